"""Temporary memory of compiled steps at a fixed microbatch size: no schedule but GPipe grows with
the microbatches."""

import dataclasses
import functools

import jax
import pytest
from support import small
from support.small import Case

from jaxtrain.training.step import make_step

# A payload of 4 · 64 · 256 elements is what counts here: weights are a quarter of it, and there is
# one layer a chunk.
SHAPES = {
    "model.width": 256,
    "model.mlp_width": 256,
    "model.heads": 4,
    "data.sequence_length": 64,
    "model.activation": "gelu",
}
FULL, SELECTIVE, NONE = ({"pipeline.remat": remat} for remat in ("full", "selective", "none"))
LAYOUTS = {  # one of each placement
    "zb_v, none": Case((1, 4, 1), "zb_v", 2, changes=NONE),
}
MORE = {
    "1f1b, full": Case((1, 2, 1), changes=FULL),
    "interleaved, selective": Case((1, 2, 1), "interleaved", 2, changes=SELECTIVE),
    "zb_h1, none": Case((1, 4, 1), "zb_h1", changes=NONE),
    "1f1b, none": Case((1, 4, 1), changes=NONE),
    "interleaved, full": Case((1, 4, 1), "interleaved", 2, changes=FULL),
    "zb_h1, full": Case((1, 4, 1), "zb_h1", changes=FULL),
    "zb_h2, selective": Case((1, 4, 1), "zb_h2", changes=SELECTIVE),
    "dualpipe_v, none": Case((1, 4, 1), "dualpipe_v", 2, changes=NONE),
    "auto, full": Case((1, 4, 1), "auto", 0, changes=FULL),
}
GPIPE = {"gpipe": Case((1, 2, 1), "gpipe", changes=FULL)}


@functools.cache
def temporary_bytes(name: str, microbatches: int) -> int:
    case = (LAYOUTS | MORE | GPIPE)[name]
    shapes = SHAPES | {
        "model.layers": case.mesh[1] * max(case.repeats, 1),
        "data.batch_size": 4 * microbatches,
    }
    cfg = dataclasses.replace(case, microbatches=microbatches).config(shapes)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        compiled = step.gradients.lower(step.abstract_state().params, step.abstract_batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def assert_same(name: str, microbatches: list[int]) -> None:
    sizes = {m: temporary_bytes(name, m) for m in microbatches}
    assert max(sizes.values()) < 1.05 * min(sizes.values()), sizes


@pytest.mark.parametrize("layout", small.named(LAYOUTS, MORE))
def test_memory_does_not_grow(layout):
    assert_same(layout, [8, 64])


@pytest.mark.full
@pytest.mark.parametrize("layout", [*LAYOUTS, *MORE])
def test_memory_does_not_grow_in_between(layout):
    assert_same(layout, [8, 16, 32, 64])


@pytest.mark.full
def test_gpipe_grows():
    """The measurement tells: GPipe keeps an input for every microbatch."""
    payload = 4 * 64 * 256 * 4
    assert temporary_bytes("gpipe", 64) - temporary_bytes("gpipe", 8) >= 56 * payload
