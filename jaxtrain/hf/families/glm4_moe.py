"""GLM-4.5."""

from jaxtrain.hf.entries import (
    Biases,
    FullAttention,
    Integer,
    Predictions,
    RotaryPositions,
    Switch,
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
from jaxtrain.hf.layer_types import DenseLayers

LONGEST = 131072

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    models="GLM-4.5, 4.5-Air, 4.6",
    table=(
        *decoder(vocab=151552, width=4096, layers=46, heads=96, epsilon=1e-5),
        Integer("num_key_value_heads", "kv_heads", 8),
        Integer("head_dim", "head_dim", None, null=0),
        *experts(mlp=10944, width=1408, count=128),
        Integer("n_shared_experts", "shared_experts", 1, least=0),
        *sigmoid_router(groups=1, group_limit=1, scale=1.0),
        Switch("use_qk_norm", "qk_norm", False),
        Biases("attention_bias", ("qkv",), False),
        RotaryPositions(LONGEST, part=0.5),
        FullAttention(LONGEST),
        DenseLayers("first_k_dense_replace", "dense_layers", 1),
        Predictions("num_nextn_predict_layers", "mtp_depth", 1),
        ROUTER_TRAINING,
    ),
    rules=decoder_rules,
    aliases=DEEPSEEK_ALIASES,
)
