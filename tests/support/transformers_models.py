"""Random small models of transformers, and the logits that transformers has for a folder.

    python transformers_models.py make FOLDER     a model of each case, and its logits
    python transformers_models.py logits FOLDER   the logits of the model that lies in FOLDER

Runs in a process of its own with the packages of requirements-transformers.txt; jax is not
imported.
"""

import pathlib
import sys

import numpy as np

TOKENS = np.random.default_rng(0).integers(0, 300, (2, 48))
_SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "intermediate_size": 96,
}
_LATENT = _SIZES | {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "qk_nope_head_dim": 16,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "num_key_value_heads": 4,
}
# Case → (the class of the model, the settings of its config).
CASES: dict[str, tuple[str, dict]] = {
    "llama": (
        "LlamaForCausalLM",
        _SIZES
        | {
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "llama 3.1": (
        "LlamaForCausalLM",
        _SIZES
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "linear scaling": (
        "LlamaForCausalLM",
        _SIZES | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "tied llama with biases": (
        "LlamaForCausalLM",
        _SIZES
        | {
            "head_dim": 24,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-5,
        },
    ),
    "biases of the MLP alone": ("LlamaForCausalLM", _SIZES | {"mlp_bias": True}),
    "biases of attention alone": ("LlamaForCausalLM", _SIZES | {"attention_bias": True}),
    "mistral": ("MistralForCausalLM", _SIZES | {"num_key_value_heads": 1, "head_dim": 32}),
    "mixtral": (
        "MixtralForCausalLM",
        _SIZES | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mixtral with one expert a token": (
        "MixtralForCausalLM",
        _SIZES | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 1},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 300, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        _LATENT | {"q_lora_rank": 40, "n_group": 4, "topk_group": 2, "rms_norm_eps": 1e-5},
    ),
    "deepseek_v3 without latent queries": (
        "DeepseekV3ForCausalLM",
        _LATENT
        | {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
}


def make(folder: pathlib.Path) -> None:
    """Saves a random model of each case. Its numbers are larger than initial ones, vectors too, so
    that a wrong place of any tensor shows."""
    import torch
    import transformers

    for number, (name, (architecture, settings)) in enumerate(CASES.items()):
        kind = getattr(transformers, architecture)
        model = kind(kind.config_class(**settings)).float().eval()
        random = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=random)
                parameter.copy_(0.08 * noise if parameter.ndim > 1 else 0.5 + 0.3 * noise)
            for buffer_name, buffer in model.named_buffers():
                if "correction" in buffer_name:
                    buffer.copy_(0.05 * torch.randn(buffer.shape, generator=random))
        model.save_pretrained(folder / name)
        write_logits(folder / name)


def write_logits(folder: pathlib.Path) -> None:
    """Writes logits.npy beside a model's files."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        np.save(folder / "logits.npy", model(torch.tensor(TOKENS)).logits.numpy())


if __name__ == "__main__":
    {"make": make, "logits": write_logits}[sys.argv[1]](pathlib.Path(sys.argv[2]))
