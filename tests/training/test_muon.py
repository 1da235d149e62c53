"""Muon against optax.contrib.muon, whose matrices are separate arrays on one device: ten updates by
the same gradients; how matrices are dealt out; and that no iteration waits for another device."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest
from support import plain_loop, small
from support.small import Case

from jaxtrain.models.spec import Spec
from jaxtrain.training.step import make_step
from jaxtrain.training.update.muon import MOST_PADDING, deal

MUON = small.PLAIN_LAYER | {
    "optimizer.name": "muon",
    "optimizer.adamw_learning_rate": 1e-3,
    "optimizer.weight_decay": 0.0,
    "model.layers": 2,
}
EXPERTS = {"model.experts": 4, "model.experts_per_token": 2, "model.expert_width": 24}
LATENT = {
    "model.attention": "mla",
    "model.kv_rank": 13,
    "model.query_rank": 10,
    "model.rope_head_dim": 4,
    "model.head_dim": 6,
    "model.value_head_dim": 5,
}
CASES = {
    "data, stage and model": Case(
        (2, 2, 2),
        changes={"parallel.zero": 3, "model.layers": 3, "optimizer.weight_decay": 3.0},
    ),
    "one device": Case((1, 1, 1)),
    "data": Case((2, 1, 1), changes={"parallel.zero": 2}),
    "stage": Case((1, 2, 1)),
    "model": Case((1, 1, 2)),
    "gated, no ZeRO, context": Case(
        (2, 1, 2),
        changes={"parallel.zero": 0, "mesh.context": 2, "model.activation": "swiglu"},
    ),
    "experts": Case((2, 1, 2), changes=EXPERTS | {"mesh.expert": 2, "model.tied_embeddings": True}),
    "experts in a pipeline, dense first": Case(
        (1, 2, 2), changes=EXPERTS | {"mesh.expert": 2, "model.dense_layers": 1}
    ),
    "latents": Case((2, 1, 2), changes=LATENT),
    "prime widths, more devices than matrices": Case(
        (8, 1, 1), changes={"model.layers": 1, "model.mlp_width": 31, "parallel.zero": 3}
    ),
    "offload, decay": Case(
        (2, 2, 1), changes={"parallel.offload": "optimizer", "optimizer.weight_decay": 3.0}
    ),
    "5 layers on 8 devices": Case((8, 1, 1), changes={"model.layers": 5}),
    "sharded ends": Case((4, 1, 2), changes={"parallel.ends": "sharded", "model.mtp_depth": 1}),
}
DEFAULT = ["data, stage and model"]


def random_gradients(like: dict, seed: int) -> dict:
    random = np.random.default_rng(seed)
    make = lambda a: np.float32(0.1 * random.standard_normal(a.shape))
    return plain_loop.without_counts(jax.tree.map(make, like))


@pytest.mark.parametrize("case", small.named(DEFAULT, sorted({*CASES} - {*DEFAULT})))
def test_updates_are_optax_s(case):
    cfg = CASES[case].config(MUON)
    step, params = make_step(cfg, small.mesh_of(cfg)), plain_loop.weights(cfg)
    with jax.set_mesh(step.mesh):
        state = small.first_state(step, params)
        compiled, held, moments = None, state.params, state.optimizer
        for i in range(10):
            gradients = small.from_plain(step.layout, random_gradients(params, i))
            gradients = jax.device_put(gradients, step.layout.scattered)
            if compiled is None:
                shardings = jax.tree.map(lambda a: a.sharding, (held, moments))
                update = jax.jit(
                    lambda g, o, p: step.optimizer.update(g, o, p)[1:], out_shardings=shardings
                )
                compiled = update.lower(gradients, moments, held).compile()
            held, moments = compiled(gradients, moments, held)
        found = small.to_plain(step.layout, jax.device_get(held))
    optimizer = plain_loop.plain_optimizer(cfg)
    wanted, of_optax = plain_loop.by_layer(params), None
    step_of_optax = jax.jit(optimizer.update)
    for i in range(10):
        of_optax = of_optax or optimizer.init(wanted)
        gradients = plain_loop.by_layer(random_gradients(params, i))
        updates, of_optax = step_of_optax(gradients, of_optax, wanted)
        wanted = jax.tree.map(np.add, wanted, updates)
    wanted = plain_loop.stacked(wanted)
    for (path, want), got, start in zip(
        jax.tree_util.tree_leaves_with_path(wanted),
        jax.tree.leaves(found),
        jax.tree.leaves(params),
        strict=True,
    ):
        name, scale = jax.tree_util.keystr(path), np.abs(want).max()
        assert np.abs(got - want).max() <= 1e-5 * scale, name
        assert plain_loop._of_router(path, plain_loop.COUNTS) or np.abs(want - start).max() > 1e-3
    assert not collectives_in_loops(compiled.as_text())


def collectives_in_loops(text: str) -> list[str]:
    """The collectives in the bodies of loops, with what those call."""
    computations = dict(re.findall(r"^%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    names = re.findall(r" body=%?([\w.\-]+)", text)
    found, seen = [], set()
    assert names
    while names:
        name = names.pop()
        if name not in seen:
            seen.add(name)
            body = computations[name]
            found += re.findall(r"= .* ((?:all-|reduce-scatter|collective-|ragged-)[\w-]*)\(", body)
            names += re.findall(r"(?:calls|body|to_apply|condition)=%?([\w.\-]+)", body)
    return found


@pytest.mark.parametrize(
    ("sizes", "units", "devices", "rounds"),
    [
        ([8, 8, 2], [32, 32, 32], 32, 3),  # a layer for each device
        ([7, 5, 13], [3, 1, 2], 8, 1),  # fewer matrices than devices
        ([58, 16, 4], [24, 16, 16], 5, 2),
        ([12], [1], 4, 1),
    ],
)
def test_every_block_travels_once(sizes, units, devices, rounds):
    block, places, in_rounds = deal(sizes, units, devices)
    assert len(in_rounds) == rounds
    messages = np.concatenate([table.ravel() for table, *_ in in_rounds])
    np.testing.assert_array_equal(messages[places], np.arange(len(places)))
    assert len(places) * block == np.dot(sizes, units)
    numbers = np.sum([numbers for *_, numbers in in_rounds], (0, 2))
    np.testing.assert_array_equal(numbers, units)
    first = np.cumsum([0, *np.multiply(sizes, units)]) // block
    loads = np.zeros(devices)
    for table, begins, numbers in in_rounds:
        for a, device in np.ndindex(begins.shape):
            length = sizes[a] // block
            for i in range(numbers[a, device]):
                at = begins[a, device] + i * length
                unit = table[device, at : at + length]
                np.testing.assert_array_equal(unit, unit[0] + np.arange(length))
                assert first[a] <= unit[0] < first[a + 1] and (unit[0] - first[a]) % length == 0
                loads[device] += length
    longest = sum(table.shape[1] for table, *_ in in_rounds)
    assert longest <= MOST_PADDING * loads.max()
    fair = max(loads.mean(), max(sizes) / block)
    assert loads.max() <= fair + max(sizes) / block


def test_blocks_of_primes_do_not_make_a_table_of_numbers():
    block, places, _ = deal([1_000_003, 999_983], [7, 5], 4)
    assert len(places) < 2**17
    padded = len(places) * block
    assert padded <= 1.01 * (7 * 1_000_003 + 5 * 999_983)


def test_which_parameters_are_orthogonalized():
    """What a Spec says: tables, vectors and biases of experts are the rest."""
    shapes = {
        Spec((8, 4, 2), ("width", "heads", "latent")): (8, 8),
        Spec((4, 2, 8), ("heads", "latent", "width")): (8, 8),
        Spec((6, 8, 5), ("experts", "width", "mlp")): (8, 5),
        Spec((3, 1, 8), ("latent", "latent", "width")): (3, 8),
    }
    for spec, shape in shapes.items():
        dims = spec.shape[spec.batch_dims :]
        rows = math.prod(dims[: spec.row_dims])
        assert spec.orthogonalized and (rows, math.prod(dims) // rows) == shape
    vectors = dataclasses.replace(Spec((6, 8), ("experts", "mlp")), vectors=True)
    tables = [Spec((61, 8), (axis, "width")) for axis in ("vocab", "staged_vocab", "position")]
    for spec in (vectors, Spec((6, 8), ("experts", "mlp")), Spec((8,), ("width",)), *tables):
        assert not spec.orthogonalized, spec
