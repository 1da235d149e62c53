"""What is done with a step's results: they are awaited one step behind, written to the log, and
shown."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.config import Config
from jaxtrain.devices import cluster
from jaxtrain.pipeline.step_model import hardware_at_hand, transformer_of
from jaxtrain.run import metrics
from jaxtrain.run.goodput import GoodputLog
from jaxtrain.run.peers import Stragglers
from jaxtrain.run.progress import Progress, StepTimer
from jaxtrain.run.wall_clock import STEPS, Part, WallClock, start_line, start_record
from jaxtrain.training.calendar import Calendar
from jaxtrain.training.metrics import StepMetrics
from jaxtrain.training.parameter_checks import Comparison
from jaxtrain.training.recovery import Finding, Judge, Numbers, Rollback
from jaxtrain.training.requests import Answer, Request
from jaxtrain.training.step import Step

TINY = 1e-12  # any drop at all: one choice of a large batch is more


@dataclasses.dataclass(frozen=True)
class Pending:
    """A step that has been dispatched: its number, its batch's, and its results, which the devices
    may still be at work on.

    metrics: of each replica where replicas are independent; answer: what processes ask of the loop
    after it; comparison: of copies of the parameters after it, where there is one.
    """

    at: int
    batch: int
    metrics: StepMetrics
    answer: Answer
    comparison: Comparison | None = None


@dataclasses.dataclass(frozen=True)
class Speed:
    """Means over some steps. mfu: model FLOPs utilisation, 0 to 1; None where a device's peak is
    not known."""

    step_time_s: float
    tokens_per_s: float
    mfu: float | None


class Speedometer:
    """Speed over the last seconds and since the last record, of the time that steps took:
    evaluations and saves are left out.

    Args:
      config: a resolved config.
      step: of this config.
      start: the step that the run begins with.
      clock: of the command.
    """

    def __init__(self, config: Config, step: Step, start: int, clock: WallClock):
        self.tokens_per_step = config.data.batch_size * config.data.sequence_length
        self._hardware = hardware_at_hand(config, step.mesh.devices.flat[0].device_kind)
        self._flops_per_token, self._dtype = (
            transformer_of(config).training_flops_per_token() / step.mesh.size,
            config.precision.compute,
        )
        self._timer = StepTimer(start, clock=lambda: clock.spent(*STEPS))
        self.lap, self.restart = self._timer.lap, self._timer.restart

    def recent(self) -> Speed:
        """The mean over the last seconds."""
        return self._speed(self._timer.recent())

    def since_asked(self) -> Speed:
        """The mean over the steps since this was asked before."""
        return self._speed(self._timer.since_asked())

    def _speed(self, seconds: float) -> Speed:
        tokens_per_s = self.tokens_per_step / seconds
        flops_per_s = tokens_per_s * self._flops_per_token
        return Speed(
            seconds,
            tokens_per_s,
            self._hardware.utilization(flops_per_s, self._dtype) if self._hardware else None,
        )


class Reporter:
    """Reads steps' results one step behind, so that the devices never wait for the host; logs and
    shows them.

    Args:
      calendar: says which steps are logged.
      mean_metrics: as in Step.
      judge: sees every step's numbers, and raises NumbersError, or finds that the run has to go
        back.
      speedometer, log, progress: get every step, every logged step, and every step.
      goodput: of the run; where the time of this start has gone up to the first step that is
        reported is shown and logged.
      stragglers: of process 0; names a process that is slower than the others.
      expert_room: model.expert_room; what finds no room is warned of. A capacity drops by
        intention, and is only logged.
    """

    def __init__(
        self,
        calendar: Calendar,
        mean_metrics: Callable[[StepMetrics], StepMetrics] | None,
        judge: Judge,
        speedometer: Speedometer,
        log: metrics.MetricsWriter,
        progress: Progress,
        goodput: GoodputLog,
        stragglers: Stragglers,
        expert_room: float = 0.0,
    ):
        self._calendar, self._mean_metrics, self._judge = calendar, mean_metrics, judge
        self._speedometer, self._log, self._progress = speedometer, log, progress
        self._goodput, self._started = goodput, False
        self._stragglers, self._warned_of_slowest = stragglers, stragglers.slowest
        self._pending: Pending | None = None
        self._expert_room, self._warned_of = expert_room, 0.0
        self._skips = 0  # of this process's replicas, since the last warning
        self._skipped: float | None = None  # of the run by then, if that is known

    def add(self, pending: Pending) -> Request:
        """Takes a step that has just been dispatched and reports the one before. What was asked
        after that; NumbersError as `finish`."""
        before, self._pending = self._pending, pending
        return (
            Request.NOTHING
            if before is None
            else self._report(before, together=False, logged=self._calendar.logs(before.at))
        )

    def finish(self, stopping: bool) -> Request:
        """Reports the step that was added last, and returns what was asked after it. It is logged
        if the run stops with it.

        Raises NumbersError as the judge's `act`.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return Request.NOTHING
        return self._report(
            pending, together=True, logged=stopping or self._calendar.logs(pending.at)
        )

    def validation(self, at: int, loss: float | None) -> None:
        """Logs and shows a validation loss in nats a token, if there is one."""
        if loss is not None:
            self._log.write(at, validation_loss=loss)
            self._progress.log(f"step {at}: validation loss {loss:.4f} nats a token")

    def saves(self, figures: Mapping[int, Mapping[str, float]]) -> None:
        """Logs, by step, how long saves that have ended blocked the loop and how long they took."""
        for at, values in figures.items():
            self._log.write(at, **values)

    def _report(self, pending: Pending, together: bool, logged: bool) -> Request:
        """together: all processes are at this step, so that independent replicas' results can be
        put together."""
        together = together or logged or self._mean_metrics is None
        with self._goodput.clock.part(Part.AWAITING):
            values, asked = self._read(pending.metrics, together), pending.answer()
        values |= {"tokens": pending.at * self._speedometer.tokens_per_step, "batch": pending.batch}
        self._speedometer.lap(pending.at)
        self._goodput.reached(pending.at)
        self._end_start_up(pending.at)
        finite = np.isfinite(_of_replicas(pending.metrics.loss)) & np.isfinite(
            _of_replicas(pending.metrics.grad_norm)
        )
        numbers = Numbers(
            pending.at,
            pending.batch,
            values["loss"],
            values["grad_norm"],
            tuple(finite.tolist()),
            whole=together,
        )
        finding = self._judge.see(numbers)
        recent = self._speedometer.recent()
        self._progress.update(
            pending.at, loss=values["loss"], tokens_per_s=recent.tokens_per_s, mfu=recent.mfu
        )
        if logged or (together and (finding or not finite.all())):
            speed = dataclasses.asdict(self._speedometer.since_asked())
            self._log.write(
                pending.at,
                **values,
                **speed,
                goodput=round(self._goodput.share(), 4),
                **self._slowest(),
            )
        self._warn_of_drops(pending.at, values.get("dropped", 0.0))
        self._warn_of_skipping(numbers, values.get("skipped", 0.0))
        if together:  # one replica's numbers do not end the run before all see them
            self._judge.act(self._agreed(finding, numbers))
        if pending.comparison:
            self._judge.see_copies(pending.at, pending.comparison())
        return asked

    def _slowest(self) -> dict[str, float]:
        """What is logged of the slowest process, where one is clearly slower than the others. A
        line for each window in which one is."""
        slowest = self._stragglers.slowest
        if slowest is None:
            return {}
        if slowest is not self._warned_of_slowest:
            self._warned_of_slowest = slowest
            self._progress.log(slowest.line())
        return {"slowest_process": slowest.process, "slowest_behind_s": round(slowest.behind_s, 4)}

    def go_back(self, rollback: Rollback) -> None:
        """The run stands at an earlier step: that is said and logged, and what was dispatched since
        is forgotten."""
        self._pending, self._skips, self._skipped = None, 0, None
        self._goodput.reached(rollback.step)
        self._speedometer.restart(rollback.step)
        self._progress.restart(rollback.step)
        self._progress.log(
            f"warning: back from step {rollback.came_from} to step {rollback.step}, and on "
            f"with batch {rollback.position}: {rollback.why}"
        )
        self._log.go_back(
            rollback.step,
            rolled_back_from=rollback.came_from,
            next_batch=rollback.position,
            why=rollback.why,
            rollbacks=self._judge.memory.rollbacks,
        )

    def _agreed(self, finding: Finding | None, numbers: Numbers) -> Finding | None:
        """What the processes have found, whose replicas have numbers of their own; of several
        findings the one that goes back furthest."""
        if self._mean_metrics is None or jax.process_count() == 1:
            return finding
        none = numbers.at + 1
        since = cluster.least(finding.since if finding else none)
        if since == none:
            return None
        return Finding(
            numbers.at,
            since,
            numbers.batch,
            finding.why if finding else self._judge.describe(numbers),
        )

    def _warn_of_skipping(self, numbers: Numbers, skipped: float) -> None:
        """A line for updates that were skipped; where replicas train apart, for all since they met
        before. skipped: so far in the run."""
        self._skips += self._judge.skips * numbers.finite.count(False)
        if not numbers.whole:
            return
        count = max(self._skips, 0 if self._skipped is None else round(skipped - self._skipped))
        if count:
            text = f"{count} updates were" if count > 1 else "an update was"
            self._progress.log(f"warning: {text} skipped: {self._judge.describe(numbers)}")
        self._skips, self._skipped = 0, skipped

    def _warn_of_drops(self, at: int, dropped: float) -> None:
        """dropped: the part of the choices of experts. A line for the first that find no room, and
        whenever these are twice as many."""
        if not self._expert_room or dropped < max(2 * self._warned_of, TINY):
            return
        self._warned_of, room = dropped, self._expert_room
        drops = (
            f"{dropped:.2%} of the choices of experts were dropped, beyond "
            f"model.expert_room={room:g}"
        )
        self._progress.log(
            f"warning: step {at}: {drops}: --config.model.expert_room={2 * room:g} has room "
            "for more"
        )

    def _end_start_up(self, at: int) -> None:
        """Shows and logs where the time up to the first step went, once."""
        if not self._started:
            self._progress.log(start_line(self._goodput.clock))
            self._log.write(at, **start_record(self._goodput.clock))
            self._started = True

    def _read(self, metrics: StepMetrics, together: bool) -> dict[str, float]:
        """A step's metrics by name. Of independent replicas: of all `together`, or of those that
        this process has a part of."""
        if self._mean_metrics is not None and together:
            metrics = self._mean_metrics(metrics)
        return {
            name: float(np.mean(_of_replicas(value))) for name, value in metrics.by_name().items()
        }


def _of_replicas(value: jax.Array) -> np.ndarray:
    """The values, [replicas], of those replicas that this process has a part of; [1] of a scalar
    that all devices have."""
    if value.is_fully_replicated:
        return np.ravel(value)
    parts: dict[Any, Any] = {shard.index[0].start: shard.data for shard in value.addressable_shards}
    return np.concatenate([parts[start] for start in sorted(parts)])
