"""How often each instruction of a compiled step runs: loops multiplied out, those of the table by what a stage does.

XLA knows the trips of most loops. Those of a tick's ops are read from columns of the table, other numbers on every stage: an op's loop runs
as often in a step as the stage's column has ones, a loop over layers as often as the stage's unit has layers. A loop that waits for a flag
is what a step does when something unusual happens: it counts as never run. A kernel that takes so many documents at a time is called once.
"""

import collections
import dataclasses
import fractions
import re
from collections.abc import Iterator

from jaxtrain.config.pipeline_setup import Setup
from jaxtrain.hlo.program import Instruction, Program
from jaxtrain.schedule.columns import columns

SCOPE = re.compile(
    r"[/(](?:([FKRBW])\d+|(take_\w+|send_\w+|stay_\w+|embed_gradient|embed|head|permute|reduce_gradients|optimizer)(?:_EARLY|_LATE)?)(?=[/)]|$)"
)
BLOCKS = re.compile(r"/row_blocks_(\d+)_(\d+)_(\d+)/")  # in parallel/grouped.py: room for rows, groups, rows of a block
CALLS = "/document_calls/"  # in parallel/cudnn.py: documents for which a call has room at a time
NAMES = {"reduce_gradients": "reduce"}


@dataclasses.dataclass(frozen=True)
class Run:
    """An instruction that runs `times` a step; `op`: in whose scope; `loops`: how many loops are around it."""

    instruction: Instruction
    times: float
    op: str
    loops: int


class StepLoops:
    """The loops of a step's program on a stage. rows: of a microbatch that come to a device's experts, each as many; if not given, all that
    there is room for."""

    def __init__(self, program: Program, setup: Setup, stage: int = 0, rows: int | None = None):
        self.program, self.setup, self.stage, self.rows = program, setup, stage, rows
        self.runs: dict[str, int] = {}
        self.busy = 0
        if setup.train:
            table = columns(setup.train)
            self.runs = {op: int(column[:, stage].sum()) for op, column in table.runs.items()}
            self.busy = int(table.busy[:, stage].sum())

    def executed(self) -> Iterator[Run]:
        """Every instruction of the step that runs."""
        return self.below(self.program.entry, 1, "other", 0)

    def below(self, computation: str, times, op: str, loops: int) -> Iterator[Run]:
        """Every instruction that runs with a computation that runs so often; `op`: the scope of what has none itself."""
        for i in self.program.inline(computation):
            scope = self.scope(i, op)
            if scope == "other" and loops and self.setup.train:
                scope = "tick"
            yield Run(i, float(times), scope, loops)
            if i.opcode == "while":
                yield from self.below(i.calls["body"], times * self.trips(i, times), self._of_loop(i, scope), loops + 1)

    def trips(self, loop: Instruction, times):
        """Trip count of a loop that is entered `times` a step. ValueError where neither XLA nor the table knows."""
        known = self.program.trip_count(loop)
        if known is not None or not times or self.program.waits_for_a_flag(loop):
            return known or 0
        if blocks := BLOCKS.search(loop.op_name):
            room, groups, size = map(int, blocks.groups())
            return -(-(room if self.rows is None else self.rows) // (groups * size))
        if CALLS in loop.op_name:
            return 1
        if self.program.holds_ops(loop):
            return fractions.Fraction(self.busy) / times
        if inside := re.findall(r"/[FKRBW](\d+)/", loop.op_name):
            return self.setup.placement.layer_count(int(inside[-1]), self.stage)
        if name := self.op_in(loop):
            return fractions.Fraction(self.runs[name]) / times
        raise ValueError(f"a loop without a known number of trips: {loop.text[:200]}")

    def op_in(self, loop: Instruction) -> str | None:
        """The op of the table that a loop runs: what two ops have in common may bear the name of either, so the most frequent name."""
        names = (found for i in self.program.below(loop.calls["body"]) for found in re.findall(r"/(\w+)", i.op_name) if found in self.runs)
        return next((name for name, _ in collections.Counter(names).most_common(1)), None)

    def _of_loop(self, loop: Instruction, op: str) -> str:
        if op not in ("other", "tick") or self.program.trip_count(loop) is not None or self.program.holds_ops(loop):
            return op
        return scope_of(f"/{self.op_in(loop)}/") or op

    def scope(self, i: Instruction, otherwise: str) -> str:
        """The op in whose scope an instruction stands; a fusion without a name has its root's."""
        name = i.op_name
        if not name and i.opcode == "fusion":
            name = self.program.root(i.calls["calls"]).op_name
        found = scope_of(name) or otherwise
        one_stage = self.setup.train is None
        return "R" if one_stage and found == "B" and "jvp(" in name and "transpose(" not in name else found


def scope_of(op_name: str) -> str:
    """The scope of a name in the traced program, "" if it has none: the innermost op, but `gather` and `reduce` for what gathers
    parameters or reduces gradients inside one."""
    if found := re.findall(r"/(gather|reduce)/", op_name):
        return found[-1]
    return op_in(op_name)


def op_in(op_name: str) -> str:
    """The innermost op that a name in the traced program names, "" if none."""
    found = SCOPE.findall(op_name)
    name = found[-1][0] or found[-1][1] if found else ""
    return NAMES.get(name, re.sub(r"^(take|send|stay)_.*", r"\1", name))
