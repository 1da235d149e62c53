"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all
heads come from one small latent.

      x ── compress ──┬─ norm ─ query latent ── query ──► queries by head: part of size H,
                      │                                   and part of size R, rotated
                      ├─ norm ─ latent C ───── expand ──► keys (size H) and values (size V) by head
                      └─ rotated key of size R, the same for all heads

A score is the sum of both parts' products, times (H + R)^-1/2, and with YaRN times its factor
(rotary.py). A cache holds only the latent and the rotated key of a token: queries are projected
into the latent's space instead of expanding keys, and results are projected out of it.

Each device compresses its own tokens of a split sequence, so the devices of `model` gather latents,
not the residual stream.

Shape suffixes: B batch, T query tokens, S key tokens, D width, N heads, H head dimension, R rotated
dimension, V value dimension, C latent, K the numbers of a token in the cache, C + R.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config import ResolvedModel
from jaxtrain.config.saved_values import ATTENTION, LATENT, QKV
from jaxtrain.devices.sharding import constrain
from jaxtrain.models.layers import Dense, Norm, column_parallel, gather_sequence, named
from jaxtrain.models.mup import score_multiplier
from jaxtrain.models.rotary import Rotary, score_factor
from jaxtrain.models.spec import CacheArray
from jaxtrain.parallel.attention import kv_cache
from jaxtrain.parallel.attention.causal import (
    HEADS,
    AttentionSettings,
    attend_at_once,
    attend_causal,
)
from jaxtrain.parallel.attention.flash import Inputs, Sight
from jaxtrain.parallel.attention.heads import row_major


class LatentAttention(nnx.Module):
    """Causal self-attention through latents.

    context: how it reaches the tokens of other devices, where a sequence is split over the mesh's
        context axis (parallel/attention/context.py)
    """

    def __init__(self, cfg: ResolvedModel, residual_std: float, context: str = "all_gather"):
        self.heads, self.rank = cfg.heads, cfg.kv_rank
        self.rotary, self.score_factor = Rotary(cfg, cfg.rope_head_dim), score_factor(cfg)
        self.head_dim, self.rope_dim = cfg.head_dim, cfg.rope_head_dim
        self.settings = AttentionSettings.of(cfg, context)
        d, n, q = cfg.width, cfg.heads, cfg.query_rank
        compressed = q + self.rank + self.rope_dim
        query, key_value = self.head_dim + self.rope_dim, self.head_dim + cfg.value_head_dim
        dense = lambda n_in, n_out, *axes, bias=False, multiplier=1.0, columns=(): Dense(
            n_in, n_out, axes, cfg.init_std, bias, multiplier, columns
        )
        norm = lambda size: Norm(cfg, size, "latent", cfg.latent_norm_epsilon)
        # Its result stays split along the sequence, as x is: the weight is small, and every device
        # has all of it.
        latents = (*([q] if q else []), self.rank, self.rope_dim)
        self.compress = dense(
            d, compressed, "width", "latent", bias="qkv" in cfg.biases, columns=latents
        )
        self.query_norm, self.norm = norm(q) if q else None, norm(self.rank)
        self.query = dense(
            q or d,
            n * query,
            "latent" if q else "width",
            "heads",
            multiplier=score_multiplier(cfg),
        )
        keys_and_values = self.head_dim, cfg.value_head_dim
        self.expand = dense(self.rank, n * key_value, "latent", "heads", columns=keys_and_values)
        self.out = Dense(
            n * cfg.value_head_dim, d, ("heads", "width"), residual_std, "out" in cfg.biases
        )

    def project(self, x_BTD, positions_BT):
        """Returns queries [B, T, N, H + R], latents [B, T, C], split along the sequence, and
        rotated keys [B, T, R]."""
        y = named(LATENT, self.compress(x_BTD))
        query_columns = y.shape[-1] - self.rank - self.rope_dim
        query_part, latent_BTC, key_BTR = jnp.split(
            y, [query_columns, query_columns + self.rank], -1
        )
        # Piece by piece: what is cut off a gathered array may be split and gathered again by the
        # partitioner.
        query_input = x_BTD if self.query_norm is None else self.query_norm(query_part)
        q = named(QKV, *column_parallel(query_input, self.query))
        latent_BTC = self.norm(latent_BTC)
        q_BTNH, q_BTNR = jnp.split(
            constrain(q.reshape(*q.shape[:2], self.heads, -1), HEADS), [self.head_dim], -1
        )
        rotate = lambda a: self.rotary(a, positions_BT)
        q = jnp.concatenate([q_BTNH, rotate(q_BTNR)], -1)
        if self.score_factor != 1:
            q = q * self.score_factor
        return q, latent_BTC, gather_sequence(rotate(key_BTR[:, :, None])[:, :, 0])

    def __call__(self, x_BTD, positions_BT, segments_BT=None, noise_BT=None) -> jax.Array:
        """[B, T, D] → [B, T, D], sequences from their beginning. With segments (int32 [B, T]) a
        token sees its own segment alone. noise_BT: as of a Block"""
        q, latent_BTC, key_BTR = self.project(x_BTD, positions_BT)
        y = named(QKV, *column_parallel(latent_BTC, self.expand))
        k, v = jnp.split(
            constrain(y.reshape(*y.shape[:2], self.heads, -1), HEADS), [self.head_dim], -1
        )
        shared = jnp.broadcast_to(key_BTR[:, :, None], (*k.shape[:3], self.rope_dim))
        k = constrain(jnp.concatenate([k, shared], -1), HEADS)
        q, k, v = map(row_major, (q, k, v))
        y = named(ATTENTION, attend_causal(q, k, v, segments_BT, self.settings, noise_BT))
        return self.out.row_parallel(y.reshape(*y.shape[:2], -1))

    def cache_arrays(self, batch: int, slots: int, dtype) -> tuple[CacheArray]:
        """Latents and rotated keys, in one array."""
        slots, axis = kv_cache.slots_of(slots, self.settings.window)
        shape = (batch, slots, self.rank + self.rope_dim)
        return (CacheArray(shape, ("batch", axis, None), dtype),)

    def cached(self, x_BTD, positions_BT, cache, start, count):
        """Returns (the output [B, T, D], the cache with these tokens), for generation/decode.py."""
        q, latent_BTC, key_BTR = self.project(x_BTD, positions_BT)
        new_BTK = jnp.concatenate([gather_sequence(latent_BTC), key_BTR], -1)
        extended = kv_cache.extended(cache, (new_BTK,), start, count, self.settings.window)
        to_keys, to_values = jnp.split(
            self.expand.weight[...].astype(q.dtype).reshape(self.rank, self.heads, -1),
            [self.head_dim],
            -1,
        )
        inner = jnp.einsum("btnh,cnh->btnc", q[..., : self.head_dim], to_keys)
        # The scores' factor is that of expanded keys, of size H + R.
        scores, window = self.settings.scores, self.settings.window
        scores = dataclasses.replace(scores, scale=scores.factor(q.shape[-1]))
        q = jnp.concatenate([inner, q[..., self.head_dim :]], -1)
        k_BS1K = extended.seen[0][:, :, None].astype(q.dtype)
        in_order = extended.is_text is not None
        sight = Sight((0,), window=window)
        inputs = Inputs(q, k_BS1K, k_BS1K[..., : self.rank], sight, scores=scores)
        of_latents = constrain(attend_at_once(inputs, extended.mask, in_order), HEADS)
        y = constrain(jnp.einsum("btnc,cnv->btnv", of_latents, to_values), HEADS)
        return self.out.row_parallel(y.reshape(*y.shape[:2], -1)), extended.cache
