"""Timelines: every op is in the text and in the pictures, where and when the table and the clock
say."""

import itertools
import math
import re
import struct
import xml.etree.ElementTree as ElementTree

import pytest

from jaxtrain.planner.step.time_breakdown import (
    ATTENTION,
    BUBBLE,
    COMMUNICATION_AXES,
    DISK,
    HOST,
    MATMULS,
    MEMORY,
    OPTIMIZER,
)
from jaxtrain.run.goodput import REDONE, USEFUL
from jaxtrain.run.wall_clock import Phase
from jaxtrain.schedule import drawing
from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.clocks.simulate import simulate
from jaxtrain.schedule.clocks.times import Times
from jaxtrain.schedule.table import Op
from jaxtrain.schedule.table_spec import TableSpec

TIMES = Times(2, 2, 1, 0.25, 2, head=0.5, embed=0.5)
OF_MODELS = ("embedding", "head", "layer", "prediction module")  # in a picture of their own
SVG = "{http://www.w3.org/2000/svg}"


def table_of(schedule="interleaved", repeats=2, **options):
    return make_table(TableSpec(schedule, 3, repeats, 5, permute="early", **options))


@pytest.mark.parametrize("width", [60, 120, 1000])
def test_text_has_every_cell_in_its_place(width):
    table = table_of(remat_full=True)
    shown = drawing.text(table, width)
    assert "\x1b" not in shown and max(map(len, shown.splitlines())) <= max(width, 80)
    stages = {s: [] for s in range(3)}
    for line in shown.splitlines():
        if match := re.match(r"stage (\d) +(.*)", line):
            stages[int(match[1])] += match[2].split()
    for s, cells in stages.items():
        wanted = [
            f"{Op(o).name}{u}.{k}" if o else "."
            for o, u, k in zip(
                table.op[:, s], table.local_unit[:, s], table.microbatch[:, s], strict=True
            )
        ]
        assert cells == wanted
    heads = [n for line in shown.splitlines() if line.startswith("head ") for n in line.split()[1:]]
    assert heads == [str(k) for k in table.head if k >= 0]
    permutes = "".join(
        line[len("permute ") :].replace(" ", "")
        for line in shown.splitlines()
        if line.startswith("permute ")
    )
    assert permutes == "".join({0: "", 1: "l", 2: "e"}[when] for when in table.permute.tolist())


def test_one_unit_a_stage_needs_no_unit_in_the_text():
    assert "F0 " in drawing.text(
        make_table(TableSpec("1f1b", 3, 1, 2, permute="late"))
    ) and "F0.0" not in drawing.text(make_table(TableSpec("1f1b", 3, 1, 2)))


def test_colours_are_the_ops_and_lighter_for_later_chunks():
    shown = drawing.text(table_of(), 120, colour=True)
    for name in "FBW":
        for chunk in (0, 1):
            assert "\x1b[48;2;{};{};{}m".format(*drawing.shade(name, chunk, 2)) in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert plain == drawing.text(table_of(), 120)
    assert len({drawing.shade(name, c, 2) for name in drawing.COLOURS for c in (0, 1)}) == 2 * len(
        drawing.COLOURS
    )
    assert all(
        a < b for a, b in zip(drawing.shade("F", 0, 2), drawing.shade("F", 1, 2), strict=True)
    )


def test_svg_has_every_op_at_its_time():
    table = table_of("zb_v", vocabulary="end_stages", remat_full=True)
    timeline = simulate(table, TIMES).timeline_coupled
    root = ElementTree.fromstring(drawing.svg(table, timeline, "three <stages> & more"))
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert "three <stages> & more" in texts and {
        "stage 0",
        "stage 1",
        "stage 2",
        *(text for name, text in drawing.MEANINGS.items() if name != "O"),
    } <= set(texts)
    found = {
        e.find(f"{SVG}title").text: e
        for e in root.iter(f"{SVG}rect")
        if e.find(f"{SVG}title") is not None
    }
    assert len(found) == len(timeline) == int((table.op != Op.IDLE).sum()) + 3 * table.microbatches
    total = max(e.end for e in timeline)
    end = max(float(r.get("x")) + float(r.get("width")) for r in found.values())
    scale = (end + 0.6 - drawing.LABEL) / total
    for event in timeline:
        chunk = f"chunk {table.chunk_of[event.unit]}, " if event.unit >= 0 else ""
        op = f"{drawing.MEANINGS[event.name]}, {chunk}microbatch {event.microbatch}"
        rect = found[f"{op}: {event.start:g} to {event.end:g}"]
        assert float(rect.get("x")) == pytest.approx(drawing.LABEL + event.start * scale, abs=0.02)
        assert float(rect.get("width")) == pytest.approx(
            (event.end - event.start) * scale - 0.6, abs=0.02
        )
        assert int(rect.get("y")) == drawing.TOP + drawing.LANE * event.stage + 1
    numbers = [e.text for e in root.iter(f"{SVG}text") if e.get("text-anchor") == "middle"]
    assert len(numbers) >= (table.op != Op.IDLE).sum() - (table.op == Op.W).sum()


def test_png_is_a_picture_of_that_size():
    table = table_of("1f1b", 1)
    timeline = simulate(table, TIMES).timeline_coupled
    data = drawing.png(table, timeline, "1f1b")
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 4 * height > 400


@pytest.mark.parametrize(
    "schedule, microbatches, options",
    [("dualpipe_v", 6, {}), ("1f1b", 3, {"remat_full": True}), ("interleaved", 4, {})],
)
def test_overlapped_cells_are_outlined_and_no_text_is_beyond_the_edge(
    schedule, microbatches, options
):
    """Of a small picture, whose legend is wider than its timeline, in both forms."""
    repeats = 1 if schedule == "1f1b" else 2
    table = make_table(TableSpec(schedule, 2, repeats, microbatches, overlap=True, **options))
    times = Times(2, 2, 1, 0.25, 2, head=0.5, embed=0.5, overlap=1)
    timeline, title = simulate(table, times).timeline_coupled, "a title of some length " * 3
    root = ElementTree.fromstring(drawing.svg(table, timeline, title))
    ends = {
        (op.stage, op.name, op.unit, op.microbatch): (op.start, op.end)
        for op in timeline
        if op.name in "FB"
    }
    expected = [
        (
            stage,
            ends[stage, "F", table.unit[tick, stage], table.microbatch[tick, stage]][0],
            ends[stage, "B", table.b_unit[tick, stage], table.b_microbatch[tick, stage]][1],
        )
        for tick, stage in zip(*table.overlapped.nonzero(), strict=True)
    ]
    assert expected and drawing._overlapped(table, timeline) == expected
    outlines = [rect for rect in root.iter(f"{SVG}rect") if rect.get("stroke") == "#000"]
    assert len(outlines) == len(expected) + 1  # and one of the legend
    texts = list(root.iter(f"{SVG}text"))
    assert drawing.TOGETHER in [text.text for text in texts]
    for text in texts:
        letter = 7.0 if text.get("font-weight") == "bold" else 5.6
        if text.get("text-anchor") is None:
            assert float(text.get("x")) + letter * len(text.text) < float(root.get("width"))


def test_colours_of_all_pictures_stand_in_one_table():
    """An op and the part that it makes have one colour, and no two parts of a picture look alike:
    they differ by more than 40 of the 441 between black and white."""
    rgb = lambda text: tuple(int(text[at : at + 2], 16) for at in (1, 3, 5))
    same = {"head": "H", "logits": "H", "embedding": "E", "optimizer": "O", "gradients": "W"}
    for part, op in same.items():
        assert rgb(drawing.PARTS[part]) == drawing.COLOURS[op]
    of_steps = {part: text for part, text in drawing.PARTS.items() if part not in OF_MODELS}
    for table in (of_steps, drawing.STARTS):
        for one, other in itertools.combinations(table, 2):
            apart = math.dist(rgb(table[one]), rgb(table[other]))
            assert apart > 40, (one, other, apart)
    assert set(drawing.STARTS) == {phase.value for phase in Phase} - {"stepping", "awaiting"} | {
        USEFUL,
        REDONE,
    }
    step_parts = (MATMULS, ATTENTION, MEMORY, BUBBLE, OPTIMIZER, HOST, DISK)
    assert drawing.PARTS.keys() >= {*step_parts, *COMMUNICATION_AXES}


def test_ink_reads_on_every_colour():
    assert drawing.ink((255, 255, 255)) == "#000" and drawing.ink((0, 0, 0)) == "#fff"
    assert {drawing.ink(drawing.shade(name, 0, 2)) for name in drawing.COLOURS} == {"#fff"}
    assert drawing.ink(drawing.shade("F", 1, 2)) == "#000"
