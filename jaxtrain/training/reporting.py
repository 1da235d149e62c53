"""The results of steps, which are awaited one step later, checked, logged and shown.

Begin with `Reporter.add`: the loop gives it each step that it has dispatched, and gets the requests
of the processes after the step before. `Reporter._report` has all that happens with one step's
numbers, in order; the methods below it are its warnings.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.config.phases import Span, span_at
from jaxtrain.devices import cluster
from jaxtrain.run.goodput import GoodputLog
from jaxtrain.run.intervals import Intervals
from jaxtrain.run.metrics import METRICS, VALIDATION_LOSS, MetricsWriter
from jaxtrain.run.peers import Slowest, Stragglers
from jaxtrain.run.progress import Progress, StepTimer
from jaxtrain.run.speculation import Speculation
from jaxtrain.run.wall_clock import STEPS, Phase, WallClock, start_line, start_record
from jaxtrain.training.one_step import StepMetrics, combine_replicas
from jaxtrain.training.parameter_checks import Comparison
from jaxtrain.training.recovery import Fault, Numbers, Rollback, SpikeDetector
from jaxtrain.training.requests import Answer, Request

TINY = 1e-12  # the least fraction of dropped choices that is warned of: any at all


@dataclasses.dataclass(frozen=True)
class Pending:
    """A dispatched step: its number, its batch's, and its results, which the devices may still
    compute.

    metrics: of each replica if replicas are independent; answer: the processes' requests after the
    step; comparison: of copies of the parameters after it, if there is one. index: the metrics are
    those of several steps of one program, [steps], of which it is this one.
    """

    at: int
    batch: int
    metrics: StepMetrics
    answer: Answer
    comparison: Comparison | None = None
    index: int | None = None

    def of_step(self) -> Mapping[str, Any]:
        """The metrics of this step alone, which are awaited if they are of several steps."""
        if self.index is None:
            return self.metrics
        return {name: np.asarray(values)[self.index] for name, values in self.metrics.items()}


class Speedometer:
    """The metrics step_time_s, tokens_per_s and mfu: means over the last seconds or since the last
    record, in the time that steps took, without evaluations and saves.

    Args:
      tokens_per_step: of all devices together.
      tokens_at_peak: tokens a second at which MFU is 1; None if the devices' peak is unknown.
      start: the step from which batches have these tokens.
      clock: of the command.
    """

    def __init__(
        self, tokens_per_step: int, tokens_at_peak: float | None, start: int, clock: WallClock
    ):
        self._tokens_per_step, self._tokens_at_peak = tokens_per_step, tokens_at_peak
        self._timer = StepTimer(start, clock=lambda: clock.spent(*STEPS))
        self.lap, self.restart = self._timer.lap, self._timer.restart

    def recent(self) -> dict[str, float | None]:
        """The mean over the last seconds."""
        return self._speed(self._timer.recent())

    def since_asked(self) -> dict[str, float | None]:
        """The mean over the steps since the last call."""
        return self._speed(self._timer.since_asked())

    def _speed(self, seconds: float) -> dict[str, float | None]:
        tokens_per_s = self._tokens_per_step / seconds
        mfu = tokens_per_s / self._tokens_at_peak if self._tokens_at_peak else None
        return {"step_time_s": seconds, "tokens_per_s": tokens_per_s, "mfu": mfu}


@dataclasses.dataclass
class Reporter:
    """Reads steps' results one step behind, so that the devices never wait for the host; checks,
    logs and shows them.

    intervals: the steps that are logged.
    spans: of the run, whose tokens are counted by steps.
    combine_metrics: as in Step.
    detector: checks every step's numbers; raises NumbersError, or sets the fault for which the run
        goes back.
    speedometer, progress, log: get every step, the log those that are due. Batches of other tokens
        have a speedometer of their own.
    goodput: of the run; the first reported step ends the start, whose seconds are shown and logged.
    stragglers: of process 0.
    speculation: is told of every step, where a program has several.
    expert_capacity: model.expert_room; choices of experts that exceed it are warned of. Those that
        exceed a capacity factor are dropped by intention, and only logged.
    """

    intervals: Intervals
    spans: Sequence[Span]
    combine_metrics: Callable[[StepMetrics], StepMetrics] | None
    detector: SpikeDetector
    speedometer: Speedometer
    log: MetricsWriter
    progress: Progress
    goodput: GoodputLog
    stragglers: Stragglers
    expert_capacity: float = 0.0
    speculation: Speculation | None = None
    # the steps of one program
    _pending: Sequence[Pending] = dataclasses.field(default=(), init=False)
    # of the steps since the last logged program
    _speed: Mapping[str, float | None] | None = dataclasses.field(default=None, init=False)
    _has_started: bool = dataclasses.field(default=False, init=False)
    _warned_of_slowest: Slowest | None = dataclasses.field(default=None, init=False)
    _warned_of_drops: float = dataclasses.field(default=0.0, init=False)
    _empty_batches: int = dataclasses.field(default=0, init=False)
    # of this process's replicas, since the last warning; of the run by then, if that is known
    _skips: int = dataclasses.field(default=0, init=False)
    _skipped: float | None = dataclasses.field(default=None, init=False)

    def add(self, *steps: Pending) -> Request:
        """Takes the steps of the program that has just been dispatched and reports those of the one
        before. The requests after these; raises NumbersError as `finish`."""
        previous, self._pending = self._pending, steps
        return self._report_all(previous, together=False, stopping=False)

    def finish(self, stopping: bool) -> Request:
        """Reports the steps that were added last, and returns the requests after them. The last one
        is logged if the run stops with it.

        Raises NumbersError as SpikeDetector.act.
        """
        steps, self._pending = self._pending, ()
        return self._report_all(steps, together=True, stopping=stopping)

    def validation(
        self, at: int, losses: Mapping[str, float], numbers: Mapping[str, float], ema_decay: float
    ) -> None:
        """Logs and shows validation losses, as of Evaluation.losses, and numbers of an evaluation
        of one's own, if there are any. ema_decay: of the average that was evaluated; 0: the
        parameters were"""
        named = {f"{VALIDATION_LOSS}/{name}".strip("/"): loss for name, loss in losses.items()}
        named |= {f"evaluation/{name}": number for name, number in numbers.items()}
        if named:  # one record: a run that goes on evaluates again where it is missing
            self.log.write(at, **named, **({"ema_decay": ema_decay} if ema_decay else {}))
        if numbers:
            line = ", ".join(f"{name} {number:.5g}" for name, number in numbers.items())
            self.progress.log(f"step {at}: {line}")
        if losses:
            sets = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if name)
            line = METRICS[VALIDATION_LOSS].line(losses[""])
            whose = " with the average of the parameters" * bool(ema_decay)
            self.progress.log(f"step {at}: {line}{whose}{sets and f' ({sets})'}")

    def saves(self, figures: Mapping[int, Mapping[str, float]]) -> None:
        """Logs, by step, the seconds that completed saves took and blocked the loop."""
        for at, values in figures.items():
            self.log.write(at, **values)

    def go_back(self, rollback: Rollback) -> None:
        """Logs and shows a roll-back, and forgets what was dispatched since."""
        self._pending, self._skips, self._skipped = (), 0, None
        self.goodput.reached(rollback.step)
        self.speedometer.restart(rollback.step)
        self.progress.restart(rollback.step)
        self.progress.log(
            f"warning: back from step {rollback.came_from} to step {rollback.step}, and on "
            f"with batch {rollback.position}: {rollback.why}"
        )
        self.log.go_back(
            rollback.step,
            rolled_back_from=rollback.came_from,
            next_batch=rollback.position,
            why=rollback.why,
            rollbacks=self.detector.state.rollbacks,
        )

    def _report_all(self, steps: Sequence[Pending], together: bool, stopping: bool) -> Request:
        """Reports the steps of a program; arguments as of `_report`. stopping: the run stops with
        the last one"""
        asked = Request.NOTHING
        if not steps:
            return asked
        # All steps of a program end together, so one wait is for all, and it is one lap of the
        # timers.
        with self.goodput.clock.phase(Phase.AWAITING):
            jax.block_until_ready(steps[-1].metrics)
        self.speedometer.lap(steps[-1].at)
        self.goodput.reached(steps[-1].at)
        self._speed = None
        for step in steps:
            last = stopping and step is steps[-1]
            asked |= self._report(step, together, last or self.intervals.logs(step.at))
        if self.speculation:
            self.speculation.ran(steps[0].at, steps[-1].at)
        return asked

    def _report(self, pending: Pending, together: bool, logged: bool) -> Request:
        """together: all processes are at this step, so that independent replicas' results can be
        combined; otherwise those of this process's replicas are."""
        at, metrics = pending.at, pending.of_step()
        # Combining independent replicas' metrics is a collective of all processes. Between logged
        # steps they do without, for it would make every replica wait for the slowest one.
        together = together or logged or self.combine_metrics is None
        with self.goodput.clock.phase(Phase.AWAITING):
            local = {name: _local(values) for name, values in metrics.items()}
            if self.combine_metrics is not None:
                metrics = (
                    self.combine_metrics(pending.metrics) if together else combine_replicas(local)
                )
            values = {name: float(metrics[name]) for name in METRICS if name in metrics}
            asked = pending.answer()
        tokens = span_at(self.spans, at - 1).tokens_before(at)
        values |= {"tokens": tokens, "batch": pending.batch}
        # The first results end the start of the command: it has compiled, loaded and run a step.
        if not self._has_started:
            self.progress.log(start_line(self.goodput.clock))
            self.log.write(at, **start_record(self.goodput.clock))
            self._has_started = True
        finite = tuple((np.isfinite(local["loss"]) & np.isfinite(local["grad_norm"])).tolist())
        numbers = Numbers(
            at, pending.batch, values["loss"], values["grad_norm"], finite, is_global=together
        )
        fault = self.detector.check(numbers)
        if self.speculation:
            self.speculation.saw(numbers.loss, numbers.grad_norm)
        self.progress.update(at, **values, **self.speedometer.recent())
        if logged or (together and (fault or not all(finite))):
            # The steps of a program end together, so each of them is logged with the same speed: a
            # second call would ask for the time of no step.
            self._speed = self._speed or self.speedometer.since_asked()
            goodput = round(self.goodput.share(), 4)
            self.log.write(at, **values, **self._speed, goodput=goodput, **self._slowest())
        self._warn_of_drops(at, values.get("dropped", 0.0))
        self._warn_of_skips(numbers, values.get("skipped", 0.0))
        if not values["weighted_tokens"]:
            self._warn_of_empty_batch(numbers)
        # One replica's numbers do not end the run before all processes see them: a process that
        # ended by itself would leave the others waiting.
        if together:
            self.detector.act(self._agreed(fault, numbers))
        if pending.comparison:
            self.detector.check_copies(at, pending.comparison())
        return asked

    def _slowest(self) -> dict[str, float]:
        """The log's figures of the slowest process, if it is clearly slower than the others. A
        warning is shown once a window."""
        slowest = self.stragglers.slowest
        if slowest is None:
            return {}
        if slowest is not self._warned_of_slowest:
            self._warned_of_slowest = slowest
            self.progress.log(slowest.line())
        return {"slowest_process": slowest.process, "slowest_behind_s": round(slowest.behind_s, 4)}

    def _agreed(self, fault: Fault | None, numbers: Numbers) -> Fault | None:
        """The fault that all processes agree on, the one that goes back furthest: each has checked
        the numbers of its own replicas."""
        if self.combine_metrics is None or jax.process_count() == 1:
            return fault
        # All processes ask for the least of their steps. Those without a fault name a step that has
        # not been.
        none = numbers.at + 1
        since = cluster.least(fault.since if fault else none)
        if since == none:
            return None
        why = fault.why if fault else self.detector.describe(numbers)
        return Fault(numbers.at, since, numbers.batch, why)

    def _warn_of_skips(self, numbers: Numbers, skipped: float) -> None:
        """Warns of skipped updates; with independent replicas, of all since they last
        synchronized. skipped: their number in the run so far."""
        # This process knows the skips of its own replicas by their numbers, and those of all by the
        # metric `skipped`, which is of all replicas only where they have synchronized.
        self._skips += self.detector.skips * numbers.finite.count(False)
        if not numbers.is_global:
            return
        count = max(self._skips, 0 if self._skipped is None else round(skipped - self._skipped))
        if count:
            text = f"{count} updates were" if count > 1 else "an update was"
            self.progress.log(f"warning: {text} skipped: {self.detector.describe(numbers)}")
        self._skips, self._skipped = 0, skipped

    def _warn_of_empty_batch(self, numbers: Numbers) -> None:
        """Warns of the first batch in which no token counts, and whenever their number has
        doubled."""
        self._empty_batches += 1
        if self._empty_batches.bit_count() == 1:  # 1, 2, 4, 8, …: few lines in a long run
            self.progress.log(
                "warning: no token of a batch counts in the loss, and the update is momentum and "
                f"weight decay alone ({self._empty_batches} so far): "
                f"{self.detector.describe(numbers)}"
            )

    def _warn_of_drops(self, at: int, dropped: float) -> None:
        """Warns of the first choices of experts that exceed the capacity, and whenever their
        fraction has doubled. dropped: that fraction."""
        capacity = self.expert_capacity
        if not capacity or dropped < max(2 * self._warned_of_drops, TINY):
            return
        self._warned_of_drops = dropped
        self.progress.log(
            f"warning: step {at}: {dropped:.2%} of the choices of experts were dropped, beyond "
            f"model.expert_room={capacity:g}: --config.model.expert_room={2 * capacity:g} has room "
            "for more"
        )


def _local(value: jax.Array | np.ndarray) -> np.ndarray:
    """The values of those replicas, [replicas], that this process holds a part of; [1] of a scalar
    that all devices have, or of numpy."""
    if not isinstance(value, jax.Array) or value.is_fully_replicated:
        return np.ravel(value)
    # Several devices of a replica hold its value: by the shard's first index each counts once.
    parts: dict[Any, Any] = {shard.index[0].start: shard.data for shard in value.addressable_shards}
    return np.concatenate([parts[start] for start in sorted(parts)])
