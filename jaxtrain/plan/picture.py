"""Memory and time of plans as stacked bars, by matplotlib. No jax."""

import io
from collections.abc import Mapping, Sequence

from jaxtrain.costs.hardware import GIB
from jaxtrain.plan import layout_flag
from jaxtrain.plan.plans import Plan
from jaxtrain.plan.prediction import Prediction

SHORT = ("data", "stage", "model", "context", "expert", "replica")  # what a bar is named by, where it is more than 1
BAR = 0.9  # inches of a bar and the room around it


def png(plans: Sequence[Plan]) -> bytes:
    """The picture: a row of bars for a device's memory, with a line for what it has, and one for a step's time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    predictions = [plan.prediction for plan in plans]
    figure = Figure(figsize=(4 + BAR * len(plans), 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _bars(above, [{name: size / GIB for name, size in p.memory.parts.items()} for p in predictions])
    above.axhline(predictions[0].work.hardware.memory / GIB, color="black", linestyle="--", linewidth=1)
    above.set_ylabel(f"GiB of a {predictions[0].work.hardware.name}")
    _bars(below, [p.time.exposed for p in predictions])
    below.set_ylabel("seconds of a step")
    below.set_xticks(range(len(plans)), [_name(p) for p in predictions], fontsize=7)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def _bars(axes, columns: Sequence[Mapping[str, float]]) -> None:  # type: ignore[no-untyped-def]
    """A bar for each column, its parts one above the other, each part in one colour."""
    bottoms = [0.0] * len(columns)
    for name in dict.fromkeys(name for column in columns for name in column):
        heights = [column.get(name, 0.0) for column in columns]
        if any(heights):
            axes.bar(range(len(columns)), heights, bottom=bottoms, label=name, width=0.7)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, reverse=True)


def _name(prediction: Prediction) -> str:
    values = layout_flag.of(prediction.config)
    sizes = [f"{axis} {values[axis]}" for axis in SHORT if values[axis] > 1]
    return "\n".join([*sizes, values["schedule"], f"remat {values['remat']}"])
