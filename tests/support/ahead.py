"""What XLA made of a tick, compiled for hardware that is not there (programs/topology.py)."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.devices.mesh import AXES, batch_shards, sizes_of
from jaxtrain.planner.programs import topology
from jaxtrain.planner.programs.program import Instruction, Program
from jaxtrain.planner.programs.topology import fitting
from support.ticks_text import holders, moves, opened

DEVICES = 16
# A payload is smaller than an op's other activations, those than a device's part of any matrix;
# what a tick carries, and a device's part of the vocabulary, do not fit into a TPU's vector memory,
# where XLA would keep smaller arrays and copy them in and out.
MODEL = {
    "model.layers": 16,
    "model.width": 4096,
    "model.heads": 32,
    "model.vocab_size": 131072,
    "data.sequence_length": 1024,
    "data.batch_size": 16,
    "mesh.data": 2,
    "mesh.stage": 4,
    "mesh.model": 2,
    "pipeline.microbatches": 8,
    "pipeline.permute": "early",
}


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledTick(topology.Compiled):
    """A compiled step of a pipeline. `payload` and `smallest_matrix` are elements on a device: what
    goes to another stage, and a layer's matrix."""

    payload: int = 0
    smallest_matrix: int = 0

    @functools.cached_property
    def tick(self) -> str:
        """The body of the scan over the table's rows: of the loops around everything, the one with
        permutes in it."""
        loops = [i for i in self.program.inline(self.program.entry) if i.opcode == "while"]
        found = [
            i
            for i in loops
            if any(
                j.collective == "collective-permute" for j in self.program.below(i.calls["body"])
            )
        ]
        if len(found) != 1:
            raise ValueError(f"permutes are in {len(found)} of the loops {[i.name for i in loops]}")
        return found[0].calls["body"]

    @functools.cached_property
    def holders(self) -> set[str]:
        """The names of the tick's loops that are around ops."""
        return holders(self.program, self.tick)

    @property
    def ops(self) -> list[Instruction]:
        return [
            i
            for i in opened(self.program, self.tick, self.holders)
            if i.opcode == "while" and self.program.is_op(i)
        ]

    def multiplies(self, i: Instruction) -> bool:
        """True for a product or what has one inside: a fusion, a loop or a kernel's call."""
        if i.opcode in ("fusion", "while"):
            inside = i.calls["calls" if i.opcode == "fusion" else "body"]
            return any(map(self.multiplies, self.program.computations[inside]))
        kernels = ("gemm", "matmul", "cudnn")
        return i.opcode == "dot" or any(name in i.target for name in kernels)

    @property
    def on_host(self) -> int:
        """Bytes of slots that are to lie in the host's memory."""
        return self.kinds.get("slots on the host", 0)


def compile_step(
    platform: str,
    changes: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    program: str = "gradients",
) -> CompiledTick:
    """A program of the step of MODEL with changes, as `topology.compile_config`."""
    config = configs.replace(Config(), MODEL | dict(changes)).resolve()
    compiled = topology.compile_config(fitting(platform, DEVICES), config, options, program)
    mesh, model = dict(zip(AXES, sizes_of(config.mesh), strict=True)), config.model
    rows = config.sequences_per_microbatch // batch_shards(mesh)
    narrowest = min(
        filter(
            None, (model.heads * model.head_dim, model.kv_heads * model.head_dim, model.mlp_width)
        )
    )
    tokens = rows * config.data.sequence_length // mesh["context"]
    payload, matrix = tokens * model.width, narrowest * model.width
    return CompiledTick(
        **vars(compiled), payload=payload // mesh["model"], smallest_matrix=matrix // mesh["model"]
    )


def host_copies(c: CompiledTick) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Asynchronous copies to the host and from there: for each, its bytes if a product stands
    between its start and its end, else 0, and its bytes."""
    to_host, back = [], []
    for name in {i.computation for i in c.program.below(c.tick)}:
        here = c.program.computations[name]
        for n, i in enumerate(here):
            if 5 not in i.spaces or not i.opcode.endswith("-start"):
                continue
            ends = [m for m, j in enumerate(here) if i.name in j.operands and "-done" in j.opcode]
            size = min(size for size in i.bytes_of_each if size > 64)
            beside = size * any(map(c.multiplies, here[n : min(ends)]))
            (to_host if "update" in i.text else back).append((beside, size))
    return to_host, back


def loop_around(program: Program, op: str) -> Instruction:
    """The innermost loop whose body has the loops of several ops, this one among them."""
    around = [
        i
        for i in program.below(program.entry)
        if i.opcode == "while"
        and {op, "head"} <= {_op_of(j) for j in program.below(i.calls["body"])}
    ]
    return min(around, key=lambda i: len(list(program.below(i.calls["body"]))))


def scope(program: Program, i: Instruction) -> str:
    """The tick's op, of embedding, head, updates, check and permutes, in which an instruction
    stands; "" outside of them. A collective that XLA has joined from several has no name, and is in
    the op of the rest of its computation, if that is one."""
    if i.op_name:
        return _op_of(i)
    names = set(map(_op_of, program.computations[i.computation])) - {""}
    return names.pop() if len(names) == 1 else ""


def _op_of(i: Instruction) -> str:
    name = re.search(r"/(embed|head|\w+_[a-zA-Z]+)/", i.op_name.partition("closed_call")[2])
    return name[1] if name else ""


# --- the checks: each returns what it finds wrong -------------------------------------------------


def _permutes(c: CompiledTick) -> list[Instruction]:
    """The tick's own."""
    return [i for i in c.program.inline(c.tick) if i.collective == "collective-permute"]


def blocking_permutes(c: CompiledTick) -> list[str]:
    """Permutes of the tick that are not in two halves, or that XLA marked as waiting all the same;
    or another number than one each way."""
    found = _permutes(c)
    dones = [
        i.operands[0] for i in c.program.inline(c.tick) if i.opcode == "collective-permute-done"
    ]
    blocking = [
        i.text
        for i in found
        if not i.starts or dones.count(i.name) != 1 or '"is_sync":true' in i.text
    ]
    return blocking + [f"{len(found)} permutes in the tick"] * (len(found) != 2)


def _has_cells(c: CompiledTick, loop: Instruction) -> bool:
    """True for a loop with ops of the stage's own layers in it."""
    names = (i.op_name for i in c.program.below(loop.calls["body"]))
    return any(re.search(r"/[FKRBW]+\d+/", f"{name}/") for name in names)


def late_permutes(c: CompiledTick) -> list[str]:
    """Permutes of the tick that do not start before the first op of the stage's own layers, or are
    done before the last one."""
    here = list(c.program.inline(c.tick))
    ops = [
        n
        for n, i in enumerate(here)
        if i.opcode == "while" and (i.name in c.holders or c.program.is_op(i)) and _has_cells(c, i)
    ]
    if not ops:
        return ["no ops"]
    late = [
        f"{i.name} after an op"
        for n, i in enumerate(here)
        if i.collective == "collective-permute" and n > ops[0]
    ]
    return late + [
        f"{i.name} before an op"
        for n, i in enumerate(here)
        if i.opcode == "collective-permute-done" and n < ops[-1]
    ]


def permutes_in_ops(c: CompiledTick) -> list[str]:
    """Permutes in a loop of the tick."""
    own = {i.name for i in _permutes(c)}
    return [
        i.text
        for i in c.program.below(c.tick)
        if i.collective == "collective-permute" and i.name not in own
    ]


def wide_collectives(c: CompiledTick) -> list[str]:
    """Collectives anywhere in the scan that are as large as a device's part of a matrix."""
    return [
        i.text
        for i in c.program.below(c.tick)
        if i.collective and max(i.sizes) >= c.smallest_matrix
    ]


def large_moves(c: CompiledTick) -> list:
    """What is larger than a payload in the tick outside the ops; or too many payloads: two that
    leave and two that arrive, with a copy or two of each."""
    moved = moves(c.program, c.tick, c.holders)
    total = sum(size * times for (_, size), times in moved.items())
    return [key for key in moved if key[1] > c.payload] + [f"{total} elements in all"] * (
        total > 10 * c.payload
    )


def products_beside(c: CompiledTick, kind: str) -> dict[str, list[str]]:
    """The products that stand between the halves of each large collective of a kind, in the ops:
    its name → their names. Large is a payload or more."""
    beside: dict[str, list[str]] = {}
    for computation in {i.computation for i in c.program.below(c.tick)}:
        begun: set[str] = set()
        for i in c.program.computations[computation]:
            if i.collective == kind and i.starts and max(i.sizes) >= c.payload:
                begun.add(i.name)
                beside[i.name] = []
            elif i.opcode == f"{kind}-done":
                begun.discard(i.operands[0])
            elif i.opcode in ("fusion", "custom-call", "dot") and i.op_name.endswith(
                "/dot_general"
            ):
                for name in begun:
                    beside[name].append(i.name)
    return beside


def covered(c: CompiledTick, kind: str) -> dict[str, list[bool]]:
    """Op of a tick → for each large collective of a kind in it, whether products stand between its
    halves, those of loops over groups of rows included. Large is a payload or more."""
    by_op: dict[str, list[bool]] = {}
    for op in c.ops:
        below = list(c.program.below(op.calls["body"]))
        scopes = (re.search(r"/([FKRBW]+\d[\d_]*)/", i.op_name) for i in below)
        name = next((scope[1] for scope in scopes if scope), "")
        for i in below:
            if i.collective != kind or max(i.sizes) < c.payload:
                continue
            following = c.program.computations[i.computation]
            following = following[following.index(i) + 1 :]
            done = next((n for n, j in enumerate(following) if i.name in j.operands), 0)
            by_op.setdefault(name, []).append(any(map(c.multiplies, following[:done])))
    return by_op


CHECKS: tuple[Callable[[CompiledTick], list], ...] = (
    blocking_permutes,
    late_permutes,
    permutes_in_ops,
    wide_collectives,
    large_moves,
)


def faults(c: CompiledTick) -> dict[str, list]:
    """What is wrong, by check."""
    return {check.__name__: found for check in CHECKS if (found := check(c))}
