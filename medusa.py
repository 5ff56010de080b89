"""
Medusa heads: each guesses its token from the same hidden state, independently of the others.

The base model has just computed the hidden state h at position t and chosen token t + 1. Head i
(0-based) guesses token t + 2 + i from h alone, so a tree of guesses costs one small pass, but head
1 can't know which of head 0's guesses it continues (Medusa, Cai et al. 2024, section 2.1). Hydra's
heads can; they are these with another `extend`. """
import torch
import torch.nn as nn
import torch.nn.functional as F


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
    and the inside of its SiLU. Before training all heads are the base model's own LM head. """

    def __init__(self, model, n_head=4, n_block=1, own_lm_head=False):
        super().__init__()
        C = model.config.n_embd
        self.options = {"n_head": n_head, "n_block": n_block, "own_lm_head": own_lm_head}
        self.max_depth = n_head
        # subtle: past nn.Module, or the base model's weights would be trained and saved with the
        # heads
        object.__setattr__(self, "base", model)
        self.inlet = self.make_inlet(C)
        self.blocks = nn.ModuleList(nn.Sequential(*(ResBlock(C) for _ in range(n_block - 1)))
                                    for _ in range(n_head))  # made anew: [block] * n shares weights
        self.lm_heads = nn.ModuleList(nn.Linear(C, model.config.vocab_size, bias=False)
                                      for _ in range(n_head if own_lm_head else 0))
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

    # the three methods of a drafter

    def start(self, h, tokens, position):
        return self.enter(h[-1:])

    def extend(self, depth, state, tokens):
        return state  # independent: whatever was put on the path, the head sees the same

    def logits(self, depth, state):
        skip, inside = state[..., depth - self.max_depth, :, :].unbind(-2)
        x = self.blocks[depth](skip + F.silu(inside))
        return (self.lm_heads[depth] if self.lm_heads else self.base.lm_head)(x)

    # training

    def loss(self, h, tokens):
        """h (B, T, C) of the frozen base model on tokens (B, T) -> (loss, losses of the K heads).

        The sum over heads of 0.8^(i+1) times the cross entropy of head i (Medusa-1, section 2.2.1),
        teacher-forced through the same three methods that draft.
        """
        T, state, losses = tokens.shape[1], self.enter(h), []
        for i in range(self.max_depth):
            # row t knows tokens up to t + 1 + i and guesses token t + 2 + i; the last 2 + i have no
            # label
            state = self.extend(i, state[:, :T - 2 - i], tokens[:, 1 + i:T - 1])
            logits = self.logits(i, state)
            losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 2 + i:].flatten()))
        return sum(0.8 ** (i + 1) * loss for i, loss in enumerate(losses)), losses
