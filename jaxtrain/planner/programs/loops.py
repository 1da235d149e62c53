"""Loops of a compiled step: the number of times that each instruction runs on a stage.

XLA's text has the trip counts of most loops. Others differ between stages: an op's loop runs as
often in a step as the stage's column of the table has ones, and a loop over layers as often as its
scope says. A loop that waits for a flag handles rare cases, and counts as never run. A loop over
groups of documents counts one call of its kernel.
"""

import collections
import dataclasses
import fractions
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.planner.programs.program import Instruction, Program
from jaxtrain.schedule.columns import LAST_WEIGHTS

SCOPE = re.compile(
    r"[/(](?:([FK]B)\d+_\d+|([FKRBW])\d+|(take|send|stay)_\w+|(reduce)_gradients"
    r"|(embed_gradient|embed|head|permute|optimizer)(?:_EARLY|_LATE)?)(?=[/)]|$)"
)
# Scopes of parallel/experts/grouped.py (capacity, groups, rows of a block) and of
# parallel/attention/cudnn.py.
BLOCKS = re.compile(r"/row_blocks_(\d+)_(\d+)_(\d+)/")
# Scope of parallel/experts/filled_rows.py (capacity, mean rows, rows of a block).
EXCESS = re.compile(r"/row_excess_(\d+)_(\d+)_(\d+)/")
CALLS = "/document_calls/"
# Scope of runtime/layers/layer_loops.py (trips on each stage, in so many repeats).
LAYERS = re.compile(r"/trips_([\d_]+)_of_(\d+)/")
# Scope of training/update/muon.py (units of matrices, devices).
DEALT = re.compile(r"/dealt_(\d+)_to_(\d+)/")


@dataclasses.dataclass(frozen=True)
class Executed:
    """An instruction that runs `times` a step. loops: those around it, the outermost first."""

    instruction: Instruction
    times: float
    loops: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class StepLoops:
    """The loops of a step's program on a stage.

    op_runs:       op of the table → the number of times that the stage runs it in a step; empty
                   with one stage, which has no table
    busy_ticks:    ticks in which the stage runs an op
    expert_tokens: tokens of a microbatch that reach a device's experts; None: their capacity
    """

    program: Program
    stage: int
    op_runs: Mapping[str, int]
    busy_ticks: int
    expert_tokens: int | None = None

    def executed(
        self, computation: str = "", times: Any = 1, loops: tuple[Instruction, ...] = ()
    ) -> Iterator[Executed]:
        """The instructions that run with a computation; by default, those of the step.

        times: how often the computation runs in a step
        loops: the loops around the computation
        """
        for i in self.program.inline(computation or self.program.entry):
            yield Executed(i, float(times), loops)
            if i.opcode == "while":
                yield from self.executed(i.calls["body"], times * self.trips(i, times), (*loops, i))

    def trips(self, loop: Instruction, times: Any) -> Any:
        """The mean trip count of a loop that is entered `times` a step, an integer or a fraction.

        Raises ValueError if neither XLA's text nor the table has it.
        """
        known = self.program.trip_count(loop)
        if known is not None or not times or self.program.waits_for_a_flag(loop):
            return known or 0
        routed = lambda capacity: capacity if self.expert_tokens is None else self.expert_tokens
        if blocks := BLOCKS.search(loop.op_name):
            capacity, groups, block = map(int, blocks.groups())
            return -(-routed(capacity) // (groups * block))
        if excess := EXCESS.search(loop.op_name):
            capacity, mean, block = map(int, excess.groups())
            return max(0, -(-(routed(capacity) - mean) // block))
        if dealt := DEALT.search(loop.op_name):
            return fractions.Fraction(*map(int, dealt.groups()))
        if CALLS in loop.op_name:
            return 1
        if self.program.holds_ops(loop):
            return fractions.Fraction(self.busy_ticks) / times
        if layers := LAYERS.findall(loop.op_name):
            counts, repeats = layers[-1]
            return fractions.Fraction(int(counts.split("_")[self.stage]), int(repeats))
        if op := self.op_of_loop(loop):
            return fractions.Fraction(self._runs(op, loop)) / times
        raise ValueError(f"a loop without a known number of trips: {loop.text[:200]}")

    def _has_last_weights(self, computation: str) -> bool:
        return any(f"/{LAST_WEIGHTS}/" in i.op_name for i in self.program.below(computation))

    def _runs(self, op: str, loop: Instruction) -> int:
        """How often a step runs the loop of an op. A unit's last W may have a loop of its own."""
        runs = self.op_runs[op]
        if not op.startswith("W") or not self._has_last_weights(self.program.entry):
            return runs
        is_last = self._has_last_weights(loop.calls["body"])
        return min(runs, 1) if is_last else runs - min(runs, 1)

    def op_of_loop(self, loop: Instruction) -> str | None:
        """The op of the table that a loop runs: the most frequent name, as XLA may share code."""
        body = self.program.below(loop.calls["body"])
        names = (name for i in body for name in re.findall(r"/(\w+)", i.op_name))
        counts = collections.Counter(name for name in names if name in self.op_runs)
        return max(counts, key=lambda name: counts[name], default=None)


def op_in(op_name: str) -> str:
    """The innermost op in a traced name; "" for none."""
    ops = SCOPE.findall(op_name)
    return "".join(ops[-1]) if ops else ""
