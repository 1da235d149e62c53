"""Orders of ops by list scheduling: stages on their own clocks, each taking the best op that is there, within a bound of stashes."""

from jaxtrain.pipeline.orders import Orders
from jaxtrain.pipeline.simulate import Times
from jaxtrain.pipeline.table import Op, directions, local_index, units_of

Choice = tuple[float, int, int]  # when it could begin, op, chunk


def list_schedule(
    place: tuple[int, ...], stages: int, microbatches: int, bound: int, times: Times, patience: float, forward_first: bool
) -> Orders | None:
    """Each stage's ops on chunks, in order; None if the bound leaves a stage nothing to do.

    times:         of one chunk's ops (F, B, W) and of a message
    bound:         the most stashes on a stage, from F to the end of W; the chunks that come later on a stage have room kept for them
    patience:      how long, in W's, a stage with a W to do waits for a B or F that is on its way
    forward_first: whether F and B take turns where both are there; otherwise B goes first. Of several B's the one of the earliest
                   microbatch is taken, of several F's the one furthest through the model.
    """
    state = _State(place, stages, microbatches, bound, times)
    ready = [state.choices(s) for s in range(stages)]
    for _ in range(3 * len(place) * microbatches):
        begin, s = min(((min(choices)[0], s) for s, choices in enumerate(ready) if choices), default=(0.0, -1))
        if s < 0:
            return None
        choices = ready[s]
        soon = [choice for choice in choices if choice[0] <= begin + patience * times.W]
        backward = min((c for c in soon if c[1] == Op.B), key=lambda c: (state.next[Op.B][c[2]], -c[2]), default=None)
        forward = max((c for c in soon if c[1] == Op.F), key=lambda c: c[2], default=None)
        turn = forward_first and state.orders[s][-1:] and state.orders[s][-1][0] != Op.F
        taken = (forward if turn else None) or backward or forward or next(c for c in choices if c[1] == Op.W)
        for changed in state.do(s, taken):
            ready[changed] = state.choices(changed)
    return state.orders


class _State:
    """What has been done, and when."""

    def __init__(self, place: tuple[int, ...], stages: int, microbatches: int, bound: int, times: Times):
        self.place, self.m, self.bound, self.message = place, microbatches, bound, times.message
        self.ways, self.own, self.local = directions(place, stages), units_of(place, stages), local_index(place)
        self.duration = {Op.F: times.F, Op.B: times.B, Op.W: times.W}
        self.next = {op: [0] * len(place) for op in (Op.F, Op.B)}  # the next microbatch of each op and chunk
        self.came: dict[tuple[int, int, int], float] = {}  # (op, chunk, microbatch) → when what it needs is there
        self.held, self.clock = [0] * stages, [0.0] * stages
        self.weights: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
        self.orders: Orders = [[] for _ in range(stages)]

    def choices(self, s: int) -> list[Choice]:
        """What a stage could do next, each from the time at which it could."""
        found: list[Choice] = [(self.clock[s], Op.W, self.weights[s][0][0])] if self.weights[s] else []
        for g in self.own[s]:
            room = self.bound - (len(self.own[s]) - 1 - self.local[g])
            for op in (Op.F, Op.B):
                k = self.next[op][g]
                if k == self.m or (op == Op.F and self.held[s] >= room):
                    continue
                came = 0.0 if (op, g) == (Op.F, 0) else self.came.get((op, g, k))
                if came is not None:
                    found.append((max(came, self.clock[s]), op, g))
        return found

    def do(self, s: int, choice: Choice) -> set[int]:
        """Runs an op on a stage; the stages whose choices change."""
        begin, op, g = choice
        end = self.clock[s] = begin + self.duration[Op(op)]
        changed = {s}
        if op == Op.W:
            g, k = self.weights[s].pop(0)
            self.held[s] -= 1
        else:
            k = self.next[Op(op)][g]
            self.next[Op(op)][g] += 1
            last = len(self.place) - 1
            if op == Op.F:
                self.held[s] += 1
                after = (Op.F, g + 1, k) if g < last else (Op.B, g, k)
            else:
                self.weights[s].append((g, k))
                after = (Op.B, g - 1, k)
            moves = self.ways[g] if op == Op.F else self.ways[g - 1]
            self.came[after] = end + (self.message if moves else 0.0)
            changed.add(self.place[after[1]])
        self.orders[s].append((op, g, k))
        return changed
