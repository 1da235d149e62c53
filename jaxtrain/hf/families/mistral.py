"""Mistral with full attention."""

from jaxtrain.config import ModelConfig
from jaxtrain.hf.families.family import (
    ROTARY_BUFFER,
    Family,
    Settings,
    epsilon,
    no_window,
    read_rotary,
    read_table,
    stream,
    write_rotary,
    write_table,
)
from jaxtrain.hf.families.llama import llama_rules
from jaxtrain.hf.fields import Fields

MISTRAL = (*stream(kv_heads=8), ("intermediate_size", "mlp_width", 14336), *epsilon(1e-6))


def _read_mistral(fields: Fields) -> Settings:
    no_window(fields, window=4096, length=131072)
    return read_table(fields, MISTRAL) | read_rotary(fields) | {"biases": ()}


def _write_mistral(model: ModelConfig, length: int) -> Settings:
    return write_table(model, MISTRAL) | write_rotary(model, length) | {"sliding_window": None}


FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    "model.",
    (ROTARY_BUFFER,),
    _read_mistral,
    _write_mistral,
    llama_rules,
)
