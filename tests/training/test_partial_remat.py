"""Recomputation of k of a unit's n layers: the gradients of one plain loop, whatever k is."""

import pytest
from support import small
from support.plain_loop import assert_same, gradients, reference
from support.small import Case

from jaxtrain.training.step import make_step


def remat(text: str, **changes) -> dict:
    return {"pipeline.remat": text, **changes}


EIGHT, SEVEN, NINE = ({"model.layers": layers} for layers in (8, 7, 9))
EXPERTS = {"model.experts": 4, "model.expert_width": 16}
CASES = {
    "1f1b, data, stage and model": Case((2, 2, 2), changes=EIGHT | remat("full:1")),
    "zb_h1, units of 4 and 3 layers": Case((1, 2, 1), "zb_h1", 1, 4, SEVEN | remat("full:3")),
    "zb_v, selective": Case((1, 2, 2), "zb_v", 2, 4, EIGHT | remat("selective:1")),
    "gpipe, the last unit recomputed too": Case((1, 4, 1), "gpipe", 1, 5, NINE | remat("full:2")),
    "interleaved": Case((2, 2, 1), "interleaved", 2, 4, NINE | remat("full:2")),
    "dualpipe_v": Case(
        (1, 4, 1), "dualpipe_v", 2, 8, EIGHT | {"model.layers": 17} | remat("full:1")
    ),
    "auto": Case((1, 2, 1), "auto", 0, 4, EIGHT | remat("full:2")),
    "zb_h2, two layers an op": Case(
        (1, 2, 1), "zb_h2", 1, 6, SEVEN | {"pipeline.layers_per_op": 2} | remat("full:1")
    ),
    "one stage": Case((2, 1, 2), changes=SEVEN | remat("full:3")),
    "one stage, selective, offloaded": Case(
        (1, 1, 1), changes=SEVEN | {"parallel.offload": "activations"} | remat("selective:3")
    ),
    "offloaded": Case(
        (2, 2, 1), changes=EIGHT | {"parallel.offload": "activations"} | remat("full:2")
    ),
    "ZeRO-3": Case((2, 2, 1), "zb_h1", 1, 4, {"parallel.zero": 3} | SEVEN | remat("full:2")),
    "ZeRO-3, one stage": Case((4, 1, 1), changes={"parallel.zero": 3} | SEVEN | remat("full:2")),
    "ZeRO-3, a unit without saved layers": Case(
        (2, 2, 1), changes={"parallel.zero": 3} | SEVEN | remat("full:3")
    ),
    "experts": Case(
        (1, 2, 2), "zb_v", 2, 4, EXPERTS | {"mesh.expert": 2} | EIGHT | remat("full:1")
    ),
    "context": Case(
        (1, 2, 1), changes={"mesh.context": 2, "model.layers": 6} | remat("selective:2")
    ),
}
ALWAYS = [
    "zb_h1, units of 4 and 3 layers",
    "one stage",
    "ZeRO-3, a unit without saved layers",
]


@pytest.mark.parametrize(
    "name", small.named(ALWAYS, [name for name in CASES if name not in ALWAYS])
)
def test_gradients(name):
    config = CASES[name].config(small.PLAIN_LAYER)
    assert_same(gradients(config), reference(config, 1))


SAME = small.named(
    [("full:0", "none", 2), ("full:2", "full", 1), ("selective:9", "selective", 2)],
    [("full:0", "none", 1), ("full:2", "full", 2), ("selective:9", "selective", 1)],
)


@pytest.mark.parametrize("of", SAME, ids=lambda of: f"{of[0]}-{of[2]}")
def test_none_and_all_of_the_layers(of):
    """The traced programs are the same text."""
    count, same_as, stages = of

    def program(text: str) -> str:
        case = Case((1, stages, 1), changes=remat(text, **{"model.layers": 2 * stages}))
        config = case.config(small.PLAIN_LAYER)
        step = make_step(config, small.mesh_of(config))
        lowered = step.gradients.lower(step.abstract_state().params, step.abstract_batch)
        return lowered.as_text()

    assert program(count) == program(same_as)
