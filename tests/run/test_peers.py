"""What processes tell each other: here all in one process, over real connections."""

import os
import socket

import pytest

from jaxtrain.run.peers import Address, Beat, Ending, Peers, PeersError


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
