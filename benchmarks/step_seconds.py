"""The estimated seconds of a compiled step, with its kernels and collectives; nothing is run.

    TPU      libtpu's cycles at the platform's clock
    H100     the longer of an instruction's FLOPs at a fraction of the peak and its bytes at the
             memory's bandwidth
    kernel   its FLOPs at another fraction of the peak

Collectives take no time in a step; the seconds for which they are exposed are given beside it
(links.py). A `SecondsReader` reads any program, `StepSeconds` that of one of our configs.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

from instruction_costs import GPU_MEMORY, TPU_MEMORY, InstructionCosts
from links import bytes_per_s
from waits import Message, Waits

from jaxtrain.config import Config
from jaxtrain.devices.mesh import AXES, batch_shards, sizes_of
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.planner.layer import hardware
from jaxtrain.planner.layer.links import PERMUTE, sent
from jaxtrain.planner.programs.compile_check import step_loops
from jaxtrain.planner.programs.compiled_collectives import (
    CompiledCollective,
    collectives,
    step_collectives,
)
from jaxtrain.planner.programs.loops import Executed, StepLoops, op_in
from jaxtrain.planner.programs.program import GROUPED, Instruction, pairs
from jaxtrain.planner.programs.topology import PLATFORMS, Compiled

FLOATS = ("bf16", "f16", "f32")
TPU_PRODUCTS = 0.93  # part of the peak that libtpu's estimate of large products comes to


@dataclasses.dataclass
class Traffic:
    """Collectives of a step that are alike.

    bytes         of the unsharded arrays: an all-gather's results, the operands of others
    sent          bytes that a device sends, by the ring algorithms
    asynchronous  bytes of those that have a start and a done, or are fused with products
    hidden        bytes of those that overlap with products
    flops         FLOPs of these products; what overlaps with two collectives counts for both
    exposed       bytes that a step waits for at the links' assumed speed: of each collective, the
                  part of its time for which it is waited for
    seconds       that a step waits for them (waits.py)
    """

    times: float = 0.0
    bytes: float = 0.0
    sent: float = 0.0
    asynchronous: float = 0.0
    hidden: float = 0.0
    flops: float = 0.0
    exposed: float = 0.0
    seconds: float = 0.0


class Scopes:
    """The scopes in which a step's instructions run.

    A scope is an op of the table; `gather` or `reduce` for communication in an op; `tick` for the
    rest of a tick, `other` for the rest of a step. With one stage, R is what B recomputes.
    """

    def __init__(self, loops: StepLoops):
        self.loops = loops
        self._of_loops: dict[tuple[str, ...], str] = {}

    def of(self, i: Instruction, loops: tuple[Instruction, ...]) -> str:
        """The scope of an instruction inside of these loops: by its name, or else the loops'."""
        name = i.op_name
        if not name and i.opcode == "fusion":  # then its root has a name
            name = self.loops.program.root(i.calls["calls"]).op_name
        scope = scope_of(name) or self._inside(loops)
        forward = "jvp(" in name and "transpose(" not in name
        if forward and scope == "B" and not self.loops.op_runs:
            scope = "R"
        return "tick" if scope == "other" and loops and self.loops.op_runs else scope

    def _inside(self, loops: tuple[Instruction, ...]) -> str:
        """The scope of what stands in the last of these loops, each in the one before."""
        key = tuple(loop.name for loop in loops)
        if loops and key not in self._of_loops:
            *outer, loop = loops
            program, scope = self.loops.program, self.of(loop, tuple(outer))
            by_table = program.trip_count(loop) is None and not program.holds_ops(loop)
            if by_table and scope in ("other", "tick"):
                scope = scope_of(f"/{self.loops.op_of_loop(loop)}/") or scope
            self._of_loops[key] = scope
        return self._of_loops.get(key, "other")


@dataclasses.dataclass(frozen=True)
class ScopedRun(Executed):
    """An instruction that runs in the scope of `op`."""

    op: str


def scoped_runs(loops: StepLoops) -> list[ScopedRun]:
    """The instructions that run in a step, with their scopes."""
    scopes = Scopes(loops)
    return [
        ScopedRun(**vars(run), op=scopes.of(run.instruction, run.loops)) for run in loops.executed()
    ]


def scope_of(op_name: str) -> str:
    """The scope that a traced name states, `gather`, `reduce` or its innermost op; "" for none."""
    communicates = re.findall(r"/(gather|reduce)/", op_name)
    return communicates[-1] if communicates else op_in(op_name)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a step that its program's text does not tell.

    sequence:      tokens of a sequence
    keys:          keys of a sequence that a kernel's call attends to at most
    expert_tokens: tokens of a microbatch that reach a device's experts
    """

    sequence: int
    keys: int
    expert_tokens: int = 0


class SecondsReader:
    """The estimated seconds of a program's instructions and collectives on a stage's devices.

    loops:              the program's loops as the stage runs them
    mesh:               axis → size, with partitions numbered in row-major order
    product_efficiency: the fraction of the peak that products in XLA's own code reach (H100)
    kernel_efficiency:  the fraction of the peak that kernels reach
    """

    def __init__(
        self,
        loops: StepLoops,
        mesh: Mapping[str, int],
        platform: str,
        sizes: Sizes,
        product_efficiency: float = 0.7,
        kernel_efficiency: float = 0.5,
    ):
        self.product_efficiency, self.kernel_efficiency = product_efficiency, kernel_efficiency
        device = PLATFORMS[platform]
        self.hardware, self.tpu = hardware.load(device.hardware), device.backend == "tpu"
        self.program, self.mesh, self.sizes = loops.program, mesh, sizes
        self.costs = InstructionCosts(self.program, TPU_MEMORY if self.tpu else GPU_MEMORY)
        self.read(loops)

    def read(self, loops: StepLoops) -> None:
        """Reads the program with these loops, which may be those of another stage."""
        self.loops, self.stage, self.runs = loops, loops.stage, scoped_runs(loops)
        self.busy_seconds = sum(map(self.seconds, self.runs))

    # ------------------------------------------------------------------ one instruction

    def kernel(self, i: Instruction) -> str:
        """The name of a custom call that is a kernel of its own; "" for other instructions."""
        name = i.target
        if not i.is_kernel or self.costs.cycles(i):
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
        in both); our fused one states the keys of a call in its name. A grouped product multiplies
        each token with one matrix; its capacity exceeds the tokens that arrive, and its cost
        follows those that do, spread evenly.
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
            return 2.0 * min(capacity, self.sizes.expert_tokens) * stack[1] * stack[2]
        length = self.sizes.sequence
        arrays = [o.shapes[0] for o in operands if o.shapes[0].count(length) < 2]
        results = [
            shape
            for shape, kind in zip(i.shapes, i.types, strict=True)
            if kind in FLOATS and len(shape) > 2
        ]
        # A backward reads queries, keys, values, the gradient, and what the forward left.
        products = {1: 3, 2: 4}.get(len(results), 5) if len(arrays) > 4 else 2
        of_call = re.search(r"bwd_fused_(\d+)_keys", name)
        keys = int(of_call[1]) if of_call else self.sizes.keys
        masked = 1.0 if "NO_MASK" in i.text else 0.5
        return products * 2.0 * max(map(math.prod, arrays), default=0) * keys * masked

    def product_flops(self, i: Instruction) -> float:
        """FLOPs of an instruction's products and of a kernel, run once."""
        return self.costs.flops(i) + self.kernel_flops(i)

    def seconds(self, run: Executed) -> float:
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
        scopes, messages = Scopes(self.loops), self._messages()
        alone = lambda i: self.seconds(Executed(i, 1.0, ()))
        waits = Waits(self.loops, alone, lambda i: messages.get(i.name)).once
        for c, run, overlapped in step_collectives(self.loops, self.mesh, self.product_flops):
            traffic = by_kind[
                scopes.of(run.instruction, run.loops), c.kind, c.dtype, "·".join(c.axes)
            ]
            size, takes, name = run.times * c.size, self._takes(c), run.instruction.name
            waited = waits.get(name, 0.0) * takes / messages[name].seconds if takes else 0.0
            traffic.exposed += size * waited / takes if takes else 0.0
            traffic.seconds += run.times * waited
            traffic.times += run.times
            traffic.bytes += size
            traffic.sent += run.times * sent(c.kind, c.sending, c.devices)
            if overlapped is not None:
                traffic.asynchronous += size
                traffic.hidden += size * (overlapped > 0)
                traffic.flops += run.times * overlapped
        return dict(by_kind)

    def _messages(self) -> dict[str, Message]:
        """Name of an instruction → its collectives, those that take time."""
        messages = {}
        for run in self.runs:
            i = run.instruction
            found = list(collectives(self.program, i, self.mesh, self.stage))
            if seconds := sum(map(self._takes, found)):
                inner = found[0].instruction
                ways = pairs(inner.text) if inner.collective == PERMUTE else found[0].axes
                messages[i.name] = Message(seconds, f"{ways}")
        return messages

    def _takes(self, collective: CompiledCollective) -> float:
        """Seconds of a collective, run once, at the assumed speed of its links."""
        bytes_sent = sent(collective.kind, collective.sending, collective.devices)
        return bytes_sent / bytes_per_s(self.hardware, self.mesh, collective)


class StepSeconds(SecondsReader):
    """A compiled `train` of a resolved config, as the busiest stage's devices run it."""

    def __init__(
        self,
        config: Config,
        platform: str,
        compiled: Compiled,
        product_efficiency: float = 0.7,
        kernel_efficiency: float = 0.5,
    ):
        self.config, self.compiled, self.setup = config, compiled, make_setup(config)
        mesh = dict(zip(AXES, sizes_of(config.mesh), strict=True))
        shards = batch_shards(mesh) * config.mesh.context
        length = config.data.sequence_length
        tokens = config.sequences_per_microbatch * length // shards
        sizes = Sizes(
            length,
            length // (config.mesh.context if config.parallel.context == "ring" else 1),
            tokens * config.model.experts_per_token,
        )
        stages = [
            step_loops(compiled.program, self.setup, stage, sizes.expert_tokens or None)
            for stage in range(config.mesh.stage)
        ]
        super().__init__(stages[0], mesh, platform, sizes, product_efficiency, kernel_efficiency)
        busiest, most = stages[0], self.busy_seconds
        for loops in stages[1:]:
            self.read(loops)
            if self.busy_seconds > most:
                busiest, most = loops, self.busy_seconds
        if self.loops is not busiest:
            self.read(busiest)
