"""Rules between settings that do not depend on the mesh, and the types of which all rules are made.

mesh_rules.py has the rules of the mesh, checks.py those of a single setting.

A rule is a generator whose parameters are groups of a FilledConfig. It yields a `Violation` for
each fault, with the fixes to try, the best first. checks.py tries them, and reports the first fault
only. Standard library only.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import (
    CheckpointConfig,
    DataConfig,
    FilledConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    ResolvedModel,
    TrainConfig,
    addresses,
    ends_with_layers,
    kernels,
    sources,
)
from jaxtrain.config.learning_rates import LEARNING_RATES
from jaxtrain.config.optimizers import OPTIMIZERS
from jaxtrain.config.saved_values import (
    LAYER_INPUT,
    ON_HOST,
    goes_with,
    names_of,
    saved_values,
)
from jaxtrain.config.sizes import SELECTIVE, remat_of
from jaxtrain.schedule.orders import (
    OVERLAPPED,
    SCHEDULES,
    default_repeats,
    fits_repeats,
    may_overlap,
)

BYTE_VOCABULARY = 257  # 256 bytes and the document separator
MOST_SMALLER = 16  # smaller numbers of stages or chunks that are tried

Changes = dict[str, Any]  # setting → value


@dataclasses.dataclass(frozen=True)
class Violation:
    """A broken rule: the setting at fault, the rule (read after "field=value"), the changes that
    may fix it, the best first, and how many values that work the message may list."""

    field: str
    rule: str
    fixes: Iterable[Changes] = ()
    show: int = 1


# Its parameters are named after the groups of settings that it reads, such as `data: DataConfig`;
# `config` is all of them.
Rule = Callable[..., Iterator[Violation]]


@functools.cache
def groups_of(rule: Rule) -> tuple[str, ...]:
    """The names of the groups of settings that a rule reads."""
    return tuple(inspect.signature(rule).parameters)


def violations(rule: Rule, config: FilledConfig) -> Iterator[Violation]:
    """The violations of a rule by a config."""
    groups = (config if name == "config" else getattr(config, name) for name in groups_of(rule))
    return rule(*groups)


def near(value: int, candidates: Iterable[int]) -> list[int]:
    """Candidates by their distance from a value; of two at the same distance, the smaller one
    first."""
    return sorted(candidates, key=lambda c: (abs(c - value), c))


@functools.lru_cache(1024)
def divisors(n: int) -> tuple[int, ...]:
    """All divisors of n ≥ 1, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def values_for(path: str, values: Iterable[Any]) -> list[Changes]:
    """Changes of one setting, to each of these values."""
    return [{path: value} for value in values]


# --- the model ------------------------------------------------------------------------------------


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


def _latent_attention(model: ResolvedModel) -> Iterator[Violation]:
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


def _attention(
    model: ResolvedModel,
    data: DataConfig,
    mesh: MeshConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
) -> Iterator[Violation]:
    """Heads, and the kernel that was asked for by name. Whether the devices have that kernel is a
    rule of checks.py."""
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


def _layers_without_rotary(model: ResolvedModel) -> Iterator[Violation]:
    layers = model.dense_layers + model.layers
    if any(layer >= layers for layer in model.nope_layers):
        yield Violation(
            "model.nope_layers",
            f"names a layer beyond the last of {layers}, {layers - 1}",
            [{"model.nope_layers": tuple(n for n in model.nope_layers if n < layers)}],
        )
    if len(set(model.nope_layers)) < len(model.nope_layers):
        yield Violation(
            "model.nope_layers",
            "names a layer twice",
            [{"model.nope_layers": tuple(sorted(set(model.nope_layers)))}],
        )


def _rotary_scaling(model: ResolvedModel, data: DataConfig) -> Iterator[Violation]:
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
    "balance_loss z_loss"
).split()


def _experts(model: ResolvedModel) -> Iterator[Violation]:
    if model.dense_layers and not model.experts:
        yield Violation(
            "model.dense_layers",
            "come before layers with experts, and model.experts=0",
            [{"model.dense_layers": 0}, {"model.experts": 8}],
        )
    if 0 < model.expert_room < 1:
        yield Violation(
            "model.expert_room",
            "is less than the mean number of tokens, so that some are always dropped: it must be "
            "at least 1, or 0 for the worst case",
            [{"model.expert_room": 1.0}],
        )


def _biases(model: ResolvedModel) -> Iterator[Violation]:
    """Parts that the model lacks, or that cannot have biases."""
    wrong = {
        "mlp": bool(model.experts) and f"model.experts={model.experts}, which have no biases",
        "router": not model.experts and "model.experts=0, where there is no router",
        "norm": model.norm != "layernorm" and f"model.norm={model.norm!r}, which has no bias",
    }
    for part in model.biases:
        if reason := wrong.get(part):
            others = tuple(other for other in model.biases if other != part)
            yield Violation(
                "model.biases", f"has {part!r} with {reason}", [{"model.biases": others}]
            )


def _router(model: ResolvedModel) -> Iterator[Violation]:
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
    default: Any = cfg.fields()["model.router_group_best"].default
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


# --- sequences and data ---------------------------------------------------------------------------


def _sequence(model: ResolvedModel, data: DataConfig, train: TrainConfig) -> Iterator[Violation]:
    tokens = data.sequence_length
    if model.mtp_depth >= tokens:
        yield Violation(
            "model.mtp_depth",
            f"predicts tokens beyond data.sequence_length={tokens}",
            [{"model.mtp_depth": tokens - 1}],
        )
    if model.positions == "learned" and model.max_positions < tokens:
        yield Violation(
            "model.max_positions",
            f"is a shorter table than data.sequence_length={tokens}",
            [{"model.max_positions": tokens}],
        )
    if model.positions == "learned" and model.max_positions <= train.sample_tokens:
        learned = f"the learned positions, model.max_positions={model.max_positions}"
        yield Violation(
            "train.sample_tokens",
            f"and a prompt are longer than {learned}",
            [{"train.sample_tokens": model.max_positions - 1}],
        )


def _data(data: DataConfig, model: ResolvedModel, train: TrainConfig) -> Iterator[Violation]:
    mask, read = data.loss_mask, data.text_fields
    from_bytes = data.tokenizer == "bytes" and not sources.holds_tokens(data.source)
    if from_bytes and model.vocab_size < BYTE_VOCABULARY:
        yield Violation(
            "model.vocab_size",
            f"is too small for data.tokenizer='bytes', which has {BYTE_VOCABULARY} tokens",
            [{"model.vocab_size": BYTE_VOCABULARY}],
        )
    if not read:
        yield Violation(
            "data.text_fields", "names no field to read", [{"data.text_fields": ("text",)}]
        )
    if unread := tuple(name for name in mask if name not in read):
        yield Violation(
            "data.loss_mask",
            f"names {unread[0]!r}, which is not in data.text_fields={read!r}",
            [{"data.text_fields": unread + read}],
        )
    if set(mask) == set(read):
        yield Violation(
            "data.loss_mask",
            "names all of data.text_fields: no token would have a loss",
            [{"data.loss_mask": mask[:-1]}],
        )
    if train.eval_every and not data.validation_fraction > 0:
        yield Violation(
            "train.eval_every",
            "needs held-out data, and data.validation_fraction=0",
            [{"train.eval_every": 0}],
        )


# --- the pipeline ---------------------------------------------------------------------------------


def _pipeline(
    pipeline: PipelineConfig, model: ResolvedModel, mesh: MeshConfig
) -> Iterator[Violation]:
    name = ends_with_layers(model)
    if name and pipeline.vocabulary == "parallel":
        needs = f"model.{name}={getattr(model, name)} needs them on one stage"
        yield Violation(
            "pipeline.vocabulary",
            f"splits embedding and head over the stages, and {needs}",
            [{"pipeline.vocabulary": "auto"}],
        )
    if mesh.stage not in (1, -1) and not fits_repeats(pipeline.schedule, pipeline.repeats):
        schedule = SCHEDULES[pipeline.schedule]
        fitting = [name for name in SCHEDULES if fits_repeats(name, pipeline.repeats)]
        yield Violation(
            "pipeline.repeats",
            f"does not fit pipeline.schedule={pipeline.schedule!r}, which has "
            f"{schedule.repeats_rule} on a stage",
            [
                {"pipeline.repeats": schedule.least_repeats},
                *values_for("pipeline.schedule", fitting),
            ],
        )
    if pipeline.memory and pipeline.schedule != "auto":
        yield Violation(
            "pipeline.memory",
            f"is for pipeline.schedule='auto' alone, not {pipeline.schedule!r}",
            [{"pipeline.memory": 0.0}, {"pipeline.schedule": "auto"}],
        )
    if pipeline.overlap and mesh.stage != 1:
        yield from _overlap(pipeline)
    if pipeline.times and len(pipeline.times) not in range(3, 10):
        fixed = (
            (*pipeline.times, 1.0, 1.0, 1.0)[:3] if len(pipeline.times) < 3 else pipeline.times[:9]
        )
        yield Violation(
            "pipeline.times",
            "must have a time for F, B and W each, and may have one for message, R, head, FB, "
            "update and embedding",
            values_for("pipeline.times", [fixed, ()]),
        )
    if pipeline.times and not all(pipeline.times[:3]):
        yield Violation("pipeline.times", "has no time for F, B or W", [{"pipeline.times": ()}])
    both = pipeline.times[6:7]
    if both and 0 < both[0] < max(pipeline.times[:2]):
        least = (*pipeline.times[:6], max(pipeline.times[:2]), *pipeline.times[7:])
        yield Violation(
            "pipeline.times",
            "has less time for FB, an F and a B at the same time, than for one of them",
            values_for("pipeline.times", [least, ()]),
        )


def _several_steps(config: FilledConfig) -> Iterator[Violation]:
    """What a program of several steps, whose updates are ops of its table, does not have."""
    path = "pipeline.steps_per_program"
    if config.pipeline.steps_per_program == 1 or config.mesh.stage == 1:
        return
    elementwise = [name for name, optimizer in OPTIMIZERS.items() if optimizer.elementwise]
    # setting → (the values that work, the reason)
    needs: dict[str, tuple[Sequence[Any], str]] = {
        "parallel.zero": ([0, 1], "updates parameters and gradients that no data shard splits"),
        "parallel.reduce": (["step"], "reduces gradients once, in each stage's update"),
        "parallel.ends": (
            ["auto", "replicated"],
            "updates embedding and head on all stages in one op",
        ),
        "parallel.offload": (["none"], "has its slots and its state in the devices' memory"),
        "pipeline.save": (
            [names_of(config.pipeline.save)],
            "has its slots in the devices' memory",
        ),
        "train.diloco_inner_steps": ([0], "updates all replicas alike"),
        "precision.params": (["float32"], "updates parameters of float32"),
        "precision.moments": (["float32"], "updates moments of float32"),
        "precision.matmul": (["compute"], "gathers updated parameters in precision.compute"),
        "optimizer.name": (elementwise, "updates each shard of a parameter on its own"),
        "model.experts": ([0], "updates parameters by gradients alone, and no counts"),
    }
    for setting, (values, reason) in needs.items():
        value = functools.reduce(getattr, setting.split("."), config)
        if value not in values:
            fixes = [{path: 1}, *values_for(setting, reversed(values))]
            yield Violation(path, f"{reason}, unlike {setting}={value!r}", fixes)


def _saved_values(pipeline: PipelineConfig, model: ResolvedModel) -> Iterator[Violation]:
    path, names = "pipeline.save", saved_values(model)
    entries = tuple(dict.fromkeys(pipeline.save))
    named = names_of(entries)
    if wrong := [name for name in entries if name.removesuffix(ON_HOST) not in names]:
        known = [name for name in entries if name not in wrong]
        place = ON_HOST * wrong[0].endswith(ON_HOST)
        close = difflib.get_close_matches(wrong[0].removesuffix(ON_HOST), names, n=1, cutoff=0.5)
        meant = [name + place for name in close]
        yield Violation(
            path,
            f"names {wrong[0]!r}, which no layer of this model has: its values are "
            f"{', '.join(names)}",
            values_for(path, [tuple(dict.fromkeys([*known, *meant])), ()]),
        )
    if twice := [name for name in named if named.count(name) > 1]:
        places = dict(zip(named, entries, strict=True))
        rule = f"saves {twice[0]!r} on the device and on the host"
        yield Violation(path, rule, values_for(path, [tuple(places.values())]))
    remat = remat_of(pipeline.remat)
    if goes_with(remat.mode, pipeline.save):
        return
    layers = "" if remat.layers is None else f":{remat.layers}"
    what = {
        "none": "recomputes no layer",
        SELECTIVE: "saves that in any case, and would save nothing else",
        "full": f"saves {LAYER_INPUT} at most",
    }[remat.mode]
    wanted = SELECTIVE
    fixes: list[dict[str, Any]] = [{"pipeline.remat": f"{SELECTIVE}{layers}"}, {path: ()}]
    if named == (LAYER_INPUT,):
        wanted, fixes = "full", [{path: ()}, {"pipeline.remat": f"full{layers}"}]
    elif remat.mode == "full":
        fixes.insert(1, {path: (LAYER_INPUT,)})
    yield Violation(path, f"is for pipeline.remat={wanted!r}, and {pipeline.remat!r} {what}", fixes)


def _overlap(pipeline: PipelineConfig) -> Iterator[Violation]:
    path, schedule = "pipeline.overlap", pipeline.schedule
    steps = "pipeline.steps_per_program"
    if not may_overlap(schedule):
        yield Violation(
            path,
            "needs an F and a B of two microbatches side by side, as in the order of "
            f"{', '.join(OVERLAPPED)}, and pipeline.schedule={schedule!r} has none",
            [
                {path: False},
                *values_for("pipeline.schedule", OVERLAPPED),
                *({"pipeline.schedule": name, "pipeline.repeats": 0} for name in OVERLAPPED),
            ],
        )
    if pipeline.steps_per_program > 1:
        yield Violation(
            path,
            f"has no table of several steps, unlike {steps}={pipeline.steps_per_program}",
            [{path: False}, {steps: 1}],
        )
    if pipeline.permute == "aligned":
        yield Violation(
            path,
            "is not packed by pipeline.permute='aligned'",
            [{path: False}, {"pipeline.permute": "auto"}],
        )


def _layers_fill_chunks(
    pipeline: PipelineConfig, model: ResolvedModel, mesh: MeshConfig
) -> Iterator[Violation]:
    layers = model.layers
    if pipeline.layer_costs and len(pipeline.layer_costs) != layers:
        yield Violation(
            "pipeline.layer_costs",
            f"must have a number for each of model.layers={layers}",
            [{"pipeline.layer_costs": ()}],
        )
    if not pipeline.chunk_layers:
        return
    path, numbers = "pipeline.chunk_layers", len(pipeline.chunk_layers)
    evenly: Changes = {path: ()}
    if pipeline.layer_costs:
        yield Violation(
            path, "and pipeline.layer_costs both cut the layers", [{"pipeline.layer_costs": ()}]
        )
    if sum(pipeline.chunk_layers) != layers:
        *others, _ = pipeline.chunk_layers
        last = layers - sum(others)
        fitted = values_for(path, [(*others, last)] if last > 0 else [])
        yield Violation(path, f"does not sum to model.layers={layers}", [*fitted, evenly])
    if not all(pipeline.chunk_layers[1:-1]):
        yield Violation(path, "has a chunk without layers that is not the first or last", [evenly])
    chunks = mesh.stage * pipeline.repeats
    if pipeline.repeats and mesh.stage > 1 and numbers != chunks:
        sizes = f"mesh.stage={mesh.stage} · pipeline.repeats={pipeline.repeats} = {chunks}"
        yield Violation(path, f"must have {sizes} numbers", [evenly])
    if pipeline.schedule == "auto" and numbers % mesh.stage:
        yield Violation(
            path, f"has {numbers} numbers, no multiple of mesh.stage={mesh.stage}", [evenly]
        )


def _chunks_have_layers(
    pipeline: PipelineConfig, model: ResolvedModel, mesh: MeshConfig
) -> Iterator[Violation]:
    stages, repeats, layers = mesh.stage, max(pipeline.repeats, 1), model.layers
    chunks = stages * repeats
    # Two chunks may be without layers, as in Llama 3's pipeline of 126 in 128: embedding and head
    # stand alone.
    most = layers + 2 if repeats > 1 else layers
    if chunks <= most or stages == 1 or len(pipeline.chunk_layers) == chunks:
        return
    smaller = {"mesh.stage": most // repeats, "pipeline.repeats": most // max(stages, 1)}
    if stages * max(default_repeats(pipeline.schedule), 1) <= layers:
        smaller = dict(reversed(smaller.items()))
    fixes = [
        {path: size}
        for path, most in smaller.items()
        for size in range(most, max(most - MOST_SMALLER, 0), -1)
    ]
    yield Violation(
        next(iter(smaller)),
        f"makes more chunks (mesh.stage={stages} · pipeline.repeats={repeats}) than "
        f"model.layers={layers}",
        [*fixes, {"model.layers": chunks}],
    )


# --- the run --------------------------------------------------------------------------------------


def _run(train: TrainConfig, optimizer: OptimizerConfig) -> Iterator[Violation]:
    # A warm-up may outlast a short run, such as a trial of another's recipe; a decay may not begin
    # before it.
    scheduled = optimizer.warmup_steps + optimizer.decay_steps
    decays_at_the_end = LEARNING_RATES[optimizer.schedule].decays_at_the_end
    if optimizer.decay_steps and decays_at_the_end and scheduled > train.steps:
        yield Violation(
            "optimizer.decay_steps",
            f"and optimizer.warmup_steps={optimizer.warmup_steps} are more than "
            f"train.steps={train.steps}",
            [{"optimizer.decay_steps": max(train.steps - optimizer.warmup_steps, 0)}],
        )
    if train.profile_steps and train.profile_steps + 2 > train.steps:
        yield Violation(
            "train.profile_steps",
            f"from the third step on are more than train.steps={train.steps}",
            [{"train.profile_steps": max(train.steps - 2, 0)}],
        )
    if train.spike_threshold and train.on_nonfinite != "rollback":
        yield Violation(
            "train.spike_threshold",
            f"is for train.on_nonfinite='rollback' alone, not {train.on_nonfinite!r}",
            [{"train.on_nonfinite": "rollback"}, {"train.spike_threshold": 0.0}],
        )


def products_are_built(precision: PrecisionConfig, model: ResolvedModel) -> Iterator[Violation]:
    if precision.matmul not in ("compute", *kernels.QUANTIZED):
        yield Violation(
            "precision.matmul",
            "has no products in this trainer, only in plans of other frameworks (plan --assume)",
            values_for("precision.matmul", ["fp8", "mxfp8", "compute"]),
            show=3,
        )
    missing = {
        f"model.experts={model.experts}": model.experts,
        "model.attention='mla'": model.attention == "mla",
        f"model.mtp_depth={model.mtp_depth}": model.mtp_depth,
    }
    for setting, has in missing.items():
        if precision.matmul == "mxfp8" and has:
            yield Violation(
                "precision.matmul",
                f"has no products for {setting} yet, only for dense layers",
                values_for("precision.matmul", ["fp8", "compute"]),
                show=2,
            )


def _compiler_options(parallel: ParallelConfig) -> Iterator[Violation]:
    """Each option is NAME=VALUE, with a name that begins as all of XLA's do, and none stands
    twice."""
    path, options = "parallel.compiler_options", parallel.compiler_options
    right = tuple(dict.fromkeys(o for o in options if re.fullmatch(r"xla_\w+=\S+", o)))
    if wrong := [option for option in options if option not in right]:
        yield Violation(
            path,
            f"has {wrong[0]!r}, which is not an XLA option such as "
            "xla_gpu_enable_latency_hiding_scheduler=true",
            [{path: right}],
        )
    last = {option.partition("=")[0]: option for option in options}
    if len(last) < len(options):
        yield Violation(path, "names an option twice", [{path: tuple(last.values())}])


def _places(checkpoint: CheckpointConfig, data: DataConfig) -> Iterator[Violation]:
    directory, local = checkpoint.directory, checkpoint.local
    every = checkpoint.local_every
    if wrong := addresses.fault(directory) or addresses.not_utf8(directory):
        yield Violation(
            "checkpoint.directory",
            wrong.rule,
            values_for("checkpoint.directory", wrong.meant or [""]),
            show=2,
        )
    if addresses.is_address(data.cache) or addresses.fault(data.cache):
        yield Violation("data.cache", "is no folder of this machine", [{"data.cache": ""}])
    if local and not every:
        yield Violation(
            "checkpoint.local_every",
            f"leaves checkpoint.local={local!r} without a step at which to save",
            [{"checkpoint.local_every": 10}],
        )
    if every and not local:
        yield Violation(
            "checkpoint.local_every",
            "needs a folder, and checkpoint.local is empty",
            [{"checkpoint.local": "/dev/shm/jaxtrain"}, {"checkpoint.local_every": 0}],
        )
    if local and not local.startswith("/"):
        folder = f"/dev/shm/{local.partition('://')[2] or local}"
        yield Violation(
            "checkpoint.local",
            "is not an absolute path, which every machine needs",
            [{"checkpoint.local": folder}],
        )


def _offload_directory(
    parallel: ParallelConfig, checkpoint: CheckpointConfig
) -> Iterator[Violation]:
    """The folder of the optimizer's state on disk."""
    path, folder = "parallel.offload_directory", parallel.offload_directory
    if not folder:
        return
    without: Changes = {path: ""}
    if parallel.offload_to("optimizer") == "device":
        offload = "both" if parallel.offload == "activations" else "optimizer"
        yield Violation(
            path,
            "is for the optimizer's state, which parallel.offload="
            f"{parallel.offload!r} leaves on the devices",
            [{"parallel.offload": offload}, without],
        )
    if addresses.is_address(folder) or addresses.fault(folder):
        yield Violation(path, "is no folder of a local disk", [without])
    elif wrong := addresses.not_utf8(folder):
        yield Violation(path, wrong.rule, values_for(path, wrong.meant))
    if checkpoint.local:
        yield Violation(
            "checkpoint.local",
            f"copies the state to memory, and {path}={folder!r} keeps it on disk because memory "
            "has no space for it",
            [{"checkpoint.local": "", "checkpoint.local_every": 0}, without],
        )


RULES: tuple[Rule, ...] = (
    _latent_attention,
    _attention,
    _layers_without_rotary,
    _rotary_scaling,
    _experts,
    _biases,
    _router,
    _sequence,
    _data,
    _compiler_options,
    products_are_built,
    _pipeline,
    _several_steps,
    _saved_values,
    _layers_fill_chunks,
    _chunks_have_layers,
    _run,
    _places,
    _offload_directory,
)
