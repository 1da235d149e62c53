"""`python -m jaxtrain.schedule`: a pipeline schedule as a picture and as figures, before anything
is trained.

    flags  →  schedule_flags.check_flags  →  make: the table  →  one: timeline, CSV, bubbles by two
                                                                  clocks, memory, slots
                                                              →  compare: all schedules, best first

The coupled clock is the one that describes the runtime. No jax.
"""

import dataclasses
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence

from jaxtrain import cli
from jaxtrain.config.flags import UsageError
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.progress import SearchProgress
from jaxtrain.schedule import by_name, drawing, table_search
from jaxtrain.schedule.clocks.independent import NotFused
from jaxtrain.schedule.clocks.simulate import comparison, figures, simulate, summary
from jaxtrain.schedule.orders import (
    AUTO,
    FUSED,
    SCHEDULES,
    default_repeats,
    fits_repeats,
    may_overlap,
)
from jaxtrain.schedule.repeated_table import repeated
from jaxtrain.schedule.table import ROUNDING, Table, TableError
from jaxtrain.schedule.table_spec import memory_of
from jaxtrain.schedule.validator import check
from jaxtrain.schedule_flags import (
    CSV_FORMATS,
    DESCRIPTION,
    FLAGS,
    OUTPUTS,
    ScheduleRequest,
    check_flags,
)

# of tables that are made only to improve an error: some seconds with --compare
MOST_REFUSED_CELLS = 1_000


@cli.command
def main(argv: Sequence[str]) -> None:
    """The command. A mistake in the flags ends it with one line and status 2 before anything is
    written, Ctrl-C with one line and status 130; a file is written completely or not at all."""
    try:
        shown = cli.checked_flags(
            argv, DESCRIPTION, FLAGS, lambda flags: shown_by(check_flags(flags))
        )
        for path, content in shown.files.items():
            cli.write_output(path, content)
        sys.stdout.write(shown.text)
    except KeyboardInterrupt:
        print("stopped: no file is half written", file=sys.stderr, flush=True)
        sys.exit(ExitStatus.INTERRUPTED)


@dataclasses.dataclass(frozen=True)
class Shown:
    """The output of the command: text for standard output, and the contents of files by their
    paths."""

    text: str
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)


# --- one schedule ---------------------------------------------------------------------------------


def make(
    request: ScheduleRequest, name: str, repeats: Sequence[int], report: table_search.ReportProgress
) -> Table:
    """The checked table of a schedule; of `auto`, the best with any of these numbers of chunks on a
    stage."""
    spec, steps = request.spec, request.flags.steps_per_program
    one_step = make_one_step(request, name, repeats, report)
    if one_step.overlaps and steps > 1:
        raise UsageError(
            f"--steps_per_program={steps} is for tables without cells of F and B at once",
            {"steps_per_program": 1},
        )
    table = repeated(one_step, steps, spec.times, permute=spec.permute)
    check(table)
    return table


def make_one_step(
    request: ScheduleRequest, name: str, repeats: Sequence[int], report: table_search.ReportProgress
) -> Table:
    """The table of one step, not checked; arguments as of `make`."""
    file = request.file
    if isinstance(file, Table):
        return file
    if file is not None:
        spec = dataclasses.replace(
            request.spec, units_per_chunk=[request.flags.ops_per_chunk] * len(file.stage_of)
        )
        try:
            table = by_name.packed(file, spec, report)
        except TableError as error:  # its cells, not its order
            raise UsageError(str(error), {"overlap": ""}) from None
        check(table)
        return table
    specs = [
        dataclasses.replace(
            request.spec,
            schedule=name,
            overlap=request.spec.overlap and may_overlap(name),
            repeats=count,
            units_per_chunk=[request.flags.ops_per_chunk] * (request.spec.stages * count),
        )
        for count in repeats
    ]
    return (
        table_search.search(specs, report)
        if name == AUTO
        else by_name.named_table(specs[0], report)
    )


def shown_by(request: ScheduleRequest) -> Shown:
    """The output for a request; empty for refused flags whose table would take long. Raises
    UsageError where no table meets the request."""
    # Flags that have been refused once are tried with the suggested value, so that the suggestion
    # is one that works. A small table shows that in no time; a large one is taken on trust.
    flags, spec = request.flags, request.spec
    cells = spec.stages * max(2, spec.repeats) * spec.microbatches * flags.ops_per_chunk
    if flags.refused and cells > MOST_REFUSED_CELLS:
        return Shown("")
    try:
        with SearchProgress(flags.schedule if not flags.compare else "all schedules") as progress:
            return compare(request, progress) if flags.compare else one(request, progress)
    except table_search.MemoryTooSmall as error:
        raise UsageError(
            f"--memory={flags.memory:g} is too little for any table found",
            {"memory": error.least * (flags.repeats or 1)},
        ) from None
    except NotFused as error:
        raise UsageError(f"--{error}", {"fused_backward": False}) from None


def one(request: ScheduleRequest, report: table_search.ReportProgress) -> Shown:
    """The output for one schedule."""
    flags, spec = request.flags, request.spec
    repeats: Sequence[int] = (spec.repeats or max(1, default_repeats(spec.schedule)),)
    if spec.schedule == AUTO and not spec.repeats:
        repeats = table_search.ANY_REPEATS
    table = make(request, spec.schedule, repeats, report)
    report("clocks and slots", 1.0)
    result = simulate(table, spec.times, fused_backward=flags.fused_backward)
    values = figures(table, result)
    sizes = f"{table.stages} stages, {table.microbatches_per_step} microbatches"
    if table.steps > 1:
        sizes += f", {table.steps} steps in a program"
    title = f"{table.name}: {sizes}, coupled bubble {result.bubble_fraction_coupled:.1%}"
    content: dict[str, Callable[[], bytes]] = {
        "csv": lambda: CSV_FORMATS[flags.csv_format](table).encode(),
        "svg": lambda: drawing.svg(table, result.timeline_coupled, title).encode(),
        "png": lambda: drawing.png(table, result.timeline_coupled, title),
    }
    files = {}
    for flag in OUTPUTS:
        if path := getattr(flags, flag):
            report(f"--{flag}", 1.0)
            files[path] = content[flag]()
    if flags.json:
        return Shown(json.dumps(values) + "\n", files)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size((140, 24)).columns
    return Shown(
        f"{table.name}: {sizes}; chunks of {drawing.stage_chunks(table)}\n\n"
        f"{drawing.text(table, width, colour)}\n{summary(values)}\n",
        files,
    )


# --- all schedules --------------------------------------------------------------------------------


def compare(request: ScheduleRequest, progress: table_search.ReportProgress) -> Shown:
    """All schedules, best first: those within the memory bound by coupled time, then the others.
    Each has the number of chunks asked for if it is made for that, else the fewest."""
    flags, spec, requested = request.flags, request.spec, request.spec.repeats
    repeats: dict[str, Sequence[int]] = {
        name: (requested if fits_repeats(name, requested) else default_repeats(name),)
        for name in SCHEDULES
    }
    repeats[AUTO] = sorted({*itertools.chain(*repeats.values()), *table_search.ANY_REPEATS})
    # The search is half of the work, the named schedules the other half.
    listed, done = [], 0.0
    for name, counts in repeats.items():
        share = 0.5 if name == AUTO else 0.5 / len(SCHEDULES)
        table = make(request, name, counts, table_search.report_share(progress, done, share))
        done += share
        fused = flags.fused_backward and name in FUSED
        values = figures(table, simulate(table, spec.times, fused_backward=fused))
        values["memory"] = memory_of(table) / values["repeats"] * (requested or 1)
        values["fits"] = not flags.memory or values["memory"] <= flags.memory + ROUNDING
        listed.append(values)
    # Nine digits, as `table_spec.cost` compares: sums in another order are no difference.
    listed.sort(
        key=lambda values: (
            not values["fits"],
            float(f"{values['step_time_coupled']:.9g}"),
            values["memory"],
        )
    )
    return Shown(json.dumps(listed) + "\n" if flags.json else comparison(listed, requested))


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
