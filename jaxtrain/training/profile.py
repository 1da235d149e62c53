"""The trace of a few steps for `train.profile_steps`. It has the ops of the devices, but not the
host's Python calls, which would slow the steps down."""

import dataclasses
import pathlib
from collections.abc import Callable

import jax

from jaxtrain.run import streams
from jaxtrain.run.wall_clock import STEPS, Phase, WallClock
from jaxtrain.training.recovery import Rollback

WARM_UP = 2  # steps of a run that are not traced


@dataclasses.dataclass
class Profile:
    """A jax.profiler trace of the `count` steps after the first WARM_UP ones, or of as many of them
    as the run has.

    folder: of the trace, for this process only; start: the step that the run starts from; clock:
        of the command; log: gets a warning where the trace cannot be written
    step_time_s: the mean over the traced steps, in seconds of the clock's STEPS; None until all of
        them have been traced
    """

    folder: pathlib.Path
    start: int
    count: int
    clock: WallClock
    log: Callable[[str], object] = streams.log
    step_time_s: float | None = dataclasses.field(default=None, init=False)
    _began: float | None = dataclasses.field(default=None, init=False)
    _failed: bool = dataclasses.field(default=False, init=False)  # jax begins no other trace then

    def before(self, at: int) -> None:
        """Starts the trace if it begins with the step after `at`."""
        if self.count and at == self.start + WARM_UP and not self._failed:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # the host's Python calls would slow the steps down
            with self.clock.phase(Phase.OTHER):
                jax.profiler.start_trace(str(self.folder), profiler_options=options)
            self._began = self.clock.spent(*STEPS)

    def stops(self, at: int) -> bool:
        """True if the trace begins or ends after this step."""
        return bool(self.count) and at - self.start - WARM_UP in (0, self.count)

    def after(self, at: int, results: object) -> None:
        """Ends the trace if step `at` is its last. results: the arrays of this step, which has been
        dispatched."""
        # The loop dispatches steps ahead. Both waits put the ends of the trace between two steps:
        # the devices have then run exactly `count` of them in it.
        if self.count and at == self.start + WARM_UP:
            jax.block_until_ready(results)
        if self._began is not None and at == self.start + WARM_UP + self.count:
            jax.block_until_ready(results)
            self.step_time_s = (self.clock.spent(*STEPS) - self._began) / self.count
            self.close()

    def go_back(self, _: Rollback) -> None:
        """Ends a trace under way; it begins anew when its first step comes again."""
        self.close()

    def close(self) -> None:
        """Ends the trace."""
        if self._began is None:
            return
        # Before the trace is written, so that it is ended once even if writing fails.
        self._began = None
        with self.clock.phase(Phase.OTHER):
            try:
                jax.profiler.stop_trace()
            # the message names the file and the reason
            except (OSError, jax.errors.JaxRuntimeError) as error:
                why = " ".join(str(error).rpartition("; ")[2].split())
                self._failed = True
                self.log(
                    f"warning: {self.folder} cannot be written ({why}): training goes on without it"
                )


def trace_folder(run: pathlib.Path) -> pathlib.Path:
    """This process's folder of traces, for processes of one machine would write to one file."""
    return run / "profile" / (f"process_{jax.process_index()}" if jax.process_count() > 1 else "")
