"""Imported models against what transformers computes with them, which reference.npz has: logits,
losses and every gradient, on one device and on meshes.

    python tests/support/transformers_models.py record tests/hf/reference.npz

writes the file anew, with the packages of requirements/transformers.txt. test_transformers.py
compares with transformers itself.
"""

import functools
import pathlib

import jax
import numpy as np
import optax
import pytest
from support import hf_reference, small
from support.hf_imported import Imported, imported
from support.hf_models import CONFIGS, FIRST, OTHERS

from jaxtrain.hf.model_config import read_model
from jaxtrain.models import transformer
from jaxtrain.training.step import make_step

RECORDED = np.load(pathlib.Path(__file__).parent / "reference.npz")
NAMES = [name.removesuffix("/loss") for name in RECORDED if name.endswith("/loss")]
BATCH = {
    "model.mtp_depth": 0,  # transformers saves no prediction modules
    "mesh.data": 1,
    "data.batch_size": hf_reference.SEQUENCES,
    "data.sequence_length": hf_reference.LENGTH - 1,
    "pipeline.microbatches": 2,
}
# Every axis that splits a model, at 2. Three layers are uneven on two stages.
MESHES = {
    "data, stage, model": {"mesh.data": 2, "mesh.stage": 2, "mesh.model": 2},
    "context, stage, model": {"mesh.context": 2, "mesh.stage": 2, "mesh.model": 2},
    "expert, context, stage": {"mesh.expert": 2, "mesh.context": 2, "mesh.stage": 2},
    "expert, stage, model": {"mesh.expert": 2, "mesh.stage": 2, "mesh.model": 2},
}
ALWAYS = [
    ("gemma2", "data, stage, model"),
    ("smollm3 with a list", "context, stage, model"),
]


def model_of(name: str, **changes) -> Imported:
    """The model of a name in CONFIGS with the weights that were recorded."""
    kind, seed = CONFIGS[name]["model_type"], int(RECORDED[f"{name}/seed"])
    weights = functools.partial(hf_reference.weights, seed, model_type=kind)
    return imported(CONFIGS[name], weights, BATCH | changes)


@pytest.mark.parametrize("name", small.named(FIRST, OTHERS))
def test_logits_and_loss(name):
    model = model_of(name)
    parts, tokens = transformer.build(model.config.model), hf_reference.tokens_of(model.config)
    logits = jax.jit(lambda params: transformer.logits(parts, params, tokens[:, :-1]))(model.plain)
    expected = RECORDED[f"{name}/logits"]
    allowed = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(logits[:, -1], expected, rtol=0, atol=allowed)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    np.testing.assert_allclose(loss, RECORDED[f"{name}/loss"], rtol=1e-5)


def meshes_of(name: str) -> list[str]:
    """The meshes that a model can have."""
    model = read_model(CONFIGS[name], "config.json")[1]
    if model.mixer:  # a Gated DeltaNet has no rule for `context`
        return ["data, stage, model", "expert, stage, model"]
    if model.experts:
        return ["data, stage, model", "expert, context, stage"]
    return ["data, stage, model", "context, stage, model"]


def meshes() -> list:
    """(name, mesh): ALWAYS, and for --full every model on the meshes that it can have."""
    every = [(name, mesh) for name in NAMES for mesh in meshes_of(name)]
    rest = [pytest.param(*case, marks=pytest.mark.full) for case in every if case not in ALWAYS]
    return [*ALWAYS, *rest]


@pytest.mark.parametrize("name, mesh", meshes())
def test_loss_and_gradients_on_meshes(name, mesh):
    model = model_of(name, **MESHES[mesh])
    step, tokens = (
        make_step(model.config, small.mesh_of(model.config)),
        hf_reference.tokens_of(model.config),
    )
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones(tokens[:, 1:].shape, np.float32),
    }
    with jax.set_mesh(step.mesh):
        params = small.from_plain(step.layout, model.plain)
        placed = small.place_batch(step, model.config, batch)
        results = jax.device_get(step.gradients(params, placed))
    np.testing.assert_allclose(results.losses.loss, RECORDED[f"{name}/loss"], rtol=1e-5)
    gradients = model.published(small.to_plain(step.layout, results.gradients))
    assert_same_gradients(hf_reference.digest(gradients), RECORDED[f"{name}/gradients"])


def assert_same_gradients(figures: np.ndarray, expected: np.ndarray) -> None:
    """Digests to 1e-4 of each gradient's norm; one that should be nothing (the router of experts
    that all weigh 1) to 1e-7 of the largest norm. NaN is expected where no parameter is."""
    parameters = ~np.isnan(expected).any(-1)
    assert parameters.sum() > len(expected) / 2
    norms = expected[parameters, :1]
    allowed = 1e-4 * np.maximum(norms, 1e-3 * norms.max())
    wrong = np.abs(figures[parameters] - expected[parameters]) > allowed
    assert not wrong.any(), (figures[parameters][wrong], expected[parameters][wrong])
