"""`auto`: the best table for given op times under a memory bound.

The search compares, by the coupled clock (clocks/coupled.py),
    - every named schedule that fits, packed in every way, so that the result is never slower than
      one of them with the same memory;
    - the orders between 1F1B, ZB-H1 and ZB-H2 that use exactly the memory of the bound;
    - orders made for the op times by list scheduling (`list_schedule`), with several rules.
There is no randomness and no time limit: a spec has one table, in every process and after every
restart. The tables that are compared depend on the size of the spec alone, which is the tasks of
each op, stages · chunks a stage · microbatches. With a larger size there are fewer list schedules
(`RULES`):

    tasks of an op     rules of list scheduling      ways to pack their orders
    up to 2^15         4                             all
    up to 2^18         2                             all but aligned, which was never the best for
                       them
    more               1                             all but aligned

Memory includes the weight stash: `peak_residuals` with `count_weight_stash`.

How to read this file: `search` is the loop, `candidates` says which orders it compares, and
`list_schedule`, the second half, makes orders for the op times. No JAX here.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxtrain.schedule.clocks.times import Times
from jaxtrain.schedule.orders import SCHEDULES, ChunkOrders, fits_repeats
from jaxtrain.schedule.orders.stage_orders import B, F, Orders, W, accumulate, between
from jaxtrain.schedule.packing import IN_ORDER, pack_into_ticks
from jaxtrain.schedule.placement import PLACEMENTS
from jaxtrain.schedule.table import (
    ROUNDING,
    ScheduleError,
    Table,
    counted,
    directions,
    local_unit_of,
    units_of,
)
from jaxtrain.schedule.table_spec import Cost, TableSpec, cost, memory_of

ANY_REPEATS = (1, 2)  # what `auto` tries where the number of chunks a stage is left to it
# is told which orders are tried next, and the fraction of the search that is done
ReportProgress = Callable[[str, float], None]


class ListRule(NamedTuple):
    """The rule of a list schedule: arguments of `list_schedule`."""

    patience: float
    forward_first: bool


# (tasks of an op up to which it holds, the list schedules to make), best first
RULES = (
    (
        2**15,
        (ListRule(0.5, False), ListRule(0.5, True), ListRule(1.0, False), ListRule(1.0, True)),
    ),
    (2**18, (ListRule(0.5, False), ListRule(1.0, True))),
    (None, (ListRule(0.5, False),)),
)


def silent(what: str, done: float) -> None:
    """A ReportProgress that says nothing."""


def report_share(report: ReportProgress, begin: float, share: float) -> ReportProgress:
    """A ReportProgress on a share of some work, which starts when the fraction `begin` is done."""
    # The third quarter of a search: begin = 0.5, share = 0.25. Half of it done reports 0.625.
    return lambda what, done: report(what, begin + done * share)


class MemoryTooSmall(ScheduleError):
    """No table fits into `memory`; one fits into `least`."""

    def __init__(self, memory: float, least: float):
        super().__init__(f"memory={memory:g} is too little for any table found", use=f"{least:g}")
        self.least = least


@dataclasses.dataclass(frozen=True)
class OrderCandidate:
    """An order that `search` compares, in each of these packings. `orders` makes it, or None if
    the bound allows no such order."""

    name: str
    spec: TableSpec
    placement: str
    packings: Sequence[str]
    orders: Callable[[], Orders | None]


def search(specs: Sequence[TableSpec], report: ReportProgress = silent) -> Table:
    """The table of least coupled time for any of these specs, whose stages never hold more than
    `memory`.

    specs: of one pipeline with several numbers of chunks on a stage; they differ in `repeats` and
    `units_per_chunk` alone. Raises MemoryTooSmall, with the least memory of any table, if nothing
    fits.
    """
    # Candidates with few chunks come first, and of equal costs the earlier table stays: a search
    # over more candidates finds another table only where that is better.
    best: tuple[Cost, Table] | None = None
    least = float("inf")
    specs = sorted(specs, key=lambda spec: spec.repeats)
    if specs[0].stages == 1:
        specs = specs[:1]  # chunks change nothing on one stage
    tried = [candidate for spec in specs for candidate in candidates(spec)]
    total, done = sum(candidate.spec.repeats for candidate in tried), 0
    for candidate in tried:
        spec, name, packings = candidate.spec, candidate.name, candidate.packings
        progress = report_share(report, done / total, spec.repeats / total)
        done += spec.repeats
        chunks = f"{counted(spec.repeats, 'chunk')} a stage"
        progress(f"{name}, {chunks}", 0.0)
        orders = candidate.orders()
        if orders is None:
            continue
        stage_of = PLACEMENTS[candidate.placement](spec.stages, spec.repeats)
        tasks = spec.tasks(ChunkOrders(name, stage_of, spec.microbatches, orders))
        # Packings of IN_ORDER keep each stage's order, and so hold equally many residuals. If one
        # is beyond the bound, the others need not be packed.
        too_much = False
        for index, packing in enumerate(packings, 1):
            progress(f"{name} {packing}, {chunks}", index / (len(packings) + 1))
            if too_much and packing in IN_ORDER:
                continue
            table = pack_into_ticks(tasks, packing)
            memory = memory_of(table) / spec.repeats
            least = min(least, memory)
            if spec.memory is not None and memory > spec.memory + ROUNDING:
                too_much |= packing in IN_ORDER
                continue
            price = cost(table, spec.times, spec.shares)
            if best is None or price < best[0]:
                best = price, table
    if best is None:
        raise MemoryTooSmall(specs[0].memory or 0.0, least)
    return dataclasses.replace(best[1], name=f"auto-{best[1].name}")


def candidates(spec: TableSpec) -> list[OrderCandidate]:
    """All orders that `search` compares for a spec; of tables that cost the same, the earliest is
    taken."""
    stages, repeats, microbatches = spec.stages, spec.repeats, spec.microbatches
    if stages == 1:
        orders = functools.partial(accumulate, 1, repeats, microbatches)
        return [OrderCandidate("accumulate", spec, "circular", spec.packings, orders)]
    listed = []
    for name, known in SCHEDULES.items():
        if fits_repeats(name, repeats):
            orders = functools.partial(known.order, stages, repeats, microbatches)
            listed.append(OrderCandidate(name, spec, known.placement, spec.packings, orders))
    # The chunks' residuals for which orders are made. More than twice what 1F1B takes (2 p − 1
    # microbatches, as ZB-H2 holds) gains nothing: a stage then never waits for the other direction.
    bound = min(microbatches, 2 * stages - 1) * repeats
    if spec.memory is not None:
        bound = max(1, min(bound, int(spec.memory * repeats + ROUNDING)))
    if repeats == 1:
        orders = functools.partial(between, stages, microbatches, bound)
        listed.append(OrderCandidate("between", spec, "circular", spec.packings, orders))
    return [*listed, *_list_schedules(spec, bound)]


def _list_schedules(spec: TableSpec, bound: int) -> Iterator[OrderCandidate]:
    """The orders by list scheduling, as many as `RULES` has for their size."""
    stages, repeats, microbatches, times = spec.stages, spec.repeats, spec.microbatches, spec.times
    # Orders are made on chunks, before there are Rs: a B is as long as its R and itself, for the
    # mean unit.
    recompute = times.R * (1 - sum(spec.saved) / max(1, len(spec.saved)))
    of_chunk = dataclasses.replace(
        times, F=times.F / repeats, B=(times.B + recompute) / repeats, W=times.W / repeats
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
                list_schedule, stage_of, stages, microbatches, bound, of_chunk, rule
            )
            yield OrderCandidate("list", spec, placement, packings, orders)


# --- list scheduling ------------------------------------------------------------------------------

NEVER = float("inf")
# (when it could begin, op, chunk): an op that a stage could do next. A search makes and compares
# millions of choices, so they stay tuples.
Choice = tuple[float, int, int]


def list_schedule(
    stage_of: tuple[int, ...],
    stages: int,
    microbatches: int,
    bound: int,
    times: Times,
    rule: ListRule,
) -> Orders | None:
    """Each stage's ops on chunks, in order; None if the bound leaves a stage nothing to do. Stages
    go by clocks of their own, and each takes the best op that it can begin.

    stage_of: of each chunk
    bound:    the most chunks' residuals on a stage, from F to the end of W; a chunk leaves capacity
              for the later chunks of its stage
    times:    of one chunk's ops (F, B, W) and of a message
    rule:     patience: how long, in W's, a stage with a W to do waits for a B or F that is on its
              way. forward_first: F and B take turns where both can begin; otherwise B goes first.
              Of several B's the one of the earliest microbatch is taken, of several F's the one
              furthest through the model
    """
    # Two stages of one chunk, F = B = W = 1, a bound of 2, B before F:
    #   stage 0 at 0: F0; at 1: F1; at 2 it holds two chunks' residuals, and waits for a B
    #   stage 1 at 1: F0 (arrived); at 2: B0, whose gradient is there; at 3: F1, …
    # The stage whose earliest choice is earliest acts next. Only choices within its patience count:
    # a B that arrives 0.3 W from now is worth waiting for with patience 0.5, one in 0.8 W is not.
    state = _ListState(stage_of, stages, microbatches, bound, times)
    wait, last_op = rule.patience * times.W, [F] * stages
    # one turn for each F, B and W
    for _ in range(3 * len(stage_of) * microbatches):
        begin = min(state.begin)
        if begin == NEVER:
            return None
        stage = state.begin.index(begin)
        forward = backward = weights = None
        for choice in state.choices[stage]:
            if choice[0] > begin + wait:
                continue
            _, op, chunk = choice
            if op == F:
                forward = choice if forward is None or chunk > forward[2] else forward
            elif op == B:
                # Of B's of one microbatch, the chunk furthest through the model.
                backward = (
                    choice
                    if backward is None or state.next_b[chunk] <= state.next_b[backward[2]]
                    else backward
                )
            else:
                weights = choice
        turn = rule.forward_first and last_op[stage] != F
        chosen = (forward if turn else None) or backward or forward or weights
        assert chosen is not None  # the choice that begins earliest is one of them
        last_op[stage] = chosen[1]
        state.do(stage, chosen)
    return state.orders


class _ListState:
    """The ops that a list schedule has done so far, and when."""

    def __init__(
        self, stage_of: tuple[int, ...], stages: int, microbatches: int, bound: int, times: Times
    ):
        chunks = len(stage_of)
        self.stage_of, self.last, self.message = stage_of, chunks - 1, times.message
        self.ways, self.chunks_of = directions(stage_of, stages), units_of(stage_of, stages)
        # Of each chunk, the residuals that its stage may hold before another F of it: one less than
        # the bound for each later chunk of the stage. Otherwise Fs of the lowest chunk could fill
        # the stage, and no microbatch would ever come to the end.
        self.capacity = [
            bound - (len(self.chunks_of[stage]) - 1 - index)
            for stage, index in zip(stage_of, local_unit_of(stage_of), strict=True)
        ]
        self.time_f, self.time_b, self.time_w = times.F, times.B, times.W
        # The next microbatch of each chunk; and, by microbatch, when the message that its F or B
        # needs can be read. Messages arrive in the order of microbatches, so a list's length says
        # how many have come.
        self.next_f, self.next_b = [0] * chunks, [0] * chunks
        self.arrived_f: list[list[float]] = [[0.0] * microbatches, *([] for _ in stage_of[1:])]
        self.arrived_b: list[list[float]] = [[] for _ in stage_of]
        self.residuals, self.clock = [0] * stages, [0.0] * stages
        # (chunk, microbatch) of the W's to do
        self.weights: list[collections.deque[tuple[int, int]]] = [
            collections.deque() for _ in range(stages)
        ]
        self.orders: Orders = [[] for _ in range(stages)]
        # the next possible ops of each stage, and when the earliest could begin
        self.choices: list[list[Choice]] = [[] for _ in range(stages)]
        self.begin = [NEVER] * stages
        self.list_choices(stage_of[0])

    def list_choices(self, stage: int) -> None:
        """Lists a stage's choices, each from the time at which it could begin."""
        clock, residuals = self.clock[stage], self.residuals[stage]
        choices: list[Choice] = (
            [(clock, W, self.weights[stage][0][0])] if self.weights[stage] else []
        )
        earliest = clock if choices else NEVER
        for chunk in self.chunks_of[stage]:
            for op, arrived, microbatch in (
                (F, self.arrived_f[chunk], self.next_f[chunk]),
                (B, self.arrived_b[chunk], self.next_b[chunk]),
            ):
                if microbatch < len(arrived) and (op == B or residuals < self.capacity[chunk]):
                    begin = arrived[microbatch]
                    begin = begin if begin > clock else clock
                    choices.append((begin, op, chunk))
                    earliest = begin if begin < earliest else earliest
        self.choices[stage], self.begin[stage] = choices, earliest

    def do(self, stage: int, choice: Choice) -> None:
        """Runs an op on a stage, and lists the choices of the stages where they change."""
        begin, op, chunk = choice
        if op == W:
            chunk, microbatch = self.weights[stage].popleft()
            self.residuals[stage] -= 1
            self.clock[stage] = begin + self.time_w
        elif op == F:
            microbatch = self.next_f[chunk]
            self.next_f[chunk] += 1
            self.residuals[stage] += 1
            self.clock[stage] = begin + self.time_f
            # The head follows the last chunk's F at once: that is when its B can begin.
            if chunk < self.last:
                self._send(stage, chunk + 1, self.arrived_f, self.ways[chunk])
            else:
                self._send(stage, chunk, self.arrived_b, self.ways[chunk])
        else:
            microbatch = self.next_b[chunk]
            self.next_b[chunk] += 1
            self.weights[stage].append((chunk, microbatch))
            self.clock[stage] = begin + self.time_b
            if chunk > 0:
                self._send(stage, chunk - 1, self.arrived_b, self.ways[chunk - 1])
        self.orders[stage].append((op, chunk, microbatch))
        self.list_choices(stage)

    def _send(self, stage: int, reader: int, arrived: list[list[float]], way: int) -> None:
        """Sends the result of a stage's op to the chunk that reads it."""
        arrived[reader].append(self.clock[stage] + (self.message if way else 0.0))
        if self.stage_of[reader] != stage:
            self.list_choices(self.stage_of[reader])
