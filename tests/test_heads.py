"""Heads: what they learn from, what they may see, and that the base model stays as it was."""
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import CASES, random_heads, small_model, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra import Hydra
from medusa import Medusa
from tree import Tree, generate


class HydraPlus(Hydra):
    """Hydra++'s recipe, whatever the number of blocks."""

    def __init__(self, model, objective="teacher", **options):
        super().__init__(model, prefix=True, objective=objective, **options)


KINDS = [Medusa, Hydra, HydraPlus]


def look_back_by_hand(heads, h):
    """The prefix layer over a whole text h (T, C), one row at a time: causal by construction."""
    if not isinstance(heads, HydraPlus):
        return h
    rotary = torch.view_as_complex(heads.base.rotary)[:, None]
    return torch.stack([heads.prefix(h[None, :t + 1], rotary[:t + 1])[0, t] for t in range(len(h))])


def head_by_hand(heads, i, h, path):
    """Logits of head i from one h (C,) and its path of tokens, as the papers write it down."""
    C, K = len(h), heads.max_depth
    if isinstance(heads, Hydra):
        x = torch.cat([h, *(heads.base.wte.weight[token] for token in path[:i + 1])])
        blocks = [heads.inlet.weight.view(K, 2, C, C)[i]]
        blocks += [heads.path[j].weight.view(K - j, 2, C, C)[i - j] for j in range(i + 1)]
        R, W = torch.cat(blocks, -1)
        bias_R, b = heads.inlet.bias.view(K, 2, C)[i]
        x = R @ x + bias_R + F.silu(W @ x + b)
    else:
        W, b = heads.inlet.weight.view(K, C, C)[i], heads.inlet.bias.view(K, C)[i]
        x = h + F.silu(W @ h + b)
    for block in heads.blocks[i]:
        x = x + F.silu(block.linear.weight @ x + block.linear.bias)
    return (heads.lm_heads[i] if heads.lm_heads else heads.base.lm_head).weight @ x


@pytest.mark.parametrize("Heads", KINDS)
@pytest.mark.parametrize("options", [{}, {"n_block": 3}, {"own_lm_head": True}])
def test_loss_equals_an_independent_count_of_labels(Heads, options):
    """Every head at every position, one at a time, with the label looked up by its index, or the
    base model's distribution where the objective is the teacher."""
    model = small_model(1)
    heads = random_heads(Heads, model, **options)
    hard = heads.options["objective"] == "hard"
    tokens = torch.randint(11, (2, 9))
    h = model(tokens)
    seen = torch.stack([look_back_by_hand(heads, row) for row in h])
    want = []
    for i in range(4):
        terms = []
        for b in range(2):
            for pos in range(9):
                label = pos + 2 + i
                if label < 9:
                    path = tokens[b, pos + 1:pos + 2 + i].tolist()
                    logits = head_by_hand(heads, i, seen[b, pos], path)
                    target = model.lm_head(model(tokens[b:b + 1, :label])[0, -1]).softmax(0)
                    if hard:
                        target = F.one_hot(tokens[b, label], 11)
                    terms.append(-((logits - logits.logsumexp(0)) * target).sum())
        want.append(torch.stack(terms).mean())
    loss, each = heads.loss(h, tokens, model.lm_head(h).softmax(-1))
    assert torch.allclose(torch.stack(each), torch.stack(want), rtol=0, atol=1e-10)
    weights = [0.8 ** (i + 1) if hard else 1.0 for i in range(4)]
    assert abs(loss - sum(w * each for w, each in zip(weights, want))) < 1e-10


@pytest.mark.parametrize("Heads", KINDS)
def test_drafting_computes_what_training_trains(Heads):
    """The three methods, called along a path as `draft` does, give the logits of head_by_hand."""
    model = small_model(2)
    heads = random_heads(Heads, model, n_block=2)
    h, path = torch.randn(3, 16), [7, 2, 9, 4]
    for tables in (False, True):
        if tables:
            heads.ready()
        state = heads.start(h, torch.tensor([1, 1, 1]), 0)
        for i, token in enumerate(path):
            state = heads.extend(i, state, torch.tensor([token]))
            want = head_by_hand(heads, i, look_back_by_hand(heads, h)[-1], path)
            assert torch.allclose(heads.logits(i, state)[0], want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("Heads", KINDS)
def test_untrained_heads_are_the_lm_head(Heads):
    model = small_model(3)
    heads, h = Heads(model, n_block=3).requires_grad_(False), torch.randn(1, 16)
    state = heads.start(h, torch.tensor([1]), 0)
    for i in range(4):
        state = heads.extend(i, state, torch.tensor([5]))
        assert torch.allclose(heads.logits(i, state), model.lm_head(h), rtol=0, atol=1e-12)


def test_only_hydra_looks_at_the_path():
    """Another parent, other logits for Hydra's child; Medusa's are the same, one row for all."""
    model = small_model(4)
    for Heads, rows in ((Medusa, 1), (Hydra, 2)):
        heads = random_heads(Heads, model)
        state = heads.extend(0, heads.start(torch.randn(1, 16), torch.tensor([1]), 0),
                             torch.tensor([2]))
        logits = heads.logits(1, heads.extend(1, state, torch.tensor([3, 4])))
        assert len(logits) == rows
        assert rows == 1 or (logits[0] - logits[1]).abs().max() > 0.01


def train(heads, model, tokens, steps, lr=0.02):
    optimizer = torch.optim.Adam(heads.parameters(), lr=lr)
    for _ in range(steps):
        with torch.no_grad():
            h = model(tokens)
            teacher = model.lm_head(h).softmax(-1)
        loss, each = heads.loss(h, tokens, teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return each


@pytest.mark.parametrize("Heads", KINDS)
def test_heads_learn_to_count(Heads):
    """x[t] = t mod V: head i has to say t + 2 + i; a shift that is off by one could not."""
    model = small_model(5, block_size=40)
    tokens = (torch.arange(36) % 11)[None]
    heads = Heads(model, objective="hard")
    each = train(heads, model, tokens, 300)
    assert max(each) < 0.05
    heads.requires_grad_(False)
    h = model(tokens)
    state = heads.start(h[0, :20], tokens[0, :20], 0)
    for i in range(4):
        state = heads.extend(i, state, tokens[0, 20 + i:21 + i])
        assert heads.logits(i, state).argmax().item() == (21 + i) % 11


@pytest.mark.parametrize("Heads", KINDS)
def test_control_a_shifted_label_is_noticed(Heads):
    model = small_model(5, block_size=40)

    class Shifted(Heads):
        def loss(self, h, tokens, teacher):  # the hidden state of the token before
            return super().loss(h[:, :-1], tokens[:, 1:], teacher[:, 1:])
    tokens = torch.randint(11, (1, 36))
    h, heads = model(tokens), random_heads(Shifted, model)
    teacher = model.lm_head(h).softmax(-1)
    want = Heads.loss(heads, h, tokens, teacher)[0]
    assert abs(heads.loss(h, tokens, teacher)[0] - want) > 1e-3


def test_control_a_shifted_teacher_is_noticed():
    """The distribution of the position before would be another loss."""
    model = small_model(5)
    tokens = torch.randint(11, (1, 12))
    h, heads = model(tokens), random_heads(HydraPlus, model)
    teacher = model.lm_head(h).softmax(-1)
    one, other = heads.loss(h, tokens, teacher)[0], heads.loss(h, tokens, teacher.roll(1, 1))[0]
    assert abs(one - other) > 1e-3


def drafts_see_the_whole_accepted_text(Heads, seed, tree, prompt):
    """Decode; at every step the row that drafting starts from must be the last one of the prefix
    layer over the whole accepted text, computed anew, with hidden states of a plain forward."""
    model, starts = small_model(seed, block_size=40), []
    heads = random_heads(Heads, model, seed)

    class Watch(type(heads)):
        def start(self, h, tokens, position):
            state = super().start(h, tokens, position)
            starts.append((position, tokens.tolist(), state))
            return state
    heads.__class__ = Watch
    text = prompt + generate(model, prompt, heads, tree.cut(4), 34)["ids"]
    for position, tokens, state in starts:
        end = position + len(tokens)
        assert tokens == text[position:end]
        seen = look_back_by_hand(heads, model(torch.tensor([text[:end]]))[0])
        assert torch.allclose(state, heads.enter(seen[-1:]), rtol=0, atol=1e-10)
    return starts


@settings(max_examples=60 * CASES)
@given(st.integers(0, 10**6), trees(),
       st.lists(st.integers(0, 10), min_size=1, max_size=40))
def test_the_prefix_layer_sees_the_accepted_text_and_nothing_else(seed, tree, prompt):
    drafts_see_the_whole_accepted_text(HydraPlus, seed, tree, prompt)


def test_control_a_wrong_row_in_the_prefix_layer_is_noticed():
    """A row that does not belong to the text, in the place of one that does."""
    tree = Tree([(0,), (1,), (0, 0), (1, 0)])
    starts = drafts_see_the_whole_accepted_text(HydraPlus, 2, tree, [3, 1, 4])
    assert max(len(tokens) for _, tokens, _ in starts[1:]) > 1  # some drafts were accepted

    class Faulty(HydraPlus):
        def look_back(self, h, position=None):
            if position:
                self.cache.data[..., position - 1, :] = self.cache.data[..., 0, :]
            return super().look_back(h, position)
    with pytest.raises(AssertionError):
        drafts_see_the_whole_accepted_text(Faulty, 2, tree, [3, 1, 4])


@settings(max_examples=40 * CASES)
@given(st.integers(0, 10**6), st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=6),
                                       min_size=1, max_size=3))
def test_the_prefix_layers_cache_takes_any_chunks(seed, texts):
    """Several texts one after the other, each in chunks of any size: equal to the whole at once;
    rows of the cache beyond its length may hold NaN."""
    model = small_model(seed, block_size=40)
    heads, generator = random_heads(HydraPlus, model, seed), torch.Generator().manual_seed(seed)
    for chunks in texts:
        h = torch.randn(1, sum(chunks), 16, generator=generator)
        whole, at = heads.look_back(h), 0
        for a in chunks:
            part = heads.look_back(h[:, at:at + a], at)
            at += a
            heads.cache.data[..., at:, :] = float("nan")
            assert torch.allclose(part, whole[:, at - a:at], rtol=0, atol=1e-10)
    assert torch.allclose(whole[0], look_back_by_hand(heads, h[0]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("Heads", KINDS)
def test_training_touches_the_heads_and_nothing_else(Heads):
    """A gradient for every head's every weight after a few steps; the base model bit-identical."""
    model = small_model(6).requires_grad_(True)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    heads = Heads(model, n_block=2, own_lm_head=True)
    train(heads, model, torch.randint(11, (2, 20)), 5)
    for name, p in heads.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert not any(name.startswith("base") for name in heads.state_dict())


@pytest.mark.parametrize("Heads", KINDS)
def test_ranks_are_those_of_the_true_tokens(Heads):
    """One position and one head at a time, with and without the noise that decided."""
    model = small_model(7)
    heads, tokens = random_heads(Heads, model), torch.randint(11, (2, 9))
    h, noise = model(tokens), torch.randn(2, 9, 11)
    for extra in (None, noise):
        ranks = heads.ranks(h, tokens, extra)
        assert ranks.shape == (2, 4, 4)
        for b, pos, i in itertools.product(range(2), range(4), range(4)):
            path = tokens[b, pos + 1:pos + 2 + i].tolist()
            scores = head_by_hand(heads, i, look_back_by_hand(heads, h[b])[pos], path)
            at = pos + 2 + i
            scores = scores if extra is None else scores + noise[b, at]
            order = scores.argsort(descending=True).tolist()
            assert ranks[b, pos, i] == order.index(tokens[b, at])
