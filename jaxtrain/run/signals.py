"""SIGTERM, Ctrl-C and SIGHUP during a run: before the loop they end the process, during the loop
they ask it to stop. No jax.

SIGHUP, which comes when a terminal or a connection is closed, means the same as SIGTERM; under
`nohup` it is ignored.

Python runs a signal's handler when its main thread returns from C code, which may compile for
minutes or wait for a device that never answers. So the handlers here do nothing: the interpreter
writes each signal's number into a pipe at once, and a thread reads it there.
"""

import contextlib
import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.run import streams

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NOTICE = "stopping after this step; Ctrl-C again ends at once, without saving\n"


def _nothing(number: int, frame: Any) -> None:
    """A handler without effect; with a handler, the interpreter writes to the pipe."""


class Signals:
    """A context in which SIGTERM, Ctrl-C and SIGHUP end the process by that signal, after
    `before_end()`; inside `deferred()` they ask the loop to stop.

    A signal that is ignored or has another handler keeps it until `deferred()`, an ignored SIGHUP
    there too. Where Ctrl-C has another handler, as in a notebook, a second one inside `deferred()`
    is given to it, and the process lives on. Only the main thread may change handlers: in another
    thread the context leaves all signals as they are.

    Args:
      before_end: called from another thread.
      notices: whether a Ctrl-C inside `deferred()` is answered on standard error.
    """

    def __init__(self, before_end: Callable[[], object], notices: bool = True):
        self.asked = False  # whether a signal inside `deferred()` has asked to stop
        self.interrupted = False  # whether it was Ctrl-C
        self.asked_at = math.inf  # when, by time.monotonic
        self._before_end, self._notices = [before_end], notices
        self._deferring = False
        self._interrupts = 0  # Ctrl-Cs inside `deferred()`
        self._program_handler: Any = None  # of Ctrl-C outside `deferred()`, where there is one
        self._taken = False  # whether signals come here

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._taken = True
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {
            n: signal.signal(n, _nothing) for n in NUMBERS if signal.getsignal(n) == signal.SIG_DFL
        }
        # The signals for which the program itself has a handler, such as Python's, which raises
        # KeyboardInterrupt. It is called as ever.
        self._handled = {n for n in {*NUMBERS} - {*self._before} if callable(signal.getsignal(n))}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._taken:
            return
        _active.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def before_end(self, call: Callable[[], object]) -> None:
        """Adds a call before the end, from another thread, ahead of those added so far."""
        self._before_end.insert(0, call)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A context in which a signal sets `asked`. The second Ctrl-C ends the process, or is given
        to the program's handler if there is one."""
        if not self._taken:
            yield
            return
        self._deferring = True
        before = {
            n: signal.signal(n, _nothing)
            for n in NUMBERS
            if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN
        }
        if signal.SIGINT in self._handled:
            self._program_handler = before[signal.SIGINT]
            signal.signal(signal.SIGINT, self._give_second)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._deferring = False

    def _give_second(self, number: int, frame: Any) -> None:
        """The handler of Ctrl-C in a program that has one of its own, which it calls from the
        second one on. `_watch` has the first."""
        self._interrupts += 1
        if self._interrupts > 1:
            self._program_handler(number, frame)

    def _watch(self) -> None:
        while number := os.read(self._read, 1)[0]:
            if number not in NUMBERS:
                continue  # another handler's signal
            if self._deferring and not (self.interrupted and number == signal.SIGINT):
                self.interrupted = self.interrupted or number == signal.SIGINT
                self.asked_at = min(self.asked_at, time.monotonic())
                self.asked = True
                if number == signal.SIGINT and self._notices:
                    streams.write_error(NOTICE)
            elif number not in self._handled:
                for each in self._before_end:
                    each()
                # The C library changes the handler, for Python does that in the main thread only.
                ctypes.CDLL(None).signal(number, 0)  # SIG_DFL
                os.kill(os.getpid(), number)
                os._exit(128 + number)  # the first process of a container does not die by signals


_active: list[Signals] = []


def _in_a_child() -> None:
    """Restores the signals of a forked process, which shares the pipe and would answer for its
    parent."""
    if _active:
        signal.set_wakeup_fd(-1)
        ours = [_nothing, *(each._give_second for each in _active)]
        for number in NUMBERS:
            if signal.getsignal(number) in ours:
                signal.signal(number, signal.SIG_DFL)
        _active.clear()


os.register_at_fork(after_in_child=_in_a_child)
