"""What the compilers' programs say of a step on a device: operations, seconds, bytes, kernels, copies, collectives; nothing is run.

    seconds    TPU: libtpu's cycles at the platform's clock; H100: the longer of an instruction's operations at a fraction of the peak and
               its bytes at the memory's speed. A kernel, for which there is neither, takes its operations at another fraction. Collectives
               are left out.
    step       the busiest stage's seconds / (1 − the bubble that the table's simulation predicts)

A scope's names are those of the table's ops; with one stage R is what B computes again, and B all of the backward.
"""

import collections
import dataclasses
import math
import re
from typing import Any

from jaxtrain.config import Config
from jaxtrain.config.pipeline_setup import make_setup
from jaxtrain.costs import hardware
from jaxtrain.devices.mesh import AXES, batch_shards, sizes_of
from jaxtrain.hlo.cost import GPU_MEMORY, TPU_MEMORY, Costs, target
from jaxtrain.hlo.loops import Run, StepLoops
from jaxtrain.hlo.program import Instruction
from jaxtrain.hlo.topology import PLATFORMS, Compiled
from jaxtrain.hlo.traffic import crossings

LARGE = 1e6  # bytes of a copy that counts
LISTED = 5  # of the largest copies and square arrays
PLAIN = "plain XLA"  # how a step attends that has no kernel for it
# Custom calls that compute nothing by themselves, or are counted as products
NO_KERNELS = re.compile(
    r"AllocateBuffer|AssumeGatherIndicesInBound|Sharding|SPMD|__cublas|annotate_device_placement|MoveTo|^$|Resource|topk|TopK"
)
GROUPED = re.compile(r"gmm|ragged|grouped")
PASS = re.compile(r"_(fwd|dq|dkv|bwd)\w*|Backward")  # what a kernel's name says of forward and backward
FLOATS = ("bf16", "f16", "f32")


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Fractions of the peak at which products in XLA's own code (H100) and in kernels run."""

    products: float = 0.7
    kernels: float = 0.5


@dataclasses.dataclass
class Traffic:
    """Collectives alike, in a step.

    bytes         of the whole arrays: an all-gather's results, the operands of others
    sent          what a device sends of them, by the ring algorithms
    asynchronous  those of them that have a start and a done, or stand in one fusion with products
    hidden        those that have products between start and done, or in the fusion
    flops         these products; what stands beside two collectives counts for both
    """

    times: float = 0.0
    bytes: float = 0.0
    sent: float = 0.0
    asynchronous: float = 0.0
    hidden: float = 0.0
    flops: float = 0.0


@dataclasses.dataclass
class Kernel:
    """A custom call: how often a step runs it, its operations in all."""

    times: float = 0.0
    flops: float = 0.0


class StepFigures:
    """The figures of a compiled `train` of a resolved config, for a device of the busiest stage."""

    def __init__(self, config: Config, platform: str, compiled: Compiled, peaks: Peaks = Peaks()):
        self.config, self.platform, self.compiled, self.peaks = config, platform, compiled, peaks
        self.setup, self.program = make_setup(config), compiled.program
        kind = hardware.load(PLATFORMS[platform].hardware)
        self.peak, self.peak_in_float32 = kind.peak(), kind.peak("float32")
        self.memory_bytes_per_s, self.clock = 1e9 * kind.memory_gb_per_s, 1e9 * kind.clock_ghz
        self.tpu = PLATFORMS[platform].backend == "tpu"
        self.costs = Costs(self.program, TPU_MEMORY if self.tpu else GPU_MEMORY)
        shards = batch_shards(dict(zip(AXES, sizes_of(config.mesh), strict=True))) * config.mesh.context
        tokens = config.sequences_per_microbatch * config.data.sequence_length // shards
        self._rows = tokens * config.model.experts_per_token  # of a microbatch that come to a device's experts
        stages = [StepLoops(self.program, self.setup, stage, self._rows or None) for stage in range(config.mesh.stage)]
        runs = [list(loops.executed()) for loops in stages]
        seconds = [sum(self.seconds(run) for run in of_stage) for of_stage in runs]
        self.stage = seconds.index(max(seconds))
        self.loops, self.runs, self.busy_seconds = stages[self.stage], runs[self.stage], seconds[self.stage]
        self._times = {(run.instruction.computation, run.instruction.name): run.times for run in self.runs}

    # ------------------------------------------------------------------ one instruction

    def kernel(self, i: Instruction) -> str:
        """The name of a custom call that is a kernel of its own; "" for other instructions."""
        name = target(i)
        if i.opcode != "custom-call" or NO_KERNELS.search(name) or self.costs.cycles(i):
            return ""
        if name == "tpu_custom_call":
            found = re.search(r'kernel_name="?([\w.]+)', i.text) or re.search(r"/([\w.]+)/pallas_call", i.op_name)
            return f"pallas {found[1] if found else i.name.split('.')[0]}"
        mask = re.search(r'"mask_type": ?"(\w+)"', i.text)
        return f"{name} {mask[1]}" if mask else name

    def kernel_flops(self, i: Instruction) -> float:
        """Operations of a kernel once. Of attention: in each product, each query with each earlier key, or with all keys where a cuDNN
        kernel is told of no mask; products by groups multiply each row with one matrix. A backward has five products, or where it is two
        kernels three and four of them (the scores, and the gradients of the weights made from them, in both)."""
        operands = [o for o in self.program.operands(i) if o.shapes and o.types[0] in FLOATS]
        if GROUPED.search(self.kernel(i)):
            return self._grouped(operands, i)
        if not operands:
            return 0.0
        numbers = [o for o in operands if o.shapes[0].count(self.config.data.sequence_length) < 2]
        results = [shape for shape, kind in zip(i.shapes, i.types, strict=True) if kind in FLOATS and len(shape) > 2]
        # A backward reads the gradient, and what the forward left, beside queries, keys and values.
        products = {1: 3, 2: 4}.get(len(results), 5) if len(numbers) > 4 else 2
        tokens = self.config.data.sequence_length // (self.config.mesh.context if self.config.parallel.context == "ring" else 1)
        query = max((math.prod(o.shapes[0]) for o in numbers), default=0)
        return products * 2.0 * query * tokens * (1.0 if "NO_MASK" in i.text else 0.5)

    def _grouped(self, operands: list[Instruction], i: Instruction) -> float:
        """FLOPs of a grouped matrix product. Its capacity exceeds the tokens that arrive; a kernel's cost
        follows those that do, spread evenly."""
        shapes = [shape for made in (*operands, i) for shape in made.shapes]
        stack = next((shape for shape in shapes if len(shape) == 3), None)
        rows = next((shape for shape in shapes if len(shape) == 2), None)
        if stack is None or rows is None:
            return 0.0
        room = next((n for n in rows if n not in stack[1:]), rows[0])
        return 2.0 * min(room, self._rows) * stack[1] * stack[2]

    def seconds(self, run: Run) -> float:
        """Seconds of all runs of an instruction in a step."""
        i = run.instruction
        if i.collective or not run.times:
            return 0.0
        if self.kernel(i):
            return run.times * self.kernel_flops(i) / (self.peak * self.peaks.kernels)
        if self.tpu:
            return run.times * self.costs.cycles(i) / self.clock
        products, peak = self.costs.flops(i), self.peak
        if products and self.costs.in_float32(i):
            peak = self.peak_in_float32
        return run.times * max(products / (peak * self.peaks.products), self.costs.bytes(i) / self.memory_bytes_per_s)

    # ------------------------------------------------------------------ sums

    def by_op(self) -> dict[str, float]:
        """Seconds of each scope, the longest first."""
        found: dict[str, float] = collections.defaultdict(float)
        for run in self.runs:
            found[run.op] += self.seconds(run)
        return {op: seconds for op, seconds in sorted(found.items(), key=lambda item: -item[1]) if seconds > 0}

    @property
    def bubble(self) -> float:
        """The part of the step in which the busiest stage waits, as the table's simulation says."""
        return self.setup.simulation().bubble_fraction_coupled if self.setup.train else 0.0

    def products(self) -> float:
        """Operations of dots and convolutions."""
        return sum(run.times * self.costs.flops(run.instruction) for run in self.runs)

    def memory_bytes(self) -> float:
        """What is read and written of the device's memory."""
        return sum(run.times * self.costs.bytes(run.instruction) for run in self.runs)

    def kernels(self) -> dict[str, Kernel]:
        found: dict[str, Kernel] = collections.defaultdict(Kernel)
        for run in self.runs:
            if name := self.kernel(run.instruction):
                found[name].times += run.times
                found[name].flops += run.times * self.kernel_flops(run.instruction)
        return dict(found)

    def square_arrays(self) -> list[str]:
        """Arrays in the device's memory with a sequence's length in two dimensions (and no matrix of that size), the largest first."""
        tokens, found = self.config.data.sequence_length, {}
        for run in self.runs:
            i = run.instruction
            for shape, kind, size in zip(i.shapes, i.types, i.bytes_of_each, strict=True):
                if shape.count(tokens) >= 2 and i.opcode not in ("parameter", "get-tuple-element", "tuple", "while", "bitcast"):
                    found[f"{kind}{list(shape)} in {run.op}"] = size
        return sorted(found, key=lambda text: -found[text])

    def copies(self) -> dict[str, Any]:
        """Copies and transposes of more than LARGE bytes in loops: bytes, seconds, part of the estimate, the longest."""
        total, seconds, each = 0.0, 0.0, collections.defaultdict[str, float](float)
        for run in self.runs:
            i = run.instruction
            if run.loops and i.bytes > LARGE and self.costs.is_copy(i):
                spent = self.seconds(run)
                total, seconds = total + run.times * i.bytes, seconds + spent
                each[f"{i.types[0]}{list(i.shapes[0])} in {run.op}"] += spent
        longest = {name: round(spent, 4) for name, spent in sorted(each.items(), key=lambda item: -item[1])[:LISTED]}
        return {"bytes": total, "seconds": seconds, "share": seconds / max(self.busy_seconds, 1e-12), "longest": longest}

    # ------------------------------------------------------------------ collectives

    def collectives(self) -> dict[tuple[str, str, str, str], Traffic]:
        """(scope, kind, type, mesh axes) → what crosses."""
        found: dict[tuple[str, str, str, str], Traffic] = collections.defaultdict(Traffic)
        mesh = dict(zip(AXES, sizes_of(self.config.mesh), strict=True))
        hidden = self._hidden_flops()
        for run in self.runs:
            for crossing in crossings(self.program, run.instruction, mesh, self.stage) if run.times else ():
                traffic = found[run.op, crossing.kind, crossing.dtype, "·".join(crossing.axes)]
                beside = hidden.get((run.instruction.computation, run.instruction.name))
                traffic.times += run.times
                traffic.bytes += run.times * crossing.size
                traffic.sent += run.times * crossing.sent
                if beside is not None:
                    traffic.asynchronous += run.times * crossing.size
                    traffic.hidden += run.times * crossing.size * (beside > 0)
                    traffic.flops += run.times * beside
        return dict(found)

    def _hidden_flops(self) -> dict[tuple[str, str], float]:
        """(computation, name) of asynchronous collectives → operations of products between start and done, once."""
        found = {}
        for computation in {run.instruction.computation for run in self.runs if run.times}:
            instructions = self.program.computations[computation]
            for n, i in enumerate(instructions):
                if i.opcode == "fusion" and (flops_beside := self.costs.flops(i)):
                    found[computation, i.name] = float(flops_beside)
                if i.collective and i.starts and '"is_sync":true' not in i.text:
                    done = next((m for m in range(n, len(instructions)) if i.name in instructions[m].operands), n)
                    found[computation, i.name] = sum(self._flops_below(j) for j in instructions[n + 1 : done])
        return found

    def _flops_below(self, i: Instruction) -> float:
        """FLOPs of an instruction; a loop counts its mean number of trips by the table each time it is reached."""
        if i.opcode in ("while", "call", "conditional"):
            reached = self._times.get((i.computation, i.name), 0.0)
            if not reached:
                return 0.0
            body = i.calls.get("body")
            names = [body] if body else list(i.calls.values())
            times = reached * (float(self.loops.trips(i, reached)) if body else 1)
            runs = (run for name in names for run in self.loops.below(name, times, "", 0))
            return sum(run.times * (self.costs.flops(run.instruction) + self._kernel_flops(run.instruction)) for run in runs) / reached
        return self.costs.flops(i) + self._kernel_flops(i)

    def _kernel_flops(self, i: Instruction) -> float:
        return self.kernel_flops(i) if self.kernel(i) else 0.0

    # ------------------------------------------------------------------ all of it

    def as_dict(self) -> dict[str, Any]:
        """All figures as JSON can hold them: bytes, operations, seconds."""
        kernels = self.kernels()
        in_kernels = sum(kernel.flops for kernel in kernels.values())
        collectives = [
            dict(zip(("op", "kind", "type", "axes"), key, strict=True)) | dataclasses.asdict(traffic)
            for key, traffic in sorted(self.collectives().items(), key=lambda item: -item[1].bytes)
        ]
        return {
            "memory": {"arguments": self.compiled.memory["argument"], "temporary": self.compiled.memory["temp"]},
            "stage": self.stage,
            "flops": {"products": self.products(), "kernels": in_kernels},
            "seconds": {
                "busy": self.busy_seconds,
                "bubble": self.bubble,
                "step": self.busy_seconds / (1 - self.bubble),
                "kernels": in_kernels / (self.peak * self.peaks.kernels),
                "by_op": self.by_op(),
            },
            "peaks": dataclasses.asdict(self.peaks),
            "memory_bytes": self.memory_bytes(),
            "kernels": {name: dataclasses.asdict(kernel) for name, kernel in kernels.items()},
            "attention": ", ".join(sorted({PASS.sub("", name) for name, k in kernels.items() if k.flops and not GROUPED.search(name)}))
            or PLAIN,
            "square_arrays": self.square_arrays()[:LISTED],
            "copies": self.copies(),
            "collectives": collectives,
            "compile_seconds": self.compiled.seconds,
        }
