"""Mistral, and Mixtral, which has experts."""

import functools

from jaxtrain.hf.entries import Fixed, Integer, RotaryPositions
from jaxtrain.hf.families.family import (
    ROUTER_TRAINING,
    ExpertNames,
    Family,
    decoder,
    decoder_rules,
    mlp_rules,
)
from jaxtrain.hf.layer_types import Windows

LONGEST = 131072

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    models="Mistral 7B",
    table=(
        *decoder(vocab=32000, width=4096, layers=32, heads=32, epsilon=1e-6),
        Integer("num_key_value_heads", "kv_heads", 8, null=0),
        Integer("head_dim", "head_dim", None, null=0),
        Integer("intermediate_size", "mlp_width", 14336),
        Fixed({"biases": ()}),
        RotaryPositions(LONGEST),
        Windows(window=4096),
    ),
    rules=decoder_rules,
)

MIXTRAL = Family(
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
        Windows(),
        ROUTER_TRAINING,
    ),
    rules=functools.partial(
        decoder_rules,
        mlp=functools.partial(
            mlp_rules,
            names=ExpertNames("block_sparse_moe", experts={"gate": "w1", "up": "w3", "down": "w2"}),
        ),
    ),
    aliases={"num_experts": "num_local_experts"},
)
