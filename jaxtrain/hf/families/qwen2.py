"""Qwen2 and Qwen2.5 with full attention."""

from jaxtrain.hf.entries import Fixed, Integer, Only, RotaryPositions, Window
from jaxtrain.hf.families.family import Family, decoder, decoder_rules

LONGEST = 32768

FAMILY = Family(
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
        Window(LONGEST, window=4096, switched=True, typed=True, layers=28),
        Only("use_mrope", (False,), written=False),
    ),
    rules=decoder_rules,
)
