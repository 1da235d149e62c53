"""Pictures of plans: memory and time as stacked bars, one for each layout, or one for each stage if
the devices are of several kinds. No jax."""

import textwrap
from collections.abc import Sequence
from typing import Any

from jaxtrain.planner.layer.hardware import GIB
from jaxtrain.planner.search import layout_flag
from jaxtrain.planner.search.heterogeneous import HeterogeneousPlan
from jaxtrain.planner.search.predict import Prediction
from jaxtrain.schedule.drawing import PARTS, stacked_bars

# Key of a layout → the value that a bar's name leaves out.
USUAL = {
    "data": 1,
    "stage": 1,
    "model": 1,
    "context": 1,
    "expert": 1,
    "replica": 1,
    "repeats": 1,
    "offload": "none",
}
BAR, LEAST_WIDTH, MOST_WIDTH = 0.9, 7.0, 24.0  # inches of a bar with its margins, and of a picture
WIDTH = 0.7  # of a bar, of the space that it has
LETTERS = 9  # of a title in an inch
LEAST_BARS = 4  # that the axes are wide enough for, at least
MOST_LABELS = 32  # of stages


def of_layouts(predictions: Sequence[Prediction], model: str) -> Any:
    """Memory of a device and time of a step, a bar for each layout, with the capacity and the
    fastest marked.

    model: its name in the title.
    """
    hardware, bars = predictions[0].work.hardware, range(len(predictions))
    figure, (above, below) = _figure(
        len(predictions), f"{model}, on {predictions[0].devices:,} × {hardware.name}, as planned"
    )
    stacked_bars(
        above,
        bars,
        [{name: size / GIB for name, size in p.memory.parts.items()} for p in predictions],
        WIDTH,
    )
    above.axhline(
        hardware.memory / GIB,
        color="black",
        linestyle="--",
        linewidth=1,
        label="memory of a device",
    )
    seconds = [p.time.exposed for p in predictions]
    stacked_bars(below, bars, seconds, WIDTH)
    below.margins(y=0.12)  # for the texts on the bars
    fastest = min(range(len(predictions)), key=lambda i: predictions[i].seconds)
    for i, parts in enumerate(seconds):
        is_marked, height = i == fastest and len(predictions) > 1, sum(parts.values())
        weight = "bold" if is_marked else "normal"
        below.text(
            i,
            height,
            f"{height:.3g} s" + "\nfastest" * is_marked,
            ha="center",
            va="bottom",
            fontsize=8,
            fontweight=weight,
        )
    below.set_xticks(range(len(predictions)), [_name(p) for p in predictions], fontsize=7)
    margin = max(1.0, (LEAST_BARS - len(predictions)) / 2)  # keeps a single bar narrow
    below.set_xlim(-margin, len(predictions) - 1 + margin)
    below.get_xticklabels()[fastest].set_fontweight("bold" if len(predictions) > 1 else "normal")
    _legends(above, below)
    return figure


def of_groups(plan: HeterogeneousPlan, model: str) -> Any:
    """Memory and time of each stage of a layout over groups of devices, in its group's colour."""
    stages = len(plan.layers)
    groups = " and ".join(f"{group.devices:,} × {group.hardware.name}" for group in plan.groups)
    figure, (above, below) = _figure(
        stages / 2, f"{model}, on {groups}: a step of {plan.seconds:.3g} s, as planned"
    )
    for number, (group, members) in enumerate(plan.stages()):
        color, name = f"C{number}", group.hardware.name
        bars = {"width": WIDTH, "color": color}
        above.bar(
            members,
            [plan.memory[stage] / GIB for stage in members],
            label=f"needed on {name}",
            **bars,
        )
        line = {"color": color, "linestyle": "--", "label": f"memory of {name}"}
        above.hlines(group.hardware.memory / GIB, members.start - 0.5, members.stop - 0.5, **line)
        below.bar(
            members, [plan.stage_s[stage] for stage in members], label=f"work on {name}", **bars
        )
    waits = [plan.seconds - busy for busy in plan.stage_s]
    below.bar(
        range(stages),
        waits,
        bottom=plan.stage_s,
        width=WIDTH,
        color=PARTS["bubble"],
        label="waiting, and what is outside the table",
    )
    shown = range(0, stages, -(-stages // MOST_LABELS))
    below.set_xticks(shown, [f"{stage}\n({plan.layers[stage]})" for stage in shown], fontsize=8)
    below.set_xlabel("stage (its layers)")
    _legends(above, below)
    return figure


def _figure(bars: float, title: str) -> tuple[Any, Any]:
    """A figure wide enough for this number of bars, and its two axes, which share x."""
    from matplotlib.figure import Figure  # not pyplot: no display, no state

    width = min(max(LEAST_WIDTH, 4 + BAR * bars), MOST_WIDTH)
    figure = Figure(figsize=(width, 8), layout="constrained")
    figure.suptitle(textwrap.fill(title, int(LETTERS * width)))
    above, below = figure.subplots(2, 1, sharex=True)
    above.set_ylabel("GiB of the fullest device")
    below.set_ylabel("seconds of a step")
    return figure, (above, below)


def _legends(*axes: Any) -> None:
    """Adds a legend to the right of each axes."""
    for each in axes:
        handles, labels = each.get_legend_handles_labels()
        wrapped = [textwrap.fill(label, 32) for label in labels]
        each.legend(
            handles, wrapped, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, reverse=True
        )


def _name(prediction: Prediction) -> str:
    values = layout_flag.of(prediction.config)
    return "\n".join(
        [
            *(f"{key} {values[key]}" for key, usual in USUAL.items() if values[key] != usual),
            f"zero {values['zero']}",
            f"microbatch {values['microbatch']}",
            values["schedule"],
            f"remat {values['remat']}",
        ]
    )
