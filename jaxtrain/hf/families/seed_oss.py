"""Seed-OSS."""

from jaxtrain.hf.entries import Biases, FullAttention, Integer, RotaryPositions
from jaxtrain.hf.families.family import Family, decoder, decoder_rules

LONGEST = 524288

SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    models="Seed-OSS 36B",
    table=(
        *decoder(vocab=155136, width=4096, layers=64, heads=80, epsilon=1e-6),
        Integer("num_key_value_heads", "kv_heads", 8, null=0),
        Integer("head_dim", "head_dim", 128, null=0),
        Integer("intermediate_size", "mlp_width", 27648),
        Biases("attention_bias", ("qkv",), True),
        Biases("attention_out_bias", ("out",), False),
        Biases("mlp_bias", ("mlp",), False),
        RotaryPositions(LONGEST),
        FullAttention(LONGEST),
    ),
    rules=decoder_rules,
)
