"""A sequence split over `context`: the same training as on one device, and activations that shrink with it."""

import collections

import hlo
import jax
import numpy as np
import pytest
import small
from plain_loop import CLIP, assert_same, reference, train

from jaxtrain.parallel import context
from jaxtrain.training.step import abstract_batch, make_step

APART = {"data.attend_across_documents": False}
GPT2 = {"model.norm": "layernorm", "model.activation": "gelu", "model.positions": "learned", "model.biases": True}
NONE, SELECTIVE = {"pipeline.remat": "none"}, {"pipeline.remat": "selective"}
# (data × stage × model, context), how, schedule, repeats, microbatches, changes
CASES = {
    "gather 2": ((1, 1, 1), 2, "all_gather", "1f1b", 1, 2, {}),
    "gather 8, selective": ((1, 1, 1), 8, "all_gather", "1f1b", 1, 1, SELECTIVE),
    "ulysses 4": ((1, 1, 1), 4, "ulysses", "1f1b", 1, 2, {}),
    "gather 4, documents, zero 3": ((2, 1, 1), 4, "all_gather", "1f1b", 1, 2, {**APART, **NONE, "parallel.zero": 3}),
    "gather 4, learned positions": ((1, 2, 1), 4, "all_gather", "interleaved", 2, 4, GPT2),
    "gather 2, grouped heads": ((1, 2, 2), 2, "all_gather", "zb_v", 2, 4, {**APART, **NONE, "model.kv_heads": 2}),
    "ulysses 2, documents": ((2, 1, 2), 2, "ulysses", "1f1b", 1, 2, APART),
    "ulysses 2, zb_h1, zero 2": ((2, 2, 1), 2, "ulysses", "zb_h1", 1, 3, {**SELECTIVE, "parallel.zero": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_training(case):
    mesh, size, how, schedule, repeats, microbatches, changes = CASES[case]
    axes = {"mesh.context": size, "parallel.context": how}
    shared = {"data.batch_size": 8 * microbatches, "optimizer.clip_norm": CLIP}
    cfg = small.config(mesh, schedule, repeats, microbatches, axes | shared | changes)
    assert_same(train(cfg), reference(cfg))


def test_zigzag():
    """Every device has an early and a late chunk: together they see as many keys as those of any other."""
    tokens, parts = 48, 3
    order = np.asarray(context.zigzag(np.arange(tokens)[None], parts)).reshape(parts, -1)
    assert [list(row[:1]) + list(row[8:9]) for row in order] == [[0, 40], [8, 32], [16, 24]]
    assert len({int((row + 1).sum()) for row in order}) == 1  # keys seen
    assert sorted(order.ravel()) == list(range(tokens))


def compiled(size: int, **changes):
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    shapes = {"mesh.context": size, "model.layers": 3, "data.batch_size": 2, "data.sequence_length": 64}
    cfg = small.config((1, 1, 1), "1f1b", 1, 2, shapes | changes)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        made = step.gradients.lower(step.abstract_state()["params"], abstract_batch(cfg, step)).compile()
    return step, hlo.Program(made.as_text())


@pytest.mark.parametrize("how", ["all_gather", "ulysses"])
def test_residuals_shrink_with_the_context(how):
    """Also attention's, whose keys and values are whole while it runs."""
    size = lambda n: sum(make(n, how).values())
    whole = size(1)
    assert [size(n) * n <= 1.1 * whole for n in (2, 4)] == [True, True]


def make(size: int, how: str) -> dict[str, int]:
    cfg = small.config(
        (1, 2, 1), "1f1b", 1, 2, {"mesh.context": size, "parallel.context": how, "data.batch_size": 2, "data.sequence_length": 64}
    )
    return make_step(cfg, small.mesh_of(cfg)).slot_bytes()


def test_what_crosses_the_context():
    """A layer gathers keys and values for F and for B, and scatters their gradients once; beside the sums only the batch is moved,
    once, into the order of the devices."""
    step, program = compiled(4, model__kv_heads=2)
    found: collections.Counter = collections.Counter()
    for i, times in program.executed(program.entry):
        if i.collective and "f32" in i.types:
            found[i.collective] += times * sum(i.sizes)
    m, layers, keys = 2, 3, 64 * 2 * 2 * 4  # microbatches; layers; elements of keys and values [1, 64, 2, 4]
    assert found["all-gather"] == m * layers * 2 * keys + m * 64  # the weights of the loss
    assert found["reduce-scatter"] == m * layers * keys // 4
    assert found["all-reduce"] == step.parts.parameter_count + 2  # gradients, the loss, the number of tokens


def test_exchange_of_heads():
    """Queries, keys, values and the output: of a layer in F, again where it is computed again, and their gradients."""
    _, program = compiled(4, parallel__context="ulysses")
    exchanges = sum(times for i, times in program.executed(program.entry) if i.collective == "all-to-all")
    assert exchanges == 2 * 3 * 3 * 4
