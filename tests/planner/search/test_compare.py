"""The planned step on the devices at hand, and the measured one beside it."""

import dataclasses
import json

import pytest

from jaxtrain import config as configs
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.planner.command import main as command
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.search import layout_flag
from jaxtrain.planner.search.compare import PlannedStep, Trace, plan_at_hand, read
from jaxtrain.run.files import PLANNED

SETTINGS = {
    "mesh.data": 8,
    "mesh.stage": 4,
    "mesh.model": 2,
    "pipeline.schedule": "1f1b",
    "pipeline.repeats": 1,
    "pipeline.microbatches": 8,
}
PLAN = {
    "matmuls": 0.9,
    "memory": 0.2,
    "bubble": 0.1,
    "stage": 0.05,
    "data": 0.3,
    "model": 0.2,
}


@pytest.fixture(scope="module")
def config():
    return configs.replace(load_recipe(find_recipe("llama3_8b")), SETTINGS).resolve()


def measured(**exposed) -> PlannedStep:
    seconds = sum(PLAN.values())
    trace = Trace(sum(exposed.values()), 0, exposed, {}) if exposed else None
    return PlannedStep(15, "h100", seconds, PLAN, {"stage": 0.1}, 10, 2.1, trace)


@pytest.mark.parametrize("by_file", [False, True])
def test_the_same_step_as_plan_has(config, by_file, tmp_path, capsys):
    """`train` on H100s, or with a file for the devices at hand, and `plan --layout` with the same
    layout."""
    name, kind = "h100", "NVIDIA H100 80GB HBM3"
    if by_file:
        name, kind = str(tmp_path / "mine.json"), "cpu"
        (tmp_path / "mine.json").write_text(
            json.dumps(dataclasses.asdict(load("a100-80gb")) | {"name": "mine"})
        )
        config = configs.replace(config, {"train.hardware": name}).resolve()
    at_hand = plan_at_hand(config, kind)
    layout = layout_flag.text_of(layout_flag.of(config))
    assert (
        command.main(["--config=llama3_8b", f"--hardware={name}", f"--layout={layout}", "--json"])
        == 0
    )
    printed = json.loads(capsys.readouterr().out)
    del printed["command"]  # the run's own
    assert (
        at_hand.prediction.seconds == printed["step_time_s"]
        and printed.items() <= at_hand.as_dict().items()
    )
    line, *sure = at_hand.lines()
    assert sure == at_hand.prediction.expected.lines() and line.startswith(
        f"planned step: {printed['step_time_s']:.4g} s for {'mine' if by_file else 'h100'}, "
    )


def test_no_plan_is_a_line_at_most(config):
    at_hand = lambda kind, **changes: plan_at_hand(
        configs.replace(config, {f"train.{k}": v for k, v in changes.items()}).resolve(), kind
    )
    assert at_hand("cpu").lines() == [] and at_hand("cpu").as_dict() is None
    (unknown,) = at_hand("NVIDIA GeForce RTX 2080").lines()
    assert "'NVIDIA GeForce RTX 2080' is not known" in unknown and "--calibrate" in unknown
    assert at_hand("TPU v4", hardware="h100").prediction.work.hardware == load("h100")


def test_a_type_without_a_peak(config, tmp_path):
    values = dataclasses.asdict(load("h100")) | {"peak_tflops": {"bfloat16": 900.0}}
    (tmp_path / "half.json").write_text(json.dumps(values))
    changes = {"train.hardware": str(tmp_path / "half.json"), "precision.compute": "float32"}
    (line,) = plan_at_hand(configs.replace(config, changes).resolve(), "cpu").lines()
    assert line == "planned step: h100 has no peak for precision.compute=float32"


def test_a_plan_that_does_not_fit(config):
    one = configs.replace(config, {"mesh.data": 1, "mesh.stage": 1, "mesh.model": 1}).resolve()
    at_hand = plan_at_hand(one, "NVIDIA H100")
    assert not at_hand.prediction.fits and at_hand.lines()[0].endswith(
        " GiB a device, and 74.4 are there"
    )
    assert "it needs" not in plan_at_hand(config, "NVIDIA H200").lines()[0]


def test_the_largest_miss():
    """Bubble, messages and idle time are one part; a part that is only planned, or only measured,
    is a miss, too."""
    step = measured(matmuls=1.0, memory=0.2, stage=0.1, waiting=0.4, data=0.28, other=0.12)
    misses = {miss.part: (miss.planned_s, miss.measured_s) for miss in step.parts_compared()}
    assert (
        misses["waiting"] == pytest.approx((0.15, 0.5))
        and misses["other"] == (0.0, 0.12)
        and misses["model"] == (0.2, 0.0)
    )
    assert [miss.part for miss in step.parts_compared()][:3] == ["waiting", "model", "other"]
    planned, parts, largest = step.lines()
    assert planned == "planned step 1.75 s (h100), measured 2.1 s (1.20 x)"
    assert "matmuls 0.9 → 1" in parts and "traced steps of 2.1 s" in parts
    assert largest == "largest miss: waiting, 0.35 s more than planned"


def test_communication_without_axes():
    misses = {
        miss.part: (miss.planned_s, miss.measured_s)
        for miss in measured(matmuls=0.5, communication=0.7).parts_compared()
    }
    assert (
        misses["communication"] == pytest.approx((0.5, 0.7))
        and not {"data", "model"} & misses.keys()
    )


def test_a_step_that_was_not_traced():
    (line,) = measured().lines()
    assert line.endswith(
        "measured 2.1 s (1.20 x); --config.train.profile_steps=2 measures its parts"
    )


@pytest.mark.parametrize("step", [measured(), measured(matmuls=1.0, waiting=1.0)])
def test_the_record_is_read_again(step, tmp_path):
    assert read(tmp_path) is None
    (tmp_path / PLANNED).write_text(step.as_json())
    assert read(tmp_path) == step
    values = json.loads((tmp_path / PLANNED).read_text())
    assert values["ratio"] == step.ratio and (values["largest_miss"] is None) == (
        step.trace is None
    )
