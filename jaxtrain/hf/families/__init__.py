"""The families of published models, one in a file: what the fields of config.json are in the model,
and which tensors are which arrays. Both are used both ways.

A family is no branch in the model: its config.json becomes a ModelConfig like any other. Defaults
and the names of tensors on disk are those of transformers 5.23.0.
"""

from jaxtrain.hf.families import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt2,
    kimi_k2,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)

# model_type → family. A model that began here is published as the first one that can hold it.
FAMILIES = {
    module.FAMILY.model_type: module.FAMILY
    for module in (
        llama,
        mistral,
        qwen2,
        qwen3,
        smollm3,
        seed_oss,
        gpt2,
        mixtral,
        qwen3_moe,
        glm4_moe,
        deepseek_v3,
        deepseek_v2,
        kimi_k2,
    )
}
