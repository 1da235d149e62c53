"""Steps whose attention is by the splash kernel, interpreted: the same training as on one device in
plain XLA, with B and W apart and over every way to split a sequence."""

import pytest
from support.plain_loop import CLIP, STEPS, assert_same, gradients, reference, train
from support.small import Case

from jaxtrain.config import replace
from jaxtrain.parallel.attention import splash

APART = {"data.attend_across_documents": False}
SPLASH = {
    "model.attention_kernel": "splash",
    "model.layers": 2,
    "model.heads": 4,
    "model.kv_heads": 2,
    "data.sequence_length": 128,
}
MLA = {
    **{"model.attention": "mla", "model.kv_heads": 0, "model.kv_rank": 20, "model.query_rank": 12},
    **{"model.rope_head_dim": 10, "model.value_head_dim": 14},
}
CASES = {
    "zb_h1, documents": Case((1, 2, 2), "zb_h1", 1, 2, changes={**APART, "pipeline.remat": "none"}),
    "1f1b, full, latent": Case(
        (1, 2, 1), "1f1b", 1, 2, changes={**MLA, **APART, "data.sequence_length": 256}
    ),
    "zb_v, selective": Case(
        (1, 2, 2), "zb_v", 2, 4, changes={"pipeline.remat": "selective", "model.layers": 4}
    ),
    "one stage, zero 3": Case((2, 1, 2), changes={**APART, "parallel.zero": 3}),
    "gather 2": Case(
        (1, 2, 1), "zb_h1", 1, 2, changes={**APART, "mesh.context": 2, "data.sequence_length": 512}
    ),
    "ulysses 2": Case(
        (1, 1, 1),
        changes={
            **APART,
            "mesh.context": 2,
            "parallel.context": "ulysses",
            "data.sequence_length": 256,
        },
    ),
    "ring 2, zb_h1": Case(
        (1, 2, 1),
        "zb_h1",
        1,
        2,
        changes={
            **APART,
            "mesh.context": 2,
            "parallel.context": "ring",
            "pipeline.remat": "selective",
            "data.sequence_length": 512,
        },
    ),
    "ring 2": Case(
        (1, 1, 1),
        changes={
            **APART,
            "mesh.context": 2,
            "parallel.context": "ring",
            "data.sequence_length": 512,
        },
    ),
}


def assert_same_as_plain_xla(name: str, run, steps: int, monkeypatch) -> None:
    monkeypatch.setattr(splash, "MOST", splash.LANES)
    cfg = CASES[name].config(
        {"optimizer.clip_norm": CLIP, **SPLASH, "data.batch_size": 4 * CASES[name].microbatches}
    )
    assert_same(run(cfg), reference(replace(cfg, {"model.attention_kernel": "xla"}), steps))


@pytest.mark.parametrize("name", ["zb_h1, documents"])
def test_same_gradients(name, monkeypatch):
    assert_same_as_plain_xla(name, gradients, 1, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_same_training(name, monkeypatch):
    assert_same_as_plain_xla(name, train, STEPS, monkeypatch)
