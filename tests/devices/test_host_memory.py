"""What lies in the host's memory: the same training as without, each array where it is said to be,
and checkpoints that do not know of it.

Simulated devices have a host memory of their own by name, in which programs and types are as on a
GPU; that a device's memory gets less, only programs for real ones show
(tests/runtime/test_ahead.py).
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support import small
from support.plain_loop import CLIP, assert_same, reference, train, weights
from support.small import Case

from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.restoring import restore
from jaxtrain.config import ConfigError
from jaxtrain.devices import host_memory
from jaxtrain.phases.start_lines import introduction
from jaxtrain.training.state import bytes_per_device, initial_state, stored_shapes
from jaxtrain.training.step import make_step

ENDS = {"pipeline.vocabulary": "end_stages"}
CASES = {
    "both, zb_h1, uneven": Case(
        (2, 2, 1),
        "zb_h1",
        1,
        4,
        changes={"parallel.offload": "both", "parallel.zero": 1, "pipeline.remat": "none"},
    ),
}
MORE = {
    "both, one stage, zero 3": Case(
        (2, 1, 1),
        changes={"parallel.offload": "both", "parallel.zero": 3, "pipeline.remat": "full"},
    ),
    "both, one stage": Case(
        (2, 1, 1),
        changes={"parallel.offload": "both", "parallel.zero": 2, "pipeline.remat": "selective"},
    ),
    "both, full, zero 3": Case(
        (2, 2, 2),
        microbatches=3,
        changes={"parallel.offload": "both", "parallel.zero": 3, "model.layers": 4, **ENDS},
    ),
    "optimizer, interleaved, zero 0": Case(
        (2, 2, 1),
        "interleaved",
        2,
        4,
        changes={"parallel.offload": "optimizer", "parallel.zero": 0},
    ),
    "optimizer, zero 2": Case(
        (4, 1, 2), changes={"parallel.offload": "optimizer", "parallel.zero": 2}
    ),
    "activations, one layer, full": Case(
        (1, 1, 2),
        changes={"parallel.offload": "activations", "parallel.zero": 1, "model.layers": 1},
    ),
    "activations, zb_v": Case(
        (1, 2, 2),
        "zb_v",
        2,
        4,
        changes={
            "parallel.offload": "activations",
            "parallel.zero": 1,
            "pipeline.remat": "selective",
            "pipeline.permute": "early",
        },
    ),
    "activations, context": Case(
        (1, 2, 1),
        microbatches=4,
        changes={
            "parallel.offload": "activations",
            "parallel.zero": 1,
            "pipeline.remat": "none",
            "mesh.context": 2,
        },
    ),
}


def config(offload="none", mesh=(1, 1, 1), remat="full"):
    changes = {
        "parallel.offload": offload,
        "pipeline.remat": remat,
        "model.layers": 5,
        "optimizer.clip_norm": CLIP,
    }
    return Case(mesh, microbatches=4).config(changes)


@pytest.mark.parametrize("case", small.named(CASES, MORE))
def test_same_training(case):
    cfg = (CASES | MORE)[case].config({"model.layers": 5, "optimizer.clip_norm": CLIP})
    assert_same(train(cfg), reference(cfg))


@functools.cache
def step_of(offload: str, mesh=(2, 2, 1), remat="none"):
    cfg = config(offload, mesh, remat)
    return cfg, make_step(cfg, small.mesh_of(cfg))


def test_the_state_lies_where_it_is_said_to():
    (_, device), (_, host) = step_of("none"), step_of("optimizer")
    usual, offloaded = (initial_state(s.layout, s.optimizer, 0) for s in (device, host))
    jax.tree.map(np.testing.assert_array_equal, offloaded, usual)
    jax.tree.map(
        lambda a, b: a.sharding == b.sharding or pytest.fail(f"{a.sharding}"),
        offloaded,
        host.abstract_state(),
    )
    moments = host.abstract_state().optimizer[1]
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves((moments.mu, moments.nu))}
    assert kinds == {"pinned_host"} != {a.sharding.memory_kind for a in jax.tree.leaves(usual)}
    whole = device.abstract_state()
    there = bytes_per_device((whole.optimizer[1].mu, whole.optimizer[1].nu))
    assert (
        bytes_per_device(host.abstract_state(), host=True)
        == there
        > 0
        == bytes_per_device(whole, host=True)
    )
    assert bytes_per_device(host.abstract_state()) == bytes_per_device(whole) - there


@pytest.mark.parametrize("offload", ["optimizer", "activations"])
def test_the_program_has_what_is_said_on_the_host(offload):
    """Arguments and results: the moments. The scan over the rows: the residuals. Nothing else."""
    cfg, step = step_of(offload)
    with jax.set_mesh(step.mesh):
        traced = step.train.trace(step.abstract_state(), step.abstract_batch)
    on_host = lambda avals: [a.shape for a in avals if a.memory_space == jax.memory.Space.Host]
    arguments = on_host(traced.jaxpr.in_avals)
    moments = [a.shape for a in jax.tree.leaves(step.abstract_state().params)] * 2
    assert (
        sorted(arguments)
        == sorted(on_host(traced.jaxpr.out_avals))
        == (sorted(moments) if offload == "optimizer" else [])
    )
    regions = [e for e in traced.jaxpr.jaxpr.eqns if e.primitive.name == "shard_map"]
    within = [e for region in regions for e in region.params["jaxpr"].eqns]
    (scan,) = [e for e in within if e.primitive.name == "scan"]
    slots = on_host([v.aval for v in scan.outvars])
    counts, layers = step.setup.train.pool_sizes, max(step.setup.placement.sizes)
    pools = step.slots_on_host()
    assert [*pools] == ["residual_b", "residual_w"] * (offload == "activations")
    assert sorted({s[0] for s in slots}) == sorted({counts[pool] * layers for pool in pools})
    assert (len(slots) > 5) == (offload == "activations")


def test_any_checkpoint_continues_with_any_offload(tmp_path):
    (_, first), (_, second) = step_of("both"), step_of("none", (1, 1, 1))
    stored = lambda s: stored_shapes(s.layout, s.optimizer)
    plain = weights(config())

    def filled(step):
        state = small.first_state(step, plain)
        moments = state.optimizer[1]
        put = lambda a, like: jax.device_put(np.asarray(a), like.sharding)
        new = moments._replace(mu=jax.tree.map(put, state.params, moments.mu))
        return dataclasses.replace(state, optimizer=(state.optimizer[0], new, *state.optimizer[2:]))

    for at, (one, other) in enumerate(((first, second), (second, first))):
        saves = Checkpointer(tmp_path, stored(one))
        saves.save(at, filled(one), {})
        saves.close()
        restored = restore(tmp_path, at, other.abstract_state(), stored(other))
        jax.tree.map(np.testing.assert_array_equal, restored, filled(other))
        jax.tree.map(
            lambda a, b: a.sharding == b.sharding or pytest.fail(f"{a.sharding}"),
            restored,
            other.abstract_state(),
        )


def test_a_device_without_a_host_memory_is_refused(monkeypatch):
    monkeypatch.setattr(host_memory, "KIND", "remote_host")
    with pytest.raises(ConfigError) as raised:
        make_step(config("both"), small.mesh_of(config()))
    has = "and cpu has device, pinned_host, unpinned_host alone"
    assert (
        str(raised.value)
        == f"parallel.offload='both' needs memory of kind remote_host, {has}: use "
        "--config.parallel.offload=none"
    )
    saves = small.config(changes={"pipeline.remat": "selective", "pipeline.save": ("qkv:host",)})
    with pytest.raises(ConfigError) as raised:
        make_step(saves, small.mesh_of(saves))
    assert f"of kind remote_host, {has}: use --config.pipeline.save=qkv" in str(raised.value)


def test_named_values_alone_lie_on_the_host():
    """Of pipeline.save the queries, keys and values, in all slots of all layers."""
    save = {"pipeline.remat": "selective", "pipeline.save": ("qkv:host", "mlp_in")}
    cfg = small.config((1, 2, 1), "zb_h1", 1, 4, save)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        traced = step.gradients.trace(step.abstract_state().params, step.abstract_batch)
    (region,) = [e for e in traced.jaxpr.jaxpr.eqns if e.primitive.name == "shard_map"]
    (scan,) = [e for e in region.params["jaxpr"].eqns if e.primitive.name == "scan"]
    avals = [v.aval for v in scan.outvars]
    there = [a for a in avals if a.memory_space == jax.memory.Space.Host]
    tokens, heads = cfg.data.sequence_length, cfg.model.heads * cfg.model.head_dim
    kv_heads = cfg.model.kv_heads * cfg.model.head_dim
    assert sorted(a.shape[-1] for a in there) == sorted([heads, kv_heads, kv_heads])
    assert {a.shape[-2] for a in there} == {tokens}
    assert small.nbytes(there) == sum(step.slots_on_host().values()) > 0


@pytest.mark.parametrize(
    "offload, mesh, remat, lies",
    [
        ("optimizer", (2, 2, 1), "none", "MiB of the optimizer's state"),
        ("both", (2, 2, 1), "full", "MiB of slots activation"),
        ("activations", (2, 1, 1), "full", "what layers save for the backward"),
        ("none", (2, 2, 1), "none", ""),
    ],
)
def test_the_start_up_text_says_what_lies_there(offload, mesh, remat, lies):
    cfg, step = step_of(offload, mesh, remat)
    with jax.set_mesh(step.mesh):
        lines = introduction(cfg, step)
    found = [line for line in lines if "host's memory" in line]
    assert len(found) == bool(lies) and (not lies or found[0].endswith(lies))
