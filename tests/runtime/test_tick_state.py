"""Parts of the tick's state, taken out and put back by name."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxtrain.runtime.tick_state import Constants, TickState, merged, only

STATE = TickState(
    loss=1,
    gradients={"layers": {"0": {"w": 2}, "1": {"w": 3}}, "embed": {"table": 4}},
    activation=5,
    residual_b=[6, 7],
)
NAMES = ("activation", ("gradients", "layers", "1"), ("gradients", "embed"))


def test_only_what_is_named():
    assert only(STATE, NAMES) == TickState(
        activation=5, gradients={"layers": {"1": {"w": 3}}, "embed": {"table": 4}}
    )
    assert only(STATE, ("gradients", ("gradients", "embed"))).gradients == STATE.gradients
    assert only(
        Constants({"head": 1, "embed": 2}, {"tokens": 3}), [("params", "head")]
    ) == Constants({"head": 1})
    assert only(STATE, ()) == TickState() == only(STATE, ("up",))  # which the table does not use


def test_a_part_that_is_not_there():
    with pytest.raises(KeyError, match="predictors"):
        only(STATE, [("gradients", "predictors")])
    with pytest.raises(AttributeError, match="stash"):
        only(STATE, ["stash"])


def test_what_is_merged_replaces_and_nothing_else_changes():
    assert merged(STATE, only(STATE, NAMES)) == STATE
    after = merged(STATE, TickState(gradients={"layers": {"1": {"w": 9}}}, residual_b=[8, 8]))
    assert after.gradients == {"layers": {"0": {"w": 2}, "1": {"w": 9}}, "embed": {"table": 4}}
    assert after == dataclasses.replace(STATE, gradients=after.gradients, residual_b=[8, 8])
    assert STATE.gradients["layers"]["1"] == {"w": 3}


def test_what_a_table_does_not_use_is_no_array():
    assert len(jax.tree.leaves(TickState(loss=np.zeros(())))) == 1
