"""
Train everything: corpus -> tokenizer -> base model -> heads, all into one folder.

    python train.py            # about 15 minutes on two cores; --quick: a toy in 90 seconds

The corpus is the source of the Python standard library that runs this program, so nothing has to be
downloaded. Training is planned by the clock, not by steps: the learning rate falls to zero when the
time is up, and a faster machine simply gets better models. What counts as held out is a fixed tenth
of the files, which nothing here learns from: the held-out loss and the standard prompts come from
there. The trees are counted on text after another twentieth, which is only in the tokenizer."""
import hashlib
import platform
import sys
import sysconfig
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

from hydra import (KINDS, Parser, number, command, load_base, make_folder, pick_device,
                   save_heads)
from measure import best_size, fastest, step_cost
from model import GPT, GPTConfig, Sampler, UserError, ready, save_file
from tokenizer import Tokenizer, count_pretokens, standard_prompts, train_bpe
from tree import generate
from vocabtrim import count_ids, count_steps, some_ids, trim, trim_for, write_text

SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "ensurepip",
        "lib2to3", "pydoc_data", "turtledemo", "__pycache__"}  # tests, tables, bundled
TEMPERATURES = (0.0, 0.8, 1.0)
MIX = (0.0, 0.8, 1.0, 0.8, 1.0)  # of the base model's own text: greedy text repeats, less will do
EMBEDDING_RATE = 8  # times the learning rate of the matrices


# the corpus


def list_files(data):
    """data: None for the standard library, or a file or folder -> (root, paths in order)."""
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = (p for p in root.rglob("*.py") if not SKIP & set(p.relative_to(root).parts))
    else:
        root = Path(data)
        if root.is_file():
            return root.parent, [root]
        if not root.is_dir():
            raise UserError(f"--data {data}: there is no such file or folder")
        found = (p for p in root.rglob("*") if not any(
            part.startswith(".") for part in p.relative_to(root).parts))
    # no links: they can lead in circles, or out of the folder
    return root, sorted(p for p in found if p.is_file() and not p.is_symlink())


def read_corpus(data):
    """-> texts in the order of their names. UserError where there is too little to learn from."""
    try:
        root, paths = list_files(data)
    except OSError as error:
        raise UserError(f"--data {data} can't be read: {error.strerror}") from None
    texts, skipped = [], 0
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            if data is not None and len(paths) == 1:
                raise UserError(f"--data {path} isn't UTF-8 text: {error.reason}") from None
            skipped += 1
        except OSError as error:
            raise UserError(f"{path} can't be read: {error.strerror}") from None
    size = sum(map(len, texts))
    if data is None and size < 1_000_000:
        raise UserError(f"this Python keeps only {size} characters of library source in {root}: "
                        "say --data PATH, a text file or a folder of them")
    digest = hashlib.sha256("\0".join(texts).encode("utf-8")).hexdigest()[:12]
    source = f"library source of Python {platform.python_version()}" if data is None else str(data)
    print(f"corpus: {source}, {len(texts)} files, {size / 1e6:.2f} M characters, sha256 {digest}"
          + (f", {skipped} files that are no UTF-8 skipped" if skipped else ""))
    return texts


def hold_out(texts, n=10):
    """-> (texts to keep, texts held out): every n-th file, or the last n-th of fewer than 20."""
    texts = [text for text in texts if text]
    if len(texts) >= 20:
        return [t for i, t in enumerate(texts) if i % n != n - 1], texts[n - 1::n]
    whole = "".join(texts)
    cut = len(whole) * (n - 1) // n
    return [whole[:cut]], [whole[cut:]]


# training


class Progress:  # one line that is rewritten, or on no terminal a plain line now and then
    def __init__(self, name, seconds):
        self.name, self.seconds, self.begin, self.shown = name, seconds, time.monotonic(), 0.0
        self.live = sys.stdout.isatty()

    def done(self):  # how much of the time is gone
        return min(1.0, (time.monotonic() - self.begin) / self.seconds)

    def show(self, text, last=False):
        now = time.monotonic() - self.begin
        if last or now - self.shown > (0.5 if self.live else 20):
            self.shown = now
            line = f"{self.name}: {text}, {max(0, self.seconds - now):.0f} s left"
            print(f"\r{line:<90}" if self.live else line, end="\n" if last or not self.live else "",
                  flush=True)


def schedule(done, step, warm_up=20):
    """Learning rate as a share of its peak: a short rise, a flat part, a straight fall."""
    return min(1.0, (step + 1) / warm_up) * max(0.02, min(1.0, (1 - done) / 0.6))


def windows(ids, batch, length, generator):
    begin = torch.randint(len(ids) - length + 1, (batch, 1), generator=generator)
    return ids[begin + torch.arange(length)]


def fit(progress, module, draw, loss_of, peak):
    """AdamW until all is done; draw(how much is) -> tensors, the tokens first; loss_of(*tensors) ->
    (loss, text)."""
    torch.set_float32_matmul_precision("medium")  # lets it take oneDNN: up to twice as fast
    groups = {"matrices": [], "embedding": [], "others": []}
    for key, p in module.named_parameters():
        groups["others" if p.dim() < 2 else "embedding" if "wte" in key else "matrices"].append(p)
    # an embedding's row gets a gradient only where its token comes: it learns best at a higher rate
    optimizer = torch.optim.AdamW([
        {"params": groups["matrices"], "rate": peak, "weight_decay": 0.1},
        {"params": groups["embedding"], "rate": EMBEDDING_RATE * peak},
        {"params": groups["others"], "rate": peak}], betas=(0.9, 0.95), weight_decay=0, fused=True)
    step, text = 0, ""
    while (done := progress.done()) < 1:
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * schedule(done, step)
        x = draw(done)
        loss, text = loss_of(*x)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        step += 1
        speed = step * x[0].numel() / (time.monotonic() - progress.begin)
        progress.show(f"step {step}, {text}, {speed:.0f} tokens/s")
    torch.set_float32_matmul_precision("highest")
    progress.show(f"step {step}, {text}", last=True)


def next_token_loss(model, tokens):
    """Nats, the mean over tokens (B, T + 1) but the first of each row."""
    logits = model.lm_head(model(tokens[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.inference_mode()
def held_out_loss(model, ids, tokens=60_000):
    """Nats per token over some 60,000 held-out ones, in windows of half the context."""
    T = model.config.block_size // 2
    rows = ids[:len(ids) // (T + 1) * (T + 1)].view(-1, T + 1)[::max(1, len(ids) // tokens)]
    losses = [next_token_loss(model, x) * len(x) for x in rows.split(16)]
    return float(sum(losses) / len(rows))


def train_base(model, ids, args):
    generator = torch.Generator().manual_seed(args.seed)

    def draw(done):  # at first twice as many windows of half the length: near context comes first
        half = 2 if done < 0.6 else 1
        return [windows(ids, args.batch * half, args.length // half + 1, generator)]

    def loss_of(x):
        loss = next_token_loss(model, x)
        return loss, f"loss {loss.item():.3f}"
    fit(Progress("base model", args.base_seconds), model, draw, loss_of, args.lr)


# the base model's own text


def own_text(model, ids, args):
    """Text for the heads to learn from, (n, rows, block_size), and its hidden states: an eighth is
    from the corpus, the rest what the base model writes then, at each temperature in turn."""
    generator, written = torch.Generator().manual_seed(args.seed + 1), []
    progress, P = Progress("own text", args.text_seconds), args.block_size // 8
    while len(written) < (18 if progress.done() < 1 else 3):  # 18 hold hidden states of a gigabyte
        temperature = MIX[len(written) % len(MIX)]
        begin = windows(ids, args.text_rows, P, generator)
        written.append(write_text(model, begin, args.block_size - P, temperature,
                                  args.seed + len(written), keep_noise=False)[:2])
        progress.show(f"{len(begin) * len(written)} texts")
    progress.show(f"{len(begin) * len(written)} texts", last=True)
    return [torch.stack(part) for part in zip(*written)]


def train_heads(model, heads, texts, hidden, args, progress):
    """All sets of heads on the same batches, whose hidden states came with the text. Of the LM head
    each batch reads the rows of some ids only, or it would take most of the time."""
    generator = torch.Generator().manual_seed(args.seed + 2)
    place = torch.zeros(model.config.vocab_size, dtype=torch.long, device=texts.device)

    def draw(done):  # small batches: many steps on few tokens teach heads more than few on many
        rows = torch.randint(len(texts), (args.heads_batch,), generator=generator)
        return texts[rows], hidden[rows]

    def loss_of(x, h):
        with torch.no_grad():
            teacher = model.lm_head(h).softmax(-1)
            ids, bias = some_ids(teacher, x, generator)
            teacher = teacher[..., ids] * bias.exp()
            teacher /= teacher.sum(-1, keepdim=True)
            place[ids] = torch.arange(len(ids), device=ids.device)
        total, text = 0, ""
        for kind, set_of_heads in heads.items():
            trim(set_of_heads, ids)
            loss, each = set_of_heads.loss(h, x, teacher, place[x], bias)
            total, text = total + loss, text + f"{kind} {each[0]:.2f}..{each[-1]:.2f} "
        return total, text.rstrip()
    fit(progress, torch.nn.ModuleDict(heads), draw, loss_of, args.heads_lr)
    for set_of_heads in heads.values():
        trim(set_of_heads, None)


def count_trees(model, heads, ids, args):
    """{kind: {temperature: counted paths, the size and the number of kept ids that pay}}, from text
    that the base model writes after `ids`, which neither it nor the heads have seen."""
    P, new, rows = args.block_size // 4, args.block_size // 2, min(64, args.calibration)
    generator = torch.Generator().manual_seed(args.seed + 3)
    trees, cost, timed = {kind: {} for kind in heads}, {}, windows(ids, 12, P, generator).tolist()
    for temperature in TEMPERATURES:
        ranks, choose = {kind: [] for kind in heads}, Sampler(temperature)
        for part in range(args.calibration // rows):
            text = write_text(model, windows(ids, rows, P, generator), new, temperature, part)
            for kind, h in heads.items():  # from the first root on that the model has written
                ranks[kind] += h.ranks(text[1], text[0], text[2])[:, P - 1:].tolist()
        for kind, h in heads.items():
            counted, total = count_steps(ranks[kind])
            ways = [(0, 1, "1 node: on this machine plain decoding is faster")]
            for k in (h.vocab_size // 8, h.vocab_size // 4, 0):
                trim_for(h, k, temperature)
                if (key := (kind, k, temperature > 0)) not in cost:
                    cost[key] = step_cost(model, h, counted, timed[:4], choose)
                best = best_size(counted, total, cost[key])
                for n, why in (best, best_size(counted, total, cost[key], max(1, best[0] // 2))):
                    ways.append((k, n, f"{why}, drafting from {k or 'all'} ids"))
            # the same text, whatever the way: the clock decides
            k, nodes, why = fastest(model, h, counted, list(dict.fromkeys(ways)), timed, choose)
            trim(h, None)
            print(f"{kind} at temperature {temperature}: {why}", flush=True)
            trees[kind][temperature] = {
                "paths": [list(path) for path, _ in counted], "counts": [n for _, n in counted],
                "total": total, "auto": nodes - 1, "trim": k, "why": why}
    return trees


# the command

SIZES = {"vocab_size": 4096, "block_size": 256, "n_layer": 4, "n_head": 4, "n_kv_head": 2,
         "n_embd": 256, "n_inner": 704, "batch": 4, "length": 256, "base_seconds": 240,
         "text_seconds": 70, "text_rows": 256, "heads_batch": 2, "heads_seconds": 425, "seed": 0,
         "calibration": 128}
QUICK = {"vocab_size": 1024, "n_layer": 2, "n_embd": 128, "n_inner": 352, "base_seconds": 25,
         "text_seconds": 5, "text_rows": 64, "heads_seconds": 18, "calibration": 16}


def parse():
    parser = Parser(description="Train tokenizer, base model and heads into one folder.")
    parser.add_argument("--data", metavar="PATH", help="a UTF-8 text file or a folder of them; "
                        "default: the source of Python's standard library")
    parser.add_argument("--out", default="out", metavar="DIR", help="the folder to fill")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--quick", action="store_true", help="a toy in 90 seconds")
    parser.add_argument("--resume", action="store_true", help="keep the base model that DIR holds")
    least = {"seed": 0, "vocab_size": 257, "block_size": 16, "calibration": 16, "length": 16}
    for name, value in SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=number(least.get(name, 1)),
                            default=value, help=f"{value}, with --quick {QUICK.get(name, value)}")
    parser.add_argument("--lr", type=number(0, kind=float), default=2e-3, help="peak, base model")
    parser.add_argument("--heads-lr", type=number(0, kind=float), default=2e-3, help="peak, heads")
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


def new_base(args, texts, held):
    """-> a base model that has learned nothing, its tokenizer, standard prompts."""
    sizes = {name: getattr(args, name) for name in GPTConfig.__dataclass_fields__ if name in SIZES}
    try:
        config = GPTConfig(**sizes)
    except ValueError as error:
        raise UserError(str(error)) from None
    begin = time.monotonic()
    tokenizer = Tokenizer(train_bpe(count_pretokens(texts), args.vocab_size - 1))
    print(f"tokenizer: {tokenizer.vocab_size} ids in {time.monotonic() - begin:.0f} s")
    config.vocab_size = tokenizer.vocab_size  # fewer than asked for where the text allows no more
    model = GPT(config).to(args.device)
    print(f"base model: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    return model, tokenizer, standard_prompts(tokenizer, held, args.block_size // 4)


def split(args, tokenizer, texts, held):
    """-> ids to learn from, ids to count trees on, held-out ids. UserError where too short."""
    ids, counting, last = map(tokenizer.encode_all, (*hold_out(texts, 20), held))
    for part, what, share in [(counting, "the twentieth to count trees on", 22),
                              (last, "the held-out tenth", 10)]:
        if len(part) < args.block_size:
            raise UserError(f"{what} has {len(part)} tokens and needs {args.block_size}: give a "
                            f"text of some {4 * share * args.block_size} characters or more")
    return [torch.tensor(part, device=args.device) for part in (ids, counting, last)]


def main():
    args = parse()
    args.device = pick_device(args.device)
    torch.manual_seed(args.seed)
    texts, held = hold_out(read_corpus(args.data))
    kept = args.resume and (Path(args.out) / "base.pt").exists()
    model, tokenizer, prompts = (load_base(args.out, args.device) if kept
                                 else new_base(args, texts, held))
    args.block_size = model.config.block_size
    args.length = min(args.length, args.block_size)
    ids, counting, last = split(args, tokenizer, texts, held)
    make_folder(args.out)
    if not kept:
        train_base(model, ids, args)
        for kind in KINDS:  # heads of an earlier base model fit this one no more
            (Path(args.out) / f"{kind}.pt").unlink(missing_ok=True)
        save_file(Path(args.out) / "base.pt", {
            "config": asdict(model.config), "model": model.state_dict(), "prompts": prompts,
            "merges": torch.tensor(tokenizer.merges),
            "counts": count_ids(ids, tokenizer.vocab_size)})
    ready(model)
    loss, size = held_out_loss(model, last), sum(map(len, held))
    print(f"held-out loss: {loss:.3f} nats a token, {loss * len(last) / size:.3f} a character")
    prompts = prompts or [counting[:args.block_size // 4].tolist()]
    text = generate(model, prompts[0], limit=64, stop=tokenizer.stop)["ids"]
    print(f"sample, after a held-out prompt:\n{tokenizer.decode(prompts[0])}\u2502"
          f"{tokenizer.decode(text)}", flush=True)
    heads = {kind: Heads(model).to(args.device) for kind, Heads in KINDS.items()}
    written, hidden = own_text(model, ids, args)
    train_heads(model, heads, written.flatten(0, 1), hidden.flatten(0, 1), args,
                Progress("heads", args.heads_seconds))
    for h in heads.values():
        h.ready().counts = dict.fromkeys(TEMPERATURES, 0)  # for VocabTrim
        for i, temperature in enumerate(MIX):
            h.counts[temperature] += count_ids(written[i::len(MIX)], tokenizer.vocab_size)
    trees = count_trees(model, heads, counting, args)
    for kind, h in heads.items():
        save_heads(args.out, kind, h, trees[kind], tokenizer)


if __name__ == "__main__":
    command(main)
