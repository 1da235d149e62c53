"""Tables by name: the values of `pipeline.schedule`.

    make_table(TableSpec(schedule, stages, repeats, microbatches, …))   gpipe, 1f1b, interleaved,
                                                                        zb_h1, zb_h2, zb_v,
                                                                        dualpipe_v, auto, csv:FILE
    make_forward_table(stage_of, stages, microbatches, …)               evaluation

orders/ has the orders, packing.py packs them into ticks, table_search.py has the search. No JAX
here.
"""

from jaxtrain.schedule.files.order_csv import read_schedule
from jaxtrain.schedule.orders import (
    AUTO,
    CSV,
    OVERLAPPED,
    SCHEDULES,
    ChunkOrders,
    fits_repeats,
    named_orders,
)
from jaxtrain.schedule.orders.stage_orders import forward
from jaxtrain.schedule.packing import PACKINGS, Tasks, pack_into_ticks
from jaxtrain.schedule.table import ROUNDING, ScheduleError, Table, TableShape
from jaxtrain.schedule.table_search import ReportProgress, search, silent
from jaxtrain.schedule.table_spec import TableSpec, cost

NAMES = (*SCHEDULES, AUTO)
PERMUTES = ("auto", *PACKINGS)


def check_repeats(schedule: str, stages: int, repeats: int) -> None:
    """Raises ScheduleError for a number of chunks a stage that a named schedule is not made for.
    With one stage any number works."""
    if stages == 1 or fits_repeats(schedule, repeats):
        return
    known = SCHEDULES[schedule]
    raise ScheduleError(
        f"repeats={repeats} does not fit schedule={schedule!r}, which has {known.repeats_rule} on "
        "a stage",
        use=known.least_repeats,
    )


def make_table(spec: TableSpec, report: ReportProgress = silent) -> Table:
    """The training table for a spec. `report` is told the progress of the search.

    On one stage every schedule is gradient accumulation. Raises ScheduleError for numbers that do
    not fit the schedule, for an unknown name, and for a file that cannot be read or has a wrong
    table.

    >>> table = make_table(TableSpec("1f1b", stages=2, repeats=1, microbatches=3))
    >>> table.ticks, table.stages, table.microbatches
    (11, 2, 3)
    """
    for name in ("stages", "repeats", "microbatches"):
        if getattr(spec, name) < 1:
            raise ScheduleError(f"{name}={getattr(spec, name)} must be at least 1", use=1)
    if spec.permute not in PERMUTES:
        raise ScheduleError(f"permute={spec.permute!r} is unknown", use=", ".join(PERMUTES))
    # A search, a file, or a named schedule; a file has a table, or orders that are still to be
    # packed.
    if spec.schedule == AUTO:
        return search([spec], report)
    if spec.schedule.startswith(CSV):
        path = spec.schedule.removeprefix(CSV)
        schedule = read_schedule(path)
        for name in ("stages", "microbatches"):
            if getattr(schedule, name) != getattr(spec, name):
                raise ScheduleError(
                    f"{path} is a table of {name}={getattr(schedule, name)}, not "
                    f"{getattr(spec, name)}",
                    use=getattr(schedule, name),
                )
        return schedule if isinstance(schedule, Table) else packed(schedule, spec, report)
    if spec.schedule not in SCHEDULES:
        raise ScheduleError(
            f"schedule={spec.schedule!r} is unknown", use=f"{', '.join(NAMES)} or csv:FILE"
        )
    check_repeats(spec.schedule, spec.stages, spec.repeats)
    if spec.overlap and spec.schedule not in OVERLAPPED:
        raise ScheduleError(
            f"schedule={spec.schedule!r} has no F and B to overlap", use=", ".join(OVERLAPPED)
        )
    return named_table(spec, report)


def named_table(spec: TableSpec, report: ReportProgress = silent) -> Table:
    """The table of a named schedule, by `packed`."""
    orders = named_orders(spec.schedule, spec.stages, spec.repeats, spec.microbatches, spec.overlap)
    return packed(orders, spec, report)


def packed(
    chunk_orders: ChunkOrders,
    spec: TableSpec,
    report: ReportProgress = silent,
) -> Table:
    """The table of these orders, in the packing of least coupled time that takes no more memory
    than late permutes do."""
    # The late packing is the yardstick for memory: a user who bounds it, or sizes a model by it,
    # has that of the papers, and a faster packing must not take more. Of equal costs the packing
    # that PACKINGS has first is taken.
    tasks = spec.tasks(chunk_orders)
    tables = []
    for index, packing in enumerate(spec.packings):
        report(f"{chunk_orders.name} {packing}", index / len(spec.packings))
        tables.append(pack_into_ticks(tasks, packing))
    if len(tables) == 1:
        return tables[0]
    costs = [cost(table, spec.times, spec.shares) for table in tables]
    most = costs[0].memory + ROUNDING
    return tables[min((each, i) for i, each in enumerate(costs) if each.memory <= most)[1]]


def make_forward_table(
    stage_of: tuple[int, ...],
    stages: int,
    microbatches: int,
    *,
    permute: str = "late",
    vocabulary: str = "parallel",
) -> Table:
    """The table of evaluation: forwards and losses alone, of units on the training table's stages.
    `permute`: one of PACKINGS."""
    # The training table's stages, since the parameters lie there; any order would do, and this one
    # keeps few inputs waiting.
    shape = TableShape(
        name="forward",
        stage_of=stage_of,
        stages=stages,
        microbatches=microbatches,
        forward_only=True,
        vocabulary=vocabulary,
    )
    return pack_into_ticks(Tasks(forward(stage_of, stages, microbatches), shape), permute)
