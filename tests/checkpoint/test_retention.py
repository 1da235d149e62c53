"""The steps that stay over a run, the deletion of the others, and the validation losses by which
the best are known."""

import json
import shutil

from etils import epath
from support.checkpoint_state import (
    Layout,
    checkpointer,
    latest_step,
    meta_of,
    state,
    stored_shapes,
)

from jaxtrain.checkpoint import retention, steps, storage
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.retention import Retention
from jaxtrain.checkpoint.steps import choose, read_meta


def test_keeps_the_newest(tmp_path):
    layout = Layout(7)
    c = checkpointer(tmp_path, layout, keep=2)
    for step in (1, 2, 5, 9):
        c.save(step, state(layout), meta_of(step))
    c.wait()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["5", "9"]
    assert latest_step(tmp_path) == 9
    assert (read_meta(tmp_path, 5), read_meta(tmp_path, 9)) == tuple(
        json.loads(json.dumps(meta_of(step))) for step in (5, 9)
    )
    c.close()
    # The next run goes on counting those that it finds.
    c = checkpointer(tmp_path, layout, keep=2)
    c.save(12, state(layout), meta_of(12))
    c.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["12", "9"]


def test_keeps_some_for_ever_and_the_best(tmp_path):
    """By what is stored: the next run keeps the same ones."""
    layout, keep = Layout(7), Retention(newest=1, every=4, best=2)
    losses = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.6, 5: 2.4, 6: 2.7}
    for first, last in ((1, 4), (4, 7)):
        c = Checkpointer(tmp_path, stored_shapes(layout), keep)
        for step in range(first, last):
            c.save(step, state(layout), meta_of(step))
            c.evaluated(step, losses[step])
        c.close()
    # 3 was among the best two until 5 came, 4 stays for ever, and 6 is the newest.
    assert steps.step_numbers(tmp_path) == [2, 4, 5, 6] and choose(tmp_path, {}).unrecognized == ()
    (tmp_path / "validation_losses.json").write_text("{")
    c = Checkpointer(tmp_path, stored_shapes(layout), keep)
    c.save(7, state(layout), meta_of(7))
    c.close()
    assert steps.step_numbers(tmp_path) == [4, 7]


def test_validation_losses_are_noted_of_all_steps_that_are_saved(tmp_path):
    """Also where none is kept for its loss. A step that is to be saved again has none until it is
    evaluated again."""
    layout, noted = Layout(7), lambda: retention.read_losses(epath.Path(tmp_path))
    c = checkpointer(tmp_path, layout, keep=3)
    for step in (1, 2, 3, 4):
        if step != 2:
            c.save(step, state(layout), meta_of(step))
        c.evaluated(step, step / 2)
    c.wait()
    assert noted() == {1: 0.5, 3: 1.5, 4: 2.0}
    c.set_aside_after(3, "the run went back")
    c.save(5, state(layout), meta_of(5))
    assert noted() == {1: 0.5, 3: 1.5}
    c.close()
    shutil.rmtree(tmp_path / "3")
    c = checkpointer(tmp_path, layout, keep=3)
    c.save(6, state(layout), meta_of(6))
    c.close()
    assert noted() == {1: 0.5} and steps.step_numbers(tmp_path) == [1, 5, 6]


def test_old_checkpoints_stay_until_the_new_one_is_finished(tmp_path, monkeypatch):
    layout = Layout(7)
    c = checkpointer(tmp_path, layout, keep=1)
    c.save(1, state(layout), meta_of(1))
    c.wait()
    write = storage._write
    seen = []

    async def look(values, infos):
        await write(values, infos)
        seen.append((tmp_path / "1").exists())

    monkeypatch.setattr(storage, "_write", look)
    c.save(2, state(layout), meta_of(2))
    c.close()
    assert seen == [True]
    assert not (tmp_path / "1").exists()
    assert latest_step(tmp_path) == 2


def test_a_checkpoint_whose_deletion_was_interrupted_is_in_nobodys_way(tmp_path):
    """It is older than the steps that are kept, and goes as they will."""
    layout = Layout(7)
    c = checkpointer(tmp_path, layout, keep=3)
    for step in (1, 2, 3):
        c.save(step, state(layout), meta_of(step))
    c.close()
    shutil.rmtree(tmp_path / "1" / "state")
    (tmp_path / "1" / "manifest.json").unlink()
    c = checkpointer(tmp_path, layout, keep=2)
    assert latest_step(tmp_path) == 3
    c.save(4, state(layout), meta_of(4))
    c.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4"]


def test_steps_that_are_not_complete_take_no_place(tmp_path):
    """Those that come while a run saves: a copy and a link are neither counted nor deleted, and the
    next run sets them aside, however old they are."""
    layout, said = Layout(7), []
    c = checkpointer(tmp_path / "run", layout, keep=2)
    for step in (2, 4):
        c.save(step, state(layout), meta_of(step))
    c.wait()
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    shutil.copytree(tmp_path / "run" / "2", tmp_path / "run" / "1")
    shutil.copytree(tmp_path / "run" / "2", tmp_path / "run" / "5")
    (tmp_path / "run" / "3").symlink_to(tmp_path / "other" / "4")
    before = sorted(map(str, (tmp_path / "other").rglob("*")))
    for step in (6, 8):
        c.save(step, state(layout), meta_of(step))
        c.wait()
    assert steps.step_numbers(tmp_path / "run") == [1, 3, 5, 6, 8]
    c = checkpointer(tmp_path / "run", layout, keep=1, log=said.append)
    c.save(9, state(layout), meta_of(9))
    c.close()
    moved = ["1.broken-1", "3.broken-1", "5.broken-1"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *moved[:2],
        "5.broken-1",
        "9",
    ]
    assert sorted(map(str, (tmp_path / "other").rglob("*"))) == before and len(said) == 3


def test_a_step_is_looked_through_once_in_a_run(tmp_path, monkeypatch):
    """It may have thousands of files. One whose manifest has gone since is looked at again."""
    layout, looked, fault = Layout(7), [], steps.fault
    monkeypatch.setattr(steps, "fault", lambda path: looked.append(path.name) or fault(path))
    for first, seen in ((1, []), (6, ["3", "4", "5"])):
        c = checkpointer(tmp_path, layout, keep=3)
        for step in range(first, first + 5):
            c.save(step, state(layout), meta_of(step))
        c.wait()
        assert sorted(looked) == seen
    (tmp_path / "9" / "manifest.json").unlink()
    c.save(11, state(layout), meta_of(11))
    c.wait()
    assert looked[3:] == ["9"] and steps.step_numbers(tmp_path) == [8, 9, 10, 11]


def test_links_of_saves_that_did_not_end_are_removed_alone(tmp_path):
    layout = Layout(7)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    (tmp_path / "run").mkdir()
    for step in (1, 2):
        (tmp_path / "run" / f"{step}.orbax-checkpoint-tmp").symlink_to(tmp_path / "other")
    c = checkpointer(tmp_path / "run", layout)
    c.save(1, state(layout), meta_of(1))
    c.wait()
    (tmp_path / "run" / "2.orbax-checkpoint-tmp").symlink_to(tmp_path / "other")
    c.save(2, state(layout), meta_of(2))
    c.close()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["1", "2"]
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]
