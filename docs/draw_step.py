"""Draws docs/step.svg, the picture of architecture.md: a real table, and one of its rows blown up into the ops of the tick.

    python docs/draw_step.py [--png=FILE]

Everything in it is read off the table, its slots and the columns that the runtime gets: nothing is drawn by hand. A test compares the
fingerprint in the file with the one of the present table and script, so a change of either asks for a new picture.
"""

import argparse
import hashlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle  # noqa: E402

from jaxtrain.schedule.by_name import make_table  # noqa: E402
from jaxtrain.schedule.columns import columns, permutes, results, units  # noqa: E402
from jaxtrain.schedule.slots import MESSAGES, SlottedTable, assign_slots  # noqa: E402
from jaxtrain.schedule.table import Op, Permute, wraps  # noqa: E402
from jaxtrain.schedule.table_spec import TableSpec  # noqa: E402
from jaxtrain.schedule.validator import check  # noqa: E402

PICTURE = ROOT / "docs" / "step.svg"
SCHEDULE, STAGES, REPEATS, MICROBATCHES = "zb_v", 3, 2, 5
TICK = 11  # the row that is blown up: here every stage does something else, and there is a head
COLORS = {
    "F": ("#7fb2e5", "#b9d6f2"),
    "R": ("#a98fd0", "#cdb7e6"),
    "B": ("#f2ab5c", "#f9d4a6"),
    "W": ("#86c98a", "#bfe3c0"),
    "other": ("#d9dde2", "#d9dde2"),
}
NAMES = ("take_", "embed", "F", "K", "R", "B", "W", "send_", "stay_", "head")  # how the names of ops begin
NUMBERS = ("_slot", "microbatch")  # and how those of slots and microbatches end
INK, FAINT = "#20262d", "#9aa4ae"
LEFT, WIDTH = 66.0, 900.0  # of both panels, in points
HEIGHT = 560.0
NARROW, PERMUTE = 0.32, 1.1  # widths of an op that no stage runs in the tick, and of the permute; one that runs: 1


def slotted_table() -> SlottedTable:
    """The table of the picture, with its slots."""
    table = make_table(TableSpec(SCHEDULE, STAGES, REPEATS, MICROBATCHES, permute="late", vocabulary="parallel"))
    check(table)
    return assign_slots(table)


def fingerprint() -> str:
    """Of everything that the picture depends on."""
    digest, p = hashlib.sha256(pathlib.Path(__file__).read_bytes()), slotted_table()
    shown = {name: a for name, a in columns(p).items() if name in ops(p) or name.startswith("permute") or name.endswith(NUMBERS)}
    for name, array in sorted(shown.items()):
        digest.update(name.encode() + np.ascontiguousarray(array, np.int32).tobytes())
    return digest.hexdigest()[:16]


def color(kind: str, unit: int = 0) -> str:
    return COLORS["F" if kind == "K" else kind][unit % 2]


def ops(p: SlottedTable) -> list[str]:
    """The names of the ops of a tick that some stage runs in some row, in order."""
    wanted = columns(p)
    return [name for name in wanted if name.startswith(NAMES) and not name.endswith(NUMBERS) and wanted[name].any()]


class Canvas:
    """A figure of which one unit is a point."""

    def __init__(self):
        self.figure = Figure(figsize=((WIDTH + 12) / 72, HEIGHT / 72), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH + 12), ylim=(0, HEIGHT))
        self.axes.axis("off")

    def text(self, x: float, y: float, text: str, size: float, align: str = "center", **style) -> None:
        self.axes.text(x, y, text, **{"ha": align, "va": "center", "fontsize": size, "color": INK, **style})

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor="none"))

    def empty(self, x: float, y: float, width: float, height: float) -> None:
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor="none", edgecolor=FAINT, linewidth=0.5, linestyle=":"))

    def line(self, y: float) -> None:
        self.axes.plot([LEFT, WIDTH], [y, y], color="#e4e7ea", linewidth=0.6, zorder=0)


# --- the table -------------------------------------------------------------------------------------------------------------------


def draw_table(canvas: Canvas, p: SlottedTable, top: float, row: float, strip: float) -> tuple[float, float, float]:
    """Stages down, ticks to the right, and below them what a row says for all stages; gives the blown-up tick's edges and bottom."""
    table = p.table
    cell = (WIDTH - LEFT) / table.ticks
    for s in range(table.stages):
        canvas.text(LEFT - 8, top - (s + 0.5) * row, f"stage {s}", 8, "right")
        for t in range(table.ticks):
            x, y = LEFT + t * cell, top - (s + 1) * row
            op, unit = Op(int(table.op[t, s])), int(table.local_unit[t, s])
            if op == Op.IDLE:
                canvas.empty(x + 1, y + 1, cell - 2, row - 2)
                continue
            canvas.box(x + 1, y + 1, cell - 2, row - 2, color(op.name, unit))
            canvas.text(x + cell / 2, y + 0.72 * row, f"{op.name}{unit}", 6.5)
            canvas.text(x + cell / 2, y + 0.34 * row, str(table.microbatch[t, s]), 9, fontweight="bold")
    bottom = top - table.stages * row - 5
    for name in ("embed", "head", "embed_gradient"):
        bottom -= strip
        canvas.text(LEFT - 8, bottom + strip / 2, name, 6.5, "right", family="monospace")
        canvas.line(bottom + strip / 2)
        for t, k in enumerate(getattr(table, name).tolist()):
            if k >= 0:
                canvas.box(LEFT + t * cell + 1, bottom + 1, cell - 2, strip - 2, color("other"))
                canvas.text(LEFT + (t + 0.5) * cell, bottom + strip / 2, str(k), 7)
    bottom -= strip
    canvas.text(LEFT - 8, bottom + strip / 2, "permute", 6.5, "right", family="monospace")
    canvas.line(bottom + strip / 2)
    for t, when in enumerate(table.permute.tolist()):
        if when != Permute.NONE:
            canvas.box(LEFT + t * cell + 1, bottom + 1, cell - 2, strip - 2, color("other"))
            canvas.text(LEFT + (t + 0.5) * cell, bottom + strip / 2, Permute(when).name.lower(), 6)
    for t in range(table.ticks):
        canvas.text(LEFT + (t + 0.5) * cell, top + 6, str(t), 6.5, color=INK if t == TICK else FAINT)
    x = LEFT + TICK * cell
    canvas.axes.add_patch(
        Rectangle((x - 0.5, bottom - 1), cell + 1, top - bottom + 2, facecolor="none", edgecolor=INK, linewidth=1.4, zorder=5)
    )
    return x - 0.5, x + cell + 0.5, bottom - 1


# --- the tick --------------------------------------------------------------------------------------------------------------------


def what_it_does(p: SlottedTable, name: str, s: int) -> str:
    """The text in the box of an op that a stage runs in the tick."""
    now = {key: int(a[TICK, s]) for key, a in columns(p).items()}
    into, slot = results(p), {key.removesuffix("_slot"): n for key, n in now.items() if key.endswith("_slot")}
    activation, gradient, stash = (f"{pool}[{slot[pool]}]" for pool in ("activation", "gradient", "weight_stash"))
    for_b, for_w = f"residual_b[{slot['residual_b']}]", f"residual_w[{slot['residual_w']}]"
    if name[0] in "FKRBW":
        op, unit = name[0], int(name[1:])
        lines = {
            "F": [f"{activation} →", f"{into.get(('F', unit))}"],
            "K": [f"{activation} →", f"{into.get(('F', unit))},", f"{for_b},", for_w],
            "R": [f"{activation} →", f"{for_b},", for_w],
            "B": [f"{gradient},", f"{for_b},", f"{for_w}", f"→ {into.get(('B', unit))},", stash],
            "W": [f"{for_w},", stash, f"→ grad{unit} += …"],
        }[op]
        return "\n".join([f"microbatch {now['microbatch']}:", *lines])
    if name == "embed":
        return f"microbatch {now['embed_microbatch']}:\ntokens → activation[{slot['embed_activation']}]"
    if name == "head":
        where = f"of stage {p.table.stage_of[-1]}" if p.table.vocabulary == "parallel" else "of this stage"
        part = f"\n1/{p.table.stages} of vocabulary," if p.table.vocabulary == "parallel" else ""
        lines = [
            f"microbatch {now['head_microbatch']}:{part}",
            f"activation[{slot['head_activation']}] →",
            f"gradient[{slot['head_gradient']}]",
            f"{where},",
            "grad_head += …",
        ]
        if s == p.table.stage_of[-1]:  # the others add zero
            lines = [*lines[:-1], f"{lines[-1]},", "loss += …"]
        return "\n".join(lines)
    if name == "embed_gradient":
        return f"microbatch {now['embed_gradient_microbatch']}:\ngradient[{slot['embed_gradient_gradient']}], tokens →\ngrad_embed += …"
    verb, *rest = name.split("_")
    if verb == "take":
        way, kind = rest
        return f"{way}_in →\n{kind}[{slot[f'{way}_{kind}']}]"
    if verb == "stay":
        kind, buffer = rest
        return f"{buffer} →\n{kind}[{slot[f'stay_{kind}']}]"
    return f"y → {rest[0]}"


def broken(name: str) -> str:
    """An op's name on one line or two: a long one is cut before `activation` or `gradient`."""
    return name.replace("_activation", "_\nactivation").replace("_gradient", "_\ngradient")


def draw_tick(canvas: Canvas, p: SlottedTable, top: float, row: float) -> None:
    """Stages down, the tick's ops to the right: a filled box is a loop of one trip, a dotted one of zero trips."""
    table, wanted, names = p.table, columns(p), ops(p)
    busy = [bool(wanted[n][TICK].any()) for n in names]
    unit = (WIDTH - LEFT) / (sum(1.0 if b else NARROW for b in busy) + PERMUTE)
    x = LEFT
    for name, runs in zip(names, busy, strict=True):
        width = unit if runs else NARROW * unit
        if runs:
            canvas.text(x + width / 2, top + 8, broken(name), 7.5, family="monospace")
        else:
            canvas.text(x + width / 2, top + 4, broken(name), 7, family="monospace", color=FAINT, rotation=90, va="bottom")
        for s in range(table.stages):
            middle = top - (s + 0.5) * row
            if not wanted[name][TICK, s]:
                canvas.empty(x + width / 2 - 7, middle - 7, 14, 14)
                canvas.text(x + width / 2, middle, "0", 7, color=FAINT)
                continue
            box = FancyBboxPatch((x + 2, middle - row / 2 + 5), width - 4, row - 10, boxstyle="round,pad=0,rounding_size=4")
            computes = name[0] in "FKRBW"
            box.set(facecolor=color(name[0], int(name[1:])) if computes else color("other"), edgecolor="none")
            canvas.axes.add_patch(box)
            canvas.text(x + width / 2, middle, what_it_does(p, name, s), 7, linespacing=1.25)
        x += width
    for s in range(table.stages):
        canvas.text(LEFT - 8, top - (s + 0.5) * row, f"stage {s}", 8, "right")
        if s:
            canvas.line(top - s * row)
    draw_permutes(canvas, p, x, PERMUTE * unit, top, row)


def draw_permutes(canvas: Canvas, p: SlottedTable, left: float, width: float, top: float, row: float) -> None:
    """The permutes of the row: what the next row takes in is dark, what travels unread is faint."""
    stages, wanted, steps = p.table.stages, columns(p), permutes(p.table)
    assert wanted["permute_LATE"][TICK].all(), "the picture is of a row that permutes at its end"
    canvas.text(left + 0.5 * width, top + 22, "permute_LATE", 7.5, family="monospace")
    for way, step in steps.items():
        x = left + {"up": 0.27, "down": 0.73}[way] * width
        canvas.text(x, top + 7, f"{way} →\n{way}_in", 7)
        for s in range(stages):
            to = (s + step) % stages
            if not wraps(p.table.stage_of, stages) and to != s + step:
                continue  # no link between the last stage and the first
            read = any(wanted[f"take_{way}_{kind}"][TICK + 1, to] for kind in MESSAGES)
            style = {"color": INK if read else FAINT, "linewidth": 1.5 if read else 0.9, "linestyle": "-" if read else ":"}
            curve = "arc3,rad=-0.22" if abs(to - s) > 1 else "arc3"  # the ring closes beside the other arrows
            ends = [(x, top - (stage + 0.5) * row) for stage in (s, to)]
            canvas.axes.add_patch(
                FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=8, connectionstyle=curve, shrinkA=6, shrinkB=6, **style)
            )
            canvas.axes.plot(*ends[0], marker="o", markersize=3.5, color=INK)


def draw() -> Canvas:
    """The picture."""
    matplotlib.rcParams.update({"svg.hashsalt": "jaxtrain", "svg.fonttype": "path", "font.family": "DejaVu Sans"})
    p, canvas = slotted_table(), Canvas()
    t = p.table
    title = f"The table: {t.name}, {t.stages} stages of {units(t)} chunks, {t.microbatches} microbatches, {t.ticks} ticks"
    canvas.text(LEFT, 545, title, 10, "left", fontweight="bold")
    chunks = "; ".join(f"stage {s}: {' and '.join(str(g) for g, at in enumerate(t.stage_of) if at == s)}" for s in range(t.stages))
    canvas.text(
        LEFT,
        531,
        f"a cell: the op with the stage's own chunk, 0 or 1 (lighter), and the microbatch below. Chunks of the model: {chunks}",
        7.5,
        "left",
    )
    legend = (("F", "forward"), ("B", "gradient of the input"), ("W", "gradient of the weights"))
    x = LEFT
    for kind, text in legend:
        canvas.box(x, 514, 9, 9, color(kind))
        canvas.text(x + 13, 518.5, f"{kind}  {text}", 7.5, "left")
        x += 46 + 4.4 * len(text)
    left, right, bottom = draw_table(canvas, p, top=494, row=32, strip=12)
    panel = 316.0
    canvas.axes.add_patch(
        Polygon([(left, bottom), (right, bottom), (WIDTH, panel), (LEFT, panel)], facecolor="#eef1f4", edgecolor="none", zorder=0)
    )
    said = (
        f"Tick {TICK}, op by op, on every stage from left to right. Filled: a loop of one trip; dotted: of none. K is an F that keeps "
        f"what its B and W read. Solid arrows are read in tick {TICK + 1}, dotted ones never."
    )
    canvas.text(LEFT, panel - 10, said, 8, "left")
    draw_tick(canvas, p, top=228, row=74)
    return canvas


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--png", default="", help="write it as PNG to this file as well, to look at")
    options = parser.parse_args()
    figure = draw().figure
    with PICTURE.open("w") as file:
        metadata = {"Date": None, "Title": "One row of the table", "Description": f"fingerprint {fingerprint()}"}
        figure.savefig(file, format="svg", metadata=metadata)
    print(f"wrote {PICTURE.relative_to(ROOT)}")
    if options.png:
        figure.savefig(options.png, dpi=130)


if __name__ == "__main__":
    main()
