"""The coupled clock: the ticks as this runtime executes them.

A permute is one operation of all stages, so a stage waits for its neighbours.

For one tick on stage s, with its neighbours n (only those it exchanges messages with) and the
cell's time:

    end[s] = start[s] + cell                                            tick without permute:
                                                                        next start[s] = end[s]
    late permute     next start[s] = max(end[s], end[n] + message)      begins when the op is done
    early permute    next start[s] = max(end[s], start[n] + message)    begins with the tick, under
                                                                        the op

No JAX here.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxtrain.schedule.clock import (
    CELL,
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    Timeline,
    Times,
    column_ops,
    durations,
    records,
)
from jaxtrain.schedule.table import Permute, Table, wraps


@dataclasses.dataclass
class Starts:
    """When things start by the coupled clock, as `walk` finds it.

    cells: of each tick, float64 [stages]; column_ops: part of a tick → the (tick, time) of its op,
    where it takes time
    """

    cells: list[np.ndarray] = dataclasses.field(default_factory=list)
    column_ops: dict[int, list[tuple[int, float]]] = dataclasses.field(
        default_factory=lambda: {EMBED: [], HEAD: [], EMBED_GRADIENT: []}
    )


STARTED = np.dtype(
    [
        ("tick", int),
        ("part", int),
        ("stage", int),
        ("name", int),
        ("unit", int),
        ("microbatch", int),
        ("start", float),
        ("end", float),
    ]
)


def coupled(table: Table, times: Times, shares: Sequence[float] | None = None) -> Timeline:
    """The timeline of the ticks as this runtime executes them; events stand by tick, in the order
    of a tick's parts, and by stage."""
    starts = Starts()
    walk(table, times, shares, starts)
    tick, stage = np.nonzero(table.op)
    op, unit, microbatch = (
        array[tick, stage] for array in (table.op, table.unit, table.microbatch)
    )
    start = np.array(starts.cells).reshape(table.op.shape)[tick, stage]
    end = start + durations(table, times, shares)[op, unit]
    parts = [
        records(
            STARTED,
            tick=tick,
            part=CELL,
            stage=stage,
            name=op,
            unit=unit,
            microbatch=microbatch,
            start=start,
            end=end,
        )
    ]
    for part, column_op in column_ops(table, times).items():
        stages = np.arange(table.stages) if column_op.together else np.array([column_op.home])
        ticks = np.array([tick for tick, _ in starts.column_ops[part]], int)[:, None]
        begin = np.array([begin for _, begin in starts.column_ops[part]], float)[:, None]
        parts.append(
            records(
                STARTED,
                tick=ticks,
                part=part,
                stage=stages,
                name=column_op.name,
                unit=-1,
                microbatch=column_op.column[ticks],
                start=begin,
                end=begin + column_op.time,
            )
        )
    events = np.concatenate(parts)
    events = events[np.lexsort((events["stage"], events["part"], events["tick"]))]
    return Timeline(*(events[field.name] for field in dataclasses.fields(Timeline)))


def walk(
    table: Table, times: Times, shares: Sequence[float] | None = None, starts: Starts | None = None
) -> float:
    """The coupled step time. If given, `starts` gets when everything starts."""
    message, ops = times.message, column_ops(table, times)
    # stage 0 and the last one are neighbours too
    closed = table.stages > 2 and wraps(table.stage_of, table.stages)
    # What takes no time is left out: none of its ticks.
    columns = {
        part: op.column.tolist() if op.time else [-1] * table.ticks for part, op in ops.items()
    }
    # All need the home stage's value first, but for the embedding, which reads tokens.
    lags = {EMBED: -np.inf, HEAD: message, EMBED_GRADIENT: message}

    def after(part: int, tick: int, clock: np.ndarray) -> np.ndarray:
        """The stages' clocks after a column's op in a tick."""
        if columns[part][tick] < 0:
            return clock
        begin, clock = ops[part].run(clock, lags[part])
        if starts is not None:
            starts.column_ops[part].append((tick, float(begin)))
        return clock

    start = np.zeros(table.stages)
    duration = durations(table, times, shares)[table.op, table.unit]
    for tick, when in enumerate(table.permute.tolist()):
        if times.tick:
            start = start + times.tick
        begin = after(EMBED, tick, start)
        if starts is not None:
            starts.cells.append(begin)
        end = after(EMBED_GRADIENT, tick, after(HEAD, tick, begin + duration[tick]))
        if when != Permute.NONE:
            come = (start if when == Permute.EARLY else end) + message
            end = end.copy()
            np.maximum(end[1:], come[:-1], out=end[1:])
            np.maximum(end[:-1], come[1:], out=end[:-1])
            if closed:
                end[0], end[-1] = max(end[0], come[-1]), max(end[-1], come[0])
        start = end
    return float(start.max())
