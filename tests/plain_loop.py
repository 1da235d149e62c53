"""Ten steps of training twice: by the runtime, and by one plain loop that knows nothing of tables, stages or accumulators.

The plain loop is `jax.value_and_grad` of the mean loss over the whole batch's valid tokens on one device, through
`transformer.forward`, and optax. Compiling is what costs here, so the runtime's side compiles one program, the train step: its gradients
are read from Adam's first moment after the first step, (1 − b1) · clipped gradient.

Tolerances: float32 sums in another order change the first loss and the norm by under 1e-6; ten times that is allowed, and 1e-4
after 10 steps of Adam, whose division by the root of the second moment makes small differences larger.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import small

from jaxtrain.config import Config, MeshConfig, PipelineConfig
from jaxtrain.models import transformer
from jaxtrain.training.optimizer import make_optimizer
from jaxtrain.training.step import make_step

STEPS = 10
CLIP = 0.05  # far below the gradients' norm: clipping is always at work


@dataclasses.dataclass(frozen=True)
class Run:
    """Ten steps: losses, the first gradient norm and the first gradients (plain), and the parameters at the end (plain)."""

    losses: list[float]
    norm: float
    gradients: dict
    params: dict


# --- the reference ---------------------------------------------------------------------------------------------------------------


def weights(cfg: Config) -> dict:
    """Initial parameters (plain) in which nothing is zero or one: norm scales and biases too."""
    parts, random = transformer.build(cfg.model), np.random.default_rng(7)
    make = lambda *lead: lambda s: np.float32(s.constant + (s.std or 0.1) * random.standard_normal((*lead, *s.shape)))
    specs = parts.specs
    return {k: jax.tree.map(make(), specs[k]) for k in ("embed", "head")} | {"layers": jax.tree.map(make(cfg.model.layers), specs["layer"])}


def reference(cfg: Config) -> Run:
    """The plain loop for the model, data and optimizer of a config, whatever its mesh and pipeline."""
    return _reference(dataclasses.replace(cfg, mesh=MeshConfig(), pipeline=PipelineConfig()))


@functools.cache
def _reference(cfg: Config) -> Run:
    parts = transformer.build(cfg.model)
    specs = {"embed": parts.specs["embed"], "layers": parts.specs["layer"], "head": parts.specs["head"]}
    optimizer = make_optimizer(cfg.optimizer, cfg.train.steps, specs)

    def mean_loss(params, batch):
        logits = transformer.forward(parts, params, batch["tokens"], batch.get("positions"), batch.get("segments"))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    @jax.jit
    def train(params, state, batch):
        loss, gradients = jax.value_and_grad(mean_loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, gradients

    params = weights(cfg)
    state, losses, first = optimizer.init(params), [], None
    for i in range(STEPS):
        params, state, loss, gradients = train(params, state, small.batch(cfg, i))
        losses.append(float(loss))
        first = first or jax.tree.map(np.asarray, gradients)
    norm = float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(first))))
    return Run(losses, norm, first, jax.tree.map(np.asarray, params))


# --- the step under test ---------------------------------------------------------------------------------------------------------


def train(cfg: Config) -> Run:
    """The same with the runtime."""
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        state = small.first_state(step, weights(cfg))
        batches = [small.place_batch(step, cfg, small.batch(cfg, i)) for i in range(STEPS)]
        metrics, moment = [], None
        with jax.transfer_guard("disallow"):
            for batch in batches:
                state, new = step.train(state, batch)
                metrics.append(jax.device_get(new))
                if moment is None:
                    moment = jax.device_get(optax.tree_utils.tree_get(state["optimizer"], "mu"))
        params = jax.device_get(state["params"])
    assert [int(m["tokens"]) for m in metrics] == [int(small.batch(cfg, i)["weights"].sum()) for i in range(STEPS)]
    norm = float(metrics[0]["grad_norm"])
    assert norm > cfg.optimizer.clip_norm, "the gradients were meant to be clipped"
    scale = norm / cfg.optimizer.clip_norm / (1 - cfg.optimizer.b1)
    gradients = jax.tree.map(lambda a: a * np.float32(scale), small.to_plain(step.layout, moment))
    # to_plain fails where padding is not zero: after weight decay, too
    return Run([float(m["loss"]) for m in metrics], norm, gradients, small.to_plain(step.layout, params))


def assert_same(got: Run, expected: Run) -> None:
    np.testing.assert_allclose(got.losses[0], expected.losses[0], rtol=1e-5)
    np.testing.assert_allclose(got.norm, expected.norm, rtol=1e-5)
    for (path, g), e in zip(jax.tree_util.tree_leaves_with_path(got.gradients), jax.tree.leaves(expected.gradients), strict=True):
        allowed = max(1e-5 * np.abs(e).max(), 1e-7 * expected.norm)
        worst = np.abs(g - e).max()
        assert worst <= allowed, f"gradient of {jax.tree_util.keystr(path)}: {worst / np.abs(e).max():.1e} of its largest value"
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-4)
