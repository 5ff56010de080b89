"""
Float32, end to end, on a trained model: equal, or differing first at a near-tie.

Two scores closer than measure.NEAR_TIE may change places, since a row computed among others differs
in its last bits from the row alone. The difference of rows is measured here too, and has to lie
far below.
"""
import pytest
import torch

import hydra
import measure
import model as m
import tree as t
from medusa import Lookup


@pytest.fixture
def trained(out):
    torch.set_default_dtype(torch.float32)  # put back by the fixture of all tests
    model, tokenizer, prompts = hydra.load_base(out)
    drafters = {kind: hydra.load_heads(out, kind, model, tokenizer) for kind in hydra.KINDS}
    return model, prompts, {**drafters, "lookup": Lookup(model.config.vocab_size)}


SAMPLERS = [(0.0, 0, 1.0), (0.8, 0, 1.0), (1.0, 0, 1.0), (1.0, 20, 0.9)]


@pytest.mark.parametrize("temperature, top_k, top_p", SAMPLERS)
def test_equal_or_a_near_tie(trained, temperature, top_k, top_p):
    model, prompts, drafters = trained
    for seed, prompt in enumerate(prompts[:4]):
        choose = m.Sampler(temperature, top_k, top_p, seed)
        naive = m.naive_generate(model, prompt, 60, choose=choose)
        for name, drafter in drafters.items():
            for size in ("chain", "16"):
                tree = hydra.make_tree(size, drafter, temperature, "cpu")
                ids = t.generate(model, prompt, drafter, tree, 60, choose=choose)["ids"]
                gap = measure.tie_gap(model, prompt, naive, ids, choose)
                assert gap is None or gap < measure.NEAR_TIE, f"{name}: scores differ by {gap}"


def test_rows_differ_far_less_than_the_bound(trained):
    model, prompts, _ = trained
    tree, worst = t.Tree(t.full(3, 2)), 0.0
    for prompt in prompts[:8]:
        cache = m.KVCache(model, 120)
        model(torch.tensor([prompt]), cache)
        cache.keep(range(len(prompt)))
        tokens = torch.randint(model.config.vocab_size, (tree.size,))
        rows = model.lm_head(model(tokens[None], cache, cache.length + tree.depths, tree.mask)[0])
        for node in range(tree.size):
            path = [node]
            while path[0]:
                path.insert(0, tree.parent[path[0]])
            alone = model.lm_head(model(torch.tensor([prompt + tokens[path].tolist()]))[0, -1])
            worst = max(worst, float((rows[node] - alone).abs().max()))
    assert 0 < worst < measure.NEAR_TIE / 20, f"rows differ by {worst}"


def test_control_a_planted_fault_is_no_near_tie(trained, monkeypatch):
    """Positions by row instead of by depth: the texts differ, and no gap is small enough to pass."""
    model, prompts, drafters = trained
    gaps = []
    for prompt in prompts[:4]:
        tree = hydra.make_tree("16", drafters["hydra"], 0.0, "cpu")
        monkeypatch.setattr(tree, "depths", torch.arange(tree.size))
        naive = m.naive_generate(model, prompt, 60)
        ids = t.generate(model, prompt, drafters["hydra"], tree, 60)["ids"]
        gaps.append(measure.tie_gap(model, prompt, naive, ids, m.Sampler()))
    assert any(gap is not None and gap >= measure.NEAR_TIE for gap in gaps), gaps
