"""The slowest process of a run, from what processes tell each other anyway (peers.py). No jax.

Steps take the same time on every process, since collectives wait for the last. What tells processes
apart is what each does before it awaits the devices: it waits for its data, dispatches, logs. The
devices of all wait for the process with most such time of its own.

A device that is slow by itself does not show here: its process, like all others, awaits the end of
the step.
"""

import dataclasses
import statistics
from collections.abc import Mapping

from jaxtrain.run.peers import Beat

WINDOW_S, WINDOW_STEPS = 10.0, 3  # a window is as long as both say, or longer
# the part of a step by which a process's own time exceeds the median's before it is called slow
BEHIND = 0.1


@dataclasses.dataclass(frozen=True)
class Slowest:
    """The process with most time of its own in a window. Seconds are means over its steps.

    name: with its host; steps: the window's first and last; own_s, data_wait_s: of the process, the
        second a part of the first;
    median_s: own time, over all processes; step_s: the window's time over its steps.
    """

    process: int
    name: str
    steps: tuple[int, int]
    own_s: float
    data_wait_s: float
    median_s: float
    step_s: float

    @property
    def behind_s(self) -> float:
        """Seconds a step that the others lose by it."""
        return self.own_s - self.median_s

    def line(self) -> str:
        """For people."""
        first, last = self.steps
        own = (
            f"{self.own_s:.3f} s of its own a step ({self.data_wait_s:.3f} waiting for data), the "
            f"median {self.median_s:.3f}"
        )
        return (
            f"warning: steps {first} to {last}: {self.name} is slowest, with {own}; a step takes "
            f"{self.step_s:.3f} s"
        )


class Stragglers:
    """Compares the beats of all processes, window by window.

    slowest: of the last window in which a process was clearly behind the others, until the next
    window is over; None if none was.
    """

    def __init__(self) -> None:
        self.slowest: Slowest | None = None
        self._first: dict[int, Beat] = {}
        self._began = 0.0

    def take(self, beats: Mapping[int, tuple[str, Beat]], now: float) -> None:
        """Takes the newest beat of each process, by number, with the name of the process for
        people; and the seconds now."""
        if any(
            p not in self._first or not 0 < self._first[p].step <= beat.step
            for p, (_, beat) in beats.items()
        ):
            # a process has not stepped yet, or the run has gone back to an earlier step
            self._begin(beats, now)
        steps = {
            process: beat.step - self._first[process].step for process, (_, beat) in beats.items()
        }
        if now - self._began < WINDOW_S or min(steps.values()) < WINDOW_STEPS:
            return
        own = {p: (beat.own_s - self._first[p].own_s) / steps[p] for p, (_, beat) in beats.items()}
        slowest = max(own, key=lambda process: own[process])
        name, last = beats[slowest]
        first, step_s, median_s = (
            self._first[slowest],
            (now - self._began) / steps[slowest],
            statistics.median_low(own.values()),
        )
        data_wait_s = (last.data_wait_s - first.data_wait_s) / steps[slowest]
        behind = own[slowest] - median_s > BEHIND * step_s
        window = (first.step + 1, last.step)
        self.slowest = (
            Slowest(slowest, name, window, own[slowest], data_wait_s, median_s, step_s)
            if behind
            else None
        )
        self._begin(beats, now)

    def _begin(self, beats: Mapping[int, tuple[str, Beat]], now: float) -> None:
        self._first = {process: beat for process, (_, beat) in beats.items()}
        self._began = now
