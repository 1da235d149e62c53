"""Loops of a compiled step: how often each instruction runs, on a stage.

XLA knows the trips of most loops. Those of a tick's ops are read from columns of the table, which
differ between stages: an op's loop runs as often in a step as the stage's column has ones, a loop
over layers as often as the stage's unit has layers. A loop that waits for a flag is what a step
does when something unusual happens: it counts as never run. A kernel that takes so many documents
at a time is called once.
"""

import collections
import dataclasses
import fractions
import re
from collections.abc import Iterator

from jaxtrain.hlo.program import Instruction, Program
from jaxtrain.pipeline.setup import Setup
from jaxtrain.schedule.columns import columns

SCOPE = re.compile(
    r"[/(](?:([FKRBW])\d+|(take|send|stay)_\w+|(reduce)_gradients"
    r"|(embed_gradient|embed|head|permute|optimizer)(?:_EARLY|_LATE)?)(?=[/)]|$)"
)
# Names of parallel/grouped.py (capacity, groups, rows of a block) and parallel/cudnn.py.
BLOCKS = re.compile(r"/row_blocks_(\d+)_(\d+)_(\d+)/")
CALLS = "/document_calls/"


@dataclasses.dataclass(frozen=True)
class Run:
    """An instruction that runs `times` a step, in the scope of `op`, inside of `loops` loops."""

    instruction: Instruction
    times: float
    op: str
    loops: int


class StepLoops:
    """The loops of a step's program on a stage.

    expert_tokens: tokens of a microbatch that reach a device's experts; None: their capacity
    """

    def __init__(
        self, program: Program, setup: Setup, stage: int = 0, expert_tokens: int | None = None
    ):
        self.program, self.setup = program, setup
        self.stage, self.expert_tokens = stage, expert_tokens
        table = columns(setup.train) if setup.train else None
        of_stage = lambda column: int(column[:, stage].sum())
        self.runs = {op: of_stage(column) for op, column in table.runs.items()} if table else {}
        self.busy = of_stage(table.busy) if table else 0

    def executed(self) -> Iterator[Run]:
        """Every instruction of the step that runs."""
        return self.below(self.program.entry, 1, "other", 0)

    def below(self, computation: str, times, op: str, loops: int) -> Iterator[Run]:
        """Every instruction that runs with a computation.

        times: how often the computation runs in a step
        op:    the scope of instructions that have none
        loops: around the computation
        """
        for i in self.program.inline(computation):
            scope = self.scope(i, op)
            if scope == "other" and loops and self.setup.train:
                scope = "tick"
            yield Run(i, float(times), scope, loops)
            if i.opcode == "while":
                trips = self.trips(i, times)
                by_table = self.program.trip_count(i) is None and not self.program.holds_ops(i)
                if by_table and scope in ("other", "tick"):
                    scope = scope_of(f"/{self.op_of_loop(i)}/") or scope
                yield from self.below(i.calls["body"], times * trips, scope, loops + 1)

    def trips(self, loop: Instruction, times):
        """Trip count of a loop that is entered `times` a step.

        ValueError where neither XLA nor the table knows.
        """
        known = self.program.trip_count(loop)
        if known is not None or not times or self.program.waits_for_a_flag(loop):
            return known or 0
        if blocks := BLOCKS.search(loop.op_name):
            capacity, groups, rows = map(int, blocks.groups())
            tokens = capacity if self.expert_tokens is None else self.expert_tokens
            return -(-tokens // (groups * rows))
        if CALLS in loop.op_name:
            return 1
        if self.program.holds_ops(loop):
            return fractions.Fraction(self.busy) / times
        if units := re.findall(r"/[FKRBW](\d+)/", loop.op_name):
            return self.setup.placement.layer_count(int(units[-1]), self.stage)
        if op := self.op_of_loop(loop):
            return fractions.Fraction(self.runs[op]) / times
        raise ValueError(f"a loop without a known number of trips: {loop.text[:200]}")

    def op_of_loop(self, loop: Instruction) -> str | None:
        """The op of the table that a loop runs: the most frequent name, as ops may share code."""
        body = self.program.below(loop.calls["body"])
        names = (name for i in body for name in re.findall(r"/(\w+)", i.op_name))
        counts = collections.Counter(name for name in names if name in self.runs)
        return max(counts, key=lambda name: counts[name], default=None)

    def scope(self, i: Instruction, otherwise: str) -> str:
        """The op in whose scope an instruction stands; a fusion without a name has its root's."""
        name = i.op_name
        if not name and i.opcode == "fusion":
            name = self.program.root(i.calls["calls"]).op_name
        scope = scope_of(name) or otherwise
        forward = "jvp(" in name and "transpose(" not in name
        return "R" if forward and scope == "B" and self.setup.train is None else scope


def scope_of(op_name: str) -> str:
    """The scope of a name in the traced program, "" if it has none.

    The innermost op, but `gather` and `reduce` for what gathers or reduces in it.
    """
    communicates = re.findall(r"/(gather|reduce)/", op_name)
    return communicates[-1] if communicates else op_in(op_name)


def op_in(op_name: str) -> str:
    """The innermost op that a name in the traced program names, "" if none."""
    ops = SCOPE.findall(op_name)
    return "".join(ops[-1]) if ops else ""
