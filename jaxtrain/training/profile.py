"""A trace of a few steps, for `train.profile_steps`."""

import dataclasses
import pathlib

import jax

from jaxtrain.training.recovery import Rollback

WARM_UP = 2  # steps of a run that are not traced


@dataclasses.dataclass
class Profile:
    """A jax.profiler trace of `count` steps after the first WARM_UP ones, or of those that there are.

    folder: where the trace goes, one of this process alone; start: the step that the run begins with.
    """

    folder: pathlib.Path
    start: int
    count: int
    running: bool = dataclasses.field(default=False, init=False)

    def before(self, at: int) -> None:
        """The step after step `at` begins."""
        if self.count and at == self.start + WARM_UP:
            jax.profiler.start_trace(str(self.folder))
            self.running = True

    def after(self, at: int, results: object) -> None:
        """Step `at` has been dispatched; `results`: arrays that are there when it has ended."""
        if at == self.start + WARM_UP + self.count:
            jax.block_until_ready(results)
            self.close()

    def go_back(self, _: Rollback) -> None:
        """The run stands at an earlier step: a trace under way ends, and begins anew where its first step comes again."""
        self.close()

    def close(self) -> None:
        """Ends the trace."""
        if self.running:
            jax.profiler.stop_trace()
            self.running = False


def trace_folder(run: pathlib.Path) -> pathlib.Path:
    """This process's folder of traces: processes of one machine would write to one file."""
    return run / "profile" / (f"process_{jax.process_index()}" if jax.process_count() > 1 else "")
