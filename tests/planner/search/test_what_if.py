"""Advice from a run's records, with and without a kind of device."""

import dataclasses
import json
import os
import shlex

import pytest

from jaxtrain import config as configs
from jaxtrain.config.errors import UsageError
from jaxtrain.config.flags import apply, read_flags
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.checks import Environment
from jaxtrain.planner.layer.hardware import GIB, load
from jaxtrain.planner.search import layout_flag, what_if
from jaxtrain.planner.search.compare import PlannedStep, Trace
from jaxtrain.planner.search.predict import exactly, predict
from jaxtrain.planner.search.what_if import single_changes
from jaxtrain.run.files import PLANNED

SETTINGS = {
    "mesh.data": 8,
    "mesh.model": 8,
    "pipeline.microbatches": 8,
    "data.batch_size": 64,
    "pipeline.remat": "full",
}
H100 = load("h100")


@pytest.fixture
def config():
    return configs.replace(load_recipe(find_recipe("llama3_8b")), SETTINGS)


@pytest.fixture
def workdir(tmp_path, config):
    """A run whose planned step it takes 1.2 times, after a slow beginning, and that waits for data
    for a tenth of its time."""
    (tmp_path / "config.json").write_text(json.dumps(configs.to_dict(config)))
    seconds = 1.2 * predict(config.resolve(), H100).seconds
    rows = [
        {"step": step, "loss": 1.0, "step_time_s": seconds * (5 if step < 3 else 1)}
        for step in range(1, 11)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = {"imports": 1.0, "compiling": 1.0, "awaiting": 87.0, "data_wait": 10.0, "saving": 1.0}
    line = {"start": 1, "began": 0.0, "time": 100.0, "step": 10, "seconds": parts}
    (tmp_path / "goodput.jsonl").write_text(
        json.dumps(line | {"step": 0, "seconds": {}, "time": 0.0}) + "\n" + json.dumps(line) + "\n"
    )
    return tmp_path


def test_what_records_say(workdir):
    lines = what_if.advise(workdir)
    assert "the median of 5 records" in lines[0] and lines[1].startswith("goodput 87.0 %")
    assert [line for line in lines if "of the wall time" in line] == [
        f"10.0% of the wall time: {what_if.REMEDIES['data_wait']}"
    ]
    assert lines[-1] == "with --hardware=NAME the planner says what else the step could be"


def test_what_the_planner_says(workdir, config):
    lines = what_if.advise(workdir, H100)
    assert any("measured 1.2 times that" in line for line in lines) and not any(
        "that is far" in line for line in lines
    )
    listed = [line for line in lines if line.startswith("  --config.")]
    assert 0 < len(listed) <= 5 and all("less time" in line for line in listed)
    assert any(line.startswith("how sure: ") for line in lines)


def test_the_changes_are_flags_that_a_shell_and_the_parser_take(workdir, config, monkeypatch):
    """Also tuples and booleans, which Python writes in another way."""
    settings = {"pipeline.save": ("layer_input",), "pipeline.overlap": False, "pipeline.repeats": 0}
    change = what_if.Change(settings, "a change", 1e-9, 0.0)
    monkeypatch.setattr(what_if, "single_changes", lambda now: [change])
    (line,) = [line for line in what_if.advise(workdir, H100) if line.startswith("  --config.")]
    reading = read_flags(shlex.split(line.partition(": ")[0]), "", (), with_config=True)
    changed = apply(config, reading.overrides)
    assert {path: configs.get(changed, path) for path in settings} == settings


def test_what_training_has_measured(workdir):
    """The record of the start that ran last, by part where its steps were traced; one that cannot
    be read is none."""
    trace = Trace(1.5, 0, {"matmuls": 1.0, "data": 0.5}, {})
    step = PlannedStep(15, "h100", 1.2, {"matmuls": 0.9, "data": 0.3}, {}, 10, 1.5, trace)
    (workdir / PLANNED).write_text(step.as_json())
    lines = [line for line in what_if.advise(workdir) if line.startswith("after warm-up: ")]
    assert (
        len(lines) == 3
        and "(1.25 x)" in lines[0]
        and lines[-1].endswith("largest miss: data, 0.2 s more than planned")
    )
    (workdir / PLANNED).write_text("{")
    assert not any(line.startswith("after warm-up") for line in what_if.advise(workdir))


def test_a_machine_that_is_not_the_planned_one(workdir):
    assert any(line.startswith("that is far") for line in what_if.advise(workdir, load("b200")))


LINE = {"start": 1, "began": 0.0, "time": 100.0, "step": 10, "seconds": {}}


def rows(*seconds: object, **values: object) -> str:
    return "".join(
        json.dumps({"step": at, "step_time_s": s} | values) + "\n"
        for at, s in enumerate(seconds, 1)
    )


@pytest.mark.parametrize("behind", [{"slowest_behind_s": None}, {"slowest_behind_s": "1"}, {}])
def test_a_row_without_the_slowest_process(workdir, behind):
    (workdir / "metrics.jsonl").write_text(rows(1.0, 1.0, 1.0, slowest_process=1, **behind))
    assert not any(line.startswith("process 1") for line in what_if.advise(workdir))


@pytest.mark.parametrize("times, far", [(0.5, True), (0.9, False), (2.0, True)])
def test_far_is_either_way(workdir, config, times, far):
    (workdir / "metrics.jsonl").write_text(
        rows(*[times * predict(config.resolve(), H100).seconds] * 3)
    )
    assert any(line.startswith("that is far") for line in what_if.advise(workdir, H100)) == far


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"mesh.data": -1}, "has mesh.data=-1"),
        ({"mesh.stage": 99, "pipeline.repeats": 1}, "its config.json is no run's: "),
        ({"data.batch_size": 63}, "its config.json "),
        ({"precision.compute": "float32"}, "has no peak on h100"),
    ],
)
def test_what_the_planner_cannot_take(workdir, config, settings, message):
    """Without a kind of device the records are read all the same."""
    (workdir / "config.json").write_text(
        json.dumps(configs.to_dict(configs.replace(config, settings)))
    )
    kind = dataclasses.replace(H100, peak_tflops={"bfloat16": 989.0})
    with pytest.raises(UsageError, match=message) as error:
        what_if.advise(workdir, kind)
    assert str(error.value).endswith(
        ": use --hardware= for what the records alone say"
    ) and what_if.advise(workdir)


RECORDS = ("config.json", "metrics.jsonl", "goodput.jsonl", "planned.json")


def pipe(path):
    """A pipe that nobody writes to: who reads it waits for ever."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda folder: (folder / "config.json").unlink(), "its config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "its config.json is not what"),
        (lambda folder: (folder / "config.json").write_text("5"), "its config.json is not what"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "has 0 records with a step's time"),
        (
            lambda folder: (
                (folder / "metrics.jsonl").unlink(),
                (folder / "metrics.jsonl").mkdir(),
            ),
            "its metrics.jsonl is not a regular file",
        ),
        *(
            (lambda folder, name=name: pipe(folder / name), f"its {name} is not a regular file")
            for name in RECORDS
        ),
        (
            lambda folder: (folder / "metrics.jsonl").write_text(
                rows(float("nan"), 0, -1, True, "1", None)
            ),
            "has 0 records",
        ),
    ],
)
def test_a_folder_without_records(workdir, spoil, message):
    spoil(workdir)
    with pytest.raises(UsageError, match=message) as error:
        what_if.advise(workdir)
    assert "\n" not in str(error.value)


LAYOUTS = (
    {"mesh.data": 8, "mesh.model": 8, "pipeline.microbatches": 8},
    {"mesh.data": 4, "mesh.stage": 8, "mesh.model": 2, "pipeline.microbatches": 16},
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=("one stage", "eight stages"))
def test_changes_are_what_train_takes(layout):
    """Each is on as many devices, passes every check, and is planned as it is alone; some are
    faster, and they are in order."""
    config = configs.replace(
        load_recipe(find_recipe("llama3_8b")),
        {"data.batch_size": 64, "pipeline.remat": "full", **layout},
    )
    now = exactly(predict(config.resolve(), H100))
    changes = single_changes(now)
    assert [change.seconds for change in changes] == sorted(
        change.seconds for change in changes
    ) and changes[0].seconds < now.seconds
    assert {"pipeline.remat=none", "parallel.zero=3"} <= {
        f"{k}={v}" for change in changes for k, v in change.settings.items()
    }
    saves = [change for change in changes if "pipeline.save" in change.settings]
    assert len(saves) == ("mesh.stage" in layout)
    for change in changes:
        changed = checks.check_devices(
            configs.replace(config, change.settings), 64, "gpu"
        ).resolve()
        other = predict(changed, H100)
        scale = now.seconds / now.work.step().seconds
        assert (scale == 1.0) == (now.in_flight is None) and change.seconds == pytest.approx(
            scale * other.work.step().seconds
        )
        if change.settings == {"pipeline.save": ("layer_input",)}:
            assert change.text == "--config.pipeline.save=layer_input"
            continue
        differs = layout_flag.read(change.text)
        assert differs and differs == {key: layout_flag.of(changed)[key] for key in differs} != {
            key: layout_flag.of(now.config)[key] for key in differs
        }


def test_overlapped_cells_are_a_change():
    """On where they gain, off where they are on; another schedule leaves them."""
    laid = "stage=4,expert=8,microbatch=1,repeats=2,schedule=dualpipe_v,overlap=false"
    mixtral = layout_flag.apply(load_recipe(find_recipe("mixtral_8x7b")), layout_flag.read(laid))
    now = exactly(predict(mixtral.resolve(), H100))
    change = next(c for c in single_changes(now) if c.text == "overlap=true")
    assert change.settings == {"pipeline.overlap": True} and change.seconds < now.seconds
    on = exactly(predict(configs.replace(mixtral, change.settings).resolve(), H100))
    texts = [c.text for c in single_changes(on)]
    assert "overlap=false" in texts and "schedule=interleaved,overlap=false" in {
        text.replace("repeats=4,", "") for text in texts
    }


@pytest.mark.full
def test_islands_of_experts_are_nodes():
    """32 devices of experts lie on 4 islands of 8, or, beside 2 of `model`, on 8; 8 on one."""
    suggested, path = [], "parallel.expert_nodes"
    for layout in ("data=2,expert=32", "expert=32,model=2", "data=8,expert=8"):
        values = layout_flag.read(f"{layout},stage=2,microbatch=1")
        recipe = configs.replace(load_recipe(find_recipe("deepseek_v3")), {path: 1})
        config = layout_flag.apply(recipe, values).resolve()
        changes = [change.settings for change in single_changes(predict(config, H100))]
        suggested.append([settings[path] for settings in changes if path in settings])
    assert suggested == [[4], [8], []]


# --- memory that was not there --------------------------------------------------------------------

SAME = ("pipeline.microbatches", "pipeline.remat", "pipeline.save", "parallel.zero")


@pytest.mark.parametrize(
    ("changes", "platform", "asked", "there", "says"),
    [
        ({}, "tpu", 0, 95 * GIB, "--config.p"),
        ({}, "gpu", 0, 70 * GIB, "--config.p"),
        # one program's arrays, as on simulated devices: the plan counts for less than they are
        ({"pipeline.remat": "none"}, "cpu", 160 * GIB, 80 * 64 * GIB, "--config.pipeline.micro"),
        ({"parallel.zero": 3}, "tpu", 0, 8 * GIB, "--config.pipeline.microbatches="),
        # other microbatches would drop other tokens
        ({"model.experts": 8, "model.expert_room": 1.5}, "tpu", 0, 95 * GIB, "--config.pa"),
        ({}, "gpu", 0, GIB, "more devices, for no setting"),
    ],
)
def test_flags_that_take_less_memory(config, changes, platform, asked, there, says):
    """They keep all rules and train the same; the planned bytes follow them."""
    config = configs.replace(config, {"pipeline.microbatches": 1, **changes})
    environment = Environment(64, platform, config)
    line = what_if.fitting(config, environment, asked, there)
    start, _, use = line.partition(": use ")
    assert start.startswith("; a device is planned to need ") and "weights" in start
    assert use.startswith(says), line
    overrides = read_flags(shlex.split(use), "", (), with_config=True).overrides
    less = apply(config, overrides)
    assert checks.first_violation(less, environment) is None
    changed = {path for path, _ in overrides}
    assert changed <= {*SAME, "parallel.offload"}
    if changed:
        before, after = (predict(each.resolve(), H100).memory.bytes for each in (config, less))
        assert after < 0.95 * before
    if changes.get("model.expert_room"):
        assert "pipeline.microbatches" not in changed
