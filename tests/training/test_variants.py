"""The model's other forms and the step's other settings, each on a mesh, against the plain loop
(plain_loop.py)."""

import jax
import numpy as np
import pytest
from support import plain_loop, small
from support.small import Case

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.training.step import make_step

GPT2 = {
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "model.positions": "learned",
    "model.biases": ("qkv", "out", "mlp", "norm"),
}
TIED = {"model.tied_embeddings": True}
DOCUMENTS = {"data.attend_across_documents": False}
YARN = {
    "model.rope_scaling": "yarn",
    "model.rope_factor": 4.0,
    "model.rope_original_length": 8,
    "model.rope_beta_slow": 0.1,
}
NOPE = ("full", "nope", "nope", "full", "full", "nope")
EARLY = {"pipeline.permute": "early"}
PROJECTION = {"model.qk_norm": True, "model.qk_norm_over": "projection"}
GEMMA = {
    "model.norm_place": "both",
    "model.norm_weight": "one_plus",
    "model.activation": "geglu",
    "model.embedding_scale": 5.6,
    "model.logit_softcap": 2.0,
}
COHERE = {"model.norm": "layernorm", "model.parallel_block": True, "model.logit_scale": 0.5}

VARIANTS = {
    "gpt2 form": Case(
        (2, 2, 2),
        "interleaved",
        2,
        4,
        changes={"data.batch_size": 16} | GPT2 | TIED | EARLY | {"model.layers": 5},
    ),
    "gpt2 form, documents apart, fewer microbatches than stages": Case(
        (2, 4, 1),
        "interleaved",
        2,
        3,
        changes={"data.batch_size": 12}
        | GPT2
        | DOCUMENTS
        | EARLY
        | {"model.layers": 9, "model.max_positions": 24},
    ),
    "grouped queries, documents apart, chunks of the loss": Case(
        (1, 4, 2),
        microbatches=7,
        changes={"data.batch_size": 14}
        | DOCUMENTS
        | YARN
        | {"model.rotary_dim": 2, "model.pattern": NOPE, "model.qk_norm": True}
        | {"model.kv_heads": 2, "model.layers": 6, "model.loss_chunk": 8}
        | {"model.biases": ("qkv",)},
    ),
    "one key/value head a device, chunks of the loss, tied": Case(
        (1, 2, 4),
        "gpipe",
        2,
        changes={"data.batch_size": 8}
        | TIED
        | EARLY
        | {"model.kv_heads": 4, "model.loss_chunk": 2, "model.head_dim": 6}
        | {"model.biases": ("mlp",)},
    ),
    "two devices to a key/value head, in B and W": Case(
        (1, 2, 4),
        "zb_h1",
        1,
        3,
        changes={
            "data.batch_size": 6,
            "model.kv_heads": 2,
            "pipeline.remat": "none",
            "model.qk_norm": True,
            "model.biases": ("qkv", "out"),
        },
    ),
    "norms before and after, tied, chunks of the loss, in B and W": Case(
        (2, 2, 2),
        "zb_h1",
        microbatches=2,
        changes={"data.batch_size": 8, "pipeline.remat": "none", "model.loss_chunk": 4}
        | {"parallel.zero": 0, "model.layers": 3, "model.attention_gate": True}
        | {"model.kv_heads": 2, **GEMMA, **TIED, **PROJECTION},
    ),
    "norms after, two devices to a key/value head": Case(
        (1, 2, 4),
        "zb_v",
        2,
        2,
        changes={"data.batch_size": 4, "pipeline.remat": "selective", "model.kv_heads": 2}
        | {"model.norm_place": "after", "model.activation": "clamped_swiglu"}
        | {"model.activation_limit": 0.1, **PROJECTION},
    ),
    "a parallel block, zero 3, split vocabulary": Case(
        (2, 2, 2),
        "interleaved",
        2,
        2,
        changes={"data.batch_size": 8, "parallel.zero": 3, "pipeline.vocabulary": "parallel"}
        | {"model.attention_gate": True, "model.positions": "learned"}
        | {"model.embedding_scale": 3.0, **COHERE},
    ),
    "two devices to a key/value head, gated": Case(
        (2, 1, 4),
        changes={"data.batch_size": 8, "model.layers": 2, "model.kv_heads": 2}
        | {"parallel.zero": 3, "model.attention_gate": True, "model.norm_place": "after"}
        | {"model.biases": ("qkv", "out"), "model.norm_weight": "one_plus", **PROJECTION},
    ),
    "four devices to a key/value head, gpt2 form": Case(
        (1, 1, 8), changes={"data.batch_size": 4} | GPT2 | {"model.kv_heads": 2, "model.layers": 2}
    ),
    "nothing sharded over data": Case(
        (2, 2, 2),
        microbatches=4,
        changes={
            "data.batch_size": 16,
            "parallel.zero": 0,
            "model.layers": 3,
            "optimizer.schedule": "constant",
            "optimizer.decay_steps": 4,
        },
    ),
    "first and last chunk without layers": Case(
        (1, 2, 1),
        "interleaved",
        2,
        4,
        {"model.layers": 3, "pipeline.chunk_layers": (0, 2, 1, 0), "pipeline.remat": "none"},
    ),
    "a stage without layers": Case(
        (2, 2, 1), "zb_h1", 1, 4, {"model.layers": 3, "pipeline.chunk_layers": (3, 0)}
    ),
    "replicas, one microbatch": Case(
        (2, 2, 1), microbatches=1, changes={"data.batch_size": 16} | EARLY | {"mesh.replica": 2}
    ),
}


def variant(name: str) -> Config:
    return VARIANTS[name].config({"optimizer.clip_norm": plain_loop.CLIP})


LONG = (  # what is tested of them is elsewhere, too
    "a stage without layers",
    "gpt2 form, documents apart, fewer microbatches than stages",
    "gpt2 form",
    "replicas, one microbatch",
    "four devices to a key/value head, gpt2 form",
    "nothing sharded over data",
    "one key/value head a device, chunks of the loss, tied",
    "two devices to a key/value head, in B and W",
    "two devices to a key/value head, gated",
    "a parallel block, zero 3, split vocabulary",
)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in LONG])
def test_same_gradients(name):
    plain_loop.assert_same(
        plain_loop.gradients(variant(name)), plain_loop.reference(variant(name), 1)
    )


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_same_training(name):
    plain_loop.assert_same(plain_loop.train(variant(name)), plain_loop.reference(variant(name)))


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["grouped queries, documents apart, chunks of the loss", "replicas, one microbatch"]
)
def test_evaluation_is_the_loss_of_training(name):
    cfg = variant(name)
    losses = jax.device_get(evaluate(cfg))
    assert int(losses.tokens) == int(small.batch(cfg, 0)["weights"].sum())
    np.testing.assert_allclose(losses.loss, plain_loop.reference(cfg, 1).losses[0], rtol=1e-5)


def evaluate(cfg: Config):
    """The losses of batch 0 with the plain weights."""
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        params = small.from_plain(step.layout, plain_loop.weights(cfg))
        return step.evaluate(params, small.place_batch(step, cfg, small.batch(cfg, 0)))


@pytest.mark.parametrize(
    "run, steps",
    [
        (plain_loop.gradients, 1),
        pytest.param(plain_loop.train, plain_loop.STEPS, marks=pytest.mark.full),
    ],
)
def test_bfloat16_is_close(run, steps):
    cfg = Case((2, 1, 2), changes=GPT2 | TIED).config({"optimizer.clip_norm": plain_loop.CLIP})
    rough = run(
        configs.replace(cfg, {"precision.compute": "bfloat16", "precision.reduce": "bfloat16"})
    )
    exact = plain_loop.reference(cfg, steps)
    # 8 bits of mantissa: 0.4 % a rounding
    np.testing.assert_allclose(rough.losses, exact.losses, rtol=1e-2)
    np.testing.assert_allclose(rough.norm, exact.norm, rtol=2e-2)
    assert abs(rough.losses[0] / exact.losses[0] - 1) > 1e-6, "nothing was computed in bfloat16"
