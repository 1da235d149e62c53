"""What the processes of a run tell each other beside their collectives: that they live, how far
they are, and why one ends. No jax.

Process 0 listens, every other process holds one connection to it. Lines of JSON go both ways:

    process i → 0     who it is, once; then a beat a second: its step and what it is at; "bye" with
                      its status before it ends
    process 0 → all   a beat a second; an ending, which ends all

A connection that closes without a bye is a process that has died: the kernel closes it at once,
also after `kill -9`. A connection that stays open and is silent is a process that is stopped or a
machine that cannot be reached.

Nothing here waits, has a thread or ends a process: the watchdog (watchdog.py) calls `poll` from its
own thread.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

CONNECT_S = 5.0  # for one address of process 0
LARGEST_LINE = 2**16


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a process says of itself.

    step: the last that is finished; part: what it is at (goodput.Part), and for how many seconds;
    own_s: seconds since it began that it did not await the devices in its steps, of which
    data_wait_s it waited for data.
    """

    step: int = 0
    part: str = ""
    part_s: float = 0.0
    own_s: float = 0.0
    data_wait_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Ending:
    """Why a process or the whole run ends: the status, and one line for people. process: who says
    so, or of whom it is said."""

    status: int
    text: str
    process: int = 0


@dataclasses.dataclass(frozen=True)
class Address:
    """Where process 0 listens, what it is, and what it wants to hear from the others; JSON can hold
    it."""

    hosts: tuple[str, ...]
    port: int
    token: str
    pid: int = 0


@dataclasses.dataclass
class Peer:
    """Another process, as it is known here. heard: when it last said something, by the clock; bye:
    why it has ended, if it said so."""

    process: int
    host: str
    pid: int
    heard: float
    beat: Beat = Beat()
    bye: Ending | None = None
    gone: bool = False

    def __str__(self) -> str:
        return f"process {self.process} ({self.host}, pid {self.pid})"


class PeersError(RuntimeError):
    """Process 0 cannot be reached; the text is one line."""


class Peers:
    """The connections of one process. Methods but `say_bye` are for one thread.

    peers: by number. Process 0 knows all others, another process knows process 0 alone.
    ending: what process 0 has said that ends the run.
    """

    def __init__(self, process: int, processes: int, clock: Callable[[], float] = time.monotonic):
        self.process, self.processes = process, processes
        self.peers: dict[int, Peer] = {}
        self.ending: Ending | None = None
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._lines: dict[socket.socket, bytes] = {}
        self._peer_of: dict[socket.socket, Peer] = {}
        self._listener: socket.socket | None = None
        self._token = ""

    # --- beginning --------------------------------------------------------------------------------

    def listen(self) -> Address:
        """Process 0 begins to listen. Gives what the others need to connect."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, backlog=4096, dualstack_ipv6=family == socket.AF_INET6
        )
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._token = secrets.token_hex(8)
        return Address(
            tuple(_own_addresses()), self._listener.getsockname()[1], self._token, os.getpid()
        )

    def connect(self, address: Address, host: str) -> None:
        """Another process connects. host: its name, for people. Raises PeersError if no address of
        process 0 answers."""
        tried = []
        for name in address.hosts:
            try:
                connection = socket.create_connection((name, address.port), timeout=CONNECT_S)
            except OSError as error:
                tried.append(f"{name}: {error.strerror or error}")
                continue
            self._add(connection, Peer(0, address.hosts[0], address.pid, self._clock()))
            self._send(
                connection,
                {"token": address.token, "process": self.process, "host": host, "pid": os.getpid()},
            )
            return
        raise PeersError(f"port {address.port} of process 0 cannot be reached ({'; '.join(tried)})")

    # --- every so often ---------------------------------------------------------------------------

    def poll(self, seconds: float) -> None:
        """Takes what has come, waiting for it at most so long: `peers` and `ending` are then up to
        date."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            connection: Any = key.fileobj
            if connection is self._listener:
                self._accept()
            else:
                self._receive(connection)

    def beat(self, beat: Beat) -> None:
        """Tells the others that this process lives, and how far it is."""
        self._broadcast({"beat": dataclasses.asdict(beat)})

    def end_all(self, ending: Ending) -> None:
        """Process 0 tells all others why the run ends, which ends them; another process tells
        process 0."""
        self._broadcast({"end" if self.process == 0 else "bye": dataclasses.asdict(ending)})

    def say_bye(self, ending: Ending) -> None:
        """This process ends, and is not to be missed; from any thread."""
        self._broadcast({"bye": dataclasses.asdict(ending)})

    def all_gone(self) -> bool:
        """Whether every other process has closed its connection."""
        return all(peer.gone for peer in self.peers.values())

    def close(self) -> None:
        """Ends all connections."""
        for connection in [*self._peer_of, *filter(None, [self._listener])]:
            connection.close()
        self._selector.close()

    # --- connections ------------------------------------------------------------------------------

    def _add(self, connection: socket.socket, peer: Peer | None) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection, selectors.EVENT_READ)
        self._lines[connection] = b""
        if peer:
            self._peer_of[connection] = self.peers[peer.process] = peer

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):  # it has gone again
            self._add(self._listener.accept()[0], None)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(LARGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, rest = (self._lines[connection] + data).split(b"\n")
        self._lines[connection] = rest
        for line in lines:
            if not self._take(connection, line):
                return self._drop(connection)
        if not data or len(rest) > LARGEST_LINE:
            self._drop(connection)

    def _take(self, connection: socket.socket, line: bytes) -> bool:
        """Takes in one line. False if it is not one that a process of this run says."""
        try:
            message = json.loads(line)
            peer = self._peer_of.get(connection)
            if peer is None:
                if message["token"] != self._token:
                    return False
                peer = Peer(
                    int(message["process"]),
                    str(message["host"]),
                    int(message["pid"]),
                    self._clock(),
                )
                self._peer_of[connection] = self.peers[peer.process] = peer
            peer.heard = self._clock()
            if "beat" in message:
                peer.beat = Beat(**message["beat"])
            if "bye" in message:
                peer.bye = Ending(**message["bye"])
            if "end" in message and self.process > 0:
                self.ending = Ending(**message["end"])
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._lines[connection]
        if peer := self._peer_of.pop(connection, None):
            peer.gone = True

    def _broadcast(self, message: dict) -> None:
        for connection in list(self._peer_of):
            self._send(connection, message)

    def _send(self, connection: socket.socket, message: dict) -> None:
        # A peer that does not read has a full buffer some day. It misses beats then; what is sent
        # is too short to be cut in between.
        with contextlib.suppress(OSError):
            connection.send(json.dumps(message).encode() + b"\n")


def _own_addresses() -> Iterable[str]:
    """The names by which other machines may reach this one; the last is for those of this
    machine."""
    found = [socket.gethostname()]
    for family, elsewhere in ((socket.AF_INET, "10.255.255.255"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # nothing is sent: the system says which of its addresses it would use
            probe.connect((elsewhere, 9))
            found.append(probe.getsockname()[0])
    return dict.fromkeys([*found, "localhost"])
