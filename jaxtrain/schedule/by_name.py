"""Tables by name: what `pipeline.schedule` means.

    make_table(schedule, stages, repeats, microbatches, …)    gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, dualpipe_v, auto, csv:FILE
    make_forward_table(place, stages, microbatches, …)        evaluation

The orders are in orders.py, the laying into rows in packing.py, the search in search.py. No JAX here.
"""

from collections.abc import Sequence

from jaxtrain.schedule import orders as orders_
from jaxtrain.schedule import search
from jaxtrain.schedule.orders import CSV, SCHEDULES, fits_repeats
from jaxtrain.schedule.packing import PACKINGS, Tasks, pack_into_ticks
from jaxtrain.schedule.simulate import Times
from jaxtrain.schedule.table import Table
from jaxtrain.schedule.table_csv import read_csv

NAMES = (*SCHEDULES, "auto")
PERMUTES = ("auto", *PACKINGS)


def check_repeats(schedule: str, stages: int, repeats: int) -> None:
    """Raises ValueError for a number of chunks a stage that a named schedule is not made for; with one stage any works."""
    if stages == 1 or fits_repeats(schedule, repeats):
        return
    rule, least = SCHEDULES[schedule].repeats_rule, SCHEDULES[schedule].least_repeats
    raise ValueError(f"repeats={repeats} does not fit schedule={schedule!r}, which has {rule} on a stage: use {least}")


def make_table(
    schedule: str,
    stages: int,
    repeats: int,
    microbatches: int,
    *,
    times: Times | None = None,
    permute: str = "auto",
    remat_full: bool = False,
    groups: Sequence[int] | None = None,
    shares: Sequence[float] | None = None,
    vocabulary: str = "parallel",
    memory: float | None = None,
    report: search.Report = search.silent,
) -> Table:
    """The training table of a schedule.

    times:      what `permute="auto"` and `schedule="auto"` make the table for (default: F = B = W = 1, no message time)
    permute:    how rows send messages (packing.py); auto: the way of least coupled time
    remat_full: F keeps a unit's input alone and R rebuilds what B needs, but for the last unit
    groups:     the number of ops that each chunk, in model order, is cut into (`layers_per_op`); default one
    shares:     of each unit, its part of a stage's work, where they differ; default stages / units
    memory:     for `auto`, the most stashes of a chunk at once, with what B leaves for W (simulate.py)
    report:     is told how far the search has come
    On one stage every schedule is gradient accumulation. Raises ValueError for numbers that do not fit the schedule,
    file that cannot be read.
    """
    for name, value in (("stages", stages), ("repeats", repeats), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1: use 1")
    if permute not in PERMUTES:
        raise ValueError(f"permute={permute!r} is unknown: use {', '.join(PERMUTES)}")
    if schedule.startswith(CSV):
        return _read(schedule.removeprefix(CSV), stages, microbatches)
    problem = search.Problem(stages, microbatches, times or Times(), remat_full, groups, shares, vocabulary)
    modes = PACKINGS if permute == "auto" else (permute,)
    if schedule == "auto":
        return search.search(problem, (repeats,), None if memory is None else memory / repeats, modes, report=report)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown: use {', '.join(NAMES)} or csv:FILE")
    check_repeats(schedule, stages, repeats)
    return search.named(schedule, repeats, problem, modes, report)


def _read(path: str, stages: int, microbatches: int) -> Table:
    """A CSV file's table; ValueError if it is for other numbers."""
    table = read_csv(path)
    for name, wanted in (("stages", stages), ("microbatches", microbatches)):
        if getattr(table, name) != wanted:
            raise ValueError(f"{path} is a table of {name}={getattr(table, name)}, not {wanted}: use {getattr(table, name)}")
    return table


def make_forward_table(
    stage_of: tuple[int, ...], stages: int, microbatches: int, *, permute: str = "late", vocabulary: str = "parallel"
) -> Table:
    """Forwards and losses alone, for evaluation, of units on these stages: those of the training table."""
    cells = orders_.forward(stage_of, stages, microbatches)
    return pack_into_ticks(Tasks(cells, stage_of, stages, microbatches), "forward", permute, forward_only=True, vocabulary=vocabulary)
