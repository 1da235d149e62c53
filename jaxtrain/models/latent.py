"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all
heads from one small latent.

      x ── compress ──┬─ norm ─ query latent ── query ──► queries by head: part of size H,
                      │                                   and part of size R, rotated
                      ├─ norm ─ latent C ───── expand ──► keys (size H) and values (size V) by head
                      └─ rotated key of size R, the same for all heads

A score is the product of both parts, times (H + R)^-1/2. Through a cache nothing is expanded: a
token leaves its latent and its rotated key alone there, queries are brought into the latent's space
and results out of it.

Tokens are compressed where they lie, along a split sequence too, so what the devices of `model`
gather is the latents, not the width.

Shape suffixes: B batch, T query tokens, S key tokens, D width, N heads, H head dimension, R rotated
dimension, V value dimension, C latent, K everything that the cache holds of a token: C + R.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.devices.sharding import constrain
from jaxtrain.models.layers import Dense, Norm, columns, gather_sequence, rotary
from jaxtrain.parallel.attention import HEADS, attend, attend_whole
from jaxtrain.parallel.heads import row_major


class LatentAttention(nnx.Module):
    """Causal self-attention through latents. over: how it goes over a split sequence
    (parallel/context.py)."""

    def __init__(self, cfg, residual_std, over="all_gather"):
        self.heads, self.rank, self.rotary_base = cfg.heads, cfg.kv_rank, cfg.rotary_base
        self.head_dim, self.rope_dim, self.value_dim = (
            cfg.head_dim,
            cfg.rope_head_dim,
            cfg.value_head_dim,
        )
        self.implementation, self.over = cfg.attention_kernel, over
        d, n, q = cfg.width, cfg.heads, cfg.query_rank
        # It leaves split along the sequence as it came: the weight is whole on every device, and
        # small.
        self.compress = Dense(
            d, q + self.rank + self.rope_dim, ("width", "latent"), cfg.init_std, cfg.biases
        )
        norm = lambda size: Norm(cfg, size, "latent", cfg.latent_norm_epsilon)
        self.query_norm, self.norm = norm(q) if q else None, norm(self.rank)
        self.query = Dense(
            q or d,
            n * (self.head_dim + self.rope_dim),
            ("latent" if q else "width", "heads"),
            cfg.init_std,
            cfg.biases,
        )
        self.expand = Dense(
            self.rank,
            n * (self.head_dim + self.value_dim),
            ("latent", "heads"),
            cfg.init_std,
            cfg.biases,
        )
        self.out = Dense(n * self.value_dim, d, ("heads", "width"), residual_std, cfg.biases)

    def project(self, x_BTD, positions_BT):
        """→ queries [B, T, N, H + R], latents [B, T, C], split along the sequence, and rotated keys
        [B, T, R]."""
        y = self.compress(x_BTD)
        query_columns = y.shape[-1] - self.rank - self.rope_dim
        query_part, latent_BTC, key_BTR = jnp.split(
            y, [query_columns, query_columns + self.rank], -1
        )
        # Piece by piece: what is cut off a gathered array may be split and gathered again by the
        # partitioner.
        (q,) = columns(
            x_BTD if self.query_norm is None else self.query_norm(query_part), self.query
        )
        latent_BTC = self.norm(latent_BTC)
        q_BTNH, q_BTNR = jnp.split(
            constrain(q.reshape(*q.shape[:2], self.heads, -1), HEADS), [self.head_dim], -1
        )
        turn = lambda a: rotary(a, positions_BT, self.rotary_base)
        return (
            jnp.concatenate([q_BTNH, turn(q_BTNR)], -1),
            latent_BTC,
            gather_sequence(turn(key_BTR[:, :, None])[:, :, 0]),
        )

    def __call__(self, x_BTD, positions_BT, segments_BT=None) -> jax.Array:
        """Over whole sequences; with segments (int32 [B, T]) a token sees its own segment alone."""
        q, latent_BTC, key_BTR = self.project(x_BTD, positions_BT)
        (y,) = columns(latent_BTC, self.expand)
        k, v = jnp.split(
            constrain(y.reshape(*y.shape[:2], self.heads, -1), HEADS), [self.head_dim], -1
        )
        shared = jnp.broadcast_to(key_BTR[:, :, None], (*k.shape[:3], self.rope_dim))
        k = constrain(jnp.concatenate([k, shared], -1), HEADS)
        y = attend_whole(
            row_major(q), row_major(k), row_major(v), segments_BT, self.over, self.implementation
        )
        return self.out.rows(y.reshape(*y.shape[:2], -1))

    def cached(self, x_BTD, positions_BT, cache, start):
        """T more tokens at `start` after those in the cache (one array [B, S, K]) → output, new
        cache."""
        q, latent_BTC, key_BTR = self.project(x_BTD, positions_BT)
        new_BTK = jnp.concatenate([gather_sequence(latent_BTC), key_BTR], -1).astype(cache[0].dtype)
        cache_BSK = jax.lax.dynamic_update_slice_in_dim(cache[0], new_BTK, start, 1)
        t, s = x_BTD.shape[1], cache_BSK.shape[1]
        mask = jnp.arange(s)[None, None, None, :] <= start + jnp.arange(t)[None, None, :, None]
        to_keys, to_values = jnp.split(
            self.expand.weight[...].astype(q.dtype).reshape(self.rank, self.heads, -1),
            [self.head_dim],
            -1,
        )
        inner = jnp.einsum("btnh,cnh->btnc", q[..., : self.head_dim], to_keys)
        # `attend` divides by the root of what it sees as the size of a head. A bias of the keys
        # shifts all scores of a query alike.
        scale = ((self.rank + self.rope_dim) / (self.head_dim + self.rope_dim)) ** 0.5
        q = jnp.concatenate([inner, q[..., self.head_dim :]], -1) * scale
        k_BS1K = cache_BSK[:, :, None].astype(q.dtype)
        y = jnp.einsum(
            "btnc,cnv->btnv", attend(q, k_BS1K, k_BS1K[..., : self.rank], mask), to_values
        )
        if self.expand.bias is not None:
            y += self.expand.bias[...].astype(y.dtype).reshape(self.heads, -1)[:, self.head_dim :]
        return self.out.rows(constrain(y, HEADS).reshape(*y.shape[:2], -1)), [cache_BSK]
