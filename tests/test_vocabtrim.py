"""VocabTrim: which ids are kept; the same drafts where they can be, and the same text always."""
import doctest
from functools import partial

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
        return t.draft(heads, tree, heads.start(h, root, 0), root, choose, 7)[1].tolist()
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


@pytest.mark.parametrize("lucky", [1, 2, 99])
def test_lucky_ids_join_where_noise_decides(lucky):
    """Drafts are those of the full head over the kept ids and, at each position anew, the ids with
    the largest noise there; without noise, over the kept ids alone."""
    model, keep = small_model(2), torch.tensor([1, 4, 5, 9])
    heads = random_heads(Hydra, model, own_lm_head=True)
    h, root, tree = torch.randn(1, 16), torch.tensor([4]), t.Tree(t.full(3, 2))
    choose = m.Sampler(1.5, seed=1)
    choose.start(8, 11)
    vocabtrim.trim(heads, keep, lucky)

    def drafts(choose):
        return t.draft(heads, tree, heads.start(h, root, 0), root, choose, 7)[1].tolist()
    some, blind = drafts(choose), drafts(None)
    vocabtrim.trim(heads, keep)
    assert drafts(None) == blind and drafts(choose) != some
    vocabtrim.trim(heads, None)

    def blocked(depth, state):
        g = choose.gumbel(8 + depth, h).tolist()
        rest = sorted(set(range(11)) - set(keep.tolist()), key=lambda v: -g[v])[lucky:]
        return Hydra.logits(heads, depth, state).index_fill(-1, torch.tensor(rest).long(), -1e9)
    heads.logits = blocked
    assert drafts(choose) == some


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


def tensors_read(work):
    """Every weight that a matrix product reads while `work` runs, counted once per product."""
    read = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in func.__name__:  # mm, addmm: the weight is the last of its arguments
                read.append(args[-1].numel())
            return func(*args, **(kwargs or {}))
    with Watch():
        work()
    return sum(read)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("Heads", [Medusa, Hydra, partial(Hydra, prefix=True)])
def test_mbsu_counts_the_weights_that_are_really_read(Heads, k, own):
    """Against a count of what the matrix products of one step read (without the few biases and
    norms, which mbsu counts too)."""
    model, depth = small_model(1), 3
    heads = random_heads(Heads, model, seed=1, n_block=2, own_lm_head=own)
    heads.ready()
    vocabtrim.trim(heads, None if k is None else torch.arange(k))
    root, h = torch.tensor([4]), torch.randn(1, 16)
    seen = tensors_read(lambda: t.draft(heads, t.Tree(t.chain(depth)), heads.start(h, root, 0),
                                        root))
    count = vocabtrim.drafting_weights(heads, depth)
    small = sum(p.numel() for p in heads.parameters() if p.dim() < 2)
    assert seen <= count <= seen + small
    base = tensors_read(lambda: model.lm_head(model(torch.tensor([[3]]))))
    value = vocabtrim.mbsu(3.0, heads, depth)
    small = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    assert 3 / (1 + count / base) <= value <= 3 / (1 + count / (base + small))
    assert value <= 3 and vocabtrim.mbsu(1.0, heads, 0) == 1


def test_an_untied_embedding_counts_in_neither():
    tied, untied = small_model(1), small_model(1, tied=False)
    values = [vocabtrim.mbsu(3.0, random_heads(Hydra, model, n_block=2), 2)
              for model in (tied, untied)]
    assert values[0] == values[1]


def test_some_ids_stand_for_all():
    """The sum over the vocabulary of any exponentials is right on average, the tokens and what the
    teacher thinks likely are always there, and with as many ids as the vocabulary nothing is
    left to chance."""
    generator = torch.Generator().manual_seed(0)
    logits, tokens = torch.randn(1, 4, 40, generator=generator), torch.tensor([[3, 9, 9, 30]])
    teacher = (2 * torch.randn(1, 4, 40, generator=generator)).softmax(-1)
    whole, sums = logits.exp().sum(-1), []
    for _ in range(3000):
        ids, bias = vocabtrim.some_ids(teacher, tokens, generator)
        assert len(set(ids.tolist())) == 8 and {3, 9, 30} <= set(ids.tolist())
        sums.append((logits[..., ids] + bias).exp().sum(-1))
    sums = torch.stack(sums)
    error = sums.std(0) / len(sums) ** 0.5
    assert ((sums.mean(0) - whole).abs() < 5 * error).all()
    ids, bias = vocabtrim.some_ids(teacher, torch.zeros(1, 30, dtype=torch.long), generator)
    assert sorted(ids.tolist()) == list(range(40)) and (bias == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_written_text_is_the_naive_decoders(temperature):
    """Batched text, its hidden states and the noise that decided: with them every token is what
    the model chooses after the ones before it."""
    model, prompts = small_model(3, block_size=40), torch.tensor([PROMPT, [9, 2, 6, 5, 3]])
    tokens, h, noise = vocabtrim.write_text(model, prompts, 20, temperature, seed=1)
    assert tokens.shape == (2, 25) and torch.equal(tokens[:, :5], prompts)
    assert torch.allclose(h, model(tokens), rtol=0, atol=1e-10)
    scores = model.lm_head(h)[:, 4:-1]
    if temperature:
        scores = scores + noise[:, 5:]
        # Gumbel noise: mean 0.577, variance 1.645, to five standard errors of 440 values
        assert abs(noise[:, 5:].mean() - 0.577) < 5 * (1.645 / 440) ** 0.5
    else:
        assert noise is None
    assert torch.equal(scores.argmax(-1), tokens[:, 5:])
    for row, prompt in zip(tokens, prompts.tolist()):
        assert temperature or row[5:].tolist() == m.naive_generate(model, prompt, 20)


def test_text_written_without_keeping_the_noise_follows_the_law():
    """By inverse distribution: chi-square of the first new token of 4000 rows, false failures
    below 1e-6 (11 ids, 10 degrees of freedom)."""
    model = small_model(3, block_size=40)
    prompts = torch.tensor([PROMPT]).expand(4000, -1)
    tokens, h, noise = vocabtrim.write_text(model, prompts, 1, 0.8, seed=1, keep_noise=False)
    assert noise is None and torch.allclose(h, model(tokens), rtol=0, atol=1e-10)
    law = (model.lm_head(h[0, 4]) / 0.8).softmax(-1) * 4000
    seen = torch.bincount(tokens[:, 5], minlength=11)
    enough = law >= 5
    statistic = ((seen - law)[enough] ** 2 / law[enough]).sum()
    df = torch.tensor(float(enough.sum() - 1))
    assert torch.special.gammaincc(df / 2, statistic / 2) > 1e-6
