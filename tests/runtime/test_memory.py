"""Temporary memory of compiled steps at a fixed microbatch size: no schedule but GPipe grows with the microbatches."""

import functools

import jax
import pytest
from support import small

from jaxtrain.training.step import abstract_batch, make_step

# A payload of 4 · 64 · 256 elements is what counts here: weights are a quarter of it, and there is one layer a chunk.
SHAPES = {"model.width": 256, "model.mlp_width": 256, "model.heads": 4, "data.sequence_length": 64}
LAYOUTS = [  # schedule, repeats, stages, what is computed again
    ("1f1b", 1, 2, "full"), ("1f1b", 1, 4, "none"), ("interleaved", 2, 4, "full"), ("interleaved", 2, 2, "selective"),
    ("zb_h1", 1, 4, "full"), ("zb_h2", 1, 4, "selective"), ("zb_v", 2, 4, "none"), ("dualpipe_v", 2, 4, "none"), ("auto", 0, 4, "full"),
]  # fmt: skip


@functools.cache
def temporary_bytes(schedule: str, repeats: int, stages: int, remat: str, microbatches: int) -> int:
    changes = SHAPES | {"model.layers": stages * max(repeats, 1), "data.batch_size": 4 * microbatches, "pipeline.remat": remat}
    cfg = small.config((1, stages, 1), schedule, repeats, microbatches, changes)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        compiled = step.gradients.lower(step.abstract_state().params, abstract_batch(cfg, step)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def assert_same(schedule: str, repeats: int, stages: int, remat: str, microbatches: list[int]) -> None:
    sizes = {m: temporary_bytes(schedule, repeats, stages, remat, m) for m in microbatches}
    assert max(sizes.values()) < 1.05 * min(sizes.values()), sizes


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_memory_does_not_grow(layout):
    assert_same(*layout, [8, 64])


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_memory_does_not_grow_in_between(layout):
    assert_same(*layout, [8, 16, 32, 64])


def test_gpipe_grows():
    """The measurement tells: GPipe keeps an input for every microbatch."""
    payload = 4 * 64 * 256 * 4
    assert temporary_bytes("gpipe", 1, 2, "full", 64) - temporary_bytes("gpipe", 1, 2, "full", 8) >= 56 * payload
