"""gpt-oss."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.hf.entries import (
    Biases,
    Fixed,
    Float,
    Integer,
    PassedOver,
    RotaryPositions,
    Settings,
)
from jaxtrain.hf.families.family import (
    ROUTER_TRAINING,
    SILU,
    Family,
    LayerPlace,
    decoder,
    decoder_rules,
)
from jaxtrain.hf.fields import Fields
from jaxtrain.hf.layer_types import Windows
from jaxtrain.hf.tensor_rules import TensorRule


class ScaledRotary(RotaryPositions):
    """Rotary positions with a scaling where a config.json has none."""

    def read(self, fields: Fields, settings: Settings) -> Settings:
        if fields.values.get("rope_parameters") is fields.values.get("rope_scaling") is None:
            fields.values["rope_parameters"] = {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            }
        return super().read(fields, settings)


def _experts(place: LayerPlace, config: Mapping[str, Any]) -> Iterator[TensorRule]:
    """All experts of a layer are one tensor [experts, in, out], and the columns of gate and up
    alternate."""
    yield place.vector("mlp.router.weight", "mlp/router/weight", transpose=True)
    yield place.vector("mlp.router.bias", "mlp/router/logit_bias")
    columns = np.arange(place.model.expert_width) * 2
    for end, arrays in {"": "mlp", "_bias": "mlp/biases"}.items():
        for number, part in enumerate(("gate", "up")):
            tensor = f"mlp.experts.gate_up_proj{end}"
            yield place.vector(tensor, f"{arrays}/{part}", taken=columns + number)
        yield place.vector(f"mlp.experts.down_proj{end}", f"{arrays}/down")


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    models="gpt-oss 20B, 120B",
    table=(
        *decoder(
            vocab=201088,
            width=2880,
            layers=36,
            heads=64,
            epsilon=1e-5,
            activation=(SILU, Fixed({"norm": "rmsnorm", "activation": "clamped_swiglu"})),
        ),
        Integer("num_key_value_heads", "kv_heads", 8, null=0),
        Integer("head_dim", "head_dim", 64, null=0),
        Integer("intermediate_size", "expert_width", 2880),
        Integer("num_local_experts", "experts", 128),
        Integer("num_experts_per_tok", "experts_per_token", 4),
        Float("swiglu_alpha", "activation_alpha", 1.702),
        Float("swiglu_limit", "activation_limit", 7.0),
        Fixed(
            {
                "sinks": True,
                "biases": ("router", "experts"),
                "router": "softmax",
                "router_bias": False,
                # the softmax over a token's experts alone is the one over all, normalised
                "router_normalize": "always",
            }
        ),
        Biases("attention_bias", ("qkv", "out"), True),
        ScaledRotary(131072, base=150000.0),
        Windows(window=128, typed=True, every=2),
        PassedOver(("initial_context_length",)),
        ROUTER_TRAINING,
    ),
    rules=functools.partial(decoder_rules, mlp=_experts),
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    joins_experts=True,
)
