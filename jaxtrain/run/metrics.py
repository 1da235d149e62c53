"""The metrics of a run, each described once in METRICS, and their record: metrics.jsonl,
TensorBoard, loss.png.

A step's program computes the metrics that have a rule for independent replicas; all others are
numbers of the host. progress.py shows them, `--replay` compares them, docs/use.md lists them.

    metrics.jsonl    one JSON object a line; a number that is not finite is null
      {"step": 10, "time": 1763786000.123, "wall_s": 12.5, "loss": 3.21, "grad_norm": 0.8,
       "param_norm": 51.7, "learning_rate": 3e-4, "weighted_tokens": 2048, "tokens": 20480,
       "batch": 9, "step_time_s": 0.1, "tokens_per_s": …, "mfu": …, "goodput": 0.7}
      {"step": 100, "time": …, "wall_s": …, "validation_loss": 3.4, "validation_loss/web": 3.6, …}
      {"step": 1, "time": …, "wall_s": …, "start_up_s": 9.1, "imports_s": 2.0, …}     once a start
      {"step": 60, "time": …, "wall_s": …, "rolled_back_from": 75, "next_batch": 75, "why": …,
       "rollbacks": 1}
    metrics.rolled_back.jsonl    the records that steps 61 to 75 had before the run went back to
                                 step 60

No device is used. Libraries that are slow to import are imported where they are used.
"""

import dataclasses
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from jaxtrain.run.files import LineFile, fresh, read_json_lines, replace_text, warned
from jaxtrain.run.wall_clock import Phase, WallClock

METRICS_FILE, LOSS_PLOT, TENSORBOARD_FOLDER = "metrics.jsonl", "loss.png", "tensorboard"
ROLLED_BACK_FILE = "metrics.rolled_back.jsonl"
VALIDATION_LOSS = "validation_loss"  # VALIDATION_LOSS/NAME is that of a set
LONGEST_TITLE = 70  # characters that fit above loss.png


# Rules by which the values of independent replicas, numpy or jax arrays [replicas], become the
# step's. tokens: the weighted tokens of each replica. The documents have a rule by its name.


def mean(values: Any, tokens: Any) -> Any:
    return values.mean()


def mean_by_tokens(values: Any, tokens: Any) -> Any:
    return (values * tokens).sum() / tokens.sum().clip(1)


def total(values: Any, tokens: Any) -> Any:
    return values.sum()


def largest(values: Any, tokens: Any) -> Any:
    return values.max()


def host(values: Any, tokens: Any) -> Any:
    raise TypeError("a number of the host has one value")


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that a record may have.

    unit:     "" for a fraction, a count or a name
    meaning:  a phrase; it says when a metric is missing
    combine:  the rule by which the values of independent replicas become the step's; `host` for a
        number of the host. All devices of a replica have the same value
    title:    its name in the texts of `--replay` and `checkpoint ls`
    line:     its value → its text on the printed line, which leaves out empty ones
    matters_most: a narrow line shows it before all others
    group:    the group in TensorBoard of the records that have it
    curve:    the label of its curve in loss.png, which has those with a label
    replayed: whether `--replay` compares it
    """

    unit: str
    meaning: str
    combine: Callable[[Any, Any], Any]
    title: str = ""
    line: Callable[[float], str] = lambda value: ""
    matters_most: bool = False
    group: str = "train"
    curve: str = ""
    replayed: bool = False


def short(number: float) -> str:
    """Three digits and a unit: 950, 12.3k, 4.56M."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 999.5 or unit == "G":
            break
        number /= 1000
    return f"{number:.3g}{unit}"


METRICS = {
    # of every record
    "step": Metric("", "the number of the step, from 1", host),
    "time": Metric("s", "Unix time at which the record was written", host),
    "wall_s": Metric(
        "s",
        "what all starts of the run have lasted, compilation and lost steps included, without the "
        "time between starts",
        host,
    ),
    # of a logged step, computed by its program
    "loss": Metric(
        "nats per token",
        "mean over the batch's weighted tokens, before the update",
        mean_by_tokens,
        title="loss",
        line=lambda loss: f"loss {loss:.4f}",
        matters_most=True,
        curve="training",
        replayed=True,
    ),
    "grad_norm": Metric(
        "",
        "l2 norm of all gradients together, before clipping",
        mean,
        title="gradient norm",
        replayed=True,
    ),
    "param_norm": Metric(
        "",
        "l2 norm of all parameters together, after the update; independent replicas have one each, "
        "taken before they exchange",
        mean,
    ),
    "learning_rate": Metric("", "that of the update", mean),
    "weighted_tokens": Metric("tokens", "the batch's tokens that count in the loss", total),
    "mtp_loss": Metric(
        "nats per token",
        "mean loss of the tokens beyond the next; only with `model.mtp_depth`",
        mean_by_tokens,
    ),
    "z_loss": Metric(
        "",
        "mean of (log Z)² over the batch's weighted tokens, Z the denominator of the softmax of a "
        "token's logits; only with `train.z_loss`",
        mean_by_tokens,
    ),
    "expert_load": Metric(
        "",
        "the busiest expert's load over the mean, in the layer where that is largest; only with "
        "`model.experts`",
        largest,
    ),
    "dropped": Metric(
        "",
        "fraction of the choices of experts that were dropped; only where experts have a capacity",
        mean,
    ),
    "skipped": Metric(
        "",
        "updates skipped for numbers that are not finite, since the run began; only where "
        "`train.on_nonfinite` is not `stop`",
        total,
    ),
    # of a logged step, from the host
    "tokens": Metric("tokens", "those of all steps so far, with a weight or without", host),
    "batch": Metric("", "the number of the step's batch, from 0", host),
    "step_time_s": Metric(
        "s",
        "mean over the steps since the last record of a step, without evaluations and saves",
        host,
    ),
    "tokens_per_s": Metric(
        "tokens/s",
        "mean over the same steps",
        host,
        line=lambda rate: f"{short(rate)} tokens/s",
    ),
    "mfu": Metric(
        "",
        "model FLOPs utilization over the same steps, 0 to 1; null if the device's peak is unknown",
        host,
        line=lambda mfu: f"MFU {100 * mfu:.1f} %",
    ),
    "goodput": Metric("", "fraction of `wall_s` spent on steps that count", host),
    "slowest_process": Metric("", "the process that the others wait for, if one is", host),
    "slowest_behind_s": Metric("s", "the time a step by which it is behind them", host),
    # of an evaluation
    VALIDATION_LOSS: Metric(
        "nats per token",
        "mean loss over the tokens that the sources hold out, at most `train.eval_batches` batches "
        "of each; over those of all sets if the sources hold out nothing",
        host,
        title="validation loss",
        line=lambda loss: f"validation loss {loss:.4f} nats a token",
        group="validation",
        curve="validation",
    ),
    f"{VALIDATION_LOSS}/NAME": Metric(
        "nats per token",
        "that of a set of `data.validation`, or of what a source of a mixture holds out",
        host,
        group="validation",
    ),
    "evaluation/NAME": Metric(
        "", "that of `train.evaluate`, by the name that it returns", host, group="validation"
    ),
    "ema_decay": Metric(
        "",
        "`optimizer.ema_decay` where the losses are those of the average of the parameters; only "
        "with `train.eval_ema`",
        host,
        group="validation",
    ),
    # of the first step of a start
    "start_up_s": Metric("s", "from the start of the command to its first finished step", host),
    **{f"{phase.value}_s": Metric("s", "its parts", host) for phase in Phase},
    # of a save
    "save_s": Metric("s", "from the request to the complete checkpoint", host),
    "save_blocked_s": Metric("s", "the part of it in which training stood still", host),
    # of a rollback
    "rolled_back_from": Metric("", "the step that the run had reached", host),
    "next_batch": Metric("", "the number of the batch that it goes on with", host),
    "why": Metric("", "the reason, a line of text", host),
    "rollbacks": Metric("", "rollbacks so far", host),
}


def read_metrics(workdir: str | os.PathLike, file: str = METRICS_FILE) -> list[dict]:
    """The records of a run in the order of their lines, none if there is no file. A line that a
    kill has cut off is left out. file: METRICS_FILE or ROLLED_BACK_FILE"""
    return [
        # names once in memory, not once a record: half of a long run's
        {sys.intern(name): value for name, value in record.items()}
        for record in read_json_lines(pathlib.Path(workdir) / file)
        if isinstance(record.get("step"), int)
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
        self._events: Any = None
        self._log, self._wall_s = log, wall_s or WallClock().wall_s
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
        with warned(rolled_back, self._log):
            lines = [rolled_back.read_text(errors="replace")] if rolled_back.exists() else []
            replace_text(
                rolled_back,
                "".join(lines + [f"{json.dumps(r)}\n" for r in records if r["step"] > step]),
            )
        self.write(step, **values)

    def write(self, step: int, **values: float | int | str | None) -> None:
        """Writes one record of METRICS, which begins with step, `time` and `wall_s`. Numbers that
        are not finite become null, for JSON has no others."""
        if self._file is None:
            return
        now, wall_s = round(time.time(), 3), round(self._wall_s(), 3)
        record = {"step": step, "time": now, "wall_s": wall_s} | {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._file.write(json.dumps(record, allow_nan=False))
        if self._events is not None:
            records = (
                METRICS.get(name) or METRICS[f"{name.partition('/')[0]}/NAME"] for name in values
            )
            groups = {record.group for record in records}
            group = "validation" if "validation" in groups else "train"
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
    of_set = f"{VALIDATION_LOSS}/"
    labels = {key: metric.curve for key, metric in METRICS.items() if metric.curve} | {
        key: key.replace(of_set, "validation, ")
        for record in records
        for key in record
        if key.startswith(of_set)
    }
    curves = {
        label: [(r["step"], r[key]) for r in records if isinstance(r.get(key), (int, float))]
        for key, label in labels.items()
    }
    if not any(curves.values()):
        return None
    from matplotlib.figure import Figure  # not pyplot: no display, no state
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for label, points in curves.items():
        if points:
            marker = "o" if label.startswith("validation") or len(points) == 1 else None
            axes.plot(*zip(*points), marker=marker, markersize=4, linewidth=1.5, label=label)
    axes.set(xlabel="step", ylabel=f"loss ({METRICS['loss'].unit})")
    name = pathlib.Path(workdir).resolve().name
    axes.set_title(
        name if len(name) <= LONGEST_TITLE else f"{name[: LONGEST_TITLE - 1]}…", parse_math=False
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    path = pathlib.Path(workdir) / LOSS_PLOT
    figure.savefig(fresh(path))
    return path
