"""Rotary positions against plain numpy, and their scalings against the figures of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import ModelConfig
from jaxtrain.models import rotary as rotary_module
from jaxtrain.models.rotary import (
    Rotary,
    attention_factor,
    score_factor,
)


def normal(*shape, seed=1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rotary(x, positions, base):
    return Rotary(ModelConfig(rotary_base=base), x.shape[-1])(x, positions)


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


LLAMA = {
    "rope_scaling": "llama3",
    "rotary_base": 5e5,
    "rope_factor": 8.0,
    "rope_original_length": 8192,
}
YARN = {"rope_scaling": "yarn", "rope_factor": 40.0, "rope_original_length": 4096}
# size of the head, settings, eighths of transformers' inv_freq, its attention factor, and the
# factor of DeepSeek-V3's scores; by transformers 5.23.0 with torch 2.13.0
PUBLISHED = {
    "linear": (
        128,
        {"rope_scaling": "linear", "rope_factor": 4.0},
        [
            0.25,
            0.079056941,
            0.025,
            0.0079056947,
            0.0024999999,
            0.00079056947,
            0.00025,
            7.9056947e-05,
        ],
        1.0,
        1.0,
    ),
    "llama 3.1": (
        128,
        LLAMA,
        [
            1,
            0.19392276,
            0.037606031,
            0.0072926651,
            0.00052484602,
            3.4281024e-05,
            6.6478697e-06,
            1.2891732e-06,
        ],
        1.0,
        1.0,
    ),
    "llama 3.2": (
        64,
        LLAMA | {"rope_factor": 32.0},
        [
            1,
            0.19392276,
            0.037606031,
            0.0072926651,
            0.00042955671,
            8.5702559e-06,
            1.6619674e-06,
            3.2229329e-07,
        ],
        1.0,
        1.0,
    ),
    "qwen": (
        128,
        YARN | {"rotary_base": 1e6, "rope_factor": 4.0, "rope_original_length": 32768},
        [
            1,
            0.17782794,
            0.031622779,
            0.0053753215,
            0.00060294115,
            4.4456985e-05,
            7.9056936e-06,
            1.4058534e-06,
        ],
        1.13862944,
        1.0,
    ),
    "deepseek v3": (
        64,
        YARN | {"rope_mscale": 1.0, "rope_mscale_all_dim": 1.0},
        [
            1,
            0.31622776,
            0.1,
            0.026879361,
            0.0055000004,
            0.00079056941,
            2.4999999e-05,
            7.9056945e-06,
        ],
        1.0,
        1.87385421,
    ),
    "two weights of the factor": (
        64,
        YARN | {"rope_mscale": 0.707, "rope_mscale_all_dim": 0.5},
        [
            1,
            0.31622776,
            0.1,
            0.026879361,
            0.0055000004,
            0.00079056941,
            2.4999999e-05,
            7.9056945e-06,
        ],
        1.0644689,
        1.40290752,
    ),
    "gpt-oss": (
        64,
        YARN | {"rotary_base": 150000.0, "rope_factor": 32.0, "rope_truncate": False},
        [
            1,
            0.225418,
            0.050813273,
            0.0067949593,
            0.00045648392,
            1.8188337e-05,
            4.0999785e-06,
            9.2420896e-07,
        ],
        1.34657359,
        1.0,
    ),
    "a narrow range, and its own attention factor": (
        16,
        YARN
        | {"rope_factor": 8.0, "rope_original_length": 512, "rope_beta_fast": 4.0}
        | {"rope_beta_slow": 2.0, "rope_attention_factor": 1.25},
        [1, 0.31622776, 0.1, 0.017787812, 0.00125, 0.00039528473, 0.00012500001, 3.9528473e-05],
        1.25,
        1.0,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_scalings(name):
    size, settings, frequencies, attention, score = PUBLISHED[name]
    cfg = ModelConfig(**settings)
    every = size // 16
    np.testing.assert_allclose(Rotary(cfg, size).frequencies()[::every], frequencies, rtol=1e-6)
    np.testing.assert_allclose(attention_factor(cfg), attention, rtol=1e-8)
    np.testing.assert_allclose(score_factor(cfg), score, rtol=1e-8)


def test_the_attention_factor_is_on_rotated_numbers():
    cfg, x = ModelConfig(**YARN, rope_attention_factor=3.0), normal(1, 2, 1, 8)
    size = lambda a: np.linalg.norm(a, axis=-1)
    rotated = Rotary(cfg, 8)(x, np.array([[0, 5]]))
    np.testing.assert_allclose(size(rotated), 3 * size(x), rtol=1e-5)


def test_a_part_of_a_head():
    x, positions = normal(2, 7, 3, 6), np.arange(7)[None]
    got = Rotary(ModelConfig(rotary_base=100.0), 4)(x, positions)
    np.testing.assert_allclose(got[..., :4], turn(x[..., :4], positions, 100.0), 1e-5, 1e-5)
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_by_a_product_as_on_tpus(dtype, tolerance, monkeypatch):
    """Values and gradients of both forms, where a head has dimensions that are not rotated."""
    config = ModelConfig(rotary_base=100.0)
    x, g = (jnp.asarray(normal(2, 7, 3, 10, seed=seed), dtype) for seed in (1, 2))
    positions = np.array([[0, 1, 2, 3, 4, 5, 6], [3, 4, 5, 0, 1, 2, 3]])

    def both(on_tpu: bool):
        monkeypatch.setattr(rotary_module, "orders_by_heads", lambda: on_tpu)
        y, vjp = jax.vjp(lambda x: Rotary(config, 6)(x, positions), x)
        return y, *vjp(g)

    for halves, product in zip(both(False), both(True), strict=True):
        assert product.dtype == dtype
        wide = (a.astype(np.float32) for a in (product, halves))
        np.testing.assert_allclose(*wide, tolerance, tolerance)
