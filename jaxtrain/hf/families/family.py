"""A family of published models, and what several families share."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.config import ModelConfig, ResolvedModel
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
    """

    model_type: str
    architecture: str
    models: str
    table: tuple[TableEntry, ...]
    rules: Rules
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: str = "model."
    dropped: tuple[str, ...] = (ROTARY_BUFFER,)

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


def decoder(
    vocab: int,
    width: int,
    layers: int,
    heads: int,
    epsilon: float,
    tied: bool = False,
    remote_code: str = "",
) -> tuple[TableEntry, ...]:
    """Entries of a decoder with RMSNorm and SwiGLU.

    remote_code: see RemoteCode; the others are transformers' defaults
    """
    return (
        *COMMON,
        Integer("vocab_size", "vocab_size", vocab),
        Integer("hidden_size", "width", width),
        Integer("num_hidden_layers", "layers", layers),
        Integer("num_attention_heads", "heads", heads),
        Float("rms_norm_eps", "norm_epsilon", epsilon),
        Float("initializer_range", "init_std", 0.02),
        Switch("tie_word_embeddings", "tied_embeddings", tied),
        Only("hidden_act", ("silu", "swish")),
        PassedOver(("pretraining_tp", "max_window_layers")),
        Training(("attention_dropout", "hidden_dropout", "residual_dropout")),
        Fixed({"norm": "rmsnorm", "activation": "swiglu"}),
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
# DeepSeek-V3's router, whose biases balance the experts.
SIGMOID_ROUTER: tuple[TableEntry, ...] = (
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


def layers_of(model: ModelConfig) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """(layer, name of its arrays, index in them) of all layers."""
    for layer in range(model.dense_layers):
        yield layer, f"first/{layer}", ()
    for layer in range(model.layers):
        yield model.dense_layers + layer, "layers", (layer,)


def prediction_modules(model: ModelConfig) -> list[str]:
    """The names before those of the tensors of each module of multi-token prediction, which follow
    the layers."""
    layers = model.dense_layers + model.layers
    return [f"model.layers.{layers + number}" for number in range(model.mtp_depth)]


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's experts on disk.

    module:  of the layer
    experts: part of an expert's MLP → its name
    """

    module: str = "mlp"
    experts: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    )


def decoder_rules(
    model: ResolvedModel, config: Mapping[str, Any], names: ExpertNames = ExpertNames()
) -> Iterator[TensorRule]:
    """The rules of a decoder as Llama is published, with any kind of attention and MLP that the
    model has."""
    yield TensorRule("model.embed_tokens.weight", "embed/table")
    yield TensorRule("model.norm.weight", "head/norm/scale")
    if not model.tied_embeddings:
        yield TensorRule("lm_head.weight", "head/table")
    # a family without this field has pairs
    interleaved = config.get("rope_interleave", True)
    for layer, arrays, index in layers_of(model):
        # the layers before those with experts are not stacked
        experts = names if model.experts and index else None
        yield from _layer(model, interleaved, experts, f"model.layers.{layer}", arrays, index)
    for number, module in enumerate(prediction_modules(model)):
        arrays, experts = f"predictors/{number}", names if model.experts else None
        yield TensorRule(f"{module}.enorm.weight", f"{arrays}/token_norm/scale")
        yield TensorRule(f"{module}.hnorm.weight", f"{arrays}/hidden_norm/scale")
        yield TensorRule(f"{module}.eh_proj.weight", f"{arrays}/project/weight", transpose=True)
        yield from _layer(model, interleaved, experts, module, f"{arrays}/block", ())
        yield TensorRule(f"{module}.shared_head.norm.weight", f"{arrays}/norm/scale")


def _layer(
    model: ResolvedModel,
    interleaved: bool,
    experts: ExpertNames | None,
    tensors: str,
    arrays: str,
    index: tuple[int, ...],
) -> Iterator[TensorRule]:
    """Rules of a layer. interleaved: as in `_latent_attention`; experts: None for an MLP"""
    yield TensorRule(f"{tensors}.input_layernorm.weight", f"{arrays}/attention_norm/scale", index)
    yield TensorRule(
        f"{tensors}.post_attention_layernorm.weight", f"{arrays}/mlp_norm/scale", index
    )
    attention, stored = f"{tensors}.self_attn", f"{arrays}/attention"
    if model.attention == "mla":
        yield from _latent_attention(model, interleaved, attention, stored, index)
    else:  # grouped queries: both sides rotate halves of a head
        for name, part in {"q": "query", "k": "key", "v": "value", "o": "out"}.items():
            bias = ("out" if part == "out" else "qkv") in model.biases
            yield from _matrix(f"{attention}.{name}_proj", f"{stored}/{part}", index, bias)
        if model.qk_norm:
            yield TensorRule(f"{attention}.q_norm.weight", f"{stored}/query_norm/scale", index)
            yield TensorRule(f"{attention}.k_norm.weight", f"{stored}/key_norm/scale", index)
    if experts:
        yield from _experts(model, experts, tensors, f"{arrays}/mlp", index)
    else:
        for part in ("gate", "up", "down"):
            names = f"{tensors}.mlp.{part}_proj", f"{arrays}/mlp/{part}"
            yield from _matrix(*names, index, "mlp" in model.biases)


def _matrix(tensor: str, array: str, index: tuple[int, ...], bias: bool) -> Iterator[TensorRule]:
    """Rules of a matrix, and of its bias."""
    yield TensorRule(f"{tensor}.weight", f"{array}/weight", index, transpose=True)
    if bias:
        yield TensorRule(f"{tensor}.bias", f"{array}/bias", index)


def _latent_attention(
    model: ResolvedModel, interleaved: bool, tensors: str, arrays: str, index: tuple[int, ...]
) -> Iterator[TensorRule]:
    """Rules of an attention through latents. Its rotated columns are pairs if `interleaved`, and
    halves in a checkpoint."""
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
    matrix = lambda name, part, taken=None, columns=None, kind="weight": TensorRule(
        f"{tensors}.{name}.{kind}",
        f"{arrays}/{part}/{kind}",
        index,
        kind == "weight",
        taken,
        columns,
    )
    for kind in ("weight", "bias") if "qkv" in model.biases else ("weight",):
        if queries:
            yield matrix("q_a_proj", "compress", None, (0, queries), kind)
        columns = (queries, queries + latent + rope)
        yield matrix("kv_a_proj_with_mqa", "compress", key, columns, kind)
    if queries:
        yield TensorRule(f"{tensors}.q_a_layernorm.weight", f"{arrays}/query_norm/scale", index)
    yield matrix("q_b_proj" if queries else "q_proj", "query", heads)
    yield TensorRule(f"{tensors}.kv_a_layernorm.weight", f"{arrays}/norm/scale", index)
    yield matrix("kv_b_proj", "expand")
    yield from _matrix(f"{tensors}.o_proj", f"{arrays}/out", index, "out" in model.biases)


def _halves(size: int, interleaved: bool) -> np.ndarray:
    """The order in which the columns of pairs (0, 1), (2, 3), … become two halves."""
    order = np.arange(size)
    return np.concatenate([order[::2], order[1::2]]) if interleaved else order


def _experts(
    model: ResolvedModel, names: ExpertNames, tensors: str, arrays: str, index: tuple[int, ...]
) -> Iterator[TensorRule]:
    """Rules of a layer's router, of its experts, and of those that all tokens use."""
    module = f"{tensors}.{names.module}"
    yield TensorRule(f"{module}.gate.weight", f"{arrays}/router/weight", index, transpose=True)
    if model.router_bias:
        yield TensorRule(f"{module}.gate.e_score_correction_bias", f"{arrays}/router/bias", index)
    for part, name in names.experts.items():
        for expert in range(model.experts):
            tensor = f"{module}.experts.{expert}.{name}.weight"
            yield TensorRule(tensor, f"{arrays}/{part}", (*index, expert), transpose=True)
        if model.shared_experts:
            tensor = f"{module}.shared_experts.{name}.weight"
            yield TensorRule(tensor, f"{arrays}/shared_{part}", index, transpose=True)
