"""The lock of a run's folder: one run at a time, also among hosts that share the file system. No
jax.

    run.lock    one line of JSON: the process that holds it, and a count that a thread of that
                process raises every BEAT_S seconds

The file is created with O_EXCL. A newcomer that finds the file watches it:

    the holder ran on this host and has ended      taken over at once
    the bytes change                               refused: the holder runs
    no change for SILENCE_S, holder on this host   refused: the holder is stuck (at once if it is
                                                   stopped)
    no change for SILENCE_S, any other holder      taken over

Clocks of two hosts are never compared: a newcomer uses only its own. A file that was half written
when its process died has no holder, and is taken over after the silence.

A lock without a holder is taken over in two moves: `run.lock.DIGEST`, named after the lock's bytes,
is created with O_EXCL, and renamed to run.lock if run.lock still has these bytes. So only one of
several newcomers wins. A newcomer that dies in between leaves a lock of the same form, which is
taken over in the same way.

A lock library is no substitute: docs/log/2026-11.md has the results of filelock on our tests.
"""

import contextlib
import dataclasses
import datetime
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
SILENCE_S = 12.0  # seconds without a beat after which a holder on another host counts as dead
LOOK_S = 0.25  # seconds between two looks of a newcomer


class FolderError(RunError):
    """A folder that this run may not use: it cannot be locked, or another run uses it. The text is
    one line."""

    status = ExitStatus.BAD_CONFIG


class LostLockError(RunError):
    """A lock that was removed while its run used it; the text is one line. The same command takes a
    new lock, or is refused by a run that has taken one meanwhile."""

    status = ExitStatus.STORAGE


@dataclasses.dataclass(frozen=True)
class Process:
    """The identity of a process among those of other hosts, of other containers, and of those that
    had its number before.

    boot: the kernel's random id of this boot; namespace: of process numbers; start: clock ticks
    from boot to the process's start. Empty or 0 without /proc.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    start: int

    def shares_pids_with(self, other: "Process") -> bool:
        """True if both processes see each other by their process numbers."""
        known = self.host and self.boot and self.namespace
        return bool(known) and (self.host, self.boot, self.namespace) == (
            other.host,
            other.boot,
            other.namespace,
        )


def this_process() -> Process:
    """The identity of the calling process."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    entry = _proc_entry(os.getpid())
    return Process(socket.gethostname(), boot, namespace, os.getpid(), entry.start if entry else 0)


@dataclasses.dataclass(frozen=True)
class _ProcEntry:
    """A process in /proc: its state as a letter (man 5 proc), and its start in clock ticks from
    boot."""

    state: str
    start: int


def _proc_entry(pid: int) -> _ProcEntry | None:
    """The entry of a process; None where /proc does not show it."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return _ProcEntry(fields[0], int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def state_of(process: Process) -> str:
    """The state letter of a process that `shares_pids_with` the calling one: "T" or "t" if it is
    stopped and may go on; "" if no process has its number, or one with another start."""
    try:
        # raised for another user's process, which exists
        with contextlib.suppress(PermissionError):
            os.kill(process.pid, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    entry = _proc_entry(process.pid)
    if entry is None:
        return "R"
    is_gone = entry.state in "ZX" or entry.start != process.start
    return "" if is_gone else entry.state


@dataclasses.dataclass(frozen=True)
class Holder:
    """A lock's holder.

    since: its start in UTC, as a text
    token: a random text that no other holder has
    silence: seconds without a beat after which other hosts take it for dead
    """

    process: Process
    since: str
    token: str
    silence: float

    def __str__(self) -> str:
        return f"process {self.process.pid} on {self.process.host}, which started {self.since}"

    def line(self, beat: int) -> bytes:
        """The lock's bytes, of one length for every beat: they are overwritten in place."""
        rest = {
            "process": dataclasses.asdict(self.process),
            "since": self.since,
            "token": self.token,
            "silence_s": self.silence,
        }
        return f'{{"beat": {beat:12}, {json.dumps(rest)[1:]}\n'.encode()


def read_holder(text: bytes) -> Holder | None:
    """The holder that a lock's bytes name; None for bytes that are incomplete, or written by
    another program."""
    try:
        values = json.loads(text)
        process = Process(**values["process"])
        silence = min(max(float(values["silence_s"]), 1.0), 60.0)
        well_typed = all(
            isinstance(getattr(process, f.name), f.type)  # type: ignore[arg-type]
            for f in dataclasses.fields(process)
        )
        if not well_typed or process.pid <= 0:
            return None
        return Holder(process, str(values["since"]), str(values["token"]), silence)
    except (ValueError, TypeError, KeyError):
        return None


@dataclasses.dataclass(frozen=True)
class _File:
    """A lock's bytes and inode at one moment."""

    text: bytes
    inode: int

    @property
    def holder(self) -> Holder | None:
        return read_holder(self.text)

    def continues(self, earlier: "_File") -> bool:
        """True if this is the same lock, possibly with another beat."""
        if self.holder and earlier.holder:
            return self.holder.token == earlier.holder.token
        return self == earlier


def _read(path: pathlib.Path) -> _File | None:
    """The lock at a path; None where there is no file."""
    try:
        # Opened each time, for then NFS asks the server. A FIFO is opened without waiting for a
        # writer.
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
    """A newcomer's observation of a lock: its initial look, and the seconds of looking without a
    change."""

    initial: _File
    last_look: float
    silent: float = 0.0


class RunLock:
    """The lock of one folder, for one process.

    Args:
      folder: created if missing.
      me: the process that takes it; None: the calling one.
      clock, sleep: as in `time`, in seconds.
      lost: called with the error of a lost lock, from the thread that beats; None: the process ends
        with the error's status.
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
        self._created_folders: list[pathlib.Path] = []  # the innermost first
        self._is_held, self._over = False, threading.Event()
        self._thread = threading.Thread(target=self._beat_often, daemon=True)

    # --- taking -----------------------------------------------------------------------------------

    def take(self, log: Callable[[str], object] = lambda text: None) -> None:
        """Returns when this process holds the lock. Waits for a silent holder on another host, and
        logs that.

        Raises FolderError if another run holds the lock, or the folder cannot be written.
        """
        logged = self._clock()
        try:
            while not self._try(self._path):
                if self._clock() - logged > 2 * BEAT_S and (silence := self._silence()):
                    logged = self._clock()
                    log(f"waiting: {self._folder} is locked by {silence}")
                self._sleep(LOOK_S)
        except OSError as error:
            raise FolderError(
                f"--workdir={str(self._folder)!r} cannot be locked ({error.strerror}): use "
                "another --workdir"
            ) from None
        self._is_held = True
        self._thread.start()

    def _silence(self) -> str:
        """Text about a silent holder on another host, and how long it is waited for; "" for a
        holder on this host, or one that may still beat."""
        watch = self._watches.get(self._path)
        if watch is None or watch.silent < BEAT_S:
            return ""
        holder = watch.initial.holder
        if holder and holder.process.shares_pids_with(self._me):
            return ""
        who = f"the run of {holder}" if holder else "a process that has not written who it is"
        left = max((holder.silence if holder else SILENCE_S) - watch.silent, 0.0)
        return f"{who}; it gives no sign of life, and this run begins in {left:.0f} s"

    def _try(self, path: pathlib.Path) -> bool:
        """True if this process now holds the lock at `path`. Raises FolderError if a live one
        does."""
        if self._create(path):
            return True
        file = _read(path)
        if file is None or not self._is_dead(path, file):
            return False
        successor = path.with_name(f"{path.name}.{hashlib.sha256(file.text).hexdigest()[:12]}")
        if not self._try(successor):
            return False
        # raised if another process took this one for dead and has taken its successor file over
        with contextlib.suppress(FileNotFoundError):
            if _read(path) == file:
                os.rename(successor, path)
                return True
            os.unlink(successor)
        return False

    def _create(self, path: pathlib.Path) -> bool:
        """Creates the folder, and the file with this process as holder. False if there is a
        file."""
        missing = [each for each in (self._folder, *self._folder.parents) if not each.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._created_folders = self._created_folders or missing
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        # FileNotFoundError: another run has just removed the folder that it had created
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

    def _is_dead(self, path: pathlib.Path, file: _File) -> bool:
        """True if the holder of this lock is dead; False while that is unknown. Raises FolderError
        if it lives."""
        now, holder = self._clock(), file.holder
        is_near = holder and holder.process.shares_pids_with(self._me)
        state = state_of(holder.process) if holder and is_near else None
        if state == "":
            return True
        watch = self._watches.get(path)
        if watch is None or not file.continues(watch.initial):
            watch = self._watches[path] = _Watch(file, now)
        # Time in which this process was stopped, or the file system did not answer, does not count
        # as the holder's silence.
        watch.silent += min(now - watch.last_look, 2 * LOOK_S)
        watch.last_look = now
        silent = watch.silent >= (holder.silence if holder else SILENCE_S)
        if file != watch.initial or (state and (silent or state in "Tt")):
            raise FolderError(
                f"--workdir={str(self._folder)!r} is in use by the run of {holder}: stop that "
                "run, or use another --workdir"
            )
        return silent

    # --- holding ----------------------------------------------------------------------------------

    def _beat_often(self) -> None:
        """Beats until the lock is released or lost."""
        while not self._over.wait(BEAT_S):
            try:
                loss = self.beat()
            except OSError:
                # the file system may answer again; a takeover meanwhile shows at the next beat
                continue
            if loss and not self._over.is_set():
                self._lost(loss)
                return

    def beat(self) -> RunError | None:
        """Increments the count in the lock's file. Returns None, or, if the lock is lost, the error
        that ends the run: FolderError if another run has taken it over, LostLockError if the file
        is gone or was overwritten.

        Raises OSError if the file cannot be read or written at the moment.
        """
        try:
            file = os.open(self._path, os.O_RDWR)
        except FileNotFoundError:
            return self._loss("is gone")
        try:
            # The beat goes into the file that was read, even if the name means another one by now.
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
            os.close(file)  # NFS sends the beat now

    def _loss(self, what: str) -> LostLockError:
        return LostLockError(
            f"{self._path} {what}, so another run may use the folder: this run ends without "
            "saving; the same command goes on"
        )

    def release(self) -> None:
        """Removes the lock if it is held, and the folders that `take` has created if they are
        empty."""
        self._over.set()
        if self._is_held:
            self._is_held = False
            if self._thread is not threading.current_thread():
                self._thread.join(timeout=BEAT_S)
            file = _read(self._path)
            if file and file.holder and file.holder.token == self._holder.token:
                self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the first one that is in use, or gone, ends it
            for folder in self._created_folders:
                folder.rmdir()
        self._created_folders = []
