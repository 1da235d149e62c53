"""The speed that is shown, the bar on real terminals of any width, and the lines of a log; and a
search's progress."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from jaxtrain.run.progress import Progress, SearchProgress, StepTimer, bar_line

# --- the timer ------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_speed_shown_is_a_mean_over_the_last_seconds():
    """However unevenly the results come: here two at a time, as from a host that is late for every
    other one."""
    clock = Clock()
    timer, shown = StepTimer(0, window=10.0, clock=clock), []
    for step in range(2, 200, 2):
        clock.now = 0.5 * step + 0.5
        timer.lap(step)
        shown.append(timer.recent())
        clock.now += 1e-6
        timer.lap(step + 1)
        shown.append(timer.recent())
    assert max(shown[:10]) / min(shown[:10]) < 2.1
    assert all(0.45 < seconds < 0.55 for seconds in shown[40:])


def test_the_speed_shown_follows_a_change():
    clock = Clock()
    timer = StepTimer(0, window=10.0, clock=clock)
    for step, now in enumerate(
        [60.0, *(60.0 + n for n in range(1, 12)), *(71.0 + 0.1 * n for n in range(1, 120))], 1
    ):
        clock.now = now
        timer.lap(step)
        if step == 1:
            assert timer.recent() == 60.0  # the first step also warms up
        if step == 12:
            assert timer.recent() == pytest.approx(1.0)  # and is forgotten soon
    assert timer.recent() == pytest.approx(0.1)


def test_a_run_that_goes_back_is_timed_anew():
    clock = Clock()
    timer = StepTimer(0, clock=clock)
    clock.now = 9.0
    timer.lap(3)
    timer.restart(1)
    with pytest.raises(ValueError, match="no step has ended since step 1"):
        timer.recent()
    clock.now = 11.0
    timer.lap(2)
    assert timer.recent() == timer.since_asked() == 2.0


def test_the_time_left_is_reckoned_anew_when_a_run_goes_back(capsys):
    clock = Clock()
    progress = Progress(10, every=0.0, clock=clock)
    for step in (1, 2, 3):
        clock.now = float(step)
        progress.update(step)
    progress.restart(1)
    for step in (2, 3):
        clock.now += 2.0
        progress.update(step)
    lines = capsys.readouterr().out.splitlines()
    assert "left" not in lines[3] and lines[4].endswith("0:14 left")


def test_a_step_longer_than_the_window_is_shown_alone():
    clock = Clock()
    timer = StepTimer(5, window=10.0, clock=clock)
    for step, now in ((6, 30.0), (7, 50.0)):
        clock.now = now
        timer.lap(step)
    assert timer.recent() == 20.0


def test_the_mean_since_it_was_asked_is_over_all_steps_between():
    """The figures of metrics.jsonl: steps over time, not a mean of laps."""
    clock = Clock()
    timer = StepTimer(0, clock=clock)
    for step, now in ((1, 3.0), (2, 3.5), (3, 9.0), (4, 9.0)):
        clock.now = now
        timer.lap(step)
        if step == 1:
            assert timer.since_asked() == 3.0
    assert timer.since_asked() == 2.0
    with pytest.raises(ValueError, match="no step has ended since step 4"):
        timer.since_asked()
    timer.lap(5)
    assert 0 < timer.since_asked() < 1e-6  # never 0: it is divided by


# --- the display ----------------------------------------------------------------------------------


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("screen", [io.StringIO, Screen])
def test_a_log_gets_few_lines(capsys, screen):
    """Also beside a bar, where standard error is a terminal; warnings stand there."""
    now, errors = [0.0], screen()
    progress = Progress(1000, step=100, stream=errors, every=5, clock=lambda: now[0])
    for step in range(101, 1001):
        now[0] += 0.125
        progress.update(
            step, loss=1.0 if step % 10 == 0 else None, tokens_per_s=12345.0, mfu=0.4321
        )
    progress.log("done")
    progress.log("warning: careful")
    progress.close()
    out, err = capsys.readouterr()
    assert (
        err == "warning: careful\n" and ("1000/1000 |███" in errors.getvalue()) == errors.isatty()
    )
    lines = out.splitlines()
    # 112.5 seconds: the first step, one line every 5 seconds, the last step, and what was said.
    assert len(lines) == 1 + 22 + 1 + 1
    assert lines[0] == "step 101/1000 · 12.3k tokens/s · MFU 43.2 %"
    assert lines[1] == "step 141/1000 · loss 1.0000 · 12.3k tokens/s · MFU 43.2 % · 1:47 left"
    assert lines[-2:] == ["step 1000/1000 · loss 1.0000 · 12.3k tokens/s · MFU 43.2 %", "done"]


def test_a_terminal_gets_a_bar(monkeypatch):
    """And no lines, where the log is on a terminal too."""
    out = Screen()
    monkeypatch.setattr("sys.stdout", out)
    progress = Progress(20, step=5, stream=out)
    for step in range(6, 21):
        progress.update(step, loss=2.0, tokens_per_s=950.0)
    progress.log("a line")
    progress.close()
    last = out.getvalue().split("\r")[-1]
    assert re.fullmatch(r"20/20 [|]█+[|] loss 2.0000 · 950 tokens/s\x1b\[K\n", last)
    assert "\ra line\n" in out.getvalue().replace("\x1b[K", "") and out.getvalue().count("\n") == 2


def test_a_silent_process_says_nothing(capsys):
    progress = Progress(2, shown=False)
    progress.update(1, loss=1.0)
    progress.log("hello")
    progress.close()
    assert capsys.readouterr() == ("", "")


PROGRAM = """
import sys
from jaxtrain.run import streams
from jaxtrain.run.progress import Progress

def main(argv):
    progress = Progress(1500, 60, clock=iter(range(10000)).__next__)
    for step in range(61, 1501, 60):
        progress.update(step, loss=123.456 / step, tokens_per_s=step * 1234.5, mfu=0.4321)
        if step == 661:
            progress.log("said")
    progress.update(1500)
    progress.close()

sys.exit(streams.run(main, []))
"""


def on_a_terminal(columns: int, **environment: str) -> list[str]:
    """The rows that a terminal of a width shows at the end: what is printed, the cursor's moves
    followed."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=terminal,
        stderr=terminal,
        env=os.environ | environment,
    )
    os.close(terminal)
    data = b""
    while True:
        try:
            if not (piece := os.read(main, 1 << 16)):
                break
        except OSError:  # how Linux says that nobody holds the terminal any more
            break
        data += piece
    os.close(main)
    assert process.wait() == 0
    return screen(data.decode(), columns or 80)


def screen(text: str, columns: int) -> list[str]:
    rows, row, column = [[]], 0, 0
    for token in re.findall(r"\x1b\[K|.", text, re.DOTALL):
        if token == "\r":
            column = 0
        elif token == "\n":
            rows, row = [*rows, []], row + 1
        elif token == "\x1b[K":
            rows[row] = rows[row][:column]
        else:
            if column == columns:
                rows, row, column = [*rows, []], row + 1, 0
            rows[row][column : column + 1] = [token]
            column += 1
    return ["".join(line) for line in rows]


@pytest.mark.parametrize(
    "columns, environment, last",
    [
        (200, {}, r"1500/1500 [|]█{40}[|] loss 0.0857 · 1.78M tokens/s · MFU 43.2 %"),
        (80, {}, r"1500/1500 [|]█+[|] loss 0.0857 · 1.78M tokens/s · MFU 43.2 %"),
        (0, {}, r"1500/1500 [|]█+[|] loss 0.0857 · 1.78M tokens/s · MFU 43.2 %"),
        (60, {}, r"1500/1500 [|]█+[|] loss 0.0857 · 1.78M tokens/s · MFU 43.2 %"),
        (40, {}, r"1500/1500 · loss 0.0857 · MFU 43.2 %"),
        (24, {}, r"1500/1500 · loss 0.0857"),
        (22, {}, r"1500/1500 loss 0.0857"),
        (20, {}, r"1500/1500 [|]█+[|]"),
        (5, {}, r"1500"),
        (2, {}, r"1"),
        (
            80,
            {"PYTHONIOENCODING": "ascii"},
            r"1500/1500 [|]#+[|] loss 0.0857 [.] 1.78M tokens/s [.] MFU 43.2 %",
        ),
    ],
)
def test_the_bar_is_one_line_of_any_terminal(columns, environment, last):
    rows = on_a_terminal(columns, **environment)
    said = -(-len("said") // (columns or 80))  # rows
    assert "".join(rows[:said]) == "said" and rows[said + 1 :] == [""], rows
    assert re.fullmatch(last, rows[said]) and len(rows[said]) < (columns or 80), rows
    assert len(rows[said]) == (columns or 80) - 3 or columns not in (0, 60, 80), (
        "the bar takes what is left, but for a ^C"
    )


@pytest.mark.parametrize(
    "step, bar",
    [
        (0, "    "),
        (1, "    "),
        (5, "▏   "),
        (40, "█   "),
        (100, "██▌ "),
        (159, "███▉"),
        (160, "████"),
    ],
)
def test_the_bar_s_cells_fill_up(step, bar):
    assert (
        bar_line(step, 160, {"loss": "loss 2.0"}, len(f"{step}/160 |    | loss 2.0^C"))
        == f"{step}/160 |{bar}| loss 2.0"
    )


def test_a_terminal_that_cannot_erase_gets_lines():
    rows = on_a_terminal(80, TERM="dumb")
    assert (
        rows[0].startswith("step 61/1500 · loss 2.0239 · ")
        and len(rows) > 5
        and not any("█" in row for row in rows)
    )


# --- a search -------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(stream: io.StringIO, seconds: list[float], shown: bool = True) -> str:
    """What a search says that begins at 0 and tells at these times."""
    clock = iter([0.0, *seconds])
    with SearchProgress("tables", stream, shown, lambda: next(clock)) as progress:
        for i in range(len(seconds)):
            progress(f"order {i}", i / len(seconds))
    return stream.getvalue()


def test_lines_every_few_seconds_where_there_is_no_terminal():
    text = said(io.StringIO(), [0.1, 4.9, 5.0, 6.0, 9.9, 10.1, 80.0, 81.0])
    assert (
        text
        == "tables: 25%, order 2, 0:05\ntables: 62%, order 5, 0:10\ntables: 75%, order 6, 1:20\n"
    )


def test_one_line_in_place_on_a_terminal_and_none_left():
    text = said(Terminal(), [0.5, 1.0, 1.05, 70.0])
    drawn = text.removesuffix("\r\x1b[K").split("\r")
    assert drawn[0] == "" and text.endswith("\x1b[K\r\x1b[K") and "\n" not in text
    assert [line.removesuffix("\x1b[K") for line in drawn[1:]] == [
        "tables [#####...............]  25% order 1, 0:01",
        "tables [###############.....]  75% order 3, 1:10",
    ]


def test_nothing_where_it_is_short_or_another_process_speaks():
    assert (
        said(io.StringIO(), [0.1, 4.0])
        == said(Terminal(), [0.1, 0.9])
        == said(io.StringIO(), [10.0, 20.0], shown=False)
        == ""
    )
