"""Qwen3 with experts."""

import dataclasses

from jaxtrain.config import ResolvedModel
from jaxtrain.hf.entries import Biases, Fixed, Integer, RotaryPositions, Switch, TableEntry, Window
from jaxtrain.hf.families.family import (
    NORMALIZED,
    ROUTER_TRAINING,
    Family,
    decoder,
    decoder_rules,
)
from jaxtrain.hf.fields import Fields
from jaxtrain.hf.rope_parameters import Settings

LONGEST = 32768


@dataclasses.dataclass(frozen=True)
class SparseLayers(TableEntry):
    """The layers with experts: every decoder_sparse_step-th one that mlp_only_layers does not list.
    The others have to be the first ones."""

    def read(self, fields: Fields, settings: Settings) -> Settings:
        layers = settings["layers"]
        step = fields.integer("decoder_sparse_step", 1)
        listed = fields.value("mlp_only_layers", None) or []
        if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
            raise fields.refuse("mlp_only_layers", "is no list of layers")
        sparse = [n for n in range(layers) if n not in set(listed) and (n + 1) % step == 0]
        field = "mlp_only_layers" if listed else "decoder_sparse_step"
        if not sparse:
            raise fields.refuse(field, f"leaves none of num_hidden_layers={layers} with experts")
        if sparse != list(range(sparse[0], layers)):
            raise fields.refuse(
                field, "is not supported: layers without experts have to be the first ones"
            )
        return {"layers": len(sparse), "dense_layers": sparse[0]}

    def write(self, model: ResolvedModel, length: int) -> Settings:
        return {
            "num_hidden_layers": model.dense_layers + model.layers,
            "mlp_only_layers": list(range(model.dense_layers)),
            "decoder_sparse_step": 1,
        }

    sources = {"dense_layers": "mlp_only_layers"}

    limits = {
        "mlp_only_layers": "the first layers",
        "decoder_sparse_step": "one that leaves only first layers dense",
    }


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3 30B-A3B, 235B-A22B",
    table=(
        *decoder(vocab=151936, width=2048, layers=24, heads=32, epsilon=1e-6),
        Integer("num_key_value_heads", "kv_heads", 4),
        Integer("head_dim", "head_dim", None, null=0),
        Integer("intermediate_size", "mlp_width", 6144),
        Integer("moe_intermediate_size", "expert_width", 768),
        Integer("num_experts", "experts", 128),
        Integer("num_experts_per_tok", "experts_per_token", 8),
        Switch("norm_topk_prob", "router_normalize", False, NORMALIZED),
        Biases("attention_bias", ("qkv", "out"), False),
        Fixed({"qk_norm": True, "router": "softmax", "router_bias": False}),
        RotaryPositions(LONGEST),
        Window(LONGEST, window=4096, switched=True),
        SparseLayers(),
        ROUTER_TRAINING,
    ),
    rules=decoder_rules,
    aliases={"num_local_experts": "num_experts"},
)
