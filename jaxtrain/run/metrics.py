"""What a run leaves about itself: metrics.jsonl, TensorBoard, loss.png.

    metrics.jsonl    one JSON object a line, the record of everything; a number that is not finite
                     is null
      {"step": 10, "time": 1763786000.123, "wall_s": 12.5, "loss": 3.21, "grad_norm": 0.8,
       "learning_rate": 3e-4, "tokens": 20480, "batch": 9, "step_time_s": 0.1, "tokens_per_s": …,
       "mfu": …, "goodput": 0.7}
      {"step": 100, "time": …, "wall_s": …, "validation_loss": 3.4, …}
      {"step": 1, "time": …, "wall_s": …, "start_up_s": 9.1, "imports_s": 2.0, …}     once a start
                                                                                (start_up.py)
      {"step": 60, "time": …, "wall_s": …, "rolled_back_from": 75, "next_batch": 75, "why": …,
       "rollbacks": 1}
    metrics.rolled_back.jsonl    the records of steps 61 to 75 of before, when the run went back to
                                 step 60

    batch           the number of the step's batch, from 0
    skipped         updates skipped so far, where the run skips those whose numbers are not finite
    time            Unix seconds at which the record was written
    wall_s          seconds that the run has run: all its starts, compiling and what a kill has cost
                    too, without the time between starts
    goodput         the share of wall_s that went into steps which count (goodput_log.py)
    step_time_s …   means over the steps since the training record before, without evaluations and
                    saves

Values are made elsewhere; nothing here touches a device. Libraries that are slow to import are
imported where they are used.
"""

import json
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

from jaxtrain.run.goodput import WallClock
from jaxtrain.run.line_file import LineFile, warned

METRICS_FILE, LOSS_PLOT, TENSORBOARD_FOLDER = "metrics.jsonl", "loss.png", "tensorboard"
ROLLED_BACK_FILE = "metrics.rolled_back.jsonl"
LONGEST_TITLE = 70  # characters that fit above loss.png


def read_metrics(workdir: str | os.PathLike) -> list[dict]:
    """The records of a run in the order of their lines, none if there is no file. A line that a
    kill has cut off is left out."""
    path = pathlib.Path(workdir) / METRICS_FILE
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


class MetricsWriter:
    """Appends records to metrics.jsonl and TensorBoard. A line is on its way to the disk when
    `write` returns, if there is room on it.

    Args:
      workdir: made if need be. None: nothing is written (for the processes that keep no log).
      tensorboard: whether event files are written too.
      resume_step: the step that the run goes on from: records of later steps are dropped, for they
        will come again. 0 begins anew.
      wall_s: seconds that the run has run by now, all its starts together; the writer's own if not
        given.
      say: gets a line, once, where files cannot be written.
    """

    def __init__(
        self,
        workdir: str | os.PathLike | None,
        tensorboard: bool = True,
        resume_step: int = 0,
        wall_s: Callable[[], float] | None = None,
        say: Callable[[str], object] = print,
    ):
        self._file: LineFile | None = None
        self._say = say
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
        """Begins the files anew, with those of these records that are not of later steps than
        this."""
        path = self._workdir / METRICS_FILE
        # A file beside, then renamed: a kill in between must not lose the run's history.
        beside = path.with_suffix(".new")
        with warned(path, self._say):
            beside.write_text(
                "".join(json.dumps(record) + "\n" for record in records if record["step"] <= step)
            )
            os.replace(beside, path)
        self._file = LineFile(path, self._say)
        if self._tensorboard:
            self._events = _event_files(self._workdir / TENSORBOARD_FOLDER, step + 1, self._say)

    def go_back(self, step: int, **values: float | int | str | None) -> None:
        """The run stands at an earlier step: records of later ones move to ROLLED_BACK_FILE; one
        about this takes their place."""
        if self._file is None:
            return
        self.close()
        records = read_metrics(self._workdir)
        self._open(step, records)
        rolled_back = self._workdir / ROLLED_BACK_FILE
        with warned(rolled_back, self._say), rolled_back.open("a") as file:
            file.writelines(
                json.dumps(record) + "\n" for record in records if record["step"] > step
            )
        self.write(step, **values)

    def write(self, step: int, **values: float | int | str | None) -> None:
        """One record, with `time` and `wall_s` in front. Numbers that are not finite become null:
        JSON has no others."""
        if self._file is None:
            return
        now, wall_s = round(time.time(), 3), round(self._wall_s(), 3)
        record = {"step": step, "time": now, "wall_s": wall_s} | {
            k: _finite(v) for k, v in values.items()
        }
        self._file.write(json.dumps(record, allow_nan=False))
        if self._events is not None:
            group = "validation" if any(k.startswith("validation") for k in values) else "train"
            for name, value in {"wall_s": wall_s, **values}.items():
                if isinstance(value, (int, float)):
                    self._events.add_scalar(f"{group}/{name}", value, step, walltime=now)

    def close(self) -> None:
        """Ends the files."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._events is not None:
            self._events.close()
            self._events = None


def _event_files(folder: pathlib.Path, first_step: int, say: Callable[[str], object]) -> Any:
    """TensorBoard's writer, None where there is no room for one. Its thread would end at an error,
    and `add_scalar` then wait for ever."""
    from tensorboardX import SummaryWriter

    with warned(folder, say):
        events = SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)
        said: set[str] = set()

        def once(line: str) -> None:
            if not said:
                say(line)
            said.add(line)

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


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot_losses(workdir: str | os.PathLike) -> pathlib.Path | None:
    """Draws loss.png, training and validation loss over steps, from metrics.jsonl. None if there is
    nothing to draw.

    Its title is the run's name, that of its folder.
    """
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
