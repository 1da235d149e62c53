"""A run's listener that measures its step after warm-up and says it beside the planned one, by part where steps are traced.

Once in each start of the run. Process 0 says, writes and reads its own trace; that takes the loop's time, but not the steps' (Part.OTHER),
and the other processes wait for it outside of any step, which would count as hung.
"""

import pathlib
import re
import statistics
from collections.abc import Callable

import jax
from jax.stages import Compiled

from jaxtrain.config import Config
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import AXES, sizes_of
from jaxtrain.hlo.trace import read
from jaxtrain.plan.measured_parts import Kinds, measured_parts
from jaxtrain.plan.planned_step import PLANNED, PlannedStep, Trace, plan_at_hand
from jaxtrain.run.goodput import STEPS, Part, WallClock
from jaxtrain.run.line_file import warned
from jaxtrain.training.profile import WARM_UP, Profile
from jaxtrain.training.recovery import Rollback

STEPS_MEASURED = 10
LEAST = 3  # of a run that ends before


class AfterWarmUp:
    """Times the steps after the first ones and those of the profile.

    Args:
      config: a resolved config whose mesh is known.
      program: of the step.
      folder: of the run, where planned.json goes.
      profile: of the loop, which is told of every step before this.
      clock: of the command.
      say: gets the lines.
    """

    def __init__(
        self,
        config: Config,
        device_kind: str,
        program: Compiled,
        folder: pathlib.Path,
        profile: Profile,
        clock: WallClock,
        say: Callable[[str], object],
    ):
        self._config, self._program, self._folder = config, program, folder
        self._profile, self._clock, self._say = profile, clock, say
        self._plan = plan_at_hand(config, device_kind).prediction
        # The first steps; then those that are traced; then one that finds nothing before it, for which nothing is awaited.
        self._first = profile.start + WARM_UP + profile.count + 1
        self._laps: list[float] = []
        self._since: float | None = None

    def after(self, at: int) -> None:
        """Step `at` has been dispatched, and the one before has ended."""
        if self._plan is None or at < self._first:
            return
        now = self._clock.spent(*STEPS)
        if self._since is not None:
            self._laps.append(now - self._since)
        self._since = now
        if len(self._laps) >= STEPS_MEASURED:
            self._report(at)

    def go_back(self, _: Rollback) -> None:
        """The run stands at an earlier step: steps are timed from the next one on."""
        self._since = None

    def finish(self, at: int) -> None:
        """The run ends at this step: what was measured is said, if that is enough."""
        if len(self._laps) >= LEAST:
            self._report(at)

    def _report(self, at: int) -> None:
        """Says and writes it, for the only time."""
        plan, laps = self._plan, self._laps
        assert plan is not None
        self._plan, self._laps = None, []
        with self._clock.part(Part.OTHER):
            if cluster.is_main():
                time, name = plan.time, plan.work.hardware.name
                step = PlannedStep(at, name, plan.seconds, time.exposed, time.hidden, len(laps), statistics.median(laps), self._trace())
                for line in step.lines():
                    self._say(line)
                with warned(self._folder / PLANNED, self._say):
                    (self._folder / PLANNED).write_text(step.as_json())
            if self._profile.step_time_s is not None and jax.process_count() > 1:
                cluster.barrier("the profile is read")

    def _trace(self) -> Trace | None:
        """The profile's steps by part; None where none were traced, or a line says why they cannot be read."""
        seconds = self._profile.step_time_s
        if seconds is None:
            return None
        try:
            text = self._program.as_text() or ""
            module = re.match(r"HloModule ([\w.\-]+)", text)
            events = read(self._profile.folder, module[1] if module else "")
            mesh = dict(zip(AXES, sizes_of(self._config.mesh), strict=True))
            found = measured_parts(events, Kinds(text, mesh), self._profile.count, seconds)
        except Exception as error:  # texts of XLA change from version to version: no reason to end a run
            self._say(f"warning: the profile cannot be read by part ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
            return None
        return Trace(seconds, found.device, found.time.exposed, found.time.hidden)
