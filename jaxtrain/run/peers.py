"""Messages between the processes of a run, apart from their collectives: signs of life, the step,
the reason of an end; and the process for which the others wait. No jax.

Process 0 listens, and every other process has one connection to it. Lines of JSON go both ways:

    process i → 0     its number, once; then every second a beat: its step and its part of the wall
                      clock; "bye" with its status before it ends
    process 0 → all   every second a beat; an ending, which ends all

If a connection closes without a bye, its process has died: the kernel closes it at once, also after
`kill -9`. If a connection stays open and is silent, its process is stopped, or its machine cannot
be reached.

This module never waits, starts no thread and ends no process: the watchdog (watchdog.py) calls
`poll` from its own thread.

Stragglers: collectives wait for the last process, so steps take the same time on every process. But
processes differ in the time that they spend before they await the devices: they wait for their
data, dispatch, log. All devices wait for the process that spends most. A device that is itself slow
does not show, since its process awaits the end of the step like all others.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

CONNECT_S = 5.0  # for one address of process 0
LARGEST_LINE = 2**16
WINDOW_S, WINDOW_STEPS = 10.0, 3  # the least length of a window; both hold
# the fraction of a step by which a slow process's host time exceeds the median at least
BEHIND = 0.1


@dataclasses.dataclass(frozen=True)
class Beat:
    """The progress of a process.

    step: the last finished one; part: of the wall clock (wall_clock.Part);
    own_s: seconds of its steps in which it did not await the devices, since it began;
    data_wait_s: those of own_s in which it waited for data.
    """

    step: int = 0
    part: str = ""
    own_s: float = 0.0
    data_wait_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Ending:
    """Why a process or the entire run ends: the exit status, and a line of text. process: the one
    that ends, or that ends the run."""

    status: int
    text: str
    process: int = 0


@dataclasses.dataclass(frozen=True)
class Address:
    """The address at which process 0 listens, its process id, and the token that the others must
    send."""

    hosts: tuple[str, ...]
    port: int
    token: str
    pid: int = 0


@dataclasses.dataclass
class Peer:
    """Another process. heard: when its last message came, by the clock; bye: its last words; gone:
    whether its connection is closed."""

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
    ending: why process 0 ends the run, once it does.
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
        """Process 0 begins to listen; the address is for the others' `connect`."""
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
        """Connects another process to process 0. host: its name in messages. Raises PeersError if
        no address answers."""
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

    # --- polling ----------------------------------------------------------------------------------

    def poll(self, seconds: float) -> None:
        """Brings `peers` and `ending` up to date; waits at most so long if no message has come."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            connection: Any = key.fileobj
            if self._listener and connection is self._listener:
                with contextlib.suppress(OSError):  # it has disconnected
                    self._add(connection.accept()[0], None)
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
        """Tells the others that this process ends on purpose; from any thread."""
        self._broadcast({"bye": dataclasses.asdict(ending)})

    def all_gone(self) -> bool:
        """True if every other process has closed its connection."""
        return all(peer.gone for peer in self.peers.values())

    def close(self) -> None:
        """Closes all connections."""
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
        """Handles one line. False if no process of this run has sent it."""
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
        # A peer that does not read has a full buffer some day, and misses beats. Messages are too
        # short to be cut.
        with contextlib.suppress(OSError):
            connection.send(json.dumps(message).encode() + b"\n")


def _own_addresses() -> Iterable[str]:
    """The names by which other machines may reach this one; the last is for processes of this
    machine."""
    names = [socket.gethostname()]
    for family, elsewhere in ((socket.AF_INET, "10.255.255.255"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # nothing is sent: the system says which of its addresses it would use
            probe.connect((elsewhere, 9))
            names.append(probe.getsockname()[0])
    return dict.fromkeys([*names, "localhost"])


# --- stragglers -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Slowest:
    """The process with the longest host time a step in a window. Seconds are means over its steps.

    name: with its host; steps: the window's first and last; own_s: host time, of which data_wait_s
        waiting for data; median_s: host time, over all processes; step_s: of a step.
    """

    process: int
    name: str
    steps: tuple[int, int]
    own_s: float
    data_wait_s: float
    median_s: float
    step_s: float

    @property
    def behind_s(self) -> float:
        """Seconds a step that the other processes wait for this one."""
        return self.own_s - self.median_s

    def line(self) -> str:
        """A warning for the log."""
        begin, end = self.steps
        return (
            f"warning: steps {begin} to {end}: {self.name} is slowest, with {self.own_s:.3f} s of "
            f"its own a step ({self.data_wait_s:.3f} waiting for data), the median "
            f"{self.median_s:.3f}; a step takes {self.step_s:.3f} s"
        )


class Stragglers:
    """Compares the beats of all processes, window by window.

    slowest: in the last window; None if no process was clearly slower than the others.
    """

    def __init__(self) -> None:
        self.slowest: Slowest | None = None
        self._window: dict[int, Beat] = {}  # each process's beat at the window's beginning
        self._began = 0.0

    def take(self, beats: Mapping[int, tuple[str, Beat]], now: float) -> None:
        """Takes the name and the newest beat of each process, by number, and the time in
        seconds."""
        if any(
            p not in self._window or not 0 < self._window[p].step <= beat.step
            for p, (_, beat) in beats.items()
        ):
            # a process has not stepped yet, or the run has gone back to an earlier step
            self._begin(beats, now)
        steps = {
            process: beat.step - self._window[process].step for process, (_, beat) in beats.items()
        }
        if now - self._began < WINDOW_S or min(steps.values()) < WINDOW_STEPS:
            return
        host_s = {
            p: (beat.own_s - self._window[p].own_s) / steps[p] for p, (_, beat) in beats.items()
        }
        slowest = max(host_s, key=lambda process: host_s[process])
        name, last = beats[slowest]
        start, count = self._window[slowest], steps[slowest]
        candidate = Slowest(
            slowest,
            name,
            steps=(start.step + 1, last.step),
            own_s=host_s[slowest],
            data_wait_s=(last.data_wait_s - start.data_wait_s) / count,
            median_s=statistics.median_low(host_s.values()),
            step_s=(now - self._began) / count,
        )
        self.slowest = candidate if candidate.behind_s > BEHIND * candidate.step_s else None
        self._begin(beats, now)

    def _begin(self, beats: Mapping[int, tuple[str, Beat]], now: float) -> None:
        self._window = {process: beat for process, (_, beat) in beats.items()}
        self._began = now
