"""A predicted step by the exact clock of its schedule's table, with the planner's op times. No jax.

The closed form of a bubble knows no permutes, no shares of uneven stages and no messages that come late; the coupled clock
(schedule/coupled_clock.py) does. What stands outside the table, sums over data and the optimizer, is added as the closed forms have it.
"""

import dataclasses

from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.config.pipeline_setup import make_setup
from jaxtrain.config.work import milliseconds
from jaxtrain.costs.step_time import FIXED, HOST, OPTIMIZER
from jaxtrain.plan import tables
from jaxtrain.plan.prediction import Prediction
from jaxtrain.schedule.simulate import Simulation

OUTSIDE = ("data", "replica", OPTIMIZER, HOST, FIXED)  # parts of a step beside the table


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
    config = cfg.replace(prediction.config, {"pipeline.times": milliseconds(prediction.work.op_times())})
    timed = min(layout.microbatches, tables.most_microbatches(layout.stage, layout.repeats))
    table = _timed(config, timed)
    inside, work = table.step_time_coupled, table.step_time_coupled * (1 - table.bubble_fraction_coupled)
    if timed < layout.microbatches:
        fewer = timed // layout.stage // 2 * layout.stage
        half = _timed(config, fewer)
        further = (layout.microbatches - timed) / (timed - fewer)
        inside += further * (inside - half.step_time_coupled)
        work *= layout.microbatches / timed
    seconds = 1e-3 * inside + sum(prediction.time.exposed.get(part, 0.0) for part in OUTSIDE)
    return Clocked(seconds, 1e-3 * max(0.0, inside - work) / seconds, max(table.peak_residuals) / max(1, layout.repeats))


def _timed(config: Config, microbatches: int) -> Simulation:
    return make_setup(cfg.replace(config, {"pipeline.microbatches": microbatches})).simulation()
