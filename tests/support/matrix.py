"""The matrix of layouts over which training must not differ, a sample of it that covers all pairs, and a memory of what passed."""

import dataclasses
import functools
import hashlib
import itertools
import pathlib
import sys
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from support import ROOT
from support.pipeline_tables import KINDS

ALONE = ((1, 1, 1), (8, 1, 1), (1, 1, 4))  # data × stage × model
STAGED = {2: ((1, 2, 1), (2, 2, 2), (4, 2, 1)), 4: ((1, 4, 1), (2, 4, 1), (1, 4, 2)), 8: ((1, 8, 1),)}
SCHEDULES = (*KINDS, ("auto", 0))  # with repeats
MICROBATCHES = (1, 2, 3, 5, 8, 13, 16)
LAYERS = (16, 17)  # 17 are uneven on every number of stages
REMATS = ("full", "selective", "none")
PERMUTES = ("auto", "late", "aligned", "early", "spaced")
VOCABULARIES = ("parallel", "end_stages")
LAYERS_PER_OP = (0, 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout and model."""

    mesh: tuple[int, int, int]
    schedule: tuple[str, int]
    remat: str
    microbatches: int
    layers: int
    tied: bool
    permute: str
    vocabulary: str
    layers_per_op: int

    def __str__(self) -> str:
        name, repeats = self.schedule
        text = f"{'x'.join(map(str, self.mesh))}-{name}{repeats}-{self.remat}-{self.microbatches}mb-{self.layers}L{'-tied' * self.tied}"
        return f"{text}-{self.permute}-{self.vocabulary}{'-by_layer' * self.layers_per_op}"

    @property
    def pairs(self) -> frozenset:
        """Every two of its values, each with the name of its factor."""
        return frozenset(itertools.combinations([(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)], 2))


@functools.cache
def whole() -> tuple[Case, ...]:
    """Every schedule × remat × number of stages × microbatches for which there are layers. The other factors are drawn, from a fixed
    seed, until every two values of any two factors have met; so are the single-stage meshes, for which all schedules are one."""
    random = np.random.default_rng(1)
    pick = lambda values: values[random.integers(len(values))]

    def case(mesh, schedule, remat, microbatches):
        return Case(
            mesh, schedule, remat, microbatches, pick(LAYERS), bool(pick((0, 1))), pick(PERMUTES), pick(VOCABULARIES), pick(LAYERS_PER_OP)
        )

    cases = []
    for stages, schedule, remat, m in itertools.product(STAGED, SCHEDULES, REMATS, MICROBATCHES):
        if stages * schedule[1] <= min(LAYERS):
            cases.append(case(pick(STAGED[stages]), schedule, remat, m))
    for mesh, remat, m in itertools.product(ALONE, REMATS, MICROBATCHES):
        cases.append(dataclasses.replace(case(mesh, ("1f1b", 1), remat, m), permute="auto", vocabulary="parallel", layers_per_op=0))
    return tuple(cases)


def cover(cases: Iterable[Case]) -> Iterator[Case]:
    """Some of the cases, in which every pair of values that any case has occurs: greedily, always the case with most new pairs."""
    cases = list(cases)
    missing = set().union(*(case.pairs for case in cases))
    while missing:
        best = max(cases, key=lambda case: len(case.pairs & missing))  # the first of equals
        missing -= best.pairs
        yield best


class Passed:
    """The names of the cases that passed with these very sources, in a file that grows by a line a case."""

    def __init__(self, name: str, *tests: pathlib.Path):
        self.path = ROOT / ".cache" / f"{name}-{source_hash(*tests)}.txt"

    def __contains__(self, case: object) -> bool:
        return self.path.exists() and str(case) in self.path.read_text().splitlines()

    def add(self, case: object) -> None:
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a") as file:  # one short write: safe beside another worker's
            file.write(f"{case}\n")


@functools.cache
def source_hash(*tests: pathlib.Path) -> str:
    """Of the package, of these test files, and of the versions of Python and jax."""
    digest = hashlib.sha256(f"{sys.version} {jax.__version__}".encode())
    for path in (*sorted((ROOT / "jaxtrain").rglob("*.py")), *tests):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
