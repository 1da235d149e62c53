"""Experts against a loop over tokens in plain numpy, and the router's losses against their
formulas."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import model_formulas, small

from jaxtrain.config import Config, ModelConfig, sizes
from jaxtrain.config.sizes import capacity_of, device_capacity
from jaxtrain.devices.mesh import AXES, EXPERT, MANUAL_AXES, make_mesh
from jaxtrain.models.moe import MoE, Router, with_counts, with_loss
from jaxtrain.models.spec import binder, specs
from jaxtrain.parallel.experts import filled_rows
from jaxtrain.runtime.layers.backward_split import LayerOp, LayerSplit, keep_products

B, T, D, ROWS = 3, 8, 6, 12
BASE = ModelConfig(
    width=D, experts=6, experts_per_token=2, expert_width=5, balance_loss=0.0, init_std=0.5
)


def as_function(module: MoE):
    """(parameters, x, drops) → the layer's output."""
    bind = binder(module)
    return lambda params, x, drops=True: bind(params)(x, drops)


def made(**fields):
    """(the layer's config, the layer as a function, its parameters)."""
    cfg = Config(model=dataclasses.replace(BASE, **fields)).fill().model
    module, random = MoE(cfg, 0.5, ROWS), np.random.default_rng(0)
    draw = lambda s: (
        np.zeros(s.shape, np.float32) if s.counts else np.float32(random.normal(size=s.shape) * 0.5)
    )
    return (
        cfg,
        jax.jit(as_function(module), static_argnames="drops"),
        jax.tree.map(draw, specs(module)),
    )


def normal(*shape, seed=1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def scores_of(cfg, params, x):
    logits = x @ params["router"]["weight"] + params["router"].get("logit_bias", 0)
    return (
        np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        if cfg.router == "softmax"
        else 1 / (1 + np.exp(-logits))
    )


def chosen_of(cfg, biased):
    """The choices of one token, best first."""
    groups = biased.reshape(cfg.router_groups, -1)
    best = np.sort(groups, 1)[:, ::-1][:, : cfg.router_group_best].sum(1)  # of a smaller group: all
    for g in np.argsort(best)[: cfg.router_groups - cfg.router_group_limit]:
        groups[g] = -np.inf
    return np.argsort(-groups.reshape(-1), kind="stable")[: cfg.experts_per_token]


def plainly(cfg, params, x):
    """→ (output, how often each expert was chosen, how often that was dropped)."""
    y, load, dropped = np.zeros_like(x), np.zeros(cfg.experts), np.zeros(cfg.experts)
    limit = (
        capacity_of(T, cfg.experts_per_token, cfg.experts, cfg.capacity_factor)
        if cfg.capacity_factor
        else T
    )

    zeros = dict.fromkeys(("up", "gate", "down"), np.zeros(cfg.experts))

    def expert(v, matrices, biases):
        up, gate = (v @ matrices[name] + biases[name] for name in ("up", "gate"))
        return model_formulas.hidden(cfg, up, gate) @ matrices["down"] + biases["down"]

    for b in range(B):
        taken = np.zeros(cfg.experts)
        for t in range(T):
            scores = scores_of(cfg, params, x[b, t])
            chosen = chosen_of(cfg, scores + params["router"].get("bias", 0))
            gates = (
                scores[chosen]
                / (scores[chosen].sum() if cfg.router_normalize == "always" else 1)
                * cfg.router_scale
            )
            for e, gate in zip(chosen, gates, strict=True):
                load[e] += 1
                taken[e] += 1
                if taken[e] > limit:
                    dropped[e] += 1
                else:
                    of_expert = lambda arrays, e=e: {k: arrays[k][e] for k in zeros}
                    biases = of_expert(params.get("biases", zeros))
                    y[b, t] += gate * expert(x[b, t], of_expert(params), biases)
            if cfg.shared_experts:
                weight = sigmoid(x[b, t] @ params["shared_weight"]) if cfg.shared_gate else 1
                shared, biases = {k: params[f"shared_{k}"] for k in zeros}, dict.fromkeys(zeros, 0)
                y[b, t] += weight * expert(x[b, t], shared, params.get("shared_biases", biases))
    return y, load, dropped


CASES = {
    "two of six": {},
    "one": {"experts_per_token": 1},
    "one of weight 1": {"experts_per_token": 1, "router_normalize": "always", "router_scale": 1.5},
    "not normalized": {"experts_per_token": 3, "router_normalize": "never"},
    "no bias": {"router_bias": False, "capacity_factor": 0.75},
    "a bias of the logits": {"biases": ("router",)},
    "sigmoids": {"router": "sigmoid", "router_scale": 2.5, "shared_experts": 2},
    "a gate of the shared experts": {
        "shared_experts": 1,
        "shared_gate": True,
        "activation": "clamped_swiglu",
        "activation_limit": 0.5,
        "activation_alpha": 1.3,
    },
    "gated GELUs": {"activation": "geglu", "shared_experts": 1},
    "biases": {"biases": ("experts", "mlp"), "shared_experts": 2, "shared_gate": True},
    "biases, capacity": {"biases": ("experts",), "capacity_factor": 0.75, "experts_per_token": 3},
    "two best of a group": {
        "experts": 12,
        "router_groups": 4,
        "router_group_limit": 2,
        "experts_per_token": 2,
        "router": "sigmoid",
    },
    "two best for five choices": {
        "experts": 12,
        "router_groups": 3,
        "router_group_limit": 2,
        "experts_per_token": 5,
    },
    "the best of a group": {
        "experts": 12,
        "router_groups": 4,
        "router_group_limit": 2,
        "experts_per_token": 3,
        "router_group_best": 1,
    },
    "groups of one": {
        "experts": 6,
        "router_groups": 6,
        "router_group_limit": 3,
        "experts_per_token": 3,
    },
    "capacity": {"capacity_factor": 0.75},
    "capacity of all": {"capacity_factor": 6.0},
}
LONG = ("one", "groups of one", "capacity of all", "gated GELUs", "biases, capacity")


@pytest.mark.parametrize("name", small.named([name for name in CASES if name not in LONG], LONG))
def test_against_a_loop_over_tokens(name):
    cfg, layer, params = made(**CASES[name])
    counter = "bias" if cfg.router_bias else "load"
    # a load that were there would change nothing
    params["router"][counter] = normal(cfg.experts, seed=3) * 0.3
    x = normal(B, T, D)
    y, load, dropped = plainly(cfg, params, x)

    def summed(params):
        result = layer(params, x)
        return result.sum(), result

    (_, got), gradients = jax.jit(jax.value_and_grad(summed, has_aux=True))(params)
    np.testing.assert_allclose(got, y, rtol=1e-4, atol=1e-5)
    of_router = gradients["router"]
    assert sorted(of_router) == sorted(
        [
            counter,
            "weight",
            *["dropped"] * (cfg.capacity_factor > 0),
            *["logit_bias"] * ("router" in cfg.biases),
        ]
    )
    np.testing.assert_array_equal(of_router[counter], load)
    if cfg.capacity_factor:
        np.testing.assert_array_equal(of_router["dropped"], dropped)
        assert dropped.any() == (cfg.capacity_factor < 1)
        np.testing.assert_allclose(
            jax.jit(lambda params: layer(params, x, drops=False))(params),
            plainly(dataclasses.replace(cfg, capacity_factor=0), params, x)[0],
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"z_loss": 0.1, "biases": ("router",)},
        {"capacity_factor": 0.75, "shared_experts": 1, "router": "sigmoid"},
        {"shared_experts": 1, "shared_gate": True, "biases": ("experts", "mlp")},
        {"capacity_factor": 0.75, "biases": ("experts",)},
    ],
    ids=["dropless", "capacity", "shared gate, biases", "capacity, biases"],
)
def test_gradients_are_those_of_all_experts_with_most_weights_zero(fields):
    cfg, layer, params = made(**fields)
    x, g = normal(B, T, D), normal(B, T, D, seed=5)
    served, limit = (
        np.zeros((B, T, cfg.experts)),
        capacity_of(T, 2, cfg.experts, cfg.capacity_factor or 9),
    )
    for b, t in itertools.product(range(B), range(T)):
        chosen = chosen_of(cfg, scores_of(cfg, params, np.asarray(x[b, t])))
        served[b, t, chosen] = 1
    chosen, served = served, served * (served.cumsum(1) <= limit)

    def expert(v, matrices, biases):
        up, gate = (v @ matrices[name] + biases.get(name, 0) for name in ("up", "gate"))
        return (jax.nn.silu(gate) * up) @ matrices["down"] + biases.get("down", 0)

    def dense(params, x):
        logits = x @ params["router"]["weight"] + params["router"].get("logit_bias", 0)
        scores = jax.nn.softmax(logits) if cfg.router == "softmax" else jax.nn.sigmoid(logits)
        gates = scores * served / (scores * chosen).sum(-1, keepdims=True)
        every = jnp.stack(
            [
                expert(
                    x,
                    {k: params[k][e] for k in ("up", "gate", "down")},
                    {k: bias[e] for k, bias in params.get("biases", {}).items()},
                )
                for e in range(cfg.experts)
            ],
            2,
        )
        y = (every * gates[..., None]).sum(2)
        if cfg.shared_experts:
            matrices = {k: params[f"shared_{k}"] for k in ("up", "gate", "down")}
            shared = expert(x, matrices, params.get("shared_biases", {}))
            y += shared * (jax.nn.sigmoid(x @ params["shared_weight"]) if cfg.shared_gate else 1)
        return (y * g).sum() + cfg.z_loss * (jax.nn.logsumexp(logits, -1) ** 2).sum() / T / ROWS

    expected = jax.jit(jax.grad(dense, (0, 1)))(params, x)
    got = jax.jit(jax.grad(lambda p, x: (layer(p, x) * g).sum(), (0, 1)))(params, x)
    for tree in (got[0], expected[0]):
        tree["router"] = {
            n: tree["router"][n] for n in ("weight", "logit_bias") if n in tree["router"]
        }
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5), got, expected)


def test_gates_and_biases_in_bfloat16():
    """Weights of rows and biases stay float32 arrays, and so do their gradients."""
    fields = {"shared_experts": 1, "shared_gate": True, "biases": ("experts", "mlp")}
    cfg = Config(model=dataclasses.replace(BASE, **fields)).fill().model
    module = MoE(cfg, 0.5, ROWS)
    shape = lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16 if s.cast else jnp.float32)
    params = jax.tree.map(shape, specs(module))
    assert {b.dtype for b in jax.tree.leaves(params["biases"])} == {jnp.dtype("float32")}
    x = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
    gradients = jax.eval_shape(jax.grad(lambda p, x: as_function(module)(p, x).sum()), params, x)
    assert jax.tree.all(jax.tree.map(lambda g, p: g.dtype == p.dtype, gradients, params))


def test_the_gradient_of_a_weight_whose_scores_are_next_to_nothing():
    """The sum of scores, to which 1e-20 is added, has a square that float32 does not hold."""
    logits = np.array([-46, -45, -47, -50], np.float32)
    cfg, _, params = made(
        experts=4,
        experts_per_token=4,
        router="sigmoid",
        router_normalize="always",
        biases=("router",),
    )
    router, of_router = binder(Router(cfg, ROWS)), params["router"] | {"weight": np.zeros((D, 4))}

    def best_weight(logits):
        return router(of_router | {"logit_bias": logits})(normal(1, 1, D), False)[0][0, 0, 0]

    weight, gradient = jax.jit(jax.value_and_grad(best_weight))(logits)
    scores = 1 / (1 + np.exp(-logits.astype(float)))
    shares = scores / (scores.sum() + 1e-20)
    np.testing.assert_allclose(weight, shares[1], rtol=1e-5)
    np.testing.assert_allclose(gradient, shares[1] * ((np.arange(4) == 1) - shares), rtol=1e-5)


def served_within(chosen, devices: int, experts: int, room: int):
    """chosen [B, T, K] → bool: which choices find room, where each device has B / devices of the
    sequences and `experts` / devices of the experts. The rows of a device for an expert are a
    group, in the tokens' order; on each device groups are cut to one level."""
    by_device = chosen.reshape(devices, -1)
    sizes = np.array([np.bincount(row, minlength=experts) for row in by_device])
    level = np.zeros(experts, int)  # of each expert's device
    for to in np.split(np.arange(experts), devices):
        level[to] = next(
            n for n in range(chosen.size, -1, -1) if np.minimum(sizes[:, to], n).sum() <= room
        )
    served, taken = np.zeros(by_device.shape, bool), np.zeros_like(sizes)
    for d, i in np.ndindex(by_device.shape):
        e = by_device[d, i]
        served[d, i] = taken[d, e] < level[e]
        taken[d, e] += 1
    return served.reshape(chosen.shape)


def level_of(sizes, room: int) -> int:
    """The highest level to which groups are cut so that they fit."""
    return next(n for n in range(sizes.max(), -1, -1) if np.minimum(sizes, n).sum() <= room)


def served_in_two_steps(chosen, devices: int, nodes: int, experts: int, room: float):
    """The same where the choices of devices with the same place in their nodes meet at a gateway of
    each node. What it sends on is cut first, then what a device receives from its gateways."""
    choices = chosen.reshape(devices, -1)
    tokens, k, near = choices.shape[1] // chosen.shape[-1], chosen.shape[-1], devices // nodes
    sends, receives = (device_capacity(tokens, k, experts, n, room) for n in (nodes, devices))
    device = np.arange(devices)[:, None]
    # the node of a choice's expert, and in it the sender's place
    gateway = choices // (experts // nodes) * near + device % near
    sizes = np.zeros((devices, experts), int)
    np.add.at(sizes, (gateway, choices), 1)
    sizes = np.array([np.minimum(row, level_of(row, sends)) for row in sizes])
    for to in np.split(np.arange(experts), devices):
        sizes[:, to] = np.minimum(sizes[:, to], level_of(sizes[:, to], receives))
    served, taken = np.zeros(choices.shape, bool), np.zeros_like(sizes)
    for at in np.ndindex(choices.shape):
        group = gateway[at], choices[at]
        served[at] = taken[group] < sizes[group]
        taken[group] += 1
    return served.reshape(chosen.shape)


@pytest.mark.parametrize(
    "room, nodes",
    [(1.0, 1), (1.0, 2), *(pytest.param(1.25, n, marks=pytest.mark.full) for n in (1, 2, 3))],
)
def test_rows_beyond_the_room_are_dropped(room, nodes):
    """On several devices, against all experts on one with the weights of what is dropped zero:
    output, counts and gradients."""
    devices, b, t, k = (3, 6, T, 2) if nodes == 1 else (2 * nodes, 4 * nodes, T - 1, 3)
    cfg, _, params = made(expert_room=room, experts_per_token=k, experts=6 if nodes < 2 else 12)
    layer = as_function(MoE(cfg, 0.5, ROWS, nodes))
    # the last device has more
    params["router"]["bias"] = np.linspace(0, 0.3, cfg.experts, dtype=np.float32)
    x, g = normal(b, t, D), normal(b, t, D, seed=5)
    biased = scores_of(cfg, params, x) + params["router"]["bias"]
    chosen = np.array([chosen_of(cfg, row) for row in biased.reshape(-1, cfg.experts)]).reshape(
        b, t, k
    )
    limit = device_capacity(b // devices * t, k, cfg.experts, devices, room)
    served = served_within(chosen, devices, cfg.experts, limit)
    if nodes > 1:
        served = served_in_two_steps(chosen, devices, nodes, cfg.experts, room)
    assert 0 < (~served).sum() < served.size / 2

    def dense(params, x):
        scores = jax.nn.softmax(x @ params["router"]["weight"])
        gates = jnp.take_along_axis(scores, chosen, -1)
        gates = gates / gates.sum(-1, keepdims=True) * served
        up, gate, down = (params[name][chosen] for name in ("up", "gate", "down"))
        h = jax.nn.silu(jnp.einsum("btd,btkdf->btkf", x, gate)) * jnp.einsum(
            "btd,btkdf->btkf", x, up
        )
        return jnp.einsum("btkf,btkfd,btk->btd", h, down, gates)

    split = {name: P(EXPERT) if name in ("up", "gate", "down") else P() for name in params}
    everywhere = lambda tree: (
        tree | {"router": jax.tree.map(lambda a: jax.lax.psum(a, EXPERT), tree["router"])}
    )

    def part(params, x, g):
        y, vjp = jax.vjp(layer, params, x)
        by_params, by_x = vjp(g)
        return y, everywhere(by_params), by_x

    mesh = make_mesh([devices if axis == EXPERT else 1 for axis in AXES], jax.devices()[:devices])
    run = jax.shard_map(
        part,
        in_specs=(split, P(EXPERT), P(EXPERT)),
        out_specs=(P(EXPERT), split, P(EXPERT)),
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        y, by_params, by_x = jax.device_get(jax.jit(run)(params, x, g))
    expected_y, (expected, expected_x) = jax.jit(
        lambda p, x, g: (dense(p, x), jax.vjp(dense, p, x)[1](g))
    )(params, x, g)
    np.testing.assert_allclose(y, expected_y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(by_x, expected_x, rtol=1e-4, atol=1e-5)
    for name in ("up", "gate", "down"):
        np.testing.assert_allclose(by_params[name], expected[name], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        by_params["router"]["weight"], expected["router"]["weight"], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(
        by_params["router"]["bias"], np.bincount(chosen.reshape(-1), minlength=cfg.experts)
    )
    np.testing.assert_array_equal(
        by_params["router"]["dropped"], np.bincount(chosen[~served], minlength=cfg.experts)
    )


# of experts, two on each of three devices: about as many rows for each; none for the first, more
# than the mean for the others; all that there is room for on the last, and none elsewhere
BIASES = ((0, 0, 0, 0, 0, 0), (-9, -9, 0, 0, 9, 0), (0, 0, 0, 0, 9, 9))


def test_elementwise_work_on_the_rows_that_are_there(monkeypatch):
    """F, B and W on several devices: the same as on all rows, where those that nothing has written
    are not numbers."""
    devices, b = 3, 6
    cfg, _, params = made(expert_room=1.875)
    cfg = dataclasses.replace(cfg, biases=("experts",))
    columns = {"up": 5, "gate": 5, "down": D}
    params["biases"] = {name: normal(6, n, seed=n) for name, n in columns.items()}
    layer = as_function(MoE(cfg, 0.5, ROWS))
    of_experts = ("up", "gate", "down", "biases")
    split = {name: P(EXPERT) if name in of_experts else P() for name in params}
    mesh = make_mesh([devices if axis == EXPERT else 1 for axis in AXES], jax.devices()[:devices])

    def part(params, x, g):
        ops = LayerSplit(lambda p, x, extra: layer(p, x), params, x, (), keep_products)
        y, residuals = ops.output_and_residuals(params, x, ())
        by_x, stash = ops.input_gradient(params, (), residuals, g)
        by_params = ops.weight_gradient(params, (), residuals.for_w, stash)
        by_router = jax.tree.map(lambda a: jax.lax.psum(a, EXPERT), by_params["router"])
        return y, by_x, by_params | {"router": by_router}

    def results():
        run = jax.shard_map(
            part,
            in_specs=(split, P(EXPERT), P(EXPERT)),
            out_specs=(P(EXPERT), P(EXPERT), split),
            axis_names=set(AXES),
            check_vma=False,
        )
        x, g, run = normal(b, T, D), normal(b, T, D, seed=5), jax.jit(run)
        for bias in BIASES:
            router = params["router"] | {"bias": np.array(bias, np.float32)}
            with jax.set_mesh(mesh):
                yield jax.device_get(run(params | {"router": router}, x, g))

    expected, work, by_blocks = list(results()), [], filled_rows._by_blocks

    def counted(fn, begin, join, mean, *arguments):
        work.append(mean)
        return by_blocks(fn, begin, join, mean, *arguments)

    unfilled = lambda shape, dtype: jnp.full(shape, np.nan if dtype == jnp.float32 else 0, dtype)
    monkeypatch.setattr(sizes, "FEW_ROWS", 1)
    monkeypatch.setattr(filled_rows, "_by_blocks", counted)
    monkeypatch.setattr(jax.lax, "empty", unfilled)
    for got, all_rows in zip(results(), expected, strict=True):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, all_rows
        )
    assert set(work) == {b // devices * T * cfg.experts_per_token}
    dropped = [by_params["router"]["dropped"].sum() for _, _, by_params in expected]
    room = device_capacity(b // devices * T, 2, cfg.experts, devices, 1.875)
    assert dropped == [0, 0, b * T * 2 - room]


@pytest.mark.parametrize(
    "router, groups",
    [("softmax", 1), pytest.param("sigmoid", 1, marks=pytest.mark.full), ("sigmoid", 3)],
)
def test_the_losses_of_the_router(router, groups):
    """The gradient is that of the layer's output and of the losses as they are written in the
    papers."""
    fields = {"router": router, "router_groups": groups, "router_group_limit": min(groups, 2)}
    cfg, without, params = made(**fields)
    _, layer, _ = made(**fields, balance_loss=0.7, z_loss=0.3)
    x = normal(B, T, D)
    params_as_given, x_as_given = params, x

    def losses(params, x):
        logits = x @ params["router"]["weight"]
        scores = jax.nn.softmax(logits) if router == "softmax" else jax.nn.sigmoid(logits)
        f = np.zeros((B, cfg.experts))
        for b, t in itertools.product(range(B), range(T)):
            f[
                b,
                np.argsort(-scores_of(cfg, params_as_given, x_as_given[b, t]))[
                    : cfg.experts_per_token
                ],
            ] += 1
        p = (scores / scores.sum(-1, keepdims=True)).mean(1)
        balance = (f * cfg.experts / cfg.experts_per_token / T * p).sum()
        return (0.7 * balance + 0.3 * (jnp.log(jnp.exp(logits).sum(-1)) ** 2).sum() / T) / ROWS

    total = lambda p, x: without(p, x).sum() + losses(p, x)
    expected = jax.jit(jax.grad(total, (0, 1)))(params, x)
    got = jax.jit(jax.grad(lambda p, x: layer(p, x).sum(), (0, 1)))(params, x)
    np.testing.assert_array_equal(layer(params, x), without(params, x))
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-3, atol=1e-5), got, expected)


def test_hung_on_losses_and_counts():
    def f(x, p):
        return 3 * with_counts(with_loss(x, (x**2).sum()), [p], [jnp.arange(2.0)]).sum()

    gradient, counts = jax.grad(f, (0, 1))(jnp.array([1.0, 2.0]), jnp.zeros(2))
    np.testing.assert_array_equal(gradient, [3 + 2, 3 + 4])
    np.testing.assert_array_equal(counts, [0, 1])


def test_choices_are_made_once():
    """Rows that cross from F to B lie in the order of the choices, so these cross as well."""
    _, layer, params = made(router_groups=3, router_group_limit=2)
    split = LayerSplit(lambda p, x, extra: layer(p, x), params, normal(B, T, D), (), keep_products)
    assert not [
        eq
        for op in (LayerOp.INPUT_GRADIENT, LayerOp.WEIGHT_GRADIENT)
        for eq in split._equations[op]
        if eq.primitive.name == "top_k"
    ]
    assert [a.shape for a in jax.tree.leaves(split.residuals) if a.dtype == jnp.int32] == [
        (B, T, 2)
    ]


def test_scores_that_underflow():
    _, layer, params = made(router="sigmoid")
    params["router"]["weight"] = np.full_like(params["router"]["weight"], -1.0)
    assert np.isfinite(
        jax.grad(lambda x: layer(params, x).sum())(np.full((B, T, D), 40.0, np.float32))
    ).all()


def test_b_makes_no_weight_gradients_and_w_little_else():
    """FLOPs of the products with experts' weights: F 3 of them, B 3, W 3."""
    _, layer, params = made(shared_experts=1)
    split = LayerSplit(lambda p, x, extra: layer(p, x), params, normal(B, T, D), ())
    products = lambda op: sum(eq.primitive.name == "while" for eq in split._equations[op])
    assert [
        products(op)
        for op in (
            LayerOp.FORWARD,
            LayerOp.INPUT_GRADIENT,
            LayerOp.WEIGHT_GRADIENT,
            LayerOp.BACKWARD,
        )
    ] == [3, 3, 3, 6]

    @jax.jit
    def gradients(params, x, g):
        _, residuals = split.output_and_residuals(params, x, ())
        dx, stash = split.input_gradient(params, (), residuals, g)
        return (split.weight_gradient(params, (), residuals.for_w, stash), dx), jax.vjp(
            layer, params, x
        )[1](g)

    (dp, dx), (expected, expected_x) = gradients(
        params, normal(B, T, D), np.ones((B, T, D), np.float32)
    )
    np.testing.assert_allclose(dx, expected_x, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6), dp, expected)
