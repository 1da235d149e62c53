"""When a watchdog ends its process, and with which words; the process's end is replaced. Real runs:
tests/chaos."""

import dataclasses
import os
import threading
import time

import pytest

from jaxtrain.cli import FlagsError
from jaxtrain.data.tokenizer import DataError
from jaxtrain.run import watchdog
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.peers import Beat, Ending, Peers
from jaxtrain.run.run_lock import LostLockError
from jaxtrain.run.wall_clock import Current, Phase, WallClock
from jaxtrain.run.watchdog import Patience, Watchdog

STEP, SAVE = Phase.STEPPING, Phase.SAVING


def stepping(seconds: float = 1.0) -> Current:
    return Current(STEP, seconds)


def test_the_first_step_has_more_time():
    patience = Patience(30, now=0)
    patience.finished(0, now=90)
    assert patience.limit(stepping()) == 600
    patience.finished(1, now=100)
    assert patience.limit(stepping()) == 30 and patience.waited(stepping(), now=129) == 29


def test_a_step_may_last_three_times_the_longest():
    patience = Patience(30, now=0)
    for step, now in ((0, 0), (1, 100), (2, 120), (3, 125), (4, 130)):
        patience.finished(step, now)
    assert patience.limit(stepping()) == 60
    assert patience.waited(stepping(), now=191) > 60 and patience.step == 4


def test_the_second_step_may_last_as_long_as_the_first():
    """Steps of 40 s were a hang after 30 s."""
    patience = Patience(30, now=0)
    patience.finished(0, now=0)
    patience.finished(1, now=40)
    assert patience.limit(stepping()) == 120
    patience.finished(2, now=50)
    assert patience.limit(stepping()) == 30


def test_a_save_is_no_part_of_a_step():
    patience = Patience(30, now=0)
    patience.finished(0, now=0)
    patience.finished(1, now=10)
    assert (
        patience.waited(Current(SAVE, 50), now=60) == 50
        and patience.limit(Current(SAVE, 50)) == 600
    )
    assert patience.waited(stepping(), now=61) == 1
    patience.finished(2, now=62)
    assert patience.limit(stepping()) == 30


def test_other_parts_learn_too():
    patience = Patience(30, now=0)
    patience.waited(Current(SAVE, 400), now=400)
    assert patience.limit(Current(SAVE, 400)) == 600
    patience.waited(stepping(), now=401)
    assert (
        patience.limit(Current(SAVE, 1)) == 1200
        and patience.limit(Current(Phase.EVALUATING, 1)) == 600
    )


def test_compiling_has_no_limit():
    assert Patience(30, now=0).limit(Current(Phase.COMPILING, 1e6)) == float("inf")


def test_what_did_not_run_was_not_late():
    patience = Patience(30, now=0)
    patience.finished(0, now=0)
    patience.finished(1, now=10)
    patience.suspended(1000)
    assert patience.waited(stepping(), now=1015) == 5


class World:
    """Watchdogs of processes that share this one, with what they end with."""

    def __init__(self, folder, processes: int, hang_after: float, monkeypatch):
        monkeypatch.setattr(watchdog, "BEAT_S", 0.05)
        monkeypatch.setattr(watchdog, "HEAD_START_S", 5.0)
        monkeypatch.setattr(watchdog, "OWN_WORD_S", 0.2)
        monkeypatch.setattr(watchdog, "GOODBYE_S", 1.0)
        self.peers = (
            [Peers(number, processes) for number in range(processes)] if processes > 1 else [None]
        )
        if processes > 1:
            address = self.peers[0].listen()
            for peers in self.peers[1:]:
                peers.connect(address, f"host{peers.process}")
            while len(self.peers[0].peers) < processes - 1:
                self.peers[0].poll(0.1)
        self.clocks = [WallClock() for _ in self.peers]
        self.ended: dict[int, int] = {}
        self.over = [threading.Event() for _ in self.peers]
        self.watchdogs = [
            Watchdog(
                folder,
                peers,
                clock,
                hang_after,
                end=lambda status, number=number: self._end(number, status),
            )
            for number, (peers, clock) in enumerate(zip(self.peers, self.clocks))
        ]

    def _end(self, number: int, status: int) -> None:
        self.ended[number] = status
        if self.peers[number]:
            for connection in list(self.peers[number]._peer_of):
                self.peers[number]._drop(connection)
        self.over[number].set()

    def step(self) -> None:
        """Every process is after step 7, and at the next."""
        for clock, each in zip(self.clocks, self.watchdogs):
            clock.enter(STEP)
            each.finished(6)
            each.finished(7)

    def wait(self, *numbers: int) -> None:
        for number in numbers:
            assert self.over[number].wait(20)


@pytest.fixture
def world(tmp_path, monkeypatch):
    worlds = []

    def make(processes: int, hang_after: float) -> World:
        worlds.append(World(tmp_path, processes, hang_after, monkeypatch))
        return worlds[-1]

    yield make
    for each in worlds:
        for one in each.watchdogs:
            one._over.set()
            if one._thread.is_alive():
                one._thread.join()


def start(world: World, *numbers: int) -> None:
    world.step()
    for number in numbers:
        world.watchdogs[number]._thread.start()


def test_a_process_alone_hangs(world, tmp_path, capfd):
    alone = world(1, 0.3)
    start(alone, 0)
    alone.wait(0)
    assert alone.ended == {0: ExitStatus.HUNG}
    error = capfd.readouterr().err
    assert error.startswith(
        "error: hung after step 7: no step was finished for 0 s; it is at stepping; the "
        "stacks of all threads are in "
    )
    stacks = (tmp_path / "hang" / "step-7-process-0.txt").read_text()
    assert (
        stacks.startswith("process 0, after step 7, at stepping for")
        and "test_watchdog.py" in stacks
        and "in wait" in stacks
    )


def test_stacks_that_cannot_be_written_cost_a_line(world, tmp_path, capfd):
    (tmp_path / "hang").write_text("a file")
    alone = world(1, 0.3)
    start(alone, 0)
    alone.wait(0)
    warning, error = capfd.readouterr().err.splitlines()
    assert alone.ended == {0: ExitStatus.HUNG} and error.startswith("error: hung after step 7: ")
    assert warning == f"warning: the stacks are not in {tmp_path}/hang (File exists)"


def test_the_process_that_waits_for_data_is_behind(world, tmp_path, capfd):
    three = world(3, 1.5)
    three.clocks[1].enter(Phase.WAITING)
    start(three, 1, 2, 0)
    three.clocks[1].enter(Phase.WAITING)
    three.wait(0, 1, 2)
    assert set(three.ended.values()) == {ExitStatus.HUNG}
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3 and all(
        f"process 1 (host1, pid {os.getpid()}) is behind, at data_wait after step 7" in line
        for line in lines
    )
    assert len(list((tmp_path / "hang").iterdir())) == 3


def test_what_waits_for_a_store_does_not_hang_nor_those_that_wait_for_it(world, monkeypatch):
    """Only process 1 knows that the store is away, and process 2 hears of it through process 0;
    when it has answered, limits count from then."""
    away: list[bool] = [True]
    three = world(3, 0.3)
    monkeypatch.setattr(watchdog, "HEAD_START_S", 0.3)
    beat = Watchdog._beat

    def beat_of(self) -> Beat:
        is_away = self is three.watchdogs[1] and bool(away)
        return dataclasses.replace(beat(self), excused=beat(self).excused or is_away)

    monkeypatch.setattr(Watchdog, "_beat", beat_of)
    start(three, 1, 2, 0)
    assert not three.over[0].wait(1.5) and not three.over[1].is_set() and not three.ended
    away.clear()
    three.wait(0, 1, 2)
    assert set(three.ended.values()) == {ExitStatus.HUNG}
    other = world(1, 0.3).watchdogs[0]
    with watchdog.excused("s3://bucket/a"):
        assert beat(other).excused
    assert not beat(other).excused


def test_a_silent_process_is_behind(world, capfd):
    """Its connection stays open, as that of a process that is stopped."""
    two = world(2, 0.4)
    start(two, 0)
    two.wait(0)
    assert two.ended == {0: ExitStatus.HUNG}
    assert (
        f"process 1 (host1, pid {os.getpid()}) is behind: stopped, or out of reach"
        in capfd.readouterr().err
    )


def test_a_silent_main_process_is_found_by_the_others(world, capfd):
    two = world(2, 0.4)
    start(two, 1)
    two.wait(1)
    assert two.ended == {1: ExitStatus.HUNG} and "process 0 (" in capfd.readouterr().err


def test_a_lost_peer_ends_all_at_once(world, capfd):
    three = world(3, 100.0)
    start(three, 0, 2)
    three.peers[1].close()
    three.wait(0, 2)
    assert three.ended == {0: ExitStatus.LOST_PEER, 2: ExitStatus.LOST_PEER}
    assert (
        capfd.readouterr().err.splitlines()
        == [f"error: process 1 (host1, pid {os.getpid()}) has gone without a word, after step 7"]
        * 2
    )


class JaxRuntimeError(RuntimeError):
    """By its name jax's."""


def test_a_collective_that_fails_before_all_know_who_is_gone(world, monkeypatch):
    """The process whose collective fails ends as the others do, and not with a fault of its own."""
    monkeypatch.setattr(watchdog, "ABORT_S", 2.0)
    three = world(3, 100.0)
    three.step()
    three.watchdogs[0]._thread.start()
    with pytest.raises(JaxRuntimeError), three.watchdogs[2].watching():
        threading.Timer(0.2, three.peers[1].close).start()
        raise JaxRuntimeError("Gloo all-reduce failed: Connection reset by peer")
    three.wait(0, 2)
    assert three.ended == {0: ExitStatus.LOST_PEER, 2: ExitStatus.LOST_PEER}


@pytest.mark.parametrize(
    ("error", "status"),
    [(DataError("a broken line"), 65), (FlagsError("mesh.data=3 bad"), 2), (KeyError(1), 1)],
)
def test_what_ends_one_process_ends_the_others_with_its_status(world, capfd, error, status):
    two = world(2, 100.0)
    two.step()
    two.watchdogs[0]._thread.start()
    with pytest.raises(type(error)), two.watchdogs[1].watching():
        raise error
    two.wait(0)
    assert two.ended == {0: status}
    assert capfd.readouterr().err.startswith(
        f"error: process 1 (host1, pid {os.getpid()}) ended with status {status}: "
    )


def test_a_good_end_ends_nobody(world):
    two = world(2, 100.0)
    two.step()
    with two.watchdogs[0].watching():
        with two.watchdogs[1].watching():
            pass
        time.sleep(0.5)
    assert two.ended == {}


def test_zero_never_hangs(world):
    alone = world(1, 0.0)
    start(alone, 0)
    time.sleep(0.5)
    assert alone.ended == {}


def test_an_ending_is_carried_out_once_told(world, capfd):
    two = world(2, 100.0)
    start(two, 1)
    two.peers[0].end_all(Ending(80, "process 5 (x) has gone"))
    two.wait(1)
    assert two.ended == {1: 80} and capfd.readouterr().err == "error: process 5 (x) has gone\n"


def test_an_error_beside_the_loop_ends_all_processes(world, capfd, monkeypatch):
    """As of the thread that holds the run's lock: each with its line and status, at once."""
    two, ended = world(2, 100.0), []
    start(two, 1)
    monkeypatch.setattr(watchdog, "_active", [two.watchdogs[0]])
    monkeypatch.setattr(watchdog.os, "_exit", ended.append)
    watchdog.end_process(LostLockError("run.lock is gone"))
    two.wait(1)
    assert (
        ended == [74]
        and two.ended == {1: 74}
        and capfd.readouterr().err == "error: run.lock is gone\n" * 2
    )


def test_an_evaluation_of_ones_own_has_its_time(world):
    one = world(1, hang_after=0.01)
    one.step()
    one.clocks[0].enter(Phase.EVALUATING)
    time.sleep(0.3)  # more than 20 × hang_after
    one.watchdogs[0].evaluate_s = 60.0
    assert one.watchdogs[0]._look(time.monotonic()) is None
    one.watchdogs[0].evaluate_s = 0.0
    ending = one.watchdogs[0]._look(time.monotonic())
    assert ending and "evaluating took 0 s" in ending.text
