"""The KV cache under any sequence of uses: what is kept always equals a fresh prefill."""
import pytest
import torch
from helpers import CASES, small_model
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import model as m
import tree as t

MODEL = {}  # built at first use, when the tests' dtype is set
TREES = [t.chain(1), t.chain(3), t.full(2, 2), [(0,), (1,), (1, 0), (1, 1), (1, 1, 0)]]


class CacheMachine(RuleBasedStateMachine):
    """Append, verify, keep a path or a part of it, take nothing, start anew; poison what isn't
    kept."""

    def __init__(self):
        super().__init__()
        torch.set_default_dtype(torch.float64)
        self.model = MODEL.setdefault(0, small_model(9, block_size=24))
        self.cache, self.text, self.pending = m.KVCache(self.model, 40), [], None
        self.place = self.cache.data.data_ptr()

    def room(self):
        return 24 - len(self.text)

    @precondition(lambda self: self.room() >= 1)
    @rule(data=st.data())
    def append(self, data):
        tokens = data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=min(5, self.room())))
        h = self.model(torch.tensor([tokens]), self.cache)[0]
        self.cache.keep(range(len(tokens)))
        self.text += tokens
        self.pending = None
        assert torch.allclose(h, self.model(torch.tensor([self.text]))[0, -len(tokens):],
                              rtol=0, atol=1e-10)

    @precondition(lambda self: self.room() >= 4)
    @rule(paths=st.sampled_from(TREES), data=st.data())
    def verify(self, paths, data):
        """Write a tree's rows; nothing is kept yet, so a second tree simply takes their place."""
        tree = t.Tree(paths)
        tokens = data.draw(st.lists(st.integers(0, 10), min_size=tree.size, max_size=tree.size))
        self.model(torch.tensor([tokens]), self.cache, len(self.text) + tree.depths, tree.mask)
        self.pending = tree, tokens

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def keep(self, data):
        """A path from the root, to its end or stopped half-way."""
        tree, tokens = self.pending
        path = [0]
        while tree.children[path[-1]] and data.draw(st.booleans()):
            path.append(data.draw(st.sampled_from(tree.children[path[-1]])))
        self.cache.keep(path)
        self.text += [tokens[i] for i in path]
        self.pending = None

    @rule()
    def start_anew(self):
        self.cache.length, self.text, self.pending = 0, [], None

    @precondition(lambda self: not self.pending)
    @rule()
    def poison(self):
        self.cache.data[..., self.cache.length:, :] = float("nan")

    @invariant()
    def live_rows_equal_a_fresh_prefill(self):
        assert self.cache.length == len(self.text) and self.cache.data.data_ptr() == self.place
        if self.text:
            fresh = m.KVCache(self.model, 40)
            self.model(torch.tensor([self.text]), fresh)
            live = slice(0, len(self.text))
            assert torch.allclose(self.cache.data[..., live, :], fresh.data[..., live, :],
                                  rtol=0, atol=1e-10)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60 * CASES, stateful_step_count=20)


@pytest.mark.parametrize("fault", [
    lambda cache, rows: setattr(cache, "length", cache.length + len(rows)),
    lambda cache, rows: KEEP(cache, sorted(rows, reverse=True)),
    lambda cache, rows: KEEP(cache, [*rows, rows[-1]]),
])
def test_control_a_faulty_keep_is_noticed(fault, monkeypatch):
    monkeypatch.setattr(m.KVCache, "keep", lambda cache, rows: fault(cache, list(rows)))
    machine = CacheMachine()
    machine.text = [1, 2, 3]
    machine.model(torch.tensor([[1, 2, 3]]), machine.cache)
    KEEP(machine.cache, range(3))
    tree = t.Tree(t.full(2, 2))
    machine.model(torch.tensor([[4, 5, 6, 7, 8, 9, 10]]), machine.cache, 3 + tree.depths, tree.mask)
    machine.cache.keep([0, 2, 5])
    machine.text += [4, 6, 9]
    with pytest.raises(AssertionError):
        machine.live_rows_equal_a_fresh_prefill()


KEEP = m.KVCache.keep
