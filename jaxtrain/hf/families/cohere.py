"""Cohere's Command R, and Command R7B and A, whose layers with full attention have no positions."""

import functools

from jaxtrain.hf.entries import (
    Biases,
    Fixed,
    Float,
    FullAttention,
    Integer,
    Only,
    PassedOver,
    RotaryPositions,
    TableEntry,
)
from jaxtrain.hf.families.family import (
    SILU,
    Family,
    decoder,
    decoder_rules,
    grouped_attention,
)
from jaxtrain.hf.layer_types import Windows

LONGEST = 8192
SIZES: tuple[TableEntry, ...] = (
    *decoder(
        vocab=256000,
        width=8192,
        layers=40,
        heads=64,
        epsilon=1e-5,
        tied=True,
        epsilon_field="layer_norm_eps",
        activation=(
            SILU,
            Fixed({"norm": "layernorm", "activation": "swiglu", "parallel_block": True}),
        ),
    ),
    Integer("num_key_value_heads", "kv_heads", None, null=0),
    Integer("intermediate_size", "mlp_width", 22528),
    Biases("attention_bias", ("qkv", "out"), False),
    Float("logit_scale", "logit_scale", 0.0625),
)
RULES = functools.partial(decoder_rules, attention=functools.partial(grouped_attention, pairs=True))

COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    models="Command R",
    table=(
        *SIZES,
        Integer("head_dim", "head_dim", None, null=0),
        # norms of LayerNorm's kind, with a weight for each head
        Only("use_qk_norm", (False,)),
        RotaryPositions(LONGEST, base=5e5),
        FullAttention(LONGEST),
        PassedOver(("model_max_length",)),
    ),
    rules=RULES,
)

COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    models="Command R7B, Command A",
    table=(
        *SIZES,
        RotaryPositions(LONGEST),
        Windows(
            window=4096, typed=True, every=4, every_field="sliding_window_pattern", full="nope"
        ),
        # transformers has width / heads whatever head_dim is
        PassedOver(("head_dim", "cache_implementation", "layer_switch", "rotary_pct")),
        PassedOver(("order_of_interleaved_layers", "position_embedding_type")),
        PassedOver(("use_embedding_sharing", "use_gated_activation")),
        PassedOver(("use_parallel_block", "use_parallel_embedding")),
    ),
    rules=RULES,
)
