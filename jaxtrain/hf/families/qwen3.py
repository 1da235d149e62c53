"""Qwen3 with one MLP in a layer."""

from jaxtrain.hf.entries import Biases, Fixed, Integer, RotaryPositions, Window
from jaxtrain.hf.families.family import Family, decoder, decoder_rules

LONGEST = 32768

FAMILY = Family(
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
        Window(LONGEST, window=4096, switched=True, typed=True, layers=28),
    ),
    rules=decoder_rules,
)
