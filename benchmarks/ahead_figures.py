"""The figures of a compiled step that ahead.py prints and that its tests bound, with the plan's."""

import collections
import dataclasses
import re
from typing import Any

import step_flops
from instruction_costs import InstructionCosts
from second_reader import second_reader
from step_seconds import SecondsReader, StepSeconds, Traffic

from jaxtrain.planner.programs.program import GROUPED, Instruction
from jaxtrain.planner.programs.report import step_counts

LARGE = 1e6  # bytes of a copy that counts
LISTED = 5  # of the largest copies and square arrays
PLAIN = "plain XLA"  # how a step attends that has no kernel for it
# The end of a kernel's name, which tells forward from backward.
PASS = re.compile(r"_(fwd|dq|dkv|bwd)\w*|Backward")
# opcodes that make no array
NAMES_OF_VALUES = ("parameter", "get-tuple-element", "tuple", "while", "bitcast")
# Opcodes that move numbers and change none of them.
MOVES = frozenset(
    """parameter constant tuple get-tuple-element bitcast reshape copy transpose slice dynamic-slice
    dynamic-update-slice concatenate broadcast fusion""".split()
)
REORDERS = frozenset({"copy", "transpose"})


def as_dict(figures: StepSeconds) -> dict[str, Any]:
    """The figures as JSON: bytes, FLOPs, seconds."""
    compiled, setup = figures.compiled, figures.setup
    total = lambda cost: sum(run.times * cost(run.instruction) for run in figures.runs)
    products, in_kernels, by_kernel = (
        total(figures.costs.flops),
        total(figures.kernel_flops),
        kernels(figures),
    )
    planned = step_flops.total(step_counts(figures.config), figures.stage)
    attention = {
        PASS.sub("", name)
        for name, kernel in by_kernel.items()
        if kernel["flops"] and not GROUPED.search(name)
    }
    bubble = setup.simulation().bubble_fraction_coupled if setup.train else 0.0
    collectives = sorted(figures.collectives().items(), key=lambda item: -item[1].bytes)
    names = ("op", "kind", "type", "axes")
    return {
        "memory": {"arguments": compiled.memory["argument"], "temporary": compiled.memory["temp"]},
        "stage": figures.stage,
        "flops": {
            "products": products,
            "kernels": in_kernels,
            "repeated": total(lambda i: figures.costs.flops(i) * figures.program.is_repeated(i)),
            "model": planned.once,
            "planned": planned.total,
            "planned_attention": planned.attention,
            "ratio": (products + in_kernels) / planned.total,
        },
        "seconds": {
            "busy": figures.busy_seconds,
            "bubble": bubble,
            "step": figures.busy_seconds / (1 - bubble),
            "kernels": in_kernels / (figures.hardware.peak() * figures.kernel_efficiency),
            "by_op": {op: seconds for op, seconds in by_op(figures).items() if seconds > 0},
            "by_part": by_part(figures),
        },
        "peaks": {"products": figures.product_efficiency, "kernels": figures.kernel_efficiency},
        "memory_bytes": total(figures.costs.bytes),
        "kernels": by_kernel,
        "attention": ", ".join(sorted(attention)) or PLAIN,
        "square_arrays": square_arrays(figures)[:LISTED],
        "copies": copies(figures),
        "collectives": [
            dict(zip(names, key, strict=True)) | dataclasses.asdict(t) for key, t in collectives
        ],
        "exposed": exposed(figures),
        "second_reader": second_reader(figures, compiled),
        "compile_seconds": compiled.tracing + compiled.compiling,
    }


def by_op(figures: StepSeconds) -> dict[str, float]:
    """Seconds of each scope, the longest first."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for run in figures.runs:
        seconds[run.op] += figures.seconds(run)
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def by_part(figures: SecondsReader) -> dict[str, float]:
    """Seconds of products, of kernels, and of all else, collectives left out."""
    seconds = {"products": 0.0, "kernels": 0.0, "other": 0.0}
    for run in figures.runs:
        product = "products" if figures.costs.flops(run.instruction) else "other"
        seconds["kernels" if figures.kernel(run.instruction) else product] += figures.seconds(run)
    return seconds


def exposed(figures: SecondsReader) -> list[dict[str, Any]]:
    """The collectives by kind and mesh axes as records, those that are exposed longest first: their
    bytes, and how many are asynchronous, overlap with products, and take longer than these."""
    by_kind: dict[tuple[str, str], Traffic] = collections.defaultdict(Traffic)
    for (_, kind, _, axes), t in figures.collectives().items():
        total = by_kind[kind, axes]
        for field in dataclasses.fields(Traffic):
            value = getattr(total, field.name) + getattr(t, field.name)
            setattr(total, field.name, value)
    records = [
        {"kind": kind, "axes": axes} | dataclasses.asdict(t) for (kind, axes), t in by_kind.items()
    ]
    return sorted(records, key=lambda record: -record["seconds"])


def exposed_lines(records: list[dict[str, Any]], least: float = 1e8) -> list[str]:
    """A table of the collectives of at least `least` bytes, by kind and axes."""
    lines = [
        f"  {'collective':18} {'axes':14} {'GB':>8} {'asynchronous':>12} {'beside products':>15} "
        f"{'exposed GB':>10} {'seconds':>8}"
    ]
    for t in records:
        if t["bytes"] >= least:
            lines.append(
                f"  {t['kind']:18} {t['axes'] or 'none':14} {t['bytes'] / 1e9:8.2f} "
                f"{t['asynchronous'] / t['bytes']:12.0%} {t['hidden'] / t['bytes']:15.0%} "
                f"{t['exposed'] / 1e9:10.2f} {t['seconds']:8.4f}"
            )
    return lines


def kernels(figures: StepSeconds) -> dict[str, dict[str, float]]:
    """Name of a kernel → how often a step runs it, and the FLOPs of all its runs."""
    by_name: dict[str, dict[str, float]] = {}
    for run in figures.runs:
        if name := figures.kernel(run.instruction):
            kernel = by_name.setdefault(name, {"times": 0.0, "flops": 0.0})
            kernel["times"] += run.times
            kernel["flops"] += run.times * figures.kernel_flops(run.instruction)
    return by_name


def square_arrays(figures: StepSeconds) -> list[str]:
    """Arrays with a sequence's length in two dimensions (and no matrix of that size), the largest
    first."""
    length, sizes = figures.config.data.sequence_length, {}
    for run in figures.runs:
        i = run.instruction
        for shape, kind, size in zip(i.shapes, i.types, i.bytes_of_each, strict=True):
            if shape.count(length) >= 2 and i.opcode not in NAMES_OF_VALUES:
                sizes[f"{kind}{list(shape)} in {run.op}"] = size
    return sorted(sizes, key=lambda text: -sizes[text])


def copies(figures: StepSeconds) -> dict[str, Any]:
    """Copies and transposes of more than LARGE bytes in loops: bytes, seconds, share of the
    estimate, the longest."""
    large = [run for run in figures.runs if run.loops and run.instruction.bytes > LARGE]
    seconds: dict[str, float] = collections.defaultdict(float)
    total = 0.0
    for run in large:
        if is_copy(figures.costs, i := run.instruction):
            seconds[f"{i.types[0]}{list(i.shapes[0])} in {run.op}"] += figures.seconds(run)
            total += run.times * i.bytes
    longest = sorted(seconds, key=lambda name: -seconds[name])[:LISTED]
    return {
        "bytes": total,
        "seconds": sum(seconds.values()),
        "share": sum(seconds.values()) / max(figures.busy_seconds, 1e-12),
        "longest": {name: round(seconds[name], 4) for name in longest},
    }


def is_copy(costs: InstructionCosts, i: Instruction) -> bool:
    """True for an instruction that only moves an array to another order or place in the device's
    memory."""
    if i.opcode in ("copy-start", "copy"):
        source = costs.program.operands(i)[0]
        if not source.layouts:
            return False
        return _order(source) != _order(i) or {source.spaces[0], i.spaces[0]} <= costs.memory
    if i.opcode != "fusion":
        return i.opcode == "transpose"
    opcodes = {j.opcode for j in costs.program.below(i.calls["calls"])}
    return opcodes <= MOVES and bool(opcodes & REORDERS)


def _order(i: Instruction) -> str:
    """The order in memory of the first array's dimensions, the innermost first: "1,0"."""
    return re.split(r"[:}]", i.layouts[0].removeprefix("{"))[0]
