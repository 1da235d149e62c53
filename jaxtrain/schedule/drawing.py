"""A table as something to look at: text for the terminal, SVG, and PNG (by matplotlib, which is imported then alone).

    text        a line a stage, a column a row of the table, each cell its op, local unit (if there are several) and microbatch
    svg, png    a lane a stage, time by the coupled clock to the right, the microbatch in each op

Colours say the op, their shade the chunk: darkest for a stage's first. No JAX here.
"""

import html
import io
from collections.abc import Sequence

import numpy as np

from jaxtrain.schedule.simulate import NAMES, Event, Timeline
from jaxtrain.schedule.table import Op, Permute, Table, local_index, units_of

COLOURS = {"F": (58, 110, 190), "R": (136, 84, 170), "B": (214, 112, 38), "W": (62, 142, 82), "H": (190, 48, 66), "E": (96, 96, 104)}
MEANINGS = {"F": "forward", "R": "recompute", "B": "input gradient", "W": "weight gradient", "H": "head and loss", "E": "embedding"}
PERMUTE_MARKS = {Permute.NONE: "", Permute.LATE: "l", Permute.EARLY: "e"}
LANE, LABEL, TOP, BOTTOM = 26, 62, 46, 26  # of the SVG, in pixels
PIXELS_OF_AN_OP, MOST_PIXELS = 24, 3000
MOST_LINES = 400  # of text
MOST_STAGES = 16  # named one by one in a line
MOST_SHAPES = 20_000  # ops of an SVG that are shapes of their own, with a title each
LIGHTEST = 0.55  # how far the last chunk's colour is on its way to white


def shade(name: str, chunk: int, chunks: int) -> tuple[int, int, int]:
    """The colour of an op on a stage's `chunk`-th of `chunks` chunks."""
    white = LIGHTEST * chunk / max(1, chunks - 1)
    red, green, blue = (round(c + (255 - c) * white) for c in COLOURS[name])
    return red, green, blue


def ink(colour: tuple[int, int, int]) -> str:
    """Black or white, whichever reads better on a colour (by luminance, ITU-R BT.601)."""
    return "#000" if 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 150 else "#fff"


def _local_chunks(table: Table) -> tuple[list[int], list[int]]:
    """(of each unit, which of its stage's chunks it is in; of each stage, its number of chunks)."""
    own: list[list[int]] = [[] for _ in range(table.stages)]
    for g, s in enumerate(table.stage_of):
        if table.chunk_of[g] not in own[s]:
            own[s].append(table.chunk_of[g])
    return [own[s].index(table.chunk_of[g]) for g, s in enumerate(table.stage_of)], [len(chunks) for chunks in own]


# --- text ------------------------------------------------------------------------------------------------------------------------


def text(table: Table, width: int = 120, colour: bool = False) -> str:
    """The table in blocks of as many rows as fit into `width` characters; with `colour`, by the terminal's 24-bit colours.

    Of a table that would take more than some MOST_LINES lines, the first and the last blocks.
    """
    local, chunks = _local_chunks(table)
    index, several = local_index(table.stage_of), len(table.stage_of) > table.stages
    rows = table.cells()
    cells = [[_label(cell, index, several) if cell else "" for cell in row] for row in rows]
    marks = [PERMUTE_MARKS[Permute(when)] for when in table.permute.tolist()]
    heads = ["" if k < 0 else str(k) for k in table.head.tolist()]
    wide = 1 + max(len(label) for label in [*(c for row in cells for c in row), *heads])
    names = [f"stage {s}" for s in range(table.stages)] + ["head", "permute"]
    margin = 1 + max(map(len, names))
    columns = max(1, (width - margin) // wide)
    legend = [name for name in ("F", "R", "B", "W") if (table.op == Op[name]).any()]
    lines = ["  ".join(_paint(f" {n} {MEANINGS[n]} ", shade(n, 0, 1) if colour else None) for n in legend)]
    lines.append("head: the microbatch whose head and loss the row has; permute: l late, e early")
    starts = list(range(0, table.ticks, columns))
    shown = max(2, MOST_LINES // (table.stages + 4))
    left_out = starts[(shown + 1) // 2 : len(starts) - shown // 2] if len(starts) > shown else []
    for start in starts:
        if start in left_out:
            if start == left_out[0]:
                lines += ["", f"rows {start} to {left_out[-1] + columns - 1} are not shown: --csv=FILE writes all, --svg=FILE draws all"]
            continue
        block = range(start, min(start + columns, table.ticks))
        lines += ["", " " * margin + f"row {start}"]
        for s in range(table.stages):
            painted = []
            for t in block:
                cell = rows[t][s]
                tint = shade(Op(cell[0]).name, local[cell[1]], chunks[s]) if cell and colour else None
                painted.append(_paint(cells[t][s].ljust(wide - 1), tint) + " " if cell else ".".ljust(wide))
            lines.append((names[s].ljust(margin) + "".join(painted)).rstrip())
        for name, values in (("head", heads), ("permute", marks)):
            lines.append((name.ljust(margin) + "".join(values[t].ljust(wide) for t in block)).rstrip())
    return "\n".join(lines) + "\n"


def _label(cell: tuple[int, int, int], index: Sequence[int], several: bool) -> str:
    op, g, k = cell
    return f"{Op(op).name}{index[g]}.{k}" if several else f"{Op(op).name}{k}"


def _paint(label: str, colour: tuple[int, int, int] | None) -> str:
    if colour is None:
        return label
    front = "0;0;0" if ink(colour) == "#000" else "255;255;255"
    return f"\x1b[48;2;{colour[0]};{colour[1]};{colour[2]}m\x1b[38;2;{front}m{label}\x1b[0m"


# --- SVG -------------------------------------------------------------------------------------------------------------------------


def svg(table: Table, timeline: Timeline, title: str) -> str:
    """A timeline as an SVG picture. `timeline` is of simulate.simulate; `title` says what it is."""
    local, chunks = _local_chunks(table)
    total = float(timeline.end.max()) or 1.0
    scale = _pixels(timeline, total) / total
    width, height = LABEL + total * scale + 12, TOP + LANE * table.stages + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="16" font-size="13" font-weight="bold">{html.escape(title)}</text>',
    ]
    x = 8.0
    for name in _names(timeline):
        parts.append(f'<rect x="{x:.0f}" y="24" width="12" height="12" fill="{_hex(shade(name, 0, 1))}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="34">{MEANINGS[name]}</text>')
        x += 30 + 6.2 * len(MEANINGS[name])
    if max(chunks) > 1:
        parts.append(f'<text x="{x:.0f}" y="34">lighter: later chunks; number: microbatch</text>')
    for s in range(table.stages):
        y = TOP + LANE * s
        parts.append(f'<text x="8" y="{y + LANE * 0.62:.0f}">stage {s}</text>')
        parts.append(f'<rect x="{LABEL}" y="{y + 1}" width="{total * scale:.1f}" height="{LANE - 2}" fill="#eee"/>')
    if len(timeline) > MOST_SHAPES:
        parts += _lanes(table, timeline, scale)
    for e in timeline if len(timeline) <= MOST_SHAPES else ():
        if e.end <= e.start:
            continue
        colour = shade(e.name, local[e.unit], chunks[e.stage]) if e.unit >= 0 else shade(e.name, 0, 1)
        left, wide, y = LABEL + e.start * scale, (e.end - e.start) * scale, TOP + LANE * e.stage
        parts.append(
            f'<rect x="{left:.2f}" y="{y + 1}" width="{max(wide - 0.6, 0.4):.2f}" height="{LANE - 2}" fill="{_hex(colour)}">'
            f"<title>{_describe(table, e)}</title></rect>"
        )
        if wide > 6 * len(str(e.microbatch)) + 2:
            parts.append(
                f'<text x="{left + wide / 2:.2f}" y="{y + LANE * 0.62:.0f}" text-anchor="middle" fill="{ink(colour)}" '
                f'pointer-events="none">{e.microbatch}</text>'
            )
    y = TOP + LANE * table.stages + 16
    parts.append(f'<text x="{LABEL}" y="{y}">0</text>')
    parts.append(f'<text x="{LABEL + total * scale:.0f}" y="{y}" text-anchor="end">time {total:g}</text></svg>')
    return "\n".join(parts) + "\n"


def _by_colour(table: Table, timeline: Timeline) -> dict[tuple[int, tuple[int, int, int]], list[tuple[float, float]]]:
    """(stage, colour) → the (start, end) of its ops that take time, in order of their starts."""
    local, chunks = _local_chunks(table)
    found: dict[tuple[int, tuple[int, int, int]], list[tuple[float, float]]] = {}
    colours: dict[tuple[str, int], tuple[int, int, int]] = {}
    for e in timeline:
        if e.end > e.start:
            if (e.name, e.unit) not in colours:
                colours[e.name, e.unit] = shade(e.name, local[e.unit], chunks[e.stage]) if e.unit >= 0 else shade(e.name, 0, 1)
            found.setdefault((e.stage, colours[e.name, e.unit]), []).append((e.start, e.end))
    return {key: sorted(times) for key, times in found.items()}


def _lanes(table: Table, timeline: Timeline, scale: float) -> list[str]:
    """The ops of a long timeline as one broad line for each stage and colour."""
    parts = []
    for (s, colour), times in _by_colour(table, timeline).items():
        steps, at = [], 0.0
        for start, end in times:
            left, wide = round(LABEL + start * scale - at, 2), round((end - start) * scale, 2)
            steps.append(f"m{left:g} 0h{wide:g}")
            at = round(at + left + wide, 2)
        path = f"M0 {TOP + LANE * s + LANE / 2:g}{''.join(steps)}"
        parts.append(f'<path d="{path}" fill="none" stroke="{_hex(colour)}" stroke-width="{LANE - 2}"/>')
    return parts


def _pixels(timeline: Timeline, total: float) -> float:
    """Width for the time axis: enough for the number in the shortest op, within bounds."""
    times = timeline.end - timeline.start
    shortest = float(times[times > 0].min(initial=total))
    return min(MOST_PIXELS, max(480.0, PIXELS_OF_AN_OP * total / shortest))


def _names(timeline: Timeline) -> list[str]:
    there = {NAMES[i] for i in np.unique(timeline.name[timeline.end > timeline.start]).tolist()}
    return [name for name in COLOURS if name in there]


def _describe(table: Table, e: Event) -> str:
    """An op in words."""
    what = f"chunk {table.chunk_of[e.unit]}, " if e.unit >= 0 else ""
    return f"{MEANINGS[e.name]}, {what}microbatch {e.microbatch}: {e.start:g} to {e.end:g}"


def _hex(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


# --- PNG -------------------------------------------------------------------------------------------------------------------------


def png(table: Table, timeline: Timeline, title: str) -> bytes:
    """A timeline as a PNG picture; as `svg`, drawn by matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    local, chunks = _local_chunks(table)
    few = len(timeline) <= MOST_SHAPES
    total = float(timeline.end.max()) or 1.0
    inches = (_pixels(timeline, total) + 150) / 100
    figure = Figure(figsize=(inches, 1.1 + 0.3 * table.stages), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    per_point = total / ((inches - 1.2) * 72)
    for (s, tint), times in _by_colour(table, timeline).items():
        spans = [(start, end - start) for start, end in times]
        axes.broken_barh(spans, (s - 0.46, 0.92), facecolors=_hex(tint), edgecolor="white", linewidth=0.4 if few else 0.0)
    for e in timeline if few else ():
        if e.end > e.start and (e.end - e.start) / per_point > 4.6 * len(str(e.microbatch)) + 1:
            colour = shade(e.name, local[e.unit], chunks[e.stage]) if e.unit >= 0 else shade(e.name, 0, 1)
            axes.text((e.start + e.end) / 2, e.stage, str(e.microbatch), ha="center", va="center", fontsize=7, color=_named_ink(colour))
    axes.set(xlim=(0, total), ylim=(table.stages - 0.45, -0.55), yticks=range(table.stages), xlabel="time", facecolor="#eeeeee")
    axes.set_yticks(range(table.stages), [f"stage {s}" for s in range(table.stages)])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    lighter = "   (lighter: later chunks; number: microbatch)" if max(chunks) > 1 else "   (number: microbatch)"
    axes.set_title(title + lighter, fontsize=9, loc="left")
    patches = [Patch(color=_hex(shade(name, 0, 1)), label=MEANINGS[name]) for name in _names(timeline)]
    figure.legend(handles=patches, loc="outside lower right", ncols=len(patches), fontsize=8, frameon=False)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def _named_ink(colour: tuple[int, int, int]) -> str:
    return "black" if ink(colour) == "#000" else "white"


def stage_chunks(table: Table) -> str:
    """One line: which chunks each stage has; of many stages, the first and the last ones."""
    own = units_of(table.stage_of, table.stages)
    listed = [f"stage {s}: {', '.join(str(c) for c in dict.fromkeys(table.chunk_of[g] for g in own[s]))}" for s in range(table.stages)]
    if table.stages > MOST_STAGES:
        listed[MOST_STAGES // 2 : -MOST_STAGES // 2] = ["…"]
    return "; ".join(listed)
