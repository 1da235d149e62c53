"""`jaxtrain track RUN`: sends the records of a run to trackers: Weights & Biases, trackio, MLflow.
A run starts a process of it for each of its trackers (followers.py).

A tracker takes no step back. So a step is sent once a checkpoint has it: a run that is killed goes
on behind it, and a roll-back does not go before it. The tracker itself is asked what it has, so a
kill between sending and noting costs nothing. A tracker is made for a RunFolder and its id, and has

    last                 the newest step that is there in full, -1 if none; the caller counts on
    log(step, numbers)   for a step after the last one
    close()              returns when all is stored

No jax; the libraries are imported where they are used.
"""

import fcntl
import hashlib
import importlib
import json
import os
import pathlib
import select
import shutil
import signal
import sys
import types
from collections.abc import Sequence
from typing import Any

from jaxtrain import cli, places
from jaxtrain.checkpoint.steps import checkpoints_of, read_meta, step_numbers
from jaxtrain.config import UsageError, own_code, to_dict, value_text
from jaxtrain.config.flags import Flag
from jaxtrain.experiments.followers import FOLDER, fault_of
from jaxtrain.experiments.run_folder import RunFolder, read_run
from jaxtrain.run import streams

DESCRIPTION = """
Sends the records of a run to trackers of experiments, each step once, however often the command is
given, and whether a tracker followed the run or not.

usage: jaxtrain track RUN [--to=wandb,trackio,mlflow]

RUN is the --workdir of jaxtrain train. A step is sent once a checkpoint has it, for until then it
may be trained again. The environment variables of the trackers' own libraries say where records go
to: WANDB_MODE=offline, TRACKIO_DIR=/tmp/runs, MLFLOW_TRACKING_URI=sqlite:////tmp/runs.db.
"""
FLAGS = (
    Flag("to", "", "wandb, trackio, mlflow, FILE.py:CLASS; empty: the run's metrics.trackers"),
    Flag("follow", False, "go on until standard input ends"),
)
LOOK_S = 5.0  # seconds between two looks for a new checkpoint
HANG_S = 600  # seconds in which a tracker has to take what there is, while the run goes on


@cli.command
def main(argv: Sequence[str]) -> None:
    """Ends with status 2 for what cannot work, and with 74 if a tracker has failed."""
    flags = cli.checked_flags(argv, DESCRIPTION, FLAGS, lambda flags: flags, words=True)
    if len(flags.words) != 1:
        raise UsageError(f"track is about one run, not {len(flags.words)}: jaxtrain track RUN")
    run = read_run(flags.words[0])
    names = (flags.to or ",".join(run.config.metrics.trackers)).split(",")
    for name in names:
        if fault := fault_of(name):
            raise UsageError(f"--to={name} {fault}")
    for name in names:
        try:
            print(f"{name}: {feed(run.folder, name, flags.follow)}", flush=True)
        except BlockingIOError:
            raise places.NoStorageError(
                f"{name}: another process sends it this run's records"
            ) from None
        except Exception as error:  # a library's, whatever it is
            raise places.NoStorageError(f"{name}: {type(error).__name__}: {error}") from error


def feed(folder: pathlib.Path, name: str, follow: bool) -> str:
    """Sends a tracker the steps that it has not; if it follows, those of new checkpoints, too,
    until standard input ends. What it has then, in words. Raises BlockingIOError where another
    process does the same, and whatever the tracker raises."""
    make = TRACKERS.get(name) or own_code.load(name)
    if name in TRACKERS:
        importlib.import_module(name)  # takes seconds, which the end of the run need not wait for
    place = folder / FOLDER / f"{name.replace('/', '_')}.lock"
    place.parent.mkdir(exist_ok=True)
    # the folder may be a stranger's, with links
    with os.fdopen(os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)) as lock:
        # the follower of a run that was killed ends a little later than the run
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if follow else fcntl.LOCK_NB))
        tracker: Any = None
        newest = -1
        while True:
            is_last = not follow or bool(select.select([sys.stdin], [], [], LOOK_S)[0])
            if follow:
                signal.alarm(HANG_S)  # ends this process
            before, newest = newest, max(step_numbers(checkpoints_of(folder)), default=0)
            if newest == before and not is_last:
                continue
            run = read_run(folder)
            steps, settled = numbers_by_step(run.records), settled_step(run)
            latest = max(steps, default=0)
            # the evaluation of the latest step may still come
            known = [step for step in steps if step <= settled and (step < latest or is_last)]
            if known and tracker is None:
                # a run that begins anew, or a copy of its folder, has another id
                identity = json.dumps([run.name, run.records[0]]).encode()
                tracker = make(run, hashlib.sha256(identity).hexdigest()[:12])
            for step in known:
                if step > tracker.last:
                    tracker.log(step, steps[step])
                    tracker.last = step
            if is_last:
                if tracker:
                    tracker.close()
                return f"it has all up to step {settled}, the newest in a checkpoint, of {latest}"


def numbers_by_step(records: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Step → all its numbers, ascending. The step that a record names may have been sent before the
    record was written: the numbers of a save belong to the step that the run had reached, those of
    a roll-back to the step after it."""
    steps: dict[int, dict[str, float]] = {}
    at = -1
    for record in records:
        at = max(at, record["step"] + ("rolled_back_from" in record))
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}
        steps[at] = steps.get(at, {}) | numbers
    return steps


def settled_step(run: RunFolder) -> int:
    """The last step whose record stays as it is: that of the newest checkpoint, or, while numbers
    are bad, the step before the first bad ones (SpikeDetector), for the run may go back there."""
    folder = checkpoints_of(run.folder)
    stored = step_numbers(folder)
    # those of a finished run may be gone
    newest = max([0, *stored, *(each["step"] for each in run.records if "save_s" in each)])
    if newest not in stored or newest >= run.config.train.steps:
        return newest
    memory = read_meta(folder, newest).get("memory", {})
    bad = (memory.get(name) for name in ("nonfinite_since", "spike_since"))
    return min([newest, *(first - 1 for first in bad if first)])


# --- trackers -------------------------------------------------------------------------------------


def wandb_run(run: RunFolder, run_id: str) -> types.SimpleNamespace:
    """Weights & Biases. A server knows the last step. Nobody can read the file of an off-line
    session before its end, so each session replaces the earlier ones, and has all steps."""
    import wandb

    session = wandb.init(
        project=run.config.metrics.project or os.environ.get("WANDB_PROJECT", "jaxtrain"),
        id=run_id,
        name=run.name,
        config=to_dict(run.config),
        resume="allow",
    )
    folder = pathlib.Path(session.dir).parent
    for earlier in {*folder.parent.glob(f"offline-run-*-{run_id}")} - {folder}:
        shutil.rmtree(earlier)
    return types.SimpleNamespace(
        last=session.step - 1,
        log=lambda step, numbers: session.log(numbers, step=step),
        close=session.finish,
    )


def trackio_run(run: RunFolder, run_id: str) -> types.SimpleNamespace:
    """trackio, whose database or server knows the last step."""
    import trackio

    session = trackio.init(
        project=run.config.metrics.project or os.environ.get("TRACKIO_PROJECT", "jaxtrain"),
        name=f"{run.name}-{run_id}",  # by which it finds the run again
        config=to_dict(run.config),
        resume="allow",
    )
    return types.SimpleNamespace(
        last=session._next_step - 1,
        # "time" is a name of trackio's own
        log=lambda step, numbers: session.log(
            {name: number for name, number in numbers.items() if name != "time"}, step
        ),
        close=session.finish,
    )


def mlflow_run(run: RunFolder, run_id: str) -> types.SimpleNamespace:
    """MLflow, whose stores know the last step of each metric; some of them may have part of a step
    after a kill."""
    import mlflow

    experiment = mlflow.set_experiment(
        run.config.metrics.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", "jaxtrain")
    )
    matches = mlflow.search_runs(
        [experiment.experiment_id], f"tags.jaxtrain = '{run_id}'", output_format="list"
    )
    data = mlflow.start_run(
        matches[0].info.run_id if matches else None, run_name=run.name, tags={"jaxtrain": run_id}
    ).data
    for group, settings in to_dict(run.config).items():
        mlflow.log_params(
            {
                path: value_text(value)
                for name, value in settings.items()
                if (path := f"{group}.{name}") not in data.params
            }
        )
    last = {metric.key: metric.step for metric in data.to_proto().metrics}

    def log(step: int, numbers: dict[str, float]) -> None:
        absent = {k: v for k, v in numbers.items() if last.get(k, -1) < step}
        absent["wall_s"] = absent.pop("wall_s")  # the last one: the step is complete
        mlflow.log_metrics(absent, step=step, timestamp=round(1000 * numbers["time"]))

    return types.SimpleNamespace(last=last.get("wall_s", -1), log=log, close=mlflow.end_run)


TRACKERS: dict[str, Any] = {"wandb": wandb_run, "trackio": trackio_run, "mlflow": mlflow_run}

if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
