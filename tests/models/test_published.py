"""Experts, routers, latent attention and multi-token prediction as the published models have them:
logits and gradients of all parameters against those of `transformers`, which published.json has
(published.py)."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from support import published, small

from jaxtrain.config import Config, ModelConfig
from jaxtrain.models import transformer
from jaxtrain.models.moe import Router
from jaxtrain.models.spec import binder
from jaxtrain.training.step import make_step

CASES = json.loads((pathlib.Path(published.__file__).parent / "published.json").read_text())
VERSIONS, ROUTERS = CASES.pop("versions"), CASES.pop("routers")


def assert_same_gradients(got: dict, expected: dict) -> None:
    """Of each parameter, to 2e-5 of its gradient's size, as the other side's float32 is no more
    exact; where that should be nothing (the router of experts that all weigh 1), of the largest
    one's."""
    largest = max(norm for norm, _ in expected.values())
    for name, (norm, along) in expected.items():
        allowed = 2e-5 * max(norm, 1e-2 * largest)
        found = published.digest(name, got[name])
        np.testing.assert_allclose(found, (norm, along), rtol=0, atol=allowed, err_msg=name)


LONG = ("deepseek_v2",)  # its choice of groups is tested in test_moe.py, too


@pytest.mark.parametrize(
    "name", small.named([n for n in CASES if not CASES[n]["mtp_depth"] and n not in LONG], LONG)
)
def test_logits_and_gradients(name):
    case = CASES[name]
    cfg = published.config_of(case["kind"], case["config"]).model
    parts, given = transformer.build(cfg), published.weights(case["shapes"])

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(given):
        logits = transformer.logits(
            parts, published.parameters_of(case["kind"], cfg, given), published.tokens()[:, :-1]
        )
        return (logits * published.random("cotangent", *logits.shape)).sum(), logits

    (_, logits), gradients = run(given)
    np.testing.assert_allclose(
        logits, case["logits"], rtol=0, atol=1e-5 * np.abs(case["logits"]).max()
    )
    assert_same_gradients(gradients, case["gradients"])


@pytest.mark.parametrize("name", published.ROUTERS)
def test_weights_of_experts(name):
    """A router's choices and weights, those of experts that are not chosen being 0."""
    case = published.ROUTERS[name]
    x, matrix, biases = case.weights()
    model = ModelConfig(width=published.WIDTH, **case.settings)
    cfg = Config(model=model).fill().model
    params = {"weight": matrix.T}
    params |= {"logit_bias": biases} if cfg.biases else {}
    params |= {"bias": biases} if cfg.router_bias else {"load": np.zeros(cfg.experts, np.float32)}
    router = binder(Router(cfg, 1))(params)
    weights, routing = router(x[None], drops=False)
    chosen = np.empty(weights.size, int)
    chosen[routing.choice_of_position] = np.repeat(np.arange(cfg.experts), routing.sizes)
    every = np.zeros((len(x), cfg.experts))
    np.put_along_axis(every, chosen.reshape(len(x), -1), np.asarray(weights[0]), 1)
    # a logit of 47 is rounded by up to 2e-6, and so a small score in proportion
    np.testing.assert_allclose(every, ROUTERS[name], rtol=1e-5, atol=0)


@pytest.mark.full
def test_a_training_step_with_predictions():
    """By the runtime, on one device."""
    (case,) = (case for case in CASES.values() if case["mtp_depth"])
    cfg = published.config_of(case["kind"], case["config"], case["mtp_depth"])
    given = published.weights(case["shapes"])
    plain, back = jax.vjp(
        lambda given: published.parameters_of(case["kind"], cfg.model, given), given
    )
    tokens = published.tokens()
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones(tokens[:, 1:].shape, np.float32),
    }
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        params = small.from_plain(step.layout, jax.tree.map(np.asarray, plain))
        results = jax.device_get(step.gradients(params, small.place_batch(step, cfg, batch)))
    np.testing.assert_allclose(
        [results.losses.loss, results.losses.further["mtp_loss"]],
        [case["loss"], case["mtp_loss"]],
        rtol=1e-5,
    )
    (gradients,) = back(small.to_plain(step.layout, results.gradients))
    assert_same_gradients(gradients, case["gradients"])
