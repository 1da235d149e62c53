"""The lock of a run's folder: who gets it, who is refused, who waits and how long; without jax."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from support import ROOT

from jaxtrain.run import run_lock
from jaxtrain.run.run_lock import FolderError, Holder, Process, RunLock, this_process

ELSEWHERE = Process("elsewhere", "another-boot", "pid:[1]", 7, 70)


class Clock:
    """Time that passes only while somebody sleeps; `then` is called after each sleep with the
    seconds since the start."""

    def __init__(self, then=lambda seconds: None):
        self.now, self._then = 1000.0, then

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._then(self.now - 1000)


def lock(folder, clock=None, **arguments) -> RunLock:
    clock = clock or Clock()
    return RunLock(folder, clock=clock, sleep=clock.sleep, **arguments)


def write_lock(folder, process: Process, beat: int = 5, silence: float = 12.0) -> pathlib.Path:
    """As a run of this process would have left it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / run_lock.NAME
    path.write_bytes(Holder(process, "2026-01-02 03:04:05 UTC", "0123", silence).line(beat))
    return path


@pytest.fixture
def child():
    """A process of this host that only waits."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def as_holder(pid: int) -> Process:
    return dataclasses.replace(this_process(), pid=pid, start=run_lock._proc_entry(pid).start)


# --- alone ----------------------------------------------------------------------------------------


def test_taken_and_removed_with_the_folders_that_it_made(tmp_path):
    own = lock(tmp_path / "runs" / "new")
    own.take()
    values = json.loads((tmp_path / "runs" / "new" / "run.lock").read_text())
    assert (
        values["process"] == dataclasses.asdict(this_process())
        and values["process"]["pid"] == os.getpid()
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", values["since"])
    own.release()
    own.release()
    assert os.listdir(tmp_path) == []


def test_folders_with_something_in_them_stay(tmp_path):
    own = lock(tmp_path / "runs" / "new")
    own.take()
    (tmp_path / "runs" / "new" / "metrics.jsonl").write_text("")
    own.release()
    assert os.listdir(tmp_path / "runs" / "new") == ["metrics.jsonl"]
    kept = tmp_path / "kept"
    kept.mkdir()
    own = lock(kept)
    own.take()
    own.release()
    assert kept.exists() and os.listdir(kept) == []


def test_beats_change_the_bytes_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    own = lock(tmp_path)
    own.take()
    path = tmp_path / run_lock.NAME
    first, inode = path.read_bytes(), path.stat().st_ino
    end = time.monotonic() + 10
    while path.read_bytes() == first:
        assert time.monotonic() < end
        time.sleep(0.005)
    later = path.read_bytes()
    assert len(later) == len(first) and path.stat().st_ino == inode
    assert run_lock.read_holder(later) == run_lock.read_holder(first) is not None
    own.release()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_locked(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="cannot be locked .*: use another --workdir"):
        lock(tmp_path / "file" / "run").take()


# --- the second -----------------------------------------------------------------------------------


def test_a_run_of_this_host_is_refused_at_the_first_beat(tmp_path, child):
    path = write_lock(tmp_path, as_holder(child.pid))
    before = Holder(as_holder(child.pid), "2026-01-02 03:04:05 UTC", "0123", 12.0)
    clock = Clock(lambda seconds: path.write_bytes(before.line(6 if seconds >= 2 else 5)))
    with pytest.raises(FolderError) as error:
        lock(tmp_path, clock).take()
    host = this_process().host
    assert str(error.value) == (
        f"--workdir={str(tmp_path)!r} is in use by the run of process {child.pid} on {host}, "
        "which started 2026-01-02 03:04:05 UTC: "
        "stop that run, or use another --workdir"
    )
    assert 2 <= clock.now - 1000 < 3
    assert os.listdir(tmp_path) == [run_lock.NAME] and path.read_bytes() == before.line(6)


def test_a_run_of_this_host_that_is_stuck_is_refused_too(tmp_path, child):
    write_lock(tmp_path, as_holder(child.pid))
    clock = Clock()
    with pytest.raises(FolderError, match=f"in use by the run of process {child.pid} "):
        lock(tmp_path, clock).take(log=pytest.fail)
    assert 12 <= clock.now - 1000 < 13


def test_a_run_of_this_host_that_is_stopped_is_refused_at_once(tmp_path, child):
    write_lock(tmp_path, as_holder(child.pid))
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    clock = Clock()
    with pytest.raises(FolderError, match=f"in use by the run of process {child.pid} "):
        lock(tmp_path, clock).take()
    assert clock.now == 1000


@pytest.mark.parametrize("end", ["reaped", "zombie", "another start"])
def test_a_run_of_this_host_that_is_gone_is_taken_over_at_once(tmp_path, child, end):
    """Also while its parent has not asked for its end, and when another process has its number."""
    holder = as_holder(child.pid)
    if end == "another start":
        holder = dataclasses.replace(holder, start=holder.start - 1)
    else:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    if end == "reaped":
        child.wait()
    write_lock(tmp_path, holder)
    clock = Clock()
    own = lock(tmp_path, clock)
    own.take(log=pytest.fail)
    assert clock.now == 1000
    assert os.listdir(tmp_path) == [run_lock.NAME]
    assert run_lock.read_holder((tmp_path / run_lock.NAME).read_bytes()).process == this_process()
    own.release()


@pytest.mark.parametrize(
    "field, value", [("host", "other"), ("boot", "other"), ("namespace", "pid:[2]"), ("boot", "")]
)
def test_the_same_number_elsewhere_says_nothing(tmp_path, field, value):
    """Of another host, another boot, another container, or where there is no /proc: silence alone
    counts."""
    holder = dataclasses.replace(this_process(), pid=2**22 + 1, **{field: value})
    write_lock(tmp_path, holder)
    clock = Clock()
    own = lock(tmp_path, clock)
    own.take()
    assert 12 <= clock.now - 1000 < 13.5
    own.release()


def test_a_newcomer_says_that_it_waits(tmp_path):
    write_lock(tmp_path, ELSEWHERE)
    said, clock = [], Clock()
    own = lock(tmp_path, clock)
    own.take(said.append)
    who = "the run of process 7 on elsewhere, which started 2026-01-02 03:04:05 UTC"
    lines = [
        re.fullmatch(
            rf"waiting: {tmp_path} is locked by {who}; it gives no sign of life, and this run "
            r"begins in (\d+) s",
            s,
        )
        for s in said
    ]
    left = [int(line[1]) for line in lines]
    assert len(left) >= 2 and left == sorted(left, reverse=True) and left[0] < 12
    own.release()


def test_a_run_elsewhere_that_beats_is_refused(tmp_path):
    """Clocks do not matter: it is the bytes that change."""
    path = write_lock(tmp_path, ELSEWHERE)
    os.utime(path, (0, 0))
    holder = run_lock.read_holder(path.read_bytes())
    clock = Clock(lambda seconds: path.write_bytes(holder.line(5 + int(seconds / 11))))
    with pytest.raises(
        FolderError,
        match="in use by the run of process 7 on elsewhere, which started 2026-01-02 03:04:05 UTC",
    ):
        lock(tmp_path, clock).take()
    assert 11 <= clock.now - 1000 < 12


def test_the_newcomer_s_own_sleep_is_nobody_s_silence(tmp_path):
    """It is stopped for an hour, or the file system is away: it has looked twice, not for an
    hour."""
    path = write_lock(tmp_path, ELSEWHERE)
    holder = run_lock.read_holder(path.read_bytes())

    def then(seconds):
        if seconds < 1:
            clock.now += 3600
        elif seconds > 3603:
            path.write_bytes(holder.line(6))

    clock = Clock(then)
    with pytest.raises(FolderError, match="in use by"):
        lock(tmp_path, clock).take()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'{"beat":            0, "process": {"host',
        b"[]\n",
        b'{"process": {"pid": "x"}}',
        b"\xff\xfe",
    ],
)
def test_a_lock_that_is_not_whole_is_taken_over_after_the_silence(tmp_path, text):
    """A crash between the creation and the writing; another program's file."""
    (tmp_path / run_lock.NAME).write_bytes(text)
    clock, said = Clock(), []
    own = lock(tmp_path, clock)
    own.take(said.append)
    assert 12 <= clock.now - 1000 < 13 and "a process that has not written who it is" in said[0]
    assert os.listdir(tmp_path) == [run_lock.NAME]
    own.release()


def test_a_lock_that_is_finished_later_has_a_holder(tmp_path, child):
    path = tmp_path / run_lock.NAME
    path.write_bytes(b"")
    holder = Holder(as_holder(child.pid), "2026-01-02 03:04:05 UTC", "0123", 12.0)
    clock = Clock(
        lambda seconds: path.write_bytes(holder.line(int(seconds))) if seconds > 1 else None
    )
    with pytest.raises(FolderError, match=f"process {child.pid} "):
        lock(tmp_path, clock).take()
    assert clock.now - 1000 < 4


def test_a_newcomer_that_died_while_it_took_over_is_taken_over_too(tmp_path, child):
    """Its successor file is there: of this host, so at once; half written, so after a silence."""
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    dead = as_holder(child.pid)
    for text, most in ((Holder(dead, "", "4567", 12.0).line(0), 0.0), (b"", 13.0)):
        path = write_lock(tmp_path, dead)
        own, clock = lock(tmp_path), Clock()
        # The name of the successor is the newcomer's business: one that dies leaves it.
        names = []
        create = own._create
        own._create = lambda p, names=names, create=create: names.append(p) or create(p)
        own.take()
        own.release()
        successor = names[1]
        assert successor.name.startswith(run_lock.NAME + ".")
        write_lock(tmp_path, dead)
        successor.write_bytes(text)
        own = lock(tmp_path, clock)
        own.take()
        assert clock.now - 1000 <= most and os.listdir(tmp_path) == [path.name]
        own.release()


# --- lost -----------------------------------------------------------------------------------------


def test_a_lost_lock_is_noticed_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    for damage, status, message in (
        (
            lambda: (tmp_path / run_lock.NAME).unlink(),
            74,
            "run.lock is gone, so another run may use the folder: this run ends",
        ),
        (
            lambda: write_lock(tmp_path, ELSEWHERE),
            2,
            "was taken over by the run of process 7 on elsewhere, which started .*: this run ends",
        ),
        (
            lambda: (tmp_path / run_lock.NAME).write_text("?"),
            74,
            "run.lock was overwritten, so another run may use the folder: this run",
        ),
    ):
        said, noticed = [], threading.Event()
        own = lock(
            tmp_path,
            lost=lambda error, said=said, noticed=noticed: (said.append(error), noticed.set()),
        )
        own.take()
        damage()
        assert noticed.wait(10)
        assert (
            re.search(message, str(said[0]))
            and "\n" not in str(said[0])
            and said[0].status == status
        )
        before = sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir())
        own.release()
        assert sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir()) == before
        for path in tmp_path.iterdir():
            path.unlink()


# --- real processes -------------------------------------------------------------------------------

# In each round: takes the lock as soon as the gate opens, says so, and holds it until it gets a
# line; or says that it is refused.
RACER = """
import os, sys
from jaxtrain.run import run_lock
run_lock.BEAT_S = 0.05
for n in range(int(sys.argv[2])):
    folder = os.path.join(sys.argv[1], str(n))
    lock = run_lock.RunLock(folder)
    print("ready", flush=True)
    while not os.path.exists(folder + ".gate"):
        pass
    try:
        lock.take()
        print("won", flush=True)
    except run_lock.FolderError as error:
        print("refused", error, flush=True)
    sys.stdin.readline()
    lock.release()
"""
RACERS, ROUNDS = 3, 10


@pytest.mark.parametrize("first", ["nobody", "a dead run"])
def test_of_processes_at_once_one_wins(tmp_path, child, first):
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    words = [sys.executable, "-c", RACER, str(tmp_path), str(ROUNDS)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    racers = [
        subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(RACERS)
    ]
    try:
        for n in range(ROUNDS):
            if first == "a dead run":
                write_lock(tmp_path / str(n), as_holder(child.pid))
            assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * RACERS
            (tmp_path / f"{n}.gate").write_text("")
            said = [racer.stdout.readline().split() for racer in racers]
            assert sorted(words[0] for words in said) == ["refused"] * (RACERS - 1) + ["won"], said
            assert os.listdir(tmp_path / str(n)) == [run_lock.NAME]
            for racer in racers:
                racer.stdin.write("\n")
                racer.stdin.flush()
        assert [racer.wait(20) for racer in racers] == [0] * RACERS
        assert [
            os.listdir(tmp_path / str(n)) for n in range(ROUNDS) if (tmp_path / str(n)).exists()
        ] in ([], [[]] * ROUNDS)
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()


def test_of_threads_at_once_one_wins(tmp_path):
    """Many more races for a dead lock, in one process: each newcomer with a token of its own."""
    for n in range(30):
        folder = tmp_path / str(n)
        path = write_lock(folder, dataclasses.replace(this_process(), start=1))
        locks, won, gate = [RunLock(folder) for _ in range(4)], [], threading.Barrier(4)

        def newcomer(own, won=won, gate=gate, path=path):
            gate.wait()
            for _ in range(5):
                if own._try(path):
                    won.append(own)
                    return

        threads = [threading.Thread(target=newcomer, args=(own,)) for own in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and os.listdir(folder) == [run_lock.NAME]
        assert run_lock.read_holder(path.read_bytes()) == won[0]._holder
