"""The flags of `python -m jaxtrain.schedule`, and the checks that make a `ScheduleRequest` of them.
show_schedule.py answers it.

A refused flag names a value that works (`UsageError`): the same request with it has to pass all
checks. No jax.
"""

import dataclasses
import difflib
import math
import types

from jaxtrain import cli, config as cfg
from jaxtrain.config.flags import Flag, UsageError
from jaxtrain.schedule import by_name
from jaxtrain.schedule.clocks.times import Times
from jaxtrain.schedule.files.order_csv import read_schedule, to_order_csv
from jaxtrain.schedule.files.table_csv import to_csv
from jaxtrain.schedule.orders import (
    CSV,
    FUSED,
    ONE_CHUNK,
    OVERLAPPED,
    SCHEDULES,
    ChunkOrders,
    default_repeats,
    may_overlap,
)
from jaxtrain.schedule.table import VOCABULARIES, ScheduleError, Table
from jaxtrain.schedule.table_spec import TableSpec

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


# --- the request ----------------------------------------------------------------------------------


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
    # A table has stages · chunks · ops a chunk cells for each microbatch, and about as many more
    # for each stage while the pipeline fills and drains: cells = others · (stages + microbatches).
    # Fewer microbatches are the suggestion if those left are at least one; else the largest of all
    # sizes is reduced. For `stages`, which is in both factors, stages² + stages · microbatches is
    # bounded from above by (stages + microbatches)².
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
        except ScheduleError as error:
            raise UsageError(
                f"--{error.problem}", {"repeats": max(1, default_repeats(name))}
            ) from None
    if flags.overlap and not may_overlap(name):
        suggested, *others = OVERLAPPED
        fix: dict[str, object] = {"schedule": suggested}
        if spec.repeats:
            fix["repeats"] = default_repeats(suggested)
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
    except ScheduleError as error:
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
    # --recompute and --overlap are text, so that an empty one (no R, no overlapped cells) differs
    # from a time of 0.
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
