"""The rules of a model. Standard library only."""

from collections.abc import Iterator
from typing import Any

from jaxtrain.config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    ResolvedModel,
    fields,
    has_experts,
    kernels,
    models_of_kinds,
)
from jaxtrain.config.rules.rules import Violation, divisors, near, values_for


def head_size_is_whole(model: ModelConfig) -> Iterator[Violation]:
    """The rule of a model before `resolve` divides its width."""
    if not model.head_dim and model.width % model.heads:
        floor = model.width // model.heads * model.heads
        wider = near(model.width, [n for n in (floor, floor + model.heads) if n])
        yield Violation(
            "model.heads",
            f"does not divide model.width={model.width}, and model.head_dim=0 means width/heads",
            [
                *values_for("model.heads", near(model.heads, divisors(model.width))),
                *values_for("model.width", wider),
            ],
            show=4,
        )


def latent_attention_is_complete(model: ResolvedModel) -> Iterator[Violation]:
    if model.attention != "mla":
        return
    if model.positions != "rotary":
        yield Violation(
            "model.attention",
            f"rotates a part of each head, and model.positions={model.positions!r} rotates nothing",
            [{"model.positions": "rotary"}, {"model.attention": "gqa"}],
        )
    if model.kv_heads != model.heads:
        yield Violation(
            "model.kv_heads",
            "is for model.attention='gqa': with mla each of "
            f"model.heads={model.heads} has its own keys and values",
            [{"model.kv_heads": 0}],
        )
    if not model.kv_rank:
        yield Violation(
            "model.kv_rank",
            "leaves model.attention='mla' without a latent",
            [{"model.kv_rank": 4 * model.head_dim}, {"model.attention": "gqa"}],
        )
    if not model.rope_head_dim or model.rope_head_dim % 2:
        size = model.rope_head_dim + 1 if model.rope_head_dim else -(-model.head_dim // 4) * 2
        yield Violation(
            "model.rope_head_dim",
            "is the part of a head that model.attention='mla' rotates, in pairs of numbers: it "
            "must be even and above 0",
            [{"model.rope_head_dim": size}],
        )


def heads_divide(
    model: ResolvedModel,
    data: DataConfig,
    mesh: MeshConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
) -> Iterator[Violation]:
    """Heads, and the kernel that was asked for by name, which the devices may not have
    (`kernel_is_of_platform`)."""
    case = kernels.attention_case(kernels.TargetDevice(), model, data, mesh, parallel, precision)
    named = {
        kernels.SPLASH: [kernels.SPLASH],
        kernels.CUDNN: [kernels.CUDNN, kernels.CUDNN_MASK],
    }.get(model.attention_kernel, [])
    refusals = [kernels.refusal(kernel, case) for kernel in named]
    if refusals and all(refusals) and (last := refusals[-1]):
        yield Violation(
            "model.attention_kernel", last.rule, [{"model.attention_kernel": "auto"}, *last.fixes]
        )
    if model.heads % model.kv_heads:
        yield Violation(
            "model.kv_heads",
            f"does not divide model.heads={model.heads}",
            values_for("model.kv_heads", near(model.kv_heads, divisors(model.heads))),
            show=5,
        )
    rotates = model.attention == "gqa" and model.positions == "rotary"
    if (
        rotates
        and model.rotary_dim == model.head_dim
        and (model.head_dim % 2 or model.head_dim < 1)
    ):
        yield Violation(
            "model.head_dim",
            f"makes heads of {model.head_dim}, and rotary positions rotate pairs of numbers: it "
            "must be even",
            [{"model.head_dim": model.head_dim + 1}, {"model.positions": "learned"}],
        )
    if rotates and (model.rotary_dim > model.head_dim or model.rotary_dim % 2):
        even = min(model.rotary_dim + 1, model.head_dim) // 2 * 2
        yield Violation(
            "model.rotary_dim",
            f"is the part of model.head_dim={model.head_dim} that rotary positions rotate, in "
            "pairs of numbers: it must be even and at most as large",
            [{"model.rotary_dim": even}],
        )


def kernel_is_of_platform(model: ModelConfig, platform: str) -> Iterator[Violation]:
    """platform: of the devices, by jax's name; "": not known"""
    path = "model.attention_kernel"
    if model.attention_kernel == kernels.CUDNN and platform not in ("", kernels.GPU):
        yield Violation(
            path,
            f"is for NVIDIA GPUs, and the devices here are of platform {platform!r}",
            [{path: "auto"}],
        )


# Settings of rotary scalings → the scalings that read them.
OF_SCALINGS = {
    "rope_factor": ("linear", "llama3", "yarn"),
    "rope_original_length": ("llama3", "yarn"),
    "rope_low_freq_factor": ("llama3",),
    "rope_high_freq_factor": ("llama3",),
    "rope_beta_fast": ("yarn",),
    "rope_beta_slow": ("yarn",),
    "rope_truncate": ("yarn",),
    "rope_attention_factor": ("yarn",),
    "rope_mscale": ("yarn",),
    "rope_mscale_all_dim": ("yarn",),
}


def rotary_scaling_is_complete(model: ResolvedModel, data: DataConfig) -> Iterator[Violation]:
    if model.positions != "rotary" or model.rope_scaling == "none":
        return
    scaling, none = f"model.rope_scaling={model.rope_scaling!r}", {"model.rope_scaling": "none"}
    if not model.rope_factor:
        yield Violation(
            "model.rope_factor",
            f"is no divisor of frequencies, and {scaling} needs one",
            [{"model.rope_factor": 8.0}, none],
        )
    if model.rope_scaling != "linear" and not model.rope_original_length:
        length = max(1, int(data.sequence_length / max(1.0, model.rope_factor)))
        yield Violation(
            "model.rope_original_length",
            f"is no length, and {scaling} needs that of the sequences before scaling",
            [{"model.rope_original_length": length}, none],
        )
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if model.rope_scaling == "llama3" and high <= low:
        yield Violation(
            "model.rope_high_freq_factor",
            f"is not above model.rope_low_freq_factor={low}",
            [{"model.rope_high_freq_factor": 4 * low}, none],
        )
    if model.rope_scaling == "yarn" and model.rope_beta_fast < model.rope_beta_slow:
        yield Violation(
            "model.rope_beta_fast",
            f"is less than model.rope_beta_slow={model.rope_beta_slow}",
            [{"model.rope_beta_fast": 32 * model.rope_beta_slow}, none],
        )


# Settings of experts alone. Without experts they have no use (unused.py), but for dense_layers,
# whose layers the model would lack.
OF_EXPERTS = (
    "dense_layers experts_per_token shared_experts expert_width router router_normalize "
    "router_scale router_bias router_groups "
    "router_group_limit router_group_best capacity_factor expert_room balance_rate "
    "balance_loss z_loss shared_gate"
).split()


def dense_layers_come_before_experts(model: ModelConfig) -> Iterator[Violation]:
    if model.dense_layers and not has_experts(model):
        yield Violation(
            "model.dense_layers",
            "come before layers with experts, and model.experts=0",
            [{"model.dense_layers": 0}, {"model.experts": 8}],
        )


def experts_have_capacity(model: ResolvedModel) -> Iterator[Violation]:
    if 0 < model.expert_room < 1:
        yield Violation(
            "model.expert_room",
            "is less than the mean number of tokens, so that some are always dropped: it must be "
            "at least 1, or 0 for the worst case",
            [{"model.expert_room": 1.0}],
        )


def biases_have_parts(model: ModelConfig) -> Iterator[Violation]:
    """Parts that all layers lack, or that cannot have biases."""
    kinds = models_of_kinds(model).values()
    has_mlp = model.dense_layers or any(not kind.experts or kind.shared_experts for kind in kinds)
    no_experts = not has_experts(model) and "model.experts=0"
    no_layernorm = all(kind.norm != "layernorm" for kind in kinds)
    wrong = {
        "mlp": not has_mlp and f"model.experts={model.experts} in every layer, and no other MLP",
        "experts": no_experts,
        "router": no_experts and f"{no_experts}, where there is no router",
        "norm": no_layernorm and f"model.norm={model.norm!r}, which has no bias",
    }
    for part in model.biases:
        if reason := wrong.get(part):
            others = tuple(other for other in model.biases if other != part)
            yield Violation(
                "model.biases", f"has {part!r} with {reason}", [{"model.biases": others}]
            )


def one_norm_is_shared(model: ResolvedModel) -> Iterator[Violation]:
    if model.parallel_block and model.norm_place != "before":
        yield Violation(
            "model.norm_place",
            "has a norm of the MLP's own, and with model.parallel_block=True attention and MLP "
            "share one",
            [{"model.norm_place": "before"}, {"model.parallel_block": False}],
        )


def mup_draws_all_values(model: ResolvedModel) -> Iterator[Violation]:
    for one in models_of_kinds(model).values():
        if model.mup_base_width and (one.block or one.mixer):
            yield Violation(
                "model.mup_base_width",
                f"scales initial values, and {one.block or one.mixer} draws its own",
                [{"model.mup_base_width": 0}],
            )


def router_groups_divide(model: ResolvedModel) -> Iterator[Violation]:
    """Groups divide the experts, and those that a token may use have as many experts as it uses."""
    if not model.experts:
        return
    if model.experts % model.router_groups:
        yield Violation(
            "model.router_groups",
            f"does not divide model.experts={model.experts}",
            values_for("model.router_groups", near(model.router_groups, divisors(model.experts))),
            show=4,
        )
    groups = f"model.router_groups={model.router_groups}"
    if model.router_group_limit > model.router_groups:
        yield Violation(
            "model.router_group_limit",
            f"is more than {groups}",
            [{"model.router_group_limit": model.router_groups}],
        )
    size = model.experts // model.router_groups
    default: Any = fields()["model.router_group_best"].default
    if model.router_groups > 1 and model.router_group_best > max(size, default):
        yield Violation(
            "model.router_group_best",
            f"is more than the {size} in each of {groups}",
            [{"model.router_group_best": size}],
        )
    usable = size * model.router_group_limit
    if model.experts_per_token > usable:
        where = f"model.experts={model.experts}"
        if model.router_group_limit < model.router_groups:
            where = f"the {usable} in model.router_group_limit={model.router_group_limit} groups"
        yield Violation(
            "model.experts_per_token",
            f"is more than {where}",
            [{"model.experts_per_token": usable}],
        )
