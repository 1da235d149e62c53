"""The families of published models, one in a file: what the fields of config.json are in the model,
and which tensors are which arrays. Both are used both ways.

A family is no branch in the model: its config.json becomes a ModelConfig like any other. Defaults
and the names of tensors on disk are those of transformers 5.23.0.
"""

from jaxtrain.hf.families.cohere import COHERE, COHERE2
from jaxtrain.hf.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from jaxtrain.hf.families.gemma import GEMMA2, GEMMA3_TEXT
from jaxtrain.hf.families.glm4_moe import GLM4_MOE
from jaxtrain.hf.families.gpt2 import GPT2
from jaxtrain.hf.families.gpt_oss import GPT_OSS
from jaxtrain.hf.families.llama import LLAMA
from jaxtrain.hf.families.mistral import MISTRAL, MIXTRAL
from jaxtrain.hf.families.olmo import OLMO2, OLMO3
from jaxtrain.hf.families.phi3 import PHI3
from jaxtrain.hf.families.qwen import QWEN2, QWEN3
from jaxtrain.hf.families.qwen_moe import QWEN3_MOE, QWEN3_NEXT
from jaxtrain.hf.families.seed_oss import SEED_OSS
from jaxtrain.hf.families.smollm3 import SMOLLM3

# model_type → family. A model that began here is published as the first one that can hold it.
FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        SMOLLM3,
        SEED_OSS,
        GPT2,
        MIXTRAL,
        QWEN3_MOE,
        GLM4_MOE,
        DEEPSEEK_V3,
        DEEPSEEK_V2,
        KIMI_K2,
        GEMMA2,
        GEMMA3_TEXT,
        GPT_OSS,
        OLMO2,
        OLMO3,
        PHI3,
        COHERE,
        COHERE2,
        QWEN3_NEXT,
    )
}
