"""A family of published models, and what several families share."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.config import ModelConfig, ResolvedModel
from jaxtrain.config.groups.layer_kinds import forms_of_kinds, kinds_of_layers, of_kind
from jaxtrain.hf.entries import (
    Fixed,
    Float,
    Integer,
    Only,
    PassedOver,
    RemoteCode,
    Settings,
    Switch,
    TableEntry,
    Training,
)
from jaxtrain.hf.fields import Fields
from jaxtrain.hf.tensor_rules import PublishedTensor, TensorRule, check_coverage, published_tensors

# Counts that training keeps among the parameters; no published model has them.
COUNTERS = ("mlp/router/load", "mlp/router/dropped")
ROTARY_BUFFER = "rotary_emb.inv_freq"  # in files of older versions
EMBEDDING, HEAD = "embed/table", "lm_head.weight"  # stored array, published tensor

Rules = Callable[[ResolvedModel, Mapping[str, Any]], Iterator[TensorRule]]


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of published models.

    model_type, architecture: as in config.json
    models:  published ones, for people
    table:   the fields of config.json in the model, both ways, in the order in which they are read
    rules:   (model, config.json) → the rules of all tensors
    aliases: other name of a field → its name in the table (transformers' `attribute_map`)
    prefix:  before the names of all tensors but the output matrix; files of older versions lack it
    dropped: the ends of names of tensors that hold no parameters
    joins_experts: a tensor has all experts of a layer
    unread:  the beginnings of names of tensors that the model has no use for
    """

    model_type: str
    architecture: str
    models: str
    table: tuple[TableEntry, ...]
    rules: Rules
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: str = "model."
    dropped: tuple[str, ...] = (ROTARY_BUFFER,)
    joins_experts: bool = False
    unread: tuple[str, ...] = ()

    def read(self, fields: Fields) -> Settings:
        """The settings of a config.json's model. Raises HfError for what the model cannot be."""
        settings: Settings = {}
        for entry in self.table:
            settings |= entry.read(fields, settings)
        return settings

    def write(self, model: ResolvedModel, length: int) -> Settings:
        """The config.json of a model, whose longest sequence has `length` tokens."""
        values: Settings = {}
        for entry in self.table:
            values |= entry.write(model, length)
        return values

    def source(self, setting: str) -> str:
        """The field that gives a setting; the family's name for one that no field gives."""
        sources = {name: field for entry in self.table for name, field in entry.sources.items()}
        return sources.get(setting, "model_type")

    def layout(
        self,
        model: ResolvedModel,
        config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> tuple[list[TensorRule], list[PublishedTensor]]:
        """The rules and the tensors of a model with this config.json.

        shapes: stored array → shape, of all parameters
        """
        rules = list(self.rules(model, config))
        published = {name: shape for name, shape in shapes.items() if not name.endswith(COUNTERS)}
        check_coverage(rules, published)
        return rules, list(published_tensors(rules, published))

    def copies(
        self, model: ResolvedModel, tensors: Sequence[PublishedTensor]
    ) -> dict[str, PublishedTensor]:
        """Name of a tensor that a folder may have besides those of `layout` → the one of these that
        has its numbers: the output matrix of tied embeddings, and both tables in prediction
        modules."""
        by_array = {tensor.rules[0].array: tensor for tensor in tensors}
        embedding = by_array[EMBEDDING]
        copies = {HEAD: embedding} if model.tied_embeddings else {}
        for module in prediction_modules(model):
            copies[f"{module}.embed_tokens.weight"] = embedding
            copies[f"{module}.shared_head.head.weight"] = by_array.get("head/table", embedding)
        return copies


# --- tables ---------------------------------------------------------------------------------------

# What the config.json of every family may have.
COMMON: tuple[TableEntry, ...] = (
    Only("is_encoder_decoder", (False,), written=False),
    Only("is_decoder", (False,), written=False),
    Only("add_cross_attention", (False,), written=False),
    Only("cross_attention_hidden_size", (None,), written=False),
    Only("tie_encoder_decoder", (False,), written=False),
    Only("pruned_heads", ({},), written=False),
)


SILU = Only("hidden_act", ("silu", "swish"))
SWIGLU: tuple[TableEntry, ...] = (SILU, Fixed({"norm": "rmsnorm", "activation": "swiglu"}))


def decoder(
    vocab: int,
    width: int,
    layers: int,
    heads: int,
    epsilon: float,
    tied: bool = False,
    remote_code: str = "",
    epsilon_field: str = "rms_norm_eps",
    activation: tuple[TableEntry, ...] = SWIGLU,
) -> tuple[TableEntry, ...]:
    """Entries of a decoder, with RMSNorm and SwiGLU unless `activation` says something else.

    remote_code: see RemoteCode; epsilon_field: of the norms; the others are transformers' defaults
    """
    return (
        *COMMON,
        Integer("vocab_size", "vocab_size", vocab),
        Integer("hidden_size", "width", width),
        Integer("num_hidden_layers", "layers", layers),
        Integer("num_attention_heads", "heads", heads),
        Float(epsilon_field, "norm_epsilon", epsilon),
        Float("initializer_range", "init_std", 0.02),
        Switch("tie_word_embeddings", "tied_embeddings", tied),
        PassedOver(("pretraining_tp", "max_window_layers")),
        Training(("attention_dropout", "hidden_dropout", "residual_dropout")),
        *activation,
        RemoteCode(remote_code),
    )


# Training of a router, which is the run's.
ROUTER_TRAINING = Training(
    (
        "aux_loss_alpha",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
    )
)
NORMALIZED = ("never", "always")  # router_normalize where norm_topk_prob is false, and true


def experts(
    mlp: int, width: int, count: int, choices: Any = 8, field: str = "n_routed_experts"
) -> tuple[TableEntry, ...]:
    """Entries of a model with experts, and with one MLP in layers without them.

    mlp, width, count, choices: transformers' defaults of the columns of an MLP and of an expert,
        of the number of experts, and of those of a token
    field: the number of experts
    """
    return (
        Integer("intermediate_size", "mlp_width", mlp),
        Integer("moe_intermediate_size", "expert_width", width),
        Integer(field, "experts", count),
        Integer("num_experts_per_tok", "experts_per_token", choices),
    )


def sigmoid_router(groups: int, group_limit: int, scale: float) -> tuple[TableEntry, ...]:
    """Entries of DeepSeek-V3's router, whose biases balance the experts. Arguments are
    transformers' defaults."""
    return (
        Integer("n_group", "router_groups", groups),
        Integer("topk_group", "router_group_limit", group_limit),
        Float("routed_scaling_factor", "router_scale", scale),
        Switch("norm_topk_prob", "router_normalize", True, NORMALIZED),
        Only("scoring_func", ("sigmoid",), written=False),
        Only("topk_method", ("noaux_tc",), written=False),
        Fixed({"router": "sigmoid", "router_bias": True, "router_group_best": 2}),
    )


DEEPSEEK_ALIASES = {
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}


# --- rules ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LayerPlace:
    """A layer on both sides.

    tensors: the beginning of its tensors' names
    arrays:  that of its arrays' names; index: its index in them
    model:   of the layer's kind, without experts if it has none
    """

    tensors: str
    arrays: str
    index: tuple[int, ...]
    model: ResolvedModel

    def vector(self, tensor: str, array: str, **taken: Any) -> TensorRule:
        """The rule of a tensor that is stored as it is published; `taken`, `columns`: TensorRule's.
        Both names begin with the layer's."""
        return TensorRule(f"{self.tensors}.{tensor}", f"{self.arrays}/{array}", self.index, **taken)

    def matrix(
        self, tensor: str, array: str, biased: bool = False, **taken: Any
    ) -> Iterator[TensorRule]:
        """The rules of a matrix that torch has as [out, in], and of its bias."""
        yield self.vector(f"{tensor}.weight", f"{array}/weight", transpose=True, **taken)
        if biased:
            yield self.vector(f"{tensor}.bias", f"{array}/bias", **taken)


def layers_of(model: ResolvedModel, tensors: str = "model.layers") -> Iterator[LayerPlace]:
    """The layers of a model. tensors: the beginning of all layers' names"""
    kinds, forms = kinds_of_layers(model), forms_of_kinds(model)
    stacked: collections.Counter[str] = collections.Counter()
    for number, kind in enumerate(kinds):
        of_layer = of_kind(model, kind)
        if number < model.dense_layers:  # these are not stacked
            of_layer = dataclasses.replace(of_layer, experts=0)
            yield LayerPlace(f"{tensors}.{number}", f"first/{number}", (), of_layer)
            continue
        form = forms[kind]
        arrays, index = f"layers/{form}".rstrip("/"), (stacked[form],)
        stacked[form] += 1
        yield LayerPlace(f"{tensors}.{number}", arrays, index, of_layer)


def prediction_modules(model: ModelConfig) -> list[str]:
    """The names before those of the tensors of each module of multi-token prediction, which follow
    the layers."""
    layers = model.dense_layers + model.layers
    return [f"model.layers.{layers + number}" for number in range(model.mtp_depth)]


# Where the norms of a layer are (model.norm_place) → array → tensor.
NORMS = {
    "before": {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    "after": {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}
GATED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}  # part of an MLP → its name


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's experts on disk.

    module, shared: of the layer, and of the experts that all tokens use
    experts:        part of an expert's MLP → its name
    """

    module: str = "mlp"
    shared: str = "shared_experts"
    experts: Mapping[str, str] = dataclasses.field(default_factory=lambda: GATED)


PartRules = Callable[[LayerPlace, Mapping[str, Any]], Iterator[TensorRule]]


def attention_rules(place: LayerPlace, config: Mapping[str, Any]) -> Iterator[TensorRule]:
    """The rules of a layer's attention. config: of the model"""
    if place.model.attention == "mla":
        # a family without this field has pairs
        return _latent_attention(place, config.get("rope_interleave", True))
    return grouped_attention(place, config)


def grouped_attention(
    place: LayerPlace, config: Mapping[str, Any], pairs: bool = False
) -> Iterator[TensorRule]:
    """The rules of grouped-query attention. pairs: the published columns of queries and keys are
    rotated in pairs (0, 1), (2, 3), …; those of a checkpoint are halves of a head"""
    model = place.model
    for name, part in {"q": "query", "k": "key", "v": "value", "o": "out"}.items():
        heads = {"query": model.heads, "key": model.kv_heads}.get(part, 0)
        head = _halves(model.head_dim, True)
        columns = (np.arange(heads)[:, None] * model.head_dim + head).ravel()
        yield from place.matrix(
            f"self_attn.{name}_proj",
            f"attention/{part}",
            ("out" if part == "out" else "qkv") in model.biases,
            taken=columns if pairs and heads else None,
        )
    if model.qk_norm:
        yield place.vector("self_attn.q_norm.weight", "attention/query_norm/scale")
        yield place.vector("self_attn.k_norm.weight", "attention/key_norm/scale")
    if model.sinks:
        yield place.vector("self_attn.sinks", "attention/sinks")


def mlp_rules(
    place: LayerPlace, config: Mapping[str, Any], names: ExpertNames = ExpertNames()
) -> Iterator[TensorRule]:
    """The rules of a layer's MLP, or of its experts."""
    if place.model.experts:
        yield from _experts(place, names)
        return
    for part, name in GATED.items():
        yield from place.matrix(f"mlp.{name}", f"mlp/{part}", "mlp" in place.model.biases)


def decoder_rules(
    model: ResolvedModel,
    config: Mapping[str, Any],
    attention: PartRules = attention_rules,
    mlp: PartRules = mlp_rules,
) -> Iterator[TensorRule]:
    """The rules of a decoder as Llama is published, with any kind of attention and MLP that the
    model has.

    attention, mlp: the rules of these parts of a layer
    """

    def layer(place: LayerPlace) -> Iterator[TensorRule]:
        norms = NORMS[model.norm_place]
        if model.parallel_block:  # attention and MLP read one norm
            norms = {"attention_norm": norms["attention_norm"]}
        for array, tensor in norms.items():
            yield place.vector(f"{tensor}.weight", f"{array}/scale")
        yield from attention(place, config)
        yield from mlp(place, config)

    yield TensorRule("model.embed_tokens.weight", "embed/table")
    yield TensorRule("model.norm.weight", "head/norm/scale")
    if not model.tied_embeddings:
        yield TensorRule("lm_head.weight", "head/table")
    for place in layers_of(model):
        yield from layer(place)
    for number, module in enumerate(prediction_modules(model)):
        arrays = f"predictors/{number}"
        yield TensorRule(f"{module}.enorm.weight", f"{arrays}/token_norm/scale")
        yield TensorRule(f"{module}.hnorm.weight", f"{arrays}/hidden_norm/scale")
        yield TensorRule(f"{module}.eh_proj.weight", f"{arrays}/project/weight", transpose=True)
        block = dataclasses.replace(place, tensors=module, arrays=f"{arrays}/block", index=())
        yield from layer(block)
        yield TensorRule(f"{module}.shared_head.norm.weight", f"{arrays}/norm/scale")


def _latent_attention(place: LayerPlace, interleaved: bool) -> Iterator[TensorRule]:
    """Rules of an attention through latents. Its rotated columns are pairs if `interleaved`, and
    halves in a checkpoint."""
    model = place.model
    plain, rope, queries, latent = (
        model.head_dim,
        model.rope_head_dim,
        model.query_rank,
        model.kv_rank,
    )
    rotated = _halves(rope, interleaved)
    head = np.concatenate([np.arange(plain), plain + rotated])
    heads = (np.arange(model.heads)[:, None] * (plain + rope) + head).ravel()
    key = np.concatenate([np.arange(latent), latent + rotated])
    biased = "qkv" in model.biases  # of the matrices that compress
    compress = lambda name, taken, columns: place.matrix(
        f"self_attn.{name}", "attention/compress", biased, taken=taken, columns=columns
    )
    if queries:
        yield from compress("q_a_proj", None, (0, queries))
    yield from compress("kv_a_proj_with_mqa", key, (queries, queries + latent + rope))
    if queries:
        yield place.vector("self_attn.q_a_layernorm.weight", "attention/query_norm/scale")
    query = "q_b_proj" if queries else "q_proj"
    yield from place.matrix(f"self_attn.{query}", "attention/query", taken=heads)
    yield place.vector("self_attn.kv_a_layernorm.weight", "attention/norm/scale")
    yield from place.matrix("self_attn.kv_b_proj", "attention/expand")
    yield from place.matrix("self_attn.o_proj", "attention/out", "out" in model.biases)


def _halves(size: int, interleaved: bool) -> np.ndarray:
    """The order in which the columns of pairs (0, 1), (2, 3), … become two halves."""
    order = np.arange(size)
    return np.concatenate([order[::2], order[1::2]]) if interleaved else order


def _experts(place: LayerPlace, names: ExpertNames) -> Iterator[TensorRule]:
    """Rules of a layer's router, of its experts, and of those that all tokens use."""
    model, module = place.model, names.module
    yield from place.matrix(f"{module}.gate", "mlp/router")
    if model.router_bias:
        yield place.vector(f"{module}.gate.e_score_correction_bias", "mlp/router/bias")
    for part, name in names.experts.items():
        for expert in range(model.experts):
            one = dataclasses.replace(place, index=(*place.index, expert))
            yield one.vector(
                f"{module}.experts.{expert}.{name}.weight", f"mlp/{part}", transpose=True
            )
        if model.shared_experts:
            shared = f"{module}.{names.shared}.{name}"
            yield place.vector(f"{shared}.weight", f"mlp/shared_{part}", transpose=True)
            if "mlp" in model.biases:
                yield place.vector(f"{shared}.bias", f"mlp/shared_biases/{part}")
