"""What both clocks of simulate.py need: the times of ops, the parts of a tick, and the events of a
timeline. No JAX here."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.schedule.table import Op, Table


@dataclasses.dataclass(frozen=True)
class Times:
    """Times of ops, in seconds, milliseconds or any other unit.

    F, B, W, R:  of one microbatch on a whole stage
    message:     of a message from a stage to its neighbour
    head, embed: of one microbatch on one stage, the whole head with loss and gradients; the
        embedding, and as much for its gradient
    tick:        of every tick of the table beside its ops, also of an idle one, by the coupled
                 clock
    """

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    message: float = 0.0
    R: float = 0.0
    head: float = 0.0
    tick: float = 0.0
    embed: float = 0.0


@dataclasses.dataclass(frozen=True)
class Event:
    """An op's time on a stage. `name` is F, R, B, W, H for the head or E for the embedding and its
    gradient, which have `unit` −1; other units are in model order."""

    stage: int
    name: str
    unit: int
    microbatch: int
    start: float
    end: float


NAMES = ("", "F", "R", "B", "W", "H", "E")  # of events, by number: those of the ops come first


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline(Iterable[Event]):
    """Events as arrays of one length, int64 and, of times, float64; iterated, as Events. `name` is
    a place in NAMES."""

    stage: np.ndarray
    name: np.ndarray
    unit: np.ndarray
    microbatch: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.stage)

    def __iter__(self) -> Iterator[Event]:
        columns = (getattr(self, field.name).tolist() for field in dataclasses.fields(self))
        for stage, name, unit, microbatch, start, end in zip(*columns, strict=True):
            yield Event(stage, NAMES[name], unit, microbatch, start, end)


def durations(table: Table, times: Times, shares: Sequence[float] | None) -> np.ndarray:
    """float64 [ops, units + 1] → time; the last column is 0, so that −1 stands for an idle cell."""
    if shares is None:
        shares = [table.stages / table.units] * table.units
    whole = {Op.IDLE: 0.0, Op.F: times.F, Op.R: times.R, Op.B: times.B, Op.W: times.W}
    return np.array([[*(whole[op] * share for share in shares), 0.0] for op in Op])


EMBED, CELL, HEAD, EMBED_GRADIENT = range(4)  # the parts of a tick, in this order


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnOp:
    """An op that a column of the table names, and not a cell.

    column: int32 [ticks], its microbatch in each tick or −1; name: of its events, a place in NAMES;
        time: on a stage
    home: the stage that has it; together: whether instead all stages take part and wait for each
        other
    """

    column: np.ndarray
    name: int
    time: float
    home: int
    together: bool

    def run(self, clock: np.ndarray, lag: float) -> tuple[float, np.ndarray]:
        """(when it begins, the stages' clocks after it). lag: what the home stage's value takes to
        come to all, where all take part."""
        if self.together:
            begin = max(clock.max(), clock[self.home] + lag)
            return begin, np.full(len(clock), begin + self.time)
        begin, after = clock[self.home], clock.copy()
        after[self.home] = begin + self.time
        return begin, after


def column_ops(table: Table, times: Times) -> dict[int, ColumnOp]:
    """Part of a tick → its op."""
    sharing = table.stages if table.vocabulary == "parallel" else 1
    first, last = table.stage_of[0], table.stage_of[-1]
    head, embed = NAMES.index("H"), NAMES.index("E")
    return {
        EMBED: ColumnOp(
            table.embed, embed, times.embed / sharing, first, sharing > 1 and times.embed > 0
        ),
        HEAD: ColumnOp(
            table.head, head, times.head / sharing, last, sharing > 1 and times.head > 0
        ),
        EMBED_GRADIENT: ColumnOp(
            table.embed_gradient,
            embed,
            times.embed / sharing,
            first,
            sharing > 1 and times.embed > 0,
        ),
    }


def records(kind: np.dtype, **fields: Any) -> np.ndarray:
    """[n]: records with these fields, which are broadcast against each other and flattened."""
    arrays = np.broadcast_arrays(*fields.values())
    records = np.zeros(arrays[0].size, kind)
    for name, array in zip(fields, arrays, strict=True):
        records[name] = array.ravel()
    return records
