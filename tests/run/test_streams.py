"""Standard streams that are closed, full, of few characters or on a terminal that has hung up, in
processes of their own; a line that is redrawn in its place."""

import io
import os
import pty
import subprocess
import sys

import pytest
from support import ROOT

from jaxtrain.run import streams

PROGRAM = """
import os, sys, threading
from jaxtrain.run import streams

def main(argv):
    if "run" in argv:
        streams.outlive()
    print("résumé × 3 → done", "█▌", "漢", os.fsdecode(b"f\\xff"))
    streams.log("said", "warning: careful")
    if "thread" in argv:
        thread = threading.Thread(target=print, args=["in a thread"])
        thread.start()
        thread.join()
    if "many" in argv:
        for number in range(100_000):
            print("line", number)
    if "raises" in argv:
        raise ValueError("a fault")
    if "interrupted" in argv:
        raise KeyboardInterrupt
    open("file", "w").write("".join(map(str, (
        os.path.exists(f"/proc/self/fd/{n}") for n in range(3)
    ))))
    print("no end of a line", end="")
    streams.write_error("at once ×\\n")
    return 3 if "three" in argv else 0

sys.exit(streams.run(main, sys.argv[1:]))
"""
WHOLE = "résumé × 3 → done █▌ 漢 f\\xff\nsaid\nno end of a line"
ERRORS = "warning: careful\nat once ×\n"


def run(
    tmp_path, words: str = "", redirection: str = "", environment: dict[str, str] | None = None
) -> tuple[int, bytes, bytes]:
    """Status, standard output and standard error of the program in a shell of POSIX."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = f"exec '{sys.executable}' program.py {words} {redirection}"
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("LC_", "LANG", "PYTHONIO", "PYTHONUTF8"))
    }
    clean |= {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"} | (environment or {})
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=clean, capture_output=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


FULL, BAD = "No space left on device", "Bad file descriptor"


def lost(why: str) -> str:
    return f"error: standard output cannot be written ({why}): what this command says is lost\n"


def without_log(why: str) -> str:
    return (
        f"warning: standard output cannot be written ({why}): this run goes on without its log; "
        "metrics.jsonl has the losses\n"
    )


def without_errors(why: str) -> str:
    return (
        f"warning: standard error cannot be written ({why}): this run goes on without warnings "
        "and errors\n"
    )


@pytest.mark.parametrize(
    "words, redirection, status, out, error",
    [
        ("", "", 0, WHOLE, ERRORS),
        ("three", "", 3, WHOLE, ERRORS),
        ("", ">/dev/full", 74, "", lost(FULL)),
        ("three thread", ">/dev/full", 74, "", lost(FULL)),
        ("", ">&-", 74, "", lost(BAD)),
        ("", "<&- >&- 2>&-", 74, "", ""),
        ("", "2>/dev/full", 0, WHOLE, ""),
        ("", "2>&-", 0, WHOLE, ""),
        ("run", ">/dev/full", 0, "", without_log(FULL) + ERRORS),
        ("run three", ">&-", 3, "", without_log(BAD) + ERRORS),
        ("run", "2>/dev/full", 0, WHOLE.replace("said\n", "said\n" + without_errors(FULL)), ""),
        ("run", "2>&-", 0, WHOLE.replace("said\n", "said\n" + without_errors(BAD)), ""),
        ("run", "<&- >&- 2>&-", 0, "", ""),
        ("run", ">/dev/full 2>&1", 0, "", ""),
    ],
)
def test_what_becomes_of_a_command_whose_streams_cannot_be_written(
    tmp_path, words, redirection, status, out, error
):
    found = run(tmp_path, words, redirection)
    assert (found[0], found[1].decode(), found[2].decode()) == (status, out, error)
    if status != 74:
        assert (tmp_path / "file").read_text() == "TrueTrueTrue", (
            "what is opened later takes no standard stream's number"
        )


@pytest.mark.parametrize(
    "words, status, error", [("many", 0, b""), ("many run", 0, without_log("Broken pipe").encode())]
)
def test_a_reader_that_has_seen_enough(tmp_path, words, status, error):
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, "program.py", *words.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline().startswith(b"r")
    process.stdout.close()
    found = process.stderr.read()
    assert process.wait(timeout=60) == status
    assert error in found and b"Traceback" not in found and b"Exception" not in found
    assert (b"at once" in found) == ("run" in words), (
        "a run goes on to its end, another command ends there"
    )


def test_a_traceback_and_ctrl_c_end_as_ever(tmp_path):
    status, out, error = run(tmp_path, "run raises", ">/dev/full")
    assert (
        status == 1
        and error.endswith(b"ValueError: a fault\n")
        and b"Exception ignored" not in error
    )
    assert run(tmp_path, "interrupted") == (
        130,
        WHOLE.removesuffix("no end of a line").encode(),
        b"warning: careful\n\n",
    )


@pytest.mark.parametrize(
    "environment, encoding, line",
    [
        ({"PYTHONIOENCODING": "ascii"}, "ascii", r"r\xe9sum\xe9 x 3 -> done ## \u6f22 f\xff"),
        (
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            "ascii",
            r"r\xe9sum\xe9 x 3 -> done ## \u6f22 f\xff",
        ),
        ({"PYTHONIOENCODING": "latin-1"}, "latin-1", r"résumé × 3 -> done ## \u6f22 f\xff"),
        ({"PYTHONIOENCODING": "cp1252:strict"}, "cp1252", r"résumé × 3 -> done ## \u6f22 f\xff"),
    ],
)
def test_text_degrades_to_what_a_stream_can_carry(tmp_path, environment, encoding, line):
    status, out, error = run(tmp_path, environment=environment)
    assert (status, out.decode(encoding).splitlines()[0]) == (0, line)
    assert error.decode(encoding) == ERRORS.replace("×", "x" if encoding == "ascii" else "×")


RECOVERS = """
import sys, resource
from jaxtrain.run import streams

def main(argv):
    streams.outlive()
    size = lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    size(30)
    streams.log("one")
    streams.log("a line that is longer than there is room for")
    streams.log("another")
    size(resource.RLIM_INFINITY)
    streams.log("two")
    return 0

sys.exit(streams.run(main, []))
"""


def test_a_disk_that_has_room_again(tmp_path):
    """What was lost meanwhile is not known any more, but that it is lost is said in its place. Here
    the room is what a limit leaves."""
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-c", RECOVERS]
        done = subprocess.run(
            command,
            stdout=log,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            text=True,
        )
    said = "one\na line that is longer than\n(lines are missing here: File too large)\ntwo\n"
    assert (done.returncode, (tmp_path / "log").read_text()) == (0, said)
    assert done.stderr == without_log("File too large")


def test_a_stream_that_somebody_has_set_not_to_block(tmp_path):
    """A shell's other programs may: a slow reader is waited for all the same."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "program.py", "many"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    with open(read) as lines:
        assert len(lines.readlines()) == 2 + 100_000 + 1
    assert (process.wait(timeout=60), process.stderr.read()) == (0, ERRORS.encode())


HUNG_UP = """
import os, signal, sys, time
from jaxtrain.run import streams

def main(argv):
    streams.outlive()
    hung_up = []
    signal.signal(signal.SIGHUP, lambda *_: hung_up.append(1))
    print("ready")
    while not hung_up:
        time.sleep(0.01)
    print("to nobody")
    streams.log("warning: to nobody")
    streams.write_error("to nobody")
    return 75

sys.exit(streams.run(main, sys.argv[1:]))
"""


def test_a_terminal_that_has_hung_up():
    """SIGHUP comes, and everything that is written then is an error."""
    pid, terminal = pty.fork()
    if not pid:
        os.execve(
            sys.executable, [sys.executable, "-c", HUNG_UP], os.environ | {"PYTHONPATH": str(ROOT)}
        )
    assert os.read(terminal, 100) == b"ready\r\n"
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75


# --- a terminal's line ----------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(stream: io.StringIO, shown: bool = True) -> str:
    line = streams.TerminalLine(stream, shown)
    line.clear()
    for now, text in ((0.0, "first"), (0.05, "too soon"), (0.2, "x" * 100)):
        line.draw(text, now)
    line.clear()
    line.clear()
    return stream.getvalue()


def test_a_line_on_a_terminal_leaves_nothing():
    assert drawn(Terminal()) == f"\rfirst\x1b[K\r{'x' * (streams.COLUMNS - 1)}\x1b[K\r\x1b[K"


def test_elsewhere_there_is_none(monkeypatch):
    assert drawn(io.StringIO()) == drawn(Terminal(), shown=False) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert drawn(Terminal()) == ""


def test_columns_of_a_table():
    table = [("", "a", "and b"), ("one", "12.5", "x")]
    assert streams.aligned(table, "<>") == ["        a  and b", "one  12.5      x"]
    assert streams.aligned(table) == ["     a     and b", "one  12.5  x"]
