"""GPT-2."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.config import ModelConfig
from jaxtrain.hf.families.family import (
    Family,
    Settings,
    read_table,
    stack,
    write_table,
)
from jaxtrain.hf.fields import Fields
from jaxtrain.hf.rules import Rule

GPT2 = (
    ("vocab_size", "vocab_size", 50257),
    ("n_positions", "max_positions", 1024),
    ("n_embd", "width", 768),
    ("n_layer", "layers", 12),
    ("n_head", "heads", 12),
    ("n_inner", "mlp_width", 0),
    ("layer_norm_epsilon", "norm_epsilon", 1e-5),
    ("initializer_range", "init_std", 0.02),
    ("tie_word_embeddings", "tied_embeddings", True),
)


def _read_gpt2(fields: Fields) -> Settings:
    fields.require("activation_function", ["gelu_new", "gelu_pytorch_tanh"])
    fields.require("scale_attn_weights", [True])
    fields.require("scale_attn_by_inverse_layer_idx", [False])
    fields.require("add_cross_attention", [False])
    fields.require("is_encoder_decoder", [False])
    fields.pass_over(
        "n_ctx",
        "reorder_and_upcast_attn",
        *(f"summary_{name}" for name in "activation first_dropout type use_proj".split()),
        "summary_proj_to_labels",
    )
    fields.only_trains("resid_pdrop", "embd_pdrop", "attn_pdrop")
    return read_table(fields, GPT2) | {
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "biases": ("qkv", "out", "mlp", "norm"),
    }


def _write_gpt2(model: ModelConfig, length: int) -> Settings:
    return write_table(model, GPT2) | {"activation_function": "gelu_new"}


def _gpt2_rules(model: ModelConfig, config: Mapping[str, Any]) -> Iterator[Rule]:
    """GPT-2's matrices are [in, out], and its queries, keys and values one matrix."""
    both = ({"weight": "scale", "bias": "bias"}, {"weight": "weight", "bias": "bias"})
    yield Rule("transformer.wte.weight", "embed/table")
    yield Rule("transformer.wpe.weight", "embed/positions")
    if not model.tied_embeddings:
        yield Rule("lm_head.weight", "head/table")
    for name, part in both[0].items():
        yield Rule(f"transformer.ln_f.{name}", f"head/norm/{part}")
    modules = {
        "ln_1": ("attention_norm", both[0]),
        "ln_2": ("mlp_norm", both[0]),
        "attn.c_proj": ("attention/out", both[1]),
        "mlp.c_fc": ("mlp/up", both[1]),
        "mlp.c_proj": ("mlp/down", both[1]),
    }
    for layer, arrays, index in stack(model):
        tensors = f"transformer.h.{layer}"
        for module, (array, parts) in modules.items():
            for name, part in parts.items():
                yield Rule(f"{tensors}.{module}.{name}", f"{arrays}/{array}/{part}", index)
        for number, part in enumerate(("query", "key", "value")):
            columns = np.arange(model.width) + number * model.width
            for name in ("weight", "bias"):
                tensor, array = f"{tensors}.attn.c_attn.{name}", f"{arrays}/attention/{part}/{name}"
                yield Rule(tensor, array, index, taken=columns)


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.",
    (".attn.bias", ".attn.masked_bias"),
    _read_gpt2,
    _write_gpt2,
    _gpt2_rules,
)
