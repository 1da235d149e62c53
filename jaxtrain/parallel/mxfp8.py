"""Products of 8-bit floating-point numbers in blocks: 32 consecutive numbers along the dimension
that a product contracts share a scale, which is a power of two (MXFP8 of the OCP Microscaling
Formats Specification 1.0: numbers of e4m3 or e5m2, scales of e8m0).

    scale    the smallest power of two with which the block's largest |x| ÷ scale is a number of the
             format. It is rounded up, so no number of the block is cut off (Mishra et al. 2025,
             section 3.1); the specification's own example rounds down and cuts off

F contracts a layer's inputs, B its outputs and W its tokens, so every operand is rounded twice, in
blocks along each of the two dimensions by which products contract it:

    weight     along inputs for F, along outputs for B; once a step
    input      along inputs for F, along tokens for W
    gradient   along outputs for B, along tokens for W

Over `model` an input is gathered by F in the one form and by W in the other. B gathers a gradient
that both it and W read, so that is rounded after: two copies have more bytes than one of 16 bits.

On NVIDIA GPUs that multiply blocks (Blackwell) a product is `jax.nn.scaled_matmul`. On other
devices operands are converted to the compute type, which has all numbers of 8 bits times powers of
two.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.config.kernels import multiplies_blocks
from jaxtrain.config.sizes import MX_BLOCK
from jaxtrain.parallel.fp8 import BITS, FORWARD, ContractedDims, Fp8, Quantized
from jaxtrain.parallel.target_device import target_device

SCALES = jnp.dtype(jnp.float8_e8m0fnu)
LAST, TOKENS = -1, -2  # dimensions of activations [batch, tokens, columns]
MANTISSA = 23  # bits of float32's mantissa
LARGEST = 254  # exponent, biased by 127, of float32's largest power of two


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks(Quantized):
    """A tensor in blocks along a dimension.

    scale:  biased exponents of the scales (e8m0) as BITS, in the shape of `bits` but for `dim`,
            which is 32 times shorter
    dim:    the dimension, counted from the end
    across: a weight's copy in blocks along its other dimension; None of an operand
    """

    across: "Blocks | None" = None
    dim: int = dataclasses.field(metadata={"static": True}, default=LAST)

    @property
    def T(self) -> "Blocks":
        """A weight [inputs, outputs] as B multiplies it, [outputs, inputs]."""
        assert self.across is not None
        transposed = lambda a: a.T
        # The copy with blocks along the outputs, which B contracts; a transpose of the other copy
        # would have its blocks along the wrong dimension.
        moved = self.across.map(transposed)
        return dataclasses.replace(moved, dim=LAST + TOKENS - moved.dim)

    def reshape(self, *shape: int) -> "Blocks":
        raise TypeError("blocks keep their dimensions")

    def map(self, fn: Callable) -> "Blocks":
        carrier = None if self.carrier is None else fn(self.carrier)
        across = None if self.across is None else self.across.map(fn)
        bits, scale = fn(self.bits), fn(self.scale)
        return dataclasses.replace(self, bits=bits, scale=scale, carrier=carrier, across=across)

    def with_gradient(self, gradient: jax.Array) -> "Blocks":
        return dataclasses.replace(self, bits=None, scale=None, carrier=gradient, across=None)

    def split_by(self, split: P) -> "Blocks":
        across = None if self.across is None else self.across.split_by(split)
        return dataclasses.replace(self, bits=split, scale=split, across=across)

    def operands(self, x, gradient: bool, gather: Callable[[Any], Any]) -> tuple[Any, Any]:
        # Blocks lie along the columns for this product, and along the tokens for the weights'
        # gradient, which contracts these.
        dtype = self.use.gradients if gradient else FORWARD
        rounded = lambda x, dim: in_blocks(x, dtype, dim, self.use)
        if not self.use.weight_gradients:
            x = gather(x)
            return rounded(x, LAST), x
        if gradient:  # B and W both read it: one copy of 16 bits moves, and is rounded twice after
            x = gather(x)
            return rounded(x, LAST), rounded(x, TOKENS)
        # F and W are different ops, and each gathers the one copy of 8 bits that it reads.
        return gather(rounded(x, LAST)), gather(rounded(x, TOKENS))

    def dot(self, other: Quantized, contracted: ContractedDims) -> jax.Array:
        """The product of two matrices of the compute type, which contracts one dimension of each:
        that along which their blocks lie."""
        assert isinstance(other, Blocks)
        (dim,), (other_dim,) = contracted
        a, b = self._along(dim), other._along(other_dim)
        if multiplies_blocks(target_device()):
            return scaled_matmul(a, b)
        left, right = a.in_compute_type(), b.in_compute_type()
        dims = (contracted, ((), ()))
        return lax.dot_general(left, right, dims, preferred_element_type=self.use.compute)

    def _along(self, dim: int) -> "Blocks":
        """The copy of a matrix whose blocks lie along a dimension, counted from the beginning."""
        wanted = dim - 2
        blocks = self if self.dim == wanted or self.across is None else self.across
        assert blocks.dim == wanted, (blocks.dim, dim)
        return blocks

    def in_compute_type(self) -> jax.Array:
        """The tensor; exact, since scales are powers of two."""
        scale = repeated(power_of_two(self.scale), self.scale.ndim + self.dim)
        return (self.numbers.astype(jnp.float32) * scale).astype(self.use.compute)


def scaled_matmul(a: Blocks, b: Blocks) -> jax.Array:
    """The product of two matrices, each in blocks along the dimension that it contracts, by the
    device's own products of blocks."""
    x, y = (rows(x.numbers, x.dim) for x in (a, b))
    of_x, of_y = (rows(lax.bitcast_convert_type(x.scale, SCALES), x.dim) for x in (a, b))
    return jax.nn.scaled_matmul(x, y, of_x, of_y, preferred_element_type=a.use.compute)[0]


def rows(a: jax.Array, dim: int) -> jax.Array:
    """A matrix as `scaled_matmul` takes it, [1, rows, contracted dimension]."""
    return (a if dim == LAST else a.T)[None]


def repeated(a: jax.Array, axis: int) -> jax.Array:
    """Each element for the numbers of its block."""
    shape = (*a.shape[: axis + 1], MX_BLOCK, *a.shape[axis + 1 :])
    dims = [d for d in range(len(shape)) if d != axis + 1]
    wide = lax.broadcast_in_dim(a, shape, dims)
    return wide.reshape(*a.shape[:axis], -1, *a.shape[axis + 1 :])


def power_of_two(biased: jax.Array) -> jax.Array:
    """float32 2 ** (biased − 127), of exponents 1 to 254; 0 of 0."""
    return lax.bitcast_convert_type(biased.astype(jnp.uint32) << MANTISSA, jnp.float32)


def exponents_of(largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The biased exponents (uint32) of the scales of blocks whose largest |x| this is."""
    quotient = largest.astype(jnp.float32) * np.float32(1 / float(jnp.finfo(dtype).max))
    # A float32's bits are exponent, then mantissa. Adding the largest mantissa carries into the
    # exponent unless the mantissa is 0: the quotient is rounded up to a power of two.
    bits = lax.bitcast_convert_type(quotient, jnp.uint32)
    return jnp.clip((bits + ((1 << MANTISSA) - 1)) >> MANTISSA, 1, LARGEST)


def in_blocks(x: jax.Array, dtype: jnp.dtype, dim: int, use: Fp8) -> Blocks:
    """x rounded, in blocks along `dim` (counted from the end)."""
    axis = x.ndim + dim
    shape = (*x.shape[:axis], x.shape[axis] // MX_BLOCK, MX_BLOCK, *x.shape[axis + 1 :])
    exponents = exponents_of(jnp.abs(x).reshape(shape).max(axis + 1), dtype)
    # A scale with the biased exponent E is 2^(E − 127). Its inverse has the biased exponent 254 −
    # E, so the division is a product, and exact.
    factor = repeated(power_of_two(LARGEST - exponents), axis)
    bits = lax.bitcast_convert_type((x.astype(jnp.float32) * factor).astype(dtype), BITS)
    return Blocks(bits, exponents.astype(BITS), format=dtype, use=use, dim=dim)


def blocked_weights(x: jax.Array, use: Fp8) -> Blocks:
    """Weights [..., inputs, outputs] in both forms."""
    across = in_blocks(x, FORWARD, LAST, use)
    return dataclasses.replace(in_blocks(x, FORWARD, TOKENS, use), across=across)
