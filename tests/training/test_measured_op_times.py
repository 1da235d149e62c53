"""A run's op times are planned or measured once and kept in its folder, where every later start and
process finds them."""

import dataclasses
import json

import pytest
from support import train_runs as runs

from jaxtrain.config import (
    Config,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    get,
    replace,
)
from jaxtrain.config.rules.unused import unused_settings
from jaxtrain.pipeline import setup
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.step.step_model import step_model_of
from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.columns import (
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    cell_op,
    overlapped_ops,
    permute_op,
)
from jaxtrain.schedule.table import Permute
from jaxtrain.schedule.table_spec import TableSpec
from jaxtrain.training import stored_op_times
from jaxtrain.training.measured_op_times import in_order, known_times, planned_times, times_of
from jaxtrain.training.stored_op_times import (
    OP_TIMES,
    OpTimesError,
    depend_on,
    needed,
    worth_storing,
)

CONFIG = Config(
    model=ModelConfig(layers=4, width=32, heads=4, mlp_width=64),
    mesh=MeshConfig(data=1, stage=2),
    pipeline=PipelineConfig(schedule="zb_h1", microbatches=4, measure_times=True),
).resolve()
TIMES = (1.5, 2.25, 0.75, 0.0, 1.5, 3.0)


def own_kind(file, tflops, *dtypes):
    """A file of a kind of device with such a peak for some types."""
    kind = dataclasses.replace(load("h100"), name="own", peak_tflops=dict.fromkeys(dtypes, tflops))
    file.write_text(json.dumps(dataclasses.asdict(kind)))
    return str(file)


def keep(config, folder, times=TIMES):
    stored_op_times.store(folder, times, depend_on(config), "8 × cpu")


def test_who_needs_times():
    assert needed(CONFIG.mesh, CONFIG.pipeline)
    for changes in ({"pipeline.times": TIMES}, {"mesh.stage": 1}):
        config = replace(CONFIG, changes)
        assert not needed(config.mesh, config.pipeline), changes
    notes = unused_settings(replace(CONFIG, {"pipeline.times": TIMES}))
    note = "pipeline.measure_times=true has no use with pipeline.times, which are used instead"
    assert note in notes


def test_which_times_are_kept():
    """Those that the run has found out for itself, and that there are none; not those that it was
    given, nor the model's sizes."""
    known, sizes = (
        replace(CONFIG, {"pipeline.times": TIMES}),
        replace(CONFIG, {"pipeline.measure_times": False}),
    )
    worth = lambda config, given: worth_storing(config.mesh, config.pipeline, given.pipeline)
    assert worth(known, CONFIG) and worth(CONFIG, CONFIG)
    assert not worth(known, known) and not worth(sizes, sizes)
    assert not worth(replace(CONFIG, {"mesh.stage": 1}), CONFIG)


def test_times_stay(tmp_path):
    """They are read to the last digit, and nothing else is left beside them."""
    assert known_times(CONFIG, tmp_path) is None
    keep(CONFIG, tmp_path)
    assert known_times(CONFIG, tmp_path) == TIMES and [
        path.name for path in tmp_path.iterdir()
    ] == [OP_TIMES]


def test_planned_times_are_the_planners(tmp_path):
    """F, B, W, message, R and head in milliseconds, of the kind of device that is named, and none
    of a type that it has no peak for."""
    assert planned_times(CONFIG) == ()
    plans = replace(CONFIG, {"pipeline.measure_times": False})
    assert known_times(plans, tmp_path) == () and known_times(CONFIG, None) is None
    file = own_kind(tmp_path / "own.json", 100.0, "bfloat16")
    config = replace(CONFIG, {"train.hardware": file, "precision.compute": "bfloat16"})
    times = planned_times(config)
    assert known_times(replace(config, {"pipeline.measure_times": False}), None) == times
    assert times == pytest.approx(
        [1e3 * seconds for seconds in step_model_of(config, load(file)).op_times()], rel=1e-3
    )
    assert dataclasses.astuple(setup.times_of(config))[:6] == times
    assert planned_times(replace(config, {"precision.compute": "float32"})) == ()


CHANGES = (
    {"mesh.stage": 4},
    {"model.width": 64},
    {"pipeline.remat": "none"},
    {"precision.compute": "float32"},
    {"train.hardware": "h100"},
)


@pytest.mark.parametrize("change", CHANGES)
def test_times_of_something_else_are_made_again(change, tmp_path):
    changed = replace(CONFIG, change)
    assert [get(changed, path) for path in change] != [get(CONFIG, path) for path in change]
    keep(CONFIG, tmp_path)
    assert known_times(changed, tmp_path) is None
    doubled = tuple(2 * time for time in TIMES)
    keep(changed, tmp_path, doubled)
    assert known_times(changed, tmp_path) == doubled


def test_what_may_change_beside_them(tmp_path):
    """Another schedule is another table of the same times; a run is longer."""
    keep(CONFIG, tmp_path)
    assert (
        known_times(
            replace(
                CONFIG,
                {"pipeline.schedule": "1f1b", "train.steps": 7, "optimizer.learning_rate": 1.0},
            ),
            tmp_path,
        )
        == TIMES
    )


def test_times_that_cannot_be_told_are_not_measured_again(tmp_path):
    keep(CONFIG, tmp_path, ())
    assert known_times(CONFIG, tmp_path) == ()
    assert "model's sizes" in stored_op_times.describe(())


NO_TIMES = (["x"], [1, 1], [1] * 10, [0, 1, 1], [1, 1, -1], [1, 1, float("nan")], [1, 1, 1e308])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[" * 10**5, *(json.dumps({"times": each, "of": {}}) for each in NO_TIMES)],
    ids=range(4 + len(NO_TIMES)),
)
def test_a_broken_file_is_one_line(text, tmp_path):
    (tmp_path / OP_TIMES).write_text(text)
    with pytest.raises(OpTimesError, match="has no op times: delete it"):
        known_times(CONFIG, tmp_path)


def test_times_of_a_whole_stage():
    """Two chunks on a stage: a stage's F is the sum of its chunks'; of an F that keeps residuals
    (K) and one that does not, the mean."""
    table = make_table(TableSpec("interleaved", 2, 2, 4, remat_full=True))
    found = {EMBED: 1.0, EMBED_GRADIENT: 3.0, HEAD: 5.0, permute_op(Permute.LATE): 0.5}
    for u in range(2):
        found |= {
            cell_op(op, u): seconds
            for op, seconds in (("F", 1.0), ("K", 2.0), ("B", 4.0), ("W", 3.0), ("R", 1.0))
        }
    times = times_of(found, table, (0.5,) * table.units)
    assert (times.F, times.B, times.W, times.R) == (3.0, 8.0, 6.0, 2.0)
    together = table.stages if table.vocabulary == "parallel" else 1
    assert (times.message, times.head, times.embed) == (0.5, 5.0 * together, 2.0 * together)


def test_times_of_overlapped_cells():
    """Each cell of two chunks is 2 shorter than their F and B: FB of a stage is 4 shorter."""
    table = make_table(TableSpec("dualpipe_v", 2, 2, 4, overlap=True))
    found = {EMBED: 1.0, EMBED_GRADIENT: 3.0, HEAD: 5.0, permute_op(Permute.LATE): 0.5}
    for u in range(2):
        for op, seconds in (("F", 3.0), ("K", 3.0), ("B", 4.0), ("W", 3.0)):
            found[cell_op(op, u)] = seconds
    found |= dict.fromkeys(overlapped_ops(table), 5.0)
    times = times_of(found, table, (0.5,) * table.units)
    assert (times.F, times.B, times.overlap) == (6.0, 8.0, 4.0)
    values = in_order(times, table)
    assert values[:3] == (6.0, 8.0, 6.0) and values[6:] == (10.0,)
    config = replace(CONFIG, {"pipeline.times": values})
    assert setup.times_of(config) == dataclasses.replace(times, embed=0.0)
    assert "FB 10" in stored_op_times.describe(values)
    assert "FB" not in stored_op_times.describe((*values[:6], 0.0, 7.0))
    slower = dataclasses.replace(times, overlap=-1.0)  # what transport takes from products
    assert in_order(slower, table)[6] == 15.0


@pytest.mark.full
def test_a_run_measures_once(folder):
    """A second start reads what the first has stored, and both have the table for it in their
    configs."""
    flags = runs.flags_of({"pipeline.measure_times": True, "pipeline.schedule": "zb_h1"})
    workdir = folder / "measured"
    first = runs.train(workdir, *flags, "--config.train.steps=2")
    kept = (workdir / OP_TIMES).read_bytes()
    times = json.loads(kept)["times"]
    assert "measuring op times" in first.out and len(times) == 6 and all(times[:3])
    second = runs.train(workdir, *flags, "--config.train.steps=3")
    assert (
        "measuring op times" not in second.out
        and "pipeline.times:" not in second.out
        and (workdir / OP_TIMES).read_bytes() == kept
    )
    assert json.loads((workdir / "config.json").read_text())["pipeline"]["times"] == times
    table = lambda done: next(line for line in done.out.splitlines() if line.startswith("table: "))
    assert table(first) == table(second) and runs.last_step(workdir) == 3


@pytest.mark.full
def test_a_run_keeps_its_planned_times(folder):
    """A second start has the first one's, though what they were planned by has changed; a dry run
    plans anew and writes nothing."""
    workdir, file = folder / "planned", own_kind(folder / "own.json", 100.0, "float32", "bfloat16")
    flags = [*runs.flags_of({"pipeline.schedule": "zb_h1"}), f"--config.train.hardware={file}"]
    dry = runs.train(workdir, *flags, "--dry_run")
    assert "planned for own" in dry.out and not (workdir / OP_TIMES).exists()
    first = runs.train(workdir, *flags, "--config.train.steps=2")
    times = json.loads((workdir / OP_TIMES).read_bytes())["times"]
    assert "planned for own" in first.out and len(times) == 6 and all(times[:3])
    own_kind(folder / "own.json", 1.0, "float32", "bfloat16")
    second = runs.train(workdir, *flags, "--config.train.steps=3")
    assert (
        f"of {OP_TIMES}" in second.out
        and json.loads((workdir / "config.json").read_text())["pipeline"]["times"] == times
    )
    table = lambda done: next(line for line in done.out.splitlines() if line.startswith("table: "))
    assert table(first) == table(second)
