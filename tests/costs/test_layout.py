"""The routed tokens that experts of a layout can receive."""

import dataclasses

from jaxtrain.config.sizes import device_capacity
from jaxtrain.costs.layout import Layout, routed_capacity
from jaxtrain.costs.transformer import gpt


def test_routed_capacity():
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
