"""DeepSeek-V2."""

import dataclasses

from jaxtrain.config import ResolvedModel
from jaxtrain.hf.entries import (
    DenseLayers,
    Fixed,
    Float,
    Integer,
    Only,
    RotaryPositions,
    Settings,
    TableEntry,
    WholeHeads,
    Window,
)
from jaxtrain.hf.families.deepseek_v3 import LATENT
from jaxtrain.hf.families.family import Family, decoder, decoder_rules
from jaxtrain.hf.fields import Fields

LONGEST = 2048
GREEDY, LIMITED = "greedy", "group_limited_greedy"


@dataclasses.dataclass(frozen=True)
class Groups(TableEntry):
    """The groups of experts, which one of the two ways of choosing experts passes over."""

    def read(self, fields: Fields, settings: Settings) -> Settings:
        if fields.require("topk_method", [GREEDY, LIMITED]) == GREEDY:
            fields.pass_over("n_group", "topk_group")
            return {}
        groups, limit = fields.integer("n_group", None), fields.integer("topk_group", None)
        return {"router_groups": groups, "router_group_limit": limit}

    def write(self, model: ResolvedModel, length: int) -> Settings:
        if model.router_groups == 1:
            return {"topk_method": GREEDY, "n_group": 1, "topk_group": 1}
        return {
            "topk_method": LIMITED,
            "n_group": model.router_groups,
            "topk_group": model.router_group_limit,
        }

    sources = {"router_groups": "n_group", "router_group_limit": "topk_group"}

    limits = {"topk_method": f'"{GREEDY}" or "{LIMITED}"'}


FAMILY = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    models="DeepSeek-V2, V2-Lite, V2.5",
    table=(
        *decoder(
            vocab=102400, width=4096, layers=32, heads=32, epsilon=1e-6, remote_code="DeepseekV2"
        ),
        *LATENT,
        WholeHeads(),
        Integer("intermediate_size", "mlp_width", 11008),
        Integer("moe_intermediate_size", "expert_width", 1407),
        Integer("n_routed_experts", "experts", 64),
        Integer("num_experts_per_tok", "experts_per_token"),
        Integer("n_shared_experts", "shared_experts", 2, least=0),
        Groups(),
        Float("routed_scaling_factor", "router_scale", 1.0),
        Fixed(
            {
                "router": "softmax",
                "router_bias": False,
                "router_normalize": "never",
                "router_group_best": 1,
            }
        ),
        RotaryPositions(LONGEST),
        Window(LONGEST),
        DenseLayers("first_k_dense_replace", "dense_layers", 0),
        Only("norm_topk_prob", (False, None)),
        Only("mlp_bias", (False,)),
        Only("scoring_func", ("softmax",), written=False),
    ),
    rules=decoder_rules,
    aliases={"num_experts": "n_routed_experts"},
)
