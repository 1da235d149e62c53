"""What the page of a run has: from runs in any state, of any length, within bounds."""

import json
import os
import time

import pytest
from support.run_folders import ONE_DEVICE, write_run

from jaxtrain import load_recipe, replace
from jaxtrain.experiments.page_data import POINTS, curve, page_data
from jaxtrain.experiments.run_folder import read_run

TINY = {"mesh.data": 1, "mesh.stage": 2, "mesh.model": 1}


def data_of(folder) -> dict:
    """What a browser reads."""
    return json.loads(json.dumps(page_data(read_run(folder)), allow_nan=False))


def test_a_run_without_records(tmp_path):
    data = data_of(write_run(tmp_path))
    assert data["curves"] == {} and data["is_running"] is None and data["goodput"] == []
    assert data["schedule"] == ["one stage, whose microbatches follow each other", ""]


def test_curves_rollbacks_and_damaged_lines(tmp_path):
    """Values that are no numbers have no point, and a record that a kill has cut off is none."""
    records = [
        {"step": 1, "wall_s": 2.0, "loss": 3.0, "mfu": None, "why": "<b>"},
        '{"step": 2, "wall_s": 3.0, "loss": NaN, "tokens": 1e999}\n',
        {"step": 2, "wall_s": 4, "rolled_back_from": 5, "why": "</script>", "validation_loss/a": 2},
        '{"step": 3, "los',
    ]
    lost = [{"step": 5, "wall_s": 3.5, "loss": 9.0}, "[]\n"]
    data = data_of(write_run(tmp_path, metrics=records, metrics__rolled_back=lost))
    assert data["curves"]["loss"] == [[1, 2.0, 3.0]] and not {"mfu", "tokens"} & {*data["curves"]}
    assert data["curves"]["validation_loss/a"] == [[2, 4, 2.0]]
    assert data["discarded"] == [[5, 3.5, 9.0]]
    assert [each["why"] for each in data["rollbacks"]] == ["</script>"]


@pytest.mark.parametrize("count", [1, POINTS, POINTS + 1, 2 * POINTS + 7, 30_000])
def test_a_thinned_curve_keeps_spikes_and_ends(count):
    records = [{"step": i, "wall_s": 0.1 * i, "loss": 2.0 + i % 7} for i in range(1, count + 1)]
    records[count // 3]["loss"], records[count // 2]["loss"] = 99.0, -5.0
    points = curve(records, "loss")
    steps, values = [point[0] for point in points], [point[2] for point in points]
    assert len(points) <= min(count, POINTS + 3) and steps == sorted(steps) and steps[-1] == count
    assert max(values) == max(r["loss"] for r in records) and -5.0 in values
    assert count > POINTS or len(points) == count


def test_whether_it_runs(tmp_path):
    lock = write_run(tmp_path) / "run.lock"
    lock.write_text("{}")
    assert data_of(tmp_path)["is_running"] is True
    long_ago = time.time() - 60
    os.utime(lock, (long_ago, long_ago))
    assert data_of(tmp_path)["is_running"] is False


def test_starts_goodput_samples_and_phases(tmp_path):
    line = {"began": 100.0, "time": 110.0, "step": 4, "seconds": {"imports": 4.0, "stepping": 6.0}}
    later = line | {"start": 2, "began": 200.0, "time": 210.0, "step": 2}
    phases = {"train.phases": ("long.step=5", "long.sequence_length=64")}
    data = data_of(
        write_run(
            tmp_path,
            replace(ONE_DEVICE, phases),
            goodput=[line | {"start": 1, "step": 0}, line | {"start": 1}, later, '{"start": 3, "'],
            starts=[
                {"time": 101.0, "step": 0},
                {"time": 201.0, "step": 2, "changed": ["a: 1 → 2"]},
            ],
            samples=[{"step": step, "text": "…"} for step in range(9)],
        )
    )
    first, second = data["goodput"]
    assert first["parts"] == {"useful steps": 3.0, "redone steps": 3.0, "imports": 4.0}
    assert second["start"] == 2 and sum(data["parts"].values()) == 20
    assert data["starts"][1]["changed"] == ["a: 1 → 2"]
    assert [sample["step"] for sample in data["samples"]] == [6, 7, 8]
    assert data["phases"] == {"": 0, "long": 5}


def test_schedules(tmp_path):
    """Of many microbatches the first rounds are drawn; a schedule that cannot be made says why."""
    tiny = replace(load_recipe("tiny"), TINY | {"data.batch_size": 64, "pipeline.microbatches": 16})
    line, svg = data_of(write_run(tmp_path, tiny))["schedule"]
    assert (
        line == "4 of the 16 microbatches of a step, by the exact clock" and svg.count("<rect") > 30
    )
    missing = replace(tiny, {"pipeline.schedule": "csv:gone.csv"})
    line, svg = data_of(write_run(tmp_path, missing))["schedule"]
    assert line.startswith("no picture: ") and "gone.csv" in line and not svg
    line, svg = data_of(write_run(tmp_path, replace(tiny, {"mesh.data": -1})))["schedule"]
    assert line == "no picture: mesh.data=-1 is no number of devices" and not svg
