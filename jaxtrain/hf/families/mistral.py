"""Mistral with full attention."""

from jaxtrain.hf.entries import Fixed, Integer, RotaryPositions, Window
from jaxtrain.hf.families.family import Family, decoder, decoder_rules

LONGEST = 131072

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    models="Mistral 7B from v0.2 on",
    table=(
        *decoder(vocab=32000, width=4096, layers=32, heads=32, epsilon=1e-6),
        Integer("num_key_value_heads", "kv_heads", 8, null=0),
        Integer("head_dim", "head_dim", None, null=0),
        Integer("intermediate_size", "mlp_width", 14336),
        Fixed({"biases": ()}),
        RotaryPositions(LONGEST),
        Window(LONGEST, window=4096),
    ),
    rules=decoder_rules,
)
