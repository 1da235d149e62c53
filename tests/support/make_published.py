"""Writes published.json: what transformers computes with the models of published.py. In an
environment of its own, as the file's first entry says, with jaxtrain's own requirements:

    pip install torch==2.13.0 transformers==5.23.0 -r requirements.txt
    PYTHONPATH=.:tests python tests/support/make_published.py
"""

import importlib
import json
import pathlib
import types

import numpy as np
import torch
import transformers
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from support import published

MIXTRAL = {
    "hidden_size": 16,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 8.0,
        "original_max_position_embeddings": 12,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
DEEPSEEK = {
    "hidden_size": 12,
    "intermediate_size": 10,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
    "q_lora_rank": 7,
    "kv_lora_rank": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 0.05,  # not that of the latents
}
V3 = {
    **DEEPSEEK,
    "norm_topk_prob": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 40.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 2.0,
        "beta_slow": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}
FIVE = {
    "n_routed_experts": 12,
    "n_group": 3,
    "num_experts_per_tok": 5,
    "first_k_dense_replace": 0,
    "num_hidden_layers": 1,
}
# kind, config, depth of multi-token prediction
CASES = {
    "mixtral": ("mixtral", MIXTRAL, 0),
    "mixtral, one expert a token": (
        "mixtral",
        MIXTRAL | {"num_experts_per_tok": 1, "num_hidden_layers": 1},
        0,
    ),
    "deepseek_v3": ("deepseek_v3", V3, 0),
    "deepseek_v3, five experts, not normalized": (
        "deepseek_v3",
        V3 | FIVE | {"norm_topk_prob": False, "q_lora_rank": None},
        0,
    ),
    "deepseek_v2": (
        "deepseek_v2",
        DEEPSEEK | {"num_hidden_layers": 1, "first_k_dense_replace": 0, "kv_lora_rank": 6},
        0,
    ),
    "deepseek_v3, predictions": (
        "deepseek_v3",
        V3 | {"num_hidden_layers": 1, "first_k_dense_replace": 0},
        2,
    ),
}


def built(kind: str, config: dict, mtp_depth: int):
    """(transformers' model, its modules of multi-token prediction)."""
    names = {"mixtral": "Mixtral", "deepseek_v3": "DeepseekV3", "deepseek_v2": "DeepseekV2"}
    more = {
        "vocab_size": published.VOCABULARY,
        "num_key_value_heads": config["num_attention_heads"],
        "attn_implementation": "eager",
    }
    more["experts_implementation"] = "eager"  # the others want sizes in multiples of 16 bytes
    if kind == "mixtral":
        more |= {"sliding_window": None}
    if kind == "deepseek_v2":
        more |= {"topk_method": "group_limited_greedy"}
    made = getattr(transformers, names[kind] + "Config")(**more | config)
    model = getattr(transformers, names[kind] + "ForCausalLM")(made).float()
    own = modeling_deepseek_v3.DeepseekV3DecoderLayer, modeling_deepseek_v3.DeepseekV3RMSNorm
    modules = [MtpLayer(made, *own, d).float() for d in range(mtp_depth)]
    for d, module in enumerate(modules):
        module.mtp_block.self_attn.layer_idx = d
    return model.eval(), torch.nn.ModuleList(modules).eval()


def arrays(model, modules) -> dict[str, torch.Tensor]:
    """Parameters, and the buffers that checkpoints have, by their names."""
    return {
        **model.state_dict(keep_vars=True),
        **{f"mtp.{k}": v for k, v in modules.state_dict(keep_vars=True).items()},
    }


def losses(model, modules, tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean loss of the next token, mean over the modules of that of the further ones)."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    out = model(inputs, output_hidden_states=False)
    mean = lambda logits, targets: torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten()
    )
    stream, further = model.model(inputs).last_hidden_state, []
    for d, module in enumerate(modules, 1):
        length = inputs.shape[1] - d
        positions = torch.arange(length)[None]
        ahead = model.model.embed_tokens(inputs[:, d:])
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        stream = module(
            ahead,
            stream[:, :length],
            model.model.rotary_emb(ahead, positions),
            mask,
            positions,
            None,
        )
        further.append(mean(model.lm_head(stream), targets[:, d:]))
    return mean(out.logits, targets), torch.stack(further).mean() if further else torch.zeros(())


def case(kind: str, config: dict, mtp_depth: int) -> dict:
    torch.manual_seed(0)
    model, modules = built(kind, config, mtp_depth)
    shapes = {name: list(a.shape) for name, a in arrays(model, modules).items()}
    given = published.weights(shapes)
    with torch.no_grad():
        for name, a in arrays(model, modules).items():
            a.copy_(torch.from_numpy(given[name]))
    tokens = torch.from_numpy(published.tokens()).long()
    logits = model(tokens[:, :-1]).logits
    made = {"kind": kind, "config": config, "mtp_depth": mtp_depth, "shapes": shapes}
    made["logits"] = np.round(logits.detach().numpy().astype(float), 6).tolist()
    if mtp_depth:
        loss, further = losses(model, modules, tokens)
        made["loss"], made["mtp_loss"] = loss.item(), further.item()
        (loss + published.MTP_WEIGHT * further).backward()
    else:
        (logits * torch.from_numpy(published.random("cotangent", *logits.shape))).sum().backward()
    found = {name: a.grad for name, a in arrays(model, modules).items() if a.grad is not None}
    made["gradients"] = {
        name: [float(f"{v:.7g}") for v in published.digest(name, g.numpy())]
        for name, g in found.items()
    }
    return made


def router_weights(case: published.RouterCase) -> list[list[float]]:
    """The weights of experts [token, expert] of a family's router."""
    family = importlib.import_module(f"transformers.models.{case.kind}.modeling_{case.kind}")
    (router,) = (of for name, of in vars(family).items() if name.lower().endswith("topkrouter"))
    config = types.SimpleNamespace(hidden_size=published.WIDTH, **case.config)
    module, (x, matrix, biases) = router(config), map(torch.from_numpy, case.weights())
    given = {"weight": matrix, "e_score_correction_bias": biases, "bias": biases}
    with torch.no_grad():
        for name, a in module.state_dict(keep_vars=True).items():
            a.copy_(given[name])
        _, weights, chosen = module(x)
    every = torch.zeros(len(x), len(matrix)).scatter(1, chosen, weights)
    return [[float(f"{weight:.9g}") for weight in row] for row in every.tolist()]


if __name__ == "__main__":
    written = {
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "type": "float32, CPU",
        }
    }
    written |= {name: case(*of) for name, of in CASES.items()}
    written["routers"] = {n: router_weights(case) for n, case in published.ROUTERS.items()}
    pathlib.Path(__file__).with_name("published.json").write_text(json.dumps(written) + "\n")
