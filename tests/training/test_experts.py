"""Experts over the `expert` axis, alone and with the others: the same training as on one device,
the same choices, the same drops."""

import dataclasses

import jax
import numpy as np
import pytest
from support import plain_loop, small
from support.small import Case

from jaxtrain.training.step import make_step

MOE = {
    "model.experts": 4,
    "model.expert_width": 32,
    "model.balance_loss": 0.01,
    "model.balance_rate": 0.003,
    "optimizer.clip_norm": plain_loop.CLIP,
    "data.batch_size": 32,
}
SEVERAL = {
    "model.dense_layers": 2,
    "model.pattern": ("full", "nope", "nope", "full", "full", "full"),
    "model.shared_experts": 2,
    "model.router": "sigmoid",
    "model.router_scale": 2.0,
    "model.z_loss": 0.01,
    "model.biases": ("out", "router"),
}
GROUPS = {
    "model.experts": 9,
    "model.router_groups": 3,
    "model.router_group_limit": 2,
    "data.batch_size": 24,
}
V2 = {"model.router_group_best": 1, "model.router_normalize": "never"}  # as in DeepSeek-V2
TWO_STEPS = {
    "mesh.expert": 4,
    "model.experts": 8,
    "model.experts_per_token": 3,
    "model.layers": 2,
    "parallel.expert_nodes": 2,
}
OF_NODES = {"model.router_groups": 4, "model.router_group_limit": 2}
CASES = {
    "two steps, groups, an odd number of tokens": Case(
        (1, 2, 1),
        "zb_h1",
        1,
        changes={
            **TWO_STEPS,
            **OF_NODES,
            "pipeline.remat": "selective",
            "data.sequence_length": 13,
            "data.batch_size": 16,
        },
    ),
    "drops": Case(
        (1, 1, 1),
        changes={"mesh.expert": 2, "model.capacity_factor": 0.7, "model.biases": ("router",)},
    ),
}
MORE = {
    "a gate of the shared experts, biases, in B and W": Case(
        (1, 2, 2),
        "zb_h1",
        1,
        changes={
            "mesh.expert": 2,
            "model.layers": 2,
            "data.batch_size": 16,
            "pipeline.remat": "none",
            "model.shared_experts": 1,
            "model.shared_gate": True,
            "model.activation": "clamped_swiglu",
            "model.activation_limit": 0.2,
            "model.biases": ("experts", "mlp", "router"),
        },
    ),
    "biases, data 2, zero 3, selective": Case(
        (2, 1, 1),
        changes={
            "mesh.expert": 2,
            "parallel.zero": 3,
            "pipeline.remat": "selective",
            "model.shared_experts": 1,
            "model.shared_gate": True,
            "model.norm_place": "both",
            "model.biases": ("experts",),
        },
    ),
    "biases, drops, zero 2, a parallel block, two steps": Case(
        (1, 2, 1),
        "zb_v",
        2,
        changes={
            **TWO_STEPS,
            "model.layers": 4,
            "parallel.zero": 2,
            "model.parallel_block": True,
            "model.activation": "geglu",
            "model.biases": ("experts", "out"),
        },
    ),
    "biases, capacity, model 2": Case(
        (1, 1, 2),
        changes={
            "mesh.expert": 2,
            "model.capacity_factor": 0.7,
            "model.activation": "gelu",
            "model.biases": ("experts",),
            "model.norm_place": "after",
        },
    ),
    "two steps, model 2, shared experts": Case(
        (1, 1, 2), changes={**TWO_STEPS, "model.experts_per_token": 2, "model.shared_experts": 1}
    ),
    "two steps to 4 nodes, groups, context": Case(
        (1, 1, 1),
        changes={
            **TWO_STEPS,
            **OF_NODES,
            "model.experts": 16,
            "mesh.expert": 8,
            "parallel.expert_nodes": 4,
        },
    ),
    "two steps, context, one choice": Case(
        (1, 1, 1), changes={**TWO_STEPS, "mesh.context": 2, "model.experts_per_token": 1}
    ),
    "two steps, data 2, zero 3, room for some": Case(
        (2, 1, 1), changes={**TWO_STEPS, "parallel.zero": 3, "model.expert_room": 3.5}
    ),
    "two steps, zb_v, an expert on each device, none": Case(
        (1, 2, 1),
        "zb_v",
        2,
        changes={
            **TWO_STEPS,
            "model.layers": 4,
            "model.experts": 4,
            "pipeline.remat": "none",
            **SEVERAL,
        },
    ),
    "two steps, overlapped": Case(
        (1, 2, 1),
        "dualpipe_v",
        2,
        changes={
            **TWO_STEPS,
            "model.layers": 4,
            "model.shared_experts": 1,
            "pipeline.overlap": True,
            "pipeline.remat": "none",
        },
    ),
    "drops, all at once, zb_h1, zero 2": Case(
        (2, 2, 1),
        "zb_h1",
        1,
        changes={
            "mesh.expert": 2,
            "pipeline.remat": "none",
            "parallel.zero": 2,
            "model.capacity_factor": 0.7,
            **SEVERAL,
        },
    ),
    "room for some, context, zero 2": Case(  # fewer rows than there can be, and none dropped
        (1, 2, 1),
        "zb_h1",
        changes={
            "mesh.expert": 2,
            "mesh.context": 2,
            "pipeline.remat": "selective",
            "parallel.zero": 2,
            "model.expert_room": 1.95,
        },
    ),
    "context, groups": Case((1, 1, 1), changes={"mesh.expert": 3, "mesh.context": 2, **GROUPS}),
    "drops, context, zb_h1": Case(
        (1, 2, 1),
        "zb_h1",
        1,
        changes={
            "mesh.expert": 2,
            "mesh.context": 2,
            "pipeline.remat": "none",
            "model.capacity_factor": 0.7,
        },
    ),
    "zb_v, zero 2, all at once": Case(
        (2, 2, 1),
        "zb_v",
        2,
        changes={"mesh.expert": 2, "pipeline.remat": "selective", "parallel.zero": 2, **SEVERAL},
    ),
    "alone": Case((1, 1, 1), changes={"mesh.expert": 2}),
    "no normalization, one best of a group": Case(
        (1, 1, 1), changes={"mesh.expert": 3, **GROUPS, **V2}
    ),
    "model 2": Case((1, 1, 2), changes={"mesh.expert": 4, "model.shared_experts": 1}),
    "zero 3, gelu": Case(
        (2, 1, 2),
        changes={
            "mesh.expert": 2,
            "model.capacity_factor": 4.0,
            "parallel.zero": 3,
            "model.activation": "gelu",
        },
    ),
    "stage 2, model 2": Case(
        (1, 2, 2), "interleaved", 2, changes={"mesh.expert": 2, "pipeline.remat": "selective"}
    ),
}


@pytest.mark.parametrize("case", small.named(CASES, MORE))
def test_same_training(case):
    cfg = dataclasses.replace((CASES | MORE)[case], microbatches=4).config(MOE)
    got, expected = plain_loop.train(cfg), plain_loop.reference(cfg)
    plain_loop.assert_same(got, expected)
    # Every step's counts moved the biases the same way.
    bias = [run.params["layers"]["mlp"]["router"]["bias"] for run in (got, expected)]
    np.testing.assert_allclose(*bias, atol=1e-6)
    assert np.abs(bias[0]).max() > 2 * cfg.model.balance_rate


@pytest.mark.full
@pytest.mark.parametrize("counter", ["bias", "load"])
def test_what_is_logged_of_the_load(counter):
    changes = MOE | {
        "mesh.expert": 2,
        "model.capacity_factor": 0.5,
        "model.layers": 2,
        "model.router_bias": counter == "bias",
    }
    cfg = small.config((1, 1, 1), microbatches=4, changes=changes)
    step = make_step(cfg, small.mesh_of(cfg))
    state = small.first_state(step, plain_loop.weights(cfg))
    with jax.set_mesh(step.mesh):
        batch = small.place_batch(step, cfg, small.batch(cfg, 0))
        found = step.gradients(state.params, batch).gradients
        state, metrics = step.train(state, batch)
    router = small.to_plain(step.layout, found)["layers"]["mlp"]["router"]
    load, dropped = router[counter], router["dropped"]
    moved = small.to_plain(step.layout, state.params)["layers"]["mlp"]["router"][counter]
    before = plain_loop.weights(cfg)["layers"]["mlp"]["router"][counter]
    assert (moved != before).any() == cfg.model.router_bias
    tokens = cfg.data.batch_size * cfg.data.sequence_length
    np.testing.assert_array_equal(
        load.sum(-1), [tokens * cfg.model.experts_per_token] * cfg.model.layers
    )
    # half of the choices have a slot
    assert (dropped.sum(-1) >= load.sum(-1) / 2 - 1).all() and (dropped <= load).all()
    np.testing.assert_allclose(
        metrics["expert_load"], (load.max(-1) / load.mean(-1)).max(), rtol=1e-6
    )
    np.testing.assert_allclose(metrics["dropped"], dropped.sum() / load.sum(), rtol=1e-6)
