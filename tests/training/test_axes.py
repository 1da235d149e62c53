"""Every axis of the mesh, alone and together: the same training as on one device, for dense models
and for experts."""

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping

import numpy as np
import pytest
from support import matrix, plain_loop, small
from support.plain_loop import STEPS, assert_same, gradients, reference, train

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.runtime.layers import layer_loops

AXES = ("replica", "data", "stage", "context", "expert", "model")
KINDS = {
    "dense": {},
    "dropless": {"model.experts": 8, "model.expert_width": 16, "model.shared_experts": 1},
    # drops nothing
    "capacity": {
        "model.experts": 8,
        "model.expert_width": 16,
        "model.router": "sigmoid",
        "model.capacity_factor": 4.0,
    },
}
SCHEDULES = (("1f1b", 1), ("zb_v", 2))
CONTEXTS = ("all_gather", "ulysses", "ring")
MICROBATCHES = 2
DRAWS = 20  # for each mesh and kind of model, from which the sample is chosen


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh in AXES' order, and how it is used."""

    mesh: tuple[int, ...]
    kind: str
    zero: int
    schedule: tuple[str, int]
    remat: str
    context: str
    documents: bool

    def __str__(self) -> str:
        sizes = ".".join(
            f"{axis}{size}" for axis, size in zip(AXES, self.mesh, strict=True) if size > 1
        )
        used = [f"-{self.schedule[0]}"] * (self.mesh[2] > 1) + [f"-{self.context}"] * (
            self.mesh[3] > 1
        )
        return (
            f"{sizes}-{self.kind}-zero{self.zero}-{self.remat}{''.join(used)}"
            f"{'-documents' * self.documents}"
        )

    @property
    def pairs(self) -> frozenset:
        """Every two axes that are used together, each axis with each of the other factors, these
        with each other, and each axis of more than 2."""
        axes = [(axis, True) for axis, size in zip(AXES, self.mesh, strict=True) if size > 1]
        factors = [("kind", self.kind), ("zero", self.zero)]
        factors += [("schedule", self.schedule)] * (self.mesh[2] > 1) + [
            ("context", self.context)
        ] * (self.mesh[3] > 1)
        sizes = [
            ("more than 2", axis) for axis, size in zip(AXES, self.mesh, strict=True) if size > 2
        ]
        return frozenset([*sizes, *itertools.combinations([*axes, *factors], 2)])

    def config(self, layer: Mapping[str, str] | None = None) -> Config:
        changes = (
            {f"mesh.{axis}": size for axis, size in zip(AXES, self.mesh, strict=True)}
            | KINDS[self.kind]
            | dict(layer or {})
        )
        changes |= {
            "parallel.zero": self.zero,
            "parallel.context": self.context,
            "pipeline.remat": self.remat,
            "data.attend_across_documents": not self.documents,
            "model.layers": 8,
            "data.batch_size": 8 * MICROBATCHES,
            "optimizer.clip_norm": plain_loop.CLIP,
        }
        return small.config((1, 1, 1), *self.schedule, MICROBATCHES, changes)


def meshes() -> list[tuple[int, ...]]:
    """Each axis at 2, 4 and 8; every two at 2 × 2, 2 × 4 and 4 × 2; the triples of all but
    replica."""
    found = []
    for axis, size in itertools.product(AXES, (2, 4, 8)):
        found.append({axis: size})
    for pair, sizes in itertools.product(itertools.combinations(AXES, 2), ((2, 2), (2, 4), (4, 2))):
        found.append(dict(zip(pair, sizes, strict=True)))
    found += [dict.fromkeys(triple, 2) for triple in itertools.combinations(AXES[1:], 3)]
    return [tuple(sizes.get(axis, 1) for axis in AXES) for sizes in found]


def draw(mesh: tuple[int, ...], kind: str, random: np.random.Generator) -> Case:
    """How a mesh is used by a kind of model, by chance."""
    pick = lambda values: values[random.integers(len(values))]
    _, _, stage, context, *_ = mesh
    return Case(
        mesh,
        kind,
        zero=int(random.integers(4)),
        schedule=pick(SCHEDULES) if 1 < stage < 8 else SCHEDULES[0],
        remat=pick(matrix.REMATS),
        context=pick(CONTEXTS) if context > 1 else CONTEXTS[0],
        documents=bool(random.integers(2)),
    )


def random_mesh(random: np.random.Generator) -> tuple[int, ...]:
    """A mesh of 8 devices."""
    sizes = [1] * len(AXES)
    for axis in random.integers(len(AXES), size=3):
        sizes[axis] *= 2
    return tuple(sizes)


def whole() -> tuple[Case, ...]:
    """Every mesh with every kind of model that it is for, and 20 more of 8 devices by chance."""
    random = np.random.default_rng(3)
    more = [random_mesh(random) for _ in range(20)]
    return tuple(
        dict.fromkeys(
            draw(mesh, kind, random)
            for mesh in (*meshes(), *more)
            for kind in list(KINDS)[mesh[4] > 1 :]
        )
    )


def sample() -> tuple[Case, ...]:
    """Few cases with every pair that the whole matrix has, chosen from more ways to use every
    mesh. Of many seeds, this one's compile fastest, with an axis alone among them."""
    random, used = np.random.default_rng(55), sorted({case.mesh for case in WHOLE})
    drawn = [
        draw(mesh, kind, random)
        for _ in range(DRAWS)
        for mesh in used
        for kind in list(KINDS)[mesh[4] > 1 :]
    ]
    return tuple(matrix.cover(drawn, wanted=set().union(*(case.pairs for case in WHOLE))))


WHOLE = whole()
SAMPLE = sample()
PASSED = matrix.Passed(
    "axes", pathlib.Path(__file__), *(pathlib.Path(m.__file__) for m in (plain_loop, small))
)


def grouped(cases) -> list:
    """As parameters. Those of one model go to one process, which makes its reference once."""
    return [
        pytest.param(
            case, id=str(case), marks=pytest.mark.xdist_group(f"axes-{case.kind}-{case.documents}")
        )
        for case in cases
    ]


def test_the_matrix_has_what_it_should():
    assert len({case.mesh for case in WHOLE}) >= 73 and len(set(SAMPLE)) == len(SAMPLE) < 20
    assert {(case.kind, case.zero) for case in WHOLE} == set(itertools.product(KINDS, range(4)))
    pairs = lambda cases: set().union(*(case.pairs for case in cases))
    assert pairs(SAMPLE) >= pairs(WHOLE)
    assert pairs(WHOLE) >= {((a, True), (b, True)) for a, b in itertools.combinations(AXES, 2)}


@pytest.mark.parametrize("case", grouped(SAMPLE))
def test_same_gradients(case):
    """Where an axis is alone the optimizer follows, whose clipping sums over all devices."""
    alone, cfg = max(case.mesh) == np.prod(case.mesh), case.config(small.PLAIN_LAYER)
    assert_same(train(cfg) if alone else gradients(cfg), reference(cfg, STEPS if alone else 1))


@pytest.mark.parametrize(
    "layers, remat", [(2, "full"), pytest.param(5, "none", marks=pytest.mark.full)]
)
def test_gradients_reduced_beside_the_next_layers_products(monkeypatch, layers, remat):
    """As on GPUs, where a layer's gradients wait for the next trip of the loop."""
    monkeypatch.setattr(layer_loops, "on_nvidia_gpu", lambda: True)
    changes = {"model.layers": layers, "parallel.zero": 3, "pipeline.remat": remat}
    cfg = configs.replace(
        Case((1, 4, 1, 1, 1, 1), "dense", 3, SCHEDULES[0], remat, CONTEXTS[0], False).config(
            small.PLAIN_LAYER
        ),
        changes,
    )
    assert_same(gradients(cfg), reference(cfg, 1))


@pytest.mark.full
@pytest.mark.parametrize("case", grouped(WHOLE))
def test_same_training_in_the_whole_matrix(case):
    if case in PASSED:
        pytest.skip(f"passed before with the same sources: {PASSED.path}")
    assert_same(train(case.config(), plain_loop.LONG), reference(case.config(), plain_loop.LONG))
    PASSED.add(case)
