"""Round trips between layouts, the stored form, and what happens to checkpoints over a run.
Crashes: test_checkpoint_processes.py."""

import asyncio
import errno
import re
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from support import small
from support.checkpoint_state import (
    EMBED,
    LAYER,
    VOCABULARY,
    WIDTH,
    Layout,
    abstract_state,
    assert_same,
    checkpointer,
    latest_step,
    restored,
    state,
    stored_numbers,
    stored_shapes,
)

from jaxtrain import config as configs
from jaxtrain.checkpoint import manifest, retention, saving, steps, storage
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.restoring import expected_shapes, restore, wrong_arrays
from jaxtrain.checkpoint.retention import Retention
from jaxtrain.checkpoint.steps import CheckpointError, Meta, UnrecognizedEntry, choose, read_meta
from jaxtrain.schedule.placement import Placement
from jaxtrain.training import state as state_module
from jaxtrain.training.step import make_step

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


@pytest.fixture
def saved(tmp_path):
    """A folder with step 5 of a state of 7 layers, and its layout."""
    layout = Layout(7, stages=2, chunks=2, data=2, model=2)
    c = checkpointer(tmp_path / "run", layout)
    c.save(5, state(layout), {"seed": 3})
    c.close()
    return tmp_path / "run", layout


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
        "embed": EMBED,
        "head": {"w": (WIDTH, VOCABULARY)},
        "layers": {"mlp": {"w": (7, *LAYER["mlp"]["w"])}, "norm": (7, *LAYER["norm"])},
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
    assert read_meta(folder, 5) == {"seed": 3}


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


def test_a_restored_state_can_be_donated(saved):
    folder, layout = saved
    numbers = restored(folder, 5, layout)
    expected = jax.tree.map(lambda x: np.asarray(x) + 1, state(layout))
    got = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(numbers)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_keeps_the_newest(tmp_path):
    layout = Layout(7)
    c = checkpointer(tmp_path, layout, keep=2)
    for step in (1, 2, 5, 9):
        c.save(step, state(layout), {"step": step})
    c.wait()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["5", "9"]
    assert latest_step(tmp_path) == 9
    assert (read_meta(tmp_path, 5), read_meta(tmp_path, 9)) == ({"step": 5}, {"step": 9})
    c.close()
    # The next run goes on counting those that it finds.
    c = checkpointer(tmp_path, layout, keep=2)
    c.save(12, state(layout), {})
    c.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["12", "9"]


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


def test_keeps_some_for_ever_and_the_best(tmp_path):
    """By what is stored: the next run keeps the same ones."""
    layout, keep = Layout(7), Retention(newest=1, every=4, best=2)
    losses = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.6, 5: 2.4, 6: 2.7}
    for first, last in ((1, 4), (4, 7)):
        c = Checkpointer(tmp_path, layout.placement, stored_shapes(layout), keep)
        for step in range(first, last):
            c.save(step, state(layout), {})
            c.evaluated(step, losses[step])
        c.close()
    # 3 was among the best two until 5 came, 4 stays for ever, and 6 is the newest.
    assert steps.names(tmp_path) == [2, 4, 5, 6] and choose(tmp_path, {}).unrecognized == ()
    (tmp_path / "validation_losses.json").write_text("{")
    c = Checkpointer(tmp_path, layout.placement, stored_shapes(layout), keep)
    c.save(7, state(layout), {})
    c.close()
    assert steps.names(tmp_path) == [4, 7]


def test_validation_losses_are_noted_of_all_steps_that_are_saved(tmp_path):
    """Also where none is kept for its loss. A step that is to be saved again has none until it is
    evaluated again."""
    layout, noted = Layout(7), lambda: retention.read_losses(epath.Path(tmp_path))
    c = checkpointer(tmp_path, layout, keep=3)
    for step in (1, 2, 3, 4):
        if step != 2:
            c.save(step, state(layout), {})
        c.evaluated(step, step / 2)
    c.wait()
    assert noted() == {1: 0.5, 3: 1.5, 4: 2.0}
    c.set_aside_after(3, "the run went back")
    c.save(5, state(layout), {})
    assert noted() == {1: 0.5, 3: 1.5}
    c.close()
    shutil.rmtree(tmp_path / "3")
    c = checkpointer(tmp_path, layout, keep=3)
    c.save(6, state(layout), {})
    c.close()
    assert noted() == {1: 0.5} and steps.names(tmp_path) == [1, 5, 6]


def test_old_checkpoints_stay_until_the_new_one_is_finished(tmp_path, monkeypatch):
    layout = Layout(7)
    c = checkpointer(tmp_path, layout, keep=1)
    c.save(1, state(layout), {})
    c.wait()
    write = storage._write
    seen = []

    async def look(values, infos):
        await write(values, infos)
        seen.append((tmp_path / "1").exists())

    monkeypatch.setattr(storage, "_write", look)
    c.save(2, state(layout), {})
    c.close()
    assert seen == [True]
    assert not (tmp_path / "1").exists()
    assert latest_step(tmp_path) == 2


def test_a_checkpoint_whose_deletion_was_interrupted_is_in_nobodys_way(tmp_path):
    """It is older than the steps that are kept, and goes as they will."""
    layout = Layout(7)
    c = checkpointer(tmp_path, layout, keep=3)
    for step in (1, 2, 3):
        c.save(step, state(layout), {})
    c.close()
    shutil.rmtree(tmp_path / "1" / "state")
    (tmp_path / "1" / "_CHECKPOINT_METADATA").unlink()
    c = checkpointer(tmp_path, layout, keep=2)
    assert latest_step(tmp_path) == 3
    c.save(4, state(layout), {})
    c.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4"]


def test_a_step_is_saved_once(saved):
    folder, layout = saved
    c = checkpointer(folder, layout)
    assert not c.save(5, state(layout), {"seed": 4})
    assert c.save(6, state(layout), {})
    assert not c.save(6, state(layout), {})
    c.close()
    assert read_meta(folder, 5) == {"seed": 3}


def failing(monkeypatch, *failures: Exception) -> list[float]:
    """Makes the next writings of arrays fail, one by one, and returns the times at which they were
    begun."""
    write, left, begun = storage._write, list(failures), []

    async def fail(values, infos):
        begun.append(time.monotonic())
        if left:
            raise left.pop(0)
        await write(values, infos)

    monkeypatch.setattr(storage, "_write", fail)
    return begun


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_store_that_fails_for_a_while_costs_no_checkpoint(tmp_path, monkeypatch, caplog):
    """In the background, with growing waits, and without a word."""
    monkeypatch.setattr(saving, "RETRY_WAITS_S", (0.05, 0.1, 0.2))
    begun = failing(monkeypatch, FULL, ValueError("UNAVAILABLE: the store is busy"), FULL)
    layout, said = Layout(7), []
    c = checkpointer(tmp_path, layout, log=said.append)
    c.save(1, state(layout), {})
    c.wait()
    waits = np.diff(begun)
    assert len(waits) == 3 and (waits >= (0.05, 0.1, 0.2)).all()
    assert not said and not caplog.records
    assert_same(restored(tmp_path, 1, layout), state(layout))
    assert list(c.figures()) == [1] and not c.figures()
    c.close()


def test_a_failed_save_is_reported_and_the_next_one_tries_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(saving, "RETRY_WAITS_S", (0.01, 0.01))
    layout, said = Layout(7), []
    c = checkpointer(tmp_path, layout, log=said.append)
    c.save(1, state(layout), {})
    c.wait()
    with monkeypatch.context() as patch:
        failing(patch, *[FULL] * 6)
        c.save(2, state(layout), {})
        c.save(3, state(layout), {})
        with pytest.raises(
            CheckpointError,
            match=r"step 3, the last of this run, is not saved: No space left on device \(3 .*; "
            r"the newest checkpoint is 1 in ",
        ):
            c.wait()
    what = (
        r"No space left on device \(\d attempts? in 0 s\); the newest checkpoint is 1 in \S+; the "
        r"next save tries again"
    )
    line = rf"warning: step 2 is not saved: {what}"
    assert len(said) == 1 and re.fullmatch(line, said[0]), said
    assert not caplog.records and [path.name for path in tmp_path.iterdir()] == ["1"]
    assert c.save(3, state(layout), {})
    c.close()
    assert latest_step(tmp_path) == 3
    assert_same(restored(tmp_path, 1, layout), state(layout))


def test_a_save_that_fails_does_not_hold_up_the_next(tmp_path, monkeypatch):
    """It is not tried again when another one is due."""
    monkeypatch.setattr(saving, "RETRY_WAITS_S", (100.0,))
    begun, layout, said = failing(monkeypatch, FULL), Layout(7), []
    c = checkpointer(tmp_path, layout, log=said.append)
    c.save(1, state(layout), {})
    began = time.monotonic()
    c.save(2, state(layout), {})
    c.close()
    assert time.monotonic() - began < 50 and len(begun) == 2 and latest_step(tmp_path) == 2
    assert said[0].endswith(
        f"(1 attempt in 0 s); there is no checkpoint in {tmp_path}; the next save tries again"
    )


def test_a_fault_in_the_program_is_no_failure_of_the_storage(tmp_path, monkeypatch):
    failing(monkeypatch, KeyError("a mistake"))
    layout = Layout(7)
    c = checkpointer(tmp_path, layout)
    c.save(1, state(layout), {})
    with pytest.raises(KeyError, match="a mistake"):
        c.wait()


def test_parameters_alone(saved):
    folder, _ = saved
    layout = Layout(7, stages=1)
    part = lambda state: {"params": state["params"]}
    parameters = restore(
        folder, 5, part(abstract_state(layout)), part(stored_shapes(layout)), layout.placement
    )
    assert_same(parameters, {"params": state(layout)["params"]})


def restore_with(saved, change) -> str:
    """The one-line error of restoring when `change` was made to (abstract state, stored shapes)."""
    folder, layout = saved
    abstract, shapes = abstract_state(layout), stored_shapes(layout)
    change(abstract["params"]["embed"], shapes["params"]["embed"])
    with pytest.raises(CheckpointError) as error:
        restore(folder, 5, abstract, shapes, layout.placement)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_array_is_named(saved):
    def add(abstract, shapes):
        abstract["positions"], shapes["positions"] = abstract["table"], shapes["table"]

    assert "params/embed/positions is not stored; float32[13, 8] is wanted" in restore_with(
        saved, add
    )


def test_an_array_of_another_shape_is_named(saved):
    def shrink(abstract, shapes):
        shapes["table"] = (12, 8)

    assert (
        "params/embed/table is stored as float32[13, 8]; float32[12, 8] is wanted"
        in restore_with(saved, shrink)
    )


def test_an_array_of_another_dtype_is_named(saved):
    def narrow(abstract, shapes):
        t = abstract["table"]
        abstract["table"] = jax.ShapeDtypeStruct(t.shape, jnp.bfloat16, sharding=t.sharding)

    assert (
        "params/embed/table is stored as float32[13, 8]; bfloat16[13, 8] is wanted"
        in restore_with(saved, narrow)
    )


def test_another_number_of_layers_is_named(saved):
    layout = Layout(6)
    with pytest.raises(
        CheckpointError,
        match=r"layers/mlp/w is stored as float32\[7, 8, 16\]; float32\[6, 8, 16\] is wanted",
    ):
        restored(saved[0], 5, layout)


def test_damaged_trees_are_named_in_plain_words(saved):
    folder, layout = saved
    for file in (folder / "5" / "state").glob("**/d/*"):
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"5/state: \S+ cannot be read: its data is damaged$"):
        restored(folder, 5, layout)


def save_of(config: configs.Config, folder, *at: int) -> tuple:
    """The abstract state, its stored shapes and placement of a run of this config, after it has
    saved zeros at these steps."""
    step = make_step(config, small.mesh_of(config))
    abstract = step.abstract_state()
    made = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), abstract)
    shapes = state_module.stored_shapes(step.layout, step.optimizer)
    c = Checkpointer(folder, step.layout.placement, shapes)
    for number in at:
        c.save(number, made, {})
    c.close()
    return abstract, shapes, step.layout.placement


def test_a_state_that_is_cut_off_is_known_without_reading_it(tmp_path):
    # A value of more than 1 KiB lies in a file of its own, which is not the tree's.
    what = save_of(
        small.config((1, 2, 1), changes={"model.mlp_width": 512}).resolve(), tmp_path, 5, 6
    )
    assert choose(tmp_path, {}).step == 6
    file = max(
        (tmp_path / "6" / "state").glob("ocdbt.process_*/d/*"), key=lambda file: file.stat().st_size
    )
    name = file.relative_to(tmp_path / "6")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    choice = choose(tmp_path, {})
    assert choice.step == 5 and latest_step(tmp_path) == 5
    assert re.fullmatch(rf"6 \({name} has [\d,]+ bytes of [\d,]+\)", str(choice)), str(choice)
    with pytest.raises(CheckpointError, match=r"6/state: \S+ cannot be read: its data is damaged$"):
        restore(tmp_path, 6, *what)
    database = epath.Path(tmp_path / "6" / "state")  # by itself, without the manifest
    with pytest.raises(
        manifest.DatabaseError, match=rf"^is cut off: {name} has [\d,]+ bytes of at least [\d,]+$"
    ):
        manifest.read_database(database)
    file.unlink()
    assert str(choose(tmp_path, {})) == f"6 ({name} is missing)"
    with pytest.raises(manifest.DatabaseError, match=f"^has no {name.relative_to('state')}$"):
        manifest.read_database(database)
    (tmp_path / "6" / "manifest.json").unlink()
    assert str(choose(tmp_path, {})) == "6 (it has no manifest.json)"


# --- what is set aside ----------------------------------------------------------------------------


def test_what_has_a_step_s_name_is_set_aside_by_the_first_save(saved):
    """Nothing is lost, nothing is in the way of a save, and whole steps are not deleted for what is
    none."""
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
    assert c.save(6, state(layout), {}) and c.save(7, state(layout), {})
    (folder / "8").mkdir()  # while the run goes on
    assert c.save(8, state(layout), {})
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


@pytest.mark.parametrize(
    "changed",
    [{}, {"train.diloco_inner_steps": 4, "mesh.replica": 2}],
    ids=["synchronous", "apart"],
)
def test_arrays_that_the_config_of_the_meta_does_not_make(tmp_path, changed):
    """Expected without a device, by the config alone: compared with what a run of it stores."""
    config = configs.replace(small.config((1, 2, 1)), changed).resolve()
    save_of(config, tmp_path, 3)
    meta, stored = (
        Meta(configs.to_dict(config)),
        manifest.shapes(manifest.read_database(epath.Path(tmp_path / "3" / "state"))),
    )
    assert expected_shapes(config) == stored
    assert wrong_arrays(meta, stored) == ""
    wider = Meta(configs.to_dict(configs.replace(config, {"model.mlp_width": 99})))
    assert re.fullmatch(
        r"its state's \S+mlp\S+ is \[.*\], not \[.*99.*\]", wrong_arrays(wider, stored)
    )
    assert wrong_arrays(
        Meta(configs.to_dict(configs.replace(config, {"model.biases": True}))), stored
    ).startswith("its state lacks ")


def test_a_state_of_another_placement_is_refused(tmp_path):
    layout = Layout(18, stages=2, chunks=2)
    for other, message in {
        (2, 1): r"\[2, 5, 8, 16\] is not unit 0 of 18 layers over 2 stages × 1 chunk",
        (4, 2): r"\[2, 5, 8, 16\] is not unit 0 of 18 layers over 4 stages × 2 chunks",
        (2, 3): r"\[2, 5, 8, 16\] is not unit 0 of 18 layers over 2 stages × 3 chunks",
    }.items():
        c = Checkpointer(tmp_path / "run", Placement(18, *other), stored_shapes(layout))
        with pytest.raises(ValueError, match=message):
            c.save(1, state(layout), {})
    live, shapes = state(layout), stored_shapes(layout)
    del live["params"]["layers"]["1"], shapes["params"]["layers"]["1"]
    with pytest.raises(
        ValueError,
        match="params/layers/mlp/w: 1 units are not the 2 of 18 layers over 2 stages × 2 chunks",
    ):
        Checkpointer(tmp_path / "run", layout.placement, shapes).save(1, live, {})
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
