"""Reads the text of a compiled program: its computations, what a loop's body moves, which collectives stand where.

Sizes are elements, not bytes: a convert does not change them, and tests choose shapes whose sizes tell them apart.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Container, Iterator, Mapping

import numpy as np

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
# Names for what is there already. A loop's body moves things, its carried values stay where they are.
FREE = frozenset("parameter get-tuple-element tuple bitcast constant while after-all partition-id replica-id opt-barrier".split())
# The scopes of ops: a letter with a chunk, and those that only some stages have.
OP = re.compile(r"[A-Z]\d*|embed|head|embed_gradient")


BYTES = {
    **{"token": 0, "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2},
    **{"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8},
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `shapes`, `types`, `layouts` ("{1,0:T(8,128)}") and `sizes` (elements) are of each array that it makes, `calls` what it
    names, by role; `computation` is where it stands."""

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
        return [math.prod(shape) for shape in self.shapes]

    @property
    def bytes(self) -> int:
        return sum(self.bytes_of_each)

    @property
    def bytes_of_each(self) -> list[int]:
        """Bytes of each array. A type without an entry is an eight-bit float, whose types have many names: one byte an element."""
        return [int(size * BYTES.get(kind, 1)) for size, kind in zip(self.sizes, self.types, strict=True)]

    @property
    def spaces(self) -> list[int]:
        """The memory of each array: 0 is the device's, 1 a TPU's vector memory, 5 the host's."""
        return [int(found[1]) if (found := re.search(r"S\((\d+)\)", layout)) else 0 for layout in self.layouts]

    @property
    def orders(self) -> list[str]:
        """The order in memory of each array's dimensions, the innermost first: "1,0"."""
        return [re.split(r"[:}]", layout.removeprefix("{"))[0] for layout in self.layouts]

    @property
    def collective(self) -> str | None:
        """Which collective this is; None for another instruction, and for the second half of an asynchronous one."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def starts(self) -> bool:
        """Whether this is the first half of something asynchronous; the second has the same name with `-done`."""
        return self.opcode.endswith("-start")

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from: scopes with slashes between them; empty where XLA made it."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""

    @property
    def trip_count(self) -> int | None:
        """Trip count of a while loop where XLA's text says it (Program.trip_count reads the condition where it does not)."""
        found = re.search(r'known_trip_count\\?":\s*\{\\?"n\\?":\\?"(\d+)', self.text)
        return int(found[1]) if found else None

    def groups(self, devices: int) -> set[frozenset[int]]:
        """The partitions that meet in a collective (all of them where the text names none)."""
        listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", self.text)
        if listed and listed[1]:
            return {frozenset(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])}
        if listed:
            return {frozenset(range(devices))}
        if iota := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", self.text):
            ids = _iota(*iota.group(2, 3)).reshape(_integers(iota[1]))
            return {frozenset(map(int, row)) for row in ids}
        # By names of a mesh's axes
        if mesh := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))? \{{('\w+'(?:,'\w+')*)\}}", self.text):
            sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
            ids = _iota(*mesh.group(2, 3)) if mesh[2] else np.arange(math.prod(sizes.values()))
            axes = tuple(list(sizes).index(name) for name in re.findall(r"'(\w+)'", mesh[4]))
            return _groups(ids.reshape(tuple(sizes.values())), axes)
        raise ValueError(f"unknown replica groups: {self.text}")


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def _iota(shape: str, order: str | None) -> np.ndarray:
    """ "2,4" and "1,0" → the numbers from 0 on in this shape, transposed."""
    ids = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return ids.transpose(_integers(order)) if order else ids


_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_CALL = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")


def _instruction(line: str, computation: str) -> Instruction | None:
    found = _LINE.match(line)
    if not found:
        return None
    root, name, rest = found.groups()
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, tail = rest[end:].strip().partition("(")
    inside = tail[: _closing("(" + tail, 0) - 1]
    arrays = _ARRAY.findall(rest[:end])
    types, layouts = tuple(t for t, *_ in arrays), tuple(layout for *_, layout in arrays)
    shapes = tuple(_integers(dims) if dims else () for _, dims, _ in arrays)
    calls = dict(_CALL.findall(tail))
    if branches := re.search(r"branch_computations=\{([^}]*)\}", tail):
        calls |= {f"branch{i}": part.strip().lstrip("%") for i, part in enumerate(branches[1].split(","))}
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, computation, opcode, shapes, types, layouts, operands, calls, bool(root), line.strip())


def _closing(text: str, start: int) -> int:
    """The index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"no closing bracket in {text[:80]}")


class Program:
    """computations: name → instructions; `entry` is the name of the first to run."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        entry = name = None
        for line in re.sub(r"\n(?=\"|}})", "", text).splitlines():  # a kernel's metadata may go over several lines
            if head := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
                name = head[2]
                self.computations[name] = []
                entry = name if head[1] else entry
            elif name and (made := _instruction(line, name)):
                self.computations[name].append(made)
        if entry is None:
            raise ValueError("this is no program: it has no entry")
        self.entry: str = entry
        self.named = {name: {i.name: i for i in instructions} for name, instructions in self.computations.items()}

    def below(self, name: str) -> Iterator[Instruction]:
        """Every instruction of a computation and of all that it calls, each computation once."""
        todo, seen = [name], set()
        while todo:
            current = todo.pop()
            if current not in seen and current in self.computations:
                seen.add(current)
                for instruction in self.computations[current]:
                    yield instruction
                    todo += instruction.calls.values()

    def inline(self, name: str, opened: Container[str] = ()) -> Iterator[Instruction]:
        """The instructions of a computation; in place of a call or a conditional those of what it names, and after a loop whose name
        is in `opened` those of its body."""
        for instruction in self.computations[name]:
            if instruction.opcode in ("call", "conditional"):
                for called in instruction.calls.values():
                    yield from self.inline(called, opened)
            else:
                yield instruction
                if instruction.opcode == "while" and instruction.name in opened:
                    yield from self.inline(instruction.calls["body"], opened)

    def executed(self, name: str, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """The instructions that run with a computation, each with how often; ValueError for a loop whose trips XLA does not know
        (loops.py knows those of a table)."""
        for instruction in self.inline(name):
            yield instruction, times
            if instruction.opcode == "while":
                number = self.trip_count(instruction)
                if number is None:
                    raise ValueError(f"a loop without a known number of trips: {instruction.text[:200]}")
                yield from self.executed(instruction.calls["body"], times * number)

    def operand_bytes(self, instruction: Instruction) -> list[int]:
        """Bytes of each operand of an instruction."""
        return [operand.bytes for operand in self.operands(instruction)]

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """What makes the values that an instruction reads."""
        return [self.named[instruction.computation][operand] for operand in instruction.operands]

    def root(self, computation: str) -> Instruction:
        """What a computation returns."""
        return next(i for i in self.computations[computation] if i.root)

    def waits_for_a_flag(self, loop: Instruction) -> bool:
        """Whether a loop goes on as long as something that it carries is true, and counts nothing."""
        found = self.root(loop.calls["condition"])
        while found.opcode == "fusion" or (found.opcode in ("copy", "bitcast") and found.operands):
            found = self.root(found.calls["calls"]) if found.opcode == "fusion" else self.operands(found)[0]
        return found.opcode in ("get-tuple-element", "parameter")

    def trip_count(self, loop: Instruction) -> int | None:
        """Trip count of a while loop, by XLA's text or by a condition `counter < limit`; the counter goes up by 1 from a known start."""
        if loop.trip_count is not None:
            return loop.trip_count
        compare = self.root(loop.calls["condition"])
        if compare.opcode != "compare" or "direction=LT" not in compare.text:
            return None
        counter, limit = self.operands(compare)
        index = re.search(r"index=(\d+)", counter.text)
        if counter.opcode != "get-tuple-element" or index is None:
            return None
        start, end = self._carried_number(loop, int(index[1])), self._number(limit, loop)
        return None if start is None or end is None else max(0, end - start)

    def _number(self, i: Instruction, loop: Instruction | None = None) -> int | None:
        """The integer that an instruction is, if that is a constant; in a condition, what its `loop` carries counts as well."""
        if i.opcode == "constant":
            found = re.search(r"constant\((-?\d+)\)", i.text)
            return int(found[1]) if found else None
        if i.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
            return self._number(self.operands(i)[0], loop)
        if i.opcode == "get-tuple-element" and (index := re.search(r"index=(\d+)", i.text)):
            if loop is not None:
                return self._carried_number(loop, int(index[1]))
            source = self.operands(i)[0]
            return self._number(self.operands(source)[int(index[1])]) if source.opcode == "tuple" else None
        return None

    def _carried_number(self, loop: Instruction, index: int) -> int | None:
        """The constant with which a loop begins at this place of what it carries."""
        start = self.operands(loop)[0]
        return self._number(self.operands(start)[index]) if start.opcode == "tuple" else None

    def scopes(self, loop: Instruction) -> set[str]:
        """The names of the scopes that stand directly in a loop's body."""
        before = f"{loop.op_name}/body/"
        names = (i.op_name for i in self.below(loop.calls["body"]))
        return {name.removeprefix(before).split("/")[0] for name in names if name.startswith(before)}

    def is_op(self, loop: Instruction) -> bool:
        """Whether a loop of the tick is an op, by the scope in it."""
        return any(OP.fullmatch(scope) for scope in self.scopes(loop))

    def holds_ops(self, loop: Instruction) -> bool:
        """Whether a loop is none itself, but has ops in it."""
        inside = (i for i in self.inline(loop.calls["body"]) if i.opcode == "while")
        return not self.is_op(loop) and any(self.is_op(i) or self.holds_ops(i) for i in inside)

    def holders(self, tick: str) -> set[str]:
        """The names of the loops in a tick that are around ops."""
        return {i.name for i in self.below(tick) if i.opcode == "while" and self.holds_ops(i)}

    def loop(self, trips: int) -> Instruction:
        """The one loop of the entry computation that has this many trips."""
        found = [i for i in self.inline(self.entry) if i.opcode == "while" and i.trip_count == trips]
        if len(found) != 1:
            loops = [(i.name, i.trip_count) for i in self.inline(self.entry) if i.opcode == "while"]
            raise ValueError(f"{len(found)} loops of {trips} trips in the entry computation, whose loops are {loops}")
        return found[0]

    def moved(self, body: str, opened: Container[str] = ()) -> collections.Counter:
        """What one trip of a loop's body moves outside of the loops in it (but for those `opened`): {(opcode, elements): times}.

        An update in place counts what it writes, something asynchronous counts when it is done. XLA's own copies are instructions like
        all others.
        """
        counts: collections.Counter = collections.Counter()
        for instruction in self.inline(body, opened):
            if instruction.opcode not in FREE:
                counts.update((instruction.opcode, size) for size in self._written(instruction))
        return counts

    def is_fill(self, name: str) -> bool:
        """Whether the instruction of this name only spreads a constant."""
        made = next(i for c in self.computations.values() for i in c if i.name == name)
        if made.opcode == "fusion":
            made = self.root(made.calls["calls"])
        return made.opcode in ("broadcast", "constant")

    def _written(self, instruction: Instruction) -> list[int]:
        """Elements that an instruction writes, for each of its results."""
        if instruction.starts:
            return []
        if instruction.opcode == "dynamic-update-slice":
            return [self._update_size(instruction)]
        if instruction.opcode != "fusion":
            return instruction.sizes
        named, root = self.named[instruction.calls["calls"]], self.root(instruction.calls["calls"])
        results = [named[operand] for operand in root.operands] if root.opcode == "tuple" else [root]
        sizes = []
        for result in results:
            while result.opcode in ("bitcast", "reshape", "copy") and named[result.operands[0]].opcode == "dynamic-update-slice":
                result = named[result.operands[0]]
            if result.opcode == "dynamic-update-slice" and self._updates_parameter(result, named):
                sizes.append(self._update_size(result))
            else:
                sizes += result.sizes
        return sizes

    @staticmethod
    def _updates_parameter(update: Instruction, named: dict[str, Instruction]) -> bool:
        """Whether an update in a fusion is of a buffer that came in, not of one made here."""
        target = named[update.operands[0]]
        while target.opcode in ("bitcast", "reshape"):
            target = named[target.operands[0]]
        return target.opcode == "parameter"

    def _update_size(self, update: Instruction) -> int:
        return self.operands(update)[1].sizes[0]


def groups_over(mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> set[frozenset[int]]:
    """The partitions that meet in a collective over these dimensions of a mesh of this shape."""
    return _groups(np.arange(math.prod(mesh_shape)).reshape(mesh_shape), axes)


def _groups(ids: np.ndarray, axes: tuple[int, ...]) -> set[frozenset[int]]:
    size = math.prod(ids.shape[i] for i in axes)
    return {frozenset(map(int, group)) for group in np.moveaxis(ids, axes, range(-len(axes), 0)).reshape(-1, size)}


def pairs(text: str) -> list[tuple[int, int]]:
    """The partitions between which a permute sends."""
    listed = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text)
    assert listed is not None, text
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", listed[1])]


def along(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """(the axes of a mesh along which the partitions of a collective differ, how many of them meet)."""
    shape = tuple(mesh.values())
    places = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), axis=-1)  # [devices, axes]
    if instruction.collective == "collective-permute":
        met = [frozenset(pair) for pair in pairs(instruction.text)]
    else:
        met = list(instruction.groups(math.prod(shape)))
    differ = np.zeros(len(shape), bool)
    for group in met:
        differ |= (places[list(group)] != places[min(group)]).any(axis=0)
    return tuple(name for name, different in zip(mesh, differ, strict=True) if different), len(met[0])


def goes_round(text: str, shape: tuple[int, ...], axis: int) -> bool:
    """Whether a permute along an axis of a mesh goes between its last and its first device too."""
    place = lambda device: int(np.unravel_index(device, shape)[axis])
    return any(abs(place(a) - place(b)) > 1 for a, b in pairs(text))
