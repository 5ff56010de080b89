"""
VocabTrim: draft with the vocabulary that is used.

A drafter reads its whole LM head at every level of the tree, V x C weights, for tokens that are
almost never drafted. Keep the rows of the k ids that the base model generates most often, and
drafting reads k / V of it (VocabTrim, Goel et al. 2025; FR-Spec, Zhao et al. 2025). Verification
reads it all, so the text can't change: what was trimmed away arrives as the model's correction.

    >>> counts = torch.tensor([0, 7, 0, 2, 7, 1])
    >>> most_frequent(counts, 3).tolist()                  # 1 and 4 came 7 times, 3 twice
    [1, 3, 4]
    >>> most_frequent(counts, 3, must_keep=[5]).tolist()
    [1, 4, 5]
    >>> most_frequent(counts, 5).tolist()                  # only four ids came: the smallest unused
    [0, 1, 3, 4, 5]
    >>> round(coverage(counts, most_frequent(counts, 3)), 3)
    0.941
"""
import math
import sys
from collections import Counter

import torch

from model import KVCache, UserError, pack


def count_ids(tokens, vocab_size):  # -> (V,)
    return torch.bincount(tokens.flatten().cpu(), minlength=vocab_size)


def most_frequent(counts, k, must_keep=()):
    """The ids to draft from, (k,) ascending: must_keep, the most frequent, ties to the smaller id,
    where too few came the smallest unused. ValueError unless len(must_keep) <= k <= V."""
    V = len(counts)
    if not len(set(must_keep)) <= k <= V or k < 1 or not all(0 <= i < V for i in must_keep):
        raise ValueError(f"can't keep k={k} ids of {V} with must_keep={list(must_keep)}")
    counts = counts.clone()
    counts[list(must_keep)] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:k].sort().values


def coverage(counts, keep):
    """The share of the counted text that can be drafted."""
    return float(counts[keep].sum() / counts.sum())


def trim(heads, keep, lucky=0):
    """Let these heads draft from the ids keep (k,) alone; None: from all. Their rows of the LM head
    are copied once into a tensor of their own: gathered at each step, they would save nothing.
    lucky: how many ids with the largest noise join them at each position, see tree.guesses."""
    V, ids = heads.vocab_size, [0] if keep is None else keep.tolist()
    if not ids or len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= V:
        raise ValueError(f"kept ids must be distinct and in 0..{V - 1}")
    heads.keep, heads.lucky = keep, min(lucky, V - len(keep)) if keep is not None else 0
    rows = [] if keep is None else [head.weight[keep] for head in heads.lm_heads or [
        heads.base.lm_head]]
    heads.trimmed = [(W, pack(W)) for W in rows] * (1 if heads.lm_heads else heads.max_depth)


def trim_for(heads, text, temperature):
    """What --trim asks for -> k, 0 = off; auto: what was faster on the machine that trained. With a
    temperature a quarter as many lucky ids join: noise lifts rare ids that drafts would miss."""
    nearest = min(heads.counts, key=lambda counted: abs(counted - temperature))
    k = heads.trees[nearest]["trim"] if text == "auto" else text
    if k > heads.vocab_size:
        raise UserError(f"--trim {k}: the vocabulary has only {heads.vocab_size} ids")
    if (came := int((heads.counts[nearest] > 0).sum())) < k:
        print(f"only {came} ids came in the counted text: filled up to {k}", file=sys.stderr)
    keep = most_frequent(heads.counts[nearest], k) if k else None
    trim(heads, keep.to(heads.base.wte.weight.device) if k else None, k // 4 if temperature else 0)
    return k


def mbsu(tokens_per_step, drafter, depth):
    """Memory-bound speed-up: what the speed would be if only the reading of weights took time,
    tokens per step / (1 + weights read by drafting / weights read by a base step)."""
    base, config = drafter.base, drafter.base.config
    base = sum(p.numel() for p in base.parameters() if config.tied or p is not base.wte.weight)
    return tokens_per_step / (1 + drafting_weights(drafter, depth) / base)


def drafting_weights(heads, depth):
    """How many weights drafting reads in a step: prefix layer and inlet once, at each level a
    head's blocks and its rows of the LM head. Rows looked up in tables aren't counted."""
    once = [heads.inlet] + [heads.prefix] * bool(heads.prefix) if depth else []
    rows = sum(heads.lm_head(i).weight.shape[1] * (
        heads.vocab_size if heads.keep is None else len(heads.keep)) for i in range(depth))
    return rows + sum(p.numel() for part in [*once, *heads.blocks[:depth]]
                      for p in part.parameters())


def some_ids(teacher, tokens, generator):
    """Sampled softmax (Jean et al. 2015): a few ids stand for the vocabulary, right on average ->
    ids (k,), what to add to their logits (k,), k twice the number of tokens (B, T).
    One half are the tokens, then the ids that the teacher (B, T, V) thinks likeliest here; the
    other half is drawn from the rest, and each weighs as much as those it stands for."""
    weight, k = teacher.sum((0, 1)), min(teacher.shape[-1], 2 * tokens.numel())
    weight[tokens.flatten()] += tokens.numel()
    order = weight.argsort(descending=True)
    chosen, rest = order[:k // 2], order[k // 2:]
    drawn = rest[torch.randperm(len(rest), generator=generator)[:k - k // 2].to(rest.device)]
    bias = teacher.new_zeros(k)
    bias[k // 2:] = math.log(len(rest) / len(drawn))
    return torch.cat((chosen, drawn)), bias


@torch.inference_mode()
def write_text(model, prompts, new, temperature, seed=0, keep_noise=True):
    """What the base model writes after prompts (B, P), all at once -> tokens (B, P + new), their
    hidden states (B, P + new, C), and the noise that decided, temperature * g (B, P + new, V)."""
    (B, P), V = prompts.shape, model.config.vocab_size
    cache, generator = KVCache(model, P + new, B), torch.Generator().manual_seed(seed)
    tokens, fed, hidden = prompts, prompts, []
    noise = torch.zeros(B, P + new, V).to(prompts.device) if temperature and keep_noise else None
    for at in range(P, P + new):
        hidden.append(model(fed, cache))
        cache.keep(range(fed.shape[1]))
        scores = model.lm_head(hidden[-1][:, -1])
        if noise is not None:  # minus the logarithm of an exponential variable is Gumbel
            noise[:, at] = -temperature * torch.empty(B, V).exponential_(generator=generator).log_()
            scores = scores + noise[:, at]
        fed = scores.argmax(-1, keepdim=True)
        if temperature and noise is None:  # one random number a row: quicker than one an id
            law = (scores / temperature).softmax(-1).cumsum(-1)
            u = torch.rand(B, 1, generator=generator).to(law)
            fed = torch.searchsorted(law, u * law[:, -1:])
        tokens = torch.cat((tokens, fed), 1)
    hidden.append(model(fed, cache))
    return tokens, torch.cat(hidden, 1), noise


def count_paths(ranks, most=300, widest=64):
    """The most frequent paths of ranks, with their counts: [(path, count), ...], the best first.

    ranks: rows of the ranks that the true next tokens had, one row a position, one column a head. A
    path counts once for each row that it begins, so `count / len(ranks)` is how often a node there
    would have been accepted. No parent is rarer than its child (ties: the shallower first), so the
    N - 1 first paths are a tree, and the best one of N nodes.

        >>> ranks = [[0, 0], [0, 1], [0, 0], [1, 0], [2, 2]]
        >>> count_paths(ranks)[:4]
        [((0,), 3), ((0, 0), 2), ((1,), 1), ((2,), 1)]
        >>> expected_tokens(count_paths(ranks), len(ranks), 4)  # 1 + (3 + 2 + 1) / 5
        2.2
    """
    counts = Counter()
    for row in ranks:
        for depth in range(1, len(row) + 1):
            if row[depth - 1] >= widest:  # too deep in the ranking for any tree
                break
            counts[tuple(row[:depth])] += 1
    return sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))[:most]


def count_steps(texts, nodes=16, rounds=4):
    """count_paths over the positions where steps begin -> (counted paths, how many positions).

    texts: of each text the ranks, a row a position. A step begins where the one before it ended, so
    the tree decides which positions count, and these decide the tree. From all positions on: take
    the best tree of so many nodes, let it walk the texts, count anew where its steps began."""
    rows = [row for text in texts for row in text]
    for _ in range(rounds):
        tree, rows = {path for path, _ in count_paths(rows)[:nodes - 1]}, []
        for text in texts:
            at = 0
            while at < len(text):
                rows.append(text[at])
                at += 1 + sum(tuple(text[at][:d]) in tree for d in range(1, len(text[at]) + 1))
    return count_paths(rows), len(rows)


def expected_tokens(counted, total, nodes):
    """Tokens per step of the best tree of this many nodes, if its steps begin where was counted."""
    return 1 + sum(count for _, count in counted[:nodes - 1]) / total
