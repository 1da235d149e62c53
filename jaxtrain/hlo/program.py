"""A compiled program's text as instructions: computations, loops and trip counts, collectives.

Sizes are elements, not bytes: a convert does not change them, and tests choose shapes whose sizes
tell them apart.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    *("collective-broadcast", "ragged-all-to-all"),
)
# Opcodes that compute and move nothing: names of values, and loops, whose bodies do the work.
FREE = frozenset(
    """parameter get-tuple-element tuple bitcast constant while after-all partition-id replica-id
    opt-barrier""".split()
)
# Scopes of ops: a letter with a unit, and those that only some stages have.
OP = re.compile(r"[A-Z]\d*|embed|head|embed_gradient")
BYTES = {
    **{"token": 0, "s4": 0.5, "u4": 0.5, "pred": 1, "s8": 1, "u8": 1},
    **{"s16": 2, "u16": 2, "bf16": 2, "f16": 2},
    **{"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8},
}
# ROOT, name, what it makes, opcode, operands, attributes. The bracket after the operands is the
# first that an attribute or the line's end follows: others are of layouts.
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(, [\w\-]+=.*|)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_CALL = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    computation:            where it stands
    shapes, types, layouts: of each array that it makes; a layout is "{1,0:T(8,128)}"
    calls:                  computations that it names, by role
    """

    name: str
    computation: str
    opcode: str
    shapes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    layouts: tuple[str, ...]
    operands: tuple[str, ...]
    calls: dict[str, str]
    root: bool
    text: str

    @property
    def sizes(self) -> list[int]:
        """Elements of each array."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def bytes(self) -> int:
        return sum(self.bytes_of_each)

    @property
    def bytes_of_each(self) -> list[int]:
        """Bytes of each array; BYTES lacks eight-bit floats, whose types have many names."""
        return [
            int(size * BYTES.get(kind, 1))
            for size, kind in zip(self.sizes, self.types, strict=True)
        ]

    @property
    def spaces(self) -> list[int]:
        """The memory of each array: 0 is the device's, 1 a TPU's vector memory, 5 the host's."""
        spaces = (re.search(r"S\((\d+)\)", layout) for layout in self.layouts)
        return [int(space[1]) if space else 0 for space in spaces]

    @property
    def collective(self) -> str | None:
        """The kind of collective; None for other instructions, and for an asynchronous end."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def starts(self) -> bool:
        """Whether this is the first half of something asynchronous; the second is its `-done`."""
        return self.opcode.endswith("-start")

    @property
    def op_name(self) -> str:
        """Scopes of the traced program, with slashes between them; "" for what XLA made."""
        name = re.search(r'op_name="([^"]*)"', self.text)
        return name[1] if name else ""

    def groups(self, devices: int) -> set[frozenset[int]]:
        """Groups of partitions that meet in a collective. ValueError for an unknown notation."""
        if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", self.text):
            groups = re.findall(r"\{([\d,]+)\}", listed[1])
            return {frozenset(_integers(group)) for group in groups} or {frozenset(range(devices))}
        if iota := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", self.text):
            ids = _iota(*iota.group(2, 3)).reshape(_integers(iota[1]))
        elif mesh := re.search(
            rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))? "
            rf"\{{('\w+'(?:,'\w+')*)\}}",
            self.text,
        ):
            sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
            met = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", mesh[4])]
            others = [axis for axis in range(len(sizes)) if axis not in met]
            ids = _iota(mesh[2] or str(math.prod(sizes.values())), mesh[3])
            ids = ids.reshape(tuple(sizes.values())).transpose(others + met)
            ids = ids.reshape(-1, math.prod(ids.shape[len(others) :]))
        else:
            raise ValueError(f"unknown replica groups: {self.text}")
        return {frozenset(group) for group in ids.tolist()}


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _iota(shape: str, order: str | None) -> np.ndarray:
    """The numbers from 0 on in a shape such as "2,4", transposed by an order such as "1,0"."""
    ids = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return ids.transpose(_integers(order)) if order else ids


def _instruction(line: str, computation: str) -> Instruction | None:
    """The instruction of a line; None if it has none."""
    match = _LINE.match(line)
    if not match:
        return None
    root, name, made, opcode, operands, attributes = match.groups()
    arrays, calls = _ARRAY.findall(made), dict(_CALL.findall(attributes))
    if branches := re.search(r"branch_computations=\{([^}]*)\}", attributes):
        calls |= {f"branch{i}": name.strip(" %") for i, name in enumerate(branches[1].split(","))}
    return Instruction(
        name,
        computation,
        opcode,
        shapes=tuple(_integers(dimensions) if dimensions else () for _, dimensions, _ in arrays),
        types=tuple(kind for kind, _, _ in arrays),
        layouts=tuple(layout for _, _, layout in arrays),
        operands=tuple(re.findall(r"%([\w.\-]+)", operands)),
        calls=calls,
        root=bool(root),
        text=line.strip(),
    )


class Program:
    """A compiled program. computations: name → instructions; entry: the first one to run."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = name = ""
        # A kernel's metadata may go over several lines.
        for line in re.sub(r"\n(?=\"|}})", "", text).splitlines():
            if head := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
                name = head[2]
                self.computations[name] = []
                self.entry = name if head[1] else self.entry
            elif name and (instruction := _instruction(line, name)):
                self.computations[name].append(instruction)
        if not self.entry:
            raise ValueError("this is no program: it has no entry")
        self.named = {name: {i.name: i for i in body} for name, body in self.computations.items()}

    def below(self, name: str) -> Iterator[Instruction]:
        """Every instruction of a computation and of all that it calls, each computation once."""
        pending, seen = [name], set()
        while pending:
            current = pending.pop()
            if current not in seen and current in self.computations:
                seen.add(current)
                for instruction in self.computations[current]:
                    yield instruction
                    pending += instruction.calls.values()

    def inline(self, name: str) -> Iterator[Instruction]:
        """The instructions of a computation; for a call or a conditional those of what it names."""
        for instruction in self.computations[name]:
            if instruction.opcode in ("call", "conditional"):
                for called in instruction.calls.values():
                    yield from self.inline(called)
            else:
                yield instruction

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose values an instruction reads."""
        return [self.named[instruction.computation][operand] for operand in instruction.operands]

    def root(self, computation: str) -> Instruction:
        """The instruction whose value a computation returns."""
        return next(i for i in self.computations[computation] if i.root)

    def waits_for_a_flag(self, loop: Instruction) -> bool:
        """Whether a loop goes on while a flag that it carries is true, and counts nothing."""
        goes_on = self.root(loop.calls["condition"])
        while goes_on.opcode in ("fusion", "copy", "bitcast"):
            fused = goes_on.opcode == "fusion"
            goes_on = self.root(goes_on.calls["calls"]) if fused else self.operands(goes_on)[0]
        return goes_on.opcode in ("get-tuple-element", "parameter")

    def trip_count(self, loop: Instruction) -> int | None:
        """Trip count of a while loop, by XLA's text or by its condition; None if neither has it.

        A condition is `counter < limit`, from a constant to a constant; the counter goes up by 1.
        """
        if known := re.search(r'known_trip_count\\?":\s*\{\\?"n\\?":\\?"(\d+)', loop.text):
            return int(known[1])
        compare = self.root(loop.calls["condition"])
        if compare.opcode != "compare" or "direction=LT" not in compare.text:
            return None
        start, limit = (self._constant(operand, loop) for operand in self.operands(compare))
        return None if start is None or limit is None else max(0, limit - start)

    def _constant(self, i: Instruction, loop: Instruction | None = None) -> int | None:
        """The integer constant that an instruction is, if any; in a condition, at the loop's
        begin."""
        if i.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
            return self._constant(self.operands(i)[0], loop)
        if i.opcode == "get-tuple-element":
            index, values = re.search(r"index=(\d+)", i.text), self.operands(loop or i)[0]
            return (
                self._constant(self.operands(values)[int(index[1])])
                if index and values.opcode == "tuple"
                else None
            )
        number = re.search(r"constant\((-?\d+)\)", i.text) if i.opcode == "constant" else None
        return int(number[1]) if number else None

    def is_op(self, loop: Instruction) -> bool:
        """Whether a loop of the tick is an op, by the scopes that stand directly in its body."""
        body = f"{loop.op_name}/body/"
        names = (i.op_name for i in self.below(loop.calls["body"]) if i.op_name.startswith(body))
        return any(OP.fullmatch(name.removeprefix(body).split("/")[0]) for name in names)

    def holds_ops(self, loop: Instruction) -> bool:
        """Whether a loop is no op itself, but has ops in it."""
        loops = (i for i in self.inline(loop.calls["body"]) if i.opcode == "while")
        return not self.is_op(loop) and any(self.is_op(i) or self.holds_ops(i) for i in loops)


def pairs(text: str) -> list[tuple[int, int]]:
    """The (sending, receiving) partitions of a permute."""
    listed = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text)
    assert listed is not None, text
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", listed[1])]


def along(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """(the mesh axes along which a collective's partitions differ, how many partitions meet)."""
    shape = tuple(mesh.values())
    permutes = instruction.collective == "collective-permute"
    groups = pairs(instruction.text) if permutes else instruction.groups(math.prod(shape))
    places = [np.unravel_index(list(group), shape) for group in groups]  # [axes][partitions]
    differ = lambda axis: any((place[axis] != place[axis][0]).any() for place in places)
    return tuple(name for axis, name in enumerate(mesh) if differ(axis)), len(places[0][0])
