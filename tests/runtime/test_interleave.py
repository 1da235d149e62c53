"""Two ops side by side: the results of each alone, and values that wait for each other in turn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import EXPERT, make_mesh
from jaxtrain.runtime.layers import interleave
from jaxtrain.runtime.layers.backward_split import LayerOp, LayerSplit

ROWS, WIDTH = 6, 16


def layer(w, x, _):
    """Two messages of different sizes that do not wait for each other, then one that waits for
    both."""
    send = functools.partial(lax.all_to_all, axis_name=EXPERT, split_axis=0, concat_axis=0)
    h = jnp.tanh(x @ w[0])
    small = jnp.argsort(h[:, :2].sum(-1)).astype(jnp.float32)
    sent, order = send(h, tiled=True), send(small, tiled=True)
    made = jnp.sin(sent * order[:, None]) @ w[1]
    return x + 0.5 * send(made, tiled=True)


def both(run, model: int = 1):
    """A jitted function of (w, x of one, x and g of another microbatch) → results of a forward and
    a backward op by `run(backward, forward)`."""
    mesh = make_mesh((1, 1, 1, 1, 2, model), jax.devices()[: 2 * model])

    def ops(w, x, other, g):
        split = LayerSplit(layer, w, x, None)
        _, residuals = split.output_and_residuals(w, other, None)
        (dx, stash), (y, saved) = run(
            split.backward(w, None, residuals, g), split.forward(LayerOp.FORWARD, w, x, None)
        )
        return y, saved, dx, stash

    local = P(EXPERT)
    run_on = jax.shard_map(
        ops, mesh=mesh, in_specs=(P(), local, local, local), out_specs=local, axis_names={EXPERT}
    )
    return mesh, jax.jit(run_on)


def alone(*ops):
    return tuple(op.run() for op in ops)


def arguments() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = (2, WIDTH, WIDTH), *[(2 * ROWS, WIDTH)] * 3
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def test_results_are_those_of_each_alone():
    results = []
    for run in (alone, interleave.side_by_side):
        mesh, ops = both(run)
        with jax.set_mesh(mesh):
            results.append(jax.tree.map(np.asarray, ops(*arguments())))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *results)


def traced(fn, x_rows: int = ROWS) -> interleave.TracedOp:
    """A layer's forward as equations without values, for one device of two."""
    w, x = jnp.zeros((2, WIDTH, WIDTH)), jnp.zeros((x_rows, WIDTH))
    jaxpr = jax.make_jaxpr(lambda w, x: fn(w, x, None), axis_env=[(EXPERT, 2)])(w, x).jaxpr
    return interleave.TracedOp(jaxpr.eqns, {}, jaxpr.invars[1], jaxpr.outvars, tuple)


def test_a_plan_has_each_equation_once_and_in_turn():
    """Without a compiler: pieces alternate, and no equation comes before one whose result it
    reads."""
    ops = traced(layer), traced(layer)
    pieces = interleave.plan_pieces(*ops, holds_first=False)
    planned: tuple[list, list] = ([], [])
    for piece in pieces:
        planned[piece.sender].extend(piece.messages)
        planned[1 - piece.sender].extend((*piece.products, *piece.rest))
    for op, equations in zip(ops, planned, strict=True):
        assert len(equations) == len(op.equations)
        assert {id(e) for e in equations} == {id(e) for e in op.equations}
        made = {a for e in op.equations for a in e.outvars}
        for equation in equations:
            assert not made & {a for a in equation.invars if not hasattr(a, "val")}
            made -= set(equation.outvars)
    # Each op sends twice: rows with their order, then the results of the second product.
    assert [(piece.sender, len(piece.messages)) for piece in pieces] == [
        (1, 0),
        (0, 2),
        (1, 2),
        (0, 1),
        (1, 1),
        (0, 0),
    ]
    waits = [str(piece).partition("waits: ")[2] for piece in pieces]
    # The last piece has nothing to send: its part waits for nothing more.
    assert waits == ["-", "start, arrival", *["start, arrival, hold"] * 2, "start", "-"]


def _messages(jaxpr) -> list[tuple[bool, set[int]]]:
    """For each message: (it goes between devices that are not neighbours; the earlier messages
    that it needs)."""
    (mapped,) = jaxpr.eqns
    found: list[tuple[bool, set[int]]] = []
    needed: dict = {}  # variable → the messages that it needs
    for equation in mapped.params["jaxpr"].eqns:
        inputs = [needed.get(a, set()) for a in equation.invars if not hasattr(a, "val")]
        numbers = set().union(*inputs)
        if equation.primitive.name == "all_to_all":
            groups = equation.params["axis_index_groups"] or [[0, 1]]
            found.append((groups[0][1] - groups[0][0] > 1, numbers))
            numbers = numbers | {len(found) - 1}
        needed |= dict.fromkeys(equation.outvars, numbers)
    return found


def needs(run, model: int = 1) -> list[set[int]]:
    """For each message of the two ops, in the order of the program, the earlier ones that it
    needs."""
    mesh, ops = both(run, model)
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(ops)(*arguments())
    found = [numbers for _, numbers in _messages(jaxpr.eqns[0].params["jaxpr"])]
    # without those of the forward whose residuals the backward reads
    return [{n - 3 for n in numbers if n >= 3} for numbers in found[3:]]


def test_messages_go_in_turn():
    """B's first, both of F's first, B's second, F's last: each needs the one of the other op before
    it, since products stand in between. F and B by themselves do not."""
    assert needs(alone) == [set(), {0}, set(), set(), {2, 3}]
    b0, f0, f0_order, b1, f1 = needs(interleave.side_by_side)
    assert not b0 and 0 in f0 and 0 in f0_order and {0, 1} <= b1 and {1, 2, 3} <= f1


def test_on_tpus_the_next_messages_do_not_wait_for_the_first(monkeypatch):
    """Their products alone do."""
    monkeypatch.setattr(interleave, "on_tpu", lambda: True)
    b0, f0, f0_order, b1, f1 = needs(interleave.side_by_side)
    assert not b0 and not f0 and not f0_order and {0, 1} <= b1 and {1, 2, 3} <= f1


def test_a_wait_is_one_number():
    """It is read where the awaited arrays say, and written back in place; the array is read by
    nothing else, or XLA would copy it."""
    jaxpr = jax.make_jaxpr(interleave.after)([jnp.float32([[2]])], jnp.zeros((3, 5, 2))).jaxpr
    (array,) = (a for a in jaxpr.invars if a.aval.shape == (3, 5, 2))
    readers = [e for e in jaxpr.eqns if any(a is array for a in e.invars)]
    assert [e.primitive.name for e in readers] == ["dynamic_slice", "dynamic_update_slice"]
    assert all(e.outvars[0].aval.size == 1 for e in jaxpr.eqns if e is not readers[1])
    x = jnp.arange(30.0).reshape(3, 5, 2) + 7
    for first in (0.0, -0.0, jnp.nan, -jnp.inf):
        waited, number = jax.jit(interleave.after)([jnp.full((1, 1), first)], x)
        np.testing.assert_array_equal(waited, x)
        assert number.shape == (1, 1, 1) and number == 7


def far_and_near(w, x, _):
    """Two messages out, across nodes of two devices and inside them, and two back."""
    send = functools.partial(lax.all_to_all, axis_name=EXPERT, split_axis=0, concat_axis=0)
    far = functools.partial(send, tiled=True, axis_index_groups=[[0, 2], [1, 3]])
    near = functools.partial(send, tiled=True, axis_index_groups=[[0, 1], [2, 3]])
    h = jnp.tanh(jnp.tanh(x @ w[0]) @ w[0])
    made = jnp.sin(jnp.sin(near(far(h)) @ w[1]) @ w[1])
    return x + 0.5 * far(near(made))


def test_each_of_two_steps_has_products_beside_it():
    """Messages of B and F go by twos. In between are B's or F's products, of which the second
    message waits for the first ones, and the third for all."""
    devices = 4
    mesh = make_mesh((1, 1, 1, 1, devices, 1), jax.devices()[:devices])
    rng = np.random.default_rng(0)
    shapes = (2, WIDTH, WIDTH), *[(devices * ROWS, WIDTH)] * 3
    args = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]

    def ops(run, w, x, other, g):
        split = LayerSplit(far_and_near, w, x, None)
        _, residuals = split.output_and_residuals(w, other, None)
        return run(
            split.backward(w, None, residuals, g), split.forward(LayerOp.FORWARD, w, x, None)
        )

    def on_devices(run):
        local = P(EXPERT)
        return jax.shard_map(
            lambda *a: jax.tree.map(lambda y: y[None], ops(run, *a)),
            mesh=mesh,
            in_specs=(P(), local, local, local),
            out_specs=local,
            axis_names={EXPERT},
        )

    with jax.set_mesh(mesh):
        results = [jax.jit(on_devices(run))(*args) for run in (alone, interleave.side_by_side)]
        found = _messages(jax.make_jaxpr(on_devices(interleave.side_by_side))(*args))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *results)
    # the forward whose residuals the backward reads, then B's and F's messages by twos
    assert [is_far for is_far, _ in found[4:]] == 2 * [True, False] + 2 * [False, True]
    for i, (_, needed) in enumerate(found[4:]):
        assert needed - {0, 1, 2, 3} == set(range(4, 4 + i)), i


def test_layers_that_the_partitioner_splits_do_not_wait():
    assert needs(interleave.side_by_side, model=2) == needs(alone, model=2)
