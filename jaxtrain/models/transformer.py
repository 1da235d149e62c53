"""A decoder-only transformer in parts: embedder, blocks, head. Single-device code with logical axis
names.

The runtime uses each part separately and spreads them over stages. `logits` runs all of them on one
device, or on a mesh without stages by the logical axes; it is the reference in tests.

Shape suffixes: B batch, T tokens, D width, V vocabulary (in memory: padded), C tokens of a chunk.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config import ResolvedModel
from jaxtrain.config.groups.layer_kinds import (
    forms_of_kinds,
    kinds_of_layers,
    of_kind,
    periods_of,
    stacked_kinds,
)
from jaxtrain.config.saved_values import ATTENTION_NORM, ATTENTION_OUT, MLP_NORM, MLP_OUT
from jaxtrain.config.sizes import padded_vocabulary
from jaxtrain.devices.sharding import constrain
from jaxtrain.models.grouped_query import Attention
from jaxtrain.models.latent import LatentAttention
from jaxtrain.models.layers import (
    MLP,
    SPLIT,
    Dense,
    Norm,
    contract_rows,
    gather_sequence,
    named,
)
from jaxtrain.models.moe import MoE
from jaxtrain.models.mup import growth, parametrized
from jaxtrain.models.own_module import OwnModule
from jaxtrain.models.spec import Parameter, Spec, binder, parameter, specs
from jaxtrain.parallel.dropout import AFTER_ATTENTION, AFTER_MLP, dropout
from jaxtrain.parallel.tensor import flat, lookup, scattered_products

ATTENTION: dict[str, type[Attention] | type[LatentAttention]] = {
    "gqa": Attention,
    "mla": LatentAttention,
}


def _table(cfg: ResolvedModel, padded: int, axis: str) -> Parameter:
    """A matrix [vocabulary, width], with `padded` rows in memory."""
    shape, axes = (cfg.vocab_size, cfg.width), (axis, "width")
    return parameter(Spec(shape, axes, std=cfg.init_std, padded=(padded, cfg.width)))


class Embedder(nnx.Module):
    """Token embeddings, plus learned positions where the model has them.

    padded: number of the table's rows in memory; vocab: logical axis of these rows
    """

    def __init__(self, cfg: ResolvedModel, padded: int, vocab: str = "vocab"):
        positions = Spec((cfg.max_positions, cfg.width), ("position", "width"), std=cfg.init_std)
        self.table, self.scale = _table(cfg, padded, vocab), cfg.embedding_scale
        self.positions = parameter(positions) if cfg.positions == "learned" else None

    def __call__(self, tokens_BT, positions_BT, dtype) -> jax.Array:
        """tokens int32 [B, T], positions int32 [B or 1, T] → [B, T, D] of `dtype`."""
        return self.add_positions(self.lookup(tokens_BT, dtype), positions_BT)

    def lookup(self, tokens_BT, dtype) -> jax.Array:
        """The tokens' rows of the table with their scale, without positions; zero for a token that
        is not in it."""
        return scaled(lookup(self.table[...], tokens_BT).astype(dtype), self.scale)

    def add_positions(self, x_BTD, positions_BT) -> jax.Array:
        """Embeddings [B, T, D] plus those of their positions, where the model has learned ones."""
        if self.positions is not None:
            x_BTD = x_BTD + constrain(
                self.positions[...].astype(x_BTD.dtype)[positions_BT], (None, *SPLIT[1:])
            )
        return constrain(x_BTD, SPLIT)


def scaled(x_BTD, scale: float) -> jax.Array:
    """Embeddings, or their gradient, times the scale, which is rounded to their dtype first as in
    Gemma's published code."""
    return x_BTD if scale == 1 else x_BTD * jnp.asarray(scale, x_BTD.dtype)


def add_position_gradient(positions_PD, positions_BT, g_BTD) -> jax.Array:
    """The accumulator of learned positions plus the gradient of the embedder's output."""
    g_BTD = gather_sequence(g_BTD)
    if positions_BT.shape[0] == 1:  # the same positions in every sequence
        g_BTD = g_BTD.astype(jnp.float32).sum(0, keepdims=True)
    return positions_PD.at[positions_BT].add(g_BTD.astype(positions_PD.dtype))


class Block(nnx.Module):
    """Attention and MLP, each added to the residual stream, with norms of their inputs (…_norm), of
    their outputs (…_out_norm), or of both. In a parallel block the MLP reads attention's input.

    dense: all tokens go through one MLP, even in a model that has experts
    """

    def __init__(
        self,
        cfg: ResolvedModel,
        context: str = "all_gather",
        batch_size: int = 1,
        expert_nodes: int = 1,
        dense: bool = False,
    ):
        # As in GPT-2: the variance of the residual stream does not grow with depth.
        residual_std = cfg.init_std / math.sqrt(2 * (cfg.dense_layers + cfg.layers))
        has_experts = cfg.experts > 0 and not dense
        before, after = cfg.norm_place != "after", cfg.norm_place != "before"
        self.is_parallel = cfg.parallel_block
        self.attention_norm = Norm(cfg) if before else None
        self.mlp_norm = Norm(cfg) if before and not self.is_parallel else None
        self.attention_out_norm = Norm(cfg) if after else None
        self.mlp_out_norm = Norm(cfg) if after else None
        self.dropout = cfg.dropout_residual
        self.attention = (
            OwnModule(cfg) if cfg.mixer else ATTENTION[cfg.attention](cfg, residual_std, context)
        )
        self.mlp = (
            MoE(cfg, residual_std, batch_size, expert_nodes)
            if has_experts
            else MLP(cfg, residual_std)
        )

    def __call__(self, x_BTD, positions_BT, segments_BT=None, noise_BT=None) -> jax.Array:
        """[B, T, D] → [B, T, D]. noise_BT: of the layer (parallel/dropout.py); None: no dropout"""
        attend = lambda y_BTD: self.attention(y_BTD, positions_BT, segments_BT, noise_BT)
        return constrain(self._residual_sum(x_BTD, attend, self.mlp, noise_BT), SPLIT)

    def _residual_sum(self, x_BTD, attend: Callable, mlp: Callable, noise_BT=None) -> jax.Array:
        """x plus what attention and MLP, functions of [B, T, D], make of it."""
        y_BTD = x_BTD
        if self.attention_norm is not None:
            y_BTD = named(ATTENTION_NORM, self.attention_norm(x_BTD))
        attended_BTD = named(ATTENTION_OUT, attend(y_BTD))
        if self.attention_out_norm is not None:
            attended_BTD = self.attention_out_norm(attended_BTD)
        x_BTD = x_BTD + dropout(attended_BTD, AFTER_ATTENTION, self.dropout, noise_BT)
        if self.mlp_norm is not None:
            y_BTD = named(MLP_NORM, self.mlp_norm(x_BTD))
        elif not self.is_parallel:
            y_BTD = x_BTD
        y_BTD = named(MLP_OUT, mlp(y_BTD))
        if self.mlp_out_norm is not None:
            y_BTD = self.mlp_out_norm(y_BTD)
        return x_BTD + dropout(y_BTD, AFTER_MLP, self.dropout, noise_BT)

    def cache_arrays(self, batch: int, slots: int, dtype):
        """The arrays of attention's cache (generation/decode.py)."""
        return self.attention.cache_arrays(batch, slots, dtype)

    def cached(self, x_BTD, positions_BT, cache, start, count):
        """Returns (the output [B, T, D], the cache with these tokens), for generation/decode.py."""

        def attend(y_BTD):
            nonlocal cache
            y_BTD, cache = self.attention.cached(y_BTD, positions_BT, cache, start, count)
            return y_BTD

        routed = isinstance(self.mlp, MoE)
        mlp = functools.partial(self.mlp, drops=False) if routed else self.mlp
        return self._residual_sum(x_BTD, attend, mlp), cache


def block_of(cfg: ResolvedModel, *args: Any, **settings: Any) -> Block | OwnModule:
    """A block of one's own, or ours. Arguments as of `Block`."""
    return OwnModule(cfg) if cfg.block else Block(cfg, *args, **settings)


class Predictor(nnx.Module):
    """A module of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2). Module k
    predicts one token more ahead than module k − 1.

    It uses the model's embedding and output matrix. The norm before that matrix is no part of the
    module (it is `ModelParts.norm`), since the next module continues from the normed stream, as in
    DeepSeek-V3's released weights; so does the order of `project`'s inputs, embeddings first.
    """

    def __init__(
        self,
        cfg: ResolvedModel,
        context: str = "all_gather",
        batch_size: int = 1,
        expert_nodes: int = 1,
    ):
        self.hidden_norm, self.token_norm = Norm(cfg), Norm(cfg)
        self.project = Dense(2 * cfg.width, cfg.width, ("width", "width"), cfg.init_std, bias=False)
        self.block = block_of(cfg, context, batch_size, expert_nodes)

    def __call__(self, x_BTD, next_BTD, positions_BT, segments_BT=None, noise_BT=None) -> jax.Array:
        """Returns the module's residual stream [B, T, D].

        x_BTD: the normed stream of the module before, or of the model
        next_BTD: embeddings of the tokens that this stream predicts
        """
        both = jnp.concatenate([self.token_norm(next_BTD), self.hidden_norm(x_BTD)], -1)
        x_BTD = constrain(self.project(both), SPLIT)
        return self.block(x_BTD, positions_BT, segments_BT, noise_BT)


@jax.custom_vjp
def vocabulary_logits(x_BCD, table_VD) -> jax.Array:
    """x @ tableᵀ in float32 [B, C, V] from operands of the compute type, x split along the
    sequence. The backward's two products are of the compute type, too; the automatic transpose
    would make them float32."""
    return _vocabulary_logits(x_BCD, table_VD)[0]


def _vocabulary_logits(x_BCD, table_VD):
    x_BCD = gather_sequence(x_BCD)
    logits = jnp.einsum("bcd,vd->bcv", x_BCD, table_VD, preferred_element_type=jnp.float32)
    return logits, (x_BCD, table_VD)


def _vocabulary_logits_backward(saved, g_BCV):
    x_BCD, table_VD = saved
    g_BCV = g_BCV.astype(x_BCD.dtype)
    return scattered_products([g_BCV], [table_VD], 0), contract_rows(flat(g_BCV), flat(x_BCD))


vocabulary_logits.defvjp(_vocabulary_logits, _vocabulary_logits_backward)


def head_norm(cfg: ResolvedModel) -> Norm:
    """The norm in front of the output matrix, with μP's factor on the logits."""
    return Norm(cfg, multiplier=1 / growth(cfg))


class Head(nnx.Module):
    """Final norm and the projection to the vocabulary, then the logits' factor and bound. A tied
    head has no table and is called with the embedding's."""

    def __init__(self, cfg: ResolvedModel, padded: int, vocab: str = "vocab"):
        self.vocab_size, self.padded = cfg.vocab_size, padded != cfg.vocab_size
        self.norm, self.scale, self.softcap = head_norm(cfg), cfg.logit_scale, cfg.logit_softcap
        self.table = None if cfg.tied_embeddings else _table(cfg, padded, vocab)

    def __call__(self, x_BCD, tied_table=None, first_row=0) -> jax.Array:
        """[B, C, D] → float32 logits [B, C, V]; those of padding are −inf.

        tied_table: the embedding's table [V, D], for a head that has none
        first_row: the table's first row in the vocabulary, if it is a shard of the table
        """
        table_VD = tied_table if self.table is None else self.table[...]
        logits = constrain(
            vocabulary_logits(self.norm(x_BCD), table_VD.astype(x_BCD.dtype)),
            ("batch", "token", "vocab"),
        )
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        if self.padded:
            row = first_row + jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
            logits = jnp.where(row < self.vocab_size, logits, -jnp.inf)
        return logits


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """The model's parts. Each is a function from its parameters, a nested dict of arrays, to the
    module with these parameters: `parts.blocks[kind](params)(x, positions, segments)`.

    specs: the parameters' specifications {"embed": …, "layer": … of one layer, "head": …}, and
        where the model has them "first": {"0": …} of the dense layers before the others, and
        "predictors": {"0": …}, each with the "norm" behind it. Where layers are of several forms
        (config/groups/layer_kinds.py), "layer" is {form: … of one layer}
    blocks: by kind of layer
    cache_arrays: by kind, the arrays of a layer's cache (generation/decode.py)
    dense_blocks: by kind, blocks without experts, for the layers "first"
    norm: the norm behind a predictor, and the head's
    """

    cfg: ResolvedModel
    specs: dict[str, dict]
    embedder: Callable[[dict], Embedder]
    dense_blocks: dict[str, Callable[[dict], Block | OwnModule]]
    blocks: dict[str, Callable[[dict], Block | OwnModule]]
    head: Callable[[dict], Head]
    norm: Callable[[dict], Norm]
    predictor: Callable[[dict], Predictor]
    cache_arrays: dict[str, Callable[..., Any]]

    @property
    def ends(self) -> dict[str, dict]:
        """The specifications of everything but the stacked layers."""
        return {name: tree for name, tree in self.specs.items() if name != "layer"}

    @property
    def parameter_count(self) -> int:
        """Parameters of the model, padding not counted."""
        count = lambda tree: sum(s.size for s in jax.tree.leaves(tree))
        layers = sum(count(self.layer_specs(kind)) for kind in stacked_kinds(self.cfg))
        return count(self.ends) + layers

    def layer_specs(self, kind: str) -> dict:
        """The specifications of one layer of a kind, outside of the dense layers before all
        others."""
        form = forms_of_kinds(self.cfg)[kind]
        return self.specs["layer"][form] if form else self.specs["layer"]

    def capacity(self, prompt: int) -> int:
        """The most tokens that can follow a prompt of this many: a learned position table ends,
        rotary positions do not."""
        positions = self.cfg.max_positions if self.cfg.positions == "learned" else 2**30
        return max(0, positions - prompt)


def build(
    cfg: ResolvedModel,
    model_shards: int = 1,
    stage_shards: int = 1,
    context: str = "all_gather",
    batch_size: int = 1,
    expert_nodes: int = 1,
) -> ModelParts:
    """The parts of the model that a config describes.

    model_shards, stage_shards: devices over which `model`, and `stage` where all stages share the
        vocabulary, split it; it is padded for their product.
    context: how attention reaches the tokens of other devices, where a sequence is split over the
        mesh's context axis (parallel/attention/context.py).
    batch_size: sequences in a step, over which the routers' losses are a mean.
    expert_nodes: the nodes that experts' devices span (parallel/experts/).
    """
    padded = padded_vocabulary(cfg.vocab_size, model_shards * stage_shards)
    vocab = "staged_vocab" if stage_shards > 1 else "vocab"
    embedder, head, norm = Embedder(cfg, padded, vocab), Head(cfg, padded, vocab), head_norm(cfg)
    kinds = kinds_of_layers(cfg)
    blocks = {
        kind: block_of(of_kind(cfg, kind), context, batch_size, expert_nodes)
        for kind in dict.fromkeys(kinds[cfg.dense_layers :])
    }
    dense_blocks = {
        kind: block_of(of_kind(cfg, kind), context, dense=True)
        for kind in dict.fromkeys(kinds[: cfg.dense_layers])
    }
    forms = {form: specs(blocks[kind]) for kind, form in forms_of_kinds(cfg).items()}
    # a module of multi-token prediction has a layer of the last one's kind
    predictor = Predictor(of_kind(cfg, kinds[-1]), context, batch_size, expert_nodes)
    tree = {"embed": specs(embedder), "layer": forms.get("", forms), "head": specs(head)}
    if cfg.dense_layers:
        tree["first"] = {
            str(i): specs(dense_blocks[kind]) for i, kind in enumerate(kinds[: cfg.dense_layers])
        }
    if cfg.mtp_depth:
        module = {**specs(predictor), "norm": specs(norm)}
        tree["predictors"] = {str(d): dict(module) for d in range(cfg.mtp_depth)}
    return ModelParts(
        cfg,
        parametrized(cfg, tree),
        binder(embedder),
        {kind: binder(block) for kind, block in dense_blocks.items()},
        {kind: binder(block) for kind, block in blocks.items()},
        binder(head),
        binder(norm),
        binder(predictor),
        {kind: block.cache_arrays for kind, block in {**dense_blocks, **blocks}.items()},
    )


def default_positions(tokens_BT: jax.Array) -> jax.Array:
    """int32 [1, T]: 0, 1, 2, …"""
    return jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]


def trunk(
    parts: ModelParts,
    params: dict,
    tokens_BT,
    positions_BT=None,
    segments_BT=None,
    dtype=jnp.float32,
) -> jax.Array:
    """The residual stream [B, T, D] after the last layer, before the final norm and the head.

    params: {"embed": …, "layers": … with leaves [L, ...], and "first": {"0": …} of the dense layers
        before them, if any}; other entries are not read
    tokens_BT: int32; positions_BT: int32 [B or 1, T], None: 0, 1, 2, …
    segments_BT: int32, the document of each token; None: a sequence is one document
    dtype: of activations and matmuls; parameters keep their type
    """
    positions_BT = default_positions(tokens_BT) if positions_BT is None else positions_BT
    x_BTD = parts.embedder(params["embed"])(tokens_BT, positions_BT, dtype)
    for i, kind in enumerate(kinds_of_layers(parts.cfg)[: parts.cfg.dense_layers]):
        block = parts.dense_blocks[kind](params["first"][str(i)])
        x_BTD = block(x_BTD, positions_BT, segments_BT)

    kinds = stacked_kinds(parts.cfg)

    def layer(x_BTD, first, _, weights):
        return parts.blocks[kinds[first]](weights)(x_BTD, positions_BT, segments_BT)

    return through_layers(parts.cfg, params["layers"], x_BTD, layer)


def through_layers(cfg: ResolvedModel, layers: dict, carry: Any, layer: Callable) -> Any:
    """`carry` after all of `model.layers`, each layer(carry, first, trip, its parameters) → carry.

    Whole periods of the kinds (config/groups/layer_kinds.py) are the trips of a loop, with a block
    for each layer of a period in its body. `first` is the layer's number in the first trip. What is
    left over, and kinds without a period, are unrolled, and `trip` is 0.

    layers: leaves [layers, …], or {form: leaves [layers of the form, …]}
    """
    kinds, forms = stacked_kinds(cfg), forms_of_kinds(cfg)
    form_of_layer = [forms[kind] for kind in kinds]
    period, trips, _ = periods_of(kinds)
    size = len(period)

    def run(carry: Any, first: int, trip: Any) -> Any:
        form = form_of_layer[first]
        place = form_of_layer[:first].count(form) + trip * form_of_layer[:size].count(form)
        weights = jax.tree.map(
            lambda a: jax.lax.dynamic_index_in_dim(a, place, 0, keepdims=False),
            layers[form] if form else layers,
        )
        return layer(carry, first, trip, weights)

    def whole_period(carry: Any, trip: jax.Array) -> tuple[Any, None]:
        for first in range(size):
            carry = run(carry, first, trip)
        return carry, None

    if trips:
        carry, _ = jax.lax.scan(whole_period, carry, jnp.arange(trips))
    for first in range(trips * size, len(kinds)):
        carry = run(carry, first, 0)
    return carry


def logits(
    parts: ModelParts,
    params: dict,
    tokens_BT,
    positions_BT=None,
    segments_BT=None,
    dtype=jnp.float32,
) -> jax.Array:
    """Float32 logits [B, T, V] of all tokens. Arguments as of `trunk`, with "head" in `params`."""
    x_BTD = trunk(parts, params, tokens_BT, positions_BT, segments_BT, dtype)
    tied_table = params["embed"]["table"] if parts.cfg.tied_embeddings else None
    return parts.head(params["head"])(x_BTD, tied_table)
