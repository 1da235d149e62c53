"""μP: the factors of table 8 by parameter, activations whose size does not depend on the width, and
training as with multipliers and rates that are written out, on meshes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import plain_loop, small
from support.small import Case

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.models import transformer
from jaxtrain.models.spec import is_spec
from jaxtrain.training.step import make_step
from jaxtrain.training.update.optimizer import Optimizer, learning_rate

BASE, RATIO = 16, 2  # of small.SMALL, whose width is 32
MUP = {"model.mup_base_width": BASE, "model.mup_base_head_dim": 2}  # of heads of 4
# (initial values, rate) by which parameters differ from those of a model without μP
HIDDEN, OUTPUT, SAME = (RATIO**-0.5, 1 / RATIO), (1 / RATIO, 1 / RATIO), (1.0, 1.0)
SCORES = math.sqrt(2 / 4)
FORMS = {
    "llama": (
        {},
        {
            "query']['weight": (HIDDEN[0] * SCORES, HIDDEN[1] * SCORES),
            "key']['weight": HIDDEN,
            "out']['weight": HIDDEN,
            "down']['weight": HIDDEN,
            "attention_norm']['scale": SAME,
            "['embed']['table": SAME,
            "['head']['table": SAME,
            "['head']['norm']['scale": OUTPUT,
        },
    ),
    "tied, Gemma's norms of heads, biases": (
        {
            "model.tied_embeddings": True,
            "model.norm_weight": "one_plus",
            "model.qk_norm": True,
            "model.biases": ("qkv", "mlp"),
        },
        {
            "query']['weight": HIDDEN,
            "query']['bias": SAME,
            "query_norm']['scale": (SCORES, SCORES),
            "key_norm']['scale": SAME,
            "up']['bias": SAME,
            "['head']['norm']['scale": OUTPUT,
        },
    ),
    "latents, experts, predictions": (
        {
            "model.attention": "mla",
            "model.kv_rank": 8,
            "model.query_rank": 8,
            "model.rope_head_dim": 2,
            "model.experts": 4,
            "model.shared_experts": 1,
            "model.shared_gate": True,
            "model.biases": ("router", "experts"),
            "model.mtp_depth": 1,
        },
        {
            "compress']['weight": HIDDEN,
            "query']['weight": tuple(factor * math.sqrt(4 / 6) for factor in HIDDEN),
            "expand']['weight": HIDDEN,
            "router']['weight": OUTPUT,
            "router']['logit_bias": SAME,
            "mlp']['up": HIDDEN,
            "mlp']['down": HIDDEN,
            "shared_weight": OUTPUT,
            "biases']['up": SAME,
            "project']['weight": HIDDEN,
            "['predictors']['0']['norm']['scale": OUTPUT,
        },
    ),
}


def specs_of(changes: dict) -> dict:
    tree = transformer.build(small.config(changes=changes).model).specs
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_spec)
    return {jax.tree_util.keystr(path): spec for path, spec in leaves}


@pytest.mark.parametrize("form", FORMS)
def test_factors_by_parameter(form):
    changes, factors = FORMS[form]
    plain, scaled = specs_of(changes), specs_of(changes | MUP)
    one_plus = changes.get("model.norm_weight") == "one_plus"
    for name, (size, rate) in factors.items():
        paths = [path for path in plain if name in path]
        assert paths, name
        for path in paths:
            before, after = plain[path], scaled[path]
            assert (after.mup_size, after.mup_rate) == pytest.approx((size, rate)), path
            if before.std is not None:
                assert after.std == pytest.approx(size * before.std), path
            elif "scale" in path:
                assert after.constant + one_plus == pytest.approx(size), path
    same = specs_of(changes | {"model.mup_base_width": 32})
    assert list(same.values()) == list(plain.values())  # so a run has the same program


# --- training with multipliers that are written out -----------------------------------------------


MESHES = {
    "data 2 · stage 2, zero 1": Case((2, 2, 1), changes={"parallel.zero": 1}),
    "2 × 2 × 2": Case((2, 2, 2)),
    "data 4, zero 3": Case((4, 1, 1), changes={"parallel.zero": 3}),
    "offload": Case((2, 1, 1), changes={"parallel.offload": "optimizer"}),
}


@functools.cache
def with_multipliers(cfg: Config) -> tuple[list[float], dict]:
    """(losses, parameters) of table 8 as it stands, by optax on one device: the logits and the
    scores have multipliers, and each matrix has its own rate."""
    scale = {"model.logit_scale": 1 / RATIO, "model.attention_scale": SCORES / math.sqrt(4)}
    plain = configs.replace(cfg, {"model.mup_base_width": 0, "model.mup_base_head_dim": 0} | scale)
    parts = transformer.build(plain.model)
    inside = lambda params, head, query: jax.tree_util.tree_map_with_path(
        lambda path, a: (
            a
            * (head if "['head']['norm']" in (name := jax.tree_util.keystr(path)) else 1)
            * (query if "['query']" in name else 1)
        ),
        params,
    )
    rates = lambda updates: jax.tree_util.tree_map_with_path(
        lambda path, a: a / RATIO if path[0].key == "layers" and path[-1].key == "weight" else a,
        updates,
    )
    is_matrix = lambda params: jax.tree_util.tree_map_with_path(
        lambda path, a: path[-1].key in ("weight", "table", "positions"), params
    )
    settings = cfg.optimizer
    optimizer = optax.chain(
        optax.scale_by_adam(settings.b1, settings.b2, settings.epsilon),
        optax.stateless(lambda updates, _: rates(updates)),
        optax.add_decayed_weights(settings.weight_decay, is_matrix),
        optax.scale_by_learning_rate(learning_rate(settings, cfg.train.steps)),
    )

    @jax.jit
    def train(params, state, batch):
        def loss(params):
            logits = transformer.logits(parts, params, batch["tokens"])
            return plain_loop.mean(logits, batch["targets"], batch["weights"])

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = inside(plain_loop.weights(cfg), RATIO, 1 / SCORES)
    state, losses = optimizer.init(params), []
    for i in range(plain_loop.STEPS):
        params, state, loss = train(params, state, small.batch(cfg, i))
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, inside(params, 1 / RATIO, SCORES))


@pytest.mark.parametrize("mesh", small.named([[*MESHES][0]], [*MESHES][1:]))
def test_same_as_with_multipliers(mesh):
    """Of parameters that carry a multiplier, the updates of Adam are the same once epsilon is
    nothing and gradients are not clipped, whose norm would be another."""
    shared = {"optimizer.clip_norm": 0.0, "optimizer.epsilon": 1e-15}
    cfg = MESHES[mesh].config(MUP | shared | small.PLAIN_LAYER | {"model.layers": 2})
    plain = Config(model=cfg.model, data=cfg.data, optimizer=cfg.optimizer, train=cfg.train)
    want_losses, want = with_multipliers(plain)
    step, losses = make_step(cfg, small.mesh_of(cfg)), []
    with jax.set_mesh(step.mesh):
        state = small.first_state(step, plain_loop.weights(cfg))
        for i in range(plain_loop.STEPS):
            batch = small.place_batch(step, cfg, small.batch(cfg, i))
            state, metrics = step.train(state, batch)
            losses.append(float(metrics["loss"]))
    got = small.to_plain(step.layout, jax.device_get(state.params))
    np.testing.assert_allclose(losses, want_losses, rtol=2e-5)
    start = plain_loop.weights(cfg)
    for changed, expected, before in zip(*map(jax.tree.leaves, (got, want, start)), strict=True):
        wrong = np.abs(changed - expected) > 0.02 * np.abs(expected - before).max()
        assert wrong.mean() < 0.01


# --- the size of activations ----------------------------------------------------------------------


RATES = {"adamw": 0.01, "lion": 0.005, "adafactor": 0.1, "muon": 0.05}


def changes_in_size(name: str, width: int, base: int) -> list[float]:
    """Mean sizes of the changes that five steps make in the residual stream and the logits."""
    cfg = small.config(
        changes={
            "model.layers": 1,
            "model.width": width,
            "model.heads": width // 8,
            "model.mlp_width": 2 * width,
            "model.mup_base_width": base,
            "model.init_std": 0.1,
            "optimizer.name": name,
            "optimizer.learning_rate": RATES[name],
        }
        | small.PLAIN_LAYER
    )
    parts = transformer.build(cfg.model)
    specs = {("layers" if name == "layer" else name): tree for name, tree in parts.specs.items()}
    mesh, params = small.mesh_of(cfg), plain_loop.weights(cfg)
    params["layers"] = jax.tree.map(lambda a: a[None], params["layers"])  # a stack of one stage
    replicated = lambda a: NamedSharding(mesh, PartitionSpec(*[None] * a.ndim))
    whole = jax.tree.map(replicated, params)
    optimizer = Optimizer(cfg.optimizer, cfg.train.steps, specs, scattered=whole)
    batch = small.batch(cfg, 1)

    plain = lambda params: params | {"layers": jax.tree.map(lambda a: a[0], params["layers"])}
    stream = lambda params: transformer.trunk(parts, plain(params), batch["tokens"])
    logits = lambda params: transformer.logits(parts, plain(params), batch["tokens"])
    loss = lambda params: plain_loop.mean(logits(params), batch["targets"], batch["weights"])

    def step(_, carry):
        params, state = carry
        return optimizer.update(jax.grad(loss)(params), state, params)[1:]

    @jax.jit
    def measured(params):
        after, _ = jax.lax.fori_loop(0, 5, step, (params, optimizer.init(params)))
        return [jnp.abs(a(after) - a(params)).mean() for a in (stream, logits)]

    with jax.set_mesh(mesh):
        return jax.device_get(measured(params))


@pytest.mark.parametrize("name", small.named(["adamw"], ["lion", "adafactor", "muon"]))
def test_changes_do_not_grow_with_the_width(name):
    """The check of the paper's appendix D: over eight times the width, what training adds to
    activations stays as large with μP, and grows without."""
    narrow = changes_in_size(name, 32, 0)
    with_mup, without = (np.divide(changes_in_size(name, 256, base), narrow) for base in (32, 0))
    assert (np.abs(np.log2(with_mup)) < 1).all(), with_mup
    assert (without > 2.5).all(), without


@pytest.mark.full
def test_every_kind_of_matrix_on_meshes():
    """Latents, experts and predictions train on meshes as on one device."""
    meshes = {(1, 1, 1): {}, (2, 2, 1): {"mesh.expert": 2}, (1, 2, 2): {"parallel.zero": 3}}
    losses = []
    for mesh, changes in meshes.items():
        form, _ = FORMS["latents, experts, predictions"]
        cfg = Case(mesh, changes=changes).config(MUP | form | {"model.layers": 2})
        batches = [small.batch(cfg, i) for i in range(4)]
        metrics = plain_loop.metrics_of(cfg, batches)
        losses.append([(float(m["loss"]), float(m["param_norm"])) for m in metrics])
    for of_mesh in losses[1:]:
        np.testing.assert_allclose(of_mesh, losses[0], rtol=1e-4)
