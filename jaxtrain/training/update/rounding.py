"""Stochastic rounding to 16 bits: up or down at random, with the probabilities that make the
rounded number's mean the number itself.

    bfloat16   sign  exponent  7 digits  ┊                      float32's other 16 digits,
    float32    sign  exponent  7 digits  ┊  16 further digits   plus 16 random bits: a carry
                                                                rounds up

The nearest bfloat16 has an error of up to 2⁻⁹ of the number, and an update is often smaller: the
parameter would never move (Gupta et al. 2015, arXiv:1502.02551; Zamirai et al. 2020,
arXiv:2010.06192). The same holds for a moment's decay.

The random bits are a function of seed, parameter and layer (the key), of the number of updates, and
of the position in the layer's parameter. So they are the same on every mesh, in every stack of
layers and after a resume, and padding does not change them.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.parallel.random_bits import GOLDEN, mixed


def rounded(
    x: jax.Array, dtype: jnp.dtype, key: jax.Array | None, count: jax.Array, use: int
) -> jax.Array:
    """x as `dtype`: an array that has this type already unchanged, float32 as bfloat16 at random.
    NaN and infinity stay what they are.

    key: uint32 [..., 2] with the leading dimensions of x, whose other dimensions are a layer's
    count: int32 scalar, the updates before this one; use: tells apart the arrays that are rounded
        with one key
    """
    if x.dtype == dtype:
        return x
    assert key is not None, f"no random key to round to {dtype}"
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # A number with the fraction f between two bfloat16s is carried to the upper one with the
    # probability f. The sign is a bit of its own, so for negative numbers "up" is away from zero.
    carried = bits + (random_bits(key, count, use, x.shape) >> 16)
    # the digits that bfloat16 lacks are cut off: the cast is exact
    up_or_down = lax.bitcast_convert_type(carried & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), up_or_down, x).astype(dtype)


def random_bits(key: jax.Array, count: jax.Array, use: int, shape: tuple[int, ...]) -> jax.Array:
    """Uniform uint32 of this shape; arguments as of `rounded`. A number depends on its index in the
    dimensions after the key's, not on their sizes."""
    lead = key.ndim - 1
    hashed = mixed(key[..., 0] + mixed(count.astype(jnp.uint32) + jnp.uint32(GOLDEN)))
    hashed = mixed(hashed ^ mixed(key[..., 1] + jnp.uint32(use)))
    # One dimension after the other: a hash of an index over all dimensions would depend on their
    # sizes, and padding would change the random bits.
    for dim in range(lead, len(shape)):
        place = lax.broadcasted_iota(jnp.uint32, shape[: dim + 1], dim) * jnp.uint32(GOLDEN)
        hashed = mixed(hashed[..., None] + place)
    return hashed
