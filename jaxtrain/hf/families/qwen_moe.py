"""Qwen3 with experts."""

from jaxtrain.hf.entries import Biases, Fixed, Integer, OfExperts, RotaryPositions, Switch
from jaxtrain.hf.families.family import (
    NORMALIZED,
    ROUTER_TRAINING,
    Family,
    decoder,
    decoder_rules,
)
from jaxtrain.hf.layer_types import SparseLayers, Windows

LONGEST = 32768

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3 30B-A3B, 235B-A22B",
    table=(
        *decoder(vocab=151936, width=2048, layers=24, heads=32, epsilon=1e-6),
        Integer("num_key_value_heads", "kv_heads", 4),
        Integer("head_dim", "head_dim", None, null=0),
        Integer("intermediate_size", "mlp_width", 6144),
        OfExperts("moe_intermediate_size", "expert_width", 768),
        OfExperts("num_experts", "experts", 128),
        OfExperts("num_experts_per_tok", "experts_per_token", 8),
        Switch("norm_topk_prob", "router_normalize", False, NORMALIZED),
        Biases("attention_bias", ("qkv", "out"), False),
        Fixed({"qk_norm": True, "router": "softmax", "router_bias": False}),
        RotaryPositions(LONGEST),
        Windows(window=4096, switched=True),
        SparseLayers(),
        ROUTER_TRAINING,
    ),
    rules=decoder_rules,
    aliases={"num_local_experts": "num_experts"},
)
