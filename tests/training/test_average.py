"""The average of the parameters (`optimizer.ema_decay`) in a step's programs, in memory, and in
checkpoints of several meshes. Each average is bit for bit the formula in numpy's float32, which
rounds the product and the sum one after the other, so all programs have the same."""

import dataclasses

import jax
import numpy as np
import pytest
from support import small
from support.small import Case

from jaxtrain import config as configs
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.restoring import restore
from jaxtrain.checkpoint.steps import Meta
from jaxtrain.training.state import TrainState, initial_state, stored_shapes
from jaxtrain.training.step import Step, make_step

DECAY = 0.9
AVERAGED = {
    "optimizer.ema_decay": DECAY,
    "train.eval_ema": True,
    "train.on_nonfinite": "skip",
    "model.layers": 2,
    **small.PLAIN_LAYER,
}
SAMPLE = Case((2, 1, 1), changes={"model.layers": 1})
MORE = {
    "data 2, stage 2, model 2": Case((2, 2, 2)),
    "zero 3": Case((4, 1, 1), changes={"parallel.zero": 3}),
    "adafactor": Case((2, 1, 1), changes={"optimizer.name": "adafactor"}),
    "muon": Case((2, 2, 1), changes={"optimizer.name": "muon"}),
    "masters on the host": Case(
        (2, 2, 1), changes={"precision.params": "bfloat16", "parallel.offload": "optimizer"}
    ),
    "16 bits alone": Case(
        (2, 1, 1), changes={"precision.params": "bfloat16", "precision.masters": "none"}
    ),
    "experts with biases": Case(
        (2, 1, 1),
        changes={"model.experts": 4, "model.experts_per_token": 2, "model.balance_rate": 0.01},
    ),
}


def numbers(step: Step, tree: dict) -> dict:
    return jax.tree.map(np.float32, small.to_plain(step.layout, tree))


def check_steps(case: Case) -> None:
    """After each step, the third of which is skipped, the average is that of all parameters so
    far; it is evaluated in their place."""
    cfg = case.config(AVERAGED)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        state = initial_state(step.layout, step.optimizer, 0)
        average = numbers(step, state.params)
        exact = jax.tree.map(np.float64, average)
        jax.tree.map(np.testing.assert_array_equal, numbers(step, state.ema), average)
        for index in range(4):
            batch = small.batch(cfg, index + 1)
            if index == 2:
                batch["weights"][0, 3] = np.nan
            state, _ = step.train(state, small.place_batch(step, cfg, batch))
            if index != 2:
                params = numbers(step, state.params)
                moved = lambda e, p: e + np.float32(1 - DECAY) * (p - e)
                average = jax.tree.map(moved, average, params)
                exact = jax.tree.map(lambda e, p: DECAY * e + (1 - DECAY) * p, exact, params)
            found = numbers(step, state.ema)
            jax.tree.map(np.testing.assert_array_equal, found, average)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, exact)
        batch = small.place_batch(step, cfg, small.batch(cfg, 1))
        losses = [float(step.evaluate(p, batch).loss) for p in (state.trained, state.params)]
    assert state.trained is state.ema and abs(losses[0] - losses[1]) > 1e-6


def test_the_average_of_a_sample():
    check_steps(SAMPLE)


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_the_average_on(name):
    check_steps(MORE[name])


@pytest.mark.full
def test_several_steps_in_one_program_move_it_as_single_ones():
    case = Case((2, 2, 1), "zb_h2", 1, 3, {"pipeline.steps_per_program": 2})
    cfg = case.config(AVERAGED | {"optimizer.clip_norm": 100.0})
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        compiled = step.lower().compile()
        of_each = []
        for alone in (0, 2):
            state = initial_state(step.layout, step.optimizer, 0)
            batches = tuple(small.place_batch(step, cfg, small.batch(cfg, i)) for i in (1, 2))
            state, _ = compiled(state, batches, np.int32(alone))
            of_each.append(numbers(step, state.ema))
    jax.tree.map(np.testing.assert_array_equal, *of_each)


# --- checkpoints ----------------------------------------------------------------------------------


def step_of(case: Case, changes: dict) -> Step:
    cfg = case.config(AVERAGED | changes)
    return make_step(cfg, small.mesh_of(cfg))


def test_a_checkpoint_moves_to_another_mesh_and_one_without_average_begins_it(tmp_path):
    case = Case((2, 1, 1))
    saved = step_of(case, {})
    shapes = saved.abstract_state()
    filled = lambda tree, seed: jax.tree.map(
        lambda a: jax.device_put(small.normal(seed, *a.shape).astype(a.dtype), a.sharding), tree
    )
    state = dataclasses.replace(filled(shapes, 0), ema=filled(shapes.ema, 1))
    for number, decay in ((1, DECAY), (2, 0.0)):
        config = configs.replace(case.config(AVERAGED), {"optimizer.ema_decay": decay})
        stored = stored_shapes(saved.layout, saved.optimizer)
        kept = state
        if not decay:
            stored, kept = (dataclasses.replace(each, ema=None) for each in (stored, state))
        saves = Checkpointer(tmp_path, stored)
        saves.save(number, kept, dataclasses.asdict(Meta(configs.to_dict(config), step=number)))
        saves.close()
    other = step_of(Case((1, 2, 1)), {"parallel.zero": 0})
    stored = stored_shapes(other.layout, other.optimizer)
    before = [small.to_plain(saved.layout, tree) for tree in (state.ema, state.params)]
    for number, expected in zip((1, 2), before, strict=True):
        restored: TrainState = restore(tmp_path, number, other.abstract_state(), stored)
        found = small.to_plain(other.layout, restored.ema)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
