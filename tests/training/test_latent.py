"""Latent attention on meshes: the same training as on one device, and no more communication over
`model` than it needs."""

import collections

import jax
import pytest
from support import small
from support.plain_loop import CLIP, assert_same, gradients, reference, train
from support.small import Case
from support.ticks_text import executed

from jaxtrain.planner.programs.program import Program
from jaxtrain.training.step import make_step

LATENT = {  # no size is another's
    "model.attention": "mla",
    "model.query_rank": 12,
    "model.kv_rank": 20,
    "model.rope_head_dim": 6,
    "model.head_dim": 4,
    "model.value_head_dim": 10,
}
SHARED = LATENT | {"model.biases": ("qkv", "out"), "optimizer.clip_norm": CLIP}
APART = {"data.attend_across_documents": False}
YARN = {
    "model.rope_scaling": "yarn",
    "model.rope_factor": 4.0,
    "model.rope_original_length": 8,
    "model.rope_mscale_all_dim": 1.0,
}
NONE, SELECTIVE = {"pipeline.remat": "none"}, {"pipeline.remat": "selective"}
CASES = {
    "context, zb_h1": Case(
        (1, 2, 2), "zb_h1", 1, 3, changes={"mesh.context": 2, **NONE, **YARN, "model.query_rank": 0}
    ),
}
MORE = {
    "zero 3, documents": Case((2, 2, 2), changes={**APART, **SELECTIVE, "parallel.zero": 3}),
    "zero 3, two chunks": Case(
        (2, 2, 2), "interleaved", 2, changes={**APART, **SELECTIVE, "parallel.zero": 3}
    ),
    "model 4": Case((1, 1, 4)),
    "stages": Case((1, 4, 2), "zb_v", 2, 4, changes={**NONE, "model.layers": 9}),
    "ulysses": Case(
        (2, 1, 2),
        changes={"mesh.context": 2, **APART, "parallel.context": "ulysses", "parallel.zero": 2},
    ),
    "ring, stages": Case(
        (1, 2, 2), "zb_h1", 1, 3, changes={"mesh.context": 2, **APART, "parallel.context": "ring"}
    ),
    "gpt2": Case(
        (2, 2, 1),
        changes={
            "mesh.context": 2,
            "model.norm": "layernorm",
            "model.biases": ("qkv", "out", "mlp", "norm"),
            "parallel.zero": 0,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_same_gradients(case):
    cfg = CASES[case].config(SHARED)
    assert_same(gradients(cfg), reference(cfg, 1))


@pytest.mark.full
@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_same_training(case):
    cfg = (CASES | MORE)[case].config(SHARED)
    assert_same(train(cfg), reference(cfg))


def test_what_crosses_model():
    """Latents are gathered in place of the residual stream: once in F and once more for the
    gradients of what reads them."""
    rows, length, width, ranks = 4, 16, 32, (12, 20, 6)
    shapes = {
        "model.layers": 1,
        "data.batch_size": rows,
        "data.sequence_length": length,
        "pipeline.remat": "none",
    }
    cfg = small.config((1, 1, 2), "1f1b", 1, 1, LATENT | shapes)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        made = step.gradients.lower(step.abstract_state().params, step.abstract_batch).compile()
    program, found = Program(made.as_text()), collections.Counter()
    for i, times in executed(program, program.entry):
        if i.collective == "all-gather":
            scope = next(
                s for s in i.op_name.split("/") if s in ("F0", "B0", "head", "embed_gradient")
            )
            found.update({(scope, size): times for size in i.sizes})
    tokens = rows * length
    latents = {(op, tokens * rank): 1 for op in ("F0", "B0") for rank in ranks}
    # The MLP gathers its input in F, and again in B with the gradients of its output and of
    # attention's.
    streams = {
        ("F0", tokens * width): 1,
        ("B0", tokens * width): 3,
        ("head", tokens * width): 1,
        ("embed_gradient", tokens * width): 1,
    }
    assert found == latents | streams
