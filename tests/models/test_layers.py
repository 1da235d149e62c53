"""Norms and the MLP against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import model_formulas

from jaxtrain.config import ModelConfig
from jaxtrain.models.layers import MLP, Norm
from jaxtrain.models.spec import binder, specs


def config(**fields):
    defaults = {
        "width": 8,
        "mlp_width": 12,
        "norm": "rmsnorm",
        "norm_epsilon": 1e-3,
        "activation": "swiglu",
        "biases": (),
        "init_std": 0.1,
    }
    return ModelConfig(**defaults | fields)


def weights(module, seed=0) -> dict:
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda s: random.normal(size=s.shape).astype(np.float32), specs(module))


def normal(*shape, seed=1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("norm", "biases", "factor"),
    [
        ("rmsnorm", ("qkv", "mlp"), "scale"),
        ("rmsnorm", (), "one_plus"),
        ("layernorm", ("qkv", "mlp"), "scale"),
        ("layernorm", ("norm",), "one_plus"),
    ],
)
def test_norm(norm, biases, factor):
    cfg = config(norm=norm, biases=biases, norm_weight=factor)
    module = Norm(cfg)
    assert specs(module)["scale"].constant == (factor == "scale")
    params, x = weights(module), normal(3, 5, 8) * 4 + 2
    assert params.keys() == ({"scale", "bias"} if "norm" in biases else {"scale"})
    wanted = model_formulas.norm(cfg, params, x)
    np.testing.assert_allclose(binder(module)(params)(x), wanted, rtol=2e-5, atol=2e-6)


def test_norm_in_bfloat16_computes_in_float32():
    module = Norm(config(norm="layernorm"))
    # the mean and the squares would lose everything in 8 bits
    x = jnp.asarray(normal(2, 8) + 200, jnp.bfloat16)
    got = binder(module)(weights(module))(x)
    assert got.dtype == jnp.bfloat16
    wanted = binder(module)(weights(module))(x.astype(jnp.float32))
    np.testing.assert_array_equal(got, wanted.astype(jnp.bfloat16))


@pytest.mark.parametrize("biases", [("qkv", "out", "norm"), ("mlp",)])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "geglu", "clamped_swiglu"])
def test_mlp(activation, biases):
    cfg = config(activation=activation, biases=biases, activation_limit=1.5)
    module = MLP(cfg, 0.1)
    params, x = weights(module), normal(2, 3, 8)
    assert ("gate" in params) == (activation != "gelu")
    if activation == "clamped_swiglu":
        up, gate = (model_formulas.dense(params[name], x) for name in ("up", "gate"))
        assert (gate > 1.5).any() and (np.abs(up) > 1.5).any()
    np.testing.assert_allclose(
        binder(module)(params)(x), model_formulas.mlp(cfg, params, x), rtol=1e-4, atol=1e-5
    )
    assert all(("bias" in part) == ("mlp" in biases) for part in params.values())
