"""
A small GPT with the Llama block, its KV cache, and the naive decoder that every test trusts.

Beyond nanoGPT, the caller may give positions and mask, so that alternatives share a forward pass
(tree attention), and the cache is written first and *kept* later.
B batch, T new rows, L rows kept in the cache, C channels, V vocabulary."""
import os
from dataclasses import dataclass
from functools import partial

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
        if self.n_embd % (2 * self.n_head) or self.n_head % self.n_kv_head:
            raise ValueError(f"n_embd={self.n_embd} must be a multiple of 2 n_head="
                             f"{2 * self.n_head}, n_head of n_kv_head={self.n_kv_head}")


class KVCache:
    """Keys and values by position, allocated once. A forward pass writes its rows behind the
    `length` kept ones; they count once `keep` has moved them next to the prefix. So a rejected
    draft needn't be taken back: it was never kept."""

    def __init__(self, model, rows, batch=1, n_layer=None):
        c, like = model.config, model.wte.weight
        self.data = like.new_zeros(n_layer or c.n_layer, 2, batch, c.n_kv_head, rows,
                                   c.n_embd // c.n_head)
        self.length = 0

    def write(self, layer, k, v):
        """k, v (B, n_kv_head, T, size) -> the live keys and values, L + T rows each, as views."""
        start, end = self.length, self.length + k.shape[2]
        if end > self.data.shape[4]:
            raise ValueError(f"cache of {self.data.shape[4]} rows can't hold {end}")
        # subtle: rows past `end` are sliced off, not masked. A mask would let a stale NaN through.
        live = self.data[layer, ..., :end, :]
        live[0, ..., start:, :], live[1, ..., start:, :] = k, v
        return live

    def keep(self, rows):
        """Keep these of the rows just written (0 = the first of them), in this order."""
        rows, start = list(rows), self.length
        if rows != list(range(len(rows))):  # the accepted path is scattered: compact it
            # subtle: indexing with a tensor copies before it writes, so overlap does no harm
            index = torch.tensor(rows, device=self.data.device) + start
            self.data[..., start:start + len(rows), :] = self.data[..., index, :]
        self.length += len(rows)


def pack(weight):
    """The weight laid out for oneDNN once, not at every call: one row takes half of the time, 16
    rows a third. None where that can't be."""
    if weight.dtype == torch.float32 and weight.is_cpu and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 16)


def linear(weight, packed, bias, x):
    if packed is None or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def ready(module):
    """The weights are final: nothing learns here any more, and the products are prepared."""
    for layer in module.eval().requires_grad_(False).modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(linear, layer.weight, pack(layer.weight), layer.bias)
    return module


class Block(nn.Module):
    """Grouped-query attention with rotary positions, then SwiGLU; each behind an RMSNorm, no
    biases, and added to the stream (Llama 2, section 2.2)."""

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
        # rotary: each pair of channels is a complex number, turned the more the later it stands
        pairs = torch.view_as_complex(qk.unflatten(-1, (-1, 2)).contiguous())
        qk = torch.view_as_real(pairs * rotary).flatten(-2)                   # (B, T, heads, size)
        (q, k), v = qk.transpose(1, 2).split((self.heads, self.kv_heads), 1), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.write(layer, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=cache is None,
                                           enable_gqa=self.heads != self.kv_heads)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


def additive(mask, T, past, like):
    """mask: which new rows a row sees, (T, T) bool, None = causal -> what attention adds to its
    scores over [kept rows | new rows], (T, past + T): 0 = seen, as kept rows are, -inf = not."""
    if T == 1:
        return None  # one row sees everything that lives
    mask = torch.ones(T, T, device=like.device).tril() > 0 if mask is None else mask
    bias = like.new_zeros(T, past + T)
    bias[:, past:].masked_fill_(~mask, -torch.inf)
    return bias


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        size = config.n_embd // config.n_head
        # rotary: cosine and sine of every angle, (block_size, size/2, 2), computed in float64
        frequency = config.rope_base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.outer(torch.arange(config.block_size, dtype=torch.float64), frequency)
        rotary = torch.stack((angles.cos(), angles.sin()), -1).to(torch.get_default_dtype())
        self.register_buffer("rotary", rotary, persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # the layers that add to the stream start smaller, as in GPT-2
                scale = (2 * config.n_layer) ** -0.5 if "proj" in name or "down" in name else 1.0
                nn.init.normal_(p, std=0.04 * scale)  # GPT-2's 0.02 is for wider layers
        if config.tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens, cache=None, positions=None, mask=None):
        """tokens (B, T) -> hidden states after the final norm (B, T, C), for `lm_head` to read.
        Without a cache: the whole context, causal. With one: T new rows behind the kept ones, at
        `positions` (T,), default length, length + 1, ...; `mask` (T, T) bool says which of the new
        rows a row sees, default causal; all see all kept rows."""
        T, past = tokens.shape[1], cache.length if cache is not None else 0
        if positions is None:
            positions = slice(past, past + T)
            if past + T > self.config.block_size:
                raise ValueError(f"{past + T} tokens exceed block_size={self.config.block_size}")
        rotary = torch.view_as_complex(self.rotary[positions]).unsqueeze(1)  # for all heads
        bias = additive(mask, T, past, self.rotary) if cache is not None else None
        x = self.wte(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, rotary, bias, cache, i)
        return self.norm(x)


class Sampler:
    """The base model's choice of a token, the same for plain decoding and for verification.

    The token at position p is argmax(filtered logits + temperature * g_p); g_p (V,) is Gumbel noise
    that belongs to the position. The law is right: P(argmax_v l_v / t + g_v = v) = softmax(l / t)_v
    (Gumbel 1954; Maddison et al. 2014), and jointly so, since the g_p are independent of one
    another and of the text before p, and each decides one emitted token. All nodes whose choice
    falls on p share g_p: drafts have no say, and a seed fixes the text.
    temperature 0 = argmax, ties to the lowest id; top_k 0 = off; top_p above 0, 1 = off."""

    def __init__(self, temperature=0.0, top_k=0, top_p=1.0, seed=0):
        if not (0 <= temperature < torch.inf and top_k >= 0 and 0 < top_p <= 1):
            raise ValueError(f"{temperature=}, {top_k=} or {top_p=} is out of range")
        self.temperature, self.top_k, self.top_p, self.seed = temperature, top_k, top_p, seed

    def start(self, position, vocab_size):
        """A new text, whose first new token comes at this position."""
        self.generator, self.next = torch.Generator().manual_seed(self.seed), position
        self.noise, self.vocab_size = {}, vocab_size

    def gumbel(self, position, like):
        """g_p (V,), of the dtype and device of `like`: in order of position, whoever asks first."""
        while self.next <= position:
            u = torch.rand(self.vocab_size, generator=self.generator, dtype=torch.float64)
            self.noise[self.next] = u.log_().neg_().log_().neg_().to(like)
            self.next += 1
        return self.noise[position]

    def law(self, logits):
        """The distribution (N, V) that the choices follow: temperature, then top-k, then top-p."""
        if self.temperature == 0:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits)
        ranked, order = logits.sort(dim=-1, descending=True, stable=True)  # ties as argmax has them
        ranked = ranked / max(self.temperature, 1e-30)  # float32 ends at 1e38
        if self.top_k:
            ranked[..., self.top_k:] = -torch.inf
        p = ranked.softmax(-1)
        if self.top_p < 1:  # the token that crosses top_p is still in
            p = p.masked_fill(p.cumsum(-1) - p >= self.top_p, 0)
        return torch.zeros_like(p).scatter_(-1, order, p / p.sum(-1, keepdim=True))

    def scores(self, logits, positions, penalty=torch.inf, keep=slice(None)):
        """logits (N, V), or of the ids `keep`; N positions -> filtered, noisy scores (N, V)."""
        if self.temperature == 0:
            return logits
        if self.top_k or self.top_p < 1:
            logits = torch.where(self.law(logits) > 0, logits, logits - penalty)
        return logits + self.temperature * torch.stack(
            [self.gumbel(p, logits)[keep] for p in positions])

    def __call__(self, logits, positions):
        """The choice for each row: logits (N, V), N positions, the lowest first -> ids (N,)."""
        if self.temperature:  # noise of positions that decoding has passed is forgotten
            self.noise = {p: g for p, g in self.noise.items() if p >= positions[0]}
        return self.scores(logits, positions).argmax(-1)


@torch.inference_mode()
def naive_generate(model, prompt, limit, stop=None, choose=Sampler()):
    """Decoding with no cache, all computed anew for each token -> list of new ids. Slow, and
    obviously right: the oracle. Whatever is faster must give the same ids."""
    ids, device = list(prompt), model.wte.weight.device
    choose.start(len(prompt), model.config.vocab_size)
    while len(ids) < min(len(prompt) + limit, model.config.block_size):
        h = model(torch.tensor([ids], device=device))[:, -1]
        ids.append(int(choose(model.lm_head(h), [len(ids)])))
        if ids[-1] == stop:
            break
    return ids[len(prompt):]


def save_file(path, content):
    """One dict of tensors and plain values. An interrupted save leaves the old file whole."""
    torch.save(content, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def load_file(path, device="cpu"):
    """The dict that save_file wrote, or a UserError that says what to do."""
    try:
        return dict(torch.load(path, map_location=device, weights_only=True))
    except FileNotFoundError:
        raise UserError(f"{path} isn't there: run `python train.py` first") from None
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    except Exception:  # whatever unpickling makes of a file that is none
        raise UserError(f"{path} is cut short or no checkpoint: run `python train.py`") from None
