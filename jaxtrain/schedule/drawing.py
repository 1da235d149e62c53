"""A table as something to look at: text for the terminal, SVG, and PNG (by matplotlib, which is
imported then alone).

    text        a line a stage, a column a tick, each cell its op, local unit (if there are several)
                and microbatch
    svg, png    a lane a stage, time by the coupled clock to the right, the microbatch in each op

Colours say the op, their shade the chunk: darkest for a stage's first. No JAX here.
"""

import html
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxtrain.schedule.clocks import NAMES, TimedOp, Timeline
from jaxtrain.schedule.table import Cell, Op, Permute, Table, local_unit_of, units_of

Colour = tuple[int, int, int]  # red, green, blue, 0 to 255
COLOURS = {
    "F": (58, 110, 190),
    "R": (136, 84, 170),
    "B": (214, 112, 38),
    "W": (62, 142, 82),
    "H": (190, 48, 66),
    "E": (96, 96, 104),
}
MEANINGS = {
    "F": "forward",
    "R": "recompute",
    "B": "input gradient",
    "W": "weight gradient",
    "H": "head and loss",
    "E": "embedding",
}
PERMUTE_MARKS = {Permute.NONE: "", Permute.LATE: "l", Permute.EARLY: "e"}
LANE, LABEL, TOP, BOTTOM = 26, 62, 46, 26  # of the SVG, in pixels
PIXELS_OF_AN_OP, MOST_PIXELS = 24, 3000
MOST_LINES = 400  # of text
MOST_STAGES = 16  # named one by one in a line
MOST_SHAPES = 20_000  # ops of an SVG that are shapes of their own, with a title each
LIGHTEST = 0.55  # how far the last chunk's colour is on its way to white


def shade(name: str, chunk: int, chunks: int) -> Colour:
    """The colour of an op on a stage's `chunk`-th of `chunks` chunks."""
    white = LIGHTEST * chunk / max(1, chunks - 1)
    red, green, blue = (round(part + (255 - part) * white) for part in COLOURS[name])
    return red, green, blue


def ink(colour: Colour) -> str:
    """Black or white, whichever reads better on a colour (by luminance, ITU-R BT.601)."""
    return "#000" if 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 150 else "#fff"


def _local_chunks(table: Table) -> tuple[list[int], list[int]]:
    """(of each unit, which of its stage's chunks it is in; of each stage, its number of chunks)."""
    chunks: list[list[int]] = [[] for _ in range(table.stages)]
    for chunk, stage in zip(table.chunk_of, table.stage_of, strict=True):
        if chunk not in chunks[stage]:
            chunks[stage].append(chunk)
    local = [
        chunks[stage].index(chunk)
        for chunk, stage in zip(table.chunk_of, table.stage_of, strict=True)
    ]
    return local, [len(of_stage) for of_stage in chunks]


# --- text -----------------------------------------------------------------------------------------


def text(table: Table, width: int = 120, colour: bool = False) -> str:
    """The table in blocks of as many ticks as fit into `width` characters; with `colour`, by the
    terminal's 24-bit colours.

    Of a table that would take more than some MOST_LINES lines, the first and the last blocks.
    """
    labels = _labels(table)
    wide = 1 + max(len(label) for line in labels.values() for label in line)
    margin = 1 + max(map(len, labels))
    columns = max(1, (width - margin) // wide)
    ops = [name for name in ("F", "R", "B", "W") if (table.op == Op[name]).any()]
    lines = [
        "  ".join(
            _paint(f" {name} {MEANINGS[name]} ", shade(name, 0, 1) if colour else None)
            for name in ops
        )
    ]
    lines.append("head: the microbatch whose head and loss the tick has; permute: l late, e early")
    tints = _tints(table) if colour else {}
    begins = list(range(0, table.ticks, columns))
    most_blocks = max(2, MOST_LINES // (table.stages + 4))
    left_out = (
        begins[(most_blocks + 1) // 2 : len(begins) - most_blocks // 2]
        if len(begins) > most_blocks
        else []
    )
    for begin in begins:
        if begin in left_out:
            if begin == left_out[0]:
                end = left_out[-1] + columns - 1
                lines += [
                    "",
                    f"ticks {begin} to {end} are not shown: --csv=FILE writes all, --svg=FILE "
                    "draws all",
                ]
            continue
        lines += ["", " " * margin + f"tick {begin}"]
        for name, line in labels.items():
            idle = "." if name.startswith("stage") else ""
            block = range(begin, min(begin + columns, table.ticks))
            painted = [
                _paint(line[tick].ljust(wide - 1), tints.get((name, tick))) + " "
                if line[tick]
                else idle.ljust(wide)
                for tick in block
            ]
            lines.append((name.ljust(margin) + "".join(painted)).rstrip())
    return "\n".join(lines) + "\n"


def _labels(table: Table) -> dict[str, list[str]]:
    """Line → what stands in it for each tick, empty for nothing: a line for each stage, for the
    head and for the permute."""
    index, several = local_unit_of(table.stage_of), table.units > table.stages
    by_stage = zip(*table.cells, strict=True)
    labels = {
        f"stage {stage}": [_label(cell, index, several) if cell else "" for cell in cells]
        for stage, cells in enumerate(by_stage)
    }
    labels["head"] = [
        "" if microbatch < 0 else str(microbatch) for microbatch in table.head.tolist()
    ]
    labels["permute"] = [PERMUTE_MARKS[Permute(when)] for when in table.permute.tolist()]
    return labels


def _tints(table: Table) -> dict[tuple[str, int], Colour]:
    """(line of `_labels`, tick) → the colour of the cell."""
    local, chunks = _local_chunks(table)
    tints = {}
    for tick, cells in enumerate(table.cells):
        for stage, cell in enumerate(cells):
            if cell:
                tints[f"stage {stage}", tick] = shade(
                    Op(cell.op).name, local[cell.unit], chunks[stage]
                )
    return tints


def _label(cell: Cell, index: Sequence[int], several: bool) -> str:
    """The op and microbatch of a cell, with the local unit if a stage has `several`."""
    return (
        f"{Op(cell.op).name}{index[cell.unit]}.{cell.microbatch}"
        if several
        else f"{Op(cell.op).name}{cell.microbatch}"
    )


def _paint(label: str, colour: Colour | None) -> str:
    if colour is None:
        return label
    front = "0;0;0" if ink(colour) == "#000" else "255;255;255"
    return f"\x1b[48;2;{colour[0]};{colour[1]};{colour[2]}m\x1b[38;2;{front}m{label}\x1b[0m"


# --- SVG ------------------------------------------------------------------------------------------


def svg(table: Table, timeline: Timeline, title: str) -> str:
    """A timeline as an SVG picture. `timeline` is of simulate.simulate; `title` says what it is."""
    total = float(timeline.end.max()) or 1.0
    scale = _pixels(timeline, total) / total
    width, height = LABEL + total * scale + 12, TOP + LANE * table.stages + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="16" font-size="13" font-weight="bold">{html.escape(title)}</text>',
        *_legend(table, timeline),
    ]
    for stage in range(table.stages):
        y = TOP + LANE * stage
        parts.append(f'<text x="8" y="{y + LANE * 0.62:.0f}">stage {stage}</text>')
        parts.append(
            f'<rect x="{LABEL}" y="{y + 1}" width="{total * scale:.1f}" height="{LANE - 2}" '
            'fill="#eee"/>'
        )
    parts += (
        _lanes(table, timeline, scale)
        if len(timeline) > MOST_SHAPES
        else _shapes(table, timeline, scale)
    )
    y = TOP + LANE * table.stages + 16
    parts.append(f'<text x="{LABEL}" y="{y}">0</text>')
    parts.append(
        f'<text x="{LABEL + total * scale:.0f}" y="{y}" text-anchor="end">time '
        f"{total:g}</text></svg>"
    )
    return "\n".join(parts) + "\n"


def _legend(table: Table, timeline: Timeline) -> list[str]:
    """What the colours mean."""
    parts, x = [], 8.0
    for name in _names(timeline):
        parts.append(
            f'<rect x="{x:.0f}" y="24" width="12" height="12" fill="{_hex(shade(name, 0, 1))}"/>'
        )
        parts.append(f'<text x="{x + 16:.0f}" y="34">{MEANINGS[name]}</text>')
        x += 30 + 6.2 * len(MEANINGS[name])
    if max(_local_chunks(table)[1]) > 1:
        parts.append(f'<text x="{x:.0f}" y="34">lighter: later chunks; number: microbatch</text>')
    return parts


def _shapes(table: Table, timeline: Timeline, scale: float) -> list[str]:
    """Each op that takes time as a rectangle, with its microbatch where there is room."""
    colour_of, parts = _Colours(table), []
    for event in timeline:
        if event.end <= event.start:
            continue
        colour = colour_of(event)
        left, width, y = (
            LABEL + event.start * scale,
            (event.end - event.start) * scale,
            TOP + LANE * event.stage,
        )
        parts.append(
            f'<rect x="{left:.2f}" y="{y + 1}" width="{max(width - 0.6, 0.4):.2f}" '
            f'height="{LANE - 2}" fill="{_hex(colour)}">'
            f"<title>{_describe(table, event)}</title></rect>"
        )
        if width > 6 * len(str(event.microbatch)) + 2:
            parts.append(
                f'<text x="{left + width / 2:.2f}" y="{y + LANE * 0.62:.0f}" '
                f'text-anchor="middle" fill="{ink(colour)}" '
                f'pointer-events="none">{event.microbatch}</text>'
            )
    return parts


class _Colours:
    """The colour of a table's events."""

    def __init__(self, table: Table):
        self._local, self._chunks = _local_chunks(table)
        self._known: dict[tuple[str, int], Colour] = {}

    def __call__(self, event: TimedOp) -> Colour:
        key = event.name, event.unit
        if key not in self._known:
            of_unit = event.unit >= 0
            local, chunks = (
                (self._local[event.unit], self._chunks[event.stage]) if of_unit else (0, 1)
            )
            self._known[key] = shade(event.name, local, chunks)
        return self._known[key]


class _Span(NamedTuple):
    """A time in which an op runs."""

    start: float
    end: float


def _by_colour(table: Table, timeline: Timeline) -> dict[tuple[int, Colour], list[_Span]]:
    """(stage, colour) → the times of its ops that take time, in order of their starts."""
    colour_of = _Colours(table)
    spans: dict[tuple[int, Colour], list[_Span]] = {}
    for event in timeline:
        if event.end > event.start:
            spans.setdefault((event.stage, colour_of(event)), []).append(
                _Span(event.start, event.end)
            )
    return {key: sorted(times) for key, times in spans.items()}


def _lanes(table: Table, timeline: Timeline, scale: float) -> list[str]:
    """The ops of a long timeline as one broad line for each stage and colour."""
    parts = []
    for (stage, colour), spans in _by_colour(table, timeline).items():
        steps, pen = [], 0.0
        for start, end in spans:
            gap, width = round(LABEL + start * scale - pen, 2), round((end - start) * scale, 2)
            steps.append(f"m{gap:g} 0h{width:g}")
            pen = round(pen + gap + width, 2)
        path = f"M0 {TOP + LANE * stage + LANE / 2:g}{''.join(steps)}"
        parts.append(
            f'<path d="{path}" fill="none" stroke="{_hex(colour)}" stroke-width="{LANE - 2}"/>'
        )
    return parts


def _pixels(timeline: Timeline, total: float) -> float:
    """Width for the time axis: enough for the number in the shortest op, within bounds."""
    times = timeline.end - timeline.start
    shortest = float(times[times > 0].min(initial=total))
    return min(MOST_PIXELS, max(480.0, PIXELS_OF_AN_OP * total / shortest))


def _names(timeline: Timeline) -> list[str]:
    """The names of the events that take time."""
    present = {
        NAMES[index] for index in np.unique(timeline.name[timeline.end > timeline.start]).tolist()
    }
    return [name for name in COLOURS if name in present]


def _describe(table: Table, event: TimedOp) -> str:
    """An op in words."""
    chunk = f"chunk {table.chunk_of[event.unit]}, " if event.unit >= 0 else ""
    return (
        f"{MEANINGS[event.name]}, {chunk}microbatch {event.microbatch}: {event.start:g} to "
        f"{event.end:g}"
    )


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


# --- PNG ------------------------------------------------------------------------------------------


def png(table: Table, timeline: Timeline, title: str) -> bytes:
    """A timeline as a PNG picture; as `svg`, drawn by matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colour_of, few = _Colours(table), len(timeline) <= MOST_SHAPES
    total = float(timeline.end.max()) or 1.0
    inches = (_pixels(timeline, total) + 150) / 100
    figure = Figure(figsize=(inches, 1.1 + 0.3 * table.stages), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    per_point = total / ((inches - 1.2) * 72)
    for (stage, colour), spans in _by_colour(table, timeline).items():
        bars = [(start, end - start) for start, end in spans]
        axes.broken_barh(
            bars,
            (stage - 0.46, 0.92),
            facecolors=_hex(colour),
            edgecolor="white",
            linewidth=0.4 if few else 0.0,
        )
    for event in timeline if few else ():
        number, middle = str(event.microbatch), (event.start + event.end) / 2
        if (
            event.end > event.start
            and (event.end - event.start) / per_point > 4.6 * len(number) + 1
        ):
            axes.text(
                middle,
                event.stage,
                number,
                ha="center",
                va="center",
                fontsize=7,
                color=_named_ink(colour_of(event)),
            )
    axes.set(
        xlim=(0, total),
        ylim=(table.stages - 0.45, -0.55),
        yticks=range(table.stages),
        xlabel="time",
        facecolor="#eeeeee",
    )
    axes.set_yticks(range(table.stages), [f"stage {stage}" for stage in range(table.stages)])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    several = max(_local_chunks(table)[1]) > 1
    lighter = (
        "   (lighter: later chunks; number: microbatch)" if several else "   (number: microbatch)"
    )
    axes.set_title(title + lighter, fontsize=9, loc="left")
    patches = [
        Patch(color=_hex(shade(name, 0, 1)), label=MEANINGS[name]) for name in _names(timeline)
    ]
    figure.legend(
        handles=patches, loc="outside lower right", ncols=len(patches), fontsize=8, frameon=False
    )
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def _named_ink(colour: Colour) -> str:
    return "black" if ink(colour) == "#000" else "white"


def stage_chunks(table: Table) -> str:
    """One line: which chunks each stage has; of many stages, the first and the last ones."""
    listed = []
    for stage, units in enumerate(units_of(table.stage_of, table.stages)):
        chunks = dict.fromkeys(table.chunk_of[unit] for unit in units)
        listed.append(f"stage {stage}: {', '.join(map(str, chunks))}")
    if table.stages > MOST_STAGES:
        listed[MOST_STAGES // 2 : -MOST_STAGES // 2] = ["…"]
    return "; ".join(listed)
