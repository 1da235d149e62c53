"""The dry run of a step: mesh, table, compiled memory and communication volume.

`--dry_run` compiles the step for the devices of this process and stops: no array is made, no corpus
is read and nothing is written. Its result is lines of text, or one JSON object with --json.
"""

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jax.stages import Compiled

from jaxtrain.config import ResolvedConfig
from jaxtrain.config.phases import largest_of
from jaxtrain.devices.mesh import AXES, make_mesh, sizes_of
from jaxtrain.devices.sharding import cut_count, mesh_axes
from jaxtrain.pipeline.prepared_run import PreparedRun
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.planner.layer.collective_time import Parameters, StepCollectives
from jaxtrain.planner.layer.hardware import GIB
from jaxtrain.planner.layer.model import model_of
from jaxtrain.planner.layer.settings import FLOAT32
from jaxtrain.planner.search.compare import plan_at_hand
from jaxtrain.planner.step.step_counts import CollectiveCount, StepCounts
from jaxtrain.planner.step.step_model import layout_of, settings_of_run
from jaxtrain.run import streams
from jaxtrain.run.wall_clock import Phase, WallClock, start_record
from jaxtrain.training.compiled_step import compiled_memory
from jaxtrain.training.parameter_layout import ParameterLayout
from jaxtrain.training.step import Step, make_layout, make_step
from jaxtrain.training.update.muon import Matrices

MIB = 2**20
CPUS_COMPILER = (
    "the compiled memory is by XLA's compiler for CPUs, which adds float32 copies of bfloat16 "
    "arrays and has no fused attention: right for these simulated devices; for a GPU or TPU believe"
)

# --- what a step sends --------------------------------------------------------------------------


def parameters_of(layout: ParameterLayout) -> dict[str, dict[str, Parameters]]:
    """Sizes on a device and axes of the gradients, by group and name of the parameter. Groups:
    "embed", "head", "layers/UNIT" with the stacks of all layers of a local unit, or
    "layers/UNIT/FORM" where they are of several forms, "first/LAYER", "predictors/MODULE"."""
    outer = dataclasses.replace(layout, zero=max(layout.zero, 1))
    groups: dict[str, dict[str, Parameters]] = collections.defaultdict(dict)
    for parameter, shared in zip(layout.parameters(), outer.parameters(), strict=True):
        keys, reduction, spec = parameter.keys, parameter.reduction, parameter.spec
        depth = 2 if keys[0] in ("layers", "first", "predictors") else 1
        depth += keys[0] == "layers" and bool(layout.placement.forms)
        split = tuple(axis for part in reduction.unsharded for axis in mesh_axes(part))
        dealt = None
        if spec.orthogonalized:
            one = (1,) * reduction.lead + spec.shape
            matrices = Matrices.of(one, spec, reduction.storage, layout.mesh)
            dealt = matrices.shards, matrices.copies
        groups["/".join(keys[:depth])][".".join(keys[depth:])] = Parameters(
            parameter.size // math.prod(layout.mesh.shape[axis] for axis in split),
            reduction.scatter_axes,
            reduction.sum_axes,
            split,
            reduction.shard_axes,
            shared.reduction.scatter_axes,
            spec.cast,
            spec.matrix,
            spec.product,
            layout.shards_ends and keys[0] != "layers",
            dealt,
        )
    return groups


def step_counts(config: ResolvedConfig, cpu: bool = False) -> StepCounts:
    """The counts of a config's step. cpu: XLA's CPU backend lowers the collectives."""
    data, mesh, parallel = config.data, config.mesh, config.parallel
    setup, layout = make_setup(config), layout_of(mesh, config.pipeline, parallel, data.batch_size)
    # No device is needed: layouts ask a mesh for its sizes alone.
    abstract_mesh: Any = AbstractMesh(sizes_of(mesh), AXES)
    state = make_layout(config, abstract_mesh, setup)
    tokens = data.sequence_length // mesh.context
    settings = dataclasses.replace(settings_of_run(config), imbalance=1.0)
    if cpu:
        settings = dataclasses.replace(settings, sent_gradient=FLOAT32, sent_weight=FLOAT32)
    collectives = StepCollectives(
        model_of(config.model, data.sequence_length),
        layout,
        settings,
        shares_vocabulary=setup.shares_vocabulary,
        reduces_in_ops=parallel.reduce == "microbatch",
        loss_cuts=cut_count(layout.microbatch, tokens, mesh.model, config.model.loss_chunk),
        cpu=cpu,
    )
    return StepCounts(
        collectives, parameters_of(state), setup.placement, setup.train, state.independent_replicas
    )


def dry_run(
    run: PreparedRun,
    clock: WallClock,
    describe: Callable[[ResolvedConfig, Step, Compiled, float, float], list[str]],
) -> tuple[list[str], dict[str, Any]]:
    """The dry run of a run on this process's devices, as lines of text and as the object that
    --json prints: mesh; the stage that sends most and its communication volume; the collectives
    between independent replicas; the planned step, None for unknown hardware; memory in bytes on a
    device; seconds of the command by part, as in `wall_clock.start_record`.

    clock:    the command's
    describe: gives the lines about a step, its compiled program, and seconds of tracing and
              compiling

    Raises ConfigError for a step that cannot be made.
    """
    largest, of_phases = largest_of(run.config)
    config = largest.resolve()
    clock.enter(Phase.TRACING)
    mesh = make_mesh(sizes_of(config.mesh))
    with jax.set_mesh(mesh):
        step = make_step(config, mesh, run.setup)
        lowered = step.lower()
        with clock.phase(Phase.COMPILING):
            compiled = lowered.compile()
        lines = describe(
            config, step, compiled, clock.spent(Phase.TRACING), clock.spent(Phase.COMPILING)
        )
    on_cpu, device = jax.default_backend() == "cpu", mesh.devices.flat[0].device_kind
    counts, planned = step_counts(config, on_cpu), plan_at_hand(config, device)
    if on_cpu:
        believed = "python -m jaxtrain.plan"
        if plan := planned.prediction:
            believed = f"the plan: {plan.memory.bytes / GIB:.1f} GiB on {plan.work.hardware.name}"
        lines.append(f"  {CPUS_COMPILER} {believed}")
    stage = counts.busiest_stage()
    entries, state = counts.volume(stage), step.state_memory(config.parallel.reduce == "microbatch")
    record = {
        "mesh": dict(mesh.shape) | {"devices": mesh.size, "device": device},
        "stage": stage,
        "communication_volume": _as_dicts(entries),
        "exchange": _as_dicts(counts.exchange_volume()),
        "planned": planned.as_dict(),
        "memory": {
            "compiled": compiled_memory(compiled),
            "state": state,
        },
        "seconds": start_record(clock),
    }
    kinds = ", ".join(f"{kind} {n / MIB:,.1f}" for kind, n in state.items())
    whose = f" of stage {stage}, which sends most" * (config.mesh.stage > 1)
    return [
        *[of_phases] * bool(of_phases),
        *lines,
        f"memory per device by kind, MiB: {kinds}",
        "",
        f"collectives of a device in a step{whose}:",
        *_table(entries),
    ], record


def _as_dicts(entries: list[CollectiveCount]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(entry) | {"bytes": entry.bytes} for entry in entries]


def _table(entries: list[CollectiveCount]) -> list[str]:
    cells = [
        ("op", "collective", "over", "devices", "times", "KiB each", "MiB sent"),
        *(
            (
                entry.op,
                entry.kind,
                "·".join(entry.axes),
                str(entry.devices),
                f"{entry.count:,}",
                f"{entry.size / 1024:,.1f}",
                f"{entry.bytes / MIB:,.1f}",
            )
            for entry in entries
        ),
        ("in all", "", "", "", "", "", f"{sum(entry.bytes for entry in entries) / MIB:,.1f}"),
    ]
    return [f"  {line}" for line in streams.aligned(cells, "<<<>")]
