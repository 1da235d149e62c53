"""GPT-2."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.config import ResolvedModel
from jaxtrain.hf.entries import (
    Fixed,
    Float,
    Integer,
    Only,
    PassedOver,
    RemoteCode,
    Switch,
    Training,
)
from jaxtrain.hf.families.family import COMMON, Family, layers_of
from jaxtrain.hf.tensor_rules import TensorRule


def _gpt2_rules(model: ResolvedModel, config: Mapping[str, Any]) -> Iterator[TensorRule]:
    """GPT-2's matrices are [in, out], and its queries, keys and values one matrix."""
    both = ({"weight": "scale", "bias": "bias"}, {"weight": "weight", "bias": "bias"})
    yield TensorRule("transformer.wte.weight", "embed/table")
    yield TensorRule("transformer.wpe.weight", "embed/positions")
    if not model.tied_embeddings:
        yield TensorRule("lm_head.weight", "head/table")
    for name, part in both[0].items():
        yield TensorRule(f"transformer.ln_f.{name}", f"head/norm/{part}")
    modules = {
        "ln_1": ("attention_norm", both[0]),
        "ln_2": ("mlp_norm", both[0]),
        "attn.c_proj": ("attention/out", both[1]),
        "mlp.c_fc": ("mlp/up", both[1]),
        "mlp.c_proj": ("mlp/down", both[1]),
    }
    for place in layers_of(model, "transformer.h"):
        for module, (array, parts) in modules.items():
            for name, part in parts.items():
                yield place.vector(f"{module}.{name}", f"{array}/{part}")
        for number, part in enumerate(("query", "key", "value")):
            columns = np.arange(model.width) + number * model.width
            for name in ("weight", "bias"):
                yield place.vector(f"attn.c_attn.{name}", f"attention/{part}/{name}", taken=columns)


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    models="GPT-2",
    table=(
        *COMMON,
        RemoteCode(),
        Integer("vocab_size", "vocab_size", 50257),
        Integer("n_positions", "max_positions", 1024),
        Integer("n_embd", "width", 768),
        Integer("n_layer", "layers", 12),
        Integer("n_head", "heads", 12),
        Integer("n_inner", "mlp_width", None, null=0),
        Float("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Float("initializer_range", "init_std", 0.02),
        Switch("tie_word_embeddings", "tied_embeddings", True),
        Fixed(
            {
                "norm": "layernorm",
                "activation": "gelu",
                "positions": "learned",
                "biases": ("qkv", "out", "mlp", "norm"),
            }
        ),
        Only("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
        Only("scale_attn_weights", (True,)),
        Only("scale_attn_by_inverse_layer_idx", (False,)),
        PassedOver(
            (
                "n_ctx",
                "reorder_and_upcast_attn",
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
            )
        ),
        Training(("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    ),
    rules=_gpt2_rules,
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    prefix="transformer.",
    dropped=(".attn.bias", ".attn.masked_bias"),
)
