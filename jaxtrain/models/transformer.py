"""A decoder-only transformer from its parts: embedder, blocks, head. Single-device code with
logical axis names.

The parts are used one by one by the runtime, which spreads them over stages; `Transformer` strings
them together for one device (and, through the logical axes, for a partitioned mesh without stages):
generation and the reference in tests.

Shape suffixes: B batch, T tokens, D width, V vocabulary (in memory: padded), C tokens of a chunk.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.costs.transformer import padded_vocabulary
from jaxtrain.devices.sharding import constrain
from jaxtrain.models.attention import Attention
from jaxtrain.models.latent import LatentAttention
from jaxtrain.models.layers import MLP, SPLIT, Dense, Norm, contract_rows, gather_sequence
from jaxtrain.models.moe import MoE
from jaxtrain.models.spec import functional, parameter, specs
from jaxtrain.parallel.tensor import lookup, scattered_products

ATTENTION = {"gqa": Attention, "mla": LatentAttention}


class Embedder(nnx.Module):
    """Token embeddings, plus learned positions where the model has them."""

    def __init__(self, cfg, vocab_rows, vocab="vocab"):
        v, d = cfg.vocab_size, cfg.width
        self.table = parameter((v, d), (vocab, "width"), std=cfg.init_std, padded=(vocab_rows, d))
        self.positions = (
            parameter((cfg.max_positions, d), ("position", "width"), std=cfg.init_std)
            if cfg.positions == "learned"
            else None
        )

    def __call__(self, tokens_BT, positions_BT, dtype) -> jax.Array:
        """tokens int32 [B, T], positions int32 [B or 1, T] → [B, T, D] of `dtype`."""
        return self.add_positions(self.lookup(tokens_BT, dtype), positions_BT)

    def lookup(self, tokens_BT, dtype) -> jax.Array:
        """The tokens' rows of the table alone; zero for a token that is not in it."""
        return lookup(self.table[...], tokens_BT).astype(dtype)

    def add_positions(self, x_BTD, positions_BT) -> jax.Array:
        """Embeddings [B, T, D] with those of their positions, where these are learned."""
        if self.positions is not None:
            x_BTD = x_BTD + constrain(
                self.positions[...].astype(x_BTD.dtype)[positions_BT], (None, *SPLIT[1:])
            )
        return constrain(x_BTD, SPLIT)


def add_position_gradient(positions_PD, positions_BT, g_BTD) -> jax.Array:
    """The accumulator of learned positions plus the gradient of the embedder's output."""
    g_BTD = gather_sequence(g_BTD)
    if positions_BT.shape[0] == 1:  # the same positions in every row
        g_BTD = g_BTD.astype(jnp.float32).sum(0, keepdims=True)
    return positions_PD.at[positions_BT].add(g_BTD.astype(positions_PD.dtype))


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, cfg, over="all_gather", batch_size=1, dense=False):
        # GPT-2: the residual stream's variance stays put with depth.
        residual_std = cfg.init_std / math.sqrt(2 * (cfg.dense_layers + cfg.layers))
        self.attention_norm, self.mlp_norm = Norm(cfg), Norm(cfg)
        self.attention = ATTENTION[cfg.attention](cfg, residual_std, over)
        self.mlp = (
            MoE(cfg, residual_std, batch_size)
            if cfg.experts and not dense
            else MLP(cfg, residual_std)
        )

    def __call__(self, x_BTD, positions_BT, segments_BT=None) -> jax.Array:
        """[B, T, D] → [B, T, D]."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions_BT, segments_BT)
        x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return constrain(x_BTD, SPLIT)

    def cached(self, x_BTD, positions_BT, cache, start):
        """As a call, with what earlier tokens left in a cache → output, new cache."""
        y, cache = self.attention.cached(self.attention_norm(x_BTD), positions_BT, cache, start)
        x_BTD = x_BTD + y
        x = self.mlp_norm(x_BTD)
        return x_BTD + (
            self.mlp(x, drops=False) if isinstance(self.mlp, MoE) else self.mlp(x)
        ), cache


class Predictor(nnx.Module):
    """A module of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): it looks one
    token further than the one before.

    Embedding and output matrix are the model's own; `norm`, the last before that matrix, stands
    beside it in `Parts.specs`. As in the released weights, what it goes on from is the stream after
    the last norm of the model, or of the module before.
    """

    def __init__(self, cfg, over="all_gather", batch_size=1):
        self.hidden_norm, self.token_norm = Norm(cfg), Norm(cfg)
        self.project = Dense(2 * cfg.width, cfg.width, ("width", "width"), cfg.init_std, cfg.biases)
        self.block = Block(cfg, over, batch_size)

    def __call__(self, x_BTD, next_BTD, positions_BT, segments_BT=None) -> jax.Array:
        """The stream of the module before after its norm, and embeddings of the tokens that it
        predicts → residual stream [B, T, D]."""
        both = jnp.concatenate([self.hidden_norm(x_BTD), self.token_norm(next_BTD)], -1)
        return self.block(constrain(self.project(both), SPLIT), positions_BT, segments_BT)


@jax.custom_vjp
def vocabulary_logits(x_BCD, table_VD) -> jax.Array:
    """x @ tableᵀ in float32 [B, C, V] from operands of the compute type, x split along the
    sequence; the backward's two matmuls keep that type as well, where the automatic transpose would
    run them in float32."""
    return _vocabulary_logits(x_BCD, table_VD)[0]


def _vocabulary_logits(x_BCD, table_VD):
    whole_BCD = gather_sequence(x_BCD)
    return jnp.einsum("bcd,vd->bcv", whole_BCD, table_VD, preferred_element_type=jnp.float32), (
        whole_BCD,
        table_VD,
    )


def _vocabulary_logits_backward(kept, g_BCV):
    whole_BCD, table_VD = kept
    g_BCV = g_BCV.astype(whole_BCD.dtype)
    flat = lambda a: a.reshape(-1, a.shape[-1])
    return scattered_products([g_BCV], [table_VD], 0), contract_rows(flat(g_BCV), flat(whole_BCD))


vocabulary_logits.defvjp(_vocabulary_logits, _vocabulary_logits_backward)


class Head(nnx.Module):
    """Final norm and the projection to the vocabulary; a tied head is given the embedding table."""

    def __init__(self, cfg, vocab_rows, vocab="vocab"):
        v, d = cfg.vocab_size, cfg.width
        self.vocab_size, self.padded = v, vocab_rows != v
        self.norm = Norm(cfg)
        self.table = (
            None
            if cfg.tied_embeddings
            else parameter((v, d), (vocab, "width"), std=cfg.init_std, padded=(vocab_rows, d))
        )

    def __call__(self, x_BCD, tied_table=None, first_row=0) -> jax.Array:
        """[B, C, D] → float32 logits [B, C, V]; those of padding rows are −inf. The table may be a
        part of one, from `first_row` on."""
        table_VD = self.table[...] if tied_table is None else tied_table
        logits = constrain(
            vocabulary_logits(self.norm(x_BCD), table_VD.astype(x_BCD.dtype)),
            ("batch", "token", "vocab"),
        )
        if self.padded:
            row = first_row + jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
            logits = jnp.where(row < self.vocab_size, logits, -jnp.inf)
        return logits


@dataclasses.dataclass(frozen=True)
class Parts:
    """The model's parts as functions of their parameters (nested dicts of arrays), and their
    parameters' specifications."""

    cfg: Any
    specs: (
        # {"embed": ..., "layer": ... of one layer, "head": ...}, and where the model has them
        # "first", "predictors": {"0": ..., ...}
        dict
    )
    embed: Callable  # (params, tokens, positions, dtype) → x
    first: Callable  # (params of one dense layer before the others, x, positions, segments) → x
    block: Callable  # (params of one layer, x, positions, segments) → x
    head: Callable  # (params, x, tied table or None) → logits
    norm: Callable  # (params of the head's norm or a predictor's, x) → x
    # (params of one without "norm", x after a norm, embeddings, positions, segments) → x
    predictor: Callable

    @property
    def ends(self) -> dict:
        """The specifications of what is no layer of the stack."""
        return {name: tree for name, tree in self.specs.items() if name != "layer"}

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model, padding not counted."""
        count = lambda name: sum(s.size for s in jax.tree.leaves(self.specs[name]))
        return sum(count(name) * (self.cfg.layers if name == "layer" else 1) for name in self.specs)


def build(
    cfg, model_shards: int = 1, stage_shards: int = 1, over: str = "all_gather", batch_size: int = 1
) -> Parts:
    """The parts of the model that a (resolved) model config describes.

    Its vocabulary is padded for `model_shards`, times `stage_shards` where the stages share it.
    `over`: how attention goes over a sequence that several devices share (parallel/context.py).
    batch_size: sequences in a step, for losses of the layers' own.
    """
    rows = padded_vocabulary(cfg.vocab_size, model_shards * stage_shards)
    vocab = "staged_vocab" if stage_shards > 1 else "vocab"
    embed, block, head = (
        Embedder(cfg, rows, vocab),
        Block(cfg, over, batch_size),
        Head(cfg, rows, vocab),
    )
    first, norm, predictor = (
        Block(cfg, over, dense=True),
        Norm(cfg),
        Predictor(cfg, over, batch_size),
    )
    tree = {"embed": specs(embed), "layer": specs(block), "head": specs(head)}
    if cfg.dense_layers:
        tree["first"] = {str(i): specs(first) for i in range(cfg.dense_layers)}
    if cfg.mtp_depth:
        tree["predictors"] = {
            str(d): {**specs(predictor), "norm": specs(norm)} for d in range(cfg.mtp_depth)
        }
    return Parts(cfg, tree, *map(functional, (embed, first, block, head, norm, predictor)))


def default_positions(tokens_BT: jax.Array) -> jax.Array:
    """int32 [1, T]: 0, 1, 2, …"""
    return jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]


def trunk(
    parts: Parts, params: dict, tokens_BT, positions_BT=None, segments_BT=None, dtype=jnp.float32
) -> jax.Array:
    """The model without its head → residual stream [B, T, D]. params: {"embed", "first" if any,
    "layers" (leaves [L, ...]), …}."""
    positions_BT = default_positions(tokens_BT) if positions_BT is None else positions_BT
    x_BTD = parts.embed(params["embed"], tokens_BT, positions_BT, dtype)
    for i in range(parts.cfg.dense_layers):
        x_BTD = parts.first(params["first"][str(i)], x_BTD, positions_BT, segments_BT)
    return jax.lax.scan(
        lambda x, layer: (parts.block(layer, x, positions_BT, segments_BT), None),
        x_BTD,
        params["layers"],
    )[0]


def logits(
    parts: Parts, params: dict, tokens_BT, positions_BT=None, segments_BT=None, dtype=jnp.float32
) -> jax.Array:
    """The whole model → float32 logits [B, T, V]. params: those of `trunk` and "head"."""
    x_BTD = trunk(parts, params, tokens_BT, positions_BT, segments_BT, dtype)
    return parts.head(
        params["head"], x_BTD, params["embed"]["table"] if parts.cfg.tied_embeddings else None
    )
