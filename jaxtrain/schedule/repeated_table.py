"""Several training steps as one table, without a barrier between them (Qi et al. 2023, section 4,
arXiv:2401.10241: "bypassing optimizer synchronizations").

The microbatches of step k of a table of m a step are numbered k m … (k + 1) m − 1. A stage updates
its own parameters at the end of the tick of its last W of a step, and begins the next step while
other stages still do theirs; the table has no tick for that. Embedding and head are updated by all
stages together, with the first unit's stage, which is the first that needs them.

    zb_h2, 2 stages, 3 microbatches, 2 steps
    stage 0   F0 F1 F2 B0 W0 B1 W1 B2 W2O F3 F4 F5 B3 W3 …
    stage 1   .  F0 B0 F1 B1 W0 F2 B2 W1 W2O F3 B3 F4 B4 …

No JAX here.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxtrain.schedule.clocks.times import Times
from jaxtrain.schedule.packing import IN_ORDER, Tasks, pack_into_ticks
from jaxtrain.schedule.table import Table, TableShape
from jaxtrain.schedule.table_spec import cost


def repeated(
    table: Table,
    steps: int,
    times: Times,
    shares: Sequence[float] | None = None,
    permute: str = "auto",
) -> Table:
    """The table of `steps` steps, each in the order of a table of one; the table itself for one.

    times, shares: for which the packing of least coupled time is chosen, of those with `same_sums`
        if there are any
    permute: one of packing.PACKINGS, or auto. `aligned` moves Ws behind the next step's ops, so the
        best of the others takes its place
    """
    if steps == 1:
        return table
    orders = [
        [
            (op, unit, microbatch + step * table.microbatches)
            for step in range(steps)
            for op, unit, microbatch in order
        ]
        for order in table.orders
    ]
    # The same pipeline with more microbatches: all fields of the shape, but not the ticks.
    fields = {field.name: getattr(table, field.name) for field in dataclasses.fields(TableShape)}
    shape = TableShape(**fields | {"steps": steps, "microbatches": steps * table.microbatches})
    tasks = Tasks(orders, shape)
    # An order of `aligned` may move a W behind later ops. Behind an op of the next step it would
    # come after the update that needs it.
    packings = (permute,) if permute in IN_ORDER else IN_ORDER
    # False sorts before True: a packing that adds up in another order is only the last resort.
    return min(
        (pack_into_ticks(tasks, packing) for packing in packings),
        key=lambda several: (not same_sums(several, table), cost(several, times, shares)),
    )


def same_sums(several: Table, one: Table) -> bool:
    """True if each step of `several` has its heads and embedding's gradients in the order of `one`.
    Where embedding and head are tied, both add to one array, and another order rounds otherwise.
    """

    def order(table: Table) -> list[tuple[int, int]]:
        """(microbatch, 0 for its head and 1 for its embedding's gradient) of each op."""
        microbatches = np.stack([table.head, table.embed_gradient], axis=1)  # as in a tick
        return [(int(microbatches[tick, op]), op) for tick, op in np.argwhere(microbatches >= 0)]

    # A program of several steps must give the same bits as steps one by one. If one step has
    # (0, 0) (1, 0) (0, 1) (1, 1), each of several must have these in this order.
    of_steps: list[list[tuple[int, int]]] = [[] for _ in range(several.steps)]
    for microbatch, op in order(several):
        step, number = divmod(microbatch, one.microbatches)
        of_steps[step].append((number, op))
    return of_steps == [order(one)] * several.steps
