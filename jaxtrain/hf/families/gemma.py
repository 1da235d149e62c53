"""Gemma 2, and the text of Gemma 3."""

import dataclasses
import math

from jaxtrain.config import ResolvedModel
from jaxtrain.hf.entries import (
    Biases,
    Fixed,
    Float,
    Integer,
    Only,
    PassedOver,
    RotaryPositions,
    Settings,
    TableEntry,
    WholeHeads,
)
from jaxtrain.hf.families.family import Family, decoder, decoder_rules
from jaxtrain.hf.fields import Fields
from jaxtrain.hf.layer_types import RotaryByType, Windows


@dataclasses.dataclass(frozen=True)
class Scales(TableEntry):
    """The factor on embeddings, which no field has, and that on scores, 1 over the root of
    query_pre_attn_scalar."""

    def read(self, fields: Fields, settings: Settings) -> Settings:
        size = fields.number("query_pre_attn_scalar", 256)
        return {
            "embedding_scale": math.sqrt(settings["width"]),
            "attention_scale": 0.0 if size == settings["head_dim"] else size**-0.5,
        }

    def write(self, model: ResolvedModel, length: int) -> Settings:
        scale = model.attention_scale
        return {"query_pre_attn_scalar": round(scale**-2) if scale else model.head_dim}

    sources = {"attention_scale": "query_pre_attn_scalar"}


ACTIVATION: tuple[TableEntry, ...] = (
    Only("hidden_activation", ("gelu_pytorch_tanh",)),
    PassedOver(("hidden_act", "cache_implementation")),
    Fixed(
        {
            "norm": "rmsnorm",
            "norm_weight": "one_plus",
            "norm_place": "both",
            "activation": "geglu",
        }
    ),
)


def _sizes(vocab: int) -> tuple[TableEntry, ...]:
    """Entries of both. vocab: transformers' default of vocab_size"""
    return (
        *decoder(
            vocab,
            width=2304,
            layers=26,
            heads=8,
            epsilon=1e-6,
            tied=True,
            activation=ACTIVATION,
        ),
        Integer("num_key_value_heads", "kv_heads", 4),
        Integer("head_dim", "head_dim", 256),
        Integer("intermediate_size", "mlp_width", 9216),
        Biases("attention_bias", ("qkv", "out"), False),
        WholeHeads(),
        Scales(),
        Only("use_bidirectional_attention", (None, False), written=False),
    )


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    models="Gemma 2",
    table=(
        *_sizes(vocab=256000),
        Float("attn_logit_softcapping", "attention_softcap", 50.0, null=0.0),
        Float("final_logit_softcapping", "logit_softcap", 30.0, null=0.0),
        RotaryPositions(8192),
        Windows(window=4096, typed=True, every=2),
    ),
    rules=decoder_rules,
)

GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    models="Gemma 3 270M, 1B, and the text of others",
    table=(
        *_sizes(vocab=262208),
        # transformers reads the field and has no use for it
        Only("attn_logit_softcapping", (None,)),
        Float("final_logit_softcapping", "logit_softcap", None, null=0.0),
        Fixed({"qk_norm": True}),
        Windows(window=4096, typed=True, every=6, every_field="sliding_window_pattern"),
        RotaryByType(131072, base=1e6, local=1e4, local_field="rope_local_base_freq"),
    ),
    rules=decoder_rules,
)
