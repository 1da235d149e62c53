"""Parts of the tick's state, taken out by a mask and put back."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxtrain.runtime.tick_state import Constants, ModelTree, Pools, TickState, merged, only

STATE = TickState(
    loss=1,
    gradients=ModelTree(embed={"table": 4}, layers={"0": {"w": 2}, "1": {"w": 3}}),
    pools=Pools(activation=5, residual_b=[6, 7]),
    buffers={"up": 8, "up_arrived": 9},
)
MASK = TickState(
    gradients=ModelTree(embed=True, layers={"1": True}),
    pools=Pools(activation=True),
    buffers={"up": True},
)


def test_only_what_is_in_the_mask():
    assert only(STATE, MASK) == TickState(
        gradients=ModelTree(embed={"table": 4}, layers={"1": {"w": 3}}),
        pools=Pools(activation=5),
        buffers={"up": 8},
    )
    assert only(STATE, TickState(gradients=ModelTree(True, True, True, True, True))).gradients == (
        STATE.gradients
    )
    constants = Constants(ModelTree(head=1, embed=2), {"tokens": 3})
    assert only(constants, Constants(ModelTree(head=True))) == Constants(ModelTree(head=1))
    # the table does not use the gradients' pool
    gradient = TickState(pools=Pools(gradient=True))
    assert only(STATE, TickState()) == TickState() == only(STATE, gradient)


def test_a_part_that_is_not_there():
    with pytest.raises(KeyError, match="down"):
        only(STATE, TickState(buffers={"down": True}))
    with pytest.raises(TypeError, match="stash"):
        TickState(stash=True)


def test_what_is_merged_replaces_and_nothing_else_changes():
    assert merged(STATE, only(STATE, MASK)) == STATE
    changes = TickState(gradients=ModelTree(layers={"1": {"w": 9}}), pools=Pools(residual_b=[8, 8]))
    after = merged(STATE, changes)
    assert after.gradients == ModelTree(embed={"table": 4}, layers={"0": {"w": 2}, "1": {"w": 9}})
    pools = Pools(activation=5, residual_b=[8, 8])
    assert after == dataclasses.replace(STATE, gradients=after.gradients, pools=pools)
    assert STATE.gradients.layers["1"] == {"w": 3}


def test_what_a_table_does_not_use_is_no_array():
    assert len(jax.tree.leaves(TickState(loss=np.zeros(())))) == 1
