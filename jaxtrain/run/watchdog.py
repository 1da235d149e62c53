"""The watchdog: a thread that ends a process when its run cannot come further, with a status that
says why. No jax.

    a peer's connection closes without a bye      LOST_PEER, at once
    a peer ends with a bye and a status           the same status
    no step is finished for longer than one       HUNG: each process writes the stacks of its
                                                  threads to WORKDIR/hang/, and process 0
    can last; or a peer is silent                 names who is behind

How long a step can last is learned from the run's own: three times the longest so far, and never
less than `train.hang_after`. Saves, evaluations and the like have limits of their own, learned in
the same way. Compiling has none.

A process that holds Python's lock for good can say nothing: the others find it silent.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from jaxtrain.config import ConfigError, one_line
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.goodput import OWN, STEPS, Current, Part, WallClock
from jaxtrain.run.peers import Beat, Ending, Peer, Peers
from jaxtrain.run.stragglers import Stragglers

BEAT_S = 1.0  # seconds between two beats
TIMES_LONGEST = 3.0  # how many times the longest step so far a step may last
# times hang_after: the least limit of a start's first step, and of a part that is no step
OTHER_PART = 20
# A peer that is silent ends these too.
ENDLESS = (
    Part.IMPORTS,
    Part.TABLE,
    Part.DATA,
    Part.TRACING,
    Part.COMPILING,
    Part.STATE,
    Part.ROLLING_BACK,
)
HEAD_START_S = 5.0  # seconds that another process leaves process 0, which knows who is behind
WRITING_S = 5.0  # seconds for the stacks: the file system may be what hangs
# seconds in which what ended a peer may end this process too, with a line of its own
OWN_WORD_S = 2.0
ABORT_S = 5.0  # seconds that an abort waits for the watchdog
# seconds that process 0 waits for the others, whose runtime would abort them without its
# coordinator
GOODBYE_S = 5.0


class Patience:
    """How long what a process is at may last. Seconds throughout.

    Args:
      hang_after: the least limit.
      now: by the clock that `finished` and `waited` are told, too.
    """

    def __init__(self, hang_after: float, now: float):
        self._hang_after = hang_after
        self._longest: dict[object, float] = {}  # by part; None: of a step
        self._since = now  # the last finished step, or the end of a part that is none
        self._at: Current | None = None  # the part that was no step, and is not known to be over
        self.step = 0
        self._has_begun = self._has_stepped = False

    def finished(self, step: int, now: float) -> None:
        """A step is finished; the first that is told is the one that the start goes on from."""
        if self._has_stepped:
            self._note(None, now - self._since)
        self.step, self._since = step, now
        self._has_begun, self._has_stepped = True, self._has_begun

    def suspended(self, seconds: float) -> None:
        """The process did not run for so long: nothing was late."""
        self._since += seconds

    def waited(self, current: Current, now: float) -> float:
        """How long nothing has come of what the process is at."""
        before, self._at = self._at, None if current.part in STEPS else current
        if before and (current.part != before.part or current.seconds < before.seconds):
            self._note(before.part, before.seconds)
        if current.part in STEPS:
            return now - self._since
        self._since = now
        return current.seconds

    def limit(self, current: Current) -> float:
        """How long that may be; infinite for what has no limit."""
        if current.part in ENDLESS:
            return float("inf")
        if current.part in STEPS:
            return max(
                self._hang_after * (1 if self._has_stepped else OTHER_PART),
                TIMES_LONGEST * self._longest.get(None, 0.0),
            )
        return max(
            self._hang_after * OTHER_PART, TIMES_LONGEST * self._longest.get(current.part, 0.0)
        )

    def _note(self, part: object, seconds: float) -> None:
        self._longest[part] = max(self._longest.get(part, 0.0), seconds)


class Watchdog:
    """Watches one process of a run from a thread of its own.

    Args:
      folder: the run's; stacks are written below it.
      peers: the connections to the other processes, which belong to the watchdog from now on; None
        for a run of one process.
      clock: what this process is at.
      hang_after: seconds, as `train.hang_after`; 0: nothing counts as hung.
      before_end: called before the process is ended, from the watchdog's thread.
      end: ends the process by a status; os._exit but in tests.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        peers: Peers | None,
        clock: WallClock,
        hang_after: float,
        before_end: Callable[[], object] = lambda: None,
        end: Callable[[int], object] = os._exit,
    ):
        self._folder, self._peers, self._clock = folder, peers, clock
        self._hang_after, self._before_end, self._end = hang_after, before_end, end
        self._patience = Patience(hang_after, time.monotonic())
        self.stragglers = Stragglers()  # of process 0: which process the others wait for
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator["Watchdog"]:
        """A context in which the process is watched. Leaving it tells the others by what it is
        left."""
        _active.append(self)
        self._thread.start()
        try:
            yield self
        except BaseException as error:
            self._leave(error)
            raise
        else:
            self.say_bye(ExitStatus.FINISHED, "")
        finally:
            _active.remove(self)
            self._over.set()
            self._thread.join()
            if self._peers:
                self._peers.close()

    def finished(self, step: int) -> None:
        """The results of a step are here; at first: of that which the start goes on from."""
        self._patience.finished(step, time.monotonic())

    def say_bye(self, status: int, text: str) -> None:
        """Tells the others that this process ends, and why."""
        if self._peers:
            self._peers.say_bye(Ending(int(status), text, self._peers.process))

    def end_others(self, status: int, text: str) -> None:
        """Ends the others as this process ends, from any thread."""
        if self._peers:
            self._peers.end_all(Ending(int(status), text, self._peers.process))

    def _leave(self, error: BaseException) -> None:
        """Tells the others of what ends this process. Without process 0 they are aborted: it waits
        for them to go."""
        if isinstance(error, RunError | ConfigError):
            status = error.status if isinstance(error, RunError) else ExitStatus.BAD_CONFIG
            self.say_bye(status, one_line(str(error)))
        else:
            self.say_bye(ExitStatus.FAULT, one_line(f"{type(error).__name__}: {error}"))
        end = time.monotonic() + GOODBYE_S
        while (
            self._peers
            and self._peers.process == 0
            and not self._peers.all_gone()
            and time.monotonic() < end
        ):
            time.sleep(0.05)

    # --- the thread -------------------------------------------------------------------------------

    def _watch(self) -> None:
        before = next_beat = time.monotonic()
        while not self._over.is_set():
            if self._peers:
                self._peers.poll(next_beat - before)
            else:
                self._over.wait(BEAT_S)
            now = time.monotonic()
            # the process was stopped and goes on, or the machine slept
            if now - before > BEAT_S + self._hang_after / 2:
                self._patience.suspended(now - before)
                self._heard_all(now)
            before = now
            if self._peers and now >= next_beat:
                next_beat = now + BEAT_S
                self._peers.beat(self._beat())
                if self._peers.process == 0 and len(self._peers.peers) == self._peers.processes - 1:
                    self.stragglers.take(
                        {peer.process: (str(peer), peer.beat) for peer in self._all()}, now
                    )
            ending = None if self._over.is_set() else self._look(now)
            if ending:
                return self._carry_out(ending)

    def _look(self, now: float) -> Ending | None:
        """What ends the process, if something does."""
        current = self._clock.current
        waited, limit = self._patience.waited(current, now), self._patience.limit(current)
        if self._peers:
            if self._peers.ending:
                return self._peers.ending
            if ending := self._of_a_peer(now):
                return ending
        if not self._hang_after:
            return None
        silent = self._silent(now)
        # a step that goes on all the same is well
        if silent and (waited > self._hang_after or current.part not in STEPS):
            return self._hung(
                f"nothing was heard of {_names(silent)} for "
                f"{now - min(p.heard for p in silent):.0f} s"
            )
        if waited > limit + (HEAD_START_S if self._peers and self._peers.process > 0 else 0.0):
            return self._hung(
                f"no step was finished for {waited:.0f} s"
                if current.part in STEPS
                else f"{current.part.value} took {waited:.0f} s"
            )
        return None

    def _of_a_peer(self, now: float) -> Ending | None:
        for peer in self._peers.peers.values() if self._peers else ():
            if (
                peer.bye
                and peer.bye.status != ExitStatus.FINISHED
                and now - peer.heard > OWN_WORD_S
            ):
                status = f"{peer} ended with status {peer.bye.status}"
                return Ending(
                    peer.bye.status,
                    f"{status}: {peer.bye.text}" if peer.bye.text else status,
                    peer.process,
                )
            if peer.gone and not peer.bye:
                step = max(peer.beat.step, self._patience.step)
                return Ending(
                    ExitStatus.LOST_PEER,
                    f"{peer} has gone without a word, after step {step}",
                    peer.process,
                )
        return None

    def _silent(self, now: float) -> list[Peer]:
        """The peers that have not been heard of for too long, though they are connected."""
        peers = self._peers.peers.values() if self._peers else ()
        return [
            peer
            for peer in peers
            if not peer.gone and not peer.bye and now - peer.heard > self._hang_after
        ]

    def _heard_all(self, now: float) -> None:
        for peer in self._peers.peers.values() if self._peers else ():
            peer.heard = max(peer.heard, now - self._hang_after / 2)

    def _hung(self, what: str) -> Ending:
        stacks = f"the stacks of all threads are in {self._folder / 'hang'}"
        return Ending(
            ExitStatus.HUNG,
            f"hung after step {self._patience.step}: {what}; {self._who_is_behind()}; {stacks}",
        )

    def _who_is_behind(self) -> str:
        """Which process the others wait for, as far as it can be told from here."""
        if not self._peers:
            current = self._clock.current
            return f"it is at {current.part.value}"
        if silent := self._silent(time.monotonic()):
            return (
                f"{_names(silent)} {'is' if len(silent) == 1 else 'are'} behind: stopped, or out "
                "of reach"
            )
        if self._peers.process > 0:
            return "process 0 knows who is behind, and says nothing"
        current, processes = self._clock.current, self._all()
        least = min(peer.beat.step for peer in processes)
        late = [peer for peer in processes if peer.beat.step == least]
        if len(late) == len(processes):
            parts = {peer.beat.part for peer in processes}
            late = [
                p
                for p in processes
                if p.beat.part != max(parts, key=[q.beat.part for q in processes].count)
            ]
        if not late:
            return f"all {len(processes)} processes are at {current.part.value} after step {least}"
        return (
            f"{_names(late)} {'is' if len(late) == 1 else 'are'} behind, at {late[0].beat.part} "
            f"after step {late[0].beat.step}"
        )

    def _beat(self) -> Beat:
        current, own_s, data_wait_s = (
            self._clock.current,
            self._clock.spent(*OWN),
            self._clock.spent(Part.WAITING),
        )
        return Beat(
            self._patience.step,
            current.part.value,
            round(current.seconds, 1),
            round(own_s, 4),
            round(data_wait_s, 4),
        )

    def _all(self) -> list[Peer]:
        """Process 0 itself, and all others."""
        mine = Peer(0, socket.gethostname(), os.getpid(), 0.0, self._beat())
        return [mine, *self._peers.peers.values()] if self._peers else [mine]

    def _carry_out(self, ending: Ending) -> None:
        """Ends the process, after telling the others; process 0 leaves last."""
        if self._peers:
            self._peers.end_all(dataclasses.replace(ending, process=self._peers.process))
        if ending.status == ExitStatus.HUNG:
            writing = threading.Thread(target=self._write_stacks, daemon=True)
            writing.start()
            writing.join(WRITING_S)
        leaving = threading.Thread(target=self._before_end, daemon=True)
        leaving.start()
        leaving.join(WRITING_S)
        if self._peers and self._peers.process == 0:
            end = time.monotonic() + GOODBYE_S
            while time.monotonic() < end and not self._peers.all_gone():
                self._peers.poll(0.1)
        streams.write_error(f"error: {ending.text}\n")
        self._over.set()
        self._end(ending.status)

    def _write_stacks(self) -> None:
        process = self._peers.process if self._peers else 0
        folder = self._folder / "hang"
        current = self._clock.current
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"step-{self._patience.step}-process-{process}.txt").open("w") as file:
                file.write(
                    f"process {process}, after step {self._patience.step}, at "
                    f"{current.part.value} for {current.seconds:.0f} s\n\n"
                )
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            streams.write_error(f"warning: the stacks are not in {folder} ({error.strerror})\n")


def _names(peers: list[Peer]) -> str:
    shown = ", ".join(map(str, peers[:4]))
    return shown if len(peers) <= 4 else f"{shown} and {len(peers) - 4} others"


_active: list[Watchdog] = []


def wait_for_ending(seconds: float) -> None:
    """Gives a watchdog, if there is one, so much time to end this process: what looks like a fault
    may be a peer's death."""
    end = time.monotonic() + seconds
    while _active and time.monotonic() < end:
        time.sleep(0.05)


def end_process(error: RunError) -> NoReturn:
    """Ends this process by an error, and with it the others of its run, from any thread. Not by an
    exception: the thread that trains may be anywhere, and must not write any more."""
    for each in _active:
        each.end_others(error.status, str(error))
    streams.write_error(f"error: {one_line(str(error))}\n")
    os._exit(error.status)


def outlive_abort() -> None:
    """Lets a watchdog end a process that is about to abort. jax's runtime aborts all processes,
    with status 134 and a stack of its own, as soon as the one that coordinates them dies; our line
    and status say who has died. For the rest of the process."""
    libc = ctypes.CDLL(None)

    def on_abort(number: int) -> None:
        wait_for_ending(ABORT_S)
        libc.signal(number, 0)  # SIG_DFL: the abort goes on

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    _handlers.append(handler)
    libc.signal(int(signal.SIGABRT), handler)


_handlers: list = []  # what C calls must live
