"""The detection of losses, gradients and parameters that are not finite or jump, and the decision
to go back or to end. No jax.

    train.on_nonfinite
      stop       the first loss or gradients that are not finite end the run
      skip       their update is skipped (step.py); train.nonfinite_limit of them in a row end the
                 run
      rollback   train.nonfinite_limit of them in a row, or train.spike_steps spikes in a row, take
                 the run back to the newest checkpoint from before the first of them; the batches
                 from that checkpoint to the last of them are skipped. After train.rollbacks
                 roll-backs the run ends

A loss is a spike if it is more than train.spike_threshold robust deviations above the median of the
last WINDOW good losses. The robust deviation is 1.4826 times the median distance from the median,
which is the standard deviation of normal noise (Hampel 1974), and at least FLOOR.

Begin with `SpikeDetector.check`, which finds a Fault in a step's numbers, and `SpikeDetector.act`,
which ends the run or asks for a roll-back. The loop then goes back (loop.py), and tells it by
`SpikeDetector.go_back`. The detector's state is in every checkpoint, so a run that was killed
decides as if it had not been.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.config import TrainConfig
from jaxtrain.run.exit_status import ExitStatus, RunError

# The good losses that are remembered; with fewer than LEAST of them no loss is a spike.
WINDOW, LEAST = 64, 16
NORMAL = 1.4826  # standard deviations of normal noise in its median distance from the median
FLOOR = 1e-3  # nats: after losses that hardly differ, not every other loss is a spike


class NumbersError(RunError):
    """Raised for a loss, gradients or parameters that end the run; the message names the step and
    its batch."""

    status = ExitStatus.BAD_NUMBERS


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numbers of a step.

    at: the step; batch: the number of its batch
    loss, grad_norm: the step's; if replicas are independent, those of this process's replicas
        or of all of them, combined
    finite: for each replica of this process, True if both are finite; one value if replicas are not
        independent
    is_global: loss and norm are those of all replicas
    """

    at: int
    batch: int
    loss: float
    grad_norm: float
    finite: tuple[bool, ...]
    is_global: bool = True


@dataclasses.dataclass(frozen=True)
class Fault:
    """A reason to go back or to end, noticed after step `at`.

    since: the first step with this fault; a good checkpoint is from before it
    batch: the last batch to skip; None: the data is not at fault, and no batch is skipped
    why:   a line of text
    """

    at: int
    since: int
    batch: int | None
    why: str


@dataclasses.dataclass(frozen=True)
class Rollback:
    """A run's return to an earlier checkpoint.

    came_from: the step that the run leaves; step: that of the checkpoint, 0 without one
    position:  the number of the next batch
    why:       the fault, as a line of text
    detector:  the detector's state in the checkpoint
    """

    came_from: int
    step: int
    position: int
    why: str
    detector: "DetectorState"


@dataclasses.dataclass(frozen=True)
class DetectorState:
    """The state of a SpikeDetector between steps, as a checkpoint's meta has it.

    rollbacks:       the number of times that the run has gone back
    losses:          the last good losses, at most WINDOW
    nonfinite_since: the first step of the unbroken series, up to now, of steps that are not finite;
        None if the last one was finite, or if replicas are independent
    spike_since, spikes: the first step of the series of spikes up to now, and their number
    """

    rollbacks: int = 0
    losses: tuple[float, ...] = ()
    nonfinite_since: int | None = None
    spike_since: int | None = None
    spikes: int = 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DetectorState":
        """The state from the values of `to_json`. A value that is missing or has another type
        becomes that of a new run."""
        kinds: dict[str, Any] = {
            "rollbacks": int,
            "losses": list,
            "nonfinite_since": int,
            "spike_since": int,
            "spikes": int,
        }
        valid = {
            name: values[name] for name, kind in kinds.items() if isinstance(values.get(name), kind)
        }
        losses = tuple(loss for loss in valid.pop("losses", ()) if isinstance(loss, (int, float)))
        return cls(losses=losses, **valid)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"losses": list(self.losses)}


class SpikeDetector:
    """Checks every step's numbers, and decides when the run has to end or to go back.

    Args:
      policy: the settings.
      describe_batch: a batch's number → a text with it and its sequences.
      state: the state in the checkpoint that the run resumes from.
      start: the step of this checkpoint.
    """

    def __init__(
        self,
        policy: TrainConfig,
        describe_batch: Callable[[int], str],
        state: DetectorState = DetectorState(),
        start: int = 0,
    ):
        self._policy, self._describe_batch, self.state = policy, describe_batch, state
        self.fault: Fault | None = None  # why the run has to go back
        self._since: list[int | None] = [state.nonfinite_since]  # of each replica
        self._copies_agreed = start  # the last step at which copies of parameters were the same

    @property
    def skips(self) -> bool:
        """True if updates that are not finite are skipped."""
        return self._policy.on_nonfinite != "stop"

    def check_parameters(self, at: int, position: int, finite: bool) -> bool:
        """Returns `finite`: the parameters after step `at` may be saved. If they are not finite,
        gives `act` a fault. Raises NumbersError as `act`.

        position: the number of the next batch.
        """
        if not finite:
            why = (
                f"the parameters after step {at} are not finite, though its loss was: no "
                "checkpoint is made of them"
            )
            self.act(Fault(at, at, position - 1, why))
        return finite

    def check_copies(self, at: int, difference: str) -> None:
        """Gives `act` a fault if copies of parameters differ after step `at`. Raises NumbersError
        as `act`.

        difference: a text that names the copies; "" if they are the same
        """
        if not difference:
            self._copies_agreed = at
            return
        agreed = self._copies_agreed
        before = f" (not yet at step {agreed})" if agreed else ""
        self.act(Fault(at, agreed + 1, None, f"{difference}, at step {at}{before}"))

    def check(self, numbers: Numbers) -> Fault | None:
        """Adds a step's numbers to the state. Returns the fault after this step, for `act`; None
        if there is none. Call it for every step, in order.

        The consecutive steps that are not finite are counted for each replica, and the longest
        count decides. A loss can be a spike only if it is finite and of all replicas; other steps
        neither continue nor end a series of spikes.
        """
        # A checkpoint has one series, a process with several independent replicas one for each.
        if len(self._since) != len(numbers.finite):
            self._since = [None] * len(numbers.finite)
        self._since = [
            None if good else numbers.at if at is None else at
            for good, at in zip(numbers.finite, self._since, strict=True)
        ]
        # Only with one series is the state the same in all processes, which a checkpoint needs.
        since = self._since[0] if len(self._since) == 1 else None
        self.state = dataclasses.replace(self.state, nonfinite_since=since)
        # Without such a step `begin` is behind this one, and the count is 0.
        begin = min((at for at in self._since if at is not None), default=numbers.at + 1)
        count, limit = numbers.at - begin + 1, self._policy.nonfinite_limit if self.skips else 1
        if count >= limit:
            skipped = f"{count} updates in a row were skipped, from step {begin} on: "
            why = f"{skipped if self.skips else ''}{self.describe(numbers)}"
            return Fault(numbers.at, begin, numbers.batch, why)
        return self._check_spike(numbers) if numbers.is_global and all(numbers.finite) else None

    def describe(self, numbers: Numbers) -> str:
        """A text with a step's numbers and its batch."""
        loss = f"the loss is {numbers.loss:g} (gradient norm {numbers.grad_norm:g})"
        return f"{loss} at step {numbers.at}, {self._describe_batch(numbers.batch)}"

    def _check_spike(self, numbers: Numbers) -> Fault | None:
        losses, threshold = self.state.losses, self._policy.spike_threshold
        counts = threshold > 0 and math.isfinite(numbers.loss)
        # A loss without a comparison, or with too few good ones before it, counts as usual.
        above = deviations(numbers.loss, losses) if counts and len(losses) >= LEAST else 0.0
        if above <= threshold:
            # Spikes are not remembered: several of them would raise the median, and hide the next.
            good = (*losses, numbers.loss)[-WINDOW:] if counts else losses
            self.state = dataclasses.replace(self.state, losses=good, spike_since=None, spikes=0)
            return None
        since, spikes = self.state.spike_since or numbers.at, self.state.spikes + 1
        self.state = dataclasses.replace(self.state, spike_since=since, spikes=spikes)
        if spikes < self._policy.spike_steps:
            return None
        usual = f"{above:.1f} robust deviations above the usual {statistics.median(losses):.4f}"
        count = f"the last of {spikes} spikes in a row, " if spikes > 1 else ""
        why = f"{self.describe(numbers)}: {count}{usual}"
        return Fault(numbers.at, since, numbers.batch, why)

    def act(self, fault: Fault | None) -> None:
        """Sets `self.fault` if the run has to go back; does nothing for None. Raises NumbersError
        if the run has to end instead."""
        if fault is None:
            return
        if self._policy.on_nonfinite != "rollback":
            raise NumbersError(f"{fault.why}; the last checkpoint is kept")
        if self.state.rollbacks >= self._policy.rollbacks:
            raise NumbersError(
                f"{fault.why}; the run has gone back {self.state.rollbacks} times, as often as "
                f"train.rollbacks={self._policy.rollbacks} lets it"
            )
        # The first fault stays: a second one of the same program does not change where to go back.
        self.fault = self.fault or fault

    def go_back(self, rollback: Rollback) -> None:
        """Takes the state of the checkpoint that the run has gone back to, and counts this
        roll-back."""
        # The count of roll-backs is that of the run, and not of the checkpoint. Otherwise a run
        # could go back to the same checkpoint for ever.
        self.state = DetectorState(self.state.rollbacks + 1, rollback.detector.losses)
        self.fault, self._since, self._copies_agreed = None, [None], rollback.step


def deviations(loss: float, losses: Sequence[float]) -> float:
    """The distance of a loss above the median of others, in robust deviations."""
    median = statistics.median(losses)
    spread = NORMAL * statistics.median(abs(other - median) for other in losses)
    return (loss - median) / max(spread, FLOOR)
