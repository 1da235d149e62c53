"""Messages between the processes of a run, apart from their collectives: signs of life, the step,
the reason of an end; and the process for which the others wait. No jax.

Process 0 listens, and every other process has one connection to it. Lines of JSON go both ways:

    process i → 0     its number, once; then every second a beat: its step and its phase of the wall
                      clock; "bye" with its status before it ends
    process 0 → all   every second a beat; an ending, which ends all

If a connection closes without a bye, its process has died: the kernel closes it at once, also after
`kill -9`. If a connection stays open and is silent, its process is stopped, or its machine cannot
be reached.

Before jax starts, the processes of a run `meet` in the same way at the address of process 0. jax
alone would wait for minutes for one whose flags were refused; its coordinators share a port (gRPC
sets SO_REUSEPORT), and a process that connects to another run's ends that run.

This module starts no thread and ends no process, and only `meet` waits: the watchdog (watchdog.py)
calls `poll` from its own thread.

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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxtrain.run.exit_status import ExitStatus

CONNECT_S = 5.0  # for one address of process 0
LARGEST_LINE = 2**16
MEETING_S = 300.0  # that processes wait for each other
TELLING_S = 8.0  # in which all are told what is wrong, and process 0 answers at its address
WINDOW_S, WINDOW_STEPS = 10.0, 3  # the least length of a window; both hold
# the fraction of a step by which a slow process's host time exceeds the median at least
BEHIND = 0.1


@dataclasses.dataclass(frozen=True)
class Beat:
    """The progress of a process.

    step: the last finished one; phase: of the wall clock (wall_clock.Phase);
    own_s: seconds of its steps in which it did not await the devices, since it began;
    data_wait_s: those of own_s in which it waited for data;
    excused: it waits for a store that does not answer (watchdog.excused); of process 0, any does.
    """

    step: int = 0
    phase: str = ""
    own_s: float = 0.0
    data_wait_s: float = 0.0
    excused: bool = False


@dataclasses.dataclass(frozen=True)
class Ending:
    """Why a process or the entire run ends: the exit status, and a line of text. process: the one
    that ends, or that ends the run."""

    status: int = ExitStatus.FINISHED
    text: str = ""
    process: int = 0


@dataclasses.dataclass(frozen=True)
class Address:
    """The address at which process 0 listens, by several names of its host; its process id, and the
    token that the others must send."""

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

    def listen(self, host: str = "", port: int = 0, token: str = "") -> Address:
        """Process 0 begins to listen; the address is for the others' `connect`.

        host: the name that the others know, tried before its others; port, token: chosen if not
        given

        Raises OSError if the port is in use.
        """
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._listener = socket.create_server(
            ("", port), family=family, backlog=4096, dualstack_ipv6=family == socket.AF_INET6
        )
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._token = token or secrets.token_hex(8)
        hosts = tuple(dict.fromkeys([*[host] * bool(host), *_own_addresses()]))
        return Address(hosts, self._listener.getsockname()[1], self._token, os.getpid())

    def connect(self, address: Address, host: str, bye: Ending | None = None) -> None:
        """Connects another process to process 0. host: its name in messages; bye: its last words,
        if it does not stay. Raises PeersError if nothing answers."""
        tried = []
        for name in address.hosts:
            try:
                connection = socket.create_connection((name, address.port), timeout=CONNECT_S)
                break
            except OSError as error:
                tried.append(f"{name}: {error.strerror or error}")
        else:
            raise PeersError(
                f"port {address.port} of process 0 cannot be reached ({'; '.join(tried)})"
            )
        self._add(connection, Peer(0, address.hosts[0], address.pid, self._clock()))
        self._send(
            connection,
            {
                "token": address.token,
                "process": self.process,
                "processes": self.processes,
                "host": host,
                "pid": os.getpid(),
                **({"bye": dataclasses.asdict(bye)} if bye else {}),
            },
        )

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
                peer.bye = self._wrong(peer, int(message["processes"]))
                self._peer_of[connection] = self.peers[peer.process] = peer
                self._send(connection, {"beat": dataclasses.asdict(Beat(phase="meeting"))})
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

    def _wrong(self, peer: Peer, processes: int) -> Ending | None:
        """Why a process that comes is not of this run; None if it is."""
        twin, why = self.peers.get(peer.process), ""
        if processes != self.processes:
            why = f"it has --processes={processes}, process 0 {self.processes}: give all the same"
        elif twin and not twin.gone:
            why = f"{twin} has the same --process_id: give each its own"
        self.processes = max(processes, self.processes)  # that are to be told
        return Ending(ExitStatus.BAD_CONFIG, why) if why else None

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


def _own_addresses() -> Iterator[str]:
    """The names by which other machines may reach this one; the last is for processes of this
    machine."""
    yield socket.gethostname()
    for family, elsewhere in ((socket.AF_INET, "10.255.255.255"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # nothing is sent: the system says which of its addresses it would use
            probe.connect((elsewhere, 9))
            yield probe.getsockname()[0]
    yield "localhost"


# --- the meeting ----------------------------------------------------------------------------------


def meet(
    coordinator_address: str = "", num_processes: int = 0, process_id: int = 0, refusal: str = ""
) -> Ending:
    """How the meeting of a run's processes ends, at the address of process 0 and before jax starts
    there: status 0 if all of them are there.

    The arguments are those of jax.distributed.initialize; without an address or a number nothing is
    done. refusal: why this process's command ends; "" if it goes on.

    BAD_CONFIG, in all processes, where one's command was refused, one is there twice, or their
    numbers of processes differ; also for an address that something else uses, which goes on.
    LOST_PEER where one has gone, or has not come in time.
    """
    if not (coordinator_address and num_processes):
        return Ending()
    host, _, port = coordinator_address.rpartition(":")
    place = Address((host.strip("[]"),), int(port), "jaxtrain")
    reason = Ending(ExitStatus.BAD_CONFIG, refusal[:1000], process_id) if refusal else None
    # the others import jax before they come, and a refused process does not
    end = time.monotonic() + (3 * TELLING_S if refusal else MEETING_S)
    with contextlib.closing(Peers(process_id, num_processes)) as peers:
        return (_attend if process_id else _receive)(peers, place, reason, end)


def _receive(peers: Peers, place: Address, ending: Ending | None, end: float) -> Ending:
    """Process 0's meeting, whose end all others are told."""
    try:
        # jax listens at another port than the one that others know, if this variable has one
        port = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")[2]
        peers.listen(place.hosts[0], int(port) if port.isdecimal() else place.port, place.token)
    except OSError as error:
        return Ending(
            ExitStatus.BAD_CONFIG,
            f"port {place.port} of --coordinator cannot be used on {socket.gethostname()} (process "
            f"0): {os.strerror(error.errno or 0)}: end what uses it, or use another port",
        )
    while time.monotonic() < end and (
        len(peers.peers) < peers.processes - 1 or (ending and not peers.all_gone())
    ):
        peers.poll(0.1)
        ending = ending or next(
            (
                Ending(peer.bye.status, f"{peer}: {peer.bye.text}")
                if peer.bye
                else Ending(ExitStatus.LOST_PEER, f"{peer} has gone without a word")
                for peer in peers.peers.values()
                if peer.bye or peer.gone
            ),
            None,
        )
        if ending:
            peers.end_all(ending)  # each time, for those who come later
            end = min(end, time.monotonic() + TELLING_S)
    if not ending and (absent := sorted({*range(1, peers.processes)} - peers.peers.keys())):
        ending = Ending(
            ExitStatus.LOST_PEER,
            f"of {peers.processes} processes these did not come to {place.hosts[0]}:{place.port}: "
            f"{', '.join(map(str, absent[:8]))}",
        )
    peers.end_all(ending or Ending())
    return ending or Ending()


def _attend(peers: Peers, place: Address, reason: Ending | None, end: float) -> Ending:
    """Another process's meeting: what process 0 says."""
    text, fine = f"process 0 at {place.hosts[0]}:{place.port}", time.monotonic()
    while not peers.ending and time.monotonic() < end:
        if peers.all_gone():  # or nobody was there
            try:
                peers.connect(place, socket.gethostname(), reason)
            except PeersError:
                fine = time.monotonic()
        peers.poll(0.1)
        if any(peer.beat.phase for peer in peers.peers.values()):
            fine = time.monotonic()
        elif time.monotonic() > fine + TELLING_S:
            return Ending(
                ExitStatus.BAD_CONFIG,
                f"{text} of this run is not what answers there: end what uses the port, or use "
                "another --coordinator",
            )
        time.sleep(0.05)  # jax starts there when process 0 has closed the port
    return peers.ending or Ending(ExitStatus.LOST_PEER, f"{text} did not come or has gone")


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
