"""Replicas: synchronous ones, whose gradients cross as little as they can, and DiLoCo against two
plain loops that meet now and then.

The plain side trains each replica by itself on one device, on its rows of each batch, and takes the
outer step with optax's SGD. The tolerances are plain_loop's. In int8 a number that lies between two
steps of its scale may be rounded either way, so there almost all numbers must agree as in float32,
and the others to a few steps.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from support import plain_loop, small
from support.crossing import across, bytes_sent
from support.small import Case

from jaxtrain.config import Config, MeshConfig, ParallelConfig, PipelineConfig
from jaxtrain.devices.mesh import AXES, REPLICA, make_mesh
from jaxtrain.models import transformer
from jaxtrain.models.spec import is_spec
from jaxtrain.parallel import replicas
from jaxtrain.planner.programs.program import Program
from jaxtrain.training.one_step import combine_replicas, step_metrics
from jaxtrain.training.step import Step, make_step
from jaxtrain.training.update.optimizer import Optimizer

STEPS, INNER = 7, 3


def config(case: Case) -> Config:
    """With the plain loops' clipping, and replicas that train apart."""
    return case.config(
        {
            "mesh.replica": 2,
            "optimizer.clip_norm": plain_loop.CLIP,
            "train.diloco_inner_steps": INNER,
        }
    )


def rows_of(cfg: Config, arrays: dict, replica: int) -> dict:
    """A replica's rows of a batch [rows, T]: its part of each microbatch."""
    cut = lambda a: a.reshape(cfg.pipeline.microbatches, cfg.mesh.replica, -1, a.shape[-1])[
        :, replica
    ].reshape(-1, a.shape[-1])
    return {k: cut(a) for k, a in arrays.items()}


# --- the reference --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """losses [step][replica]; the anchor, and each replica's parameters, at the end (plain)."""

    losses: list[list[float]]
    anchor: dict
    params: list[dict]


def plain_int8(x: np.ndarray, parts: int) -> np.ndarray:
    """x [..., n], each its blocks rounded to one of 255 values; blocks as for this many
    replicas."""
    block = min(1024, -(-x.shape[-1] // parts))
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % (parts * block))]).reshape(
        *x.shape[:-1], -1, block
    )
    scale = np.maximum(np.abs(padded).max(-1, keepdims=True), 1e-30) / 127
    return (np.round(padded / scale) * scale).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def plain_mean(values: list[np.ndarray], dtype: str) -> np.ndarray:
    flat = np.stack([np.ravel(v) for v in values])
    if dtype == "int8":
        return plain_int8(plain_int8(flat, len(flat)).mean(0), len(flat)).reshape(values[0].shape)
    return flat.mean(0).reshape(values[0].shape)


def reference(cfg: Config) -> Run:
    replica = cfg.mesh.replica
    optimizer, train = plain_step(
        dataclasses.replace(
            cfg.as_read(), mesh=MeshConfig(), pipeline=PipelineConfig(), parallel=ParallelConfig()
        )
    )
    outer = optax.sgd(
        cfg.optimizer.outer_learning_rate, cfg.optimizer.outer_momentum, nesterov=True
    )
    anchor = plain_loop.weights(cfg)
    params, states, momentum = (
        [anchor] * replica,
        [optimizer.init(anchor)] * replica,
        outer.init(anchor),
    )
    losses = []
    for i in range(STEPS):
        batch = small.batch(cfg, i)
        results = [train(params[r], states[r], rows_of(cfg, batch, r)) for r in range(replica)]
        params, states = [p for p, *_ in results], [s for _, s, _ in results]
        losses.append([float(loss) for *_, loss in results])
        if (i + 1) % INNER == 0:
            delta = jax.tree.map(
                lambda a, *p: plain_mean([np.asarray(a - q) for q in p], cfg.precision.outer),
                anchor,
                *params,
            )
            updates, momentum = outer.update(delta, momentum)
            anchor = optax.apply_updates(anchor, updates)
            params = [anchor] * replica
    return Run(losses, *jax.tree.map(np.asarray, (anchor, params)))


@functools.cache
def plain_step(cfg: Config):
    """(the inner optimizer, (params, state, batch) → (params, state, loss) on one device)."""
    parts = transformer.build(cfg.model)
    specs = {
        "embed": parts.specs["embed"],
        "layers": parts.specs["layer"],
        "head": parts.specs["head"],
    }
    one_device = make_mesh((1,) * len(AXES), jax.devices()[:1])
    scattered = lambda s, lead=0: NamedSharding(one_device, P(*[None] * (lead + len(s.shape))))
    layouts = jax.tree.map(scattered, specs, is_leaf=is_spec)
    layouts["layers"] = jax.tree.map(
        functools.partial(scattered, lead=1), specs["layers"], is_leaf=is_spec
    )
    optimizer = Optimizer(cfg.optimizer, cfg.train.steps, specs, scattered=layouts)

    def mean_loss(params, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            transformer.logits(parts, params, batch["tokens"]), batch["targets"]
        )
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    @jax.jit
    def train(params, state, batch):
        loss, gradients = jax.value_and_grad(mean_loss)(params, batch)
        _, params, state = optimizer.update(gradients, state, params)
        return params, state, loss

    return optimizer, train


# --- the step under test --------------------------------------------------------------------------


def train(cfg: Config) -> tuple[Run, Step, dict[str, Program]]:
    """The run, and its two programs."""
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        state = small.first_state(step, plain_loop.weights(cfg))
        batches = [small.place_batch(step, cfg, small.batch(cfg, i)) for i in range(STEPS)]
        inner, exchange = (
            step.train.lower(state, batches[0]).compile(),
            step.exchange.lower(state).compile(),
        )
        losses = []
        for i, batch in enumerate(batches):
            state, metrics = inner(state, batch)
            losses.append(list(map(float, metrics["loss"])))
            means, tokens = step.combine_metrics(metrics), np.asarray(metrics["weighted_tokens"])
            np.testing.assert_allclose(
                means["loss"], (losses[-1] * tokens).sum() / tokens.sum(), rtol=1e-6
            )
            assert int(means["weighted_tokens"]) == small.batch(cfg, i)["weights"].sum()
            if (i + 1) % INNER == 0:
                state = exchange(state)
    state = jax.device_get(state)
    own = [jax.tree.map(lambda a, r=r: a[r], state.params) for r in range(cfg.mesh.replica)]
    run = Run(
        losses,
        small.to_plain(step.layout, state.anchor),
        [small.to_plain(step.layout, p) for p in own],
    )
    return (
        run,
        step,
        {
            name: Program(made.as_text())
            for name, made in (("train", inner), ("exchange", exchange))
        },
    )


def share(step: Step) -> int:
    """How many numbers a device has to move across: each parameter once, by all of a replica's
    devices together."""
    devices = step.mesh.size // step.mesh.shape[REPLICA]
    return sum(-(-a.size // devices) for a in jax.tree.leaves(step.layout.shapes))


CASES = {
    "data 2, stage 2": Case((2, 2, 1), microbatches=4),
}
MORE = {
    "data 2, model 2, zero 3": Case((2, 1, 2), changes={"parallel.zero": 3}),
    "data 2, stage 2, interleaved": Case((2, 2, 1), "interleaved", 2, 4),
    "muon": Case((2, 1, 2), changes={"optimizer.name": "muon", "parallel.zero": 2}),
    "4 replicas, data 2, zero 0": Case(
        (2, 1, 1), changes={"mesh.replica": 4, "parallel.zero": 0, "data.batch_size": 32}
    ),
    "context 2, zb_v, zero 2": Case(
        (1, 2, 1), "zb_v", 2, changes={"mesh.context": 2, "parallel.zero": 2, "model.layers": 5}
    ),
}


@pytest.mark.parametrize("case", small.named(CASES, MORE))
def test_same_as_plain_loops_that_meet(case):
    cfg = config((CASES | MORE)[case])
    got, step, programs = train(cfg)
    expected = reference(cfg)
    np.testing.assert_allclose(got.losses[0], expected.losses[0], rtol=1e-5)
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-4)
    assert_same_parameters(got.anchor, expected.anchor, cfg)
    for own, e in zip(got.params, expected.params, strict=True):
        assert_same_parameters(own, e, cfg)
    # Nothing crosses in a step, not even a loss; in an exchange each number does, once each way.
    assert not across(programs["train"], step.mesh)
    replica = cfg.mesh.replica
    assert (
        bytes_sent(programs["exchange"], step.mesh)
        == 4 * share(step) * 2 * (replica - 1) // replica
    )


def assert_same_parameters(got: dict, expected: dict, cfg: Config) -> None:
    """To a thousandth of the largest move of a tensor since the beginning: Adam divides by what may
    be small."""
    for (path, a), b, first in zip(
        jax.tree_util.tree_leaves_with_path(got),
        jax.tree.leaves(expected),
        jax.tree.leaves(plain_loop.weights(cfg)),
        strict=True,
    ):
        worst, moved = np.abs(a - b).max(), np.abs(b - first).max()
        assert worst < 1e-3 * moved, (
            f"{jax.tree_util.keystr(path)}: {worst / moved:.1e} of its largest move"
        )


@pytest.mark.full
def test_int8_is_the_same_as_plain_loops_with_rounded_numbers():
    """On one device a replica, where blocks are those of whole tensors."""
    cfg = config(Case((1, 1, 1), changes={"precision.outer": "int8", "model.layers": 2}))
    got, step, programs = train(cfg)
    expected = reference(cfg)
    np.testing.assert_allclose(got.losses[: INNER + 1], expected.losses[: INNER + 1], rtol=1e-4)
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-3)
    first = plain_loop.weights(cfg)
    apart = np.concatenate([
        np.ravel(np.abs(a - b) / np.abs(b - f).max())
        for a, b, f in zip(*map(jax.tree.leaves, (got.anchor, expected.anchor, first)), strict=True)
    ])  # fmt: skip
    assert np.quantile(apart, 0.99) < 1e-3 and apart.max() < 0.05
    # The messages are int8, and all that there are: two of numbers, two of scales.
    met = across(programs["exchange"], step.mesh)
    assert sorted((i.collective, i.types[0]) for i in met) == sorted(
        (c, t) for c in ("all-to-all", "all-gather") for t in ("f32", "s8")
    )
    assert not across(programs["train"], step.mesh)
    assert 3.9 < 4 * share(step) / bytes_sent(programs["exchange"], step.mesh) < 4


LAYOUTS = {  # of [4, 6, 10] numbers, on 2 or 4 replicas
    "whole on one device": ((2, 1, 1, 1, 1, 1), P()),
    "scattered": ((2, 2, 1, 1, 1, 2), P(None, "data", "model")),
    "copies inside": ((4, 1, 2, 1, 1, 1), P(None, None, None)),
    "copies of parts": ((2, 2, 2, 1, 1, 1), P("stage")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mean_across_replicas(layout):
    sizes, spec = LAYOUTS[layout]
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(sizes))])
    x = np.random.default_rng(0).standard_normal((sizes[0], 4, 6, 10)).astype(np.float32)
    x[:, 0, 0] = 0
    like = [jax.ShapeDtypeStruct(x.shape[1:], jnp.float32, sharding=NamedSharding(mesh, spec))] * 2
    given = jax.device_put([x, -2 * x], [a.sharding for a in map(replicas.each, like)])
    run = lambda dtype: jax.jit(lambda tree: replicas.mean_across(tree, like, dtype))(given)
    for got, factor in zip(run("float32"), (1, -2), strict=True):
        np.testing.assert_allclose(got, factor * x.mean(0), rtol=1e-6, atol=1e-6)
    for got, factor in zip(run("int8"), (1, -2), strict=True):
        # Half a step of the scale on the way there, and again on the way back.
        assert np.abs(got - factor * x.mean(0)).max() < abs(factor) * np.abs(x).max() / 127
        assert not np.any(np.asarray(got)[0, 0])
        by_place: dict = {}
        for shard in got.addressable_shards:
            by_place.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert all(len(values) == 1 for values in by_place.values()), "replicas differ"


def test_a_batch_without_a_valid_token_has_no_loss():
    names = ("loss", "grad_norm", "mtp_loss", "weighted_tokens")
    metrics = step_metrics(**dict.fromkeys(names, jnp.zeros(2)))
    assert combine_replicas(metrics) == dict.fromkeys(names, 0)


def test_rounding_to_int8():
    x = jnp.array([[0.0, 0.0], [1.27, -0.004], [np.nan, 1.0]])
    numbers, scale = replicas.quantise(x)
    assert numbers.dtype == jnp.int8 and scale.shape == (3, 1)
    np.testing.assert_array_equal(numbers[:2], [[0, 0], [127, 0]])
    back = numbers * scale
    np.testing.assert_allclose(back[:2], [[0, 0], [1.27, 0]], rtol=1e-6)
    assert np.isnan(back[2]).all()  # a replica whose numbers are not finite is not hidden


# --- replicas that meet in every step -------------------------------------------------------------


@pytest.mark.parametrize("zero, context", [(1, 1), (0, 2)])
def test_gradients_are_summed_inside_first(zero, context):
    """Only a device's share of each gradient crosses to other replicas: what ZeRO leaves it, or a
    part of what is whole."""
    changes = {
        "data.batch_size": 16,
        "parallel.zero": zero,
        "mesh.replica": 2,
        "mesh.context": context,
    }
    cfg = small.config((2, 1, 1), "1f1b", 1, 2, changes)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        program = Program(
            step.gradients.lower(step.abstract_state().params, step.abstract_batch)
            .compile()
            .as_text()
        )
    met = across(program, step.mesh)
    sizes = [size for i in met for size in i.sizes]
    # the loss and the number of tokens
    assert {i.collective for i in met} == {"all-reduce"} and sizes.count(1) == 2
    assert sum(sizes) == share(step) + 2
