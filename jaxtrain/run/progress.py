"""Progress of a run and of a search for a table: a bar on a terminal, else lines. No JAX.

    12/150 |██▏            | loss 3.2134 · 12.3k tokens/s · MFU 41.0 % · 4:50 left
        on a terminal, cut to its width
    step 12/150 · loss 3.2134 · 12.3k tokens/s · MFU 41.0 % · 4:50 left
        without a terminal, every few seconds
    tables [########............] 40 % list late, 2 chunks a stage, 0:12
        of a search, on a terminal
    tables: 40 %, list late, 2 chunks a stage, 0:12
        of a search, without a terminal, every few seconds

A line has the metrics that have a text (METRICS), and the time left. The lasting record of a run is
in metrics.py.
"""

import collections
import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

from jaxtrain.run import streams
from jaxtrain.run.metrics import METRICS

WINDOW = 10.0  # seconds of steps whose mean speed is shown
BAR_SIZES = (3, 40)  # columns of the bar itself, at least and at most
EIGHTHS = " ▏▎▍▌▋▊▉█"  # the bar's last cell from empty to full
DOT = " · "
EVERY = 5.0  # seconds between two lines
SEARCH_QUIET = 1.0  # seconds of a search before anything is drawn on a terminal
SEARCH_BAR = 20  # characters


class StepTimer:
    """Seconds a step.

    Call `lap` when the devices have finished a step: dispatch alone takes no time. A single lap
    means little, since a host that was late for one result gets the next one at once; so both
    figures are means over several laps if there are several.

    Args:
      step: the step that the run starts from.
      window: seconds that `recent` looks back.
      clock: seconds; a clock may stand still in evaluations and saves, which then do not count.
    """

    def __init__(
        self, step: int, window: float = WINDOW, clock: Callable[[], float] = time.perf_counter
    ):
        self._clock, self._window = clock, window
        self.restart(step)

    def restart(self, step: int) -> None:
        """Starts timing anew, from this step."""
        # (step, time): the newest lap that is older than the window, and all after it
        self._laps = collections.deque([(step, self._clock())])
        self._asked = self._laps[0]

    def lap(self, step: int) -> None:
        """Notes that `step` has just ended."""
        now = self._clock()
        self._laps.append((step, now))
        while len(self._laps) > 2 and self._laps[1][1] <= now - self._window:
            self._laps.popleft()

    def recent(self) -> float:
        """Seconds a step: the mean over the steps that ended within the window, or over the last
        one if it took longer."""
        return _seconds_a_step(self._laps[0], self._laps[-1])

    def since_asked(self) -> float:
        """Seconds a step: the mean over the steps since the last call, or since the beginning."""
        before, self._asked = self._asked, self._laps[-1]
        return _seconds_a_step(before, self._asked)


def _seconds_a_step(begin: tuple[int, float], end: tuple[int, float]) -> float:
    """The mean between two laps, never 0. Raises ValueError if no step lies between them."""
    if end[0] <= begin[0]:
        raise ValueError(f"no step has ended since step {begin[0]}")
    return max(end[1] - begin[1], 1e-9) / (end[0] - begin[0])


class Progress:
    """A progress bar if `stream` is a terminal; a line every few seconds if standard output is
    none.

    Args:
      total: the run's last step.
      step: the step that it starts from.
      stream: of the bar; standard error if not given.
      every: seconds between lines.
      shown: False for processes that print nothing.
    """

    def __init__(
        self,
        total: int,
        step: int = 0,
        stream: TextIO | None = None,
        every: float = EVERY,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._step = total, step
        self._stream, self._shown = stream or sys.stderr, shown
        self._every, self._clock = every, clock
        self._status: dict[str, float] = {}
        # The time left is extrapolated from the second step on: the first one compiles.
        self._first_lap: tuple[int, float] | None = None
        self._last = self._last_line = -math.inf  # when the bar was drawn; when a line was printed
        self._bar = shown and streams.redraws(self._stream)
        self._lines = shown and not (self._bar and sys.stdout.isatty())
        if self._bar:
            self._draw()

    def update(self, step: int, **values: float | None) -> None:
        """Shows that `step` is done. values: metrics by name; those that are missing or None stay
        as they were."""
        self._status |= {name: value for name, value in values.items() if value is not None}
        self._step = step
        if self._first_lap is None:
            self._first_lap = step, self._clock()
        now, is_last = self._clock(), step == self._total
        if self._bar and (is_last or now - self._last >= streams.REDRAW):
            self._draw()
        if self._lines and (is_last or now - self._last_line >= self._every):
            self._last_line = now
            streams.log(DOT.join([f"step {step}/{self._total}", *self._parts().values()]))

    def restart(self, step: int) -> None:
        """Goes back to this step."""
        self._step, self._first_lap = step, None

    def _parts(self) -> dict[str, str]:
        """The texts of the known metrics and of the time left by name, in the order in which they
        are shown."""
        texts = {
            name: metric.line(self._status[name])
            for name, metric in METRICS.items()
            if name in self._status
        }
        begin, since = self._first_lap or (self._step, 0.0)
        if begin != self._step and self._step < self._total:
            seconds = (self._clock() - since) / (self._step - begin) * (self._total - self._step)
            texts["left"] = f"{duration(seconds)} left"
        return {name: text for name, text in texts.items() if text}

    def _draw(self) -> None:
        """Draws the bar over the terminal's last line."""
        self._last = self._clock()
        width = streams.width(self._stream)
        streams.draw(self._stream, bar_line(self._step, self._total, self._parts(), width))

    def log(self, text: str) -> None:
        """Prints a line as `streams.log` does, above the bar."""
        if not self._shown:
            return
        if self._bar:
            streams.clear(self._stream)
        streams.log(text)
        if self._bar:
            self._draw()

    def close(self) -> None:
        """Draws the bar a last time and ends its line."""
        if self._bar:
            self._draw()
            print(file=self._stream, flush=True)
        self._bar = False


def bar_line(step: int, total: int, parts: dict[str, str], width: int) -> str:
    """One line of at most `width` characters: steps, a bar, and as many parts as fit, the least
    important left out first.

    parts: name of a metric or "left" → text, in the order shown. The metrics that matter most are
        more important than the time left, and that than the others.
    """
    most = [name for name in parts if name != "left" and METRICS[name].matters_most]
    dot, shown = DOT, {"step": f"{step}/{total}"}
    if len(dot.join([shown["step"], *(parts[name] for name in most)])) > width:
        dot = " "
    for name in dict.fromkeys([*most, "left", *parts]):
        if name in parts and len(dot.join([*shown.values(), parts[name]])) <= width:
            shown[name] = parts[name]
    count, rest = shown["step"], dot.join(parts[name] for name in parts if name in shown)
    size = min(width - len(f"{count} || {rest}^C"), BAR_SIZES[1])  # a terminal writes ^C behind it
    if size < BAR_SIZES[0]:
        return dot.join(filter(None, [count, rest]))[:width]
    full, eighths = divmod(size * 8 * step // max(total, 1), 8)
    bar = (EIGHTHS[-1] * full + EIGHTHS[eighths] * bool(eighths)).ljust(size)
    return f"{count} |{bar}| {rest}".rstrip()


def duration(seconds: float) -> str:
    """4:50, or 1:04:50."""
    whole_minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(whole_minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class SearchProgress:
    """A table_search.ReportProgress that shows a search's progress, and a context that clears its
    line at the end.

    Args:
      title: of the line, such as "tables".
      stream: of the line that is redrawn, if it is a terminal; standard error if not given.
      log: of lines otherwise; the same stream if not given.
      shown: False for processes that print nothing.
      clock: seconds.
    """

    def __init__(
        self,
        title: str,
        stream: TextIO | None = None,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
        log: TextIO | None = None,
    ):
        self._title, self._shown, self._clock = title, shown, clock
        self._line = streams.TerminalLine(stream or sys.stderr, shown)
        self._log = log or stream or sys.stderr
        self._began = clock()
        self._next = self._began + (SEARCH_QUIET if self._line.is_live else EVERY)

    def __call__(self, what: str, done: float) -> None:
        """Shows that `what` begins now. done: the fraction of the search that is over, 0 to 1."""
        now = self._clock()
        if not self._shown or now < self._next:
            return
        text = f"{what}, {duration(int(now - self._began))}"
        if self._line.is_live:
            filled = int(SEARCH_BAR * done)
            self._line.draw(
                f"{self._title} [{'#' * filled}{'.' * (SEARCH_BAR - filled)}] {done:4.0%} {text}",
                now,
            )
        else:
            print(f"{self._title}: {done:.0%}, {text}", file=self._log, flush=True)
            self._next = now + EVERY

    def __enter__(self) -> "SearchProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._line.clear()
