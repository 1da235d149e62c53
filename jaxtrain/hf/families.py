"""The families of published models: which fields of config.json are which settings, and which
tensors are which arrays. Both are used both ways.

A family is no branch in the model: its config.json becomes a ModelConfig like any other. The names
and layouts of tensors are those on disk, checked against transformers 5.23.0.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

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


# --- what Llama, Mistral, Mixtral and DeepSeek share ----------------------------------------------


def _stream(kv_heads: int, vocab: int = 32000, width: int = 4096, layers: int = 32) -> Table:
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


def _epsilon(default: float) -> Table:
    return (("rms_norm_eps", "norm_epsilon", default),)


def _read_rotary(fields: Fields, base: float = 10000.0) -> Settings:
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


def _write_rotary(model: ModelConfig, length: int) -> Settings:
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


def _no_window(fields: Fields, window: int | None, length: int) -> None:
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


def _stack(model: ModelConfig) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """(layer, name of its arrays, index in them) of all layers."""
    for layer in range(model.dense_layers):
        yield layer, f"first/{layer}", ()
    for layer in range(model.layers):
        yield model.dense_layers + layer, "layers", (layer,)


def _ends(model: ModelConfig) -> Iterator[Rule]:
    yield Rule("model.embed_tokens.weight", "embed/table")
    yield Rule("model.norm.weight", "head/norm/scale")
    if not model.tied_embeddings:
        yield Rule("lm_head.weight", "head/table")


def _norms(tensors: str, arrays: str, index: tuple[int, ...]) -> Iterator[Rule]:
    yield Rule(f"{tensors}.input_layernorm.weight", f"{arrays}/attention_norm/scale", index)
    yield Rule(f"{tensors}.post_attention_layernorm.weight", f"{arrays}/mlp_norm/scale", index)


def _attention(
    model: ModelConfig, tensors: str, arrays: str, index: tuple[int, ...]
) -> Iterator[Rule]:
    """Rules of query, key, value and output matrices. Both sides rotate halves of a head."""
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
    for name, part in names.items():
        tensor, array = f"{tensors}.self_attn.{name}", f"{arrays}/attention/{part}"
        yield Rule(f"{tensor}.weight", f"{array}/weight", index, transpose=True)
        if ("out" if part == "out" else "qkv") in model.biases:
            yield Rule(f"{tensor}.bias", f"{array}/bias", index)


def _mlp(model: ModelConfig, tensors: str, arrays: str, index: tuple[int, ...]) -> Iterator[Rule]:
    for part in ("gate", "up", "down"):
        tensor, array = f"{tensors}.mlp.{part}_proj", f"{arrays}/mlp/{part}"
        yield Rule(f"{tensor}.weight", f"{array}/weight", index, transpose=True)
        if "mlp" in model.biases:
            yield Rule(f"{tensor}.bias", f"{array}/bias", index)


# --- Llama 2 and 3, SmolLM2, Yi -------------------------------------------------------------------

LLAMA = (*_stream(kv_heads=0), ("intermediate_size", "mlp_width", 11008), *_epsilon(1e-6))


def _read_llama(fields: Fields) -> Settings:
    fields.require("rope_interleaved", [False])
    fields.pass_over("is_llama_config", "pad_to_multiple_of")
    attention = ("qkv", "out") if fields.require("attention_bias", [False, True]) else ()
    mlp = ("mlp",) if fields.require("mlp_bias", [False, True]) else ()
    return read_table(fields, LLAMA) | _read_rotary(fields) | {"biases": attention + mlp}


def _write_llama(model: ModelConfig, length: int) -> Settings:
    biases = {"attention_bias": "qkv" in model.biases, "mlp_bias": "mlp" in model.biases}
    return write_table(model, LLAMA) | _write_rotary(model, length) | biases


def _llama_rules(model: ModelConfig, config: Mapping[str, Any]) -> Iterator[Rule]:
    yield from _ends(model)
    for layer, arrays, index in _stack(model):
        tensors = f"model.layers.{layer}"
        yield from _norms(tensors, arrays, index)
        yield from _attention(model, tensors, arrays, index)
        yield from _mlp(model, tensors, arrays, index)


# --- Mistral --------------------------------------------------------------------------------------

MISTRAL = (*_stream(kv_heads=8), ("intermediate_size", "mlp_width", 14336), *_epsilon(1e-6))


def _read_mistral(fields: Fields) -> Settings:
    _no_window(fields, window=4096, length=131072)
    return read_table(fields, MISTRAL) | _read_rotary(fields) | {"biases": ()}


def _write_mistral(model: ModelConfig, length: int) -> Settings:
    return write_table(model, MISTRAL) | _write_rotary(model, length) | {"sliding_window": None}


# --- Mixtral --------------------------------------------------------------------------------------

MIXTRAL = (
    *_stream(kv_heads=8),
    ("intermediate_size", "expert_width", 14336),
    ("num_local_experts", "experts", 8),
    ("num_experts_per_tok", "experts_per_token", 2),
    *_epsilon(1e-5),
)


def _read_mixtral(fields: Fields) -> Settings:
    _no_window(fields, window=None, length=131072)
    fields.only_trains("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")
    router = {
        "router": "softmax",
        "router_bias": False,
        "router_normalize": "always",
        "biases": (),
    }
    return read_table(fields, MIXTRAL) | _read_rotary(fields, base=1e6) | router


def _write_mixtral(model: ModelConfig, length: int) -> Settings:
    return write_table(model, MIXTRAL) | _write_rotary(model, length) | {"sliding_window": None}


def _mixtral_rules(model: ModelConfig, config: Mapping[str, Any]) -> Iterator[Rule]:
    yield from _ends(model)
    for layer, arrays, index in _stack(model):
        tensors = f"model.layers.{layer}"
        yield from _norms(tensors, arrays, index)
        yield from _attention(model, tensors, arrays, index)
        moe = f"{tensors}.block_sparse_moe"
        yield Rule(f"{moe}.gate.weight", f"{arrays}/mlp/router/weight", index, transpose=True)
        for expert in range(model.experts):
            for name, part in {"w1": "gate", "w3": "up", "w2": "down"}.items():
                tensor, array = f"{moe}.experts.{expert}.{name}.weight", f"{arrays}/mlp/{part}"
                yield Rule(tensor, array, (*index, expert), transpose=True)


# --- DeepSeek-V3 ----------------------------------------------------------------------------------

DEEPSEEK = (
    ("vocab_size", "vocab_size", 129280),
    ("hidden_size", "width", 7168),
    ("intermediate_size", "mlp_width", 18432),
    ("moe_intermediate_size", "expert_width", 2048),
    ("num_attention_heads", "heads", 128),
    ("n_shared_experts", "shared_experts", 1),
    ("n_routed_experts", "experts", 256),
    ("num_experts_per_tok", "experts_per_token", 8),
    ("routed_scaling_factor", "router_scale", 2.5),
    ("kv_lora_rank", "kv_rank", 512),
    ("q_lora_rank", "query_rank", 1536),
    ("qk_rope_head_dim", "rope_head_dim", 64),
    ("v_head_dim", "value_head_dim", 128),
    ("qk_nope_head_dim", "head_dim", 128),
    ("n_group", "router_groups", 8),
    ("topk_group", "router_group_limit", 4),
    ("initializer_range", "init_std", 0.02),
    ("tie_word_embeddings", "tied_embeddings", False),
    *_epsilon(1e-6),
)
LATENT_EPSILON = 1e-6  # of transformers' latent norms, whatever rms_norm_eps is


def _read_deepseek(fields: Fields) -> Settings:
    settings = read_table(fields, DEEPSEEK)
    layers, dense = (
        fields.integer("num_hidden_layers", 61),
        fields.integer("first_k_dense_replace", 3),
    )
    if dense >= layers:
        raise fields.refuse("first_k_dense_replace", f"leaves none of {layers} layers with experts")
    heads, rope = settings["heads"], settings["rope_head_dim"]
    fields.require("num_key_value_heads", [heads, None], default=heads)
    fields.require("head_dim", [rope, None], default=rope)
    fields.require("qk_head_dim", [rope + settings["head_dim"]])
    fields.require("attention_bias", [False])
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        fields.require(name, [0, None])
    fields.require("scoring_func", ["sigmoid"])
    fields.require("topk_method", ["noaux_tc"])
    fields.require("moe_layer_freq", [1])
    fields.value("rope_interleave", True)
    fields.pass_over("ep_size")
    fields.only_trains("aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "output_router_logits")
    normalized = fields.require("norm_topk_prob", [True, False])
    return (
        settings
        | _read_rotary(fields)
        | {
            "layers": layers - dense,
            "dense_layers": dense,
            "kv_heads": heads,
            "attention": "mla",
            "latent_norm_epsilon": LATENT_EPSILON,
            "biases": (),
            "router": "sigmoid",
            "router_bias": True,
            "router_normalize": "always" if normalized else "never",
            "router_groups": settings["router_groups"] or 1,
            "router_group_limit": settings["router_group_limit"] or 1,
            "router_group_best": 2,
        }
    )


def _write_deepseek(model: ModelConfig, length: int) -> Settings:
    return (
        write_table(model, DEEPSEEK)
        | _write_rotary(model, length)
        | {
            "num_hidden_layers": model.dense_layers + model.layers,
            "first_k_dense_replace": model.dense_layers,
            "num_key_value_heads": model.heads,
            "head_dim": model.rope_head_dim,
            "q_lora_rank": model.query_rank or None,
            "attention_bias": False,
            "norm_topk_prob": model.router_normalize == "always",
            "num_nextn_predict_layers": 0,
            "rope_interleave": True,
        }
    )


def _halves(size: int, interleaved: bool) -> np.ndarray:
    """The order in which the columns of pairs (0, 1), (2, 3), … become two halves."""
    order = np.arange(size)
    return np.concatenate([order[::2], order[1::2]]) if interleaved else order


def _latent_attention(
    model: ModelConfig, interleaved: bool, tensors: str, arrays: str, index: tuple[int, ...]
) -> Iterator[Rule]:
    """Rules of an attention through latents. Its rotated columns are pairs if `interleaved`, and
    halves in a checkpoint."""
    plain, rope, queries, latent = (
        model.head_dim,
        model.rope_head_dim,
        model.query_rank,
        model.kv_rank,
    )
    tensor, array = f"{tensors}.self_attn", f"{arrays}/attention"
    rotated = _halves(rope, interleaved)
    head = np.concatenate([np.arange(plain), plain + rotated])
    heads = (np.arange(model.heads)[:, None] * (plain + rope) + head).ravel()
    key = np.concatenate([np.arange(latent), latent + rotated])
    compressed = (queries, queries + latent + rope)
    matrix = lambda name, part, taken=None, columns=None: Rule(
        f"{tensor}.{name}.weight", f"{array}/{part}/weight", index, True, taken, columns
    )
    if queries:
        yield matrix("q_a_proj", "compress", columns=(0, queries))
        yield Rule(f"{tensor}.q_a_layernorm.weight", f"{array}/query_norm/scale", index)
    yield matrix("q_b_proj" if queries else "q_proj", "query", heads)
    yield matrix("kv_a_proj_with_mqa", "compress", key, compressed)
    yield Rule(f"{tensor}.kv_a_layernorm.weight", f"{array}/norm/scale", index)
    yield matrix("kv_b_proj", "expand")
    yield matrix("o_proj", "out")


def _deepseek_rules(model: ModelConfig, config: Mapping[str, Any]) -> Iterator[Rule]:
    interleaved = config.get("rope_interleave", True) is not False
    yield from _ends(model)
    for layer, arrays, index in _stack(model):
        tensors = f"model.layers.{layer}"
        yield from _norms(tensors, arrays, index)
        yield from _latent_attention(model, interleaved, tensors, arrays, index)
        if not index:
            yield from _mlp(model, tensors, arrays, index)
            continue
        router = f"{arrays}/mlp/router"
        yield Rule(f"{tensors}.mlp.gate.weight", f"{router}/weight", index, transpose=True)
        yield Rule(f"{tensors}.mlp.gate.e_score_correction_bias", f"{router}/bias", index)
        for part in ("gate", "up", "down"):
            for expert in range(model.experts):
                tensor = f"{tensors}.mlp.experts.{expert}.{part}_proj.weight"
                yield Rule(tensor, f"{arrays}/mlp/{part}", (*index, expert), transpose=True)
            if model.shared_experts:
                tensor = f"{tensors}.mlp.shared_experts.{part}_proj.weight"
                yield Rule(tensor, f"{arrays}/mlp/shared_{part}", index, transpose=True)


# --- GPT-2 ----------------------------------------------------------------------------------------

GPT2 = (
    ("vocab_size", "vocab_size", 50257),
    ("n_positions", "max_positions", 1024),
    ("n_embd", "width", 768),
    ("n_layer", "layers", 12),
    ("n_head", "heads", 12),
    ("n_inner", "mlp_width", 0),
    ("layer_norm_epsilon", "norm_epsilon", 1e-5),
    ("initializer_range", "init_std", 0.02),
    ("tie_word_embeddings", "tied_embeddings", True),
)


def _read_gpt2(fields: Fields) -> Settings:
    fields.require("activation_function", ["gelu_new", "gelu_pytorch_tanh"])
    fields.require("scale_attn_weights", [True])
    fields.require("scale_attn_by_inverse_layer_idx", [False])
    fields.require("add_cross_attention", [False])
    fields.require("is_encoder_decoder", [False])
    fields.pass_over(
        "n_ctx",
        "reorder_and_upcast_attn",
        *(f"summary_{name}" for name in "activation first_dropout type use_proj".split()),
        "summary_proj_to_labels",
    )
    fields.only_trains("resid_pdrop", "embd_pdrop", "attn_pdrop")
    return read_table(fields, GPT2) | {
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "biases": ("qkv", "out", "mlp", "norm"),
    }


def _write_gpt2(model: ModelConfig, length: int) -> Settings:
    return write_table(model, GPT2) | {"activation_function": "gelu_new"}


def _gpt2_rules(model: ModelConfig, config: Mapping[str, Any]) -> Iterator[Rule]:
    """GPT-2's matrices are [in, out], and its queries, keys and values one matrix."""
    both = ({"weight": "scale", "bias": "bias"}, {"weight": "weight", "bias": "bias"})
    yield Rule("transformer.wte.weight", "embed/table")
    yield Rule("transformer.wpe.weight", "embed/positions")
    if not model.tied_embeddings:
        yield Rule("lm_head.weight", "head/table")
    for name, part in both[0].items():
        yield Rule(f"transformer.ln_f.{name}", f"head/norm/{part}")
    modules = {
        "ln_1": ("attention_norm", both[0]),
        "ln_2": ("mlp_norm", both[0]),
        "attn.c_proj": ("attention/out", both[1]),
        "mlp.c_fc": ("mlp/up", both[1]),
        "mlp.c_proj": ("mlp/down", both[1]),
    }
    for layer, arrays, index in _stack(model):
        tensors = f"transformer.h.{layer}"
        for module, (array, parts) in modules.items():
            for name, part in parts.items():
                yield Rule(f"{tensors}.{module}.{name}", f"{arrays}/{array}/{part}", index)
        for number, part in enumerate(("query", "key", "value")):
            columns = np.arange(model.width) + number * model.width
            for name in ("weight", "bias"):
                tensor, array = f"{tensors}.attn.c_attn.{name}", f"{arrays}/attention/{part}/{name}"
                yield Rule(tensor, array, index, taken=columns)


ROTARY_BUFFER = "rotary_emb.inv_freq"
FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            "model.",
            (ROTARY_BUFFER,),
            _read_llama,
            _write_llama,
            _llama_rules,
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            "model.",
            (ROTARY_BUFFER,),
            _read_mistral,
            _write_mistral,
            _llama_rules,
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            "model.",
            (ROTARY_BUFFER,),
            _read_mixtral,
            _write_mixtral,
            _mixtral_rules,
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            "model.",
            (ROTARY_BUFFER,),
            _read_deepseek,
            _write_deepseek,
            _deepseek_rules,
        ),
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            "transformer.",
            (".attn.bias", ".attn.masked_bias"),
            _read_gpt2,
            _write_gpt2,
            _gpt2_rules,
        ),
    )
}
