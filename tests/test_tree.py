"""Trees: built right, or refused by name; the order of the paths is no matter."""
import doctest

import pytest
import torch
from helpers import Oracle, small_model, trees
from hypothesis import given
from hypothesis import strategies as st

import tree as t


def test_examples_in_docstrings():
    assert doctest.testmod(t).failed == 0 < doctest.testmod(t).attempted


@pytest.mark.parametrize("paths, message", [
    ([(0, 0)], r"path \[0, 0\] has no parent \[0\]"),
    ([(0,), (0,)], r"path \[0\] is there twice"),
    ([(-1,)], r"path \[-1\] isn't a list of ranks"),
    ([(0,), (0, 1.5)], r"path \[0, 1.5\] isn't a list of ranks"),
    ([()], r"path \[\] isn't a list of ranks"),
    ([("a",)], r"path \['a'\] isn't a list of ranks"),
])
def test_bad_trees_are_refused_by_name(paths, message):
    with pytest.raises(ValueError, match=message):
        t.Tree(paths)


@given(trees(), st.randoms())
def test_order_and_kind_of_sequence_are_no_matter(tree, random):
    paths = [list(path) for path in tree.paths]
    random.shuffle(paths)
    again = t.Tree(paths)
    assert again.paths == tree.paths and again.parent == tree.parent
    assert torch.equal(again.mask, tree.mask)


@given(trees(), st.integers(0, 5), st.integers(0, 3))
def test_cut_is_a_prefix_of_the_nodes(tree, depth, width):
    cut = tree.cut(depth)
    assert cut.parent == [up for up, d in zip(tree.parent, tree.depth) if d <= depth]
    assert cut.size == sum(d <= depth for d in tree.depth)
    narrow = tree.cut(depth, width)
    assert narrow.paths == [p for p in tree.paths if len(p) <= depth and all(r < width for r in p)]


def test_helpers():
    assert t.chain(3) == [(0,), (0, 0), (0, 0, 0)] and t.chain(0) == []
    assert len(t.full(3, 2)) == 2 + 4 + 8
    for n in range(40):
        paths = t.likely_paths(n, 4)
        assert t.Tree(paths).size == n + 1 and t.Tree(paths).max_depth <= 4


@given(trees())
def test_draft_puts_each_rank_where_the_tree_has_it(tree):
    """Every node holds the token of its rank in its parent's row, computed here one path at a
    time."""
    class ByPath:
        max_depth = 9

        def extend(self, depth, state, tokens):  # the state is the path itself, as one number
            return state * 100 + tokens[:, None] + 1

        def logits(self, depth, state):
            return row(state)

    def row(state):
        return torch.sin(state.double() * torch.arange(1, 8))
    tokens = t.draft(ByPath(), tree, torch.zeros(1, 1, dtype=torch.long),
                     torch.tensor([3])).tolist()
    for node, path in enumerate([(), *tree.paths]):
        state, token = torch.zeros(1, 1, dtype=torch.long), 3
        for rank in path:
            state = state * 100 + token + 1
            token = row(state)[0].argsort(descending=True)[rank].item()
        assert tokens[node] == token


def test_lookup_proposes_what_followed_before():
    lookup = t.Lookup(50, max_depth=4)
    text = [1, 2, 3, 4, 5, 9, 2, 7, 1, 2]
    state = lookup.start(torch.zeros(len(text), 2), torch.tensor(text), 0)
    tree = t.Tree(t.chain(4))

    def propose(root):
        return t.draft(lookup, tree, state, torch.tensor([root])).tolist()[1:]
    assert propose(3) == [4, 5, 9, 2]     # after 1 2 3, though 2 alone was followed by 7 later
    assert propose(7) == [1, 2, 7]        # the text ends, and the root after it
    assert propose(8) == []               # never seen
    state = lookup.start(torch.zeros(1, 2), torch.tensor([3]), len(text))  # the text goes on
    assert propose(4) == [5, 9, 2, 7]


def test_lookup_runs_to_the_point_where_it_knows_nothing():
    """A drafter that ends half-way costs no rows: the step feeds only what was proposed."""
    model = small_model(1)

    class Short(Oracle):
        def extend(self, depth, state, tokens):
            return None if depth == 2 else super().extend(depth, state, tokens)
    prompt = [1, 2, 3]
    text = prompt + t.generate(model, prompt, limit=20)["ids"]
    result = t.generate(model, prompt, Short(text, 11, 1.0), t.Tree(t.full(4, 2)), 20)
    assert result["ids"] == text[3:] and set(result["accepted"][:-1]) == {3}
