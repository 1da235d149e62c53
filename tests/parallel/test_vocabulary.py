"""The embedding table split by rows: lookup and gradient equal the whole table's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.mesh import make_mesh
from jaxtrain.parallel.vocabulary import add_lookup_gradient, lookup


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("model", [1, 2, 4])
def test_lookup_and_gradient(model, dtype):
    random = np.random.default_rng(model)
    table = jnp.asarray(random.normal(size=(12, 8)), dtype)
    tokens = jnp.asarray(random.integers(0, 12, (3, 8)), jnp.int32)
    gradient = jnp.asarray(random.normal(size=(3, 8, 8)), dtype)
    sums = jnp.asarray(random.normal(size=(12, 8)), jnp.float32)
    with jax.set_mesh(make_mesh((1, 1, 1, 1, 1, model), jax.devices()[:model])):
        rows = jax.jit(lookup)(*jax.device_get((table, tokens)))
        added = jax.jit(add_lookup_gradient)(*jax.device_get((sums, tokens, gradient)))
    np.testing.assert_array_equal(np.asarray(rows, np.float32), np.asarray(table[tokens], np.float32))
    wanted = np.array(sums)
    np.add.at(wanted, np.asarray(tokens), np.asarray(gradient, np.float32))
    np.testing.assert_allclose(added, wanted, rtol=1e-6, atol=1e-6)


def test_no_device_gathers_the_table():
    with jax.set_mesh(make_mesh((1, 1, 1, 1, 1, 8))) as _:
        from jaxtrain.sharding import named

        mesh = jax.sharding.get_mesh()
        table = jax.ShapeDtypeStruct((4096, 8), jnp.float32, sharding=named(mesh, ("vocab", "width")))
        tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
        text = jax.jit(lookup).lower(table, tokens).compile().as_text()
    assert "f32[512,8]" in text and "f32[4096,8]" not in text
