"""Collectives of a compiled step, read from its text. Kinds are XLA's opcodes, by which
planner/layer/collective_time.py names them, too."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jaxtrain.planner.programs.loops import Executed, StepLoops
from jaxtrain.planner.programs.program import Instruction, Program, along, pairs

FEW = 128  # bytes: losses, norms and counts


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """A collective, run once.

    instruction: the collective itself, which may be fused into another instruction
    kind:        the opcode; "collective-permute" for all that goes to the next device
    axes:        the mesh axes along which a group's devices differ
    devices:     the number of a group's devices; for a permute, of those along its axis
    size:        bytes of the unsharded arrays: an all-gather's results, the operands of others
    sending:     the part of `size` in which a device of the stage takes part: 0 for a permute that
                 does not begin on it, else all
    """

    instruction: Instruction
    kind: str
    dtype: str
    axes: tuple[str, ...]
    devices: int
    size: float
    sending: float


def step_collectives(
    loops: StepLoops, mesh: Mapping[str, int], flops: Callable[[Instruction], float]
) -> Iterator[tuple[CompiledCollective, Executed, float | None]]:
    """The collectives of a step for a device of the loops' stage: each with the instruction that it
    is, or that fuses it, and FLOPs between its start and its done, or fused with it, run once; None
    for a synchronous collective.

    flops: FLOPs of an instruction, run once
    """
    runs = list(loops.executed())
    times = {(run.instruction.computation, run.instruction.name): run.times for run in runs}

    def overlapped(i: Instruction) -> float | None:
        """FLOPs that overlap with an instruction's collectives; loops count by their mean trips."""
        if i.opcode == "fusion":
            return flops(i) or None
        if not i.starts or '"is_sync":true' in i.text:
            return None
        following = loops.program.computations[i.computation]
        following = following[following.index(i) + 1 :]
        done = next((n for n, user in enumerate(following) if i.name in user.operands), 0)
        return sum(map(once, following[:done]))

    def once(i: Instruction) -> float:
        """FLOPs of an instruction, run once; those of a loop with all its trips."""
        reached = times.get((i.computation, i.name))
        if i.opcode != "while" or not reached:
            return flops(i)
        inside = loops.executed(i.calls["body"], reached * float(loops.trips(i, reached)))
        return sum(run.times * flops(run.instruction) for run in inside) / reached

    for run in runs:
        for collective in collectives(loops.program, run.instruction, mesh, loops.stage):
            if run.times:
                yield collective, run, overlapped(run.instruction)


def collectives(
    program: Program, i: Instruction, mesh: Mapping[str, int], stage: int = 0
) -> Iterator[CompiledCollective]:
    """The collectives of an instruction for a device of a stage: itself, or those that it fuses.

    Arrays of at most FEW bytes are left out.
    """
    fusion = i.calls["calls"] if i.opcode == "fusion" else ""
    for inner in program.computations[fusion] if fusion else [i]:
        if (kind := inner.collective) is None:
            continue
        if kind == "all-reduce" and "all-reduce-scatter" in fusion:  # a TPU's reduce-scatter
            kind = "reduce-scatter"
        axes, devices = along(inner, mesh)
        operands = program.operands(inner)
        arrays = [operand.bytes * (devices if kind == "all-gather" else 1) for operand in operands]
        # The operand, and the capacity for what arrives: the larger one exceeds what travels.
        if kind == "ragged-all-to-all":
            arrays = [min(arrays[:2])]
        # That of `context` sends everything to the next device (parallel/attention/ring.py).
        if kind == "ragged-all-to-all" and axes == ("context",):
            kind = "collective-permute"
        size = sending = float(sum(array for array in arrays if array > FEW))
        if not size:
            continue
        if inner.collective == "collective-permute":
            devices = mesh[axes[0]]
            place = [stage if name == "stage" else 0 for name in mesh]
            device = int(np.ravel_multi_index(place, tuple(mesh.values())))
            if device not in dict(pairs(inner.text)):
                sending = 0.0
        yield CompiledCollective(inner, kind, operands[0].types[0], axes, devices, size, sending)
