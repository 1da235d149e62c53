"""Orders of ops by list scheduling: stages on their own clocks, each taking the best op that is there, within a bound of stashes."""

import collections

from jaxtrain.schedule.orders import B, F, Orders, W
from jaxtrain.schedule.simulate import Times
from jaxtrain.schedule.table import directions, local_index, units_of

NEVER = float("inf")
Choice = tuple[float, int, int]  # when it could begin, op, chunk


def list_schedule(
    stage_of: tuple[int, ...], stages: int, microbatches: int, bound: int, times: Times, patience: float, forward_first: bool
) -> Orders | None:
    """Each stage's ops on chunks, in order; None if the bound leaves a stage nothing to do.

    times:         of one chunk's ops (F, B, W) and of a message
    bound:         the most stashes on a stage, from F to the end of W; the chunks that come later on a stage have room kept for them
    patience:      how long, in W's, a stage with a W to do waits for a B or F that is on its way
    forward_first: whether F and B take turns where both are there; otherwise B goes first. Of several B's the one of the earliest
                   microbatch is taken, of several F's the one furthest through the model.
    """
    state = _State(stage_of, stages, microbatches, bound, times)
    wait, last_op = patience * times.W, [F] * stages
    for _ in range(3 * len(stage_of) * microbatches):
        begin = min(state.begin)
        if begin == NEVER:
            return None
        s = state.begin.index(begin)
        forward = backward = rest = None
        for choice in state.choices[s]:
            if choice[0] > begin + wait:
                continue
            _, op, g = choice
            if op == F:
                forward = choice if forward is None or g > forward[2] else forward
            elif op == B:
                # Of B's of one microbatch, the chunk furthest through the model.
                backward = choice if backward is None or state.next_b[g] <= state.next_b[backward[2]] else backward
            else:
                rest = choice
        turn = forward_first and last_op[s] != F
        taken = (forward if turn else None) or backward or forward or rest
        assert taken is not None  # the choice that begins first is one of them
        last_op[s] = taken[1]
        state.do(s, taken)
    return state.orders


class _State:
    """What has been done, and when."""

    def __init__(self, stage_of: tuple[int, ...], stages: int, microbatches: int, bound: int, times: Times):
        self.stage_of, self.m, self.message, self.last = stage_of, microbatches, times.message, len(stage_of) - 1
        self.ways, self.own = directions(stage_of, stages), units_of(stage_of, stages)
        # Of each chunk, the stashes that its stage may hold before another F of it.
        self.room = [bound - (len(self.own[s]) - 1 - index) for s, index in zip(stage_of, local_index(stage_of), strict=True)]
        self.time_f, self.time_b, self.time_w = times.F, times.B, times.W
        # The next microbatch of each chunk; and, by microbatch, when what F and B need is there: it comes in order.
        self.next_f, self.next_b = [0] * len(stage_of), [0] * len(stage_of)
        self.came_f: list[list[float]] = [[0.0] * microbatches, *([] for _ in stage_of[1:])]
        self.came_b: list[list[float]] = [[] for _ in stage_of]
        self.held, self.clock = [0] * stages, [0.0] * stages
        self.weights: list[collections.deque[tuple[int, int]]] = [collections.deque() for _ in range(stages)]
        self.orders: Orders = [[] for _ in range(stages)]
        self.choices: list[list[Choice]] = [[] for _ in range(stages)]  # what each stage could do next
        self.begin = [NEVER] * stages  # and when it could do something
        self.look(stage_of[0])

    def look(self, s: int) -> None:
        """Finds a stage's choices, each from the time at which it could begin."""
        clock, held = self.clock[s], self.held[s]
        found: list[Choice] = [(clock, W, self.weights[s][0][0])] if self.weights[s] else []
        begin = clock if found else NEVER
        for g in self.own[s]:
            for op, came, k in ((F, self.came_f[g], self.next_f[g]), (B, self.came_b[g], self.next_b[g])):
                if k < len(came) and (op == B or held < self.room[g]):
                    at = came[k]
                    at = at if at > clock else clock
                    found.append((at, op, g))
                    begin = at if at < begin else begin
        self.choices[s], self.begin[s] = found, begin

    def do(self, s: int, choice: Choice) -> None:
        """Runs an op on a stage, and looks again at the stages whose choices change."""
        begin, op, g = choice
        if op == W:
            g, k = self.weights[s].popleft()
            self.held[s] -= 1
            self.clock[s] = begin + self.time_w
        elif op == F:
            k = self.next_f[g]
            self.next_f[g] += 1
            self.held[s] += 1
            end = self.clock[s] = begin + self.time_f
            to, came = (g + 1, self.came_f) if g < self.last else (g, self.came_b)
            came[to].append(end + (self.message if self.ways[g] else 0.0))
            if self.stage_of[to] != s:
                self.look(self.stage_of[to])
        else:
            k = self.next_b[g]
            self.next_b[g] += 1
            self.weights[s].append((g, k))
            end = self.clock[s] = begin + self.time_b
            if g > 0:
                self.came_b[g - 1].append(end + (self.message if self.ways[g - 1] else 0.0))
                if self.stage_of[g - 1] != s:
                    self.look(self.stage_of[g - 1])
        self.orders[s].append((op, g, k))
        self.look(s)
