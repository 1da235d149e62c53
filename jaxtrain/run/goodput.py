"""Goodput of a run: the fraction of the wall time of all its starts that went into steps that
count. goodput.jsonl and goodput.png.

    goodput.jsonl    one JSON object a line, appended throughout a start, so that a start that is
                     killed leaves its parts
      {"start": 2, "began": 1763786000.1, "time": 1763786012.6, "step": 47,
       "seconds": {"imports": 2.01, …, "stepping": 4.5}}

    start      from 1
    began      Unix seconds at which the start's command began, by its machine's clock at that time
    time       `began` plus the seconds that the start has lasted, which do not change if the
               machine's clock is corrected meanwhile
    step       the last step with results; in a start's first line the step that it resumes from
    seconds    of each part since `began` (wall_clock.py); their sum is time - began

A start that resumes from step 40 repeats the steps after 40, so the time of earlier starts for
these no longer counts. The same holds for a roll-back in a start, where `step` falls from one line
to the next. Down time is between the last line of a start and the beginning of the next one. It is
shown, but is not in the run's wall time. A start that ends before its first line, in the imports,
is down time too.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable

from jaxtrain.run.files import LineFile, fresh, read_json_lines, replace_text
from jaxtrain.run.wall_clock import Phase, WallClock
from jaxtrain.schedule.drawing import STARTS, stacked_bars

GOODPUT_FILE, GOODPUT_PLOT = "goodput.jsonl", "goodput.png"
# The next line is due after this fraction of the time that the start has lasted, between SHORTEST
# and LONGEST seconds: a kill loses no more.
GROWTH, SHORTEST, LONGEST = 0.01, 0.05, 60.0
BEFORE_STATE = {Phase.IMPORTS, Phase.TABLE, Phase.DATA, Phase.TRACING, Phase.COMPILING}
LINES_PER_START = 50  # about as many of each start remain once another start follows
SHOWN = 0.0005  # a part with a smaller share is not in the summary
STEPPING = (Phase.STEPPING.value, Phase.AWAITING.value)
USEFUL, REDONE = "useful steps", "redone steps"  # the two parts of STEPPING
TITLES = {Phase.TABLE.value: "search for a table", Phase.ENDING.value: "last save and pictures"}


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of goodput.jsonl."""

    start: int
    began: float
    time: float
    step: int
    seconds: dict[str, float]

    def stepping(self) -> float:
        """Seconds in steps, without the wait for their batches."""
        return sum(self.seconds.get(name, 0.0) for name in STEPPING)

    def wall_s(self) -> float:
        """Seconds that the start had lasted."""
        return sum(self.seconds.values())

    def json(self) -> str:
        """The line's text, without its end."""
        return json.dumps(dataclasses.asdict(self))


@dataclasses.dataclass
class Start:
    """A start, by its last line. redone_s: seconds of its steps that were redone or discarded."""

    last: Line
    redone_s: float = 0.0

    def parts(self) -> dict[str, float]:
        """Seconds by part; stepping is split into useful and redone steps."""
        others = {
            name: seconds for name, seconds in self.last.seconds.items() if name not in STEPPING
        }
        return {USEFUL: self.last.stepping() - self.redone_s, REDONE: self.redone_s} | others


@dataclasses.dataclass
class _Stretch:
    """Consecutive steps of one start that count so far: those after `begin` up to `end`, and the
    seconds that they took."""

    begin: int
    end: int
    seconds: float
    start: Start


class Goodput:
    """The starts of a run, from their lines in order."""

    def __init__(self, lines: Iterable[Line] = ()):
        self.starts: list[Start] = []
        self.down_s = 0.0
        self._stretches: list[_Stretch] = []  # in the order of steps, without gap or overlap
        for line in lines:
            self.add(line)

    def add(self, line: Line) -> None:
        """Takes the next line, of the same start or of the next one."""
        before = self.starts[-1].last if self.starts else None
        if before is None or line.start != before.start:
            self.down_s += max(0.0, line.began - before.time) if before else 0.0
            self._forget_after(line.step)
            self.starts.append(Start(line))
            self._stretches.append(_Stretch(line.step, line.step, line.stepping(), self.starts[-1]))
            return
        start, seconds = self.starts[-1], line.stepping() - before.stepping()
        start.last = line
        if line.step < before.step:
            start.redone_s += seconds
            self._forget_after(line.step)
            self._stretches.append(_Stretch(line.step, line.step, 0.0, start))
            return
        stretch = self._stretches[-1]
        if stretch.end > stretch.begin and stretch.seconds > GROWTH * line.wall_s():
            self._stretches.append(stretch := _Stretch(before.step, before.step, 0.0, start))
        stretch.end = line.step
        stretch.seconds += seconds

    def wall_s(self) -> float:
        """Seconds that all starts have lasted, without the time between them."""
        return sum(start.last.wall_s() for start in self.starts)

    def useful_s(self) -> float:
        """Seconds in steps whose results are in the run's present state."""
        return sum(start.last.stepping() - start.redone_s for start in self.starts)

    def share(self) -> float:
        """Goodput, 0 to 1: useful seconds over wall time; 0 before there is any."""
        return self.useful_s() / wall_s if (wall_s := self.wall_s()) > 0 else 0.0

    def parts(self) -> dict[str, float]:
        """Seconds by part over all starts; they add up to the wall time."""
        total: dict[str, float] = {}
        for start in self.starts:
            for name, seconds in start.parts().items():
                total[name] = total.get(name, 0.0) + seconds
        return total

    def summary(self) -> str:
        """A line of text with goodput, wall time, and the share of each part."""
        wall_s, parts = self.wall_s(), self.parts()
        text = ", ".join(
            f"{TITLES.get(name) or name.replace('_', ' ')} {100 * parts[name] / wall_s:.1f} %"
            for name in sorted(parts, key=lambda name: -parts[name])
            if wall_s > 0 and parts[name] / wall_s >= SHOWN
        )
        starts = f"{len(self.starts)} start{'s'[: len(self.starts) > 1]}"
        down = f"; {self.down_s:.1f} s down between them" if len(self.starts) > 1 else ""
        return f"goodput {100 * self.share():.1f} % of {wall_s:.1f} s in {starts}: {text}{down}"

    def _forget_after(self, step: int) -> None:
        """Steps after this one no longer count: whole stretches, and a part of the one that it lies
        in."""
        while self._stretches and (last := self._stretches[-1]).begin >= step:
            last.start.redone_s += last.seconds
            self._stretches.pop()
        if self._stretches and (last := self._stretches[-1]).end > step:
            lost = last.seconds * (last.end - step) / (last.end - last.begin)
            last.start.redone_s += lost
            last.end, last.seconds = step, last.seconds - lost


def read_goodput(workdir: str | os.PathLike) -> list[Line]:
    """The lines of a run in order, none if there is no file. A line that a kill has cut off, or
    whose values are of other kinds, is left out."""
    lines = []
    for values in read_json_lines(pathlib.Path(workdir) / GOODPUT_FILE):
        with contextlib.suppress(TypeError, AttributeError):
            line = Line(**values)
            if math.isfinite(line.start + line.began + line.time + line.step + line.wall_s()):
                lines.append(line)
    return lines


def thinned(lines: list[Line]) -> list[Line]:
    """Some LINES_PER_START lines of each start, with its first and last one and the two at each
    roll-back."""
    start_s = {line.start: line.wall_s() for line in lines}  # by each start's last line
    selected: list[Line] = []
    for before, line, after in zip([None, *lines], lines, [*lines[1:], None], strict=False):
        is_first = before is None or before.start != line.start or line.step < before.step
        is_last = after is None or after.start != line.start or after.step < line.step
        if (
            is_first
            or is_last
            or line.wall_s() - selected[-1].wall_s() > start_s[line.start] / LINES_PER_START
        ):
            selected.append(line)
    return selected


class GoodputLog:
    """Writes goodput.jsonl for a start, from a thread of its own: also while the loop compiles,
    saves or hangs.

    Args:
      workdir: created if missing. None: nothing is written (for the processes that keep no log),
        and no earlier start is known.
      clock: of the command.
      step: the step that the start goes on from.
      ran_before: wall seconds of the run when the checkpoint was saved that it goes on from; the
        file may know of more.
      now: Unix seconds; asked once.
    """

    def __init__(
        self,
        workdir: str | os.PathLike | None,
        clock: WallClock,
        step: int = 0,
        ran_before: float = 0.0,
        now: Callable[[], float] = time.time,
    ):
        self.clock = clock
        earlier = read_goodput(workdir) if workdir is not None else []
        self._goodput = Goodput(earlier)
        self._ran_before = max(ran_before, self._goodput.wall_s())
        self._start = self._goodput.starts[-1].last.start + 1 if self._goodput.starts else 1
        self._began = now() - clock.wall_s()
        self._step = step
        self._ended = threading.Event()
        self._goodput.add(self._line())
        self._writing = threading.Lock()
        self._path = pathlib.Path(workdir) / GOODPUT_FILE if workdir is not None else None
        if self._path is None:
            return
        self._is_new = not self._path.exists()
        # no warning: metrics.jsonl, in the same folder, has one
        self._file = LineFile(self._path, log=lambda warning: None)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Without a line that a kill has cut off, and with fewer lines of earlier starts: over
            # hundreds of starts the file would grow without end.
            text = "".join(f"{line.json()}\n" for line in thinned(earlier))
            if not self._is_new and self._path.stat().st_size != len(text):
                replace_text(self._path, text)
        self._write()
        self._thread = threading.Thread(
            target=self._write_often, name="jaxtrain-goodput", daemon=True
        )
        self._thread.start()

    def reached(self, step: int) -> None:
        """Takes the step whose results have come, or an earlier one that the run has gone back
        to."""
        went_back = step < self._step
        if went_back:
            self._goodput.add(self._line())
            self._write()
        self._step = step
        if went_back:
            self._goodput.add(self._line())
            self._write()

    def share(self) -> float:
        """The run's goodput so far, 0 to 1."""
        self._goodput.add(self._line())
        return self._goodput.share()

    def wall_s(self) -> float:
        """Seconds that all starts of the run have lasted by now."""
        return round(self._ran_before + self.clock.wall_s(), 3)

    def summary(self) -> str:
        """A line of text about the run so far."""
        self._goodput.add(self._line())
        return self._goodput.summary()

    def close(self) -> None:
        """Writes the last line and ends the thread."""
        self._ended.set()
        if self._path is not None:
            self._thread.join()
            self._write()
            self._file.close()
        self.discard()

    def discard(self) -> None:
        """Removes the file of a new run that a signal or an error ends before it has a state: such
        a run leaves nothing. For any thread."""
        is_early = self.clock.seconds().keys() <= BEFORE_STATE
        if self._path is not None and self._is_new and is_early:
            self._ended.set()
            self._path.unlink(missing_ok=True)

    def _line(self) -> Line:
        seconds = {phase.value: round(s, 4) for phase, s in self.clock.seconds().items()}
        until = self._began + sum(seconds.values())
        return Line(self._start, round(self._began, 3), round(until, 3), self._step, seconds)

    def _write(self) -> None:
        """Appends a line, if there is a file."""
        with self._writing:  # the loop's thread writes too where the run goes back
            if self._path is not None:
                self._file.write(self._line().json())

    def _write_often(self) -> None:
        while not self._ended.wait(min(max(GROWTH * self.clock.wall_s(), SHORTEST), LONGEST)):
            self._write()


# goodput.png is as wide as for this many starts at least; with more than MOST_LABELS not every
# start has its number.
LEAST_STARTS, MOST_LABELS = 6, 20


def plot_goodput(workdir: str | os.PathLike) -> pathlib.Path | None:
    """Draws goodput.png from goodput.jsonl: each start's seconds by part, and the share of each
    part over all starts. The picture's path; None if there is nothing to draw."""
    goodput = Goodput(read_goodput(workdir))
    if not goodput.wall_s():
        return None
    from matplotlib.figure import Figure  # not pyplot: no display, no state
    from matplotlib.ticker import FixedLocator, MaxNLocator

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    shares, starts = figure.subplots(1, 2, width_ratios=(1, 5))
    total = goodput.parts()
    numbers = [start.last.start for start in goodput.starts]
    names = [name for name in [*STARTS, *sorted(total.keys() - STARTS.keys())] if total.get(name)]
    share = {name: 100 * total[name] / goodput.wall_s() for name in names}
    seconds = [{name: start.parts().get(name, 0.0) for name in names} for start in goodput.starts]
    stacked_bars(shares, [0], [share], colours=STARTS)
    stacked_bars(starts, numbers, seconds, colours=STARTS)
    shares.set(xticks=[], ylabel="% of the wall time of all starts", ylim=(0, 100))
    starts.set(xlabel="start", ylabel="seconds")
    # a single bar would fill the picture
    margin = max(0.5, (LEAST_STARTS - (numbers[-1] - numbers[0])) / 2)
    starts.set_xlim(numbers[0] - margin, numbers[-1] + margin)
    starts.xaxis.set_major_locator(
        MaxNLocator(integer=True) if len(numbers) > MOST_LABELS else FixedLocator(numbers)
    )
    figure.legend(
        shares.containers[::-1],
        [f"{name.replace('_', ' ')} {share[name]:.1f} %" for name in reversed(names)],
        loc="outside right upper",
        fontsize="small",
    )
    figure.suptitle(goodput.summary().partition(":")[0])
    path = pathlib.Path(workdir) / GOODPUT_PLOT
    figure.savefig(fresh(path))
    return path
