"""Tables by name: what `pipeline.schedule` means.

    make_table(TableSpec(schedule, stages, repeats, microbatches, …))   gpipe, 1f1b, interleaved,
                                                                        zb_h1, zb_h2, zb_v,
                                                                        dualpipe_v, auto, csv:FILE
    make_forward_table(stage_of, stages, microbatches, …)               evaluation

The orders are in orders.py, their packing into ticks in packing.py, the search in search.py. No JAX
here.
"""

from jaxtrain.schedule import orders as orders_
from jaxtrain.schedule import search
from jaxtrain.schedule.orders import CSV, SCHEDULES, fits_repeats
from jaxtrain.schedule.packing import PACKINGS, Tasks, pack_into_ticks
from jaxtrain.schedule.table import Table, TableShape
from jaxtrain.schedule.table_csv import read_csv
from jaxtrain.schedule.table_spec import TableSpec

NAMES = (*SCHEDULES, "auto")
PERMUTES = ("auto", *PACKINGS)


def check_repeats(schedule: str, stages: int, repeats: int) -> None:
    """Raises ValueError for a number of chunks a stage that a named schedule is not made for; with
    one stage any works."""
    if stages == 1 or fits_repeats(schedule, repeats):
        return
    rule, least = SCHEDULES[schedule].repeats_rule, SCHEDULES[schedule].least_repeats
    raise ValueError(
        f"repeats={repeats} does not fit schedule={schedule!r}, which has {rule} on a stage: "
        f"use {least}"
    )


def make_table(spec: TableSpec, report: search.Report = search.silent) -> Table:
    """The training table that a spec wants. `report` is told how far the search has come.

    On one stage every schedule is gradient accumulation. Raises ValueError for numbers that do not
    fit the schedule, for a name that is no schedule's, and for a file that cannot be read or has a
    wrong table.
    """
    for name in ("stages", "repeats", "microbatches"):
        if getattr(spec, name) < 1:
            raise ValueError(f"{name}={getattr(spec, name)} must be at least 1: use 1")
    if spec.permute not in PERMUTES:
        raise ValueError(f"permute={spec.permute!r} is unknown: use {', '.join(PERMUTES)}")
    if spec.schedule.startswith(CSV):
        return _read(spec)
    if spec.schedule == "auto":
        return search.search([spec], report)
    if spec.schedule not in SCHEDULES:
        raise ValueError(
            f"schedule={spec.schedule!r} is unknown: use {', '.join(NAMES)} or csv:FILE"
        )
    check_repeats(spec.schedule, spec.stages, spec.repeats)
    return search.named(spec, report)


def _read(spec: TableSpec) -> Table:
    """A CSV file's table; ValueError if it is for other numbers."""
    path = spec.schedule.removeprefix(CSV)
    table = read_csv(path)
    for name in ("stages", "microbatches"):
        if getattr(table, name) != getattr(spec, name):
            raise ValueError(
                f"{path} is a table of {name}={getattr(table, name)}, not "
                f"{getattr(spec, name)}: use {getattr(table, name)}"
            )
    return table


def make_forward_table(
    stage_of: tuple[int, ...],
    stages: int,
    microbatches: int,
    *,
    permute: str = "late",
    vocabulary: str = "parallel",
) -> Table:
    """Forwards and losses alone, for evaluation, of units on these stages: those of the training
    table. `permute`: one of PACKINGS."""
    shape = TableShape(
        name="forward",
        stage_of=stage_of,
        stages=stages,
        microbatches=microbatches,
        forward_only=True,
        vocabulary=vocabulary,
    )
    return pack_into_ticks(Tasks(orders_.forward(stage_of, stages, microbatches), shape), permute)
