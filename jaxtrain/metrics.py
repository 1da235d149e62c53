"""What a run says about itself: metrics.jsonl, TensorBoard, loss.png, the progress bar, and how fast it is.

    metrics.jsonl    one JSON object a line, the record of everything; a number that is not finite is null
      {"step": 10, "loss": 3.21, "grad_norm": 0.8, "learning_rate": 3e-4, "tokens": 20480, "step_time_s": 0.1, "tokens_per_s": …, "mfu": …}
      {"step": 100, "validation_loss": 3.4, …}

Values are made elsewhere; nothing here touches a device. Libraries that are slow to import are imported where they are used.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

METRICS_FILE, LOSS_PLOT, TENSORBOARD_FOLDER = "metrics.jsonl", "loss.png", "tensorboard"

# Floating-point operations a second of one device as jax counts them, without sparsity: bfloat16, and what float32 matmuls run at
# by default (TF32 on NVIDIA, bfloat16 passes on TPU). From the vendors' data sheets. The first pattern found in the device kind counts.
PEAK_FLOPS: tuple[tuple[str, float, float], ...] = (
    (r"TPU v6|v6e", 918e12, 918e12),
    (r"TPU v5 ?lite|v5e", 197e12, 197e12),
    (r"TPU v5", 459e12, 459e12),
    (r"TPU v4", 275e12, 275e12),
    (r"TPU v3", 61.5e12, 61.5e12),
    (r"TPU v2", 22.5e12, 22.5e12),
    (r"GB[23]00", 2500e12, 1250e12),
    (r"B[23]00", 2250e12, 1125e12),
    (r"H[12]00 NVL", 835e12, 417.5e12),
    (r"H100 PCIe", 756e12, 378e12),
    (r"G?H[12]00", 989e12, 494.5e12),
    (r"H20\b", 148e12, 74e12),
    (r"H800", 989e12, 494.5e12),
    (r"A[18]00", 312e12, 156e12),
    (r"A30\b", 165e12, 82.5e12),
    (r"A40\b", 149.7e12, 74.8e12),
    (r"A10\b", 125e12, 62.5e12),
    (r"A10G", 70e12, 35e12),
    (r"L40S", 362e12, 183e12),
    (r"L40\b", 181e12, 90.5e12),
    (r"L4\b", 121e12, 60e12),
    (r"RTX A6000", 154.8e12, 77.4e12),
    (r"RTX 5090", 209.5e12, 104.8e12),
    (r"RTX 4090", 165.2e12, 82.6e12),
    (r"RTX 3090", 71e12, 35.6e12),
    (r"MI3[02]\dX", 1307e12, 163.4e12),
)


def peak_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Floating-point operations a second that one device can do in matmuls of `dtype`; None where it is not known (any CPU).

    Args:
      device_kind: as `jax.Device.device_kind` gives it.
      dtype: "bfloat16" or "float32".
    """
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype={dtype!r}: use 'bfloat16' or 'float32'")
    for pattern, bfloat16, float32 in PEAK_FLOPS:
        if re.search(pattern, device_kind, re.IGNORECASE):
            return bfloat16 if dtype == "bfloat16" else float32
    return None


def model_flops_per_token(
    matmul_parameters: int, layers: int, attention_width: float, sequence_length: int, *, causal: bool = True
) -> float:
    """Operations of the model's forward and backward pass for one token, recomputation not counted (PaLM, arXiv:2204.02311, appendix B).

    6·N + 12·L·W·S, of which causal attention needs half the second term: 6·L·W·S. Counting the half makes MFU lower, not higher,
    than PaLM's formula does.

    Args:
      matmul_parameters: N, the parameters that each token is multiplied with: not the embedding that is looked up, but the head,
        also when it is that same table.
      layers: L.
      attention_width: W, heads · head_dim; where keys and values differ in size, their mean.
      sequence_length: S.
      causal: whether a token attends to half the sequence on average.
    """
    return 6.0 * matmul_parameters + (6.0 if causal else 12.0) * layers * attention_width * sequence_length


def mfu(tokens_per_s: float, flops_per_token: float, devices: int, device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Model FLOPs utilisation, 0 to 1: the model's operations a second over what the devices can do; None where that is not known."""
    peak = peak_flops(device_kind, dtype)
    return None if peak is None else tokens_per_s * flops_per_token / (devices * peak)


class StepTimer:
    """Seconds a step, between laps, without what is paused for (evaluation, checkpoints).

    Call `lap` when the devices have finished a step: dispatch alone takes no time.
    """

    def __init__(self, step: int, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._step, self._since = step, clock()

    def lap(self, step: int) -> float | None:
        """Seconds a step since the last lap, and begins the next; None if there was no step."""
        now, steps = self._clock(), step - self._step
        seconds = (now - self._since) / steps if steps > 0 else None
        self._step, self._since = step, now
        return seconds

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves out what happens inside."""
        start = self._clock()
        try:
            yield
        finally:
            self._since += self._clock() - start


def read_metrics(workdir: str | os.PathLike) -> list[dict]:
    """The records of a run in the order of their lines, none if there is no file. A line that a kill has cut off is left out."""
    path = pathlib.Path(workdir) / METRICS_FILE
    if not path.exists():
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
    """Appends records to metrics.jsonl and TensorBoard. A line is on its way to the disk when `write` returns.

    Args:
      workdir: made if need be. None: nothing is written (for the processes that keep no log).
      tensorboard: whether event files are written too.
      resume_step: the step that the run goes on from: records of later steps are dropped, for they will come again. 0 begins anew.
    """

    def __init__(self, workdir: str | os.PathLike | None, tensorboard: bool = True, resume_step: int = 0):
        self._file: TextIO | None = None
        self._events: Any = None
        if workdir is None:
            return
        workdir = pathlib.Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / METRICS_FILE
        if path.exists():
            kept = [r for r in read_metrics(workdir) if r["step"] <= resume_step] if resume_step > 0 else []
            # Beside and renamed: a kill in between must not lose the run's history.
            new = path.with_suffix(".new")
            new.write_text("".join(json.dumps(r) + "\n" for r in kept))
            os.replace(new, path)
        self._file = path.open("a", buffering=1)
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(workdir / TENSORBOARD_FOLDER), purge_step=resume_step + 1, flush_secs=10)

    def write(self, step: int, **values: float | int | str | None):
        """One record. Numbers that are not finite become null: JSON has no others."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step} | {k: _finite(v) for k, v in values.items()}, allow_nan=False) + "\n")
        if self._events is not None:
            group = "validation" if any(k.startswith("validation") for k in values) else "train"
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._events.add_scalar(f"{group}/{name}", value, step)

    def close(self):
        """Ends the files."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._events is not None:
            self._events.close()
            self._events = None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot_losses(workdir: str | os.PathLike) -> pathlib.Path | None:
    """Draws loss.png, training and validation loss over steps, from metrics.jsonl. None if there is nothing to draw."""
    records = read_metrics(workdir)
    curves = {
        label: [(r["step"], r[key]) for r in records if isinstance(r.get(key), (int, float))]
        for label, key in (("training", "loss"), ("validation", "validation_loss"))
    }
    if not any(curves.values()):
        return None
    from matplotlib.figure import Figure  # not pyplot: no display, no state

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for label, points in curves.items():
        if points:
            marker = "o" if label == "validation" or len(points) == 1 else None
            axes.plot(*zip(*points), marker=marker, markersize=4, linewidth=1.5, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    path = pathlib.Path(workdir) / LOSS_PLOT
    figure.savefig(path)
    return path


class Progress:
    """A progress bar on a terminal; elsewhere a line every few seconds, so that logs can be read.

    Args:
      total: the run's last step.
      step: the step it begins with.
      stream: where it goes, standard error if not given.
      every: seconds between lines where there is no terminal.
      shown: False for the processes that say nothing.
    """

    def __init__(
        self,
        total: int,
        step: int = 0,
        stream: TextIO | None = None,
        every: float = 5.0,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._step = total, step
        self._stream, self._shown = stream or sys.stderr, shown
        self._every, self._clock = every, clock
        self._status: dict[str, float] = {}
        # The time left is reckoned from the second step: the first one compiles.
        self._first: tuple[int, float] | None = None
        self._last_line: float | None = None
        self._bar: Any = None
        if shown and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=step, file=self._stream, unit="step", dynamic_ncols=True)

    def update(self, step: int, *, loss: float | None = None, tokens_per_s: float | None = None, mfu: float | None = None):
        """`step` is done. What is not given stays as it was."""
        new = {"loss": loss, "tokens_per_s": tokens_per_s, "mfu": mfu}
        self._status |= {k: v for k, v in new.items() if v is not None}
        done, self._step = step - self._step, step
        if self._first is None:
            self._first = step, self._clock()
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(_status_text(self._status), refresh=False)
            self._bar.update(done)
        elif self._last_line is None or self._clock() - self._last_line >= self._every or step == self._total:
            self._last_line = self._clock()
            text = " · ".join(filter(None, [f"step {step}/{self._total}", _status_text(self._status), self._left()]))
            print(text, file=self._stream, flush=True)

    def _left(self) -> str:
        first, since = self._first or (self._step, 0.0)
        if first == self._step or self._step >= self._total:
            return ""
        seconds = (self._clock() - since) / (self._step - first) * (self._total - self._step)
        return f"{_duration(seconds)} left"

    def say(self, text: str):
        """Prints a line without breaking the bar."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self):
        """Leaves the bar as it is and ends its line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _status_text(status: dict[str, float]) -> str:
    parts = []
    if "loss" in status:
        parts.append(f"loss {status['loss']:.4f}")
    if "tokens_per_s" in status:
        parts.append(f"{_short(status['tokens_per_s'])} tokens/s")
    if "mfu" in status:
        parts.append(f"MFU {100 * status['mfu']:.1f} %")
    return " · ".join(parts)


def _short(number: float) -> str:
    """Three digits and a unit: 950, 12.3k, 4.56M."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 999.5 or unit == "G":
            break
        number /= 1000
    return f"{number:.3g}{unit}"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
