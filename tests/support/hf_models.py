"""Small published models for tests: a config.json for each family, and one family's tensors by
numpy."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts
from safetensors.numpy import save_file

_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
_SIZES = {
    "vocab_size": 260,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}

# Model → config.json, as transformers 5 writes it.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_SIZES,
        **_ROTARY,
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "eos_token_id": 2,
    },
    "tied llama with biases": {
        "model_type": "llama",
        **_SIZES,
        "intermediate_size": 24,
        "head_dim": 6,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama with biases of attention alone": {
        "model_type": "llama",
        **_SIZES,
        "intermediate_size": 24,
        "attention_bias": True,
    },
    "llama 3.1": {
        "model_type": "llama",
        **_SIZES,
        "intermediate_size": 24,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama with linear scaling": {
        "model_type": "llama",
        **_SIZES,
        "intermediate_size": 24,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
    "mistral": {
        "model_type": "mistral",
        **_SIZES,
        **_ROTARY,
        "intermediate_size": 24,
        "num_key_value_heads": 1,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_SIZES,
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "sliding_window": None,
    },
    "mixtral with two experts a token": {
        "model_type": "mixtral",
        **_SIZES,
        "head_dim": 6,
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_SIZES,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "kv_lora_rank": 10,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 8,
        "v_head_dim": 5,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v3 without latent queries": {
        "model_type": "deepseek_v3",
        **_SIZES,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 10,
        "q_lora_rank": None,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 8,
        "v_head_dim": 5,
        "first_k_dense_replace": 0,
        "num_key_value_heads": None,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
    },
    "llama with yarn": {
        "model_type": "llama",
        **_SIZES,
        "intermediate_size": 24,
        "head_dim": 12,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 6.0}
        | {"attention_factor": 1.25, "truncate": False},
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **_SIZES,
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "rope_theta": 1e6,
        "use_sliding_window": False,
        "sliding_window": 32,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "qwen2 with yarn": {
        "model_type": "qwen2",
        **_SIZES,
        **_ROTARY,
        "intermediate_size": 24,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e3, "factor": 2.5},
        "layer_types": ["full_attention"] * 3,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_SIZES,
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "sliding_window": None,
        "max_window_layers": 3,
    },
    "qwen3 with biases": {
        "model_type": "qwen3",
        **_SIZES,
        **_ROTARY,
        "intermediate_size": 20,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "attention_bias": True,
        "rms_norm_eps": 1e-4,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_SIZES,
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.001,
    },
    "qwen3_moe with a dense layer": {
        "model_type": "qwen3_moe",
        **_SIZES,
        **_ROTARY,
        "intermediate_size": 24,
        "num_key_value_heads": 4,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "mlp_only_layers": [0],
        "attention_bias": True,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        **_SIZES,
        "num_hidden_layers": 4,
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "rope_theta": 5e4,
        "no_rope_layer_interval": 3,
        "pad_token_id": None,
        "max_window_layers": 28,
        "pretraining_tp": 2,
    },
    "smollm3 with a list": {
        "model_type": "smollm3",
        **_SIZES,
        **_ROTARY,
        "intermediate_size": 24,
        "num_key_value_heads": 1,
        "no_rope_layers": [0, 1, 0, 1],
        "pad_token_id": None,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "seed_oss": {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        **_SIZES,
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rope_theta": 1e7,
        "rope_scaling": {"rope_type": "default"},
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    "seed_oss with other biases": {
        "model_type": "seed_oss",
        **_SIZES,
        **_ROTARY,
        "intermediate_size": 24,
        "num_key_value_heads": 4,
        "head_dim": None,
        "attention_bias": False,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **_SIZES,
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e6,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe with groups": {
        "model_type": "glm4_moe",
        **_SIZES,
        "intermediate_size": 24,
        "num_key_value_heads": 4,
        "head_dim": 10,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 8,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.61},
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v3 with yarn": {
        "model_type": "deepseek_v3",
        **_SIZES,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 10,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "attention_bias": True,
        "rope_theta": 100,
        "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "kimi_k2": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        **_SIZES,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 10,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 8,
        "v_head_dim": 5,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
        "rope_scaling": _YARN
        | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        **_SIZES,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "kv_lora_rank": 10,
        "q_lora_rank": None,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 8,
        "v_head_dim": 5,
        "first_k_dense_replace": 1,
        "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "scoring_func": "softmax",
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
    },
    "deepseek_v2 with groups": {
        "model_type": "deepseek_v2",
        **_SIZES,
        **_ROTARY,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
        "kv_lora_rank": 10,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 8,
        "v_head_dim": 5,
        "first_k_dense_replace": 0,
        "attention_bias": True,
        "n_shared_experts": 1,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 260,
        "n_positions": 80,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": None,
        "attn_pdrop": 0.1,
        "task_specific_params": {"text-generation": {"do_sample": True}},
    },
}


def older(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as versions of transformers before 5 wrote it."""
    result = {name: v for name, v in values.items() if name not in ("rope_parameters", "dtype")}
    if rotary := dict(values.get("rope_parameters") or {}):
        base, kind = rotary.pop("rope_theta", None), rotary.pop("rope_type", "default")
        result["rope_scaling"] = {"type": kind} | rotary if kind != "default" or rotary else None
        result |= {"rope_theta": base} if base else {}
    return result | {"torch_dtype": values.get("dtype", "float32")}


def llama_tensors(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The tensors of CONFIGS["llama"], drawn from a normal distribution."""
    width, hidden, keys = 16, 24, 8
    shapes = {
        "model.embed_tokens.weight": (260, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (260, width),
    }
    for layer in range(3):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (width,),
                "post_attention_layernorm": (width,),
                "self_attn.q_proj": (width, width),
                "self_attn.k_proj": (keys, width),
                "self_attn.v_proj": (keys, width),
                "self_attn.o_proj": (width, width),
                "mlp.gate_proj": (hidden, width),
                "mlp.up_proj": (hidden, width),
                "mlp.down_proj": (width, hidden),
            }.items()
        }
    random = np.random.default_rng(0)
    return {
        name: (random.standard_normal(shape, np.float32) * 0.3).astype(dtype)
        for name, shape in shapes.items()
    }


def write_llama(
    folder: pathlib.Path, bfloat16: bool = False, **changes: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Writes the small Llama into a folder, and returns its tensors.

    changes: tensor, with "_" for ".", and what to have instead; None: to be left out
    """
    tensors = llama_tensors(ml_dtypes.bfloat16 if bfloat16 else np.float32)
    for name in list(tensors):
        if name.replace(".", "_") in changes:
            other = changes.pop(name.replace(".", "_"))
            if other is None:
                del tensors[name]
            else:
                tensors[name] = other
    tensors |= {name: array for name, array in changes.items() if array is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def stored_array(numbers: np.ndarray, piece: tuple[int, ...]) -> ts.TensorStore:
    """An array as a checkpoint has it."""
    grid = {"name": "regular", "configuration": {"chunk_shape": piece}}
    metadata = {"shape": numbers.shape, "data_type": "float32", "chunk_grid": grid}
    spec = {"driver": "zarr3", "kvstore": "memory://", "metadata": metadata}
    array = ts.open(spec, create=True).result()
    array.write(numbers).result()
    return array
