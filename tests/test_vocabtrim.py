"""VocabTrim: which ids are kept; the same drafts where they can be, and the same text always."""
import doctest

import pytest
import torch
from helpers import Oracle, random_heads, small_model

import model as m
import tree as t
import vocabtrim
from hydra import Hydra
from medusa import Medusa

PROMPT = [3, 1, 4, 1, 5]


def test_examples_in_docstrings():
    assert doctest.testmod(vocabtrim).failed == 0 < doctest.testmod(vocabtrim).attempted


def test_bad_sets_are_refused():
    counts = torch.ones(5, dtype=torch.long)
    for k, must in [(0, []), (6, []), (1, [0, 1]), (2, [5]), (2, [-1])]:
        with pytest.raises(ValueError, match=f"k={k} ids of 5"):
            vocabtrim.most_frequent(counts, k, must)
    heads = random_heads(Hydra, small_model(1))
    for ids in ([], [1, 1], [11], [-1]):
        with pytest.raises(ValueError, match="distinct and in 0..10"):
            vocabtrim.trim(heads, torch.tensor(ids, dtype=torch.long))


def test_counting():
    assert vocabtrim.count_ids(torch.tensor([[1, 1], [4, 0]]), 6).tolist() == [1, 2, 0, 0, 1, 0]


@pytest.mark.parametrize("Heads", [Medusa, Hydra])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_keeping_all_drafts_the_same_and_keeping_some_the_right_ones(Heads, own, temperature):
    """Trimmed drafts are those of the full head with every other id's score at minus infinity."""
    model = small_model(2)
    heads = random_heads(Heads, model, own_lm_head=own)
    h, root, tree = torch.randn(1, 16), torch.tensor([4]), t.Tree(t.full(3, 2))
    choose = m.Sampler(temperature, seed=1)
    choose.start(8, 11)

    def drafts():
        return t.draft(heads, tree, heads.start(h, root, 0), root, choose, 7).tolist()
    full, logits = drafts(), Heads.logits
    vocabtrim.trim(heads, torch.arange(11))
    assert drafts() == full
    keep = torch.tensor([1, 4, 5, 9])
    vocabtrim.trim(heads, keep)
    some = drafts()
    vocabtrim.trim(heads, None)
    blocked = torch.full((11,), -torch.inf).index_fill(0, keep, 0.0)
    heads.logits = lambda depth, state: logits(heads, depth, state) + blocked
    assert drafts() == some != full


def test_what_is_trimmed_away_arrives_as_a_correction():
    """Without any token of the true text: the same text, one token a step."""
    model = small_model(5, block_size=60, V=30)
    text = m.naive_generate(model, PROMPT, 30)
    drafter = Oracle(PROMPT + text, 30, 1.0)
    drafter.keep = torch.tensor([i for i in range(30) if i not in text])
    full = drafter.logits
    drafter.logits = lambda depth, state: full(depth, state)[:, drafter.keep]
    result = t.generate(model, PROMPT, drafter, t.Tree(t.full(2, 2)), 30)
    assert result["ids"] == text and set(result["accepted"]) == {1}


def test_a_rank_beyond_the_kept_ids_cuts_the_tree():
    model = small_model(5)
    heads = random_heads(Medusa, model)
    vocabtrim.trim(heads, torch.tensor([2, 7]))
    tree = t.Tree([(0,), (1,), (2,), (2, 0), (1, 1)])
    assert t.generate(model, PROMPT, heads, tree, 20)["ids"] == m.naive_generate(model, PROMPT, 20)
