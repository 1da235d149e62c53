"""A family of published models, and what several families share."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxtrain.config import ModelConfig
from jaxtrain.hf.fields import SCALINGS, Fields
from jaxtrain.hf.rules import PublishedTensor, Rule, check_coverage, published_tensors

Settings = dict[str, Any]
# (field of config.json, setting of the model, transformers' default); null is 0
Table = tuple[tuple[str, str, Any], ...]
# Counts that training keeps among the parameters; no published model has them.
COUNTERS = ("mlp/router/load", "mlp/router/dropped")


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of published models.

    model_type, architecture: as in config.json
    prefix:  before the names of all tensors but the output matrix; files of older versions lack it
    dropped: the ends of names of tensors that hold no parameters
    read:    config.json → settings of the model; raises HfError for what the model cannot be
    write:   (resolved model, tokens of a sequence) → config.json
    rules:   (resolved model, config.json) → the rules of all tensors
    """

    model_type: str
    architecture: str
    prefix: str
    dropped: tuple[str, ...]
    read: Callable[[Fields], Settings]
    write: Callable[[ModelConfig, int], Settings]
    rules: Callable[[ModelConfig, Mapping[str, Any]], Iterator[Rule]]

    def layout(
        self,
        model: ModelConfig,
        config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> tuple[list[Rule], list[PublishedTensor]]:
        """The rules and the tensors of a resolved model with this config.json.

        shapes: stored array → shape, of all parameters
        """
        rules = list(self.rules(model, config))
        published = {name: shape for name, shape in shapes.items() if not name.endswith(COUNTERS)}
        check_coverage(rules, published)
        return rules, list(published_tensors(rules, published))


def read_table(fields: Fields, table: Table) -> Settings:
    """The settings that a table's fields give. Raises HfError for a value of another type."""
    settings = {}
    for field, setting, default in table:
        kind = type(getattr(ModelConfig(), setting))
        if kind is int:
            settings[setting] = fields.integer(field, default)
        else:
            value = fields.value(field, default)
            if value is None:
                raise fields.refuse(field, f"is no {kind.__name__}")
            settings[setting] = kind(value)
    return settings


def write_table(model: ModelConfig, table: Table) -> Settings:
    """The fields that a table's settings give."""
    return {field: getattr(model, setting) for field, setting, _ in table}


ROTARY_BUFFER = "rotary_emb.inv_freq"  # in files of older versions


def stream(kv_heads: int, vocab: int = 32000, width: int = 4096, layers: int = 32) -> Table:
    """The fields that these families share, with the defaults in which they differ."""
    return (
        ("vocab_size", "vocab_size", vocab),
        ("hidden_size", "width", width),
        ("num_hidden_layers", "layers", layers),
        ("num_attention_heads", "heads", 32),
        ("num_key_value_heads", "kv_heads", kv_heads),
        ("head_dim", "head_dim", 0),
        ("initializer_range", "init_std", 0.02),
        ("tie_word_embeddings", "tied_embeddings", False),
    )


def epsilon(default: float) -> Table:
    return (("rms_norm_eps", "norm_epsilon", default),)


def read_rotary(fields: Fields, base: float = 10000.0) -> Settings:
    """The settings of a rotary model with SwiGLU and RMSNorm."""
    fields.require("hidden_act", ["silu"])
    fields.require("is_encoder_decoder", [False])
    fields.pass_over("max_position_embeddings", "pretraining_tp")
    fields.only_trains("attention_dropout", "hidden_dropout")
    kinds = fields.value("layer_types", None) or ()
    if any(kind != "full_attention" for kind in kinds):
        raise fields.refuse("layer_types", 'is not supported: only "full_attention" is')
    return {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rotary",
        **fields.rotary(base),
    }


def write_rotary(model: ModelConfig, length: int) -> Settings:
    kind = "default" if model.rope_scaling == "none" else model.rope_scaling
    scaling = {field: getattr(model, setting) for field, setting in SCALINGS.get(kind, {}).items()}
    # versions of transformers before 5 read rope_theta and rope_scaling
    older = {"rope_scaling": {"rope_type": kind} | scaling} if scaling else {}
    return older | {
        "hidden_act": "silu",
        "max_position_embeddings": length,
        "rope_parameters": {"rope_type": kind, "rope_theta": model.rotary_base} | scaling,
        "rope_theta": model.rotary_base,
    }


def no_window(fields: Fields, window: int | None, length: int) -> None:
    """Raises HfError for a window that is shorter than the longest sequence.

    window, length: transformers' defaults
    """
    window = fields.value("sliding_window", window)
    longest = fields.integer("max_position_embeddings", length)
    if window is not None and window < longest:
        raise fields.refuse(
            "sliding_window",
            f"is not supported: attention is full (null, or at least the max_position_embeddings "
            f"of {longest})",
        )


def stack(model: ModelConfig) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """(layer, name of its arrays, index in them) of all layers."""
    for layer in range(model.dense_layers):
        yield layer, f"first/{layer}", ()
    for layer in range(model.layers):
        yield model.dense_layers + layer, "layers", (layer,)


def ends(model: ModelConfig) -> Iterator[Rule]:
    yield Rule("model.embed_tokens.weight", "embed/table")
    yield Rule("model.norm.weight", "head/norm/scale")
    if not model.tied_embeddings:
        yield Rule("lm_head.weight", "head/table")


def norms(tensors: str, arrays: str, index: tuple[int, ...]) -> Iterator[Rule]:
    yield Rule(f"{tensors}.input_layernorm.weight", f"{arrays}/attention_norm/scale", index)
    yield Rule(f"{tensors}.post_attention_layernorm.weight", f"{arrays}/mlp_norm/scale", index)


def attention(
    model: ModelConfig, tensors: str, arrays: str, index: tuple[int, ...]
) -> Iterator[Rule]:
    """Rules of query, key, value and output matrices. Both sides rotate halves of a head."""
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
    for name, part in names.items():
        tensor, array = f"{tensors}.self_attn.{name}", f"{arrays}/attention/{part}"
        yield Rule(f"{tensor}.weight", f"{array}/weight", index, transpose=True)
        if ("out" if part == "out" else "qkv") in model.biases:
            yield Rule(f"{tensor}.bias", f"{array}/bias", index)


def mlp(model: ModelConfig, tensors: str, arrays: str, index: tuple[int, ...]) -> Iterator[Rule]:
    for part in ("gate", "up", "down"):
        tensor, array = f"{tensors}.mlp.{part}_proj", f"{arrays}/mlp/{part}"
        yield Rule(f"{tensor}.weight", f"{array}/weight", index, transpose=True)
        if "mlp" in model.biases:
            yield Rule(f"{tensor}.bias", f"{array}/bias", index)
