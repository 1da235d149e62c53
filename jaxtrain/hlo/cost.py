"""What one instruction of a compiled program costs: operations of its products, bytes of the device's memory, a TPU compiler's cycles.

    flops    2 · multiplications of its dots and convolutions, those in its fused computation included; a kernel's are not in the program
    bytes    what it reads and writes of the device's memory; of an array that it cuts, or updates in place, the part alone
    cycles   `estimated_cycles`, with which libtpu schedules

A loop costs nothing itself: what is in it runs as often as its trips say (loops.py).
"""

import functools
import json
import math
import re
from collections.abc import Iterator, Set

import numpy as np

from jaxtrain.hlo.program import FREE, Instruction, Program

CALLS = frozenset({"while", "call", "conditional"})
READS_A_PART = frozenset({"dynamic-slice", "slice", "gather"})
VIEWS = frozenset({"bitcast", "reshape"})
GEMM = re.compile(r"__cublas\$|__triton_gemm|__cudnn\$gemm")
# What moves numbers and changes none of them.
MOVES = frozenset(
    """parameter constant tuple get-tuple-element bitcast reshape copy transpose slice dynamic-slice dynamic-update-slice concatenate
    broadcast fusion""".split()
)
REORDERS = frozenset({"copy", "transpose"})


TPU_MEMORY, GPU_MEMORY = frozenset({0}), frozenset({0, 1, 7})  # spaces that are the device's memory; a TPU's 1 is its vector memory


class Costs:
    """The costs of a program's instructions. memory: which of its spaces are the device's memory."""

    def __init__(self, program: Program, memory: Set[int] = TPU_MEMORY):
        self.program, self.memory = program, memory
        self._of_computation = functools.lru_cache(maxsize=None)(lambda name: sum(map(self.flops, program.computations[name])))

    # ------------------------------------------------------------------ products

    def flops(self, i: Instruction) -> int:
        """Operations of its products."""
        if i.opcode == "dot":
            return 2 * math.prod(i.sizes) * self._contracted(i, _dimensions(i.text, "lhs_contracting_dims"))
        if i.opcode == "convolution":
            return self._convolution(i)
        if i.opcode == "custom-call" and GEMM.search(target(i)) and "dot_dimension_numbers" in i.text:
            found = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', i.text)
            assert found is not None, i.text
            return 2 * i.sizes[0] * self._contracted(i, tuple(map(int, json.loads(found[1]))))
        if i.opcode.removesuffix("-start") in ("fusion", "async") and "calls" in i.calls:
            return self._of_computation(i.calls["calls"])
        return 0

    def in_float32(self, i: Instruction) -> bool:
        """Whether one of its products has operands of 32 bits."""
        inside = self.program.below(i.calls["calls"]) if "calls" in i.calls else [i]
        products = (j for j in inside if j.opcode in ("dot", "convolution", "custom-call") and j.operands)
        return any(self.program.operands(j)[0].types[0] == "f32" for j in products if self.flops(j))

    def _contracted(self, i: Instruction, dimensions: tuple[int, ...]) -> int:
        left = self.program.operands(i)[0].shapes[0]
        return math.prod(left[d] for d in dimensions)

    def _convolution(self, i: Instruction) -> int:
        """FLOPs of a convolution. An output counts the window's places that meet a number, neither padding nor a hole."""
        left, right = (operand.shapes[0] for operand in self.program.operands(i)[:2])
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.text)
        assert labels is not None, i.text
        window, out = _window(i.text), i.shapes[0]
        flops = 2 * right[labels[2].index("i")] * out[labels[3].index("b")] * out[labels[3].index("f")]
        for d, name in enumerate(sorted(c for c in labels[1] if c.isdigit())):
            read = lambda key, otherwise, d=d: window[key][d] if key in window else otherwise
            flops *= _meetings(
                left[labels[1].index(name)],
                out[labels[3].index(name)],
                right[labels[2].index(name)],
                int(read("stride", 1)),
                int(str(read("pad", "0_0")).split("_")[0]),
                int(read("lhs_dilate", 1)),
                int(read("rhs_dilate", 1)),
            )
        return flops

    # ------------------------------------------------------------------ bytes of the device's memory

    def bytes(self, i: Instruction) -> int:
        """What an instruction reads and writes of the device's memory. Something asynchronous costs this at its start."""
        if i.opcode in FREE or i.opcode in CALLS or i.opcode.endswith(("-done", "-update")) or target(i) == "AllocateBuffer":
            return 0
        if i.opcode.endswith("-start") and i.opcode != "fusion-start":
            return self._in_memory(i)
        if i.opcode in ("fusion", "fusion-start"):
            inside = self.program.computations[i.calls["calls"]]
            parameters = {int(_number_of(p)): p for p in inside if p.opcode == "parameter"}
            read = sum(self._read(i, n, parameters[n]) for n in range(len(i.operands)))
            return read + self._written(i)
        made = self._in_memory(i)
        if i.opcode in READS_A_PART:
            return 2 * made
        if i.opcode == "dynamic-update-slice":
            return 2 * self._in_memory(self.program.operands(i)[1])
        return made + sum(map(self._in_memory, self.program.operands(i)))

    def _in_memory(self, i: Instruction) -> int:
        return sum(size for size, space in zip(i.bytes_of_each, i.spaces, strict=True) if space in self.memory)

    def _read(self, fusion: Instruction, n: int, parameter: Instruction) -> int:
        """Bytes that a fusion reads of its n-th operand."""
        operand = self.program.operands(fusion)[n]
        if not any(space in self.memory for space in operand.spaces):
            return 0
        return min(operand.bytes, self._used(parameter))

    def _used(self, value: Instruction) -> int:
        """Bytes of a value in a fused computation that others in it read."""
        used = 0
        for user in self._users(value):
            if user.opcode in READS_A_PART:
                used += user.bytes
            elif user.opcode in VIEWS:
                used += self._used(user)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
                pass
            elif user.opcode == "fusion":
                inside = self.program.computations[user.calls["calls"]]
                places = [n for n, operand in enumerate(user.operands) if operand == value.name]
                used += sum(self._used(p) for p in inside if p.opcode == "parameter" and int(_number_of(p)) in places)
            else:
                return value.bytes
        return used

    def _users(self, value: Instruction) -> Iterator[Instruction]:
        return (i for i in self.program.computations[value.computation] if value.name in i.operands)

    def _written(self, fusion: Instruction) -> int:
        root = self.program.root(fusion.calls["calls"])
        results = self.program.operands(root) if root.opcode == "tuple" else [root]
        if len(results) != len(fusion.sizes):  # of an asynchronous fusion, whose tuple has its operands too
            return sum(result.bytes for result in results)
        return sum(self._update(r) for r, space in zip(results, fusion.spaces, strict=True) if space in self.memory)

    def _update(self, result: Instruction) -> int:
        """Bytes that are written of a fusion's result: of one that is updated in place, the update."""
        size = result.bytes
        while result.opcode in VIEWS or result.opcode == "copy":
            result = self.program.operands(result)[0]
        if result.opcode == "dynamic-update-slice":
            return self.program.operands(result)[1].bytes
        return size

    # ------------------------------------------------------------------ cycles, copies

    def cycles(self, i: Instruction) -> int:
        """libtpu's estimate; of a fusion of what the cores of a chip do side by side, which has none, the sum of its parts'; else 0."""
        if found := re.search(r'"estimated_cycles":"(\d+)"', i.text):
            return int(found[1])
        return sum(map(self.cycles, self.program.computations[i.calls["calls"]])) if i.opcode == "fusion" else 0

    def is_copy(self, i: Instruction) -> bool:
        """Whether it does nothing but to bring an array into another order or place in the device's memory."""
        if i.opcode in ("copy-start", "copy"):
            source = self.program.operands(i)[0]
            return bool(source.orders) and (source.orders[0] != i.orders[0] or {source.spaces[0], i.spaces[0]} <= self.memory)
        if i.opcode == "transpose":
            return True
        if i.opcode != "fusion":
            return False
        inside = list(self.program.below(i.calls["calls"]))
        return all(j.opcode in MOVES for j in inside) and any(j.opcode in REORDERS for j in inside)


def target(i: Instruction) -> str:
    """Target of a custom call; "" for other instructions."""
    found = re.search(r'custom_call_target="([^"]*)"', i.text)
    return found[1] if found else ""


def _dimensions(text: str, name: str) -> tuple[int, ...]:
    found = re.search(rf"{name}=\{{([\d,]*)\}}", text)
    return tuple(map(int, found[1].split(","))) if found and found[1] else ()


def _number_of(parameter: Instruction) -> str:
    found = re.search(r"parameter\((\d+)\)", parameter.text)
    assert found is not None, parameter.text
    return found[1]


def _window(text: str) -> dict[str, list[str]]:
    """A convolution's "{size=8x1 stride=7x1 …}", by dimension."""
    found = re.search(r"window=\{([^}]*)\}", text)
    return {key: value.split("x") for key, value in (part.split("=") for part in found[1].split())} if found else {}


@functools.lru_cache(maxsize=1024)
def _meetings(size: int, outputs: int, window: int, stride: int, before: int, base_dilation: int, window_dilation: int) -> int:
    """Pairs (output, place of the window) of a dimension that meet one of its `size` numbers."""
    at = np.arange(outputs)[:, None] * stride + np.arange(window)[None] * window_dilation - before
    return int(((at % base_dilation == 0) & (at >= 0) & (at // base_dilation < size)).sum())
