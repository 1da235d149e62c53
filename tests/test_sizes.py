"""Whole runs on meshes whose sizes are no powers of two, through the real command: the losses of
one device, and on from each other's checkpoints. No size of the model is a power of two either, and
its 257 tokens are a prime."""

import dataclasses
import functools
import itertools
import math
import shutil

import numpy as np
import pytest
from support import matrix, train_runs as runs
from support.train_runs import settings

from jaxtrain.run.metrics import read_metrics

STAGES, MODEL = (3, 5, 6, 7), (1, 2, 3)
SCHEDULES = (("interleaved", 2), ("zb_v", 2), ("zb_h1", 1), ("1f1b", 1), ("auto", 0))
SIZES = settings(
    model__layers=15,
    model__width=36,
    model__heads=6,
    model__mlp_width=60,
    data__sequence_length=36,
    data__batch_size=12,
    mesh__data=1,
)
ONE_DEVICE = settings(
    mesh__stage=1,
    mesh__model=1,
    pipeline__schedule="1f1b",
    pipeline__repeats=1,
    pipeline__microbatches=1,
)
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
        name = (
            f"{self.stage}x{self.model}-{self.schedule[0]}-{self.microbatches}mb-{self.remat}-"
            f"{self.vocabulary}"
        )
        return name + "-tied" * self.tied

    @property
    def devices(self) -> int:
        return self.stage * self.model

    def flags(self) -> tuple[str, ...]:
        schedule, repeats = self.schedule
        flags = settings(
            mesh__stage=self.stage,
            mesh__model=self.model,
            pipeline__schedule=schedule,
            pipeline__repeats=repeats,
            pipeline__microbatches=self.microbatches,
            pipeline__vocabulary=self.vocabulary,
            pipeline__remat=self.remat,
        )
        return (*flags,)


FIRST, SECOND = (
    Case(3, 3, True, ("1f1b", 1), "parallel", 6, "full"),
    Case(7, 1, True, ("zb_h1", 1), "parallel", 4, "selective"),
)
OTHERS = (
    Case(5, 2, False, ("interleaved", 2), "parallel", 4, "none"),
    Case(6, 1, False, ("zb_v", 2), "end_stages", 3, "selective"),
)

# The other axes: how a mesh is used, and what of its model and data is not as in SIZES.
LAYOUT = {
    "mesh.stage": 1,
    "mesh.model": 1,
    "pipeline.schedule": "1f1b",
    "pipeline.repeats": 1,
    "pipeline.microbatches": 2,
}
MOE = {"model.experts": 6, "model.expert_width": 20}
MLA = {
    "model.attention": "mla",
    "model.kv_rank": 15,
    "model.rope_head_dim": 6,
    "model.head_dim": 10,
    "model.value_head_dim": 7,
}
APART = {"data.attend_across_documents": False}
ENDS, SHARED = {"pipeline.vocabulary": "end_stages"}, {"pipeline.vocabulary": "parallel"}
AXES: dict[str, tuple[dict, dict]] = {
    "data 3, zero 3": ({"mesh.data": 3, "mesh.stage": 2, "parallel.zero": 3}, {}),
    "data 5 divides nothing": (
        {"mesh.data": 5, "mesh.stage": 3, "parallel.zero": 3, "pipeline.microbatches": 3, **ENDS},
        {"data.batch_size": 15},
    ),
    "replica 3, data 3": ({"mesh.replica": 3, "mesh.data": 3}, {"data.batch_size": 18}),
    "context 3, model 2": ({"mesh.context": 3, "mesh.model": 2, "mesh.stage": 2}, {}),
    "context 3 by heads, documents": (
        {"mesh.context": 3, "mesh.stage": 2, "parallel.context": "ulysses"},
        APART,
    ),
    "context 5 as a ring, documents": (
        {"mesh.context": 5, "parallel.context": "ring"},
        {"data.sequence_length": 50, **APART},
    ),
    "context 3 as a ring, stage 3": (
        {"mesh.context": 3, "mesh.stage": 3, "parallel.context": "ring"},
        APART,
    ),
    "expert 3, stage 3": ({"mesh.expert": 3, "mesh.stage": 3}, MOE),
    "expert 3, context 3, capacity": (
        {"mesh.expert": 3, "mesh.context": 3},
        {"model.capacity_factor": 6.0, **MOE},
    ),
    "model 3 shares a head": ({"mesh.model": 3, "mesh.stage": 3}, {"model.kv_heads": 1}),
    "model 3, latent attention": ({"mesh.model": 3}, MLA),
    "model 3, further tokens": ({"mesh.model": 3, "mesh.stage": 3}, {"model.mtp_depth": 2}),
    "offload, data 3": (
        {"mesh.data": 3, "mesh.stage": 3, "parallel.offload": "both", "pipeline.remat": "none"},
        {},
    ),
    "one sequence of 35": (
        {"mesh.stage": 5, "pipeline.microbatches": 1},
        {"data.batch_size": 1, "data.sequence_length": 35},
    ),
    "a large vocabulary, a prime, over 21 shards": (
        {"mesh.stage": 7, "mesh.model": 3, **SHARED},
        {"model.vocab_size": 4099},
    ),
}


@functools.cache
def whole() -> tuple[Case, ...]:
    """All numbers of stages × model × tied or not: those above, and others for which the rest is
    drawn."""
    random = np.random.default_rng(0)
    pick = lambda values: values[random.integers(len(values))]
    rest = lambda: (
        pick(SCHEDULES),
        pick(("parallel", "parallel", "end_stages")),
        pick((3, 4, 6)),
        pick(matrix.REMATS),
    )
    cases = {
        sizes: Case(*sizes, *rest()) for sizes in itertools.product(STAGES, MODEL, (True, False))
    }
    return tuple(
        (
            cases | {(case.stage, case.model, case.tied): case for case in (FIRST, SECOND, *OTHERS)}
        ).values()
    )


@pytest.fixture(scope="module")
def trained(folder):
    """(name, devices, flags of the model, flags of the layout) → the workdir of STEPS steps, of
    GOES_ON on one device without a layout."""

    @functools.cache
    def trained(name: str, devices: int, model: tuple[str, ...], layout: tuple[str, ...] = ()):
        more = (
            [*layout, *settings(train__steps=STEPS)]
            if layout
            else [*ONE_DEVICE, *settings(train__steps=GOES_ON)]
        )
        runs.train(folder / name, *SIZES, *model, *more, devices=devices)
        return folder / name

    return trained


def run_of(trained, case: Case):
    """The workdir of a case, and that of its model on one device."""
    model = (*settings(model__tied_embeddings=case.tied),)
    return trained(str(case), case.devices, model, case.flags()), trained(
        f"one-device{'-tied' * case.tied}", 1, model
    )


def assert_same(workdir, reference, steps) -> None:
    """Losses, gradient norms and what was held out, to rounding of float32; and the parameters'
    norm, which is that of the checkpoint."""
    runs.assert_norm_is_stored(workdir, steps[-1])
    found, expected = runs.losses(workdir), runs.losses(reference)
    for step in steps:
        assert found[step] == pytest.approx(expected[step], rel=1e-5, abs=0), f"step {step}"
    held_out = lambda workdir: {
        r["step"]: r["validation_loss"] for r in read_metrics(workdir) if "validation_loss" in r
    }
    if steps[-1] == GOES_ON:
        assert held_out(workdir)[GOES_ON] == pytest.approx(held_out(reference)[GOES_ON], rel=1e-5)


def assert_goes_on(trained, first: Case, second: Case) -> None:
    """From the checkpoint that the first case has left, of its model."""
    workdir, reference = run_of(trained, first)
    workdir = shutil.copytree(
        workdir, workdir.with_name(f"{workdir.name}-on-{second.stage}x{second.model}")
    )
    flags = [*second.flags(), *settings(model__tied_embeddings=first.tied, train__steps=GOES_ON)]
    done = runs.train(workdir, *SIZES, *flags, devices=second.devices)
    assert f"continuing from step {STEPS}" in done.out
    assert_same(workdir, reference, range(1, GOES_ON + 1))


def following(case: Case) -> Case:
    """The next one with another number of stages."""
    cases = whole()
    return cases[(cases.index(case) + 2 * len(MODEL) + 2) % len(cases)]


def test_the_matrix_has_what_it_should():
    assert len(whole()) == len(STAGES) * len(MODEL) * 2 and {FIRST, SECOND, *OTHERS} < set(whole())
    assert {case.schedule for case in whole()} == set(SCHEDULES)


@pytest.mark.full
def test_goes_on_on_another_such_mesh(trained):
    """With the losses of one device on 3 × 3, and on from there on 7 stages."""
    assert_same(*run_of(trained, FIRST), range(1, STEPS + 1))
    assert_goes_on(trained, FIRST, SECOND)


@pytest.mark.full
@pytest.mark.parametrize("case", whole(), ids=str)
def test_every_such_mesh(trained, case):
    """Each with the losses of one device, and on from its checkpoint on another."""
    assert_same(*run_of(trained, case), range(1, STEPS + 1))
    assert_goes_on(trained, case, following(case))


@pytest.mark.full
@pytest.mark.parametrize("name", AXES)
def test_every_other_axis(trained, name):
    layout, model = AXES[name]
    layout, model = LAYOUT | layout, (*runs.flags_of(model),)
    devices = math.prod(size for path, size in layout.items() if path.startswith("mesh."))
    name = name.replace(",", "").replace(" ", "-")
    workdir = trained(name, devices, model, (*runs.flags_of(layout),))
    assert_same(workdir, trained(f"one-device-{name}", 1, model), range(1, STEPS + 1))
