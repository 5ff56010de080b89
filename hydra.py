"""
Hydra heads: each guesses its token knowing the guesses before it. And the command line.

Head i reads the hidden state h at position t and the embeddings of the i + 1 tokens put on the path
so far, and guesses token t + 2 + i (Hydra, Ankner et al. 2024, section 3). That is one method's
difference from Medusa: `extend`. Everything else, tree, verification, loop, is the same.

    python hydra.py --prompt "def read_"
"""
import argparse
import codecs
import hashlib
import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from medusa import Lookup, Medusa, typical_walk, zero
from model import (GPT, Block, GPTConfig, KVCache, Sampler, UserError, additive, load_file,
                   ready, save_file)
from tokenizer import Tokenizer
from tree import Dynamic, Tree, chain, check_tree, generate, parse_paths, picture, walk
from vocabtrim import trim_for


class Hydra(Medusa):
    """Sequentially dependent heads.

    The first block of head i is R x + SiLU(W x + b) over x = [h ; e_0 ; ... ; e_i], with a learned
    R since x is wider than the block. Products of a sum's parts can be added up: the part of h is
    one product for all heads, and the part of each token is added as it joins the path.
    prefix: one more decoder layer between the base model and the heads, see `look_back`."""

    def __init__(self, model, prefix=False, **options):
        super().__init__(model, **options)
        self.options["prefix"] = prefix
        if prefix:
            self.prefix = Block(model.config)
            zero(self.prefix.proj), zero(self.prefix.down)  # starts as the identity, like all else

    def make_inlet(self, C):
        """R and W of all first blocks: `inlet` holds the columns of h, `path[i]` those of e_i for
        the heads i and up. R starts as [I | 0 | ...], so that here too all heads start as the LM
        head."""
        K = self.max_depth
        inlet = nn.Linear(C, 2 * K * C)
        self.path = nn.ModuleList(nn.Linear(C, 2 * (K - i) * C, bias=False) for i in range(K))
        for linear in (inlet, *self.path):
            zero(linear)
        with torch.no_grad():
            inlet.weight.view(K, 2, C, C)[:, 0] = torch.eye(C)
        self.tables = None
        return inlet

    def enter(self, h):
        return self.inlet(h).unflatten(-1, (self.max_depth, 2, -1))

    def extend(self, depth, state, tokens):
        """The whole of sequential dependence: the heads from `depth` on see these tokens too."""
        if self.tables is None:
            added = self.path[depth](self.base.wte(tokens))
        else:
            added = F.embedding(tokens, self.tables[depth])
        added = added.unflatten(-1, (-1, 2, state.shape[-1]))
        return state[..., depth - self.max_depth:, :, :] + added

    def look_back(self, h, position=None):
        """The prefix-attention layer of Hydra++: a decoder layer whose output over the base
        model's hidden states takes the place of h, so that the heads see more of the text.

        h (B, T, C): whole texts; or (1, a, C): the rows from `position` on, those before being in
        the layer's own KV cache. Rows of accepted tokens only: no rejected one ever comes here."""
        if self.prefix is None:
            return h
        begin, a = position or 0, h.shape[1]
        rotary = torch.view_as_complex(self.base.rotary[begin:begin + a, None])
        if position is None:
            return self.prefix(h, rotary)
        if position == 0:  # a new text
            self.cache = KVCache(self.base, self.base.config.block_size, n_layer=1)
        assert self.cache.length == position, (self.cache.length, position)
        h = self.prefix(h, rotary, additive(None, a, position, h), self.cache)
        self.cache.keep(range(a))
        return h

    def ready(self):
        """The embeddings are frozen, so each token's product can be looked up: an exact identity
        that trades 4 K (K + 1) V C bytes of memory for the reading of `path`."""
        super().ready()
        with torch.no_grad():
            self.tables = [path(self.base.wte.weight) for path in self.path]
        return self


KINDS = {"medusa": Medusa, "hydra": Hydra, "hydra++": partial(
    Hydra, prefix=True, n_block=4, objective="teacher")}  # the better ones last


def fingerprint(model):
    """A hash of the base model's weights: heads fit the model they were trained for and no
    other."""
    digest = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def save_heads(out, kind, heads, trees, tokenizer):
    """trees: {temperature: {"paths": counted paths, the best first, with their "counts" of "total",
    "auto": how many of them pay on this machine, "trim": how many kept ids, "why": a sentence}}.
    heads.counts: {temperature: how often the base model writes each id, (V,)}."""
    save_file(Path(out) / f"{kind}.pt", {
        "options": heads.options, "heads": heads.state_dict(), "trees": trees,
        "counts": heads.counts, "tokenizer": tokenizer.hash, "base": fingerprint(heads.base)})


def load_base(out, device="cpu"):
    """The base model ready to decode, its tokenizer and the standard prompts from folder `out`."""
    path = Path(out) / "base.pt"
    content = load_file(path, device)
    try:
        model = GPT(GPTConfig(**content["config"]))
        model.load_state_dict(content["model"])
        tokenizer, prompts = Tokenizer(content["merges"].tolist()), content["prompts"]
    except (LookupError, ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise misfit(path, error) from None
    if tokenizer.vocab_size != model.config.vocab_size:
        raise UserError(f"{path} holds a model of {model.config.vocab_size} ids and a tokenizer of "
                        f"{tokenizer.vocab_size}: train again")
    return ready(model.to(device)), tokenizer, prompts


def misfit(path, error):
    reason = " ".join(str(error).split())
    return UserError(f"{path} doesn't fit this program ({reason}): train again")


def load_heads(out, kind, model, tokenizer, device="cpu"):
    """The heads that train.py saved in `out` for this very base model, ready for drafting."""
    path = Path(out) / f"{kind}.pt"
    content = load_file(path, device)
    try:
        heads = KINDS[kind](model, **content["options"])
        heads.load_state_dict(content["heads"])
        heads.trees, heads.counts = content["trees"], dict(content["counts"])
        bound_to = content["tokenizer"], content["base"]
    except (KeyError, TypeError, RuntimeError) as error:
        raise misfit(path, error) from None
    if bound_to != (tokenizer.hash, fingerprint(model)):
        raise UserError(f"{path} was trained for another base model: train again")
    return heads.to(device).ready()


# from here on: the manners that all commands share
class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (--help lists the options)")


def number(low, high=2**60, kind=int, word=None):
    """An argparse type: a number from `low` to `high`, or this word."""
    def value(text):
        if text == word:
            return text
        if not low <= kind(text) <= high:  # false for NaN too
            raise argparse.ArgumentTypeError(f"{text} isn't a number from {low} to {high:.4g}")
        return kind(text)
    return value


def command(main):
    """Run a command: a UserError ends it with one sentence and exit code 2, Ctrl-C quietly."""
    try:
        for stream in (sys.stdout, sys.stderr):  # a locale without some character prints ? for it
            stream.reconfigure(errors="replace")
        main()
        sys.stdout.flush()
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` has read enough; nothing may be left for the exit to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def pick_device(name):
    """'auto' is a GPU where there is one; a device that is asked for and missing is a UserError."""
    found = {"cpu": True, "cuda": torch.cuda.is_available(),
             "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return "cuda" if found["cuda"] else "cpu"  # mps only when asked for: slow at these sizes
    if not found[name]:
        raise UserError(f"--device {name}: this machine or this build of torch has none; use cpu")
    return name


def make_folder(out):
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        save_file(Path(out) / "try.pt", {})
        (Path(out) / "try.pt").unlink()
    except (OSError, RuntimeError) as error:
        raise UserError(f"--out {out} can't be written: {error}") from None


# from here on: this command
def make_tree(text, drafter, temperature, device):
    """The tree that --tree asks for; without a drafter it is empty. UserError if it can't be."""
    if drafter is None:
        return Tree()
    try:
        if text == "dynamic":  # as many nodes as auto takes, but never the root alone
            return Dynamic(max(2, 1 + counted_at(drafter, temperature)["auto"]), drafter.max_depth)
        if text == "chain":
            paths = chain(drafter.max_depth)
        elif text == "auto" or text.isdecimal() and int(text) > 0:  # N nodes with the root
            counted = counted_at(drafter, temperature)
            paths = counted["paths"][:counted["auto"] if text == "auto" else int(text) - 1]
        else:
            paths = parse_paths(text)
        tree = Tree(paths, device)
        check_tree(tree, drafter.max_depth, drafter.vocab_size)
        return tree
    except (ValueError, RecursionError) as error:
        raise UserError(f"--tree {text[:80]}: {error}; say auto, chain, dynamic, a number of "
                        "nodes from 1 up, or paths such as [[0],[1],[0,0]]") from None


def counted_at(drafter, temperature):
    """The paths that were counted nearest to this temperature. Lookup has none: a chain."""
    if isinstance(drafter, Lookup):
        return {"paths": chain(drafter.max_depth), "auto": drafter.max_depth, "why": "a chain"}
    return drafter.trees[min(drafter.trees, key=lambda counted: abs(counted - temperature))]


def parse():
    parser = Parser(description="Continue a prompt: the base model's own text, in fewer steps.")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--heads", choices=["none", "lookup", *KINDS],
                        help="who drafts; default: the best that the folder --out holds")
    parser.add_argument("--tree", default="auto", metavar="auto|chain|dynamic|N|PATHS",
                        help="N = nodes with the root, PATHS = JSON such as [[0],[1],[0,0]]")
    parser.add_argument("--trim", type=number(0, word="auto"), default="auto", metavar="auto|K",
                        help="draft from the K most frequent ids; 0 = from all")
    parser.add_argument("--max-new-tokens", type=number(0), default=128, metavar="N")
    parser.add_argument("--temperature", type=number(0, 1e6, float), default=0.0, metavar="T",
                        help="0 = always the likeliest token")
    parser.add_argument("--top-k", type=number(0), default=0, metavar="K", help="0 = off")
    parser.add_argument("--top-p", type=number(1e-9, 1, float), default=1.0, metavar="P",
                        help="above 0; 1 = off")
    parser.add_argument("--seed", type=number(0), default=0)
    parser.add_argument("--typical", action="store_true", help="accept what is plausible: lossy, "
                        "the text is no longer the base model's own")
    parser.add_argument("--trace", action="store_true", help="show each step's tree and the path "
                        "accepted; on a terminal colour what was accepted, rejected, bonus")
    parser.add_argument("--out", default="out", help="the folder that train.py filled")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")
    return parser.parse_args()


def printer(tokenizer, colour=False):
    """A function that prints tokens as they come; a character cut in two waits for its rest. In
    colour, accepted drafts are green."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(ids, final=False):
        drafts = decoder.decode(tokenizer.decode_bytes(ids[:-1]))
        drafts = f"\33[32m{drafts}\33[0m" if colour else drafts
        bonus = decoder.decode(tokenizer.decode_bytes(ids[-1:]), final)
        print(drafts + bonus, end="", flush=True)
    return show


def traced(accept, tokenizer, colour):
    """`accept`, printing each step's tree on stderr: > and green = accepted, red = rejected."""
    def show(tree, tokens, choice, *rest):
        path = accept(tree, tokens, choice, *rest)
        print(file=sys.stderr)
        for line in picture(tree, [repr(tokenizer.decode([t])) for t in tokens], path).split("\n"):
            line = f"\33[3{2 if line[0] == '>' else 1}m{line}\33[0m" if colour else line
            print(line, file=sys.stderr)
        return path
    return show


def main():
    args = parse()
    device = pick_device(args.device)
    model, tokenizer, _ = load_base(args.out, device)
    prompt = tokenizer.encode(args.prompt)
    if not 1 <= len(prompt) <= model.config.block_size:
        raise UserError(f"the prompt has {len(prompt)} tokens; 1 to {model.config.block_size} fit")
    kind, drafter, trimmed = args.heads, None, 0
    if kind is None:
        kind = next((k for k in reversed(KINDS) if (Path(args.out) / f"{k}.pt").exists()), "none")
    if kind in KINDS:
        drafter = load_heads(args.out, kind, model, tokenizer, device)
        trimmed = trim_for(drafter, args.trim, args.temperature)
    elif kind == "lookup":
        drafter = Lookup(model.config.vocab_size)
    tree = make_tree(args.tree, drafter, args.temperature, device)
    colour, accept = args.trace and sys.stdout.isatty(), typical_walk if args.typical else walk
    show = None if args.json else printer(tokenizer, colour)
    accept = traced(accept, tokenizer, colour) if args.trace else accept
    if args.typical:
        print("--typical is lossy: this text is no longer the base model's own", file=sys.stderr)
    choose = Sampler(args.temperature, args.top_k, args.top_p, args.seed)
    result = generate(model, prompt, drafter, tree, args.max_new_tokens, tokenizer.stop, show,
                      choose=choose, accept=accept)
    result = {"prompt_ids": prompt, "ids": result["ids"], "text": tokenizer.decode(result["ids"]),
              **result, "heads": kind, "tree_nodes": tree.size, "trim": trimmed}
    if args.json:
        print(json.dumps(result))
        return
    show([], final=True)
    print()
    why = counted_at(drafter, args.temperature)["why"] if drafter and args.tree == "auto" else ""
    print(figures(result, why), file=sys.stderr)


def figures(result, why):
    """One line: what the text took, and why this tree where it was chosen by itself."""
    count, rate = len(result["ids"]), result["tokens_per_step"]
    speed = f"{(count - 1) / result['seconds']:.0f} tokens/s" if rate else "no step"
    tree = f"tree of {result['tree_nodes']}" + f" (auto: {why})" * bool(why)
    ids = f", drafts of {result['trim']} ids" * bool(result["trim"])
    return (f"[{result['heads']}, {tree}{ids}] {count} tokens in {result['steps']} steps, "
            f"{rate or 0:.2f} tokens per step, {speed}; prompt {result['prompt_seconds']:.3f} s, "
            f"then {result['seconds']:.3f} s; finish: {result['finish']}")


if __name__ == "__main__":
    command(main)
