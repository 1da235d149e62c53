"""Llama 2 and 3, SmolLM2, Yi."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.config import ModelConfig
from jaxtrain.hf.families.family import (
    ROTARY_BUFFER,
    Family,
    Settings,
    attention,
    ends,
    epsilon,
    mlp,
    norms,
    read_rotary,
    read_table,
    stack,
    stream,
    write_rotary,
    write_table,
)
from jaxtrain.hf.fields import Fields
from jaxtrain.hf.rules import Rule

LLAMA = (*stream(kv_heads=0), ("intermediate_size", "mlp_width", 11008), *epsilon(1e-6))


def _read_llama(fields: Fields) -> Settings:
    fields.require("rope_interleaved", [False])
    fields.pass_over("is_llama_config", "pad_to_multiple_of")
    attention = ("qkv", "out") if fields.require("attention_bias", [False, True]) else ()
    mlp = ("mlp",) if fields.require("mlp_bias", [False, True]) else ()
    return read_table(fields, LLAMA) | read_rotary(fields) | {"biases": attention + mlp}


def _write_llama(model: ModelConfig, length: int) -> Settings:
    biases = {"attention_bias": "qkv" in model.biases, "mlp_bias": "mlp" in model.biases}
    return write_table(model, LLAMA) | write_rotary(model, length) | biases


def llama_rules(model: ModelConfig, config: Mapping[str, Any]) -> Iterator[Rule]:
    yield from ends(model)
    for layer, arrays, index in stack(model):
        tensors = f"model.layers.{layer}"
        yield from norms(tensors, arrays, index)
        yield from attention(model, tensors, arrays, index)
        yield from mlp(model, tensors, arrays, index)


FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    "model.",
    (ROTARY_BUFFER,),
    _read_llama,
    _write_llama,
    llama_rules,
)
