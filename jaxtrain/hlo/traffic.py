"""Collectives of a compiled program, read from its text in the terms of costs/collectives.py."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from jaxtrain.costs.collectives import GATHER, PERMUTE, RAGGED, sent
from jaxtrain.hlo.program import Instruction, Program, along, pairs

FEW = 128  # bytes: losses, norms and counts


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """A collective, run once.

    instruction: the collective itself, which may stand in a fusion
    axes:        of the mesh, along which the devices that meet differ
    devices:     how many meet; of a permute, how many there are along its axis
    size:        bytes of the unsharded arrays: an all-gather's results, the operands of others
    sent:        bytes that a device of the stage sends, by the ring algorithms
    """

    instruction: Instruction
    kind: str
    dtype: str
    axes: tuple[str, ...]
    devices: int
    size: float
    sent: float


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
        if kind == "all-reduce" and "all-reduce-scatter" in fusion:  # how TPUs reduce and scatter
            kind = "reduce-scatter"
        axes, devices = along(inner, mesh)
        operands = program.operands(inner)
        arrays = [operand.bytes * (devices if kind == GATHER else 1) for operand in operands]
        # The larger array, of what is sent or the capacity for what arrives, exceeds what travels.
        if kind == RAGGED:
            arrays = [min(arrays[:2])]
        size = sending = float(sum(array for array in arrays if array > FEW))
        if not size:
            continue
        if kind == PERMUTE:
            devices = mesh[axes[0]]
            place = [stage if name == "stage" else 0 for name in mesh]
            device = int(np.ravel_multi_index(place, tuple(mesh.values())))
            if device not in dict(pairs(inner.text)):
                sending = 0.0
        yield CompiledCollective(
            inner, kind, operands[0].types[0], axes, devices, size, sent(kind, sending, devices)
        )
