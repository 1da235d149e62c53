"""Small models of published kinds, with weights by their published names: what `transformers`
computes with them (published.json, written by make_published.py) and what jaxtrain does.

A case of published.json: "kind" and "config" of transformers' model; "shapes" of its parameters by
name, as transformers holds them in memory; "logits" [B, T, V] of `tokens`, with "mtp_depth" the
loss of the further predictions; and "gradients", of each parameter the sum of squares and a
projection: of Σ logits · random, or with "mtp_depth" of the whole training loss. "routers" has the
weights of experts [token, expert] of each case of ROUTERS.
"""

import zlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxtrain.config import Config, DataConfig, MeshConfig, ModelConfig, PrecisionConfig

BATCH, TOKENS, VOCABULARY = 2, 9, 11
ROUTED, WIDTH = 12, 8  # tokens of a router's input, and their size
MTP_WEIGHT = 0.3


def random(name: str, *shape: int) -> np.ndarray:
    """Float32 normal numbers that depend on a name and the shape alone, whatever numpy's
    version."""
    return (
        np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    )


def tokens() -> np.ndarray:
    """A sequence and the token after it, [B, T + 1]."""
    return np.random.RandomState(0).randint(0, VOCABULARY, (BATCH, TOKENS + 1)).astype(np.int32)


def weights(shapes: dict) -> dict[str, np.ndarray]:
    """Norms around 1, the others around 0; large enough for choices that do not hang on
    rounding."""

    def value(name: str, shape) -> np.ndarray:
        noise = random(name, *shape)
        return 1 + 0.3 * noise if "norm" in name else 0.3 * noise

    return {name: value(name, shape) for name, shape in shapes.items()}


def digest(name: str, gradient) -> tuple[float, float]:
    """The norm of an array, and its projection on a random direction of as many numbers."""
    gradient = np.asarray(gradient, np.float64)
    return float(np.sqrt((gradient**2).sum())), float(
        (gradient * random("direction " + name, *gradient.shape)).sum()
    )


# --- routers --------------------------------------------------------------------------------------


class RouterCase(NamedTuple):
    """A published router: the family and the fields of its config, and jaxtrain's settings.

    offset: added to all logits
    """

    kind: str
    config: dict[str, Any]
    settings: dict[str, Any]
    offset: float = 0.0

    def weights(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (input [T, D] with a column of ones, matrix [E, D], biases [E])."""
        experts = self.settings["experts"]
        x, matrix = random("input", ROUTED, WIDTH), random("matrix", experts, WIDTH)
        x[:, 0], matrix[:, 0] = 1.0, matrix[:, 0] + self.offset
        return x, matrix, 0.3 * random("biases", experts)


def _router_case(kind: str, config: dict, settings: dict, offset: float = 0.0) -> RouterCase:
    """A case with its settings by jaxtrain's names, besides the sizes that all families have."""
    counts = {
        "experts": next(config[n] for n in ("num_experts", "num_local_experts") if n in config),
        "experts_per_token": config["num_experts_per_tok"],
    }
    return RouterCase(kind, config, counts | settings, offset)


_SOFTMAX = {"router": "softmax", "router_bias": False}
_ALWAYS, _NEVER = {"router_normalize": "always"}, {"router_normalize": "never"}
_EIGHT = {"num_experts": 8, "num_experts_per_tok": 3}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3}
_GROUPS = {"n_group": 4, "topk_group": 2}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_V2 = _EIGHT | {"routed_scaling_factor": 16.0, "topk_method": "greedy"}
_OURS_V2 = _SOFTMAX | _NEVER | {"router_scale": 16.0}
_LIMITED = {"topk_method": "group_limited_greedy"}
_V3 = _LOCAL | {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
_OURS_V3 = {"router": "sigmoid", "router_bias": True, "router_scale": 2.5} | _ALWAYS
_LIMIT = {"router_groups": 4, "router_group_limit": 2}
_ALL_GROUPS = {"n_group": 4, "topk_group": 4}
_LIMIT_OF_ALL = {"router_groups": 4, "router_group_limit": 4}
ROUTERS = {
    "mixtral": _router_case("mixtral", _LOCAL, _SOFTMAX | _ALWAYS),
    "mixtral, one expert": _router_case(
        "mixtral", _LOCAL | {"num_experts_per_tok": 1}, _SOFTMAX | _ALWAYS
    ),
    "qwen3_moe, normalized": _router_case(
        "qwen3_moe", _EIGHT | {"norm_topk_prob": True}, _SOFTMAX | _ALWAYS
    ),
    "qwen3_moe": _router_case("qwen3_moe", _EIGHT | {"norm_topk_prob": False}, _SOFTMAX | _NEVER),
    "qwen3_moe, one expert, normalized": _router_case(
        "qwen3_moe",
        _EIGHT | {"norm_topk_prob": True, "num_experts_per_tok": 1},
        _SOFTMAX | _ALWAYS,
    ),
    "qwen3_moe, one expert": _router_case(
        "qwen3_moe",
        _EIGHT | {"norm_topk_prob": False, "num_experts_per_tok": 1},
        _SOFTMAX | _NEVER,
    ),
    # its groups are without effect, and so is norm_topk_prob
    "deepseek_v2, greedy": _router_case(
        "deepseek_v2", _V2 | _GROUPS | {"norm_topk_prob": True}, _OURS_V2
    ),
    "deepseek_v2, groups": _router_case(
        "deepseek_v2", _V2 | _LIMITED | _GROUPS, _OURS_V2 | _LIMIT | {"router_group_best": 1}
    ),
    "deepseek_v2, all groups": _router_case(
        "deepseek_v2",
        _V2 | _LIMITED | _ALL_GROUPS,
        _OURS_V2 | _LIMIT_OF_ALL | {"router_group_best": 1},
    ),
    "deepseek_v3, groups": _router_case("deepseek_v3", _V3 | _GROUPS, _OURS_V3 | _LIMIT),
    "deepseek_v3, all groups": _router_case(
        "deepseek_v3", _V3 | _ALL_GROUPS, _OURS_V3 | _LIMIT_OF_ALL
    ),
    "deepseek_v3, two groups of four, not normalized": _router_case(
        "deepseek_v3",
        _V3 | {"n_group": 2, "topk_group": 1, "norm_topk_prob": False},
        _OURS_V3 | _NEVER | {"router_groups": 2, "router_group_limit": 1},
    ),
    "deepseek_v3, one expert": _router_case(
        "deepseek_v3", _V3 | _ONE_GROUP | {"num_experts_per_tok": 1}, _OURS_V3
    ),
    # sums of scores around 1e-20, which is added to them
    "deepseek_v3, small scores": _router_case("deepseek_v3", _V3 | _ONE_GROUP, _OURS_V3, -47.0),
    "glm4_moe": _router_case(
        "glm4_moe",
        _V3 | _ONE_GROUP | {"routed_scaling_factor": 1.0},
        _OURS_V3 | {"router_scale": 1.0},
    ),
    "glm4_moe, not normalized": _router_case(
        "glm4_moe", _V3 | _ONE_GROUP | {"norm_topk_prob": False}, _OURS_V3 | _NEVER
    ),
    # its softmax is over the logits of the chosen experts, with their biases
    "gpt_oss": _router_case("gpt_oss", _LOCAL, _SOFTMAX | _ALWAYS | {"biases": ("router",)}),
}


# --- jaxtrain's side ------------------------------------------------------------------------------


def config_of(kind: str, hf: dict, mtp_depth: int = 0) -> Config:
    """The resolved config of a published one (its fields by transformers' names)."""
    shared = {
        "width": hf["hidden_size"],
        "heads": hf["num_attention_heads"],
        "vocab_size": VOCABULARY,
        "norm_epsilon": hf["rms_norm_eps"],
        "experts_per_token": hf["num_experts_per_tok"],
        "balance_rate": 0.0,
        "balance_loss": 0.0,
        "mtp_depth": mtp_depth,
        "mtp_weight": MTP_WEIGHT,
        **_scaling(hf.get("rope_parameters", {})),
    }
    if kind == "mixtral":
        own = {
            "layers": hf["num_hidden_layers"],
            "kv_heads": hf["num_key_value_heads"],
            "experts": hf["num_local_experts"],
            "expert_width": hf["intermediate_size"],
            "router_normalize": "always",
            "router_bias": False,
        }
    else:
        own = {
            "layers": hf["num_hidden_layers"] - hf["first_k_dense_replace"],
            "dense_layers": hf["first_k_dense_replace"],
            "attention": "mla",
            "head_dim": hf["qk_nope_head_dim"],
            "rope_head_dim": hf["qk_rope_head_dim"],
            "value_head_dim": hf["v_head_dim"],
            "query_rank": hf["q_lora_rank"] or 0,
            "kv_rank": hf["kv_lora_rank"],
            "latent_norm_epsilon": 1e-6,
            "mlp_width": hf["intermediate_size"],
            "experts": hf["n_routed_experts"],
            "expert_width": hf["moe_intermediate_size"],
            "shared_experts": hf["n_shared_experts"],
            "router_scale": hf["routed_scaling_factor"],
            "router_groups": hf["n_group"],
            "router_group_limit": hf["topk_group"],
        }
        if kind == "deepseek_v3":
            own |= {
                "router": "sigmoid",
                "router_normalize": "always" if hf["norm_topk_prob"] else "never",
            }
        else:
            own |= {"router_normalize": "never", "router_bias": False, "router_group_best": 1}
    mesh = MeshConfig(data=1)
    data = DataConfig(source="ids.npy", sequence_length=TOKENS, batch_size=BATCH)
    return Config(
        model=ModelConfig(**shared, **own),
        data=data,
        mesh=mesh,
        precision=PrecisionConfig(compute="float32"),
    ).resolve()


def _scaling(rope: dict) -> dict:
    """The settings of a published model's "rope_parameters"."""
    names = {
        "rope_theta": "rotary_base",
        "rope_type": "rope_scaling",
        "original_max_position_embeddings": "rope_original_length",
    }
    return {names.get(name, f"rope_{name}"): value for name, value in rope.items()}


def parameters_of(kind: str, cfg: ModelConfig, given: dict) -> dict:
    """Plain parameters (small.py), as jax's arrays, of parameters by their published names; linear,
    so that gradients can come back."""
    last = cfg.dense_layers + cfg.layers
    blocks = [
        _block(kind, cfg, given, f"model.layers.{i}.", i < cfg.dense_layers) for i in range(last)
    ]
    made = {
        "embed": {"table": given["model.embed_tokens.weight"]},
        "head": {"norm": _scale(given, "model.norm"), "table": given["lm_head.weight"]},
        "layers": _stack(blocks[cfg.dense_layers :]),
    }
    if cfg.dense_layers:
        made["first"] = {str(i): block for i, block in enumerate(blocks[: cfg.dense_layers])}
    if cfg.mtp_depth:
        made["predictors"] = {
            str(d): _predictor(kind, cfg, given, f"mtp.{d}.") for d in range(cfg.mtp_depth)
        }
    return made


def _stack(trees: list) -> dict:
    first = trees[0]
    return {
        k: _stack([t[k] for t in trees])
        if isinstance(first[k], dict)
        else jnp.stack([t[k] for t in trees])
        for k in first
    }


def _scale(given: dict, name: str) -> dict:
    return {"scale": given[f"{name}.weight"]}


def _predictor(kind: str, cfg: ModelConfig, given: dict, at: str) -> dict:
    return {
        "hidden_norm": _scale(given, at + "hnorm"),
        "token_norm": _scale(given, at + "enorm"),
        "project": {"weight": given[at + "eh_proj.weight"].T},
        "block": _block(kind, cfg, given, at + "mtp_block.", False),
        "norm": _scale(given, at + "post_norm"),
    }


def _block(kind: str, cfg: ModelConfig, given: dict, at: str, dense: bool) -> dict:
    attention = (_attention if kind == "mixtral" else _latent_attention)(
        cfg, given, at + "self_attn."
    )
    matrices = lambda name: {
        ours: given[f"{at}mlp.{name}{ours}_proj.weight"].T for ours in ("up", "gate", "down")
    }
    if dense:
        mlp = {ours: {"weight": matrix} for ours, matrix in matrices("").items()}
    else:
        gate, up = jnp.split(jnp.swapaxes(given[at + "mlp.experts.gate_up_proj"], 1, 2), 2, -1)
        router = {"weight": given[at + "mlp.gate.weight"].T}
        router |= (
            {"bias": given[at + "mlp.gate.e_score_correction_bias"]}
            if cfg.router_bias
            else {"load": jnp.zeros(cfg.experts)}
        )
        mlp = {
            "router": router,
            "up": up,
            "gate": gate,
            "down": jnp.swapaxes(given[at + "mlp.experts.down_proj"], 1, 2),
        }
        if cfg.shared_experts:
            mlp |= {
                f"shared_{ours}": matrix for ours, matrix in matrices("shared_experts.").items()
            }
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return {
        "attention": attention,
        "mlp": mlp,
        **{ours: _scale(given, at + theirs) for ours, theirs in norms.items()},
    }


def _attention(cfg: ModelConfig, given: dict, at: str) -> dict:
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    return {ours: {"weight": given[f"{at}{theirs}.weight"].T} for ours, theirs in names.items()}


def _latent_attention(cfg: ModelConfig, given: dict, at: str) -> dict:
    """There, rotated columns lie in pairs, and latents are made by two matrices."""
    matrix, rotated = lambda name: given[f"{at}{name}.weight"].T, cfg.rope_head_dim
    halves = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2)])
    turn = lambda a: jnp.concatenate([a[..., :-rotated], a[..., -rotated:][..., halves]], -1)
    query = matrix("q_b_proj" if cfg.query_rank else "q_proj")
    query = turn(query.reshape(len(query), cfg.heads, -1)).reshape(query.shape)
    ahead = [matrix("q_a_proj")] if cfg.query_rank else []
    return {
        "compress": {"weight": jnp.concatenate([*ahead, turn(matrix("kv_a_proj_with_mqa"))], -1)},
        **({"query_norm": _scale(given, at + "q_a_layernorm")} if cfg.query_rank else {}),
        "norm": _scale(given, at + "kv_a_layernorm"),
        "query": {"weight": query},
        "expand": {"weight": matrix("kv_b_proj")},
        "out": {"weight": matrix("o_proj")},
    }
