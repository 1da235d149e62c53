"""For how many rows experts have room."""

import dataclasses

from jaxtrain.costs.layout import Layout, capacity_of, device_capacity, routed_capacity
from jaxtrain.costs.transformer import gpt


def test_slots_of_an_expert():
    assert capacity_of(128, 2, 8, 1.0) == 32 and capacity_of(128, 2, 8, 1.25) == 40
    assert capacity_of(100, 2, 8, 1.01) == 26  # upwards
    assert capacity_of(128, 2, 8, 100.0) == 128  # a token chooses an expert once


def test_room_for_rows():
    assert device_capacity(100, 2, 8, 4, 0.0) == 4 * 100 * 2  # all devices' choices
    assert device_capacity(100, 4, 4, 4, 0.0) == 4 * 100  # a token chooses an expert once
    assert device_capacity(100, 2, 8, 4, 1.501) == 304  # in fours
    assert device_capacity(100, 2, 8, 4, 9.0) == 800  # never more than all
    assert device_capacity(8192, 2, 8, 8, 2.0) == 32768
    assert device_capacity(5, 2, 8, 4, 1.0) == 10


def test_rows_of_a_layout():
    dense = gpt(64, 4, 2, sequence=100)
    model = dataclasses.replace(dense, experts=8, experts_per_token=2, expert_width=32)
    layout = Layout(expert=4, microbatch=3)
    assert routed_capacity(dense, layout) == 0
    assert routed_capacity(model, layout) == 4 * 300 * 2
    assert (
        routed_capacity(dataclasses.replace(model, expert_room=1.0), layout)
        == device_capacity(300, 2, 8, 4, 1.0)
        < 4 * 300
    )
    assert routed_capacity(dataclasses.replace(model, capacity_factor=1.0), layout) == 8 * 3 * 25
    # A sequence that is split is still one, whose tokens may all lie on one device.
    assert (
        routed_capacity(
            dataclasses.replace(model, capacity_factor=4.0),
            Layout(expert=4, microbatch=3, context=2),
        )
        == 8 * 3 * 50
    )
