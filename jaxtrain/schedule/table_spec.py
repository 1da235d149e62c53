"""The request for a training table: its tasks for an order of ops, and the cost of a table that
meets it. No JAX here."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxtrain.schedule.clocks import Times, coupled_time
from jaxtrain.schedule.orders import PLACEMENTS, Orders
from jaxtrain.schedule.packing import PACKINGS, Tasks, cut_into_units
from jaxtrain.schedule.table import Op, Table, TableShape, peak_residuals

# microbatches whose residuals the last chunk's F may save for their Bs under full recomputation;
# with a larger number they have an R there too
MOST_SAVED = 2


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """A request for a training table.

    schedule:   a name of orders.SCHEDULES, `auto` or `csv:FILE`
    repeats:    chunks on each stage
    times:      what `permute="auto"` and `schedule="auto"` make the table for
    permute:    how ticks send messages, one of packing.PACKINGS; auto: the packing of least coupled
                time
    remat_full: F saves a unit's input alone and R rebuilds what B needs; not for the last unit
    groups:     the number of units that each chunk, in model order, is cut into (`layers_per_op`);
                None: one
    shares:     of each unit, its part of a stage's work; None: stages / units
    vocabulary: one of table.VOCABULARIES
    memory:     for `auto`, the most residuals at once on a stage, weight stash included, as a
                multiple of a whole stage's for one microbatch: a chunk's count 1 / repeats. None:
                no bound
    """

    schedule: str
    stages: int
    repeats: int
    microbatches: int
    _: dataclasses.KW_ONLY
    times: Times = Times()
    permute: str = "auto"
    remat_full: bool = False
    groups: Sequence[int] | None = None
    shares: Sequence[float] | None = None
    vocabulary: str = "parallel"
    memory: float | None = None

    @property
    def packings(self) -> Sequence[str]:
        """The packings to compare. One stage has no permutes, and one packing."""
        if self.stages == 1:
            return ("late",)
        return PACKINGS if self.permute == "auto" else (self.permute,)

    def tasks(self, name: str, placement: str, orders: Orders) -> Tasks:
        """The tasks of an order of chunks, cut into units, ready to be packed. Raises ValueError
        for `groups` of another number of chunks."""
        stage_of_chunk = PLACEMENTS[placement](self.stages, self.repeats)
        chunks = len(stage_of_chunk)
        if self.groups is not None and len(self.groups) != chunks:
            raise ValueError(
                f"groups has {len(self.groups)} numbers, and {name} has {chunks} chunks: give one "
                "number for each"
            )
        recompute_last = self.remat_full and _most_in_flight(orders, chunks - 1) > MOST_SAVED
        orders_of_units, chunk_of = cut_into_units(
            orders, self.groups or [1] * chunks, self.remat_full, recompute_last
        )
        shape = TableShape(
            name=name,
            stage_of=tuple(stage_of_chunk[chunk] for chunk in chunk_of),
            stages=self.stages,
            microbatches=self.microbatches,
            chunk_of=chunk_of,
            recompute=self.remat_full and len(chunk_of) > 1,
            recompute_last=recompute_last,
            vocabulary=self.vocabulary,
        )
        return Tasks(orders_of_units, shape)


def _most_in_flight(orders: Orders, chunk: int) -> int:
    """The most microbatches of a chunk that are between their F and their B at once."""
    in_flight = most = 0
    for op, chunk_of_task, _ in (task for order in orders for task in order):
        if chunk_of_task == chunk:
            in_flight += (op == Op.F) - (op == Op.B)
            most = max(most, in_flight)
    return most


class Cost(NamedTuple):
    """What tables are compared by, in this order: coupled step time, memory by `memory_of`,
    ticks."""

    time: float
    memory: float
    ticks: int


def cost(table: Table, spec: TableSpec) -> Cost:
    """The cost of a table by the spec's times, rounded to nine digits."""
    time = coupled_time(table, spec.times, spec.shares)
    return Cost(float(f"{time:.9g}"), memory_of(table), table.ticks)


def memory_of(table: Table) -> float:
    """The most residuals that any stage holds at once, weight stash included; 1 is those of one
    chunk for one microbatch."""
    return max(peak_residuals(table, count_weight_stash=True))
