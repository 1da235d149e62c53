"""Goodput of a run over all its starts: which share of their wall time went into steps that count.
goodput.jsonl and goodput.png.

    goodput.jsonl    one JSON object a line, appended as a start goes on, so that a start that is
                     killed has left its parts
      {"start": 2, "began": 1763786000.1, "time": 1763786012.6, "step": 47,
       "seconds": {"imports": 2.01, …, "stepping": 4.5}}

    start      from 1
    began      Unix seconds at which the start's command began, by the clock of the start's machine
               then
    time       began and how long the start has lasted since: a clock that is put right meanwhile
               changes nothing
    step       the last step whose results were there; in a start's first line the step that it goes
               on from
    seconds    of each part since `began` (goodput.py); they add up to time - began

A start that goes on from step 40 takes what steps after 40 have cost earlier starts out of what
counts: those steps are redone. So does a roll-back in a start, where `step` falls from one line to
the next. Down time is what lies between a start's last line and the beginning of the next one; it
is shown beside, and is no part of the run's wall time. A start that ends before its first line, in
the imports, is down time too.
"""

import dataclasses
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable

from jaxtrain.run.goodput import Part, WallClock

GOODPUT_FILE, GOODPUT_PLOT = "goodput.jsonl", "goodput.png"
# A line is due when a start has lasted so much longer than at its last line: a kill loses no more
# of it.
GROWTH, SHORTEST, LONGEST = 0.01, 0.05, 60.0  # a part of the start's time; seconds
BEFORE_STATE = {Part.IMPORTS, Part.TABLE, Part.DATA, Part.TRACING, Part.COMPILING}
KEPT_LINES = 50  # about so many of each start are kept once another start follows
SHOWN = 0.0005  # the share of a part that stands in the summary
STEPPING = (Part.STEPPING.value, Part.AWAITING.value)
USEFUL, REDONE = "useful steps", "redone steps"  # what these are split into


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


@dataclasses.dataclass
class Start:
    """A start as its last line has it. redone_s: of its stepping, what was done again or thrown
    away."""

    last: Line
    redone_s: float = 0.0

    def wall_s(self) -> float:
        return sum(self.last.seconds.values())

    def parts(self) -> dict[str, float]:
        """Seconds by part, where stepping is split into what counts and what does not."""
        others = {
            name: seconds for name, seconds in self.last.seconds.items() if name not in STEPPING
        }
        return {USEFUL: self.last.stepping() - self.redone_s, REDONE: self.redone_s} | others


@dataclasses.dataclass
class _Stretch:
    """Steps that count so far: those after `begin` up to `end`, and the seconds that they took
    their start."""

    begin: int
    end: int
    seconds: float
    start: Start


class Goodput:
    """The starts of a run, from their lines in order."""

    def __init__(self, lines: Iterable[Line] = ()):
        self.starts: list[Start] = []
        self.down_s = 0.0
        self._stretches: list[_Stretch] = []  # one after the other, without gap or overlap
        for line in lines:
            self.add(line)

    def add(self, line: Line) -> None:
        """Takes the next line: of the start that the last one was of, or of a new one."""
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
        if stretch.end > stretch.begin and stretch.seconds > GROWTH * start.wall_s():
            self._stretches.append(stretch := _Stretch(before.step, before.step, 0.0, start))
        stretch.end = line.step
        stretch.seconds += seconds

    def wall_s(self) -> float:
        """Seconds that the run has run, without the time between starts."""
        return sum(start.wall_s() for start in self.starts)

    def useful_s(self) -> float:
        """Seconds in steps whose results are in what the run has become."""
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
        """For people, in a line."""
        wall_s, parts = self.wall_s(), self.parts()
        shares = (
            {name: parts[name] / wall_s for name in sorted(parts, key=lambda name: -parts[name])}
            if wall_s > 0
            else {}
        )
        text = ", ".join(
            f"{name.replace('_', ' ')} {100 * share:.1f} %"
            for name, share in shares.items()
            if share >= SHOWN
        )
        starts = f"{len(self.starts)} start{'s'[: len(self.starts) > 1]}"
        down = f"; {self.down_s:.1f} s down between them" if len(self.starts) > 1 else ""
        return f"goodput {100 * self.share():.1f} % of {wall_s:.1f} s in {starts}: {text}{down}"

    def _forget_after(self, step: int) -> None:
        """What came after a step does not count: whole stretches, and of the one around it a
        part."""
        while self._stretches and (last := self._stretches[-1]).begin >= step:
            last.start.redone_s += last.seconds
            self._stretches.pop()
        if self._stretches and (last := self._stretches[-1]).end > step:
            lost = last.seconds * (last.end - step) / (last.end - last.begin)
            last.start.redone_s += lost
            last.end, last.seconds = step, last.seconds - lost


def _text(line: Line) -> str:
    return json.dumps(dataclasses.asdict(line)) + "\n"


def read_goodput(workdir: str | os.PathLike) -> list[Line]:
    """The lines of a run in order, none if there is no file. A line that a kill has cut off is left
    out."""
    path = pathlib.Path(workdir) / GOODPUT_FILE
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            lines.append(Line(**json.loads(text)))
        except (ValueError, TypeError):
            continue
    return lines


def thinned(lines: list[Line]) -> list[Line]:
    """So few of the lines that each start has some KEPT_LINES, with its first and last one and
    those around a roll-back."""
    # the last of each start has all
    whole = {line.start: sum(line.seconds.values()) for line in lines}
    kept: list[Line] = []
    for before, line, after in zip([None, *lines], lines, [*lines[1:], None], strict=False):
        ends = (
            before is None or before.start != line.start,
            after is None or after.start != line.start,
        )
        back = (
            before is not None and line.step < before.step,
            after is not None and after.step < line.step,
        )
        grown = (
            bool(kept)
            and sum(line.seconds.values()) - sum(kept[-1].seconds.values())
            > whole[line.start] / KEPT_LINES
        )
        if any(ends) or any(back) or grown:
            kept.append(line)
    return kept


class GoodputLog:
    """Writes goodput.jsonl for a start, from a thread of its own: also while the loop compiles,
    saves or hangs.

    Args:
      workdir: made if need be. None: nothing is written (for the processes that keep no log), and
        no other start is known.
      clock: of the command.
      step: the step that the start goes on from.
      ran_before: seconds that the run had run when the checkpoint was saved that it goes on from;
        the file may know of more.
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
        self._goodput = Goodput(read_goodput(workdir) if workdir is not None else [])
        self._ran_before = max(ran_before, self._goodput.wall_s())
        self._start = self._goodput.starts[-1].last.start + 1 if self._goodput.starts else 1
        self._began = now() - clock.wall_s()
        self._step = step
        self._ended = threading.Event()
        self._goodput.add(self._line())
        self._first: Line | None = self._line()  # until it is written
        self._path: pathlib.Path | None = None
        self._descriptor: int | None = None
        self._is_first = False  # whether there was nothing in the folder before this start
        self._cut = False  # whether the file ends in the middle of a line
        self._writing = threading.Lock()
        if workdir is None:
            return
        self._path = pathlib.Path(workdir) / GOODPUT_FILE
        self._is_first = not self._path.exists()
        self._write()
        self._thread = threading.Thread(target=self._go_on, name="jaxtrain-goodput", daemon=True)
        self._thread.start()

    def reached(self, step: int) -> None:
        """The results of a step are there, or the run has gone back to an earlier one."""
        back = step < self._step
        if back:
            self._note()
        self._step = step
        if back:
            self._note()

    def share(self) -> float:
        """The run's goodput so far, 0 to 1."""
        self._goodput.add(self._line())
        return self._goodput.share()

    def wall_s(self) -> float:
        """Seconds that the run has run by now, all its starts together."""
        return round(self._ran_before + self.clock.wall_s(), 3)

    def summary(self) -> str:
        """Of the run so far, for people."""
        self._goodput.add(self._line())
        return self._goodput.summary()

    def close(self) -> None:
        """Writes the last line and ends the thread."""
        self._ended.set()
        if self._path is not None:
            self._thread.join()
            self._write()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self.discard()

    def discard(self) -> None:
        """Removes the file of a run that ends, by a signal or an error, before it has a state: such
        a run leaves nothing. Any thread."""
        if (
            self._path is not None
            and self._is_first
            and self.clock.seconds().keys() <= BEFORE_STATE
        ):
            self._ended.set()
            self._path.unlink(missing_ok=True)

    def _note(self) -> None:
        self._goodput.add(self._line())
        self._write()

    def _line(self) -> Line:
        seconds = {part.value: round(seconds, 4) for part, seconds in self.clock.seconds().items()}
        return Line(
            self._start,
            round(self._began, 3),
            round(self._began + sum(seconds.values()), 3),
            self._step,
            seconds,
        )

    def _write(self) -> None:
        """Appends a line. One that has no room on the disk is left out: what is measured must not
        end what it measures."""
        with self._writing:  # the loop's thread writes too where the run goes back
            self._append()

    def _append(self) -> None:
        if self._descriptor is None:
            self._descriptor = self._open()
        if self._descriptor is None:
            return
        lines = [line for line in (self._first, self._line()) if line]
        text = ("\n" * self._cut + "".join(map(_text, lines))).encode()
        try:
            self._cut = os.write(self._descriptor, text) < len(text)
        except OSError:
            self._cut = True
        if not self._cut:
            self._first = None

    def _open(self) -> int | None:
        """The file to append to; None where it cannot be written."""
        if self._path is None:
            return None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines = read_goodput(self._path.parent)
            # over hundreds of starts the file would grow without end
            if len(few := thinned(lines)) < len(lines):
                # then renamed: a kill in between must not lose what was
                beside = self._path.with_suffix(".new")
                beside.write_text("".join(map(_text, few)))
                os.replace(beside, self._path)
            self._cut = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
            return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError:
            return None

    def _go_on(self) -> None:
        """Writes whatever becomes due until the start ends."""
        while not self._ended.wait(min(max(GROWTH * self.clock.wall_s(), SHORTEST), LONGEST)):
            self._write()


# for which goodput.png has room at least, and of which each has its number
LEAST_STARTS, MOST_LABELS = 6, 20

# The parts of every start, from the bottom up, with their colours: what counts is dark, what is
# lost is red.
COLOURS = {
    USEFUL: "#1b6e3c",
    REDONE: "#c0392b",
    Part.ROLLING_BACK.value: "#e67e22",
    Part.WAITING.value: "#f1c40f",
    Part.SAVING.value: "#2e86c1",
    Part.EVALUATING.value: "#8e44ad",
    Part.COMPILING.value: "#7f8c8d",
    Part.TRACING.value: "#95a5a6",
    Part.STATE.value: "#aab7b8",
    Part.DATA.value: "#bfc9ca",
    Part.TABLE.value: "#d5dbdb",
    Part.IMPORTS.value: "#e5e8e8",
    Part.ENDING.value: "#34495e",
    Part.OTHER.value: "#000000",
}


def plot_goodput(workdir: str | os.PathLike) -> pathlib.Path | None:
    """Draws goodput.png, from goodput.jsonl: each start's seconds by part, and the share of each
    over all. None if there is nothing."""
    goodput = Goodput(read_goodput(workdir))
    if not goodput.wall_s():
        return None
    from matplotlib.figure import Figure  # not pyplot: no display, no state
    from matplotlib.ticker import FixedLocator, MaxNLocator

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    whole, each = figure.subplots(1, 2, width_ratios=(1, 5))
    total = goodput.parts()
    height, heights = 0.0, [0.0] * len(goodput.starts)
    numbers = [start.last.start for start in goodput.starts]
    for name in [*COLOURS, *sorted(total.keys() - COLOURS.keys())]:
        if not total.get(name):
            continue
        share = 100 * total[name] / goodput.wall_s()
        whole.bar(
            [0],
            [share],
            bottom=[height],
            color=COLOURS.get(name),
            label=f"{name.replace('_', ' ')} {share:.1f} %",
        )
        seconds = [start.parts().get(name, 0.0) for start in goodput.starts]
        each.bar(numbers, seconds, bottom=heights, color=COLOURS.get(name))
        height, heights = (
            height + share,
            [low + more for low, more in zip(heights, seconds, strict=True)],
        )
    whole.set(xticks=[], ylabel="% of the wall time of all starts", ylim=(0, 100))
    each.set(xlabel="start", ylabel="seconds")
    # so that a bar of few is no wall
    beside = max(0.5, (LEAST_STARTS - (numbers[-1] - numbers[0])) / 2)
    each.set_xlim(numbers[0] - beside, numbers[-1] + beside)
    each.xaxis.set_major_locator(
        MaxNLocator(integer=True) if len(numbers) > MOST_LABELS else FixedLocator(numbers)
    )
    figure.legend(
        *(reversed(labels) for labels in whole.get_legend_handles_labels()),
        loc="outside right upper",
        fontsize="small",
    )
    figure.suptitle(goodput.summary().partition(":")[0])
    path = pathlib.Path(workdir) / GOODPUT_PLOT
    figure.savefig(path)
    return path
