"""Whether a run's numbers are good, and what follows where they are not. No jax.

    train.on_nonfinite
      stop       the first loss or gradients that are not finite end the run
      skip       their update is skipped (step.py); train.nonfinite_limit of them in a row end the
                 run
      rollback   so many in a row take the run back to the newest checkpoint from before the first
                 of them, as train.spike_steps spikes in a row do; the batches between that
                 checkpoint and the last of them are passed over. After train.rollbacks of these it
                 ends

A loss is a spike where it is more than train.spike_threshold robust deviations above the median of
the last WINDOW good losses. The robust deviation is 1.4826 times the median distance from the
median, which is the standard deviation of normal noise (Hampel 1974), and at least FLOOR.

What this remembers is in every checkpoint, so a run that was killed judges as if it had not been.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.config import TrainConfig
from jaxtrain.run.exit_status import ExitStatus, RunError

# good losses that are remembered; fewer than these say nothing of what is usual
WINDOW, LEAST = 64, 16
NORMAL = 1.4826  # standard deviations of normal noise in its median distance from the median
FLOOR = 1e-3  # nats: losses that hardly differ do not make every other one a spike


class NumbersError(RunError):
    """A loss, gradients or parameters that end the run; the message names the step and its
    batch."""

    status = ExitStatus.BAD_NUMBERS


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What is looked at after a step.

    at: the step; batch: the number of its batch
    loss, grad_norm: of the step, or of those replicas whose results this process has
    finite: whether both are, of each of these replicas; of one, where replicas meet in every step
    whole: loss and norm are those of all replicas together
    """

    at: int
    batch: int
    loss: float
    grad_norm: float
    finite: tuple[bool, ...]
    whole: bool = True


@dataclasses.dataclass(frozen=True)
class Finding:
    """What cannot stay as it is.

    since: the first step that it is about: a good checkpoint is from before
    batch: the last one that is passed over; None: the data is not at fault, and the same batches
        come again
    why:   in words
    """

    at: int
    since: int
    batch: int | None
    why: str


@dataclasses.dataclass(frozen=True)
class Rollback:
    """A run's way back: from which step to which, the number of the batch that comes next, and what
    was remembered at that checkpoint."""

    came_from: int
    step: int
    position: int
    why: str
    memory: "Memory"


@dataclasses.dataclass(frozen=True)
class Memory:
    """What is remembered between steps, as a checkpoint's meta holds it.

    rollbacks:       how often the run has gone back
    losses:          the last good ones, at most WINDOW
    nonfinite_since: the first step of those in a row up to now that are not finite; None if the
        last one was, or where replicas train apart
    spike_since, spikes: the first of the spikes in a row up to now, and how many these are
    """

    rollbacks: int = 0
    losses: tuple[float, ...] = ()
    nonfinite_since: int | None = None
    spike_since: int | None = None
    spikes: int = 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Memory":
        """What `to_json` gave; what is missing, or is of another type, is as in the beginning."""
        kinds: dict[str, Any] = {
            "rollbacks": int,
            "losses": list,
            "nonfinite_since": int,
            "spike_since": int,
            "spikes": int,
        }
        found = {
            name: values[name] for name, kind in kinds.items() if isinstance(values.get(name), kind)
        }
        losses = tuple(loss for loss in found.pop("losses", ()) if isinstance(loss, (int, float)))
        return cls(losses=losses, **found)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"losses": list(self.losses)}


class Judge:
    """Sees every step's numbers, and says when the run has to end or to go back.

    Args:
      policy: the settings.
      rows_of: a batch's number → it and its rows, in words.
      memory: of the checkpoint that the run goes on from.
      start: its step.
    """

    def __init__(
        self,
        policy: TrainConfig,
        rows_of: Callable[[int], str],
        memory: Memory = Memory(),
        start: int = 0,
    ):
        self._policy, self._rows_of, self.memory = policy, rows_of, memory
        self.finding: Finding | None = None  # why the run has to go back
        self._since: list[int | None] = [memory.nonfinite_since]  # of each replica
        self._copies_agreed = start  # the last step at which copies of parameters were the same

    @property
    def skips(self) -> bool:
        return self._policy.on_nonfinite != "stop"

    @property
    def good(self) -> bool:
        """Whether the run may go on from where it stands."""
        return self.finding is None

    def good_parameters(self, at: int, position: int, finite: bool) -> bool:
        """Whether the parameters after step `at` may be saved; if not, the run goes back, or ends
        by NumbersError as in `act`.

        position: the number of the next batch.
        """
        if not finite:
            why = (
                f"the parameters after step {at} are not finite, though its loss was: no "
                "checkpoint is made of them"
            )
            self.act(Finding(at, at, position - 1, why))
        return finite

    def see_copies(self, at: int, wrong: str) -> None:
        """Takes what is wrong with the copies of parameters after step `at`, in words; "" if they
        are all the same. Raises as `act`."""
        if not wrong:
            self._copies_agreed = at
            return
        since = self._copies_agreed + 1
        self.act(
            Finding(
                at,
                since,
                None,
                f"{wrong}, at step {at}" + (f" (not yet at step {since - 1})" if since > 1 else ""),
            )
        )

    def see(self, numbers: Numbers) -> Finding | None:
        """What has to be done something about after this step, which is for `act`. Every step is to
        be seen, in turn."""
        if len(self._since) != len(numbers.finite):
            self._since = [None] * len(numbers.finite)
        self._since = [
            None if good else numbers.at if at is None else at
            for good, at in zip(numbers.finite, self._since, strict=True)
        ]
        alone = len(self._since) == 1
        self.memory = dataclasses.replace(
            self.memory, nonfinite_since=self._since[0] if alone else None
        )
        first = min((at for at in self._since if at is not None), default=numbers.at + 1)
        count, limit = numbers.at - first + 1, self._policy.nonfinite_limit if self.skips else 1
        if count >= limit:
            many = (
                f"{count} updates in a row were skipped, from step {first} on: "
                if self.skips
                else ""
            )
            return Finding(numbers.at, first, numbers.batch, many + self.describe(numbers))
        return self._see_spikes(numbers) if numbers.whole and all(numbers.finite) else None

    def describe(self, numbers: Numbers) -> str:
        """A step's numbers and its batch, in words."""
        loss = f"the loss is {numbers.loss:g} (gradient norm {numbers.grad_norm:g})"
        return f"{loss} at step {numbers.at}, {self._rows_of(numbers.batch)}"

    def _see_spikes(self, numbers: Numbers) -> Finding | None:
        losses, threshold = self.memory.losses, self._policy.spike_threshold
        above = (
            deviations(numbers.loss, losses)
            if threshold and len(losses) >= LEAST and math.isfinite(numbers.loss)
            else 0.0
        )
        if above <= threshold:
            good = (
                (*losses, numbers.loss)[-WINDOW:]
                if threshold and math.isfinite(numbers.loss)
                else losses
            )
            self.memory = dataclasses.replace(self.memory, losses=good, spike_since=None, spikes=0)
            return None
        since, spikes = self.memory.spike_since or numbers.at, self.memory.spikes + 1
        self.memory = dataclasses.replace(self.memory, spike_since=since, spikes=spikes)
        if spikes < self._policy.spike_steps:
            return None
        usual = f"{above:.1f} robust deviations above the usual {statistics.median(losses):.4f}"
        count = f"the last of {spikes} spikes in a row, " if spikes > 1 else ""
        return Finding(
            numbers.at, since, numbers.batch, f"{self.describe(numbers)}: {count}{usual}"
        )

    def act(self, finding: Finding | None) -> None:
        """Sets `finding` where the run has to go back. NumbersError where it has to end instead;
        nothing for None."""
        if finding is None:
            return
        if self._policy.on_nonfinite != "rollback":
            raise NumbersError(f"{finding.why}; the last checkpoint is kept")
        if self.memory.rollbacks >= self._policy.rollbacks:
            times = (
                f"the run has gone back {self.memory.rollbacks} times, as often as "
                f"train.rollbacks={self._policy.rollbacks} lets it"
            )
            raise NumbersError(f"{finding.why}; {times}")
        self.finding = self.finding or finding

    def go_back(self, rollback: Rollback) -> None:
        """The run stands at another step now: what was seen since is forgotten, but for how often
        this has happened."""
        memory = rollback.memory
        self.memory = Memory(self.memory.rollbacks + 1, memory.losses)
        self.finding, self._since, self._copies_agreed = None, [None], rollback.step


def deviations(loss: float, losses: Sequence[float]) -> float:
    """How many robust deviations a loss lies above the median of others."""
    median = statistics.median(losses)
    spread = NORMAL * statistics.median(abs(other - median) for other in losses)
    return (loss - median) / max(spread, FLOOR)
