"""Whole runs of replicas that train apart, by the real commands: stopped between exchanges, on
another mesh, refused, generated from."""

import shutil

import numpy as np
import pytest
from support import train_runs as runs
from support.train_runs import settings

from jaxtrain.run.metrics import read_metrics

STEPS, STOPPED = 11, 6  # an exchange every 4 steps, and after the last
OWN = settings(
    mesh__replica=2, train__diloco_inner_steps=4, optimizer__outer_momentum=0.8, checkpoint__every=2
)
ALONE = settings(mesh__stage=1, mesh__data=1)  # a replica is one device


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The workdir and the output of a run that nothing disturbs; recipe and corpus are beside
    it."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    runs.write_inputs(workdir.parent)
    done = runs.train(
        workdir, *OWN, *ALONE, *settings(train__steps=STEPS, train__eval_every=STOPPED), devices=2
    )
    return workdir, done


def test_a_run_learns_and_says_what_it_does(whole):
    workdir, done = whole
    assert (
        "replicas: 2 train independently and exchange float32 every 4 steps and after the last"
        in done.out.splitlines()
    )
    losses = runs.losses(workdir)
    assert list(losses) == list(range(1, STEPS + 1)) and losses[STEPS][0] < losses[1][0] - 0.5


def test_the_logged_norm_is_the_mean_of_the_replicas(whole):
    """Before an exchange: after step 2 the checkpoint has the replicas' own parameters, after step
    4 those that they go on with."""
    workdir, _ = whole
    logged = {r["step"]: r["param_norm"] for r in read_metrics(workdir) if "loss" in r}
    norms = {}
    for step in (2, 4):
        squares = [
            np.square(array.reshape(2, -1)).sum(1)
            for array in runs.stored_parameters(workdir, step)
        ]
        norms[step] = np.sqrt(np.sum(squares, axis=0))
    assert norms[2][0] != norms[2][1] and logged[2] == pytest.approx(norms[2].mean(), rel=1e-6)
    assert norms[4][0] == norms[4][1]
    assert logged[4] == pytest.approx(norms[4][0], rel=0.05)
    assert logged[4] != pytest.approx(norms[4][0], rel=1e-6)


@pytest.mark.full
def test_stopped_between_exchanges_it_goes_on_bit_for_bit(whole):
    workdir = whole[0].with_name("same")
    runs.copy_up_to(STOPPED, whole[0], workdir)
    done = runs.train(workdir, *OWN, *ALONE, *settings(train__steps=STEPS), devices=2)
    assert f"continuing from step {STOPPED}" in done.out
    assert runs.losses(workdir) == runs.losses(whole[0])


@pytest.mark.full
def test_goes_on_on_another_mesh_of_as_many_replicas(whole):
    """Each replica has the same rows there, though they are cut into other microbatches."""
    workdir = whole[0].with_name("other")
    runs.copy_up_to(STOPPED, whole[0], workdir)
    runs.train(workdir, *OWN, *settings(mesh__stage=2, train__steps=STEPS), devices=4)
    found, expected = runs.losses(workdir), runs.losses(whole[0])
    for step in range(STOPPED + 1, STEPS + 1):
        assert found[step] == pytest.approx(
            expected[step], rel=1e-5 if step == STOPPED + 1 else 1e-4, abs=0
        ), step


def test_another_number_of_replicas_is_refused(whole):
    workdir = whole[0].with_name("refused")
    shutil.copytree(whole[0], workdir)
    done = runs.train(
        workdir,
        *OWN,
        *settings(mesh__replica=4, mesh__stage=1, train__steps=20),
        status=2,
        devices=4,
    )
    use = "use --config.mesh.replica=2 (or another --workdir)"
    assert (
        done.err.splitlines()[-1]
        == f"error: mesh.replica=4 cannot continue a checkpoint of mesh.replica=2: {use}"
    )


def test_text_comes_from_the_anchor(whole):
    with runs.running(
        whole[0].parent,
        "jaxtrain.generate",
        "--workdir=whole",
        "--prompt=a batch",
        "--tokens=8",
        "--greedy",
    ) as command:
        assert command.end().out.startswith("a batch")
