"""The compile check: a training step compiled for devices that need not exist here, compared with
its plan.

    python -m jaxtrain.plan --compile --config=llama3_8b --topology=v5p:4x4x4
                            [--layout=data=16,model=4 …] [--config.… …] [--json]

    memory        bytes on a device by part: XLA's figures, and the planner's with the table's slots
    collectives   bytes that a device sends in a step, on the stage that sends most, compiled and
                  planned; the fractions that are asynchronous and that overlap with products

Nothing is run. The TPU compiler refuses a step that does not fit. The GPU compiler never does, so
its figure is compared with the device's memory.
"""

import collections
import dataclasses
import functools
import importlib.metadata
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxtrain.config import ConfigError, ResolvedConfig, UsageError, one_line
from jaxtrain.config.flags import Flag, Reading, apply, read_flags, settled
from jaxtrain.config.phases import largest_of
from jaxtrain.config.recipes import DEFAULT_RECIPE, load_recipe
from jaxtrain.config.rules import checks
from jaxtrain.devices.mesh import AXES, sizes_of
from jaxtrain.pipeline.setup import Setup, make_setup
from jaxtrain.planner.layer import hardware
from jaxtrain.planner.layer.links import sent
from jaxtrain.planner.programs import topology
from jaxtrain.planner.programs.compiled_collectives import CompiledCollective, step_collectives
from jaxtrain.planner.programs.loops import Executed, StepLoops
from jaxtrain.planner.programs.program import Program
from jaxtrain.planner.programs.report import step_counts
from jaxtrain.planner.programs.topology import (
    INSTALL_COMMAND,
    Compiled,
    Refused,
    Topology,
    compile_config,
    compilers,
)
from jaxtrain.planner.search import layout_flag
from jaxtrain.planner.search.predict import predict, with_op_times
from jaxtrain.planner.search.what_if import fitting
from jaxtrain.planner.step.memory import MemoryBreakdown
from jaxtrain.planner.step.step_counts import CollectiveCount
from jaxtrain.planner.step.step_model import step_model_of
from jaxtrain.run import out_of_memory, streams
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.schedule.columns import columns

# The planner's part → the key of `Step.state_memory` with the compiled program's bytes.
PARTS = {
    "weights": "parameters",
    "gradients": "accumulators",
    "optimizer": "moments",
    "activations": "slots",
}
OF_OPTIMIZER = ("masters", "average")  # the keys of what the plan counts with its state
AGREES = 0.1  # of the compiler's memory
FLAGS = (
    Flag("config", DEFAULT_RECIPE, "recipe: a Python file, or a shipped one's name"),
    Flag("topology", "", f"devices to compile for: {topology.FORMS}"),
    Flag("layout", "", "compile this layout: KEY=VALUE,… as in planning; empty: the recipe's"),
    Flag("json", False, "print one JSON object"),
)


@dataclasses.dataclass(frozen=True)
class MemoryPart:
    """A part of a device's memory, bytes. planned: None if the planner has no such part."""

    name: str
    compiled: float
    planned: float | None


@dataclasses.dataclass(frozen=True)
class CollectiveBytes:
    """Bytes that a device sends in a step by collectives of a kind over the same mesh axes.

    asynchronous: fraction of the compiled bytes whose collectives have a start and a done
    overlapped:   fraction of the compiled bytes whose collectives overlap with products
    """

    kind: str
    axes: str
    compiled: float
    planned: float
    asynchronous: float
    overlapped: float


@dataclasses.dataclass(frozen=True)
class CompileCheck:
    """A config's step, compiled and planned.

    topology, compiled: the devices, and the step's program for them
    parts:    of a device's memory
    capacity: bytes that a device has for arrays
    stage:    of so many `stages` the one whose devices send most, whose collectives these are
    """

    topology: Topology
    compiled: Compiled
    parts: tuple[MemoryPart, ...]
    capacity: float
    stage: int
    stages: int
    collectives: tuple[CollectiveBytes, ...]

    @property
    def total(self) -> MemoryPart:
        """All parts. `compiled` is XLA's sum of arguments, temporary memory and results."""
        return MemoryPart(
            "total", float(self.compiled.total), sum(part.planned or 0.0 for part in self.parts)
        )

    @property
    def error(self) -> float:
        """The planner's memory over the compiler's, less 1."""
        return (self.total.planned or 0.0) / self.total.compiled - 1

    @property
    def repeated_products(self) -> int:
        """Products in the program that XLA computes once more, to hold less memory."""
        program = self.compiled.program
        return sum(map(program.is_repeated, program.named.values()))

    @property
    def fits(self) -> bool:
        """True if a device has the memory that the compiler asks for."""
        return self.total.compiled <= self.capacity

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON, in bytes and seconds."""
        where, compiled, parts = self.topology, self.compiled, (*self.parts, self.total)
        return {
            "topology": where.text,
            "devices": where.devices,
            "device": where.platform.device_kind,
            "wrap": list(where.wrap),
            "compiler": where.platform.compiler,
            "jax": importlib.metadata.version("jax"),
            "tracing_s": compiled.tracing,
            "compiling_s": compiled.compiling,
            "memory": {
                "compiled": dict(compiled.memory) | {"total": compiled.total},
                "kinds": dict(compiled.kinds),
                "pools": {kind: list(pool) for kind, pool in compiled.pools.items()},
                "parts": {part.name: part.compiled for part in self.parts},
                "planned": {part.name: part.planned for part in parts},
                "error": self.error,
                "usable": self.capacity,
                "fits": self.fits,
                "repeated_products": self.repeated_products,
            },
            "stage": self.stage,
            "collectives": [dataclasses.asdict(each) for each in self.collectives],
        }

    def lines(self) -> list[str]:
        """The comparison as lines of text."""
        where, platform, compiled = self.topology, self.topology.platform, self.compiled
        rings = sum(map(bool, where.wrap[: len(where.sizes)]))
        links = f", links that go round along {rings} of {len(where.sizes)} dimensions"
        devices = f"{where.devices} × {platform.device_kind}{links * (platform.backend != 'gpu')}"
        versions = f"{platform.compiler}, jax {importlib.metadata.version('jax')}"
        seconds = f"traced in {compiled.tracing:.0f} s, compiled in {compiled.compiling:.0f} s"
        big = self.total.compiled >= hardware.GIB
        size = lambda n: "–" if n is None else f"{n / (hardware.GIB if big else 2**20):,.2f}"
        unit = "GiB" if big else "MiB"
        memory = [
            (f"memory per device, {unit}", "compiler", "planner"),
            *(
                (f"  {part.name}", size(part.compiled), size(part.planned))
                for part in (*self.parts, self.total)
            ),
        ]
        split = ", ".join(f"{kind} {size(compiled.memory[kind])}" for kind in ("argument", "temp"))
        agrees = "within" if abs(self.error) <= AGREES else "not within"
        return [
            f"{where.text}: {devices}; {versions}: {seconds}",
            *streams.aligned(memory, "<>"),
            f"  the planner is {abs(self.error):.1%} {'below' if self.error < 0 else 'above'} the "
            f"compiler, {agrees} {AGREES:.0%}; as compiled it "
            f"{'fits' if self.fits else 'does not fit'} the {self.capacity / hardware.GIB:,.1f} "
            f"GiB that a device has for arrays ({split} {unit})",
            *[
                f"  to hold less memory XLA computes {self.repeated_products} products of the "
                "program once more, and sends less beside others: save less for the backward"
            ]
            * bool(self.repeated_products),
            *self._collective_lines(),
        ]

    def _collective_lines(self) -> list[str]:
        whose = f" of stage {self.stage}" if self.stages > 1 else ""
        compiled = sum(c.compiled for c in self.collectives)
        planned = sum(c.planned for c in self.collectives)
        unit, name = (1e9, "GB") if compiled >= 1e9 else (1e6, "MB")
        size = lambda n: f"{n / unit:,.3f}"
        title = f"collectives: {name} that a device{whose} sends in a step"
        share = lambda c, part: f"{part:.0%}" if c.compiled else "–"
        cells = [
            (title, "compiler", "planner", "asynchronous", "overlapped"),
            *(
                (
                    f"  {c.kind} over {c.axes}",
                    size(c.compiled),
                    size(c.planned),
                    share(c, c.asynchronous),
                    share(c, c.overlapped),
                )
                for c in self.collectives
            ),
            ("  in all", size(compiled), size(planned), "", ""),
        ]
        return streams.aligned(cells, "<>")


def check_topology(devices: Topology, wanted: int) -> Topology:
    """The topology itself. Raises UsageError if it has not this number of devices, or no
    compiler for them is installed."""
    if devices.devices != wanted:
        rule = f"--topology={devices.text} has {devices.devices} devices, and the mesh has {wanted}"
        try:
            fitting = topology.fitting(devices.platform.name, wanted)
        except UsageError as error:
            raise UsageError(f"{rule}: {error}", advice="another mesh") from None
        raise UsageError(rule, {"topology": fitting.text})
    if devices.platform.missing:
        raise UsageError(
            f"--topology={devices.text} needs {devices.platform.package}, which is neither "
            f"installed nor in {compilers()} ($JAXTRAIN_COMPILERS): {INSTALL_COMMAND}"
        )
    return devices


def step_loops(
    program: Program, setup: Setup, stage: int = 0, expert_tokens: int | None = None
) -> StepLoops:
    """The loops of a step's program on a stage, with the trips that its table and placement say.

    expert_tokens: tokens of a microbatch that reach a device's experts; None: their capacity
    """
    table = columns(setup.train) if setup.train else None
    runs = table.runs if table else {}
    return StepLoops(
        program,
        stage,
        op_runs={op: int(column[:, stage].sum()) for op, column in runs.items()},
        busy_ticks=int(table.busy[:, stage].sum()) if table else 0,
        expert_tokens=expert_tokens,
    )


def compile_check(config: ResolvedConfig, devices: Topology, compiled: Compiled) -> CompileCheck:
    """The compile check of a config's step that has been compiled for these devices."""
    device, counts = hardware.load(devices.platform.hardware), step_counts(config)
    stage, program = counts.busiest_stage(), compiled.program
    computes = lambda i: float(i.is_kernel or program.multiplies(i))
    mesh = dict(zip(AXES, sizes_of(config.mesh), strict=True))
    loops = step_loops(program, make_setup(config), stage)
    return CompileCheck(
        devices,
        compiled,
        tuple(_parts(compiled, predict(config, device).memory)),
        device.memory,
        stage,
        config.mesh.stage,
        tuple(_collectives(step_collectives(loops, mesh, computes), counts.volume(stage))),
    )


def _parts(compiled: Compiled, planned: MemoryBreakdown) -> list[MemoryPart]:
    """Memory by the planner's parts, as far as the program tells them apart: with one stage, it
    does not tell saved activations."""
    beside = {
        "weights": cast_bytes(compiled.program),
        "optimizer": sum(compiled.kinds.get(kind, 0) for kind in OF_OPTIMIZER),
    }
    known = {
        part: float(compiled.kinds[kind] + beside.get(part, 0))
        for part, kind in PARTS.items()
        if kind in compiled.kinds and part in planned.parts
    }
    listed = (*PARTS.values(), *OF_OPTIMIZER)
    parts = [
        *(MemoryPart(part, n, planned.parts[part]) for part, n in known.items()),
        *(
            MemoryPart(kind, float(n), None)
            for kind, n in compiled.kinds.items()
            if kind not in listed and not kind.endswith(("on the host", "on disk"))
        ),
    ]
    rest = ", ".join([*(name for name in planned.parts if name not in known), "gaps"])
    compiled_rest = compiled.total - sum(part.compiled for part in parts)
    planned_rest = planned.bytes - sum(planned.parts[part] for part in known)
    return [*parts, MemoryPart(f"rest ({rest})", compiled_rest, planned_rest)]


def cast_bytes(program: Program) -> int:
    """Bytes of the weights that a step casts to bfloat16 once, before all loops. What the optimizer
    makes of them after the loops is no such cast."""
    cast = 0
    for i in program.inline(program.entry):
        if i.opcode not in ("fusion", "convert") or "/optimizer/" in i.text:
            continue
        sizes = set()
        for source in program.operands(i):
            while source.opcode in ("bitcast", "reshape", "copy") and source.operands:
                source = program.operands(source)[0]
            if source.opcode == "parameter" and source.types[0] == "f32":
                sizes.add(source.sizes[0])
        results = zip(i.sizes, i.types, i.bytes_of_each, strict=True)
        cast += sum(
            size for elements, dtype, size in results if dtype == "bf16" and elements in sizes
        )
    return cast


def _collectives(
    compiled: Iterable[tuple[CompiledCollective, Executed, float | None]],
    planned: Iterable[CollectiveCount],
) -> list[CollectiveBytes]:
    """Bytes of collectives by kind and axes, those with most bytes first."""
    # sent as compiled and as planned; unsharded, and of these asynchronous and overlapped
    sums = collections.defaultdict[tuple[str, str], np.ndarray](lambda: np.zeros(5))
    for c, run, overlapped in compiled:
        sums[c.kind, "·".join(c.axes)] += (
            run.times * sent(c.kind, c.sending, c.devices),
            0.0,
            run.times * c.size,
            run.times * c.size * (overlapped is not None),
            run.times * c.size * bool(overlapped),
        )
    for entry in planned:
        sums[entry.kind, "·".join(entry.axes)][1] += entry.bytes
    rows = [
        CollectiveBytes(
            *key, round(row[0]), round(row[1]), row[3] / (row[2] or 1), row[4] / (row[2] or 1)
        )
        for key, row in sums.items()
    ]
    return sorted(rows, key=lambda row: (-max(row.compiled, row.planned), row.kind, row.axes))


def _requested(reading: Reading) -> tuple[Topology, ResolvedConfig]:
    """The topology and the config of a command line, with the op times by which those
    devices would train it.

    Raises UsageError or ConfigError.
    """
    devices = topology.parse(reading.values["topology"])
    recipe = load_recipe(reading.values["config"])
    platform, config = devices.platform, apply(recipe, reading.overrides)
    if text := reading.values["layout"]:
        values = layout_flag.read(text)
        known = checks.Environment(None, platform.backend, recipe)
        on_mesh = layout_flag.laid_out(config, values, known)
    else:
        on_mesh = checks.check_devices(config, devices.devices, platform.backend)
    largest, of_phases = largest_of(on_mesh)
    if of_phases:
        streams.remark(f"note: {of_phases}")
    resolved = largest.resolve()
    if (steps := resolved.pipeline.steps_per_program) > 1 and resolved.mesh.stage > 1:
        name, rule = "pipeline.steps_per_program", "has loops whose trips no table says"
        raise ConfigError(name, steps, rule, fixes=[{name: 1}])
    resolved = with_op_times(resolved, step_model_of(resolved, hardware.load(platform.hardware)))
    return check_topology(devices, math.prod(sizes_of(resolved.mesh))), resolved


def main(argv: Sequence[str]) -> int:
    """The exit status. Raises UsageError, ConfigError and RunError, which `plan` reports."""
    reading = read_flags(argv, __doc__ or "", FLAGS, with_config=True)
    try:
        devices, config = settled(reading, _requested)
        print(
            f"compiling the step for {devices.text} with {devices.platform.compiler}: a few "
            "minutes at most, nothing is run",
            file=sys.stderr,
            flush=True,
        )
        known = checks.Environment(devices.devices, devices.platform.backend)
        with out_of_memory.named(functools.partial(fitting, config, known)):
            check = compile_check(config, devices, compile_config(devices, config))
    except Refused as error:
        print(one_line(f"the compiler refuses the step: {error.line}"), file=sys.stderr)
        return ExitStatus.FAULT
    print(json.dumps(check.as_dict()) if reading.values["json"] else "\n".join(check.lines()))
    return ExitStatus.FINISHED
