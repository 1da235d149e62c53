"""The planner's memory beside XLA's for H100s, of layouts that compile_check.py has compiled.

compiled_memory.json: rows of recipe, topology, layout (with the vocabulary where the compiled table
had it), settings beside it, and the bytes on a device (jax 0.10.2, XLA of jax-cuda13-pjrt 0.10.2).
"""

import json
import math
import pathlib

import pytest
from support.compilers import needs

from jaxtrain import config as configs
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.programs import compile_check
from jaxtrain.planner.search import layout_flag
from jaxtrain.planner.search.predict import Prediction, predict
from jaxtrain.planner.step.memory import memory

COMPILED = json.loads(pathlib.Path(__file__).with_name("compiled_memory.json").read_text())
# of the compiler's bytes: what XLA leaves between arrays differs so much from layout to layout
WORST = 0.06
CELLS = 2**13  # stages · chunks · microbatches of tables that are made in a second


def laid_out(row: dict) -> configs.Config:
    settings = {path: tuple(v) if isinstance(v, list) else v for path, v in row["settings"].items()}
    config = configs.replace(load_recipe(find_recipe(row["recipe"])), settings)
    return layout_flag.apply(config, layout_flag.read(row["layout"])).resolve()


def planned(row: dict) -> Prediction:
    return predict(laid_out(row), load("h100"))


def marks(row: dict) -> list[pytest.MarkDecorator]:
    """--full where the table alone takes seconds."""
    config = laid_out(row)
    return [pytest.mark.full] * (
        config.mesh.stage * max(1, config.pipeline.repeats) * config.pipeline.microbatches > CELLS
    )


ROWS = [
    pytest.param(row, marks=marks(row), id=f"{row['recipe']} {row['layout']}") for row in COMPILED
]


@pytest.mark.parametrize("row", ROWS)
def test_planned_as_compiled(row):
    assert planned(row).memory.bytes == pytest.approx(row["bytes"], rel=WORST)


def test_what_the_rows_cover():
    """Three recipes in three layouts at least, all stages of ZeRO, all recomputation, schedules
    with B and W apart and not."""
    layouts = [layout_flag.read(row["layout"]) for row in COMPILED]
    assert all(
        sum(row["recipe"] == recipe for row in COMPILED) >= 3
        for recipe in ("llama3_8b", "gpt3_175b", "gpt_1t")
    )
    assert {layout.get("zero", 1) for layout in layouts} >= {1, 2, 3} and {
        layout["remat"] for layout in layouts if "remat" in layout
    } == {
        "none",
        "selective",
        "full",
    }
    assert {layout.get("schedule") for layout in layouts} >= {
        "gpipe",
        "1f1b",
        "interleaved",
        "zb_h1",
        "zb_v",
    }


def test_closed_form_beside_the_table():
    """What a search takes for a table's slots is within a tenth of the table's own, where the
    vocabulary lies as it takes it."""
    rows = [row for row in COMPILED if "vocabulary=parallel" in row["layout"] and not marks(row)]
    for row in rows:
        exact = planned(row)
        closed = memory(exact.work, exact.config.model.loss_chunk)
        assert exact.memory.pools and closed.bytes == pytest.approx(exact.memory.bytes, rel=0.1)
    assert len(rows) > 5


CASES = [
    "data=64,zero=3,microbatch=1,remat=selective",
    "data=8,stage=4,model=2,microbatch=1,schedule=zb_h1,remat=none",
]


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=needs("h100")) for layout in CASES])
def test_compiled_now(layout, capsys):
    """By the command that says both; what the planner calls slots is what the program has, to the
    byte but for statistics."""
    assert (
        compile_check.main(
            ["--config=llama3_8b", "--topology=h100:8x8", f"--layout={layout}", "--json"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)["memory"]
    assert abs(found["error"]) < WORST
    if pools := found["pools"]:
        exact = planned({"recipe": "llama3_8b", "layout": layout, "settings": {}}).memory
        for pool, (number, each) in pools.items():
            assert math.isclose(exact.pools[pool], number * each, rel_tol=1e-3), pool
