"""The transport of messages: the tick in which one leaves its stage, and the tick from which on it
can be read. No other module computes these.

A message that stays on its stage can be read from the tick after its op's. One that moves waits in
its stage's send buffer, of which there is one for each direction, until a permute sends it. A late
permute comes after the ops of its tick and sends their messages too; an early one comes before them
and sends only those of earlier ticks. A message can be read from the tick after its permute's on.

    tick                0           1           2           3
    op of stage 0       F0
    permute             none        late        none        none
    stage 1             –           –           may read    may read

In a table with overlapped cells a stage has two such buffers for each direction, one for the
messages of F and one for those of B: both may go the same way at once.

No JAX here.
"""

import dataclasses
import itertools
from typing import TypeVar

import numpy as np

from jaxtrain.schedule.table import Op, Permute, Table, message_ways

NEVER = np.iinfo(np.int32).max  # the tick of what does not come
Ticks = TypeVar("Ticks", int, np.ndarray)


def read_after(tick: Ticks) -> Ticks:
    """The earliest tick that can read a message that a tick's permute sends, or that its op makes
    and that stays: the next one."""
    return tick + 1


def departures(permute: np.ndarray) -> np.ndarray:
    """The tick whose permute sends the messages of each tick's ops, int64 [ticks]; NEVER where none
    does. permute: int [ticks], of Permute."""
    # Permutes late – early late: the messages of ticks 0 1 2 3 leave in ticks 0 2 3 3. That of tick
    # 2 is made after the early permute, and waits for the next one.
    ticks = np.arange(len(permute))
    leaves = np.full(len(permute), NEVER, np.int64)
    # `searchsorted` finds the first permute at or after the tick ("left"), or only after it
    # ("right"): an early permute of the op's own tick comes before the op.
    for when, side in ((Permute.LATE, "left"), (Permute.EARLY, "right")):
        permutes = np.append(np.flatnonzero(permute == when), NEVER)
        leaves = np.minimum(leaves, permutes[np.searchsorted(permutes, ticks, side=side)])  # type: ignore[call-overload]
    return leaves


def readable_from(ticks: np.ndarray, ways: np.ndarray, permute: np.ndarray) -> np.ndarray:
    """The earliest tick in which each message can be read, int [messages]; NEVER for one that no
    permute sends.

    ticks, ways: int [messages], the tick of its op, and its way, 0 where it stays
    """
    leaves = departures(permute)[ticks]
    return np.where(
        ways == 0, read_after(ticks), np.where(leaves == NEVER, NEVER, read_after(leaves))
    )


def delays(ways: np.ndarray, when: Permute) -> np.ndarray:
    """Ticks from each message's op until it can be read, int [messages], if every tick permutes at
    this time."""
    # 1 if it stays or permutes are late, 2 if they are early. Two ticks show all cases.
    return readable_from(np.zeros(len(ways), int), ways, np.full(2, when))


@dataclasses.dataclass(frozen=True, eq=False)
class Arrivals:
    """The earliest tick in which each message can be read, NEVER for one that never arrives.

    activation: int32 [units + 1, microbatches], input of each unit; activation[-1], the head's,
                from the tick in which it is made
    gradient:   int32 [units + 1, microbatches], gradient of each unit's output; gradient[-1], of
                the embedding, from the tick in which it is made
    """

    activation: np.ndarray
    gradient: np.ndarray


def arrivals(table: Table) -> Arrivals:
    """The arrivals of all messages of a table that has every cell and every entry of its columns
    once."""
    tick, stage, op, unit, microbatch = table.busy
    readable = readable_from(
        tick, message_ways(table.stage_of, table.stages)[op, unit], table.permute
    )
    last = table.units - 1
    activation, gradient = (
        np.full((table.units + 1, table.microbatches), NEVER, np.int32) for _ in range(2)
    )
    activation[0] = _ticks_of(table.embed, table.microbatches)
    heads = _ticks_of(table.head, table.microbatches)
    gradient[last] = np.where(heads == NEVER, NEVER, read_after(heads))
    forward, backward = op == Op.F, op == Op.B
    # F of unit u fills entry u + 1, B of unit u entry u − 1: for unit 0 that is index −1, the last
    # entry, which is the embedding's. Head and embedding's gradient come after the cell's op in the
    # same tick, so their values can be read in it.
    activation[unit[forward] + 1, microbatch[forward]] = np.where(unit == last, tick, readable)[
        forward
    ]
    gradient[unit[backward] - 1, microbatch[backward]] = np.where(unit == 0, tick, readable)[
        backward
    ]
    return Arrivals(activation, gradient)


def _ticks_of(column: np.ndarray, microbatches: int) -> np.ndarray:
    """The tick in which a column names each microbatch, int32 [microbatches]."""
    ticks = np.full(microbatches, NEVER, np.int32)
    named = np.flatnonzero(column >= 0)
    ticks[column[named]] = named
    return ticks


def buffer_numbers(table: Table, op: np.ndarray, way: np.ndarray) -> np.ndarray:
    """The number of the send buffer of each op's message on its stage, int [ops]: equal for
    messages that take turns in one buffer."""
    return way + 3 * (op == Op.B) * table.overlaps


def sent_ways(table: Table) -> dict[Op, np.ndarray]:
    """F or B → int32 [ticks, stages]: the way that its message of the tick leaves, +1 or −1; 0 for
    none."""
    ways = message_ways(table.stage_of, table.stages)
    forward, backward = (np.where(table.op == op, ways[op, table.unit], 0) for op in (Op.F, Op.B))
    backward = backward + ways[Op.B, table.b_unit]
    return {Op.F: forward.astype(np.int32), Op.B: backward.astype(np.int32)}


def waiting(table: Table) -> dict[tuple[Op, int], np.ndarray]:
    """(F or B, way +1 or −1) → bool [ticks, stages]: the send buffer of the op's messages of that
    way holds one that is still to leave when the tick's op begins."""
    sent = sent_ways(table)
    if not table.overlaps:  # one buffer for both
        sent = dict.fromkeys(sent, sent[Op.F] + sent[Op.B])
    leaves = departures(table.permute)
    # The earliest tick in which the buffer is free of each tick's messages. A late permute of that
    # tick empties it after the tick's op, an early one before.
    late = table.permute[np.minimum(leaves, table.ticks - 1)] == Permute.LATE
    free = np.where(leaves == NEVER, table.ticks, np.where(late, leaves + 1, leaves))
    buffers = {}
    for op, way in itertools.product(sent, (1, -1)):
        tick, stage = np.nonzero(sent[op] == way)
        # +1 from the tick after the op on, −1 from when the buffer is free: sums over ticks then
        # count the messages in the buffer, 0 or 1 in a table that has passed the check.
        change = np.zeros((table.ticks + 1, table.stages), int)
        np.add.at(change, (tick + 1, stage), 1)
        np.add.at(change, (free[tick], stage), -1)
        buffers[op, way] = np.cumsum(change, axis=0)[:-1] > 0
    return buffers
