"""Dropout (Srivastava et al. 2014) whose bits are the same on every mesh.

A number is dropped by a hash of what it is: the run's seed, the step, its token (the sequence's
place in the global batch and the token's in the sequence), its layer, its place in the layer and
its index there. So no layout, schedule or remat changes the bits, every op makes them again from
the token's number, and none are saved. `token_noise` has the first three, `layer_noise` adds the
layer.

Shape suffixes: M microbatches, B sequences, T tokens.
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxtrain.parallel.random_bits import combined, mixed


class Place(enum.IntEnum):
    """The places in a model that drop numbers; a place has bits of its own."""

    ATTENTION_OUT = 0
    MLP_OUT = 1
    WEIGHTS = 2
    EMBEDDING = 3


def token_noise(
    seed: int, step: jax.Array | int, shape: tuple[int, int, int], replicas: int = 1
) -> jax.Array:
    """The random numbers of a batch's tokens, uint32 [M, B, T] of this shape. No two tokens of a
    step have the same.

    replicas: those that train separately, each with consecutive sequences of the global batch
    """
    microbatches, sequences, tokens = shape
    # the places that data/loader.py gives to the sequences of a batch
    of_replicas = np.arange(microbatches * sequences).reshape(replicas, microbatches, -1)
    places_MB = of_replicas.swapaxes(0, 1).reshape(microbatches, sequences)
    counter = jnp.asarray(places_MB, jnp.uint32)[..., None] * np.uint32(tokens)
    counter = counter + jax.lax.broadcasted_iota(jnp.uint32, shape, 2)
    return combined(combined(mixed(jnp.uint32(seed)), step), counter)


def layer_noise(extra: tuple, layer: ArrayLike) -> tuple:
    """What a layer reads beside its input (positions, segments and, in training with dropout, the
    noise of its tokens), where the noise is that of a layer by its number in the model."""
    positions_and_segments, noise = extra[:2], extra[2:]
    return *positions_and_segments, *(combined(a, layer) for a in noise)


def keep(noise: jax.Array, index: ArrayLike, rate: float) -> jax.Array:
    """The mask of the numbers that are not dropped: bool, of the shapes of noise and index,
    broadcast."""
    return combined(noise, index) >= np.uint32(rate * 2**32)


def dropped(x: jax.Array, kept: jax.Array, rate: float) -> jax.Array:
    """x where it is kept, divided by the fraction that is kept on average; 0 elsewhere."""
    return jnp.where(kept, x * (1 / (1 - rate)), 0)


def dropout(x_BTD: jax.Array, noise_BT: jax.Array | None, place: Place, rate: float) -> jax.Array:
    """x after dropout in a place of a layer. noise_BT: of the layer; None: nothing is dropped"""
    if noise_BT is None or not rate:
        return x_BTD
    index_D = jnp.arange(x_BTD.shape[-1])
    return dropped(x_BTD, keep(combined(noise_BT, place)[..., None], index_D, rate), rate)


def head_noise(noise_BT: jax.Array, heads: int) -> jax.Array:
    """The noise of attention's weights, by query and head: uint32 [B, T, heads]."""
    return combined(combined(noise_BT, Place.WEIGHTS)[..., None], jnp.arange(heads))
