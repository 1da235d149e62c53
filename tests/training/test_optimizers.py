"""Optimizers on meshes against optax on one device, whose parameters are separate arrays
(plain_loop.py): losses, first gradients, and the parameters after some steps."""

import dataclasses

import jax
import numpy as np
import pytest
from support import plain_loop, small
from support.small import Case

from jaxtrain.config.optimizers import OPTIMIZERS

EXPERTS = {"model.experts": 4, "model.experts_per_token": 2, "model.expert_width": 24}
LAYOUTS = {
    "ZeRO 3, padded stacks and vocabulary": Case(
        (2, 2, 2), "1f1b", 1, 2, changes={"model.layers": 3, "parallel.zero": 3}
    ),
    "ZeRO 2, interleaved": Case(
        (2, 2, 1), "interleaved", 2, 4, changes={"parallel.zero": 2, "mesh.context": 2}
    ),
    "ZeRO 1, experts": Case(
        (2, 1, 1), changes=EXPERTS | {"mesh.expert": 4, "model.tied_embeddings": True}
    ),
    "ZeRO 0, replicas": Case((1, 1, 2), changes={"mesh.replica": 4, "parallel.zero": 0}),
    "offload": Case((4, 2, 1), changes={"parallel.offload": "optimizer", "model.layers": 4}),
}
SETTINGS = {
    "lion": {"optimizer.b2": 0.99, "optimizer.learning_rate": 3e-4},
    # matrices of 16 and more are factored; those of the vocabulary's 61 rows, padded, too
    "adafactor": {"optimizer.factored_size": 16, "optimizer.learning_rate": 3e-2},
}
CASES = {f"{name}: {layout}": (name, layout) for name in SETTINGS for layout in LAYOUTS}
DEFAULT = [
    "lion: ZeRO 2, interleaved",
    "adafactor: ZeRO 3, padded stacks and vocabulary",
]


@pytest.mark.parametrize("case", small.named(DEFAULT, sorted({*CASES} - {*DEFAULT})))
def test_optimizer_on_a_mesh(case):
    name, layout = CASES[case]
    cfg = LAYOUTS[layout].config(
        {"optimizer.name": name, "optimizer.clip_norm": plain_loop.CLIP, **SETTINGS[name]}
        | small.PLAIN_LAYER
    )
    expected, got = plain_loop.reference(cfg), plain_loop.train(cfg)
    if not OPTIMIZERS[name].momentum:
        first = plain_loop.gradients(cfg)
        got = dataclasses.replace(got, gradients=first.gradients)
    plain_loop.assert_same(got, expected)
    before = plain_loop.weights(cfg)
    for path, changed in jax.tree_util.tree_leaves_with_path(got.params):
        want, start = (
            dict(jax.tree_util.tree_leaves_with_path(tree))[path]
            for tree in (expected.params, before)
        )
        moved = np.abs(want - start).max()
        # A sign turns where a gradient is rounding alone.
        wrong = np.abs(changed - want) > 2e-3 * moved + 1e-6
        assert wrong.mean() < (0.02 if name == "lion" else 1e-9), jax.tree_util.keystr(path)
