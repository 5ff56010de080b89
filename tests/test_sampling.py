"""
Sampling follows the base model's law, and the seed fixes the text.

Tests of the law compare frequencies of whole short texts with exact enumeration by chi-square.
They fail where the chance of so bad a fit is below 1e-6: with new seeds every time, a right program
would fail each of them once in a million runs; as the seeds are fixed, it passes always or never.
"""
import itertools
import math

import pytest
import torch
from helpers import Itself, Oracle, Random, random_heads, small_model
from textbook import accept_chain, generate_textbook

import model as m
import tree as t
from hydra import Hydra
from medusa import typical_walk

PROMPT = [2, 0, 1]


def exact_law(model, choose, length):
    """{text: probability} of all texts of this length after PROMPT, by enumeration. The filters are
    written out anew here: sort, cut after k, cut after the mass p, renormalise."""
    V = model.config.vocab_size

    def next_law(text):
        logits = model.lm_head(model(torch.tensor([text]))[0, -1]).tolist()
        p = [math.exp((x - max(logits)) / choose.temperature) for x in logits]
        order = sorted(range(V), key=lambda v: (-p[v], v))[:choose.top_k or V]
        total, mass, kept = sum(p[v] for v in order), 0.0, []
        for v in order:
            if mass >= choose.top_p:
                break
            kept.append(v)
            mass += p[v] / total
        return {v: p[v] / sum(p[w] for w in kept) for v in kept}
    law = {(): 1.0}
    for _ in range(length):
        law = {(*text, v): chance * p for text, chance in law.items()
               for v, p in next_law(PROMPT + list(text)).items()}
    return law


def misfit(counts, law, runs):
    """The chance that counts drawn from the law fit it as badly (chi-square, cells under 5
    joined)."""
    assert set(counts) <= set(law)  # what the filters cut never comes
    cells, rest = [], [0, 0.0]
    for text, p in law.items():
        if p * runs >= 5:
            cells.append((counts.get(text, 0), p * runs))
        else:
            rest = [rest[0] + counts.get(text, 0), rest[1] + p * runs]
    if rest[1] >= 5:
        cells.append(rest)
    statistic = sum((seen - want) ** 2 / want for seen, want in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2])
    return float(torch.special.gammaincc(half[0], half[1]))


def count_texts(model, drafter, choose, length, runs):
    counts = {}
    for seed in range(runs):
        choose.seed = seed
        ids = t.generate(model, PROMPT, drafter, t.Tree(t.full(2, 2)), length, choose=choose)["ids"]
        counts[tuple(ids)] = counts.get(tuple(ids), 0) + 1
    return counts


CASES = [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 2, 1.0), (2.0, 0, 0.7), (1.5, 3, 0.8)]


@pytest.mark.parametrize("temperature, top_k, top_p", CASES)
@pytest.mark.parametrize("drafter", ["nearly itself", "random"])
def test_whole_texts_follow_the_law(temperature, top_k, top_p, drafter):
    """Jointly over three positions (64 texts), through a tree; the marginals follow from that."""
    model = small_model(12, n_layer=1, V=4, n_head=2)
    choose = m.Sampler(temperature, top_k, top_p)
    law = exact_law(model, choose, 3)
    assert abs(sum(law.values()) - 1) < 1e-9 and len(law) > 4
    drafter = Itself(model, 0.5) if drafter == "nearly itself" else Random(4)
    assert misfit(count_texts(model, drafter, choose, 3, 1500), law, 1500) > 1e-6


def test_control_noise_shared_by_all_positions(monkeypatch):
    """Every single token then still follows its law, and the whole texts don't."""
    model = small_model(12, n_layer=1, V=4, n_head=2)
    gumbel = m.Sampler.gumbel
    monkeypatch.setattr(m.Sampler, "gumbel", lambda self, p, like: gumbel(self, len(PROMPT), like))
    monkeypatch.setattr(m.Sampler, "__call__", lambda self, logits, positions: self.scores(
        logits, positions).argmax(-1))
    choose = m.Sampler(1.0)
    counts = count_texts(model, Random(4), choose, 3, 1500)
    first = {(v,): sum(n for text, n in counts.items() if text[0] == v) for v in range(4)}
    assert misfit(first, exact_law(model, choose, 1), 1500) > 1e-6
    assert misfit(counts, exact_law(model, choose, 3), 1500) < 1e-6


def test_control_a_wrong_temperature():
    model = small_model(12, n_layer=1, V=4, n_head=2)
    counts = count_texts(model, Random(4), m.Sampler(1.3), 3, 1500)
    assert misfit(counts, exact_law(model, m.Sampler(1.0), 3), 1500) < 1e-6


def test_textbook_rule_follows_the_same_law():
    """Its law on texts of three tokens, drafted by untrained Hydra heads."""
    model = small_model(12, n_layer=1, V=4, n_head=2)
    heads, counts = random_heads(Hydra, model), {}
    for seed in range(1500):
        text = tuple(generate_textbook(model, PROMPT, heads, 2, 3, seed=seed)[0][:3])
        counts[text] = counts.get(text, 0) + 1
    assert misfit(counts, exact_law(model, m.Sampler(1.0), 3), 1500) > 1e-6


def test_textbook_rule_accepts_one_minus_total_variation():
    """One draft: accepted with chance 1 - TV(p, q) on average, and always where q = p."""
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    generator, n = torch.Generator().manual_seed(0), 4000
    hits = sum(len(accept_chain(torch.stack([p, p]), [q],
                                [int(torch.multinomial(q, 1, generator=generator))],
                                generator)) == 2 for _ in range(n))
    assert abs(hits / n - 0.6) < 5 * math.sqrt(0.6 * 0.4 / n)
    assert len(accept_chain(torch.stack([p, p, p]), [p, p], [0, 2], generator)) == 3


def test_seed_fixes_the_text():
    model = small_model(3, block_size=60)
    texts = {seed: m.naive_generate(model, PROMPT, 40, choose=m.Sampler(1.0, seed=seed))
             for seed in (0, 1)}
    assert texts[0] != texts[1]
    choose = m.Sampler(1.0, seed=1)
    for _ in range(2):  # twice on the same object
        assert t.generate(model, PROMPT, Random(11), t.Tree(t.full(2, 2)), 40,
                          choose=choose)["ids"] == texts[1]
    for seed in range(3):
        assert m.naive_generate(model, PROMPT, 40, choose=m.Sampler(0.0, seed=seed)) == (
            m.naive_generate(model, PROMPT, 40))


def test_extreme_temperatures_and_logits():
    """Logits of size 1e4 and temperatures from 1e-8: no infinity, no NaN; a tiny one is greedy."""
    logits = 1e4 * torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float64):
        for temperature in (1e-300, 1e-36, 1e-8, 1e-3, 0.5, 2.0):
            for top_k, top_p in ((0, 1.0), (7, 0.9)):
                choose = m.Sampler(temperature, top_k, top_p)
                choose.start(0, 50)
                scores = choose.scores(logits.to(dtype), range(5), penalty=1e4)
                assert scores.isfinite().all() and choose.law(logits.to(dtype)).isfinite().all()
                if temperature < 1e-2:
                    assert torch.equal(choose(logits.to(dtype), range(5)), logits.argmax(-1))


def test_filters_at_their_edges():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])

    def kept(top_k=0, top_p=1.0):
        return m.Sampler(1.0, top_k, top_p).law(logits)[0].nonzero()[:, 0].tolist()
    assert kept() == kept(99) == kept(4) == [0, 1, 2, 3]
    assert kept(1) == [1]          # the lower id of a tie, as argmax has it
    assert kept(2) == [1, 2]
    assert kept(top_p=1e-9) == [1]  # never empty
    p = logits.softmax(-1)[0].tolist()
    assert kept(top_p=p[1] + 1e-9) == [1, 2] and kept(top_p=p[1] - 1e-9) == [1]
    assert kept(top_p=2 * p[1] + p[3] + 1e-9) == [0, 1, 2, 3]
    model = small_model(2)
    assert m.naive_generate(model, PROMPT, 20, choose=m.Sampler(2.0, top_k=1, seed=5)) == (
        m.naive_generate(model, PROMPT, 20))
    for bad in ({"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": float("inf")},
                {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            m.Sampler(**bad)


def test_noise_is_drawn_in_order_and_forgotten():
    """Whoever asks first, and for whatever position, the vectors are the same; few are kept."""
    one, other, like = m.Sampler(1.0, seed=4), m.Sampler(1.0, seed=4), torch.zeros(1, 6)
    one.start(10, 6), other.start(10, 6)
    ahead = one.gumbel(13, like)
    assert torch.equal(torch.stack([other.gumbel(p, like) for p in (10, 11, 12, 13)]),
                       torch.stack([one.gumbel(p, like) for p in (10, 11, 12, 13)]))
    assert torch.equal(ahead, one.gumbel(13, like))
    one(torch.zeros(2, 6), [12, 13])
    assert set(one.noise) == {12, 13}


def test_gumbel_noise_is_gumbel():
    """Mean 0.5772, variance pi^2 / 6, to five standard errors."""
    choose = m.Sampler(1.0)
    choose.start(0, 200_000)
    g, n = choose.gumbel(0, torch.zeros(200_000)), 200_000
    assert g.isfinite().all()
    assert abs(g.mean() - 0.57722) < 5 * math.sqrt(math.pi ** 2 / 6 / n)
    assert abs(g.var() - math.pi ** 2 / 6) < 5 * math.sqrt((5.4 - 1) * (math.pi ** 2 / 6) ** 2 / n)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.7}])
def test_who_agrees_with_the_model_agrees_with_its_dice(temperature, filters):
    """The base model as drafter has D + 1 tokens at every step, at any temperature; blind to the
    noise it would not. The filters don't come between them."""
    model, depth = small_model(6, block_size=60), 3
    choose = m.Sampler(temperature, seed=3, **filters)
    tree = t.Tree(t.chain(depth))
    result = t.generate(model, PROMPT, Itself(model), tree, 41, choose=choose)
    assert set(result["accepted"]) == {depth + 1} and result["steps"] == 10
    blind = t.generate(model, PROMPT, Itself(model), tree, 41, choose=choose, noise=False)
    assert blind["ids"] == result["ids"]
    trimmed = Itself(model)  # to just the ids of the text: as good
    trimmed.keep = torch.tensor(sorted(set(result["ids"])))
    again = t.generate(model, PROMPT, trimmed, tree, 41, choose=choose)
    assert (again["ids"], again["accepted"]) == (result["ids"], result["accepted"])
    assert (blind["steps"] > 10) == (temperature > 0)


def accepted_by_hand(tree, tokens, p, epsilon=0.09, delta=0.3):
    """The deepest path on which every draft passes, by trying all paths."""
    def passes(node):
        law = p[tree.parent[node]].tolist()
        entropy = -sum(x * math.log(x) for x in law if x)
        return law[tokens[node]] > min(epsilon, delta * math.exp(-entropy))
    best = [0]
    for path in itertools.chain.from_iterable(
            itertools.combinations(range(1, tree.size), n) for n in range(1, tree.max_depth + 1)):
        joined = all(tree.parent[b] == a for a, b in zip((0, *path), path))
        if joined and all(map(passes, path)) and len(path) + 1 > len(best):
            best = [0, *path]
    return best


def test_typical_acceptance_is_its_formula():
    tree, choose = t.Tree(t.full(2, 2) + [(1, 0, 0)]), m.Sampler(0.8, top_k=6)
    generator, depths = torch.Generator().manual_seed(1), set()
    for _ in range(60):
        logits = 2 * torch.randn(tree.size, 12, generator=generator)
        tokens = torch.randint(12, (tree.size,), generator=generator)
        path = typical_walk(tree, tokens.tolist(), None, logits, choose)
        assert path == accepted_by_hand(tree, tokens.tolist(), choose.law(logits))
        depths.add(len(path))
    assert depths >= {1, 2, 3}


def test_typical_acceptance_is_lossy_but_not_at_temperature_0():
    model, tree = small_model(3, block_size=60), t.Tree(t.full(3, 3))
    plain = m.naive_generate(model, PROMPT, 50)
    assert t.generate(model, PROMPT, Random(11), tree, 50, accept=typical_walk)["ids"] == plain
    choose = m.Sampler(1.0, seed=1)
    plain = m.naive_generate(model, PROMPT, 50, choose=choose)
    result = t.generate(model, PROMPT, Random(11), tree, 50, choose=choose, accept=typical_walk)
    # other text: that is what lossy means
    assert len(result["ids"]) == 50 and result["ids"] != plain


def test_perfect_heads_take_the_fewest_steps_at_temperature_1():
    model, choose = small_model(5, block_size=60), m.Sampler(1.0, seed=2)
    text = PROMPT + m.naive_generate(model, PROMPT, 50, choose=choose)
    for limit in range(13):
        result = t.generate(model, PROMPT, Oracle(text, 11, 1.0), t.Tree(t.chain(3)), limit,
                            choose=choose)
        assert result["ids"] == text[3:3 + limit] and result["steps"] == -(-max(0, limit - 1) // 4)
