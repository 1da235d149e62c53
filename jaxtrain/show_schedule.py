"""`python -m jaxtrain.schedule`: a pipeline schedule as a picture and as figures, before anything
is trained.

    schedule, stages, microbatches, op times  →  table
                                              →  timeline, CSV, bubbles by two clocks, memory, slots

    --compare    a table of all schedules, the best first

The coupled clock is the one that describes the runtime. No jax.
"""

import dataclasses
import difflib
import itertools
import json
import math
import os
import shutil
import sys
import types
from collections.abc import Callable, Sequence

from jaxtrain import cli
from jaxtrain import config as cfg
from jaxtrain.config.flags import Flag, UsageError
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.progress import SearchProgress
from jaxtrain.schedule import by_name, drawing, table_search
from jaxtrain.schedule.clocks import NotFused, Times
from jaxtrain.schedule.files.order_csv import read_schedule, to_order_csv
from jaxtrain.schedule.files.table_csv import to_csv
from jaxtrain.schedule.orders import (
    AUTO,
    CSV,
    FUSED,
    ONE_CHUNK,
    OVERLAPPED,
    SCHEDULES,
    ChunkOrders,
    default_repeats,
    fits_repeats,
    may_overlap,
)
from jaxtrain.schedule.repeated_table import repeated
from jaxtrain.schedule.simulate import comparison, figures, simulate, summary
from jaxtrain.schedule.table import ROUNDING, VOCABULARIES, Table, TableError
from jaxtrain.schedule.table_spec import TableSpec, memory_of
from jaxtrain.schedule.validator import check

DESCRIPTION = """usage: jaxtrain schedule [flags]      (or python -m jaxtrain.schedule …)

Shows a pipeline schedule with its time and memory:
  jaxtrain schedule --schedule=zb_v --stages=4 --microbatches=8
  jaxtrain schedule --schedule=1f1b --stages=8 --microbatches=64 --times=18.5,18.1,9.3,0.6 \\
      --svg=1f1b.svg
  jaxtrain schedule --compare --stages=8 --microbatches=32 --times=18.5,18.1,9.3,0.6 --memory=8

Schedules: gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, dualpipe_v; auto, the best table for the
times within --memory that a search finds; csv:FILE, your own table (write one with --csv and change
it), or the order of ops in a file of PyTorch's pipelining.

Ops: F forward, B gradient of the input, W gradient of the weights, R recompute. Times are those of
one microbatch on all chunks of a stage, in any unit; an op on one of its `repeats` chunks takes its
part of that.

There are two clocks. By the independent one stages wait only for messages, as papers assume. By the
coupled one ticks run as this runtime executes them, where a permute makes a stage wait for its
neighbours. --json prints, and the lines below the timeline show:
  ticks                     ticks of the table; a stage does at most one F, R, B or W in each
  step_time                 by the independent clock; step_time_coupled: by the coupled one
  span                      longest time from a stage's first op to the end of its last one; with
                            --steps_per_program=N these three are of the program, divided by N
  bubble_fraction           1 - busiest stage's work / step_time
  bubble_fraction_span      1 - busiest stage's work / span, independent clock
  bubble_fraction_coupled   1 - busiest stage's work / step_time_coupled
  peak_residuals            for each stage, the most chunks whose residuals it holds at once, each
                            from its F to the end of its B
                            (peak_residuals_with_weight_stash: to the end of its W)
  pool_sizes                slots of each pool in a device's memory, the most of all stages;
                            slots_per_stage: those that each stage uses"""

FLAGS = (
    Flag("schedule", ONE_CHUNK, f"{', '.join(by_name.NAMES)} or csv:FILE"),
    Flag("stages", 0, "pipeline stages; 0: 4, or those of the CSV file", at_least=1),
    Flag("microbatches", 0, "microbatches of a step; 0: 8, or those of the CSV file", at_least=1),
    Flag(
        "steps_per_program",
        1,
        "training steps in the table, without a barrier between them; each stage's next step "
        "begins when its own update is done",
        at_least=1,
    ),
    Flag(
        "repeats",
        0,
        "chunks of the model on each stage; 0: the fewest that the schedule takes (auto: 1 or 2)",
        at_least=1,
    ),
    Flag(
        "times",
        "1,1,1,0",
        "F,B,W,message: times of the ops of one microbatch on all chunks of a stage, and of a "
        "message",
    ),
    Flag(
        "recompute",
        "",
        "time of R, for full recomputation with an R on all chunks but the last; empty: no "
        "recomputation",
    ),
    Flag(
        "overlap",
        "",
        "time by which F and B are shorter when they are overlapped in one cell, as in 1f1b, "
        "interleaved, dualpipe_v, and where a file of PyTorch's has OVERLAP_F_B; empty: no cell is "
        "overlapped",
    ),
    Flag(
        "head",
        0.0,
        "time of the head, loss and gradients of one microbatch on one stage",
        at_least=0,
    ),
    Flag(
        "embed",
        0.0,
        "time of the embedding of one microbatch on one stage, and of its gradient",
        at_least=0,
    ),
    Flag(
        "update",
        0.0,
        "time of the optimizer's update of a stage, if --steps_per_program > 1",
        at_least=0,
    ),
    Flag("row", 0.0, "time added to every tick on every stage; for the coupled clock", at_least=0),
    Flag(
        "vocabulary",
        "parallel",
        "parallel: head and embedding are split over all stages; end_stages: the last unit's "
        "stage has the head, the first unit's the embedding",
    ),
    Flag(
        "fused_backward",
        False,
        "B and W count as one op, so a gradient leaves after W; for 1f1b, interleaved and gpipe, "
        "by the independent clock",
    ),
    Flag(
        "permute",
        "auto",
        "when ticks send messages: auto (best for the times), late, aligned, early or spaced",
    ),
    Flag("ops_per_chunk", 1, "ops that each chunk's layers are cut into", at_least=1),
    Flag(
        "memory",
        0.0,
        "bound for auto and --compare: the most residuals and weight stash that a stage holds at "
        "once; 1 is that of a chunk, 1/repeats of a stage, for one microbatch; 0: no bound",
        at_least=0,
    ),
    Flag(
        "compare",
        False,
        "compare all schedules: those within --memory first, each group by coupled time",
    ),
    Flag("json", False, "print the figures as JSON in place of the timeline"),
    Flag("csv", "", "write the table to this file, which --schedule=csv:FILE reads back"),
    Flag(
        "csv_format",
        "table",
        "format of --csv: table, with ticks, R and messages; pytorch, the order alone, as files of "
        "torch.distributed.pipelining have it",
    ),
    Flag("svg", "", "write the timeline (coupled clock) to this file"),
    Flag("png", "", "as --svg, drawn by matplotlib"),
)
CSV_FORMATS = {"table": to_csv, "pytorch": to_order_csv}
OUTPUTS = ("csv", "svg", "png")  # flags that name a file to write
DEFAULT_STAGES, DEFAULT_MICROBATCHES = 4, 8
MOST_CELLS = 200_000  # stages · repeats · (stages + microbatches): some ten seconds
MOST_COMPARED_CELLS = 20_000  # with --compare, which makes some thirty tables: half a minute
MOST_TIME = 1e15  # of an op, in any unit: sums of larger ones can be neither compared nor drawn
# of tables that are made only to improve an error: some seconds with --compare
MOST_REFUSED_CELLS = 1_000


@cli.command
def main(argv: Sequence[str]) -> None:
    """The command. A mistake in the flags ends it with one line and status 2 before anything is
    written, Ctrl-C with one line and status 130; a file is written whole or not at all."""
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


# --- flags ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduleRequest:
    """The schedule that checked flags ask for. spec: with `repeats` 0 where it is left to the
    schedule; file: a CSV file's, None for others."""

    flags: types.SimpleNamespace
    spec: TableSpec
    file: Table | ChunkOrders | None


def check_flags(flags: types.SimpleNamespace) -> ScheduleRequest:
    """The request of the flags. Raises UsageError for flags that cannot be met."""
    of_file = flags.schedule.startswith(CSV)
    for flag, known in (
        ("schedule", (flags.schedule,) if of_file else by_name.NAMES),
        ("vocabulary", VOCABULARIES),
        ("permute", by_name.PERMUTES),
        ("csv_format", tuple(CSV_FORMATS)),
    ):
        value = getattr(flags, flag)
        if value not in known:
            near = difflib.get_close_matches(value, known, n=1, cutoff=0.5) or list(known)
            raise UsageError(f"--{flag}={value!r} is unknown", {flag: near[0]}, near[1:])
    times = read_times(flags)
    if flags.csv_format != "table" and not flags.csv:
        raise UsageError(
            f"--csv_format={flags.csv_format} is the format of --csv, which names no file",
            {"csv_format": "table"},
        )
    if flags.csv and flags.steps_per_program > 1:
        raise UsageError(
            "--csv writes the table of one step, which --steps_per_program repeats",
            {"steps_per_program": 1},
        )
    file = _read_file(flags) if of_file else None
    spec = TableSpec(
        flags.schedule,
        file.stages if file else flags.stages or DEFAULT_STAGES,
        flags.repeats,
        file.microbatches if file else flags.microbatches or DEFAULT_MICROBATCHES,
        times=times,
        permute=flags.permute,
        remat_full=bool(flags.recompute),
        vocabulary=flags.vocabulary,
        overlap=bool(flags.overlap),
        memory=flags.memory / (flags.repeats or 1) or None,
    )
    _check_size(flags, spec)
    _check_schedule(flags, spec)
    for flag in OUTPUTS:
        cli.check_output(flag, getattr(flags, flag), f"schedule.{flag}")
    return ScheduleRequest(flags, spec, file)


def _check_size(flags: types.SimpleNamespace, spec: TableSpec) -> None:
    """Raises UsageError for a table of more tasks than can be made in a while."""
    sizes = {
        "microbatches": spec.microbatches,
        "ops_per_chunk": flags.ops_per_chunk,
        "repeats": max(2, spec.repeats),
        "stages": spec.stages,
    }
    limit = MOST_COMPARED_CELLS if flags.compare else MOST_CELLS
    others = math.prod(sizes.values()) // spec.microbatches
    steps = flags.steps_per_program
    of_step = others * (spec.stages + spec.microbatches)
    if of_step * steps <= limit:
        return
    if of_step <= limit:
        raise UsageError(
            f"--steps_per_program={steps} of these steps are more than {limit} tasks",
            {"steps_per_program": limit // of_step},
        )
    # Fewer microbatches where these are enough, else less of what is most.
    name, most = "microbatches", limit // others - spec.stages
    if most <= 0:
        name = max(sizes, key=lambda name: sizes[name])
        rest = others // sizes[name] if name != "microbatches" else others
        if name == "stages":
            most = math.isqrt(limit // rest) - spec.microbatches
        else:
            most = limit // (rest * (spec.stages + spec.microbatches))
    raise UsageError(
        f"--{name}={sizes[name]} with these stages, chunks and microbatches is more than "
        f"{limit} tasks",
        {name: max(1, most)},
    )


def _check_schedule(flags: types.SimpleNamespace, spec: TableSpec) -> None:
    """Raises UsageError for flags that do not fit the schedule, or --compare."""
    if flags.compare:
        for flag in OUTPUTS:
            if getattr(flags, flag):
                raise UsageError(
                    f"--{flag} needs one schedule, and --compare shows all", {"compare": False}
                )
        return
    name = spec.schedule
    if spec.repeats and name in SCHEDULES:
        try:
            by_name.check_repeats(name, spec.stages, spec.repeats)
        except ValueError as error:
            rule = str(error).partition(": use ")[0]
            raise UsageError(f"--{rule}", {"repeats": max(1, default_repeats(name))}) from None
    if flags.overlap and not may_overlap(name):
        first, *others = OVERLAPPED
        fix: dict[str, object] = {"schedule": first}
        if spec.repeats:
            fix["repeats"] = default_repeats(first)
        raise UsageError(
            f"--overlap={flags.overlap} does not fit --schedule={name!r}, where no F and B of "
            "other microbatches stand side by side",
            fix,
            others,
        )
    if flags.fused_backward and name not in FUSED and not name.startswith(CSV):
        raise UsageError(
            f"--fused_backward does not fit --schedule={name!r}, whose W's stand apart",
            {"schedule": FUSED[0]},
            FUSED[1:],
        )


def _read_file(flags: types.SimpleNamespace) -> Table | ChunkOrders:
    """The CSV file's schedule. Raises UsageError for flags that do not go with it."""
    try:
        file = read_schedule(flags.schedule.removeprefix(CSV))
    except ValueError as error:
        raise UsageError(str(error)) from None
    for flag in ("stages", "microbatches"):
        if getattr(flags, flag) not in (0, getattr(file, flag)):
            raise UsageError(
                f"--{flag}={getattr(flags, flag)} is not what the CSV file has",
                {flag: getattr(file, flag)},
            )
    if flags.recompute and isinstance(file, Table) and not file.recompute:
        raise UsageError(
            f"--recompute={flags.recompute} is the time of R, and the CSV file has no R",
            {"recompute": ""},
        )
    return file


def read_times(flags: types.SimpleNamespace) -> Times:
    """Times from --times, --recompute, --head, --embed, --update and --row. Raises UsageError for
    values that are no times."""
    numbers = [cfg.number(text) for text in flags.times.split(",")]
    known = [number for number in numbers if number is not None and number >= 0]
    if len(known) != 4 or len(numbers) != 4 or not sum(known[:3]) > 0 or max(known) > MOST_TIME:
        most = f", and none more than {MOST_TIME:g}" if known and max(known) > MOST_TIME else ""
        raise UsageError(
            f"--times={cfg.shown(flags.times)} is not four times F,B,W,message, of which F, B or "
            f"W is more than 0{most}",
            {"times": "1,1,1,0"},
        )
    recompute, overlap = cfg.number(flags.recompute or "0"), cfg.number(flags.overlap or "0")
    for name in ("head", "embed", "update", "row"):
        if not getattr(flags, name) <= MOST_TIME:
            raise UsageError(
                f"--{name}={getattr(flags, name):g} must be at most {MOST_TIME:g}", {name: 0.0}
            )
    if recompute is None or not 0 <= recompute <= MOST_TIME:
        raise UsageError(
            f"--recompute={cfg.shown(flags.recompute)} is not a time, such as that of F",
            {"recompute": "1"},
        )
    if overlap is None or not 0 <= overlap <= MOST_TIME:
        raise UsageError(f"--overlap={cfg.shown(flags.overlap)} is not a time", {"overlap": "0"})
    if flags.overlap and flags.permute == "aligned":
        raise UsageError("--permute='aligned' packs no overlapped cells", {"permute": "auto"})
    forward, backward, weights, message = known
    return Times(
        forward,
        backward,
        weights,
        message,
        R=recompute,
        head=flags.head,
        tick=flags.row,
        embed=flags.embed,
        update=flags.update,
        overlap=overlap,
    )


# --- one schedule ---------------------------------------------------------------------------------


def make(
    request: ScheduleRequest, name: str, repeats: Sequence[int], report: table_search.Report
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
    request: ScheduleRequest, name: str, repeats: Sequence[int], report: table_search.Report
) -> Table:
    """The table of one step, not checked; arguments as of `make`."""
    file = request.file
    if isinstance(file, Table):
        return file
    if file is not None:
        units = [request.flags.ops_per_chunk] * len(file.stage_of)
        spec = dataclasses.replace(request.spec, units_per_chunk=units)
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


def one(request: ScheduleRequest, report: table_search.Report) -> Shown:
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


def compare(request: ScheduleRequest, progress: table_search.Report) -> Shown:
    """All schedules, best first: those within the memory bound by coupled time, then the others.
    Each has the number of chunks asked for if it is made for that, else the fewest."""
    flags, spec, requested = request.flags, request.spec, request.spec.repeats
    repeats: dict[str, Sequence[int]] = {
        name: (requested if fits_repeats(name, requested) else default_repeats(name),)
        for name in SCHEDULES
    }
    repeats[AUTO] = sorted({*itertools.chain(*repeats.values()), *table_search.ANY_REPEATS})
    listed, done = [], 0.0
    for name, counts in repeats.items():
        part = 0.5 if name == AUTO else 0.5 / len(SCHEDULES)
        table = make(request, name, counts, table_search.part_of(progress, done, part))
        done += part
        fused = flags.fused_backward and name in FUSED
        values = figures(table, simulate(table, spec.times, fused_backward=fused))
        values["memory"] = memory_of(table) / values["repeats"] * (requested or 1)
        values["fits"] = not flags.memory or values["memory"] <= flags.memory + ROUNDING
        listed.append(values)
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
