"""
A small GPT with the Llama block, its KV cache, and the naive decoder that every test trusts.

The block is the one of both papers' target models (Vicuna, Llama 3): RMSNorm before each half, rotary
positions, grouped-query attention, SwiGLU, no biases. What speculation needs beyond nanoGPT is small:
positions and mask are given by the caller, so that rows that are alternatives to each other can share
one forward pass (tree attention), and the cache is written first and *kept* later.

Shapes: B batch, T new rows, L rows kept in the cache, C channels, V vocabulary.
"""
import os
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F


class UserError(Exception):
    """A mistake of the person at the keyboard: the commands print it as one sentence and exit."""


@dataclass
class GPTConfig:
    vocab_size: int = 4096
    block_size: int = 256   # the longest context, in tokens
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int = 2      # grouped-query attention: n_head / n_kv_head queries share a key
    n_embd: int = 256
    n_inner: int = 704      # width of the SwiGLU layer, about 8/3 n_embd
    rope_base: float = 10000.0
    tied: bool = True       # embedding and LM head share one matrix

    def __post_init__(self):
        if self.n_embd % self.n_head or self.n_head % self.n_kv_head:
            raise ValueError(f"n_embd={self.n_embd}, n_head={self.n_head} and n_kv_head="
                             f"{self.n_kv_head} must divide one another in that order")
        if self.n_embd // self.n_head % 2:
            raise ValueError(f"head size {self.n_embd // self.n_head} is odd: rotary needs pairs")


class KVCache:
    """Keys and values by position, allocated once.

    A forward pass writes its rows behind the `length` kept ones; they count only once `keep` has
    moved them next to the prefix. So taking back a rejected draft costs nothing: it was never kept.
    """

    def __init__(self, config, rows, batch=1, n_layer=None, like=torch.empty(0)):
        size = config.n_embd // config.n_head
        self.data = like.new_zeros(n_layer or config.n_layer, 2, batch, config.n_kv_head, rows, size)
        self.length = 0

    def write(self, layer, k, v):
        """k, v (B, n_kv_head, T, size) -> the live keys and values, L + T rows each, as views."""
        start, end = self.length, self.length + k.shape[2]
        if end > self.data.shape[4]:
            raise ValueError(f"cache of {self.data.shape[4]} rows can't hold {end}")
        # subtle: rows past `end` are sliced off, not masked. A mask would let a stale NaN through.
        k_all, v_all = self.data[layer, 0, :, :, :end], self.data[layer, 1, :, :, :end]
        k_all[:, :, start:], v_all[:, :, start:] = k, v
        return k_all, v_all

    def keep(self, rows):
        """Keep these of the rows just written (0 = the first of them), in this order."""
        rows, start = list(rows), self.length
        if rows != list(range(len(rows))):  # the accepted path is scattered over the tree: compact it
            # subtle: indexing with a tensor copies before it writes, so overlap does no harm
            index = torch.tensor(rows, device=self.data.device) + start
            self.data[..., start:start + len(rows), :] = self.data[..., index, :]
        self.length += len(rows)


def rotary_table(positions, size, base):
    """(positions, size/2, 2): cosine and sine of every angle, computed in float64."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float64),
                         base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size))
    return torch.stack((angles.cos(), angles.sin()), -1).to(torch.get_default_dtype())


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and added to the stream (Llama 2, section 2.2)."""

    def __init__(self, config):
        super().__init__()
        C, size = config.n_embd, config.n_embd // config.n_head
        self.heads, self.kv_heads = config.n_head, config.n_kv_head
        self.norm_1, self.norm_2 = nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
        self.qkv = nn.Linear(C, (config.n_head + 2 * config.n_kv_head) * size, bias=False)
        self.proj = nn.Linear(C, C, bias=False)
        self.gate_up = nn.Linear(C, 2 * config.n_inner, bias=False)
        self.down = nn.Linear(config.n_inner, C, bias=False)

    def forward(self, x, rotary, mask=None, cache=None, layer=0):
        x = x + self.attend(self.norm_1(x), rotary, mask, cache, layer)
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def attend(self, x, rotary, mask, cache, layer):
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, self.heads + 2 * self.kv_heads, -1)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 2)
        # rotary: each pair of channels is a complex number, turned by an angle that grows with position
        pairs = torch.view_as_complex(qk.unflatten(-1, (-1, 2)).contiguous())
        qk = torch.view_as_real(pairs * rotary).flatten(-2)                   # (B, T, heads, size)
        q, k = qk.transpose(1, 2).split((self.heads, self.kv_heads), 1)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.write(layer, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=cache is None,
                                           enable_gqa=self.heads != self.kv_heads)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


def causal(T, device=None):
    """(T, T) bool: each row sees itself and those before it, the mask of a chain."""
    return torch.ones(T, T, dtype=torch.bool, device=device).tril()


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        size = config.n_embd // config.n_head
        self.register_buffer("rotary", rotary_table(config.block_size, size, config.rope_base),
                             persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # the layers that add to the stream start smaller, as in GPT-2
                scale = (2 * config.n_layer) ** -0.5 if "proj" in name or "down" in name else 1.0
                nn.init.normal_(p, std=0.04 * scale)  # GPT-2's 0.02 is for wider layers
        if config.tied:
            self.lm_head.weight = self.wte.weight

    def angles(self, positions):
        """Rotary factors of these positions, (T, 1, size/2) complex, shared by all heads."""
        return torch.view_as_complex(self.rotary[positions]).unsqueeze(1)

    def forward(self, tokens, cache=None, positions=None, mask=None):
        """Hidden states after the final norm; `lm_head` turns them into logits.

        tokens (B, T). Without a cache: the whole context, causal. With one: T new rows behind the
        kept ones, at `positions` (T,), default length, length + 1, ...; `mask` (T, T) bool says which
        of the new rows a row sees, default causal; all rows see all kept rows. -> (B, T, C)
        """
        T, past = tokens.shape[1], cache.length if cache is not None else 0
        if past + T > self.config.block_size and positions is None:
            raise ValueError(f"{past} + {T} tokens exceed block_size={self.config.block_size}")
        if positions is None:
            positions = slice(past, past + T)
        bias = None if cache is None else self.bias(T, past, mask)
        x, rotary = self.wte(tokens), self.angles(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, rotary, bias, cache, i)
        return self.norm(x)

    def bias(self, T, past, mask):
        """The additive mask over [cache | new rows], (T, past + T): 0 = seen, -inf = not."""
        if T == 1:
            return None  # one row sees everything that lives
        bias = self.rotary.new_zeros(T, past + T)
        mask = causal(T, bias.device) if mask is None else mask
        bias[:, past:].masked_fill_(~mask, -torch.inf)
        return bias

    def loss(self, tokens):
        """Next-token cross entropy in nats, the mean over tokens (B, T + 1)."""
        logits = self.lm_head(self(tokens[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def greedy(logits, position):
    """The base model's choice: logits (N, V), positions (N,) -> ids (N,). Ties go to the lowest id."""
    return logits.argmax(-1)


@torch.inference_mode()
def naive_generate(model, prompt, limit, stop=None, choose=greedy):
    """Decoding with no cache, the whole context recomputed for each token: slow, and obviously right.

    It is the oracle of the tests: whatever is faster must give the same ids. -> list of new ids.
    """
    ids = list(prompt)
    end = min(len(ids) + limit, model.config.block_size)
    device = model.wte.weight.device
    while len(ids) < end:
        h = model(torch.tensor([ids], device=device))
        position = torch.tensor([len(ids)], device=device)  # the position being chosen
        ids.append(int(choose(model.lm_head(h[:, -1]), position)))
        if ids[-1] == stop:
            break
    return ids[len(prompt):]


def save_file(path, content):
    """One dict of tensors and plain values. An interrupted save leaves the old file whole."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    torch.save(content, temporary)
    os.replace(temporary, path)


def load_file(path, device="cpu"):
    """The dict that save_file wrote, or a UserError that says what to do."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} isn't there: run `python train.py` first") from None
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path} is cut short or no checkpoint: delete it and run `python train.py`")
    return content


def pack(model, **more):
    return {"config": asdict(model.config), "model": model.state_dict(), **more}


def unpack(content, path, device="cpu"):
    """A GPT from a dict that `pack` made, ready for decoding; anything missing is named."""
    try:
        model = GPT(GPTConfig(**content["config"]))
        model.load_state_dict(content["model"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} doesn't fit this program ({reason}): train again") from None
    return model.to(device).eval().requires_grad_(False)
