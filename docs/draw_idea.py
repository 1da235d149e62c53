"""Draws docs/idea.svg, the picture of the README: layers on stages, a table for them, and other
tables for the same stages.

    python docs/draw_idea.py [--out=FILE]

The tables are real ones, timed by the simulator. A test compares the file with what this script
draws.
"""

import argparse
import html
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxtrain.schedule.by_name import make_table  # noqa: E402
from jaxtrain.schedule.clocks.simulate import Simulation, simulate  # noqa: E402
from jaxtrain.schedule.clocks.times import TimedOp, Times  # noqa: E402
from jaxtrain.schedule.drawing import COLOURS, ink, shade  # noqa: E402
from jaxtrain.schedule.table_spec import TableSpec  # noqa: E402

PICTURE = ROOT / "docs" / "idea.svg"
STAGES, MICROBATCHES, LAYERS = 4, 8, 8
OTHERS = (("gpipe", 1), ("zb_h1", 1), ("zb_v", 2))  # with the chunks on a stage
WIDTH, HEIGHT = 900, 384
# left edge of the upper table; height of a stage; top of the upper part
TABLE, LANE, TOP = 250, 34, 66
SMALL_TOP, SMALL_LANE, GAP = 292, 17, 24
GREY, FAINT = "#5b6570", "#eceff2"
WORDS = {"F": "forward", "B": "gradient of a chunk's input", "W": "gradients of its weights"}


def hex_of(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def text(
    x: float,
    y: float,
    words: str,
    size: float = 11,
    anchor: str = "start",
    fill: str = "#20262d",
    weight: str = "normal",
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )


def timed(schedule: str, repeats: int) -> Simulation:
    """A schedule in unit times: F, B and W of a stage's layers take 1 each."""
    return simulate(
        make_table(TableSpec(schedule, STAGES, repeats, MICROBATCHES, permute="late")), Times()
    )


def costs(simulation: Simulation, repeats: int) -> str:
    """What a schedule costs, in words."""
    kept = max(simulation.peak_residuals) / repeats
    return f"idle {simulation.bubble_fraction_coupled:.0%}, activations of {kept:g} microbatches"


def colour(event: TimedOp) -> tuple[int, int, int]:
    return shade(event.name, event.unit // STAGES, 2)


def stages() -> list[str]:
    """The stages from top to bottom: their layers, and their devices."""
    parts, each = [], LAYERS // STAGES
    for s in range(STAGES):
        y = TOP + s * LANE
        layers = f"layers {s * each}, {s * each + 1}"
        held = {0: f"embedding, {layers}", STAGES - 1: f"{layers}, head"}.get(s, layers)
        parts.append(text(10, y + 15, f"stage {s}", 11, weight="bold"))
        parts.append(text(10, y + 27, held, 9, fill=GREY))
        for i in range(4):
            parts.append(
                box(176 + 30 * (i % 2), y + 4 + 13 * (i // 2), 27, 10, "#ffffff", "#9aa4ae")
            )
    return parts


def lanes(
    simulation: Simulation, left: float, top: float, lane: float, scale: float, numbers: bool
) -> list[str]:
    """A timeline, stages down and time to the right."""
    events = [event for event in simulation.timeline_coupled if event.end > event.start]
    parts = [
        box(left, top + s * lane + 1, simulation.step_time_coupled * scale, lane - 2, FAINT)
        for s in range(STAGES)
    ]
    for e in events:
        x, wide, y = left + e.start * scale, (e.end - e.start) * scale, top + e.stage * lane
        parts.append(box(x + 0.4, y + 1, wide - 0.8, lane - 2, hex_of(colour(e))))
        if numbers:
            parts.append(text(x + wide / 2, y + lane / 2 - 2, e.name, 9, "middle", ink(colour(e))))
            parts.append(
                text(
                    x + wide / 2,
                    y + lane / 2 + 11,
                    str(e.microbatch),
                    10,
                    "middle",
                    ink(colour(e)),
                    "bold",
                )
            )
    return parts


def draw() -> str:
    """The picture as SVG."""
    whole = timed("1f1b", 1)
    scale = (WIDTH - TABLE - 10) / whole.step_time_coupled
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif">',
        box(0, 0, WIDTH, HEIGHT, "#ffffff"),
        text(10, 20, "Layers lie on stages.", 13, weight="bold"),
        text(10, 36, "A stage is several devices:", 10, fill=GREY),
        text(10, 49, "data (down) × model (across).", 10, fill=GREY),
        text(TABLE, 20, "A table says what each stage does in each tick.", 13, weight="bold"),
        text(
            TABLE,
            36,
            f"A cell: the op, and which of {MICROBATCHES} microbatches. Grey: nothing to do.",
            10,
            fill=GREY,
        ),
        text(TABLE, 54, "1f1b", 11, weight="bold"),
        text(TABLE + 38, 54, costs(whole, 1), 10, fill=GREY),
        *stages(),
        *lanes(whole, TABLE, TOP, LANE, scale, numbers=True),
    ]
    x, y = float(TABLE), TOP + STAGES * LANE + 12
    for name, words in WORDS.items():
        parts += [
            box(x, y, 10, 10, hex_of(COLOURS[name])),
            text(x + 14, y + 9, f"{name}  {words}", 10, fill=GREY),
        ]
        x += 40 + 5.6 * len(words)
    parts.append(
        text(
            10,
            SMALL_TOP - 36,
            "Another table is another schedule. One runtime runs any of them.",
            13,
            weight="bold",
        )
    )
    wide, left = (WIDTH - 20 - 2 * GAP) / len(OTHERS), 10.0
    times = [timed(schedule, repeats) for schedule, repeats in OTHERS]
    longest = max(simulation.step_time_coupled for simulation in times)
    for (schedule, repeats), simulation in zip(OTHERS, times, strict=True):
        parts.append(text(left, SMALL_TOP - 8, schedule, 11, weight="bold"))
        parts.append(
            text(
                left + 8 + 7.2 * len(schedule),
                SMALL_TOP - 8,
                costs(simulation, repeats),
                10,
                fill=GREY,
            )
        )
        parts += lanes(simulation, left, SMALL_TOP, SMALL_LANE, wide / longest, numbers=False)
        left += wide + GAP
    below = (
        "Also yours, as a CSV file, or the best one found for measured op times. Lighter: the "
        "second chunk of a stage."
    )
    parts.append(text(10, SMALL_TOP + STAGES * SMALL_LANE + 20, below, 10, fill=GREY))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=PICTURE, help="file of the picture")
    out = parser.parse_args().out
    out.write_text(draw())
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
