"""DeepSeek-V3, and what it shares with DeepSeek-V2."""

from jaxtrain.hf.entries import (
    Biases,
    DenseLayers,
    Fixed,
    Float,
    Integer,
    Only,
    PassedOver,
    Predictions,
    RotaryPositions,
    Same,
    TableEntry,
    Window,
)
from jaxtrain.hf.families.family import (
    DEEPSEEK_ALIASES,
    ROUTER_TRAINING,
    SIGMOID_ROUTER,
    Family,
    decoder,
    decoder_rules,
)

LONGEST = 4096
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

FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    models="DeepSeek-V3, V3.1, R1, Moonlight",
    table=(
        *decoder(
            vocab=129280, width=7168, layers=61, heads=128, epsilon=1e-6, remote_code="DeepseekV3"
        ),
        *LATENT,
        Integer("intermediate_size", "mlp_width", 18432),
        Integer("moe_intermediate_size", "expert_width", 2048),
        Integer("n_routed_experts", "experts", 256),
        Integer("num_experts_per_tok", "experts_per_token", 8),
        Integer("n_shared_experts", "shared_experts", 1, least=0),
        Integer("n_group", "router_groups", 8),
        Integer("topk_group", "router_group_limit", 4),
        Float("routed_scaling_factor", "router_scale", 2.5),
        *SIGMOID_ROUTER,
        RotaryPositions(LONGEST),
        Window(LONGEST),
        DenseLayers("first_k_dense_replace", "dense_layers", 3),
        Predictions("num_nextn_predict_layers", "mtp_depth", 1),
        # how the tensors' columns lie, which the rules read
        Only("rope_interleave", (True, False)),
    ),
    rules=decoder_rules,
    aliases=DEEPSEEK_ALIASES,
)
