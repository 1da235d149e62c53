"""The compile check: the train step compiled for devices that need not be there, compared with its
plan.

    python -m jaxtrain.plan --compile --config=llama3_8b --topology=v5p:4x4x4
                            [--layout=data=16,model=4 …] [--config.… …] [--json]

    memory        XLA's figures for a device, and those of costs/memory.py with the table's slots,
                  by part
    collectives   bytes that a device of the busiest stage sends in a step, compiled and planned;
                  which fraction is asynchronous, and which has products beside it

Nothing is run. The TPU compiler refuses a step that does not fit; the GPU compiler never does, so
its figure is compared with the memory.
"""

import collections
import dataclasses
import importlib.metadata
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.config import Config, ConfigError, checks, one_line
from jaxtrain.config.errors import UsageError
from jaxtrain.config.flags import Flag, Reading, apply, read_flags, settled
from jaxtrain.config.recipes import DEFAULT_RECIPE, find_recipe, load_recipe
from jaxtrain.config.work import step_model_of
from jaxtrain.costs import hardware
from jaxtrain.costs.memory import MemoryBreakdown
from jaxtrain.devices.mesh import sizes_of
from jaxtrain.hlo import topology
from jaxtrain.hlo.program import Program
from jaxtrain.hlo.step_figures import StepFigures
from jaxtrain.hlo.topology import (
    INSTALL_COMMAND,
    Compiled,
    Refused,
    Topology,
    TopologyError,
    compile_config,
    compilers,
)
from jaxtrain.plan import layout_flag
from jaxtrain.plan.explain import aligned
from jaxtrain.plan.predict import predict, with_op_times
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.training.step import step_counts

GIB = 2**30
# The planner's part → the kind of `training.step.state_memory` that the compiled program holds of
# it.
PARTS = {
    "weights": "parameters",
    "gradients": "accumulators",
    "optimizer": "moments",
    "activations": "slots",
}
REST = "rest"
AGREES = 0.1  # of the compiler's memory
FLAGS = (
    Flag("config", DEFAULT_RECIPE, "recipe: a Python file, or a shipped one's name"),
    Flag(
        "topology",
        "",
        "devices to compile for: "
        + ", ".join(platform.form for platform in topology.PLATFORMS.values()),
    ),
    Flag("layout", "", "compile this layout: KEY=VALUE,… as in planning; empty: the recipe's"),
    Flag("json", False, "print one JSON object"),
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a device's memory, bytes. planned: nan where the planner has no such part."""

    name: str
    compiled: float
    planned: float


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Collectives of a kind over mesh axes: bytes that a device sends in a step, compiled and
    planned.

    asynchronous: fraction of the compiled ones that have a start and a done
    beside:       fraction of them that have products in between
    """

    kind: str
    axes: str
    compiled: float
    planned: float
    asynchronous: float
    beside: float


@dataclasses.dataclass(frozen=True)
class CompileCheck:
    """A resolved config's step, compiled and planned. stage: the busiest, whose collectives are
    listed."""

    topology: Topology
    compiler: str
    compiled: Compiled
    parts: tuple[Part, ...]
    usable: float
    stage: int
    stages: int
    collectives: tuple[Collectives, ...]

    @property
    def total(self) -> Part:
        """All parts. `compiled` is XLA's sum of arguments, temporary memory and results."""
        planned = (part.planned for part in self.parts if not math.isnan(part.planned))
        return Part("total", float(self.compiled.total), sum(planned))

    @property
    def error(self) -> float:
        """The planner's memory over the compiler's, less 1."""
        return self.total.planned / self.total.compiled - 1

    @property
    def fits(self) -> bool:
        """Whether the memory that the compiler asks for is available."""
        return self.total.compiled <= self.usable

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON, in bytes and seconds."""
        planned = {
            part.name: None if math.isnan(part.planned) else part.planned for part in self.parts
        }
        kinds = {
            "kinds": dict(self.compiled.kinds),
            "pools": {kind: list(pool) for kind, pool in self.compiled.pools.items()},
        }
        return {
            "topology": self.topology.text,
            "devices": self.topology.devices,
            "device": self.topology.platform.device_kind,
            "wrap": list(self.topology.wrap),
            "compiler": self.compiler,
            "jax": importlib.metadata.version("jax"),
            "tracing_s": self.compiled.tracing,
            "compiling_s": self.compiled.compiling,
            "memory": {
                "compiled": dict(self.compiled.memory) | {"total": self.compiled.total},
                **kinds,
                "parts": {part.name: part.compiled for part in self.parts},
                "planned": planned | {"total": self.total.planned},
                "error": self.error,
                "usable": self.usable,
                "fits": self.fits,
            },
            "stage": self.stage,
            "collectives": [dataclasses.asdict(each) for each in self.collectives],
        }

    def lines(self) -> list[str]:
        """The comparison as lines of text."""
        where, jax = self.topology, importlib.metadata.version("jax")
        seconds = (
            f"traced in {self.compiled.tracing:.0f} s, compiled in {self.compiled.compiling:.0f} s"
        )
        rings = sum(map(bool, where.wrap[: len(where.sizes)]))
        links = f", links that go round along {rings} of {len(where.sizes)} dimensions"
        devices = (
            f"{where.devices} × "
            f"{where.platform.device_kind}{links * (where.platform.backend != 'gpu')}"
        )
        return [
            f"{where.text}: {devices}; {self.compiler}, jax {jax}: {seconds}",
            *self._memory_lines(),
            *self._collective_lines(),
        ]

    def _memory_lines(self) -> list[str]:
        unit, name = (GIB, "GiB") if self.total.compiled >= GIB else (2**20, "MiB")
        text = lambda n: "–" if math.isnan(n) else f"{n / unit:,.2f}"
        cells = [
            (f"  {part.name}", text(part.compiled), text(part.planned))
            for part in (*self.parts, self.total)
        ]
        split = ", ".join(
            f"{kind} {self.compiled.memory[kind] / unit:,.2f}" for kind in ("argument", "temp")
        )
        agrees = "within" if abs(self.error) <= AGREES else "not within"
        fits = "fits" if self.fits else "does not fit"
        below = "below" if self.error < 0 else "above"
        return [
            *aligned([(f"memory per device, {name}", "compiler", "planner"), *cells], words=1),
            f"  the planner is {abs(self.error):.1%} {below} the compiler, {agrees} "
            f"{AGREES:.0%}; as compiled it {fits} "
            f"the {self.usable / GIB:,.1f} GiB that a device has for arrays ({split} {name})",
        ]

    def _collective_lines(self) -> list[str]:
        whose = f" of stage {self.stage}" if self.stages > 1 else ""
        compiled, planned = (
            sum(c.compiled for c in self.collectives),
            sum(c.planned for c in self.collectives),
        )
        unit, name = (1e9, "GB") if compiled >= 1e9 else (1e6, "MB")
        title = f"collectives: {name} that a device{whose} sends in a step"
        cells = [(title, "compiler", "planner", "asynchronous", "beside products")]
        for c in self.collectives:
            parts = (f"{c.asynchronous:.0%}", f"{c.beside:.0%}") if c.compiled else ("–", "–")
            cells.append(
                (
                    f"  {c.kind} over {c.axes}",
                    f"{c.compiled / unit:,.3f}",
                    f"{c.planned / unit:,.3f}",
                    *parts,
                )
            )
        cells.append(("  in all", f"{compiled / unit:,.3f}", f"{planned / unit:,.3f}", "", ""))
        return [line.rstrip() for line in aligned(cells, words=1)]


def compile_check(
    config: Config, text: str, write: Callable[[str], object] = print
) -> CompileCheck:
    """The compile check of a resolved config, whose mesh is known, on the topology of a text like
    v5p:8x8x8.

    write: gets a line that it takes minutes. Raises TopologyError for devices that are unknown,
    that the mesh does not use, or whose compiler is missing; Refused with the compiler's words if
    it rejects the step.
    """
    devices = check_topology(config, text)
    compiler = f"{devices.platform.package} {devices.platform.version}"
    write(
        f"compiling the step for {devices.text} with {compiler}: a few minutes at most, "
        "nothing is run"
    )
    return compare(config, devices, compile_config(devices, config))


def check_topology(config: Config, text: str) -> Topology:
    """The topology of a text. Raises TopologyError as `compile_check`."""
    devices, wanted = topology.parse(text), math.prod(sizes_of(config.mesh))
    if devices.devices != wanted:
        rule = f"--topology={devices.text} has {devices.devices} devices, and the mesh has {wanted}"
        try:
            fitting = topology.fitting(devices.platform.name, wanted)
        except TopologyError as error:
            raise TopologyError(f"{rule}: {error}", advice="another mesh") from None
        raise TopologyError(rule, {"topology": fitting.text})
    if devices.platform.missing:
        where = f"neither installed nor in {compilers()} ($JAXTRAIN_COMPILERS)"
        raise TopologyError(
            f"--topology={devices.text} needs {devices.platform.package}, which is {where}: "
            f"{INSTALL_COMMAND}"
        )
    return devices


def compare(config: Config, devices: Topology, compiled: Compiled) -> CompileCheck:
    """The compile check of a step that has been compiled."""
    platform = devices.platform
    device = hardware.load(platform.hardware)
    figures = StepFigures(config, platform.name, compiled)
    return CompileCheck(
        devices,
        f"{platform.package} {platform.version}",
        compiled,
        tuple(_parts(compiled, predict(config, device).memory)),
        device.memory,
        figures.stage,
        config.mesh.stage,
        tuple(_collectives(config, figures)),
    )


def _parts(compiled: Compiled, planned: MemoryBreakdown) -> list[Part]:
    """Memory by the planner's parts, as far as the program tells them apart: with one stage, not
    saved activations."""
    known = {
        part: float(compiled.kinds[kind])
        for part, kind in PARTS.items()
        if kind in compiled.kinds and part in planned.parts
    }
    if "weights" in known:
        known["weights"] += cast_bytes(compiled.program)
    parts = [Part(part, n, planned.parts[part]) for part, n in known.items()]
    others = [
        kind
        for kind in compiled.kinds
        if kind not in PARTS.values() and not kind.endswith("on the host")
    ]
    parts += [Part(kind, float(compiled.kinds[kind]), math.nan) for kind in others]
    rest = ", ".join([*(name for name in planned.parts if name not in known), "gaps"])
    planned_rest = planned.bytes - sum(planned.parts[part] for part in known)
    return [
        *parts,
        Part(
            f"{REST} ({rest})", compiled.total - sum(part.compiled for part in parts), planned_rest
        ),
    ]


def cast_bytes(program: Program) -> int:
    """Bytes of the weights that a step casts to bfloat16 for its products once, before all
    loops."""
    cast = 0
    for i in program.inline(program.entry):
        if i.opcode not in ("fusion", "convert"):
            continue
        sizes = set()
        for source in program.operands(i):
            while source.opcode in ("bitcast", "reshape", "copy") and source.operands:
                source = program.operands(source)[0]
            if source.opcode == "parameter":
                sizes.add(source.sizes[0])
        results = zip(i.sizes, i.types, i.bytes_of_each, strict=True)
        cast += sum(
            size for elements, kind, size in results if kind == "bf16" and elements in sizes
        )
    return cast


def _collectives(config: Config, figures: StepFigures) -> list[Collectives]:
    """Collectives of the busiest stage, those with most bytes first."""
    sent, bytes_, asynchronous, beside, planned = (
        collections.Counter[tuple[str, str]]() for _ in range(5)
    )
    for (_, kind, _, axes), traffic in figures.collectives().items():
        sent[kind, axes] += round(traffic.sent)
        bytes_[kind, axes] += round(traffic.bytes)
        asynchronous[kind, axes] += round(traffic.asynchronous)
        beside[kind, axes] += round(traffic.hidden)
    for entry in step_counts(config).volume(figures.stage):
        planned[entry.kind, "·".join(entry.axes)] += entry.bytes
    keys = sorted({*sent, *planned}, key=lambda key: (-max(sent[key], planned[key]), key))
    fraction = lambda count, key: count[key] / bytes_[key] if bytes_[key] else 0.0
    return [
        Collectives(
            *key, sent[key], planned[key], fraction(asynchronous, key), fraction(beside, key)
        )
        for key in keys
    ]


def _requested(reading: Reading) -> tuple[Topology, Config]:
    """The devices and the resolved config of a command line, with the op times by which they would
    train it.

    Raises UsageError or ConfigError.
    """
    devices, recipe = (
        topology.parse(reading.values["topology"]),
        load_recipe(find_recipe(reading.values["config"])),
    )
    platform, config = devices.platform, apply(recipe, reading.overrides)
    if text := reading.values["layout"]:
        values = layout_flag.read(text)
        config = layout_flag.apply(config, values)
        layout_flag.check(config, values, platform.backend, recipe)
    else:
        config = checks.check_devices(config, devices.devices, platform.backend)
    config = config.resolve()
    config = with_op_times(config, step_model_of(config, hardware.load(platform.hardware)))
    return check_topology(config, devices.text), config


def main(argv: Sequence[str]) -> int:
    reading = read_flags(argv, __doc__ or "", FLAGS, with_config=True)
    try:
        devices, config = settled(reading, _requested)
        check = compile_check(
            config, devices.text, write=lambda line: print(line, file=sys.stderr, flush=True)
        )
    except (ConfigError, UsageError) as error:
        print(one_line(f"error: {error}"), file=sys.stderr)
        return ExitStatus.BAD_CONFIG
    except Refused as error:
        print(one_line(f"the compiler refuses the step: {error.line}"), file=sys.stderr)
        return ExitStatus.FAULT
    print(json.dumps(check.as_dict()) if reading.values["json"] else "\n".join(check.lines()))
    return ExitStatus.FINISHED


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
