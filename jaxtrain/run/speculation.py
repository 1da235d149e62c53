"""Whether the steps of the next program run together (training/several_steps.py). No jax."""

import math
from collections.abc import Callable
from typing import Any


class Speculation:
    """Tries a program's steps together where those of the last reported program were neither
    clipped nor skipped; if one is, all have to run again. So a phase of clipping, as most runs
    begin with, costs one attempt at most.

    Args:
      clip_norm: optimizer.clip_norm; without it the first program is tried, too.
      skips: updates that are not finite are skipped.
      log: gets a line when steps begin to run one at a time, for the first, second, fourth, … time.

    tries: the next program's steps are to run together.
    together, programs: programs so far whose steps ran together, and all.
    """

    def __init__(self, clip_norm: float, skips: bool, log: Callable[[str], object]):
        self._clip_norm, self._skips, self._log = clip_norm, skips, log
        self.tries = not clip_norm
        self.together = self.programs = 0
        self._dispatched: list[bool] = []  # of programs that are not reported: tried together
        self._clear = True  # no step of the program that is being reported was clipped or skipped
        self._was_clear, self._phases = True, 0  # of one program after the other that were not

    def dispatched(self, together: bool) -> None:
        """A program has been dispatched whose steps are tried together, or not."""
        self._dispatched.append(together)

    def saw(self, loss: float, grad_norm: float) -> None:
        """A step of the oldest program that is not reported yet had these numbers."""
        if self._clip_norm and not grad_norm < self._clip_norm:
            self._clear = False
        if self._skips and not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._clear = False

    def ran(self, first: int, last: int) -> None:
        """That program is reported, with its steps from `first` to `last`."""
        tried, self.tries, self._clear = self._dispatched.pop(0), self._clear, True
        self.programs += 1
        self.together += tried and self.tries
        before, self._was_clear = self._was_clear, self.tries
        if self.tries or not before:
            return
        self._phases += 1
        if self._phases & (self._phases - 1) == 0:
            ran = "ran again" if tried else "ran"
            times = f" (for the {self._phases}th time)" if self._phases > 2 else ""
            self._log(
                f"note: steps {first} to {last} {ran} one at a time{times}, because a gradient was "
                "clipped or an update skipped; so will others until there is none"
            )

    def summary(self) -> str:
        """A line about all programs so far."""
        return f"{self.together} of {self.programs} programs had their steps without a barrier"

    def go_back(self, _: Any) -> None:
        """Forgets what was dispatched: the run goes back."""
        self._dispatched.clear()
        self._clear = True
