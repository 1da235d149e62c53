"""The families of published models, one in a file: which fields of config.json are which settings,
and which tensors are which arrays. Both are used both ways.

A family is no branch in the model: its config.json becomes a ModelConfig like any other. The names
and layouts of tensors are those on disk, checked against transformers 5.23.0.
"""

from jaxtrain.hf.families import deepseek_v3, gpt2, llama, mistral, mixtral

FAMILIES = {
    module.FAMILY.model_type: module.FAMILY
    for module in (llama, mistral, mixtral, deepseek_v3, gpt2)
}
