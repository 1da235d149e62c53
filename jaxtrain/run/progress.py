"""How far a run is and how fast: the bar of a terminal, the lines of a log.

    12/150 |██▏            | loss 3.2134 · 12.3k tokens/s · MFU 41.0 % · 4:50 left      as much of it as the terminal is wide
    step 12/150 · loss 3.2134 · 12.3k tokens/s · MFU 41.0 % · 4:50 left                  elsewhere, every few seconds

What lasts, metrics.jsonl and the like, is in metrics.py.
"""

import collections
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

WINDOW = 10.0  # seconds of steps whose mean speed is shown
REDRAW = 0.1  # seconds between drawings of the bar
BAR_SIZES = (3, 40)  # columns of the bar itself, at least and at most
COLUMNS = 80  # of a terminal that does not say
ERASE = "\x1b[K"  # to the end of the line
EIGHTHS = " ▏▎▍▌▋▊▉█"


class StepTimer:
    """Seconds a step, without what is paused for (evaluation, checkpoints).

    Call `lap` when the devices have finished a step: dispatch alone takes no time. A single lap says little, since a host that was late for
    one result finds the next one there; so both figures are means over several laps where there are several.

    Args:
      step: the step that the run begins with.
      window: seconds that `recent` looks back.
    """

    def __init__(self, step: int, window: float = WINDOW, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._window, self._paused = clock, window, 0.0
        # (step, time without pauses): the newest lap that is a window old or older, and all since.
        self._laps = collections.deque([(step, clock())])
        self._asked = self._laps[0]

    def lap(self, step: int) -> None:
        """`step` has ended now."""
        now = self._clock() - self._paused
        self._laps.append((step, now))
        while len(self._laps) > 2 and self._laps[1][1] <= now - self._window:
            self._laps.popleft()

    def recent(self) -> float:
        """Seconds a step: the mean over the steps that ended in the last seconds, over one step where that took longer."""
        return _seconds_a_step(self._laps[0], self._laps[-1])

    def since_asked(self) -> float:
        """Seconds a step: the mean over the steps since this was asked before, or since the beginning."""
        before, self._asked = self._asked, self._laps[-1]
        return _seconds_a_step(before, self._asked)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves out what happens inside."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - start


def _seconds_a_step(first: tuple[int, float], last: tuple[int, float]) -> float:
    """The mean between two laps, never 0; ValueError if there was no step between."""
    if last[0] <= first[0]:
        raise ValueError(f"no step has ended since step {first[0]}")
    return max(last[1] - first[1], 1e-9) / (last[0] - first[0])


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
        self._last: float | None = None  # when the bar was drawn, or a line printed
        self._bar = shown and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        if self._bar:
            self._draw()

    def update(self, step: int, *, loss: float | None = None, tokens_per_s: float | None = None, mfu: float | None = None):
        """`step` is done. What is not given stays as it was."""
        new = {"loss": loss, "tokens_per_s": tokens_per_s, "mfu": mfu}
        self._status |= {k: v for k, v in new.items() if v is not None}
        self._step = step
        if self._first is None:
            self._first = step, self._clock()
        wait = REDRAW if self._bar else self._every
        if not self._shown or (self._last is not None and self._clock() - self._last < wait and step != self._total):
            return
        if self._bar:
            self._draw()
        else:
            self._last = self._clock()
            parts = [f"step {step}/{self._total}", *self._parts().values()]
            print(self._dot().join(parts), file=self._stream, flush=True)

    def _parts(self) -> dict[str, str]:
        """What is known, in the order in which it is shown."""
        return _status_texts(self._status) | ({"left": left} if (left := self._left()) else {})

    def _left(self) -> str:
        first, since = self._first or (self._step, 0.0)
        if first == self._step or self._step >= self._total:
            return ""
        seconds = (self._clock() - since) / (self._step - first) * (self._total - self._step)
        return f"{_duration(seconds)} left"

    def _dot(self) -> str:
        return " · " if self._can_show("·") else ", "

    def _can_show(self, text: str) -> bool:
        try:
            text.encode(self._stream.encoding or "utf-8")
        except UnicodeEncodeError:
            return False
        return True

    def _draw(self) -> None:
        """The bar over the line as it was. It leaves a column free: a full line makes some terminals begin the next one."""
        self._last = self._clock()
        marks = EIGHTHS if self._can_show(EIGHTHS) else " #"
        line = bar_line(self._step, self._total, self._parts(), max(_columns(self._stream) - 1, 1), self._dot(), marks)
        print(f"\r{line}{ERASE}", end="", file=self._stream, flush=True)

    def say(self, text: str):
        """Prints a line without breaking the bar."""
        if not self._shown:
            return
        print(f"\r{ERASE}{text}" if self._bar else text, file=self._stream, flush=True)
        if self._bar:
            self._draw()

    def close(self):
        """Leaves the bar as it is and ends its line."""
        if self._bar:
            self._draw()
            print(file=self._stream, flush=True)
        self._bar = False


def bar_line(step: int, total: int, parts: dict[str, str], width: int, dot: str, marks: str) -> str:
    """One line of at most `width` characters: how far, a bar, and those parts that there is room for, the least important left out first.

    parts: name → text, in the order shown; names as `_IMPORTANT` has them. marks: the bar's last cell from empty to full.
    """
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
    full, part = divmod(size * (len(marks) - 1) * step // max(total, 1), len(marks) - 1)
    bar = (marks[-1] * full + marks[part] * bool(part)).ljust(size)
    return f"{count} |{bar}| {rest}".rstrip()


_IMPORTANT = ("loss", "left", "tokens_per_s", "mfu")


def _columns(stream: TextIO) -> int:
    """A terminal's width; COLUMNS where it has none, as a pseudo-terminal that nobody has given a size."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS
    except OSError:
        return COLUMNS


def _status_texts(status: dict[str, float]) -> dict[str, str]:
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
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
