"""A tick on symbols in place of arrays: a table executed by the columns that the runtime scans, and
by nothing else of the table.

It does what runtime/tick.py does with these columns, stage by stage, but compiles nothing and knows
no arithmetic: a value is a tuple that says what it is. Every op demands the values that it should
find, so that a wrong slot, buffer, column or order fails.
"""

import dataclasses

import numpy as np

from jaxtrain.schedule.columns import (
    ARRIVED,
    BUFFERS,
    CELL_OPS,
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    TickColumns,
    TickTable,
    cell_op,
    permute_op,
)
from jaxtrain.schedule.table import Op, Permute, units_of, wraps

# all stages do them together where they share the vocabulary
SHARED = (EMBED, HEAD, EMBED_GRADIENT)
# such as ("activation", unit, microbatch); None: nothing has been written there
Value = tuple | None


def by_name(columns: TickColumns) -> dict[str, np.ndarray]:
    """Every column by a name of its own: the fields', the ops', and the slots' with "_slot" behind
    them."""
    microbatches = (
        "microbatch",
        "embed_microbatch",
        "head_microbatch",
        "embed_gradient_microbatch",
    )
    if columns.b_microbatch is not None:
        microbatches = (*microbatches, "b_microbatch")
    fields = {name: getattr(columns, name) for name in (*microbatches, "busy")}
    return (
        fields
        | columns.runs
        | {
            f"{slot}_slot": column
            for slot, column in vars(columns.slots).items()
            if column is not None
        }
    )


@dataclasses.dataclass
class Stage:
    """What a stage holds: pools of slots by name; the buffers that leave; what has come from the
    stage before (up) and after (down)."""

    pools: dict[str, list[Value]]
    buffers: dict[str, Value] = dataclasses.field(default_factory=lambda: dict.fromkeys(BUFFERS))
    arrived: dict[str, Value] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(ARRIVED.values())
    )


class Replay:
    """A table's execution. `done` has the tasks: (op, unit, microbatch), ("H", microbatch) of the
    head, ("E", microbatch) of the gradient of the embedding. AssertionError where an op does not
    find what it needs, or does again what has been done."""

    def __init__(self, ticks: TickTable, changed: dict[str, np.ndarray] | None = None):
        """`changed`: columns, by name, that stand in place of the table's own."""
        self.table, self.ticks = ticks.slotted.table, ticks
        self.columns = by_name(ticks.columns) | (changed or {})
        self.units = units_of(self.table.stage_of, self.table.stages)
        self.done: set[tuple] = set()
        sizes = {pool: max(1, slots) for pool, slots in ticks.slotted.pool_sizes.items()}
        self.stages = [
            Stage({pool: [None] * slots for pool, slots in sizes.items()})
            for _ in range(self.table.stages)
        ]

    def run(self) -> set[tuple]:
        """The tasks that are done."""
        for t in range(self.table.ticks):
            tick = {name: column[t].tolist() for name, column in self.columns.items()}
            for s in range(self.table.stages):
                self.take_in(s, {name: values[s] for name, values in tick.items()})
            self.permute(tick[permute_op(Permute.EARLY)])
            for name in SHARED:
                assert self.table.vocabulary != "parallel" or len(set(tick[name])) == 1, (
                    f"{name} waits for stages that do not run it"
                )
            for s in range(self.table.stages):
                self.ops(s, {name: values[s] for name, values in tick.items()})
            self.permute(tick[permute_op(Permute.LATE)])
        return self.done

    def permute(self, runs: list[int]) -> None:
        """Sends the buffers to the neighbours, if the tick does; all stages do it or none does."""
        assert len(set(runs)) == 1, "a permute waits for stages that do not run it"
        if not runs[0]:
            return
        stages, closed = self.table.stages, wraps(self.table.stage_of, self.table.stages)
        for way, step in self.ticks.permutes.items():
            sent = [stage.buffers[way] for stage in self.stages]
            for s, stage in enumerate(self.stages):
                source = s - step
                stage.arrived[ARRIVED[way]] = (
                    sent[source % stages] if closed or 0 <= source < stages else None
                )

    def take_in(self, s: int, tick: dict[str, int]) -> None:
        """What arrived goes into its slots."""
        stage = self.stages[s]
        for copy in self.ticks.copies.takes:
            if tick[copy.op]:
                value = stage.arrived[copy.source]
                assert value and value[0] == copy.target, f"{copy.op} finds {value}"
                stage.pools[copy.target][tick[f"{copy.slot}_slot"]] = value

    def ops(self, s: int, tick: dict[str, int]) -> None:
        """All that a stage computes in a tick, in order."""
        stage, table = self.stages[s], self.table
        of_units = [cell_op(kind, u) for u in range(table.units_per_stage) for kind in CELL_OPS]
        copies = self.ticks.copies
        run = [
            name
            for name in (
                *SHARED,
                *of_units,
                *self.ticks.overlapped,
                *(copy.op for copy in (*copies.sends, *copies.stays)),
            )
            if tick[name]
        ]
        assert bool(tick["busy"]) == bool(run), f"the runtime may skip {run}"
        activations, gradients, last = (
            stage.pools["activation"],
            stage.pools["gradient"],
            table.units - 1,
        )
        if tick[EMBED] and s == table.stage_of[0]:
            activations[tick["embed_activation_slot"]] = ("activation", 0, tick["embed_microbatch"])
        for u in range(table.units_per_stage):
            for kind in CELL_OPS:
                if tick[cell_op(kind, u)]:
                    self.compute(kind, u, s, tick)
        for name, (kind, u, b_u) in self.ticks.overlapped.items():
            if tick[name]:
                of_b = {
                    f"{pool}_slot": tick[f"b_{pool}_slot"] for pool in ("residual_b", "residual_w")
                }
                # B reads before F writes, or after it: it must make no difference
                order = [
                    (kind, u, tick),
                    ("B", b_u, tick | of_b | {"microbatch": tick["b_microbatch"]}),
                ]
                for step in order[:: -1 if tick["microbatch"] % 2 else 1]:
                    self.compute(step[0], step[1], s, step[2])
        for copy in copies.sends:
            if tick[copy.op]:
                stage.buffers[copy.target] = stage.buffers[copy.source]
        for copy in copies.stays:
            if tick[copy.op]:
                stage.pools[copy.target][tick[f"{copy.slot}_slot"]] = stage.buffers[copy.source]
        if tick[HEAD] and s == table.stage_of[-1]:
            k = tick["head_microbatch"]
            self.find(activations[tick["head_activation_slot"]], ("activation", last + 1, k))
            self.count(("H", k))
            if not table.forward_only:
                gradients[tick["head_gradient_slot"]] = ("gradient", last, k)
        if tick[EMBED_GRADIENT] and s == table.stage_of[0]:
            k = tick["embed_gradient_microbatch"]
            self.find(gradients[tick["embedding_gradient_slot"]], ("gradient", -1, k))
            self.count(("E", k))

    def compute(self, kind: str, u: int, s: int, tick: dict[str, int]) -> None:
        """An op of local unit u: F, K (the F that keeps what the backward reads), R, B or W."""
        stage, unit, k = self.stages[s], self.units[s][u], tick["microbatch"]
        held = lambda pool: stage.pools[pool][tick[f"{pool}_slot"]]
        residuals = ("residuals", unit, k)
        if kind in "FKR":
            self.find(held("activation"), ("activation", unit, k))
        if kind in "KR":
            for pool in ("residual_b", "residual_w"):
                stage.pools[pool][tick[f"{pool}_slot"]] = residuals
        if kind == "B":
            self.find(held("gradient"), ("gradient", unit, k))
            self.find(held("residual_b"), residuals)
            stage.pools["weight_stash"][tick["weight_stash_slot"]] = ("weight_stash", unit, k)
        if kind in "BW":
            self.find(held("residual_w"), residuals)
        if kind == "W":
            self.find(held("weight_stash"), ("weight_stash", unit, k))
        if kind in "FK":
            stage.buffers[self.ticks.result_buffers[Op.F, u]] = ("activation", unit + 1, k)
        if kind == "B":
            stage.buffers[self.ticks.result_buffers[Op.B, u]] = ("gradient", unit - 1, k)
        self.count(("F" if kind == "K" else kind, unit, k))

    def find(self, value: Value, wanted: tuple) -> None:
        assert value == wanted, f"{value} in place of {wanted}"

    def count(self, task: tuple) -> None:
        assert task not in self.done, f"{task} is done again"
        self.done.add(task)
