"""The matrix of layouts over which training must not differ, a sample of it that covers all pairs, and a memory of what passed."""

import dataclasses
import functools
import hashlib
import itertools
import pathlib
import sys
from collections.abc import Iterable, Iterator

import jax

ROOT = pathlib.Path(__file__).parents[1]
MESHES = ((1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 4), (2, 2, 2), (2, 4, 1), (1, 4, 2))  # data × stage × model
SCHEDULES = (("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3))  # with repeats
MICROBATCHES = (4, 7, 8)
LAYERS = (16, 18)  # 18 are uneven on 4 and 8 stages


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout and model."""

    mesh: tuple[int, int, int]
    schedule: tuple[str, int]
    microbatches: int
    layers: int
    tied: bool

    def __str__(self) -> str:
        name, repeats = self.schedule
        return f"{'x'.join(map(str, self.mesh))}-{name}{repeats}-{self.microbatches}mb-{self.layers}L{'-tied' * self.tied}"

    @property
    def allowed(self) -> bool:
        """Whether there are enough layers. On one stage every schedule is the same table: one stands for all."""
        stages, repeats = self.mesh[1], self.schedule[1]
        return stages * repeats <= self.layers and (stages > 1 or self.schedule == ("1f1b", 1))

    @property
    def pairs(self) -> frozenset:
        """Every two of its values, each with the name of its factor."""
        return frozenset(itertools.combinations([(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)], 2))


def whole() -> list[Case]:
    """Every allowed case."""
    cases = itertools.starmap(Case, itertools.product(MESHES, SCHEDULES, MICROBATCHES, LAYERS, (False, True)))
    return [case for case in cases if case.allowed]


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
