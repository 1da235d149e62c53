"""The named schedules: small functions from the sizes of a pipeline to the order of each stage's
ops.

    order(p, v, m) → for each stage its tasks (op, chunk, microbatch), chunks in model order

The letters are those of the papers: p stages, v chunks on a stage, m microbatches; s is a stage, c
a chunk, k a microbatch.

Chunks are placed in a circle (chunk c on stage c mod p) or, for `zb_v` and `dualpipe_v`, in a V:
down the stages and back up, so that the last chunk is on stage 0, and a message stays on its stage
where the V turns. packing.py gives tasks their ticks. The figures are for F = B = W = 1 and
messages that take no time. The peak is the largest number of chunks whose residuals a stage holds
at once, in tables with late permutes:

              placement   idle time of the whole step                peak
    gpipe     circular    2 (p − 1)                                  m v
    1f1b      circular    2 (p − 1)                                  p
    interleaved circular  2 (p − 1) chunks, m ≥ p                    p v + p − 1, p divides m
    zb_h1     circular    p − 1, m ≥ p                               p
    zb_h2     circular    p − 1, none between, m ≥ 2 p − 1           2 p − 1
    zb_v      V           p − 1 chunks, none between, m ≥ 2 p        2 p
    dualpipe_v V          2 (p − 1) chunks, m ≥ 2 p                  2 p + 1
"""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable

from jaxtrain.schedule.table import Op, counted

# op, chunk or unit, microbatch: no table.Cell, since a search makes millions of them
Task = tuple[int, int, int]
Orders = list[list[Task]]
F, B, W = int(Op.F), int(Op.B), int(Op.W)


def circular(stages: int, chunks: int) -> tuple[int, ...]:
    """Chunk c on stage c mod p (Narayanan et al. 2021)."""
    return tuple(c % stages for c in range(stages * chunks))


def v_shape(stages: int, chunks: int) -> tuple[int, ...]:
    """Down the stages and back up (Qi et al. 2024): 0 … p − 1, p − 1 … 0, and again for every two
    chunks."""
    down = list(range(stages))
    return tuple(s for c in range(chunks) for s in (down if c % 2 == 0 else down[::-1]))


PLACEMENTS: dict[str, Callable[[int, int], tuple[int, ...]]] = {"circular": circular, "v": v_shape}


# --- circular placement ---------------------------------------------------------------------------


def gpipe(p: int, v: int, m: int) -> Orders:
    """All forwards, then all backwards (Huang et al. 2019); with more chunks the forwards go round
    the circle chunk by chunk."""
    return [
        [(F, c * p + s, k) for c in range(v) for k in range(m)]
        + [(op, c * p + s, k) for c in reversed(range(v)) for k in range(m) for op in (B, W)]
        for s in range(p)
    ]


def one_f_one_b(p: int, v: int, m: int) -> Orders:
    """1F1B (Narayanan et al. 2019, PipeDream-Flush): stage s has at most p − s microbatches in
    flight."""
    return [_steady(s, m, p - s, 0) for s in range(p)]


def zb_h1(p: int, v: int, m: int) -> Orders:
    """ZB-H1 (Qi et al. 2023, section 2.2): as 1F1B, but stage s is s microbatches behind with W,
    which it does when others are idle."""
    return [_steady(s, m, p - s, s) for s in range(p)]


def zb_h2(p: int, v: int, m: int) -> Orders:
    """ZB-H2 (Qi et al. 2023, section 2.3): 2 (p − s) − 1 forwards first and 2 s microbatches behind
    with W, so that no stage idles."""
    return [_steady(s, m, 2 * (p - s) - 1, 2 * s) for s in range(p)]


def between(p: int, m: int, bound: int) -> Orders:
    """The order of this family for a bound on the chunks' residuals: ZB-H1 at p, ZB-H2 at 2 p − 1,
    fewer forwards first than 1F1B below p.

    Stage s holds warm-up plus W's put off; what there is beyond p goes first to the warm-up and
    then, down the stages, to the W's.
    """
    orders = []
    for s in range(p):
        ahead = min(p - s + max(0, min(bound - p, p - 1 - s)), bound)
        orders.append(_steady(s, m, ahead, min(bound - ahead, 2 * s)))
    return orders


def _steady(s: int, m: int, warmup: int, behind: int) -> list[Task]:
    """`warmup` forwards, then B, W, F in turn, W being `behind` microbatches behind B."""
    ahead = min(warmup, m)
    tasks = [(F, s, k) for k in range(ahead)]
    for k in range(m):
        tasks.append((B, s, k))
        if k >= behind:
            tasks.append((W, s, k - behind))
        if k + ahead < m:
            tasks.append((F, s, k + ahead))
    return tasks + [(W, s, k) for k in range(max(0, m - behind), m)]


def interleaved(p: int, v: int, m: int, in_pairs: bool = False) -> Orders:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2): microbatches go through the chunks in
    groups of p.

    Where the microbatches do not divide, the last group takes the rest as well: groups of p to 2p −
    1 keep the idle time at 1/v of 1F1B's. With fewer microbatches than stages there is one short
    group: right, but with more idle time. in_pairs: an F after the warm-up comes before a B and W,
    and not after them
    """
    groups = _groups(p, m)
    forward = [(c, k) for group in groups for c in range(v) for k in group]
    backward = [(c, k) for group in groups for c in reversed(range(v)) for k in group]
    orders = []
    for s in range(p):
        warm_up = _warm_up(p, v, m, s)
        tasks: list[Task] = [(F, c * p + s, k) for c, k in forward[:warm_up]]
        steady = itertools.zip_longest(backward, forward[warm_up:])
        for (c, k), following in steady:
            next_f = [(F, following[0] * p + s, following[1])] if following else []
            done = [(B, c * p + s, k), (W, c * p + s, k)]
            tasks += next_f + done if in_pairs else done + next_f
        orders.append(tasks)
    return orders


def _groups(p: int, m: int) -> list[range]:
    """The groups of microbatches of interleaved 1F1B."""
    count = max(1, m // p)
    return [range(i * p, (i + 1) * p if i < count - 1 else m) for i in range(count)]


def _warm_up(p: int, v: int, m: int, s: int) -> int:
    """The Fs of stage s before its first B, or in pairs before the first one with a B."""
    return min(m * v, 2 * (p - s - 1) + (v - 1) * max(map(len, _groups(p, m))) + 1)


def in_pairs(p: int, v: int, m: int) -> Orders:
    """Interleaved 1F1B, and with one chunk 1F1B, whose steady state has an F before the B of
    another microbatch, so that both can share a cell. A stage holds one chunk more than interleaved
    1F1B, which with one chunk is twice as many as 1F1B."""
    return interleaved(p, v, m, in_pairs=True)


# --- V placement ----------------------------------------------------------------------------------


class _CountedOrder:
    """A stage's order of ops on chunks; each takes its next microbatch. `count`: the number of
    each so far."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []
        self.count: collections.Counter[tuple[int, int]] = collections.Counter()

    def add(self, times: int, *ops: tuple[int, int]) -> None:
        """Adds these (op, chunk), one after the other, `times` times."""
        for op in ops * times:
            self._tasks.append((*op, self.count[op]))
            self.count[op] += 1

    def of_microbatches(self, m: int) -> list[Task]:
        """The order without the tasks of microbatches from m on."""
        return [task for task in self._tasks if task[2] < m]


def zb_v(p: int, v: int, m: int) -> Orders:
    """ZB-V (Qi et al. 2023, section 6; 2024): every stage has a chunk on the way down and one on
    the way back.

    Stage s starts with 2 (p − s) − 1 forwards of its first chunk, passes on s microbatches of each,
    and is then never idle: B and W of the returning chunk fill what is left of the warm-up, W's are
    put off at the end. Made for m ≥ 2p − 1; with fewer microbatches it is that order without the
    tasks of those that are not there.
    """
    full = max(m, 2 * p - 1)
    orders = []
    for s in range(p):
        down, back = s, 2 * p - 1 - s
        order = _CountedOrder()
        order.add(2 * (p - s) - 1, (F, down))
        order.add(s, (F, back), (F, down))
        order.add(p - s, (F, back), (B, back), (W, back))
        while order.count[F, back] < full:
            if order.count[F, down] < full:
                order.add(1, (F, down))
            order.add(1, (B, down), (W, down), (F, back), (B, back), (W, back))
        order.add(s, (B, down), (B, back))
        order.add(full - order.count[B, down], (B, down), (W, down))
        for c in (back, down):
            order.add(full - order.count[W, c], (W, c))
        orders.append(order.of_microbatches(m))
    return orders


def dualpipe_v(p: int, v: int, m: int) -> Orders:
    """DualPipe in a V (DeepSeek-V3 2024, section 3.2.1, cut in half as its authors later
    published): one copy of the parameters.

    In the steady state each forward of one chunk is followed by a backward of the other. Made for m
    ≥ 2p; with fewer microbatches it is that order without the tasks of those that are not there.
    """
    full = max(m, 2 * p)
    orders = []
    for s in range(p):
        down, back = s, 2 * p - 1 - s
        order = _CountedOrder()
        add, count = order.add, order.count
        backward = {c: ((B, c), (W, c)) for c in (down, back)}
        add(2 * (p - s - 1), (F, down))
        add(s + 1, (F, down), (F, back))
        add(p - s - 1, *backward[back], (F, back))
        add(full - 2 * p + s + 1, (F, down), *backward[back], (F, back), *backward[down])
        add(p - s - 1, *backward[back], (F, back), *backward[down])
        soon = (s + 1) // 2
        add(soon, *backward[back], *backward[down])
        add(s + 1 - soon, (B, back), (B, down))
        for _ in range(p - s - 1):
            add(1, (W, back if count[W, back] < count[B, back] else down), (B, down))
        for c in (back, down):
            add(full - count[W, c], (W, c))
        orders.append(order.of_microbatches(m))
    return orders


def accumulate(p: int, v: int, m: int) -> Orders:
    """One stage: every microbatch forward through all chunks and back, which is gradient
    accumulation."""
    back = [(op, c) for c in reversed(range(v)) for op in (B, W)]
    return [[(op, c, k) for k in range(m) for op, c in [*((F, c) for c in range(v)), *back]]]


def forward(stage_of: tuple[int, ...], p: int, m: int) -> Orders:
    """Evaluation, an order of units: of the inputs that have arrived a stage takes the one furthest
    through the model, so that none collects inputs."""
    ready: list[list[tuple[int, int]]] = [[] for _ in range(p)]  # heaps of (−unit, microbatch)
    ready[stage_of[0]] = [(0, k) for k in range(m)]
    orders: Orders = [[] for _ in range(p)]
    while any(ready):
        furthest = [(s, *heapq.heappop(heap)) for s, heap in enumerate(ready) if heap]
        for s, minus_unit, k in furthest:
            unit = -minus_unit
            orders[s].append((F, unit, k))
            if unit + 1 < len(stage_of):
                heapq.heappush(ready[stage_of[unit + 1]], (-(unit + 1), k))
    return orders


# --- all of them ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkOrders:
    """The orders of a pipeline's stages, and the stage of each chunk.

    overlapped: the Fs that share a cell with the B that follows in the order
    """

    name: str
    stage_of: tuple[int, ...]
    microbatches: int
    orders: Orders
    overlapped: frozenset[Task] = frozenset()

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.orders)


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """Seconds of F, R, B and W of one microbatch on a whole stage, and those by which F and B are
    shorter in overlapped cells."""

    F: float
    R: float
    B: float
    W: float
    overlap: float = 0.0

    @property
    def all(self) -> float:
        return self.F + self.R + self.B + self.W


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A named schedule: its order, and closed forms for its tables, for p stages, v chunks on each,
    m microbatches. A new schedule is an order and a record in SCHEDULES.

    placement:     a name of PLACEMENTS
    least_repeats, most_repeats: the numbers of chunks on a stage that it is made for; most_repeats
        0: any
    idle:          (p, v, times) → seconds of a step that a stage waits (Narayanan et al. 2021; Qi
                   et al. 2023 and 2024 where B and W are separate ops)
    residuals:     (p, v, m) → chunks whose residuals a stage holds at once, at most
    stashes:       p → chunks whose W is yet to come, at most
    gradients:     (p, m) → arrived gradients that wait for their B
    fused:         every W follows its B at once
    shared_cells:  (p, v, m) → cells that F and B share, on the stage with fewest; 0 where no F is
                   followed by B of another microbatch
    """

    order: Callable[[int, int, int], Orders]
    placement: str
    least_repeats: int
    most_repeats: int
    idle: Callable[[int, int, StageTimes], float]
    residuals: Callable[[int, int, int], int]
    stashes: Callable[[int], int]
    gradients: Callable[[int, int], float] = lambda p, m: 2
    fused: bool = False
    shared_cells: Callable[[int, int, int], int] = lambda p, v, m: 0

    def fits(self, repeats: int) -> bool:
        """True if the schedule is made for this number of chunks on a stage."""
        return self.least_repeats <= repeats <= (self.most_repeats or repeats)

    @property
    def repeats_rule(self) -> str:
        """The numbers of chunks in words, such as "exactly 1 chunk"."""
        exactly = self.least_repeats == self.most_repeats
        return f"{'exactly' if exactly else 'at least'} {counted(self.least_repeats, 'chunk')}"


def _idle_fused(p: int, v: int, t: StageTimes) -> float:
    return (p - 1) * t.all / v


def _idle_in_pairs(p: int, v: int, t: StageTimes) -> float:
    # an R does not wait for the gradient that its B waits for
    return (p - 1) * max(0.0, t.F + t.B - 2 * t.overlap / v) / v


def _idle_filled(delayed: int) -> Callable[[int, int, StageTimes], float]:
    """The closed form of idle time of which `delayed` W's of a microbatch fill a part."""
    return lambda p, v, t: (p - 1) * max(0.0, t.F + t.R + t.B - delayed * t.W) / v


def _idle_dualpipe(p: int, v: int, t: StageTimes) -> float:
    return (p / 2 - 1) * max(0.0, t.all + t.B - 2 * t.W - t.overlap) / v


INTERLEAVED = "interleaved"
ONE_CHUNK = "1f1b"  # for one chunk on a stage, and for one stage
SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(
        gpipe,
        placement="circular",
        least_repeats=1,
        most_repeats=0,
        idle=lambda p, v, t: (p - 1) * t.all,
        residuals=lambda p, v, m: m * v,
        stashes=lambda p: 1,
        gradients=lambda p, m: m,
        fused=True,
    ),
    ONE_CHUNK: Schedule(
        one_f_one_b,
        placement="circular",
        least_repeats=1,
        most_repeats=1,
        idle=_idle_fused,
        residuals=lambda p, v, m: p,
        stashes=lambda p: 1,
        fused=True,
    ),
    INTERLEAVED: Schedule(
        interleaved,
        placement="circular",
        least_repeats=2,
        most_repeats=0,
        idle=_idle_fused,
        residuals=lambda p, v, m: p * v + p - 1,
        stashes=lambda p: 1,
        gradients=lambda p, m: p / 2,
        fused=True,
    ),
    "zb_h1": Schedule(
        zb_h1,
        placement="circular",
        least_repeats=1,
        most_repeats=1,
        idle=_idle_filled(1),
        residuals=lambda p, v, m: p,
        stashes=lambda p: p,
    ),
    "zb_h2": Schedule(
        zb_h2,
        placement="circular",
        least_repeats=1,
        most_repeats=1,
        idle=_idle_filled(2),
        residuals=lambda p, v, m: 2 * p - 1,
        stashes=lambda p: 2 * p - 1,
    ),
    "zb_v": Schedule(
        zb_v,
        placement="v",
        least_repeats=2,
        most_repeats=2,
        idle=_idle_filled(2),
        residuals=lambda p, v, m: 2 * p,
        stashes=lambda p: 2 * p - 1,
    ),
    "dualpipe_v": Schedule(
        dualpipe_v,
        placement="v",
        least_repeats=2,
        most_repeats=2,
        idle=_idle_dualpipe,
        residuals=lambda p, v, m: 2 * p + 1,
        stashes=lambda p: p,
        shared_cells=lambda p, v, m: max(0, 2 * m - 3 * p + 1),
    ),
}
_IN_PAIRS = dataclasses.replace(
    SCHEDULES[INTERLEAVED],
    order=in_pairs,
    idle=_idle_in_pairs,
    residuals=lambda p, v, m: min(v * m, _warm_up(p, v, m, 0) + 1),
    gradients=lambda p, m: 2,
    shared_cells=lambda p, v, m: v * m - _warm_up(p, v, m, 0),
)
# the schedules with overlapped cells: in these, no stage waits for an F or a B when it has the
# other one
OVERLAPPED: dict[str, Schedule] = {
    ONE_CHUNK: dataclasses.replace(_IN_PAIRS, least_repeats=1, most_repeats=1),
    INTERLEAVED: _IN_PAIRS,
    "dualpipe_v": SCHEDULES["dualpipe_v"],
}
CSV = "csv:"  # before the path of a file with a schedule
AUTO = "auto"  # the best table of a search
FUSED = tuple(name for name, schedule in SCHEDULES.items() if schedule.fused)
ZERO_BUBBLE = tuple(
    name
    for name, schedule in SCHEDULES.items()
    if not schedule.fused and schedule.placement == "circular"
)
GROWING = tuple(
    name
    for name, schedule in SCHEDULES.items()
    if schedule.residuals(2, 1, 64) > schedule.residuals(2, 1, 32)
)


def may_overlap(name: str) -> bool:
    """True if the schedule may have overlapped cells: it is one of these, or a file."""
    return name in OVERLAPPED or name.startswith(CSV)


def closed_forms(name: str, overlap: bool = False) -> Schedule:
    """The schedule of this name, or the one with overlapped cells; for `auto` and a file, whose
    tables are not known yet, the one with several chunks of any number. Raises KeyError for another
    name."""
    known = OVERLAPPED if overlap else SCHEDULES
    return known[INTERLEAVED if name == AUTO or name.startswith(CSV) else name]


def named_orders(
    schedule: str, stages: int, repeats: int, microbatches: int, overlap: bool = False
) -> ChunkOrders:
    """The orders of a named schedule; on one stage, those of gradient accumulation. overlap: with
    overlapped cells"""
    known = closed_forms(schedule, overlap and stages > 1)
    order = known.order if stages > 1 else accumulate
    stage_of = PLACEMENTS[known.placement](stages, repeats)
    orders = order(stages, repeats, microbatches)
    overlapped: frozenset[Task] = frozenset()
    if stages > 1 and known.placement == "v" and schedule in OVERLAPPED:
        overlapped = overlapped_forwards(orders)
    elif stages > 1 and overlap:
        overlapped = _in_steady_state(orders, repeats)
    return ChunkOrders(schedule, stage_of, microbatches, orders, overlapped)


def overlapped_forwards(orders: Orders) -> frozenset[Task]:
    """The Fs that the B after them, of another chunk and microbatch, may be overlapped with. On the
    last stage of a V the first of them stands alone: the chunk after its own, on the same stage,
    waits for it (as DualPipeV's authors have it)."""
    overlapped = []
    for s, order in enumerate(orders):
        pairs = [
            task
            for task, following in itertools.pairwise(order)
            if (task[0], following[0]) == (F, B)
            and task[1] != following[1]
            and task[2] != following[2]
        ]
        overlapped += pairs[s == len(orders) - 1 :]
    return frozenset(overlapped)


def _in_steady_state(orders: Orders, v: int) -> frozenset[Task]:
    """The Fs of orders `in_pairs` after the warm-up of each stage, which stand before a B."""
    m = max(k for _, _, k in orders[0]) + 1
    overlapped: list[Task] = []
    for s, order in enumerate(orders):
        forwards = [task for task in order if task[0] == F]
        overlapped += forwards[_warm_up(len(orders), v, m, s) :]
    return frozenset(overlapped)


def fits_repeats(schedule: str, repeats: int) -> bool:
    """True if a schedule is made for this number of chunks on a stage; `auto` and a file are for
    any."""
    return schedule not in SCHEDULES or SCHEDULES[schedule].fits(repeats)


def default_repeats(schedule: str) -> int:
    """The number of chunks on a stage where none is given: the fewest that the schedule is made
    for; 0 for `auto` and a file, which choose."""
    return SCHEDULES[schedule].least_repeats if schedule in SCHEDULES else 0
