"""The figures of a compiled step that ahead.py prints and that its tests bound, with the plan's."""

import collections
import dataclasses
import re
from typing import Any

import step_flops
from instruction_costs import InstructionCosts
from step_seconds import StepSeconds

from jaxtrain.hlo.program import GROUPED, Instruction
from jaxtrain.plan.report import step_counts

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
        "compile_seconds": compiled.tracing + compiled.compiling,
    }


def by_op(figures: StepSeconds) -> dict[str, float]:
    """Seconds of each scope, the longest first."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for run in figures.runs:
        seconds[run.op] += figures.seconds(run)
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


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
