"""Recomputation of k of a unit's n layers: the gradients of one plain loop, whatever k is."""

import pytest
from support.plain_loop import assert_same, gradients, reference
from support.small import Case

UNEVEN = {"model.layers": 7}
CASES = {
    "1f1b": Case((2, 2, 1), changes={"pipeline.remat": "full:1"}),
    "zb_h1, uneven": Case((1, 2, 1), "zb_h1", 1, 4, {**UNEVEN, "pipeline.remat": "full:3"}),
    "zb_v, selective": Case(
        (1, 2, 2), "zb_v", 2, 4, {"model.layers": 8, "pipeline.remat": "selective:1"}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    config = CASES[name].config()
    assert_same(gradients(config), reference(config, 1))
