"""What counts of a run's wall time over kills and roll-backs, against a simulation that knows; the
file, its cut lines, the picture."""

import contextlib
import dataclasses
import json
import os
import random
import time

import matplotlib.figure
import pytest

from jaxtrain.run.goodput import (
    GROWTH,
    LINES_PER_START,
    REDONE,
    USEFUL,
    Goodput,
    GoodputLog,
    Line,
    plot_goodput,
    read_goodput,
    thinned,
)
from jaxtrain.run.wall_clock import Phase, WallClock

STEPS, SAVE_EVERY = 200, 10


class Simulated:
    """A run that is killed and started again: its lines, as a log writes them, and what each step's
    last execution has cost."""

    def __init__(self, kills: int, seed: int, roll_backs: bool = False):
        self.chance, self.lines = random.Random(seed), []
        self.now, self.step, self.start, self.saved = 1000.0, 0, 0, 0
        self.cost, self.lived, self.down, self.stepped = {}, 0.0, 0.0, 0.0
        left = kills
        while self.step < STEPS:
            self.began, self.seconds, self.start, self.step, self.due = (
                self.now,
                {},
                self.start + 1,
                self.saved,
                0.0,
            )
            ends = self.now + self.chance.uniform(3.0, 12.0) if left else float("inf")
            self.spend("imports", 2.0, ends)
            self.line()
            for part, seconds in (("compiling", 3.0), ("state", 0.5)):
                self.spend(part, seconds, ends)
            while self.now < ends and self.step < STEPS:
                self.one_step(ends, roll_backs)
            left -= 1
            self.lived += self.now - self.began
            if self.step < STEPS:
                pause = self.chance.uniform(0.0, 3.0)
                self.down += pause
                self.now += pause
        self.line()

    def one_step(self, ends: float, roll_backs: bool) -> None:
        before = self.now
        self.spend("stepping", self.chance.uniform(0.05, 0.15), ends)
        self.stepped += self.now - before
        if self.now >= ends:
            return
        self.step += 1
        self.cost[self.step] = self.now - before
        if self.step % SAVE_EVERY == 0:
            self.spend("saving", 0.2, ends)
            self.saved = self.step if self.now < ends else self.saved
        elif roll_backs and self.chance.random() < 0.02:
            self.line()
            self.step = self.saved
            self.line()
            self.spend("rolling_back", 0.3, ends)

    def spend(self, part: str, seconds: float, ends: float) -> None:
        """Time goes by, with lines where they are due, until the kill."""
        end = min(self.now + seconds, ends)
        while self.lines and self.due <= end:
            self.seconds[part] = self.seconds.get(part, 0.0) + max(0.0, self.due - self.now)
            self.now = max(self.now, self.due)
            self.line()
        self.seconds[part] = self.seconds.get(part, 0.0) + end - self.now
        self.now = end

    def line(self) -> None:
        self.lines.append(Line(self.start, self.began, self.now, self.step, dict(self.seconds)))
        self.due = self.now + max(GROWTH * (self.now - self.began), 0.05)


@pytest.mark.parametrize("roll_backs", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_thirty_kills(seed, roll_backs):
    """Parts add up to what the starts have lived, with the down time to all. What counts is what
    the last execution of each step cost."""
    run = Simulated(30, seed, roll_backs)
    goodput = Goodput(run.lines)
    assert sum(goodput.parts().values()) == pytest.approx(goodput.wall_s())
    assert goodput.wall_s() == pytest.approx(run.lived, rel=0.02)
    assert goodput.wall_s() + goodput.down_s == pytest.approx(run.now - 1000.0)
    assert goodput.useful_s() == pytest.approx(sum(run.cost.values()), abs=0.02 * run.lived)
    assert goodput.parts()[REDONE] == pytest.approx(
        run.stepped - sum(run.cost.values()), abs=0.02 * run.lived
    )
    assert goodput.parts()[REDONE] > 0 and 0 < goodput.share() < 1


def test_what_was_done_again_has_the_time_of_the_first_time():
    """Steps 41 to 47 cost 1 s each the first time and 2 s the second; the half step after 47 is
    lost with them."""
    stepping = lambda start, step, seconds, time: Line(
        start, 100.0 * start, time, step, {"imports": 5.0, "stepping": seconds}
    )
    lines = [
        stepping(1, 30, 0.0, 105.0),
        stepping(1, 40, 10.0, 115.0),
        stepping(1, 47, 17.0, 122.0),
        stepping(1, 47, 17.5, 122.5),
    ]
    lines += [stepping(2, 40, 0.0, 205.0), stepping(2, 50, 20.0, 225.0)]
    goodput = Goodput(lines)
    assert goodput.parts() == {USEFUL: 30.0, REDONE: 7.5, "imports": 10.0}
    assert goodput.down_s == 200.0 - 122.5 and goodput.share() == pytest.approx(30 / 47.5)
    text = (
        "goodput 63.2 % of 47.5 s in 2 starts: useful steps 63.2 %, imports 21.1 %, redone steps "
        "15.8 %; 77.5 s down between them"
    )
    assert goodput.summary() == text


def test_parts_are_named_in_words():
    seconds = {"table": 1.0, "ending": 2.0, "data_wait": 3.0}
    said = Goodput([Line(1, 0.0, 6.0, 0, seconds)]).summary()
    assert said.endswith(
        "data wait 50.0 %, last save and pictures 33.3 %, search for a table 16.7 %"
    )


def test_back_inside_a_stretch_takes_its_share():
    """From step 40 to 60 without a line between: a quarter of it is redone after a start from
    55."""
    lines = [
        Line(1, 0.0, 1.0, 40, {"stepping": 0.0}),
        Line(1, 0.0, 21.0, 60, {"stepping": 20.0}),
        Line(2, 30.0, 30.0, 55, {}),
    ]
    assert Goodput(lines).parts() == {USEFUL: 15.0, REDONE: 5.0}


def test_a_long_run_keeps_few_stretches():
    lines = (Line(1, 0.0, 0.1 * step, step, {"stepping": 0.1 * step}) for step in range(50_000))
    goodput = Goodput(lines)
    assert goodput.useful_s() == pytest.approx(4999.9) and len(goodput._stretches) < 2000


@pytest.mark.parametrize("roll_backs", [False, True])
def test_fewer_lines_say_the_same(tmp_path, roll_backs):
    """Once another start follows, the file has few of the earlier ones' lines."""
    run = Simulated(30, 7, roll_backs)
    few = thinned(run.lines)
    assert len(few) < len(run.lines) / 2 and len(few) < 31 * (LINES_PER_START + 10)
    goodput, expected = Goodput(few), Goodput(run.lines)
    assert goodput.wall_s() == expected.wall_s() and goodput.down_s == expected.down_s
    assert goodput.parts() == pytest.approx(expected.parts(), abs=0.01 * expected.wall_s())
    (tmp_path / "goodput.jsonl").write_text(
        "".join(json.dumps(dataclasses.asdict(line)) + "\n" for line in run.lines)
    )
    GoodputLog(tmp_path, WallClock(), STEPS).close()
    lines = read_goodput(tmp_path)
    assert [line for line in lines if line.start < lines[-1].start] == few and lines[
        -1
    ].start == few[-1].start + 1


class Now:
    """A clock that is set."""

    def __init__(self, now: float = 0.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_starts_after_each_other(tmp_path):
    """wall_s and goodput go on; a line that a kill has cut does no harm, and neither does what is
    no line."""
    now = Now(3.0)
    clock = WallClock(0.0, now)
    log = GoodputLog(tmp_path, clock, 0, now=lambda: 1000.0 + now.now)
    clock.enter(Phase.STEPPING)
    now.now = 9.0
    log.reached(6)
    assert log.share() == pytest.approx(6 / 9) and log.wall_s() == 9.0
    log.close()
    with (tmp_path / "goodput.jsonl").open("a") as file:
        file.write('[1]\n{"start": 1, "began"')

    now.now = 102.0
    second = WallClock(100.0, now)
    log = GoodputLog(tmp_path, second, 3, now=lambda: 1000.0 + now.now)
    assert log.wall_s() == 11.0
    second.enter(Phase.STEPPING)
    now.now = 105.0
    log.reached(6)
    assert log.share() == pytest.approx((3 + 3) / 14)
    log.close()
    lines = read_goodput(tmp_path)
    assert [line.start for line in lines] == sorted(line.start for line in lines) and {
        line.start for line in lines
    } == {1, 2}
    assert lines[-1] == Line(2, 1100.0, 1105.0, 6, {"imports": 2.0, "stepping": 3.0})
    goodput = Goodput(lines)
    assert goodput.parts() == {USEFUL: 6.0, REDONE: 3.0, "imports": 5.0} and goodput.down_s == 91.0
    assert plot_goodput(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_a_roll_back_is_in_the_file(tmp_path):
    now = Now()
    clock = WallClock(0.0, now)
    log = GoodputLog(tmp_path, clock)
    clock.enter(Phase.STEPPING)
    for now.now, step in ((1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (5, 3), (6, 4)):
        log.reached(step)
    assert log.share() == pytest.approx(4 / 6)
    log.close()
    assert Goodput(read_goodput(tmp_path)).useful_s() == pytest.approx(4.0)


def test_a_checkpoint_knows_how_long_a_run_has_run(tmp_path):
    assert 300 <= GoodputLog(None, WallClock(), 5, ran_before=300.0).wall_s() < 360
    log = GoodputLog(tmp_path / "new", WallClock(), 5, ran_before=300.0)
    assert 300 <= log.wall_s() < 360
    log.close()


def test_a_thread_writes_while_the_loop_is_busy(tmp_path):
    clock = WallClock(time.monotonic() - 1.0)
    clock.enter(Phase.STEPPING)
    log = GoodputLog(tmp_path, clock)
    end = time.monotonic() + 60
    while len(read_goodput(tmp_path)) < 4:
        assert time.monotonic() < end
        time.sleep(0.01)
    log.close()
    times = [line.time for line in read_goodput(tmp_path)]
    assert times == sorted(times)


def full(descriptor: int, text: bytes) -> int:
    raise OSError(28, "No space left on device")


def test_lines_without_room_come_later(tmp_path, monkeypatch):
    clock = WallClock()
    clock.enter(Phase.STEPPING)
    log, write = GoodputLog(tmp_path, clock), os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        for step in (3, 2):
            log.reached(step)
        patched.setattr(os, "write", lambda descriptor, text: write(descriptor, text[:20]))
        log.reached(1)
    log.reached(0)
    log.close()
    texts = (tmp_path / "goodput.jsonl").read_text().splitlines()
    steps = [line.step for line in read_goodput(tmp_path)]
    assert list(dict.fromkeys(steps)) == [0, 3, 2, 1] and steps[-1] == 0
    assert all(
        json.loads(text).keys() == {field.name for field in dataclasses.fields(Line)}
        for text in texts
        if text.endswith("}")
    )


def test_a_first_line_without_room_comes_with_the_next(tmp_path, monkeypatch):
    """It says from which step the start goes on, so that what came after that step is redone."""
    (tmp_path / "goodput.jsonl").touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        log = GoodputLog(tmp_path, WallClock(time.monotonic() - 1000.0), 2)
    log.reached(7)
    log.close()
    assert [line.step for line in read_goodput(tmp_path)] == [2, 7]


@pytest.mark.parametrize("starts", [1, 2, 30])
def test_starts_are_drawn_by_their_numbers(tmp_path, monkeypatch, starts):
    """Whole numbers alone, and one start is a bar and no wall."""
    lines = [
        Line(n, 10.0 * n, 10.0 * n + 8, 3 * n, {"imports": 2.0, "stepping": 6.0})
        for n in range(1, starts + 1)
    ]
    (tmp_path / "goodput.jsonl").write_text(
        "".join(json.dumps(dataclasses.asdict(line)) + "\n" for line in lines)
    )
    figures = []
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda figure, path: figures.append(figure)
    )
    plot_goodput(tmp_path)
    each = figures[0].axes[1]
    figures[0].draw_without_rendering()
    first, last = each.get_xlim()
    shown = [tick for tick in each.get_xticks() if first <= tick <= last]
    assert shown and all(tick == round(tick) and 1 <= tick <= starts for tick in shown)
    assert shown == list(range(1, starts + 1)) or starts > 20
    assert last - first >= 6 and first <= 0.5 and last >= starts + 0.5


def test_nothing_to_draw(tmp_path):
    assert plot_goodput(tmp_path) is None


def test_nothing_is_left_of_a_start_without_a_state(tmp_path):
    clock = WallClock()
    clock.enter(Phase.COMPILING)
    with contextlib.closing(GoodputLog(tmp_path, clock, 0)):
        clock.enter(Phase.TRACING)
    assert not list(tmp_path.iterdir())


def test_a_clock_that_is_put_right_meanwhile_changes_nothing(tmp_path):
    """By an hour either way: no negative time, and no down time between starts that follow each
    other."""
    fast_by = [0.0]
    for jump in (3600.0, -3600.0):
        fast_by[0] = 0.0
        clock = WallClock(time.monotonic() - 5)
        log = GoodputLog(tmp_path, clock, now=lambda: time.time() + fast_by[0])
        clock.enter(Phase.STEPPING)
        fast_by[0] = jump
        log.reached(1)
        log.close()
    lines = read_goodput(tmp_path)
    assert {line.start for line in lines} == {1, 2}
    for line in lines:
        assert (
            line.time - line.began == pytest.approx(sum(line.seconds.values()), abs=0.01)
            and line.time >= line.began
        )
    assert 0 <= Goodput(lines).down_s < 60
