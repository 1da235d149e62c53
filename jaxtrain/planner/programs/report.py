"""The dry run of a step: mesh, table, compiled memory and communication volume.

`--dry_run` compiles the step for the devices of this process and stops: no array is made, no corpus
is read and nothing is written. Its result is lines of text, or one JSON object with --json.
"""

import collections
import dataclasses
import json
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jax.stages import Compiled

from jaxtrain.config import Config, ModelConfig, kernels
from jaxtrain.devices import mesh as meshes
from jaxtrain.devices.mesh import AXES, DATA, sizes_of
from jaxtrain.devices.sharding import cut_count, mesh_axes
from jaxtrain.parallel.target_device import target_device_of
from jaxtrain.pipeline.setup import Setup, make_setup
from jaxtrain.planner.search.compare import plan_at_hand
from jaxtrain.planner.search.explain import aligned
from jaxtrain.planner.step.collectives import Parameters, StepCollectives
from jaxtrain.planner.step.hardware import GIB
from jaxtrain.planner.step.layer_collectives import FLOAT32
from jaxtrain.planner.step.layout import Layout, routed_capacity
from jaxtrain.planner.step.settings import bytes_of
from jaxtrain.planner.step.step_counts import Entry, StepCounts
from jaxtrain.planner.step.step_model import layout_of, transformer_of
from jaxtrain.planner.step.transformer import Transformer
from jaxtrain.run.wall_clock import Part, WallClock, start_record
from jaxtrain.training.state import ParameterLayout, bytes_on_disk, bytes_per_device
from jaxtrain.training.step import Step, make_layout, make_step

CPUS_COMPILER = (
    "the compiled memory is by XLA's compiler for CPUs, which adds float32 copies of bfloat16 "
    "arrays and has no fused attention: right for these simulated devices; for a GPU or TPU believe"
)

# --- what lies on a device, and what it sends ----------------------------------------------------


def parameters_of(layout: ParameterLayout) -> dict[str, dict[str, Parameters]]:
    """Sizes on a device and axes of the gradients, by group and name of the parameter. Groups:
    "embed", "head", "layers/UNIT" with the stacks of all layers of a local unit, "first/LAYER",
    "predictors/MODULE"."""
    outer = dataclasses.replace(layout, zero=max(layout.zero, 1))
    groups: dict[str, dict[str, Parameters]] = collections.defaultdict(dict)
    for parameter, shared in zip(layout.parameters(), outer.parameters(), strict=True):
        keys, reduction, spec = parameter.keys, parameter.reduction, parameter.spec
        depth = 2 if keys[0] in ("layers", "first", "predictors") else 1
        split = tuple(axis for part in reduction.unsharded for axis in mesh_axes(part))
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
        )
    return groups


def state_memory(step: Step, reduces_in_ops: bool) -> dict[str, int]:
    """Bytes on a device by kind: the parameters that ops read, their masters, the optimizer's
    moments, anchor and momentum of independent replicas, gradient accumulators, slots; then those
    in the host's memory, such as "moments on the host", and the optimizer's state on disk.

    reduces_in_ops: gradients cross `data` each microbatch, so accumulators hold a shard.
    """
    state = step.abstract_state()
    kinds = {
        "parameters": bytes_per_device(state.read),
        "moments": bytes_per_device(state.optimizer),
    }
    if step.layout.masters:
        kinds["masters"] = bytes_per_device((state.params, state.working)) - kinds["parameters"]
    if step.layout.independent_replicas:
        kinds["anchor"] = bytes_per_device(state.anchor)
        kinds["outer_momentum"] = bytes_per_device(state.outer_momentum)
    parameters = [p for group in parameters_of(step.layout).values() for p in group.values()]
    shards = lambda p: math.prod(step.mesh.shape[axis] for axis in p.shard)
    kinds["accumulators"] = FLOAT32 * sum(
        int(p.size // (shards(p) if reduces_in_ops or p.as_zero3 else 1)) for p in parameters
    )
    host = {
        "moments": bytes_per_device(state.optimizer, host=True),
        "masters": bytes_per_device(state.params, host=True),
    }
    if step.setup.train:
        pools = {kind: number * each for kind, (number, each) in slot_pools(step).items()}
        host["slots"] = sum(size for kind, size in pools.items() if kind in step.host_pools)
        kinds["slots"] = sum(pools.values()) - host["slots"]
    kinds |= {f"{kind} on the host": n for kind, n in host.items() if n}
    on_disk = bytes_on_disk(state)
    return kinds | ({"optimizer on disk": on_disk} if on_disk else {})


def step_counts(config: Config, cpu: bool = False) -> StepCounts:
    """The counts of the step of a resolved config whose mesh is known. cpu: XLA's CPU backend
    lowers the collectives."""
    data, mesh, parallel, precision = config.data, config.mesh, config.parallel, config.precision
    setup, layout = make_setup(config), layout_of(mesh, config.pipeline, parallel, data.batch_size)
    # No device is needed: layouts ask a mesh for its sizes alone.
    abstract_mesh: Any = AbstractMesh(sizes_of(mesh), AXES)
    independent = config.train.diloco_inner_steps > 0
    state = make_layout(
        setup, abstract_mesh, config.model, parallel, precision, data.batch_size, independent
    )
    tokens = data.sequence_length // mesh.context
    collectives = StepCollectives(
        transformer_of(config.model, data.sequence_length),
        layout,
        item=bytes_of(precision.compute),
        read=bytes_of(precision.compute),
        reduced=FLOAT32 if cpu else bytes_of(precision.reduce),
        updated=FLOAT32 if cpu else bytes_of(precision.params),
        context=parallel.context,
        shares_vocabulary=setup.shares_vocabulary,
        gathers_in_ops=parallel.zero == 3 and parallel.gather == "layer",
        reduces_in_ops=parallel.reduce == "microbatch",
        documents=not data.attend_across_documents,
        loss_cuts=cut_count(layout.microbatch, tokens, mesh.model, config.model.loss_chunk),
        cpu=cpu,
        outer_int8=precision.outer == "int8",
        fp8=precision.matmul in kernels.QUANTIZED,
        fp8_blocks=precision.matmul == "mxfp8",
        fp8_weight_gradients=precision.fp8_weight_gradients == "fp8",
    )
    return StepCounts(
        collectives, parameters_of(state), setup.placement, setup.train, state.independent_replicas
    )


def slot_pools(step: Step) -> dict[str, tuple[int, int]]:
    """Kind of slot → their number on a device, bytes of each; empty with one stage."""
    if not step.setup.train:
        return {}
    size = step.slot_bytes()
    return {
        kind: (number, size[kind]) for kind, number in step.setup.train.pool_sizes.items() if number
    }


# --- lines about a step ---------------------------------------------------------------------------


def mebibytes(n: float) -> str:
    return f"{n / 2**20:,.1f}"


def introduction(config: Config, step: Step) -> list[str]:
    """Lines about a step, compiled or not: mesh, model, table, slots."""
    d, m, device = config.data, config.model, step.mesh.devices.flat[0]
    lines = [
        *meshes.describe(step.mesh),
        f"model: {step.parts.parameter_count:,} parameters; {step.layout.placement.describe()}",
        f"step: {d.batch_size * d.sequence_length:,} tokens in {config.pipeline.microbatches} "
        f"microbatches of {config.sequences_per_microbatch} sequences of {d.sequence_length}",
    ]
    if every := config.train.diloco_inner_steps:
        lines.append(
            f"replicas: {config.mesh.replica} train independently and exchange "
            f"{config.precision.outer} every {every} steps and after the last"
        )
    case = kernels.attention_case(
        target_device_of(device), m, d, config.mesh, config.parallel, config.precision
    )
    lines += [
        *kernels.describe_products(config.precision, case.device),
        *kernels.describe(m, case),
    ]
    if (unsharded := unsharded_over_data(step)) >= 0.01:
        data = config.mesh.data
        lines.append(
            f"ZeRO: {unsharded:.0%} of the parameters are unsharded over all {data} devices: "
            f"mesh.data={data} divides no free dimension of theirs (model.width={m.width})"
        )
    if m.experts and not m.capacity_factor and config.mesh.expert > 1:
        layout = layout_of(config.mesh, config.pipeline, config.parallel, d.batch_size)
        lines.append(_expert_capacity(m, transformer_of(m, d.sequence_length), layout))
    lines.append(f"table: {step.setup.describe()}")
    if step.setup.train:
        total = sum(n * each for n, each in slot_pools(step).values())
        lines.append(f"saved from forward to backward: {mebibytes(total)} MiB a device")
    offloaded = []
    if step.layout.offload:
        size = mebibytes(bytes_per_device(step.abstract_state(), host=True))
        offloaded.append(f"{size} MiB of the optimizer's state")
    if config.parallel.offload in ("activations", "both"):
        pools = f"slots {', '.join(step.host_pools)}"
        offloaded.append(pools if step.setup.train else "what layers save for the backward")
    if offloaded:
        lines.append(f"in the host's memory, for each device: {'; '.join(offloaded)}")
    if step.layout.disk:
        lines.append(
            f"on disk in {config.parallel.offload_directory}, for each device: "
            f"{mebibytes(bytes_on_disk(step.abstract_state()))} MiB of the optimizer's state"
        )
    return lines + plan_at_hand(config, device.device_kind).lines()


def _expert_capacity(m: ModelConfig, model: Transformer, layout: Layout) -> str:
    """A line with the most routed tokens that one device's experts can receive, for experts that
    are split over `expert`."""
    capacity = routed_capacity(model, layout)
    mean = layout.microbatch * (model.sequence // layout.context) * m.experts_per_token
    beyond = "the worst case"
    if m.expert_room:
        beyond = f"model.expert_room={m.expert_room:g}; tokens beyond it are dropped"
    return (
        f"experts: a device's capacity is {capacity:,} routed tokens, {capacity / mean:.2f} times "
        f"the mean ({beyond})"
    )


def as_compiled(step: Step, compiled: Compiled, tracing: float, compiling: float) -> list[str]:
    """Lines about a compiled step: its memory, if the platform reports it, and the seconds of
    tracing and compiling."""
    settings: Any = jax.config  # its attributes have no declared types
    again = (
        ""
        if settings.jax_enable_compilation_cache
        else " (again at each start: compiled programs are not kept)"
    )
    lines = [f"traced in {tracing:.1f} s, compiled in {compiling:.1f} s{again}"]
    if memory := compiled_memory(compiled):
        state = mebibytes(bytes_per_device(step.abstract_state()))
        lines.insert(
            0,
            f"memory per device as compiled: {mebibytes(memory['total'])} MiB ({state} of state, "
            f"{mebibytes(memory['temporary'])} temporary)",
        )
    return lines


def unsharded_over_data(step: Step) -> float:
    """The fraction of the parameters that ZeRO leaves unsharded, because `data` divides none of
    their dimensions."""
    layout = step.layout
    if not layout.zero or step.mesh.shape[DATA] == 1:
        return 0.0
    parameters = layout.parameters()
    unsharded = sum(each.size for each in parameters if not each.reduction.shard_axes)
    return unsharded / sum(each.size for each in parameters)


def compiled_memory(compiled: Compiled) -> dict[str, int] | None:
    """Bytes of a compiled program in one device's memory, {"arguments", "temporary", "results",
    "total"}; None if the platform does not report them. Results are those that reuse no
    argument's memory."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    }
    return parts | {"total": sum(parts.values())}


@dataclasses.dataclass(frozen=True)
class DryRun:
    """A step that was compiled and not run.

    record: the object that --json prints: mesh; the stage that sends most and its communication
            volume; the collectives between independent replicas; the planned step, None for
            unknown hardware; memory in bytes on a device; seconds of the command by part, as in
            `wall_clock.start_record`
    """

    introduction: list[str]
    entries: list[Entry]
    record: dict[str, Any]

    def lines(self) -> list[str]:
        """The dry run as lines of text."""
        kinds = ", ".join(
            f"{kind} {mebibytes(n)}" for kind, n in self.record["memory"]["state"].items()
        )
        whose = (
            f" of stage {self.record['stage']}, which sends most"
            if self.record["mesh"]["stage"] > 1
            else ""
        )
        return [
            *self.introduction,
            f"memory per device by kind, MiB: {kinds}",
            "",
            f"collectives of a device in a step{whose}:",
            *_table(self.entries),
        ]

    def json(self) -> str:
        """The dry run as one JSON object."""
        return json.dumps(self.record)


def dry_run(config: Config, setup: Setup, clock: WallClock) -> DryRun:
    """The dry run of a resolved config, whose tables are in `setup`, on this process's devices.

    clock: the command's. Raises ConfigError for a step that cannot be made.
    """
    clock.enter(Part.TRACING)
    mesh = meshes.make_mesh(meshes.sizes_of(config.mesh))
    with jax.set_mesh(mesh):
        step = make_step(config, mesh, setup)
        lowered = step.lower()
        with clock.part(Part.COMPILING):
            compiled = lowered.compile()
        seconds = clock.spent(Part.TRACING), clock.spent(Part.COMPILING)
        lines = [*introduction(config, step), *as_compiled(step, compiled, *seconds)]
        pools = [
            f"{kind} {n} × {each / 2**20:,.2f}" for kind, (n, each) in slot_pools(step).items()
        ]
        lines += [f"slots of a device, MiB: {', '.join(pools)}"] if pools else []
    counts, device = (
        step_counts(config, jax.default_backend() == "cpu"),
        mesh.devices.flat[0].device_kind,
    )
    planned = plan_at_hand(config, device)
    if jax.default_backend() == "cpu":
        believed = "python -m jaxtrain.plan"
        if plan := planned.prediction:
            believed = f"the plan: {plan.memory.bytes / GIB:.1f} GiB on {plan.work.hardware.name}"
        lines.append(f"  {CPUS_COMPILER} {believed}")
    stage = counts.busiest_stage()
    entries = counts.volume(stage)
    sizes = {name: int(size) for name, size in mesh.shape.items()}
    record = {
        "mesh": sizes | {"devices": math.prod(sizes.values()), "device": device},
        "stage": stage,
        "communication_volume": _as_dicts(entries),
        "exchange": _as_dicts(counts.exchange_volume()),
        "planned": planned.as_dict(),
        "memory": {
            "compiled": compiled_memory(compiled),
            "state": state_memory(step, config.parallel.reduce == "microbatch"),
        },
        "seconds": start_record(clock),
    }
    return DryRun(lines, entries, record)


def _as_dicts(entries: list[Entry]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(entry) | {"bytes": entry.bytes} for entry in entries]


def _table(entries: list[Entry]) -> list[str]:
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
                mebibytes(entry.bytes),
            )
            for entry in entries
        ),
        ("in all", "", "", "", "", "", mebibytes(sum(entry.bytes for entry in entries))),
    ]
    return [f"  {line}" for line in aligned(cells, words=3)]
