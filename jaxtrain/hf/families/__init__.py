"""The families of published models, one in a file: what the fields of config.json are in the model,
and which tensors are which arrays. Both are used both ways.

A family is no branch in the model: its config.json becomes a ModelConfig like any other. Defaults
and the names of tensors on disk are those of transformers 5.23.0.
"""

from jaxtrain.hf.families import (
    cohere,
    deepseek,
    gemma,
    glm4_moe,
    gpt2,
    gpt_oss,
    llama,
    mistral,
    olmo,
    phi3,
    qwen,
    qwen_moe,
    seed_oss,
    smollm3,
)

# model_type → family. A model that began here is published as the first one that can hold it; those
# with experts, which may all be absent, come last.
FAMILIES = {
    family.model_type: family
    for family in (
        llama.LLAMA,
        mistral.MISTRAL,
        qwen.QWEN2,
        qwen.QWEN3,
        smollm3.SMOLLM3,
        seed_oss.SEED_OSS,
        gpt2.GPT2,
        phi3.PHI3,
        olmo.OLMO2,
        olmo.OLMO3,
        gemma.GEMMA2,
        gemma.GEMMA3_TEXT,
        cohere.COHERE,
        cohere.COHERE2,
        mistral.MIXTRAL,
        qwen_moe.QWEN3_MOE,
        glm4_moe.GLM4_MOE,
        deepseek.DEEPSEEK_V3,
        deepseek.DEEPSEEK_V2,
        deepseek.KIMI_K2,
        gpt_oss.GPT_OSS,
        qwen_moe.QWEN3_NEXT,
    )
}
