"""Updates whose loss or gradients are not finite: skipped, they leave the state bit for bit as if
their batch had not been."""

import dataclasses

import jax
import numpy as np
import pytest
from support import plain_loop, small
from support.small import Case

from jaxtrain import config as configs
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step, make_step

SKIP = {"train.on_nonfinite": "skip"}
OFFLOAD = {"parallel.zero": 2, "parallel.offload": "optimizer", "model.layers": 2}
EXPERTS = {"model.experts": 4, "model.expert_width": 16, "mesh.expert": 2}
ADAFACTOR = {"optimizer.name": "adafactor", "optimizer.factored_size": 16}
CASES = {"data 2, zero 2, offload, adafactor": Case((2, 1, 1), changes=OFFLOAD | ADAFACTOR)}
MORE = {
    "data 2, zero 2, offload": Case((2, 1, 1), changes=OFFLOAD),
    "data 2, stage 2, zero 3, adafactor": Case(
        (2, 2, 1), changes=ADAFACTOR | {"parallel.zero": 3, "model.layers": 3}
    ),
    "data 2, model 2, zero 3, muon": Case(
        (2, 1, 2), changes={"optimizer.name": "muon", "parallel.zero": 3, "model.layers": 2}
    ),
    "data 2, model 2, lion": Case((2, 1, 2), changes={"optimizer.name": "lion"}),
    "data 2, zero 2, offload, experts": Case((2, 1, 1), changes=OFFLOAD | EXPERTS),
    "one device": Case((1, 1, 1)),
    "data 2, stage 2": Case((2, 2, 1)),
    "data 2, stage 2, zero 3": Case((2, 2, 1), "interleaved", 2, 4, {"parallel.zero": 3}),
    "data 2, model 2, zero 3 by steps": Case(
        (2, 1, 2), changes={"parallel.zero": 3, "parallel.gather": "step"}
    ),
    "stage 2, shared vocabulary, zero 0": Case(
        (1, 2, 1), "zb_h1", changes={"parallel.zero": 0, "pipeline.vocabulary": "parallel"}
    ),
    "context 2, replica 2": Case((1, 1, 1), changes={"mesh.context": 2, "mesh.replica": 2}),
}
APART = Case(
    (2, 1, 1), changes={"mesh.replica": 2, "train.diloco_inner_steps": 100, "model.layers": 2}
)


def compiled(case: Case):
    cfg = case.config(SKIP | small.PLAIN_LAYER)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        return (
            cfg,
            step,
            step.train.lower(step.abstract_state(), step.abstract_batch).compile(),
        )


def spoiled(arrays: dict, rows: slice = slice(0, 1)) -> dict:
    """A batch whose rows have a weight that is not a number."""
    weights = arrays["weights"].copy()
    weights[rows, 3] = np.nan
    return arrays | {"weights": weights}


def train(cfg, step: Step, program, batches: list[dict]) -> tuple[list[TrainState], list]:
    """The states after each of these batches, on the host, and their metrics."""
    with jax.set_mesh(step.mesh):
        state, states, metrics = small.first_state(step, plain_loop.weights(cfg)), [], []
        for arrays in batches:
            state, results = program(state, small.place_batch(step, cfg, arrays))
            states.append(jax.tree.map(np.array, jax.device_get(state)))
            metrics.append(jax.device_get(results))
    return states, metrics


def assert_same_bits(found, expected) -> None:
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)


@pytest.mark.parametrize("case", small.named(CASES, MORE))
def test_a_skipped_update_leaves_nothing(case):
    cfg, step, program = compiled((CASES | MORE)[case])
    first, second = small.batch(cfg, 1), small.batch(cfg, 2)
    (before, after, last), metrics = train(cfg, step, program, [first, spoiled(first), second])
    (_, without), plain = train(cfg, step, program, [first, second])
    assert np.isnan(metrics[1]["loss"]) and [int(m["skipped"]) for m in metrics] == [0, 1, 1]
    assert [int(state.step) for state in (before, after, last)] == [1, 2, 3]
    assert_same_bits(dataclasses.replace(after, step=before.step), before)
    assert_same_bits(dataclasses.replace(last, step=without.step), without)
    # The learning rate goes by updates, and so does what is said of it.
    assert (
        metrics[2]["learning_rate"] == plain[1]["learning_rate"]
        and metrics[2]["loss"] == plain[1]["loss"]
    )
    assert any(
        (a != b).any()
        for a, b in zip(jax.tree.leaves(last.params), jax.tree.leaves(after.params), strict=True)
    )


@pytest.mark.full
def test_a_replica_that_trains_apart_skips_its_own():
    cfg, step, program = compiled(APART)
    first, second = small.batch(cfg, 1), small.batch(cfg, 2)
    # the first replica's rows
    half = (
        np.arange(cfg.data.batch_size).reshape(cfg.pipeline.microbatches, 2, -1)[:, 0].reshape(-1)
    )
    (before, after), metrics = train(cfg, step, program, [first, spoiled(second, half)])
    (_, clean), _ = train(cfg, step, program, [first, second])
    assert np.isnan(metrics[1]["loss"][0]) and np.isfinite(metrics[1]["loss"][1])
    assert metrics[1]["skipped"].tolist() == [1, 0]
    of = lambda state, replica: jax.tree.map(lambda a: a[replica], (state.params, state.optimizer))
    assert_same_bits(of(after, 0), of(before, 0))
    assert_same_bits(of(after, 1), of(clean, 1))


def test_a_run_that_stops_has_no_guard_in_its_program():
    """Reads the program as it is lowered: nothing of it is compiled."""
    cfg = Case((1, 1, 1)).config(small.PLAIN_LAYER)
    texts = []
    for choice in ("stop", "skip"):
        changed = configs.replace(cfg, {"train.on_nonfinite": choice}).resolve()
        step = make_step(changed, small.mesh_of(changed))
        with jax.set_mesh(step.mesh):
            texts.append(step.train.lower(step.abstract_state(), step.abstract_batch).as_text())
    assert "is_finite" not in texts[0] and "is_finite" in texts[1]
