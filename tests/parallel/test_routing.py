"""The positions of rows: the example in the module's head, and plain loops over choices."""

import doctest

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.parallel.experts import routing


def test_the_example_of_eight_tokens():
    failures, examples = doctest.testmod(routing)
    assert examples > 8 and not failures


@pytest.mark.parametrize("seed", range(3))
def test_each_admitted_choice_has_a_position_of_its_own(seed):
    """Choices are sent by expert, the earliest of each, and one after the other."""
    random = np.random.default_rng(seed)
    chosen, sends = random.integers(0, 5, 23), 20
    choices = routing.sort_choices(jnp.asarray(chosen, jnp.int32), 5)
    admitted = np.minimum(np.bincount(chosen, minlength=5), [2, 9, 0, 9, 1])
    positions = routing.positions(choices, jnp.asarray(admitted), sends)
    choice_of, position_of = map(np.asarray, positions)
    expected = [c for e in range(5) for c in np.flatnonzero(chosen == e)[: admitted[e]]]
    assert choice_of.tolist() == expected + [len(chosen)] * (sends - len(expected))
    for choice, position in enumerate(position_of):
        assert position == (expected.index(choice) if choice in expected else sends)


def test_arriving_rows_are_sorted_by_expert():
    sizes = np.array([[2, 0, 1], [1, 3, 0]])  # devices, experts
    order = np.asarray(routing.arrival_order(jnp.asarray(sizes), 9))
    arrived = np.repeat(np.tile(np.arange(3), 2), sizes.reshape(-1))
    assert arrived[order[:7]].tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert order.tolist() == [0, 1, 3, 4, 5, 6, 2, 7, 8]
    assert np.asarray(routing.inverse(jnp.asarray(order)))[order].tolist() == list(range(9))


def test_an_expert_has_its_capacity_for_each_sequence():
    """Two sequences of four tokens with one choice, and a capacity of two for each expert."""
    chosen = jnp.array([[0, 0, 0, 1], [1, 0, 1, 1]], jnp.int32)[..., None]
    runs = routing.runs_of(chosen, 2, halves=1)
    assert runs.sizes.tolist() == [[[3, 1]], [[1, 3]]]
    admitted = jnp.minimum(runs.sizes, 2)
    by_capacity = routing.positions_by_capacity(chosen, runs, admitted, limit=2)
    # Positions 0 and 1 are of expert 0 and sequence 0, 2 and 3 of sequence 1, then expert 1.
    assert by_capacity.position_of_choice.tolist() == [0, 1, 8, 4, 6, 2, 7, 8]
    assert by_capacity.choice_of_position.tolist() == [0, 1, 5, 8, 3, 8, 4, 6]


def test_groups_are_cut_to_the_highest_level_at_which_they_fit():
    random = np.random.default_rng(0)
    for room in (0, 1, 7, 18, 40, 200):
        sizes = random.integers(0, 9, (3, 4, 2))  # from, to, expert
        got = np.asarray(routing.cut_groups(jnp.asarray(sizes, jnp.int32), room))
        for to in range(4):
            cut = [np.minimum(sizes[:, to], level) for level in range(10)]
            expected = [fitting for fitting in cut if fitting.sum() <= room][-1]
            np.testing.assert_array_equal(got[:, to], expected)
