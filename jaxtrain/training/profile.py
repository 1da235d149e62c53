"""A trace of a few steps, for `train.profile_steps`: the ops of the devices, without the host's
Python, which would slow the steps down."""

import dataclasses
import pathlib
from collections.abc import Callable

import jax

from jaxtrain.run import streams
from jaxtrain.run.wall_clock import STEPS, Part, WallClock
from jaxtrain.training.recovery import Rollback

WARM_UP = 2  # steps of a run that are not traced


@dataclasses.dataclass
class Profile:
    """A jax.profiler trace of `count` steps after the first WARM_UP ones, or of those that there
    are: whole steps and nothing else.

    folder: where the trace goes, one of this process alone; start: the step that the run begins
        with; clock: of the command; say: gets a line where the trace cannot be written, which the
        run can do without.
    step_time_s: the mean of the traced steps, by the parts of the clock that are steps; None until
        all of them have been traced.
    """

    folder: pathlib.Path
    start: int
    count: int
    clock: WallClock
    say: Callable[[str], object] = streams.log
    step_time_s: float | None = dataclasses.field(default=None, init=False)
    _began: float | None = dataclasses.field(default=None, init=False)
    _failed: bool = dataclasses.field(default=False, init=False)  # jax begins no other trace then

    def before(self, at: int) -> None:
        """The step after step `at` begins."""
        if self.count and at == self.start + WARM_UP and not self._failed:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            with self.clock.part(Part.OTHER):
                jax.profiler.start_trace(str(self.folder), profiler_options=options)
            self._began = self.clock.spent(*STEPS)

    def after(self, at: int, results: object) -> None:
        """Step `at` has been dispatched; `results`: arrays that are there when it has ended."""
        if self.count and at == self.start + WARM_UP:
            jax.block_until_ready(results)
        if self._began is not None and at == self.start + WARM_UP + self.count:
            jax.block_until_ready(results)
            self.step_time_s = (self.clock.spent(*STEPS) - self._began) / self.count
            self.close()

    def go_back(self, _: Rollback) -> None:
        """The run stands at an earlier step: a trace under way ends, and begins anew where its
        first step comes again."""
        self.close()

    def close(self) -> None:
        """Ends the trace."""
        if self._began is None:
            return
        self._began = None
        with self.clock.part(Part.OTHER):
            try:
                jax.profiler.stop_trace()
            # which names the file, and what the disk lacks
            except (OSError, jax.errors.JaxRuntimeError) as error:
                why = " ".join(str(error).rpartition("; ")[2].split())
                self._failed = True
                self.say(
                    f"warning: {self.folder} cannot be written ({why}): training goes on without it"
                )


def trace_folder(run: pathlib.Path) -> pathlib.Path:
    """This process's folder of traces: processes of one machine would write to one file."""
    return run / "profile" / (f"process_{jax.process_index()}" if jax.process_count() > 1 else "")
