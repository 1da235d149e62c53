"""Phi-3, and Phi-4 of its architecture."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.hf.entries import Fixed, Integer, Only, PassedOver, RotaryPositions, Training
from jaxtrain.hf.families.family import Family, LayerPlace, decoder, decoder_rules
from jaxtrain.hf.layer_types import Windows
from jaxtrain.hf.tensor_rules import TensorRule

LONGEST = 4096


def _attention(place: LayerPlace, config: Mapping[str, Any]) -> Iterator[TensorRule]:
    """Queries, keys and values are one matrix."""
    model = place.model
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    start = 0
    for part, size in {"query": queries, "key": keys, "value": keys}.items():
        columns = np.arange(start, start + size)
        yield from place.matrix("self_attn.qkv_proj", f"attention/{part}", taken=columns)
        start += size
    yield from place.matrix("self_attn.o_proj", "attention/out")


def _mlp(place: LayerPlace, config: Mapping[str, Any]) -> Iterator[TensorRule]:
    """The gate and what it multiplies are one matrix."""
    columns = np.arange(place.model.mlp_width)
    for number, part in enumerate(("gate", "up")):
        taken = columns + number * len(columns)
        yield from place.matrix("mlp.gate_up_proj", f"mlp/{part}", taken=taken)
    yield from place.matrix("mlp.down_proj", "mlp/down")


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    models="Phi-3 of 4k tokens, Phi-4",
    table=(
        *decoder(vocab=32064, width=3072, layers=32, heads=32, epsilon=1e-5, remote_code="Phi3"),
        Integer("num_key_value_heads", "kv_heads", None, null=0),
        Integer("head_dim", "head_dim", None, null=0),
        Integer("intermediate_size", "mlp_width", 8192),
        Fixed({"biases": ()}),
        *(
            Only(field, (False,), written=False)
            for field in ("attention_bias", "mlp_bias", "lm_head_bias")
        ),
        RotaryPositions(LONGEST, part=1.0, scaled=False),
        Windows(),
        PassedOver(("original_max_position_embeddings", "full_attn_mod", "interpolate_factor")),
        Training(("resid_pdrop", "embd_pdrop")),
    ),
    rules=functools.partial(decoder_rules, attention=_attention, mlp=_mlp),
)
