"""Qwen2 and Qwen2.5, and Qwen3 with one MLP in a layer."""

from jaxtrain.hf.entries import Biases, Fixed, Integer, Only, RotaryPositions
from jaxtrain.hf.families.family import Family, decoder, decoder_rules
from jaxtrain.hf.layer_types import Windows

LONGEST = 32768
WINDOWS = Windows(window=4096, switched=True, typed=True, start=28)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5, QwQ",
    table=(
        *decoder(vocab=151936, width=4096, layers=32, heads=32, epsilon=1e-6),
        Integer("num_key_value_heads", "kv_heads", 32, null=0),
        Integer("head_dim", "head_dim", None, null=0),
        Integer("intermediate_size", "mlp_width", 22016),
        Fixed({"biases": ("qkv",)}),
        RotaryPositions(LONGEST),
        WINDOWS,
        Only("use_mrope", (False,), written=False),
    ),
    rules=decoder_rules,
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    models="Qwen3 0.6B to 32B",
    table=(
        *decoder(vocab=151936, width=4096, layers=32, heads=32, epsilon=1e-6),
        Integer("num_key_value_heads", "kv_heads", 32, null=0),
        Integer("head_dim", "head_dim", 128),
        Integer("intermediate_size", "mlp_width", 22016),
        Biases("attention_bias", ("qkv", "out"), False),
        Fixed({"qk_norm": True}),
        RotaryPositions(LONGEST),
        WINDOWS,
    ),
    rules=decoder_rules,
)
