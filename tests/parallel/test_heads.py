"""A kernel over heads sees its own device's heads alone, and the result is the whole's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.mesh import make_mesh
from jaxtrain.models.attention import grouped_attention
from jaxtrain.parallel.heads import over_heads


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("model", [1, 2, 4])
def test_over_heads(model, masked):
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(2, 8, n, 4)).astype(np.float32) for n in (8, 4, 4))
    mask = (np.tril(np.ones((8, 8), bool)) & (random.random((2, 1, 8, 8)) < 0.7)) | np.eye(8, dtype=bool) if masked else None
    seen = []

    def kernel(q, k, v, mask):
        seen.append((q.shape[2], k.shape[2]))
        return grouped_attention(q, k, v, mask)

    wanted, gradient = jax.value_and_grad(lambda q: jnp.sum(jnp.sin(grouped_attention(q, k, v, mask))))(q)
    with jax.set_mesh(make_mesh((1, 1, 1, 1, 1, model), jax.devices()[:model])):
        run = jax.jit(jax.value_and_grad(lambda q, k, v: jnp.sum(jnp.sin(over_heads(kernel, q, k, v, mask)))))
        value, ours = run(q, k, v)
    assert set(seen) == {(8 // model, 4 // model)}
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(ours, gradient, rtol=1e-4, atol=1e-6)


def test_over_heads_without_a_mesh_is_the_kernel():
    x = jnp.ones((1, 2, 2, 4))
    assert over_heads(lambda q, k, v, m: q, x, x, x, None) is x
