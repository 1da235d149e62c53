"""Draws docs/stages.svg: the kinds of layers of configs/deepseek_v3.py on its stages, by the time
that is planned for them.

    python docs/draw_stages.py [--out=FILE]

A test compares the file with what this script draws.
"""

import argparse
import dataclasses
import pathlib
import sys

DOCS = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from draw_idea import box, text  # noqa: E402

from jaxtrain import config as configs  # noqa: E402
from jaxtrain.config.recipes import find_recipe, load_recipe  # noqa: E402
from jaxtrain.pipeline.setup import make_setup  # noqa: E402
from jaxtrain.planner.layer import hardware  # noqa: E402
from jaxtrain.planner.search.predict import with_op_times  # noqa: E402
from jaxtrain.planner.step.step_model import step_model_of  # noqa: E402
from jaxtrain.schedule.drawing import PARTS  # noqa: E402

PICTURE = DOCS / "stages.svg"
HARDWARE, DATA = "h100", 2  # 2,048 devices
WIDTH, HEIGHT, LEFT, BASE = 900, 330, 60, 250
COLUMN, GAP, SCALE = 44, 8, 0.42  # points; points of a millisecond
COLOURS = {
    "embedding and dense layers, forward twice and backward": PARTS["embedding"],
    "a layer with experts": PARTS["layer"],
    "prediction module": PARTS["prediction module"],
    "head": PARTS["head"],
}
DENSE, EXPERTS, MODULE, HEAD = COLOURS


@dataclasses.dataclass(frozen=True)
class Stage:
    """Milliseconds of a microbatch by kind, from the bottom up; layers with experts one by one."""

    boxes: tuple[tuple[str, float], ...]


def stages() -> list[Stage]:
    """The recipe's stages, as its table places the layers."""
    recipe = load_recipe(find_recipe("deepseek_v3"))
    config = configs.replace(recipe, {"mesh.data": DATA}).resolve()
    work = step_model_of(config, hardware.load(HARDWARE))
    placement = make_setup(with_op_times(config, work)).placement
    layer = 1e3 * sum(op.seconds for op in work.layers.mean(False).values())
    plain = dataclasses.replace(work.model, mtp_depth=0)
    head = dataclasses.replace(work, model=plain).head.seconds
    first = ((DENSE, 1e3 * work.dense_layers.seconds),)
    last = ((MODULE, 1e3 * (work.head.seconds - head)), (HEAD, 1e3 * head))
    columns = []
    for stage in range(placement.stages):
        boxes = ((EXPERTS, layer),) * placement.layer_count(0, stage)
        is_first, is_last = stage == placement.stage_of[0], stage == placement.stage_of[-1]
        columns.append(Stage(first * is_first + boxes + last * is_last))
    return columns


def draw() -> str:
    """The picture as SVG text."""
    columns = stages()
    parts = [text(LEFT - 8, BASE - 200 * SCALE + 4, "200 ms", anchor="end")]
    parts += [text(LEFT - 8, BASE - 400 * SCALE + 4, "400 ms", anchor="end")]
    for number, stage in enumerate(columns):
        x, y = LEFT + number * (COLUMN + GAP), float(BASE)
        for kind, milliseconds in stage.boxes:
            height = SCALE * milliseconds
            y -= height
            parts.append(box(x, y, COLUMN, height, COLOURS[kind], "#ffffff"))
        parts.append(text(x + COLUMN / 2, BASE + 16, f"{number}", anchor="middle"))
        total = sum(milliseconds for _, milliseconds in stage.boxes)
        parts.append(text(x + COLUMN / 2, y - 5, f"{total:.0f}", anchor="middle", size=10))
    mean = sum(ms for stage in columns for _, ms in stage.boxes) / len(columns)
    y, right = BASE - SCALE * mean, LEFT + len(columns) * (COLUMN + GAP)
    parts.append(f'<path d="M{LEFT - 4} {y:.1f}H{right}" stroke="#20262d" stroke-dasharray="4 3"/>')
    parts.append(text(LEFT, BASE + 34, f"stages; dashes: the mean, {mean:.0f} ms", size=11))
    x = float(LEFT)
    for kind, colour in COLOURS.items():
        parts += [box(x, BASE + 50, 12, 12, colour), text(x + 17, BASE + 60, kind)]
        x += 40 + 6.1 * len(kind)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif"><rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n'
        f"{body}\n</svg>\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, default=PICTURE)
    flags = parser.parse_args()
    flags.out.write_text(draw())
    print(f"wrote {flags.out}")
