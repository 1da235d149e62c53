"""Training twice, by the runtime and by one plain loop that knows nothing of tables, stages or
accumulators: a step's gradients, or some steps.

The plain loop is `jax.value_and_grad` of the mean loss over the whole batch's valid tokens on one
device, through `transformer.trunk`, and optax. Compiling is what costs here, so the runtime's side
compiles one program, the train step: its gradients are read from the optimizer's momentum after
the first step (config/optimizers.py), where it has one. Four steps show what the first does not:
that the state after a step is that from which the next goes on, and that padding stays zero.

Tolerances: float32 sums in another order change the first loss and the norm by under 1e-6; ten
times that is allowed, and 1e-4 after ten steps of Adam, whose division by the root of the second
moment makes small differences larger.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import optax

from jaxtrain.config import Config
from jaxtrain.config.groups.layer_kinds import forms_of_layers
from jaxtrain.config.optimizers import record_of
from jaxtrain.models import transformer
from jaxtrain.training.step import make_step
from jaxtrain.training.update.optimizer import learning_rate
from support import small

STEPS, LONG = 4, 10  # of most tests, and of the matrices with --full
CLIP = 0.05  # far below the gradients' norm: clipping is always at work


@dataclasses.dataclass(frozen=True)
class Run:
    """Losses of some steps, the first gradient norm and the first gradients (plain), the parameters
    at the end (plain), and the first loss of the tokens beyond the next: None where it is not known
    or there is none."""

    losses: list[float]
    norm: float
    gradients: dict
    params: dict
    mtp_loss: float | None = None


# --- the reference --------------------------------------------------------------------------------


def weights(cfg: Config) -> dict:
    """Initial parameters (plain) in which nothing is zero or one: norm scales and biases too."""
    parts, random = transformer.build(cfg.model), np.random.default_rng(7)
    make = lambda *lead: (
        lambda s: np.float32(
            s.constant + (s.std or 0.1) * random.standard_normal((*lead, *s.shape))
        )
    )
    layer, forms = parts.specs["layer"], forms_of_layers(cfg.model)
    ends = {k: jax.tree.map(make(), tree) for k, tree in parts.ends.items()}
    if not forms:
        return ends | {"layers": jax.tree.map(make(cfg.model.layers), layer)}
    stacks = {form: jax.tree.map(make(forms.count(form)), layer[form]) for form in layer}
    return ends | {"layers": stacks}


def mean(logits, targets, weights):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * weights).sum() / weights.sum()


def further_losses(parts, params, batch, x):
    """The mean of the modules' losses, by equations 21 to 25 of arXiv:2412.19437, each h after its
    norm, as in the released weights; 0 without modules. The last tokens, which have no target, are
    followed by 0s, which nothing before them sees; experts count them."""
    m, tokens, segments = parts.cfg, batch["tokens"], batch.get("segments")
    positions = batch.get("positions", transformer.default_positions(tokens))
    total, table, norm = 0.0, params["embed"]["table"], params["head"]["norm"]
    for k in range(1, m.mtp_depth + 1):
        module = params["predictors"][str(k - 1)]
        inner, following = (
            {n: p for n, p in module.items() if n != "norm"},
            np.roll(np.arange(tokens.shape[1]), -k),
        )
        x, norm = parts.norm(norm)(x), module["norm"]
        x = parts.predictor(inner)(
            x, table[(tokens[:, following]).at[:, -k:].set(0)], positions, segments
        )
        logits = parts.head({**params["head"], "norm": norm})(
            x, table if m.tied_embeddings else None
        )[:, :-k]
        same = 1 if segments is None else segments[:, :-k] == segments[:, k:]
        total += mean(logits, batch["targets"][:, k:], batch["weights"][:, k:] * same) / m.mtp_depth
    return total


def reference(cfg: Config, steps: int = STEPS) -> Run:
    """The plain loop for the model, data and optimizer of a config, whatever its layout. Made once
    in a process for all layouts. Of one step the parameters are those before it: the optimizer,
    of every layer's arrays apart, is much of what the loop takes to compile."""
    return _reference(
        Config(model=cfg.model, data=cfg.data, optimizer=cfg.optimizer, train=cfg.train), steps
    )


COUNTS = ("bias", "load", "dropped")  # of a router: their gradients are counts


def _of_router(path: tuple, names) -> bool:
    return len(path) > 1 and path[-2].key == "router" and path[-1].key in names


def without_counts(gradients: dict) -> dict:
    return jax.tree_util.tree_map_with_path(
        lambda path, g: 0 * g if _of_router(path, COUNTS) else g, gradients
    )


def moved(params: dict, gradients: dict, rate: float) -> dict:
    """An expert that has less than the mean becomes more attractive, one that has more less."""
    towards_mean = lambda load: rate * jax.numpy.sign(load.mean(-1, keepdims=True) - load)
    move = lambda path, p, g: p + towards_mean(g) if _of_router(path, ("bias",)) else p
    return jax.tree_util.tree_map_with_path(move, params, gradients)


def plain_optimizer(cfg: Config) -> optax.GradientTransformation:
    """optax's own, of parameters that are separate arrays."""
    is_matrix = lambda path, a: a.ndim > 1 and "biases" not in jax.tree_util.keystr(path)
    matrices = lambda params: jax.tree_util.tree_map_with_path(is_matrix, params)
    if cfg.optimizer.name == "muon":
        return optax.chain(optax.clip_by_global_norm(cfg.optimizer.clip_norm), _muon(cfg))
    return optax.chain(
        optax.clip_by_global_norm(cfg.optimizer.clip_norm),
        record_of(cfg.optimizer.name).make(jax, optax, cfg.optimizer),
        optax.add_decayed_weights(cfg.optimizer.weight_decay, matrices),
        optax.scale_by_learning_rate(learning_rate(cfg.optimizer, cfg.train.steps)),
    )


def _muon(cfg: Config) -> optax.GradientTransformation:
    """optax's, of matrices that stand side by side in an array as separate ones. Tables decay on
    their own: optax's Adam would let norms decay with them."""
    of, model = cfg.optimizer, cfg.model

    def of_head(array, heads: int, *widths: int) -> list:
        by_head = array.reshape(len(array), heads, -1)
        parts = jax.numpy.split(by_head, np.cumsum(widths)[:-1], -1)
        return [part.reshape(len(array), -1) for part in parts]

    def apart(path, a):
        name = jax.tree_util.keystr(path)
        if "compress" in name and a.ndim == 2:
            widths = [n for n in (model.query_rank, model.kv_rank, model.rope_head_dim) if n]
            return of_head(a, 1, *widths)
        if "expand" in name and a.ndim == 2:
            return of_head(a, model.heads, model.head_dim, model.value_head_dim)
        return a

    def together(like, parts):
        if not isinstance(parts, list):
            return parts
        heads = 1 if len(like) == model.width else model.heads
        by_head = [part.reshape(len(like), heads, -1) for part in parts]
        return jax.numpy.concatenate(by_head, -1).reshape(like.shape)

    def a_table(path) -> bool:
        return any(word in jax.tree_util.keystr(path) for word in ("table", "positions"))

    def numbers(path, a):
        if a.ndim < 2 or "biases" in jax.tree_util.keystr(path) or a_table(path):
            return None
        return optax.contrib.MuonDimensionNumbers(a.ndim - 2, a.ndim - 1)

    rate = learning_rate(of, cfg.train.steps)
    of_rest = lambda count: (
        rate(count) * (of.adamw_learning_rate or of.learning_rate) / of.learning_rate
    )
    inner = optax.contrib.muon(
        rate,
        ns_steps=of.muon_iterations,
        beta=of.momentum,
        eps=of.epsilon,
        adam_b1=of.b1,
        adam_b2=of.b2,
        adam_learning_rate=of_rest,
        weight_decay=of.weight_decay,
        muon_weight_dimension_numbers=lambda params: jax.tree_util.tree_map_with_path(
            numbers, params
        ),
        consistent_rms=of.muon_rms,
    )
    split = lambda tree: jax.tree_util.tree_map_with_path(apart, tree)

    def update(gradients, state, params):
        count, of_inner = state
        updates, of_inner = inner.update(split(gradients), of_inner, split(params))
        updates = jax.tree.map(together, params, updates, is_leaf=lambda a: hasattr(a, "shape"))
        decay = of_rest(count) * of.weight_decay
        updates = jax.tree_util.tree_map_with_path(
            lambda path, u, p: u - decay * p if a_table(path) else u, updates, params
        )
        return updates, (count + 1, of_inner)

    return optax.GradientTransformation(lambda params: (0, inner.init(split(params))), update)


def by_layer(tree: dict) -> dict:
    """Plain parameters, or anything shaped like them, with the layers' arrays apart."""
    layer = lambda i: jax.tree.map(lambda a: a[i], tree["layers"])
    return tree | {"layers": [layer(i) for i in range(len(jax.tree.leaves(tree["layers"])[0]))]}


def stacked(tree: dict) -> dict:
    """`by_layer`, undone."""
    return tree | {"layers": jax.tree.map(lambda *a: jax.numpy.stack(a), *tree["layers"])}


@functools.cache
def _reference(cfg: Config, steps: int) -> Run:
    parts = transformer.build(cfg.model, batch_size=cfg.data.batch_size)
    optimizer = plain_optimizer(cfg)

    def mean_loss(params, batch):
        x = transformer.trunk(
            parts, params, batch["tokens"], batch.get("positions"), batch.get("segments")
        )
        logits = parts.head(params["head"])(
            x, params["embed"]["table"] if cfg.model.tied_embeddings else None
        )
        loss = mean(logits, batch["targets"], batch["weights"])
        further = further_losses(parts, params, batch, x)
        return loss + cfg.model.mtp_weight * further, (loss, further)

    @jax.jit
    def train(params, state, batch):
        (_, both), gradients = jax.value_and_grad(mean_loss, has_aux=True)(params, batch)
        if steps == 1:
            return params, state, both, gradients
        updates, state = optimizer.update(
            by_layer(without_counts(gradients)), state, by_layer(params)
        )
        changed = optax.apply_updates(params, stacked(updates))
        return (
            moved(changed, gradients, cfg.model.balance_rate),
            state,
            both,
            gradients,
        )

    params, state = weights(cfg), None
    losses, further, first = [], [], None
    if steps > 1:
        state = optimizer.init(by_layer(params))
    for i in range(steps):
        params, state, both, gradients = train(params, state, small.batch(cfg, i))
        losses.append(float(both[0]))
        further.append(float(both[1]))
        first = first or jax.tree.map(np.asarray, without_counts(gradients))
    mtp_loss = further[0] if cfg.model.mtp_depth else None
    return Run(losses, norm_of(first), first, jax.tree.map(np.asarray, params), mtp_loss)


def norm_of(gradients: dict) -> float:
    return float(
        np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(gradients)))
    )


# --- the step under test --------------------------------------------------------------------------


def train(cfg: Config, steps: int = STEPS) -> Run:
    """The same with the runtime. Gradients are {} of an optimizer without a momentum."""
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        state = small.first_state(step, weights(cfg))
        batches = [small.place_batch(step, cfg, small.batch(cfg, i)) for i in range(steps)]
        metrics, moment = [], None
        momentum = record_of(cfg.optimizer.name).momentum
        with jax.transfer_guard("disallow"):
            for batch in batches:
                state, new = step.train(state, batch)
                metrics.append(jax.device_get(new))
                if momentum and moment is None:
                    moment = optax.tree_utils.tree_get(state.optimizer, momentum[0])
                    moment = jax.device_get(moment)
        params = jax.device_get(state.params)
    assert [int(m["weighted_tokens"]) for m in metrics] == [
        int(small.batch(cfg, i)["weights"].sum()) for i in range(steps)
    ]
    norm = float(metrics[0]["grad_norm"])
    assert norm > cfg.optimizer.clip_norm, "the gradients were meant to be clipped"
    gradients = {}
    if momentum:
        scale = norm / cfg.optimizer.clip_norm / momentum[1](cfg.optimizer)
        gradients = jax.tree.map(
            lambda a: a * np.float32(scale), small.to_plain(step.layout, moment)
        )
    # to_plain fails where padding is not zero: after weight decay, too
    plain_params = small.to_plain(step.layout, params)
    np.testing.assert_allclose(metrics[-1]["param_norm"], norm_of(plain_params), rtol=1e-6)
    return Run([float(m["loss"]) for m in metrics], norm, gradients, plain_params)


def metrics_of(cfg: Config, batches: Sequence[Mapping]) -> list[dict]:
    """The metrics of a step of the runtime for each of these batches [rows, T], from `weights`."""
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        state, metrics = small.first_state(step, weights(cfg)), []
        for batch in batches:
            state, results = step.train(state, small.place_batch(step, cfg, batch))
            metrics.append(jax.device_get(results))
    return metrics


def gradients(cfg: Config) -> Run:
    """One step without the optimizer, which is much of what a train step takes to compile."""
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        params = small.from_plain(step.layout, weights(cfg))
        batch = small.place_batch(step, cfg, small.batch(cfg, 0))
        with jax.transfer_guard("disallow"):
            results = jax.device_get(step.gradients(params, batch))
    assert int(results.losses.tokens) == int(small.batch(cfg, 0)["weights"].sum())
    found = without_counts(small.to_plain(step.layout, results.gradients))
    mtp_loss = results.losses.further.get("mtp_loss")
    mtp_loss = None if mtp_loss is None else float(mtp_loss)
    return Run([float(results.losses.loss)], norm_of(found), found, {}, mtp_loss)


def assert_same(got: Run, expected: Run) -> None:
    """Of the steps that `got` has."""
    np.testing.assert_allclose(got.losses[0], expected.losses[0], rtol=1e-5)
    np.testing.assert_allclose(got.norm, expected.norm, rtol=1e-5)
    if got.mtp_loss is not None:
        np.testing.assert_allclose(got.mtp_loss, expected.mtp_loss, rtol=1e-5)
    for (path, g), e in zip(
        jax.tree_util.tree_leaves_with_path(got.gradients),
        jax.tree.leaves(expected.gradients) if got.gradients else [],
        strict=True,
    ):
        allowed = max(1e-5 * np.abs(e).max(), 1e-7 * expected.norm)
        worst = np.abs(g - e).max()
        assert worst <= allowed, (
            f"gradient of {jax.tree_util.keystr(path)}: {worst / np.abs(e).max():.1e} of its "
            "largest value"
        )
    np.testing.assert_allclose(got.losses, expected.losses[: len(got.losses)], rtol=1e-4)
