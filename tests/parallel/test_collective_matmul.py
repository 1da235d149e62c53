"""Products beside the messages of `model`: values and gradients of the layers' products, with rings
of all sizes; the gradients of whole steps, against one plain loop; and the messages of the compiled
program."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small
from support.plain_loop import assert_same, gradients, reference
from support.small import Case

from jaxtrain.config.kernels import CPU, GPU, PART, TPU, multiplies_while_sending
from jaxtrain.devices.mesh import make_mesh
from jaxtrain.models.layers import column_products, row_product
from jaxtrain.parallel.collective_matmul import DOWN, UP, distances, requested
from jaxtrain.training.step import make_step

ON = {"parallel.collective_matmul": "on"}
RINGS = {"3 devices": (3, 1, 9), "4 devices": (4, 3, 8)}
MORE_RINGS = {"2 devices": (2, 2, 6), "5, a token each": (5, 1, 5), "8 devices": (8, 1, 16)}
EXPERTS = {"model.experts": 4, "model.expert_width": 16, "model.shared_experts": 1}
LATENT = {
    **{"model.attention": "mla", "model.kv_heads": 4, "model.kv_rank": 8},
    **{"model.query_rank": 12, "model.rope_head_dim": 4},
}
STEPS = {
    "selective, shared heads, ZeRO-3": Case(
        (2, 1, 4),
        changes=ON | {"pipeline.remat": "selective", "model.kv_heads": 2, "parallel.zero": 3},
    ),
    "full, 7 layers": Case((4, 1, 2), changes=ON | {"model.layers": 7}),
    "some layers, context": Case(
        (1, 1, 2),
        changes=ON | {"pipeline.remat": "full:1", "mesh.context": 4, "model.layers": 5},
    ),
    "none, gpt2's form, 8 devices": Case(
        (1, 1, 8),
        changes=ON
        | {"pipeline.remat": "none"}
        | {"model.activation": "gelu", "model.biases": ("qkv", "out", "mlp")},
    ),
    "experts": Case((2, 1, 2), changes=ON | EXPERTS | {"mesh.expert": 2}),
    "latent attention": Case((2, 1, 4), changes=ON | LATENT | {"pipeline.remat": "selective"}),
    "replicas, saved values": Case(
        (2, 1, 2),
        changes=ON
        | {"mesh.replica": 2, "pipeline.remat": "selective"}
        | {"pipeline.save": ("qkv", "mlp_hidden")},
    ),
}
FIRST = ["selective, shared heads, ZeRO-3"]


def loss(x, up, gate, down):
    a, b = column_products(x, (up, gate))
    return jnp.sum(row_product(jnp.tanh(a) * b, down) ** 2)


@pytest.mark.parametrize("ring", small.named(RINGS, MORE_RINGS))
def test_products_and_their_gradients(ring):
    devices, batch, tokens = (RINGS | MORE_RINGS)[ring]
    arrays = [
        jnp.asarray(small.normal(i, *shape))
        for i, shape in enumerate(
            [(batch, tokens, 16), *[(16, 3 * devices)] * 2, (3 * devices, 16)]
        )
    ]
    run = lambda *arrays: jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(*arrays)
    expected = run(*arrays)
    with (
        jax.set_mesh(make_mesh((1, 1, 1, 1, 1, devices), jax.devices()[:devices])),
        requested("on"),
    ):
        compiled = jax.jit(lambda *arrays: run(*arrays)).lower(*arrays).compile()
        found = compiled(*arrays)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(jnp.abs(b).max()))
    kinds = collections.Counter(
        re.findall(r" (all-gather|reduce-scatter|collective-permute)\(", compiled.as_text())
    )
    # x, the gradient of the output; their sums
    assert kinds == {"collective-permute": 4 * (devices - 1)}


@pytest.mark.parametrize("devices", range(1, 10))
def test_blocks_come_from_all_devices_by_the_shorter_way(devices):
    found = distances(devices)
    assert {d % devices for d in found} == set(range(devices)) and len(found) == devices
    assert max(map(abs, found)) == devices // 2
    for way in (UP, DOWN):  # each block has come one place further than one that was there before
        steps = [d * way for d in found if d * way > 0]
        assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("name", small.named(FIRST, [name for name in STEPS if name not in FIRST]))
def test_gradients_of_a_step(name):
    config = STEPS[name].config()
    assert_same(gradients(config), reference(config, 1))


@functools.cache
def messages(setting: str) -> collections.Counter:
    cfg = small.config((4, 1, 2), changes={"parallel.collective_matmul": setting})
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        made = step.gradients.lower(step.abstract_state().params, step.abstract_batch).compile()
    return collections.Counter(
        re.findall(r" (all-gather|reduce-scatter|collective-permute)\(", made.as_text())
    )


def test_the_cpu_keeps_its_collectives():
    assert messages("auto") == messages("off")
    assert messages("on")["reduce-scatter"] < messages("off")["reduce-scatter"]


def test_the_setting():
    for platform, auto in ((TPU, True), (GPU, True), (CPU, False), ("rocm", False)):
        assert multiplies_while_sending("auto", platform, 1, PART) is auto
        assert not multiplies_while_sending("auto", platform, 1, PART - 1)
        assert not multiplies_while_sending("auto", platform, 2, PART)
        assert multiplies_while_sending("on", platform, 1, 1)
        assert not multiplies_while_sending("off", platform, 1, PART)
