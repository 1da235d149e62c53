"""What a restored state is, and what is said of one that cannot be restored. Round trips between
layouts: test_manager.py; damage: test_damage.py."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from support import small
from support.checkpoint_state import (
    Layout,
    abstract_state,
    assert_same,
    latest_step,
    restored,
    state,
    stored_shapes,
)

from jaxtrain import config as configs
from jaxtrain.checkpoint import manifest
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.restoring import expected_shapes, restore, wrong_arrays
from jaxtrain.checkpoint.steps import CheckpointError, Meta, choose
from jaxtrain.config.groups.layer_kinds import forms_of_layers
from jaxtrain.models.transformer import build
from jaxtrain.schedule.placement import Placement
from jaxtrain.training import state as state_module
from jaxtrain.training.parameter_layout import ParameterLayout
from jaxtrain.training.step import make_step
from jaxtrain.training.update.optimizer import Optimizer


def test_a_restored_state_can_be_donated(saved):
    folder, layout = saved
    numbers = restored(folder, 5, layout)
    expected = jax.tree.map(lambda x: np.asarray(x) + 1, state(layout))
    got = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(numbers)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_parameters_alone(saved):
    folder, _ = saved
    layout = Layout(7, stages=1)
    part = lambda state: {"params": state["params"]}
    parameters = restore(folder, 5, part(abstract_state(layout)), part(stored_shapes(layout)))
    assert_same(parameters, {"params": state(layout)["params"]})


def restore_with(saved, change) -> str:
    """The one-line error of restoring when `change` was made to (abstract state, stored shapes)."""
    folder, layout = saved
    abstract, shapes = abstract_state(layout), stored_shapes(layout)
    change(abstract["params"]["embed"], shapes["params"]["embed"])
    with pytest.raises(CheckpointError) as error:
        restore(folder, 5, abstract, shapes)
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
        shapes["table"] = state_module.Stored((12, 8))

    assert (
        "params/embed/table is stored as float32[13, 8]; float32[12, 8] is wanted"
        in restore_with(saved, shrink)
    )


def test_an_array_of_another_dtype_is_named(saved):
    def of_integers(abstract, shapes):
        t = abstract["table"]
        abstract["table"] = jax.ShapeDtypeStruct(t.shape, jnp.int32, sharding=t.sharding)

    assert "params/embed/table is stored as float32[13, 8]; int32[13, 8] is wanted" in restore_with(
        saved, of_integers
    )


def test_parameters_of_32_bits_are_read_as_the_nearest_of_16(saved):
    folder, layout = saved
    exact = restored(folder, 5, layout)["params"]["embed"]["table"]
    abstract, shapes = abstract_state(layout), stored_shapes(layout)
    table = abstract["params"]["embed"]["table"]
    abstract["params"]["embed"]["table"] = jax.ShapeDtypeStruct(
        table.shape, jnp.bfloat16, sharding=table.sharding
    )
    narrow = restore(folder, 5, abstract, shapes)["params"]["embed"]["table"]
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, np.asarray(exact).astype(jnp.bfloat16))


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


def save_of(config: configs.Config, folder, *at: int, values=np.zeros) -> tuple:
    """The abstract state and its stored shapes, of a run of this config, after it has saved
    `values`, of a shape and a dtype, at these steps."""
    step = make_step(config, small.mesh_of(config))
    abstract = step.abstract_state()
    made = jax.tree.map(lambda a: jax.device_put(values(a.shape, a.dtype), a.sharding), abstract)
    shapes = state_module.stored_shapes(step.layout, step.optimizer)
    c = Checkpointer(folder, shapes)
    for number in at:
        c.save(number, made, {})
    c.close()
    return abstract, shapes


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
        manifest.read_database(epath.Path(tmp_path / "3" / "state")).shapes,
    )
    assert expected_shapes(config) == stored
    assert wrong_arrays(meta, stored) == ""
    wider = Meta(configs.to_dict(configs.replace(config, {"model.mlp_width": 99})))
    assert re.fullmatch(
        r"its state's \S+mlp\S+ is \[.*\], not \[.*99.*\]", wrong_arrays(wider, stored)
    )
    assert wrong_arrays(
        Meta(configs.to_dict(configs.replace(config, {"model.biases": ("mlp",)}))), stored
    ).startswith("its state lacks ")
    of_experts = {"model.experts": 4, "model.experts_per_token": 1, "model.dense_layers": 2_000_000}
    for many in (of_experts, {"model.mtp_depth": 2_000_000}):  # no tree is made for them
        deep = Meta(configs.to_dict(configs.replace(config, many)))
        assert "fewer arrays" in wrong_arrays(deep, stored)
    group = "anchor" if changed else "params"
    more = {"optimizer/0/mu/head/scale": (3,), f"{group}/head/scale": (3,)}
    line = (
        f"its state has {group}/head/scale, which its config's model does not have in this jaxtrain"
    )
    assert wrong_arrays(meta, {**stored, **more}) == line
    assert wrong_arrays(meta, {**stored, **more}, trained_alone=True) == line
    del more[f"{group}/head/scale"]
    assert "has optimizer/0/mu/head/scale" in wrong_arrays(meta, {**stored, **more})
    assert wrong_arrays(meta, {**stored, **more}, trained_alone=True) == ""  # moments are not used


@pytest.mark.parametrize("name", ["lion", "adafactor", "muon"])
def test_the_state_of_every_optimizer_on_another_mesh(tmp_path, name):
    """Saved with padded stacks and vocabulary, restored on another mesh and saved there: the same
    arrays, bit for bit, as the first save has."""
    random = np.random.default_rng(3)
    draw = lambda shape, dtype: np.asarray(random.normal(size=shape) * 9, dtype)
    changes = {"optimizer.name": name, "optimizer.factored_size": 16, "model.layers": 3}
    on = lambda mesh, zero: small.config(mesh, changes=changes | {"parallel.zero": zero}).resolve()
    one, other = on((1, 1, 1), 0), on((2, 1, 4), 2)
    save_of(on((2, 2, 2), 3), tmp_path / "first", 1, values=draw)
    second = save_of(other, tmp_path / "second")
    state = restore(tmp_path / "first", 1, *second)
    c = Checkpointer(tmp_path / "second", second[1])
    c.save(1, state, {})
    c.close()
    alone = save_of(one, tmp_path / "none")
    first, again = (restore(tmp_path / folder, 1, *alone) for folder in ("first", "second"))
    assert_same(again, first)
    assert any(np.any(a) for a in jax.tree.leaves(first.optimizer))
    assert (
        expected_shapes(one)
        == manifest.read_database(epath.Path(tmp_path / "second" / "1" / "state")).shapes
    )


# --- layers of several forms ----------------------------------------------------------------------

# three forms, of which some units have one alone; a window changes no form
FORMS = {
    "model.layers": 7,
    "model.pattern": ("wide", "window", "dense", "full", "dense"),
    "model.kinds": ("wide.mlp_width=32",),
    "model.window": 4,
    "model.width": 16,
    "model.heads": 2,
    "model.mlp_width": 16,
    "model.experts": 2,
}
FORM_LAYOUTS = {  # data, stages, ZeRO's stage, the stage and the layers of each unit
    "one device": (1, 1, 0, (0,), (7,)),
    "v, zero 3": (2, 2, 3, (0, 1, 1, 0), (1, 2, 2, 2)),
    "uneven": (1, 4, 1, (0, 1, 2, 3), (0, 3, 3, 1)),
}


def state_of_forms(name: str) -> tuple[ParameterLayout, Optimizer, state_module.TrainState]:
    """A state in a layout. Its moments are its parameters, which tell layers and names apart."""
    data, stages, zero, stage_of, sizes = FORM_LAYOUTS[name]
    cfg = small.config((data, stages, 1), changes=FORMS)
    forms = forms_of_layers(cfg.model)
    placement = Placement(7, stages, 1, stage_of, sizes, forms)
    layout = ParameterLayout(
        build(cfg.model), placement, small.mesh_of(cfg), zero, optimizer=cfg.optimizer
    )
    optimizer = Optimizer(cfg.optimizer, 10, layout.specs)
    numbers = state_module.initial_state(layout, optimizer, 0)
    moments = jax.device_put(numbers.params, layout.scattered)
    with_moments = optax.tree_utils.tree_set(numbers.optimizer, mu=moments, nu=moments)
    return layout, optimizer, dataclasses.replace(numbers, optimizer=with_moments)


def test_layers_of_several_forms_move_between_layouts(tmp_path):
    """Initial values are those of one device, and a state that is saved on one layout is, bit for
    bit, that of each other."""
    states = {name: state_of_forms(name) for name in FORM_LAYOUTS}
    one, _, first = states["one device"]
    assert {name: len(tree) for name, tree in one.specs["layers"].items()} == {"0": 3}
    plain = small.to_plain(one, first.params)
    assert set(plain["layers"]) == {"wide", "window", "dense"}
    assert plain["layers"]["wide"]["mlp"]["up"].shape == (2, 2, 16, 32)
    for name, (layout, optimizer, numbers) in states.items():
        got = small.to_plain(layout, numbers.params)
        jax.tree.map(np.testing.assert_array_equal, got, plain)
        again = small.from_plain(layout, plain)
        assert_same(again, numbers.params)
        saver = Checkpointer(tmp_path / name, state_module.stored_shapes(layout, optimizer))
        assert saver.save(1, numbers.stored, {})
        saver.close()
    for layout, optimizer, numbers in states.values():
        stored = state_module.stored_shapes(layout, optimizer)
        abstract = state_module.abstract_state(layout, optimizer)
        for name in FORM_LAYOUTS:
            assert_same(restore(tmp_path / name, 1, abstract, stored), numbers)


def test_a_form_has_its_own_arrays_in_a_checkpoint():
    arrays = expected_shapes(small.config(changes=FORMS | {"optimizer.name": "adafactor"}))
    assert arrays["params/layers/wide/attention_norm/scale"] == (2, 16)
    assert arrays["params/layers/window/mlp/up"] == (3, 2, 16, 16)
    assert arrays["params/layers/dense/mlp/up/weight"] == (2, 16, 16)
    # of kinds that have equal parameters, as a model of one kind
    equal = {"model.layers": 7, "model.pattern": ("window", "full"), "model.window": 4}
    assert expected_shapes(small.config(changes=equal)) == expected_shapes(
        small.config(changes={"model.layers": 7})
    )
