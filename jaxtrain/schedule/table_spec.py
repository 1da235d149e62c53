"""The request for a training table: the tasks of an order of ops, and the cost by which tables are
compared. No JAX here."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxtrain.schedule.clocks.coupled import coupled_time
from jaxtrain.schedule.clocks.times import Times
from jaxtrain.schedule.orders import ChunkOrders
from jaxtrain.schedule.orders.stage_orders import Orders
from jaxtrain.schedule.packing import IN_ORDER, PACKINGS, Tasks, cut_into_units
from jaxtrain.schedule.table import Op, ScheduleError, Table, TableShape, peak_residuals

# Under full recomputation the last unit has no R, and its F saves the residuals themselves, while
# at most this many microbatches are between their F and B there; with overlapped cells one, or all
# stages would have memory for the residuals of two.
MOST_SAVED, MOST_SAVED_IN_CELLS = 2, 1


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """A request for a training table.

    schedule:   a name of orders.SCHEDULES, `auto` or `csv:FILE`
    repeats:    number of chunks on each stage
    times:      the op times for which `permute="auto"` and `schedule="auto"` choose
    permute:    one of packing.PACKINGS; auto: the packing whose table takes the least coupled time
    remat_full: F saves only a unit's input, and R rebuilds what B needs; not for the last unit
    units_per_chunk: number of units into which each chunk, in model order, is cut (from
                `pipeline.layers_per_op`); None: one
    shares:     each unit's fraction of a stage's work; None: stages / units
    saved:      each unit's fraction of layers that save all residuals; (): none in any unit
    saves_inputs: under full remat F saves the input of each layer that R recomputes
    vocabulary: one of table.VOCABULARIES
    overlap:    Fs and Bs share cells where the order has them so
    memory:     for `auto`, the most residuals that a stage may hold at once, weight stash included;
                1 is those of all its layers for one microbatch, 1 / repeats those of a chunk.
                None: no bound
    """

    schedule: str
    stages: int
    repeats: int
    microbatches: int
    _: dataclasses.KW_ONLY
    times: Times = Times()
    permute: str = "auto"
    remat_full: bool = False
    units_per_chunk: Sequence[int] | None = None
    shares: Sequence[float] | None = None
    saved: tuple[float, ...] = ()
    saves_inputs: bool = False
    vocabulary: str = "parallel"
    overlap: bool = False
    memory: float | None = None

    @property
    def packings(self) -> Sequence[str]:
        """The packings to compare. One stage has no permutes, and one packing."""
        if self.stages == 1:
            return ("late",)
        if self.permute == "auto":
            return IN_ORDER if self.overlap else PACKINGS
        return (self.permute,)

    # The name of an order, its chunks' stages and its overlapped Fs come from `chunk_orders`; all
    # else from the spec.
    def tasks(self, chunk_orders: ChunkOrders) -> Tasks:
        """The tasks of orders of ops on chunks, cut into units, to be packed. Raises ScheduleError
        unless `units_per_chunk` has a number for each chunk."""
        name, orders = chunk_orders.name, chunk_orders.orders
        chunks = len(chunk_orders.stage_of)
        if self.units_per_chunk is not None and len(self.units_per_chunk) != chunks:
            raise ScheduleError(
                f"units_per_chunk has {len(self.units_per_chunk)} numbers, and {name} has {chunks} "
                "chunks: give one number for each"
            )
        most_saved = MOST_SAVED_IN_CELLS if self.overlap else MOST_SAVED
        recompute_last = self.remat_full and _most_in_flight(orders, chunks - 1) > most_saved
        orders_of_units, chunk_of, overlapped = cut_into_units(
            orders,
            self.units_per_chunk or [1] * chunks,
            self.remat_full,
            recompute_last,
            chunk_orders.overlapped if self.overlap else frozenset(),
        )
        shape = TableShape(
            name=name,
            stage_of=tuple(chunk_orders.stage_of[chunk] for chunk in chunk_of),
            stages=self.stages,
            microbatches=self.microbatches,
            chunk_of=chunk_of,
            recompute=self.remat_full and len(chunk_of) > 1,
            recompute_last=recompute_last,
            saved=self.saved,
            saves_inputs=self.saves_inputs,
            vocabulary=self.vocabulary,
        )
        return Tasks(orders_of_units, shape, overlapped)


def _most_in_flight(orders: Orders, chunk: int) -> int:
    """The most microbatches of a chunk that are between their F and their B at once."""
    # F0 F1 B0 W0 F2 B1 …: 1 2 1 1 2 1 …, at most 2. Only one stage has the chunk.
    in_flight = most = 0
    for op, chunk_of_task, _ in (task for order in orders for task in order):
        if chunk_of_task == chunk:
            in_flight += (op == Op.F) - (op == Op.B)
            most = max(most, in_flight)
    return most


class Cost(NamedTuple):
    """The cost of a table. Costs are compared by coupled step time, then by the memory of
    `memory_of`, then by ticks."""

    time: float
    memory: float
    ticks: int


def cost(table: Table, times: Times, shares: Sequence[float] | None = None) -> Cost:
    """The cost of a table by these op times, rounded to nine digits. shares: of each unit, as in
    `TableSpec`"""
    # Nine digits: sums of floats in another order must not decide between two tables that take the
    # same time.
    time = coupled_time(table, times, shares)
    return Cost(float(f"{time:.9g}"), memory_of(table), table.ticks)


def memory_of(table: Table) -> float:
    """The most residuals that any stage holds at once, weight stash included; 1 is those of one
    chunk for one microbatch."""
    return max(peak_residuals(table, count_weight_stash=True))
