"""The order of each stage's ops, a small function for each schedule.

    order(p, v, m) → for each stage its tasks (op, chunk, microbatch), chunks in model order

The letters are those of the papers: p stages, v chunks on a stage, m microbatches; s is a stage, c
a chunk, k a microbatch. Comments write F of chunk 2 on microbatch 0 as F2.0. The package's
docstring has each schedule's figures. An order says nothing about ticks: packing.py gives tasks
theirs. No JAX here.
"""

import collections
import heapq
import itertools

from jaxtrain.schedule.table import Op

# op, chunk or unit, microbatch: no table.Cell, since a search makes millions of them
Task = tuple[int, int, int]
Orders = list[list[Task]]
F, B, W = int(Op.F), int(Op.B), int(Op.W)


# --- circular placement ---------------------------------------------------------------------------


def gpipe(p: int, v: int, m: int) -> Orders:
    """All forwards, then all backwards (Huang et al. 2019); with more chunks the forwards go round
    the circle chunk by chunk."""
    # p = v = m = 2, stage 0: F0.0 F0.1 F2.0 F2.1  B2.0 W2.0 B2.1 W2.1 B0.0 W0.0 B0.1 W0.1
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

    Stage s holds warm-up plus W's put off. A bound beyond p lengthens the warm-up first; the stages
    further down, which need no longer warm-up, put off more W's.
    """
    # p = 4, bound = 5, that is one more than ZB-H1 holds: the warm-ups are 5 4 3 1 forwards, and
    # W is 0 1 2 4 microbatches behind B.
    orders = []
    for s in range(p):
        ahead = min(p - s + max(0, min(bound - p, p - 1 - s)), bound)
        orders.append(_steady(s, m, ahead, min(bound - ahead, 2 * s)))
    return orders


def _steady(s: int, m: int, warmup: int, behind: int) -> list[Task]:
    """`warmup` forwards, then B, W, F in turn, W being `behind` microbatches behind B."""
    ahead = min(warmup, m)
    # m = 4, warmup = 2, behind = 1: F0 F1  B0 F2  B1 W0 F3  B2 W1  B3 W2  W3. The W's that are
    # behind come last, when the stage has nothing else to do.
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
    group, and more idle time. in_pairs: an F after the warm-up comes before a B and W, and not
    after them
    """
    # p = v = 2, m = 4, stage 0 (chunks 0 and 2), whose warm-up has five forwards:
    #             F0.0 F0.1 F2.0 F2.1 F0.2  B2.0 W2.0 F0.3  B2.1 W2.1 F2.2  B0.0 W0.0 F2.3 …
    #   in pairs  F0.0 F0.1 F2.0 F2.1 F0.2  F0.3 B2.0 W2.0  F2.2 B2.1 W2.1  F2.3 B0.0 W0.0 …
    # `forward` and `backward` number the chunks of a stage 0 and 1; stage s has chunk c p + s.
    groups = _groups(p, m)
    forward = [(c, k) for group in groups for c in range(v) for k in group]
    backward = [(c, k) for group in groups for c in reversed(range(v)) for k in group]
    orders = []
    for s in range(p):
        ahead = warm_up(p, v, m, s)
        tasks: list[Task] = [(F, c * p + s, k) for c, k in forward[:ahead]]
        steady = itertools.zip_longest(backward, forward[ahead:])
        for (c, k), following in steady:
            next_f = [(F, following[0] * p + s, following[1])] if following else []
            done = [(B, c * p + s, k), (W, c * p + s, k)]
            tasks += next_f + done if in_pairs else done + next_f
        orders.append(tasks)
    return orders


def _groups(p: int, m: int) -> list[range]:
    """The groups of microbatches of interleaved 1F1B."""
    # p = 4: of 10 microbatches 0 … 3 and 4 … 9, of 3 microbatches 0 … 2
    count = max(1, m // p)
    return [range(i * p, (i + 1) * p if i < count - 1 else m) for i in range(count)]


def warm_up(p: int, v: int, m: int, s: int) -> int:
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

    # An empty order, after add(2, (F, 0)) and add(1, (F, 3), (B, 3)): F0.0 F0.1 F3.0 B3.0, and
    # after a further add(1, (F, 0)): … F0.2. The authors give their orders in this form.
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
    # p = 2, m = 4, stage 0 (chunks 0 and 3), where a steady round is B0 W0 F3 B3 W3 after an F0:
    #   F0.0 F0.1 F0.2  F3.0 B3.0 W3.0  F3.1 B3.1 W3.1  F0.3 B0.0 W0.0 F3.2 B3.2 W3.2  …
    full = max(m, 2 * p - 1)
    orders = []
    for s in range(p):
        down, back = s, 2 * p - 1 - s
        order = _CountedOrder()
        order.add(2 * (p - s) - 1, (F, down))
        order.add(s, (F, back), (F, down))
        order.add(p - s, (F, back), (B, back), (W, back))
        # the steady state, until all forwards are done
        while order.count[F, back] < full:
            if order.count[F, down] < full:
                order.add(1, (F, down))
            order.add(1, (B, down), (W, down), (F, back), (B, back), (W, back))
        # The end: the stages before wait for these Bs, and nobody for a W.
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
    # p = 2, m = 4, stage 0 (chunks 0 and 3); F0.3 and F3.2 stand each before a B of another chunk
    # and microbatch, with which it may share a cell:
    #   F0.0 F0.1  F0.2 F3.0  B3.0 W3.0 F3.1  F0.3 B3.1 W3.1 F3.2 B0.0 W0.0  B3.2 W3.2 …
    full = max(m, 2 * p)
    orders = []
    for s in range(p):
        down, back = s, 2 * p - 1 - s
        order = _CountedOrder()
        add, count = order.add, order.count
        backward = {c: ((B, c), (W, c)) for c in (down, back)}
        # The authors' eight steps. Warm-up: F down, then both forwards in turn, then the returning
        # chunk's backward too. Steady state. Cool-down: no F down, no F, W's put off, W's alone.
        add(2 * (p - s - 1), (F, down))
        add(s + 1, (F, down), (F, back))
        add(p - s - 1, *backward[back], (F, back))
        add(full - 2 * p + s + 1, (F, down), *backward[back], (F, back), *backward[down])
        add(p - s - 1, *backward[back], (F, back), *backward[down])
        # Half of the last backwards have their W at once, the others put it off, so that the
        # gradients go up the stages sooner.
        with_w = (s + 1) // 2
        add(with_w, *backward[back], *backward[down])
        add(s + 1 - with_w, (B, back), (B, down))
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
    # Units 0 … 3 on stages 0 1 0 1, 3 microbatches, stage 0: F0.0 F0.1 F2.0 F2.1 F0.2 F2.2. In its
    # third turn it has F0.2 and F2.0 to choose from, and takes F2.0.
    ready: list[list[tuple[int, int]]] = [[] for _ in range(p)]  # heaps of (−unit, microbatch)
    ready[stage_of[0]] = [(0, k) for k in range(m)]
    orders: Orders = [[] for _ in range(p)]
    while any(ready):
        # All stages choose before any output is passed on: it can be read in the next turn.
        furthest = [(s, *heapq.heappop(heap)) for s, heap in enumerate(ready) if heap]
        for s, minus_unit, k in furthest:
            unit = -minus_unit
            orders[s].append((F, unit, k))
            if unit + 1 < len(stage_of):
                heapq.heappush(ready[stage_of[unit + 1]], (-(unit + 1), k))
    return orders
