"""Writing into slots that devices share, and splash over them, against one device. Attention in
plain XLA, with the collectives of a step, is in tests/generation/test_decode.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attended
from support.small import normal

from jaxtrain.devices.mesh import make_mesh
from jaxtrain.devices.sharding import named
from jaxtrain.parallel.attention import kv_cache

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
    run = jax.jit(attended.from_cache, static_argnums=0)
    expected = run("xla", q, k, v)
    k, v = (jnp.asarray(a[:, :slots]).at[:, 256:].set(jnp.nan) for a in (k, v))
    mesh = mesh_of(context, model)
    with jax.set_mesh(mesh):
        axes = ("batch", kv_cache.SLOT, "kv_heads", None)
        k, v = (jax.device_put(a, named(mesh, axes)) for a in (k, v))
        got = run("splash", q, k, v)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


# --- the ring of a window -------------------------------------------------------------------------

RING_AXES = ("batch", kv_cache.RING, None)


@pytest.mark.parametrize("context", [1, 2])
def test_a_ring_has_the_last_tokens(context):
    """Whatever the calls: what a token sees are the tokens of its window, in any order, and padding
    is nowhere."""
    window, mesh = 6, mesh_of(context)
    text = normal(0, BATCH, 40, SIZE)
    with jax.set_mesh(mesh):
        put = lambda a: jax.device_put(a, named(mesh, RING_AXES))
        ring, start = put(np.zeros((BATCH, window, SIZE), np.float32)), 0
        run = jax.jit(
            lambda ring, tokens, start, count: kv_cache.extended(
                (ring,), (tokens,), start, count, window
            )
        )
        one = jax.jit(
            lambda ring, tokens, start: kv_cache.extended((ring,), (tokens,), start, 1, window)
        )
        for count, padding in ((3, 1), (1, 0), (2, 2), (1, 1), (9, 3), (1, 0), (1, 0), (4, 0)):
            tokens = np.full((BATCH, count + padding, SIZE), np.nan, np.float32)
            tokens[:, :count] = text[:, start : start + count]
            if count == 1:
                extended = one(ring, tokens, start)
            else:
                extended = run(ring, tokens, jnp.int32(start), jnp.int32(count))
            for i in range(count):
                seen = np.asarray(extended.seen[0])[:, np.asarray(extended.mask)[0, 0, i]]
                expected = text[:, max(0, start + i - window + 1) : start + i + 1]
                order = lambda a: a[:, np.argsort(a[0, :, 0])]
                np.testing.assert_array_equal(order(seen), order(expected))
            (ring,) = extended.cache
            ring, start = put(ring), start + count
            in_slot = {p % window: p for p in range(max(0, start - window), start)}
            for slot, position in in_slot.items():
                np.testing.assert_array_equal(np.asarray(ring)[:, slot], text[:, position])
