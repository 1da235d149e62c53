"""An update whose state is streamed from disk: the training of a run without, number by number, on
several meshes; and checkpoints that do not know of it."""

import jax
import numpy as np
import pytest
from support import small
from support.small import Case

from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.restoring import restore
from jaxtrain.devices.state_file import is_on_disk
from jaxtrain.training.compiled_step import trace
from jaxtrain.training.state import bytes_on_disk, bytes_per_device, initial_state, stored_shapes
from jaxtrain.training.step import make_step
from jaxtrain.training.update import streamed_update

CASES = {"one device": Case((1, 1, 1), microbatches=2)}
MORE = {
    "zero 3, skipped updates": Case(
        (2, 1, 2), changes={"parallel.zero": 3, "train.on_nonfinite": "skip"}
    ),
    "zero 2, interleaved": Case((2, 2, 1), "interleaved", 2, 4, changes={"parallel.zero": 2}),
    "zero 1, model": Case((2, 2, 2), microbatches=4),
    "layers of several forms": Case(
        (2, 2, 1),
        "interleaved",
        2,
        4,
        changes={
            "model.layers": 6,
            "model.pattern": ("full", "wide", "full", "nope", "experts"),
            "model.kinds": ("wide.mlp_width=96", "experts.experts=2"),
        },
    ),
    "masters": Case((2, 2, 1), microbatches=4, changes={"precision.params": "bfloat16"}),
    "zero 0, lion": Case((4, 1, 1), changes={"parallel.zero": 0, "optimizer.name": "lion"}),
    "16-bit parameters and moments": Case(
        (2, 1, 1),
        changes={
            "precision.params": "bfloat16",
            "precision.masters": "none",
            "precision.moments": "bfloat16",
        },
    ),
}
# With the suite's XLA flags LLVM contracts a product and a sum in one kernel and not in another,
# though both have the same operations. At XLA's own level it did so in none of these cases.
SHARED = {
    "model.layers": 5,
    "optimizer.clip_norm": 0.5,
    "parallel.compiler_options": ("xla_backend_optimization_level=3",),
}


def trained(case: Case, folder: str = "", steps: int = 3) -> tuple[list[dict], list[np.ndarray]]:
    """The metrics of some steps, and the arrays of the state after them; with the optimizer's state
    in this folder."""
    disk = {"parallel.offload": "optimizer", "parallel.offload_directory": folder}
    cfg = case.config(SHARED | (disk if folder else {}))
    mesh = small.mesh_of(cfg)
    with jax.set_mesh(mesh):
        step = make_step(cfg, mesh)
        programs = trace(step)()
        file = step.layout.disk
        if file:
            file.open()
        state, metrics = initial_state(step.layout, step.optimizer, 0), []
        for number in range(steps):
            batch = small.place_batch(step, cfg, small.batch(cfg, number))
            state, of_step = programs.take(state, batch)
            metrics.append({name: np.asarray(value) for name, value in of_step.items()})
        leaves = jax.tree.leaves(state, is_leaf=is_on_disk)
        arrays = [np.asarray(a.load() if is_on_disk(a) else a) for a in leaves]
        if file:
            file.close()
    return metrics, arrays


@pytest.mark.parametrize("case", small.named(CASES, MORE))
def test_the_same_training_bit_for_bit(tmp_path, monkeypatch, case):
    """Groups are small, so that a layer has several."""
    monkeypatch.setattr(streamed_update, "GROUP_BYTES", 2**15)
    (metrics, state), (expected, of_plain) = (
        trained((CASES | MORE)[case], folder) for folder in (str(tmp_path), "")
    )
    for of_step, in_plain in zip(metrics, expected, strict=True):
        # the masters' squares are summed layer by layer
        norms = [values.pop("param_norm") for values in (of_step, in_plain)]
        np.testing.assert_allclose(*norms, rtol=2e-7 if case == "masters" else 0)
    assert metrics == expected
    for a, b in zip(state, of_plain, strict=True):
        np.testing.assert_array_equal(a, b)


OTHERS = {
    "adafactor": Case(
        (2, 1, 1), changes={"optimizer.name": "adafactor", "optimizer.factored_size": 4}
    ),
    "muon": Case((2, 1, 2), changes={"optimizer.name": "muon", "parallel.zero": 3}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_others_but_for_the_last_bit(tmp_path, name):
    """Adafactor's means over rows and columns are sums of one layer here, and of a stack in the
    other; Muon's matrices are dealt out layer by layer."""
    case = OTHERS[name]
    (metrics, state), (expected, of_plain) = (trained(case, path) for path in (str(tmp_path), ""))
    for of_step, in_plain in zip(metrics, expected, strict=True):
        assert of_step.keys() == in_plain.keys()
        for name, value in of_step.items():
            np.testing.assert_allclose(value, in_plain[name], rtol=2e-6, err_msg=name)
    for a, b in zip(state, of_plain, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), atol=1e-6 * np.abs(b).max()
        )


def test_checkpoints_do_not_know_of_it(tmp_path):
    """A state on disk is saved block by block, and restored into another file or on devices."""
    case = Case((2, 2, 1), microbatches=4)
    disk = {"parallel.offload": "optimizer", "parallel.offload_directory": str(tmp_path / "disk")}
    configs = case.config(SHARED | disk), case.config(SHARED | disk), case.config(SHARED)
    mesh = small.mesh_of(configs[0])
    with jax.set_mesh(mesh):
        steps = [make_step(cfg, mesh) for cfg in configs]
        first, second, plain = steps
        stored = [stored_shapes(step.layout, step.optimizer) for step in steps]
        for step in (first, second):
            step.layout.disk.open()
        state = first.abstract_state()
        params = jax.tree.map(
            lambda a: jax.device_put(np.full(a.shape, 3, a.dtype), a.sharding),
            plain.abstract_state(),
        )
        for a, like in zip(
            jax.tree.leaves(state, is_leaf=is_on_disk), jax.tree.leaves(params), strict=True
        ):
            if is_on_disk(a):
                a.fill(like)
        filled = jax.tree.map(
            lambda a, like: a if is_on_disk(a) else like, state, params, is_leaf=is_on_disk
        )
        saves = Checkpointer(tmp_path / "steps", stored[0], waits=True)
        assert saves.save(1, filled, {}) and not saves.busy
        saves.wait()
        onto_disk = restore(tmp_path / "steps", 1, second.abstract_state(), stored[1])
        onto_devices = restore(tmp_path / "steps", 1, plain.abstract_state(), stored[2])
        for a, b in zip(
            jax.tree.leaves(onto_disk, is_leaf=is_on_disk),
            jax.tree.leaves(onto_devices),
            strict=True,
        ):
            value = np.asarray(a.load() if is_on_disk(a) else a)
            np.testing.assert_array_equal(value, np.asarray(b))
            assert value.any()
        for step in (first, second):
            step.layout.disk.close()
    on_disk = bytes_on_disk(first.abstract_state())
    whole = bytes_per_device(plain.abstract_state())
    assert bytes_per_device(first.abstract_state()) == whole - on_disk < whole


def test_a_first_state_without_the_file(tmp_path):
    """Op times are measured with such a state: ops read the copies of masters, and all else is in
    memory."""
    disk = {"parallel.offload": "optimizer", "parallel.offload_directory": str(tmp_path)}
    cfg = MORE["masters"].config({"model.layers": 2} | disk)
    step = make_step(cfg, small.mesh_of(cfg))
    read = initial_state(step.layout, step.optimizer, 0).read
    for value, expected in zip(
        jax.tree.leaves(read), jax.tree.leaves(step.abstract_state().read), strict=True
    ):
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
