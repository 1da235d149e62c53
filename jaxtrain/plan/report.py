"""What somebody wants to know of a step before it runs: mesh, table, memory as compiled, and communication volume; as lines or as one object.

`--dry_run` compiles the step for the devices that are there and stops: no array is made, no corpus read and nothing written.
"""

import dataclasses
import json
import math
from typing import Any

import jax
from jax.stages import Compiled

from jaxtrain.config import Config, kernels
from jaxtrain.config.pipeline_setup import Setup
from jaxtrain.config.work import layout_of, transformer_of
from jaxtrain.costs.layout import expert_rows
from jaxtrain.costs.step_counts import Entry
from jaxtrain.devices import mesh as meshes
from jaxtrain.devices.mesh import DATA
from jaxtrain.parallel.zero import Reduction
from jaxtrain.plan.compare import plan_at_hand
from jaxtrain.run import start_up
from jaxtrain.run.goodput import Part, WallClock
from jaxtrain.training.state import bytes_per_device
from jaxtrain.training.step import Step, abstract_batch, make_step, slot_pools, state_memory, step_counts


def mebibytes(n: float) -> str:
    return f"{n / 2**20:,.1f}"


def introduction(config: Config, step: Step) -> list[str]:
    """Lines about a step that need not be compiled yet: mesh, model, table, slots."""
    d, m = config.data, config.pipeline.microbatches
    lines = meshes.describe(step.mesh)
    lines.append(f"model: {step.parts.parameter_count:,} parameters; {step.layout.placement.describe()}")
    parts = f"{m} microbatches of {config.sequences_per_microbatch} sequences of {d.sequence_length}"
    lines.append(f"step: {d.batch_size * d.sequence_length:,} tokens in {parts}")
    if every := config.train.diloco_inner_steps:
        lines.append(
            f"replicas: {config.mesh.replica} train apart and exchange {config.precision.outer} every {every} steps and after the last"
        )
    lines += kernels.describe(config, meshes.hardware_of(step.mesh.devices.flat[0]))
    if (whole := whole_over_data(step)) >= 0.01:
        data = config.mesh.data
        why = f"mesh.data={data} divides no free dimension of theirs (model.width={config.model.width})"
        lines.append(f"ZeRO: {whole:.0%} of the parameters stay whole on all {data} data shards: {why}")
    if config.model.experts and not config.model.capacity_factor:
        lines += _room_for_rows(config)
    lines.append(f"table: {step.setup.describe()}")
    if step.setup.train:
        pools = slot_pools(step)
        total = sum(n * each for n, each in pools.values())
        listed = ", ".join(f"{kind} {n} × {each / 2**20:,.2f}" for kind, (n, each) in pools.items())
        lines.append(f"slots: {listed} MiB, {mebibytes(total)} in all")
    lies = [f"{mebibytes(bytes_per_device(step.abstract_state(), host=True))} MiB of the optimizer's state"] if step.layout.offload else []
    if config.parallel.offload in ("activations", "both"):
        lies.append(f"slots {', '.join(step.host_pools)}" if step.setup.train else "what layers keep for the backward")
    if lies:
        lines.append(f"in the host's memory, for each device: {'; '.join(lies)}")
    return lines + plan_at_hand(config, step.mesh.devices.flat[0].device_kind).lines()


def _room_for_rows(config: Config) -> list[str]:
    """How many rows can arrive at a device's experts; nothing where all experts are on each device."""
    m, devices = config.model, config.mesh.expert
    if devices == 1:
        return []
    model, layout = transformer_of(config), layout_of(config)
    rows, mean = expert_rows(model, layout), layout.microbatch * (model.sequence // layout.context) * m.experts_per_token
    beyond = f"model.expert_room={m.expert_room:g}; what is beyond is dropped" if m.expert_room else "all that there can be"
    return [f"experts: room for {rows:,} rows on a device, {rows / mean:.2f} times the mean ({beyond})"]


def as_compiled(step: Step, compiled: Compiled, tracing: float, compiling: float) -> list[str]:
    """Lines about a compiled step: memory where the platform reports it, and the seconds to trace and to compile."""
    lines = [f"traced in {tracing:.1f} s, compiled in {compiling:.1f} s"]
    if not (compiled_bytes := compiled_memory(compiled)):
        return lines
    split = f"{mebibytes(bytes_per_device(step.abstract_state()))} of state, {mebibytes(compiled_bytes['temporary'])} temporary"
    return [f"memory per device as compiled: {mebibytes(compiled_bytes['total'])} MiB ({split})", *lines]


def whole_over_data(step: Step) -> float:
    """The part of the parameters, from 0 to 1, that ZeRO would share out over `data` and cannot."""
    layout = step.layout
    if not layout.zero or step.mesh.shape[DATA] == 1:
        return 0.0
    reductions = jax.tree.leaves(layout.reductions, is_leaf=lambda x: isinstance(x, Reduction))
    sizes = [math.prod(array.shape) for array in jax.tree.leaves(layout.shapes)]
    return sum(size for reduction, size in zip(reductions, sizes, strict=True) if not reduction.over_data) / sum(sizes)


def compiled_memory(compiled: Compiled) -> dict[str, int] | None:
    """Bytes on a device, None where the platform does not say: arguments, temporary, results that take no argument's place, all of it."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    parts = {"arguments": memory.argument_size_in_bytes, "temporary": memory.temp_size_in_bytes, "results": results}
    return parts | {"total": sum(parts.values())}


@dataclasses.dataclass(frozen=True)
class DryRun:
    """A step that was compiled and not run. `stage`: of which the communication volume is, the busiest; `exchange`: of replicas that train apart;
    planned: the step, None where the kind of device is not known; memory in bytes on a device; seconds of the command by part, as
    `start_up.record` has them."""

    introduction: list[str]
    mesh: dict[str, int]
    device: str
    stage: int
    entries: list[Entry]
    exchange: list[Entry]
    planned: dict[str, Any] | None
    compiled: dict[str, int] | None
    state: dict[str, int]
    seconds: dict[str, float]

    def lines(self) -> list[str]:
        kinds = ", ".join(f"{kind} {mebibytes(n)}" for kind, n in self.state.items())
        whose = f" of stage {self.stage}, which sends most" if self.mesh["stage"] > 1 else ""
        return [
            *self.introduction,
            f"memory per device by kind, MiB: {kinds}",
            "",
            f"collectives of a device in a step{whose}:",
            *_table(self.entries),
        ]

    def json(self) -> str:
        memory: dict[str, Any] = {"compiled": self.compiled, "state": self.state}
        mesh = self.mesh | {"devices": math.prod(self.mesh.values()), "device": self.device}
        accounts = {"communication_volume": _as_dicts(self.entries), "exchange": _as_dicts(self.exchange)}
        rest = {"planned": self.planned, "memory": memory, "seconds": self.seconds}
        return json.dumps({"mesh": mesh, "stage": self.stage} | accounts | rest)


def dry_run(config: Config, setup: Setup, clock: WallClock) -> DryRun:
    """Compiles the step of a resolved config, whose tables are in `setup`, for this process's devices. Raises ConfigError for what cannot
    be made. clock: of the command."""
    clock.enter(Part.TRACING)
    mesh = meshes.make_mesh(meshes.sizes_of(config.mesh))
    cpu = jax.default_backend() == "cpu"
    with jax.set_mesh(mesh):
        step = make_step(config, mesh, setup)
        lowered = step.train.lower(step.abstract_state(), abstract_batch(config, step))
        with clock.part(Part.COMPILING):
            compiled = lowered.compile()
        lines = [*introduction(config, step), *as_compiled(step, compiled, clock.spent(Part.TRACING), clock.spent(Part.COMPILING))]
    counts = step_counts(config, cpu)
    stage = counts.busiest_stage()
    device = mesh.devices.flat[0].device_kind
    shape = {name: int(size) for name, size in mesh.shape.items()}
    accounts = counts.volume(stage), counts.exchange_volume()
    memory = compiled_memory(compiled), state_memory(config, step)
    planned = plan_at_hand(config, device).as_dict()
    return DryRun(lines, shape, device, stage, *accounts, planned, *memory, start_up.record(clock))


def _as_dicts(entries: list[Entry]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(entry) | {"bytes": entry.bytes} for entry in entries]


def _table(entries: list[Entry]) -> list[str]:
    cells = [("op", "collective", "over", "devices", "times", "KiB each", "MiB sent")]
    for entry in entries:
        size, sent = f"{entry.size / 1024:,.1f}", mebibytes(entry.bytes)
        cells.append((entry.op, entry.kind, "·".join(entry.axes), str(entry.devices), f"{entry.count:,}", size, sent))
    cells.append(("in all", "", "", "", "", "", mebibytes(sum(entry.bytes for entry in entries))))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ([text.ljust(width) for text, width in zip(line[:3], widths[:3], strict=True)] for line in cells)
    numbers = ([text.rjust(width) for text, width in zip(line[3:], widths[3:], strict=True)] for line in cells)
    return ["  " + "  ".join(words + figures) for words, figures in zip(padded, numbers, strict=True)]
