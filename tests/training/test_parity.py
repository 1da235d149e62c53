"""Training does not depend on the layout: every mesh, schedule and number of microbatches against one plain loop (plain_loop.py)."""

import itertools
import pathlib

import pytest
from support import matrix, plain_loop, small
from support.plain_loop import assert_same, reference, train

from jaxtrain.config import Config


def config_of(case: matrix.Case) -> Config:
    # The fewest rows that every mesh can cut into these microbatches: one reference serves all meshes.
    rows = 8 * case.microbatches
    changes = {
        "pipeline.remat": case.remat,
        "pipeline.permute": case.permute,
        "pipeline.vocabulary": case.vocabulary,
        "pipeline.layers_per_op": case.layers_per_op,
        "model.layers": case.layers,
        "model.tied_embeddings": case.tied,
        "data.batch_size": rows,
        "optimizer.clip_norm": plain_loop.CLIP,
    }
    return small.config(case.mesh, *case.schedule, case.microbatches, changes)


def grouped(cases) -> list:
    """As parameters. Those of one reference go to one process, which makes it once."""
    return [pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(f"parity-{case.microbatches}")) for case in cases]


# --- the matrix ------------------------------------------------------------------------------------------------------------------

WHOLE = matrix.whole()
SAMPLE = list(matrix.cover(WHOLE))
PASSED = matrix.Passed("parity", pathlib.Path(__file__), *(pathlib.Path(m.__file__) for m in (plain_loop, small)))


def test_the_sample_has_every_pair():
    assert len(set(WHOLE)) == len(WHOLE) and len(set(SAMPLE)) == len(SAMPLE) < len(WHOLE) / 6
    pairs = lambda cases: set().union(*(case.pairs for case in cases))
    assert pairs(SAMPLE) == pairs(WHOLE)
    core = {(case.mesh[1], case.schedule, case.remat, case.microbatches) for case in WHOLE}
    stages = [(s, *rest) for s, *rest in itertools.product((2, 4, 8), matrix.SCHEDULES, matrix.REMATS, matrix.MICROBATCHES)]
    assert core >= {(s, schedule, *rest) for s, schedule, *rest in stages if s * schedule[1] <= 16}
    drawn = (matrix.LAYERS, (False, True), matrix.PERMUTES, matrix.VOCABULARIES, matrix.LAYERS_PER_OP)
    assert {v for _, v in itertools.chain(*pairs(SAMPLE))} >= {v for values in drawn for v in values}


@pytest.mark.parametrize("case", grouped(SAMPLE))
def test_same_training_on_every_layout(case):
    assert_same(train(config_of(case)), reference(config_of(case)))


@pytest.mark.full
@pytest.mark.parametrize("case", grouped(WHOLE))
def test_same_training_in_the_whole_matrix(case):
    if case in PASSED:
        pytest.skip(f"passed before with the same sources: {PASSED.path}")
    assert_same(train(config_of(case)), reference(config_of(case)))
    PASSED.add(case)
