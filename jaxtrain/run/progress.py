"""How far a run is and how fast: the bar of a terminal, the lines of a log.

    12/150 |██▏            | loss 3.2134 · 12.3k tokens/s · MFU 41.0 % · 4:50 left
        as much of it as the terminal is wide
    step 12/150 · loss 3.2134 · 12.3k tokens/s · MFU 41.0 % · 4:50 left
        elsewhere and in a log, every few seconds

What lasts, metrics.jsonl and the like, is in metrics.py; the progress of a search for a table is in
search_progress.py.
"""

import collections
import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

from jaxtrain.run import streams, terminal

WINDOW = 10.0  # seconds of steps whose mean speed is shown
BAR_SIZES = (3, 40)  # columns of the bar itself, at least and at most
EIGHTHS = " ▏▎▍▌▋▊▉█"  # the bar's last cell from empty to full
DOT = " · "


class StepTimer:
    """Seconds a step.

    Call `lap` when the devices have finished a step: dispatch alone takes no time. A single lap
    says little, since a host that was late for one result finds the next one there; so both figures
    are means over several laps where there are several.

    Args:
      step: the step that the run begins with.
      window: seconds that `recent` looks back.
      clock: seconds, of those that count: of a clock that stands still in evaluations and saves,
        say.
    """

    def __init__(
        self, step: int, window: float = WINDOW, clock: Callable[[], float] = time.perf_counter
    ):
        self._clock, self._window = clock, window
        # (step, time): the newest lap that is a window old or older, and all since.
        self._laps = collections.deque([(step, clock())])
        self._asked = self._laps[0]

    def lap(self, step: int) -> None:
        """`step` has ended now."""
        now = self._clock()
        self._laps.append((step, now))
        while len(self._laps) > 2 and self._laps[1][1] <= now - self._window:
            self._laps.popleft()

    def recent(self) -> float:
        """Seconds a step: the mean over the steps that ended in the last seconds, over one step
        where that took longer."""
        return _seconds_a_step(self._laps[0], self._laps[-1])

    def since_asked(self) -> float:
        """Seconds a step: the mean over the steps since this was asked before, or since the
        beginning."""
        before, self._asked = self._asked, self._laps[-1]
        return _seconds_a_step(before, self._asked)

    def restart(self, step: int) -> None:
        """The run stands at this step now, whatever it was: nothing that was timed before
        counts."""
        self._laps.clear()
        self._laps.append((step, self._clock()))
        self._asked = self._laps[0]


def _seconds_a_step(first: tuple[int, float], last: tuple[int, float]) -> float:
    """The mean between two laps, never 0; ValueError if there was no step between."""
    if last[0] <= first[0]:
        raise ValueError(f"no step has ended since step {first[0]}")
    return max(last[1] - first[1], 1e-9) / (last[0] - first[0])


class Progress:
    """A progress bar where standard error is a terminal; a line every few seconds where the log is
    none.

    Args:
      total: the run's last step.
      step: the step it begins with.
      stream: where the bar goes if that is a terminal, standard error if not given.
      every: seconds between lines.
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
        self._last = self._last_line = -math.inf  # when the bar was drawn; when a line was printed
        self._bar = shown and terminal.redraws(self._stream)
        self._lines = shown and not (self._bar and sys.stdout.isatty())
        if self._bar:
            self._draw()

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        tokens_per_s: float | None = None,
        mfu: float | None = None,
    ) -> None:
        """`step` is done. What is not given stays as it was."""
        figures = {"loss": loss, "tokens_per_s": tokens_per_s, "mfu": mfu}
        self._status |= {name: figure for name, figure in figures.items() if figure is not None}
        self._step = step
        if self._first is None:
            self._first = step, self._clock()
        now, is_last = self._clock(), step == self._total
        if self._bar and (is_last or now - self._last >= terminal.REDRAW):
            self._draw()
        if self._lines and (is_last or now - self._last_line >= self._every):
            self._last_line = now
            streams.say(DOT.join([f"step {step}/{self._total}", *self._parts().values()]))

    def restart(self, step: int) -> None:
        """The run stands at this step now, whatever it was."""
        self._step, self._first = step, None

    def _parts(self) -> dict[str, str]:
        """What is known, in the order in which it is shown."""
        return _status_texts(self._status) | ({"left": left} if (left := self._left()) else {})

    def _left(self) -> str:
        first, since = self._first or (self._step, 0.0)
        if first == self._step or self._step >= self._total:
            return ""
        seconds = (self._clock() - since) / (self._step - first) * (self._total - self._step)
        return f"{_duration(seconds)} left"

    def _draw(self) -> None:
        """Draws the bar over the line as it was."""
        self._last = self._clock()
        terminal.draw(
            self._stream,
            bar_line(self._step, self._total, self._parts(), terminal.width(self._stream)),
        )

    def say(self, text: str) -> None:
        """Prints a line as `streams.say`, without breaking the bar."""
        if not self._shown:
            return
        if self._bar:
            terminal.clear(self._stream)
        streams.say(text)
        if self._bar:
            self._draw()

    def close(self) -> None:
        """Leaves the bar as it is and ends its line."""
        if self._bar:
            self._draw()
            print(file=self._stream, flush=True)
        self._bar = False


def bar_line(step: int, total: int, parts: dict[str, str], width: int) -> str:
    """One line of at most `width` characters: how far, a bar, and those parts that there is room
    for, the least important left out first.

    parts: name → text, in the order shown; names as `_IMPORTANT` has them.
    """
    dot = DOT
    shown = {"step": f"{step}/{total}"}
    if len(dot.join([shown["step"], parts.get("loss", "")])) > width:
        dot = " "
    for name in _IMPORTANT:
        if name in parts and len(dot.join([*shown.values(), parts[name]])) <= width:
            shown[name] = parts[name]
    count, rest = shown["step"], dot.join(parts[name] for name in parts if name in shown)
    size = min(width - len(f"{count} || {rest}^C"), BAR_SIZES[1])  # a terminal writes ^C behind it
    if size < BAR_SIZES[0]:
        return dot.join(filter(None, [count, rest]))[:width]
    full, part = divmod(size * 8 * step // max(total, 1), 8)
    bar = (EIGHTHS[-1] * full + EIGHTHS[part] * bool(part)).ljust(size)
    return f"{count} |{bar}| {rest}".rstrip()


_IMPORTANT = ("loss", "left", "tokens_per_s", "mfu")


def _status_texts(status: dict[str, float]) -> dict[str, str]:
    """The parts of the line that the last step's figures are, by name."""
    texts = {}
    if "loss" in status:
        texts["loss"] = f"loss {status['loss']:.4f}"
    if "tokens_per_s" in status:
        texts["tokens_per_s"] = f"{_short(status['tokens_per_s'])} tokens/s"
    if "mfu" in status:
        texts["mfu"] = f"MFU {100 * status['mfu']:.1f} %"
    return texts


def _short(number: float) -> str:
    """Three digits and a unit: 950, 12.3k, 4.56M."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 999.5 or unit == "G":
            break
        number /= 1000
    return f"{number:.3g}{unit}"


def _duration(seconds: float) -> str:
    """4:50, or 1:04:50."""
    whole_minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(whole_minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
