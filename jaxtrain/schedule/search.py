"""Tables for given op times: the best way to pack a named schedule, and `auto`, the best table
found under a memory bound.

`auto` compares, by the coupled clock (coupled_clock.walk),
    - every named schedule that fits, packed in every way: so it never does worse than one of them
      with the same memory;
    - the orders between 1F1B, ZB-H1 and ZB-H2 that use just the memory there is;
    - orders made for the op times by list scheduling (list_schedule), under several rules.
No randomness and no clock: a spec has one table, in every process and after every restart. What is
compared depends on its size alone, the tasks of each op, stages · chunks a stage · microbatches;
the larger it is, the fewer list schedules (`RULES`):

    tasks of an op     rules of list scheduling      ways to pack their orders
    up to 2^15         4                             all
    up to 2^18         2                             all but aligned, which was never the best for
                       them
    more               1                             all but aligned

Memory is counted with what B leaves for W: table.peak_residuals with `count_weight_stash`. No JAX
here.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxtrain.schedule import orders as orders_
from jaxtrain.schedule.coupled_clock import walk
from jaxtrain.schedule.list_scheduling import list_schedule
from jaxtrain.schedule.orders import PLACEMENTS, SCHEDULES, Orders, fits_repeats
from jaxtrain.schedule.packing import IN_ORDER, Tasks, cut_into_units, pack_into_ticks
from jaxtrain.schedule.table import Op, Table, TableShape, peak_residuals
from jaxtrain.schedule.table_spec import TableSpec

ANY_REPEATS = (1, 2)  # what `auto` tries where the number of chunks a stage is left to it
ROOM = 1e-9
# microbatches whose residuals the last chunk's F may keep for their Bs under full recomputation:
# more have an R there too
MOST_KEPT = 2
Report = Callable[[str, float], None]  # is told what is tried next, and which part of all is done


class Rule(NamedTuple):
    """How a list schedule is made: see `list_schedule`."""

    patience: float
    forward_first: bool


# (tasks of an op up to which it holds, the list schedules to make), best first
RULES = (
    (2**15, (Rule(0.5, False), Rule(0.5, True), Rule(1.0, False), Rule(1.0, True))),
    (2**18, (Rule(0.5, False), Rule(1.0, True))),
    (None, (Rule(0.5, False),)),
)


def silent(what: str, done: float) -> None:
    """A Report that says nothing."""


def part_of(report: Report, begin: float, part: float) -> Report:
    """A Report on what is `part` of the whole, after `begin` of it."""
    return lambda what, done: report(what, begin + done * part)


class MemoryTooSmall(ValueError):
    """No table fits into `memory`; one fits into `least`."""

    def __init__(self, memory: float, least: float):
        super().__init__(f"memory={memory:g} is too little for any table found: use {least:g}")
        self.least = least


# --- one order ------------------------------------------------------------------------------------


def unit_tasks(spec: TableSpec, name: str, placement: str, orders: Orders) -> Tasks:
    """An order of chunks, cut into units as a spec says, ready to be packed. Raises ValueError for
    `groups` of another number of chunks."""
    stage_of_chunk = PLACEMENTS[placement](spec.stages, spec.repeats)
    chunks = len(stage_of_chunk)
    if spec.groups is not None and len(spec.groups) != chunks:
        raise ValueError(
            f"groups has {len(spec.groups)} numbers, and {name} has {chunks} chunks: give one "
            "number for each"
        )
    recompute_last = spec.remat_full and _most_kept(orders, chunks - 1) > MOST_KEPT
    orders_of_units, chunk_of = cut_into_units(
        orders, spec.groups or [1] * chunks, spec.remat_full, recompute_last
    )
    shape = TableShape(
        name=name,
        stage_of=tuple(stage_of_chunk[chunk] for chunk in chunk_of),
        stages=spec.stages,
        microbatches=spec.microbatches,
        chunk_of=chunk_of,
        recompute=spec.remat_full and len(chunk_of) > 1,
        recompute_last=recompute_last,
        vocabulary=spec.vocabulary,
    )
    return Tasks(orders_of_units, shape)


def _most_kept(orders: Orders, chunk: int) -> int:
    """The most microbatches of a chunk that are between their F and their B at once."""
    held = most = 0
    for op, chunk_of_task, _ in (task for order in orders for task in order):
        if chunk_of_task == chunk:
            held += (op == Op.F) - (op == Op.B)
            most = max(most, held)
    return most


class Cost(NamedTuple):
    """What tables are compared by, in this order: coupled step time, memory as `memory_of` has it,
    ticks."""

    time: float
    memory: float
    ticks: int


def cost(table: Table, spec: TableSpec) -> Cost:
    """The cost of a table by the spec's times; differences by rounding count for nothing."""
    return Cost(float(f"{walk(table, spec.times, spec.shares):.9g}"), memory_of(table), table.ticks)


def memory_of(table: Table) -> float:
    """The most residuals that any stage holds at once, in those of a chunk, with what B leaves for
    W."""
    return max(peak_residuals(table, count_weight_stash=True))


def named(spec: TableSpec, report: Report = silent) -> Table:
    """A named schedule's table, packed in the way of least coupled time that takes no more memory
    than late permutes do."""
    known = SCHEDULES[spec.schedule]
    order = known.order if spec.stages > 1 else orders_.accumulate
    tasks = unit_tasks(
        spec, spec.schedule, known.placement, order(spec.stages, spec.repeats, spec.microbatches)
    )
    tables = []
    for index, packing in enumerate(spec.packings):
        report(f"{spec.schedule} {packing}", index / len(spec.packings))
        tables.append(pack_into_ticks(tasks, packing))
    if len(tables) == 1:
        return tables[0]
    costs = [cost(table, spec) for table in tables]
    return tables[
        min(
            (price, index)
            for index, price in enumerate(costs)
            if price.memory <= costs[0].memory + ROOM
        )[1]
    ]


# --- auto -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An order that `search` compares, packed in each of these ways; `orders` makes it, None where
    there is no such order."""

    name: str
    spec: TableSpec
    placement: str
    packings: Sequence[str]
    orders: Callable[[], Orders | None]


@dataclasses.dataclass(frozen=True)
class _Packed:
    """A candidate's table, and the most residuals that a stage holds, in those of a whole stage."""

    table: Table
    memory: float
    fits: bool


def search(specs: Sequence[TableSpec], report: Report = silent) -> Table:
    """`auto`: the table of least coupled time found for any of these specs, whose stages never hold
    more than `memory`.

    specs: of one pipeline with several numbers of chunks on a stage; they differ in `repeats` and
    `groups` alone. Raises MemoryTooSmall, with the least memory found, if nothing fits.
    """
    best: tuple[Cost, Table] | None = None
    least = float("inf")
    tried = [candidate for spec in _sorted(specs) for candidate in candidates(spec)]
    whole, done = sum(candidate.spec.repeats for candidate in tried), 0
    for candidate in tried:
        for packed in _packed(
            candidate, part_of(report, done / whole, candidate.spec.repeats / whole)
        ):
            least = min(least, packed.memory)
            if packed.fits:
                price = cost(packed.table, candidate.spec)
                if best is None or price < best[0]:
                    best = price, packed.table
        done += candidate.spec.repeats
    if best is None:
        raise MemoryTooSmall(specs[0].memory or 0.0, least)
    return dataclasses.replace(best[1], name=f"auto-{best[1].name}")


def _sorted(specs: Sequence[TableSpec]) -> Sequence[TableSpec]:
    """The specs by their chunks on a stage; on one stage, where chunks change nothing, the first of
    these alone."""
    by_repeats = sorted(specs, key=lambda spec: spec.repeats)
    return by_repeats if specs[0].stages > 1 else by_repeats[:1]


def _packed(candidate: Candidate, report: Report) -> Iterator[_Packed]:
    """A candidate's tables. Where an order holds too much as it stands, it is packed no more in
    ways that keep it."""
    spec = candidate.spec
    chunks = f"{spec.repeats} chunk{'s'[: spec.repeats != 1]} a stage"
    report(f"{candidate.name}, {chunks}", 0.0)
    orders = candidate.orders()
    if orders is None:
        return
    tasks = unit_tasks(spec, candidate.name, candidate.placement, orders)
    too_much = False
    for index, packing in enumerate(candidate.packings, 1):
        report(f"{candidate.name} {packing}, {chunks}", index / (len(candidate.packings) + 1))
        if too_much and packing in IN_ORDER:
            continue
        table = pack_into_ticks(tasks, packing)
        memory = memory_of(table) / spec.repeats
        fits = spec.memory is None or memory <= spec.memory + ROOM
        too_much |= packing in IN_ORDER and not fits
        yield _Packed(table, memory, fits)


def candidates(spec: TableSpec) -> list[Candidate]:
    """Everything that `search` compares for a spec, in its order: of tables that cost the same, the
    first is taken."""
    stages, repeats, microbatches = spec.stages, spec.repeats, spec.microbatches
    if stages == 1:
        orders = functools.partial(orders_.accumulate, 1, repeats, microbatches)
        return [Candidate("accumulate", spec, "circular", spec.packings, orders)]
    listed = []
    for name, known in SCHEDULES.items():
        if fits_repeats(name, repeats):
            orders = functools.partial(known.order, stages, repeats, microbatches)
            listed.append(Candidate(name, spec, known.placement, spec.packings, orders))
    bound = _bound(spec)
    if repeats == 1:
        orders = functools.partial(orders_.between, stages, microbatches, bound)
        listed.append(Candidate("between", spec, "circular", spec.packings, orders))
    return [*listed, *_list_schedules(spec, bound)]


def _list_schedules(spec: TableSpec, bound: int) -> Iterator[Candidate]:
    """Orders by list scheduling, as many as `RULES` has for their size."""
    stages, repeats, microbatches, times = spec.stages, spec.repeats, spec.microbatches, spec.times
    of_chunk = dataclasses.replace(
        times, F=times.F / repeats, B=(times.B + times.R) / repeats, W=times.W / repeats
    )
    rules = next(
        rules for most, rules in RULES if most is None or stages * repeats * microbatches <= most
    )
    packings = spec.packings
    if rules != RULES[0][1]:
        packings = [packing for packing in packings if packing != "aligned"] or packings
    for placement in PLACEMENTS if repeats > 1 else ["circular"]:
        stage_of = PLACEMENTS[placement](stages, repeats)
        for rule in rules:
            orders = functools.partial(
                list_schedule, stage_of, stages, microbatches, bound, of_chunk, *rule
            )
            yield Candidate("list", spec, placement, packings, orders)


def _bound(spec: TableSpec) -> int:
    """The number of chunks' residuals to make orders for: all that there is, and no more than twice
    what 1F1B takes."""
    most = min(spec.microbatches, 2 * spec.stages - 1) * spec.repeats
    return (
        most if spec.memory is None else max(1, min(most, int(spec.memory * spec.repeats + ROOM)))
    )
