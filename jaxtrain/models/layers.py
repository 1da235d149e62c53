"""Norms, dense products, rotary positions and the MLP.

Shape suffixes: B batch, T tokens of a sequence, D width, F MLP columns, N heads, K key/value heads, H head dimension.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.spec import parameter
from jaxtrain.sharding import constrain, is_split, reshard

SPLIT = ("batch", "sequence", None)  # between blocks
WHOLE = ("batch", "token", None)  # inside a block


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) over the last dimension, computed in float32."""

    def __init__(self, cfg):
        self.kind, self.epsilon = cfg.norm, cfg.norm_epsilon
        self.scale = parameter((cfg.width,), ("width",), constant=1.0)
        self.bias = parameter((cfg.width,), ("width",)) if cfg.biases and cfg.norm == "layernorm" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] → the same shape and dtype."""
        y = x.astype(jnp.float32)
        if self.kind == "layernorm":
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.epsilon) * self.scale[...]
        return (y if self.bias is None else y + self.bias[...]).astype(x.dtype)


def contract_rows(a_TM: jax.Array, b_TN: jax.Array) -> jax.Array:
    """aᵀ b, [M, N]: the form of every weight's gradient.

    On CPU the transpose is written out, behind a barrier that keeps XLA from folding it into the product again: its backend
    multiplies a transposed left side 1.1 to 1.5 times more slowly than it transposes and multiplies (docs/log.md).
    """
    if jax.default_backend() != "cpu":
        return jax.lax.dot_general(a_TM, b_TN, (((0,), (0,)), ((), ())))
    return jax.lax.optimization_barrier(a_TM.T) @ b_TN


@jax.custom_vjp
def matmul(x_TI: jax.Array, weight_IO: jax.Array) -> jax.Array:
    """x @ weight, whose backward takes the weight's gradient by `contract_rows`."""
    return x_TI @ weight_IO


matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, contract_rows(kept[0], g)))


class Dense(nnx.Module):
    """x [B, T, in] → [B, T, out]. With `gather`, the input arrives split along the sequence and is gathered for its columns
    (column parallel); with `scatter` the output leaves split along the sequence (row parallel)."""

    def __init__(self, n_in, n_out, axes, std, bias, scatter=False):
        self.weight = parameter((n_in, n_out), axes, std=std)
        self.bias = parameter((n_out,), axes[1:]) if bias else None
        self.scatter = scatter

    def __call__(self, x_BTI: jax.Array) -> jax.Array:
        weight_IO = self.weight[...].astype(x_BTI.dtype)
        if self.scatter and is_split("sequence"):
            # Batch and a split sequence cannot be merged without gathering it.
            y_BTO = constrain(jnp.einsum("bti,io->bto", x_BTI, weight_IO), SPLIT)
        else:
            # With the tokens in one dimension the weight's gradient is one plain matmul, not one with two contracted
            # dimensions, which costs a transposed copy (measured on CPU: 9.1 → 6.4 CPU-seconds a step).
            y_BTO = matmul(x_BTI.reshape(-1, x_BTI.shape[-1]), weight_IO).reshape(*x_BTI.shape[:-1], -1)
        return y_BTO if self.bias is None else y_BTO + self.bias[...].astype(y_BTO.dtype)


def gather_sequence(x_BTD: jax.Array) -> jax.Array:
    """The whole sequence on every device of `model`; its gradient goes back split."""
    return reshard(x_BTD, SPLIT, WHOLE)


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020) or GELU (tanh form, as GPT-2)."""

    def __init__(self, cfg, residual_std):
        self.activation = cfg.activation
        d, f = cfg.width, cfg.mlp_width
        self.up = Dense(d, f, ("width", "mlp"), cfg.init_std, cfg.biases)
        self.gate = Dense(d, f, ("width", "mlp"), cfg.init_std, cfg.biases) if cfg.activation == "swiglu" else None
        self.down = Dense(f, d, ("mlp", "width"), residual_std, cfg.biases, scatter=True)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = gather_sequence(x_BTD)
        h_BTF = self.up(x_BTD)
        h_BTF = jax.nn.gelu(h_BTF, approximate=True) if self.gate is None else jax.nn.silu(self.gate(x_BTD)) * h_BTF
        return self.down(constrain(h_BTF, ("batch", "token", "mlp")))


def rotary(x_BTNH: jax.Array, positions_BT: jax.Array, base: float) -> jax.Array:
    """Rotary positions (Su et al. 2021), the two halves of a head rotated against each other, angles in float32.

    positions_BT: int32 [B, T] or [1, T].
    """
    half = x_BTNH.shape[-1] // 2
    frequency_H = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BT1H = positions_BT[..., None, None].astype(jnp.float32) * frequency_H
    cos, sin = jnp.cos(angle_BT1H), jnp.sin(angle_BT1H)
    a, b = x_BTNH[..., :half].astype(jnp.float32), x_BTNH[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTNH.dtype)
