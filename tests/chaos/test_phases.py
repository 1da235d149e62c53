"""Runs with phases that are killed at random moments, taken back, and on another mesh: losses,
tokens and rates of an undisturbed run."""

import os
import pathlib
import random

import pytest
from support import train_runs as runs
from support.chaos import launched
from support.train_runs import settings

from jaxtrain.config.phases import span_at, spans
from jaxtrain.config.recipes import load_recipe
from jaxtrain.run.files import CONFIG_FILE
from jaxtrain.run.metrics import read_metrics

KILLS = 3
PHASES = (
    "ramp.step=5,ramp.batch_size=8+16,ramp.ramp_steps=8,long.step=18,long.sequence_length=64,"
    "last.tokens=20000,last.learning_rate_end=0"
)
FLAGS = settings(train__steps=32, train__phases=PHASES, checkpoint__every=4)
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(runs.ROOT), str(runs.ROOT / "tests")])}

pytestmark = pytest.mark.full


def numbers(workdir: pathlib.Path) -> dict[int, tuple]:
    """step → what a kill may not change."""
    names = ("loss", "grad_norm", "learning_rate", "weighted_tokens", "tokens", "batch")
    records = [record for record in read_metrics(workdir) if "loss" in record]
    return {record["step"]: tuple(record[name] for name in names) for record in records}


@pytest.fixture(scope="module")
def undisturbed(folder):
    workdir = folder / "undisturbed"
    runs.train(workdir, *FLAGS)
    return workdir


def test_kills_change_nothing(folder, pytestconfig, undisturbed):
    chance = random.Random(pytestconfig.getoption("--chaos_seed"))
    workdir = folder / "killed"
    for _ in range(KILLS):
        with runs.running(folder, *runs.training(workdir, *FLAGS)) as command:
            step = runs.last_step(workdir) + chance.randint(1, 9)
            command.wait_for(lambda step=step: runs.last_step(workdir) >= step, f"step {step}")
            command.kill()
    runs.train(workdir, *FLAGS)
    assert numbers(workdir) == numbers(undisturbed)
    *_, last = numbers(workdir).values()
    assert last[2] == 0  # the learning rate's end


@pytest.mark.parametrize("processes", [1, 2])
def test_another_mesh(folder, undisturbed, processes):
    workdir = folder / f"another_{processes}"
    flags = (*FLAGS, *settings(mesh__stage=1, mesh__data=2, pipeline__microbatches=1))
    if processes == 1:
        runs.train(workdir, *flags)
    else:
        with runs.running(folder, *launched(workdir, 0, *flags, processes=2)) as command:
            command.end()
    for step, (loss, *_, tokens, batch) in numbers(undisturbed).items():
        other, *_, other_tokens, other_batch = numbers(workdir)[step]
        assert (tokens, batch) == (other_tokens, other_batch)
        assert other == pytest.approx(loss, rel=1e-4), f"step {step}"


def test_a_roll_back_goes_on_in_the_phase_of_its_batch(folder):
    """Batch 17 is the last before the longer sequences: the run goes back to step 16, and its next
    step has batch 18."""
    workdir = folder / "rolled_back"
    flags = settings(train__on_nonfinite="rollback", train__nonfinite_limit=2)
    words = runs.training(workdir, *FLAGS, *flags)
    spoiled = ("support.bad_batches", "nan:16,17", "--", *words[1:])
    with runs.running(folder, *spoiled, environment=ENVIRONMENT) as command:
        said = command.end()
    assert "warning: back from step 18 to step 16, and on with batch 18" in said.err
    all_spans = spans(load_recipe(workdir / CONFIG_FILE))
    for step, (*_, counted, tokens, batch) in numbers(workdir).items():
        assert batch == step - 1 + 2 * (step > 16)
        # all tokens but those after the end of a document
        assert 0.9 < counted / span_at(all_spans, batch).batch_tokens <= 1
        assert tokens == span_at(all_spans, step - 1).tokens_before(step)


def test_batches_of_another_shape_begin_with_a_save(folder):
    """Their program may not fit. A phase of the same shape needs none."""
    workdir = folder / "saved"
    phases = "long.step=3,long.sequence_length=64,last.step=5,last.learning_rate_end=0"
    runs.train(workdir, *settings(train__steps=6, train__phases=phases, checkpoint__every=0))
    assert runs.checkpoints(workdir) == [3, 6]
