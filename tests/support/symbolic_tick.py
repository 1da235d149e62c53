"""A tick on symbols in place of arrays: a table executed by the columns that the runtime scans, and by nothing else of the table.

It does what runtime/tick.py does with these columns, stage by stage, but compiles nothing and knows no arithmetic: a value is a tuple
that says what it is. Every op demands the values that it should find, so that a wrong slot, buffer, column or order fails.
"""

import dataclasses
from collections.abc import Callable

from jaxtrain.schedule.columns import (
    ARRIVED,
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
)
from jaxtrain.schedule.columns import units as units_per_stage
from jaxtrain.schedule.slots import SlottedTable
from jaxtrain.schedule.table import Op, Permute, units_of, wraps

SHARED = (EMBED, HEAD, EMBED_GRADIENT)  # all stages do them together where they share the vocabulary
Value = tuple | None  # such as ("activation", unit, microbatch); None: nothing has been written there


def of_columns(function: Callable, columns: TickColumns) -> TickColumns:
    """The columns with a function of each in its place."""
    values = {field.name: getattr(columns, field.name) for field in dataclasses.fields(columns)}
    each = lambda value: {name: function(a) for name, a in value.items()} if isinstance(value, dict) else function(value)
    return TickColumns(**{name: each(value) for name, value in values.items()})


@dataclasses.dataclass
class Stage:
    """What a stage holds: pools of slots by name, and by name the buffers that leave and those that arrive."""

    pools: dict[str, list[Value]]
    buffers: dict[str, Value] = dataclasses.field(default_factory=lambda: dict.fromkeys((*BUFFERS, *ARRIVED.values())))


class Replay:
    """A table's execution. `done` has the tasks: (op, unit, microbatch), ("H", microbatch) of the head, ("E", microbatch) of the gradient
    of the embedding. AssertionError where an op does not find what it needs, or does again what has been done."""

    def __init__(self, slotted: SlottedTable, changed: TickColumns | None = None):
        """`changed`: columns that stand in place of the table's own."""
        self.table, ticks = slotted.table, tick_table(slotted)
        self.columns, self.result_buffers, self.permutes = changed or ticks.columns, ticks.result_buffers, ticks.permutes
        self.units = units_of(self.table.stage_of, self.table.stages)
        self.done: set[tuple] = set()
        slots = {pool: max(1, n) for pool, n in slotted.pool_sizes.items()}
        self.stages = [Stage({pool: [None] * n for pool, n in slots.items()}) for _ in range(self.table.stages)]

    def run(self) -> set[tuple]:
        for t in range(self.table.ticks):
            tick = of_columns(lambda column, t=t: column[t].tolist(), self.columns)
            stages = [of_columns(lambda column, s=s: column[s], tick) for s in range(self.table.stages)]
            for s, columns in enumerate(stages):
                for copy in TAKES:
                    self.copy(copy, s, columns)
            self.permute(tick.runs[permute_op(Permute.EARLY)])
            for op in SHARED:
                assert self.table.vocabulary != "parallel" or len(set(tick.runs[op])) == 1, f"{op} waits for stages that do not run it"
            for s, columns in enumerate(stages):
                self.ops(s, columns)
            self.permute(tick.runs[permute_op(Permute.LATE)])
        return self.done

    def permute(self, runs: list[int]) -> None:
        """Sends the buffers to the neighbours, if the tick does that; all stages do or none does."""
        assert len(set(runs)) == 1, "a permute waits for stages that do not run it"
        if not runs[0]:
            return
        stages, closed = self.table.stages, wraps(self.table.stage_of, self.table.stages)
        for way, step in self.permutes.items():
            sent = [stage.buffers[way] for stage in self.stages]
            for s, stage in enumerate(self.stages):
                source = s - step
                stage.buffers[ARRIVED[way]] = sent[source % stages] if closed or 0 <= source < stages else None

    def copy(self, copy: Copy, s: int, columns: TickColumns) -> None:
        if not columns.runs[copy.op]:
            return
        stage, value = self.stages[s], self.stages[s].buffers[copy.source]
        if copy.slot:
            assert value and value[0] == copy.target, f"{copy.op} finds {value}"
            stage.pools[copy.target][columns.slots[copy.slot]] = value
        else:
            stage.buffers[copy.target] = value

    def ops(self, s: int, columns: TickColumns) -> None:
        table, runs, slots = self.table, columns.runs, columns.slots
        activation, gradient, last = self.stages[s].pools["activation"], self.stages[s].pools["gradient"], table.units - 1
        cells = [(kind, u) for u in range(units_per_stage(table)) for kind in CELL_OPS]
        names = [*SHARED, *(cell_op(*cell) for cell in cells), *(copy.op for copy in (*SENDS, *STAYS))]
        assert bool(columns.busy) == any(runs[name] for name in names), "the runtime may skip what the tick has"
        if runs[EMBED] and s == table.stage_of[0]:
            activation[slots["embed_activation"]] = ("activation", 0, columns.embed_microbatch)
        for kind, u in cells:
            if runs[cell_op(kind, u)]:
                self.compute(kind, u, s, columns)
        for copy in (*SENDS, *STAYS):
            self.copy(copy, s, columns)
        if runs[HEAD] and s == table.stage_of[-1]:
            self.find(activation[slots["head_activation"]], ("activation", last + 1, columns.head_microbatch))
            self.count(("H", columns.head_microbatch))
            if not table.forward_only:
                gradient[slots["head_gradient"]] = ("gradient", last, columns.head_microbatch)
        if runs[EMBED_GRADIENT] and s == table.stage_of[0]:
            self.find(gradient[slots["embed_gradient_gradient"]], ("gradient", -1, columns.embed_gradient_microbatch))
            self.count(("E", columns.embed_gradient_microbatch))

    def compute(self, kind: str, local_unit: int, s: int, columns: TickColumns) -> None:
        """An op of a local unit: F, K (the F that keeps what the backward reads), R, B or W."""
        stage, unit, k = self.stages[s], self.units[s][local_unit], columns.microbatch
        held = lambda pool: stage.pools[pool][columns.slots[pool]]
        residuals, stash = ("residuals", unit, k), ("weight_stash", unit, k)
        if kind in ("F", "K", "R"):
            self.find(held("activation"), ("activation", unit, k))
        if kind in ("K", "R"):
            for pool in ("residual_b", "residual_w"):
                stage.pools[pool][columns.slots[pool]] = residuals
        if kind == "B":
            self.find(held("gradient"), ("gradient", unit, k))
            self.find(held("residual_b"), residuals)
            stage.pools["weight_stash"][columns.slots["weight_stash"]] = stash
        if kind in ("B", "W"):
            self.find(held("residual_w"), residuals)
        if kind == "W":
            self.find(held("weight_stash"), stash)
        if kind in ("F", "K"):
            stage.buffers[self.result_buffers[Op.F, local_unit]] = ("activation", unit + 1, k)
        if kind == "B":
            stage.buffers[self.result_buffers[Op.B, local_unit]] = ("gradient", unit - 1, k)
        self.count(("F" if kind == "K" else kind, unit, k))

    def find(self, value: Value, needed: tuple) -> None:
        assert value == needed, f"{value} in place of {needed}"

    def count(self, task: tuple) -> None:
        assert task not in self.done, f"{task} is done again"
        self.done.add(task)
