"""Each record of an optimizer against optax's own: what it reads, its state, and what an update of
a number depends on."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from jaxtrain.config import OptimizerConfig
from jaxtrain.config.optimizers import OPTIMIZERS, READS

SHAPES = [(5,), (6, 7), (7, 6), (6, 6), (3, 8, 6), (9, 2, 8), (4, 5)]
SETTINGS = OptimizerConfig(factored_size=6)
# of Muon, after `make`: of its directions (training/update/muon.py), and of the rest's rate
AFTERWARDS = {"muon_iterations", "muon_rms", "adamw_learning_rate"}


class Recorder:
    """Settings that say which of them were read."""

    def __init__(self):
        self.names = set()

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(SETTINGS, name)


@pytest.mark.parametrize("record", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_settings_that_it_reads(record):
    recorder = Recorder()
    for one in filter(None, [record, record.rest]):
        optimizer = one.make(jax, optax, recorder)
        one.state((8, 8), recorder)
        array = np.ones((8, 8), np.float32)
        optimizer.update(array, optimizer.init(array), array)
    assert recorder.names - {"names"} == {*record.reads} - AFTERWARDS
    assert {*record.fixed} <= {*record.reads}


def test_every_setting_that_an_optimizer_reads_exists():
    fields = {field.name for field in dataclasses.fields(OptimizerConfig)}
    assert {*READS} <= fields


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("record", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_is_optax_s(record, shape):
    state = record.make(jax, optax, SETTINGS).init({"a": np.ones(shape, np.float32)})
    arrays = [a for a in jax.tree.leaves(state) if a.ndim]
    assert not any(np.any(a) for a in arrays), "an offloaded state begins with zeros"
    sizes = [tuple(shape[d] for d in dims) or (1,) for dims in record.state(shape, SETTINGS)]
    assert [a.shape for a in arrays] == sizes
    assert record.state_numbers(shape, SETTINGS) == sum(a.size for a in arrays)


@pytest.mark.parametrize("record", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_an_update_depends_on(record):
    """With one number of the gradient changed, the updates of the others stay, or do not."""
    optimizer = record.make(jax, optax, SETTINGS)
    random = np.random.default_rng(0)
    params, gradient = ({"a": random.normal(size=(8, 8)).astype(np.float32)} for _ in range(2))
    changed = {"a": gradient["a"].copy()}
    changed["a"][0, 0] *= 30
    updates, others = (
        optimizer.update(g, optimizer.init(params), params)[0]["a"] for g in (gradient, changed)
    )
    same = np.delete(np.ravel(updates == others), 0).all()
    # Muon's updates depend on a matrix when they are orthogonalized, which is after this.
    assert same == (record.elementwise or record.rest is not None)


def test_adam_is_optax_s_but_for_its_rounding():
    random = np.random.default_rng(0)
    ours = OPTIMIZERS["adamw"].make(jax, optax, SETTINGS)
    theirs = optax.scale_by_adam(SETTINGS.b1, SETTINGS.b2, SETTINGS.epsilon)
    state = None
    for _ in range(3):
        gradient = {"a": random.normal(size=(8, 8)).astype(np.float32)}
        state = state or ours.init(gradient)
        (found, after), (expected, of_theirs) = (o.update(gradient, state) for o in (ours, theirs))
        np.testing.assert_allclose(found["a"], expected["a"], rtol=1e-6)
        jax.tree.map(np.testing.assert_array_equal, after, of_theirs)
        state = after


@pytest.mark.parametrize("record", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_first_step_leaves_the_gradient_in_the_momentum(record):
    params = {"a": np.ones((8, 8), np.float32)}
    gradient = {"a": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
    optimizer = record.make(jax, optax, SETTINGS)
    _, state = optimizer.update(gradient, optimizer.init(params), params)
    if record.momentum:
        tree, factor = record.momentum
        found = optax.tree_utils.tree_get(state, tree)["a"] / factor(SETTINGS)
        np.testing.assert_allclose(found, gradient["a"], rtol=1e-6)
    else:
        assert all(a.size < 64 for a in jax.tree.leaves(state)), "a tree may have it: name it"
