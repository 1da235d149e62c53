"""Training does not depend on the layout: every mesh, schedule and number of microbatches against
one plain loop (plain_loop.py)."""

import itertools
import pathlib
from collections.abc import Mapping

import pytest
from support import matrix, plain_loop, small
from support.plain_loop import assert_same, gradients, reference, train

from jaxtrain.config import Config


def config_of(case: matrix.Case, layer: Mapping[str, str] | None = None) -> Config:
    changes = {
        **(layer or {}),
        "pipeline.remat": case.remat,
        "pipeline.permute": case.permute,
        "pipeline.vocabulary": case.vocabulary,
        "pipeline.layers_per_op": case.layers_per_op,
        "model.layers": case.layers,
        "model.tied_embeddings": case.tied,
        "data.batch_size": case.sequences,
        "optimizer.clip_norm": plain_loop.CLIP,
    }
    return small.config(case.mesh, *case.schedule, case.microbatches, changes)


def grouped(cases) -> list:
    """As parameters. Those of one model go to one process, which makes its reference once."""
    group = lambda case: f"parity-{case.sequences}-{case.layers}"
    return [
        pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(group(case)))
        for case in cases
    ]


# --- the matrix -----------------------------------------------------------------------------------

WHOLE, SAMPLE = matrix.whole(), matrix.sample()
PASSED = matrix.Passed(
    "parity", pathlib.Path(__file__), *(pathlib.Path(m.__file__) for m in (plain_loop, small))
)


def test_the_matrix_has_what_it_should():
    assert len(set(WHOLE)) == len(WHOLE) > 600 and len(set(SAMPLE)) == len(SAMPLE) < 25
    core = {(case.mesh[1], case.schedule, case.remat, case.microbatches) for case in WHOLE}
    stages = [
        (s, *rest)
        for s, *rest in itertools.product(
            (2, 4, 8), matrix.SCHEDULES, matrix.REMATS, matrix.MICROBATCHES
        )
    ]
    assert core >= {(s, schedule, *rest) for s, schedule, *rest in stages if s * schedule[1] <= 16}


def test_the_sample_has_every_pair():
    pairs = lambda cases: set().union(*(case.pairs for case in cases))
    assert pairs(WHOLE) <= pairs(SAMPLE)
    values = {
        "mesh": {mesh for meshes in matrix.STAGED.values() for mesh in meshes} | set(matrix.ALONE),
        "schedule": set(matrix.SCHEDULES),
        "remat": set(matrix.REMATS),
        "permute": set(matrix.PERMUTES),
        "vocabulary": set(matrix.VOCABULARIES),
        "layers_per_op": set(matrix.SAMPLE_LAYERS_PER_OP),
        "tied": {False, True},
        "microbatches": set(matrix.SAMPLE_MICROBATCHES),
    }
    assert {name: {getattr(case, name) for case in SAMPLE} for name in values} == values


@pytest.mark.parametrize("case", grouped(SAMPLE))
def test_same_gradients_on_every_layout(case):
    cfg = config_of(case, small.PLAIN_LAYER)
    assert_same(gradients(cfg), reference(cfg, 1))


@pytest.mark.full
@pytest.mark.parametrize("case", grouped(WHOLE))
def test_same_training_in_the_whole_matrix(case):
    if case in PASSED:
        pytest.skip(f"passed before with the same sources: {PASSED.path}")
    assert_same(
        train(config_of(case), plain_loop.LONG), reference(config_of(case), plain_loop.LONG)
    )
    PASSED.add(case)
