"""The routed tokens that experts of a layout can receive, and the nodes to which a token goes."""

import dataclasses
import itertools

import numpy as np
import pytest

from benchmarks.model_forms import gpt
from jaxtrain.config.sizes import device_capacity
from jaxtrain.planner.layer.layout import Layout, nodes_of_token, routed_capacity


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


@pytest.mark.parametrize(
    "nodes, groups, limit", [(2, 1, 1), (4, 1, 1), (4, 4, 2), (2, 4, 3), (4, 2, 1), (3, 4, 4)]
)
def test_nodes_of_a_token(nodes, groups, limit):
    """The mean over all choices of three experts in all choices of groups."""
    dense = gpt(64, 4, 2, sequence=100)
    model = dataclasses.replace(
        dense,
        experts=12,
        experts_per_token=3,
        router_groups=groups,
        router_group_limit=limit,
    )
    experts = np.arange(12)
    numbers = [
        len({expert * nodes // 12 for expert in chosen})
        for allowed in itertools.combinations(range(groups), limit)
        for chosen in itertools.combinations(experts[np.isin(experts * groups // 12, allowed)], 3)
    ]
    assert nodes_of_token(model, nodes) == pytest.approx(np.mean(numbers))


def test_a_token_of_deepseek_v3_goes_to_four_nodes_at_most():
    model = dataclasses.replace(gpt(64, 4, 2, sequence=100), experts=256, experts_per_token=8)
    limited = dataclasses.replace(model, router_groups=8, router_group_limit=4)
    assert 3.6 < nodes_of_token(limited, 8) < 4 < 5.2 < nodes_of_token(model, 8) < 5.3
