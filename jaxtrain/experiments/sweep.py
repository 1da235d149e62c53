"""`python -m jaxtrain.experiments.sweep`, which is `jaxtrain sweep`: runs of one recipe that differ
by settings.

    SWEEP/learning_rate=1e-3,width=64/    a run's folder, trained by `jaxtrain train`
        output.log                        what its processes have said
    SWEEP/sweep.jsonl                     how each process has ended, and what its run has reached:
                                          of a run the last line counts, of those that went on
                                          the longest
    SWEEP/table.txt, sweep.png            the table, and losses over steps and over settings

    sweep ─┬─ python -m jaxtrain.train … --workdir=SWEEP/learning_rate=1e-3,width=64
           └─ guard of that process: kills it if the sweep is gone (launch.py)

The runs follow from the command line alone. The same command goes on with those that sweep.jsonl
does not have as finished, from their checkpoints.

With --halving=N, all runs stop at a fraction of their steps (train.stop_at), and the best 1/N of
them go on to N times as many: successive halving (Jamieson & Talwalkar 2016, arXiv:1502.07943),
the bracket of Hyperband that stops earliest (Li et al. 2018, arXiv:1603.06560). No jax.
"""

import concurrent.futures
import contextlib
import hashlib
import itertools
import math
import os
import pathlib
import random
import re
import shlex
import signal
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain import cli, config as cfg, launch, train_command
from jaxtrain.config.flags import SHARED_FLAGS, Flag, Reading, read_flags
from jaxtrain.devices import cluster_environment
from jaxtrain.experiments.run_folder import read_run
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.files import LineFile, append_record, fresh, read_json_lines, replace_text, warned
from jaxtrain.run.metrics import METRICS, VALIDATION_LOSS, read_metrics
from jaxtrain.run.run_lock import RunLock

DESCRIPTION = """
Trains runs of one recipe that differ by settings, and prints their table, the best one first.

usage: jaxtrain sweep --config=NAME|FILE --grid SETTING=VALUE,VALUE … [--parallel=N]
                      [--workdir=DIR] [--config.GROUP.FIELD=VALUE …]
       jaxtrain sweep … --grid SETTING=LOW..HIGH … --random=N [--halving=N]
       jaxtrain sweep … --list | --index=I

Each run has a folder in --workdir, named after its settings, and a process of its own. All runs are
checked before the first one begins. The same command goes on with a sweep that was stopped or
killed, trains once more what failed, and prints the table of a sweep that has ended. The status is
that of a run that failed, if one did. Parallel runs share the GPUs, with at least one for each. TPU
chips are not shared out: use --parallel=1 there, or --index on several hosts.
"""
FLAGS = (
    *(flag for flag in SHARED_FLAGS if flag.name in ("config", "workdir", "cpu_devices")),
    Flag(
        "grid",
        (),
        "SETTING=VALUE,VALUE,… (or A;B where values have commas), once for each setting; with "
        "--random also LOW..HIGH, drawn log-uniformly",
    ),
    Flag("random", 0, "draw so many of the combinations; 0: all of them", 1),
    Flag("seed", 0, "seed of what is drawn; the first runs of a larger --random are the same", 0),
    Flag("parallel", 1, "runs that are trained at the same time", 1, launch.MOST_PROCESSES),
    Flag("halving", 1, "the best 1/N of the runs go on, to N times the steps; 1: all of them", 1),
    Flag("list", False, "print the commands of all runs, and stop"),
    Flag("index", -1, "train this run alone, from 0, in this process: for array jobs", 0),
)
REACHED = ("step", "loss", VALIDATION_LOSS)  # metrics of a record
RECORDS, TABLE, PICTURE, OUTPUT = "sweep.jsonl", "table.txt", "sweep.png", "output.log"
MOST_RUNS = 1000
DRAWS = 100  # for each run: some are there already
MOST_NAMED = 10  # lines of the picture with a legend
LONGEST_NAME = 120  # characters of a folder's name
# statuses after which a run is not trained again: bad numbers would be the same ones
ENDED = (ExitStatus.FINISHED, ExitStatus.BAD_NUMBERS)
# exit status of a process → how it has ended, in words
ENDS: dict[int, str] = {0: "finished"} | {
    status: f"{status} {each.name}"
    for kind, base in ((signal.Signals, 128), (ExitStatus, 0))
    for each in kind
    if (status := base + each)
}
# record of a run that has none, by whose types one in sweep.jsonl is told from other lines
NOT_ENDED: dict[str, Any] = {
    "status": -1,
    "ended": "not ended",
    "error": "",
    "digest": "",
    "cut": 0,
}


class SweepRun(NamedTuple):
    """A run: its folder, the texts of the settings in which it differs from others by their paths,
    the arguments of `jaxtrain train`, its steps, and the digest of all its settings."""

    folder: pathlib.Path
    settings: dict[str, str]
    words: list[str]
    steps: int
    digest: str

    def record(self, cut: int, status: int, error: str = "") -> dict[str, Any]:
        """What sweep.jsonl gets of a process that was to train this run to 1/cut of its steps."""
        losses = {
            metric: values[metric]
            for values in read_metrics(self.folder)
            if values["step"] <= self.steps // cut  # with another --halving it went beyond
            for metric in REACHED
            if isinstance(values.get(metric), (int, float))
        }
        record = {
            **{"run": self.folder.name, "settings": self.settings, "digest": self.digest},
            **{"cut": cut, "status": status, "ended": ENDS.get(status, str(status))},
            **{"error": error, **losses},
        }
        append_record(self.folder.parent / RECORDS, record, streams.log)
        return record


@cli.command
def main(argv: Sequence[str]) -> int | None:
    """The exit status: 0, or that of the first run that failed for good, else of one that may go
    on."""
    flags, runs = cli.checked(read_flags(argv, DESCRIPTION, FLAGS, with_config=True), plan_sweep)
    if flags.list:
        print("\n".join(f"jaxtrain train {shlex.join(run.words)}" for run in runs), flush=True)
        return ExitStatus.FINISHED
    if flags.index >= 0:
        status = train_command.main(runs[flags.index].words)
        from jaxtrain.devices import cluster  # with jax, which has started by now

        if status == ExitStatus.FINISHED and cluster.is_main():
            runs[flags.index].record(1, status)
        return status
    folder = pathlib.Path(flags.workdir)
    lock = RunLock(folder)
    lock.take(streams.log)
    streams.outlive()
    try:
        signals = launch.received_signals()
        train_in_rungs(runs, flags, signals)
        pairs = reached(runs, folder)
        report(pairs, folder)
    finally:
        lock.release()
    if signals:
        return ExitStatus.INTERRUPTED if signals[0] == signal.SIGINT else ExitStatus.STOPPED
    failed = [record["status"] for _, record in pairs if record["status"] > 0]
    return next((status for status in failed if not launch.goes_on(status)), max([0, *failed]))


# --- which runs -----------------------------------------------------------------------------------


def plan_sweep(reading: Reading) -> tuple[types.SimpleNamespace, list[SweepRun]]:
    """The flags, and the runs, checked as `jaxtrain train` checks them. Raises UsageError, or
    FlagsError for a run that cannot work."""
    flags, runs = reading.namespace, []
    flags.workdir = flags.workdir or f"{cli.default_workdir(flags.config)}_sweep"
    of_all = [
        f"--config={flags.config}",
        *(f"--config.{path}={text}" for path, text in reading.overrides),
        *[f"--cpu_devices={flags.cpu_devices}"] * bool(flags.cpu_devices),
    ]
    for settings in settings_of_runs(flags.grid, flags.random, flags.seed):
        folder = pathlib.Path(flags.workdir, name_of(settings))
        words = [
            *of_all,
            *(f"--config.{path}={text}" for path, text in settings.items()),
            f"--workdir={folder}",
        ]
        # the machine that lists runs need not have their devices
        config, _ = cli.parse(words, "", train_command.FLAGS, uses_devices=not flags.list)
        if place := config.checkpoint.directory.rstrip("/"):
            words.append(f"--config.checkpoint.directory={place}/{folder.name}")
        digest = hashlib.sha256(repr(config).encode()).hexdigest()
        runs.append(SweepRun(folder, settings, words, config.train.steps, digest))
    if flags.index >= len(runs):
        raise cfg.UsageError(
            f"--index={flags.index} is not below the number of runs, {len(runs)}",
            {"index": len(runs) - 1},
        )
    return flags, runs


def settings_of_runs(texts: Sequence[str], number: int, seed: int) -> list[dict[str, str]]:
    """The settings of each run, path → text: all combinations of a grid, or so many that are drawn.
    Raises UsageError. texts: of --grid"""
    grid = {
        path: [each.strip() for each in values.split(";" if ";" in values else ",")]
        for path, _, values in (text.partition("=") for text in texts)
    }
    if not grid:
        raise cfg.UsageError(
            "a sweep has no --grid", advice="--grid optimizer.learning_rate=1e-3,2e-3"
        )
    size = number or math.prod(map(len, grid.values()))
    if size > MOST_RUNS:
        raise cfg.UsageError(
            f"a sweep of {size:,} runs has more than {MOST_RUNS:,}", advice=f"--random={MOST_RUNS}"
        )
    generator, combinations = random.Random(seed), itertools.product(*grid.values())
    drawn = ([draw_value(generator, v) for v in grid.values()] for _ in range(DRAWS * number))
    runs = [dict(zip(grid, each, strict=True)) for each in (drawn if number else combinations)]
    return [*{name_of(run): run for run in runs}.values()][: number or None]


def draw_value(generator: random.Random, texts: Sequence[str]) -> str:
    """One of some texts; if that is LOW..HIGH, a number between, of four digits, or a whole one
    where both ends are."""
    text = generator.choice(texts)
    low, high = (cfg.number(end) or 0.0 for end in text.partition("..")[::2])
    if not 0 < low < high:
        return text
    value = low * (high / low) ** generator.random()
    return f"{value:.0f}" if text.replace("..", "").isdigit() else f"{value:.4g}"


def name_of(settings: Mapping[str, str]) -> str:
    """The name of a run's folder, of characters that every file system takes.

    >>> name_of({"optimizer.learning_rate": "1e-3", "model.width": "64"})
    'learning_rate=1e-3,width=64'
    """
    last = [path.rpartition(".")[2] for path in settings]
    names = [name if last.count(name) == 1 else path for name, path in zip(last, settings)]
    exact = ",".join(map("{}={}".format, names, settings.values()))
    safe = re.sub("[^A-Za-z0-9_.,=+-]", "_", exact)[:LONGEST_NAME]
    return safe if safe == exact else f"{safe}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


# --- their processes ------------------------------------------------------------------------------


def train_in_rungs(
    runs: Sequence[SweepRun], flags: types.SimpleNamespace, signals: list[int]
) -> None:
    """Trains the runs to their end, or with --halving fewer and fewer of them to more and more of
    their steps: a rung is a training of all that are left. A run that failed and may go on ends the
    sweep after its rung, for it may be one of the best."""
    chosen, folder = [*runs], pathlib.Path(flags.workdir)
    fewest = min(len(runs), *(run.steps for run in runs))
    powers = (flags.halving**rung for rung in range(MOST_RUNS.bit_length()))
    cuts = sorted({cut for cut in powers if cut <= fewest}, reverse=True)
    gpus = 0 if flags.cpu_devices else cluster_environment.visible_gpus(os.environ)
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    # of the runs that are trained at the same time, at most one for a GPU
    places = launch.environments(
        min(flags.parallel, gpus or flags.parallel), names[:gpus], "CUDA_VISIBLE_DEVICES"
    )
    for cut in cuts:
        waiting = [run for run, last in reached(chosen, folder, cut) if last["status"] not in ENDED]
        streams.log(f"runs to 1/{cut} of their steps: {len(chosen)}, of which {len(waiting)} now")
        with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
            futures = [pool.submit(train, run, cut, places, signals) for run in waiting]
            for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
                if record := future.result():
                    how = f"{record['ended']}, {record['error'] or f'loss {score(record):.6g}'}"
                    streams.log(f"{number}/{len(waiting)} {record['run']}: {how}")
        ended = reached(chosen, folder, cut)
        if any(last["status"] < 0 or launch.goes_on(last["status"]) for _, last in ended):
            break
        best = len(runs) // (cuts[0] // cut * flags.halving)
        chosen = [run for run, last in ended if last["status"] == 0][:best]


def train(
    run: SweepRun, cut: int, places: list[dict[str, str]], signals: list[int]
) -> dict[str, Any] | None:
    """The record of how a process has ended that trains a run to 1/cut of its steps; None if a
    signal came before it began. places: the environments that no other thread uses"""
    if signals:
        return None
    environment = places.pop()  # there are as many as threads
    stop = [f"--config.train.stop_at={run.steps // cut}"] * (cut > 1)
    words = [*launch.python("jaxtrain.train"), *run.words, *stop]
    with warned(run.folder, streams.log):
        run.folder.mkdir(exist_ok=True)
    log = LineFile(run.folder / OUTPUT, streams.log)
    job = launch.Job([words], [environment], lambda line, _: log.write(line.removeprefix("[0] ")))
    with contextlib.closing(log), contextlib.closing(job):
        status = launch.watch(job, signals)
    places.append(environment)
    error = ([*job.last_lines(0), *job.errors] or [""])[-1]
    return run.record(cut, status, error if status else "")


# --- what they have reached -----------------------------------------------------------------------


def reached(
    runs: Sequence[SweepRun], folder: pathlib.Path, cut: int = 0
) -> list[tuple[SweepRun, dict[str, Any]]]:
    """The runs with their last records, the best first, failed ones last. cut: of the processes
    that were to train them to 1/cut of their steps; 0: of any"""
    lines = (
        line
        for line in read_json_lines(folder / RECORDS)
        if all(type(line.get(name)) is type(value) for name, value in NOT_ENDED.items())
        and all(isinstance(line.get(metric, 0.0), (int, float)) for metric in REACHED)
    )
    records = {
        line["digest"]: line
        for line in sorted(lines, key=lambda line: -line["cut"])  # the furthest of a run is last
        if cut in (0, line["cut"])
    }
    # a run whose folder was removed has no record
    pairs = [(r, records.get(r.digest if r.folder.exists() else "", NOT_ENDED)) for r in runs]
    return sorted(pairs, key=lambda pair: (pair[1]["status"] != 0, pair[1]["cut"], score(pair[1])))


def score(record: Mapping[str, Any]) -> float:
    """The validation loss, or the training loss of a run without evaluations."""
    return record.get(VALIDATION_LOSS, record.get("loss", math.inf))


def report(pairs: Sequence[tuple[SweepRun, Mapping[str, Any]]], folder: pathlib.Path) -> None:
    """Prints, writes and draws the table of runs and their records, with the errors of those that
    failed."""
    table = [[*pairs[0][0].settings, *REACHED, "status"]]
    for run, record in pairs:
        figures = [f"{record[each]:.6g}" if each in record else "" for each in REACHED]
        table.append([*run.settings.values(), *figures, record["ended"]])
    lines = streams.aligned(table)
    lines += [f"{r['ended']}: {run.folder}: {r['error']}" for run, r in pairs if r["status"] > 0]
    streams.log(*lines)
    with warned(folder, streams.log):
        replace_text(folder / TABLE, "\n".join(lines) + "\n")
        draw([pair for pair in pairs if pair[1]["status"] == 0], folder / PICTURE)


def draw(pairs: Sequence[tuple[SweepRun, Mapping[str, Any]]], path: pathlib.Path) -> None:
    """Draws the training losses of runs over steps, and the losses of their records over each
    setting."""
    from matplotlib.figure import Figure  # not pyplot: no display, no state

    settings = pairs[0][0].settings if pairs else {}
    figure = Figure(figsize=(5 * (1 + len(settings)), 5), dpi=120, layout="constrained")
    curves, *panels = figure.subplots(1, 1 + len(settings), sharey=True, squeeze=False)[0]
    curves.set(title="training loss", xlabel="step", ylabel=METRICS["loss"].unit)
    for run, _ in pairs:
        curves.plot(*zip(*read_run(run.folder).curve("loss"), strict=True))
    for axes, setting in zip(panels, settings, strict=True):
        numbers = [cfg.number(run.settings[setting]) for run, _ in pairs]
        lines: dict[str, list[tuple[Any, float]]] = {}
        for (run, record), number in zip(pairs, numbers, strict=True):
            value = run.settings[setting] if None in numbers else number
            others = {path: text for path, text in run.settings.items() if path != setting}
            lines.setdefault(name_of(others), []).append((value, score(record)))
        is_positive = all(number and number > 0 for number in numbers)
        axes.set(title="last loss", xlabel=setting, xscale="log" if is_positive else "linear")
        for name, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=name)
        if 1 < len(lines) <= MOST_NAMED:
            axes.legend()
    figure.savefig(fresh(path))


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
