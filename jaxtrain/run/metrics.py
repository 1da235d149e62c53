"""The record of a run's steps: metrics.jsonl, TensorBoard, loss.png.

    metrics.jsonl    one JSON object a line; a number that is not finite is null
      {"step": 10, "time": 1763786000.123, "wall_s": 12.5, "loss": 3.21, "grad_norm": 0.8,
       "learning_rate": 3e-4, "tokens": 20480, "batch": 9, "step_time_s": 0.1, "tokens_per_s": …,
       "mfu": …, "goodput": 0.7}
      {"step": 100, "time": …, "wall_s": …, "validation_loss": 3.4, …}
      {"step": 1, "time": …, "wall_s": …, "start_up_s": 9.1, "imports_s": 2.0, …}     once a start
      {"step": 60, "time": …, "wall_s": …, "rolled_back_from": 75, "next_batch": 75, "why": …,
       "rollbacks": 1}
    metrics.rolled_back.jsonl    the records that steps 61 to 75 had before the run went back to
                                 step 60

    batch           the number of the step's batch, from 0
    skipped         updates skipped so far, if the run skips those whose numbers are not finite
    time            Unix seconds at which the record was written
    wall_s          seconds that all starts of the run have lasted, compiling and lost steps
                    included, without the time between starts
    goodput         the fraction of wall_s that went into steps that count (goodput.py)
    step_time_s …   means over the steps since the last training record, without evaluations and
                    saves

No device is used. Libraries that are slow to import are imported where they are used.
"""

import json
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

from jaxtrain.run.files import LineFile, read_json_lines, replace_text, warned
from jaxtrain.run.wall_clock import WallClock

METRICS_FILE, LOSS_PLOT, TENSORBOARD_FOLDER = "metrics.jsonl", "loss.png", "tensorboard"
ROLLED_BACK_FILE = "metrics.rolled_back.jsonl"
LONGEST_TITLE = 70  # characters that fit above loss.png


def read_metrics(workdir: str | os.PathLike) -> list[dict]:
    """The records of a run in the order of their lines, none if there is no file. A line that a
    kill has cut off is left out."""
    return [
        record
        for record in read_json_lines(pathlib.Path(workdir) / METRICS_FILE)
        if isinstance(record, dict) and isinstance(record.get("step"), int)
    ]


class MetricsWriter:
    """Appends records to metrics.jsonl and TensorBoard. A line is handed to the system when `write`
    returns, if the disk is not full.

    Args:
      workdir: created if missing. None: nothing is written (for the processes that keep no log).
      tensorboard: whether event files are written too.
      resume_step: the step that the run goes on from: records of later steps are dropped, for they
        will come again. 0 starts empty files.
      wall_s: seconds that all starts of the run have lasted; this writer's lifetime if not given.
      log: gets a line, once, where files cannot be written.
    """

    def __init__(
        self,
        workdir: str | os.PathLike | None,
        tensorboard: bool = True,
        resume_step: int = 0,
        wall_s: Callable[[], float] | None = None,
        log: Callable[[str], object] = print,
    ):
        self._file: LineFile | None = None
        self._log = log
        self._events: Any = None
        self._wall_s = wall_s or WallClock().wall_s
        if workdir is None:
            return
        workdir = pathlib.Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self._workdir, self._tensorboard = workdir, tensorboard
        if resume_step == 0:
            (workdir / ROLLED_BACK_FILE).unlink(missing_ok=True)
        self._open(resume_step, read_metrics(workdir) if resume_step > 0 else [])

    def _open(self, step: int, records: list[dict]) -> None:
        """Replaces metrics.jsonl by those of the records up to this step, and opens both files."""
        path = self._workdir / METRICS_FILE
        lines = [json.dumps(record) + "\n" for record in records if record["step"] <= step]
        with warned(path, self._log):
            replace_text(path, "".join(lines))
        self._file = LineFile(path, self._log)
        if self._tensorboard:
            self._events = _event_files(self._workdir / TENSORBOARD_FOLDER, step + 1, self._log)

    def go_back(self, step: int, **values: float | int | str | None) -> None:
        """Moves the records of steps after this one to ROLLED_BACK_FILE, and writes a record of the
        roll-back with these values."""
        if self._file is None:
            return
        self.close()
        records = read_metrics(self._workdir)
        self._open(step, records)
        rolled_back = self._workdir / ROLLED_BACK_FILE
        with warned(rolled_back, self._log), rolled_back.open("a") as file:
            file.writelines(
                json.dumps(record) + "\n" for record in records if record["step"] > step
            )
        self.write(step, **values)

    def write(self, step: int, **values: float | int | str | None) -> None:
        """Writes one record, which begins with step, `time` and `wall_s`. Numbers that are not
        finite become null, for JSON has no others."""
        if self._file is None:
            return
        now, wall_s = round(time.time(), 3), round(self._wall_s(), 3)
        record = {"step": step, "time": now, "wall_s": wall_s} | {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._file.write(json.dumps(record, allow_nan=False))
        if self._events is not None:
            group = "validation" if any(k.startswith("validation") for k in values) else "train"
            for name, value in {"wall_s": wall_s, **values}.items():
                if isinstance(value, (int, float)):
                    self._events.add_scalar(f"{group}/{name}", value, step, walltime=now)

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._events is not None:
            self._events.close()
            self._events = None


def _event_files(folder: pathlib.Path, first_step: int, log: Callable[[str], object]) -> Any:
    """TensorBoard's writer; None where its file cannot be created. Errors of its thread become
    warnings: a thread that had ended would let `add_scalar` wait forever."""
    from tensorboardX import SummaryWriter

    with warned(folder, log):
        events = SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)
        warnings: list[str] = []

        def once(line: str) -> None:
            if not warnings:
                log(line)
            warnings.append(line)

        def guarded(method: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object) -> None:
                with warned(folder, once):
                    method(*arguments)

            return call

        writer: Any = events.file_writer.event_writer._ev_writer
        for name in ("write_event", "flush", "close"):
            setattr(writer, name, guarded(getattr(writer, name)))
        return events
    return None


def plot_losses(workdir: str | os.PathLike) -> pathlib.Path | None:
    """Draws loss.png, training and validation loss over steps, from metrics.jsonl, under the name
    of the run's folder. The picture's path; None if there is nothing to draw."""
    records = read_metrics(workdir)
    curves = {
        label: [(r["step"], r[key]) for r in records if isinstance(r.get(key), (int, float))]
        for label, key in (("training", "loss"), ("validation", "validation_loss"))
    }
    if not any(curves.values()):
        return None
    from matplotlib.figure import Figure  # not pyplot: no display, no state
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for label, points in curves.items():
        if points:
            marker = "o" if label == "validation" or len(points) == 1 else None
            axes.plot(*zip(*points), marker=marker, markersize=4, linewidth=1.5, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    name = pathlib.Path(workdir).resolve().name
    axes.set_title(
        name if len(name) <= LONGEST_TITLE else f"{name[: LONGEST_TITLE - 1]}…", parse_math=False
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    path = pathlib.Path(workdir) / LOSS_PLOT
    figure.savefig(path)
    return path
