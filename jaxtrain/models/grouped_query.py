"""Grouped-query causal attention.

Shape suffixes: B batch, T query tokens, S key tokens, N heads, K key/value heads, H head dimension.
"""

import jax
from flax import nnx

from jaxtrain.config import ResolvedModel
from jaxtrain.config.saved_values import ATTENTION, QKV
from jaxtrain.devices.sharding import constrain
from jaxtrain.models.layers import Dense, Norm, column_parallel, named
from jaxtrain.models.mup import score_multiplier
from jaxtrain.models.rotary import Rotary
from jaxtrain.models.spec import CacheArray, Spec, parameter
from jaxtrain.parallel.attention import kv_cache
from jaxtrain.parallel.attention.causal import (
    HEADS,
    KV_HEADS,
    AttentionSettings,
    attend_cached,
    attend_causal,
)
from jaxtrain.parallel.attention.heads import heads_first, kept_by_heads, orders_by_heads, row_major
from jaxtrain.parallel.tensor import attention_kv_heads, shared_columns


class Attention(nnx.Module):
    """Causal self-attention with N query heads in K groups.

    context: how it reaches the tokens of other devices, where a sequence is split over the mesh's
        context axis (parallel/attention/context.py)
    """

    def __init__(self, cfg: ResolvedModel, residual_std: float, context: str = "all_gather"):
        self.heads, self.kv_heads, self.head_dim = cfg.heads, cfg.kv_heads, cfg.head_dim
        self.rotary = (
            Rotary(cfg, cfg.rotary_dim or cfg.head_dim) if cfg.positions == "rotary" else None
        )
        self.settings = AttentionSettings.of(cfg, context)
        self.sinks = parameter(Spec((cfg.heads,), ("heads",))) if cfg.sinks else None
        d, n, k = cfg.width, cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        dense = lambda size, axis, multiplier=1.0: Dense(
            d, size, ("width", axis), cfg.init_std, "qkv" in cfg.biases, multiplier
        )
        multiplier = score_multiplier(cfg)
        self.query = dense(n, "heads", 1.0 if cfg.qk_norm else multiplier)
        self.key, self.value = dense(k, "kv_heads"), dense(k, "kv_heads")
        self.gate = dense(n, "heads") if cfg.attention_gate else None
        self.out = Dense(n, d, ("heads", "width"), residual_std, "out" in cfg.biases)
        self.norm_over = cfg.qk_norm_over if cfg.qk_norm else ""
        over_query, over_key = ((self.head_dim, "latent"),) * 2
        if self.norm_over == "projection":
            over_query, over_key = (n, "heads"), (k, "kv_heads")
        self.query_norm = Norm(cfg, *over_query, multiplier=multiplier) if self.norm_over else None
        self.key_norm = Norm(cfg, *over_key) if self.norm_over else None

    def project(self, x_BTD, positions_BT):
        """Returns queries [B, T, N, H], keys and values [B, T, K, H], and the gate of attention's
        output [B, T, columns of the heads], None in a model without one.

        Queries and keys are normed where the model has `qk_norm`, then rotated where positions are
        rotary. K is at least the number of devices that heads are split over.
        """
        split = lambda y, n: y.reshape(*y.shape[:2], n, self.head_dim)
        shared = lambda a: shared_columns(a, self.kv_heads)
        change = lambda layer, a: shared(a) if layer is self.key or layer is self.value else a
        gates = () if self.gate is None else (self.gate,)
        products = column_parallel(x_BTD, self.query, self.key, self.value, *gates, change=change)
        q, k, v, *gates = (named(QKV, row_major(product)) for product in products)
        if self.norm_over == "projection":
            # Each key head has equally many copies, so their mean square is that of the heads.
            q, k = self.query_norm(q), self.key_norm(k, shared)
        q_BTNH = constrain(split(q, self.heads), HEADS)
        k_BTKH, v_BTKH = (
            constrain(split(a, attention_kv_heads(self.kv_heads)), KV_HEADS) for a in (k, v)
        )
        if orders_by_heads():
            q_BTNH, k_BTKH, v_BTKH = map(heads_first, (q_BTNH, k_BTKH, v_BTKH))
        if self.norm_over == "head":
            q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
        if self.rotary is not None:
            q_BTNH, k_BTKH = (self.rotary(a, positions_BT) for a in (q_BTNH, k_BTKH))
        kept = kept_by_heads if orders_by_heads() else row_major
        return kept(q_BTNH), kept(k_BTKH), kept(v_BTKH), gates[0] if gates else None

    def output(self, y_BTNH, gate_BTI) -> jax.Array:
        """The result of attention's core, gated where the model has a gate, times the output
        matrix."""
        y_BTI = y_BTNH.reshape(*y_BTNH.shape[:2], -1)
        if gate_BTI is not None:
            y_BTI = y_BTI * jax.nn.sigmoid(gate_BTI)
        return self.out.row_parallel(y_BTI)

    def __call__(self, x_BTD, positions_BT, segments_BT=None, noise_BT=None) -> jax.Array:
        """[B, T, D] → [B, T, D], sequences from their beginning. With segments (int32 [B, T]) a
        token sees its own segment alone. noise_BT: as of a Block"""
        q, k, v, gate = self.project(x_BTD, positions_BT)
        y = attend_causal(q, k, v, segments_BT, self.settings, noise_BT, self._sinks_N)
        y = named(ATTENTION, y)
        return self.output(y, gate)

    @property
    def _sinks_N(self) -> jax.Array | None:
        return None if self.sinks is None else self.sinks[...]

    def cache_arrays(self, batch: int, slots: int, dtype) -> tuple[CacheArray, CacheArray]:
        """Keys and values of a cache."""
        slots, axis = kv_cache.slots_of(slots, self.settings.window)
        shape = (batch, slots, attention_kv_heads(self.kv_heads), self.head_dim)
        return (CacheArray(shape, ("batch", axis, "kv_heads", None), dtype),) * 2

    def cached(self, x_BTD, positions_BT, cache, start, count):
        """Returns (the output [B, T, D], the cache with these tokens), for generation/decode.py."""
        q, k, v, gate = self.project(x_BTD, positions_BT)
        extended = kv_cache.extended(cache, (k, v), start, count, self.settings.window)
        y = attend_cached(q, extended, start, self.settings, self._sinks_N)
        return self.output(y, gate), extended.cache
