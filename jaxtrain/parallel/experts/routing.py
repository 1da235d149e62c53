"""The positions of rows on their way to experts and back: index code, without communication.

A choice, a token's choice of an expert, has three positions: where its row stands among those that
its device sends, where it arrives, and where it stands among the rows of its expert's device, which
are sorted by expert. A `Routing` has these as arrays of indices; expert_messages.py applies them.

An example: eight tokens on two devices, with one choice each of four experts. Device 0 has tokens
0 to 3 and experts 0 and 1; device 1 has tokens 4 to 7 and experts 2 and 3.

>>> chosen = jnp.array([2, 0, 3, 2]), jnp.array([1, 2, 0, 2])  # of each device's tokens
>>> sorted_0, sorted_1 = (sort_choices(c, 4) for c in chosen)
>>> sorted_0.order.tolist(), sorted_0.sizes.tolist()  # of device 0: choices by expert
([1, 0, 3, 2], [1, 0, 2, 1])

Rows are sent in that order. Every device learns how many rows each device has for each expert
(routing_collectives.py): sizes [from, to, expert of the receiver].

>>> sizes = jnp.array([c.sizes.reshape(2, 2) for c in (sorted_0, sorted_1)])
>>> sizes.sum(-1).tolist()                                 # rows from each device to each
[[1, 3], [2, 2]]

Device 1 receives three rows from device 0 (tokens 0 and 3 for expert 2, token 2 for expert 3) and
two from device 1 (tokens 5 and 7 for expert 2). It has memory for eight, all that can
come. Sorted by expert, arrival 2 (token 2) moves behind arrivals 3 and 4; empty rows are last.

>>> arrival_of_row = arrival_order(sizes[:, 1], rows=8)
>>> arrival_of_row.tolist()
[0, 1, 3, 4, 2, 5, 6, 7]
>>> inverse(arrival_of_row).tolist()                   # the way back: row_of_arrival
[0, 1, 4, 2, 3, 5, 6, 7]

With memory for four rows, the groups for device 1 (2 and 1 rows from device 0, 2 and 0 from device
1) are cut to one row each. The last rows of cut groups are dropped, tokens 3 and 7: the position of
their choices is the number of positions, 4, which is out of range.

>>> cut = cut_groups(sizes, capacity=4)
>>> cut[:, 1].tolist()
[[1, 1], [1, 0]]
>>> choice_of_position, position_of_choice = positions(sorted_0, cut[0].reshape(-1), sends=4)
>>> position_of_choice.tolist()                            # of tokens 0 to 3
[1, 0, 2, 4]
>>> choice_of_position.tolist()                            # 4: no choice at this position
[1, 0, 2, 4]

Shape suffixes: B batch, T tokens, K choices of a token, E experts of a device; in comments S
positions of sent rows, R rows of a device's experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Routing(NamedTuple):
    """The positions of rows, as int32.

    choice_of_position: [S] the choice (counted token by token) that is sent at a position; the
        number of choices at an empty one
    position_of_choice: [choices] the position of a choice; S for one that is not sent
    sizes: [E] rows of each expert; None if all have the same number
    rows_from_to: [devices, devices] rows from each device to each; None if they are fixed, and for
        one device
    arrival_of_row: [R] the index at which a row of the experts has arrived; None if rows arrive in
        the order of the experts
    row_of_arrival: [R] the inverse of `arrival_of_row`
    """

    choice_of_position: jax.Array
    position_of_choice: jax.Array
    sizes: jax.Array | None = None
    rows_from_to: jax.Array | None = None
    arrival_of_row: jax.Array | None = None
    row_of_arrival: jax.Array | None = None

    @property
    def choices(self) -> int:
        """The number of choices, those included that are dropped."""
        return self.position_of_choice.size


class TwoSteps(NamedTuple):
    """The routing of rows that go across nodes and then inside a node
    (`DispatchSpec.across_nodes`, `DispatchSpec.inside_node`). A choice across nodes is sent if it
    is a token's first one in a node."""

    across_nodes: Routing
    inside_node: Routing

    @property
    def sizes(self) -> jax.Array | None:
        """[E] rows of each expert."""
        return self.inside_node.sizes


class SortedChoices(NamedTuple):
    """Choices sorted by a key, such as their expert; choices of one key stay in order.

    order: int32 [choices], the choice at each place of the sorted order
    keys:  int32 [choices], the key at each place
    begin: int32 [keys + 1], the place at which each key begins
    """

    order: jax.Array
    keys: jax.Array
    begin: jax.Array

    @property
    def sizes(self) -> jax.Array:
        """The number of choices of each key."""
        return jnp.diff(self.begin)

    @property
    def rank(self) -> jax.Array:
        """The number of earlier choices of the same key, in the sorted order."""
        return jnp.arange(self.order.size, dtype=jnp.int32) - self.begin[self.keys]


def choice_counts(chosen_BTK: jax.Array, experts: int) -> jax.Array:
    """The number of times that a sequence's part on this device has chosen each expert, float32
    [B, experts]."""
    return (chosen_BTK[..., None] == jnp.arange(experts)).sum((1, 2), dtype=jnp.float32)


def inverse(order: jax.Array) -> jax.Array:
    """The inverse of a permutation."""
    # A scatter of distinct indices takes linear time; a second argsort would sort again.
    return (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    )


def sort_choices(keys: jax.Array, number: int) -> SortedChoices:
    """The choices of keys int32 [choices], sorted. A key is below `number`; `number` itself is the
    key of none, and its choices come last."""
    # The sort is stable, so that the choices that are dropped are the last ones of the text.
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    ordered = keys[order]
    begin = jnp.searchsorted(ordered, jnp.arange(number + 1)).astype(jnp.int32)
    return SortedChoices(order, ordered, begin)


def cut_groups(sizes: jax.Array, capacity: int) -> jax.Array:
    """sizes int32 [from, to, expert] of groups of rows → the rows of each that are sent, so that no
    more than `capacity` arrive at a device.

    All groups that go to a device are cut to one level, the highest at which they fit: the sum of
    min(size, level) over the groups is, for sizes in ascending order, the least over j of the j
    smallest and `level` times the others.
    """
    # The largest groups are cut, not all in proportion: a small group, whose tokens would be a rare
    # expert's only ones, keeps its rows.
    by_device = sizes.swapaxes(0, 1).reshape(sizes.shape[1], -1)
    ascending = jnp.sort(by_device, -1)
    smallest = jnp.cumsum(ascending, -1) - ascending
    level = ((capacity - smallest) // (by_device.shape[1] - jnp.arange(by_device.shape[1]))).max(-1)
    level = jnp.where(by_device.sum(-1) > capacity, level, ascending[:, -1])
    return jnp.minimum(sizes, level[:, None])


def positions(
    choices: SortedChoices, admitted: jax.Array, sends: int
) -> tuple[jax.Array, jax.Array]:
    """Returns `choice_of_position` [sends] and `position_of_choice` of a Routing, where of each key
    only the earliest choices are sent. admitted: int32 [keys], their number"""
    rank = choices.rank
    is_sent = rank < admitted[choices.keys]
    # Sent rows have no gaps: a key's begin where those of the keys before end.
    starts = jnp.cumsum(admitted) - admitted
    position = jnp.where(is_sent, starts[choices.keys] + rank, sends)
    position_of_choice = (
        jnp.zeros_like(choices.order).at[choices.order].set(position, unique_indices=True)
    )
    # `sends` is out of bounds, so a choice that is not sent writes nothing.
    choice_of_position = (
        jnp.full((sends,), choices.order.size, choices.order.dtype)
        .at[position]
        .set(choices.order, mode="drop")
    )
    return choice_of_position, position_of_choice


def arrival_order(sizes: jax.Array, rows: int) -> jax.Array:
    """`arrival_of_row` of a Routing. Rows arrive ordered by device, each device's by expert; they
    are then sorted by expert, and empty ones come last.

    sizes: int32 [devices, E] of the arriving groups
    rows: that there is memory for
    """
    devices, experts = sizes.shape
    expert = jnp.tile(jnp.arange(experts, dtype=jnp.int32), devices)
    filled = jnp.repeat(expert, sizes.reshape(-1), total_repeat_length=rows)
    # Empty rows get the number of experts as theirs, which the stable sort puts behind all others.
    expert = jnp.where(jnp.arange(rows) < sizes.sum(), filled, experts)
    return jnp.argsort(expert, stable=True).astype(jnp.int32)


# --- by capacity ----------------------------------------------------------------------------------


class ChoiceRuns(NamedTuple):
    """Choices counted by run of consecutive tokens: a sequence, or each half of its part on this
    device where `context` splits it, since these halves are far apart in the text.

    key:   int32 [choices], the run and the expert of a choice as one number
    rank:  int32 [choices], earlier choices of its run for the same expert
    sizes: int32 [B, runs of a sequence, experts], the number of choices
    """

    key: jax.Array
    rank: jax.Array
    sizes: jax.Array


def runs_of(chosen_BTK: jax.Array, experts: int, halves: int) -> ChoiceRuns:
    """The runs of choices, `halves` of each sequence: 1 or 2."""
    # One key for run and expert, so that one sort ranks the choices of all runs.
    b, t, _ = chosen_BTK.shape
    # Halves of one device's part are not neighbours in the text (zigzag), so each is a run.
    half = jnp.arange(t, dtype=jnp.int32) // (t // halves)
    run = (jnp.arange(b, dtype=jnp.int32)[:, None] * halves + half)[..., None]
    key = (run * experts + chosen_BTK).reshape(-1)
    choices = sort_choices(key, b * halves * experts)
    rank = jnp.zeros_like(choices.order).at[choices.order].set(choices.rank, unique_indices=True)
    return ChoiceRuns(key, rank, choices.sizes.reshape(b, halves, experts))


def positions_by_capacity(
    chosen_BTK: jax.Array, runs: ChoiceRuns, admitted: jax.Array, limit: int
) -> Routing:
    """The routing by capacity: an expert has `limit` positions for each sequence on this device, in
    the order [experts, B, limit]. admitted: the sent choices of each run, as its sizes"""
    b, experts = chosen_BTK.shape[0], admitted.shape[-1]
    # positions that the sequence's earlier half on this device has taken
    taken = jnp.concatenate([jnp.zeros_like(admitted[:, :1]), admitted[:, :-1]], 1)
    block = chosen_BTK * b + jnp.arange(b, dtype=jnp.int32)[:, None, None]
    number = experts * b * limit
    position = block.reshape(-1) * limit + taken.reshape(-1)[runs.key] + runs.rank
    position = jnp.where(runs.rank < admitted.reshape(-1)[runs.key], position, number)
    choice = (
        jnp.full((number,), position.size, jnp.int32)
        .at[position]
        .set(jnp.arange(position.size, dtype=jnp.int32), mode="drop")
    )
    return Routing(choice, position)
