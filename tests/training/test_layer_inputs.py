"""Full recomputation from each layer's own input (`pipeline.save=layer_input`): the gradients of
one plain loop, and what R leaves out."""

import pytest
from support import small
from support.plain_loop import assert_same, gradients, reference
from support.small import Case

SAVES = {"pipeline.remat": "full", "pipeline.save": ("layer_input",), "model.layers": 7}
EXPERTS = {"model.experts": 4, "model.expert_width": 16, "mesh.expert": 2}
CASES = {
    "1f1b": Case((2, 2, 1), changes=SAVES),
    "interleaved, model": Case((1, 2, 2), "interleaved", 2, 4, SAVES),
    "gpipe, the last unit too": Case((1, 3, 1), "gpipe", 2, 5, SAVES),
    "zb_h1, k of n, ZeRO-3": Case(
        (2, 2, 1), "zb_h1", 1, 4, SAVES | {"pipeline.remat": "full:2", "parallel.zero": 3}
    ),
    "zb_v, experts": Case((1, 2, 1), "zb_v", 2, 4, SAVES | EXPERTS),
    "dualpipe_v, overlapped": Case(
        (1, 2, 1), "dualpipe_v", 2, 5, SAVES | EXPERTS | {"pipeline.overlap": True}
    ),
    "context": Case((1, 2, 1), changes=SAVES | {"mesh.context": 2}),
    "units of a chunk": Case((1, 2, 1), "zb_h2", 1, 4, SAVES | {"pipeline.layers_per_op": 2}),
    "auto": Case((1, 4, 1), "auto", 1, 4, SAVES),
}
ALWAYS = ["zb_h1, k of n, ZeRO-3"]


@pytest.mark.parametrize(
    "name", small.named(ALWAYS, [name for name in CASES if name not in ALWAYS])
)
def test_gradients(name):
    config = CASES[name].config()
    assert_same(gradients(config), reference(config, 1))
