"""Random config.json's of published families, in older and newer forms, with fields removed, fields
that nobody knows, and values that cannot be.

A family is a table of fields, each with the draw of its value; a field may depend on those before
it. Sizes are small, so that transformers and jaxtrain make a model in a second. `draw` gives a
case; `reason` says why jaxtrain may refuse it.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

MISSING = object()  # a field that is left out
Chance = random.Random
Values = dict[str, Any]
Draw = Callable[[Chance, Values], Any]


@dataclasses.dataclass
class Case:
    """A config.json and what was done to it.

    removed: fields that were left out, so that transformers' defaults hold
    unknown: a field that was added, which jaxtrain must refuse by its name
    odd: a field whose value is likely to be wrong
    dtype: of the model's numbers, as safetensors has it
    saved: the config.json is the one that transformers writes for the model of this one
    everything: gradients and continuations are compared, too
    """

    family: str
    values: Values
    removed: list[str]
    unknown: str
    odd: str
    dtype: str
    saved: bool
    everything: bool


def some(*values: Any) -> Draw:
    """One of the values; those that stand more often are more likely."""
    return lambda chance, _: chance.choice(values)


def between(low: int, high: int) -> Draw:
    return lambda chance, _: chance.randint(low, high)


def mostly(usual: Any, *others: Any, likely: float = 0.9) -> Draw:
    return lambda chance, _: usual if chance.random() < likely else chance.choice(others)


def flag(likely: float = 0.5) -> Draw:
    return lambda chance, _: chance.random() < likely


def maybe(draw: Draw, likely: float = 0.5) -> Draw:
    """The draw's value, or nothing."""
    return lambda chance, values: draw(chance, values) if chance.random() < likely else MISSING


def nothing(chance: Chance, values: Values) -> Any:
    return MISSING


def divisor(field: str, *others: Any) -> Draw:
    """A divisor of a field before, or one of the others."""

    def draw(chance: Chance, values: Values) -> Any:
        number = values[field]
        return chance.choice([n for n in range(1, number + 1) if number % n == 0] + list(others))

    return draw


# --- what families share --------------------------------------------------------------------------

HARMLESS = {
    "use_cache": flag(),
    "bos_token_id": some(0, 1, None),
    "eos_token_id": some(2, [1, 2], None),
    "pad_token_id": some(None, 0),
    "torch_dtype": some("float32", "bfloat16", "float16", None),
    "dtype": some("float32", "bfloat16", None),
    "transformers_version": some("4.31.0", "5.23.0"),
    "_name_or_path": some("", "somewhere/model"),
    "output_attentions": some(False),
    "output_hidden_states": some(False),
    "chunk_size_feed_forward": some(0),
    "id2label": some({"0": "LABEL_0", "1": "LABEL_1"}),
    "label2id": some({"LABEL_0": 0, "LABEL_1": 1}),
    "tie_encoder_decoder": some(False),
    "is_encoder_decoder": some(False),
    "temperature": some(1.0, 0.6),
    "top_p": some(1.0, 0.9),
    "return_dict": some(True),
    # marks of libraries
    "_attn_implementation_autoset": some(True),
    "_drawn": some(1, None, [], {}),
    "unsloth_version": some("2026.5.2"),
}
# Some are smaller than the bytes' 257, the tokenizer of a folder without one.
VOCABULARY = lambda chance, _: (
    chance.randint(257, 500) if chance.random() < 0.8 else chance.randint(2, 256)
)
SIZES: Mapping[str, Draw] = {
    "vocab_size": VOCABULARY,
    "hidden_size": some(8, 12, 16, 20, 24, 32, 36, 48),
    "num_hidden_layers": some(1, 2, 2, 3, 4),
    "num_attention_heads": between(1, 8),
    "max_position_embeddings": some(16, 33, 64, 128, 4096, 131072),
    "intermediate_size": between(1, 60),
}
EPSILONS = some(1e-6, 1e-5, 1e-5, 1e-8, 1e-3, 0.01, 0.3)
SHARED: Mapping[str, Draw] = {
    "rms_norm_eps": EPSILONS,
    "tie_word_embeddings": flag(0.3),
    "hidden_act": mostly("silu", "swish", "gelu", "relu", "gelu_pytorch_tanh", likely=0.95),
    "initializer_range": some(0.02, 0.006),
    "attention_dropout": maybe(some(0.0, 0.1)),
}


def heads_that_divide(chance: Chance, values: Values) -> int:
    """Query heads into which hidden_size can be divided, even parts."""
    width = values["hidden_size"]
    return chance.choice([n for n in range(1, 9) if width % n == 0 and width // n % 2 == 0])


def head_dim(chance: Chance, values: Values) -> Any:
    """The size of a head, left out where hidden_size gives an even one, sometimes."""
    even = values["hidden_size"] % (2 * values["num_attention_heads"]) == 0
    return chance.choice([2, 4, 6, 8, 10, 16] + ([MISSING, MISSING, None] if even else []))


KEY_HEADS = divisor("num_attention_heads", None)
# Of the classes that know no null.
KEY_HEADS_GIVEN = divisor("num_attention_heads")


def window(chance: Chance, values: Values) -> Any:
    """A window that is longer than the positions and the sequences compared, none, or a shorter
    one."""
    return chance.choice([None, values["max_position_embeddings"] + 5, 1, 2, 7, 8, 31, 40, 4096])


def types(chance: Chance, values: Values) -> list[str]:
    """The types of layers."""
    return [chance.choice(TYPES) for _ in range(values["num_hidden_layers"])]


def types_with_window(chance: Chance, values: Values) -> Any:
    """The types of layers, where the config asks for windows."""
    return types(chance, values) if values.get("use_sliding_window") else MISSING


TYPES = ("full_attention", "sliding_attention")
WINDOWS: Mapping[str, Draw] = {
    "num_hidden_layers": some(1, 2, 3, 5, 7),
    "sliding_window": lambda chance, v: window(chance, v) or MISSING,
    "layer_types": maybe(types, 0.4),
}


EXPERTS_OF_GROUPS: Mapping[str, Draw] = {
    "n_group": some(1, 1, 2, 3, 4),
    "n_routed_experts": lambda chance, v: (v["n_group"] or 1) * chance.randint(2, 4),
    "topk_group": lambda chance, v: chance.randint(1, v["n_group"] or 1),
    "num_experts_per_tok": lambda chance, v: chance.randint(
        1, v["n_routed_experts"] // (v["n_group"] or 1) * v["topk_group"]
    ),
    "moe_intermediate_size": between(1, 24),
    "n_shared_experts": some(1, 1, 2, 3),
    "routed_scaling_factor": some(1.0, 2.5, 0.5),
    "first_k_dense_replace": lambda chance, v: chance.randint(0, v["num_hidden_layers"]),
    "norm_topk_prob": flag(0.7),
    "num_nextn_predict_layers": maybe(mostly(0, 1, likely=0.9), 0.7),
    "output_router_logits": maybe(flag(), 0.1),
}
LATENTS: Mapping[str, Draw] = {
    "kv_lora_rank": between(2, 20),
    "q_lora_rank": some(None, 3, 8, 13),
    "qk_rope_head_dim": some(2, 4, 6, 8),
    "v_head_dim": between(1, 12),
    "qk_nope_head_dim": between(1, 12),
    "num_key_value_heads": lambda chance, v: chance.choice(
        [MISSING, None, v["num_attention_heads"]]
    ),
    "attention_bias": maybe(flag(0.15)),
    "aux_loss_alpha": maybe(some(0.001), 0.3),
    "seq_aux": maybe(some(True), 0.3),
    "ep_size": maybe(some(1), 0.3),
    "moe_layer_freq": maybe(some(1), 0.3),
    "pretraining_tp": maybe(some(1), 0.3),
}

GEMMA: Mapping[str, Draw] = {
    "num_key_value_heads": KEY_HEADS_GIVEN,
    "head_dim": some(2, 4, 6, 8, 10, 16),
    **{name: draw for name, draw in SHARED.items() if name != "hidden_act"},
    "hidden_activation": mostly("gelu_pytorch_tanh", "gelu", "silu", likely=0.95),
    "query_pre_attn_scalar": between(1, 20),
    "final_logit_softcapping": maybe(some(None, 3.0, 30.0)),
    "attention_bias": maybe(flag(0.3)),
}
COHERE: Mapping[str, Draw] = {
    "num_key_value_heads": KEY_HEADS,
    **{name: draw for name, draw in SHARED.items() if name != "rms_norm_eps"},
    "layer_norm_eps": EPSILONS,
    "logit_scale": maybe(some(0.0625, 0.25, 1.0, 2)),
    "attention_bias": maybe(flag(0.3)),
}

# --- the families ---------------------------------------------------------------------------------

FAMILIES: dict[str, Mapping[str, Draw]] = {
    "llama": {
        **SIZES,
        "num_attention_heads": heads_that_divide,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": head_dim,
        **SHARED,
        "attention_bias": flag(0.4),
        "mlp_bias": lambda chance, v: chance.choice([v["attention_bias"]] * 3 + [True, False]),
        "pretraining_tp": maybe(some(1, 2)),
    },
    "mistral": {
        **SIZES,
        "num_key_value_heads": KEY_HEADS_GIVEN,
        "head_dim": head_dim,
        **SHARED,
        "sliding_window": window,
    },
    "mixtral": {
        **SIZES,
        "num_key_value_heads": KEY_HEADS_GIVEN,
        "head_dim": head_dim,
        **SHARED,
        "num_local_experts": between(1, 8),
        "num_experts_per_tok": lambda chance, v: chance.randint(1, v["num_local_experts"]),
        "sliding_window": window,
        "router_aux_loss_coef": maybe(some(0.001, 0.02)),
        "output_router_logits": maybe(flag(0.3)),
        "router_jitter_noise": maybe(some(0.0, 0.1)),
    },
    "qwen2": {
        **SIZES,
        "num_attention_heads": heads_that_divide,
        "num_key_value_heads": KEY_HEADS,
        **SHARED,
        "use_sliding_window": maybe(flag()),
        "sliding_window": maybe(window),
        "max_window_layers": maybe(between(0, 4)),
        "layer_types": maybe(types_with_window),
        "head_dim": maybe(head_dim, 0.1),
    },
    "qwen3": {
        **SIZES,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": some(2, 4, 6, 8, 10, 16),
        **SHARED,
        "attention_bias": maybe(flag(0.3)),
        "use_sliding_window": maybe(flag()),
        "sliding_window": maybe(window),
        "max_window_layers": maybe(between(0, 4)),
        "layer_types": maybe(types_with_window),
    },
    "qwen3_moe": {
        **SIZES,
        "num_key_value_heads": KEY_HEADS_GIVEN,
        "head_dim": head_dim,
        **SHARED,
        "attention_bias": maybe(flag(0.3)),
        "use_sliding_window": maybe(flag()),
        "sliding_window": maybe(window),
        "max_window_layers": maybe(between(0, 4), 0.3),
        "moe_intermediate_size": between(1, 24),
        "num_experts": between(1, 8),
        "num_experts_per_tok": lambda chance, v: chance.randint(1, v["num_experts"]),
        "norm_topk_prob": flag(),
        "decoder_sparse_step": some(1, 1, 2, 3),
        "mlp_only_layers": lambda chance, v: chance.choice(
            [MISSING, None, [], [], [0], [chance.randint(0, v["num_hidden_layers"])]]
        ),
        "router_aux_loss_coef": maybe(some(0.001)),
        "output_router_logits": maybe(flag(0.3)),
    },
    "smollm3": {
        **SIZES,
        "num_attention_heads": heads_that_divide,
        "num_key_value_heads": KEY_HEADS,
        **SHARED,
        "attention_bias": maybe(flag(0.3)),
        "mlp_bias": maybe(flag(0.3)),
        "use_sliding_window": maybe(flag(0.1)),
        "sliding_window": maybe(window, 0.3),
        "no_rope_layer_interval": maybe(between(1, 4)),
        "no_rope_layers": maybe(
            lambda chance, v: [chance.randint(0, 1) for _ in range(v["num_hidden_layers"])]
        ),
        "layer_types": maybe(lambda chance, v: ["full_attention"] * v["num_hidden_layers"], 0.3),
        "pad_token_id": some(None, 0),
    },
    "seed_oss": {
        **SIZES,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": head_dim,
        **SHARED,
        "attention_bias": maybe(flag()),
        "attention_out_bias": maybe(flag()),
        "mlp_bias": maybe(flag(0.3)),
        "residual_dropout": maybe(some(0.0, 0.1)),
        "pretraining_tp": maybe(some(1)),
    },
    "glm4_moe": {
        **SIZES,
        "num_key_value_heads": KEY_HEADS_GIVEN,
        "head_dim": some(4, 8, 12, 16),
        **SHARED,
        "attention_bias": maybe(flag()),
        "use_qk_norm": maybe(flag()),
        "partial_rotary_factor": maybe(some(0.5, 0.5, 1.0, 1, 0.25)),
        **EXPERTS_OF_GROUPS,
    },
    "deepseek_v2": {
        **SIZES,
        "num_attention_heads": heads_that_divide,
        **SHARED,
        **EXPERTS_OF_GROUPS,
        "num_nextn_predict_layers": nothing,
        "topk_method": some("greedy", "greedy", "group_limited_greedy"),
        "norm_topk_prob": maybe(flag(0.1)),
        **LATENTS,
        # transformers takes the rotated part of these as complex numbers, which have even strides
        "kv_lora_rank": some(2, 6, 12, 20),
        "qk_nope_head_dim": some(2, 4, 10),
        "mlp_bias": maybe(flag(0.3)),
    },
    "deepseek_v3": {
        **SIZES,
        **SHARED,
        **EXPERTS_OF_GROUPS,
        **LATENTS,
        "rope_interleave": maybe(flag(0.7)),
        "scoring_func": maybe(some("sigmoid")),
        "topk_method": maybe(some("noaux_tc")),
    },
    "gemma2": {
        **SIZES,
        "num_attention_heads": heads_that_divide,
        **GEMMA,
        **WINDOWS,
        "attn_logit_softcapping": maybe(some(None, 5.0, 50.0)),
        "cache_implementation": maybe(some("hybrid")),
    },
    "gemma3_text": {
        **SIZES,
        "num_attention_heads": heads_that_divide,
        **GEMMA,
        **WINDOWS,
        "sliding_window_pattern": maybe(between(1, 4)),
        "attn_logit_softcapping": maybe(some(None)),
    },
    "gpt_oss": {
        **SIZES,
        "num_key_value_heads": KEY_HEADS_GIVEN,
        "head_dim": some(2, 4, 6, 8, 10, 16),
        **SHARED,
        **WINDOWS,
        "attention_bias": maybe(flag()),
        "num_local_experts": between(1, 8),
        "num_experts_per_tok": lambda chance, v: chance.randint(1, v["num_local_experts"]),
        "swiglu_limit": maybe(some(7.0, 1.0, 2)),
        "swiglu_alpha": maybe(some(1.702, 1.0), 0.3),
        "initial_context_length": maybe(some(16)),
        "router_aux_loss_coef": maybe(some(0.9)),
    },
    "olmo2": {
        **SIZES,
        "num_attention_heads": heads_that_divide,
        "num_key_value_heads": KEY_HEADS,
        **SHARED,
        "attention_bias": maybe(flag(0.3)),
    },
    "olmo3": {
        **SIZES,
        "num_attention_heads": heads_that_divide,
        "num_key_value_heads": KEY_HEADS,
        **SHARED,
        **WINDOWS,
        "attention_bias": maybe(flag(0.3)),
    },
    "phi3": {
        **SIZES,
        "num_attention_heads": heads_that_divide,
        "num_key_value_heads": KEY_HEADS,
        **SHARED,
        "sliding_window": maybe(window),
        "partial_rotary_factor": maybe(some(0.5, 0.75, 1.0), 0.4),
        "original_max_position_embeddings": maybe(some(16, 4096)),
        "pad_token_id": some(None, 0),
        "resid_pdrop": maybe(some(0.0, 0.1)),
        "embd_pdrop": maybe(some(0.0)),
    },
    "cohere": {
        **SIZES,
        "num_attention_heads": heads_that_divide,
        **COHERE,
        "use_qk_norm": maybe(flag(0.1)),
    },
    "cohere2": {
        **SIZES,
        "num_attention_heads": heads_that_divide,
        **COHERE,
        **WINDOWS,
        "sliding_window_pattern": maybe(between(1, 4)),
        "position_embedding_type": maybe(some("rope_gptj"), 0.2),
    },
    "qwen3_next": {
        **SIZES,
        "num_key_value_heads": KEY_HEADS_GIVEN,
        "head_dim": some(8, 16),
        **SHARED,
        "attention_bias": maybe(flag(0.3)),
        "partial_rotary_factor": maybe(some(0.25, 0.5, 1.0)),
        "num_hidden_layers": some(1, 2, 3, 5, 7),
        "full_attention_interval": maybe(between(1, 4)),
        "layer_types": maybe(
            lambda chance, v: [
                chance.choice(["linear_attention", "full_attention"])
                for _ in range(v["num_hidden_layers"])
            ],
            0.4,
        ),
        "linear_num_key_heads": between(1, 3),
        "linear_num_value_heads": lambda chance, v: (
            v["linear_num_key_heads"] * chance.randint(1, 3)
        ),
        "linear_key_head_dim": between(2, 8),
        "linear_value_head_dim": between(2, 8),
        "linear_conv_kernel_dim": between(1, 5),
        "moe_intermediate_size": between(1, 24),
        "shared_expert_intermediate_size": lambda chance, v: (
            v["moe_intermediate_size"] * chance.randint(1, 2)
        ),
        "num_experts": between(1, 8),
        "num_experts_per_tok": lambda chance, v: chance.randint(1, v["num_experts"]),
        "norm_topk_prob": flag(),
        "decoder_sparse_step": some(1, 1, 2),
        "mlp_only_layers": lambda chance, v: chance.choice(
            [MISSING, None, [], [0], [chance.randint(0, v["num_hidden_layers"])]]
        ),
        "router_aux_loss_coef": maybe(some(0.001)),
    },
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_positions": between(75, 90),
        "n_head": between(1, 6),
        # the norm of few numbers is all rounding
        "n_embd": lambda chance, v: v["n_head"] * chance.randint(-(-8 // v["n_head"]), 10),
        "n_layer": between(1, 4),
        "n_inner": maybe(some(None, 5, 17, 40)),
        "activation_function": mostly("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", likely=0.8),
        "layer_norm_epsilon": EPSILONS,
        "tie_word_embeddings": maybe(flag(0.6)),
        "resid_pdrop": maybe(some(0.0, 0.1)),
        "attn_pdrop": maybe(some(0.0, 0.1)),
        "embd_pdrop": maybe(some(0.0, 0)),
        "initializer_range": some(0.02),
        "n_ctx": maybe(between(75, 90), 0.3),
        "summary_type": maybe(some("cls_index"), 0.3),
        "summary_use_proj": maybe(some(True), 0.3),
        "summary_first_dropout": maybe(some(0.1), 0.3),
        "scale_attn_weights": maybe(flag(0.9), 0.3),
        "scale_attn_by_inverse_layer_idx": maybe(flag(0.1), 0.3),
        "reorder_and_upcast_attn": maybe(flag(0.2), 0.3),
        "add_cross_attention": maybe(some(False), 0.2),
    },
}
FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
# Sizes whose defaults would make a model of gigabytes, or which other draws need.
SMALL = frozenset(
    "hidden_size intermediate_size moe_intermediate_size n_embd num_hidden_layers vocab_size "
    "num_attention_heads n_head kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim "
    "n_group topk_group num_experts_per_tok n_routed_experts num_experts num_local_experts "
    "n_positions n_layer head_dim pad_token_id linear_num_key_heads linear_num_value_heads "
    "shared_expert_intermediate_size".split()
)
# Fields that nobody knows, or which only other families have.
UNKNOWN: Mapping[str, Draw] = {
    "attention_multiplier": some(0.5),
    "residual_scale": some(1.0, 0.22),
    "logit_softcapping": some(30.0, None),
    "use_alibi": flag(),
    "clip_qkv": some(8.0, None),
    "parallel_residual": flag(),
    "per_layer_config": some({"0": {"rms_norm_eps": 0.5}}),
    "quantization_config": some({"quant_method": "gptq", "bits": 4}),
    "auto_map": some({"AutoConfig": "configuration_x.X"}),
    "x": some(1, "y", [1], None, {}),
}
ODD = (None, -1, 0, 0.5, 3.0, "x", "16", True, [], {}, 10**6, float("nan"), float("inf"), [1, 2])


# --- rotary positions -----------------------------------------------------------------------------

SCALINGS: Mapping[str, Mapping[str, Draw]] = {
    "default": {},
    "linear": {"factor": some(2.0, 4, 1.0, 0.5)},
    "llama3": {
        "factor": some(8.0, 2, 32.0),
        "low_freq_factor": some(1.0, 1, 0.5),
        "high_freq_factor": some(4.0, 2, 8.0),
        "original_max_position_embeddings": maybe(some(8, 16, 64, 8192), 0.85),
    },
    "yarn": {
        "factor": some(4.0, 40, 1.0, 2.5),
        "original_max_position_embeddings": maybe(some(8, 16, 64, 4096), 0.85),
        "beta_fast": maybe(some(32, 32.0, 4, 1.5)),
        "beta_slow": maybe(some(1, 1.0, 0.3)),
        "mscale": maybe(some(1.0, 0.707, 1, 0), 0.4),
        "mscale_all_dim": maybe(some(1.0, 0.5, 1, 0), 0.4),
        "attention_factor": maybe(some(1.2, 1.0, None), 0.3),
        "truncate": maybe(flag(), 0.3),
    },
    "dynamic": {"factor": some(2.0)},
    "longrope": {"factor": some(2.0), "short_factor": some([1.0]), "long_factor": some([2.0])},
    "su": {},
}
KINDS = ["default"] * 8 + ["linear"] * 3 + ["llama3"] * 3 + ["yarn"] * 5
RARE_KINDS = ["dynamic", "longrope", "su"]


def rotary(chance: Chance) -> Values:
    """The fields of rotary positions in one of their forms."""
    kind = chance.choice(KINDS if chance.random() < 0.95 else RARE_KINDS)
    drawn = {field: draw(chance, {}) for field, draw in SCALINGS[kind].items()}
    scaling = {field: value for field, value in drawn.items() if value is not MISSING}
    base = chance.choice([{}, {"rope_theta": chance.choice([10000.0, 500, 100.0, 500000, 1e6])}])
    form = chance.choice(["newer", "newer", "older", "older", "both", "apart", "named twice"])
    if kind == "default" and form != "newer":
        name = {"both": "rope_parameters"}.get(form, "rope_scaling")
        return base | chance.choice([{}, {name: None}, {name: {"rope_type": "default"}}])
    if form == "older":
        return base | {"rope_scaling": {"type": kind} | scaling}
    if form == "named twice":
        return base | {"rope_scaling": {"type": kind, "rope_type": kind} | scaling}
    if form == "apart":
        return base | {"rope_parameters": {"rope_type": kind} | scaling}
    newer = {"rope_parameters": {"rope_type": kind} | base | scaling}
    return newer | (
        base | {"rope_scaling": {"rope_type": kind} | scaling} if form == "both" else {}
    )


def rotary_by_type(chance: Chance, local_field: str) -> Values:
    """The fields of rotary positions that go by the type of a layer, in one of their forms.

    local_field: of the older form, with the base of layers with a window; "" if there is none
    """
    if chance.random() < 0.5:
        flat = rotary(chance)
        values = {name: v for name, v in flat.items() if name != "rope_parameters"}
        local = {local_field: chance.choice([10000.0, 300])} if chance.random() < 0.5 else {}
        return values | (local if local_field else {})
    nested = {}
    for kind in TYPES:
        if chance.random() < 0.9:
            one = rotary(chance).get("rope_parameters") or {"rope_type": "default"}
            nested[kind] = one | {"rope_theta": chance.choice([10000.0, 500, 1e6])}
    return {"rope_parameters": nested}


# --- a case ---------------------------------------------------------------------------------------


def draw(family: str, seed: int, number: int) -> Case:
    """Case `number` of a family."""
    chance = random.Random(f"{seed}/{family}/{number}")
    values: Values = {"model_type": family}
    for field, draw_value in FAMILIES[family].items():
        if (value := draw_value(chance, values)) is not MISSING:
            values[field] = value
    if family in ("gemma3_text", "olmo3"):
        values |= rotary_by_type(chance, "rope_local_base_freq" * (family == "gemma3_text"))
    elif family == "phi3" and chance.random() < 0.9:  # it has longrope alone
        values |= {"rope_theta": chance.choice([10000.0, 500, 250000])}
    elif family != "gpt2":
        values |= rotary(chance)
    for field in chance.sample(sorted(HARMLESS), chance.randint(0, 5)):
        values.setdefault(field, HARMLESS[field](chance, values))
    architecture = ARCHITECTURES[family]
    base = architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
    names = chance.choice([MISSING, [architecture], [architecture], [base], None])
    if names is not MISSING:
        values["architectures"] = names
    removable = [f for f in values if f not in SMALL and f != "model_type"]
    # key heads of most families have a default that does not divide few query heads
    rare = lambda field: 0.03 if field == "num_key_value_heads" else 0.15
    removed = [field for field in removable if chance.random() < rare(field)]
    for field in removed:
        del values[field]
    unknown = odd = ""
    saved = chance.random() < 0.3
    kind = chance.random()
    if kind < 0.08:
        unknown = chance.choice(sorted(UNKNOWN))
        values[unknown] = UNKNOWN[unknown](chance, values)
    elif kind < 0.2:
        odd = chance.choice([field for field in values if field != "model_type"])
        values[odd] = chance.choice(ODD)
    fields = list(values)
    chance.shuffle(fields)
    ordered = {field: values[field] for field in fields}
    dtype = chance.choice(["F32", "F32", "BF16", "F16"])
    everything = not odd and not unknown and chance.random() < 0.25
    return Case(family, ordered, removed, unknown, odd, dtype, saved, everything)


# --- refusals -------------------------------------------------------------------------------------


def reason(case: Case, field: str) -> str:
    """Why jaxtrain may refuse a case by this field; "" if it may not.

    field: as the refusal names it, such as "rope_scaling.type"
    """
    values, name = case.values, field.partition(".")[0]
    if field == case.unknown:
        return "a field that nobody knows"
    if name == case.odd:
        return "an odd value"
    for wanted, holds, text in LACKING:
        if wanted == name and holds(values):
            return text
    return ""


def kind_of(values: Values) -> str:
    """The kind of rotary scaling that a config.json has."""
    scaling = values.get("rope_scaling") or values.get("rope_parameters")
    if not isinstance(scaling, dict):
        return "default"
    return scaling.get("rope_type") or scaling.get("type") or "default"


def _head(values: Values) -> int:
    return values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]


# (field, condition, what jaxtrain lacks): every refusal of a case that transformers has.
LACKING: tuple[tuple[str, Callable[[Values], bool], str], ...] = (
    ("hidden_act", lambda v: v["hidden_act"] not in ("silu", "swish"), "another activation"),
    ("activation_function", lambda v: v["activation_function"] in ("gelu", "relu"), "another one"),
    *(
        (name, lambda v: kind_of(v) in RARE_KINDS, "a rotary scaling that jaxtrain lacks")
        for name in ("rope_scaling", "rope_parameters")
    ),
    (
        "rope_parameters",
        lambda v: v.get("rope_scaling") and "rope_theta" in v["rope_parameters"],
        "two forms with two bases",
    ),
    ("norm_topk_prob", lambda v: v["model_type"] == "deepseek_v2", "what transformers passes over"),
    ("sliding_window", lambda v: v["model_type"] == "smollm3", "a window without positions"),
    ("hidden_activation", lambda v: v["hidden_activation"] != "gelu_pytorch_tanh", "another one"),
    ("use_qk_norm", lambda v: v["use_qk_norm"], "norms with a weight for each head"),
    (
        "partial_rotary_factor",
        lambda v: int(_head(v) * v["partial_rotary_factor"]) % 2 or _head(v) < 4,
        "an odd number of rotated dimensions",
    ),
    ("scale_attn_weights", lambda v: not v["scale_attn_weights"], "scores without scale"),
    (
        "scale_attn_by_inverse_layer_idx",
        lambda v: v["scale_attn_by_inverse_layer_idx"],
        "scores by layer",
    ),
)
