"""Qwen3 with experts, and Qwen3-Next, most of whose layers have a Gated DeltaNet in the place of
attention."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.config import ResolvedModel
from jaxtrain.hf.entries import (
    Biases,
    Fixed,
    Integer,
    Only,
    RotaryPositions,
    SettingField,
    Settings,
    Switch,
    TableEntry,
)
from jaxtrain.hf.families.family import (
    NORMALIZED,
    ROUTER_TRAINING,
    SILU,
    ExpertNames,
    Family,
    LayerPlace,
    decoder,
    decoder_rules,
    experts,
    grouped_attention,
    mlp_rules,
)
from jaxtrain.hf.fields import Fields
from jaxtrain.hf.layer_types import (
    FULL,
    SparseLayers,
    Windows,
    layer_types,
    models_of_layers,
    settings_of,
)
from jaxtrain.hf.tensor_rules import TensorRule

LONGEST = 32768
LINEAR = "linear_attention"
DELTANET = "layers/gated_deltanet.py:GatedDeltaNet"
# A field of a Gated DeltaNet → the setting that it gives, and transformers' default.
DELTANET_FIELDS = {
    "linear_num_key_heads": ("key_heads", 16),
    "linear_num_value_heads": ("value_heads", 32),
    "linear_key_head_dim": ("key_dim", 128),
    "linear_value_head_dim": ("value_dim", 128),
    "linear_conv_kernel_dim": ("conv", 4),
}

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3 30B-A3B, 235B-A22B",
    table=(
        *decoder(vocab=151936, width=2048, layers=24, heads=32, epsilon=1e-6),
        Integer("num_key_value_heads", "kv_heads", 4),
        Integer("head_dim", "head_dim", None, null=0),
        *experts(mlp=6144, width=768, count=128, field="num_experts"),
        Switch("norm_topk_prob", "router_normalize", False, NORMALIZED),
        Biases("attention_bias", ("qkv", "out"), False),
        Fixed({"qk_norm": True, "router": "softmax", "router_bias": False}),
        RotaryPositions(LONGEST),
        Windows(window=4096, switched=True),
        SparseLayers(),
        ROUTER_TRAINING,
    ),
    rules=decoder_rules,
    aliases={"num_local_experts": "num_experts"},
)


@dataclasses.dataclass(frozen=True)
class LinearLayers(TableEntry):
    """The layers with a Gated DeltaNet, by layer_types or all but every
    full_attention_interval-th one, and its sizes."""

    def read(self, fields: Fields, settings: Settings) -> Settings:
        layers, every = settings["layers"], fields.integer("full_attention_interval", 4)
        usual = [LINEAR if number % every else FULL for number in range(1, layers + 1)]
        types = layer_types(fields, layers, usual, (LINEAR, FULL))
        sizes = {
            setting: fields.integer(field, default)
            for field, (setting, default) in DELTANET_FIELDS.items()
        }
        if sizes["value_heads"] % sizes["key_heads"]:
            raise fields.refuse(
                "linear_num_value_heads",
                f"is no multiple of linear_num_key_heads={sizes['key_heads']}",
            )
        if LINEAR not in types:
            return settings_of(["full"], 0)
        values = sizes | {"epsilon": settings["norm_epsilon"]}
        mixer = {
            "mixer": DELTANET,
            "block_settings": tuple(f"{name}={value}" for name, value in values.items()),
        }
        return mixer | settings_of(["mixer" if t == LINEAR else "full" for t in types], 0)

    def write(self, model: ResolvedModel, length: int) -> Settings:
        layers = models_of_layers(model)
        texts = next((layer.block_settings for layer in layers if layer.mixer), ())
        given = dict(text.split("=", 1) for text in texts)
        sizes = {
            field: int(given.get(setting, default))
            for field, (setting, default) in DELTANET_FIELDS.items()
        }
        return {"layer_types": [LINEAR if layer.mixer else FULL for layer in layers]} | sizes

    sources = {"pattern": "layer_types"} | {
        f"block_settings.{setting}": field for field, (setting, _) in DELTANET_FIELDS.items()
    }

    limits = {"layer_types": f'"{LINEAR}" or "{FULL}"'}


@dataclasses.dataclass(frozen=True)
class SharedExpert(SettingField):
    """The size of the expert that all tokens use, which has a gate."""

    default: int

    def read(self, fields: Fields, settings: Settings) -> Settings:
        size, width = fields.integer(self.field, self.default), settings["expert_width"]
        if size % width:
            raise fields.refuse(self.field, f"is no multiple of moe_intermediate_size={width}")
        return {self.setting: size // width, "shared_gate": True}

    def write(self, model: ResolvedModel, length: int) -> Settings:
        return {self.field: model.shared_experts * model.expert_width or self.default}


def _attention(place: LayerPlace, config: Mapping[str, Any]) -> Iterator[TensorRule]:
    """A Gated DeltaNet; or attention, the columns of whose query and gate alternate by heads."""
    model = place.model
    if model.mixer:
        stored, module = "attention/own", "linear_attn"
        for name in ("in_proj_qkvz", "in_proj_ba", "out_proj"):
            yield place.vector(f"{module}.{name}.weight", f"{stored}/{name}", transpose=True)
        yield place.vector(
            f"{module}.conv1d.weight", f"{stored}/conv1d", transpose=True, channels=True
        )
        for name in ("A_log", "dt_bias"):
            yield place.vector(f"{module}.{name}", f"{stored}/{name}")
        yield place.vector(f"{module}.norm.weight", f"{stored}/norm")
        return
    heads = np.arange(model.heads)[:, None] * 2 * model.head_dim + np.arange(model.head_dim)
    query, gate = heads.ravel(), heads.ravel() + model.head_dim
    for rule in grouped_attention(place, config):
        if ".q_proj." in rule.tensor:
            of_gate = rule.array.replace("/attention/query/", "/attention/gate/")
            yield dataclasses.replace(rule, taken=query)
            yield dataclasses.replace(rule, array=of_gate, taken=gate)
        else:
            yield rule


def _mlp(place: LayerPlace, config: Mapping[str, Any]) -> Iterator[TensorRule]:
    yield from mlp_rules(place, config, ExpertNames(shared="shared_expert"))
    if place.model.experts:
        yield place.vector("mlp.shared_expert_gate.weight", "mlp/shared_weight", transpose=True)


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    models="Qwen3-Next 80B-A3B, without its prediction module",
    table=(
        *decoder(
            vocab=151936,
            width=2048,
            layers=48,
            heads=16,
            epsilon=1e-6,
            activation=(
                SILU,
                Fixed({"norm": "rmsnorm", "norm_weight": "one_plus", "activation": "swiglu"}),
            ),
        ),
        Integer("num_key_value_heads", "kv_heads", 2),
        Integer("head_dim", "head_dim", 256),
        *experts(mlp=5632, width=512, count=512, choices=10, field="num_experts"),
        SharedExpert("shared_expert_intermediate_size", "shared_experts", 512),
        Switch("norm_topk_prob", "router_normalize", True, NORMALIZED),
        Biases("attention_bias", ("qkv", "out"), False),
        Fixed(
            {
                "qk_norm": True,
                "attention_gate": True,
                "router": "softmax",
                "router_bias": False,
            }
        ),
        RotaryPositions(LONGEST, part=0.25),
        Only("use_sliding_window", (False,), written=False),
        LinearLayers(),
        SparseLayers(),
        ROUTER_TRAINING,
    ),
    rules=functools.partial(decoder_rules, attention=_attention, mlp=_mlp),
    unread=("mtp.",),
)
