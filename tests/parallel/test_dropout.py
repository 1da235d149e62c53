"""Dropout: its random numbers, and attention with dropped weights by blocks, by halves and at
once. Whole steps on meshes are in tests/training/test_dropout.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import attended, small

from jaxtrain.devices.mesh import make_mesh, manual_axes
from jaxtrain.devices.sharding import BATCH_SPEC, constrain
from jaxtrain.parallel.attention import blockwise, context, flash
from jaxtrain.parallel.attention.causal import attend_at_once
from jaxtrain.parallel.attention.flash import CAUSAL, Inputs
from jaxtrain.parallel.dropout import (
    AFTER_ATTENTION,
    AFTER_MLP,
    dropout,
    dropped,
    layer_noise,
    token_noise,
)
from jaxtrain.parallel.random_bits import combined

RATE = 0.25
SHAPE = (2, 8, 64)  # microbatches, sequences, tokens
WIDTH = 64


def kept(step=3, layer=0, place=AFTER_ATTENTION, shape=SHAPE, seed=1, rate=RATE) -> np.ndarray:
    """The mask of a place in a layer, for all of a batch: bool [sequences, T, WIDTH]."""
    (noise,) = layer_noise((None, None, token_noise(seed, step, shape)), layer)[2:]
    ones = jnp.ones((*shape[:2], shape[2], WIDTH))
    by_sequence = jax.jit(jax.vmap(lambda x, noise: dropout(x, place, rate, noise)))(ones, noise)
    return np.asarray(by_sequence).reshape(-1, shape[2], WIDTH) > 0


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1])


def test_fractions_and_the_mean():
    """With n numbers a fraction is within 5 deviations of √(p (1 − p) / n), a correlation within
    5/√n of 0: once in a million seeds it is not."""
    mask = kept()
    n = mask.size
    assert abs(mask.mean() - (1 - RATE)) < 5 * (RATE * (1 - RATE) / n) ** 0.5
    # of each sequence, token and number too: none is always dropped, or never
    for axes in ((1, 2), (0, 2), (0, 1)):
        means = mask.mean(axes)
        limit = 5 * (RATE * (1 - RATE) * means.size / n) ** 0.5
        assert np.abs(means - (1 - RATE)).max() < limit
    x = jnp.ones((1, 4096, WIDTH))
    noise = token_noise(0, 0, (1, 1, 4096))[0]
    y = np.asarray(dropout(x, AFTER_MLP, RATE, noise))
    assert {*np.unique(y)} == {0.0, np.float32(1 / (1 - RATE))}
    assert abs(y.mean() - 1) < 5 * (RATE / (1 - RATE) / y.size) ** 0.5


def test_other_seeds_steps_layers_places_sequences_and_tokens_are_independent():
    mask = kept()
    limit = 5 / mask.size**0.5
    others = {
        "seed": kept(seed=2),
        "step": kept(step=4),
        "layer": kept(layer=1),
        "place": kept(place=AFTER_MLP),
        "swapped": kept(step=0, layer=3),  # not a sum of numbers
        "sequence": np.roll(mask, 1, 0),
        "token": np.roll(mask, 1, 1),
        "number": np.roll(mask, 1, 2),
        "token and number": np.roll(mask, (1, 1), (1, 2)),
    }
    for name, other in others.items():
        assert abs(correlation(mask, other)) < limit, name


def test_the_place_in_the_batch_decides_and_not_the_microbatch():
    np.testing.assert_array_equal(kept(), kept(shape=(16, 1, 64)))
    first = kept(shape=(2, 4, 64))
    np.testing.assert_array_equal(kept()[:8], first)
    # independent replicas have consecutive sequences, each in microbatches of its own
    whole = np.asarray(token_noise(1, 3, SHAPE)).reshape(2, 2, 4, 64)
    apart = np.asarray(token_noise(1, 3, SHAPE, replicas=2)).reshape(2, 2, 4, 64)
    np.testing.assert_array_equal(apart, whole.swapaxes(0, 1))


def test_the_same_bits_on_a_mesh():
    """Sequences split over `data`, their tokens over `context` and `model`, as in the runtime."""
    mesh = make_mesh((1, 2, 1, 2, 1, 2), jax.devices()[:8])

    def masks(noise):
        x = constrain(jnp.ones((*noise.shape[1:], WIDTH)), ("batch", "sequence", None))
        of_microbatch = lambda noise: dropout(x, AFTER_ATTENTION, RATE, combined(noise, 0)) > 0
        return jax.lax.map(of_microbatch, noise)

    split = P(*BATCH_SPEC, None)
    on_devices = jax.shard_map(
        masks,
        mesh=mesh,
        in_specs=BATCH_SPEC,
        out_specs=split,
        axis_names=manual_axes(mesh),
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        got = jax.jit(lambda step: on_devices(context.zigzag(token_noise(1, step, SHAPE), 2)))(3)
    of_tokens = np.moveaxis(kept().reshape(*SHAPE, WIDTH), 2, 3)
    wanted = np.moveaxis(np.asarray(context.zigzag(of_tokens, 2)), 3, 2)
    np.testing.assert_array_equal(got, wanted)


def test_nothing_is_dropped_without_noise_or_a_rate():
    x = jnp.ones((1, 4, 8))
    assert dropout(x, AFTER_MLP, RATE) is x
    assert dropout(x, AFTER_MLP, 0.0, token_noise(0, 0, (1, 1, 4))[0]) is x


# --- attention ------------------------------------------------------------------------------------


def of_weights(batch: int, tokens: int, heads: int) -> jax.Array:
    return token_noise(0, 0, (1, batch, tokens * heads))[0].reshape(batch, tokens, heads)


def plain(q, k, v, noise_BTN, segments=None):
    """Attention by its formula, with the mask from `dropout` of a query's weights by distance."""
    t, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, groups, 2) for a in (k, v))
    scores = jnp.einsum("btnh,bsnh->btns", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones((t, t), bool))[None, :, None]
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None])[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
    # number d of a query's mask is for the key d tokens before it
    ones = jnp.ones((*noise_BTN.shape, t))
    by_distance = dropped(ones, noise_BTN[..., None], jnp.arange(t), RATE)
    distance = jnp.clip(jnp.arange(t)[:, None] - jnp.arange(t), 0)[None, :, None]
    mask = jnp.take_along_axis(by_distance, jnp.broadcast_to(distance, weights.shape), -1)
    return jnp.einsum("btns,bsnh->btnh", weights * mask, v)


@pytest.mark.parametrize("documents", small.named([True], [False]))
def test_attention_with_dropped_weights(documents, monkeypatch):
    monkeypatch.setattr(blockwise, "SCORES", 1)  # blocks of the least size, two of them
    q, k, v, g = attended.arrays(tokens=2 * blockwise.LEAST_BLOCK)
    noise_BTN = of_weights(*q.shape[:3])
    segments = attended.segments(*q.shape[:2]) if documents else None
    pair = None if segments is None else (segments, segments)
    mask = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))[None, None]
    if segments is not None:
        mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
    run = lambda way: jax.jit(lambda *a: attended.with_gradients(way, *a))(q, k, v, g)
    wanted = run(lambda *a: plain(*a, noise_BTN, segments))
    scores = flash.Scores(dropout=RATE)
    inputs = lambda *a: Inputs(*a, CAUSAL, pair, noise_BTN, scores)
    ways = {
        "at once": lambda *a: attend_at_once(inputs(*a), mask, True),
        "by blocks": lambda *a: flash.attend(blockwise.KERNEL, inputs(*a)),
    }
    for name, way in ways.items():
        for got, right in zip(run(way), wanted, strict=True):
            np.testing.assert_allclose(got, right, atol=2e-5, err_msg=name)
