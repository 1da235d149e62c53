"""What stands in a tick of a compiled program, and what its loops move: the readings of a program
that only tests need."""

import collections
import math
from collections.abc import Container, Iterator

import numpy as np

from jaxtrain.planner.programs.program import FREE, Instruction, Program, pairs


def loop(program: Program, trips: int) -> Instruction:
    """The one loop of the entry computation that has this many trips."""
    counts = [
        (i, program.trip_count(i)) for i in program.inline(program.entry) if i.opcode == "while"
    ]
    matches = [i for i, count in counts if count == trips]
    if len(matches) != 1:
        loops = [(i.name, count) for i, count in counts]
        raise ValueError(
            f"{len(matches)} loops of {trips} trips in the entry computation, whose loops are "
            f"{loops}"
        )
    return matches[0]


def executed(program: Program, name: str, times: int = 1) -> Iterator[tuple[Instruction, int]]:
    """The instructions that run with a computation, each with how often; ValueError for a loop
    whose trips XLA does not know (those of a table: planner/programs/loops.py)."""
    for instruction in program.inline(name):
        yield instruction, times
        if instruction.opcode == "while":
            number = program.trip_count(instruction)
            if number is None:
                raise ValueError(
                    f"a loop without a known number of trips: {instruction.text[:200]}"
                )
            yield from executed(program, instruction.calls["body"], times * number)


def holders(program: Program, tick: str) -> set[str]:
    """The names of the loops in a tick that are around ops."""
    return {i.name for i in program.below(tick) if i.opcode == "while" and program.holds_ops(i)}


def opened(program: Program, name: str, loops: Container[str]) -> Iterator[Instruction]:
    """The instructions of a computation, as `Program.inline`, and after each loop of these names
    those of its body."""
    for instruction in program.inline(name):
        yield instruction
        if instruction.opcode == "while" and instruction.name in loops:
            yield from opened(program, instruction.calls["body"], loops)


def moves(program: Program, body: str, loops: Container[str] = ()) -> collections.Counter:
    """What one trip of a loop's body moves outside of the loops in it (but for `loops`): {(opcode,
    elements): times}.

    An update in place counts what it writes, something asynchronous counts when it is done. XLA's
    own copies are instructions like all others.
    """
    counts: collections.Counter = collections.Counter()
    for instruction in opened(program, body, loops):
        if instruction.opcode not in FREE and not instruction.starts:
            counts.update((instruction.opcode, size) for size in _written(program, instruction))
    return counts


def is_fill(program: Program, name: str) -> bool:
    """Whether the instruction of this name only spreads a constant."""
    instruction = program.named[name]
    if instruction.opcode == "fusion":
        instruction = program.root(instruction.calls["calls"])
    return instruction.opcode in ("broadcast", "constant")


def _written(program: Program, instruction: Instruction) -> list[int]:
    """Elements that an instruction writes, for each of its results."""
    if instruction.opcode == "dynamic-update-slice":
        return [_update_size(program, instruction)]
    if instruction.opcode != "fusion":
        return instruction.sizes
    named, root = program.named, program.root(instruction.calls["calls"])
    results = [named[operand] for operand in root.operands] if root.opcode == "tuple" else [root]
    sizes = []
    for result in results:
        while (
            result.opcode in ("bitcast", "reshape", "copy")
            and named[result.operands[0]].opcode == "dynamic-update-slice"
        ):
            result = named[result.operands[0]]
        if result.opcode == "dynamic-update-slice" and _updates_parameter(result, named):
            sizes.append(_update_size(program, result))
        else:
            sizes += result.sizes
    return sizes


def _updates_parameter(update: Instruction, named: dict[str, Instruction]) -> bool:
    """Whether an update in a fusion is of a buffer that came in, not of one made here."""
    target = named[update.operands[0]]
    while target.opcode in ("bitcast", "reshape"):
        target = named[target.operands[0]]
    return target.opcode == "parameter"


def _update_size(program: Program, update: Instruction) -> int:
    return program.operands(update)[1].sizes[0]


def groups_over(mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> set[frozenset[int]]:
    """The partitions that meet in a collective over these dimensions of a mesh of this shape."""
    ids = np.moveaxis(
        np.arange(math.prod(mesh_shape)).reshape(mesh_shape), axes, range(-len(axes), 0)
    )
    return {
        frozenset(group)
        for group in ids.reshape(-1, math.prod(mesh_shape[axis] for axis in axes)).tolist()
    }


def goes_round(text: str, shape: tuple[int, ...], axis: int) -> bool:
    """Whether a permute along an axis of a mesh goes between its last and its first device too."""
    place = lambda device: int(np.unravel_index(device, shape)[axis])
    return any(abs(place(a) - place(b)) > 1 for a, b in pairs(text))
