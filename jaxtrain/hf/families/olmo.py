"""OLMo 2 and 3."""

from jaxtrain.hf.entries import (
    Biases,
    Fixed,
    FullAttention,
    Integer,
    RotaryPositions,
    TableEntry,
)
from jaxtrain.hf.families.family import Family, decoder, decoder_rules
from jaxtrain.hf.layer_types import RotaryByType, Windows

LONGEST = 2048
SIZES: tuple[TableEntry, ...] = (
    *decoder(vocab=50304, width=4096, layers=32, heads=32, epsilon=1e-5),
    Integer("num_key_value_heads", "kv_heads", None, null=0),
    Integer("head_dim", "head_dim", None, null=0),
    Integer("intermediate_size", "mlp_width", 11008),
    Biases("attention_bias", ("qkv", "out"), False),
    Fixed({"norm_place": "after", "qk_norm": True, "qk_norm_over": "projection"}),
)

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    models="OLMo 2",
    table=(*SIZES, RotaryPositions(LONGEST), FullAttention(LONGEST)),
    rules=decoder_rules,
)

OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    models="OLMo 3",
    table=(
        *SIZES,
        Windows(window=4096, typed=True, every=4),
        RotaryByType(LONGEST, base=5e5, local=5e5),
    ),
    rules=decoder_rules,
)
