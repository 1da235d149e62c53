"""Pools begin without values: nothing of them is read before it is written, not even to be masked
by a product."""

import jax.numpy as jnp
import pytest
from support import small
from support.plain_loop import assert_same, gradients, reference
from support.small import Case

from jaxtrain.devices import host_memory

SEVEN = {"model.layers": 7}
EXPERTS = {"model.experts": 4, "model.expert_width": 16, "mesh.expert": 2}
CASES = {
    "interleaved": Case((1, 2, 2), "interleaved", 2, 4, SEVEN),
    "inputs of layers": Case((1, 3, 1), "gpipe", 2, 5, SEVEN | {"pipeline.save": ("layer_input",)}),
    "ends on two stages": Case(
        (2, 2, 1), "zb_h1", 1, 4, SEVEN | {"pipeline.vocabulary": "end_stages"}
    ),
    "k of n": Case((1, 2, 1), "zb_v", 2, 4, SEVEN | {"pipeline.remat": "full:1"}),
    "overlapped, experts": Case(
        (1, 2, 1), "dualpipe_v", 2, 5, EXPERTS | {"pipeline.overlap": True}
    ),
    "one stage": Case((2, 1, 2), changes=SEVEN | {"pipeline.remat": "selective"}),
}
ALWAYS = ["interleaved"]


@pytest.mark.parametrize(
    "name", small.named(ALWAYS, [name for name in CASES if name not in ALWAYS])
)
def test_gradients(monkeypatch, name):
    made = []

    def wrong(shape, dtype, on_host):
        made.append(shape)
        return jnp.full(shape, jnp.nan, dtype)

    config = CASES[name].config()
    expected = reference(config, 1)
    monkeypatch.setattr(host_memory, "empty_pool", wrong)
    assert_same(gradients(config), expected)
    assert made
