"""Dropout (Srivastava et al. 2014) whose bits are the same on every mesh.

A number is dropped by a hash of what it is: the run's seed, the step, its token (the sequence's
place in the global batch and the token's in the sequence), its layer, its place in the layer and
its index there. So no layout, schedule or remat changes the bits, every op makes them again from
the token's number, and none are saved. `token_noise` has the first three, `layer_noise` adds the
layer.

Shape suffixes: M microbatches, B sequences, T tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxtrain.devices.sharding import constrain
from jaxtrain.parallel.random_bits import combined, mixed

# the places in a model that drop numbers, each with bits of its own
AFTER_ATTENTION, AFTER_MLP, WEIGHTS, EMBEDDINGS = range(4)


def token_noise(
    seed: int, step: ArrayLike, shape: tuple[int, int, int], replicas: int = 1
) -> jax.Array:
    """The random numbers of the tokens of a step's batch, uint32 [M, B, T] of this shape. No two
    tokens have the same.

    replicas: those that train separately, each with consecutive sequences of the global batch
    """
    microbatches, sequences, tokens = shape
    # the places that data/loader.py gives to the sequences of a batch
    of_replicas = np.arange(microbatches * sequences).reshape(replicas, microbatches, -1)
    first_tokens = of_replicas.swapaxes(0, 1).reshape(microbatches, sequences, 1) * tokens
    of_tokens = first_tokens.astype(np.uint32) + jnp.arange(tokens, dtype=jnp.uint32)
    return combined(combined(mixed(jnp.uint32(seed)), step), of_tokens)


def layer_noise(extra: tuple, layer: ArrayLike) -> tuple:
    """The arguments of a layer after its input.

    extra: (positions, segments), in training with dropout also the tokens' noise, which is made
        that of the layer
    layer: its number in the model
    """
    return *extra[:2], *(combined(noise, layer) for noise in extra[2:])


def dropped(x: jax.Array, noise: jax.Array, index: ArrayLike, rate: float) -> jax.Array:
    """x divided by 1 − rate, with 0 in the place of a fraction `rate` of its numbers. Whether a
    number is dropped depends on its noise and index, which are broadcast to x."""
    remains = combined(noise, index) >= np.uint32(rate * 2**32)
    return jnp.where(remains, x * (1 / (1 - rate)), 0)


def dropout(x_BTD: jax.Array, place: int, rate: float, noise_BT: jax.Array | None = None):
    """x after dropout in a place of a layer. noise_BT: of the layer; None: nothing is dropped"""
    if noise_BT is None or not rate:
        return x_BTD
    # x is split along the sequence. Without the constraint the partitioner splits the noise for it,
    # too, and gathers it for attention, which is split by heads.
    noise_BT = constrain(noise_BT, ("batch", "token"))
    noise_BT1 = combined(noise_BT, place)[..., None]
    return dropped(x_BTD, noise_BT1, jnp.arange(x_BTD.shape[-1]), rate)
