"""The lock of a run's folder: one run at a time, also where hosts share the file system. No jax.

    run.lock    one line of JSON: the process that holds it, and a count that a thread of that
                process raises every BEAT_S seconds

The file is created with O_EXCL. Whoever finds one watches it:

    the holder is of this host and gone            taken over at once
    the bytes change                               refused: it lives
    no change for SILENCE_S, holder of this host   refused: it is there, though stuck (or stopped:
                                                   refused at once)
    no change for SILENCE_S, any other holder      taken over

Clocks of two hosts are never compared: only the newcomer's own counts. A file that was half written
when its process died has no holder, and falls silent like any other.

A dead lock is taken over in two moves: `run.lock.DIGEST`, named after the dead lock's bytes, is
created with O_EXCL, and renamed to run.lock if that is still the dead one. So of several newcomers
one wins. A newcomer that dies in between leaves a dead lock of the same form, which is taken over
in the same way.
"""

import contextlib
import dataclasses
import datetime
import enum
import errno
import hashlib
import json
import os
import pathlib
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable

from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.watchdog import end_process

NAME = "run.lock"
BEAT_S = 2.0  # seconds between two beats
SILENCE_S = 12.0  # seconds without a beat after which a holder elsewhere counts as dead
LOOK_S = 0.25  # seconds between two looks of a newcomer


class FolderError(RunError):
    """A folder that this run may not use: it cannot be locked, or another run is at work in it; the
    text is one line."""

    status = ExitStatus.BAD_CONFIG


class LostLockError(RunError):
    """A lock that somebody has removed while its run is at work; the text is one line. Started
    again, the run takes a new one, or is refused by whoever has taken one meanwhile."""

    status = ExitStatus.STORAGE


@dataclasses.dataclass(frozen=True)
class Process:
    """A process, told from all others: of other hosts, of other containers of this host, and of
    those that had its number before.

    boot: the kernel's random id of this boot; namespace: of process numbers; start: clock ticks
    from boot to the process's start. Empty or 0 where there is no /proc.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    start: int

    def shares_pids_with(self, other: "Process") -> bool:
        """Whether both see each other under their numbers."""
        known = self.host and self.boot and self.namespace
        return bool(known) and (self.host, self.boot, self.namespace) == (
            other.host,
            other.boot,
            other.namespace,
        )


def this_process() -> Process:
    """The process that asks."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    entry = _proc_entry(os.getpid())
    return Process(socket.gethostname(), boot, namespace, os.getpid(), entry.start if entry else 0)


@dataclasses.dataclass(frozen=True)
class _ProcEntry:
    """What /proc says about a process: its state as a letter (man 5 proc), and its start in clock
    ticks from boot."""

    state: str
    start: int


def _proc_entry(pid: int) -> _ProcEntry | None:
    """None where /proc does not show the process."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return _ProcEntry(fields[0], int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


class Fate(enum.Enum):
    """What has become of a process of this host."""

    RUNS = enum.auto()
    STOPPED = enum.auto()  # by Ctrl-Z, SIGSTOP or a debugger: it may go on
    GONE = enum.auto()  # nobody has its number, or somebody who started at another time


def fate(process: Process) -> Fate:
    """What has become of a process that shares its numbers with this one."""
    try:
        # of a process that is another user's, but is there
        with contextlib.suppress(PermissionError):
            os.kill(process.pid, 0)
    except (ProcessLookupError, OverflowError):
        return Fate.GONE
    entry = _proc_entry(process.pid)
    if entry is None:
        return Fate.RUNS
    if entry.state in "ZX" or entry.start != process.start:
        return Fate.GONE
    return Fate.STOPPED if entry.state in "Tt" else Fate.RUNS


@dataclasses.dataclass(frozen=True)
class Holder:
    """What a lock says about its holder. since: UTC, for people; silence: seconds after which it
    counts as dead where nobody can look."""

    process: Process
    since: str
    token: str
    silence: float

    def __str__(self) -> str:
        return f"process {self.process.pid} on {self.process.host}, which started {self.since}"

    def line(self, beat: int) -> bytes:
        """The lock's bytes: as many for every beat, since they are overwritten in place."""
        rest = {
            "process": dataclasses.asdict(self.process),
            "since": self.since,
            "token": self.token,
            "silence_s": self.silence,
        }
        return f'{{"beat": {beat:12}, {json.dumps(rest)[1:]}\n'.encode()


def read_holder(text: bytes) -> Holder | None:
    """The holder that a lock's bytes name; None for bytes that were not written to their end, or by
    something else."""
    try:
        values = json.loads(text)
        process = Process(**values["process"])
        silence = min(max(float(values["silence_s"]), 1.0), 60.0)
        well_typed = all(
            isinstance(getattr(process, f.name), f.type)  # type: ignore[arg-type]
            for f in dataclasses.fields(process)
        )
        return (
            Holder(process, str(values["since"]), str(values["token"]), silence)
            if well_typed and process.pid > 0
            else None
        )
    except (ValueError, TypeError, KeyError):
        return None


@dataclasses.dataclass(frozen=True)
class _File:
    """A lock as it was at a moment."""

    text: bytes
    inode: int

    @property
    def holder(self) -> Holder | None:
        return read_holder(self.text)

    def continues(self, earlier: "_File") -> bool:
        """Whether this is the same lock, perhaps with another beat."""
        if self.holder and earlier.holder:
            return self.holder.token == earlier.holder.token
        return self == earlier


def _read(path: pathlib.Path) -> _File | None:
    """None where there is no such file."""
    try:
        # Opened anew each time: that is when NFS asks the server. A FIFO is opened without waiting
        # for somebody who writes.
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, f"{path} is no file")
            return _File(file.read(4096), status.st_ino)
    except FileNotFoundError:
        return None


@dataclasses.dataclass
class _Watch:
    """What a newcomer has seen of a lock: the first look, and for how many seconds of looking
    nothing has changed."""

    first: _File
    last_look: float
    silent: float = 0.0


@dataclasses.dataclass(frozen=True)
class _SilentHolder:
    """A holder of whom nothing is heard: who, in words, and the seconds until it counts as dead."""

    who: str
    left: float


class RunLock:
    """The lock of one folder, for one process.

    Args:
      folder: made if need be.
      me: the process that takes it.
      clock, sleep: seconds of this host.
      lost: called from the thread that beats with what `beat` returns when the lock is lost.
        Default: ends the process with its status.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        me: Process | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        lost: Callable[[RunError], object] | None = None,
    ):
        self._folder, self._path = pathlib.Path(folder), pathlib.Path(folder) / NAME
        self._me = me or this_process()
        self._clock, self._sleep, self._lost = clock, sleep, lost or end_process
        since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        self._holder = Holder(self._me, since, secrets.token_hex(8), SILENCE_S)
        self._beats = 0
        self._watches: dict[pathlib.Path, _Watch] = {}
        self._made_folders: list[pathlib.Path] = []  # the innermost first
        self._held, self._over, self._thread = (
            False,
            threading.Event(),
            threading.Thread(target=self._beat, daemon=True),
        )

    # --- taking -----------------------------------------------------------------------------------

    def take(self, say: Callable[[str], object] = lambda text: None) -> None:
        """Returns when this process holds the lock. Waits for a holder elsewhere that gives no sign
        of life, and says so.

        Raises FolderError, in one line, where another run holds it, or where the folder cannot be
        written.
        """
        told = self._clock()
        try:
            while not self._try(self._path):
                if self._clock() - told > 2 * BEAT_S and (silent := self._silent_holder()):
                    told = self._clock()
                    begins = f"this run begins in {silent.left:.0f} s"
                    say(
                        f"waiting: {self._folder} is locked by {silent.who}; it gives no sign "
                        f"of life, and {begins}"
                    )
                self._sleep(LOOK_S)
        except OSError as error:
            raise FolderError(
                f"--workdir={str(self._folder)!r} cannot be locked ({error.strerror}): use "
                "another --workdir"
            ) from None
        self._held = True
        self._thread.start()

    def _silent_holder(self) -> "_SilentHolder | None":
        """The lock's holder elsewhere; None for a holder of this host, or while it may still
        beat."""
        watch = self._watches.get(self._path)
        if watch is None or watch.silent < BEAT_S:
            return None
        holder = watch.first.holder
        if holder and holder.process.shares_pids_with(self._me):
            return None
        who = f"the run of {holder}" if holder else "a process that has not written who it is"
        return _SilentHolder(
            who, max((holder.silence if holder else SILENCE_S) - watch.silent, 0.0)
        )

    def _try(self, path: pathlib.Path) -> bool:
        """Whether this process now holds the lock at `path`. FolderError where a live one does."""
        if self._create(path):
            return True
        file = _read(path)
        if file is None or not self._is_dead(path, file):
            return False
        successor = path.with_name(f"{path.name}.{hashlib.sha256(file.text).hexdigest()[:12]}")
        if not self._try(successor):
            return False
        with contextlib.suppress(FileNotFoundError):  # this process was taken for dead meanwhile
            if _read(path) == file:
                os.rename(successor, path)
                return True
            os.unlink(successor)
        return False

    def _create(self, path: pathlib.Path) -> bool:
        """Whether there was no such file, and now it is this process's."""
        self._make_folder()
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        # FileNotFoundError: another run has just removed the folder that it had made
        except (FileExistsError, FileNotFoundError):
            return False
        try:
            os.write(file, self._holder.line(self._beats))
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(file)
        return True

    def _make_folder(self) -> None:
        """Makes the run's folder, and remembers which ones were not there."""
        missing = [
            folder for folder in (self._folder, *self._folder.parents) if not folder.exists()
        ]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._made_folders = self._made_folders or missing

    def _is_dead(self, path: pathlib.Path, file: _File) -> bool:
        """Whether nobody holds this lock any more; False while that is open. FolderError where its
        holder lives."""
        now, holder = self._clock(), file.holder
        known_fate = (
            fate(holder.process) if holder and holder.process.shares_pids_with(self._me) else None
        )
        if known_fate is Fate.GONE:
            return True
        watch = self._watches.get(path)
        if watch is None or not file.continues(watch.first):
            watch = self._watches[path] = _Watch(file, now)
        # This process may have been stopped between two looks, or the file system away: that is no
        # silence of the holder's.
        watch.silent += min(now - watch.last_look, 2 * LOOK_S)
        watch.last_look = now
        silent = watch.silent >= (holder.silence if holder else SILENCE_S)
        if file != watch.first or known_fate is Fate.STOPPED or (silent and known_fate):
            raise FolderError(
                f"--workdir={str(self._folder)!r} is in use by the run of {holder}: stop that "
                "run, or use another --workdir"
            )
        return silent

    # --- holding ----------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Beats until the lock is released, or lost."""
        while not self._over.wait(BEAT_S):
            try:
                loss = self.beat()
            except OSError:
                # the file system's, which may pass; whoever takes the folder meanwhile is seen at
                # the next beat
                continue
            if loss and not self._over.is_set():
                self._lost(loss)
                return

    def beat(self) -> RunError | None:
        """Raises the count in the lock. None; where the lock is no longer this process's, the error
        that the run ends with: FolderError where another run has taken it over, LostLockError where
        it is gone or no lock any more.

        Raises OSError where the file cannot be read or written just now.
        """
        try:
            file = os.open(self._path, os.O_RDWR)
        except FileNotFoundError:
            return self._loss("is gone")
        try:
            # What is written goes into the file that was read, even if the name has come to mean
            # another one.
            holder = read_holder(os.read(file, 4096))
            if holder is None:
                return self._loss("was overwritten")
            if holder.token != self._holder.token:
                return FolderError(
                    f"{self._folder} was taken over by the run of {holder}: this run ends "
                    "without saving"
                )
            self._beats += 1
            os.pwrite(file, self._holder.line(self._beats), 0)
            return None
        finally:
            os.close(file)  # NFS sends it off now

    def _loss(self, what: str) -> LostLockError:
        return LostLockError(
            f"{self._path} {what}, so another run may use the folder: this run ends without "
            "saving; the same command goes on"
        )

    def release(self) -> None:
        """Removes the lock, and the folders that `take` has made as far as they are empty. Nothing
        where the lock is not held."""
        self._over.set()
        if self._held:
            self._held = False
            if self._thread is not threading.current_thread():
                self._thread.join(timeout=BEAT_S)
            file = _read(self._path)
            if file and file.holder and file.holder.token == self._holder.token:
                self._path.unlink(missing_ok=True)
        for folder in self._made_folders:
            try:
                folder.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST):
                    raise
                break
        self._made_folders = []
