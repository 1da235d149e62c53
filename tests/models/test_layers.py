"""Norms, rotary positions and the MLP against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import ModelConfig
from jaxtrain.models.layers import MLP, Norm, rotary
from jaxtrain.models.spec import binder, specs


def config(**fields):
    defaults = {
        "width": 8,
        "mlp_width": 12,
        "norm": "rmsnorm",
        "norm_epsilon": 1e-3,
        "activation": "swiglu",
        "biases": False,
        "init_std": 0.1,
    }
    return ModelConfig(**defaults | fields)


def weights(module, seed=0) -> dict:
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda s: random.normal(size=s.shape).astype(np.float32), specs(module))


def normal(*shape, seed=1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_norm(norm, biases):
    module = Norm(config(norm=norm, biases=biases))
    params, x = weights(module), normal(3, 5, 8) * 4 + 2
    assert params.keys() == ({"scale", "bias"} if biases and norm == "layernorm" else {"scale"})
    centred = x - (x.mean(-1, keepdims=True) if norm == "layernorm" else 0)
    wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * params[
        "scale"
    ] + params.get("bias", 0)
    np.testing.assert_allclose(binder(module)(params)(x), wanted, rtol=2e-5, atol=2e-6)


def test_norm_in_bfloat16_computes_in_float32():
    module = Norm(config(norm="layernorm"))
    # the mean and the squares would lose everything in 8 bits
    x = jnp.asarray(normal(2, 8) + 200, jnp.bfloat16)
    got = binder(module)(weights(module))(x)
    assert got.dtype == jnp.bfloat16
    wanted = binder(module)(weights(module))(x.astype(jnp.float32))
    np.testing.assert_array_equal(got, wanted.astype(jnp.bfloat16))


def turn(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """Rotary positions as multiplication by a complex number: component i and i + half are its
    parts."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * base ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_rotary(base):
    x, positions = (
        normal(2, 7, 3, 6),
        np.array([[0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 2, 3000, 8191]]),
    )
    # float32 angles of thousands
    np.testing.assert_allclose(
        rotary(x, positions, base), turn(x, positions, base), rtol=1e-3, atol=2e-3
    )
    near = positions % 8
    np.testing.assert_allclose(rotary(x, near, base), turn(x, near, base), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        rotary(x[:1], positions[:1], base),
        rotary(x, np.zeros_like(positions) + positions[:1], base)[:1],
    )


def test_rotary_products_depend_on_distance_alone():
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=2)
    at = lambda x, p: rotary(x, np.array([[p]]), 100.0)
    products = [float((at(q, p + 3) * at(k, p)).sum()) for p in (0, 5, 50)]
    np.testing.assert_allclose(products, products[0], rtol=1e-4)
    assert abs(float((at(q, 4) * at(k, 0)).sum()) - products[0]) > 1e-2


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_mlp(activation, biases):
    module = MLP(config(activation=activation, biases=biases), 0.1)
    params, x = weights(module), normal(2, 3, 8)
    dense = lambda name, x: x @ params[name]["weight"] + params[name].get("bias", 0)
    up = dense("up", x)
    if activation == "swiglu":
        gate = dense("gate", x)
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        assert "gate" not in params
        hidden = up / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    np.testing.assert_allclose(
        binder(module)(params)(x), dense("down", hidden), rtol=1e-4, atol=1e-5
    )
    assert all(("bias" in part) == biases for part in params.values())
