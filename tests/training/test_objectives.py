"""The objective with a z-loss, and a loss of one's own: on every layout the loss and gradients of
plain jax, whose logits are all in memory at once.

Tolerances: plain_loop's for the loss; a gradient may differ by 1e-5 of its largest number.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import plain_loop, small
from support.small import Case

from jaxtrain.models import transformer
from jaxtrain.training.step import make_step

Z_LOSS = 0.1
FILE = """
import jax
import jax.numpy as jnp

def smoothed(logits, targets):
    log_p = jax.nn.log_softmax(logits)
    target = jnp.take_along_axis(log_p, targets[:, None], -1)[:, 0]
    return -0.9 * target - 0.1 * log_p.mean(-1)
"""
CHUNKS = {"model.loss_chunk": 16, "data.batch_size": 8, "model.layers": 2} | small.PLAIN_LAYER
LAYOUTS = {
    "2 × 2 × 2": Case((2, 2, 2), changes={"pipeline.vocabulary": "end_stages"}),
    "shared vocabulary": Case((1, 2, 2), changes={"pipeline.vocabulary": "parallel"}),
    "zb_h1, zero 3": Case((2, 2, 2), "zb_h1", changes={"parallel.zero": 3}),
    "context": Case((1, 2, 2), changes={"mesh.context": 2}),
    "tied": Case((1, 1, 4), changes={"model.tied_embeddings": True}),
}
DRAWN = {("own", "2 × 2 × 2"), ("z-loss", "shared vocabulary")}
ALL = [(name, layout) for name in ("z-loss", "own") for layout in LAYOUTS]


def objective(name: str, logits, targets, weights):
    """Returns (the objective, the reported terms)."""
    log_p = jax.nn.log_softmax(logits)
    target = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    if name == "own":
        loss = ((-0.9 * target - 0.1 * log_p.mean(-1)) * weights).sum()
        return loss, {"loss": loss}
    loss = (-target * weights).sum()
    z_loss = (jax.nn.logsumexp(logits, -1) ** 2 * weights).sum()
    return loss + Z_LOSS * z_loss, {"loss": loss, "z_loss": z_loss}


@functools.cache
def plain(name: str, cfg) -> tuple[dict, dict]:
    """The reported terms and the gradients of the parameters."""
    parts, batch = transformer.build(cfg.model), small.batch(cfg, 0)
    weights = batch["weights"] / batch["weights"].sum()

    def of(params):
        logits = transformer.logits(parts, params, batch["tokens"])
        return objective(name, logits, batch["targets"], weights)

    return jax.jit(jax.grad(of, has_aux=True))(plain_loop.weights(cfg))[::-1]


@pytest.mark.parametrize(
    "name, layout",
    [
        pytest.param(*each, marks=[] if each in DRAWN else pytest.mark.full)
        for each in ALL
        if each != ("own", "shared vocabulary")  # refused: no device has all logits of a token
    ],
)
def test_loss_and_gradients_of_plain_jax(tmp_path, name, layout):
    (tmp_path / "mine.py").write_text(FILE)
    asked = {"train.z_loss": Z_LOSS} if name == "z-loss" else {}
    if name == "own":
        asked = {"train.loss": f"{tmp_path}/mine.py:smoothed"}
    cfg = LAYOUTS[layout].config(CHUNKS | asked)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        params = small.from_plain(step.layout, plain_loop.weights(cfg))
        batch = small.place_batch(step, cfg, small.batch(cfg, 0))
        results = jax.device_get(step.gradients(params, batch))
    model = {path: a for path, a in LAYOUTS[layout].changes.items() if path.startswith("model.")}
    terms, gradients = plain(name, Case((1, 1, 1), changes=model).config(CHUNKS))
    got = {"loss": results.losses.loss, **results.losses.further}
    assert got.keys() == terms.keys()
    for term, value in terms.items():
        np.testing.assert_allclose(got[term], value, rtol=1e-5, err_msg=term)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()),
        small.to_plain(step.layout, results.gradients),
        gradients,
    )
