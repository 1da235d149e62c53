"""Training does not depend on the layout: every mesh, schedule and number of microbatches against one plain loop (plain_loop.py)."""

import dataclasses
import pathlib

import matrix
import plain_loop
import pytest
import small
from plain_loop import assert_same, reference, train

from jaxtrain.config import Config


def config_of(case: matrix.Case) -> Config:
    # The fewest rows that every mesh can cut into these microbatches: one reference serves all meshes.
    rows = 8 * case.microbatches
    changes = {
        "model.layers": case.layers,
        "model.tied_embeddings": case.tied,
        "data.batch_size": rows,
        "optimizer.clip_norm": plain_loop.CLIP,
    }
    return small.config(case.mesh, *case.schedule, case.microbatches, changes)


# --- the matrix ------------------------------------------------------------------------------------------------------------------

WHOLE = matrix.whole()
SAMPLE = list(matrix.cover(WHOLE))
PASSED = matrix.Passed("parity", pathlib.Path(__file__), *(pathlib.Path(m.__file__) for m in (plain_loop, small)))


def test_the_sample_has_every_pair():
    values = {(f.name, getattr(case, f.name)) for case in WHOLE for f in dataclasses.fields(case)}
    assert len(values) == len(matrix.MESHES) + len(matrix.SCHEDULES) + len(matrix.MICROBATCHES) + len(matrix.LAYERS) + 2
    pairs = lambda cases: set().union(*(case.pairs for case in cases))
    assert pairs(SAMPLE) == pairs(WHOLE) and {v for pair in pairs(SAMPLE) for v in pair} == values
    assert len(set(SAMPLE)) == len(SAMPLE) < len(WHOLE) / 8


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_same_training_on_every_layout(case):
    assert_same(train(config_of(case)), reference(config_of(case)))


@pytest.mark.full
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_same_training_in_the_whole_matrix(case):
    if case in PASSED:
        pytest.skip(f"passed before with the same sources: {PASSED.path}")
    assert_same(train(config_of(case)), reference(config_of(case)))
    PASSED.add(case)
