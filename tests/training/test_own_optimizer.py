"""An optimizer of one's own, in a file: AdamW written by a user makes the updates of the one that
jaxtrain has, bit for bit, on every layout; and what does not fit is one line."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import plain_loop, small
from support.small import Case

from jaxtrain import config as configs
from jaxtrain.checkpoint.restoring import expected_shapes, wrong_arrays
from jaxtrain.checkpoint.steps import Meta
from jaxtrain.config import Config, ConfigError
from jaxtrain.models.spec import Spec
from jaxtrain.training.update.optimizer import Optimizer, check_own_optimizer

FILE = '''
import functools
from jaxtrain.config.optimizers import OptimizerRecord, copies


def adam(jax, optax, settings):
    """Kingma & Ba 2015, algorithm 1, with the corrections as factors."""
    def init(params):
        zeros = jax.tree.map(jax.numpy.zeros_like, params)
        return optax.ScaleByAdamState(jax.numpy.zeros((), jax.numpy.int32), zeros, zeros)

    def update(gradients, state, params=None):
        moments = optax.scale_by_adam(settings.b1, settings.b2, settings.epsilon)
        new = moments.update(gradients, state, params)[1]
        step = lambda m, v: m * (1 / (1 - settings.b1**new.count)) / (
            jax.numpy.sqrt(v * (1 / (1 - settings.b2**new.count))) + settings.epsilon
        )
        return jax.tree.map(step, new.mu, new.nu), new

    return optax.GradientTransformation(init, update)


def record(make, arrays):
    return OptimizerRecord(
        "mine", "adam", make=make, reads=dict.fromkeys(("b1", "b2", "epsilon"), "as of adamw"),
        state=functools.partial(copies, arrays), passes=3, momentum=("mu", lambda s: 1 - s.b1),
    )


MINE = record(adam, 2)
FEWER = record(adam, 1)
RAISES = record(lambda jax, optax, settings: optax.absent(), 0)
'''
WRONG = {
    "FEWER": "has a state of [(256, 384), (256, 384)] for a parameter of (256, 384), and its "
    "record says [(256, 384)]",
    "RAISES": "raises AttributeError: module 'optax' has no attribute 'absent'",
}
LAYOUTS = {
    "2 × 2 × 2, zero 3": Case((2, 2, 2), changes={"parallel.zero": 3}),
    "data 4, zero 0": Case((4, 1, 1), changes={"parallel.zero": 0}),
    "offload": Case((2, 1, 1), changes={"parallel.offload": "optimizer"}),
}


@pytest.fixture
def own(tmp_path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return f"{tmp_path}/mine.py"


def settings(name: str):
    return configs.replace(Config(), {"optimizer.name": name}).optimizer


def test_the_updates_of_adamw(own):
    specs = {"a": Spec((3, 5), ("width", "width"), std=1.0), "b": Spec((4,), ("width",))}
    random = np.random.default_rng(0)
    draw = lambda: {
        name: jnp.asarray(random.normal(size=s.shape), jnp.float32) for name, s in specs.items()
    }
    first, gradients, results = draw(), [draw() for _ in range(3)], []
    for name in ("adamw", f"{own}:MINE"):
        optimizer = Optimizer(settings(name), 10, specs)
        params, state = first, optimizer.init(first)
        update = jax.jit(optimizer.update)
        for gradient in gradients:
            updated = update(gradient, state, params)
            params, state = updated.params, updated.state
        results.append((params, state))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("name", WRONG)
def test_one_line_about_a_record_that_does_not_fit(own, name):
    with pytest.raises(ConfigError) as error:
        check_own_optimizer(settings(f"{own}:{name}"))
    text = f"optimizer.name='{own}:{name}' {WRONG[name]}: use adamw or another record"
    assert str(error.value) == text
    check_own_optimizer(settings(f"{own}:MINE"))


def test_a_checkpoint_is_used_without_its_optimizer(own):
    """Generation and conversion read parameters alone, on a machine that may lack the file."""
    config = configs.replace(small.SMALL, {"mesh.data": 1, "optimizer.name": f"{own}:MINE"})
    meta = Meta(configs.to_dict(config.to_store()))
    shapes = expected_shapes(meta.stored_config())
    os.remove(own)
    assert wrong_arrays(meta, shapes, trained_alone=True) == ""


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_losses_of_adamw(own, layout):
    losses = []
    for name in ("adamw", f"{own}:MINE"):
        cfg = LAYOUTS[layout].config({"optimizer.name": name})
        metrics = plain_loop.metrics_of(cfg, [small.batch(cfg, i) for i in range(3)])
        losses.append([(float(m["loss"]), float(m["param_norm"])) for m in metrics])
    assert losses[0] == losses[1]
