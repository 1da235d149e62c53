"""The named schedules, and what is known of each without making its table.

A schedule is the order of each stage's ops, a function of stage_orders.py, with closed forms for
the figures of its tables (`Schedule`). Begin with `SCHEDULES` and `named_orders`.

The letters are those of the papers: p stages, v chunks on a stage, m microbatches. Chunks are
placed in a circle (chunk c on stage c mod p) or, for `zb_v` and `dualpipe_v`, in a V: down the
stages and back up, so that the last chunk is on stage 0, and a message stays on its stage where the
V turns. The figures are for F = B = W = 1 and messages that take no time. The peak is the largest
number of chunks whose residuals a stage holds at once, in tables with late permutes:

              placement   idle time of the whole step                peak
    gpipe     circular    2 (p − 1)                                  m v
    1f1b      circular    2 (p − 1)                                  p
    interleaved circular  2 (p − 1) chunks, m ≥ p                    p v + p − 1, p divides m
    zb_h1     circular    p − 1, m ≥ p                               p
    zb_h2     circular    p − 1, none between, m ≥ 2 p − 1           2 p − 1
    zb_v      V           p − 1 chunks, none between, m ≥ 2 p        2 p
    dualpipe_v V          2 (p − 1) chunks, m ≥ 2 p                  2 p + 1

No JAX here.
"""

import dataclasses
import itertools
from collections.abc import Callable

from jaxtrain.schedule.orders.stage_orders import (
    B,
    F,
    Orders,
    Task,
    accumulate,
    dualpipe_v,
    gpipe,
    in_pairs,
    interleaved,
    one_f_one_b,
    warm_up,
    zb_h1,
    zb_h2,
    zb_v,
)
from jaxtrain.schedule.placement import PLACEMENTS
from jaxtrain.schedule.table import counted


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
    """Seconds of F, R, B and W of one microbatch on all layers of a stage, and those by which F and
    B are shorter in overlapped cells."""

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

    # Closed forms let the planner compare thousands of layouts without a table for each. Tests hold
    # them against the tables (tests/schedule/test_orders.py).
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


# A stage idles while its part of the pipeline fills and drains. In all of these forms p − 1 is the
# number of other stages for which it waits, and 1 / v the part of a stage's work that one wait
# lasts: a chunk's. Example, `interleaved` with p = 4, v = 2, F = B = W = 1, R = 0: 3 · 3 / 2 = 4.5.


def _idle_fused(p: int, v: int, t: StageTimes) -> float:
    return (p - 1) * t.all / v


def _idle_filled(delayed: int) -> Callable[[int, int, StageTimes], float]:
    """The closed form of idle time of which `delayed` W's of a microbatch fill a part."""
    # ZB-H1 delays one W for each stage behind, and waits for F + R + B − W; ZB-H2 and ZB-V delay
    # two, and wait for nothing where F + R + B = 2 W.
    return lambda p, v, t: (p - 1) * max(0.0, t.F + t.R + t.B - delayed * t.W) / v


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
        idle=lambda p, v, t: (p / 2 - 1) * max(0.0, t.all + t.B - 2 * t.W - t.overlap) / v,
        residuals=lambda p, v, m: 2 * p + 1,
        stashes=lambda p: p,
        shared_cells=lambda p, v, m: max(0, 2 * m - 3 * p + 1),
    ),
}
# interleaved 1F1B, and with one chunk 1F1B, whose steady state has an F before each B
_IN_PAIRS = dataclasses.replace(
    SCHEDULES[INTERLEAVED],
    order=in_pairs,
    # an R does not wait for the gradient that its B waits for
    idle=lambda p, v, t: (p - 1) * max(0.0, t.F + t.B - 2 * t.overlap / v) / v,
    residuals=lambda p, v, m: min(v * m, warm_up(p, v, m, 0) + 1),
    gradients=lambda p, m: 2,
    shared_cells=lambda p, v, m: v * m - warm_up(p, v, m, 0),
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
# Groups of schedules by what their records say, so that a new schedule joins them by itself.
FUSED = tuple(name for name, schedule in SCHEDULES.items() if schedule.fused)
ZERO_BUBBLE = tuple(
    name
    for name, schedule in SCHEDULES.items()
    if not schedule.fused and schedule.placement == "circular"
)
# those whose residuals grow with the microbatches
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
    # A search or a file with several chunks is closest to interleaved 1F1B; the planner only needs
    # a figure to begin with.
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
    # In a V two chunks of a stage alternate by themselves, and cells can be overlapped without
    # another order; whether they are is the packing's choice (`TableSpec.overlap`). Other
    # schedules have them only in the orders made for it.
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
    # of "… F0.3 B3.1 W3.1 F3.2 B0.0": F0.3 and F3.2
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
    # p = v = 2, m = 4, stage 0: after the warm-up's five forwards, F0.3, F2.2 and F2.3
    m = max(k for _, _, k in orders[0]) + 1
    overlapped: list[Task] = []
    for s, order in enumerate(orders):
        forwards = [task for task in order if task[0] == F]
        overlapped += forwards[warm_up(len(orders), v, m, s) :]
    return frozenset(overlapped)


def fits_repeats(schedule: str, repeats: int) -> bool:
    """True if a schedule is made for this number of chunks on a stage; `auto` and a file are for
    any."""
    return schedule not in SCHEDULES or SCHEDULES[schedule].fits(repeats)


def default_repeats(schedule: str) -> int:
    """The number of chunks on a stage where none is given: the fewest that the schedule is made
    for; 0 for `auto` and a file, which choose."""
    return SCHEDULES[schedule].least_repeats if schedule in SCHEDULES else 0
