"""The cost of a compiled instruction: FLOPs, bytes of the device's memory, a TPU's cycles.

    flops    2 · multiplications of its dots and convolutions, also of those that it fuses;
             a kernel's are not in the program
    bytes    read from and written to the device's memory; where an array is sliced, or updated in
             place, those of the slice
    cycles   `estimated_cycles`, with which libtpu schedules

A loop costs nothing itself: its body runs as often as its trips say
(jaxtrain/planner/programs/loops.py).
"""

import functools
import math
import re
from collections.abc import Set

import numpy as np

from jaxtrain.planner.programs.program import FREE, Instruction, Program

# The contracted dimensions of a dot, or of a library's call.
CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s?"?[=:][{\[]([\d,"]*)')
WINDOW = {"stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}  # and its defaults
COSTLESS = FREE | {"call", "conditional"}
SLICES = frozenset({"dynamic-slice", "slice", "gather"})
VIEWS = frozenset({"bitcast", "reshape"})
# Memory spaces of arrays that are in the device's memory; a TPU's 1 is its vector memory.
TPU_MEMORY, GPU_MEMORY = frozenset({0}), frozenset({0, 1, 7})


class InstructionCosts:
    """The costs of a program's instructions. memory: the spaces that are the device's memory."""

    def __init__(self, program: Program, memory: Set[int] = TPU_MEMORY):
        self.program, self.memory = program, memory
        self._of_computation: dict[str, int] = {}

    def flops(self, i: Instruction) -> int:
        """FLOPs of an instruction's products, also of those that it fuses; two a multiplication."""
        if i.opcode == "convolution":
            return self._convolution(i)
        if i.is_product:
            contracted, lhs = CONTRACTED.search(i.text), self.program.operands(i)[0].shapes[0]
            dimensions = re.findall(r"\d+", contracted[1]) if contracted else ()
            return 2 * i.sizes[0] * math.prod(lhs[int(d)] for d in dimensions)
        called = i.calls.get("calls", "")
        if not called or i.opcode.removesuffix("-start") not in ("fusion", "async"):
            return 0
        if called not in self._of_computation:
            self._of_computation[called] = sum(map(self.flops, self.program.computations[called]))
        return self._of_computation[called]

    def _convolution(self, i: Instruction) -> int:
        """FLOPs of a convolution. Pairs of a window's place with padding or a hole do not count."""
        lhs, rhs = (operand.shapes[0] for operand in self.program.operands(i)[:2])
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.text)
        assert labels is not None, i.text
        shapes = zip(labels.groups(), (lhs, rhs, i.shapes[0]), strict=True)
        inputs, kernel, outputs = (dict(zip(*labelled, strict=True)) for labelled in shapes)
        written = re.search(r"window=\{([^}]*)\}", i.text)
        window = dict(part.split("=") for part in written[1].split()) if written else {}
        flops = 2 * kernel["i"] * outputs["b"] * outputs["f"]
        for n, d in enumerate(sorted(filter(str.isdigit, inputs))):
            settings = {key: window[key].split("x")[n] for key in WINDOW if key in window}
            numbers = [int(text.split("_")[0]) for text in (WINDOW | settings).values()]
            flops *= _pairs(inputs[d], outputs[d], kernel[d], *numbers)
        return flops

    def in_float32(self, i: Instruction) -> bool:
        """True if one of an instruction's products has operands of 32 bits."""
        fused = self.program.below(i.calls["calls"]) if "calls" in i.calls else [i]
        products = (
            j for j in fused if j.opcode in ("dot", "convolution", "custom-call") and j.operands
        )
        return any(self.program.operands(j)[0].types[0] == "f32" for j in products if self.flops(j))

    def bytes(self, i: Instruction) -> int:
        """Bytes that an instruction reads and writes; an asynchronous one does so at its start."""
        if (
            i.opcode in COSTLESS
            or i.opcode.endswith(("-done", "-update"))
            or i.target == "AllocateBuffer"
        ):
            return 0
        if i.opcode in ("fusion", "fusion-start"):
            operands = self.program.operands(i)
            read = {n: p for n, p in self._parameters(i).items() if self._in_memory(operands[n])}
            used = sum(min(operands[n].bytes, self._used(p)) for n, p in read.items())
            return used + self._written(i)
        if i.starts:
            return self._in_memory(i)
        if i.opcode in SLICES:
            return 2 * self._in_memory(i)
        operands = self.program.operands(i)
        if i.opcode == "dynamic-update-slice":
            return 2 * self._in_memory(operands[1])
        return sum(map(self._in_memory, [i, *operands]))

    def _in_memory(self, i: Instruction) -> int:
        """Bytes of an instruction's arrays that are in the device's memory."""
        arrays = zip(i.bytes_of_each, i.spaces, strict=True)
        return sum(size for size, space in arrays if space in self.memory)

    def _parameters(self, fusion: Instruction) -> dict[int, Instruction]:
        """The parameters of a fused computation by the number of the operand."""
        fused = self.program.computations[fusion.calls["calls"]]
        numbers = (
            (re.search(r" parameter\((\d+)\)", i.text), i) for i in fused if i.opcode == "parameter"
        )
        return {int(number[1]): i for number, i in numbers if number}

    def _used(self, value: Instruction) -> int:
        """Bytes of a value in a fused computation that other instructions in it read."""
        used = 0
        for user in self.program.computations[value.computation]:
            if value.name not in user.operands:
                continue
            if user.opcode in SLICES:
                used += user.bytes
            elif user.opcode in VIEWS:
                # A nested fusion that returns the view as it is: its user reads all of it.
                used += user.bytes if user.root else self._used(user)
            elif user.opcode == "fusion":
                parameters = self._parameters(user)
                used += sum(
                    self._used(parameters[n])
                    for n, name in enumerate(user.operands)
                    if name == value.name
                )
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != value.name:
                return value.bytes
        return used

    def _written(self, fusion: Instruction) -> int:
        """Bytes that a fusion writes: of a result that is updated in place, the update."""
        root = self.program.root(fusion.calls["calls"])
        results = self.program.operands(root) if root.opcode == "tuple" else [root]
        if len(results) != len(fusion.sizes):  # an asynchronous fusion's tuple has its operands too
            return sum(result.bytes for result in results)
        written = 0
        for result, space in zip(results, fusion.spaces, strict=True):
            if space in self.memory:
                source = result
                while source.opcode in VIEWS or source.opcode == "copy":
                    source = self.program.operands(source)[0]
                updates = source.opcode == "dynamic-update-slice"
                written += (self.program.operands(source)[1] if updates else result).bytes
        return written

    def cycles(self, i: Instruction) -> int:
        """Cycles by libtpu's estimate, or 0.

        A fusion without an estimate, whose parts run on different cores, has the sum of its parts'.
        """
        if estimate := re.search(r'"estimated_cycles":"(\d+)"', i.text):
            return int(estimate[1])
        fused = self.program.computations[i.calls["calls"]] if i.opcode == "fusion" else []
        return sum(map(self.cycles, fused))


@functools.lru_cache(maxsize=1024)
def _pairs(
    size: int,
    outputs: int,
    window: int,
    stride: int,
    padding: int,
    base_dilation: int,
    window_dilation: int,
) -> int:
    """The number of pairs (output, place in its window) that lie on one of a dimension's `size`
    numbers."""
    at = np.arange(outputs)[:, None] * stride + np.arange(window)[None] * window_dilation - padding
    return int(((at % base_dilation == 0) & (at >= 0) & (at // base_dilation < size)).sum())
