"""What a table costs, as figures: a dict for JSON, a few lines for people, or many schedules side
by side. No JAX here."""

from typing import Any

from jaxtrain.schedule.simulate import Simulation
from jaxtrain.schedule.slots import assign_slots
from jaxtrain.schedule.table import Permute, Table

Figures = dict[str, Any]  # as JSON has them


def figures(table: Table, result: Simulation) -> Figures:
    """What --json prints."""
    slotted = assign_slots(table)
    return {
        "schedule": table.name,
        "stages": table.stages,
        "repeats": max(1, len(set(table.chunk_of)) // table.stages),
        "microbatches": table.microbatches,
        "permutes": {when.name.lower(): int((table.permute == when).sum()) for when in Permute},
        "ticks": table.ticks,
        "step_time": result.step_time,
        "step_time_coupled": result.step_time_coupled,
        "bubble_fraction": result.bubble_fraction,
        "bubble_fraction_span": result.bubble_fraction_span,
        "bubble_fraction_coupled": result.bubble_fraction_coupled,
        "peak_residuals": result.peak_residuals,
        "peak_residuals_with_weight_stash": result.peak_residuals_with_weight_stash,
        "pool_sizes": slotted.pool_sizes,
        "slots_per_stage": {pool: list(counts) for pool, counts in slotted.slots_per_stage.items()},
    }


def summary(values: Figures) -> str:
    """The figures in words."""
    permutes = ", ".join(f"{count} {when}" for when, count in values["permutes"].items() if count)
    lines = [
        f"ticks               {values['ticks']} (permutes: {permutes})",
        f"step time           {values['step_time']:g} independent, "
        f"{values['step_time_coupled']:g} coupled",
        f"bubble              {values['bubble_fraction']:.2%} of the step, "
        f"{values['bubble_fraction_span']:.2%} of the longest span, "
        f"{values['bubble_fraction_coupled']:.2%} coupled",
        f"peak residuals      {_numbers(values['peak_residuals'])} chunks on each stage; with "
        "what B leaves for W "
        f"{_numbers(values['peak_residuals_with_weight_stash'])}",
        "slots               "
        f"{', '.join(f'{pool} {count}' for pool, count in values['pool_sizes'].items())}",
    ]
    return "\n".join(lines)


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def comparison(listed: list[Figures], repeats: int) -> str:
    """The figures of schedules side by side, a line each. repeats: the number of chunks on a stage
    that was asked for, 0 for none."""
    width = max(len(values["schedule"]) for values in listed)
    lines = [
        f"{'schedule':{width}}  repeats  ticks  step coupled  independent  bubble coupled  "
        "independent    span  residuals"
    ]
    for values in listed:
        lines.append(
            f"{values['schedule']:{width}}  {values['repeats']:7}  {values['ticks']:5}  "
            f"{values['step_time_coupled']:12.6g}  "
            f"{values['step_time']:11.6g}  {values['bubble_fraction_coupled']:14.2%}  "
            f"{values['bubble_fraction']:11.2%}  "
            f"{values['bubble_fraction_span']:6.2%}  {values['memory']:9.4g}"
            + ("" if values["fits"] else "  more than --memory")
        )
    unit = "of a stage" if repeats in (0, 1) else f"of 1/{repeats} of a stage"
    lines.append(
        f"residuals: the most at once on any stage, {unit} for one microbatch, from F to the "
        "end of W"
    )
    return "\n".join(lines) + "\n"
