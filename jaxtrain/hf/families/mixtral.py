"""Mixtral with full attention."""

import functools

from jaxtrain.hf.entries import Fixed, Integer, RotaryPositions, Window
from jaxtrain.hf.families.family import (
    ROUTER_TRAINING,
    ExpertNames,
    Family,
    decoder,
    decoder_rules,
)

LONGEST = 131072
NAMES = ExpertNames("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"})

FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    models="Mixtral 8x7B, 8x22B",
    table=(
        *decoder(vocab=32000, width=4096, layers=32, heads=32, epsilon=1e-5),
        Integer("num_key_value_heads", "kv_heads", 8, null=0),
        Integer("head_dim", "head_dim", None, null=0),
        Integer("intermediate_size", "expert_width", 14336),
        Integer("num_local_experts", "experts", 8),
        Integer("num_experts_per_tok", "experts_per_token", 2),
        Fixed(
            {
                "biases": (),
                "router": "softmax",
                "router_bias": False,
                "router_normalize": "always",
            }
        ),
        RotaryPositions(LONGEST, base=1e6),
        Window(LONGEST),
        ROUTER_TRAINING,
    ),
    rules=functools.partial(decoder_rules, names=NAMES),
    aliases={"num_experts": "num_local_experts"},
)
