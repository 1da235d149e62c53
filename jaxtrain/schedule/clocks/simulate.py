"""The time and memory of a table, by the two clocks of clocks/: as numbers, as figures for JSON,
and as text. No JAX here."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.schedule.clocks.coupled import coupled
from jaxtrain.schedule.clocks.independent import independent
from jaxtrain.schedule.clocks.times import Timeline, Times
from jaxtrain.schedule.slots import assign_slots
from jaxtrain.schedule.table import Permute, Table, peak_residuals


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A table's times and memory. Bubbles are fractions of time in which the busiest stage
    is idle.

    step_time, step_time_coupled       of the table, by the independent and by the coupled clock
    span                               longest time from a stage's first op to the end of its last
                                       one, independent clock
    bubble_fraction                    1 − busiest stage's work / step_time
    bubble_fraction_span               1 − busiest stage's work / span (Qi et al. 2023: the
                                       optimizer's step follows on each stage without a barrier)
    bubble_fraction_coupled            1 − busiest stage's work / step_time_coupled
    imbalance                          busiest stage's work / mean work of a stage
    peak_residuals                     of each stage, by `table.peak_residuals`, from F to the end
                                       of B
    peak_residuals_with_weight_stash   the same, to the end of W
    timeline, timeline_coupled         by each clock
    """

    step_time: float
    step_time_coupled: float
    span: float
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
        Raises NotFused for others.

    >>> from jaxtrain.schedule.by_name import make_table
    >>> from jaxtrain.schedule.table_spec import TableSpec
    >>> spec = TableSpec("1f1b", stages=4, repeats=1, microbatches=8)
    >>> result = simulate(make_table(spec), Times(F=1.0, B=1.0, W=1.0))
    >>> result.step_time, round(result.bubble_fraction, 3)
    (30.0, 0.2)
    """
    # 1F1B on 2 stages, 4 microbatches, F = B = W = 1: each stage works 12 of the 14 that the step
    # takes. The span of stage 0 is 14, too, so both bubbles are 1/7.
    timeline = independent(table, times, shares, fused_backward)
    timeline_coupled = coupled(table, times, shares)
    busy = np.bincount(timeline.stage, timeline.end - timeline.start, table.stages).tolist()
    begin, end = np.full(table.stages, np.inf), np.zeros(table.stages)
    np.minimum.at(begin, timeline.stage, timeline.start)
    np.maximum.at(end, timeline.stage, timeline.end)
    busiest, step_time = max(busy), float(end.max())
    step_time_coupled, span = float(timeline_coupled.end.max()), float((end - begin).max())

    def bubble(time: float) -> float:
        return max(0.0, 1 - busiest / time) if time > 0 else 0.0

    return Simulation(
        step_time=step_time,
        step_time_coupled=step_time_coupled,
        span=span,
        bubble_fraction=bubble(step_time),
        bubble_fraction_span=bubble(span),
        bubble_fraction_coupled=bubble(step_time_coupled),
        imbalance=busiest * table.stages / sum(busy) if busiest else 1.0,
        peak_residuals=peak_residuals(table),
        peak_residuals_with_weight_stash=peak_residuals(table, count_weight_stash=True),
        timeline=timeline,
        timeline_coupled=timeline_coupled,
    )


# --- as figures and text --------------------------------------------------------------------------

Figures = dict[str, Any]  # as JSON has them


def figures(table: Table, result: Simulation) -> Figures:
    """The object that --json prints. Times are of one step, those of the table divided by its
    steps."""
    # A table of several steps has the times of all of them; its figures are of one. Bubbles and
    # residuals are those of the table.
    slotted = assign_slots(table)
    return {
        "schedule": table.name,
        "stages": table.stages,
        "repeats": max(1, len(set(table.chunk_of)) // table.stages),
        "microbatches": table.microbatches_per_step,
        "steps_per_program": table.steps,
        "permutes": {when.name.lower(): int((table.permute == when).sum()) for when in Permute},
        "ticks": table.ticks,
        "step_time": result.step_time / table.steps,
        "step_time_coupled": result.step_time_coupled / table.steps,
        "span": result.span / table.steps,
        "bubble_fraction": result.bubble_fraction,
        "bubble_fraction_span": result.bubble_fraction_span,
        "bubble_fraction_coupled": result.bubble_fraction_coupled,
        "peak_residuals": result.peak_residuals,
        "peak_residuals_with_weight_stash": result.peak_residuals_with_weight_stash,
        "pool_sizes": slotted.pool_sizes,
        "slots_per_stage": {pool: list(counts) for pool, counts in slotted.slots_per_stage.items()},
    }


def summary(values: Figures) -> str:
    """The figures in words, a line each."""
    permutes = ", ".join(f"{count} {when}" for when, count in values["permutes"].items() if count)
    peaks, with_stash = (
        " ".join(f"{value:g}" for value in values[name])
        for name in ("peak_residuals", "peak_residuals_with_weight_stash")
    )
    slots = ", ".join(f"{pool} {count}" for pool, count in values["pool_sizes"].items())
    return "\n".join(
        [
            f"ticks               {values['ticks']} (permutes: {permutes})",
            f"step time           {values['step_time']:g} independent, "
            f"{values['step_time_coupled']:g} coupled; longest span of a stage {values['span']:g}",
            f"bubble              {values['bubble_fraction']:.2%} of the step, "
            f"{values['bubble_fraction_span']:.2%} of the longest span, "
            f"{values['bubble_fraction_coupled']:.2%} coupled",
            f"peak residuals      {peaks} chunks on each stage; with what B leaves for W "
            f"{with_stash}",
            f"slots               {slots}",
        ]
    )


def comparison(listed: list[Figures], repeats: int) -> str:
    """The figures of schedules side by side, a line each. repeats: the number of chunks on a stage
    that was asked for, 0 for none."""
    width = max(len(values["schedule"]) for values in listed)
    unit = "of a stage" if repeats in (0, 1) else f"of 1/{repeats} of a stage"
    return "\n".join(
        [
            f"{'schedule':{width}}  repeats  ticks  step coupled  independent  bubble coupled  "
            "independent    span  residuals",
            *(
                f"{values['schedule']:{width}}  {values['repeats']:7}  {values['ticks']:5}  "
                f"{values['step_time_coupled']:12.6g}  "
                f"{values['step_time']:11.6g}  {values['bubble_fraction_coupled']:14.2%}  "
                f"{values['bubble_fraction']:11.2%}  "
                f"{values['bubble_fraction_span']:6.2%}  {values['memory']:9.4g}"
                f"{'' if values['fits'] else '  more than --memory'}"
                for values in listed
            ),
            f"residuals: the most at once on any stage, {unit} for one microbatch, from F to the "
            "end of W\n",
        ]
    )
