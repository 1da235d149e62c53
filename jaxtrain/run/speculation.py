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
        self._right: list[bool] = []  # of the steps of the program that is being reported
        self._was_right, self._phases = True, 0  # of one program after the other with wrong steps

    def dispatched(self, together: bool) -> None:
        """A program has been dispatched whose steps are tried together, or not."""
        self._dispatched.append(together)

    def saw(self, loss: float, grad_norm: float) -> None:
        """A step of the oldest program that is not reported yet had these numbers."""
        clipped = self._clip_norm and not grad_norm < self._clip_norm
        skipped = self._skips and not (math.isfinite(loss) and math.isfinite(grad_norm))
        self._right.append(not (clipped or skipped))

    def ran(self, first: int, last: int) -> None:
        """That program is reported, with its steps from `first` to `last`."""
        tried, right, self._right = self._dispatched.pop(0), self._right, []
        self.tries = right[-1]
        begin = right.index(False) if tried and not all(right) else 0  # of those one at a time
        self.steps += len(right)
        if tried:
            self.together += begin or len(right) * all(right)
        before, self._was_right = self._was_right, all(right)
        if all(right) or not before:
            return
        self._phases += 1
        if self._phases & (self._phases - 1) == 0:
            steps = f"steps {first + begin} to {last}" if first + begin < last else f"step {last}"
            times = f" (for the {self._phases}th time)" if self._phases > 2 else ""
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
        self._right.clear()
