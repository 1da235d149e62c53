"""A tick on symbols in place of arrays: a table executed by the columns that the runtime scans, and by nothing else of the table.

It does what runtime/tick.py does with these columns, stage by stage, but compiles nothing and knows no arithmetic: a value is a tuple
that says what it is. Every op demands the values that it should find, so that a wrong slot, buffer, column or order fails.
"""

import dataclasses

import numpy as np

from jaxtrain.schedule.columns import (
    BUFFERS,
    CELL_OPS,
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    SENDS,
    STAYS,
    TAKES,
    Copy,
    TickColumns,
    cell_op,
    permute_op,
    tick_table,
    units,
)
from jaxtrain.schedule.slots import KINDS as POOLS
from jaxtrain.schedule.slots import SlottedTable
from jaxtrain.schedule.table import Op, Permute, Table, tasks, units_of, wraps

SHARED = (EMBED, HEAD, EMBED_GRADIENT)  # all stages do them together where they share the vocabulary
Value = tuple | None  # such as ("activation", unit, microbatch); None: nothing has been written there


@dataclasses.dataclass
class Stage:
    """What a stage holds: pools of slots by name, and buffers: those that leave, and those in which a message arrives."""

    pools: dict[str, list[Value]]
    buffers: dict[str, Value] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """The columns of one tick on one stage."""

    columns: TickColumns
    tick: int
    stage: int

    def runs(self, op: str) -> bool:
        return bool(self.columns.runs[op][self.tick, self.stage])

    def slot(self, name: str) -> int:
        return int(self.columns.slots[name][self.tick, self.stage])

    def microbatch(self, op: str = "") -> int:
        """That of the cell, or of an op that is no cell's."""
        return int(getattr(self.columns, f"{op}_microbatch" if op else "microbatch")[self.tick, self.stage])


class Replay:
    """A table's execution. `done` has the tasks: (op, unit, microbatch), ("H", microbatch) of the head, ("E", microbatch) of the gradient
    of the embedding. AssertionError where an op does not find what it needs, or does again what has been done."""

    def __init__(self, slotted: SlottedTable, columns: TickColumns | None = None):
        """`columns`: in place of the table's own."""
        ticks = tick_table(slotted)
        self.table, self.result_buffers, self.permutes = slotted.table, ticks.result_buffers, ticks.permutes
        self.columns = columns or ticks.columns
        self.units = units_of(self.table.stage_of, self.table.stages)
        self.done: set[tuple] = set()
        self.stages = [Stage({pool: [None] * max(1, n) for pool, n in slotted.pool_sizes.items()}) for _ in range(self.table.stages)]

    def run(self) -> set[tuple]:
        for tick in range(self.table.ticks):
            rows = [Row(self.columns, tick, stage) for stage in range(self.table.stages)]
            for stage, row in zip(self.stages, rows, strict=True):
                for copy in TAKES:
                    self.copy(copy, stage, row)
            self.permute(Permute.EARLY, rows)
            for op in SHARED:
                together = self.table.vocabulary == "parallel"
                assert not together or len({row.runs(op) for row in rows}) == 1, f"{op} waits for stages that do not run it"
            for row in rows:
                self.ops(row)
            self.permute(Permute.LATE, rows)
        return self.done

    def permute(self, when: Permute, rows: list[Row]) -> None:
        """Sends the buffers to the neighbours, if the tick does so now; all stages want it or none does."""
        wanted = {row.runs(permute_op(when)) for row in rows}
        assert len(wanted) == 1, "a permute waits for stages that do not run it"
        if wanted == {False}:
            return
        stages, closed = self.table.stages, wraps(self.table.stage_of, self.table.stages)
        for way, step in self.permutes.items():
            sent = [stage.buffers.get(way) for stage in self.stages]
            for number, stage in enumerate(self.stages):
                source = number - step
                stage.buffers[f"{way}_arrived"] = sent[source % stages] if closed or 0 <= source < stages else None

    def copy(self, copy: Copy, stage: Stage, row: Row) -> None:
        if not row.runs(copy.op):
            return
        value = stage.buffers.get(copy.source)
        if copy.target in BUFFERS:
            stage.buffers[copy.target] = value
        else:
            assert value and value[0] == copy.target, f"{copy.op} finds {value}"
            stage.pools[copy.target][row.slot(copy.slot)] = value

    def ops(self, row: Row) -> None:
        """What a tick may compute on a stage, in order."""
        stage, table, last = self.stages[row.stage], self.table, self.table.units - 1
        cells = [(kind, u) for u in range(units(table)) for kind in CELL_OPS]
        every = [*SHARED, *(cell_op(*cell) for cell in cells), *(copy.op for copy in (*SENDS, *STAYS))]
        wanted = [op for op in every if row.runs(op)]
        assert bool(row.columns.busy[row.tick, row.stage]) == bool(wanted), f"the runtime may skip {wanted}"
        first_stage, last_stage = row.stage == table.stage_of[0], row.stage == table.stage_of[-1]
        if row.runs(EMBED) and first_stage:
            stage.pools["activation"][row.slot("embed_activation")] = ("activation", 0, row.microbatch(EMBED))
        for kind, u in cells:
            if row.runs(cell_op(kind, u)):
                self.compute(kind, u, row)
        for copy in (*SENDS, *STAYS):
            self.copy(copy, stage, row)
        if row.runs(HEAD) and last_stage:
            self.find(stage, "activation", row.slot("head_activation"), ("activation", last + 1, row.microbatch(HEAD)))
            self.count(("H", row.microbatch(HEAD)))
            if not table.forward_only:
                stage.pools["gradient"][row.slot("head_gradient")] = ("gradient", last, row.microbatch(HEAD))
        if row.runs(EMBED_GRADIENT) and first_stage:
            message = ("gradient", -1, row.microbatch(EMBED_GRADIENT))
            self.find(stage, "gradient", row.slot("embed_gradient_gradient"), message)
            self.count(("E", row.microbatch(EMBED_GRADIENT)))

    def compute(self, kind: str, u: int, row: Row) -> None:
        """An op of local unit u: F, K (the F that keeps what the backward reads), R, B or W."""
        stage, unit, k = self.stages[row.stage], self.units[row.stage][u], row.microbatch()
        slot = {pool: row.slot(pool) for pool in POOLS}
        read = {"F": ["activation"], "K": ["activation"], "R": ["activation"], "W": ["residual_w", "weight_stash"]}
        read["B"] = ["gradient", "residual_b", "residual_w"]
        fills = {"K": ["residual_b", "residual_w"], "R": ["residual_b", "residual_w"], "B": ["weight_stash"]}
        for pool in read[kind]:
            self.find(stage, pool, slot[pool], (pool, unit, k))
        for pool in fills.get(kind, []):
            stage.pools[pool][slot[pool]] = (pool, unit, k)
        if kind in "FK":
            stage.buffers[self.result_buffers[Op.F, u]] = ("activation", unit + 1, k)
        if kind == "B":
            stage.buffers[self.result_buffers[Op.B, u]] = ("gradient", unit - 1, k)
        self.count(("F" if kind == "K" else kind, unit, k))

    def find(self, stage: Stage, pool: str, slot: int, wanted: tuple) -> None:
        value = stage.pools[pool][slot]
        assert value == wanted, f"{value} in place of {wanted}"

    def count(self, task: tuple) -> None:
        assert task not in self.done, f"{task} is done again"
        self.done.add(task)


def expected(table: Table) -> set[tuple]:
    """What a replay of a table has to do."""
    heads = {("H", k) for k in range(table.microbatches)}
    cells = {(Op(op).name, unit, k) for op, unit, k in tasks(table)}
    return cells | heads if table.forward_only else cells | heads | {("E", k) for k in range(table.microbatches)}


def by_name(columns: TickColumns) -> dict[str, np.ndarray]:
    """Every column by name: those of `runs` by op, of `slots` as "slot NAME"."""
    numbers = {field.name: getattr(columns, field.name) for field in dataclasses.fields(columns)}
    numbers = {name: column for name, column in numbers.items() if isinstance(column, np.ndarray)}
    return numbers | columns.runs | {f"slot {name}": column for name, column in columns.slots.items()}


def changed(columns: TickColumns, name: str, column: np.ndarray) -> TickColumns:
    """The columns with another one in place of that of a name in `by_name`."""
    if name.startswith("slot "):
        return dataclasses.replace(columns, slots=columns.slots | {name.removeprefix("slot "): column})
    if name in columns.runs:
        return dataclasses.replace(columns, runs=columns.runs | {name: column})
    return dataclasses.replace(columns, **{name: column})
