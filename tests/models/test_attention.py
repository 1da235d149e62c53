"""Attention and rotary positions against plain numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.attention import attend, choose_implementation
from jaxtrain.models.layers import rotary


def plain(q, k, v, allowed):
    """Query by query, head by head. allowed: bool [B, T, S]."""
    b, t, n, h = q.shape
    out = np.zeros(q.shape)
    for i in range(b):
        for j in range(n):
            head = j // (n // k.shape[2])
            for row in range(t):
                scores = k[i, :, head] @ q[i, row, j] / np.sqrt(h)
                scores = np.where(allowed[i, row], scores, -np.inf)
                weights = np.exp(scores - scores.max())
                out[i, row, j] = weights / weights.sum() @ v[i, :, head]
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("segments", [False, True])
def test_attention(kv_heads, segments):
    random = np.random.default_rng(kv_heads)
    q, k, v = (random.normal(size=(2, 6, n, 4)) for n in (4, kv_heads, kv_heads))
    allowed = np.broadcast_to(np.tril(np.ones((6, 6), bool)), (2, 6, 6))
    mask = None
    if segments:
        ids = np.array([[1, 1, 2, 2, 2, 3], [1, 1, 1, 1, 2, 2]])
        allowed = allowed & (ids[:, :, None] == ids[:, None, :])
        mask = jnp.asarray(allowed[:, None])
    for implementation in ("auto", "xla"):
        ours = attend(*(jnp.asarray(a, jnp.float32) for a in (q, k, v)), mask, implementation)
        np.testing.assert_allclose(ours, plain(q, k, v, allowed), rtol=1e-5, atol=1e-5)


def test_implementation_by_platform():
    assert choose_implementation("auto", jnp.bfloat16, 128, "gpu") == "cudnn"
    assert choose_implementation("auto", jnp.float32, 128, "gpu") == "xla"
    assert choose_implementation("auto", jnp.bfloat16, 256, "gpu") == "xla"
    assert choose_implementation("auto", jnp.bfloat16, 128, "cpu") == "xla"
    assert choose_implementation("cudnn", jnp.float32, 128, "cpu") == "cudnn"


def test_rotary_turns_pairs_by_position():
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 5, 2, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 0, 1]])
    out = np.asarray(rotary(jnp.asarray(x), jnp.asarray(positions), 100.0))
    for i, position in enumerate(positions[0]):
        for j in range(4):
            angle = position * 100.0 ** (-j / 4)
            turned = (x[0, i, :, j] + 1j * x[0, i, :, j + 4]) * np.exp(1j * angle)
            np.testing.assert_allclose(out[0, i, :, j], turned.real, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(out[0, i, :, j + 4], turned.imag, rtol=1e-5, atol=1e-5)
