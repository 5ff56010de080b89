"""
The textbook rule of speculative sampling, for a chain, beside the shared noise of this project.

A draft x, drawn from the drafter's q, is accepted with chance min(1, p(x) / q(x)); at the first
one that is not, the token is drawn from the residual max(0, p - q), normalised; after the last one
the bonus comes from p (Leviathan et al. 2023; Chen et al. 2023). The tokens follow p exactly, as
with the shared noise, but here the text depends on the drafter, and only in law is it the base
model's own.

    python tests/textbook.py     # both rules on the trained heads, the same chain, temperature 1
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import hydra  # noqa: E402
from model import KVCache, Sampler  # noqa: E402
from tree import Tree, chain, generate  # noqa: E402


def accept_chain(p, q, drafts, generator):
    """p (D + 1, V), q (D, V), drafts: D ids drawn from q -> the new tokens, 1 to D + 1 of them."""
    new = []
    for p_i, q_i, x in zip(p, q, drafts):
        if torch.rand((), generator=generator, dtype=p.dtype) * q_i[x] >= p_i[x]:
            residual = (p_i - q_i).clamp(min=0)
            return new + [int(torch.multinomial(residual, 1, generator=generator))]
        new.append(x)
    return new + [int(torch.multinomial(p[-1], 1, generator=generator))]


@torch.inference_mode()
def generate_textbook(model, prompt, drafter, depth, limit, temperature=1.0, seed=0):
    """-> (new ids, how many tokens each step gave)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(logits):
        p = (logits / temperature).softmax(-1)
        return p, int(torch.multinomial(p, 1, generator=generator))
    fed, cache = torch.tensor(prompt), KVCache(model, model.config.block_size + depth)
    h = model(fed[None], cache)[0]
    cache.keep(range(len(prompt)))
    ids, accepted, position = [draw(model.lm_head(h[-1]))[1]], [], 0
    while len(ids) < limit and cache.length + depth + 1 <= model.config.block_size:
        state, tokens, q = drafter.start(h, fed, position), ids[-1:], []
        for i in range(depth):
            state = drafter.extend(i, state, torch.tensor(tokens[-1:]))
            q_i, token = draw(drafter.logits(i, state)[0])
            q.append(q_i)
            tokens.append(token)
        position, fed = cache.length, torch.tensor(tokens)
        h = model(fed[None], cache)[0]
        p = (model.lm_head(h) / temperature).softmax(-1)
        new = accept_chain(p, q, tokens[1:], generator)
        cache.keep(range(len(new)))
        h, fed = h[:len(new)], fed[:len(new)]
        ids += new
        accepted.append(len(new))
    return ids, accepted


def main():
    parser = hydra.Parser(description="Tokens per step of both rules, a chain, temperature 1.")
    parser.add_argument("--out", default="out")
    args = parser.parse_args()
    model, tokenizer, prompts = hydra.load_base(args.out)
    for kind in hydra.KINDS:
        heads = hydra.load_heads(args.out, kind, model, tokenizer)
        tree, text, shared = Tree(chain(heads.max_depth)), [], []
        for seed, prompt in enumerate(prompts[:40]):
            text += generate_textbook(model, prompt, heads, heads.max_depth, 128, seed=seed)[1]
            shared += generate(model, prompt, heads, tree, 128,
                               choose=Sampler(1.0, seed=seed))["accepted"]
        print(f"{kind}: a chain of {heads.max_depth} at temperature 1, tokens per step: "
              f"textbook rule {sum(text) / len(text):.2f}, "
              f"shared noise {sum(shared) / len(shared):.2f}")


if __name__ == "__main__":
    hydra.command(main)
