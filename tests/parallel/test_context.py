"""A sequence split over `context`: the same training as on one device, and activations that shrink
with it."""

import collections

import jax
import numpy as np
import pytest
from support import plain_loop, small
from support.plain_loop import CLIP, STEPS, assert_same, gradients, reference, train
from support.small import Case
from support.ticks_text import executed

from jaxtrain.config import replace
from jaxtrain.parallel.attention import blockwise, context
from jaxtrain.planner.programs.compiled_collectives import collectives
from jaxtrain.planner.programs.program import Program
from jaxtrain.runtime.state_plan import UnitPlan
from jaxtrain.training.step import make_step

APART = {"data.attend_across_documents": False}
GPT2 = {
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "model.positions": "learned",
    "model.biases": ("qkv", "out", "mlp", "norm"),
}
LENGTH = {"data.sequence_length": 24}  # of which 3 devices have whole chunks
RING, UNEVEN = {"parallel.context": "ring"}, {"model.layers": 5}
NONE, SELECTIVE = {"pipeline.remat": "none"}, {"pipeline.remat": "selective"}
# A window, with all that a score may have. Chunks have 4 tokens: a window of 6 reaches two of them.
WINDOW = {"model.window": 6, "model.sinks": True, "model.attention_softcap": 2.0}
CASES = {
    "window, gather 3, stage 2, zb_h1, documents, blocks": Case(
        (1, 2, 1),
        "zb_h1",
        1,
        3,
        changes={"mesh.context": 3, **LENGTH, **WINDOW, **APART, "pipeline.remat": "selective"},
    ),
    "ring 3, grouped heads, documents, blocks": Case(
        (1, 1, 2),
        changes={
            "mesh.context": 3,
            "parallel.context": "ring",
            **APART,
            "model.kv_heads": 2,
            "data.sequence_length": 24,
        },
    ),
}
MORE = {
    "window, ring 4": Case(
        (1, 1, 2), changes={"mesh.context": 4, **RING, **WINDOW, **NONE, "data.sequence_length": 32}
    ),
    "window, ulysses 2, documents": Case(
        (1, 1, 2), changes={"mesh.context": 2, "parallel.context": "ulysses", **WINDOW, **APART}
    ),
    # so wide that all tokens are gathered
    "window, ring 2, blocks": Case(
        (1, 2, 2), changes={"mesh.context": 2, **RING, **WINDOW, "model.window": 20}
    ),
    "window, ring 3, pattern, none": Case(
        (1, 2, 1),
        "1f1b",
        1,
        4,
        changes={
            "mesh.context": 3,
            **RING,
            **LENGTH,
            **NONE,
            **WINDOW,
            "model.pattern": ("window", "full"),
        },
    ),
    "ring 2, stage 2, zb_h1, documents, uneven": Case(
        (1, 2, 1), "zb_h1", 1, 3, changes={"mesh.context": 2, **RING, **APART, **NONE, **UNEVEN}
    ),
    "ring 2, stage 2, model 2, interleaved, selective, blocks": Case(
        (1, 2, 2),
        "interleaved",
        2,
        4,
        changes={
            "mesh.context": 2,
            **RING,
            **SELECTIVE,
            "model.kv_heads": 2,
            "model.sinks": True,
        },
    ),
    "ring 2, stage 2, selective, documents, blocks": Case(
        (2, 2, 1), "1f1b", 1, 4, changes={"mesh.context": 2, **RING, **SELECTIVE, **APART}
    ),
    "ring 4, stage 2, full, uneven, blocks": Case(
        (1, 2, 1), "1f1b", 1, 4, changes={"mesh.context": 4, **RING, **UNEVEN}
    ),
    "ring 4, stage 2, dualpipe_v, none, documents": Case(
        (1, 2, 1), "dualpipe_v", 2, 4, changes={"mesh.context": 4, **RING, **NONE, **APART}
    ),
    "ring 3, stage 2, zb_v, full, documents": Case(
        (1, 2, 1), "zb_v", 2, 4, changes={"mesh.context": 3, **RING, **LENGTH, **APART}
    ),
    "ring 2, stage 4, zb_h1, full, documents, uneven, blocks": Case(
        (1, 4, 1), "zb_h1", 1, 4, changes={"mesh.context": 2, **RING, **APART, **UNEVEN}
    ),
    "ring 2, stage 4, dualpipe_v, overlap, selective": Case(
        (1, 4, 1),
        "dualpipe_v",
        2,
        8,
        changes={
            "mesh.context": 2,
            **RING,
            **SELECTIVE,
            "model.layers": 9,
            "pipeline.overlap": True,
        },
    ),
    "ring 2, stage 4, interleaved, none, zero 3": Case(
        (1, 4, 1),
        "interleaved",
        2,
        4,
        changes={"mesh.context": 2, **RING, **NONE, "model.layers": 9, "parallel.zero": 3},
    ),
    "gather 8, selective, blocks": Case(
        (1, 1, 1),
        microbatches=1,
        changes={"mesh.context": 8, **SELECTIVE, "data.sequence_length": 64},
    ),
    "gather 3, learned positions": Case(
        (1, 2, 1), "interleaved", 2, 4, changes={"mesh.context": 3, **GPT2, **LENGTH}
    ),
    "gather 2, grouped heads, blocks": Case(
        (1, 2, 2), "zb_v", 2, 4, changes={"mesh.context": 2, **APART, **NONE, "model.kv_heads": 2}
    ),
    "ulysses 2, documents, blocks": Case(
        (2, 1, 2), changes={"mesh.context": 2, "parallel.context": "ulysses", **APART}
    ),
    "gather 2": Case((1, 1, 1), changes={"mesh.context": 2}),
    "ulysses 4": Case((1, 1, 1), changes={"mesh.context": 4, "parallel.context": "ulysses"}),
    "gather 4, documents, zero 3": Case(
        (2, 1, 1), changes={"mesh.context": 4, **APART, **NONE, "parallel.zero": 3}
    ),
    "gather 2, two devices to a head": Case(
        (1, 1, 4), changes={"mesh.context": 2, "model.kv_heads": 2, "parallel.zero": 3}
    ),
    "ulysses 2, zb_h1, zero 2": Case(
        (2, 2, 1),
        "zb_h1",
        1,
        3,
        changes={"mesh.context": 2, "parallel.context": "ulysses", **SELECTIVE, "parallel.zero": 2},
    ),
    "ring 2, zero 3, blocks": Case(
        (4, 1, 1),
        changes={"mesh.context": 2, "parallel.context": "ring", **NONE, "parallel.zero": 3},
    ),
    "ring 8, selective, blocks": Case(
        (1, 1, 1),
        microbatches=1,
        changes={
            "mesh.context": 8,
            "parallel.context": "ring",
            **SELECTIVE,
            "data.sequence_length": 64,
        },
    ),
}


@pytest.fixture
def small_blocks(monkeypatch):
    """A function after which attention goes in blocks of 2 tokens, for 8 sequences of 8 heads."""

    def begin():
        for name, value in (("LEAST_KEYS", 1), ("LEAST_BLOCK", 1), ("SCORES", 8 * 8 * 2 * 2)):
            monkeypatch.setattr(blockwise, name, value)

    return begin


@pytest.mark.parametrize("case", CASES)
def test_same_gradients(case, small_blocks):
    assert_same_as_one_device(case, small_blocks, gradients, steps=1)


@pytest.mark.full
@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_same_training(case, small_blocks):
    assert_same_as_one_device(case, small_blocks, train, steps=STEPS)


def assert_same_as_one_device(case, small_blocks, run, steps: int) -> None:
    cfg = (CASES | MORE)[case].config({"optimizer.clip_norm": CLIP})
    expected = reference(cfg, steps)
    if "blocks" in case:
        small_blocks()
    assert_same(run(cfg), expected)


@pytest.mark.full
def test_the_ring_evaluates():
    cfg = small.config(
        (1, 1, 2),
        "1f1b",
        1,
        2,
        {"mesh.context": 4, "parallel.context": "ring", "data.batch_size": 16} | APART,
    )
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        params = small.from_plain(step.layout, plain_loop.weights(cfg))
        loss = step.evaluate(params, small.place_batch(step, cfg, small.batch(cfg, 0))).loss
    np.testing.assert_allclose(
        loss, reference(replace(cfg, {"optimizer.clip_norm": CLIP})).losses[0], rtol=1e-5
    )


def test_zigzag():
    """Every device has an early and a late chunk: together they see as many keys as those of any
    other."""
    tokens, parts = 48, 3
    order = np.asarray(context.zigzag(np.arange(tokens)[None], parts)).reshape(parts, -1)
    assert [list(row[:1]) + list(row[8:9]) for row in order] == [[0, 40], [8, 32], [16, 24]]
    assert len({int((row + 1).sum()) for row in order}) == 1  # keys seen
    assert sorted(order.ravel()) == list(range(tokens))


def compiled(size: int, stages: int = 1, **changes):
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    shapes = {
        "mesh.context": size,
        "model.layers": 3,
        "data.batch_size": 2,
        "data.sequence_length": 64,
    }
    cfg = small.config((1, stages, 1), "1f1b", 1, 2, shapes | changes)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        made = step.gradients.lower(step.abstract_state().params, step.abstract_batch).compile()
    return step, Program(made.as_text())


@pytest.mark.parametrize(
    "how", ["all_gather", "ulysses", "all_gather, blocks", "ring, blocks", "ring, window"]
)
def test_residuals_shrink_with_the_context(how, small_blocks, monkeypatch):
    """Also attention's, whose keys and values are whole while it runs, or come from every
    device."""
    how, *blocks = how.split(", ")
    splits, make = [], UnitPlan._split
    monkeypatch.setattr(
        UnitPlan, "_split", lambda self, *shapes: splits.append(make(self, *shapes)) or splits[-1]
    )
    if blocks == ["blocks"]:
        small_blocks()
    for size in (1, 2, 4):
        changes = {
            "mesh.context": size,
            "parallel.context": how,
            "pipeline.remat": "none",
            "data.batch_size": 2,
            "data.sequence_length": 64,
            "model.window": 6 * (blocks == ["window"]),
        }
        cfg = small.config((1, 1, 1), "1f1b", 1, 2, changes)
        step = make_step(cfg, small.mesh_of(cfg))
        with jax.set_mesh(step.mesh):
            step.gradients.trace(step.abstract_state().params, step.abstract_batch)
    whole, *parts = [small.nbytes(split.residuals) for split in splits]
    assert [n * part <= 1.1 * whole for n, part in zip((2, 4), parts, strict=True)] == [True, True]


def test_what_crosses_the_context():
    """A layer gathers keys and values for F and for B, and scatters their gradients once; beside
    the sums only the batch is moved, once, into the order of the devices."""
    step, program = compiled(4, model__kv_heads=2)
    found: collections.Counter = collections.Counter()
    for i, times in executed(program, program.entry):
        if i.collective and "f32" in i.types:
            found[i.collective] += times * sum(i.sizes)
    # microbatches; layers; elements of keys and values [1, 64, 2, 4]
    m, layers, keys = 2, 3, 64 * 2 * 2 * 4
    assert found["all-gather"] == m * layers * 2 * keys + m * 64  # the weights of the loss
    assert found["reduce-scatter"] == m * layers * keys // 4
    # gradients, the loss, the number of tokens
    assert found["all-reduce"] == step.layout.parts.parameter_count + 2


def test_what_crosses_the_context_for_a_window():
    """The window's keys before each of a device's two chunks, for F and for B, and their gradients:
    no more with more devices, or longer sequences."""
    _, program = compiled(4, model__kv_heads=2, model__window=5, parallel__context="ring")
    found: collections.Counter = collections.Counter()
    for i, times in executed(program, program.entry):
        if i.collective and "f32" in i.types and "attention" in i.op_name:
            found[i.collective] += times * sum(i.sizes)
    # microbatches; layers; elements of keys and values [1, 2 · 4, 2, 4]
    m, layers, window = 2, 3, 2 * 8 * 2 * 4
    assert found == {"collective-permute": m * layers * 3 * window}


def test_what_goes_round():
    """Of a layer: keys and values for F, again where it is computed again, and for B, whose first
    step is the same; their gradients one step further, until they are home."""
    _, program = compiled(4, parallel__context="ring", model__kv_heads=2)
    found: collections.Counter = collections.Counter()
    for i, times in executed(program, program.entry):
        if i.collective:
            found[i.collective] += times * sum(i.sizes) * ("f32" in i.types)
    # microbatches; layers; elements of a device's keys and values [1, 16, 2, 4]
    m, layers, own = 2, 3, 2 * 16 * 2 * 4
    assert found["collective-permute"] == m * layers * (3 + 3 + 2 + 4) * own
    assert not found["all-to-all"] and found["all-gather"] == m * 64 and not found["reduce-scatter"]


def test_what_goes_round_inside_a_stage():
    """With several stages no permute stands in an op. Keys and values, and their gradients, go to
    the next device by an all-to-all among the devices of one stage."""
    step, program = compiled(2, stages=2, parallel__context="ring")
    ops = {"F0", "R0", "B0", "F1", "R1", "B1"}
    found = {
        (c.kind, c.axes, c.size)
        for i in program.below(program.entry)
        if ops.intersection(i.op_name.split("/"))
        for c in collectives(program, i, dict(step.mesh.shape))
    }
    both = 2 * 4 * 32 * 8 * 4  # bytes of a device's keys and values: [1, 32, 8, 4] in float32
    assert found == {("all-to-all", ("context",), 2 * both)}


def test_exchange_of_heads():
    """Queries, keys, values and the output: of a layer in F, again where it is computed again, and
    their gradients."""
    _, program = compiled(4, parallel__context="ulysses")
    exchanges = sum(
        times for i, times in executed(program, program.entry) if i.collective == "all-to-all"
    )
    assert exchanges == 2 * 3 * 3 * 4
