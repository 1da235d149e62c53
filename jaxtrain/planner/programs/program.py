"""A compiled program as instructions, read from its text: computations, loops and their trip
counts, collectives.

The text is XLA's for CPU, GPU and TPU (`Compiled.as_text()`), after optimization and scheduling.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    *("collective-broadcast", "ragged-all-to-all"),
)
# Opcodes that neither compute nor move anything: names of values, and loops, whose bodies do.
FREE = frozenset(
    """parameter get-tuple-element tuple bitcast constant while after-all partition-id replica-id
    opt-barrier""".split()
)
GEMM = re.compile(r"__cublas\$|__triton_gemm|__cudnn\$gemm")  # calls of a library for a product
# Targets of custom calls that compute nothing by themselves, or are calls of a library.
NO_KERNELS = re.compile(
    r"AllocateBuffer|AssumeGatherIndicesInBound|Sharding|SPMD|__cublas|annotate_device_placement"
    r"|MoveTo|^$|Resource|topk|TopK|PrepareAsyncCall"
)
GROUPED = re.compile(r"gmm|ragged|grouped")  # kernels of experts' products
# Scopes of a tick's ops: a letter and the unit's number, or an op of embedding and head.
OP = re.compile(r"[A-Z]\d*|embed|head|embed_gradient")
BYTES = {  # of an element, by type
    **{"token": 0, "s4": 0.5, "u4": 0.5, "pred": 1, "s8": 1, "u8": 1},
    **{"s16": 2, "u16": 2, "bf16": 2, "f16": 2},
    **{"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8},
}
# ROOT, name, result, opcode, operands, attributes. The operands end at the first bracket that an
# attribute or the line's end follows: earlier brackets belong to layouts.
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(, [\w\-]+=.*|)$")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")  # the first line of a computation
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_CALL = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_PART_OF_MESH = r"'(\w+)'(?::\((\d+)\)(\d+))?"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    computation:            the name of the computation in which it stands
    shapes, types, layouts: one entry for each array of the result; a layout is "{1,0:T(8,128)}"
    operands:               names of the instructions whose values it reads
    calls:                  names of the computations that it calls, by role
    root:                   the computation returns its value
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
        """The number of elements of each array."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def bytes(self) -> int:
        return sum(self.bytes_of_each)

    @property
    def bytes_of_each(self) -> list[int]:
        """Bytes of each array. A type that BYTES lacks is one of the many eight-bit floats."""
        return [
            int(size * BYTES.get(dtype, 1))
            for size, dtype in zip(self.sizes, self.types, strict=True)
        ]

    @property
    def spaces(self) -> list[int]:
        """The memory space of each array: 0 the device's, 1 a TPU's vector memory, 5 the host's."""
        spaces = (re.search(r"S\((\d+)\)", layout) for layout in self.layouts)
        return [int(space[1]) if space else 0 for space in spaces]

    @property
    def collective(self) -> str | None:
        """The kind of collective; None for other instructions and for the end of one (`-done`)."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def starts(self) -> bool:
        """True for the start of an asynchronous operation, whose end is a `-done`."""
        return self.opcode.endswith("-start")

    @property
    def target(self) -> str:
        """The target of a custom call; "" for other instructions."""
        name = re.search(r'custom_call_target="([^"]*)"', self.text)
        return name[1] if name else ""

    @property
    def is_kernel(self) -> bool:
        """True for a call of a kernel (Pallas, cuDNN), whose FLOPs the program does not tell."""
        return self.opcode == "custom-call" and not NO_KERNELS.search(self.target)

    @property
    def is_product(self) -> bool:
        """True for a dot, a convolution or a library's call for one."""
        if self.opcode == "custom-call":
            return bool(GEMM.search(self.target)) and "dot_dimension_numbers" in self.text
        return self.opcode in ("dot", "convolution")

    @property
    def op_name(self) -> str:
        """The scopes of the traced program, with slashes between; "" for what XLA added."""
        name = re.search(r'op_name="([^"]*)"', self.text)
        return name[1] if name else ""

    def groups(self, devices: int) -> set[frozenset[int]]:
        """The groups of partitions that communicate. Raises ValueError for an unknown notation.

        devices: the number of all partitions, which an empty list of groups stands for
        """
        if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", self.text):
            groups = re.findall(r"\{([\d,]+)\}", listed[1])
            return {frozenset(_integers(group)) for group in groups} or {frozenset(range(devices))}
        if iota := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", self.text):
            ids = _iota(*iota.group(2, 3)).reshape(_integers(iota[1]))
        elif mesh := re.search(
            rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))? "
            rf"\{{({_PART_OF_MESH}(?:,{_PART_OF_MESH})*)\}}",
            self.text,
        ):
            sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
            ids = _along_parts(
                _iota(mesh[2] or str(math.prod(sizes.values())), mesh[3]), sizes, mesh[4]
            )
        else:
            raise ValueError(f"unknown replica groups: {self.text}")
        return {frozenset(group) for group in ids.tolist()}


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def _along_parts(ids: np.ndarray, sizes: Mapping[str, int], parts: str) -> np.ndarray:
    """Partitions [groups, of a group] that differ along parts of a mesh alone. parts: such as
    "'a','b':(2)4": all of a, and of b the factor of 4 that has one of 2 outside of it"""
    shape, length = tuple(sizes.values()), 1
    places = np.indices(shape).reshape(len(shape), -1)
    for name, outside, size in re.findall(_PART_OF_MESH, parts):
        axis, part = list(sizes).index(name), int(size or sizes[name])
        inside = sizes[name] // (int(outside or 1) * part)
        places[axis] -= places[axis] // inside % part * inside
        length *= part
    groups = np.ravel_multi_index(tuple(places), shape)
    return ids.reshape(-1)[np.argsort(groups, kind="stable")].reshape(-1, length)


def _iota(shape: str, order: str | None) -> np.ndarray:
    """0, 1, 2, … in a shape such as "2,4", transposed by an order such as "1,0"."""
    ids = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return ids.transpose(_integers(order)) if order else ids


class Program:
    """A compiled program. Raises ValueError for a text without an entry computation.

    computations: name → instructions, in the order in which they run
    entry:        the name of the computation that runs first
    named:        name → instruction; XLA gives no name twice
    """

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.named: dict[str, Instruction] = {}
        self.entry = computation = ""
        # A kernel's metadata may go over several lines.
        for line in re.sub(r"\n(?=\"|}})", "", text).splitlines():
            if head := _HEAD.match(line):
                computation = head[2]
                self.computations[computation] = []
                self.entry = computation if head[1] else self.entry
            elif computation and (match := _LINE.match(line)):
                root, name, result, opcode, operands, attributes = match.groups()
                arrays, calls = _ARRAY.findall(result), dict(_CALL.findall(attributes))
                if branches := re.search(r"branch_computations=\{([^}]*)\}", attributes):
                    called = (branch.strip(" %") for branch in branches[1].split(","))
                    calls |= {f"branch{n}": branch for n, branch in enumerate(called)}
                instruction = Instruction(
                    name,
                    computation,
                    opcode,
                    shapes=tuple(_integers(dimensions) for _, dimensions, _ in arrays),
                    types=tuple(dtype for dtype, _, _ in arrays),
                    layouts=tuple(layout for _, _, layout in arrays),
                    operands=tuple(re.findall(r"%([\w.\-]+)", operands)),
                    calls=calls,
                    root=bool(root),
                    text=line.strip(),
                )
                self.named[name] = self._offloaded(instruction)
                self.computations[computation].append(self.named[name])
        if not self.entry:
            raise ValueError("this is no program: it has no entry")

    def _offloaded(self, i: Instruction) -> Instruction:
        """An instruction; of a collective on a TPU's SparseCores, the start of an asynchronous one,
        whose end is a `call-done`: the `call-start`, or the `call-update` that gives the operands
        to one without."""
        if i.opcode not in ("call-start", "call-update") or not i.operands:
            return i
        calls = i.calls or self.named[i.operands[0]].calls
        called, given = self.root(calls["to_apply"]), i.operands[i.opcode == "call-update" :]
        start = dataclasses.replace(i, opcode=f"{called.opcode}-start", operands=given)
        return dataclasses.replace(start, text=called.text) if called.collective else i

    def below(self, name: str) -> Iterator[Instruction]:
        """The instructions of a computation and of all that it calls, also of loops, fusions and
        reductions, each computation once; none for an unknown name."""
        pending, seen = [name], set()
        while pending:
            current = pending.pop()
            if current not in seen and current in self.computations:
                seen.add(current)
                for instruction in self.computations[current]:
                    yield instruction
                    pending += instruction.calls.values()

    def inline(self, name: str) -> Iterator[Instruction]:
        """The instructions of a computation in their order. In place of a call stand those of the
        computation that it calls; in place of a conditional, those of all its branches. Fusions and
        loops stay single instructions.

        Raises KeyError for a name that is no computation's.
        """
        for instruction in self.computations[name]:
            if instruction.opcode in ("call", "conditional"):
                for called in instruction.calls.values():
                    yield from self.inline(called)
            else:
                yield instruction

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose values an instruction reads."""
        return [self.named[operand] for operand in instruction.operands]

    def root(self, computation: str) -> Instruction:
        """The instruction whose value a computation returns."""
        return next(i for i in self.computations[computation] if i.root)

    def multiplies(self, i: Instruction) -> bool:
        """True for an instruction that is a product or fuses one."""
        return any(j.is_product for j in (i, *self.below(i.calls.get("calls", ""))))

    def is_repeated(self, i: Instruction) -> bool:
        """True for a product that XLA computes once more by itself, to hold less memory (its
        rematerialization, which names what it repeats)."""
        return ".remat" in i.name and self.multiplies(i)

    def waits_for_a_flag(self, loop: Instruction) -> bool:
        """True for a loop that repeats while a flag that it carries is true, without a counter."""
        condition = self.root(loop.calls["condition"])
        while condition.opcode in ("fusion", "copy", "bitcast"):
            if condition.opcode == "fusion":
                condition = self.root(condition.calls["calls"])
            else:
                condition = self.operands(condition)[0]
        return condition.opcode in ("get-tuple-element", "parameter")

    def trip_count(self, loop: Instruction) -> int | None:
        """The trip count of a while loop, by XLA's annotation or its condition, or None.

        The condition must be `counter < limit` with constant begin, limit and increment: XLA
        unrolls the loops of windowed einsums by two, and their counter then goes up by two.
        """
        if known := re.search(r'known_trip_count\\?":\s*\{\\?"n\\?":\\?"(\d+)', loop.text):
            return int(known[1])
        compare = self.root(loop.calls["condition"])
        before, after = self.operands(loop)[0], self.root(loop.calls["body"])
        if compare.opcode != "compare" or "direction=LT" not in compare.text:
            return None
        counter, limit = self.operands(compare)
        first = lambda n: self._element(before, n, lambda _: None)
        start, end = (self._integer(i, first) for i in (counter, limit))
        # the counter's number among the values that the loop carries
        place = self._integer(counter, lambda n: n)
        step = place is not None and self._element(after, place, {place: 0}.get)
        if start is None or end is None or not step or step < 0:
            return None
        return max(0, -(-(end - start) // step))

    def _integer(self, i: Instruction, given: Callable[[int], int | None]) -> int | None:
        """The integer that an instruction makes by copies and additions alone; None for others.

        given: the integer of a computation's parameter by its number, or of an element of the
            tuple that is its only parameter
        """
        operands = self.operands(i)
        number = re.search(r" (?:constant|parameter)\((-?\d+)\)", i.text)
        if i.opcode == "get-tuple-element":
            return self._element(
                operands[0], int(i.text.rpartition("index=")[2].split(",")[0]), given
            )
        if i.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
            return self._integer(operands[0], given)
        if i.opcode == "fusion":
            value = lambda n: self._integer(operands[n], given)
            return self._integer(self.root(i.calls["calls"]), value)
        if i.opcode == "add":
            terms = [self._integer(operand, given) for operand in operands]
            return None if None in terms else sum(filter(None, terms))
        if number is None:
            return None
        return int(number[1]) if i.opcode == "constant" else given(int(number[1]))

    def _element(self, i: Instruction, n: int, given: Callable[[int], int | None]) -> int | None:
        """The integer of the n-th element of an instruction's tuple, as `_integer` finds it."""
        if i.opcode == "parameter":
            return given(n)
        return self._integer(self.operands(i)[n], given) if i.opcode == "tuple" else None

    def is_op(self, loop: Instruction) -> bool:
        """True for a loop of the tick that runs an op, by the scopes directly in its body."""
        body = f"{loop.op_name}/body/"
        names = (i.op_name for i in self.below(loop.calls["body"]) if i.op_name.startswith(body))
        return any(OP.fullmatch(name.removeprefix(body).split("/")[0]) for name in names)

    def holds_ops(self, loop: Instruction) -> bool:
        """True for a loop that runs no op itself, but has loops in it that do."""
        loops = (i for i in self.inline(loop.calls["body"]) if i.opcode == "while")
        return not self.is_op(loop) and any(self.is_op(i) or self.holds_ops(i) for i in loops)


def pairs(text: str) -> list[tuple[int, int]]:
    """The (sending, receiving) partitions of a permute, from an instruction's text."""
    listed = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text)
    assert listed is not None, text
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", listed[1])]


def along(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which a collective communicates, and the number of partitions in one of
    its groups (2 for a permute: a sender and a receiver).

    mesh: axis → size, with partitions numbered in row-major order
    """
    shape = tuple(mesh.values())
    permutes = instruction.collective == "collective-permute"
    groups = pairs(instruction.text) if permutes else instruction.groups(math.prod(shape))
    places = [np.unravel_index(list(group), shape) for group in groups]  # [axes][partitions]
    differ = lambda axis: any((place[axis] != place[axis][0]).any() for place in places)
    return tuple(name for axis, name in enumerate(mesh) if differ(axis)), len(places[0][0])
