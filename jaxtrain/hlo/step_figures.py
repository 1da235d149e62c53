"""Figures of a compiled step on a device: seconds, kernels, collectives; nothing is run.

    seconds    TPU: libtpu's cycles at the platform's clock; H100: the longer of an instruction's
               operations at a fraction of the peak and its bytes at the memory's speed. A kernel,
               which has neither, takes its operations at another one. Collectives are left out.

A scope's names are those of the table's ops; with one stage R is what B computes again, and B all
of the backward.
"""

import collections
import dataclasses
import math
import re

from jaxtrain.config import Config
from jaxtrain.costs import hardware
from jaxtrain.devices.mesh import AXES, batch_shards, sizes_of
from jaxtrain.hlo.cost import GPU_MEMORY, TPU_MEMORY, Costs, target
from jaxtrain.hlo.loops import Run, StepLoops
from jaxtrain.hlo.program import Instruction
from jaxtrain.hlo.topology import PLATFORMS, Compiled
from jaxtrain.hlo.traffic import collectives
from jaxtrain.pipeline.setup import make_setup

# Custom calls that compute nothing by themselves, or are counted as products
NO_KERNELS = re.compile(
    r"AllocateBuffer|AssumeGatherIndicesInBound|Sharding|SPMD|__cublas|annotate_device_placement"
    r"|MoveTo|^$|Resource|topk|TopK"
)
GROUPED = re.compile(r"gmm|ragged|grouped")
FLOATS = ("bf16", "f16", "f32")


@dataclasses.dataclass
class Traffic:
    """Collectives alike, in a step.

    bytes         of the unsharded arrays: an all-gather's results, the operands of others
    sent          what a device sends of them, by the ring algorithms
    asynchronous  those of them that have a start and a done, or stand in one fusion with products
    hidden        those that have products between start and done, or in the fusion
    flops         these products; what overlaps with two collectives counts for both
    """

    times: float = 0.0
    bytes: float = 0.0
    sent: float = 0.0
    asynchronous: float = 0.0
    hidden: float = 0.0
    flops: float = 0.0


class StepFigures:
    """The figures of a compiled `train` of a resolved config, for a device of the busiest stage.

    product_efficiency: the fraction of the peak that products in XLA's own code reach (H100)
    kernel_efficiency:  the fraction of it that kernels reach
    """

    def __init__(
        self,
        config: Config,
        platform: str,
        compiled: Compiled,
        product_efficiency: float = 0.7,
        kernel_efficiency: float = 0.5,
    ):
        self.config, self.compiled = config, compiled
        self.product_efficiency, self.kernel_efficiency = product_efficiency, kernel_efficiency
        self.setup, self.program = make_setup(config), compiled.program
        device = PLATFORMS[platform]
        self.hardware, self.tpu = hardware.load(device.hardware), device.backend == "tpu"
        self.costs = Costs(self.program, TPU_MEMORY if self.tpu else GPU_MEMORY)
        self.mesh = dict(zip(AXES, sizes_of(config.mesh), strict=True))
        shards = batch_shards(self.mesh) * config.mesh.context
        tokens = config.sequences_per_microbatch * config.data.sequence_length // shards
        # Those of a microbatch that reach a device's experts.
        self._expert_tokens = tokens * config.model.experts_per_token
        self.busy_seconds = -1.0
        for stage in range(config.mesh.stage):
            loops = StepLoops(self.program, self.setup, stage, self._expert_tokens or None)
            runs = list(loops.executed())
            if (seconds := sum(map(self.seconds, runs))) > self.busy_seconds:
                self.stage, self.loops, self.runs, self.busy_seconds = stage, loops, runs, seconds

    # ------------------------------------------------------------------ one instruction

    def kernel(self, i: Instruction) -> str:
        """The name of a custom call that is a kernel of its own; "" for other instructions."""
        if (
            i.opcode != "custom-call"
            or NO_KERNELS.search(name := target(i))
            or self.costs.cycles(i)
        ):
            return ""
        if name == "tpu_custom_call":
            named = re.search(r'kernel_name="?([\w.]+)', i.text)
            scope = named or re.search(r"/([\w.]+)/pallas_call", i.op_name)
            return f"pallas {scope[1] if scope else i.name.split('.')[0]}"
        mask = re.search(r'"mask_type": ?"(\w+)"', i.text)
        return f"{name} {mask[1]}" if mask else name

    def kernel_flops(self, i: Instruction) -> float:
        """FLOPs of a kernel, run once; 0 for other instructions.

        Attention multiplies, in each product, each query with each earlier key, or with all keys
        where a cuDNN kernel is told of no mask. A backward has five products, or where it is two
        kernels three and four of them (the scores, and the gradients of the weights made from them,
        in both). A grouped product multiplies each token with one matrix; its capacity exceeds the
        tokens that arrive, and its cost follows those that do, spread evenly.
        """
        if not (name := self.kernel(i)):
            return 0.0
        operands = [o for o in self.program.operands(i) if o.shapes and o.types[0] in FLOATS]
        if GROUPED.search(name):
            shapes = [shape for values in (*operands, i) for shape in values.shapes]
            stack = next((shape for shape in shapes if len(shape) == 3), None)
            matrix = next((shape for shape in shapes if len(shape) == 2), None)
            if stack is None or matrix is None:
                return 0.0
            capacity = next((n for n in matrix if n not in stack[1:]), matrix[0])
            return 2.0 * min(capacity, self._expert_tokens) * stack[1] * stack[2]
        length = self.config.data.sequence_length
        arrays = [o.shapes[0] for o in operands if o.shapes[0].count(length) < 2]
        results = [
            shape
            for shape, kind in zip(i.shapes, i.types, strict=True)
            if kind in FLOATS and len(shape) > 2
        ]
        # A backward reads queries, keys, values, the gradient, and what the forward left.
        products = {1: 3, 2: 4}.get(len(results), 5) if len(arrays) > 4 else 2
        keys = length // (self.config.mesh.context if self.config.parallel.context == "ring" else 1)
        masked = 1.0 if "NO_MASK" in i.text else 0.5
        return products * 2.0 * max(map(math.prod, arrays), default=0) * keys * masked

    def product_flops(self, i: Instruction) -> float:
        """FLOPs of an instruction's products and of a kernel, run once."""
        return self.costs.flops(i) + self.kernel_flops(i)

    def seconds(self, run: Run) -> float:
        """Seconds of all runs of an instruction in a step."""
        i = run.instruction
        if i.collective or not run.times:
            return 0.0
        if self.kernel(i):
            return (
                run.times * self.kernel_flops(i) / (self.hardware.peak() * self.kernel_efficiency)
            )
        if self.tpu:
            return run.times * self.costs.cycles(i) / (1e9 * self.hardware.clock_ghz)
        products = self.costs.flops(i)
        float32 = products and self.costs.in_float32(i)
        peak = self.hardware.peak("float32" if float32 else "bfloat16")
        memory_s = self.costs.bytes(i) / (1e9 * self.hardware.memory_gb_per_s)
        return run.times * max(products / (peak * self.product_efficiency), memory_s)

    # ------------------------------------------------------------------ collectives

    def collectives(self) -> dict[tuple[str, str, str, str], Traffic]:
        """(scope, kind, type, mesh axes) → the collectives of a step."""
        by_kind: dict[tuple[str, str, str, str], Traffic] = collections.defaultdict(Traffic)
        overlapped = self._overlapped_flops()
        for run in self.runs:
            flops = overlapped.get((run.instruction.computation, run.instruction.name))
            for c in (
                collectives(self.program, run.instruction, self.mesh, self.stage)
                if run.times
                else ()
            ):
                traffic = by_kind[run.op, c.kind, c.dtype, "·".join(c.axes)]
                size = run.times * c.size
                traffic.times += run.times
                traffic.bytes += size
                traffic.sent += run.times * c.sent
                if flops is not None:
                    traffic.asynchronous += size
                    traffic.hidden += size * (flops > 0)
                    traffic.flops += run.times * flops
        return dict(by_kind)

    def _overlapped_flops(self) -> dict[tuple[str, str], float]:
        """(computation, name) of asynchronous collectives → FLOPs between start and done, run once.

        A loop in between counts with its mean number of trips.
        """
        times = {
            (run.instruction.computation, run.instruction.name): run.times for run in self.runs
        }

        def flops(i: Instruction) -> float:
            reached = times.get((i.computation, i.name))
            if i.opcode != "while" or not reached:
                return self.product_flops(i)
            runs = self.loops.below(
                i.calls["body"], reached * float(self.loops.trips(i, reached)), "", 0
            )
            return sum(run.times * self.product_flops(run.instruction) for run in runs) / reached

        overlapped = {}
        for computation in {computation for (computation, _), often in times.items() if often}:
            instructions = self.program.computations[computation]
            for n, i in enumerate(instructions):
                if i.opcode == "fusion" and (fused := self.costs.flops(i)):
                    overlapped[computation, i.name] = float(fused)
                if i.collective and i.starts and '"is_sync":true' not in i.text:
                    users = (m for m, j in enumerate(instructions) if i.name in j.operands)
                    done = next(users, n)
                    overlapped[computation, i.name] = sum(map(flops, instructions[n + 1 : done]))
        return overlapped
