"""
The promise: whatever drafts, and whatever the tree, the text is the naive decoder's, id for id.

Everything here is in float64, so "equal" is meant literally. Each property has controls: a fault
planted from outside, through a seam, that must turn it red. A test that can't fail proves nothing.

The lines of the product that these tests are meant to guard; bending one should turn the suite red:

    tree.py    guesses   the position of the noise; the lucky ids are none that are kept
               draft     `state[place[onward]]`; the map to ids
               walk      `tokens[c] == choice[node]`
               decode    cutting after the stop token; `tree.cut(room - 1)`; cutting to the ranks
                         that can be drafted; `now.depths + position`; `now.mask`; positions of
                         the choices; `choose.start`; `cache.keep(path)`; `new`; `h[path]`
               Nodes     ancestors in the mask
               Tree      the cut; `filled`, the levels that the drafter filled
               Dynamic   the order of the nodes; their parents
    model.py   KVCache   slicing off rows past the end; compaction in `keep`
               additive  what a row may see
               Sampler   seed, order of the noise, temperature, its least size, top-k, top-p
    medusa.py  guesses   the shift of the path
               loss      the shifts of label and teacher
               start     the last row
    hydra.py   extend    the heads that a token is added to, with tables and without
               look_back a new text; causal; rows kept
"""
from functools import partial

import pytest
import torch
from helpers import (CASES, Itself, Oracle, Random, dynamic_trees, models, random_heads, samplers,
                     small_model, trees)
from hypothesis import given, settings
from hypothesis import strategies as st

import model as m
import tree as t
from hydra import Hydra
from medusa import Lookup, Medusa
from vocabtrim import trim

DRAFTERS = {
    "random": lambda model, text, seed: Random(model.config.vocab_size, seed),
    "perfect": lambda model, text, seed: Oracle(text, model.config.vocab_size, 1.0, seed),
    "wrong": lambda model, text, seed: Oracle(text, model.config.vocab_size, 0.0, seed),
    "half right": lambda model, text, seed: Oracle(text, model.config.vocab_size, 0.6, seed),
    "lookup": lambda model, text, seed: Lookup(model.config.vocab_size),
    "itself": lambda model, text, seed: Itself(model),
    "nearly itself": lambda model, text, seed: Itself(model, 0.5, seed),
    "medusa": lambda model, text, seed: random_heads(Medusa, model, seed),
    "hydra": lambda model, text, seed: random_heads(Hydra, model, seed),
    "hydra++": lambda model, text, seed: random_heads(Hydra, model, seed, prefix=True, n_block=2),
    "trimmed": lambda model, text, seed: trimmed((Medusa, Hydra)[seed % 2], model, seed),
    "trimmed itself": lambda model, text, seed: keep_some(Itself(model), model, seed),
}


def trimmed(Heads, model, seed):
    """Heads that draft from a random part of the vocabulary, at times from one id or from all."""
    heads = random_heads(Heads, model, seed, own_lm_head=seed % 3 == 0)
    trim(heads, keep_some(heads, model, seed).keep, lucky=seed % 3)
    return heads


def keep_some(drafter, model, seed):
    V, generator = model.config.vocab_size, torch.Generator().manual_seed(seed)
    k = [1, 2, V // 2, V][seed % 4]
    drafter.keep = torch.randperm(V, generator=generator)[:k].sort().values
    return drafter


def check(model, prompt, limit, stop, tree, name, seed=0, choose=m.Sampler(), noise=True):
    """Decode with this drafter and tree, compare with the naive decoder, check the count of
    steps."""
    V = model.config.vocab_size
    # the oracles also know what would come after the end
    text = prompt + m.naive_generate(model, prompt, model.config.block_size, choose=choose)
    naive = text[len(prompt):][:limit]
    naive = naive[:naive.index(stop) + 1] if stop in naive else naive
    drafter = DRAFTERS[name](model, text, seed)
    tree = tree.cut(9, V - 1 if name == "wrong" else V)  # the wrong drafter's last rank is right
    result = t.generate(model, prompt, drafter, tree.cut(drafter.max_depth), limit, stop,
                        choose=choose, noise=noise)
    assert result["ids"] == naive
    assert sum(result["accepted"]) == max(0, len(naive) - 1)
    room = min(limit, model.config.block_size - len(prompt))
    assert result["finish"] == ("stop" if stop in naive else
                                "length" if limit <= room else "context")
    if name == "wrong" and not isinstance(tree, t.Dynamic):  # which may take the last rank too
        assert set(result["accepted"]) <= {1}
    return result


@settings(max_examples=2000 * CASES)
@given(models, st.one_of(trees(), dynamic_trees), st.sampled_from(list(DRAFTERS)), samplers,
       st.booleans(), st.data())
def test_any_drafter_any_tree_gives_the_naive_text(model, tree, name, choose, noise, data):
    V, block_size = model.config.vocab_size, model.config.block_size
    prompt = data.draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=block_size))
    limit = data.draw(st.integers(0, block_size + 2))
    stop = data.draw(st.one_of(st.none(), st.integers(0, V - 1)))
    check(model, prompt, limit, stop, tree, name, data.draw(st.integers(0, 99)), choose, noise)


PROMPT, TREE = [3, 1, 4, 1, 5], t.Tree(t.full(3, 2))


def run_fixed_cases():
    """What the controls break: branching trees, drafts right now and then, thirty models, two
    temperatures; and that a drafter which is the base model itself is right about everything."""
    for seed in range(30):
        for choose in (m.Sampler(), m.Sampler(1.0, seed=seed)):
            check(small_model(seed), PROMPT, 25, None, TREE, "half right", seed, choose)
            check(small_model(seed), PROMPT, 25, None, t.Dynamic(9, 3, 4), "nearly itself", seed,
                  choose)
            result = check(small_model(seed), PROMPT, 25, None, TREE, "itself", seed, choose)
            assert set(result["accepted"]) == {TREE.max_depth + 1}


def test_fixed_cases_hold():
    run_fixed_cases()


def sibling_seen(tree):
    mask = tree.mask.clone()
    for kids in tree.children:
        for kid in kids:
            mask[kid, kids] = True
    return mask


def accept_first_child(tree, tokens, choice, *_):
    path = [0]
    while tree.children[path[-1]]:
        path.append(tree.children[path[-1]][0])
    return path


def one_node_late(walk):
    def late(tree, *args):
        path = walk(tree, *args)
        return path + tree.children[path[-1]][:1]
    return late


def only_count(cache, rows):
    cache.length += len(list(rows))


def later_noise(scores):
    """The drafter's noise off by one: whoever has a finite penalty is the drafter."""
    return lambda self, logits, positions, penalty=torch.inf, keep=slice(None): scores(
        self, logits, [p + (penalty < torch.inf) for p in positions], penalty, keep)


def fresh_noise(scores):
    """Verification and plain decoding alike draw anew at each call."""
    def afresh(self, logits, positions, penalty=torch.inf, keep=slice(None)):
        self.noise, self.next = {}, positions[0]
        return scores(self, logits, positions, penalty, keep)
    return afresh


def open_mask(filled):
    def seeing(self, tokens):
        now, tokens = filled(self, tokens)
        now.mask = torch.ones_like(now.mask).tril()
        return now, tokens
    return seeing


FAULTS = {
    "a dynamic tree's nodes see all before them": lambda p: p.setattr(
        t.Dynamic, "filled", open_mask(t.Dynamic.filled)),
    "a wrong child is accepted": lambda p: p.setattr(t, "walk", accept_first_child),
    "the walk stops one node late": lambda p: p.setattr(t, "walk", one_node_late(t.walk)),
    "positions by row, not by depth": lambda p: p.setattr(TREE, "depths", torch.arange(TREE.size)),
    "the mask lets siblings in": lambda p: p.setattr(TREE, "mask", sibling_seen(TREE)),
    "the cache isn't compacted": lambda p: p.setattr(m.KVCache, "keep", only_count),
    "the drafter's noise is off by one": lambda p: p.setattr(
        m.Sampler, "scores", later_noise(m.Sampler.scores)),
    "noise is drawn afresh": lambda p: p.setattr(
        m.Sampler, "scores", fresh_noise(m.Sampler.scores)),
    "the drafter ignores the noise": lambda p: p.setattr(
        t, "draft",
        lambda d, tree, state, root, choose, L, draft=t.draft: draft(d, tree, state, root)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_planted_fault_is_noticed(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError):
        run_fixed_cases()


def test_control_the_wrong_drafter_is_needed_to_see_wasted_steps():
    """The count of steps is checked as well: a drafter that is right must not pass for a wrong
    one."""
    model = small_model(1)
    text = PROMPT + m.naive_generate(model, PROMPT, 20)
    result = t.generate(model, PROMPT, Oracle(text, 11, 1.0), TREE, 20)
    assert not set(result["accepted"]) <= {1}


@pytest.mark.parametrize("paths", [[], t.chain(1), t.chain(4), t.full(2, 3),
                                   [(0,), (1,), (1, 0), (1, 0, 0)]])
def test_perfect_drafts_take_the_fewest_steps(paths):
    """D + 1 tokens a step, ceil((n - 1) / (D + 1)) steps, cut exactly at every limit."""
    model = small_model(5, block_size=60)
    tree = t.Tree(paths)
    text = PROMPT + m.naive_generate(model, PROMPT, 60)
    first = [p for p in t.chain(9) if p in tree.paths]  # the perfect guess has rank 0
    D = len(first)
    for limit in range(3 * (D + 1) + 2):
        result = t.generate(model, PROMPT, Oracle(text, 11, 1.0), tree, limit)
        assert result["ids"] == text[5:5 + limit]
        assert result["steps"] == -(-max(0, limit - 1) // (D + 1))


def test_stop_token_at_each_place_of_an_accepted_path():
    model = small_model(5, block_size=60, V=40)
    text = m.naive_generate(model, PROMPT, 40)
    drafter = Oracle(PROMPT + text, 40, 1.0)
    for end in range(12):
        stop = text[end]
        want = text[:text.index(stop) + 1]
        for _ in range(2):  # a second call on the same objects is as good as new
            result = t.generate(model, PROMPT, drafter, t.Tree(t.chain(4)), 40, stop)
            assert (result["ids"], result["finish"]) == (want, "stop")
    start = [text[3]] + PROMPT  # in the prompt a stop token is an ordinary token
    rest = m.naive_generate(model, start, 5)
    stop = next(i for i in range(40) if i not in rest)
    assert t.generate(model, [stop] + start, limit=5, stop=stop)["ids"] == (
        m.naive_generate(model, [stop] + start, 5, stop))


def test_end_of_the_context():
    """Prompts that leave room for 0 to D + 2 tokens; and the order stop, length, context."""
    model = small_model(2, block_size=20)
    drafter = Random(11)
    for left in range(7):
        prompt = [(7 * i) % 11 for i in range(20 - left)]
        for paths in ([], t.chain(4), t.full(3, 2)):
            result = t.generate(model, prompt, drafter, t.Tree(paths), 99)
            assert result["ids"] == m.naive_generate(model, prompt, 99)
            assert (len(result["ids"]), result["finish"]) == (left, "context")
        assert t.generate(model, prompt, limit=left)["finish"] == "length"
    assert t.generate(model, [1], limit=0) | {"prompt_seconds": 0} == {
        "ids": [], "finish": "length", "steps": 0, "accepted": [], "tokens_per_step": None,
        "seconds": 0, "prompt_seconds": 0}


def test_objects_are_reused_cleanly():
    """A prompt of 5, of 20, of 5 tokens, with other trees between: each as in a fresh process."""
    model = small_model(8, block_size=50)
    lookup = Lookup(11)
    for n, paths in [(5, t.chain(3)), (20, t.full(2, 2)), (5, t.chain(3)), (5, t.chain(8))]:
        prompt = [(3 * i * i) % 11 for i in range(n)]
        result = t.generate(model, prompt, lookup, t.Tree(paths), 30)
        fresh = t.generate(model, prompt, Lookup(11), t.Tree(paths), 30)
        assert result["ids"] == fresh["ids"] == m.naive_generate(model, prompt, 30)
        assert result["accepted"] == fresh["accepted"]


def test_token_id_0_is_an_ordinary_token():
    """A model that says 0 for ever, leaves at different depths: nothing is accepted beyond a
    leaf."""
    model = small_model(3, tied=False)
    model.lm_head.weight.zero_()  # all scores equal: the lowest id wins, everywhere alike
    tree = t.Tree([(0,), (1,), (1, 0), (1, 0, 0), (2,)])
    for name in ("random", "perfect", "wrong", "lookup"):
        check(model, PROMPT, 20, None, tree, name)


def test_siblings_with_the_same_token_are_walked_once():
    tree = t.Tree([(0,), (1,), (0, 0), (1, 0)])
    assert t.walk(tree, [5, 7, 7, 8, 9], [7, 8, 9, 1, 2]) == [0, 1, 3]
    # the second choice was right
    assert t.walk(tree, [5, 6, 7, 8, 9], [7, 8, 9, 1, 2]) == [0, 2, 4]
    assert t.walk(tree, [5, 6, 7, 8, 9], [4, 8, 9, 1, 2]) == [0]


def test_drafting_starts_from_the_accepted_rows():
    """`start` gets the hidden states of a plain forward over the whole text so far, and its
    tokens."""
    model = small_model(6, block_size=60)
    text = PROMPT + m.naive_generate(model, PROMPT, 40)

    class Watch(Oracle):
        def start(self, h, tokens, position, fault=lambda h: h):
            whole = model(torch.tensor([self.text[:position + len(tokens)]]))[0]
            assert torch.allclose(fault(h), whole[position:], rtol=0, atol=1e-10)
            return super().start(h, tokens, position)
    result = t.generate(model, PROMPT, Watch(text, 11, 0.6), TREE, 40)
    assert max(result["accepted"]) > 2

    class Faulty(Watch):  # control: the root's hidden state in place of the accepted rows'
        def start(self, h, tokens, position):
            return super().start(h, tokens, position, lambda h: h[:1] if position else h)
    with pytest.raises(AssertionError):
        t.generate(model, PROMPT, Faulty(text, 11, 0.6), TREE, 40)


def test_no_allocation_a_step_and_no_trace_of_rejected_drafts(monkeypatch):
    """The cache's storage never moves; rows that weren't kept may hold NaN without any effect."""
    model, places = small_model(4), set()

    class Poisoned(m.KVCache):
        def keep(self, rows):
            super().keep(rows)
            places.add(self.data.data_ptr())
            self.data[..., self.length:, :] = float("nan")
    monkeypatch.setattr(t, "KVCache", Poisoned)
    check(model, PROMPT, 27, None, TREE, "half right")
    assert len(places) == 1


def test_training_mode_changes_nothing():
    """model.train() left on: nothing drops out, in the base model or in the heads."""
    model = small_model(7).train()
    check(model, PROMPT, 20, None, TREE, "half right")
    for Heads in (Medusa, Hydra, partial(Hydra, prefix=True)):
        heads = random_heads(Heads, model).train()
        runs = [t.generate(model, PROMPT, heads, TREE, 20)["accepted"] for _ in range(2)]
        assert runs[0] == runs[1]


def test_the_callers_modes_are_left_alone():
    """decode is a generator: between its tokens the caller must not find itself in inference
    mode."""
    for _ in t.decode(small_model(1), PROMPT, limit=3):
        assert not torch.is_inference_mode_enabled()


def test_bad_calls_are_refused_by_name():
    model = small_model(1)
    for prompt in ([], [1] * 33):
        with pytest.raises(ValueError, match="a prompt has 1 to block_size=32 tokens, not"):
            t.generate(model, prompt)
    with pytest.raises(ValueError, match="limit=-1"):
        t.generate(model, [1], limit=-1)
    with pytest.raises(ValueError, match=r"path \[0\] is deeper than the 0 heads"):
        t.generate(model, [1], None, t.Tree(t.chain(2)))
    with pytest.raises(ValueError, match=r"path \[11\] has a rank beyond vocab_size=11"):
        t.generate(model, [1], Random(11), t.Tree([(11,)]))
