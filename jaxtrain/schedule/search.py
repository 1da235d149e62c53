"""Tables for given op times: the best way to lay a named schedule, and `auto`, the best table found under a memory bound.

`auto` compares, by the coupled clock (simulate.walk),
    - every named schedule that fits, laid in every way: so it never does worse than one of them with the same memory;
    - the orders between 1F1B, ZB-H1 and ZB-H2 that use just the memory there is;
    - orders made for the op times by list scheduling (list_schedule), under several rules.
No randomness and no clock: a problem has one table, in every process and after every restart. What is compared depends on its size alone,
the tasks of each op, stages · chunks a stage · microbatches; the larger it is, the fewer list schedules (`RULES`):

    tasks of an op     rules of list scheduling      ways to lay their orders
    up to 2^15         4                             all
    up to 2^18         2                             all but aligned, which was never the best for them
    more               1                             all but aligned

Memory is counted with what B leaves for W: table.peak_stashes with `count_stash`. No JAX here.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from jaxtrain.schedule import orders as orders_
from jaxtrain.schedule.list_scheduling import list_schedule
from jaxtrain.schedule.orders import PLACES, SCHEDULES, Orders, fits_repeats
from jaxtrain.schedule.packing import IN_ORDER, PACKINGS, Tasks, expand, pack_into_ticks
from jaxtrain.schedule.simulate import Times, walk
from jaxtrain.schedule.table import Op, Table, peak_residuals

ANY_REPEATS = (1, 2)  # what `auto` tries where the number of chunks a stage is left to it
ROOM = 1e-9
MOST_KEPT = 2  # microbatches whose residuals the last chunk's F may keep for their Bs under full recomputation: more have an R there too
Cost = tuple[float, float, int]
Report = Callable[[str, float], None]  # is told what is tried next, and which part of all is done
# (tasks of an op up to which it holds, the patience and forward_first of list schedules to make), best first
RULES = ((2**15, ((0.5, False), (0.5, True), (1.0, False), (1.0, True))), (2**18, ((0.5, False), (1.0, True))), (None, ((0.5, False),)))


def silent(what: str, done: float) -> None:
    """A Report that says nothing."""


class MemoryTooSmall(ValueError):
    """No table fits into `memory`; one fits into `least`."""

    def __init__(self, memory: float, least: float):
        super().__init__(f"memory={memory:g} is too little for any table found: use {least:g}")
        self.least = least


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a table is wanted for.

    groups: the number of ops that each chunk, in model order, is cut into; None: one
    shares: of each unit, its part of a stage's work; None: stages / units
    """

    stages: int
    microbatches: int
    times: Times
    remat_full: bool = False
    groups: Sequence[int] | None = None
    shares: Sequence[float] | None = None
    vocabulary: str = "parallel"


def pack_chunks(problem: Problem, name: str, placement: str, repeats: int, orders: Orders) -> Callable[[str], Table]:
    """From a mode to the table of an order of chunks. Raises ValueError for `groups` of another number of chunks."""
    chunks = PLACES[placement](problem.stages, repeats)
    if problem.groups is not None and len(problem.groups) != len(chunks):
        raise ValueError(f"groups has {len(problem.groups)} numbers, and {name} has {len(chunks)} chunks: give one number for each")
    last_too = problem.remat_full and _most_kept(orders, len(chunks) - 1) > MOST_KEPT
    cells, chunk_of = expand(orders, problem.groups or [1] * len(chunks), problem.remat_full, last_too)
    tasks = Tasks(cells, tuple(chunks[c] for c in chunk_of), problem.stages, problem.microbatches)
    return lambda mode: pack_into_ticks(
        tasks,
        name,
        mode,
        chunk_of=chunk_of,
        recompute=problem.remat_full and len(chunk_of) > 1,
        recompute_last=last_too,
        vocabulary=problem.vocabulary,
    )


def _most_kept(orders: Orders, chunk: int) -> int:
    """The most microbatches of a chunk that are between their F and their B at once."""
    held = most = 0
    for op, c, _ in (cell for order in orders for cell in order):
        if c == chunk:
            held += (op == Op.F) - (op == Op.B)
            most = max(most, held)
    return most


def cost(table: Table, problem: Problem) -> Cost:
    """What tables are compared by: coupled step time (differences by rounding count for nothing), memory, rows."""
    return float(f"{walk(table, problem.times, problem.shares):.9g}"), memory_of(table), table.ticks


def memory_of(table: Table) -> float:
    """The most stashes of a chunk that any stage holds at once, with what B leaves for W."""
    return max(peak_residuals(table, count_weight_stash=True))


def named(schedule: str, repeats: int, problem: Problem, modes: Sequence[str] = PACKINGS, report: Report = silent) -> Table:
    """A named schedule's table, laid in the way of least coupled time that takes no more memory than late permutes do."""
    known, p = SCHEDULES[schedule], problem.stages
    orders = (known.order if p > 1 else orders_.accumulate)(p, repeats, problem.microbatches)
    at = pack_chunks(problem, schedule, known.placement, repeats, orders)
    modes = modes if p > 1 else ("late",)  # one stage has no permutes
    tables = []
    for i, mode in enumerate(modes):
        report(f"{schedule} {mode}", i / len(modes))
        tables.append(at(mode))
    if len(tables) == 1:
        return tables[0]
    priced = [(cost(table, problem), i) for i, table in enumerate(tables)]
    return tables[min(price for price in priced if price[0][1] <= priced[0][0][1] + ROOM)[1]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An order that `search` compares, laid by each of `modes`; `orders` makes it, None where there is no such order."""

    name: str
    placement: str
    repeats: int
    modes: Sequence[str]
    orders: Callable[[], Orders | None]


def search(
    problem: Problem,
    repeats: Sequence[int] = ANY_REPEATS,
    memory: float | None = None,
    modes: Sequence[str] = PACKINGS,
    ops_per_chunk: int = 1,
    report: Report = silent,
) -> Table:
    """`auto`: the table of least coupled time found whose stages never hold more than `memory` stashes.

    memory: in stashes of a whole stage for one microbatch; a chunk counts 1 / repeats. None: no bound.
    repeats: the numbers of chunks a stage to try. ops_per_chunk: into how many each chunk is cut, unless the problem's `groups` says it.
    Raises ValueError, with the least memory found, if nothing fits.
    """
    best: tuple[Cost, Table] | None = None
    least = float("inf")
    tried = candidates(problem, repeats, memory, modes if problem.stages > 1 else ("late",))
    whole, done = sum(candidate.repeats for candidate in tried), 0
    for candidate in tried:
        v, name = candidate.repeats, candidate.name
        cut = problem if problem.groups else dataclasses.replace(problem, groups=[ops_per_chunk] * (problem.stages * v))
        report(f"{name}, {v} chunk{'s'[: v != 1]} a stage", done / whole)
        orders = candidate.orders()
        full = False  # whether an order holds too much, as it stands
        at = None if orders is None else pack_chunks(cut, name, candidate.placement, v, orders)
        for i, mode in enumerate(candidate.modes if at else ()):
            report(f"{name} {mode}, {v} chunk{'s'[: v != 1]} a stage", (done + v * (i + 1) / (len(candidate.modes) + 1)) / whole)
            if at is None or (full and mode in IN_ORDER):
                continue
            table = at(mode)
            held = memory_of(table) / v
            least = min(least, held)
            if memory is not None and held > memory + ROOM:
                full |= mode in IN_ORDER
                continue
            price = cost(table, problem)
            if best is None or price < best[0]:
                best = price, table
        done += v
    if best is None:
        raise MemoryTooSmall(memory or 0.0, least)
    return dataclasses.replace(best[1], name=f"auto-{best[1].name}")


def candidates(problem: Problem, repeats: Sequence[int], memory: float | None, modes: Sequence[str]) -> list[Candidate]:
    """Everything that `search` compares, in its order: of tables that cost the same, the first is taken."""
    p, m = problem.stages, problem.microbatches
    if p == 1:
        v = min(repeats)
        return [Candidate("accumulate", "circular", v, modes, lambda: orders_.accumulate(1, v, m))]
    found = []
    for v in sorted(set(repeats)):
        for name, known in SCHEDULES.items():
            if fits_repeats(name, v):
                found.append(Candidate(name, known.placement, v, modes, functools.partial(known.order, p, v, m)))
        bound = _bound(p, v, m, memory)
        if v == 1:
            found.append(Candidate("between", "circular", 1, modes, functools.partial(orders_.between, p, m, bound)))
        found += _list_schedules(problem, v, bound, modes)
    return found


def _list_schedules(problem: Problem, v: int, bound: int, modes: Sequence[str]) -> Iterator[Candidate]:
    """Orders by list scheduling with `v` chunks on a stage, as many as `RULES` has for their size."""
    p, m, times = problem.stages, problem.microbatches, problem.times
    times = dataclasses.replace(times, F=times.F / v, B=(times.B + times.R) / v, W=times.W / v)
    rules = next(rules for most, rules in RULES if most is None or p * v * m <= most)
    if rules != RULES[0][1]:
        modes = [mode for mode in modes if mode != "aligned"] or modes
    for placement in PLACES if v > 1 else ["circular"]:
        stage_of = PLACES[placement](p, v)
        for patience, forward_first in rules:
            yield Candidate(
                "list", placement, v, modes, functools.partial(list_schedule, stage_of, p, m, bound, times, patience, forward_first)
            )


def _bound(p: int, v: int, m: int, memory: float | None) -> int:
    """The number of chunk stashes to make orders for: all that there is, and no more than twice what 1F1B takes."""
    most = min(m * v, (2 * p - 1) * v)
    return most if memory is None else max(1, min(most, int(memory * v + ROOM)))
