"""Rotary positions (Su et al. 2021, arXiv:2104.09864), and the scalings by which published models
read longer sequences than those of their first training.

A scaling divides each frequency by `rope_factor`, except for the fraction that it leaves:

    frequency · (fraction + (1 − fraction) / rope_factor)

Fast dimensions, which turn often within `rope_original_length` tokens, keep their frequency:

    linear   fraction 0 (Chen et al. 2023, arXiv:2306.15595)
    llama3   with n turns in the original length, (n − low) / (high − low), clipped to 0 … 1
             (`apply_scaling` of Llama 3.1's published code)
    yarn     1 for dimensions below that of `rope_beta_fast` turns, 0 for those above that of
             `rope_beta_slow`, linear in the dimension's number between (Peng et al. 2023,
             arXiv:2309.00071, section 3.2)

YaRN also multiplies the rotated numbers of queries and keys by its attention factor (section 3.4).
DeepSeek-V2 and V3 have the logarithm of the factor in the scale of all scores instead, by
`rope_mscale_all_dim`. The figures are those of transformers' `ROPE_INIT_FUNCTIONS`.

Shape suffixes: B batch, T tokens of a sequence, N heads, H head dimension.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import ResolvedModel
from jaxtrain.devices.sharding import constrain
from jaxtrain.parallel.attention.heads import orders_by_heads


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotation of queries and keys by their positions. size: rotated dimensions of a head, its
    first ones."""

    cfg: ResolvedModel
    size: int

    def __call__(self, x_BTNH: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """x rotated by its positions: the two halves of the rotated dimensions are the coordinates,
        angles are float32.

        positions_BT: int32 [B, T] or [1, T]
        """
        size, half = self.size, self.size // 2
        angle_BT1H = positions_BT[..., None, None].astype(jnp.float32) * self.frequencies()
        # Unsharded, also where x is split over the sequence: or one device's angles are sent to the
        # others.
        cos, sin = (
            constrain(f(angle_BT1H), (None, "token", None, None)) for f in (jnp.cos, jnp.sin)
        )
        if (factor := attention_factor(self.cfg)) != 1:
            cos, sin = cos * factor, sin * factor
        if orders_by_heads():
            return _by_product(x_BTNH, cos, sin)
        a, b = x_BTNH[..., :half].astype(jnp.float32), x_BTNH[..., half:size].astype(jnp.float32)
        y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTNH.dtype)
        return y if size == x_BTNH.shape[-1] else jnp.concatenate([y, x_BTNH[..., size:]], -1)

    def frequencies(self) -> jax.Array:
        """Radians a token, float32 [size / 2], the fastest one first."""
        half, cfg = self.size // 2, self.cfg
        frequency_H = cfg.rotary_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
        if cfg.rope_scaling == "none":
            return frequency_H
        fraction_H = _fraction_left(cfg, self.size)
        return frequency_H * (fraction_H + (1 - fraction_H) / cfg.rope_factor).astype(np.float32)


@jax.custom_vjp
def _by_product(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x · cos + x' · sin, where x' has the second half, negated, before the first one: a product
    with a matrix of 0, 1 and −1, which is exact. On TPUs halves that are cut and concatenated take
    passes of their own; this is one with the order of `heads_first`. cos, sin: of a half, in
    float32."""
    return _rotated(x_BTNH, cos, sin)


def _rotated(x_BTNH, cos, sin):
    half, rest = cos.shape[-1], x_BTNH.shape[-1] - 2 * cos.shape[-1]
    swap_HH = np.zeros((x_BTNH.shape[-1],) * 2)
    at = np.arange(half)
    swap_HH[at + half, at], swap_HH[at, at + half] = -1, 1
    exact = jax.lax.Precision.HIGHEST if x_BTNH.dtype == jnp.float32 else None
    # With a batch dimension, of size 1, it is no product with weights, which `selective` saves.
    swapped = jax.lax.dot_general(
        x_BTNH[None],
        jnp.asarray(swap_HH[None], x_BTNH.dtype),
        (((4,), (1,)), ((0,), (0,))),
        exact,
        preferred_element_type=jnp.float32,
    )[0]
    wide = lambda a, fill: jnp.pad(
        jnp.concatenate([a, a], -1), ((0, 0),) * 3 + ((0, rest),), constant_values=fill
    )
    y = x_BTNH.astype(jnp.float32) * wide(cos, 1) + swapped * wide(sin, 0)
    return y.astype(x_BTNH.dtype)


_by_product.defvjp(
    lambda x, cos, sin: (_rotated(x, cos, sin), (cos, sin)),
    # The gradient is rotated back.
    lambda angles, g: (_rotated(g, angles[0], -angles[1]), None, None),
)


def _fraction_left(cfg: ResolvedModel, size: int) -> np.ndarray:
    """The fraction of each frequency that the scaling leaves, float64 [size / 2]."""
    dimension_H = np.arange(size // 2)
    if cfg.rope_scaling == "llama3":
        frequency_H = cfg.rotary_base ** (-2 * dimension_H / size)
        turns_H = cfg.rope_original_length * frequency_H / (2 * math.pi)
        low, high = cfg.rope_low_freq_factor, cfg.rope_high_freq_factor
        return np.clip((turns_H - low) / (high - low), 0, 1)
    if cfg.rope_scaling == "yarn":
        low, high = (_dimension(cfg, size, n) for n in (cfg.rope_beta_fast, cfg.rope_beta_slow))
        if cfg.rope_truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        if low == high:
            high += 0.001
        return 1 - np.clip((dimension_H - low) / (high - low), 0, 1)
    return np.zeros(size // 2)


def _dimension(cfg: ResolvedModel, size: int, turns: float) -> float:
    """The dimension, a fractional number, that turns so often within the original length."""
    longest = cfg.rope_original_length / (turns * 2 * math.pi)  # 1 / frequency
    return size * math.log(longest) / (2 * math.log(cfg.rotary_base))


def attention_factor(cfg: ResolvedModel) -> float:
    """The factor on rotated queries and on rotated keys."""
    if cfg.rope_scaling != "yarn":
        return 1.0
    if cfg.rope_attention_factor:
        return cfg.rope_attention_factor
    if cfg.rope_mscale and cfg.rope_mscale_all_dim:
        return _mscale(cfg, cfg.rope_mscale) / _mscale(cfg, cfg.rope_mscale_all_dim)
    return _mscale(cfg, 1.0)


def score_factor(cfg: ResolvedModel) -> float:
    """The factor of `rope_mscale_all_dim` on all scores of latent attention (DeepSeek-V3's
    published code: `softmax_scale`)."""
    if cfg.rope_scaling != "yarn" or not cfg.rope_mscale_all_dim:
        return 1.0
    return _mscale(cfg, cfg.rope_mscale_all_dim) ** 2


def _mscale(cfg: ResolvedModel, weight: float) -> float:
    """0.1 · weight · ln(rope_factor) + 1, and 1 for a factor up to 1 (YaRN, section 3.4)."""
    return 0.1 * weight * math.log(cfg.rope_factor) + 1 if cfg.rope_factor > 1 else 1.0
