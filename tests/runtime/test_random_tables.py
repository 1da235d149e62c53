"""Tables that nobody would write: whatever the validator passes trains as one device does, also as
a user's file."""

import dataclasses
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from support import plain_loop, small
from support.pipeline_tables import random_table

from jaxtrain.config import Config
from jaxtrain.schedule.files.table_csv import to_csv
from jaxtrain.schedule.table import Table
from jaxtrain.schedule.validator import check

LAYERS = 9


def usable(seed: int) -> Table:
    """The first random training table from a seed that has more than one stage and no more units
    than layers."""
    source = random.Random(seed)
    while True:
        table = random_table(source)
        if table.stages > 1 and table.units <= LAYERS and not table.forward_only:
            return dataclasses.replace(table, vocabulary=source.choice(["parallel", "end_stages"]))


def assert_same_as_one_device(
    table: Table, remat: str, tied: bool, folder, run: Callable[[Config], plain_loop.Run]
) -> None:
    check(table)
    path = folder / "random.csv"
    path.write_text(to_csv(table))
    changes = {
        "pipeline.remat": "full" if table.recompute else remat,
        "model.layers": LAYERS,
        "model.tied_embeddings": tied,
        "data.batch_size": 4 * table.microbatches,
        "optimizer.clip_norm": plain_loop.CLIP,
    }
    cfg = small.config((1, table.stages, 1), f"csv:{path}", 0, table.microbatches, changes)
    steps = 1 if run is plain_loop.gradients else plain_loop.STEPS
    plain_loop.assert_same(run(cfg), plain_loop.reference(cfg, steps))


def examples(n: int):
    """Hypothesis's settings for n examples. No shrinking: each example compiles a program."""
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=n,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=checks,
    )


CASES = {
    "seed": st.integers(0, 2**31),
    "remat": st.sampled_from(["selective", "none"]),
    "tied": st.booleans(),
}


@pytest.mark.full
@given(**CASES)
@examples(2)
def test_random_tables(tmp_path, seed, remat, tied):
    assert_same_as_one_device(usable(seed), remat, tied, tmp_path, plain_loop.gradients)


@pytest.mark.full
@given(**CASES)
@examples(60)
def test_many_random_tables(tmp_path, seed, remat, tied):
    assert_same_as_one_device(usable(seed + 1), remat, tied, tmp_path, plain_loop.train)
