"""A module of one's own as a part of the model: parameters, their axes, generation; and the layers
in configs/layers against the recurrences of their papers, token by token in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import ROOT, own_layers, small

from jaxtrain import config as configs, product
from jaxtrain.config import own_code
from jaxtrain.config.recipes import load_recipe
from jaxtrain.config.rules import checks
from jaxtrain.generation.decode import empty_cache, extend
from jaxtrain.models import transformer
from jaxtrain.models.own_module import describe, without_cache
from jaxtrain.pipeline.run_checks import RULES
from jaxtrain.runtime.own_loss import read_loss
from jaxtrain.training.state import initial_state
from jaxtrain.training.step import make_step


def test_parameters_and_their_axes(tmp_path):
    cfg = small.config(changes=own_layers.settings("Shifted", tmp_path)).model
    specs = transformer.build(cfg).specs["layer"]["own"]
    assert {*specs} == {"conv", "fused", "heads", "layers", "norm"}, "a shared one counts once"
    assert specs["fused"].axes == ("width", "mlp") and specs["conv"].axes == ("latent", "mlp")
    assert specs["heads"].axes == ("heads", "latent", "width") and specs["heads"].cast
    assert specs["layers"]["0"]["kernel"].axes == ("width", "width")
    assert not specs["norm"]["scale"].cast, "vectors stay in float32"
    (line,) = describe(cfg)
    assert f"{tmp_path}/mine.py (sha256 " in line
    assert line.endswith("mesh.model splits all matrices but layers.0.kernel, layers.1.kernel")
    assert without_cache(cfg) == f"model.block={tmp_path}/mine.py:Shifted"


def test_a_product_outside_of_a_model():
    weight = nnx.Param(jnp.ones((3, 2)), product=True)
    np.testing.assert_array_equal(product(jnp.ones((1, 4, 3)), weight), np.full((1, 4, 2), 3))


def test_the_document_s_layer_and_loss(tmp_path, monkeypatch):
    """docs/own_layer.md: twenty lines, which every mesh takes; and a loss."""
    text = (ROOT / "docs" / "own_layer.md").read_text()
    layer, loss = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert layer.count("\n") <= 20 and len(text.encode()) <= 5000
    (tmp_path / "mean.py").write_text(layer + loss)
    monkeypatch.chdir(tmp_path)
    changes = {"model.block": "mean.py:Mean", "model.block_settings": ("inner=128",)}
    cfg = configs.replace(load_recipe("tiny"), changes | {"precision.compute": "bfloat16"})
    checks.check(cfg, checks.Environment(8, "cpu", rules=RULES))
    specs = transformer.build(cfg.fill().model).specs["layer"]["own"]
    assert specs["up"].shape == (128, 128) and specs["down"].axes == ("mlp", "width")
    own, logits = read_loss("mean.py:loss", 5), small.normal(0, 3, 5)
    expected = -jax.nn.log_softmax(logits)[np.arange(3), [0, 4, 2]]
    np.testing.assert_allclose(own(logits, jnp.array([0, 4, 2])), expected, rtol=1e-5)


# --- recurrences ----------------------------------------------------------------------------------


def silu(x):
    return x / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))


def convolved(x, weight, documents):
    """The causal convolution of [T, D] inside documents, with its SiLU."""
    y = np.zeros_like(x)
    for t in range(len(x)):
        for i in range(min(len(weight), t + 1)):
            y[t] += (documents[t - i] == documents[t]) * x[t - i] * weight[-1 - i]
    return silu(y)


def gated_deltanet(p, s, x, documents):
    keys, heads, group = s.key_heads * s.key_dim, s.value_heads, s.value_heads // s.key_heads
    tokens, dims = len(x), (s.key_dim, s.key_dim, group * s.value_dim, group * s.value_dim)
    q, k, v, z = np.split(
        (x @ p["in_proj_qkvz"]).reshape(tokens, s.key_heads, -1), np.cumsum(dims)[:-1], -1
    )
    b, a = np.split((x @ p["in_proj_ba"]).reshape(tokens, s.key_heads, -1), 2, -1)
    joined = np.concatenate([part.reshape(tokens, -1) for part in (q, k, v)], -1)
    q, k, v = np.split(convolved(joined, p["conv1d"], documents), (keys, 2 * keys), -1)
    q, k = (part.reshape(tokens, s.key_heads, -1) for part in (q, k))
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    v, z = (part.reshape(tokens, heads, -1) for part in (v, z))
    beta = 1 / (1 + np.exp(-b.reshape(tokens, heads)))
    alpha = np.exp(-np.exp(p["A_log"]) * softplus(a.reshape(tokens, heads) + p["dt_bias"]))
    out = np.zeros_like(v)
    for h in range(heads):
        state = np.zeros((s.key_dim, s.value_dim))
        for t in range(tokens):
            if t and documents[t] != documents[t - 1]:
                state[:] = 0
            key = k[t, h // group]
            state = alpha[t, h] * (state - beta[t, h] * np.outer(key, key @ state))
            state += beta[t, h] * np.outer(key, v[t, h])
            out[t, h] = q[t, h // group] @ state / np.sqrt(s.key_dim)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + s.epsilon) * p["norm"] * silu(z)
    return out.reshape(tokens, -1) @ p["out_proj"]


def mamba2(p, s, x, documents):
    normed = lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + s.epsilon) * scale
    y, tokens = normed(x, p["norm"]), len(x)
    u = convolved(y @ p["input"], p["conv_input"], documents).reshape(tokens, s.heads, -1)
    b, c = np.split(convolved(y @ p["b_and_c"], p["conv_b_and_c"], documents), 2, -1)
    step = softplus(y @ p["step"] + p["step_bias"])
    out = np.zeros_like(u)
    for h in range(s.heads):
        state = np.zeros((s.head_dim, s.state))
        for t in range(tokens):
            if t and documents[t] != documents[t - 1]:
                state[:] = 0
            state = np.exp(-step[t, h] * np.exp(p["rate"][h])) * state
            state += step[t, h] * np.outer(u[t, h], b[t])
            out[t, h] = state @ c[t] + p["skip"][h] * u[t, h]
    out = normed(out.reshape(tokens, -1) * silu(y @ p["gate"]), p["inner_norm"])
    return x + out @ p["output"]


RECURRENCES = {
    "deltanet": (
        "configs/layers/gated_deltanet.py:GatedDeltaNet",
        {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 12, "chunk": 8},
        gated_deltanet,
    ),
    "mamba2": (
        "configs/layers/mamba2.py:Mamba2",
        {"heads": 4, "head_dim": 6, "state": 8, "chunk": 8},
        mamba2,
    ),
}


@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("tokens", [40, *small.named((), (7, 33, 200))])
def test_as_the_paper_s_recurrence(name, tokens):
    text, settings, recurrence = RECURRENCES[name]
    layer = own_code.load(text)(24, rngs=nnx.Rngs(0), **settings)
    for _, param in nnx.iter_graph(layer):
        if isinstance(param, nnx.Param) and param[...].ndim > 1:
            param[...] = 20 * param[...]  # so that states matter
    params = {
        path[0]: np.float64(param[...])
        for path, param in nnx.iter_graph(layer)
        if isinstance(param, nnx.Param)
    }
    x = small.normal(1, 2, tokens, 24)
    documents = np.cumsum(np.random.default_rng(2).random((2, tokens)) < 0.1, 1, dtype=np.int32)
    expected = [
        recurrence(params, layer.s, np.float64(x), d) for x, d in zip(x, documents, strict=True)
    ]
    y = jax.jit(lambda x, d: layer(x, None, d))(x, documents)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# --- generation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deltanet", *small.named((), ("mamba2",))])
def test_a_cache_continues_as_the_whole_sequence(name, tmp_path):
    """By pieces with padding behind them, and by single tokens."""
    cfg = small.config(changes=own_layers.settings(name, tmp_path) | {"model.layers": 2})
    step = make_step(cfg, small.mesh_of(cfg))
    plain = small.to_plain(step.layout, initial_state(step.layout, step.optimizer, 0).params)
    params = jax.tree.map(lambda a: jnp.asarray(3 * a if a.ndim > 2 else a), plain)
    parts, tokens = transformer.build(cfg.model), np.arange(2 * 13, dtype=np.int32).reshape(2, 13)
    cache, outputs = empty_cache(parts, 2, 24, jnp.dtype("float32")), []
    piece = jax.jit(
        lambda tokens, cache, start, count: extend(
            parts, params, tokens, cache, start, jnp.float32, count
        )
    )
    for start, count in ((0, 8), (8, 3), (11, 1), (12, 1)):
        padded = np.full((2, 8), 60, np.int32)
        padded[:, :count] = tokens[:, start : start + count]
        y, cache = piece(padded, cache, jnp.int32(start), jnp.int32(count))
        outputs.append(y[:, :count])
    whole = transformer.trunk(parts, params, jnp.asarray(tokens))
    np.testing.assert_allclose(np.concatenate(outputs, 1), whole, rtol=1e-4, atol=1e-5)
