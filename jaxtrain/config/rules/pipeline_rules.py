"""The rules of the pipeline and its table. Standard library only."""

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.config import (
    FilledConfig,
    MeshConfig,
    PipelineConfig,
    ResolvedModel,
    ends_with_layers,
    get,
    with_values,
)
from jaxtrain.config.optimizers import OPTIMIZERS, record_of
from jaxtrain.config.rules.rules import SettingChanges, Violation, values_for
from jaxtrain.config.saved_values import (
    LAYER_INPUT,
    ON_HOST,
    goes_with,
    names_of,
    saved_values,
)
from jaxtrain.config.sizes import SELECTIVE, remat_of
from jaxtrain.schedule.clocks.times import KnownTimes
from jaxtrain.schedule.orders import (
    OVERLAPPED,
    SCHEDULES,
    default_repeats,
    fits_repeats,
    may_overlap,
)

MOST_SMALLER = 16  # smaller numbers of stages or chunks that are tried


def pipeline_fits(
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
    if not pipeline.times:
        return
    if len(pipeline.times) not in range(3, 10):
        fixed = (
            (*pipeline.times, 1.0, 1.0, 1.0)[:3] if len(pipeline.times) < 3 else pipeline.times[:9]
        )
        yield Violation(
            "pipeline.times",
            "must have a time for F, B and W each, and may have one for message, R, head, FB, "
            "update and embedding",
            values_for("pipeline.times", [fixed, ()]),
        )
        return
    times = KnownTimes(*pipeline.times)
    if not (times.F and times.B and times.W):
        yield Violation("pipeline.times", "has no time for F, B or W", [{"pipeline.times": ()}])
    longer = max(times.F, times.B)
    if times.FB and longer > times.FB:
        least = dataclasses.replace(times, FB=longer).setting()
        yield Violation(
            "pipeline.times",
            "has less time for FB, an F and a B at the same time, than for one of them",
            values_for("pipeline.times", [least, ()]),
        )


def several_steps_update_alike(config: FilledConfig, model: ResolvedModel) -> Iterator[Violation]:
    """What a program of several steps, whose updates are ops of its table, does not have."""
    path, config = "pipeline.steps_per_program", with_values(config, model=model)
    if config.pipeline.steps_per_program == 1 or config.mesh.stage == 1:
        return
    optimizers = (*OPTIMIZERS, config.optimizer.name)
    elementwise = [name for name in optimizers if record_of(name).elementwise]
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
        value = get(config, setting)
        if value not in values:
            fixes = [{path: 1}, *values_for(setting, reversed(values))]
            yield Violation(path, f"{reason}, unlike {setting}={value!r}", fixes)


def saved_values_exist(pipeline: PipelineConfig, config: FilledConfig) -> Iterator[Violation]:
    path, names = "pipeline.save", saved_values(config.model)
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


def layers_fill_chunks(
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
    evenly: SettingChanges = {path: ()}
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


def chunks_have_layers(
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
