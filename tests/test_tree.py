"""Trees: built right, or refused by name; the order of the paths is no matter."""
import doctest
import itertools
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, Oracle, random_heads, small_model, trees
from hypothesis import given
from hypothesis import strategies as st

import tree as t
from hydra import Hydra
from measure import best_size
from medusa import Lookup, Medusa
from model import Sampler
from vocabtrim import count_paths, count_steps, expected_tokens


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


def random_ranks(seed, rows=60, heads=3, widest=3):
    """Ranks as heads have them: the low ones often, later heads worse."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(rows, heads, generator=generator) ** 2 * (1 + torch.arange(heads) / heads)
    return (u * widest).long().clamp(max=widest - 1).tolist()


def accepted(paths, row):
    """How many drafts of this tree are accepted where the true tokens have these ranks."""
    return sum(tuple(row[:d]) in paths for d in range(1, len(row) + 1))


@pytest.mark.parametrize("seed", range(5))
def test_counted_tree_is_the_best_of_all_trees(seed):
    """Against brute force over every tree of N nodes, N up to 5; and its expected number of tokens
    is the mean over the very rows that were counted, exactly."""
    ranks = random_ranks(seed)
    counted = count_paths(ranks)
    every = t.full(3, 3)
    for nodes in range(1, 6):
        best = max(sum(accepted(set(paths), row) for row in ranks)
                   for paths in itertools.combinations(every, nodes - 1)
                   if all(p[:-1] in paths or len(p) == 1 for p in paths))
        tree = t.Tree([path for path, _ in counted[:nodes - 1]])
        mean = sum(accepted(set(tree.paths), row) for row in ranks) / len(ranks)
        assert tree.size == nodes and mean * len(ranks) == pytest.approx(best)
        assert expected_tokens(counted, len(ranks), nodes) == pytest.approx(1 + mean)


def test_control_a_guessed_tree_is_not_the_best():
    ranks = random_ranks(1)
    counted, chain = count_paths(ranks), set(t.chain(3))
    assert sum(accepted(chain, row) for row in ranks) < sum(
        accepted({path for path, _ in counted[:3]}, row) for row in ranks)


@pytest.mark.parametrize("Heads, temperature", [(Medusa, 0.0), (Hydra, 0.0), (Hydra, 1.0)])
def test_steps_counted_are_the_steps_that_decoding_takes(Heads, temperature):
    """The third round counts where steps with the second round's tree begin: decoding these texts
    with that tree takes as many steps, and finds as many tokens as were counted. (Not in the last
    positions, where the limit may cut a step.)"""
    model, P, new = small_model(3, size=2, V=5, block_size=64), 8, 52
    heads = random_heads(Heads, model, n_head=3)
    prompts = torch.randint(5, (12, P), generator=torch.Generator().manual_seed(1))
    choose = Sampler(temperature, seed=7)
    texts = [p.tolist() + t.generate(model, p.tolist(), limit=new, choose=choose)["ids"]
             for p in prompts]
    h = model(torch.tensor(texts))
    choose.start(P, 5)
    noise = torch.zeros(12, P + new, 5)
    noise[:, P:] = temperature * torch.stack([choose.gumbel(p, h) for p in range(P, P + new)])
    ranks = heads.ranks(h, torch.tensor(texts), noise)[:, P - 1:-1].tolist()
    paths = [path for path, _ in count_steps(ranks, nodes=6, rounds=2)[0]][:5]
    tree, (counted, total) = t.Tree(paths), count_steps(ranks, nodes=6, rounds=3)
    begun = [[] for _ in texts]
    for text, prompt, steps in zip(texts, prompts, begun):
        at = 0
        for n in t.generate(model, prompt.tolist(), heads, tree, new, choose=choose)["accepted"]:
            steps += [n] * (at < len(ranks[0]))
            at += n
    assert sum(map(len, begun)) == total
    mean = sum(map(sum, begun)) / total
    assert mean == pytest.approx(1 + sum(n for path, n in counted if path in paths) / total)
    # control: all positions alike give another number
    rows = [row for text in ranks for row in text]
    alike = 1 + sum(n for path, n in count_paths(rows) if path in paths) / len(rows)
    assert alike != pytest.approx(mean)


def test_independent_heads_give_the_product_rules_tree():
    """Every combination of ranks as often as independence says: the counts are then products."""
    first, second = [50, 30, 11, 9], [40, 25, 20, 15]
    ranks = [[i, j] for i in range(4) for j in range(4) for _ in range(first[i] * second[j])]
    share = {(i,): first[i] / 100 for i in range(4)}
    share |= {(i, j): first[i] * second[j] / 10**4 for i in range(4) for j in range(4)}
    product = sorted(share, key=lambda path: (-share[path], len(path), path))
    assert [path for path, _ in count_paths(ranks)] == product


def test_the_size_that_pays():
    """Of 10 positions: 2 nodes find 1.6 tokens, 4 nodes 2.2 (worked out by hand)."""
    counted = [((0,), 6), ((0, 0), 4), ((1,), 2)]
    cost = {1: 1.0, 2: 1.2, 3: 1.6, 4: 1.9}  # 1.00, 1.33, 1.25, 1.16 tokens a unit of time
    assert best_size(counted, 10, cost) == (
        2, "2 nodes: 1.60 tokens a step at 1.20x the time of a plain step")
    assert best_size(counted, 10, cost | {4: 1.5})[0] == 4
    assert best_size(counted, 10, cost | {4: 1.5}, most=3)[0] == 2
    assert best_size(counted, 10, cost | {2: 2.0, 3: 2.1, 4: 3.0})[0] == 1


def test_paths_beyond_the_widest_rank_are_left_out():
    assert count_paths([[0, 99], [99, 0]], widest=64) == [((0,), 1)]
    assert len(count_paths(random_ranks(3), most=4)) == 4


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
    _, tokens = t.draft(ByPath(), tree, torch.zeros(1, 1, dtype=torch.long), torch.tensor([3]))
    tokens = tokens.tolist()
    for node, path in enumerate([(), *tree.paths]):
        state, token = torch.zeros(1, 1, dtype=torch.long), 3
        for rank in path:
            state = state * 100 + token + 1
            token = row(state)[0].argsort(descending=True)[rank].item()
        assert tokens[node] == token


def test_lookup_proposes_what_followed_before():
    lookup = Lookup(50, max_depth=4)
    text = [1, 2, 3, 4, 5, 9, 2, 7, 1, 2]
    state = lookup.start(torch.zeros(len(text), 2), torch.tensor(text), 0)
    tree = t.Tree(t.chain(4))

    def propose(root):
        return t.draft(lookup, tree, state, torch.tensor([root]))[1].tolist()[1:]
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


def grow_by_hand(logits, size, depth, width):
    """The dynamic tree over a drafter whose logits for a path of tokens are `logits(path)`: every
    path with its likelihood, one at a time -> the set of paths that stay, with their values."""
    value, level = {(): 0.0}, [()]
    for _ in range(depth):
        new = {(*path, v): value[path] + lp for path in level
               for v, lp in enumerate((t.Dynamic.sharp * logits(path)).log_softmax(-1).tolist())}
        best = sorted(new, key=lambda path: -new[path])[:size - 1]
        value |= {path: new[path] for path in best}
        level = best[:width]
    return sorted(value, key=lambda path: -value[path])[:size]


@given(st.integers(0, 10**6), st.integers(2, 14), st.integers(1, 3), st.integers(1, 6))
def test_dynamic_tree_is_that_of_a_slow_search(seed, size, depth, width):
    """The same paths of tokens; parents before children; a mask that holds the ancestors."""
    weights = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))

    def logits(path):
        mixed = sum(((i + 2) * weights[token] for i, token in enumerate((5, *path))),
                    start=0 * weights[0])
        return 2 * torch.sin(3 * mixed)

    class ByPath:
        max_depth = 9

        def extend(self, depth, state, tokens):  # the state is the path itself
            return torch.cat((state.expand(len(tokens), -1), tokens[:, None]), 1)

        def logits(self, depth, state):
            return torch.stack([logits(path[1:]) for path in state.tolist()])
    now, tokens = t.draft(ByPath(), t.Dynamic(size, depth, width),
                          torch.zeros(1, 0, dtype=torch.long), torch.tensor([5]))
    tokens, paths = tokens.tolist(), [()]
    for i, up in enumerate(now.parent[1:], 1):
        assert up < i
        paths.append((*paths[up], tokens[i]))
    assert sorted(paths) == sorted(grow_by_hand(logits, size, depth, width))
    for i, path in enumerate(paths):
        assert now.depth[i] == len(path)
        assert now.mask[i].tolist() == [path[:len(other)] == other for other in paths]


@given(trees())
def test_a_row_of_the_mask_holds_the_ancestors(tree):
    for i, path in enumerate([(), *tree.paths]):
        assert tree.mask[i].tolist() == [path[:len(p)] == p for p in [(), *tree.paths]]
        assert tree.mask[i].sum() == tree.depth[i] + 1


def test_a_dynamic_tree_may_not_be_deeper_than_the_heads():
    with pytest.raises(ValueError, match="deeper than the 4 heads"):
        t.generate(small_model(1), [1], Oracle([1], 11, 1.0, max_depth=4), t.Dynamic(8, 5))


def test_picture():
    """Who sees whom, and which path was taken."""
    lines = t.picture(t.Tree([(0,), (1,), (1, 0)]), path=[0, 2]).splitlines()
    assert [line.split() for line in lines] == [
        [">", "0", "#"], ["1", "#", "#"], [">", "2", "#", ".", "#"], ["3", "#", ".", "#", "#"]]


def test_the_command_shows_a_tree_or_says_what_is_wrong():
    def run(*arguments):
        done = subprocess.run([sys.executable, str(ROOT / "tree.py"), *arguments],
                              capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr
    code, text, error = run("[[0],[1],[1,0]]")
    assert (code, error, text.count("#")) == (0, "", 1 + 2 + 2 + 3)
    assert run()[0] == 0
    for bad, message in [("[[1,0]]", "path [1, 0] has no parent [1]"), ("{}", "no list of lists"),
                         ("x", "say paths such as"), ("[[0],[0]]", "there twice")]:
        code, text, error = run(bad)
        assert code == 2 and text == "" and message in error and error.count("\n") == 1
