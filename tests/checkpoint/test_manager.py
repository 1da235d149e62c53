"""Round trips between layouts, the stored form, saves, and what they set aside. Crashes:
test_checkpoint_processes.py; failures: test_saving.py."""

import asyncio
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from support.checkpoint_state import (
    HIDDEN,
    VOCABULARY,
    WIDTH,
    Layout,
    assert_same,
    checkpointer,
    latest_step,
    meta_of,
    restored,
    state,
    stored_numbers,
    stored_shapes,
)

from jaxtrain.checkpoint import steps, storage
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.steps import CheckpointError, UnrecognizedEntry, read_meta

LAYOUTS = {
    7: [
        Layout(7, padded=13),
        Layout(7, stages=1, chunks=3, data=8),
        Layout(7, stages=1, data=1, model=8),
        Layout(7, stages=2, chunks=3, data=2, model=2),
        Layout(7, stages=3, data=2, padded=18),
    ],
    18: [
        Layout(18, stages=1, chunks=2, data=2, model=4),
        Layout(18, stages=2, chunks=1, data=4),
        Layout(18, stages=2, chunks=3, data=2, model=2, padded=32),
        Layout(18, stages=7, chunks=2, padded=21),
        Layout(18, stages=4, chunks=3, data=2),
    ],
    "5, replicas apart": [
        Layout(5, stages=2, chunks=2, data=2, padded=24, replicas=2),
        Layout(5, model=4, replicas=2),
    ],
}


@pytest.mark.parametrize("layers", LAYOUTS)
def test_every_layout_restores_every_other(tmp_path, layers):
    for i, layout in enumerate(LAYOUTS[layers]):
        c = checkpointer(tmp_path / str(i), layout)
        assert c.save(1, state(layout), {})
        c.close()
    for target in LAYOUTS[layers]:
        expected = state(target)
        for i in range(len(LAYOUTS[layers])):
            assert_same(restored(tmp_path / str(i), 1, target), expected)


@pytest.mark.parametrize("layout", LAYOUTS[7][1:], ids=str)
def test_stored_form_is_the_layers_in_order_and_nothing_padded(tmp_path, layout):
    c = checkpointer(tmp_path, layout)
    c.save(1, state(layout), {})
    c.close()
    metadata = ocp.PyTreeCheckpointHandler().metadata(epath.Path(c._directory / "1" / "state")).tree
    shapes = jax.tree.map(lambda m: m.shape, metadata, is_leaf=lambda m: not isinstance(m, dict))
    parameters = {
        "embed": {"table": (VOCABULARY, WIDTH)},
        "head": {"w": (WIDTH, VOCABULARY)},
        "layers": {"mlp": {"w": (7, WIDTH, HIDDEN)}, "norm": (7, WIDTH)},
    }
    assert shapes == {
        "params": parameters,
        "optimizer": {"0": {"count": (), "mu": parameters, "nu": parameters}},
        "step": (),
    }
    # Orbax's own restore, which knows nothing of this package, finds the known numbers.
    with ocp.StandardCheckpointer() as plain:
        tree = plain.restore(c._directory / "1" / "state")
    for path, numbers in jax.tree_util.tree_leaves_with_path(tree):
        expected = stored_numbers(
            jax.tree_util.keystr(path, simple=True, separator="/"), numbers.shape, numbers.dtype
        )
        assert numbers.tobytes() == expected.tobytes(), path


def test_nothing_is_made_before_the_first_save(tmp_path):
    layout = Layout(7)
    c = checkpointer(tmp_path / "run", layout)
    assert latest_step(tmp_path / "run") is None
    c.wait()
    c.close()
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        restored(tmp_path / "run", 3, layout)
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        read_meta(tmp_path / "run", 3)
    assert not (tmp_path / "run").exists()


def test_meta_comes_back(saved):
    folder, _ = saved
    assert latest_step(folder) == 5
    assert read_meta(folder, 5)["seed"] == 3


def test_other_folders_are_no_checkpoints(saved):
    folder, _ = saved
    for name in ("7.orbax-checkpoint-tmp", "notes", "best_9"):
        (folder / name).mkdir()
    assert latest_step(folder) == 5


def test_the_state_may_be_overwritten_after_save_returns(tmp_path, monkeypatch):
    layout = Layout(7, stages=2, data=2, model=2)
    write, gate = storage._write, asyncio.Event()

    async def late(values, infos):
        while not gate.is_set():
            await asyncio.sleep(0.01)
        await write(values, infos)

    monkeypatch.setattr(storage, "_write", late)
    c = checkpointer(tmp_path, layout)
    live = state(layout)
    c.save(1, live, {})
    live = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(live)
    assert not any(np.any(x) for x in jax.tree.leaves(jax.tree.map(jnp.any, live)))
    assert latest_step(tmp_path) is None, "save must not wait for the files"
    gate.set()
    c.wait()
    assert_same(restored(tmp_path, 1, layout), state(layout))
    c.close()


def test_steps_that_a_run_has_gone_back_over_are_set_aside_and_saved_again(tmp_path):
    layout, said = Layout(7), []
    c = checkpointer(tmp_path, layout, keep=9, log=said.append)
    for step in (1, 2, 3):
        c.save(step, state(layout), {"first": True})
    c.set_aside_after(1, "the run went back to step 1")  # while the last is being saved
    assert latest_step(tmp_path) == 1 and c.save(2, state(layout), {"first": False})
    assert [*c.figures()] == [1]
    c.wait()
    assert [*c.figures()] == [2]
    c.close()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["1", "2", "2.broken-1", "3.broken-1"] and read_meta(tmp_path, 2) == {
        "first": False
    }
    assert [line.partition(": ")[2] for line in said] == [
        f"{step} (the run went back to step 1) is now {step}.broken-1" for step in (2, 3)
    ]


def test_a_step_is_saved_once(saved):
    folder, layout = saved
    c = checkpointer(folder, layout)
    assert not c.save(5, state(layout), {"seed": 4})
    assert c.save(6, state(layout), {})
    assert not c.save(6, state(layout), {})
    c.close()
    assert read_meta(folder, 5)["seed"] == 3


# --- what is set aside ----------------------------------------------------------------------------


def test_a_step_that_cannot_be_read_at_the_moment_stays(saved, monkeypatch):
    """A store or a network disk that fails for a while must not cost a checkpoint its name."""
    folder, layout = saved
    with monkeypatch.context() as patch:
        why = "meta/metadata cannot be read: Input/output error"
        patch.setattr(steps, "what_is_wrong", lambda *_: why)
        c = checkpointer(folder, layout, log=pytest.fail)
        assert c.save(6, state(layout), {})
        c.close()
    assert steps.step_numbers(folder) == [5, 6] and latest_step(folder) == 6


def test_what_has_a_step_s_name_is_set_aside_by_the_first_save(saved):
    """Nothing is lost, nothing is in the way of a save, and complete steps are not deleted for
    what is none."""
    folder, layout = saved
    (folder / "6").mkdir()
    (folder / "7").write_text("mine")
    (folder / "100" / "state").mkdir(parents=True)
    (folder / "100.broken-1").mkdir()
    (folder / "200").symlink_to(folder / "nowhere")
    shutil.copytree(folder / "5", folder / "8")
    (folder / "notes").mkdir()
    said = []
    cut_off = UnrecognizedEntry("8", "of another model", 8, holds_data=True)
    c = checkpointer(folder, layout, keep=2, broken=[cut_off], log=said.append)
    assert c.save(6, state(layout), meta_of(6)) and c.save(7, state(layout), meta_of(7))
    (folder / "8").mkdir()  # while the run goes on
    assert c.save(8, state(layout), meta_of(8))
    c.close()
    moved = [
        "100.broken-1",
        "100.broken-2",
        "200.broken-1",
        "6.broken-1",
        "7.broken-1",
        "8.broken-1",
        "8.broken-2",
    ]
    assert sorted(p.name for p in folder.iterdir()) == sorted(["7", "8", "notes", *moved])
    assert (folder / "7.broken-1").read_text() == "mine" and (
        folder / "100.broken-2" / "state"
    ).exists()
    assert (
        f"set aside in {folder}: 6 (an empty folder) is now 6.broken-1" in said
        and len(said) == len(moved) - 1
    )
    assert_same(restored(folder, 8, layout), state(layout))


def test_a_state_of_another_placement_is_refused(tmp_path):
    layout = Layout(18, stages=2, chunks=2)
    for other, message in {
        (18, 2, 1): "Dict key mismatch",  # it has one unit
        (18, 4, 2): r"\[2, 5, 8, 16\] is no stack of 3 layers on each of 4 stages",
        (20, 2, 2): r"\[2, 4, 8, 16\] is no stack of 5 layers on each of 2 stages",
    }.items():
        c = Checkpointer(tmp_path / "run", stored_shapes(Layout(*other)))
        with pytest.raises(ValueError, match=message):
            c.save(1, state(layout), {})
    live, shapes = state(layout), stored_shapes(layout)
    del live["params"]["layers"]["1"], shapes["params"]["layers"]["1"]
    with pytest.raises(
        ValueError,
        match="params/layers/mlp/w: the units hold 10 of the model's 18 layers",
    ):
        Checkpointer(tmp_path / "run", shapes).save(1, live, {})
    assert not (tmp_path / "run").exists()


def test_saving_and_restoring_take_no_device_memory_but_the_state(tmp_path, monkeypatch):
    layout = Layout(18, stages=2, chunks=3, data=2, model=2)
    seen = []

    def live() -> int:
        # Arrays share buffers with their shards.
        return sum(
            {
                s.data.unsafe_buffer_pointer(): s.data.nbytes
                for x in jax.live_arrays()
                for s in x.addressable_shards
            }.values()
        )

    def watch(name):
        original = getattr(storage, name)

        def wrapped(*args):
            seen.append(live())
            result = original(*args)
            seen.append(live())
            return result

        monkeypatch.setattr(storage, name, wrapped)

    for name in ("to_host", "_read_leaf"):
        watch(name)
    base = live()
    s = state(layout)
    with_state = live()
    c = checkpointer(tmp_path, layout)
    c.save(1, s, {})
    c.close()
    assert max(seen) == with_state
    del s
    assert live() == base
    seen.clear()
    numbers = restored(tmp_path, 1, layout)
    assert max(seen) <= live()
    whole = sum(
        x.nbytes
        for leaf in jax.tree.leaves(numbers)
        for s in leaf.addressable_shards
        for x in [s.data]
    )
    assert live() - base <= whole
