"""The collectives that move rows between devices, on one device's part over `model`.

A dispatch has three functions, and the combination of results their inverses in reverse order. Each
is linear, so each list is the other's transpose: the backward of one is the other (dispatch.py).

    DISPATCH   sent_rows     tokens → rows in the order in which they are sent
               to_experts    the message: sent rows → rows as they arrive
               by_expert     rows as they arrive → sorted by expert
    COMBINE    by_device     sorted by expert → as they arrived
               from_experts  the message back
               token_sums    rows in the order in which they were sent → the sum of each token's

Shape suffixes: B batch, T tokens, D width, E experts of a device, S positions of sent rows, R rows
of a device's experts.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.mesh import EXPERT, manual_size
from jaxtrain.parallel.experts.exchange_group import DispatchSpec, ExchangeGroup
from jaxtrain.parallel.experts.filled_rows import ROWS_IN_ORDER, on_rows
from jaxtrain.parallel.experts.routing import Routing
from jaxtrain.parallel.tensor import take

# --- messages -------------------------------------------------------------------------------------


def ragged_all_to_all(
    rows: jax.Array,
    rows_from_to: jax.Array,
    capacity: int,
    most: int,
    fills_empty: bool,
    group: ExchangeGroup,
) -> jax.Array:
    """The rows that arrive, [capacity, …], ordered by sender, and behind them zeros or, without
    `fills_empty`, anything.

    rows: [n, …], ordered by the device of the group they go to
    rows_from_to: int32 [from, to], the numbers of rows, none over `most`
    """
    me, devices, groups = group.me, group.devices, group.all_groups
    before = lambda a, axis: jnp.cumsum(a, axis) - a
    # the index at which each device's rows begin, where they are sent and where they arrive
    starts, lands = before(rows_from_to, 1), before(rows_from_to, 0)
    sent, received = rows_from_to[me], rows_from_to[:, me]

    def exactly(rows):
        # Zeros cost a pass over memory for the worst case, most of which stays empty.
        out = (jnp.zeros if fills_empty else lax.empty)((capacity, *rows.shape[1:]), rows.dtype)
        return lax.ragged_all_to_all(
            *(rows, out, starts[me], sent, lands[me], received),
            axis_name=EXPERT,
            axis_index_groups=groups,
        )

    def padded(rows):
        # `most` rows to each device, zeros behind those that are sent
        is_sent = jnp.arange(most) < sent[:, None]
        index = starts[me][:, None] + jnp.arange(most)
        blocks = take(rows, jnp.where(is_sent, index, rows.shape[0]).reshape(-1))
        blocks = lax.all_to_all(blocks, EXPERT, 0, 0, tiled=True, axis_index_groups=groups)
        # Row i comes from the device whose rows end behind i. It is row i − (the index at which
        # this device's rows begin) of its block.
        row = jnp.arange(capacity)
        device = jnp.searchsorted(jnp.cumsum(received), row, side="right")
        return take(
            blocks,
            jnp.where(
                device < devices,
                device * most + row - take(lands[:, me], device),
                blocks.shape[0],
            ),
        )

    # By the platform that the program is lowered for: XLA's CPU backend has no ragged all-to-all.
    return lax.platform_dependent(rows, cpu=padded, default=exactly)


def _equal_all_to_all(sent: jax.Array) -> jax.Array:
    """The all-to-all of [S, …], with the same number of rows for each device."""
    return lax.all_to_all(sent, EXPERT, 0, 0, tiled=True) if manual_size(EXPERT) > 1 else sent


def _most_between_two(routing: Routing, spec: DispatchSpec) -> int:
    """The most rows from one device to another."""
    assert routing.arrival_of_row is not None
    tokens = spec.batch * spec.tokens
    return min(
        # a token has at most a row for each expert of the receiver
        tokens * min(routing.choices // tokens, spec.local_experts),
        routing.choice_of_position.size,
        routing.arrival_of_row.size,
    )


# --- to the experts -------------------------------------------------------------------------------


def sent_rows(x_BTD: jax.Array, routing: Routing, spec: DispatchSpec) -> jax.Array:
    """Tokens → rows [S, …] in the order in which they are sent."""
    tokens = x_BTD.reshape(-1, x_BTD.shape[-1])
    choices_of_token = routing.choices // tokens.shape[0]
    return take(tokens, routing.choice_of_position // choices_of_token)


def to_experts(sent: jax.Array, routing: Routing, spec: DispatchSpec) -> jax.Array:
    """Sent rows [S, …] → rows of this device's experts as they arrive [R, …], or [E, R, …]."""
    if routing.rows_from_to is not None:
        assert routing.arrival_of_row is not None
        capacity, most = routing.arrival_of_row.size, _most_between_two(routing, spec)
        return ragged_all_to_all(
            sent, routing.rows_from_to, capacity, most, spec.fills_empty, spec.group
        )
    if routing.sizes is not None:  # one device
        return sent
    # By capacity: positions are ordered by expert, so a device's experts are one block of them.
    # From [devices, E, …] to [E, devices, …]: an expert's rows of all devices stand together.
    by_sender = _equal_all_to_all(sent).reshape(
        manual_size(EXPERT), spec.local_experts, -1, *sent.shape[1:]
    )
    return by_sender.swapaxes(0, 1).reshape(spec.local_experts, -1, *sent.shape[1:])


def by_expert(arrived: jax.Array, routing: Routing, spec: DispatchSpec) -> jax.Array:
    """Rows as they arrive → sorted by expert."""
    return _reordered(arrived, routing.arrival_of_row, routing, spec)


# --- and back -------------------------------------------------------------------------------------


def by_device(rows: jax.Array, routing: Routing, spec: DispatchSpec) -> jax.Array:
    """The inverse of `by_expert`."""
    return _reordered(rows, routing.row_of_arrival, routing, spec)


def _reordered(
    rows: jax.Array, order: jax.Array | None, routing: Routing, spec: DispatchSpec
) -> jax.Array:
    """rows [R, …] of this device's experts in another order, in which empty ones come last, too;
    these may hold anything then."""
    if order is None or spec.local_experts == 1:  # arrived rows are all one expert's
        return rows
    assert routing.sizes is not None
    reordered = lambda order: take(rows, order)
    return on_rows(reordered, spec.mean_rows, routing.sizes.sum(), order, name=ROWS_IN_ORDER)


def from_experts(rows: jax.Array, routing: Routing, spec: DispatchSpec) -> jax.Array:
    """The inverse of `to_experts`."""
    if routing.rows_from_to is not None:
        capacity, most = routing.choice_of_position.size, _most_between_two(routing, spec)
        # Rows that were not sent stay undefined: `token_sums` reads the positions of sent ones.
        return ragged_all_to_all(rows, routing.rows_from_to.T, capacity, most, False, spec.group)
    if routing.sizes is not None:  # one device
        return rows
    by_receiver = rows.reshape(
        spec.local_experts, manual_size(EXPERT), -1, *rows.shape[2:]
    ).swapaxes(0, 1)
    return _equal_all_to_all(by_receiver.reshape(-1, *rows.shape[2:]))


def token_sums(rows: jax.Array, routing: Routing, spec: DispatchSpec) -> jax.Array:
    """Rows in the order in which they were sent → the sum of each token's [B, T, D]."""
    if routing.choices > routing.choice_of_position.size:
        # An array of all choices would be mostly empty and is not made. A token's rows are added up
        # one after the other, in float32 so that their number does not matter.
        positions = routing.position_of_choice.reshape(spec.batch * spec.tokens, -1).T
        total = jnp.zeros((positions.shape[1], rows.shape[-1]))
        for position in positions:
            total += take(rows, position).astype(total.dtype)
        return total.astype(rows.dtype).reshape(spec.batch, spec.tokens, -1)
    choices = take(rows, routing.position_of_choice)
    return choices.reshape(spec.batch, spec.tokens, -1, rows.shape[-1]).sum(2)


# Each is a call of its own where products overlap with the message, so that no other work is in the
# time of a message (runtime/layers/interleave.py).
DISPATCH = (sent_rows, to_experts, by_expert)
COMBINE = (by_device, from_experts, token_sums)


def run(
    functions: Sequence[Callable], x: jax.Array, routing: Routing, spec: DispatchSpec
) -> jax.Array:
    """x after functions of DISPATCH or COMBINE, one after the other."""
    for function in functions:
        x = function(x, routing, spec)
    return x
