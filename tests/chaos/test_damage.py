"""Random damage to the newest checkpoint of a run, by the real commands: `verify` names it, and the
run goes on as if it had not been.

Damage of each kind to each file, without processes: tests/checkpoint/test_damage.py.
"""

import random
import shutil

import pytest
from support import train_runs as runs
from support.damage import DAMAGE, files_of
from support.train_runs import settings

from jaxtrain.run.exit_status import ExitStatus

DAMAGES, CONTINUED = 30, 3


@pytest.fixture(scope="module")
def original(folder):
    """A run of 6 steps with checkpoints of 3 and 6."""
    with runs.running(
        folder,
        "jaxtrain.train",
        "--config=recipe.py",
        "--workdir=original",
        *settings(train__steps=6),
    ) as command:
        command.end()
    return folder / "original"


@pytest.mark.full
def test_random_damage_is_named_by_verify(folder, pytestconfig, original):
    chance = random.Random(pytestconfig.getoption("--chaos_seed"))
    files = files_of(original / "checkpoints" / "6")
    for number in range(DAMAGES):
        copy, kind, file = (
            folder / f"damaged{number}",
            chance.choice(list(DAMAGE)),
            chance.choice(files),
        )
        shutil.copytree(original, copy)
        DAMAGE[kind](copy / "checkpoints" / "6" / file, chance)
        with runs.running(folder, "jaxtrain.checkpoint", "verify", copy.name) as command:
            done = command.end(ExitStatus.STORAGE)
        assert "3: complete" in done.out and "/6: " in done.out, (kind, file, done.out)
        if number < CONTINUED:
            with runs.running(
                folder,
                "jaxtrain.train",
                "--config=recipe.py",
                f"--workdir={copy.name}",
                *settings(train__steps=6),
            ) as command:
                done = command.end()
            assert "passed over in " in done.out and "continuing from step 3" in done.out, (
                kind,
                file,
            )
            assert runs.losses(copy) == runs.losses(original)
        shutil.rmtree(copy)
