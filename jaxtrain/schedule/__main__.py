"""`python -m jaxtrain.schedule`: a pipeline schedule as a picture and as figures, before anything is trained.

    schedule, stages, microbatches, op times  →  table  →  timeline, CSV, bubbles by two clocks, memory, slots

    --compare    all schedules side by side, best first

The coupled clock is that of the runtime, which executes rows. No jax.
"""

import dataclasses
import difflib
import json
import os
import pathlib
import shutil
import sys
import types
from collections.abc import Sequence

from jaxtrain import cli
from jaxtrain.config.flags import Flag, UsageError
from jaxtrain.run.search_progress import SearchProgress
from jaxtrain.schedule import by_name, drawing, search
from jaxtrain.schedule.orders import SCHEDULES, default_repeats, fits_repeats
from jaxtrain.schedule.simulate import Simulation, Times, simulate
from jaxtrain.schedule.slots import assign_slots
from jaxtrain.schedule.table import VOCABULARIES, Permute, Table
from jaxtrain.schedule.table_csv import read_csv, to_csv
from jaxtrain.schedule.validator import check

DESCRIPTION = """usage: jaxtrain schedule [flags]      (or python -m jaxtrain.schedule …)

Shows a pipeline schedule and says what it costs, such as
  jaxtrain schedule --schedule=zb_v --stages=4 --microbatches=8
  jaxtrain schedule --schedule=1f1b --stages=8 --microbatches=64 --times=18.5,18.1,9.3,0.6 --svg=1f1b.svg
  jaxtrain schedule --compare --stages=8 --microbatches=32 --times=18.5,18.1,9.3,0.6 --memory=8

Schedules: gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, dualpipe_v; auto, the best table found for the times within --memory; csv:FILE,
your own table (write one with --csv and change it).

Ops: F forward, B gradient of the input, W gradient of the weights, R recompute. Times are of one microbatch on a whole stage, in any unit;
an op on one of a stage's `repeats` chunks takes its part of that.

Two clocks: independent (stages wait for messages alone, as papers assume) and coupled (the rows as this runtime executes them, where a
permute makes a stage wait for its neighbours). What --json prints, and the timeline shows below it:
  ticks                     rows of the table
  step_time                 by the independent clock; step_time_coupled by the coupled one
  bubble_fraction           1 - busiest stage's work / step_time
  bubble_fraction_span      1 - busiest stage's work / longest time from a stage's first op to its last, independent clock
  bubble_fraction_coupled   1 - busiest stage's work / step_time_coupled
  peak_residuals          of each stage, the most chunk stashes at once, each from its F to the end of its B
                            (peak_residuals_with_weight_stash: to the end of its W)
  slots                     buffers a stage needs of each kind"""

FLAGS = (
    Flag("schedule", "1f1b", f"{', '.join(by_name.NAMES)} or csv:FILE"),
    Flag("stages", 0, "pipeline stages; 0: 4, or those of the CSV file", at_least=1),
    Flag("microbatches", 0, "microbatches of a step; 0: 8, or those of the CSV file", at_least=1),
    Flag("repeats", 0, "chunks of the model on each stage; 0: the fewest that the schedule is made for (auto: 1 or 2)", at_least=1),
    Flag("times", "1,1,1,0", "F,B,W,message: time of each op of one microbatch on a whole stage, and of a message"),
    Flag("recompute", "", "time of R: full recomputation, with R ops on all chunks but the last; empty: none"),
    Flag("head", 0.0, "time of the head, loss and gradients of one microbatch on one stage", at_least=0),
    Flag("embed", 0.0, "time of the embedding of one microbatch on one stage, and of its gradient", at_least=0),
    Flag("row", 0.0, "time that every row of the table costs every stage, coupled clock", at_least=0),
    Flag(
        "vocabulary",
        "parallel",
        "parallel: all stages share head and embedding; end_stages: the last unit's stage and the first's have them",
    ),
    Flag("fused_backward", False, "the gradient leaves after W, as where B and W are one op; 1f1b, interleaved, gpipe; independent clock"),
    Flag("permute", "auto", "when rows send messages: auto (best for the times), late, aligned, early or spaced"),
    Flag("ops_per_chunk", 1, "ops that each chunk's layers are cut into", at_least=1),
    Flag(
        "memory", 0.0, "bound for auto and --compare: stashes at once, W's counted, in chunks of 1/repeats of a stage; 0: none", at_least=0
    ),
    Flag("compare", False, "all schedules side by side, best coupled time first; those within --memory before the others"),
    Flag("json", False, "print the figures as JSON in place of the timeline"),
    Flag("csv", "", "write the table to this file, which --schedule=csv:FILE reads back"),
    Flag("svg", "", "write the timeline (coupled clock) to this file"),
    Flag("png", "", "as --svg, drawn by matplotlib"),
)
DEFAULT_STAGES, DEFAULT_MICROBATCHES = 4, 8
MOST_CELLS = 1_000_000  # stages · repeats · microbatches
FUSED = ("gpipe", "1f1b", "interleaved")  # schedules whose every W follows its B at once


def main(argv: list[str]) -> None:
    """The command. Whatever is wrong with the flags ends it with one line and status 2 before anything is written, Ctrl-C with one line
    and status 130; a file is written whole or not at all."""
    flags = cli.parse_flags(argv, DESCRIPTION, FLAGS)
    try:
        try:
            problem = check_flags(flags)
            with SearchProgress(flags.schedule if not flags.compare else "all schedules") as progress:
                if flags.compare:
                    output, files = compare(flags, problem, progress), dict[str, bytes]()
                else:
                    output, files = one(flags, problem, progress)
        except search.MemoryTooSmall as error:
            least = error.least * (flags.repeats or 1)
            cli.fail(str(UsageError(f"--memory={flags.memory:g} is too little for any table found", {"memory": least})))
        except (ValueError, OSError) as error:
            cli.fail(str(error))
        for path, content in files.items():
            try:
                _write(pathlib.Path(path), content)
            except OSError as error:
                cli.fail(f"{path!r} cannot be written ({error.strerror}): use a file in a folder with room, of your own")
        try:
            sys.stdout.write(output)
            sys.stdout.flush()
        except BrokenPipeError:  # `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("stopped: no file is half written", file=sys.stderr, flush=True)
        sys.exit(cli.INTERRUPTED)


def _write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file whole or not at all; a device or a pipe, and a file in a folder that may not be written, are written as they are."""
    if path.exists() and not (path.is_file() and os.access(path.resolve().parent, os.W_OK)):
        path.write_bytes(content)
        return
    path = path.resolve()  # a link stays one
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# --- flags -----------------------------------------------------------------------------------------------------------------------


def check_flags(flags: types.SimpleNamespace) -> search.Problem:
    """What the flags ask for; fills in `stages` and `microbatches`, and `table`, a CSV file's. Raises ValueError for what cannot be."""
    name, flags.table = flags.schedule, None
    if not name.startswith("csv:"):
        _check_choice("schedule", name, by_name.NAMES)
    for flag, known in (("vocabulary", VOCABULARIES), ("permute", by_name.PERMUTES)):
        _check_choice(flag, getattr(flags, flag), known)
    times = read_times(flags)
    if name.startswith("csv:"):
        _check_csv_flags(flags)
    flags.stages, flags.microbatches = flags.stages or DEFAULT_STAGES, flags.microbatches or DEFAULT_MICROBATCHES
    size = flags.stages * max(2, flags.repeats) * flags.microbatches * flags.ops_per_chunk
    if size > MOST_CELLS:
        most = max(1, MOST_CELLS * flags.microbatches // size)
        rule = f"--microbatches={flags.microbatches} with these stages and chunks is more than {MOST_CELLS} tasks"
        raise UsageError(rule, {"microbatches": most})
    if flags.repeats and name in SCHEDULES and flags.stages > 1 and not flags.compare and not fits_repeats(name, flags.repeats):
        try:
            by_name.check_repeats(name, flags.stages, flags.repeats)
        except ValueError as error:
            rule = str(error).partition(": use ")[0]
            raise UsageError(f"--{rule}", {"repeats": max(1, default_repeats(name))}) from None
    if flags.fused_backward and not flags.compare and name not in FUSED and not name.startswith("csv:"):
        rule = f"--fused_backward does not fit --schedule={name!r}, whose W's stand apart"
        raise UsageError(rule, {"schedule": FUSED[0]}, FUSED[1:])
    if flags.compare and (given := [f for f in ("csv", "svg", "png") if getattr(flags, f)]):
        raise UsageError(f"--{given[0]} needs one schedule, and --compare shows all", {"compare": False})
    for flag in ("csv", "svg", "png"):
        _check_output(flag, getattr(flags, flag))
    return search.Problem(flags.stages, flags.microbatches, times, bool(flags.recompute), None, None, flags.vocabulary)


def _check_choice(flag: str, value: str, known: Sequence[str]) -> None:
    """UsageError for what is no choice: with the one that is most like it, or all of them where none is."""
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1, cutoff=0.5) or list(known)
        raise UsageError(f"--{flag}={value!r} is unknown", {flag: near[0]}, near[1:])


def _check_csv_flags(flags: types.SimpleNamespace) -> None:
    """Reads the file once, so that its numbers are known, and refuses flags that do not go with it."""
    flags.table = table = read_csv(flags.schedule.removeprefix("csv:"))
    for flag in ("stages", "microbatches"):
        if getattr(flags, flag) not in (0, getattr(table, flag)):
            raise UsageError(f"--{flag}={getattr(flags, flag)} is not what the CSV file has", {flag: getattr(table, flag)})
        setattr(flags, flag, getattr(table, flag))
    if flags.recompute and not table.recompute:
        raise UsageError(f"--recompute={flags.recompute} is the time of R, and the CSV file has no R", {"recompute": ""})


def read_times(flags: types.SimpleNamespace) -> Times:
    """Times from --times, --recompute, --head, --embed and --row. Raises ValueError for what are no times."""
    try:
        numbers = [float(text) for text in flags.times.split(",")]
        recompute = float(flags.recompute or 0)
    except ValueError:
        numbers, recompute = [], 0.0
        if all(_is_number(text) for text in flags.times.split(",")):
            raise UsageError(f"--recompute={flags.recompute!r} is not a time, such as that of F", {"recompute": "1"}) from None
    if len(numbers) != 4 or not all(0 <= number < float("inf") for number in numbers) or not sum(numbers[:3]) > 0:
        rule = f"--times={flags.times!r} is not four times F,B,W,message, of which F, B or W is more than 0"
        raise UsageError(rule, {"times": "1,1,1,0"})
    for flag, value in (
        ("recompute", recompute),
        ("head", flags.head),
        ("embed", flags.embed),
        ("row", flags.row),
        ("memory", flags.memory),
    ):
        if not 0 <= value < float("inf"):
            raise UsageError(f"--{flag}={value} must be a number from 0 up", {flag: 0})
    F, B, W, message = numbers
    return Times(F, B, W, message, recompute, flags.head, flags.row, flags.embed)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_output(flag: str, name: str) -> None:
    """ValueError unless a file of this name can be written."""
    path = pathlib.Path(name)
    if not name:
        return
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"is in {str(path.parent)!r}, which is not a folder"
        raise UsageError(f"--{flag}={name!r} {what}", {flag: (path.name or "schedule") + ("" if path.suffix else f".{flag}")})
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--{flag}={name!r} may not be written", {flag: path.name})


# --- one schedule ----------------------------------------------------------------------------------------------------------------


def make(flags: types.SimpleNamespace, problem: search.Problem, name: str, repeats: Sequence[int], report: search.Report) -> Table:
    """The checked table of a schedule; of `auto`, the best with any of these numbers of chunks on a stage."""
    if flags.table is not None:
        return flags.table
    modes = search.PACKINGS if flags.permute == "auto" else (flags.permute,)
    if name == "auto":
        bound = flags.memory / (flags.repeats or 1) if flags.memory else None
        table = search.search(problem, repeats, bound, modes, flags.ops_per_chunk, report)
    else:
        groups = [flags.ops_per_chunk] * (problem.stages * repeats[0])
        table = search.named(name, repeats[0], dataclasses.replace(problem, groups=groups), modes, report)
    check(table)
    return table


def one(flags: types.SimpleNamespace, problem: search.Problem, report: search.Report) -> tuple[str, dict[str, bytes]]:
    """(what to print, what to write into which files) for one schedule."""
    default = search.ANY_REPEATS if flags.schedule == "auto" else (max(1, default_repeats(flags.schedule)),)
    table = make(flags, problem, flags.schedule, (flags.repeats,) if flags.repeats else default, report)
    report("clocks and slots", 1.0)
    result = simulate(table, problem.times, fused_backward=flags.fused_backward)
    found = figures(table, result)
    title = f"{table.name}: {table.stages} stages, {table.microbatches} microbatches, coupled bubble {result.bubble_fraction_coupled:.1%}"
    files = {}
    for flag, draw in (
        ("csv", lambda: to_csv(table).encode()),
        ("svg", lambda: drawing.svg(table, result.timeline_coupled, title).encode()),
        ("png", lambda: drawing.png(table, result.timeline_coupled, title)),
    ):
        if path := getattr(flags, flag):
            report(f"--{flag}", 1.0)
            files[path] = draw()
    if flags.json:
        return json.dumps(found) + "\n", files
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size((140, 24)).columns
    lines = [f"{table.name}: {table.stages} stages, {table.microbatches} microbatches; chunks of {drawing.stage_chunks(table)}"]
    lines += ["", drawing.text(table, width, colour)]
    return "\n".join([*lines, summary(found)]) + "\n", files


def figures(table: Table, result: Simulation) -> dict:
    """What --json prints."""
    slotted = assign_slots(table)
    return {
        "schedule": table.name,
        "stages": table.stages,
        "repeats": max(1, len(set(table.chunk_of)) // table.stages),
        "microbatches": table.microbatches,
        "permutes": {when.name.lower(): int((table.permute == when).sum()) for when in Permute},
        "ticks": table.ticks,
        "step_time": result.step_time,
        "step_time_coupled": result.step_time_coupled,
        "bubble_fraction": result.bubble_fraction,
        "bubble_fraction_span": result.bubble_fraction_span,
        "bubble_fraction_coupled": result.bubble_fraction_coupled,
        "peak_residuals": result.peak_residuals,
        "peak_residuals_with_weight_stash": result.peak_residuals_with_weight_stash,
        "pool_sizes": slotted.pool_sizes,
        "slots_per_stage": {kind: list(counts) for kind, counts in slotted.slots_per_stage.items()},
    }


def summary(report: dict) -> str:
    """The figures in words."""
    permutes = ", ".join(f"{n} {when}" for when, n in report["permutes"].items() if n)
    lines = [
        f"rows                {report['ticks']} (permutes: {permutes})",
        f"step time           {report['step_time']:g} independent, {report['step_time_coupled']:g} coupled",
        f"bubble              {report['bubble_fraction']:.2%} of the step, {report['bubble_fraction_span']:.2%} of the longest span, "
        f"{report['bubble_fraction_coupled']:.2%} coupled",
        f"peak activations    {_numbers(report['peak_residuals'])} chunks on each stage; with what B leaves for W "
        f"{_numbers(report['peak_residuals_with_weight_stash'])}",
        f"slots               {', '.join(f'{kind} {n}' for kind, n in report['pool_sizes'].items())}",
    ]
    return "\n".join(lines)


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


# --- all schedules ---------------------------------------------------------------------------------------------------------------


def compare(flags: types.SimpleNamespace, problem: search.Problem, progress: search.Report) -> str:
    """All make_table, best first: those within the memory bound by coupled time, then the others."""
    rows = []
    chosen: dict[str, Sequence[int]] = {name: (_repeats_to_compare(name, flags.repeats),) for name in SCHEDULES}
    chosen["auto"] = tuple(sorted({*(v for values in chosen.values() for v in values), *search.ANY_REPEATS}))
    done = 0.0
    for name, repeats in chosen.items():
        part = 0.5 if name == "auto" else 0.5 / len(SCHEDULES)
        table = make(flags, problem, name, repeats, _part(progress, done, part))
        done += part
        result = simulate(table, problem.times, fused_backward=flags.fused_backward and name in FUSED)
        report = figures(table, result)
        report["memory"] = search.memory_of(table) / report["repeats"] * (flags.repeats or 1)
        report["fits"] = not flags.memory or report["memory"] <= flags.memory + search.ROOM
        rows.append(report)
    rows.sort(key=lambda r: (not r["fits"], float(f"{r['step_time_coupled']:.9g}"), r["memory"]))
    if flags.json:
        return json.dumps(rows) + "\n"
    width = max(len(r["schedule"]) for r in rows)
    unit = "of a stage" if flags.repeats in (0, 1) else f"of 1/{flags.repeats} of a stage"
    lines = [f"{'schedule':{width}}  repeats  rows  step coupled  independent  bubble coupled  independent    span  stashes"]
    for r in rows:
        lines.append(
            f"{r['schedule']:{width}}  {r['repeats']:7}  {r['ticks']:4}  {r['step_time_coupled']:12.6g}  {r['step_time']:11.6g}  "
            f"{r['bubble_fraction_coupled']:14.2%}  {r['bubble_fraction']:11.2%}  {r['bubble_fraction_span']:6.2%}  {r['memory']:7.4g}"
            + ("" if r["fits"] else "  more than --memory")
        )
    lines.append(f"stashes: the most at once on any stage, {unit} for one microbatch, from F to the end of W")
    return "\n".join(lines) + "\n"


def _part(report: search.Report, done: float, part: float) -> search.Report:
    """A report of what is `part` of the whole, after `done` of it."""
    return lambda what, of: report(what, done + of * part)


def _repeats_to_compare(name: str, repeats: int) -> int:
    """The number of chunks asked for if the schedule is made for it, else the fewest that it is made for."""
    return repeats if repeats and fits_repeats(name, repeats) else max(1, default_repeats(name))


if __name__ == "__main__":
    main(sys.argv[1:])
