"""Multi-token prediction: the same training as on one device, where the modules stand, and what is
left of them when training is over."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small
from support.plain_loop import CLIP, assert_same, gradients, mean, reference, train, weights
from support.small import Case

from jaxtrain import config as configs
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.restoring import load_parameters, restore
from jaxtrain.config import ConfigError
from jaxtrain.models import transformer
from jaxtrain.pipeline.setup import make_setup, times_of
from jaxtrain.planner.layer.model import model_of
from jaxtrain.runtime.batch import look_ahead
from jaxtrain.training.state import stored_shapes
from jaxtrain.training.step import make_step

SHARED = {"optimizer.clip_norm": CLIP}
APART, TIED = {"data.attend_across_documents": False}, {"model.tied_embeddings": True}
NONE, SELECTIVE = {"pipeline.remat": "none"}, {"pipeline.remat": "selective"}
LATENT = {"model.attention": "mla", "model.kv_rank": 20, "model.rope_head_dim": 6}
CASES = {
    "context, tied": Case(
        (1, 2, 1),
        "zb_h1",
        1,
        3,
        changes={"mesh.context": 2, "model.mtp_depth": 1, **NONE, **TIED, **APART},
    ),
}
MORE = {
    "zero 3, documents": Case(
        (2, 2, 1), changes={"model.mtp_depth": 2, **APART, **SELECTIVE, "parallel.zero": 3}
    ),
    "zero 3, documents, model 2": Case(
        (2, 2, 2),
        "interleaved",
        2,
        changes={"model.mtp_depth": 2, **APART, **SELECTIVE, "parallel.zero": 3},
    ),
    "one stage, zero 3, tied": Case(
        (4, 1, 1), changes={"mesh.context": 2, "model.mtp_depth": 1, **TIED, "parallel.zero": 3}
    ),
    "zb_v, zero 2": Case(
        (2, 2, 1),
        "zb_v",
        2,
        4,
        changes={"model.mtp_depth": 1, "parallel.zero": 2, "model.positions": "learned"},
    ),
    "experts": Case(
        (1, 2, 1),
        changes={
            "mesh.context": 2,
            "model.mtp_depth": 1,
            "mesh.expert": 2,
            "model.experts": 4,
            "model.balance_loss": 0.01,
            "parallel.zero": 2,
        },
    ),
    "latent": Case((1, 2, 2), changes={"model.mtp_depth": 2, **LATENT, "model.loss_chunk": 8}),
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


def test_look_ahead():
    """The text a b c d e f with a document's end after c: the token one place on, its target, and
    no weight where that is another's."""
    text = np.array([[[1, 2, 3, 4, 5, 6]]])
    batch = {
        "tokens": text[..., :5],
        "targets": text[..., 1:],
        "weights": jnp.ones((1, 1, 5)),
        "segments": np.array([[[1, 1, 1, 2, 2]]]),
    }
    ahead = look_ahead(batch, 2)
    first, second = ahead["mtp"]["0"], ahead["mtp"]["1"]
    assert first["tokens"].tolist() == [[[2, 3, 4, 5, 0]]] and first["targets"].tolist() == [
        [[3, 4, 5, 6, 0]]
    ]
    assert first["weights"].tolist() == [[[1, 1, 0, 1, 0]]]
    assert second["targets"].tolist() == [[[4, 5, 6, 0, 0]]] and second["weights"].tolist() == [
        [[1, 0, 0, 0, 0]]
    ]
    assert look_ahead(batch, 0) == batch


def test_the_loss_is_reported_apart():
    """`loss` is the next token's alone, `mtp_loss` the mean over the modules, whatever their
    weight; evaluation has the former. Here a module sees only the tokens that have a target, and of
    the stream before it what the norm there has left."""
    cfg = small.config(
        microbatches=2, changes={"model.mtp_depth": 2, "model.mtp_weight": 0.2, "model.layers": 1}
    )
    step, arrays = make_step(cfg, small.mesh_of(cfg)), small.batch(cfg, 1)
    plain, parts, tokens = weights(cfg), transformer.build(cfg.model), arrays["tokens"]
    # a scale that is the same everywhere would not be seen
    for norm in (plain["head"]["norm"], plain["predictors"]["0"]["norm"]):
        norm["scale"] = np.geomspace(0.1, 10, cfg.model.width, dtype=np.float32)
    with jax.set_mesh(step.mesh):
        params, batch = small.first_state(step, plain).params, small.place_batch(step, cfg, arrays)
        evaluated, losses = step.evaluate(params, batch), step.gradients(params, batch).losses

    @jax.jit
    def expected(plain):
        positions, layer = (
            transformer.default_positions(tokens),
            jax.tree.map(lambda a: a[0], plain["layers"]),
        )
        x = parts.embedder(plain["embed"])(tokens, positions, np.float32)
        x = parts.blocks[""](layer)(x, positions)
        norm = lambda p, x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"]
        x = norm(plain["head"]["norm"], x)
        losses = [mean(x @ plain["head"]["table"].T, arrays["targets"], arrays["weights"])]
        for k in (1, 2):
            module = dict(plain["predictors"][str(k - 1)])
            last, rest = module.pop("norm"), slice(None, tokens.shape[1] - k)
            x = norm(
                last,
                parts.predictor(module)(
                    x[:, rest], plain["embed"]["table"][tokens[:, k:]], positions[:, rest]
                ),
            )
            losses.append(
                mean(
                    x @ plain["head"]["table"].T, arrays["targets"][:, k:], arrays["weights"][:, k:]
                )
            )
        return losses

    assert evaluated.further == {}
    first, *further = expected(plain)
    np.testing.assert_allclose(
        [evaluated.loss, losses.loss, losses.further["mtp_loss"]],
        [first, first, np.mean(further)],
        rtol=1e-5,
    )


def test_where_the_modules_stand():
    """With the head on the last stage, whose op takes as much longer."""
    cfg = small.config((1, 2, 1), changes={"model.mtp_depth": 1})
    assert make_setup(cfg).table.vocabulary == "end_stages"
    plain = dataclasses.replace(cfg.model, mtp_depth=0)
    layer, head = 4 * 32 * 32 + 3 * 32 * 64, 61 * 32
    assert times_of(cfg).head == pytest.approx(3 * (2 * head + layer + 2 * 32 * 32) / (2 * layer))
    parts, without = transformer.build(cfg.model), transformer.build(plain)
    assert parts.parameter_count == without.parameter_count + layer + 2 * 32 * 32 + 5 * 32
    counts = [model_of(model, 16).sequence_flops(causal=False) for model in (plain, cfg.model)]
    attention = 16 * 2 * 32 * 2  # of a token: scores and values of a layer
    assert counts[1] - counts[0] == 16 * (2 * (layer + 2 * 32 * 32 + head) + attention)


def test_a_table_of_ones_own_that_shares_the_head(tmp_path):
    from jaxtrain.schedule import by_name
    from jaxtrain.schedule.files import table_csv
    from jaxtrain.schedule.table_spec import TableSpec

    file = tmp_path / "mine.csv"
    file.write_text(
        table_csv.to_csv(
            by_name.make_table(TableSpec("1f1b", 2, 1, 4, remat_full=True, vocabulary="parallel"))
        )
    )
    cfg = small.config((1, 2, 1), f"csv:{file}", changes={"model.mtp_depth": 1})
    with pytest.raises(
        ConfigError,
        match=re.escape("model.mtp_depth=1 needs embedding and head on one stage, and csv:"),
    ):
        make_setup(cfg)


def test_checkpoints(tmp_path):
    """Another mesh restores the modules; what generation loads has none."""
    cfg = small.config((2, 2, 1), changes={"model.mtp_depth": 1, "parallel.zero": 3})
    other = configs.replace(cfg, {"mesh.data": 1, "mesh.stage": 1, "mesh.model": 2})
    steps = [make_step(c, small.mesh_of(c)) for c in (cfg, other)]
    plain = weights(cfg)
    for step in steps:
        shapes = stored_shapes(step.layout, step.optimizer)
        with jax.set_mesh(step.mesh):
            if step is steps[0]:
                manager = Checkpointer(tmp_path, shapes)
                manager.save(1, small.first_state(step, plain), {})
                manager.wait()
                manager.close()
            else:
                state = restore(tmp_path, 1, step.abstract_state(), shapes)
                jax.tree.map(
                    np.testing.assert_array_equal,
                    small.to_plain(step.layout, jax.device_get(state.params)),
                    plain,
                )
    layout, params = load_parameters(tmp_path, 1, cfg.model, cfg.precision)
    assert sorted(params) == ["embed", "head", "layers"] and layout.parts.cfg.mtp_depth == 0
