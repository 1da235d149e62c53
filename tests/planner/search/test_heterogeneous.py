"""Stages on unequal devices: the cut of the layers, and what the step takes."""

import itertools

import pytest

from jaxtrain import config as configs
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.planner.layer.hardware import HardwareError, load
from jaxtrain.planner.search import heterogeneous
from jaxtrain.planner.search.heterogeneous import parse, plan, split_layers
from jaxtrain.planner.search.predict import exactly, predict
from jaxtrain.planner.step.step_model import step_model_of

MIXED = "a100-80gb:512,h100:512"


def config(
    stages: int,
    layers: int = 64,
    microbatches: int = 128,
    schedule: str = "1f1b",
    repeats: int = 1,
    devices: int = 1024,
    **changes,
):
    data = devices // 8 // stages
    settings = {
        "model.layers": layers,
        "mesh.stage": stages,
        "mesh.model": 8,
        "mesh.data": data,
        "pipeline.schedule": schedule,
        "pipeline.repeats": repeats,
        "pipeline.microbatches": microbatches,
        "data.batch_size": microbatches * data,
    }
    return configs.replace(load_recipe(find_recipe("gpt3_175b")), settings | changes).resolve()


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 2.2), (1.0, 3.1, 0.7), (2.0, 2.0, 2.0)])
@pytest.mark.parametrize("most", [(9, 9, 9), (2, 9, 9)])
def test_no_other_cut_is_better(seconds, most):
    layers = 9
    cut = split_layers(layers, seconds, (0.0, 0.5, 0.0), most)
    cost = lambda given: max(
        f + n * s for f, n, s in zip((0.0, 0.5, 0.0), given, seconds, strict=True)
    )
    others = (
        given for given in itertools.product(range(1, layers), repeat=3) if sum(given) == layers
    )
    assert sum(cut) == layers and all(1 <= n <= m for n, m in zip(cut, most, strict=True))
    assert cost(cut) == pytest.approx(
        min(
            cost(given) for given in others if all(n <= m for n, m in zip(given, most, strict=True))
        )
    )


def test_without_room():
    """Layers are then cut by speed alone."""
    assert split_layers(9, (1.0, 2.0), (0.0, 0.0), (2, 3)) == [6, 3]


def test_a_plan_that_does_not_fit():
    made = plan(config(2, devices=16), parse("a100-40gb:8,h100:8"))
    assert (
        not made.fits
        and sum(made.layers) == 64
        and any("does not fit" in line for line in heterogeneous.describe(made, 0))
    )


@pytest.mark.parametrize("schedule, remat", [("1f1b", "full"), ("zb_h1", "selective")])
def test_one_group_is_the_plan_of_its_kind(schedule, remat):
    """With sums over every axis, the vocabulary's too."""
    settings = {
        "mesh.data": 8,
        "mesh.replica": 2,
        "mesh.stage": 4,
        "pipeline.microbatches": 32,
        "pipeline.remat": remat,
    }
    recipe = load_recipe(find_recipe("llama3_8b"))
    laid_out = configs.replace(
        recipe, settings | {"pipeline.schedule": schedule, "pipeline.repeats": 1}
    ).resolve()
    one = exactly(predict(laid_out, load("h100")))
    assert plan(laid_out, parse("h100:64")).seconds == pytest.approx(one.seconds, rel=5e-3)


@pytest.mark.parametrize("schedule, repeats", [("1f1b", 1), ("interleaved", 2), ("zb_h1", 1)])
def test_two_kinds(schedule, repeats):
    """64 layers on 8 stages take at most 1.1 times the time of all devices together; the faster
    ones have more layers."""
    made = plan(config(8, schedule=schedule, repeats=repeats), parse(MIXED))
    assert (
        sum(made.layers) == 64
        and len(made.config.pipeline.chunk_layers) == 8 * repeats
        and sum(made.config.pipeline.chunk_layers) == 64
    )
    assert max(made.layers[:4]) < min(made.layers[4:]) and made.fits
    assert max(made.stage_s) <= made.seconds <= 1.1 * made.ideal_s
    assert heterogeneous.describe(made, 0)[0].startswith("a100-80gb: stages 0 to 3 with ")


def test_better_than_layers_cut_evenly():
    even = step_model_of(config(8), parse("a100-80gb:1024")[0].hardware)
    assert plan(config(8), parse(MIXED)).seconds < 0.8 * even.step().seconds


def test_one_kind_in_two_groups_is_one_kind():
    both, one = (plan(config(8), parse(text)) for text in ("h100:512,h100:512", "h100:1024"))
    assert both.layers == one.layers == (8,) * 8 and both.seconds == one.seconds


@pytest.mark.parametrize(
    "text, message",
    [
        ("a100-80gb", "has 'a100-80gb', which is no NAME:DEVICES: use"),
        ("a100-80gb:0,h100:4", "which is no NAME:DEVICES"),
        ("a100-80gb:4,b100:4", "'b100' is not known"),
    ],
)
def test_groups_that_are_none(text, message):
    with pytest.raises(HardwareError, match=message):
        parse(text)


def test_groups_without_whole_stages():
    with pytest.raises(
        ValueError, match="a100-80gb has 320 devices, no whole number of stages of 128"
    ):
        plan(config(8), groups := parse("a100-80gb:320,h100:704"))
    assert next(heterogeneous.layouts(config(8), groups, {"stage": 8, "model": 8}))["stage"] == 16
    with pytest.raises(ValueError, match="stage=1 does not share out 1024 devices"):
        plan(config(1), parse(MIXED))
