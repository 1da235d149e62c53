"""Draws docs/step.svg, the picture of architecture.md: a real table, and one of its rows blown up
into the ops of the tick.

    python docs/draw_step.py [--out=FILE] [--png=FILE]

Everything in it is read off the table, its slots and the columns that the runtime gets: nothing is
drawn by hand. A test compares the fingerprint in the file with the one of the present table and
script, so a change of either asks for a new picture.
"""

import argparse
import functools
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
from jaxtrain.schedule.columns import (  # noqa: E402
    ARRIVED,
    CELL_OPS,
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    TickTable,
    cell_op,
    permute_op,
    tick_table,
)
from jaxtrain.schedule.drawing import ink, shade  # noqa: E402
from jaxtrain.schedule.slots import assign_slots  # noqa: E402
from jaxtrain.schedule.table import Op, Permute, wraps  # noqa: E402
from jaxtrain.schedule.table_spec import TableSpec  # noqa: E402
from jaxtrain.schedule.validator import check  # noqa: E402

PICTURE = ROOT / "docs" / "step.svg"
SCHEDULE, STAGES, REPEATS, MICROBATCHES = "zb_v", 3, 2, 5
TICK = 11  # the row that is blown up: here every stage does something else, and there is a head
OTHER = "#d9dde2"  # ops that are of no cell
INK, FAINT = "#20262d", "#9aa4ae"
LEFT, WIDTH = 66.0, 900.0  # of both panels, in points
HEIGHT = 560.0
MOST_LINES = 6  # of a box's text at its usual size
# widths of an op that no stage runs in the tick, and of the permute; one that runs: 1
NARROW, PERMUTE = 0.32, 1.1


@functools.cache
def ticks() -> TickTable:
    """The ticks of the picture's table."""
    table = make_table(
        TableSpec(SCHEDULE, STAGES, REPEATS, MICROBATCHES, permute="late", vocabulary="parallel")
    )
    check(table)
    return tick_table(assign_slots(table))


def fingerprint() -> str:
    """Of everything that the picture depends on."""
    digest, columns = hashlib.sha256(pathlib.Path(__file__).read_bytes()), ticks().columns
    microbatches = {
        f"{op or 'cell'} microbatch": column for op, column in microbatch_columns().items()
    }
    slots = {name: column for name, column in vars(columns.slots).items() if column is not None}
    for name, array in sorted((columns.runs | slots | microbatches).items()):
        digest.update(name.encode() + np.ascontiguousarray(array, np.int32).tobytes())
    return digest.hexdigest()[:16]


def color(kind: str, unit: int = 0) -> str:
    """The colour of an op of this kind on a stage's unit, as in every picture of a schedule."""
    if kind == "other":
        return OTHER
    return "#{:02x}{:02x}{:02x}".format(*shade("F" if kind == "K" else kind, unit % 2, 2))


def text_color(kind: str, unit: int = 0) -> str:
    """The colour of a text that is read on `color`."""
    return INK if kind == "other" else ink(shade("F" if kind == "K" else kind, unit % 2, 2))


def microbatch_columns() -> dict[str, np.ndarray]:
    """Op → the column of its microbatch; "" for the cells."""
    columns = ticks().columns
    shared = {
        EMBED: columns.embed_microbatch,
        HEAD: columns.head_microbatch,
        EMBED_GRADIENT: columns.embed_gradient_microbatch,
    }
    return {"": columns.microbatch, **shared}


def ops() -> list[str]:
    """The names of the ops of a tick that some stage runs in some tick, in order; without the
    permutes."""
    permutes = {permute_op(when) for when in Permute}
    return [
        name
        for name, column in ticks().columns.runs.items()
        if name not in permutes and column.any()
    ]


def cells() -> dict[str, tuple[str, int]]:
    """The op of a cell → its kind and its local unit."""
    return {
        cell_op(kind, unit): (kind, unit)
        for kind in CELL_OPS
        for unit in range(ticks().slotted.table.units_per_stage)
    }


class Canvas:
    """A figure of which one unit is a point."""

    def __init__(self):
        self.figure = Figure(figsize=((WIDTH + 12) / 72, HEIGHT / 72), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH + 12), ylim=(0, HEIGHT))
        self.axes.axis("off")

    def text(
        self, x: float, y: float, text: str, size: float, align: str = "center", **style
    ) -> None:
        self.axes.text(
            x, y, text, **{"ha": align, "va": "center", "fontsize": size, "color": INK, **style}
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor="none"))

    def empty(self, x: float, y: float, width: float, height: float) -> None:
        self.axes.add_patch(
            Rectangle(
                (x, y),
                width,
                height,
                facecolor="none",
                edgecolor=FAINT,
                linewidth=0.5,
                linestyle=":",
            )
        )

    def line(self, y: float) -> None:
        self.axes.plot([LEFT, WIDTH], [y, y], color="#e4e7ea", linewidth=0.6, zorder=0)


# --- the table ------------------------------------------------------------------------------------


def draw_table(canvas: Canvas, top: float, row: float, strip: float) -> tuple[float, float, float]:
    """Stages down, ticks to the right, and below them what a row says for all stages; gives the
    blown-up tick's edges and bottom."""
    table = ticks().slotted.table
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
            words = {"color": text_color(op.name, unit)}
            canvas.text(x + cell / 2, y + 0.72 * row, f"{op.name}{unit}", 6.5, **words)
            words["fontweight"] = "bold"
            canvas.text(x + cell / 2, y + 0.34 * row, str(table.microbatch[t, s]), 9, **words)
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
        canvas.text(
            LEFT + (t + 0.5) * cell, top + 6, str(t), 6.5, color=INK if t == TICK else FAINT
        )
    x = LEFT + TICK * cell
    canvas.axes.add_patch(
        Rectangle(
            (x - 0.5, bottom - 1),
            cell + 1,
            top - bottom + 2,
            facecolor="none",
            edgecolor=INK,
            linewidth=1.4,
            zorder=5,
        )
    )
    return x - 0.5, x + cell + 0.5, bottom - 1


# --- the tick -------------------------------------------------------------------------------------


def what_it_does(name: str, stage: int) -> str:
    """The text in the box of an op that a stage runs in the tick."""
    columns, table = ticks().columns, ticks().slotted.table
    microbatch = {op: int(column[TICK, stage]) for op, column in microbatch_columns().items()}
    slot = {
        slot: f"[{int(column[TICK, stage])}]"
        for slot, column in vars(columns.slots).items()
        if column is not None
    }
    if name in cells():
        kind, unit = cells()[name]
        return "\n".join(
            [
                f"microbatch {microbatch['']}:",
                *cell_lines(kind, unit, {pool: f"{pool}{at}" for pool, at in slot.items()}),
            ]
        )
    if name == EMBED:
        return f"microbatch {microbatch[name]}:\ntokens → activation{slot['embed_activation']}"
    if name == HEAD:
        shared = table.vocabulary == "parallel"
        where = f"of stage {table.stage_of[-1]}" if shared else "of this stage"
        part = f"\n1/{table.stages} of vocabulary," if shared else ""
        lines = [
            f"activation{slot['head_activation']} →",
            f"gradient{slot['head_gradient']}",
            f"{where},",
            "gradients.head",
        ]
        if stage == table.stage_of[-1]:  # the others add zero
            lines = [*lines[:-1], f"{lines[-1]},", "loss"]
        return "\n".join([f"microbatch {microbatch[name]}:{part}", *lines])
    if name == EMBED_GRADIENT:
        return (
            f"microbatch {microbatch[name]}:\ngradient{slot['embedding_gradient']}, "
            "tokens\n→ gradients.embed"
        )
    copies = ticks().copies
    every = (*copies.takes, *copies.sends, *copies.stays)
    (copy,) = (copy for copy in every if copy.op == name)
    return f"{copy.source} →\n{copy.target}{slot[copy.slot] if copy.slot else ''}"


def cell_lines(kind: str, unit: int, slot: dict[str, str]) -> list[str]:
    """What a cell's op reads and writes. slot: pool → its name with the slot."""
    output, input_gradient = (ticks().result_buffers[op, unit] for op in (Op.F, Op.B))
    activation, gradient, stash = slot["activation"], slot["gradient"], slot["weight_stash"]
    residuals = [f"{slot['residual_b']},", slot["residual_w"]]
    return {
        "F": [f"{activation} →", output],
        "K": [f"{activation} →", f"{output},", *residuals],
        "R": [f"{activation} →", *residuals],
        "B": [f"{gradient},", *residuals, f"→ {input_gradient},", stash],
        "W": [f"{slot['residual_w']},", f"{stash} →", "gradients", f".layers.{unit}"],
    }[kind]


def broken(name: str) -> str:
    """An op's name on one line or two: a long one is cut before `activation` or `gradient`."""
    return name.replace("_activation", "_\nactivation").replace("_gradient", "_\ngradient")


def draw_tick(canvas: Canvas, top: float, row: float) -> None:
    """Stages down, the tick's ops to the right: a filled box is a loop of one trip, a dotted one of
    zero trips."""
    table, columns, names = ticks().slotted.table, ticks().columns.runs, ops()
    busy = [bool(columns[name][TICK].any()) for name in names]
    unit = (WIDTH - LEFT) / (sum(1.0 if b else NARROW for b in busy) + PERMUTE)
    x = LEFT
    for name, runs in zip(names, busy, strict=True):
        width = unit if runs else NARROW * unit
        if runs:
            canvas.text(x + width / 2, top + 8, broken(name), 7.5, family="monospace")
        else:
            canvas.text(
                x + width / 2,
                top + 4,
                broken(name),
                7,
                family="monospace",
                color=FAINT,
                rotation=90,
                va="bottom",
            )
        for s in range(table.stages):
            middle = top - (s + 0.5) * row
            if not columns[name][TICK, s]:
                canvas.empty(x + width / 2 - 7, middle - 7, 14, 14)
                canvas.text(x + width / 2, middle, "0", 7, color=FAINT)
                continue
            box = FancyBboxPatch(
                (x + 2, middle - row / 2 + 5),
                width - 4,
                row - 10,
                boxstyle="round,pad=0,rounding_size=4",
            )
            kind, unit_of_op = cells().get(name, ("other", 0))
            box.set(facecolor=color(kind, unit_of_op), edgecolor="none")
            canvas.axes.add_patch(box)
            words = what_it_does(name, s)
            # more lines are closer, away from the box's edge
            close = 1.25 if words.count("\n") < MOST_LINES else 1.1
            size = 7.0 if close > 1.2 else 6.5
            style = {"linespacing": close, "color": text_color(kind, unit_of_op)}
            canvas.text(x + width / 2, middle, words, size, **style)
        x += width
    for s in range(table.stages):
        canvas.text(LEFT - 8, top - (s + 0.5) * row, f"stage {s}", 8, "right")
        if s:
            canvas.line(top - s * row)
    draw_permutes(canvas, x, PERMUTE * unit, top, row)


def draw_permutes(canvas: Canvas, left: float, width: float, top: float, row: float) -> None:
    """The permutes of the row: what the next row takes in is dark, what travels unread is faint."""
    table, columns, late = ticks().slotted.table, ticks().columns.runs, permute_op(Permute.LATE)
    stages = table.stages
    assert columns[late][TICK].all(), "the picture is of a tick that permutes at its end"
    canvas.text(left + 0.5 * width, top + 22, late, 7.5, family="monospace")
    for way, step in ticks().permutes.items():
        x = left + {"up": 0.23, "down": 0.77}[way] * width
        canvas.text(x, top + 7, f"{way} →\n{ARRIVED[way]}", 6)
        for s in range(stages):
            to = (s + step) % stages
            if not wraps(table.stage_of, stages) and to != s + step:
                continue  # no link between the last stage and the first
            read = any(
                columns[copy.op][TICK + 1, to]
                for copy in ticks().copies.takes
                if copy.source == ARRIVED[way]
            )
            style = {
                "color": INK if read else FAINT,
                "linewidth": 1.5 if read else 0.9,
                "linestyle": "-" if read else ":",
            }
            # the ring closes beside the other arrows
            curve = "arc3,rad=-0.22" if abs(to - s) > 1 else "arc3"
            ends = [(x, top - (stage + 0.5) * row) for stage in (s, to)]
            canvas.axes.add_patch(
                FancyArrowPatch(
                    *ends,
                    arrowstyle="-|>",
                    mutation_scale=8,
                    connectionstyle=curve,
                    shrinkA=6,
                    shrinkB=6,
                    **style,
                )
            )
            canvas.axes.plot(*ends[0], marker="o", markersize=3.5, color=INK)


def draw() -> Canvas:
    """The picture."""
    matplotlib.rcParams.update(
        {"svg.hashsalt": "jaxtrain", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
    )
    table, canvas = ticks().slotted.table, Canvas()
    title = (
        f"The table: {table.name}, {table.stages} stages of {table.units_per_stage} chunks, "
        f"{table.microbatches} microbatches, {table.ticks} ticks"
    )
    canvas.text(LEFT, 545, title, 10, "left", fontweight="bold")
    chunks = "; ".join(
        f"stage {s}: {' and '.join(str(g) for g, at in enumerate(table.stage_of) if at == s)}"
        for s in range(table.stages)
    )
    canvas.text(
        LEFT,
        531,
        "a cell: the op with the stage's own chunk, 0 or 1 (lighter), and the microbatch "
        f"below. Chunks of the model: {chunks}",
        7.5,
        "left",
    )
    legend = (("F", "forward"), ("B", "gradient of the input"), ("W", "gradient of the weights"))
    x = LEFT
    for kind, text in legend:
        canvas.box(x, 514, 9, 9, color(kind))
        canvas.text(x + 13, 518.5, f"{kind}  {text}", 7.5, "left")
        x += 46 + 4.4 * len(text)
    left, right, bottom = draw_table(canvas, top=494, row=32, strip=12)
    panel = 316.0
    canvas.axes.add_patch(
        Polygon(
            [(left, bottom), (right, bottom), (WIDTH, panel), (LEFT, panel)],
            facecolor="#eef1f4",
            edgecolor="none",
            zorder=0,
        )
    )
    said = (
        f"Tick {TICK}, op by op, on every stage from left to right. Filled: a loop of one "
        "trip; dotted: of none. K is an F that keeps "
        f"what its B and W read. Solid arrows are read in tick {TICK + 1}, dotted ones never."
    )
    canvas.text(LEFT, panel - 10, said, 8, "left")
    draw_tick(canvas, top=228, row=74)
    return canvas


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=PICTURE, help="file of the picture")
    parser.add_argument(
        "--png", default="", help="write it as PNG to this file as well, to look at"
    )
    options = parser.parse_args()
    figure = draw().figure
    with options.out.open("w") as file:
        metadata = {
            "Date": None,
            "Title": "One row of the table",
            "Description": f"fingerprint {fingerprint()}",
        }
        figure.savefig(file, format="svg", metadata=metadata)
    print(f"wrote {options.out}")
    if options.png:
        figure.savefig(options.png, dpi=130)


if __name__ == "__main__":
    main()
