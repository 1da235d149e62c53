"""DeepSeek-V3."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.config import ModelConfig
from jaxtrain.hf.families.family import (
    ROTARY_BUFFER,
    Family,
    Settings,
    ends,
    epsilon,
    mlp,
    norms,
    read_rotary,
    read_table,
    stack,
    write_rotary,
    write_table,
)
from jaxtrain.hf.fields import Fields
from jaxtrain.hf.rules import Rule

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
    *epsilon(1e-6),
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
        | read_rotary(fields)
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
        | write_rotary(model, length)
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
    yield from ends(model)
    for layer, arrays, index in stack(model):
        tensors = f"model.layers.{layer}"
        yield from norms(tensors, arrays, index)
        yield from _latent_attention(model, interleaved, tensors, arrays, index)
        if not index:
            yield from mlp(model, tensors, arrays, index)
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


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    "model.",
    (ROTARY_BUFFER,),
    _read_deepseek,
    _write_deepseek,
    _deepseek_rules,
)
