"""Training with dropout: one seed gives the losses of one device on every layout, and evaluation
drops nothing.

A mask that differed in a few numbers would change a loss by more than 1e-4; sums in another order
change it by 1e-6 at most (tests/support/plain_loop.py).
"""

import collections
import functools
import re

import jax
import numpy as np
import pytest
from support import plain_loop, small
from support.small import Case

from jaxtrain.config import Config
from jaxtrain.training.step import make_step

DROPOUT = {
    "model.dropout_residual": 0.2,
    "model.dropout_attention": 0.1,
    "model.dropout_embedding": 0.1,
}
SHARED = DROPOUT | {"data.batch_size": 8, "data.attend_across_documents": False}
EXPERTS = {"model.experts": 4, "model.dense_layers": 1, "model.mtp_depth": 1, "model.layers": 3}
LATENT = {"model.attention": "mla", "model.kv_rank": 16, "model.rope_head_dim": 4}
KINDS = {
    "model.pattern": ("full", "quiet"),
    "model.kinds": ("quiet.dropout_residual=0", "quiet.dropout_attention=0.3"),
}
WINDOWS = {"model.pattern": ("window", "full"), "model.window": 3}
CASES = {"2 × 2 × 2": Case((2, 2, 2), "zb_h1", changes={"parallel.zero": 3, "model.layers": 2})}
MORE = {
    "4 microbatches": Case((1, 1, 1), microbatches=4),
    "selective": Case((1, 1, 1), changes={"pipeline.remat": "selective"}),
    "everything saved": Case((1, 2, 1), changes={"pipeline.remat": "none"}),
    "interleaved": Case((1, 2, 1), "interleaved", 2),
    "overlapped": Case((1, 2, 1), "dualpipe_v", 2, microbatches=4),
    "context": Case((1, 2, 1), changes={"mesh.context": 2}),
    "ulysses": Case((1, 1, 2), changes={"mesh.context": 2, "parallel.context": "ulysses"}),
    "replica, expert": Case((1, 1, 2), changes={"mesh.replica": 2, "mesh.expert": 2} | EXPERTS),
    "experts on stages": Case((2, 2, 1), changes=EXPERTS),
    "latent": Case((1, 2, 2), changes=LATENT),
    "kinds": Case((2, 2, 1), "zb_h1", changes=KINDS),
    "windows": Case((1, 2, 1), changes=WINDOWS | {"mesh.context": 2}),
    "windows, ulysses": Case(
        (1, 1, 2), changes=WINDOWS | {"mesh.context": 2, "parallel.context": "ulysses"}
    ),
    "vocabulary on the stages": Case((1, 2, 2), changes={"pipeline.vocabulary": "parallel"}),
}


def losses(cfg: Config) -> list[tuple[float, float]]:
    """The losses and gradient norms of three steps."""
    metrics = plain_loop.metrics_of(cfg, [small.batch(cfg, i) for i in range(3)])
    return [(float(of_step["loss"]), float(of_step["grad_norm"])) for of_step in metrics]


on_one_device = functools.cache(losses)


@pytest.mark.parametrize("name", small.named(CASES, MORE))
def test_the_losses_of_one_device(name):
    case = (CASES | MORE)[name]
    model = {path: value for path, value in case.changes.items() if path.startswith("model.")}
    wanted = on_one_device(Case((1, 1, 1), changes=model).config(SHARED))
    np.testing.assert_allclose(losses(case.config(SHARED)), wanted, rtol=2e-6)


def test_evaluation_drops_nothing_and_masks_are_not_saved():
    """The program of an evaluation is that of a model without dropout, and a layer saves what it
    saves there."""
    case = Case((1, 2, 1), changes={"pipeline.remat": "none"})
    texts, slots = [], []
    for changes in (SHARED, SHARED | dict.fromkeys(DROPOUT, 0.0)):
        cfg = case.config(changes)
        step = make_step(cfg, small.mesh_of(cfg))
        with jax.set_mesh(step.mesh):
            state, batch = step.abstract_state(), step.abstract_batch
            texts.append(step.evaluate.lower(state.trained, batch).as_text())
            slots.append(step.slot_bytes())
    assert texts[0] == texts[1]
    assert slots[0] == slots[1]


@pytest.mark.full
def test_masks_cost_no_collectives():
    counts = []
    for changes in (SHARED, SHARED | dict.fromkeys(DROPOUT, 0.0)):
        cfg = Case((2, 2, 2), "zb_h1").config(changes)
        step = make_step(cfg, small.mesh_of(cfg))
        with jax.set_mesh(step.mesh):
            program = step.train.lower(step.abstract_state(), step.abstract_batch).compile()
        found = re.findall(r" (all-\w+|reduce-scatter|collective-permute)\(", program.as_text())
        counts.append(collections.Counter(found))
    assert counts[0] == counts[1] and counts[0]
