"""A tick on symbols in place of arrays: a table executed by the columns that the runtime scans, and by nothing else of the table.

It does what runtime/tick.py does with these columns, stage by stage, but compiles nothing and knows no arithmetic: a value is a tuple
that says what it is. Every op demands the values that it should find, so that a wrong slot, buffer, column or order fails.
"""

import dataclasses

import numpy as np

from jaxtrain.schedule.columns import BUFFERS, STAYS, TAKES, WAY, columns, permutes, results
from jaxtrain.schedule.columns import units as units_per_stage
from jaxtrain.schedule.slots import KINDS as POOLS
from jaxtrain.schedule.slots import Program
from jaxtrain.schedule.table import units_of, wraps

SHARED = ("embed", "head", "embed_gradient")  # all stages do them together where they share the vocabulary
Value = tuple | None  # such as ("x", unit, microbatch); None: nothing has been written there


@dataclasses.dataclass
class Stage:
    """What a stage holds: pools of slots by name; the buffers that leave; what has come from the stage before (up) and after (down)."""

    pools: dict[str, list[Value]]
    buffers: dict[str, Value] = dataclasses.field(default_factory=lambda: dict.fromkeys(BUFFERS))
    arrived: dict[str, Value] = dataclasses.field(default_factory=lambda: dict.fromkeys(WAY))


class Replay:
    """A table's execution. `done` has the tasks: (op, unit, microbatch), ("H", microbatch) of the head, ("E", microbatch) of the gradient
    of the embedding. AssertionError where an op does not find what it needs, or does again what has been done."""

    def __init__(self, program: Program, changed: dict[str, np.ndarray] | None = None):
        """`changed`: columns that stand in place of the program's own."""
        self.table = program.table
        self.columns = columns(program) | (changed or {})
        self.results, self.permutes = results(program), permutes(program.table)
        self.own = units_of(self.table.place, self.table.stages)
        self.done: set[tuple] = set()
        slots = {kind: max(1, n) for kind, n in program.slots.items()}
        self.stages = [Stage({kind: [None] * n for kind, n in slots.items()}) for _ in range(self.table.stages)]

    def run(self) -> set[tuple]:
        for t in range(self.table.ticks):
            row = {name: column[t].tolist() for name, column in self.columns.items()}
            for s in range(self.table.stages):
                self.take_in(s, {name: values[s] for name, values in row.items()})
            self.permute(row["permute_EARLY"])
            for name in SHARED:
                assert self.table.vocabulary != "parallel" or len(set(row[name])) == 1, f"{name} waits for stages that do not run it"
            for s in range(self.table.stages):
                self.ops(s, {name: values[s] for name, values in row.items()})
            self.permute(row["permute_LATE"])
        return self.done

    def permute(self, wanted: list[int]) -> None:
        """Sends the buffers to the neighbours, if the row wants that; all stages want it or none does."""
        assert len(set(wanted)) == 1, "a permute waits for stages that do not run it"
        if not wanted[0]:
            return
        stages, closed = self.table.stages, wraps(self.table.place, self.table.stages)
        for way, step in self.permutes.items():
            sent = [stage.buffers[way] for stage in self.stages]
            for s, stage in enumerate(self.stages):
                source = s - step
                stage.arrived[way] = sent[source % stages] if closed or 0 <= source < stages else None

    def take_in(self, s: int, row: dict[str, int]) -> None:
        stage = self.stages[s]
        for name in TAKES:
            if row[name]:
                _, way, kind = name.split("_")
                value = stage.arrived[way]
                assert value and value[0] == kind, f"{name} finds {value}"
                stage.pools[kind][row[f"{way}_{kind}_slot"]] = value

    def ops(self, s: int, row: dict[str, int]) -> None:
        stage, table = self.stages[s], self.table
        ops = [f"{op}{u}" for u in range(units_per_stage(table)) for op in "FKRBW"]
        wanted = [name for name in (*SHARED, *ops, *(f"send_{way}" for way in WAY), *STAYS) if row[name]]
        assert bool(row["busy"]) == bool(wanted), f"the runtime may skip {wanted}"
        x, g, last = stage.pools["x"], stage.pools["g"], table.units - 1
        if row["embed"] and s == table.place[0]:
            x[row["embed_x_slot"]] = ("x", 0, row["embed_microbatch"])
        for u in range(units_per_stage(table)):
            for op in "FKRBW":
                if row[f"{op}{u}"]:
                    self.compute(op, u, s, row)
        for way in WAY:
            if row[f"send_{way}"]:
                stage.buffers[way] = stage.buffers["y"]
        for name in STAYS:
            if row[name]:
                _, kind, buffer = name.split("_")
                stage.pools[kind][row[f"stay_{kind}_slot"]] = stage.buffers[buffer]
        if row["head"] and s == table.place[-1]:
            self.find(x[row["head_x_slot"]], ("x", last + 1, row["head_microbatch"]))
            self.count(("H", row["head_microbatch"]))
            if not table.forward_only:
                g[row["head_g_slot"]] = ("g", last, row["head_microbatch"])
        if row["embed_gradient"] and s == table.place[0]:
            self.find(g[row["embed_gradient_g_slot"]], ("g", -1, row["embed_gradient_microbatch"]))
            self.count(("E", row["embed_gradient_microbatch"]))

    def compute(self, op: str, u: int, s: int, row: dict[str, int]) -> None:
        """An op of local unit u: F, K (the F that keeps what the backward reads), R, B or W."""
        stage, unit, k = self.stages[s], self.own[s][u], row["microbatch"]
        slot = {pool: row[f"{pool}_slot"] for pool in POOLS}
        held = lambda pool: stage.pools[pool][slot[pool]]
        residuals = ("residuals", unit, k)
        if op in "FKR":
            self.find(held("x"), ("x", unit, k))
        if op in "KR":
            for pool in ("residual_b", "residual_w"):
                stage.pools[pool][slot[pool]] = residuals
        if op == "B":
            self.find(held("g"), ("g", unit, k))
            self.find(held("residual_b"), residuals)
            stage.pools["stash"][slot["stash"]] = ("stash", unit, k)
        if op in "BW":
            self.find(held("residual_w"), residuals)
        if op == "W":
            self.find(held("stash"), ("stash", unit, k))
        if op in "FK":
            stage.buffers[self.results["F", u]] = ("x", unit + 1, k)
        if op == "B":
            stage.buffers[self.results["B", u]] = ("g", unit - 1, k)
        self.count(("F" if op == "K" else op, unit, k))

    def find(self, value: Value, wanted: tuple) -> None:
        assert value == wanted, f"{value} in place of {wanted}"

    def count(self, task: tuple) -> None:
        assert task not in self.done, f"{task} is done again"
        self.done.add(task)
