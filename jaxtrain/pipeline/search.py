"""Tables for given op times: the best way to lay a named schedule, and `auto`, the best table found under a memory bound.

`auto` compares, by the coupled clock (simulate.walk),
    - every named schedule that fits, laid in every way: so it never does worse than one of them with the same memory;
    - the orders between 1F1B, ZB-H1 and ZB-H2 that use just the memory there is;
    - orders made for the op times by list scheduling (list_schedule), under several rules.
No randomness. Memory is counted with what B leaves for W: table.peak_stashes with `count_stash`. No JAX here.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jaxtrain.config import fits_repeats
from jaxtrain.pipeline import orders as orders_
from jaxtrain.pipeline.lay import MODES, expand, lay
from jaxtrain.pipeline.list_schedule import list_schedule
from jaxtrain.pipeline.orders import PLACES, SCHEDULES, Orders
from jaxtrain.pipeline.simulate import Times, walk
from jaxtrain.pipeline.table import Op, Table, peak_stashes

ANY_REPEATS = (1, 2)  # what `auto` tries where the number of chunks a stage is left to it
ROOM = 1e-9
MOST_KEPT = 2  # microbatches whose residuals the last chunk's F may keep for their Bs under full recomputation: more have an R there too
Cost = tuple[float, float, int]


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


def lay_chunks(problem: Problem, name: str, placement: str, repeats: int, orders: Orders, mode: str) -> Table:
    """The table of an order of chunks, laid by mode. Raises ValueError for `groups` of another number of chunks."""
    chunks = PLACES[placement](problem.stages, repeats)
    if problem.groups is not None and len(problem.groups) != len(chunks):
        raise ValueError(f"groups has {len(problem.groups)} numbers, and {name} has {len(chunks)} chunks: give one number for each")
    last_too = problem.remat_full and _most_kept(orders, len(chunks) - 1) > MOST_KEPT
    cells, chunk = expand(orders, problem.groups or [1] * len(chunks), problem.remat_full, last_too)
    return lay(
        cells,
        name,
        tuple(chunks[c] for c in chunk),
        problem.stages,
        problem.microbatches,
        mode,
        chunk=chunk,
        recompute=problem.remat_full and len(chunk) > 1,
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
    return max(peak_stashes(table, count_stash=True))


def named(schedule: str, repeats: int, problem: Problem, modes: Sequence[str] = MODES) -> Table:
    """A named schedule's table, laid in the way of least coupled time that takes no more memory than late permutes do."""
    known, p = SCHEDULES[schedule], problem.stages
    orders = (known.order if p > 1 else orders_.accumulate)(p, repeats, problem.microbatches)
    tables = [lay_chunks(problem, schedule, known.placement, repeats, orders, mode) for mode in (modes if p > 1 else ("late",))]
    if len(tables) == 1:
        return tables[0]
    priced = [(cost(table, problem), i) for i, table in enumerate(tables)]
    return tables[min(price for price in priced if price[0][1] <= priced[0][0][1] + ROOM)[1]]


def search(
    problem: Problem,
    repeats: Sequence[int] = ANY_REPEATS,
    memory: float | None = None,
    modes: Sequence[str] = MODES,
    ops_per_chunk: int = 1,
) -> Table:
    """`auto`: the table of least coupled time found whose stages never hold more than `memory` stashes.

    memory: in stashes of a whole stage for one microbatch; a chunk counts 1 / repeats. None: no bound.
    repeats: the numbers of chunks a stage to try. ops_per_chunk: into how many each chunk is cut, unless the problem's `groups` says it.
    Raises ValueError, with the least memory found, if nothing fits.
    """
    best: tuple[Cost, Table] | None = None
    least = float("inf")
    for name, placement, v, orders in _orders(problem, repeats, memory):
        cut = problem if problem.groups else dataclasses.replace(problem, groups=[ops_per_chunk] * (problem.stages * v))
        for mode in modes if problem.stages > 1 else ("late",):  # one stage has no permutes
            table = lay_chunks(cut, name, placement, v, orders, mode)
            held = memory_of(table) / v
            least = min(least, held)
            if memory is not None and held > memory + ROOM:
                continue
            price = cost(table, problem)
            if best is None or price < best[0]:
                best = price, table
    if best is None:
        raise MemoryTooSmall(memory or 0.0, least)
    return dataclasses.replace(best[1], name=f"auto-{best[1].name}")


def _orders(problem: Problem, repeats: Sequence[int], memory: float | None) -> Iterator[tuple[str, str, int, Orders]]:
    """(name, placement, chunks a stage, order) of everything that `search` compares."""
    p, m = problem.stages, problem.microbatches
    if p == 1:
        yield "accumulate", "circular", min(repeats), orders_.accumulate(1, min(repeats), m)
        return
    for v in sorted(set(repeats)):
        for name, known in SCHEDULES.items():
            if fits_repeats(name, v):
                yield name, known.placement, v, known.order(p, v, m)
        bounds = _bounds(p, v, m, memory)
        if v == 1:
            for bound in bounds:
                yield "between", "circular", 1, orders_.between(p, m, bound)
        for placement, bound in itertools.product(PLACES if v > 1 else ["circular"], bounds):
            times = dataclasses.replace(
                problem.times, F=problem.times.F / v, B=(problem.times.B + problem.times.R) / v, W=problem.times.W / v
            )
            for patience, forward_first in itertools.product((0.5, 1.0), (False, True)):
                orders = list_schedule(PLACES[placement](p, v), p, m, bound, times, patience, forward_first)
                if orders is not None:
                    yield "list", placement, v, orders


def _bounds(p: int, v: int, m: int, memory: float | None) -> list[int]:
    """Numbers of chunk stashes to make orders for: all that there is, and no more than twice what 1F1B takes."""
    most = min(m * v, (2 * p - 1) * v)
    return [most if memory is None else max(1, min(most, int(memory * v + ROOM)))]
