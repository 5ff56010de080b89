"""
Medusa heads: each guesses its token from the same hidden state, independently of the others.

The base model has just computed the hidden state h at position t and chosen token t + 1. Head i
(0-based) guesses token t + 2 + i from h alone, so a tree of guesses costs one small pass, but head
1 can't know which of head 0's guesses it continues (Medusa, Cai et al. 2024, section 2.1). Hydra's
heads can; they are these with another `extend`."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from model import linear, ready


class Lookup:
    """The drafter that needs no training: what followed the last time these tokens stood here.

    Prompt lookup decoding (Saxena 2023): of the last three, two or one tokens, the longest run seen
    before decides. Copying is free, so it is the yardstick for everything trained."""

    def __init__(self, vocab_size, max_depth=8, longest=3):
        self.vocab_size, self.max_depth, self.longest = vocab_size, max_depth, longest

    def start(self, h, tokens, position):
        if position == 0:
            self.text, self.after = [], {}
        for token in tokens.tolist():
            self.text.append(token)
            for n in range(1, self.longest + 1):  # what follows this run begins at the text's end
                self.after[tuple(self.text[-n:])] = len(self.text)
        return h[-1:]

    def extend(self, depth, state, tokens):
        if depth == 0:
            text = self.text + tokens.tolist()
            runs = (tuple(text[-n:]) for n in range(self.longest, 0, -1))
            begin = next((self.after[run] for run in runs if run in self.after), len(text))
            self.guess = text[begin:]
        return state if depth < len(self.guess) else None

    def logits(self, depth, state):
        row = state.new_zeros(1, self.vocab_size)
        row[0, self.guess[depth]] = 1e4  # certain, yet finite
        return row


class ResBlock(nn.Module):
    """x + SiLU(W x + b), started as the identity: W = b = 0."""
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        zero(self.linear)

    def forward(self, x):
        return x + F.silu(self.linear(x))


def zero(linear):
    for p in linear.parameters():
        nn.init.zeros_(p)


class Medusa(nn.Module):
    """K heads of `n_block` residual blocks, and one LM head: the base model's, frozen, or one each.

    The state is what the first block of every head has seen so far, (rows, K, 2, C): its skip part
    and the inside of its SiLU. Before training all heads are the base model's own LM head.
    objective: "hard" labels or the "teacher", see `loss`."""

    def __init__(self, model, n_head=4, n_block=1, own_lm_head=False, objective="hard"):
        super().__init__()
        C = model.config.n_embd
        self.options = {"n_head": n_head, "n_block": n_block, "own_lm_head": own_lm_head,
                        "objective": objective}
        self.max_depth, self.vocab_size = n_head, model.config.vocab_size
        # subtle: past nn.Module, or the base model's weights would be trained and saved with the
        # heads
        object.__setattr__(self, "base", model)
        self.inlet, self.prefix = self.make_inlet(C), None
        self.blocks = nn.ModuleList(nn.Sequential(*(ResBlock(C) for _ in range(n_block - 1)))
                                    for _ in range(n_head))  # made anew: [block] * n shares weights
        self.lm_heads = nn.ModuleList(nn.Linear(C, model.config.vocab_size, bias=False)
                                      for _ in range(n_head if own_lm_head else 0))
        self.keep, self.lucky = None, 0  # the ids to draft from: all, or see vocabtrim.trim
        for head in self.lm_heads:
            head.load_state_dict(model.lm_head.state_dict())

    def make_inlet(self, C):
        """W and b of all first blocks as one product of h."""
        inlet = nn.Linear(C, self.max_depth * C)
        zero(inlet)
        return inlet

    def enter(self, h):
        """h (..., C) -> state (..., K, 2, C)."""
        inside = self.inlet(h).unflatten(-1, (self.max_depth, -1))
        return torch.stack((h.unsqueeze(-2).expand_as(inside), inside), -2)

    def look_back(self, h, position=None):
        return h  # Hydra++ puts a layer between

    # the three methods of a drafter

    def start(self, h, tokens, position):
        return self.enter(self.look_back(h[None], position)[0, -1:])

    def extend(self, depth, state, tokens):
        return state  # independent: whatever was put on the path, the head sees the same

    def logits(self, depth, state, extra=None):
        """extra: ids to score beside those that trimmed heads keep."""
        skip, inside = state[..., depth - self.max_depth, :, :].unbind(-2)
        x = self.blocks[depth](skip + F.silu(inside))
        if self.keep is None:
            return self.lm_head(depth)(x)
        kept, all_rows = linear(*self.trimmed[depth], None, x), self.lm_head(depth).weight
        return kept if extra is None else torch.cat((kept, F.linear(x, all_rows[extra])), -1)

    def lm_head(self, depth):
        return self.lm_heads[depth] if self.lm_heads else self.base.lm_head

    def ready(self):
        return ready(self)

    # teacher-forced: all positions of a text at once

    def guesses(self, h, tokens):
        """h (B, T, C) of the base model on tokens (B, T) -> for each head i its logits
        (B, T - 2 - i, V), computed through the same methods that draft."""
        T, state = tokens.shape[1], self.enter(self.look_back(h))
        for i in range(self.max_depth):
            # row t knows the tokens up to t + 1 + i and guesses token t + 2 + i; the last 2 + i
            # rows have no label
            state = self.extend(i, state[:, :T - 2 - i], tokens[:, 1 + i:T - 1])
            yield self.logits(i, state)

    def loss(self, h, tokens, teacher=None, labels=None, bias=0.0):
        """-> (loss to minimise, losses of the K heads), the base model frozen. teacher (B, T, V):
        its own distributions after each token.

        "hard": the sum over heads of 0.8^(i+1) times the cross entropy with the true token
        (Medusa-1, section 2.2.1). "teacher": the cross entropy with the base model's distribution
        at t + 1 + i, all heads alike (Hydra++). For trimmed heads teacher, labels (by default the
        tokens) and a bias (V,) are of the ids they keep, see train.py."""
        labels, losses = tokens if labels is None else labels, []
        hard = self.options["objective"] == "hard"
        for i, logits in enumerate(self.guesses(h, tokens)):
            target = labels[:, 2 + i:] if hard else teacher[:, 1 + i:-1]
            losses.append(F.cross_entropy((logits + bias).flatten(0, 1), target.flatten(0, 1)))
        weights = [0.8 ** (i + 1) if hard else 1.0 for i in range(self.max_depth)]
        return sum(weight * loss for weight, loss in zip(weights, losses)), losses

    @torch.no_grad()
    def ranks(self, h, tokens, noise=None):
        """The rank that each head gave to the true token, (B, T - 1 - K, K): trees are counted so.

        noise (B, T, V): temperature * g for the choice of the token at each position, or None."""
        ranks = []
        for i, scores in enumerate(self.guesses(h, tokens)):
            scores = scores if noise is None else scores + noise[:, 2 + i:]
            better = scores > scores.gather(-1, tokens[:, 2 + i:, None])
            ranks.append(better.sum(-1)[:, :tokens.shape[1] - 1 - self.max_depth])
        return torch.stack(ranks, -1)


def typical_walk(tree, tokens, choice, logits, choose, epsilon=0.09, delta=0.3):
    """The lossy rule of Medusa (section 2.3.1), for `decode` in place of the walk: accept what is
    plausible, not only what the model chose.

    A draft x passes where p(x) > min(epsilon, delta exp(-H(p))), p being the base model's
    distribution at its parent after temperature and filters. -> the deepest passing path, ties to
    the lower ranks."""
    p = choose.law(logits)
    bar = (delta * torch.exp(torch.special.xlogy(p, p).sum(-1))).clamp(max=epsilon).tolist()
    paths = {0: [0]}
    for node in range(1, len(tokens)):
        parent = tree.parent[node]
        if parent in paths and p[parent, tokens[node]] > bar[parent]:
            paths[node] = paths[parent] + [node]
    return max(paths.values(), key=len)  # the first of the longest: nodes are in order of rank
