"""Pictures of plans: memory and time as stacked bars, one for each layout, or one for each stage if
the devices are of several kinds. `--png` draws them, `--html` puts them into a page, by the
template page.html, that needs nothing else. No jax."""

import dataclasses
import html
import pathlib
import re
import string
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.config import ResolvedConfig
from jaxtrain.config.rules.mesh_rules import AXES
from jaxtrain.pipeline.step_picture import step_picture
from jaxtrain.planner.layer.hardware import GIB
from jaxtrain.planner.search import layout_flag
from jaxtrain.planner.search.explain import amount
from jaxtrain.planner.search.heterogeneous import HeterogeneousPlan
from jaxtrain.planner.search.predict import Prediction
from jaxtrain.planner.search.validation import KEYS
from jaxtrain.schedule import drawing

WAITING = "waiting, and what is outside the table"
COLOURS = drawing.PARTS | {WAITING: drawing.PARTS["bubble"]}


class Bar(NamedTuple):
    """A layout, or a stage of groups: GiB of the fullest device and seconds of a step, by part.

    capacity: GiB of a device that arrays may take
    """

    name: str
    gib: Mapping[str, float]
    capacity: float
    seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """A plan, as the command prints and draws it.

    figures: the object that --json prints
    devices: in words
    caution: how the command does not do what was planned, to be read after "to train it"
    cells:   of a table, the first line with the columns' names
    bars:    of the other lines of the table, for its columns GiB and seconds
    below_axis: what the names of the bars are
    drawn:   the config whose schedule the page has; None for another framework's
    heading: lines of text before the others, which the page does not have
    lines:   makes the text, as CARD takes it
    """

    figures: Mapping[str, Any]
    devices: str
    caution: str
    cells: Sequence[Sequence[str]]
    bars: Sequence[Bar]
    drawn: ResolvedConfig | None
    lines: Callable[[], list[str]]
    heading: Sequence[str] = ()
    below_axis: str = ""


def of_layouts(predictions: Sequence[Prediction]) -> list[Bar]:
    """A bar for each layout."""
    gib = lambda parts: {name: size / GIB for name, size in parts.items()}
    return [
        Bar(_name(p), gib(p.memory.parts), p.work.hardware.memory / GIB, p.time.exposed)
        for p in predictions
    ]


def _name(prediction: Prediction) -> str:
    values = layout_flag.of(prediction.config)
    return "\n".join(
        [
            *(
                f"{key} {values[key]}"
                for key in (*AXES, "repeats", "offload")
                if values[key] not in (1, "none")
            ),
            f"zero {values['zero']}",
            f"microbatch {values['microbatch']}",
            values["schedule"],
            f"remat {values['remat']}",
        ]
    )


def of_groups(plan: HeterogeneousPlan) -> list[Bar]:
    """A bar for each stage of a layout over groups of devices; its part is named after these."""
    none = {group.hardware.name: 0.0 for group in plan.groups}
    return [
        Bar(
            f"{stage}\n({plan.layers[stage]})",
            none | {group.hardware.name: plan.memory[stage] / GIB},
            group.hardware.memory / GIB,
            none | {group.hardware.name: busy, WAITING: plan.seconds - busy},
        )
        for group, stages in plan.stages()
        for stage, busy in zip(stages, plan.stage_s[stages.start : stages.stop], strict=True)
    ]


# --- as a PNG -------------------------------------------------------------------------------------

BAR, LEAST_WIDTH, MOST_WIDTH = 0.9, 7.0, 24.0  # inches of a bar with its margins, and of a picture
WIDTH, LETTERS = 0.7, 9  # of a bar, of the space that it has; of a title in an inch
LEAST_BARS, MOST_LABELS = 4, 32  # bars that axes are wide enough for, at least; names below them


def png(bars: Sequence[Bar], title: str, below_axis: str = "") -> bytes:
    """The bars as a PNG, with the capacity and, of several layouts, the fastest marked.

    below_axis: what the names of the bars are
    """
    from matplotlib.figure import Figure  # not pyplot: no display, no state

    count = len(bars)
    width = min(max(LEAST_WIDTH, 4 + BAR * count), MOST_WIDTH)
    figure = Figure(figsize=(width, 8), layout="constrained")
    figure.suptitle(textwrap.fill(title, int(LETTERS * width)))
    above, below = figure.subplots(2, 1, sharex=True)
    above.set_ylabel("GiB of the fullest device")
    below.set(ylabel="seconds of a step", xlabel=below_axis)
    drawing.stacked_bars(above, range(count), [bar.gib for bar in bars], WIDTH, COLOURS)
    drawing.stacked_bars(below, range(count), [bar.seconds for bar in bars], WIDTH, COLOURS)
    above.hlines(
        [bar.capacity for bar in bars],
        [i - 0.5 for i in range(count)],
        [i + 0.5 for i in range(count)],
        color="black",
        linestyle="--",
        linewidth=1,
        label="memory of a device",
    )
    below.margins(y=0.12)  # for the texts on the bars
    heights = [sum(bar.seconds.values()) for bar in bars]
    texts = [f"{height:.3g} s" for height in heights]
    fastest = heights.index(min(heights)) if len({*texts}) > 1 else -1
    shown = range(0, count, -(-count // MOST_LABELS))
    below.set_xticks(shown, [bars[i].name for i in shown], fontsize=7)
    margin = max(1.0, (LEAST_BARS - count) / 2)  # keeps a single bar narrow
    below.set_xlim(-margin, count - 1 + margin)
    for i, label in zip(shown, below.get_xticklabels(), strict=True):
        weight = "bold" if i == fastest else "normal"
        label.set_fontweight(weight)
        if count == 1 or fastest >= 0:  # stages all take as long as the step
            below.text(
                i,
                heights[i],
                texts[i] + "\nfastest" * (i == fastest),
                ha="center",
                va="bottom",
                fontsize=8,
                fontweight=weight,
            )
    for axes in (above, below):
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(
            handles,
            [textwrap.fill(label, 32) for label in labels],
            loc="center left",
            bbox_to_anchor=(1, 0.5),
            fontsize=8,
            reverse=True,
        )
    return drawing.as_png(figure)


# --- as a page ------------------------------------------------------------------------------------

OTHER = "#7a8fa6"  # the colour of a part that has none
# a line "name: text" and the indented ones after it, and how these are shown
CARD = re.compile(r"^(\S[^:\n]*): ?(.*)((?:\n .*)*)\n?", re.MULTILINE)
SECTION = r"<section><h3>\1</h3><p>\2</p><pre>\3</pre></section>"


def page(title: str, report: PlanReport, train: Sequence[str]) -> bytes:
    """The page of a plan. train: lines about the command, and the command"""
    figures, cells, bars = report.figures, report.cells, report.bars
    sure = figures["validation"]
    behind = (
        f"{runs['rows']:4}  {runs['error']:13.1%}  {', '.join(runs[key] for key in KEYS)}"
        for runs in sure["behind"]
    )
    gib, seconds = (
        max(max(sum(bar.gib.values()), bar.capacity) for bar in bars),
        max(sum(bar.seconds.values()) for bar in bars),
    )
    drawn = (
        {"GiB": _bar(bar.gib, gib, bar.capacity), "seconds": _bar(bar.seconds, seconds)}
        for bar in bars
    )
    rows = (
        "".join(
            f'<td class="{name}" data-name="{name}">{html.escape(cell)}{extra.get(name, "")}</td>'
            for name, cell in zip(cells[0], line, strict=True)
        )
        for line, extra in zip(cells[1:], drawn, strict=True)
    )
    template = string.Template(pathlib.Path(__file__).with_name("page.html").read_text("utf-8"))
    return template.substitute(
        title=html.escape(title),
        lead=f"{amount(figures['step_time_s'], 'step', sure['error'])} a step, "
        f"{amount(figures['tokens_per_s'], '', sure['error'])} tokens/s",
        head="".join(f'<th class="{name}">{name}</th>' for name in cells[0]),
        rows="</tr>\n<tr>".join(rows),
        legend="".join(
            f'<span><i style="background:{COLOURS.get(part, OTHER)}"></i>{html.escape(part)}</span>'
            for part in dict.fromkeys(part for bar in bars for part in {**bar.gib, **bar.seconds})
        ),
        cards=CARD.sub(SECTION, html.escape("\n".join(report.lines()))),
        behind=html.escape("\n".join(behind)),
        schedule=_schedule(report.drawn),
        told=html.escape(" ".join(train[:-1])),
        command=html.escape(train[-1].strip()),
    ).encode()


def _bar(parts: Mapping[str, float], most: float, end: float = 0.0) -> str:
    """A bar of these parts on a scale to `most`, with a mark at `end`."""
    pieces = (
        f'<i style="width:{100 * size / most:.2f}%;background:{COLOURS.get(name, OTHER)}" '
        f'title="{html.escape(name)} {size:.3g}"></i>'
        for name, size in parts.items()
        if size > 0
    )
    mark = [f'<b style="left:{100 * end / most:.2f}%"></b>'] * (end > 0)
    return f'<div class="bar">{"".join([*pieces, *mark])}</div>'


def _schedule(config: ResolvedConfig | None) -> str:
    """The first rounds of a step's table, as HTML."""
    if config is None or config.mesh.stage == 1:
        return "<p>One stage, or a framework whose tables are its own: nothing is drawn.</p>"
    line, svg = step_picture(config)
    return f'<p class="soft">{line}</p><div class="box white">{svg}</div>'
