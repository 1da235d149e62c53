"""The matrix of layouts over which training must not differ, a sample of it that covers all pairs,
and a memory of what passed."""

import dataclasses
import functools
import hashlib
import itertools
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.schedule import orders
from jaxtrain.schedule.orders.stage_orders import B, W
from support import ROOT
from support.pipeline_tables import KINDS

ALONE = ((1, 1, 1), (8, 1, 1), (1, 1, 4))  # data × stage × model
STAGED = {
    2: ((1, 2, 1), (2, 2, 2), (4, 2, 1)),
    4: ((1, 4, 1), (2, 4, 1), (1, 4, 2)),
    8: ((1, 8, 1),),
}
SCHEDULES = (*KINDS, ("auto", 0))  # with repeats
MICROBATCHES = (1, 2, 3, 5, 8, 13, 16)
LAYERS = (16, 17)  # 17 are uneven on every number of stages
REMATS = ("full", "selective", "none")
PERMUTES = ("auto", "late", "aligned", "early", "spaced")
VOCABULARIES = ("parallel", "end_stages")
LAYERS_PER_OP = (0, 1)

# The sample's own values, so that few models serve all of its cases: one batch, and fewer layers
# where that many are not needed.
SAMPLE_SEQUENCES = 48
SAMPLE_MICROBATCHES = (1, 3, 6, 8, 12)
SAMPLE_LAYERS_PER_OP = (0, 2)
FEW_LAYERS = (8, 9)  # 9 are uneven on 2 and 4 stages
DRAWS = 3  # of what is left open, for every combination from which the sample is chosen


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
    sequences: int

    def __str__(self) -> str:
        name, repeats = self.schedule
        text = (
            f"{'x'.join(map(str, self.mesh))}-{name}{repeats}-{self.remat}-{self.microbatches}mb-"
            f"{self.layers}L{'-tied' * self.tied}"
        )
        return (
            f"{text}-{self.permute}-{self.vocabulary}"
            f"{f'-{self.layers_per_op}_per_op' * (self.layers_per_op > 0)}"
        )

    @property
    def longest_chunk(self) -> int:
        """Layers; at least so many where `auto` may choose two chunks a stage."""
        return -(-self.layers // (self.mesh[1] * (self.schedule[1] or 2)))

    @property
    def factors(self) -> dict[str, object]:
        """What the compiled program and its arithmetic depend on. That each schedule's table is
        right is shown without compiling (tests/schedule/test_columns.py), so schedules count by
        family here, microbatches by what they are to the stages, and permutes by whether all of
        them stand beside the ops, where the runtime has another loop."""
        data, stages, model = self.mesh
        found: dict[str, object] = {"stages": stages, "data": data > 1, "model": model > 1}
        found["microbatches"] = to_stages(self.microbatches, stages)
        found |= {"remat": self.remat, "uneven": bool(self.layers % 2), "tied": self.tied}
        if stages > 1:
            found |= {
                "family": family(*self.schedule),
                "early": self.permute == "early",
                "vocabulary": self.vocabulary,
            }
            found["cut"] = 0 < self.layers_per_op < self.longest_chunk
        return found

    @property
    def pairs(self) -> frozenset:
        """Every two of its factors, and by themselves its mesh, its schedule and the way to pack it
        into ticks."""
        named = (
            {("schedule", self.schedule), ("permute", self.permute)} if self.mesh[1] > 1 else set()
        )
        return (
            frozenset(itertools.combinations(self.factors.items(), 2))
            | named
            | {("mesh", self.mesh)}
        )


def to_stages(microbatches: int, stages: int) -> str:
    """The class of a number of microbatches."""
    if microbatches == 1:
        return "one"
    if microbatches < stages:
        return "fewer than stages"
    return "uneven over stages" if microbatches % stages else "a multiple of stages"


@functools.cache
def family(schedule: str, repeats: int) -> tuple:
    """Schedules of one family have the same placement, one chunk on a stage or several, and put off
    their W's or do not."""
    if schedule not in orders.SCHEDULES:
        return (schedule,)
    known = orders.SCHEDULES[schedule]
    cells = itertools.chain(*(itertools.pairwise(stage) for stage in known.order(4, repeats, 8)))
    puts_off = any(cell[0] == B and after != (W, *cell[1:]) for cell, after in cells)
    return known.placement, repeats > 1, puts_off


@functools.cache
def whole() -> tuple[Case, ...]:
    """Every schedule × remat × number of stages × microbatches for which there are layers; the
    other factors are drawn, from a fixed seed. So are the single-stage meshes, for which all
    schedules are one."""
    random = np.random.default_rng(1)
    cases = []
    for stages, schedule, remat, m in itertools.product(STAGED, SCHEDULES, REMATS, MICROBATCHES):
        if stages * schedule[1] <= min(LAYERS):
            # the fewest sequences that fit every mesh
            cases.append(draw(random, STAGED[stages], schedule, remat, m, LAYERS, 8 * m))
    for mesh, remat, m in itertools.product(ALONE, REMATS, MICROBATCHES):
        cases.append(draw(random, [mesh], ("1f1b", 1), remat, m, LAYERS, 8 * m))
    return tuple(cases)


@functools.cache
def sample() -> tuple[Case, ...]:
    """A cover of the same space at the sample's own values."""
    random = np.random.default_rng(2)
    cases = []
    for _, stages, schedule, remat, m in itertools.product(
        range(DRAWS), STAGED, SCHEDULES, REMATS, SAMPLE_MICROBATCHES
    ):
        meshes = [mesh for mesh in STAGED[stages] if SAMPLE_SEQUENCES % (m * mesh[0]) == 0]
        # `auto` may choose two chunks
        layers = FEW_LAYERS if stages <= 4 and schedule[1] <= 2 else LAYERS
        if meshes and stages * schedule[1] <= min(layers):
            cases.append(
                draw(
                    random,
                    meshes,
                    schedule,
                    remat,
                    m,
                    layers,
                    SAMPLE_SEQUENCES,
                    SAMPLE_LAYERS_PER_OP,
                )
            )
    for mesh, remat, m in itertools.product(ALONE, REMATS, SAMPLE_MICROBATCHES):
        if SAMPLE_SEQUENCES % (m * mesh[0]) == 0:
            cases.append(draw(random, [mesh], ("1f1b", 1), remat, m, FEW_LAYERS, SAMPLE_SEQUENCES))
    return tuple(cover(cases))


def draw(
    random: np.random.Generator,
    meshes: Sequence[tuple[int, int, int]],
    schedule: tuple[str, int],
    remat: str,
    microbatches: int,
    layers: Sequence[int],
    sequences: int,
    layers_per_op: Sequence[int] = LAYERS_PER_OP,
) -> Case:
    """A case whose other factors are chosen by chance; those that mean nothing on one stage are
    always the same there."""
    pick = lambda values: values[random.integers(len(values))]
    case = Case(
        mesh=pick(meshes),
        schedule=schedule,
        remat=remat,
        microbatches=microbatches,
        layers=pick(layers),
        tied=bool(pick((0, 1))),
        permute=pick(PERMUTES),
        vocabulary=pick(VOCABULARIES),
        layers_per_op=pick(layers_per_op),
        sequences=sequences,
    )
    return (
        case
        if case.mesh[1] > 1
        else dataclasses.replace(case, permute="auto", vocabulary="parallel", layers_per_op=0)
    )


def cover(cases: Iterable[Any], wanted: Iterable[Any] | None = None) -> Iterator[Any]:
    """Some of the cases, in which every wanted pair of values occurs (without `wanted` every pair
    that any case has): greedily, always the case with most that are missing. ValueError where no
    case has one."""
    pairs_of = {case: case.pairs for case in cases}
    missing = set().union(*pairs_of.values()) if wanted is None else set(wanted)
    while missing:
        best = max(pairs_of, key=lambda case: len(pairs_of[case] & missing))  # the first of equals
        if not pairs_of[best] & missing:
            raise ValueError(f"no case has {missing}")
        missing -= pairs_of[best]
        yield best


class Passed:
    """The names of the cases that passed with these very sources, in a file that grows by a line a
    case."""

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
