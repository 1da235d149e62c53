"""The events of a table: the ops that both clocks time, one NumPy record for each op on each stage.

A tick of the table has up to five parts on a stage, in this order:

    EMBED → CELL (F, R, B or W, or an F and a B at once) → HEAD → EMBED_GRADIENT → UPDATE

Cells differ from stage to stage. Embedding, head and embedding's gradient are named by a column of
the table that all stages have in common (`ColumnOp`): one stage runs them, or all stages together.

The F and the B of an overlapped cell begin together, when both have what they wait for, and both
messages leave at its end. Timelines show the F and then the B, each shortened by the same factor.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.schedule.clocks.times import NAMES, Timeline, Times
from jaxtrain.schedule.table import Op, Table

TINY = 1e-300  # keeps 0 ÷ 0 from ops that take no time

EMBED, CELL, HEAD, EMBED_GRADIENT, UPDATE = range(5)  # the parts of a tick, in this order

# An event: one op on one stage, of a cell or of a column (ColumnOp). −1 stands for no unit, no
# message and no joint op.
EVENT = np.dtype(
    [
        ("stage", int),
        ("tick", int),
        ("part", int),  # of the tick
        ("name", int),  # an index of NAMES
        ("unit", int),
        ("microbatch", int),
        ("start", float),
        ("time", float),
        # for the independent clock
        ("needs", int),  # the number of the message that it reads
        ("needs_too", int),  # of another that must be there: B's, for the F of an overlapped cell
        ("gives", int),  # the number of the message that it makes
        ("lag", float),  # time from when its message can be read until it can begin
        ("delay", float),  # time from its end until the message that it makes can be read
        ("joint_op", int),  # the number of the op that all stages do together in this event
    ]
)


def make_events(**fields: Any) -> np.ndarray:
    """EVENT [events] with these fields, which are broadcast against each other and flattened; the
    other fields are 0."""
    arrays = np.broadcast_arrays(*fields.values())
    events = np.zeros(arrays[0].size, EVENT)
    for name, array in zip(fields, arrays, strict=True):
        events[name] = array.ravel()
    return events


def timeline_of(events: np.ndarray) -> Timeline:
    """The timeline of EVENTs whose starts are known, in their order."""
    stage, name, unit, microbatch, start = (
        events[field] for field in ("stage", "name", "unit", "microbatch", "start")
    )
    return Timeline(stage, name, unit, microbatch, start, start + events["time"])


# --- cells ----------------------------------------------------------------------------------------


def _shares_of(table: Table, shares: Sequence[float] | None) -> Sequence[float]:
    """Each unit's fraction of a stage's work, by default stages / units."""
    return [table.stages / table.units] * table.units if shares is None else shares


def op_durations(table: Table, times: Times, shares: Sequence[float] | None) -> np.ndarray:
    """The time of each op on each unit, float64 [ops, units + 1]. The last column is 0: idle cells
    have unit −1."""
    # With two units a stage each has half of its work. F = 4 of the stage is 2 in a cell, and R is
    # less where `table.saved` leaves it only some of the unit's layers.
    shares = _shares_of(table, shares)
    of_stage = {Op.IDLE: 0.0, Op.F: times.F, Op.R: times.R, Op.B: times.B, Op.W: times.W}
    durations = np.array([[*(of_stage[op] * share for share in shares), 0.0] for op in Op])
    durations[Op.R, :-1] *= table.recomputed
    return durations


def overlap_factors(
    table: Table, times: Times, shares: Sequence[float] | None, durations: np.ndarray
) -> np.ndarray:
    """The time of each cell's ops, float64 [ticks, stages], in times of the same ops one after the
    other: 1 but in overlapped cells. An op is overlapped as far as its share of a stage's work
    goes, and an overlapped cell takes no less than the longer of its ops.

    durations: by `op_durations`
    """
    factors = np.ones(table.op.shape)
    if not table.overlaps or not times.overlap:
        return factors
    # F = 3, B = 5, overlap = 2, one unit a stage: the cell takes 6 instead of 8, a factor of 3/4.
    # With overlap = 4 it takes 5, for the F cannot hide more than itself.
    cells, share = table.overlapped, np.array(_shares_of(table, shares))
    unit, b_unit = table.unit[cells], table.b_unit[cells]
    forward, backward = durations[Op.F, unit], durations[Op.B, b_unit]
    both = forward + backward
    saved = times.overlap * np.minimum(share[unit], share[b_unit])
    factors[cells] = np.maximum(both - saved, np.maximum(forward, backward)) / np.maximum(
        both, TINY
    )
    return factors


def update_events(table: Table, times: Times, **fields: Any) -> np.ndarray:
    """The events of the optimizer's updates in a table of several steps, by tick and stage, EVENT
    [updates]. fields: further ones of `make_events`"""
    tick, stage = np.nonzero(table.update >= 0)
    return make_events(
        stage=stage,
        tick=tick,
        part=UPDATE,
        name=NAMES.index("O"),
        unit=-1,
        microbatch=table.update[tick, stage],
        time=times.update,
        **fields,
    )


# --- embedding and head ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnOp:
    """An op that a column of the table names: embedding, head, or the embedding's gradient.

    column: int32 [ticks], its microbatch in each tick, −1 for none
    name: an index of NAMES
    time: how long it takes on each stage that takes part
    home: the stage of the first unit, for the head of the last one
    together: all stages take part, and wait for each other
    """

    column: np.ndarray
    name: int
    time: float
    home: int
    together: bool

    def stages(self, count: int) -> np.ndarray:
        """The stages that take part, of `count`."""
        return np.arange(count) if self.together else np.array([self.home])

    def run(self, clock: np.ndarray, lag: float) -> tuple[float, np.ndarray]:
        """Returns (its start, the stages' clocks after it).

        clock: float64 [stages], before it; lag: time in which the home stage's value reaches all
            stages
        """
        # Clocks of 4, 6 and 5, home is stage 2, lag 2, time 1. All together begin at
        # max(6, 5 + 2) = 7 and end at 8. The home stage alone goes from 5 to 6.
        if self.together:
            begin = max(clock.max(), clock[self.home] + lag)
            return begin, np.full(len(clock), begin + self.time)
        begin, after = clock[self.home], clock.copy()
        after[self.home] = begin + self.time
        return begin, after


def column_ops(table: Table, times: Times) -> dict[int, ColumnOp]:
    """The column ops, by part of a tick."""
    sharing = table.stages if table.vocabulary == "parallel" else 1

    def column_op(column: np.ndarray, name: str, time: float, home: int) -> ColumnOp:
        # An op that takes no time is skipped, so no stage has to wait for the others because of it.
        together = sharing > 1 and time > 0
        return ColumnOp(column, NAMES.index(name), time / sharing, home, together)

    return {
        EMBED: column_op(table.embed, "E", times.embed, table.stage_of[0]),
        HEAD: column_op(table.head, "H", times.head, table.stage_of[-1]),
        EMBED_GRADIENT: column_op(table.embed_gradient, "E", times.embed, table.stage_of[0]),
    }
