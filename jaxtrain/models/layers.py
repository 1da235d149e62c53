"""Norms, dense products and the MLP.

Shape suffixes: B batch, T tokens of a sequence, D width, F MLP columns.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config import ResolvedModel
from jaxtrain.config.saved_values import MLP_HIDDEN, MLP_IN
from jaxtrain.devices.mesh import on_cpu
from jaxtrain.devices.sharding import constrain, is_split, reshard
from jaxtrain.models.spec import Spec, parameter
from jaxtrain.parallel import fp8
from jaxtrain.parallel.collective_matmul import Arrived
from jaxtrain.parallel.fp8 import Quantized, gradient_of, mapped, operands
from jaxtrain.parallel.mxfp8 import Blocks
from jaxtrain.parallel.tensor import (
    contracted,
    flat,
    gather_tokens,
    gathered_products,
    products_of_parts,
    scattered_products,
)

SPLIT = ("batch", "sequence", None)  # activations between blocks
GATHERED = ("batch", "token", None)  # activations inside a block


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) over the last dimension,
    computed in float32. Its factor is `scale`, or with `one_plus` 1 + `scale`, as in Gemma.

    multiplier: μP's factor on its result (models/mup.py)
    """

    def __init__(self, cfg: ResolvedModel, size=0, axis="width", epsilon=0.0, multiplier=1.0):
        self.kind, self.epsilon = cfg.norm, epsilon or cfg.norm_epsilon
        self.one_plus = cfg.norm_weight == "one_plus"
        with_bias = "norm" in cfg.biases
        vector = lambda value: parameter(
            Spec(
                (size or cfg.width,),
                (axis,),
                constant=value,
                mup_rate=multiplier,
                mup_size=multiplier,
            )
        )
        self.scale = vector(multiplier - 1.0 if self.one_plus else multiplier)
        self.bias = vector(0.0) if with_bias else None

    def __call__(self, x: jax.Array, change=lambda scale: scale) -> jax.Array:
        """x [..., D] → the same shape and dtype. change(a): what is used in place of scale or bias
        `a`."""
        y = x.astype(jnp.float32)
        if self.kind == "layernorm":
            y = y - y.mean(-1, keepdims=True)
        scale = change(self.scale[...])
        factor = 1.0 + scale if self.one_plus else scale
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.epsilon) * factor
        return (y if self.bias is None else y + change(self.bias[...])).astype(x.dtype)


def contract_rows(a_TM, b_TN, precision=None, split: int = 1) -> jax.Array:
    """aᵀ b, [M, N]: the form of every weight's gradient; of arrays or quantized tensors. These may
    have several dimensions in the place of T. split: the dimension of the result that `model`
    splits, for tensors in blocks.

    On CPU the transpose is written out, behind a barrier that keeps XLA from folding it into the
    product again: its backend multiplies a transposed left side 1.1 to 1.5 times more slowly than
    it transposes and multiplies (docs/log.md).
    """
    if isinstance(a_TM, Blocks):
        return products_of_parts(a_TM, b_TN, ((0,), (0,)), split)
    if isinstance(a_TM, Quantized) or len(a_TM.shape) > 2:
        tokens = tuple(range(len(a_TM.shape) - 1))
        return fp8.dot(a_TM, b_TN, (tokens, tokens))
    if not on_cpu():
        return jax.lax.dot_general(a_TM, b_TN, (((0,), (0,)), ((), ())), precision=precision)
    return jax.lax.optimization_barrier(a_TM.T) @ b_TN


def matrix(weight: nnx.Param, x):
    """A parameter in the type of x, or quantized."""
    value = weight.get_value()
    return value if isinstance(value, Quantized) else value.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x_TI: jax.Array, weight_IO, precision: jax.lax.Precision | None = None) -> jax.Array:
    """x @ weight; its backward makes the weight's gradient by `contract_rows`. The precision is
    that of all three products, if they are not of FP8."""
    return _matmul(x_TI, weight_IO, precision)[0]


def _times(a, b, precision) -> jax.Array:
    return a @ b if isinstance(a, Quantized) else jnp.matmul(a, b, precision=precision)


def _matmul(x, w, precision):
    x, saved = operands(x, w)
    return _times(x, w, precision), (saved, w)


def _matmul_backward(precision, saved, g):
    x, w = saved
    g, g_for_weight = operands(g, w, gradient=True)
    by_weight = contract_rows(x, g_for_weight, precision)
    return _times(g, w.T, precision), gradient_of(w, by_weight)


matmul.defvjp(_matmul, _matmul_backward)


def contract_tokens(a_BTM, b_BTN, split: int) -> jax.Array:
    """aᵀ b over all tokens, [M, N], also where one of them was gathered beside its products. split:
    as for `contract_rows`."""
    if isinstance(a_BTM, Arrived) or isinstance(b_BTN, Arrived):
        return contracted(a_BTM, b_BTN)
    return contract_rows(flat(a_BTM), flat(b_BTN), split=split)


@jax.custom_vjp
def column_products(x_BTD: jax.Array, weights: tuple) -> tuple:
    """x @ weight for each, over all tokens [B, T, columns]; x arrives split along the sequence and
    is gathered once for all of them."""
    return _column_products(x_BTD, weights)[0]


def _column_products(x_BTD, weights):
    products, saved_BTD = gathered_products(x_BTD, weights, gather_sequence)
    return products, (saved_BTD, weights)


def _column_products_backward(saved, gradients):
    x_BTD, weights = saved
    pairs = [operands(g, w, gradient=True) for g, w in zip(gradients, weights, strict=True)]
    by_x = scattered_products([g for g, _ in pairs], weights, 1)
    by_weights = [contract_tokens(x_BTD, g, 1) for _, g in pairs]
    return by_x, tuple(map(gradient_of, weights, by_weights))


column_products.defvjp(_column_products, _column_products_backward)


@jax.custom_vjp
def row_product(x_BTI: jax.Array, weight_IO) -> jax.Array:
    """x @ weight, whose sum over the devices' columns of x leaves split along the sequence."""
    return _row_product(x_BTI, weight_IO)[0]


def _row_product(x_BTI, weight_IO):
    x_BTI, saved_BTI = operands(x_BTI, weight_IO)
    return scattered_products([x_BTI], [weight_IO], 0), (saved_BTI, weight_IO)


def _row_product_backward(saved, g_BTO):
    x_BTI, weight_IO = saved
    (by_x,), for_weight_BTO = gathered_products(g_BTO, (weight_IO.T,), gather_tokens, True)
    by_weight = contract_tokens(x_BTI, for_weight_BTO, 0)
    return by_x, gradient_of(weight_IO, by_weight)


row_product.defvjp(_row_product, _row_product_backward)


class Dense(nnx.Module):
    """A matrix [in, out] with its bias, if any.

    How `model` splits the matrix decides how it is used: not at all by a call, by its rows with
    `row_parallel`, by its columns with `column_parallel`.

    multiplier: μP's factor on its result (models/mup.py)
    columns: of several matrices side by side, as in Spec
    """

    def __init__(self, n_in, n_out, axes, std, bias, multiplier=1.0, columns=()):
        mup = {"mup_rate": multiplier, "mup_size": multiplier}
        shape, std = (n_in, n_out), std * multiplier
        weight = Spec(shape, axes, std=std, product=True, columns=columns, **mup)
        self.weight = parameter(weight)
        self.bias = parameter(Spec((n_out,), axes[1:], **mup)) if bias else None

    def __call__(self, x_BTI: jax.Array) -> jax.Array:
        """Multiplies each token on its own device; every device has the full matrix."""
        weight_IO = matrix(self.weight, x_BTI)
        if is_split("sequence"):  # batch and a split sequence cannot be merged without gathering it
            if isinstance(weight_IO, Quantized):
                y_BTO = constrain(matmul(x_BTI, weight_IO), SPLIT)
            else:
                y_BTO = constrain(jnp.einsum("bti,io->bto", x_BTI, weight_IO), SPLIT)
        else:
            y_BTO = matmul(flat(x_BTI), weight_IO).reshape(*x_BTI.shape[:-1], -1)
        return y_BTO if self.bias is None else y_BTO + self.bias[...].astype(y_BTO.dtype)

    def row_parallel(self, x_BTI: jax.Array) -> jax.Array:
        """All tokens, with columns split over `model` → [B, T, out], split along the sequence."""
        y_BTO = row_product(x_BTI, matrix(self.weight, x_BTI))
        return y_BTO if self.bias is None else y_BTO + self.bias[...].astype(y_BTO.dtype)


def column_parallel(x_BTD: jax.Array, *layers: Dense, change=lambda layer, a: a) -> list[jax.Array]:
    """x [B, T, D], split along the sequence → each layer's product with all tokens.

    change(layer, a): what is multiplied or added in place of a layer's weight or bias `a`.
    """
    cast = lambda layer, a: change(layer, matrix(a, x_BTD))
    weights = tuple(cast(layer, layer.weight) for layer in layers)
    biases = [None if layer.bias is None else cast(layer, layer.bias) for layer in layers]
    products = column_products(x_BTD, weights)
    return [y if b is None else y + b for y, b in zip(products, biases, strict=True)]


def gather_sequence(x_BTD):
    """The full sequence on every device of `model`, of an array or a quantized tensor; its gradient
    goes back split."""
    if isinstance(x_BTD, Quantized):
        return x_BTD.map(lambda a: constrain(constrain(a, SPLIT), GATHERED))
    return reshard(x_BTD, SPLIT, GATHERED)


def named(name: str, x):
    """An array, a quantized tensor or None, whose values `pipeline.save` can name."""
    return x if x is None else mapped(lambda a: checkpoint_name(a, name), x)


# Elementwise functions of an MLP's first products, `up` and where it has one `gate`. GELU has its
# tanh form, as in GPT-2 and Gemma; the gated ones are of Shazeer 2020 (arXiv:2002.05202).
gelu = functools.partial(jax.nn.gelu, approximate=True)
ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    "gelu": gelu,
    "geglu": lambda up, gate: gelu(gate) * up,
    "swiglu": lambda up, gate: jax.nn.silu(gate) * up,
}


def clamped_swiglu(alpha: float, limit: float, up: jax.Array, gate: jax.Array) -> jax.Array:
    """(up + 1) · gate · sigmoid(alpha · gate), of up between ±limit and of gate up to limit, as in
    gpt-oss's published code."""
    # not jnp.clip, which halves the gradient of a number at the limit
    gate = jnp.where(gate > limit, limit, gate)
    up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return (up + 1) * (gate * jax.nn.sigmoid(alpha * gate))


def activation_of(cfg: ResolvedModel) -> Callable[..., jax.Array]:
    """The function from an MLP's first products to its hidden layer, as in ACTIVATIONS."""
    if cfg.activation == "clamped_swiglu":
        return functools.partial(clamped_swiglu, cfg.activation_alpha, cfg.activation_limit)
    return ACTIVATIONS[cfg.activation]


class MLP(nnx.Module):
    """Two products with an activation between them, whose input may be gated."""

    def __init__(self, cfg: ResolvedModel, residual_std: float):
        d, f = cfg.width, cfg.mlp_width
        widen = lambda: Dense(d, f, ("width", "mlp"), cfg.init_std, "mlp" in cfg.biases)
        self.up = widen()
        self.gate = widen() if cfg.is_gated else None
        self.activation = activation_of(cfg)
        self.down = Dense(f, d, ("mlp", "width"), residual_std, "mlp" in cfg.biases)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        widened = (self.up,) if self.gate is None else (self.up, self.gate)
        products = [named(MLP_IN, product) for product in column_parallel(x_BTD, *widened)]
        h_BTF = self.activation(*products)
        h_BTF = named(MLP_HIDDEN, constrain(h_BTF, ("batch", "token", "mlp")))
        return self.down.row_parallel(h_BTF)
