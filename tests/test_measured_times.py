"""`pipeline.measure_times`: times are measured once and kept in the run's folder, where every later start and process finds them."""

import json

import pytest
from support import train_runs as runs

from jaxtrain import measured_times
from jaxtrain.config import Config, MeshConfig, ModelConfig, PipelineConfig, get, replace
from jaxtrain.config.unused import unused_settings
from jaxtrain.measured_times import OP_TIMES, OpTimesError, stored
from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.columns import EMBED, EMBED_GRADIENT, HEAD, cell_op, permute_op
from jaxtrain.schedule.table import Permute
from jaxtrain.schedule.table_spec import TableSpec
from jaxtrain.training.op_times import times_of

CONFIG = Config(
    model=ModelConfig(layers=4, width=32, heads=4, mlp_width=64),
    mesh=MeshConfig(data=1, stage=2),
    pipeline=PipelineConfig(schedule="zb_h1", microbatches=4, measure_times=True),
).resolve()
TIMES = (1.5, 2.25, 0.75, 0.0, 1.5, 3.0)


def keep(config, folder, times=TIMES):
    return tuple(measured_times._write(config, folder, times))


def test_who_measures():
    assert measured_times.wanted(CONFIG)
    for changes in ({"pipeline.measure_times": False}, {"pipeline.times": TIMES}, {"mesh.stage": 1}):
        assert not measured_times.wanted(replace(CONFIG, changes)), changes
    notes = unused_settings(replace(CONFIG, {"pipeline.times": TIMES}))
    assert "pipeline.measure_times=true has no use with pipeline.times, which count" in notes


def test_times_stay_whatever_is_measured_later(tmp_path):
    """The first of two starts wins, and its file is read to the last digit; nothing else is left beside it."""
    folder = tmp_path / "run"
    assert stored(CONFIG, folder) is None
    assert keep(CONFIG, folder) == TIMES and keep(CONFIG, folder, (9.0, 9.0, 9.0, 9.0, 9.0, 9.0)) == TIMES
    assert stored(CONFIG, folder) == TIMES
    assert [path.name for path in folder.iterdir()] == [OP_TIMES]


@pytest.mark.parametrize("change", [{"mesh.stage": 4}, {"model.width": 64}, {"pipeline.remat": "none"}, {"precision.compute": "float32"}])
def test_times_of_something_else_are_measured_again(change, tmp_path):
    changed = replace(CONFIG, change)
    assert [get(changed, path) for path in change] != [get(CONFIG, path) for path in change]
    keep(CONFIG, tmp_path)
    assert stored(changed, tmp_path) is None
    assert keep(changed, tmp_path, TIMES[::-1]) == TIMES[::-1] == stored(changed, tmp_path)


def test_what_may_change_beside_them(tmp_path):
    """Another schedule is another table of the same times; a run is longer."""
    keep(CONFIG, tmp_path)
    assert stored(replace(CONFIG, {"pipeline.schedule": "1f1b", "train.steps": 7, "optimizer.learning_rate": 1.0}), tmp_path) == TIMES


def test_times_that_cannot_be_told_are_not_measured_again(tmp_path):
    assert keep(CONFIG, tmp_path, ()) == () == stored(CONFIG, tmp_path)
    assert "model's sizes" in measured_times.describe(())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"times": ["x"], "of": {}}'])
def test_a_broken_file_is_one_line(text, tmp_path):
    (tmp_path / OP_TIMES).write_text(text)
    with pytest.raises(OpTimesError, match="has no op times: delete it"):
        stored(CONFIG, tmp_path)


def test_times_of_a_whole_stage():
    """Two chunks on a stage: a stage's F is the sum of its chunks'; of an F that keeps residuals (K) and one that does not, the mean."""
    table = make_table(TableSpec("interleaved", 2, 2, 4, remat_full=True))
    found = {EMBED: 1.0, EMBED_GRADIENT: 3.0, HEAD: 5.0, permute_op(Permute.LATE): 0.5}
    for u in range(2):
        found |= {cell_op(op, u): seconds for op, seconds in (("F", 1.0), ("K", 2.0), ("B", 4.0), ("W", 3.0), ("R", 1.0))}
    times = times_of(found, table, (0.5,) * table.units)
    assert (times.F, times.B, times.W, times.R) == (3.0, 8.0, 6.0, 2.0)
    together = table.stages if table.vocabulary == "parallel" else 1
    assert (times.message, times.head, times.embed) == (0.5, 5.0 * together, 2.0 * together)


@pytest.mark.full
def test_a_run_measures_once(folder):
    """A second start reads what the first has stored, and both have the table for it in their configs."""
    flags = runs.flags_of({"pipeline.measure_times": True, "pipeline.schedule": "zb_h1"})
    workdir = folder / "measured"
    first = runs.train(workdir, *flags, "--config.train.steps=2")
    kept = (workdir / OP_TIMES).read_bytes()
    times = json.loads(kept)["times"]
    assert "measuring op times" in first.out and len(times) == 6 and all(times[:3])
    second = runs.train(workdir, *flags, "--config.train.steps=3")
    assert "measuring op times" not in second.out and "pipeline.times:" not in second.out and (workdir / OP_TIMES).read_bytes() == kept
    assert json.loads((workdir / "config.json").read_text())["pipeline"]["times"] == times
    table = lambda done: next(line for line in done.out.splitlines() if line.startswith("table: "))
    assert table(first) == table(second) and runs.last_step(workdir) == 3
