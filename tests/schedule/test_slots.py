"""Slots: no fewer would do. That every op finds in its slots what it wants is in test_columns.py,
of all schedules."""

import dataclasses
import itertools
import random

import numpy as np

from jaxtrain.schedule.by_name import make_forward_table, make_table
from jaxtrain.schedule.placement import PLACEMENTS
from jaxtrain.schedule.slots import assign_slots, colour
from jaxtrain.schedule.table_spec import TableSpec


def test_forward_tables_keep_nothing_for_a_backward():
    for placement in ("circular", "v"):
        for stages, repeats, microbatches in ((1, 1, 3), (2, 2, 5), (4, 2, 9), (5, 1, 2)):
            for permute in ("late", "early"):
                table = make_forward_table(
                    PLACEMENTS[placement](stages, repeats), stages, microbatches, permute=permute
                )
                slotted = assign_slots(table)
                assert slotted.pool_sizes["residual_b"] == slotted.pool_sizes["weight_stash"] == 0
                # and not the number of microbatches
                assert slotted.pool_sizes["activation"] <= 2 * stages + 2


def test_colouring_takes_as_many_slots_as_are_alive_at_once():
    source = random.Random(1)
    for _ in range(200):
        first = np.array([source.randrange(30) for _ in range(source.randrange(1, 25))])
        last = first + np.array([source.randrange(8) for _ in first])
        slots, count = colour(first, last)
        assert count == max(int(((first <= t) & (t <= last)).sum()) for t in range(40))
        for i, j in itertools.combinations(range(len(first)), 2):
            assert not (slots[i] == slots[j] and first[i] <= last[j] and first[j] <= last[i])


def test_slots_of_1f1b_do_not_grow_with_the_microbatches():
    few, many = (
        assign_slots(make_table(TableSpec("1f1b", 4, 1, m, permute="late"))) for m in (8, 32)
    )
    # The first stage's four microbatches in flight; on the last one the output of F beside its
    # input, which the head reads.
    assert few.slots_per_stage == many.slots_per_stage
    assert few.slots_per_stage["residual_b"] == (4, 3, 2, 1) and few.slots_per_stage[
        "weight_stash"
    ] == (1, 1, 1, 1)


def test_recompute_keeps_inputs_in_place_of_residuals():
    kept, rebuilt = (
        assign_slots(
            make_table(TableSpec("1f1b", 4, 1, 12, permute="late", remat_full=full))
        ).slots_per_stage
        for full in (False, True)
    )
    assert kept["residual_b"][0] == 4 and rebuilt["residual_b"] == (1, 1, 1, 1)
    assert rebuilt["activation"][0] == 4


def test_inputs_of_layers_wait_for_r_in_place_of_the_unit_s():
    spec = TableSpec("1f1b", 4, 1, 12, permute="late", remat_full=True)
    of_unit, of_layers = (
        assign_slots(make_table(dataclasses.replace(spec, saves_inputs=saves))).slots_per_stage
        for saves in (False, True)
    )
    assert "layer_input" not in of_unit
    # the last stage has no R: its F saves the residuals
    assert of_layers["layer_input"] == (4, 3, 2, 0)
    assert of_unit["activation"] == (4, 4, 3, 2) and of_layers["activation"] == (1, 1, 1, 2)
    assert of_unit["residual_w"] == of_layers["residual_w"]
