"""What the collectives of a compiled program send, read from its text in the terms of costs/collectives.py."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.costs.collectives import GATHER, PERMUTE, RAGGED, sent
from jaxtrain.hlo.program import Instruction, Program, along, pairs

FEW = 128  # bytes: losses, norms and counts


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A collective once.

    instruction: the collective itself, which may stand in a fusion
    axes:        of the mesh, along which the devices that meet differ
    devices:     how many meet; of a permute, how many there are along its axis
    size:        bytes of the whole arrays: an all-gather's results, the operands of others
    sent:        bytes that a device of the stage sends, by the ring algorithms
    """

    instruction: Instruction
    kind: str
    dtype: str
    axes: tuple[str, ...]
    devices: int
    size: float
    sent: float


def crossings(program: Program, i: Instruction, mesh: Mapping[str, int], stage: int = 0) -> Iterator[Crossing]:
    """The collectives of an instruction for a device of a stage, without arrays of a few bytes: one or none, and those in a fusion."""
    for inner, kind, arrays in collectives(program, i):
        axes, devices = along(inner, mesh)
        whole = devices if kind == GATHER else 1
        if kind == RAGGED:  # there and back, either what is sent or the room for what arrives is larger than what travels
            arrays = [min(arrays[:2])]
        size = float(sum(array * whole for array in arrays if array * whole > FEW))
        if not size:
            continue
        sends = size
        if kind == PERMUTE:
            devices = mesh[axes[0]]
            device = int(np.ravel_multi_index([stage if name == "stage" else 0 for name in mesh], tuple(mesh.values())))
            sends = size if device in dict(pairs(inner.text)) else 0.0
        yield Crossing(inner, kind, program.operands(inner)[0].types[0], axes, devices, size, sent(kind, sends, devices))


def collectives(program: Program, i: Instruction) -> Iterator[tuple[Instruction, str, list[int]]]:
    """(the collective, its kind, bytes of its operands) of an instruction, or of a fusion around one. TPUs reduce and scatter in a fusion
    of an all-reduce."""
    if i.collective:
        yield i, i.collective, program.operand_bytes(i)
    elif i.opcode == "fusion":
        for inner in program.computations.get(i.calls["calls"], []):
            if inner.collective:
                scatters = inner.collective == "all-reduce" and "all-reduce-scatter" in i.calls["calls"]
                yield inner, "reduce-scatter" if scatters else inner.collective, program.operand_bytes(inner)


def describe(t: Mapping[str, Any]) -> str:
    """A line about collectives alike, of `StepFigures.as_dict`."""
    asynchronous, beside = t["asynchronous"] / t["bytes"], t["hidden"] / t["bytes"]
    overlap = "not asynchronous"
    if asynchronous:
        overlap = f"{asynchronous:.0%} asynchronous, {beside:.0%} beside products ({t['flops'] / 1e12:.1f} TF)"
    kind = f"{t['op']:9} {t['kind']:18} {t['type']:5} {t['axes']:12}"
    return f"{kind} {t['times']:6.0f} × {t['bytes'] / t['times'] / 1e6:8.1f} MB, {t['bytes'] / 1e9:7.2f} GB; {overlap}"
