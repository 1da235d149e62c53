"""A decoder-only transformer from its parts: embedder, blocks, head. Single-device code with logical axis names.

The parts are used one by one by the runtime, which spreads them over stages; `Transformer` strings them together for
one device (and, through the logical axes, for a partitioned mesh without stages): generation and the reference in tests.

Shape suffixes: B batch, T tokens, D width, V vocabulary (in memory: padded), C tokens of a chunk.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.attention import Attention
from jaxtrain.models.layers import MLP, SPLIT, Norm, contract_rows, gather_sequence
from jaxtrain.models.spec import functional, parameter, specs
from jaxtrain.parallel.vocabulary import lookup
from jaxtrain.sharding import constrain

TILE = 128  # matrix units want the vocabulary in multiples of this


def padded_vocabulary(vocab_size: int, shards: int) -> int:
    """Rows held in memory: divisible by the shards, and large vocabularies by whole tiles on each."""
    unit = shards if vocab_size < 32 * TILE else shards * TILE
    return -(-vocab_size // unit) * unit


class Embedder(nnx.Module):
    """Token embeddings, plus learned positions where the model has them."""

    def __init__(self, cfg, vocab_rows, vocab="vocab"):
        v, d = cfg.vocab_size, cfg.width
        self.table = parameter((v, d), (vocab, "width"), std=cfg.init_std, padded=(vocab_rows, d))
        self.positions = parameter((cfg.max_positions, d), ("position", "width"), std=cfg.init_std) if cfg.positions == "learned" else None

    def __call__(self, tokens_BT, positions_BT, dtype) -> jax.Array:
        """tokens int32 [B, T], positions int32 [B or 1, T] → [B, T, D] of `dtype`."""
        return self.place(self.lookup(tokens_BT, dtype), positions_BT)

    def lookup(self, tokens_BT, dtype) -> jax.Array:
        """The tokens' rows of the table alone; zero for a token that is not in it."""
        return lookup(self.table[...], tokens_BT).astype(dtype)

    def place(self, x_BTD, positions_BT) -> jax.Array:
        """With their positions, where these are learned."""
        if self.positions is not None:
            x_BTD = x_BTD + constrain(self.positions[...].astype(x_BTD.dtype)[positions_BT], (None, *SPLIT[1:]))
        return constrain(x_BTD, SPLIT)


def add_position_gradient(positions_PD, positions_BT, g_BTD) -> jax.Array:
    """The accumulator of learned positions plus the gradient of the embedder's output."""
    g_BTD = gather_sequence(g_BTD)
    if positions_BT.shape[0] == 1:  # the same positions in every row
        g_BTD = g_BTD.astype(jnp.float32).sum(0, keepdims=True)
    return positions_PD.at[positions_BT].add(g_BTD.astype(positions_PD.dtype))


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, cfg, over="all_gather"):
        residual_std = cfg.init_std / math.sqrt(2 * cfg.layers)  # GPT-2: the residual stream's variance stays put with depth
        self.attention_norm, self.mlp_norm = Norm(cfg), Norm(cfg)
        self.attention = Attention(cfg, residual_std, over)
        self.mlp = MLP(cfg, residual_std)

    def __call__(self, x_BTD, positions_BT, segments_BT=None) -> jax.Array:
        """[B, T, D] → [B, T, D]."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions_BT, segments_BT)
        x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return constrain(x_BTD, SPLIT)

    def cached(self, x_BTD, positions_BT, cache, start):
        """As a call, with keys and values of earlier tokens from a cache → output, new cache."""
        y, cache = self.attention.cached(self.attention_norm(x_BTD), positions_BT, cache, start)
        x_BTD = x_BTD + y
        return x_BTD + self.mlp(self.mlp_norm(x_BTD)), cache


@jax.custom_vjp
def vocabulary_logits(x_CD, table_VD) -> jax.Array:
    """x @ tableᵀ in float32 [C, V] from operands of the compute type; the backward's two matmuls keep that type as well,
    where the automatic transpose would run them in float32."""
    return jnp.einsum("cd,vd->cv", x_CD, table_VD, preferred_element_type=jnp.float32)


def _vocabulary_logits_backward(residuals, g_CV):
    x_CD, table_VD = residuals
    g_CV = g_CV.astype(x_CD.dtype)
    return jnp.einsum("cv,vd->cd", g_CV, table_VD), contract_rows(g_CV, x_CD)


vocabulary_logits.defvjp(lambda x, table: (vocabulary_logits(x, table), (x, table)), _vocabulary_logits_backward)


class Head(nnx.Module):
    """Final norm and the projection to the vocabulary; a tied head is given the embedding table."""

    def __init__(self, cfg, vocab_rows, vocab="vocab"):
        v, d = cfg.vocab_size, cfg.width
        self.vocab_size = v
        self.norm = Norm(cfg)
        self.table = None if cfg.tied_embeddings else parameter((v, d), (vocab, "width"), std=cfg.init_std, padded=(vocab_rows, d))

    def __call__(self, x_BCD, tied_table=None, first_row=0) -> jax.Array:
        """[B, C, D] → float32 logits [B, C, V]; those of padding rows are −inf. The table may be a part of one, from `first_row` on."""
        table_VD = self.table[...] if tied_table is None else tied_table
        x_BCD = gather_sequence(self.norm(x_BCD))
        flat = x_BCD.reshape(-1, x_BCD.shape[-1])
        logits = vocabulary_logits(flat, table_VD.astype(flat.dtype))
        logits = constrain(logits.reshape(*x_BCD.shape[:-1], -1), ("batch", "token", "vocab"))
        if table_VD.shape[0] != self.vocab_size:
            row = first_row + jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
            logits = jnp.where(row < self.vocab_size, logits, -jnp.inf)
        return logits


@dataclasses.dataclass(frozen=True)
class Parts:
    """The model's parts as functions of their parameters (nested dicts of arrays), and their parameters' specifications."""

    cfg: Any
    specs: dict  # {"embed": ..., "layer": ... of one layer, "head": ...}
    embed: Callable  # (params, tokens, positions, dtype) → x
    block: Callable  # (params of one layer, x, positions, segments) → x
    head: Callable  # (params, x, tied table or None) → logits

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model, padding not counted."""
        sizes = {k: sum(s.size for s in jax.tree.leaves(v)) for k, v in self.specs.items()}
        return sizes["embed"] + self.cfg.layers * sizes["layer"] + sizes["head"]

    @property
    def matmul_parameters(self) -> int:
        """Parameters that every token is multiplied with: the matrices of all layers, and the head's, tied or not."""
        layer = sum(s.size for s in jax.tree.leaves(self.specs["layer"]) if s.matrix)
        return self.cfg.layers * layer + self.cfg.vocab_size * self.cfg.width


def build(cfg, model_shards: int = 1, stage_shards: int = 1, over: str = "all_gather") -> Parts:
    """The parts of the model that a (resolved) model config describes.

    Its vocabulary is padded for `model_shards`, times `stage_shards` where the stages share it. `over`: how attention goes over a
    sequence that several devices share (parallel/context.py).
    """
    rows = padded_vocabulary(cfg.vocab_size, model_shards * stage_shards)
    vocab = "staged_vocab" if stage_shards > 1 else "vocab"
    embed, block, head = Embedder(cfg, rows, vocab), Block(cfg, over), Head(cfg, rows, vocab)
    tree = {"embed": specs(embed), "layer": specs(block), "head": specs(head)}
    return Parts(cfg, tree, functional(embed), functional(block), functional(head))


def default_positions(tokens_BT: jax.Array) -> jax.Array:
    """int32 [1, T]: 0, 1, 2, …"""
    return jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]


def forward(parts: Parts, params: dict, tokens_BT, positions_BT=None, segments_BT=None, dtype=jnp.float32) -> jax.Array:
    """The whole model → float32 logits [B, T, V]. params: {"embed", "layers" (leaves [L, ...]), "head"}."""
    positions_BT = default_positions(tokens_BT) if positions_BT is None else positions_BT
    x_BTD = parts.embed(params["embed"], tokens_BT, positions_BT, dtype)
    x_BTD, _ = jax.lax.scan(lambda x, layer: (parts.block(layer, x, positions_BT, segments_BT), None), x_BTD, params["layers"])
    return parts.head(params["head"], x_BTD, params["embed"]["table"] if parts.cfg.tied_embeddings else None)
