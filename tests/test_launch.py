"""launch.py, with small programs instead of training: output, failures, signals, and that nothing
stays behind."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from support import ROOT

from jaxtrain import launch

# Each process writes its id to a file, so that the test can see whether it is still there.
PROGRAM = """
import os, signal, subprocess, sys, time
number = next(a for a in sys.argv if a.startswith("--process_id="))[-1]
open(f"pid{number}", "w").write(str(os.getpid()))
def others():
    return all(os.path.exists(f"pid{n}") for n in "01")
def wait():
    while not others():
        time.sleep(0.01)
"""


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie that nobody has waited for does not."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


class Launched:
    """A launcher of two processes in a folder, running a program of a test."""

    def __init__(self, folder: pathlib.Path, program: str, *arguments: str):
        (folder / "program.py").write_text(PROGRAM + program)
        self.folder = folder
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jaxtrain.launch",
                "--module=program",
                "--devices_per_process=3",
                "--",
                *arguments,
            ],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self, *names: str) -> list[int]:
        paths = [self.folder / name for name in names]
        wait_for(lambda: all(path.exists() and path.read_text() for path in paths))
        return [int(path.read_text()) for path in paths]

    def end(self) -> tuple[int, list[str], list[str]]:
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out.splitlines(), err.splitlines()


@pytest.fixture
def launch_program(tmp_path):
    started = []

    def start(program: str, *arguments: str) -> Launched:
        started.append(Launched(tmp_path, program, *arguments))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.communicate()


def test_every_line_has_its_process_number(launch_program):
    """And stays on its stream."""
    status, out, err = launch_program(
        "print('a'); print('b', sys.argv[1:], file=sys.stderr)", "--x=1", "y z"
    ).end()
    assert (status, sorted(out)) == (0, ["[0] a", "[1] a"])
    said = sorted(err)
    assert len(said) == 2
    port = said[0].split("localhost:")[1].split("'")[0]
    for number, line in enumerate(said):
        flags = [
            "--x=1",
            "y z",
            f"--coordinator=localhost:{port}",
            "--processes=2",
            "--cpu_devices=3",
            f"--process_id={number}",
        ]
        assert line == f"[{number}] b {flags}"


def test_one_that_fails_ends_the_others_and_has_the_last_word(launch_program):
    launched = launch_program(
        """
wait()
if number == "1":
    print("so many lines\\n" * 50 + "the reason")
    sys.exit(7)
time.sleep(1000)
"""
    )
    pids = launched.pids("pid0", "pid1")
    status, out, err = launched.end()
    assert status == 7
    assert err[0] == "process 1 failed with status 7; its last lines:"
    assert err[-1] == "the reason" and len(err) == 1 + launch.LAST_LINES
    assert out.count("[1] so many lines") == 50
    assert not any(alive(pid) for pid in pids)


def test_an_error_of_all_processes_is_said_once(launch_program):
    """At its first process, and not again as a last line; gloo's lines of success are left out, and
    one that is no success is not."""
    launched = launch_program(
        """
wait()
connected = "[Gloo] Rank 0 is connected to {} peer ranks. Expected number of connected peer ranks "
print((connected + "is : 1").format(1))
print((connected + "is : 1").format(0), flush=True)
time.sleep(0.5)
print("error: the same", file=sys.stderr)
sys.exit(2)
"""
    )
    status, out, err = launched.end()
    assert status == 2 and len(out) == 2 and all("connected to 0 peer" in line for line in out)
    first, last = err
    assert first[3:] == " error: the same" and last[9:] == " failed with status 2"


def test_an_error_of_one_process_is_never_lost(launch_program):
    launched = launch_program(
        """
wait()
print(f"error: of {number}" if number == "1" else "error: of the others", file=sys.stderr)
sys.exit(2)
"""
    )
    _, _, err = launched.end()
    assert {"[1] error: of 1", "[0] error: of the others"} <= {*err}


def test_one_that_is_killed_is_a_failure(launch_program):
    launched = launch_program("wait()\ntime.sleep(1000)")
    pids = launched.pids("pid0", "pid1")
    os.kill(pids[0], signal.SIGKILL)
    status, _, err = launched.end()
    assert status == 128 + signal.SIGKILL
    assert err == ["process 0 failed with status 137; its last lines:"]
    assert not alive(pids[1])


def test_one_that_does_not_listen_is_killed(launch_program, monkeypatch):
    launched = launch_program(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait()
if number == "0":
    sys.exit(3)
time.sleep(1000)
"""
    )
    pids = launched.pids("pid0", "pid1")
    assert launched.end()[0] == 3
    assert not alive(pids[1])


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGINT],
        [signal.SIGTERM],
        [signal.SIGHUP],
        [signal.SIGHUP, signal.SIGHUP, signal.SIGTERM],
    ],
)
def test_a_signal_is_passed_on_and_waited_for(launch_program, numbers):
    """A terminal that closes may send more than one."""
    launched = launch_program(
        """
def stop(received, frame):
    print("received", received)
    for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(n, signal.SIG_IGN)
    time.sleep(0.5)
    print("saved")
    sys.exit(0)
for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(n, stop)
open(f"ready{number}", "w").write("1")
while True:
    time.sleep(0.01)
"""
    )
    launched.pids("ready0", "ready1")
    for number in numbers:
        os.kill(launched.process.pid, number)
        time.sleep(0.1)
    status, out, err = launched.end()
    assert (status, err) == (0, [])
    assert sorted(out) == sorted(
        f"[{n}] {word}" for n in (0, 1) for word in (f"received {int(numbers[0])}", "saved")
    )


def test_its_output_closes_and_its_processes_go_on(launch_program):
    launched = launch_program(
        """
wait()
print("begun")
while not os.path.exists("closed"):
    time.sleep(0.01)
for line in range(10_000):
    print("line", line)
sys.exit(5 if number == "1" else 0)
"""
    )
    assert launched.process.stdout.readline().endswith(" begun\n")
    launched.process.stdout.close()
    (launched.folder / "closed").touch()
    err = launched.process.stderr.read().splitlines()
    assert launched.process.wait(timeout=30) == 5
    assert err[0].startswith(
        "warning: standard output cannot be written (Broken pipe): this run goes on without its log"
    )
    assert (
        err[1] == "process 1 failed with status 5; its last lines:"
        and err[-1] == "line 9999"
        and len(err) == 2 + launch.LAST_LINES
    )
    launched.process.stdout = None


def test_nohup_is_kept(launch_program):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launched = launch_program("wait()\ntime.sleep(1)\nprint('done')")
    finally:
        signal.signal(signal.SIGHUP, before)
    launched.pids("pid0", "pid1")
    os.kill(launched.process.pid, signal.SIGHUP)
    status, out, err = launched.end()
    assert (status, sorted(out), err) == (0, ["[0] done", "[1] done"], [])


def test_a_second_signal_kills(launch_program):
    launched = launch_program(
        """
signal.signal(signal.SIGINT, lambda received, frame: print("no"))
open(f"ready{number}", "w").write("1")
while True:
    time.sleep(0.01)
"""
    )
    launched.pids("ready0", "ready1")
    pids = launched.pids("pid0", "pid1")
    os.kill(launched.process.pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(launched.process.pid, signal.SIGINT)
    status, out, _ = launched.end()
    assert status == 128 + signal.SIGKILL
    assert sorted(out) == ["[0] no", "[1] no"]
    assert not any(alive(pid) for pid in pids)


def test_a_process_that_never_stops_talking_holds_up_no_signal(launch_program):
    launched = launch_program("wait()\nwhile True:\n    print('x')")
    pids = launched.pids("pid0", "pid1")
    os.kill(launched.process.pid, signal.SIGTERM)
    assert launched.end()[0] == 128 + signal.SIGTERM
    assert not any(alive(pid) for pid in pids)


WITH_CHILD = """
child = subprocess.Popen(["sleep", "1000"])
open(f"child{number}", "w").write(str(child.pid))
wait()
"""


def test_no_orphan_when_the_launcher_is_killed(launch_program):
    launched = launch_program(WITH_CHILD + "time.sleep(1000)")
    pids = launched.pids("pid0", "pid1", "child0", "child1")
    assert all(alive(pid) for pid in pids)
    os.kill(launched.process.pid, signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in pids), seconds=5)


def test_no_orphan_of_a_process_that_ended_well(launch_program):
    launched = launch_program(WITH_CHILD)
    pids = launched.pids("child0", "child1")
    assert launched.end()[0] == 0
    wait_for(lambda: not any(alive(pid) for pid in pids), seconds=5)


def test_wrong_flags_start_nothing(capsys):
    for argv, says in (
        (
            ["--proceses=2", "--", "--x"],
            "--proceses is an unknown flag: use --processes=2 (in front of --)",
        ),
        (
            ["--module=absent"],
            "--module='absent' is no Python module here: use --module=jaxtrain.train",
        ),
        (
            ["--module=jaxtrain.shedule"],
            "--module='jaxtrain.shedule' is no Python module here: use --module=jaxtrain.schedule",
        ),
        (
            ["--module=jaxtrain.run"],
            "--module='jaxtrain.run' is no Python module here: use --module=jaxtrain.train",
        ),
        (
            ["--module=--help"],
            "--module='--help' is no Python module here: use --module=jaxtrain.train",
        ),
        (
            [f"--devices_per_process={2**63}"],
            f"--devices_per_process={2**63} must be at most 1024: use --devices_per_process=0",
        ),
        (
            ["--processes=1000003", "--restarts=-1", "--module="],
            "--processes=1000003 must be at most 1024: use --processes=2 --restarts=0 "
            "--module=jaxtrain.train",
        ),
    ):
        assert launch.main(argv) == 2
        assert capsys.readouterr().err == f"error: {says}\n"


def test_gpus_are_shared_out():
    assert [e["JAX_LOCAL_DEVICE_IDS"] for e in launch.environments(2, range(8))] == [
        "0,1,2,3",
        "4,5,6,7",
    ]
    assert [e["JAX_LOCAL_DEVICE_IDS"] for e in launch.environments(2, range(5))] == ["0,1", "2,3"]
    assert all("JAX_LOCAL_DEVICE_IDS" not in e for e in launch.environments(2, range(1)))


RESTARTED = """
import pathlib
starts = pathlib.Path(f"starts{number}")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
count = len(starts.read_text())
while not all(
    pathlib.Path(f"starts{n}").exists() and len(pathlib.Path(f"starts{n}").read_text()) >= count
    for n in "01"
):
    time.sleep(0.01)
ends = {ENDS}
end = ends[count - 1] if count <= len(ends) else 0
if number == "1" and end:
    if end < 0:
        os.kill(os.getpid(), -end)
    sys.exit(end)
if end == 75:
    sys.exit(end)
if end:
    time.sleep(1000)
"""


def test_what_is_started_again():
    assert [status for status in range(256) if launch.goes_on(status)] == [
        74,
        75,
        79,
        80,
        *range(129, 130),
        *range(131, 256),
    ]


@pytest.mark.parametrize(
    ("ends", "restarts", "status", "starts"),
    [((-9, 75), 5, 0, 3), ((80, 80), 1, 80, 2), ((80, 65), 5, 65, 2)],
)
def test_restarts_where_that_helps(tmp_path, ends, restarts, status, starts):
    """To the end; as often as asked for; not where it would end the same way again."""
    (tmp_path / "program.py").write_text(PROGRAM + RESTARTED.replace("{ENDS}", repr(ends)))
    command = [
        sys.executable,
        "-m",
        "jaxtrain.launch",
        "--module=program",
        "--devices_per_process=1",
        f"--restarts={restarts}",
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, done.stderr
    assert [len((tmp_path / f"starts{n}").read_text()) for n in (0, 1)] == [starts, starts]
    assert (
        len([line for line in done.stderr.splitlines() if line.startswith("restart ")])
        == starts - 1
    )


def test_no_restart_after_a_signal_to_the_launcher(launch_program):
    """It came from whoever wants the run to end."""
    launched = launch_program(
        """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open(f"ready{number}", "w").write("1")
while True:
    time.sleep(0.01)
"""
    )
    launched.pids("ready0", "ready1")
    os.kill(launched.process.pid, signal.SIGTERM)
    assert launched.end()[0] == 75


def test_one_that_is_stopped_on_request_is_waited_for(launch_program):
    """A cluster may tell one process alone; the others end in their own time, with the same
    status."""
    launched = launch_program(
        "wait()\nif number == '0':\n    time.sleep(2)\nprint('saved')\nsys.exit(75)"
    )
    status, out, err = launched.end()
    assert (status, err) == (75, []) and sorted(out) == ["[0] saved", "[1] saved"]
