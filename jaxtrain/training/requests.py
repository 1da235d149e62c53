"""Requests to the loop to stop or to save. All processes must follow a request after the same step,
so they agree on it."""

import enum
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.devices import cluster
from jaxtrain.run.signals import Signals


class Request(enum.Flag):
    """Requests to the loop, to be combined."""

    NOTHING = 0
    STOP = enum.auto()  # a signal has reached some process
    # the signal was Ctrl-C: a person does not want the run restarted
    INTERRUPT = enum.auto()
    HURRY = enum.auto()  # the machine is taken away before another save could end
    SAVE = enum.auto()  # checkpoint.minutes have passed on process 0

    @property
    def stop(self) -> bool:
        return Request.STOP in self


Answer = Callable[[], Request]  # waits for the requests of all processes


def no_request() -> Request:
    """The answer after a step at which processes do not ask each other."""
    return Request.NOTHING


class Saves(Protocol):
    """Saves, as checkpoint.manager.Checkpointer has them. busy: one is under way; longest_s:
    seconds of the longest so far."""

    @property
    def longest_s(self) -> float: ...

    @property
    def busy(self) -> bool: ...


class Requests:
    """Asks all processes. The question goes through the devices, behind the step that is running,
    and is answered with its results.

    Args:
      mesh: the devices of all processes.
      signals: this process's.
      saves: no save is asked for while one is under way, which the next would wait for.
      minutes: after a save until it is time for the next; 0 means never.
      grace: seconds after a signal until the machine is taken away; 0: not known, and enough.
      clock: seconds.
    """

    def __init__(
        self,
        mesh: Mesh,
        signals: Signals,
        saves: Saves,
        minutes: float,
        grace: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._signals, self._saves, self._grace = signals, saves, grace or math.inf
        self._interval = 60 * minutes if minutes else math.inf
        self._clock, self._last_save = clock, clock()
        self._devices = mesh.size
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        # Devices combine the flags, and not the hosts: the answer then comes behind the step that
        # is running, with its results, and no process waits for another at a point of its own.
        self._any = jax.jit(
            lambda flags: flags.max(axis=0), out_shardings=NamedSharding(mesh, PartitionSpec())
        )

    def saved(self) -> None:
        """Counts the minutes until the next save from now on."""
        self._last_save = self._clock()

    def ask(self) -> Answer:
        """A function that waits for the answer. Every process must call this after the same
        step."""
        # Alone, a process looks at its signals when it reads the answer, a step later than it asks:
        # a signal of that time still counts.
        if jax.process_count() == 1:
            return self._of_this_process
        request = self._of_this_process()
        # Each device of a process has the flags of this process, so a maximum over all devices has
        # every request that some process has.
        flags = np.tile(
            np.array([flag in request for flag in Request], np.int32), (self._devices, 1)
        )
        answer = self._any(
            jax.make_array_from_callback(flags.shape, self._sharding, flags.__getitem__)
        )

        return lambda: _together(dict(zip(Request, np.asarray(answer), strict=True)))

    def _of_this_process(self) -> Request:
        # Clocks differ between processes: that of process 0 decides for all.
        late = (
            cluster.is_main()
            and self._clock() - self._last_save >= self._interval
            and not self._saves.busy
        )
        # A save that is under way is finished first.
        needed = (2 if self._saves.busy else 1) * self._saves.longest_s
        return _together(
            {
                Request.STOP: self._signals.asked,
                Request.INTERRUPT: self._signals.interrupted,
                Request.HURRY: self._clock() + needed > self._signals.asked_at + self._grace,
                Request.SAVE: late,
            }
        )


def _together(asked: Mapping[Request, Any]) -> Request:
    """The requests of a mapping that are true."""
    return Request(sum(request.value for request, is_asked in asked.items() if is_asked))
