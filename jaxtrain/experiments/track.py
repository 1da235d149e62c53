"""`jaxtrain track RUN`: sends the records of a run to trackers. A run starts a process of it for
each of its trackers (followers.py).

A tracker takes no step back. So a step is sent once a checkpoint has it: a run that is killed goes
on behind it, and a roll-back does not go before it.
"""

import fcntl
import hashlib
import json
import pathlib
import signal
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

from jaxtrain import cli
from jaxtrain.checkpoint.steps import checkpoints_of, read_meta, step_numbers
from jaxtrain.config import UsageError, own_code
from jaxtrain.config.flags import Flag
from jaxtrain.experiments.followers import FOLDER, LAST_S
from jaxtrain.experiments.run_folder import RunFolder, read_run
from jaxtrain.experiments.trackers import fault_of, tracker_class
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus, RunError

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


class TrackerError(RunError):
    """A tracker that has failed; the text is one line."""

    status = ExitStatus.STORAGE


@cli.command
def main(argv: Sequence[str]) -> None:
    """Ends with status 2 for what cannot work, and with 74 if a tracker has failed."""
    run, names, follow = cli.checked_flags(argv, DESCRIPTION, FLAGS, check_flags, words=True)
    own_code.distrust(str(run.folder))
    over = threading.Event()
    if follow:
        threading.Thread(target=_end_with_the_run, args=(over,), daemon=True).start()
    else:
        over.set()
    for name in names:
        try:
            print(f"{name}: {feed(run.folder, name, over)}", flush=True)
        except Exception as error:  # a library's, whatever it is
            raise TrackerError(f"{name}: {type(error).__name__}: {error}") from error


def check_flags(flags: types.SimpleNamespace) -> tuple[RunFolder, list[str], bool]:
    """The run, its trackers, and whether they follow it. Raises UsageError."""
    if len(flags.words) != 1:
        raise UsageError(f"track is about one run, not {len(flags.words)}: jaxtrain track RUN")
    run = read_run(flags.words[0])
    names = list(filter(None, flags.to.split(","))) or [*run.config.metrics.trackers]
    if not names:
        raise UsageError("the run has no metrics.trackers", {"to": "wandb"})
    for name in names:
        if fault := fault_of(name):
            raise UsageError(f"--to={name} {fault}")
    return run, names, flags.follow


def feed(folder: pathlib.Path, name: str, over: threading.Event) -> str:
    """Sends a tracker the steps that it has not, and those of new checkpoints, until `over`. What
    it has then, in words. Raises BlockingIOError where another process does the same, and whatever
    the tracker raises."""
    (folder / FOLDER).mkdir(exist_ok=True)
    with open(folder / FOLDER / f"{name.replace('/', '_')}.lock", "w") as lock:
        # a follower before this one ends LAST_S after its run
        fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if over.is_set() else 0))
        tracker: Any = None
        newest = -1
        while True:
            is_last = over.wait(LOOK_S)
            before, newest = newest, max(step_numbers(checkpoints_of(folder)), default=0)
            if newest == before and not is_last:
                continue
            run = read_run(folder)
            steps, settled = numbers_by_step(run.records), settled_step(run)
            latest = max(steps, default=0)
            for step, numbers in steps.items():
                # the evaluation of the latest step may still come
                if step <= settled and (step < latest or is_last):
                    tracker = tracker or tracker_class(name)(run, id_of(run))
                    if step > tracker.last:
                        tracker.log(step, numbers)
                        tracker.last = step
            if is_last:
                if tracker:
                    tracker.close()
                return f"it has all up to step {settled}, the newest in a checkpoint, of {latest}"


def id_of(run: RunFolder) -> str:
    """12 digits that a run keeps. One that begins anew in its folder has others, and so has a copy
    of the folder under another name."""
    return hashlib.sha256(json.dumps([run.name, run.records[0]]).encode()).hexdigest()[:12]


def numbers_by_step(records: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Step → all its numbers, ascending. The step that a record names may have been sent before the
    record was written: the numbers of a save belong to the step that the run had reached, those of
    a roll-back to the first step after it."""
    steps: dict[int, dict[str, float]] = {}
    of_rollback: dict[str, float] = {}
    at = -1
    for record in records:
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}
        if "rolled_back_from" in record:
            of_rollback = numbers
            continue
        at = max(at, record["step"])
        if at not in steps:
            steps[at], of_rollback = of_rollback, {}
        steps[at] |= numbers
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


def _end_with_the_run(over: threading.Event) -> None:
    """Sets `over` at the end of standard input. An alarm ends the process if it does not end."""
    sys.stdin.buffer.read()
    over.set()
    signal.alarm(LAST_S)


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
