"""The error that is expected of a plan, from the published runs of its kind."""

import dataclasses
import json
import pathlib

import pytest

from jaxtrain.config import PrecisionConfig
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.search import layout_flag, validation
from jaxtrain.planner.search.explain import amount, explained
from jaxtrain.planner.search.predict import Prediction, predict
from jaxtrain.planner.step.other_frameworks import FRAMEWORKS

LAYOUTS = {
    "llama3_8b": "data=8,zero=3,microbatch=1",
    "mixtral_8x7b": "data=8,expert=8,zero=3,microbatch=1",
}


def kind(model: str, framework: str, device: str, precision: str, errors: list[float]) -> dict:
    values = (model, framework, device, precision, errors)
    return dict(zip((*validation.KEYS, "errors"), values, strict=True))


MANY = [0.01, -0.02, 0.03, -0.04, 0.05, -0.06, 0.07, 0.08, 1.0]
KINDS = [
    kind("dense", "megatron_core", "h100", "bfloat16", MANY),
    kind("dense", "megatron_core", "h100", "fp8", [0.1, -0.1]),
    kind("dense", "megatron_core", "b200", "bfloat16", [0.2, 0.0]),
    kind("dense", "maxtext", "tpu-v5p", "bfloat16", [0.3, 0.3, 0.3, 0.3, -0.5]),
    kind("experts", "torchtitan", "h100", "bfloat16", [0.4]),
    kind("experts", "megatron_core@25.04", "h100", "mxfp8", [0.1]),
    kind("experts", "megatron_core", "h100", "mxfp8", [0.1, 0.1, 0.2]),
]


@pytest.fixture
def rows(monkeypatch):
    """The sample KINDS in place of the published runs."""
    text = json.dumps({"kinds": KINDS}).encode()
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda path: text)
    validation._misses.cache_clear()
    misses = validation._misses()
    monkeypatch.undo()
    monkeypatch.setattr(validation, "_misses", lambda: misses)


def planned(
    assume: str, device: str, recipe: str = "llama3_8b", matmul: str = "compute", **of_run: float
) -> Prediction:
    config = layout_flag.apply(
        load_recipe(find_recipe(recipe)), layout_flag.read(LAYOUTS[recipe])
    ).resolve()
    plan = predict(config, load(device), assume, **of_run)
    settings = dataclasses.replace(plan.work.settings, precision=PrecisionConfig(matmul=matmul))
    return dataclasses.replace(plan, work=dataclasses.replace(plan.work, settings=settings))


def test_a_kind_of_enough_runs_has_their_error(rows):
    """Eight of nine runs keep it: a run that is like them keeps it with 80 %."""
    sure = planned("megatron_core", "h100").expected
    assert sure.error == pytest.approx(0.08) and [*sure.kinds] == [sure.kind]
    assert sure.lines() == [
        "how sure: 9 measured runs of this kind (dense, megatron_core, h100, bfloat16), 8 of 10 "
        "within 8.0% of their plans"
    ]
    assert sure.range_of(1.08) == pytest.approx([1.0, 1.08**2])
    # a plan that was twice as fast as its run, and one that was half as fast, miss by the same
    assert validation._misses()["dense", "maxtext", "tpu-v5p", "bfloat16"][-1] == 1.0


@pytest.mark.parametrize(
    "asked, error, own, nearest, behind",
    [
        # another precision
        (("megatron_core", "h100", "llama3_8b", "fp8"), 1 / 0.9 - 1, 2, "fp8", 2),
        (("megatron_core", "h100", "llama3_8b", "mxfp8"), 1 / 0.9 - 1, 0, "bfloat16", 2),
        # a device that no run was on goes by all runs of its model
        (("megatron_core", "gb200"), 1.0, 0, "bfloat16", 4),
        # another framework
        (("torchtitan", "b200"), 1.0, 0, "b200, bfloat16", 4),
        # a framework's releases are one kind
        (("megatron_core", "h100", "mixtral_8x7b", "mxfp8"), 0.2, 4, "mxfp8", 1),
        # our own program goes by all of its model, whatever was measured of it
        (("jaxtrain", "h100"), 1.0, 0, "h100, bfloat16", 4),
        (("jaxtrain", "tpu-v6e", "mixtral_8x7b"), 0.4, 0, "h100, bfloat16", 2),
    ],
)
def test_a_kind_of_few_runs_has_the_widest_error_of_the_nearest(
    rows, asked, error, own, nearest, behind
):
    sure = planned(*asked).expected
    assert sure.error == pytest.approx(error) and len(sure.kinds) == behind
    assert sure.kinds.get(sure.kind, (0,))[0] == own
    assert ", ".join([*sure.kinds][0]).endswith(nearest)
    first, *rest = sure.lines()
    assert f"{own or 'no'} measured run" in first and bool(rest) == (behind > 1)
    assert not rest or rest[0].startswith("  nearest: ")


def test_our_own_program_is_the_least_sure():
    """By the published runs themselves, for every kind of model and device."""
    for recipe, device in (
        ("llama3_8b", "h100"),
        ("llama3_8b", "tpu-v5p"),
        ("mixtral_8x7b", "h100"),
    ):
        ours, *others = (
            planned(assume, device, recipe).expected
            for assume in ("jaxtrain", "megatron_core", "torchtitan", "maxtext")
        )
        assert all(ours.error >= other.error for other in others) and ours.lines()[1:]


def test_a_plan_prints_its_ranges(rows):
    """Time, rate, days and money; a range is as wide in figures as in text."""
    plan = planned("megatron_core", "h100", tokens=15.6e12)
    figures, text = plan.figures(), "\n".join(explained(plan, price=2.0, kwh_price=0.1))
    for name, ends in (
        ("step_time_s", "step_time_range_s"),
        ("tokens_per_s", "tokens_per_s_range"),
        ("train_days", "train_days_range"),
    ):
        low, high = figures[ends]
        assert low * 1.08 == pytest.approx(figures[name]) == pytest.approx(high / 1.08)
    validated = figures["validation"]
    assert validated["kind"]["device"] == "h100" and validated["rows"] == 9
    assert validated["behind"] == [validated["kind"] | {"rows": 9, "error": validated["error"]}]
    low, high = (f"{end / 365.25:.3g}" for end in figures["train_days_range"])
    assert (
        f"run: 15.6 trillion tokens take {figures['train_days'] / 365.25:.3g} years ({low} to"
        in text
    )
    assert text.count(" to ") >= 7 and "cost: US$" in text


@pytest.mark.parametrize("assume", FRAMEWORKS)
@pytest.mark.parametrize("device", ["h100", "tpu-v5e", "mi300x"])
def test_every_plan_has_an_error(assume, device):
    sure = planned(assume, device).expected
    assert 0 < sure.error < 10 and sure.kinds and sure.lines()[0].startswith("how sure: ")


@pytest.mark.parametrize(
    "number, what, text",
    [
        (15.6e12, "count", "15.6 trillion"),
        (300e9, "count", "300 billion"),
        (8.03e9, "count", "8.03 billion"),
        (123_456, "count", "123,000"),
        (5, "count", "5"),
        (0.0123, "step", "12.3 ms"),
        (98.34, "step", "98.3 s"),
        (86400 * 400, "run", "1.10 years"),
        (86400 * 54.26, "run", "54.3 days"),
        (5400, "run", "1.50 hours"),
        (90, "run", "1.50 minutes"),
        (0, "", "0"),
        (1e-9, "", "1.00e-9"),
        (1e300, "", "1.00e+300"),
    ],
)
def test_amounts_have_three_digits(number, what, text):
    assert amount(number, what) == text
    assert amount(number, what, 0.25).startswith(f"{text} (")


def test_a_range_has_the_unit_of_its_number():
    assert amount(86400 * 300, "run", 0.5) == "300 days (200 to 450)"
    assert amount(4_160_000, "", 0.1) == "4,160,000 (3,780,000 to 4,580,000)"
