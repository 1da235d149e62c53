"""Pictures of a table: text for the terminal, SVG, and PNG (the only one that imports matplotlib).

    text        a line for each stage, a column for each tick; a cell has its op, local unit (if
                there are several) and microbatch
    svg, png    a lane for each stage, with time by the coupled clock to the right; an op has its
                microbatch

The colour is the op's, its shade the chunk's: the lowest chunk of a stage is darkest. An outline
joins the F and the B of an overlapped cell. Other pictures take their colours and stacked bars from
here.

How to read this file: `text`, `svg` and `png` are the three pictures; functions above them choose
colours, those behind each one draw its parts. No JAX.
"""

import html
import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.schedule.clocks.times import NAMES, Timeline
from jaxtrain.schedule.table import Op, Permute, Table, local_unit_of, units_of

Colour = tuple[int, int, int]  # red, green, blue, 0 to 255
COLOURS = {
    "F": (58, 110, 190),
    "R": (136, 84, 170),
    "B": (214, 112, 38),
    "W": (62, 142, 82),
    "H": (190, 48, 66),
    "E": (96, 96, 104),
    "O": (32, 32, 36),
}
MEANINGS = {
    "F": "forward",
    "R": "recompute",
    "B": "input gradient",
    "W": "weight gradient",
    "H": "head and loss",
    "E": "embedding",
    "O": "optimizer's update",
}
# Parts of a model, of a step and of a device's memory → their colours in all pictures but those of
# starts. What an op of a table does has the op's colour.
PARTS = {
    "embedding": "#606068",
    "layer": "#5b86c4",
    "prediction module": "#9a6fb8",
    "head": "#be3042",
    "matmuls": "#2f6fb7",
    "attention": "#f28e2b",
    "memory": "#8fd0b8",
    "optimizer": "#202024",
    "bubble": "#dddddd",
    "host": "#a87c5f",
    "disk": "#5f3f2a",
    "data": "#a6d854",
    "stage": "#d94f9a",
    "model": "#8f5fc4",
    "context": "#f2d43d",
    "expert": "#ffab9f",
    "replica": "#17a5cf",
    "weights": "#1f3b73",
    "gradients": "#3e8e52",
    "outer": "#4b1f83",
    "activations": "#9cc4f5",
    "working": "#a8a422",
    "logits": "#be3042",
    "kept copy": "#565f6a",
}
# Parts of a start's wall time, from the bottom of a bar up: useful steps are dark green, redone
# ones red.
STARTS = {
    "useful steps": "#1b6e3c",
    "redone steps": "#c0392b",
    "rolling_back": "#e67e22",
    "data_wait": "#f1c40f",
    "saving": "#2e86c1",
    "evaluating": "#8e44ad",
    "compiling": "#7f8c8d",
    "tracing": "#16a2a2",
    "state": "#8a5a2b",
    "data": "#e3a5c7",
    "table": "#a9d18e",
    "imports": "#a9cbe8",
    "ending": "#34495e",
    "other": "#000000",
}
TOGETHER, CHUNKS = (
    "outlined: forward and input gradient at once",
    "lighter: later chunks; number: microbatch",
)
PERMUTE_MARKS = {Permute.NONE: "", Permute.LATE: "l", Permute.EARLY: "e"}
LANE, LABEL, TOP, BOTTOM = 26, 62, 46, 26  # of the SVG, in pixels
PIXELS_OF_AN_OP, MOST_PIXELS = 24, 3000
# pixels of a title's letter; of a PNG, letters in an inch of it, and inches of a colour's meaning
LETTER, LETTERS, MEANING = 8, 13, 2.0
MOST_LINES = 400  # of text
MOST_STAGES = 16  # named one by one in a line
MOST_SHAPES = 20_000  # ops of an SVG that are shapes of their own, with a title each
OUTLINE = 'fill="none" stroke="#000" stroke-width="1.5"'
LIGHTEST = 0.55  # how far the last chunk's colour is on its way to white


def shade(name: str, chunk: int, chunks: int) -> Colour:
    """The colour of an op on a stage's `chunk`-th of `chunks` chunks."""
    # Of three chunks: 0, 27.5 % and 55 % of the way to white
    white = LIGHTEST * chunk / max(1, chunks - 1)
    red, green, blue = (round(part + (255 - part) * white) for part in COLOURS[name])
    return red, green, blue


def ink(colour: Colour) -> str:
    """Black or white, whichever reads better on a colour (by luminance, ITU-R BT.601)."""
    return "#000" if 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 150 else "#fff"


def _chunks(table: Table) -> list[list[int]]:
    """The chunks of each stage, in model order."""
    return [
        list(dict.fromkeys(table.chunk_of[unit] for unit in units))
        for units in units_of(table.stage_of, table.stages)
    ]


def _colours(table: Table) -> dict[tuple[str, int], Colour]:
    """(name of an op, unit) → its colour; unit −1 of the head, the embedding and the update."""
    chunks = _chunks(table)
    colours = {(name, -1): shade(name, 0, 1) for name in "HEO"}
    for unit, (chunk, stage) in enumerate(zip(table.chunk_of, table.stage_of, strict=True)):
        local, count = chunks[stage].index(chunk), len(chunks[stage])
        colours |= {(name, unit): shade(name, local, count) for name in "FRBW"}
    return colours


def stage_chunks(table: Table) -> str:
    """One line with the chunks of each stage; of many stages, the lowest and the highest."""
    listed = [
        f"stage {stage}: {', '.join(map(str, chunks))}"
        for stage, chunks in enumerate(_chunks(table))
    ]
    if table.stages > MOST_STAGES:
        listed[MOST_STAGES // 2 : -MOST_STAGES // 2] = ["…"]
    return "; ".join(listed)


# --- text -----------------------------------------------------------------------------------------


def text(table: Table, width: int = 120, colour: bool = False) -> str:
    """The table in blocks of as many ticks as fit into `width` characters; with `colour`, by the
    terminal's 24-bit colours.

    A table of more than some MOST_LINES lines is cut in the middle.

    >>> from jaxtrain.schedule.by_name import make_table
    >>> from jaxtrain.schedule.table_spec import TableSpec
    >>> table = make_table(TableSpec("1f1b", stages=2, repeats=1, microbatches=3))
    >>> stage_0, stage_1 = text(table, width=60).splitlines()[4:6]
    >>> print(stage_0)
    stage 0 F0 F1 .  B0 W0 F2 B1 W1 .  B2 W2
    >>> print(stage_1)
    stage 1 .  F0 B0 W0 F1 B1 W1 F2 B2 W2 .
    """
    # Labels of a table's ticks stand in blocks below each other, each as wide as the terminal:
    #             tick 0
    #   stage 0   F0 F1 .  .  B0 W0
    #   stage 1   .  F0 B0 W0 F1 B1
    labels = _labels(table)
    wide = 1 + max(len(label) for line in labels.values() for label in line)
    margin = 1 + max(map(len, labels))
    columns = max(1, (width - margin) // wide)
    ops = [name for name in "FRBW" if (table.op == Op[name]).any()]
    legend = [
        _paint(f" {name} {MEANINGS[name]} ", shade(name, 0, 1) if colour else None) for name in ops
    ]
    updates = "; O after an op: the stage's update at the end of the tick" * (table.steps > 1)
    lines = [
        "  ".join(legend),
        f"head: the microbatch whose head and loss the tick has; permute: l late, e early{updates}",
    ]
    tints: dict[tuple[str, int], Colour] = {}  # of a line's tick
    if colour:
        colours, busy = _colours(table), table.busy
        for tick, stage, op, unit, _ in zip(*(array.tolist() for array in busy), strict=True):
            tints[f"stage {stage}", tick] = colours[Op(op).name, unit]
    begins = range(0, table.ticks, columns)
    most_blocks = max(2, MOST_LINES // (table.stages + 4))
    # The blocks in the middle that are not shown. Of 10 with 4 to show: the 3rd to the 8th.
    cut = begins[(most_blocks + 1) // 2 : max(0, len(begins) - most_blocks // 2)]
    for begin in begins:
        if begin in cut[:1]:
            lines += [
                "",
                f"ticks {begin} to {cut[-1] + columns - 1} are not shown: --csv=FILE writes all, "
                "--svg=FILE draws all",
            ]
        if begin in cut:
            continue
        lines += ["", " " * margin + f"tick {begin}"]
        for name, line in labels.items():
            idle = "." if name.startswith("stage") else ""
            painted = [
                _paint(line[tick].ljust(wide - 1), tints.get((name, tick))) + " "
                if line[tick]
                else idle.ljust(wide)
                for tick in range(begin, min(begin + columns, table.ticks))
            ]
            lines.append((name.ljust(margin) + "".join(painted)).rstrip())
    return "\n".join(lines) + "\n"


def _labels(table: Table) -> dict[str, list[str]]:
    """Line → its label for each tick, empty for nothing: a line for each stage, for the head and
    for the permute."""
    # F2 for microbatch 2, or F1.2 with the local unit where stages have several; F1.2+B0.0 for an
    # overlapped cell, W0O for a W with the stage's update behind it
    local, several = local_unit_of(table.stage_of), table.units > table.stages
    labels = {f"stage {stage}": [""] * table.ticks for stage in range(table.stages)}
    busy = (array.tolist() for array in table.busy)
    for tick, stage, op, unit, microbatch in zip(*busy, strict=True):
        of_unit = f"{local[unit]}." if several else ""
        label = f"{Op(op).name}{of_unit}{microbatch}"
        line = labels[f"stage {stage}"]
        line[tick] = f"{line[tick]}+{label}" if line[tick] else label  # F and B of one cell
    for tick, stage in np.argwhere(table.update >= 0).tolist():
        labels[f"stage {stage}"][tick] += "O"
    labels["head"] = [
        "" if microbatch < 0 else str(microbatch) for microbatch in table.head.tolist()
    ]
    labels["permute"] = [PERMUTE_MARKS[Permute(when)] for when in table.permute.tolist()]
    return labels


def _paint(label: str, colour: Colour | None) -> str:
    if colour is None:
        return label
    front = "0;0;0" if ink(colour) == "#000" else "255;255;255"
    return f"\x1b[48;2;{colour[0]};{colour[1]};{colour[2]}m\x1b[38;2;{front}m{label}\x1b[0m"


# --- SVG ------------------------------------------------------------------------------------------


def svg(table: Table, timeline: Timeline, title: str) -> str:
    """A timeline of simulate.simulate as an SVG picture."""
    # A table whose ops all take no time is drawn with a length of 1, not divided by 0.
    total = float(timeline.end.max()) or 1.0
    scale = _pixels(timeline, total) / total
    legend, end = _legend(table, timeline)
    # no text beyond the edge
    width = max(LABEL + total * scale, end, LETTER * len(title)) + 12
    height = TOP + LANE * table.stages + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="16" font-size="13" font-weight="bold">{html.escape(title)}</text>',
        *legend,
    ]
    for stage in range(table.stages):
        y = TOP + LANE * stage
        parts += [
            f'<text x="8" y="{y + LANE * 0.62:.0f}">stage {stage}</text>',
            f'<rect x="{LABEL}" y="{y + 1}" width="{total * scale:.1f}" height="{LANE - 2}" '
            'fill="#eee"/>',
        ]
    draw = _lanes if len(timeline) > MOST_SHAPES else _shapes
    parts += draw(table, timeline, scale)
    parts += [
        f'<rect x="{LABEL + start * scale:.2f}" y="{TOP + LANE * stage + 1}" '
        f'width="{(end - start) * scale - 0.6:.2f}" height="{LANE - 2}" {OUTLINE}/>'
        for stage, start, end in _overlapped(table, timeline)
    ]
    y = TOP + LANE * table.stages + 16
    parts += [
        f'<text x="{LABEL}" y="{y}">0</text>',
        f'<text x="{LABEL + total * scale:.0f}" y="{y}" text-anchor="end">time '
        f"{total:g}</text></svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(table: Table, timeline: Timeline) -> tuple[list[str], float]:
    """The meaning of the colours, and where it ends."""
    # Letters are about 6.2 pixels wide in this font and size; an SVG cannot measure its text.
    parts, x = [], 8.0
    looks = [(f'fill="{_hex(shade(name, 0, 1))}"', MEANINGS[name]) for name in _names(timeline)]
    for look, meaning in [*looks, *[(OUTLINE, TOGETHER)] * table.overlaps]:
        parts += [
            f'<rect x="{x:.0f}" y="24" width="12" height="12" {look}/>',
            f'<text x="{x + 16:.0f}" y="34">{meaning}</text>',
        ]
        x += 30 + 6.2 * len(meaning)
    several = max(map(len, _chunks(table))) > 1
    parts += [f'<text x="{x:.0f}" y="34">{CHUNKS}</text>'] * several
    return parts, x + 6.2 * len(CHUNKS) * several


def _overlapped(table: Table, timeline: Timeline) -> list[tuple[int, float, float]]:
    """(stage, start of the F, end of the B) of each overlapped cell."""
    at = {(op.name, op.unit, op.microbatch): op for op in timeline}
    arrays = (table.unit, table.microbatch, table.b_unit, table.b_microbatch)
    cells = zip(*(array[table.overlapped].tolist() for array in arrays), strict=True)
    pairs = ((at["F", f, k], at["B", b, n]) for f, k, b, n in cells)
    return [(forward.stage, forward.start, backward.end) for forward, backward in pairs]


def _shapes(table: Table, timeline: Timeline, scale: float) -> list[str]:
    """Each op that takes time as a rectangle, with its microbatch where that fits."""
    colours, parts = _colours(table), []
    for op in timeline:
        if op.end <= op.start:
            continue
        colour = colours[op.name, op.unit]
        left, width = LABEL + op.start * scale, (op.end - op.start) * scale
        y = TOP + LANE * op.stage
        chunk = f"chunk {table.chunk_of[op.unit]}, " if op.unit >= 0 else ""
        of = "step" if op.name == "O" else "microbatch"
        title = f"{chunk}{of} {op.microbatch}: {op.start:g} to {op.end:g}"
        parts.append(
            f'<rect x="{left:.2f}" y="{y + 1}" width="{max(width - 0.6, 0.4):.2f}" '
            f'height="{LANE - 2}" fill="{_hex(colour)}">'
            f"<title>{MEANINGS[op.name]}, {title}</title></rect>"
        )
        if width > 6 * len(str(op.microbatch)) + 2:
            parts.append(
                f'<text x="{left + width / 2:.2f}" y="{y + LANE * 0.62:.0f}" '
                f'text-anchor="middle" fill="{ink(colour)}" '
                f'pointer-events="none">{op.microbatch}</text>'
            )
    return parts


def _spans(table: Table, timeline: Timeline) -> dict[tuple[int, Colour], list[tuple[float, float]]]:
    """(stage, colour) → (start, end) of its ops that take time, in order of their starts."""
    colours = _colours(table)
    spans: dict[tuple[int, Colour], list[tuple[float, float]]] = {}
    for op in timeline:
        if op.end > op.start:
            key = op.stage, colours[op.name, op.unit]
            spans.setdefault(key, []).append((op.start, op.end))
    return {key: sorted(times) for key, times in spans.items()}


def _lanes(table: Table, timeline: Timeline, scale: float) -> list[str]:
    """The ops of a long timeline as one broad line for each stage and colour."""
    # A million rectangles would fill a browser's memory. One path has all spans of a stage and
    # colour, as strokes as broad as a lane: "m3 0h2" moves by 3 and draws 2. Steps are relative and
    # rounded, so `pen` adds up what has been written, and rounding errors do not.
    parts = []
    for (stage, colour), spans in _spans(table, timeline).items():
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
    # 24 pixels for the shortest op, so that its number can be read, but never so many that a long
    # table becomes a picture nobody can scroll.
    times = timeline.end - timeline.start
    shortest = float(times[times > 0].min(initial=total))
    return min(MOST_PIXELS, max(480.0, PIXELS_OF_AN_OP * total / shortest))


def _names(timeline: Timeline) -> list[str]:
    """The names of the ops that take time."""
    present = np.unique(timeline.name[timeline.end > timeline.start])
    return [name for name in MEANINGS if NAMES.index(name) in present]


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


# --- PNG ------------------------------------------------------------------------------------------


def stacked_bars(
    axes: Any,
    places: Sequence[float],
    columns: Sequence[Mapping[str, float]],
    width: float = 0.8,
    colours: Mapping[str, str] = PARTS,
) -> None:
    """Adds stacked bars to matplotlib's axes, one a column, from the bottom up; a part has the same
    colour in all of them."""
    # All columns' bars of a part in one call: then the legend has each part once.
    bottoms = [0.0] * len(columns)
    for name in dict.fromkeys(name for column in columns for name in column):
        heights = [column.get(name, 0.0) for column in columns]
        if any(heights):
            colour = colours.get(name)
            axes.bar(places, heights, width, bottom=bottoms, label=name, color=colour)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]


def png(table: Table, timeline: Timeline, title: str) -> bytes:
    """A timeline as a PNG picture; as `svg`, drawn by matplotlib."""
    # matplotlib takes a second to import, and is no requirement of training
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colours, few = _colours(table), len(timeline) <= MOST_SHAPES
    total = float(timeline.end.max()) or 1.0
    inches = (_pixels(timeline, total) + 150) / 100
    patches = [
        Patch(color=_hex(shade(name, 0, 1)), label=MEANINGS[name]) for name in _names(timeline)
    ]
    patches += [Patch(facecolor="none", edgecolor="black", label=TOGETHER)] * table.overlaps
    columns = min(len(patches), int(inches / MEANING))
    tall = 1.1 + 0.3 * table.stages + 0.2 * (-(-len(patches) // columns) - 1)
    figure = Figure(figsize=(inches, tall), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    per_point = total / ((inches - 1.2) * 72)
    for (stage, colour), spans in _spans(table, timeline).items():
        axes.broken_barh(
            [(start, end - start) for start, end in spans],
            (stage - 0.46, 0.92),
            facecolors=_hex(colour),
            edgecolor="white",
            linewidth=0.4 if few else 0.0,
        )
    for stage, start, end in _overlapped(table, timeline):
        axes.broken_barh([(start, end - start)], (stage - 0.46, 0.92), fc="none", ec="black")
    for op in timeline if few else ():
        number, time = str(op.microbatch), op.end - op.start
        if time > 0 and time / per_point > 4.6 * len(number) + 1:
            axes.text(
                (op.start + op.end) / 2,
                op.stage,
                number,
                ha="center",
                va="center",
                fontsize=7,
                color=ink(colours[op.name, op.unit]),
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
    said = CHUNKS if max(map(len, _chunks(table))) > 1 else CHUNKS.partition("; ")[2]
    axes.set_title(
        textwrap.fill(f"{title}   ({said})", int(LETTERS * inches)), fontsize=9, loc="left"
    )
    figure.legend(
        handles=patches, loc="outside lower right", ncols=columns, fontsize=8, frameon=False
    )
    return as_png(figure)


def as_png(figure: Any) -> bytes:
    """A matplotlib figure as the bytes of a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()
