"""The coupled clock: ticks as the runtime executes them. A permute is one operation of all stages,
so a stage waits for its neighbours. Begin with `coupled_starts`.

One tick on stage s, with neighbours n, the stages that it exchanges messages with:

    end[s] = start[s] + cell
    no permute       next start[s] = end[s]
    late permute     next start[s] = max(end[s], end[n] + message)      begins when the op is done
    early permute    next start[s] = max(end[s], start[n] + message)    begins with the tick, under
                                                                        the op

    Three stages start at 0 with cells of 3, 1 and 2, and a message takes 1:
                       stage 0   stage 1   stage 2
    no permute            3         1         2
    late permute          3         4         2       stage 1 waits for the F of stage 0
    early permute         3         1         2       the messages have left at 0

A tick's head takes `head` on the last unit's stage if that stage computes it alone. If all stages
share the vocabulary, it begins when all of them have come to it and the last unit's output has
arrived (`message`), and takes head / stages on each. The embedding and its gradient do the same
with the first unit's stage and `embed`. An op that takes no time is skipped, and no stage waits for
it. No JAX here.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxtrain.schedule.clocks.events import (
    CELL,
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    column_ops,
    make_events,
    op_durations,
    overlap_factors,
    timeline_of,
    update_events,
)
from jaxtrain.schedule.clocks.times import Timeline, Times
from jaxtrain.schedule.table import Op, Permute, Table, wraps


@dataclasses.dataclass
class CoupledStarts:
    """The starts of ops by the coupled clock.

    cells:      for each tick, float64 [stages]
    updates:    for each tick with an update, float64 [stages]
    column_ops: part of a tick → (tick, start) of each of its ops, if they take time
    step_time:  the end of the last tick
    """

    cells: list[np.ndarray]
    updates: list[np.ndarray]
    column_ops: dict[int, list[tuple[int, float]]]
    step_time: float = 0.0


def coupled_starts(
    table: Table, times: Times, shares: Sequence[float] | None = None
) -> CoupledStarts:
    """The starts of all ops by the coupled clock.

    shares: each unit's fraction of a stage's work; None: stages / units
    """
    message, ops = times.message, column_ops(table, times)
    starts = CoupledStarts([], [], {part: [] for part in ops})
    # Stage 0 and the last one are neighbours too where a message goes between them. Of two stages
    # they are neighbours anyway.
    closed = table.stages > 2 and wraps(table.stage_of, table.stages)
    # An op that takes no time stands in no tick.
    columns = {
        part: op.column.tolist() if op.time else [-1] * table.ticks for part, op in ops.items()
    }
    # Head and embedding's gradient need the home stage's value first; the embedding reads tokens.
    lags = {EMBED: -np.inf, HEAD: message, EMBED_GRADIENT: message}

    def after(part: int, tick: int, clock: np.ndarray) -> np.ndarray:
        """The stages' clocks after a column's op in a tick."""
        if columns[part][tick] < 0:
            return clock
        begin, clock = ops[part].run(clock, lags[part])
        starts.column_ops[part].append((tick, float(begin)))
        return clock

    start = np.zeros(table.stages)
    durations = op_durations(table, times, shares)
    duration = durations[table.op, table.unit] + durations[Op.B, table.b_unit]
    duration = duration * overlap_factors(table, times, shares, durations)
    updating = set(np.nonzero(table.update >= 0)[0].tolist())
    for tick, when in enumerate(table.permute.tolist()):
        if times.tick:
            start = start + times.tick
        begin = after(EMBED, tick, start)
        starts.cells.append(begin)
        end = after(EMBED_GRADIENT, tick, after(HEAD, tick, begin + duration[tick]))
        if tick in updating:
            starts.updates.append(end)
            end = end + times.update * (table.update[tick] >= 0)
        if when != Permute.NONE:
            # A stage waits for both neighbours, whether they have a message for it or not: the
            # permute is one operation of the program. `arrival` is fixed before `end` changes, so
            # no wait travels further than one stage in a tick.
            arrival = (start if when == Permute.EARLY else end) + message
            end = end.copy()
            np.maximum(end[1:], arrival[:-1], out=end[1:])
            np.maximum(end[:-1], arrival[1:], out=end[:-1])
            if closed:
                end[0], end[-1] = max(end[0], arrival[-1]), max(end[-1], arrival[0])
        start = end
    starts.step_time = float(start.max())
    return starts


def coupled_time(table: Table, times: Times, shares: Sequence[float] | None = None) -> float:
    """The step time by the coupled clock."""
    return coupled_starts(table, times, shares).step_time


def coupled(table: Table, times: Times, shares: Sequence[float] | None = None) -> Timeline:
    """The timeline by the coupled clock, ordered by tick, part of the tick and stage."""
    starts = coupled_starts(table, times, shares)
    tick, stage, op, unit, microbatch = table.busy
    durations = op_durations(table, times, shares)
    factors = overlap_factors(table, times, shares, durations)
    start = np.array(starts.cells).reshape(table.op.shape)
    # Both ops of an overlapped cell begin together. The picture has the B behind its F, so that
    # neither hides the other.
    after_f = factors * np.where(table.overlapped, durations[Op.F, table.unit], 0.0)
    cells = make_events(
        stage=stage,
        tick=tick,
        part=CELL,
        name=op,
        unit=unit,
        microbatch=microbatch,
        start=start[tick, stage] + np.where(op == Op.B, after_f[tick, stage], 0.0),
        time=durations[op, unit] * factors[tick, stage],
    )
    tick, stage = np.nonzero(table.update >= 0)
    ticks_of_updates, index = np.unique(tick, return_inverse=True)
    begun = np.array(starts.updates).reshape(len(ticks_of_updates), table.stages)
    parts = [cells, update_events(table, times, start=begun[index, stage])]
    for part, column_op in column_ops(table, times).items():
        # [ops, 1] against the stages that take part: an event for each op on each of them.
        started = np.array(starts.column_ops[part], float).reshape(-1, 2)
        ticks = started[:, :1].astype(int)
        parts.append(
            make_events(
                stage=column_op.stages(table.stages),
                tick=ticks,
                part=part,
                name=column_op.name,
                unit=-1,
                microbatch=column_op.column[ticks],
                start=started[:, 1:],
                time=column_op.time,
            )
        )
    events = np.concatenate(parts)
    # Stable: of an overlapped cell the F, which `table.busy` has before its B, stays before it.
    return timeline_of(events[np.lexsort((events["stage"], events["part"], events["tick"]))])
