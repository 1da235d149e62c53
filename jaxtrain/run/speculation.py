"""Whether the steps of the next program run together (training/several_steps.py). No jax."""

import math
from collections.abc import Callable
from typing import Any


class Speculation:
    """Tries a program's steps together where the last reported step was neither clipped nor
    skipped. If one of them is, it has to run again, and the steps after it run one at a time. So a
    phase of clipping, as most runs begin with, costs about one step.

    Args:
      clip_norm: optimizer.clip_norm; without it the first program is tried, too.
      skips: updates that are not finite are skipped.
      log: gets a line when steps begin to run one at a time, for the first, second, fourth, … time.

    tries: the next program's steps are to run together.
    together, steps: steps so far that ran without a barrier between them, and all.
    """

    def __init__(self, clip_norm: float, skips: bool, log: Callable[[str], object]):
        self._clip_norm, self._skips, self._log = clip_norm, skips, log
        self.tries = not clip_norm
        self.together = self.steps = 0
        self._dispatched: list[bool] = []  # of programs that are not reported: tried together
        # of each step of the program that is being reported: neither clipped nor skipped
        self._accepted: list[bool] = []
        # whether the program before had such steps alone; series of programs that had others
        self._was_accepted, self._series = True, 0

    def dispatched(self, together: bool) -> None:
        """A program has been dispatched whose steps are tried together, or not."""
        self._dispatched.append(together)

    def saw(self, loss: float, grad_norm: float) -> None:
        """A step of the oldest program that is not reported yet had these numbers."""
        clipped = self._clip_norm and not grad_norm < self._clip_norm
        skipped = self._skips and not (math.isfinite(loss) and math.isfinite(grad_norm))
        self._accepted.append(not (clipped or skipped))

    def ran(self, first: int, last: int) -> None:
        """That program is reported, with its steps from `first` to `last`."""
        tried, accepted, self._accepted = self._dispatched.pop(0), self._accepted, []
        self.tries = accepted[-1]
        # the first of the steps that ran one at a time
        begin = accepted.index(False) if tried and not all(accepted) else 0
        self.steps += len(accepted)
        if tried:
            self.together += begin or len(accepted) * all(accepted)
        before, self._was_accepted = self._was_accepted, all(accepted)
        if all(accepted) or not before:
            return
        self._series += 1
        if self._series & (self._series - 1) == 0:
            steps = f"steps {first + begin} to {last}" if first + begin < last else f"step {last}"
            times = f" (for the {self._series}th time)" if self._series > 2 else ""
            self._log(
                f"note: {steps} ran one at a time{times}, because a gradient was clipped or an "
                "update skipped; so does a program that follows such a step"
            )

    def summary(self) -> str:
        """A line about all programs so far."""
        return f"{self.together} of {self.steps} steps ran without a barrier between them"

    def go_back(self, _: Any) -> None:
        """Forgets what was dispatched: the run goes back."""
        self._dispatched.clear()
        self._accepted.clear()
