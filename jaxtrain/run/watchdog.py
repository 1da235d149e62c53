"""The watchdog: a thread that ends the process when the run cannot go on, with a status that says
why. No jax.

    a peer's connection closes without a bye      LOST_PEER, at once
    a peer ends with a bye and a status           the same status
    no step finishes within its limit,            HUNG: each process writes the stacks of its
    or a peer is silent                           threads to WORKDIR/hang/, and process 0 names
                                                  the processes that are behind

The limit of a step is three times the longest step so far, and at least `train.hang_after`. Saves,
evaluations and the like have limits of the same kind. Compiling has none.

A process that holds Python's lock forever cannot report anything, but the others notice its
silence.
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

from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.files import fresh
from jaxtrain.run.peers import Beat, Ending, Peer, Peers, Stragglers
from jaxtrain.run.wall_clock import HOST_STEPS, STEPS, Current, Phase, WallClock

BEAT_S = 1.0  # seconds between two beats
TIMES_LONGEST = 3.0  # a limit, in longest times so far
# the least limit of a start's first step and of a phase that is no step, × hang_after
OTHER_PHASE = 20
# Phases without a limit; a silent peer ends these too.
ENDLESS = (
    Phase.IMPORTS,
    Phase.TABLE,
    Phase.DATA,
    Phase.TRACING,
    Phase.COMPILING,
    Phase.STATE,
    Phase.ROLLING_BACK,
)
HEAD_START_S = 5.0  # seconds that the others leave to process 0, which knows who is behind
WRITING_S = 5.0  # seconds for the stacks: the file system may be what hangs
# seconds in which the cause of a peer's end may end this process too, with its own line
OWN_WORD_S = 2.0
ABORT_S = 5.0  # seconds that an abort, or an error of jax's, waits for the watchdog
# seconds that process 0 waits for the others, whose runtime would abort them without its
# coordinator
GOODBYE_S = 5.0


class Patience:
    """The limits of a process's steps and of the other phases of its wall clock. All in seconds.

    Args:
      hang_after: the least limit.
      now: by the same clock as in `finished` and `waited`.
    """

    def __init__(self, hang_after: float, now: float):
        self._hang_after = hang_after
        self._longest: dict[object, float] = {}  # by phase; None: of a step
        self._since = now  # the last finished step, or the end of another phase
        self._at: Current | None = None  # the phase other than a step at the last look
        self.step = self._finished = 0

    def finished(self, step: int, now: float) -> None:
        """Notes a finished step; at the first call the step that the start goes on from."""
        if self._finished == 2:  # a start's first step may be long, and counts until the next
            del self._longest[None]
        if self._finished:
            self._note(None, now - self._since)
        self.step, self._since = step, now
        self._finished += 1

    def expect_longer(self) -> None:
        """The next steps are others: their first one may be as long as that of a start."""
        self._finished = 0

    def suspended(self, seconds: float) -> None:
        """Notes that the process did not run for so long, so that nothing was late."""
        self._since += seconds

    def excused(self, now: float) -> None:
        """Notes that nothing is late until now."""
        self._since = now

    def waited(self, current: Current, now: float) -> float:
        """Seconds since the last finished step, or since another phase began."""
        before, self._at = self._at, None if current.phase in STEPS else current
        if before and (current.phase != before.phase or current.seconds < before.seconds):
            self._note(before.phase, before.seconds)
        if current.phase in STEPS:
            return now - self._since
        self._since = now
        return current.seconds

    def limit(self, current: Current) -> float:
        """The most that `waited` may be; infinite for a phase without a limit."""
        if current.phase in ENDLESS:
            return float("inf")
        is_step = current.phase in STEPS
        least = self._hang_after * (1 if is_step and self._finished > 1 else OTHER_PHASE)
        longest = self._longest.get(None if is_step else current.phase, 0.0)
        return max(least, TIMES_LONGEST * longest)

    def _note(self, phase: object, seconds: float) -> None:
        self._longest[phase] = max(self._longest.get(phase, 0.0), seconds)


class Watchdog:
    """Watches one process of a run from a thread of its own.

    Args:
      folder: the run's; stacks are written below it.
      peers: the connections to the other processes, which the watchdog closes; None for a run of
        one process.
      clock: of this process.
      hang_after: seconds, as `train.hang_after`; 0: nothing counts as hung.
      before_end: called before the process is ended, from another thread.
      end: ends the process by a status; os._exit except in tests.
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
        self._folder, self._peers, self._clock = folder, peers or Peers(0, 1), clock
        self._hang_after, self._before_end, self._end = hang_after, before_end, end
        self._patience = Patience(hang_after, time.monotonic())
        self.stragglers = Stragglers()  # filled on process 0
        self.evaluate_s = 0.0  # that evaluations may take longer than other phases
        self._is_alone = self._peers.processes == 1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator["Watchdog"]:
        """A context in which the process is watched. When it is left, the others are told why."""
        _active.append(self)
        self._thread.start()
        try:
            yield self
        except BaseException as error:
            if isinstance(error, RunError):
                self.say_bye(error.status, _one_line(str(error)))
            else:
                # Collectives fail before process 0 has told who is gone: the thread ends this
                # process.
                time.sleep(ABORT_S if self._peers.peers and "JaxRuntimeError" in repr(error) else 0)
                self.say_bye(ExitStatus.FAULT, _one_line(f"{type(error).__name__}: {error}"))
            # Process 0 waits until the others have ended: without it jax aborts them.
            end = time.monotonic() + GOODBYE_S
            is_main = self._peers.process == 0
            while is_main and not self._peers.all_gone() and time.monotonic() < end:
                time.sleep(0.05)
            raise
        else:
            self.say_bye(ExitStatus.FINISHED, "")
        finally:
            _active.remove(self)
            self._over.set()
            self._thread.join()
            self._peers.close()

    def finished(self, step: int) -> None:
        """Notes that the results of a step have come; at the first call, the step that the start
        goes on from."""
        self._patience.finished(step, time.monotonic())

    def expect_longer(self) -> None:
        """The next steps are others: their first one may be as long as that of a start."""
        self._patience.expect_longer()

    def say_bye(self, status: int, text: str) -> None:
        """Tells the others that this process ends, and why."""
        self._peers.say_bye(Ending(int(status), text, self._peers.process))

    def end_others(self, status: int, text: str) -> None:
        """Ends the others with this process's status and text, from any thread."""
        self._peers.end_all(Ending(int(status), text, self._peers.process))

    # --- the thread -------------------------------------------------------------------------------

    def _watch(self) -> None:
        before = next_beat = time.monotonic()
        while not self._over.is_set():
            if self._is_alone:
                self._over.wait(BEAT_S)
            else:
                self._peers.poll(next_beat - before)
            now = time.monotonic()
            # the process was stopped and goes on, or the machine slept
            if now - before > BEAT_S + self._hang_after / 2:
                self._patience.suspended(now - before)
                for peer in self._peers.peers.values():
                    peer.heard = max(peer.heard, now - self._hang_after / 2)
            before = now
            if now >= next_beat and not self._is_alone:
                next_beat = now + BEAT_S
                self._peers.beat(self._beat())
                if self._peers.process == 0 and len(self._peers.peers) == self._peers.processes - 1:
                    beats = {peer.process: (str(peer), peer.beat) for peer in self._all()}
                    self.stragglers.take(beats, now)
            ending = None if self._over.is_set() else self._look(now)
            if ending:
                return self._carry_out(ending)

    def _look(self, now: float) -> Ending | None:
        """Why the process has to end; None while it may go on."""
        current = self._clock.current
        waited, limit = self._patience.waited(current, now), self._patience.limit(current)
        limit += self.evaluate_s if current.phase is Phase.EVALUATING else 0.0
        if ending := self._peers.ending or self._after_a_peer(now):
            return ending
        if any(peer.beat.excused for peer in self._all()):
            self._patience.excused(now)
            return None
        if not self._hang_after:
            return None
        silent = self._silent(now)
        # a step that still makes progress is well
        if silent and (waited > self._hang_after or current.phase not in STEPS):
            return self._hung(
                f"nothing was heard of {_names(silent)} for "
                f"{now - min(p.heard for p in silent):.0f} s"
            )
        if waited > limit + (HEAD_START_S if self._peers.process > 0 else 0.0):
            return self._hung(
                f"no step was finished for {waited:.0f} s"
                if current.phase in STEPS
                else f"{current.phase.value} took {waited:.0f} s"
            )
        return None

    def _after_a_peer(self, now: float) -> Ending | None:
        """The ending that a peer's end makes necessary, if one has ended."""
        for peer in self._peers.peers.values():
            bye = peer.bye
            if bye and bye.status != ExitStatus.FINISHED and now - peer.heard > OWN_WORD_S:
                why = f": {bye.text}" if bye.text else ""
                text = f"{peer} ended with status {bye.status}{why}"
                return Ending(bye.status, text, peer.process)
            if peer.gone and not bye:
                step = max(peer.beat.step, self._patience.step)
                text = f"{peer} has gone without a word, after step {step}"
                return Ending(ExitStatus.LOST_PEER, text, peer.process)
        return None

    def _silent(self, now: float) -> list[Peer]:
        """The connected peers whose last message is older than `hang_after`."""
        return [
            peer
            for peer in self._peers.peers.values()
            if not peer.gone and not peer.bye and now - peer.heard > self._hang_after
        ]

    def _hung(self, what: str) -> Ending:
        return Ending(
            ExitStatus.HUNG,
            f"hung after step {self._patience.step}: {what}; {self._who_is_behind()}; the stacks "
            f"of all threads are in {self._folder / 'hang'}",
        )

    def _who_is_behind(self) -> str:
        """A line of text: which process the others wait for, as far as this one knows."""
        current = self._clock.current
        if self._is_alone:
            return f"it is at {current.phase.value}"
        if silent := self._silent(time.monotonic()):
            return (
                f"{_names(silent)} {'is' if len(silent) == 1 else 'are'} behind: stopped, or out "
                "of reach"
            )
        if self._peers.process > 0:
            return "process 0 knows who is behind, and says nothing"
        processes = self._all()
        least = min(peer.beat.step for peer in processes)
        late = [peer for peer in processes if peer.beat.step == least]
        if len(late) == len(processes):
            phases = {peer.beat.phase for peer in processes}
            usual = max(phases, key=[peer.beat.phase for peer in processes].count)
            late = [peer for peer in processes if peer.beat.phase != usual]
        if not late:
            return f"all {len(processes)} processes are at {current.phase.value} after step {least}"
        return (
            f"{_names(late)} {'is' if len(late) == 1 else 'are'} behind, at {late[0].beat.phase} "
            f"after step {late[0].beat.step}"
        )

    def _beat(self) -> Beat:
        # the others know process 0 alone, so it says what any of them waits for
        others = self._peers.peers.values() if self._peers.process == 0 else ()
        return Beat(
            self._patience.step,
            self._clock.current.phase.value,
            own_s=round(self._clock.spent(*HOST_STEPS), 4),
            data_wait_s=round(self._clock.spent(Phase.WAITING), 4),
            excused=bool(_excused) or any(peer.beat.excused for peer in others),
        )

    def _all(self) -> list[Peer]:
        """All processes, as process 0 knows them."""
        return [
            Peer(0, socket.gethostname(), os.getpid(), 0.0, self._beat()),
            *self._peers.peers.values(),
        ]

    def _carry_out(self, ending: Ending) -> None:
        """Ends the process, after telling the others; process 0 leaves last."""
        self._peers.end_all(dataclasses.replace(ending, process=self._peers.process))
        stacks = [self._write_stacks] if ending.status == ExitStatus.HUNG else []
        for task in (*stacks, self._before_end):
            # In a thread, which is not waited for longer than WRITING_S: it may hang, too.
            thread = threading.Thread(target=task, daemon=True)
            thread.start()
            thread.join(WRITING_S)
        if self._peers.process == 0:
            end = time.monotonic() + GOODBYE_S
            while time.monotonic() < end and not self._peers.all_gone():
                self._peers.poll(0.1)
        streams.write_error(f"error: {ending.text}\n")
        self._over.set()
        self._end(ending.status)

    def _write_stacks(self) -> None:
        process, step, current = self._peers.process, self._patience.step, self._clock.current
        folder = self._folder / "hang"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with fresh(folder / f"step-{step}-process-{process}.txt").open("w") as file:
                where = f"at {current.phase.value} for {current.seconds:.0f} s"
                file.write(f"process {process}, after step {step}, {where}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            streams.write_error(f"warning: the stacks are not in {folder} ({error.strerror})\n")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _names(peers: list[Peer]) -> str:
    shown = ", ".join(map(str, peers[:4]))
    return shown if len(peers) <= 4 else f"{shown} and {len(peers) - 4} others"


_active: list[Watchdog] = []
_excused: list[str] = []  # what threads of this process wait for


@contextlib.contextmanager
def excused(why: str) -> Iterator[None]:
    """A context in which neither this process nor one that waits for it counts as hung: it waits
    for something that is known to be away."""
    _excused.append(why)
    try:
        yield
    finally:
        _excused.remove(why)


def wait_for_ending(seconds: float) -> None:
    """Gives a watchdog, if there is one, so many seconds to end this process: an error may be the
    consequence of a peer's death."""
    end = time.monotonic() + seconds
    while _active and time.monotonic() < end:
        time.sleep(0.05)


def end_process(error: RunError) -> NoReturn:
    """Ends this process and the others of its run with an error's status, from any thread. No
    exception is raised: the thread that trains may be anywhere, and must not write any more."""
    for each in _active:
        each.end_others(error.status, str(error))
    streams.write_error(f"error: {_one_line(str(error))}\n")
    os._exit(error.status)


def outlive_abort() -> None:
    """Lets a watchdog end a process that is about to abort, for the rest of the process. jax's
    runtime aborts all processes with status 134 and a stack trace as soon as their coordinator
    dies; the watchdog's line and status tell who has died."""
    libc = ctypes.CDLL(None)

    def on_abort(number: int) -> None:
        wait_for_ending(ABORT_S)
        libc.signal(number, 0)  # SIG_DFL: the abort goes on

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    _handlers.append(handler)
    libc.signal(int(signal.SIGABRT), handler)


_handlers: list = []  # what C calls must live
