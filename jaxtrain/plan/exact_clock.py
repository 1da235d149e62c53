"""A predicted step by the exact clock of its schedule's table, with the planner's op times. No jax.

The closed form of a bubble knows no permutes, no shares of uneven stages and no messages that come late; the coupled clock
(schedule/coupled_clock.py) does. What stands outside the table, sums over data and the optimizer, is added as the closed forms have it.
"""

import dataclasses

from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.config.pipeline_setup import make_setup
from jaxtrain.costs.step_time import FIXED, OPTIMIZER
from jaxtrain.plan.prediction import Prediction
from jaxtrain.plan.tables import op_times
from jaxtrain.schedule.simulate import Simulation

OUTSIDE = ("data", "replica", OPTIMIZER, FIXED)  # parts of a step beside the table
CELLS = 2**12  # stages · chunks on a stage · microbatches of a table that is made in a second; of longer steps a part is timed
LEAST_ROUNDS = 4  # microbatches of such a part, in those of a pipeline that is filled


@dataclasses.dataclass(frozen=True)
class Clocked:
    """Seconds of a step; the part of it that the busiest stage waits; the most microbatches whose activations a stage holds."""

    seconds: float
    bubble_fraction: float
    in_flight: float


def clocked(prediction: Prediction) -> Clocked | None:
    """By the table that training would use; None on one stage, where there is none.

    Of a step with very many microbatches two shorter ones are timed, and the rest goes on as between these. Raises ConfigError for a
    schedule that is not made for these numbers.
    """
    layout = prediction.work.layout
    if layout.stage == 1:
        return None
    config = cfg.replace(prediction.config, {"pipeline.times": prediction.work.op_times()})
    rounds = max(LEAST_ROUNDS, CELLS // (layout.stage**2 * layout.repeats))
    timed = min(layout.microbatches, rounds * layout.stage)
    table = _timed(config, timed)
    inside, work = table.step_time_coupled, table.step_time_coupled * (1 - table.bubble_fraction_coupled)
    if timed < layout.microbatches:
        half = _timed(config, rounds // 2 * layout.stage)
        further = (layout.microbatches - timed) / (timed - rounds // 2 * layout.stage)
        inside += further * (inside - half.step_time_coupled)
        work *= layout.microbatches / timed
    seconds = inside + sum(prediction.time.exposed.get(part, 0.0) for part in OUTSIDE)
    return Clocked(seconds, max(0.0, inside - work) / seconds, max(table.peak_residuals) / max(1, layout.repeats))


def _timed(config: Config, microbatches: int) -> Simulation:
    return make_setup(cfg.replace(config, {"pipeline.microbatches": microbatches})).simulation()
