"""What a table costs in time and memory, by two clocks.

    independent   each stage goes through its cells on its own and waits for messages only: what the
                  papers on schedules assume
    coupled       the ticks as this runtime executes them: a permute is one operation of all stages,
                  so a stage waits for its neighbours

A tick's head takes `head` on the last unit's stage if that computes it alone. With the vocabulary
over all stages it begins when all have come to it and the last unit's output has arrived
(`message`), and takes head / stages on each. The embedding and its gradient likewise, with the
first unit's stage and `embed`. What takes no time is no event and makes nobody wait.
independent_clock.py and coupled_clock.py have the clocks.

Times are of one microbatch on a whole stage; an op on a unit takes its share, by default stages /
units. No JAX here.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxtrain.schedule.clock import Timeline, Times
from jaxtrain.schedule.coupled_clock import coupled
from jaxtrain.schedule.independent_clock import independent
from jaxtrain.schedule.table import Table, peak_residuals


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What `simulate` finds. Bubbles are fractions of time that the busiest stage is idle.

    step_time, step_time_coupled       by the independent and by the coupled clock
    bubble_fraction                    1 − busiest stage's work / step_time
    bubble_fraction_span               1 − busiest stage's work / longest time from a stage's first
                                       op to the end of its last one (Qi et al. 2023: the
                                       optimizer's step follows on each stage without a barrier)
    bubble_fraction_coupled            1 − busiest stage's work / step_time_coupled
    imbalance                          busiest stage's work / mean work of a stage
    peak_residuals                     of each stage, by `table.peak_residuals`: in chunks', from F
                                       to the end of B
    peak_residuals_with_weight_stash   the same, to the end of W
    timeline, timeline_coupled         by each clock
    """

    step_time: float
    step_time_coupled: float
    bubble_fraction: float
    bubble_fraction_span: float
    bubble_fraction_coupled: float
    imbalance: float
    peak_residuals: list[float]
    peak_residuals_with_weight_stash: list[float]
    timeline: Timeline
    timeline_coupled: Timeline


def simulate(
    table: Table,
    times: Times,
    *,
    shares: Sequence[float] | None = None,
    fused_backward: bool = False,
) -> Simulation:
    """Times a table by both clocks.

    shares: of each unit, its part of a stage's work, where units differ (uneven layers).
    fused_backward: the gradient leaves after W and not after B, as where both are one op. It
        concerns the independent clock, and needs tables whose every W is the next cell after its B.
        Raises ValueError for others.
    """
    timeline = independent(table, times, shares, fused_backward)
    timeline_coupled = coupled(table, times, shares)
    busy = np.bincount(timeline.stage, timeline.end - timeline.start, table.stages).tolist()
    first, last = np.full(table.stages, np.inf), np.zeros(table.stages)
    np.minimum.at(first, timeline.stage, timeline.start)
    np.maximum.at(last, timeline.stage, timeline.end)
    busiest, step_time = max(busy), float(last.max())
    step_time_coupled = float(timeline_coupled.end.max())
    return Simulation(
        step_time=step_time,
        step_time_coupled=step_time_coupled,
        bubble_fraction=_bubble(busiest, step_time),
        bubble_fraction_span=_bubble(busiest, float((last - first).max())),
        bubble_fraction_coupled=_bubble(busiest, step_time_coupled),
        imbalance=busiest * table.stages / sum(busy) if busiest else 1.0,
        peak_residuals=peak_residuals(table),
        peak_residuals_with_weight_stash=peak_residuals(table, count_weight_stash=True),
        timeline=timeline,
        timeline_coupled=timeline_coupled,
    )


def _bubble(work: float, time: float) -> float:
    return max(0.0, 1 - work / time) if time > 0 else 0.0
