"""The compilers' own figures of a compiled step beside ours, with the deviation.

flops, bytes  XLA's cost analysis, which counts a loop as if it had one trip, a kernel as
              nothing, and bytes of all memories; ours are summed in the same way
arguments     XLA's memory analysis, beside the parameters in the program's text
products      libtpu's cycles of instructions with products, beside a roofline: products at 93 %
other         of the peak or bytes at 2.5 TB/s, whichever takes longer; and those of all others
"""

from typing import Any

from instruction_costs import InstructionCosts
from step_seconds import TPU_PRODUCTS, SecondsReader

from jaxtrain.planner.programs.program import Instruction
from jaxtrain.planner.programs.topology import Compiled

ALL_MEMORIES = frozenset(range(8))
TPU_BYTES_PER_S = 2.5e12


def second_reader(figures: SecondsReader, compiled: Compiled) -> dict[str, dict[str, float]]:
    """Name of a figure → ours, and theirs. Figures that the compiler does not give are left out."""
    costs, program = figures.costs, figures.program
    once = [run.instruction for run in figures.runs]
    everywhere = InstructionCosts(program, ALL_MEMORIES)
    compared = {}
    if "flops" in compiled.cost:
        ours = sum(map(costs.flops, once))
        compared["flops"] = {"ours": ours, "theirs": compiled.cost["flops"]}
    if "bytes accessed" in compiled.cost:
        ours = sum(_bytes(everywhere, i) for i in once)
        compared["bytes"] = {"ours": ours, "theirs": compiled.cost["bytes accessed"]}
    if "argument" in compiled.memory:
        entry = program.computations[program.entry]
        ours = sum(i.bytes for i in entry if i.opcode == "parameter")
        compared["arguments"] = {"ours": ours, "theirs": compiled.memory["argument"]}
    if figures.tpu:
        for run in figures.runs:
            i = run.instruction
            if not figures.kernel(i) and not i.collective:
                products = costs.flops(i) / (figures.hardware.peak() * TPU_PRODUCTS)
                name = "seconds of products" if products else "seconds of other"
                seconds = compared.setdefault(name, {"ours": 0.0, "theirs": 0.0})
                seconds["ours"] += run.times * max(products, costs.bytes(i) / TPU_BYTES_PER_S)
                seconds["theirs"] += figures.seconds(run)
    return compared


def _bytes(everywhere: InstructionCosts, i: Instruction) -> int:
    """Bytes of an instruction as XLA's analysis counts them: the start of an asynchronous operation
    and its done each read their operand and write their result."""
    if i.starts or i.opcode.endswith("-done"):
        return i.bytes + sum(operand.bytes for operand in everywhere.program.operands(i))
    return everywhere.bytes(i)


def second_reader_lines(compared: dict[str, dict[str, Any]]) -> list[str]:
    """The lines that are printed for it."""
    lines = ["  a second reader, the compiler:"]
    for name, figure in compared.items():
        ours, theirs = figure["ours"], figure["theirs"]
        off = f"{ours / theirs - 1:+.1%}" if theirs else "none"
        lines.append(f"    {name}: ours {ours:.4g}, the compiler's {theirs:.4g}, {off}")
    return lines
