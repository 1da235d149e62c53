"""ZeRO's stages: the same training as on one device, the memory of the paper's formulas, and no
more communication than they need."""

import collections

import jax
import pytest
from support import small
from support.plain_loop import CLIP, assert_same, reference, train
from support.small import Case
from support.ticks_text import executed, loop

from jaxtrain import config as configs
from jaxtrain.planner.programs.program import Program
from jaxtrain.training.step import make_step

ENDS, SHARED = {"pipeline.vocabulary": "end_stages"}, {"pipeline.vocabulary": "parallel"}
TIED = {"model.tied_embeddings": True}
GPT2 = {
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "model.positions": "learned",
    "model.biases": ("qkv", "out", "mlp", "norm"),
}
CASES = {
    "3, gathered once, nothing divides": Case(
        (3, 2, 1),
        changes={"parallel.zero": 3, "parallel.gather": "step", "data.batch_size": 12, **SHARED},
    ),
}
MORE = {
    "3, reduced once": Case(
        (3, 1, 1),
        changes={
            "parallel.zero": 3,
            "parallel.reduce": "step",
            "data.batch_size": 12,
            "model.width": 48,
            **TIED,
        },
    ),
    "1, reduced each microbatch": Case(
        (2, 2, 1),
        microbatches=3,
        changes={"parallel.zero": 1, "parallel.reduce": "microbatch", **ENDS},
    ),
    "3, gathered once": Case(
        (2, 2, 1),
        microbatches=3,
        changes={"parallel.zero": 3, "parallel.gather": "step", "mesh.replica": 2},
    ),
    "3, nothing divides": Case(
        (3, 2, 1), changes={"parallel.zero": 3, "data.batch_size": 12, **SHARED}
    ),
    "3, data 4, model 2": Case((4, 1, 2), changes={"parallel.zero": 3, **GPT2}),
    "3, zb_v, ends, tied": Case(
        (2, 2, 2),
        "zb_v",
        2,
        4,
        changes={"parallel.zero": 3, "pipeline.remat": "none", **ENDS, **TIED},
    ),
    "2, data 8": Case((8, 1, 1), changes={"parallel.zero": 2}),
    "3, data 8, none": Case((8, 1, 1), changes={"parallel.zero": 3, "pipeline.remat": "none"}),
    "1, one microbatch": Case((8, 1, 1), microbatches=1),
    "1, one microbatch, reduced once": Case(
        (8, 1, 1), microbatches=1, changes={"parallel.reduce": "step"}
    ),
    "1, one microbatch, data 3": Case(
        (3, 1, 1), microbatches=1, changes={"data.batch_size": 12, **TIED}
    ),
    "1, one microbatch, model and replica": Case(
        (2, 1, 2), microbatches=1, changes={"mesh.replica": 2, "pipeline.remat": "none"}
    ),
    "1, reduced in the last W": Case(
        (2, 2, 1), microbatches=3, changes={"parallel.reduce": "last", "mesh.replica": 2}
    ),
    "1, reduced in the last W, zb_h1, uneven": Case(
        (2, 4, 1), "zb_h1", 1, 5, changes={"parallel.reduce": "last", "model.layers": 7, **SHARED}
    ),
    "1, reduced in the last W, interleaved, model": Case(
        (2, 2, 2), "interleaved", 2, 4, changes={"parallel.reduce": "last", **ENDS, **TIED}
    ),
    "1, reduced in the last W, nothing divides": Case(
        (3, 2, 1), changes={"parallel.reduce": "last", "data.batch_size": 12}
    ),
    "3, reduced in the last W, zb_v, k of n": Case(
        (2, 2, 1),
        "zb_v",
        2,
        4,
        changes={"parallel.zero": 3, "parallel.reduce": "last", "pipeline.remat": "selective:1"},
    ),
    "2, interleaved, ends": Case(
        (2, 2, 2), "interleaved", 2, 4, changes={"parallel.zero": 2, **ENDS, **GPT2}
    ),
    "3, uneven stages": Case(
        (2, 4, 1),
        "zb_h1",
        1,
        5,
        changes={"parallel.zero": 3, "model.layers": 7, "pipeline.remat": "selective", **SHARED},
    ),
}


@pytest.mark.parametrize("case", small.named(CASES, MORE))
def test_same_training(case):
    cfg = (CASES | MORE)[case].config({"model.layers": 5, "optimizer.clip_norm": CLIP})
    assert_same(train(cfg), reference(cfg))


# --- the compiled program -------------------------------------------------------------------------

DATA, LAYERS, MICROBATCHES, ROWS, LENGTH = 8, 3, 5, 1, 16


def compiled(which: str, **changes):
    """(the step, its program, XLA's account of its memory) on 8 data shards; by field, with "__" in
    place of the dot."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    shapes = {
        "model.layers": LAYERS,
        "model.vocab_size": 64,
        "data.batch_size": DATA * MICROBATCHES * ROWS,
        "data.sequence_length": LENGTH,
    }
    cfg = small.config((DATA, 1, 1), "1f1b", 1, MICROBATCHES, shapes | changes)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        state = step.abstract_state()
        argument = state if which == "train" else state.params
        made = getattr(step, which).lower(argument, step.abstract_batch).compile()
    return step, Program(made.as_text()), made.memory_analysis()


SHARES = {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16)}


@pytest.mark.parametrize("zero", small.named([3], [0, 1, 2]))
def test_memory(zero):
    """Rajbhandari et al. 2020, with float32 gradients: bytes per parameter that a device has, and
    that the data shards share."""
    whole, shared = SHARES[zero]
    step, program, memory = compiled("train", parallel__zero=zero)
    parameters, targets = step.layout.parts.parameter_count, MICROBATCHES * ROWS * LENGTH
    # The scan carries the parameters, the weights of the loss, and the sums; and factors of rotary
    # positions, which XLA moves out of the inner loops, layer by layer.
    scan = loop(program, MICROBATCHES)
    rotary = (1, LENGTH, 1, step.layout.parts.cfg.head_dim // 2)
    arrays = zip(scan.types, scan.shapes, scan.sizes, strict=True)
    floats = sum(size for kind, shape, size in arrays if kind == "f32" and shape != rotary)
    sums = floats - targets - (parameters // DATA if zero == 3 else parameters)
    wanted = (whole + shared / DATA) * parameters
    has = memory.argument_size_in_bytes - 3 * 4 * targets + 4 * sums
    assert abs(has - wanted) < 0.03 * wanted, (has, wanted)


def elements(program: Program) -> collections.Counter:
    """Elements that a device gets from each kind of collective in a step."""
    found: collections.Counter = collections.Counter()
    for i, times in executed(program, program.entry):
        if i.collective:
            found[i.collective] += times * sum(i.sizes)
    return found


@pytest.mark.parametrize("remat", small.named(["full"], ["none"]))
def test_each_layer_is_gathered_for_its_op_and_reduced_after_it(remat):
    step, program, _ = compiled("gradients", parallel__zero=3, pipeline__remat=remat)
    size = lambda tree: sum(s.size for s in jax.tree.leaves(tree))
    layer, head, width = (
        size(step.layout.parts.specs["layer"]),
        size(step.layout.parts.specs["head"]),
        step.layout.parts.cfg.width,
    )
    tokens = ROWS * LENGTH
    found = elements(program)
    assert found["all-gather"] == MICROBATCHES * (2 * LAYERS * layer + head + DATA * tokens)
    assert found["reduce-scatter"] == MICROBATCHES * (LAYERS * layer + head) // DATA
    # rows of the embedding, and their gradients; not the table
    assert found["all-to-all"] == MICROBATCHES * 2 * tokens * width
    assert found["all-reduce"] <= 8  # the loss and the number of tokens


def test_gathered_once_a_step():
    step, program, _ = compiled(
        "gradients", parallel__zero=3, parallel__gather="step", parallel__reduce="step"
    )
    found = elements(program)
    assert (
        found["all-gather"] == step.layout.parts.parameter_count
        and found["reduce-scatter"] == step.layout.parts.parameter_count // DATA
    )
    assert not found["all-to-all"]


def test_settings_without_a_use_are_refused():
    base = configs.replace(small.SMALL, {"mesh.data": 8})
    # one microbatch on one stage; two; two stages; no data shards
    assert base.resolve().parallel.reduce == "microbatch"
    for others in (
        {"pipeline.microbatches": 2},
        {"mesh.stage": 2},
        {"mesh.data": 1},
        {"parallel.zero": 0},
    ):
        assert configs.replace(base, others).resolve().parallel.reduce == "step"
    assert configs.replace(base, {"parallel.zero": 2}).resolve().parallel.reduce == "microbatch"
