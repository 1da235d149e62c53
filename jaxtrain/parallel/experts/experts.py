"""Expert parallelism: tokens go to the devices that hold the experts they chose, and return.

The `expert` axis splits the experts, and the batch in all other layers; `model` splits the columns
of each expert. A token's choice of an expert is a row of the matrix that the expert multiplies.
Rows are sent in one of three ways:

    dropless    by a ragged all-to-all of exactly the chosen rows. A device sorts the rows that it
                receives by expert, and multiplies each group of rows with its expert (grouped.py,
                megablox.py). It has memory for all choices that can fall on it: for each token of
                all devices, the smaller of the token's choices and the device's experts. Or it has
                memory for `expert_room` times the mean. Then the largest groups (one device's rows
                for one expert) are cut to a size at which all fit, and the last rows of such a
                group are dropped. XLA's CPU backend has no ragged all-to-all: a plain one sends the
                most rows that can arrive, from each device to each
    two steps   dropless, for an axis that spans `expert_nodes` nodes, between which links are slow
                (DeepSeek-V3, arXiv:2412.19437, section 3.2.2). A token is a row for each node in
                which it has a choice, not for each choice. The row goes to its gateway, the node's
                device with the sender's place in its own node, and from there a row for each of
                its choices goes to an expert of the node. On the way back the gateway adds up the
                results of a token. With `expert_room` a gateway, too, has memory for that multiple
                of the mean number of rows that it sends, and cuts its largest groups first
    capacity    by a plain all-to-all of a fixed number of positions for each expert and sequence;
                the last choices of a sequence for a full expert are dropped

Arrays that are split over `model` have a leading dimension for it, [M, …], with one part on each
device. The experts' results in them are terms of a sum, which `collect` computes. Sending and
receiving are each other's transposes, so the backward of one is the other. Inside the runtime's
manual region experts are split over `expert`; elsewhere a device has all of them.

Shape suffixes: M parts over model, B batch, T tokens, K choices of a token, D width, E experts of a
device, S positions of sent rows, R rows of experts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.config.kernels import BLOCKS, LARGE_BLOCKS, MEGABLOX, product_kernel
from jaxtrain.config.sizes import capacity_of, device_capacity, exceeds_mean, is_large
from jaxtrain.devices.mesh import (
    CONTEXT,
    EXPERT,
    MODEL,
    manual_size,
    over_model,
    psum,
    psum_scatter,
)
from jaxtrain.devices.sharding import constrain, is_split
from jaxtrain.parallel.attention.context import in_text_order, local_chunks
from jaxtrain.parallel.experts import grouped, megablox
from jaxtrain.parallel.experts.filled_rows import ROWS_IN_ORDER, on_rows
from jaxtrain.parallel.fp8 import (
    Quantized,
    gradient_of,
    multiplicable,
    operands,
    quantized,
    rescaled,
)
from jaxtrain.parallel.target_device import target_device

PART, REPLICATED = P(MODEL), P()
# cuts of experts' matrices [E, in, out] over model
COLUMNS, ROWS = P(None, None, MODEL), P(None, MODEL)


class ExchangeGroup(NamedTuple):
    """Devices that exchange rows: so many of the `expert` axis, each `stride` after the one
    before."""

    devices: int
    stride: int = 1

    @property
    def all_groups(self) -> list[list[int]] | None:
        """The groups of this kind, as indices along the axis; None if there is only one."""
        axis, span = manual_size(EXPERT), self.devices * self.stride
        if self.devices == axis:
            return None
        firsts = [at + first for at in range(0, axis, span) for first in range(self.stride)]
        return [list(range(first, first + span, self.stride)) for first in firsts]

    @property
    def me(self) -> jax.Array:
        """The place of this device in its group."""
        index = lax.axis_index(EXPERT)
        if self.devices == manual_size(EXPERT):
            return index
        return index // self.stride % self.devices


class Size(NamedTuple):
    """The number of all experts, and the sequences and tokens of a microbatch on a device.

    fills_empty: rows of this device's experts that no device has sent are zeros; else they may hold
        anything. Products of groups do not read them, but a scale of FP8 is the largest number of
        all rows.
    nodes: that the `expert` axis spans, for rows that go in two steps
    among: of a step, the devices between which rows go; None: all along the axis
    mean: the mean number of rows of this device's experts, if only those that are there are worked
        on; 0: all
    """

    experts: int
    batch: int
    tokens: int
    fills_empty: bool = True
    nodes: int = 1
    among: ExchangeGroup | None = None
    mean: int = 0

    @property
    def group(self) -> ExchangeGroup:
        """The devices between which rows go."""
        return self.among or ExchangeGroup(manual_size(EXPERT))

    @property
    def across(self) -> "Size":
        """The first of two steps, in which each node is as an expert."""
        group = ExchangeGroup(self.nodes, manual_size(EXPERT) // self.nodes)
        return Size(self.nodes, self.batch, self.tokens, False, among=group)

    @property
    def inside(self) -> "Size":
        """The second of two steps, in which the rows that a gateway has capacity for are as tokens:
        those of one device of each node."""
        group = ExchangeGroup(manual_size(EXPERT) // self.nodes)
        experts, batch = self.experts // self.nodes, self.nodes * self.batch
        return Size(experts, batch, self.tokens, self.fills_empty, among=group, mean=self.mean)


class Routing(NamedTuple):
    """The positions of rows, as int32.

    choice:   [S] the choice (token by token) that is sent at a position; the number of choices at
              an empty one
    position: [choices] the position of a choice; S for one that is not sent
    sizes:    [E] rows of each expert; None if all have the same number
    travel:   [devices, devices] rows from each device to each; None if they are fixed, and for one
              device
    source:   [R] the index at which a row of the experts has arrived; None if they arrive in order
    row:      [R] the inverse of `source`
    """

    choice: jax.Array
    position: jax.Array
    sizes: jax.Array | None = None
    travel: jax.Array | None = None
    source: jax.Array | None = None
    row: jax.Array | None = None


class TwoSteps(NamedTuple):
    """The positions of rows that go across nodes and then inside a node (`Size.across`,
    `Size.inside`). A choice across is sent if it is a token's first one in a node."""

    across: Routing
    inside: Routing

    @property
    def sizes(self) -> jax.Array | None:
        """[E] rows of each expert."""
        return self.inside.sizes


def counts(chosen: jax.Array, experts: int) -> jax.Array:
    """chosen int32 [B, T, K] → the number of times that a sequence's part on this device has chosen
    each expert, float32 [B, experts]."""
    return (chosen[..., None] == jnp.arange(experts)).sum((1, 2), dtype=jnp.float32)


# --- the positions of rows ------------------------------------------------------------------------


def _inverse(order: jax.Array) -> jax.Array:
    return (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    )


def _sorted(keys: jax.Array, number: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """keys int32 [n] below `number` → (their order, the sorted keys, the index at which each key
    begins [number + 1])."""
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    ordered = keys[order]
    return order, ordered, jnp.searchsorted(ordered, jnp.arange(number + 1)).astype(jnp.int32)


def _fitting(sizes: jax.Array, room: int) -> jax.Array:
    """sizes int32 [from, to, expert] of groups of rows → the rows of each that are sent, so that no
    more than `room` arrive at a device.

    All groups that go to a device are cut to one level, the highest at which they fit: the sum of
    min(size, level) over the groups is, for sizes in ascending order, the least over j of the j
    smallest and `level` times the others.
    """
    by_device = sizes.swapaxes(0, 1).reshape(sizes.shape[1], -1)
    ascending = jnp.sort(by_device, -1)
    smallest = jnp.cumsum(ascending, -1) - ascending
    level = ((room - smallest) // (by_device.shape[1] - jnp.arange(by_device.shape[1]))).max(-1)
    level = jnp.where(by_device.sum(-1) > room, level, ascending[:, -1])
    return jnp.minimum(sizes, level[:, None])


def dropless(
    chosen: jax.Array, experts: int, room: float = 0.0, nodes: int = 1
) -> tuple[Routing | TwoSteps, jax.Array]:
    """Returns (routing, this device's dropped choices of each expert, float32 [experts]) for chosen
    int32 [B, T, K], of all experts. room: the rows that a device has memory for, as a multiple of
    their mean number; 0: all that can arrive. nodes: that the `expert` axis spans; 1: rows go in
    one step"""
    b, t, k = chosen.shape
    devices = manual_size(EXPERT)
    if devices == 1:
        order, _, begin = _sorted(chosen.reshape(-1), experts)
        return Routing(order, _inverse(order), jnp.diff(begin)), jnp.zeros(experts)
    if nodes > 1:
        return _in_two_steps(chosen, Size(experts, b, t, nodes=nodes), room)
    rows = device_capacity(b * t, k, experts, devices, room)
    drops = rows < device_capacity(b * t, k, experts, devices, 0.0)
    return _routed(chosen.reshape(-1), experts, ExchangeGroup(devices), b * t * k, rows, drops)


def _in_two_steps(chosen: jax.Array, size: Size, room: float) -> tuple[TwoSteps, jax.Array]:
    """`dropless` for a `size` of several nodes. Dropped choices are counted by the gateways, each
    those of the rows that it has received."""
    k, across, inside = chosen.shape[-1], size.across, size.inside
    tokens, node = size.batch * size.tokens, chosen // inside.experts
    before = jnp.tril(jnp.ones((k, k), bool), -1)
    is_repeated = ((node[..., None] == node[..., None, :]) & before).any(-1)
    first_of_node = jnp.where(is_repeated, size.nodes, node).reshape(-1)
    sent = tokens * min(size.nodes, k)
    first, _ = _routed(
        first_of_node, size.nodes, across.group, sent, size.nodes * tokens, False, True
    )
    # A row brings all choices of its token, plus 1: behind those that arrive are zeros.
    filled = across._replace(fills_empty=True)
    arrived = _run(
        lambda p, c: _at_once(OUT, c, p, filled), (REPLICATED,), REPLICATED, first, chosen + 1
    )
    my_node = across.group.me
    local = arrived.reshape(-1) - 1 - my_node * inside.experts
    local = jnp.where((local >= 0) & (local < inside.experts), local, inside.experts)
    # On average a gateway sends as many rows as a device receives. At most it sends all choices of
    # its senders, one device of each node: as if nodes were devices.
    capacity = functools.partial(device_capacity, tokens, k, size.experts)
    devices = manual_size(EXPERT)
    sends, rows = capacity(size.nodes, room), capacity(devices, room)
    drops = sends < capacity(size.nodes, 0.0) or rows < capacity(devices, 0.0)
    second, dropped = _routed(local, inside.experts, inside.group, sends, rows, drops, True)
    dropped = jnp.where(jnp.arange(size.nodes)[:, None] == my_node, dropped, 0.0).reshape(-1)
    return TwoSteps(first, second), dropped


def _routed(
    chosen: jax.Array,
    experts: int,
    group: ExchangeGroup,
    sends: int,
    rows: int,
    drops: bool,
    optional: bool = False,
) -> tuple[Routing, jax.Array]:
    """The routing inside a group of devices, and the dropped choices of each expert.

    Args:
      chosen: int32 [choices], of the group's experts.
      sends, rows: those that a device has memory for, to send and to receive.
      drops: more may be chosen than there is memory for.
      optional: a choice may be `experts`, which is none.
    """
    devices, local_experts = group.devices, experts // group.devices
    order, ordered, begin = _sorted(chosen, experts)
    sizes = admitted = jnp.diff(begin)
    if drops and sends < chosen.size:
        admitted = _fitting(sizes[:, None, None], sends).reshape(-1)
    me, all_groups = group.me, group.all_groups
    all_sizes = lax.all_gather(  # [from, to, expert]
        admitted.reshape(devices, local_experts), EXPERT, axis_index_groups=all_groups
    )
    dropped = jnp.zeros(experts)
    if drops:
        all_sizes = _fitting(all_sizes, rows)
        admitted = all_sizes[me].reshape(-1)
        dropped = (sizes - admitted).astype(jnp.float32)
    if drops or optional:
        if optional:
            admitted = jnp.append(admitted, 0)
        rank = jnp.arange(order.size, dtype=jnp.int32) - begin[ordered]
        place = jnp.where(
            rank < admitted[ordered], (jnp.cumsum(admitted) - admitted)[ordered] + rank, sends
        )
        position = jnp.zeros_like(order).at[order].set(place, unique_indices=True)
        choice = jnp.full((sends,), order.size, order.dtype).at[place].set(order, mode="drop")
    else:
        choice, position = order, _inverse(order)
    travel, mine = all_sizes.sum(-1), all_sizes[:, me]
    # Arrived rows are ordered by device, each device's by expert; empty rows come last.
    expert = jnp.tile(jnp.arange(local_experts, dtype=jnp.int32), devices)
    filled = jnp.repeat(expert, mine.reshape(-1), total_repeat_length=rows)
    expert = jnp.where(jnp.arange(rows) < mine.sum(), filled, local_experts)
    source = jnp.argsort(expert, stable=True).astype(jnp.int32)
    return Routing(choice, position, mine.sum(0), travel, source, _inverse(source)), dropped


def by_capacity(chosen: jax.Array, experts: int, factor: float) -> tuple[Routing, jax.Array]:
    """Returns (routing, dropped choices of each expert, float32 [experts]). A capacity is that of a
    sequence, also if `context` splits it."""
    b, t, k = chosen.shape
    parts = manual_size(CONTEXT)
    limit = capacity_of(t * parts, k, experts, factor)
    local_limit, halves = min(limit, t), 2 if parts > 1 else 1
    half = jnp.arange(t, dtype=jnp.int32) // (t // halves)
    # the index of a run of consecutive tokens
    run = (jnp.arange(b, dtype=jnp.int32)[:, None] * halves + half)[..., None]
    keys = (run * experts + chosen).reshape(-1)
    order, ordered, begin = _sorted(keys, b * halves * experts)
    rank = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.size, dtype=jnp.int32) - begin[ordered], unique_indices=True)
    )
    number = jnp.diff(begin).reshape(b, halves, experts)
    before = jnp.zeros_like(number)
    if parts > 1:
        every = in_text_order(lax.all_gather(number, CONTEXT, axis=1, tiled=True), parts)
        before = local_chunks(jnp.cumsum(every, 1) - every, parts)
    admitted = jnp.clip(limit - before, 0, number)
    # positions taken by the half before, on this device
    taken = jnp.concatenate([jnp.zeros_like(admitted[:, :1]), admitted[:, :-1]], 1)
    place = chosen * b + jnp.arange(b, dtype=jnp.int32)[:, None, None]
    positions = experts * b * local_limit
    position = place.reshape(-1) * local_limit + taken.reshape(-1)[keys] + rank
    position = jnp.where(rank < admitted.reshape(-1)[keys], position, positions)
    choice = (
        jnp.full((positions,), position.size, jnp.int32)
        .at[position]
        .set(jnp.arange(position.size, dtype=jnp.int32), mode="drop")
    )
    return Routing(choice, position), (number - admitted).sum((0, 1)).astype(jnp.float32)


# --- to the experts and back, on one device's part ------------------------------------------------


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    return x.at[rows].get(mode="fill", fill_value=0)


def _in_order(rows: jax.Array, order: jax.Array, routing: Routing, size: Size) -> jax.Array:
    """rows [R, …] of this device's experts, in another order, in which empty ones come last, too;
    these may hold anything then."""
    assert routing.sizes is not None
    number = routing.sizes.sum()
    reordered = lambda order: _take(rows, order)
    return on_rows(reordered, size.mean, number, order, name=ROWS_IN_ORDER)


def _ragged(
    rows: jax.Array,
    travel: jax.Array,
    room: int,
    most: int,
    fills_empty: bool,
    group: ExchangeGroup,
) -> jax.Array:
    """Rows [n, …], ordered by the device of the group they go to → the rows that arrive, [room, …],
    and behind them zeros or, without `fills_empty`, anything. travel [from, to]: the numbers of
    rows, none over `most`."""
    me, devices, groups = group.me, group.devices, group.all_groups
    before = lambda a, axis: jnp.cumsum(a, axis) - a
    # the index at which a device's rows begin, where they are sent and where they arrive
    starts, lands = before(travel, 1), before(travel, 0)
    to, from_ = travel[me], travel[:, me]

    def exactly(rows):
        out = (jnp.zeros if fills_empty else lax.empty)((room, *rows.shape[1:]), rows.dtype)
        return lax.ragged_all_to_all(
            *(rows, out, starts[me], to, lands[me], from_),
            axis_name=EXPERT,
            axis_index_groups=groups,
        )

    def padded(rows):
        sent = _take(
            rows,
            jnp.where(
                jnp.arange(most) < to[:, None],
                starts[me][:, None] + jnp.arange(most),
                rows.shape[0],
            ).reshape(-1),
        )
        sent = lax.all_to_all(sent, EXPERT, 0, 0, tiled=True, axis_index_groups=groups)
        row = jnp.arange(room)
        device = jnp.searchsorted(jnp.cumsum(from_), row, side="right")
        return _take(
            sent,
            jnp.where(
                device < devices, device * most + row - _take(lands[:, me], device), sent.shape[0]
            ),
        )

    return lax.platform_dependent(rows, cpu=padded, default=exactly)


def _exchange(sent: jax.Array) -> jax.Array:
    """The all-to-all of [S, …], with the same number of rows for each device."""
    return lax.all_to_all(sent, EXPERT, 0, 0, tiled=True) if manual_size(EXPERT) > 1 else sent


def _most(routing: Routing, size: Size) -> int:
    """The most rows from one device to another."""
    assert routing.source is not None
    tokens, experts = size.batch * size.tokens, size.experts // size.group.devices
    return min(
        tokens * min(routing.position.size // tokens, experts),
        routing.choice.size,
        routing.source.size,
    )


def _arrives_sorted(size: Size) -> bool:
    """True if arrived rows are sorted by expert already: a device has one expert."""
    return size.experts == size.group.devices


def _sent(x_BTD: jax.Array, routing: Routing, size: Size) -> jax.Array:
    """Tokens → rows [S, …] in the order in which they are sent."""
    tokens = x_BTD.reshape(-1, x_BTD.shape[-1])
    return _take(tokens, routing.choice // (routing.position.size // tokens.shape[0]))


def _arrive(sent: jax.Array, routing: Routing, size: Size) -> jax.Array:
    """Sent rows [S, …] → rows of this device's experts as they arrive [R, …], or [E, R, …]."""
    if routing.travel is not None:
        assert routing.source is not None
        room, most = routing.source.size, _most(routing, size)
        return _ragged(sent, routing.travel, room, most, size.fills_empty, size.group)
    if routing.sizes is not None:
        return sent
    devices = manual_size(EXPERT)
    by_expert = (
        _exchange(sent)
        .reshape(devices, size.experts // devices, -1, *sent.shape[1:])
        .swapaxes(0, 1)
    )
    return by_expert.reshape(size.experts // devices, -1, *sent.shape[1:])


def _by_expert(arrived: jax.Array, routing: Routing, size: Size) -> jax.Array:
    """Rows as they arrive → sorted by expert."""
    if routing.source is None or _arrives_sorted(size):
        return arrived
    return _in_order(arrived, routing.source, routing, size)


def _by_device(rows: jax.Array, routing: Routing, size: Size) -> jax.Array:
    """The inverse of `_by_expert`."""
    if routing.row is None or _arrives_sorted(size):
        return rows
    return _in_order(rows, routing.row, routing, size)


def _leave(rows: jax.Array, routing: Routing, size: Size) -> jax.Array:
    """The inverse of `_arrive`."""
    if routing.travel is not None:
        room, most = routing.choice.size, _most(routing, size)
        # no position is that of a row that was not sent
        return _ragged(rows, routing.travel.T, room, most, False, size.group)
    if routing.sizes is not None:
        return rows
    devices = manual_size(EXPERT)
    by_device = rows.reshape(size.experts // devices, devices, -1, *rows.shape[2:]).swapaxes(0, 1)
    return _exchange(by_device.reshape(-1, *rows.shape[2:]))


def _added_up(rows: jax.Array, routing: Routing, size: Size) -> jax.Array:
    """Rows in the order in which they were sent → the sum of each token's [B, T, D]."""
    if routing.position.size > routing.choice.size:  # an array of all choices would be mostly empty
        positions = routing.position.reshape(size.batch * size.tokens, -1).T
        total = jnp.zeros((positions.shape[1], rows.shape[-1]))
        for position in positions:
            total += _take(rows, position).astype(total.dtype)
        return total.astype(rows.dtype).reshape(size.batch, size.tokens, -1)
    choices = _take(rows, routing.position)
    return choices.reshape(size.batch, size.tokens, -1, rows.shape[-1]).sum(2)


# The functions that bring tokens to the experts, and rows back. Each is a call of its own where
# products go beside the message, so that no other work is in the time of a message
# (runtime/interleave.py).
OUT = (_sent, _arrive, _by_expert)
BACK = (_by_device, _leave, _added_up)


def _at_once(functions: tuple, x: jax.Array, routing: Routing, size: Size) -> jax.Array:
    for fn in functions:
        x = fn(x, routing, size)
    return x


def _gates_out(gates_BTK: jax.Array, routing: Routing | TwoSteps, size: Size) -> jax.Array:
    """Weights of choices → weights of rows."""
    if isinstance(routing, TwoSteps):
        arrived = _at_once(OUT, gates_BTK, routing.across, size.across)
        return _gates_out(arrived, routing.inside, size.inside)
    return _at_once(OUT[1:], _take(gates_BTK.reshape(-1), routing.choice), routing, size)


def _gates_back(gates: jax.Array, routing: Routing | TwoSteps, size: Size) -> jax.Array:
    """Weights' gradients of rows → those of choices [B, T, K]."""
    if isinstance(routing, TwoSteps):
        arrived = _gates_back(gates, routing.inside, size.inside)
        arrived = arrived.reshape(-1, arrived.shape[-1])
        return _at_once(BACK, arrived, routing.across, size.across)
    rows = _at_once(BACK[:2], gates, routing, size)
    return _take(rows, routing.position).reshape(size.batch, size.tokens, -1)


# --- the same on all parts, with gradients --------------------------------------------------------


def _run(fn, in_specs, out_specs, routing: Routing | TwoSteps, *args):
    return over_model(
        lambda routing, *a: fn(routing, *a),
        (jax.tree.map(lambda _: REPLICATED, routing), *in_specs),
        out_specs,
    )(routing, *args)


def send(
    x_MBTD, gates_BTK: jax.Array, routing: Routing | TwoSteps, size: Size
) -> tuple[Any, jax.Array]:
    """Returns (rows of this device's experts [M, R, D], or [M, E, R, D] by capacity; the weight of
    each row). A quantized tensor is sent in FP8, and the gradient comes back in its own type. In
    two steps x_MBTD is what `send_across` has sent."""
    if not isinstance(x_MBTD, Quantized):
        return _send(x_MBTD, gates_BTK, routing, size)
    carrier, gates = _send(x_MBTD.carrier, gates_BTK, routing, size)
    bits = _rows(x_MBTD.bits, *_last_step(routing, size))
    return dataclasses.replace(x_MBTD, bits=bits, carrier=carrier), gates


def send_across(x_MBTD, routing: Routing | TwoSteps, size: Size):
    """Tokens, an array or quantized → the rows [M, R, D] that arrive at their gateways; in one step
    the tokens as they are."""
    if not isinstance(routing, TwoSteps):
        return x_MBTD
    if not isinstance(x_MBTD, Quantized):
        return _send_across(x_MBTD, routing.across, size.across)
    carrier = _send_across(x_MBTD.carrier, routing.across, size.across)
    bits = _rows(x_MBTD.bits, routing.across, size.across)
    return dataclasses.replace(x_MBTD, bits=bits, carrier=carrier)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _send_across(x_MBTD: jax.Array, routing: Routing, size: Size) -> jax.Array:
    return _rows(x_MBTD, routing, size)


_send_across.defvjp(
    lambda x, routing, size: (_send_across(x, routing, size), routing),
    lambda size, routing, g: (_sums(g, routing, size), None),
)


def _last_step(routing: Routing | TwoSteps, size: Size) -> tuple[Routing, Size]:
    """The routing and the size of the step to the experts."""
    return (routing.inside, size.inside) if isinstance(routing, TwoSteps) else (routing, size)


def _one_by_one(functions: tuple, x: jax.Array, routing: Routing, size: Size) -> jax.Array:
    """The functions of each part of x [M, …], each as a call of its own."""
    for fn in functions:
        of_part = lambda p, x, fn=fn: fn(x[0], p, size)[None]
        x = _run(of_part, (PART,), PART, routing, x)
    return x


def _rows(x_MBTD: jax.Array, routing: Routing | TwoSteps, size: Size) -> jax.Array:
    """Each of two steps is a message of its own (runtime/interleave.py)."""
    if isinstance(routing, TwoSteps):
        return _rows(_rows(x_MBTD, routing.across, size.across), routing.inside, size.inside)
    return _one_by_one(OUT, x_MBTD, routing, size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _send(
    x_MBTD: jax.Array, gates_BTK: jax.Array, routing: Routing | TwoSteps, size: Size
) -> tuple[jax.Array, jax.Array]:
    return _rows(x_MBTD, *_last_step(routing, size)), _run(
        lambda p, g: _gates_out(g, p, size),
        (REPLICATED,),
        REPLICATED,
        routing,
        gates_BTK,
    )


def _send_backward(size, routing, gradients):
    rows, gates = gradients
    to_gates = lambda p, g: _gates_back(g, p, size)
    by_tokens = receive(rows, *_last_step(routing, size))
    if isinstance(routing, TwoSteps):  # as rows of a gateway
        by_tokens = by_tokens.reshape(by_tokens.shape[0], -1, by_tokens.shape[-1])
    by_gates = _run(to_gates, (REPLICATED,), REPLICATED, routing, gates)
    return by_tokens, by_gates, None


_send.defvjp(
    lambda x, gates, routing, size: (_send(x, gates, routing, size), routing), _send_backward
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def receive(rows: jax.Array, routing: Routing | TwoSteps, size: Size) -> jax.Array:
    """Rows → the sum of each token's rows, [M, B, T, D]: a term of the sum over M."""
    return _sums(rows, routing, size)


def _sums(rows: jax.Array, routing: Routing | TwoSteps, size: Size) -> jax.Array:
    """Each of two steps is a message of its own."""
    if isinstance(routing, TwoSteps):
        sums = _sums(rows, routing.inside, size.inside)
        sums = sums.reshape(sums.shape[0], -1, sums.shape[-1])
        return _sums(sums, routing.across, size.across)
    return _one_by_one(BACK, rows, routing, size)


def _receive_backward(size, routing, g):
    return _rows(g, routing, size), None


receive.defvjp(
    lambda rows, routing, size: (receive(rows, routing, size), routing), _receive_backward
)


def after(routing: Routing | TwoSteps, x):
    """x, an array or a quantized tensor, behind a barrier: its readers begin when the routing is
    known."""
    if isinstance(x, Quantized):
        return dataclasses.replace(x, bits=_after(routing, x.bits))
    return _after(routing, x)


@jax.custom_vjp
def _after(routing: Routing | TwoSteps, x: jax.Array) -> jax.Array:
    return lax.optimization_barrier((routing, x))[1]


_after.defvjp(lambda routing, x: (_after(routing, x), None), lambda _, g: (None, g))


def together(rows, hidden: jax.Array) -> tuple[Any, jax.Array]:
    """Both, behind one barrier, and so are their gradients."""
    return (
        _together(rows, hidden)
        if isinstance(rows, Quantized)
        else lax.optimization_barrier((rows, hidden))
    )


@jax.custom_vjp
def _together(rows: Quantized, hidden: jax.Array) -> tuple[Quantized, jax.Array]:
    bits, hidden = lax.optimization_barrier((rows.bits, hidden))
    return dataclasses.replace(rows, bits=bits), hidden


def _together_backward(_, gradients):
    rows, hidden = gradients
    carrier, hidden = lax.optimization_barrier((rows.carrier, hidden))
    return rows.with_gradient(carrier), hidden


_together.defvjp(lambda rows, hidden: (_together(rows, hidden), None), _together_backward)


@jax.custom_vjp
def weigh(rows: jax.Array, gates: jax.Array) -> jax.Array:
    """Rows [M, …, F] times the weight of each, […]; the gradient of the weights is summed over
    M."""
    return _weigh(rows, gates)[0]


def _weigh(rows, gates):
    weights = gates[None, ..., None].astype(rows.dtype)
    return rows * weights, (rows, weights)


def _weigh_backward(residuals, g):
    rows, weights = residuals

    def by_gates(r, g):
        part = (r[0].astype(jnp.float32) * g[0].astype(jnp.float32)).sum(-1)
        return psum(part, (MODEL,)) if rows.shape[0] > 1 else part

    return g * weights, over_model(by_gates, (PART, PART), REPLICATED)(rows, g)


weigh.defvjp(_weigh, _weigh_backward)


def activated(
    fn: Callable,
    inputs: Sequence[jax.Array],
    gates: jax.Array,
    sizes: jax.Array | None,
    mean: int,
) -> jax.Array:
    """`weigh` of fn(*inputs), an elementwise function of rows: on those that are there, as
    filled_rows.py says, where `exceeds_mean`. mean: the mean number of rows"""
    if sizes is None or not exceeds_mean(inputs[0].shape[1], mean):
        return weigh(fn(*inputs), gates)
    return _activated(fn, mean, tuple(inputs), gates, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _activated(
    fn: Callable, mean: int, inputs: tuple, gates: jax.Array, sizes: jax.Array
) -> jax.Array:
    weighed = lambda gates, *x: fn(*x) * gates[:, None].astype(x[0].dtype)
    run = lambda inputs, gates, sizes: on_rows(
        weighed, mean, sizes.sum(), gates, *(x[0] for x in inputs)
    )[None]
    specs = ((PART,) * len(inputs), REPLICATED, REPLICATED)
    return over_model(run, specs, PART)(inputs, gates, sizes)


def _activated_backward(fn, mean, saved, g):
    def gradients(gates, g, *x):
        y, backward = jax.vjp(fn, *x)
        by_gates = (y.astype(jnp.float32) * g.astype(jnp.float32)).sum(-1)
        return by_gates, *backward(g * gates[:, None].astype(g.dtype))

    def run(inputs, gates, sizes, g):
        rows = gates, g[0], *(x[0] for x in inputs)
        by_gates, *by_inputs = on_rows(gradients, mean, sizes.sum(), *rows)
        if model_parts > 1:
            by_gates = psum(by_gates, (MODEL,))
        return tuple(x[None] for x in by_inputs), by_gates

    model_parts = saved[0][0].shape[0]
    parts = (PART,) * len(saved[0])
    specs = (parts, REPLICATED, REPLICATED, PART)
    return *over_model(run, specs, (parts, REPLICATED))(*saved, g), None


_activated.defvjp(
    lambda fn, mean, *saved: (_activated(fn, mean, *saved), saved),
    _activated_backward,
)


# --- products -------------------------------------------------------------------------------------


class Products(NamedTuple):
    """Products of rows with their experts' matrices, and their gradients; arguments as in
    grouped.py."""

    product: Callable
    rows_gradient: Callable
    weights_gradient: Callable
    add_rows_gradient: Callable


def _products_of(module) -> Products:
    return Products(*(getattr(module, form) for form in Products._fields))


BY_BLOCKS = _products_of(grouped)
KERNELS = {
    BLOCKS: BY_BLOCKS,
    LARGE_BLOCKS: Products(
        *(functools.partial(form, most_rows=grouped.MOST_ROWS_ON_GPU) for form in BY_BLOCKS)
    ),
    MEGABLOX: _products_of(megablox),
}


def _einsum(form: str) -> Callable:
    return lambda a, b, _, dtype=None: jnp.einsum(form, a, b, preferred_element_type=dtype)


# of [E, R, I]: all experts have the same number of rows
EQUAL_GROUPS = Products(
    _einsum("eri,eio->ero"),
    _einsum("ero,eio->eri"),
    _einsum("eri,ero->eio"),
    lambda total, g, weights, *_: total + jnp.einsum("ero,eio->eri", g, weights),
)


def _products(sizes: jax.Array | None) -> Products:
    return EQUAL_GROUPS if sizes is None else KERNELS[product_kernel(target_device()).kernel]


def _multiply(form: str, a, b, sizes: jax.Array | None, in_specs, out_spec: P) -> jax.Array:
    """A product of `Products` on each device's part; of arrays, or of quantized tensors in FP8.

    What is [M, …] has a part of its own on each device.
    """
    part = lambda x, spec: x[0] if spec is PART else x
    whole = lambda y: y[None] if out_spec is PART else y
    dtype = None
    x, y = a, b
    if isinstance(a, Quantized):
        dtype = a.use.compute
        x, y = multiplicable(a, b)

    def run(x, y, sizes=None):
        multiply = getattr(_products(sizes), form)
        x, y = part(x, in_specs[0]), part(y, in_specs[1])
        if dtype is not None:  # a scale of FP8 is the largest number, empty rows included
            return whole(multiply(x, y, sizes, dtype))
        if sizes is not None and form != "weights_gradient" and is_large(x.shape[0]):
            return whole(multiply(x, y, sizes, fills_empty=False))
        return whole(multiply(x, y, sizes))

    if sizes is None:
        result = over_model(lambda x, y: run(x, y), in_specs, out_spec)(x, y)
    else:
        result = over_model(run, (*in_specs, REPLICATED), out_spec)(x, y, sizes)
    return result if dtype is None else rescaled(result, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(rows, weights, sizes: jax.Array | None, cut: P) -> jax.Array:
    """Rows [M, R, I] sorted by expert, `sizes` of each, or [M, E, R, I], times their experts'
    weights [E, I, O] → rows of O. Rows and weights are arrays or quantized tensors.

    The weights are cut over model: COLUMNS (outputs are cut), or ROWS (inputs are cut, outputs are
    terms of a sum).
    """
    return _product(rows, weights, sizes, cut)[0]


def _product(rows, weights, sizes, cut):
    multiplied, for_weights = operands(rows, weights)
    y = _multiply("product", multiplied, weights, sizes, (PART, cut), PART)
    return y, (rows if isinstance(rows, Quantized) else None, for_weights, weights, sizes)


def _gradients(rows, weights, sizes, g, g_for_weights, cut) -> tuple[jax.Array, jax.Array]:
    """The gradients of rows and weights, from that of their product."""
    by_rows = _multiply("rows_gradient", g, weights, sizes, (PART, cut), PART)
    return by_rows, _multiply("weights_gradient", rows, g_for_weights, sizes, (PART, PART), cut)


def _product_backward(cut, saved, g):
    travelled, rows, weights, sizes = saved
    pair = operands(g, weights, gradient=True)
    by_rows, by_weights = _gradients(rows, weights, sizes, *pair, cut)
    return gradient_of(travelled, by_rows), gradient_of(weights, by_weights), None


product.defvjp(_product, _product_backward)


def two_products(
    rows, first, second, sizes: jax.Array | None, mean: int
) -> tuple[jax.Array, jax.Array]:
    """The products of rows with two experts' weights that are cut by COLUMNS. Where `exceeds_mean`,
    the rows' two gradients are added up on the rows that are there."""
    if sizes is None or not exceeds_mean(rows.shape[1], mean):
        return product(rows, first, sizes, COLUMNS), product(rows, second, sizes, COLUMNS)
    return _two_products(rows, first, second, sizes, mean)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _two_products(
    rows: jax.Array, first: jax.Array, second: jax.Array, sizes: jax.Array, mean: int
) -> tuple[jax.Array, jax.Array]:
    return product(rows, first, sizes, COLUMNS), product(rows, second, sizes, COLUMNS)


def _two_products_backward(mean, saved, gradients):
    rows, *weights, sizes = saved
    by_weights = [
        _multiply("weights_gradient", rows, g, sizes, (PART, PART), COLUMNS) for g in gradients
    ]
    total = _multiply("rows_gradient", gradients[0], weights[0], sizes, (PART, COLUMNS), PART)
    specs = (PART, COLUMNS, PART, REPLICATED)

    def add(g, weights, total, sizes):
        return _products(sizes).add_rows_gradient(total[0], g[0], weights, sizes, mean)[None]

    return over_model(add, specs, PART)(gradients[1], weights[1], total, sizes), *by_weights, None


_two_products.defvjp(
    lambda rows, first, second, sizes, mean: (
        _two_products(rows, first, second, sizes, mean),
        (rows, first, second, sizes),
    ),
    _two_products_backward,
)


def product_received(
    rows: jax.Array, weights, routing: Routing | TwoSteps, size: Size
) -> jax.Array:
    """`receive` of the rows' products with weights cut by ROWS. With quantized weights the gradient
    goes out to the experts in FP8."""
    if isinstance(weights, Quantized):
        return _product_received(rows, weights, routing, size)
    return receive(product(rows, weights, routing.sizes, ROWS), routing, size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product_received(rows, weights, routing: Routing | TwoSteps, size: Size) -> jax.Array:
    return _product_received_forward(rows, weights, routing, size)[0]


def _product_received_forward(rows, weights, routing, size):
    y, (_, rows, _, _) = _product(rows, weights, routing.sizes, ROWS)
    return receive(y, routing, size), (rows, weights, routing)


def _product_received_backward(size, saved, g):
    rows, weights, routing = saved
    sent = quantized(g, weights.use, gradient=True).map(lambda a: _rows(a, routing, size))
    by_rows, by_weights = _gradients(
        rows, weights, routing.sizes, *operands(sent, weights, gradient=True), ROWS
    )
    return by_rows, gradient_of(weights, by_weights), None


_product_received.defvjp(_product_received_forward, _product_received_backward)


# --- tokens over model ----------------------------------------------------------------------------

SPLIT, GATHERED = ("batch", "sequence", None), ("batch", "token", None)


@jax.custom_vjp
def spread(x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x, split along the sequence → (x gathered; the same with a leading M, [M, B, T, D], whose
    gradients of all parts add up)."""
    gathered = constrain(x_BTD, GATHERED)
    return gathered, over_model(lambda x: x[None], (REPLICATED,), PART)(gathered)


@jax.custom_vjp
def collect(x_MBTD: jax.Array) -> jax.Array:
    """The sum of the parts, split along the sequence."""
    if not is_split("sequence"):
        return x_MBTD[0]
    return over_model(lambda x: psum_scatter(x[0], MODEL, 1), (PART,), P(None, MODEL))(x_MBTD)


spread.defvjp(lambda x: (spread(x), None), lambda _, g: (constrain(g[0], SPLIT) + collect(g[1]),))
collect.defvjp(lambda x: (collect(x), None), lambda _, g: (spread(g)[1],))
