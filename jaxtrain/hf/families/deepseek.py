"""DeepSeek-V2 and V3, and Kimi-K2, which is a DeepSeek-V3 by another name. transformers 5.23.0 does
not know it."""

import dataclasses

from jaxtrain.config import ResolvedModel
from jaxtrain.hf.entries import (
    Biases,
    Fixed,
    Float,
    FullAttention,
    Integer,
    Only,
    PassedOver,
    Predictions,
    RotaryPositions,
    Same,
    Settings,
    TableEntry,
    WholeHeads,
)
from jaxtrain.hf.families.family import (
    DEEPSEEK_ALIASES,
    ROUTER_TRAINING,
    Family,
    decoder,
    decoder_rules,
    experts,
    sigmoid_router,
)
from jaxtrain.hf.fields import MISSING, Fields
from jaxtrain.hf.layer_types import DenseLayers

LONGEST_V2, LONGEST_V3 = 2048, 4096
GREEDY, LIMITED = "greedy", "group_limited_greedy"
# transformers' latent norms have an epsilon of their own, whatever rms_norm_eps is.
LATENT: tuple[TableEntry, ...] = (
    Fixed({"attention": "mla", "latent_norm_epsilon": 1e-6}),
    Integer("kv_lora_rank", "kv_rank", 512),
    Integer("q_lora_rank", "query_rank", 1536, null=0),
    Integer("qk_rope_head_dim", "rope_head_dim", 64),
    Integer("qk_nope_head_dim", "head_dim", 128),
    Integer("v_head_dim", "value_head_dim", 128),
    Same("num_key_value_heads", ("heads",), others=(128,)),
    Same("head_dim", ("rope_head_dim",)),
    Same("qk_head_dim", ("head_dim", "rope_head_dim"), written=False),
    Biases("attention_bias", ("qkv", "out"), False),
    Only("moe_layer_freq", (1,), written=False),
    PassedOver(("ep_size",)),
    ROUTER_TRAINING,
)


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
        return {
            "topk_method": LIMITED if model.router_groups > 1 else GREEDY,
            "n_group": model.router_groups,
            "topk_group": model.router_group_limit,
        }

    sources = {"router_groups": "n_group", "router_group_limit": "topk_group"}

    limits = {"topk_method": f'"{GREEDY}" or "{LIMITED}"'}


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    models="DeepSeek-V3, V3.1, R1, Moonlight",
    table=(
        *decoder(
            vocab=129280, width=7168, layers=61, heads=128, epsilon=1e-6, remote_code="DeepseekV3"
        ),
        *LATENT,
        *experts(mlp=18432, width=2048, count=256),
        Integer("n_shared_experts", "shared_experts", 1, least=0),
        *sigmoid_router(groups=8, group_limit=4, scale=2.5),
        RotaryPositions(LONGEST_V3),
        FullAttention(LONGEST_V3),
        DenseLayers("first_k_dense_replace", "dense_layers", 3),
        Predictions("num_nextn_predict_layers", "mtp_depth", 1),
        # how the tensors' columns lie, which the rules read
        Only("rope_interleave", (True, False)),
    ),
    rules=decoder_rules,
    aliases=DEEPSEEK_ALIASES,
)

KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2", models="Kimi-K2")

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    models="DeepSeek-V2, V2-Lite, V2.5",
    table=(
        *decoder(
            vocab=102400, width=4096, layers=32, heads=32, epsilon=1e-6, remote_code="DeepseekV2"
        ),
        *LATENT,
        WholeHeads(),
        *experts(mlp=11008, width=1407, count=64, choices=MISSING),
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
        RotaryPositions(LONGEST_V2),
        FullAttention(LONGEST_V2),
        DenseLayers("first_k_dense_replace", "dense_layers", 0),
        Only("norm_topk_prob", (False, None)),
        Biases("mlp_bias", ("mlp",), False),
        Only("scoring_func", ("softmax",), written=False),
    ),
    rules=decoder_rules,
    aliases={"num_experts": "n_routed_experts"},
)
