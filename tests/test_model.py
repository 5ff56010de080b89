"""The base model against arithmetic written out in numpy, its cache against the whole context."""
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn as nn
from helpers import CASES, models, small_model, trees
from hypothesis import given, settings
from hypothesis import strategies as st

import hydra
import model as m
import train
import tree as t


def numpy_forward(model, tokens):
    """The whole model in numpy, one position and one head at a time -> logits (T, V)."""
    c = model.config
    w = {name: p.numpy() for name, p in model.state_dict().items()}
    size = c.n_embd // c.n_head

    def norm(x, gain):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain

    def turn(vector, position):
        """Rotary, pair by pair: (a, b) turned by position * base^(-2i/size)."""
        out = np.empty(size)
        for i in range(0, size, 2):
            angle = position * c.rope_base ** (-i / size)
            out[i] = vector[i] * np.cos(angle) - vector[i + 1] * np.sin(angle)
            out[i + 1] = vector[i] * np.sin(angle) + vector[i + 1] * np.cos(angle)
        return out

    x = w["wte.weight"][tokens]
    for layer in range(c.n_layer):
        block = {n[len(f"blocks.{layer}."):]: p for n, p in w.items()
                 if n.startswith(f"blocks.{layer}.")}
        qkv = norm(x, block["norm_1.weight"]) @ block["qkv.weight"].T
        y = np.zeros_like(x)
        for head in range(c.n_head):
            group = head // (c.n_head // c.n_kv_head)
            q = qkv[:, head * size:(head + 1) * size]
            k = qkv[:, (c.n_head + group) * size:][:, :size]
            v = qkv[:, (c.n_head + c.n_kv_head + group) * size:][:, :size]
            for i in range(len(tokens)):
                scores = np.array([turn(q[i], i) @ turn(k[j], j)
                                   for j in range(i + 1)]) / np.sqrt(size)
                p = np.exp(scores - scores.max())
                y[i, head * size:(head + 1) * size] = p / p.sum() @ v[:i + 1]
        x = x + y @ block["proj.weight"].T
        gate, up = np.split(norm(x, block["norm_2.weight"]) @ block["gate_up.weight"].T, 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ block["down.weight"].T
    return norm(x, w["norm.weight"]) @ w["lm_head.weight"].T


def close(a, b):
    return torch.allclose(a, torch.as_tensor(b), rtol=0, atol=1e-10)


@settings(max_examples=30 * CASES)
@given(models, st.data())
def test_forward_equals_numpy(model, data):
    V = model.config.vocab_size
    tokens = data.draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=8))
    assert close(model.lm_head(model(torch.tensor([tokens])))[0], numpy_forward(model, tokens))


@settings(max_examples=50 * CASES)
@given(models, st.data())
def test_cached_equals_whole_context_at_every_position(model, data):
    """However the text is cut into pieces, two prompts at a time."""
    c = model.config
    torch.manual_seed(data.draw(st.integers(0, 99)))
    tokens = torch.randint(c.vocab_size, (2, c.block_size))
    cache, pieces = m.KVCache(model, c.block_size, batch=2), []
    while cache.length < c.block_size:
        n = data.draw(st.integers(1, c.block_size - cache.length))
        pieces.append(model(tokens[:, cache.length:cache.length + n], cache))
        cache.keep(range(n))
    assert close(torch.cat(pieces, 1), model(tokens))


def test_equal_sizes_hide_no_wrong_axis():
    """n_head = head size = length = 4, where a slice on the wrong axis raises nothing."""
    model = small_model(3, n_head=4, n_kv_head=4, size=4)
    tokens, cache = torch.tensor([[1, 2, 3, 4, 5, 6]]), m.KVCache(model, 8)
    model(tokens[:, :4], cache)
    cache.keep(range(4))
    assert close(model(tokens[:, 4:], cache), model(tokens)[:, 4:])  # both new rows see all four


@settings(max_examples=60 * CASES)
@given(models, trees(max_depth=4), st.data())
def test_every_node_sees_its_own_path(model, tree, data):
    """Hidden states of all nodes of a branching tree = a plain forward over prefix and path."""
    V = model.config.vocab_size
    torch.manual_seed(data.draw(st.integers(0, 99)))
    prefix = torch.randint(V, (data.draw(st.integers(0, 3)),))
    tokens = torch.randint(V, (tree.size,))
    cache = m.KVCache(model, 8 + tree.size)
    if len(prefix):
        model(prefix[None], cache)
        cache.keep(range(len(prefix)))
    h = model(tokens[None], cache, cache.length + tree.depths, tree.mask)[0]
    for node in range(tree.size):
        path = [node]
        while path[0]:
            path.insert(0, tree.parent[path[0]])
        whole = torch.cat((prefix, tokens[path]))
        assert close(h[node], model(whole[None])[0, -1])


def test_mask_is_ancestors_and_self():
    tree = t.Tree(t.full(3, 2))
    assert tree.mask.sum(-1).tolist() == [depth + 1 for depth in tree.depth]


def test_keep_moves_the_path_next_to_the_prefix():
    model = small_model(1)
    tree, cache = t.Tree(t.full(2, 2)), m.KVCache(model, 20)
    tokens = torch.tensor([4, 1, 2, 3, 5, 6, 7])
    model(torch.tensor([[8, 9]]), cache)
    cache.keep(range(2))
    model(tokens[None], cache, 2 + tree.depths, tree.mask)
    cache.keep([0, 2, 5])
    assert cache.length == 5
    after = model(torch.tensor([[3]]), cache)
    assert close(after, model(torch.tensor([[8, 9, 4, 2, 6, 3]]))[:, -1:])


def test_cache_and_context_overflow_are_refused():
    model = small_model(1, block_size=8)
    with pytest.raises(ValueError, match="cache of 4 rows can't hold 5"):
        model(torch.zeros(1, 5, dtype=torch.long), m.KVCache(model, 4))
    with pytest.raises(ValueError, match="9 tokens exceed block_size=8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_loss_starts_near_ln_V():
    torch.manual_seed(0)
    model = m.GPT(m.GPTConfig(vocab_size=500))
    loss = train.next_token_loss(model, torch.randint(500, (4, 65)))
    assert abs(loss.item() - np.log(500)) < 0.3


def test_prepared_products_are_the_same_products():
    """In float32, where they are prepared, against float64: all numbers of rows that a step may
    have, contiguous or not, with and without a bias. What learns goes the ordinary way."""
    assert m.pack(torch.ones(4, 4)) is None  # float64: nothing to prepare
    for bias in (False, True):
        layer, right = nn.Linear(48, 96, bias=bias).float(), nn.Linear(48, 96, bias=bias)
        right.load_state_dict(layer.state_dict())
        m.ready(layer)
        for rows in (1, 2, 3, 8, 13, 16, 33, 200):
            for x in (torch.randn(1, rows, 48), torch.randn(rows, 48), torch.randn(48, rows).t()):
                with torch.inference_mode():
                    got = layer(x.float())
                assert got.shape == right(x).shape and torch.allclose(
                    got.double(), right(x), atol=1e-4)
        x = torch.randn(3, 48, dtype=torch.float32, requires_grad=True)  # as heads learn
        layer(x).sum().backward()
        assert torch.allclose(x.grad[0], layer.weight.sum(0), atol=1e-5)


def test_control_what_was_prepared_is_used():
    if m.pack(torch.ones(4, 4, dtype=torch.float32)) is None:
        pytest.skip("this build of torch has no oneDNN")
    layer, x = m.ready(nn.Linear(48, 96).float()), torch.ones(1, 48, dtype=torch.float32)
    with torch.inference_mode():
        before = layer(x)
        layer.weight.zero_()
        assert torch.equal(layer(x), before)


def test_config_is_checked():
    for sizes in ({"n_embd": 10}, {"n_kv_head": 3}, {"n_embd": 12}):
        with pytest.raises(ValueError):
            m.GPTConfig(**sizes)


def test_checkpoint_round_trip_and_damage(tmp_path, monkeypatch):
    model, path = small_model(1, V=257), tmp_path / "base.pt"
    m.save_file(path, {"config": dataclasses.asdict(model.config), "model": model.state_dict(),
                       "merges": torch.zeros(0, 2), "prompts": []})
    again = hydra.load_base(tmp_path)[0]
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens), again(tokens))
    whole = path.read_bytes()

    def refused(match, content=None):
        if content:
            m.save_file(path, content)
        with pytest.raises(m.UserError, match=match) as error:
            hydra.load_base(tmp_path)
        assert "\n" not in str(error.value)
    for damage in (whole[:len(whole) // 2], whole[:-100], b"", b"once upon a time\n", b"hello",
                   b"README"):
        path.write_bytes(damage)
        refused("cut short or no checkpoint")
    path.unlink()
    refused("run `python train.py` first")
    path.write_bytes(whole)
    content = m.load_file(path)
    lacking = {**content, "model": {k: v for k, v in content["model"].items()
                                    if "blocks.1.qkv" not in k}}
    refused("blocks.1.qkv", lacking)
    refused("blocks.2", {**content, "config": {**content["config"], "n_layer": 3}})
    refused("wte.weight", {**content, "config": {**content["config"], "vocab_size": 12}})
    refused("config", {"model": content["model"]})
    refused("merges", {key: content[key] for key in ("config", "model", "prompts")})
    m.save_file(path, content)
    whole = path.read_bytes()

    def interrupted(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        m.save_file(path, {})
    assert path.read_bytes() == whole
