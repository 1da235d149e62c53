"""Mixtral with full attention."""

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
    no_window,
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

MIXTRAL = (
    *stream(kv_heads=8),
    ("intermediate_size", "expert_width", 14336),
    ("num_local_experts", "experts", 8),
    ("num_experts_per_tok", "experts_per_token", 2),
    *epsilon(1e-5),
)


def _read_mixtral(fields: Fields) -> Settings:
    no_window(fields, window=None, length=131072)
    fields.only_trains("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")
    router = {
        "router": "softmax",
        "router_bias": False,
        "router_normalize": "always",
        "biases": (),
    }
    return read_table(fields, MIXTRAL) | read_rotary(fields, base=1e6) | router


def _write_mixtral(model: ModelConfig, length: int) -> Settings:
    return write_table(model, MIXTRAL) | write_rotary(model, length) | {"sliding_window": None}


def _mixtral_rules(model: ModelConfig, config: Mapping[str, Any]) -> Iterator[Rule]:
    yield from ends(model)
    for layer, arrays, index in stack(model):
        tensors = f"model.layers.{layer}"
        yield from norms(tensors, arrays, index)
        yield from attention(model, tensors, arrays, index)
        moe = f"{tensors}.block_sparse_moe"
        yield Rule(f"{moe}.gate.weight", f"{arrays}/mlp/router/weight", index, transpose=True)
        for expert in range(model.experts):
            for name, part in {"w1": "gate", "w3": "up", "w2": "down"}.items():
                tensor, array = f"{moe}.experts.{expert}.{name}.weight", f"{arrays}/mlp/{part}"
                yield Rule(tensor, array, (*index, expert), transpose=True)


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    "model.",
    (ROTARY_BUFFER,),
    _read_mixtral,
    _write_mixtral,
    _mixtral_rules,
)
