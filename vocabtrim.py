"""
VocabTrim: draft with the vocabulary that is used.

A drafter reads its whole LM head at every level of the tree, V x C weights, for tokens that are
almost never drafted. Keep the rows of the k ids that the base model generates most often, and
drafting reads k / V of it (VocabTrim, Goel et al. 2025; FR-Spec, Zhao et al. 2025). Verification
reads the whole head as before, so the text can't change: a token that was trimmed away can't be
drafted and arrives as the base model's correction.

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
import torch

from model import KVCache, UserError


def count_ids(tokens, vocab_size):
    """How often each id stands in a text that the base model generated -> (V,)."""
    return torch.bincount(tokens.flatten().cpu(), minlength=vocab_size)


def most_frequent(counts, k, must_keep=()):
    """The ids to draft from, (k,) ascending: must_keep, then the most frequent, ties to the smaller
    id; where fewer than k came at all, the smallest unused ids fill up. ValueError unless
    len(must_keep) <= k <= V."""
    V = len(counts)
    if not len(set(must_keep)) <= k <= V or k < 1 or not all(0 <= i < V for i in must_keep):
        raise ValueError(f"can't keep k={k} ids of {V} with must_keep={list(must_keep)}")
    counts = counts.clone()
    counts[list(must_keep)] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:k].sort().values


def coverage(counts, keep):
    """The share of the counted text that can be drafted."""
    return float(counts[keep].sum() / counts.sum())


def trim(heads, keep):
    """Let these heads draft from the ids keep (k,) alone; None: from all. Their rows of the LM head
    are copied once into a tensor of their own: gathered at each step, they would save nothing."""
    V = heads.base.config.vocab_size
    if keep is not None:
        ids = keep.tolist()
        if not ids or len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= V:
            raise ValueError(f"kept ids must be distinct and in 0..{V - 1}")
    heads.keep = keep
    heads.trimmed = None if keep is None else [
        heads.lm_head(i).weight[keep].contiguous() for i in range(heads.max_depth)
    ] if heads.lm_heads else [heads.base.lm_head.weight[keep].contiguous()] * heads.max_depth


def trim_for(heads, text, temperature):
    """What --trim asks for -> k, 0 = off. auto: an eighth of the vocabulary for greedy decoding;
    off with a temperature, where noise lifts rare ids and drafts would miss them."""
    V = heads.base.config.vocab_size
    k = text if text != "auto" else V // 8 if temperature == 0 else 0
    if k > V:
        raise UserError(f"--trim {k}: the vocabulary has only {V} ids")
    device = heads.base.wte.weight.device
    trim(heads, most_frequent(heads.counts, k).to(device) if k else None)
    return k


@torch.inference_mode()
def write_text(model, prompts, new, temperature, seed=0, keep_noise=True):
    """What the base model writes after prompts (B, P), all at once -> tokens (B, P + new), their
    hidden states (B, P + new, C), and the noise that decided, temperature * g (B, P + new, V)."""
    cache, generator = KVCache(model, prompts.shape[1] + new, len(prompts)), torch.Generator()
    generator.manual_seed(seed)
    tokens, fed, hidden, noise = prompts, prompts, [], []
    for _ in range(new):
        hidden.append(model(fed, cache))
        cache.keep(range(fed.shape[1]))
        scores = model.lm_head(hidden[-1][:, -1])
        if temperature:
            u = torch.rand(scores.shape, generator=generator).clamp_(min=1e-30)
            g = u.log_().neg_().log_().mul_(-temperature).to(scores)
            scores = scores + g
            noise += [g] if keep_noise else []
        fed = scores.argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, fed), 1)
    hidden.append(model(fed, cache))
    if noise:
        before = scores.new_zeros(len(prompts), prompts.shape[1], scores.shape[-1])
        noise = torch.cat((before, torch.stack(noise, 1)), 1)
    return tokens, torch.cat(hidden, 1), noise if len(noise) else None
