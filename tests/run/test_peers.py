"""Messages between processes, here all in one process over real connections; and stragglers, from
beats."""

import concurrent.futures
import os
import socket
import time

import pytest

from jaxtrain.run import peers as peers_module
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.peers import (
    WINDOW_S,
    Address,
    Beat,
    Ending,
    Peers,
    PeersError,
    Slowest,
    Stragglers,
    meet,
)


@pytest.fixture
def three():
    """Process 0 and the two that are connected to it."""
    processes = [Peers(number, 3) for number in range(3)]
    address = processes[0].listen()
    for peers in processes[1:]:
        peers.connect(address, f"host{peers.process}")
    until(processes[0], lambda: len(processes[0].peers) == 2)
    yield processes
    for peers in processes:
        peers.close()


def until(peers: Peers, condition) -> None:
    for _ in range(100):
        if condition():
            return
        peers.poll(0.1)
    raise AssertionError("waited too long")


def test_each_knows_the_other_and_how_far_it_is(three):
    main, first, second = three
    first.beat(Beat(3, "waiting", 1.5))
    second.beat(Beat(4, "stepping", 0.5))
    until(main, lambda: main.peers[1].beat.step == 3 and main.peers[2].beat.step == 4)
    assert str(main.peers[1]) == f"process 1 (host1, pid {os.getpid()})" and main.peers[
        1
    ].beat == Beat(3, "waiting", 1.5)
    heard = first.peers[0].heard
    main.beat(Beat(5))
    until(first, lambda: first.peers[0].beat.step == 5)
    assert first.peers[0].heard > heard and list(first.peers) == [0]


def test_one_that_dies_and_one_that_says_bye(three):
    main, first, second = three
    second.say_bye(Ending(65, "a broken line", 2))
    for peers in (first, second):
        for connection in list(peers._peer_of):
            # as the kernel does for a process that has been killed
            connection.shutdown(socket.SHUT_RDWR)
    until(main, main.all_gone)
    assert main.peers[1].gone and main.peers[1].bye is None
    assert main.peers[2].bye == Ending(65, "a broken line", 2)


def test_process_0_ends_all(three):
    main, first, second = three
    main.end_all(Ending(79, "hung"))
    for peers in (first, second):
        until(peers, lambda peers=peers: peers.ending is not None)
        assert peers.ending == Ending(79, "hung")


def test_strangers_are_dropped(three):
    main, first, _ = three
    address = Address(("localhost",), main._listener.getsockname()[1], "another token")
    stranger = Peers(1, 3)
    stranger.connect(address, "elsewhere")
    with socket.create_connection(("localhost", address.port)) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(main, lambda: not main._selector.select(0) and len(main._lines) == 2)
        until(stranger, stranger.all_gone)
    assert main.peers[1].host == "host1" and not main.peers[1].gone
    first.end_all(Ending(80, "only process 0 may end all", 1))
    until(main, lambda: main.peers[1].bye is not None)
    assert main.ending is None
    stranger.close()


def test_a_main_process_out_of_reach():
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        PeersError,
        match=rf"^port {port} of process 0 cannot be reached \(localhost: Connection refused\)$",
    ):
        Peers(1, 2).connect(Address(("localhost",), port, ""), "here")


# --- the meeting ----------------------------------------------------------------------------------


@pytest.fixture
def address(monkeypatch):
    """Of a port that is free; all that a meeting waits for is short."""
    monkeypatch.setattr(peers_module, "TELLING_S", 0.5)
    monkeypatch.setattr(peers_module, "MEETING_S", 1.5)
    with socket.create_server(("localhost", 0)) as server:
        return f"localhost:{server.getsockname()[1]}"


def met(address: str, *of_each: tuple) -> list[Ending]:
    """How the meeting ends in processes that are threads. of_each: the number of processes, that of
    this one and the reason of its refusal, if any."""
    with concurrent.futures.ThreadPoolExecutor(len(of_each)) as threads:
        return list(threads.map(lambda process: meet(address, *process), of_each))


@pytest.mark.parametrize("bound", ["", "0.0.0.0", "[::]", "[::]:{port}"])
def test_all_meet_and_the_port_is_free(address, bound, monkeypatch):
    bound = bound.format(port=address.rpartition(":")[2])
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", bound)
    assert met(address, (3, 0), (3, 1), (3, 2)) == [Ending()] * 3
    socket.create_server(("localhost", int(address.rpartition(":")[2]))).close()
    assert meet() == meet(address) == Ending(), "jax finds the others by itself"


REFUSED = "process 1 ({host}, pid {pid}): mesh.stage=7 is too much"


@pytest.mark.parametrize(
    "of_each, text",
    [
        ([(3, 0), (3, 1, "mesh.stage=7 is too much"), (3, 2)], REFUSED),
        ([(3, 0, "no such flag"), (3, 1), (3, 2)], "no such flag"),
        (
            [(2, 0), (3, 1), (3, 2)],
            "it has --processes=3, process 0 2: give all the same",
        ),
        ([(3, 0), (3, 1), (3, 1)], "has the same --process_id: give each its own"),
    ],
)
def test_all_are_told_what_is_wrong_with_one(address, of_each, text):
    first, *others = met(address, *of_each)
    assert first.status == ExitStatus.BAD_CONFIG and all(other == first for other in others)
    expected = text.format(host=socket.gethostname(), pid=os.getpid())
    assert first.text.endswith(expected) and "\n" not in first.text


def test_one_that_is_refused_like_all_others_waits_for_nobody(address):
    began = time.monotonic()
    met(address, (2, 0, "no such flag"), (2, 1, "no such flag"))
    assert time.monotonic() - began < 0.45


def test_one_that_does_not_come_is_named(address):
    endings = met(address, (4, 0), (4, 2))
    assert {ending.status for ending in endings} == {ExitStatus.LOST_PEER}
    assert endings[0].text == f"of 4 processes these did not come to {address}: 1, 3"
    alone = meet(address, 2, 1)
    assert alone.status == ExitStatus.LOST_PEER
    assert alone.text == f"process 0 at {address} did not come or has gone"


def test_a_port_that_something_else_uses(address):
    """It is not disturbed by process 0; the others connect, and say nothing that it would take for
    jax's."""
    with socket.create_server(("localhost", int(address.rpartition(":")[2]))):
        for process, text in (
            (0, rf"cannot be used on {socket.gethostname()} (process 0): Address already in use: "),
            (1, f"process 0 at {address} of this run is not what answers there: end what uses "),
        ):
            ending = meet(address, 2, process)
            assert ending.status == ExitStatus.BAD_CONFIG and text in ending.text


# --- stragglers -----------------------------------------------------------------------------------


def run(
    stragglers: Stragglers,
    own: dict[int, float],
    seconds: int,
    data_wait: float = 0.0,
    begin: tuple[int, float] = (1, 100.0),
) -> None:
    """Beats once a second of processes that take a step in 0.2 s, with so much time of their own in
    each."""
    first, now = begin
    for second in range(seconds + 1):
        step = first + 5 * second
        beats = {
            p: (
                f"process {p} (host{p})",
                Beat(step, own_s=each * step, data_wait_s=data_wait * step),
            )
            for p, each in own.items()
        }
        stragglers.take(beats, now + second)


def test_the_process_with_most_time_of_its_own_is_named():
    stragglers = Stragglers()
    own = {0: 0.020, 1: 0.010, 2: 0.100, 3: 0.012}
    run(stragglers, own, int(WINDOW_S) - 1, 0.09)
    assert stragglers.slowest is None, "the window is not over"
    run(stragglers, own, int(WINDOW_S), 0.09)
    slowest = stragglers.slowest
    assert (slowest.process, slowest.steps) == (2, (2, 51))
    assert (slowest.own_s, slowest.data_wait_s, slowest.behind_s, slowest.step_s) == pytest.approx(
        (0.1, 0.09, 0.088, 0.2)
    )
    text = (
        "warning: steps 2 to 51: process 2 (host2) is slowest, with 0.100 s of its own a step "
        "(0.090 waiting for data), the median 0.012"
    )
    assert slowest.line() == f"{text}; a step takes 0.200 s"


def test_nobody_is_named_for_little():
    stragglers = Stragglers()
    run(stragglers, {0: 0.025, 1: 0.010, 2: 0.011}, 30)
    assert stragglers.slowest is None


def test_of_two_the_slower_is_named():
    stragglers = Stragglers()
    run(stragglers, {0: 0.010, 1: 0.060}, 15)
    assert stragglers.slowest.process == 1 and stragglers.slowest.behind_s == pytest.approx(0.05)


def test_who_has_caught_up_is_no_longer_named():
    stragglers = Stragglers()
    stragglers.slowest = Slowest(1, "process 1", (1, 2), 1.0, 0.0, 0.0, 1.0)
    run(stragglers, {0: 0.010, 1: 0.011}, 10)
    assert stragglers.slowest is None


def test_a_window_begins_with_the_first_step_and_anew_after_a_roll_back():
    stragglers = Stragglers()
    stragglers.take({0: ("", Beat()), 1: ("", Beat())}, 0.0)
    run(stragglers, {0: 0.0, 1: 0.1}, 9)
    assert stragglers.slowest is None, "the start does not count"
    run(stragglers, {0: 0.0, 1: 0.1}, 9, begin=(1, 110.0))
    assert stragglers.slowest is None, "what was before the roll-back does not count"
    run(stragglers, {0: 0.0, 1: 0.1}, 1, begin=(51, 120.0))
    assert stragglers.slowest.process == 1 and stragglers.slowest.step_s == pytest.approx(0.2)


def test_a_step_longer_than_the_window_makes_it_longer():
    stragglers = Stragglers()
    for now in range(0, 100, 5):
        step = 1 + now // 20
        stragglers.take(
            {p: ("", Beat(step, own_s=own * step)) for p, own in enumerate([0.0, 10.0])}, float(now)
        )
        assert (stragglers.slowest is None) == (now < 60)
