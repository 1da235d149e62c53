"""Norms, dense products, rotary positions and the MLP.

Shape suffixes: B batch, T tokens of a sequence, D width, F MLP columns, N heads, K key/value heads,
H head dimension.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.devices.mesh import on_cpu
from jaxtrain.devices.sharding import constrain, is_split, reshard
from jaxtrain.models.spec import parameter
from jaxtrain.parallel.tensor import gather_tokens, scattered_products

SPLIT = ("batch", "sequence", None)  # between blocks
WHOLE = ("batch", "token", None)  # inside a block


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) over the last dimension,
    computed in float32."""

    def __init__(self, cfg, size=0, axis="width", epsilon=0.0):
        self.kind, self.epsilon = cfg.norm, epsilon or cfg.norm_epsilon
        shape = (size or cfg.width,)
        self.scale = parameter(shape, (axis,), constant=1.0)
        self.bias = parameter(shape, (axis,)) if cfg.biases and cfg.norm == "layernorm" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] → the same shape and dtype."""
        y = x.astype(jnp.float32)
        if self.kind == "layernorm":
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.epsilon) * self.scale[...]
        return (y if self.bias is None else y + self.bias[...]).astype(x.dtype)


def contract_rows(a_TM: jax.Array, b_TN: jax.Array, precision=None) -> jax.Array:
    """aᵀ b, [M, N]: the form of every weight's gradient.

    On CPU the transpose is written out, behind a barrier that keeps XLA from folding it into the
    product again: its backend multiplies a transposed left side 1.1 to 1.5 times more slowly than
    it transposes and multiplies (docs/log.md).
    """
    if not on_cpu():
        return jax.lax.dot_general(a_TM, b_TN, (((0,), (0,)), ((), ())), precision=precision)
    return jax.lax.optimization_barrier(a_TM.T) @ b_TN


def _flat(x: jax.Array) -> jax.Array:
    """With the tokens in one dimension a weight's gradient is one plain matmul, not one with two
    contracted dimensions, which costs a transposed copy (measured on CPU: 9.1 → 6.4 CPU-seconds a
    step)."""
    return x.reshape(-1, x.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(
    x_TI: jax.Array, weight_IO: jax.Array, precision: jax.lax.Precision | None = None
) -> jax.Array:
    """x @ weight, whose backward takes the weight's gradient by `contract_rows`; of all three
    products the precision."""
    return jnp.matmul(x_TI, weight_IO, precision=precision)


def _matmul_backward(precision, kept, g):
    x, w = kept
    return jnp.matmul(g, w.T, precision=precision), contract_rows(x, g, precision)


matmul.defvjp(lambda x, w, precision: (matmul(x, w, precision), (x, w)), _matmul_backward)


@jax.custom_vjp
def by_columns(x_BTD: jax.Array, weights: tuple) -> tuple:
    """x @ weight for each, over all tokens [B, T, columns]; x arrives split along the sequence and
    is gathered once for all of them."""
    return _by_columns(x_BTD, weights)[0]


def _by_columns(x_BTD, weights):
    whole_BTD = gather_sequence(x_BTD)
    return tuple((_flat(whole_BTD) @ w).reshape(*x_BTD.shape[:-1], -1) for w in weights), (
        whole_BTD,
        weights,
    )


def _by_columns_backward(kept, gradients):
    whole_BTD, weights = kept
    return scattered_products(gradients, weights, 1), tuple(
        contract_rows(_flat(whole_BTD), _flat(g)) for g in gradients
    )


by_columns.defvjp(_by_columns, _by_columns_backward)


@jax.custom_vjp
def by_rows(x_BTI: jax.Array, weight_IO: jax.Array) -> jax.Array:
    """x @ weight, whose sum over the columns of x leaves split along the sequence."""
    return scattered_products([x_BTI], [weight_IO], 0)


def _by_rows_backward(kept, g_BTO):
    x_BTI, weight_IO = kept
    whole_BTO = gather_tokens(g_BTO)
    return (_flat(whole_BTO) @ weight_IO.T).reshape(x_BTI.shape), contract_rows(
        _flat(x_BTI), _flat(whole_BTO)
    )


by_rows.defvjp(lambda x, w: (by_rows(x, w), (x, w)), _by_rows_backward)


class Dense(nnx.Module):
    """A matrix [in, out] with its bias, if any; how it is split over devices decides between
    `columns` and `rows`."""

    def __init__(self, n_in, n_out, axes, std, bias):
        self.weight = parameter((n_in, n_out), axes, std=std)
        self.bias = parameter((n_out,), axes[1:]) if bias else None

    def __call__(self, x_BTI: jax.Array) -> jax.Array:
        """Each token where it is; the matrix is whole on every device."""
        weight_IO = self.weight[...].astype(x_BTI.dtype)
        if is_split("sequence"):  # batch and a split sequence cannot be merged without gathering it
            y_BTO = constrain(jnp.einsum("bti,io->bto", x_BTI, weight_IO), SPLIT)
        else:
            y_BTO = matmul(_flat(x_BTI), weight_IO).reshape(*x_BTI.shape[:-1], -1)
        return y_BTO if self.bias is None else y_BTO + self.bias[...].astype(y_BTO.dtype)

    def rows(self, x_BTI: jax.Array) -> jax.Array:
        """Row parallel: all tokens of split columns → [B, T, out], split along the sequence."""
        y_BTO = by_rows(x_BTI, self.weight[...].astype(x_BTI.dtype))
        return y_BTO if self.bias is None else y_BTO + self.bias[...].astype(y_BTO.dtype)


def columns(x_BTD: jax.Array, *layers: Dense, change=lambda layer, a: a) -> list[jax.Array]:
    """Column parallel: x [B, T, D], split along the sequence → each layer's product with all
    tokens. change(layer, a): what is multiplied or added in place of a layer's weight or bias
    `a`."""
    weights = tuple(change(layer, layer.weight[...].astype(x_BTD.dtype)) for layer in layers)
    biases = [
        None if layer.bias is None else change(layer, layer.bias[...].astype(x_BTD.dtype))
        for layer in layers
    ]
    return [
        y if bias is None else y + bias
        for y, bias in zip(by_columns(x_BTD, weights), biases, strict=True)
    ]


def gather_sequence(x_BTD: jax.Array) -> jax.Array:
    """The whole sequence on every device of `model`; its gradient goes back split."""
    return reshard(x_BTD, SPLIT, WHOLE)


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020) or GELU (tanh form, as GPT-2)."""

    def __init__(self, cfg, residual_std):
        self.activation = cfg.activation
        d, f = cfg.width, cfg.mlp_width
        self.up = Dense(d, f, ("width", "mlp"), cfg.init_std, cfg.biases)
        self.gate = (
            Dense(d, f, ("width", "mlp"), cfg.init_std, cfg.biases)
            if cfg.activation == "swiglu"
            else None
        )
        self.down = Dense(f, d, ("mlp", "width"), residual_std, cfg.biases)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        if self.gate is None:
            h_BTF = jax.nn.gelu(columns(x_BTD, self.up)[0], approximate=True)
        else:
            up_BTF, gate_BTF = columns(x_BTD, self.up, self.gate)
            h_BTF = jax.nn.silu(gate_BTF) * up_BTF
        return self.down.rows(constrain(h_BTF, ("batch", "token", "mlp")))


def rotary(x_BTNH: jax.Array, positions_BT: jax.Array, base: float) -> jax.Array:
    """Rotary positions (Su et al. 2021), the two halves of a head rotated against each other,
    angles in float32.

    positions_BT: int32 [B, T] or [1, T].
    """
    half = x_BTNH.shape[-1] // 2
    frequency_H = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BT1H = positions_BT[..., None, None].astype(jnp.float32) * frequency_H
    # Whole, also where what is rotated is split: or one device's angles are sent to the others.
    cos, sin = (constrain(f(angle_BT1H), (None, "token", None, None)) for f in (jnp.cos, jnp.sin))
    a, b = x_BTNH[..., :half].astype(jnp.float32), x_BTNH[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTNH.dtype)
