"""`train.evaluate` in runs of the real command: its numbers are logged, and the run is the same
without it. training/test_evaluation.py has the failures of a function one by one."""

import math
import pathlib

import pytest
from support import train_runs as runs

from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.metrics import read_metrics

OWN = """
import time

import jax

def good(params, context):
    ids = context.tokenizer.encode("a batch is cut into microbatches")
    on_mesh = all(a.sharding.mesh == context.mesh for a in jax.tree.leaves(params))
    return {"loss": context.loss([ids]), "step": context.step, "on_mesh": on_mesh}

def alone(params, context):
    if jax.process_index() == 1:
        time.sleep(2)
        raise ValueError("only here")
    return {"a": 1.0}

def apart(params, context):
    return {} if jax.process_index() else good(params, context)

def slow(params, context):
    while True:
        time.sleep(9)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("own_evaluations")
    runs.write_inputs(folder)
    (folder / "own.py").write_text(OWN)
    runs.train(folder / "without", *flags())
    return folder


def flags(name: str = "", **values: object) -> list[str]:
    own = {"train__evaluate": f"own.py:{name}"} if name else {}
    return runs.settings(train__steps=6, train__eval_every=3, **own, **values)


@pytest.mark.full
def test_numbers_are_logged_and_losses_stay(folder):
    done = runs.train(folder / "good", *flags("good", metrics__tensorboard=True))
    records = [r for r in read_metrics(folder / "good") if "evaluation/loss" in r]
    assert [r["step"] for r in records] == [3, 6] == [r["evaluation/step"] for r in records]
    assert all(r["evaluation/on_mesh"] == 1 for r in records)
    assert 0 < records[1]["evaluation/loss"] < records[0]["evaluation/loss"] < math.log(257)
    assert "step 6: loss " in done.out
    assert runs.losses(folder / "good") == runs.losses(folder / "without")


@pytest.mark.full
def test_what_takes_too_long_is_ended(folder):
    done = runs.train(folder / "slow", *flags("slow", train__evaluate_seconds=0.5))
    text = done.out + done.err
    assert text.count("0.5 s, more than train.evaluate_seconds=0.5") == 2
    assert runs.losses(folder / "slow") == runs.losses(folder / "without")


def launched(folder: pathlib.Path, name: str, status: int, **values: object) -> str:
    words = runs.training(folder / name, *flags(name, **values), devices=1)[1:]
    words = [word for word in words if not word.startswith("--cpu_devices")]
    launch = ["jaxtrain.launch", "--processes=2", "--devices_per_process=1", "--", *words]
    with runs.running(folder, *launch) as command:
        done = command.end(status)
    return done.out + done.err


@pytest.mark.full
def test_several_processes_wait_for_each_other(folder):
    text = launched(folder, "alone", 0)
    assert text.count("own.py:alone: ValueError: only here") == 2
    losses = runs.losses(folder / "without")
    for step, loss in runs.losses(folder / "alone").items():
        assert loss == pytest.approx(losses[step], rel=1e-5)


@pytest.mark.full
def test_a_process_that_is_left_in_a_collective_is_a_hang(folder):
    limits = {"train__hang_after": 2, "train__evaluate_seconds": 2}
    text = launched(folder, "apart", ExitStatus.HUNG, **limits)
    assert "hung after step" in text
