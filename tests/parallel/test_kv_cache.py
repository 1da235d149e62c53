"""Writing into slots that devices share, and splash over them, against one device. Attention in
plain XLA, with the collectives of a step, is in tests/generation/test_decode.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small import normal

from jaxtrain.devices.mesh import make_mesh
from jaxtrain.devices.sharding import named
from jaxtrain.parallel.attention import kv_cache
from jaxtrain.parallel.attention.causal import attend_cached

LAYERS, BATCH, SLOTS, SIZE = 3, 2, 12, 5
AXES = ("layer", "batch", kv_cache.SLOT, None)


def mesh_of(context: int, model: int = 1) -> jax.sharding.Mesh:
    return make_mesh((1, 1, 1, context, 1, model), jax.devices()[: context * model])


@pytest.mark.parametrize("count", [1, 3, 7])  # of tokens; a device has 4 slots
def test_tokens_anywhere(count):
    """Also over the border of two devices, and of three."""
    mesh, cache, tokens = (
        mesh_of(3),
        normal(0, LAYERS, BATCH, SLOTS, SIZE),
        normal(1, BATCH, count, SIZE),
    )

    @jax.jit
    def written(cache, tokens, start):
        layer = kv_cache.write(cache[1], tokens, start)
        return layer, kv_cache.put_back(cache, layer, jnp.int32(1), start, count)

    with jax.set_mesh(mesh):
        split = jax.device_put(cache, named(mesh, AXES))
        for start in range(SLOTS - count + 1):
            expected = cache.copy()
            expected[1, :, start : start + count] = tokens
            layer, whole = written(split, tokens, jnp.int32(start))
            np.testing.assert_array_equal(layer, expected[1])
            np.testing.assert_array_equal(whole, expected)
            assert whole.sharding.is_equivalent_to(named(mesh, AXES), whole.ndim)


@pytest.mark.full
@pytest.mark.parametrize(("context", "model"), [(2, 1), (3, 2)])
def test_a_prompt_read_by_splash(context, model):
    """Interpreted. Tokens 128 to 256, of which the last device's slots have none; what lies beyond
    is never looked at."""
    slots = 128 * context
    q, k, v = normal(0, 1, 128, 4, 8), normal(1, 1, 384, 2, 8), normal(2, 1, 384, 2, 8)
    expected = jax.jit(lambda *a: attend_cached(*a, jnp.int32(128), "xla"))(q, k, v)
    k, v = (jnp.asarray(a[:, :slots]).at[:, 256:].set(jnp.nan) for a in (k, v))
    mesh = mesh_of(context, model)
    with jax.set_mesh(mesh):
        axes = ("batch", kv_cache.SLOT, "kv_heads", None)
        k, v = (jax.device_put(a, named(mesh, axes)) for a in (k, v))
        got = jax.jit(lambda *a: attend_cached(*a, jnp.int32(128), "splash"))(q, k, v)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
