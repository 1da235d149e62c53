"""Llama 2 and 3, and models of their architecture: SmolLM2, Yi."""

from jaxtrain.hf.entries import (
    Biases,
    FullAttention,
    Integer,
    Only,
    PassedOver,
    RotaryPositions,
    WholeHeads,
)
from jaxtrain.hf.families.family import Family, decoder, decoder_rules

LONGEST = 2048

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    models="Llama 2, 3, 3.1, 3.2, SmolLM2, Yi",
    table=(
        *decoder(vocab=32000, width=4096, layers=32, heads=32, epsilon=1e-6),
        Integer("num_key_value_heads", "kv_heads", None, null=0),
        Integer("head_dim", "head_dim", None, null=0),
        Integer("intermediate_size", "mlp_width", 11008),
        Biases("attention_bias", ("qkv", "out"), False),
        Biases("mlp_bias", ("mlp",), False),
        WholeHeads(),
        RotaryPositions(LONGEST),
        FullAttention(LONGEST),
        Only("rope_interleaved", (False,), written=False),
        PassedOver(("is_llama_config", "pad_to_multiple_of")),
    ),
    rules=decoder_rules,
)
