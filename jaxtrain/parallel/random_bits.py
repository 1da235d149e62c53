"""Random bits that are a function of what they are for, and so the same on every mesh: a hash of
numbers such as a seed, a step and an index. It is elementwise work on integers, which XLA fuses
with what reads the bits, and splits as that is."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

# The fraction of the golden ratio: consecutive numbers, times this, are far apart in 32 bits.
GOLDEN = 0x9E3779B9


def mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which each bit of the argument changes about half of the result's
    (lowbias32 of Wellons, https://nullprogram.com/blog/2018/07/31)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def combined(number: jax.Array, index: ArrayLike) -> jax.Array:
    """A random uint32 for each pair of a uint32 `number` and a non-negative `index`, which are
    broadcast. For one index no two numbers give the same, and for one number no two indices."""
    # `mixed` of 0 is 0, so indices do not begin with 0.
    return mixed(number ^ mixed(jnp.asarray(index).astype(jnp.uint32) + jnp.uint32(GOLDEN)))
