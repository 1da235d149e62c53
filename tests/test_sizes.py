"""Whole runs on meshes whose sizes are no powers of two, through the real command: the losses of one device, and on from each other's
checkpoints. No size of the model is a power of two either, and its 257 tokens are a prime."""

import dataclasses
import functools
import itertools
import shutil

import matrix
import numpy as np
import pytest
import train_runs as runs
from train_runs import settings

STAGES, MODEL = (3, 5, 6, 7), (1, 2, 3)
SCHEDULES = (("interleaved", 2), ("zb_v", 2), ("zb_h1", 1), ("1f1b", 1), ("auto", 0))
SIZES = settings(
    model__layers=15, model__width=36, model__heads=6, model__mlp_width=60, data__sequence_length=36, data__batch_size=12, mesh__data=1
)
ONE_DEVICE = settings(mesh__stage=1, mesh__model=1, pipeline__schedule="1f1b", pipeline__repeats=1, pipeline__microbatches=1)
STEPS, GOES_ON = 2, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh of stages × model, and how it is used."""

    stage: int
    model: int
    tied: bool
    schedule: tuple[str, int]
    vocabulary: str
    microbatches: int
    remat: str

    def __str__(self) -> str:
        name = f"{self.stage}x{self.model}-{self.schedule[0]}-{self.microbatches}mb-{self.remat}-{self.vocabulary}"
        return name + "-tied" * self.tied

    @property
    def devices(self) -> int:
        return self.stage * self.model

    def flags(self) -> list[str]:
        schedule, repeats = self.schedule
        return settings(
            mesh__stage=self.stage,
            mesh__model=self.model,
            pipeline__schedule=schedule,
            pipeline__repeats=repeats,
            pipeline__microbatches=self.microbatches,
            pipeline__vocabulary=self.vocabulary,
            pipeline__remat=self.remat,
        )


SAMPLE = (
    Case(3, 3, True, ("interleaved", 2), "parallel", 6, "full"),
    Case(5, 2, False, ("zb_v", 2), "parallel", 4, "none"),
    Case(6, 1, False, ("zb_h1", 1), "end_stages", 3, "selective"),
    Case(7, 1, True, ("1f1b", 1), "parallel", 4, "full"),
)


@functools.cache
def whole() -> tuple[Case, ...]:
    """All numbers of stages × model × tied or not: those of the sample, and others for which the rest is drawn."""
    random = np.random.default_rng(0)
    pick = lambda values: values[random.integers(len(values))]
    rest = lambda: (pick(SCHEDULES), pick(("parallel", "parallel", "end_stages")), pick((3, 4, 6)), pick(matrix.REMATS))
    cases = {sizes: Case(*sizes, *rest()) for sizes in itertools.product(STAGES, MODEL, (True, False))}
    return tuple((cases | {(case.stage, case.model, case.tied): case for case in SAMPLE}).values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds recipe, corpus and its cache, and the workdirs of all tests here."""
    folder = tmp_path_factory.mktemp("sizes")
    runs.write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """case → the workdir of its first steps; None → tied or not → that of one device, which goes on."""

    @functools.cache
    def trained(case: Case | None, tied: bool):
        workdir = folder / (str(case) if case else f"one-device-{tied}")
        flags = [*case.flags(), *settings(train__steps=STEPS)] if case else [*ONE_DEVICE, *settings(train__steps=GOES_ON)]
        runs.train(workdir, *SIZES, *settings(model__tied_embeddings=tied), *flags, devices=case.devices if case else 1)
        return workdir

    return trained


def assert_same(found: dict, expected: dict, steps) -> None:
    """Losses and gradient norms, to rounding of float32."""
    assert set(found) >= set(steps)
    for step in steps:
        assert found[step] == pytest.approx(expected[step], rel=1e-5, abs=0), f"step {step}"


def assert_goes_on(trained, first: Case, second: Case) -> None:
    """From the checkpoint that the first case has left."""
    workdir = trained(first, first.tied)
    workdir = shutil.copytree(workdir, workdir.with_name(f"{workdir.name}-on-{second.stage}x{second.model}"))
    flags = [*second.flags(), *settings(model__tied_embeddings=first.tied, train__steps=GOES_ON)]
    done = runs.train(workdir, *SIZES, *flags, devices=second.devices)
    assert f"continuing from step {STEPS}" in done.out
    assert_same(runs.losses(workdir), runs.losses(trained(None, first.tied)), range(1, GOES_ON + 1))


def following(case: Case) -> Case:
    """The next one with another number of stages."""
    cases = whole()
    return cases[(cases.index(case) + 2 * len(MODEL) + 2) % len(cases)]


def test_the_sample_has_what_it_should():
    assert len(whole()) == len(STAGES) * len(MODEL) * 2 and set(SAMPLE) < set(whole())
    for name in ("stage", "model", "tied", "vocabulary", "remat"):
        assert {getattr(case, name) for case in SAMPLE} == {getattr(case, name) for case in whole()}, name
    assert {case.schedule for case in whole()} == set(SCHEDULES)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_same_losses_as_on_one_device(trained, case):
    assert_same(runs.losses(trained(case, case.tied)), runs.losses(trained(None, case.tied)), range(1, STEPS + 1))


def test_goes_on_on_another_such_mesh(trained):
    assert_goes_on(trained, SAMPLE[1], SAMPLE[3])


@pytest.mark.full
@pytest.mark.parametrize("case", whole(), ids=str)
def test_every_such_mesh(trained, case):
    """Each with the losses of one device, and on from its checkpoint on another."""
    assert_same(runs.losses(trained(case, case.tied)), runs.losses(trained(None, case.tied)), range(1, STEPS + 1))
    assert_goes_on(trained, case, following(case))
