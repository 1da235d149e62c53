"""Products of 8-bit floating-point numbers: matrices and activations are divided by a scale and
rounded, multiplied, and the result is multiplied by both scales.

    scale    the largest |x| of the tensor ÷ the largest number of the format: one float32 scalar a
             tensor, over all devices that have a part of it, so it is the same on every mesh
    formats  e4m3 (3 bits of mantissa, to 448) for weights and activations; e5m2 (2 bits, to 57344)
             or e4m3 for gradients (Micikevicius et al. 2022)

The form of a weight decides about its products. One that is `Quantized` multiplies in FP8, forward
and backward: the layers quantize what it is multiplied with. The runtime quantizes weights once a
step (runtime/runtime.py); a weight that is an array multiplies in its own type.

Numbers of 8 bits have no gradients that 8 bits could hold. So a tensor that is differentiated has a
`carrier`: an array of its shape in the compute type, whose gradient is the tensor's. Nothing reads
a carrier's values, and no compiled program has them.

A tensor of zeros has the scale of SMALLEST. NaN and infinities become NaN: a scale of infinity
makes all of a tensor NaN or 0 · infinity.

On NVIDIA GPUs that have FP8 a product becomes cuBLASLt's, since its operands are FP8 in the
program. On other devices operands are converted to the compute type, which has all numbers of FP8.

Begin with `Quantized` and `operands`. After them come quantization, products and differentiation.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.config import PrecisionConfig
from jaxtrain.config.kernels import QUANTIZED, has_fp8
from jaxtrain.devices.mesh import manual_size
from jaxtrain.parallel import replicas
from jaxtrain.parallel.target_device import target_device

FORMATS = {"e4m3": jnp.dtype(jnp.float8_e4m3fn), "e5m2": jnp.dtype(jnp.float8_e5m2)}
FORWARD = FORMATS["e4m3"]
# in which numbers of FP8 are saved and sent, since not every backend moves FP8 as 8 bits
BITS = jnp.dtype("uint8")
# of a tensor's largest |x|: scales and their products are then normal float32 numbers
SMALLEST = 2.0**-50

# the dimensions of each operand over which a product sums, as for lax.dot_general
ContractedDims = tuple[Sequence[int], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Fp8:
    """The use of FP8 in a step.

    compute:   dtype of products' results
    gradients: FP8 dtype of gradients
    weight_gradients: products that make weights' gradients are of FP8; otherwise of `compute`
    axes:      mesh axes whose devices have different tokens of the same model
    blocks:    blocks of numbers have their own scales (parallel/mxfp8.py)
    """

    compute: jnp.dtype
    gradients: jnp.dtype = FORMATS["e5m2"]
    weight_gradients: bool = True
    axes: tuple[str, ...] = ()
    blocks: bool = False


def fp8_of(precision: PrecisionConfig, independent_replicas: bool) -> Fp8 | None:
    """The use of FP8 in a step; None where products are of the compute type."""
    if precision.matmul not in QUANTIZED:
        return None
    return Fp8(
        jnp.dtype(precision.compute),
        FORMATS[precision.fp8_gradients],
        precision.fp8_weight_gradients == "fp8",
        replicas.sum_axes(independent_replicas),
        precision.matmul == "mxfp8",
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """The tensor `numbers` · `scale`.

    bits:    the numbers of FP8 as BITS
    scale:   float32 scalar; [layers] of a stack of matrices
    carrier: the array whose gradient is the tensor's; None where it is not differentiated
    format:  the numbers' dtype
    """

    bits: Any
    scale: Any
    carrier: Any = None
    format: jnp.dtype = dataclasses.field(metadata={"static": True}, default=FORWARD)
    use: Fp8 = dataclasses.field(metadata={"static": True}, kw_only=True)

    @property
    def numbers(self) -> jax.Array:
        return lax.bitcast_convert_type(self.bits, self.format)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape  # type: ignore[no-any-return]

    @property
    def T(self) -> "Quantized":
        return self.map(lambda a: a.T)

    def __matmul__(self, other: "Quantized") -> jax.Array:
        return dot(self, other, ((self.bits.ndim - 1,), (0,)))

    def reshape(self, *shape: int) -> "Quantized":
        return self.map(lambda a: a.reshape(shape))

    def map(self, fn: Callable) -> "Quantized":
        """The tensor after fn, which moves numbers without changing them."""
        carrier = None if self.carrier is None else fn(self.carrier)
        return dataclasses.replace(self, bits=fn(self.bits), carrier=carrier)

    def without_carrier(self) -> "Quantized":
        return dataclasses.replace(self, carrier=None)

    def with_gradient(self, gradient: jax.Array) -> "Quantized":
        """The gradient of this tensor as custom_vjp takes it: that of the carrier alone."""
        # custom_vjp wants a gradient of the tensor's own structure; integers and scales have none.
        return dataclasses.replace(self, bits=None, scale=None, carrier=gradient)

    def split_by(self, split: P) -> "Quantized":
        """The specification of a tensor without carrier whose numbers are split over `model`."""
        return dataclasses.replace(self, bits=split, scale=P())  # type: ignore[arg-type]

    def operands(self, x, gradient: bool, gather: Callable[[Any], Any]) -> tuple[Any, Any]:
        """`operands` with this weight."""
        if isinstance(x, Quantized):  # it was quantized before it was sent to its expert
            x = gather(x.without_carrier())
            return x, x if self.use.weight_gradients else dequantized(x)
        if self.use.weight_gradients:
            # Both products read FP8, so it is quantized first: the all-gather moves half the bytes.
            x = gather(quantized(x, self.use, gradient))
            return x, x
        x = gather(x)
        return quantized(x, self.use, gradient), x

    def dot(self, other: "Quantized", contracted: ContractedDims) -> jax.Array:
        """The product of the compute type that contracts these dimensions of each."""
        x, y = multiplicable(self, other)
        dims, compute = (contracted, ((), ())), self.use.compute
        return rescaled(lax.dot_general(x, y, dims, preferred_element_type=compute), self, other)


def is_quantized(x: object) -> bool:
    """For `is_leaf`: a Quantized is a leaf of a tree of parameters."""
    return isinstance(x, Quantized)


def mapped(fn: Callable, x):
    """fn of an array, or of the numbers of a quantized tensor."""
    return x.map(fn) if isinstance(x, Quantized) else fn(x)


# --- quantization ---------------------------------------------------------------------------------


def scale_of(x: jax.Array, dtype: jnp.dtype, dims: int, axes: Sequence[str]) -> jax.Array:
    """The scales of tensors of `dims` dimensions stacked in x: float32, the leading dimensions of
    x. axes: mesh axes whose devices have other parts of the same tensors."""
    largest = jnp.abs(x).max(tuple(range(x.ndim - dims, x.ndim))).astype(jnp.float32)
    # Over all devices with a part of the tensor, so that neither its numbers nor losses depend on
    # the mesh.
    if wide := tuple(axis for axis in axes if manual_size(axis) > 1):
        largest = lax.pmax(largest, wide)
    # A quotient would be another number where XLA makes a product of it.
    return jnp.maximum(largest, SMALLEST) * np.float32(1 / float(jnp.finfo(dtype).max))


def _quantized(
    x: jax.Array, dtype: jnp.dtype, dims: int, axes: Sequence[str], use: Fp8
) -> Quantized:
    scale = scale_of(x, dtype, dims, axes)
    # One division for a tensor and a product for each number, where a quotient would be slower.
    factor = (1 / scale).reshape(*scale.shape, *(1,) * dims)
    numbers = (x.astype(jnp.float32) * factor).astype(dtype)
    return Quantized(lax.bitcast_convert_type(numbers, BITS), scale, format=dtype, use=use)


def quantized_weights(x: jax.Array, use: Fp8, dims: int, axes: Sequence[str]) -> Quantized:
    """Weights [..., *matrix of `dims` dimensions], each matrix with its scale. axes: mesh axes that
    split a matrix and that the runtime handles."""
    return _quantized(x, FORWARD, dims, axes, use)


def quantized(x: jax.Array, use: Fp8, gradient: bool = False) -> Quantized:
    """Activations, or their gradients, of a microbatch."""
    return _quantized(x, use.gradients if gradient else FORWARD, x.ndim, use.axes, use)


def differentiable(x: jax.Array, weight):
    """x as it is sent before it is multiplied with `weight`: quantized where the weight is."""
    if not isinstance(weight, Quantized):
        return x
    # Rounding has no useful gradient: the tensor's gradient goes to x as it is, by the carrier.
    return dataclasses.replace(quantized(lax.stop_gradient(x), weight.use), carrier=x)


def dequantized(x: Quantized) -> jax.Array:
    """The tensor in the compute type."""
    return (x.numbers.astype(jnp.float32) * x.scale).astype(x.use.compute)


def operands(
    x, weight, gradient: bool = False, gather: Callable[[Any], Any] = lambda x: x
) -> tuple[Any, Any]:
    """Returns (x as it is multiplied with `weight`, x as the product that makes the weight's
    gradient reads it), both after `gather`: quantized where the weight is, before it is gathered.

    gradient: x is a gradient
    """
    if not isinstance(weight, Quantized):
        x = gather(x)
        return x, x
    return weight.operands(x, gradient, gather)


def gradient_of(x, gradient: jax.Array):
    """The gradient of an array, or of a quantized tensor, as a custom backward returns it."""
    return x.with_gradient(gradient) if isinstance(x, Quantized) else gradient


# --- products -------------------------------------------------------------------------------------


def multiplicable(a: Quantized, b: Quantized) -> tuple[jax.Array, jax.Array]:
    """The tensors' numbers as the device multiplies them: in FP8, or in the compute type."""
    # bfloat16 has all numbers of e4m3 and e5m2, so devices without FP8 multiply the same numbers.
    x, y, compute = a.numbers, b.numbers, a.use.compute
    return (x, y) if has_fp8(target_device()) else (x.astype(compute), y.astype(compute))


def rescaled(product: jax.Array, a: Quantized, b: Quantized) -> jax.Array:
    """The product of two tensors, of the compute type, from that of their numbers."""
    # The scales' product is one scalar, so the result is multiplied once.
    return (product.astype(jnp.float32) * (a.scale * b.scale)).astype(a.use.compute)


def dot(a, b, contracted: ContractedDims) -> jax.Array:
    """The product of two arrays, or of two quantized tensors (of the compute type), that contracts
    these dimensions of each."""
    if not isinstance(a, Quantized):
        return lax.dot_general(a, b, (contracted, ((), ())))
    return a.dot(b, contracted)


def bare(tree):
    """Arrays and quantized tensors, these without carriers."""
    strip = lambda x: x.without_carrier() if isinstance(x, Quantized) else x
    return jax.tree.map(strip, tree, is_leaf=is_quantized)


def split_by(x, split: P) -> Any:
    """The specification of an array, or of a tensor of `bare`, whose numbers are split over
    `model`."""
    return x.split_by(split) if isinstance(x, Quantized) else split


# --- differentiation ------------------------------------------------------------------------------


def trainable(params):
    """The arrays by which a function of `params` is differentiated: the parameters, and zeros in
    the compute type in the place of quantized ones."""
    # The zeros are the carriers. Nothing reads their values, so XLA removes them.
    zeros = lambda w: jnp.zeros(w.shape, w.use.compute) if isinstance(w, Quantized) else w
    return jax.tree.map(zeros, params, is_leaf=is_quantized)


def with_trainable(params, arrays):
    """`params` as a function of `trainable(params)`."""
    put = lambda w, a: dataclasses.replace(w, carrier=a) if isinstance(w, Quantized) else a
    return jax.tree.map(put, params, arrays, is_leaf=is_quantized)


def vjp(fn: Callable, params, *args) -> tuple[Any, Callable]:
    """jax.vjp of fn(params, *args) by the arrays of `trainable(params)` and `args`."""
    run = lambda arrays, *args: fn(with_trainable(params, arrays), *args)
    y, backward = jax.vjp(run, trainable(params), *args)
    return y, backward
