"""Overlapped forward and backward: the gradients of one plain loop, whatever shares a cell. A case
without --full is in test_end_layers.py."""

import pytest
from support import pytorch_files, small
from support.plain_loop import assert_same, gradients, reference
from support.small import Case

from jaxtrain.config import Config
from jaxtrain.pipeline.setup import make_setup

ON = {"pipeline.overlap": True}
EXPERTS = {"model.experts": 4, "model.expert_width": 16, "mesh.expert": 2}


def dualpipe(mesh, microbatches: int, layers: int, remat: str, **changes) -> Case:
    changes = {"model.layers": layers, "pipeline.remat": remat} | ON | changes
    return Case(mesh, "dualpipe_v", 2, microbatches, changes)


CASES = {
    "one chunk, experts": Case(
        (1, 2, 1),
        "1f1b",
        1,
        5,
        {"model.layers": 3, "pipeline.save": ("layer_input",), **EXPERTS, **ON},
    ),
    "one chunk, three stages": Case((2, 3, 1), "1f1b", 1, 7, {"model.layers": 5, **ON}),
    "two chunks, experts and model": Case(
        (1, 2, 2), "interleaved", 2, 6, {"pipeline.remat": "none", **EXPERTS, **ON}
    ),
    "two chunks, four stages": Case(
        (2, 4, 1),
        "interleaved",
        2,
        9,
        {"model.layers": 11, "pipeline.remat": "selective", "parallel.zero": 3, **ON},
    ),
    "two stages": dualpipe((1, 2, 1), 5, 4, "none", **small.PLAIN_LAYER),
    "experts": dualpipe((1, 2, 2), 5, 4, "none", **EXPERTS),
    "four stages and data": dualpipe((2, 4, 1), 9, 8, "none"),
    "experts, data and stage": dualpipe((2, 2, 1), 5, 7, "selective", **EXPERTS),
    "chunks of 2 and 1 layers": dualpipe((1, 2, 2), 5, 7, "full"),
    "k of n layers": dualpipe((1, 2, 1), 5, 11, "full:1"),
    "k of n layers, selective": dualpipe((1, 2, 1), 7, 11, "selective:2"),
    "two layers an op": dualpipe((1, 2, 1), 5, 11, "full", **{"pipeline.layers_per_op": 2}),
    "ZeRO-3": dualpipe((2, 2, 1), 5, 8, "none", **{"parallel.zero": 3}),
    "ZeRO-2, reduced in ops": dualpipe(
        (2, 2, 1), 5, 8, "none", **{"parallel.zero": 2, "parallel.reduce": "microbatch"}
    ),
    "activations on the host": dualpipe(
        (1, 2, 1), 5, 8, "none", **{"parallel.offload": "activations"}
    ),
    "context": dualpipe((1, 2, 1), 5, 4, "full", **{"mesh.context": 2}),
    "ticks that permute late": dualpipe((1, 4, 1), 8, 8, "full", **{"pipeline.permute": "late"}),
    "16 bits": dualpipe((1, 2, 1), 5, 4, "none", **{"precision.params": "bfloat16"}),
}


def check(config: Config) -> None:
    assert_same(gradients(config), reference(config, 1))


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    config = CASES[name].config()
    assert make_setup(config).table.overlaps
    check(config)


# one chunk a stage, as in 1F1B: the F of a microbatch and the B of the one before
ONE_CHUNK = """\
# place=0,1
stage 0,stage 1
F0.0,
F0.1,F0.0
,F0.1
,B0.0
F0.2+B0.0,W0.0
W0.0,F0.2+B0.1
B0.1,W0.1
W0.1,B0.2
B0.2,W0.2
W0.2,
"""


@pytest.mark.full
def test_a_table_of_ones_own(tmp_path):
    """Its cells say so, whatever the setting; F and B of one unit share a cell."""
    path = tmp_path / "mine.csv"
    path.write_text(ONE_CHUNK)
    config = Case((2, 2, 1), f"csv:{path}", 0, 3, {"pipeline.remat": "none"}).config()
    assert make_setup(config).table.overlapped.sum() == 2
    check(config)


@pytest.mark.full
@pytest.mark.parametrize("name", pytorch_files.SHA256)
def test_files_of_pytorchs_tests(name, tmp_path):
    path = tmp_path / name
    path.write_text(pytorch_files.text_of(name))
    stages, microbatches = (4, 10) if name == pytorch_files.DUALPIPEV else (2, 8)
    changes = {"model.layers": 8, "pipeline.remat": "none"} | ON
    config = Case((2, stages, 1), f"csv:{path}", 0, microbatches, changes).config()
    table = make_setup(config).table
    assert table.overlaps == (name == pytorch_files.DUALPIPEV)
    check(config)
