"""Draws docs/step.svg, the picture of architecture.md: a real table, and one of its rows blown up into the ops of the tick.

    python docs/draw_step.py

Everything in it is read off the table, its slots and the columns that the runtime gets: nothing is drawn by hand. A test compares the
fingerprint in the file with the one of the present table and script, so a change of either asks for a new picture.
"""

import hashlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402
import numpy as np  # noqa: E402
from jaxtrain.pipeline.schedule import Op, Program, assign_slots, check, make_table  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle  # noqa: E402

from jaxtrain.pipeline.tick import columns  # noqa: E402

PICTURE = ROOT / "docs" / "step.svg"
SCHEDULE, STAGES, CHUNKS, MICROBATCHES = "interleaved", 3, 2, 6
TICK = 7  # the row that is blown up: here every stage does something else
COLORS = {"F": ("#b9d6f2", "#7fb2e5"), "B": ("#f9d4a6", "#f2ab5c"), "L": ("#cdb7e6", "#cdb7e6"), "other": ("#d9dde2", "#d9dde2")}
INK, FAINT = "#20262d", "#9aa4ae"
LEFT, WIDTH = 46.0, 860.0  # of both panels, in points


def program() -> Program:
    """The table of the picture, with its slots."""
    table = make_table(SCHEDULE, STAGES, CHUNKS, MICROBATCHES)
    check(table)
    return assign_slots(table)


def fingerprint() -> str:
    """Of everything that the picture depends on."""
    digest = hashlib.sha256(pathlib.Path(__file__).read_bytes())
    for name, array in sorted(columns(program()).items()):
        digest.update(name.encode() + np.ascontiguousarray(array, np.int32).tobytes())
    return digest.hexdigest()[:16]


def color(kind: str, chunk: int) -> str:
    return COLORS[kind][chunk % 2]


def draw_table(axes, p: Program, top: float, height: float) -> tuple[float, float]:
    """Stages down, ticks to the right; gives the left and right edge of the blown-up tick."""
    table = p.table
    cell = (WIDTH - LEFT) / table.ticks
    row = height / table.stages
    for s in range(table.stages):
        axes.text(LEFT - 8, top - (s + 0.5) * row, f"stage {s}", ha="right", va="center", fontsize=8, color=INK)
        for t in range(table.ticks):
            x, y = LEFT + t * cell, top - (s + 1) * row
            op = Op(int(table.op[t, s]))
            if op == Op.IDLE:
                axes.add_patch(
                    Rectangle((x + 1, y + 1), cell - 2, row - 2, facecolor="none", edgecolor=FAINT, linewidth=0.5, linestyle=":")
                )
                continue
            axes.add_patch(Rectangle((x + 1, y + 1), cell - 2, row - 2, facecolor=color(op.name, int(table.chunk[t, s])), edgecolor="none"))
            axes.text(x + cell / 2, y + 0.72 * row, f"{op.name}{table.chunk[t, s]}", ha="center", va="center", fontsize=6.5, color=INK)
            axes.text(
                x + cell / 2,
                y + 0.34 * row,
                str(table.microbatch[t, s]),
                ha="center",
                va="center",
                fontsize=9,
                fontweight="bold",
                color=INK,
            )
    for t in range(table.ticks):
        axes.text(LEFT + (t + 0.5) * cell, top + 6, str(t), ha="center", va="center", fontsize=6.5, color=INK if t == TICK else FAINT)
    x = LEFT + TICK * cell
    axes.add_patch(Rectangle((x - 0.5, top - height - 1), cell + 1, height + 2, facecolor="none", edgecolor=INK, linewidth=1.4))
    return x - 0.5, x + cell + 0.5


def what_it_does(p: Program, name: str, s: int) -> str:
    """The text in the box of an op that a stage runs in the tick."""
    t = p.table
    x, g, k = p.x_slot[TICK, s], p.g_slot[TICK, s], t.microbatch[TICK, s]
    if name[0] in "FBL":
        c = int(t.chunk[TICK, s])
        return {
            "F": f"chunk {c} of\nmicrobatch {k}:\nx[{x}] → y",
            "B": f"chunk {c} of\nmicrobatch {k}:\nx[{x}] again,\ng_kept[{g}] → g,\ngrad{c} += …",
            "L": f"chunk {c} of\nmicrobatch {k},\nhead, loss and\nback: x[{x}] → g,\ngrad{c}, grad_head,\nloss += …",
        }[name[0]]
    return {
        "take_x": f"x_in\n→ x[{p.arriving_x[TICK, s]}]",
        "take_g": f"g_in →\ng_kept[{p.arriving_g[TICK, s]}]",
        "embed": f"tokens of\nmicrobatch {k}\n→ x[{x}]",
        "embed_gradient": "g, tokens →\ngrad_embed += …",
    }[name]


def draw_tick(axes, p: Program, top: float, height: float) -> None:
    """Stages down, the tick's ops to the right: a filled box is a loop of one trip, a dotted one of zero trips."""
    table, wanted = p.table, columns(p)
    names = ["take_x", "take_g", "embed"] + [f"{op}{c}" for c in range(table.chunks) for op in "FB"] + ["L", "embed_gradient"]
    busy = [bool(wanted[n][TICK].any()) for n in names]
    unit = (WIDTH - LEFT) / (sum(1.0 if b else 0.55 for b in busy) + 1.25)
    row, x = height / table.stages, LEFT
    for name, runs in zip(names, busy, strict=True):
        width = unit if runs else 0.55 * unit
        axes.text(
            x + width / 2,
            top + 9,
            name.replace("embed_gradient", "embed_\ngradient"),
            ha="center",
            va="center",
            fontsize=7.5,
            family="monospace",
            color=INK,
        )
        for s in range(table.stages):
            middle = top - (s + 0.5) * row
            if not wanted[name][TICK, s]:
                axes.add_patch(
                    Rectangle((x + width / 2 - 7, middle - 7), 14, 14, facecolor="none", edgecolor=FAINT, linewidth=0.7, linestyle=":")
                )
                axes.text(x + width / 2, middle, "0", ha="center", va="center", fontsize=7, color=FAINT)
                continue
            kind = name[0] if name[0] in "FBL" else "other"
            box = FancyBboxPatch((x + 3, middle - row / 2 + 5), width - 6, row - 10, boxstyle="round,pad=0,rounding_size=4")
            box.set(facecolor=color(kind, int(table.chunk[TICK, s]) if kind != "other" else 0), edgecolor="none")
            axes.add_patch(box)
            axes.text(x + width / 2, middle, what_it_does(p, name, s), ha="center", va="center", fontsize=7, color=INK, linespacing=1.25)
        x += width
    for s in range(table.stages):
        axes.text(LEFT - 8, top - (s + 0.5) * row, f"stage {s}", ha="right", va="center", fontsize=8, color=INK)
        if s:
            axes.plot([LEFT, WIDTH], [top - s * row] * 2, color="#e4e7ea", linewidth=0.6, zorder=0)
    draw_permutes(axes, p, x, 1.25 * unit, top, row)


def draw_permutes(axes, p: Program, left: float, width: float, top: float, row: float) -> None:
    """The two permutes of the row: what the next row takes in is dark, what travels unread is faint."""
    stages, wanted = p.table.stages, columns(p)
    assert wanted["permute_LATE"][TICK].all(), "the picture is of a row that permutes at its end"
    axes.text(left + 0.5 * width, top + 14, "permute", ha="center", va="center", fontsize=7.5, family="monospace", color=INK)
    for payload, step, at, text in (("x", 1, 0.3, "y → x_in"), ("g", -1, 0.72, "g → g_in")):
        x = left + at * width
        axes.text(x, top + 1, text, ha="center", va="center", fontsize=7, color=INK)
        for s in range(stages):
            to = (s + step) % stages
            read = bool(wanted[f"take_{payload}"][TICK + 1, to])
            style = {"color": INK if read else FAINT, "linewidth": 1.5 if read else 0.9, "linestyle": "-" if read else ":"}
            curve = "arc3,rad=-0.22" if abs(to - s) > 1 else "arc3"  # the ring closes beside the other arrows
            ends = [(x, top - (stage + 0.5) * row) for stage in (s, to)]
            axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=8, connectionstyle=curve, shrinkA=6, shrinkB=6, **style))
            axes.plot(*ends[0], marker="o", markersize=3.5, color=INK)


def draw() -> None:
    """Writes the picture."""
    matplotlib.rcParams.update({"svg.hashsalt": "jaxtrain", "svg.fonttype": "path", "font.family": "DejaVu Sans"})
    p = program()
    height = 470.0
    figure = Figure(figsize=((WIDTH + 12) / 72, height / 72), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH + 12), ylim=(0, height))
    axes.axis("off")
    t = p.table
    axes.text(
        LEFT,
        455,
        f"The table: {t.name}, {t.stages} stages × {t.chunks} chunks, {t.microbatches} microbatches, {t.ticks} ticks",
        fontsize=10,
        fontweight="bold",
        va="center",
        color=INK,
    )
    axes.text(LEFT, 441, "a cell: the op with its chunk, and the microbatch below", fontsize=7.5, va="center", color=INK)
    legend = [("F", "forward"), ("B", "recompute and backward"), ("L", "last chunk: forward, head, loss, backward")]
    x = 330.0
    for kind, text in legend:
        axes.add_patch(Rectangle((x, 436.5), 9, 9, facecolor=color(kind, 1), edgecolor="none"))
        axes.text(x + 13, 441, f"{kind}  {text}", fontsize=7.5, va="center", color=INK)
        x += 36 + 4.6 * len(text)
    left, right = draw_table(axes, p, top=414, height=102)
    axes.add_patch(Polygon([(left, 311), (right, 311), (WIDTH, 297), (LEFT, 297)], facecolor="#eef1f4", edgecolor="none", zorder=0))
    text = (
        f"Tick {TICK}, op by op, on every stage from left to right. Filled: a loop of one trip; dotted: of none. "
        f"Solid arrows are read in tick {TICK + 1}, dotted ones never."
    )
    axes.text(LEFT, 285, text, fontsize=8, va="center", color=INK)
    draw_tick(axes, p, top=248, height=232)
    with PICTURE.open("w") as file:
        figure.savefig(
            file, format="svg", metadata={"Date": None, "Title": "One row of the table", "Description": f"fingerprint {fingerprint()}"}
        )


if __name__ == "__main__":
    draw()
    print(f"wrote {PICTURE.relative_to(ROOT)}")
