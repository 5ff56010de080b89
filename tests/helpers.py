"""Small random models, trees and drafters, shared by the tests."""
import os
import sys
from pathlib import Path

import torch
from hypothesis import strategies as st

import hydra
import model as m
import tree as t

ROOT = Path(__file__).parents[1]
CASES = int(os.environ.get("HYDRA_CASES", "1"))  # how many times the usual number of cases


def run(monkeypatch, module, *args):
    """Run a command in this process -> its exit code."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, args)])
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "reconfigure", lambda **kw: None, raising=False)
    try:
        hydra.command(module.main)
    except SystemExit as end:
        return end.code or 0
    return 0


def small_model(seed=0, n_layer=2, n_head=4, n_kv_head=2, size=4, V=11, block_size=32, tied=True):
    """A random model in the default dtype whose greedy text doesn't repeat one token for ever."""
    torch.manual_seed(seed)
    model = m.GPT(m.GPTConfig(vocab_size=V, block_size=block_size, n_layer=n_layer, n_head=n_head,
                              n_kv_head=n_kv_head, n_embd=n_head * size, n_inner=12, tied=tied))
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.7)
    return model.eval().requires_grad_(False)


def random_heads(Heads, model, seed=0, **options):
    """Heads with random weights everywhere, so that nothing is hidden behind a zero; every second
    pair of Hydra heads drafts with its tables."""
    heads, generator = Heads(model, **options), torch.Generator().manual_seed(seed)
    for p in heads.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=generator)
    if seed % 2:
        heads.ready()
    return heads.eval().requires_grad_(False)


models = st.builds(lambda seed, layers, heads, size, V, tied, block: small_model(
    seed, layers, heads[0], heads[1], size, V, block, tied),
    st.integers(0, 10**6), st.integers(1, 2), st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]),
    st.sampled_from([2, 4]), st.integers(3, 12), st.booleans(), st.integers(8, 40))


@st.composite
def trees(draw, max_depth=4, max_rank=2, max_nodes=12):
    """Any tree: grown by hanging a new path under a node that is already there."""
    paths = [()]
    for _ in range(draw(st.integers(0, max_nodes))):
        path = draw(st.sampled_from(paths)) + (draw(st.integers(0, max_rank)),)
        if len(path) <= max_depth and path not in paths:
            paths.append(path)
    order = draw(st.permutations(paths[1:]))
    return t.Tree(order)


dynamic_trees = st.builds(t.Dynamic, st.integers(1, 12), st.integers(1, 4), st.integers(1, 5))


class Oracle:
    """A drafter that knows the text to come: its guess is right with the given chance, at each
    level.

    chance 1 is the perfect drafter, 0 the one that is always wrong (the right token comes last).
    """

    def __init__(self, text, V, chance, seed=0, max_depth=9):
        self.text, self.V, self.chance, self.max_depth = text, V, chance, max_depth
        self.generator = torch.Generator().manual_seed(seed)

    def start(self, h, tokens, position):
        assert len(h) == len(tokens) > 0
        assert tokens.tolist() == self.text[position:position + len(tokens)]
        self.root = position + len(tokens)
        return h[-1:]

    def extend(self, depth, state, tokens):
        self.rows = len(tokens)
        return state.expand(len(tokens), -1)

    def logits(self, depth, state):
        logits = torch.rand(self.rows, self.V, generator=self.generator)
        at = self.root + 1 + depth
        if at < len(self.text):
            hit = torch.rand((), generator=self.generator) < self.chance
            logits[:, self.text[at]] = 1e6 if hit else -1e6  # beyond any noise
        return logits


class Itself:
    """The base model as its own drafter: it knows nothing of the noise, yet has to be right always,
    since the drafts are ranked with the noise that decides. `skew` spoils its logits a little."""
    max_depth = 9

    def __init__(self, model, skew=0.0, seed=0):
        self.model, self.keep = model, None
        generator = torch.Generator().manual_seed(seed)
        self.skew = skew * torch.randn(model.config.vocab_size, generator=generator)

    def start(self, h, tokens, position):
        self.text = tokens.tolist() if position == 0 else self.text[:position] + tokens.tolist()
        return torch.zeros(1, 0, dtype=torch.long)

    def extend(self, depth, state, tokens):  # the state is the path itself
        return torch.cat((state.expand(len(tokens), -1), tokens[:, None]), 1)

    def logits(self, depth, state):
        text = torch.tensor(self.text).expand(len(state), -1)
        logits = self.model.lm_head(self.model(torch.cat((text, state), 1))[:, -1]) + self.skew
        return logits if self.keep is None else logits[:, self.keep]


samplers = st.builds(m.Sampler, st.sampled_from([0.0, 1e-8, 0.3, 0.8, 1.0, 2.0]),
                     st.integers(0, 13), st.sampled_from([1.0, 0.95, 0.6, 0.1, 1e-9]),
                     st.integers(0, 2**40))


class Random:
    """A drafter whose guesses have nothing to do with anything, one row a parent."""
    max_depth = 9

    def __init__(self, V, seed=0):
        self.V, self.generator = V, torch.Generator().manual_seed(seed)

    def start(self, h, tokens, position):
        return h[-1:]

    def extend(self, depth, state, tokens):
        return state.expand(len(tokens), -1)

    def logits(self, depth, state):
        return torch.rand(len(state), self.V, generator=self.generator)
