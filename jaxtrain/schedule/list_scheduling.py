"""Orders of ops by list scheduling: stages on their own clocks, each taking the best op that it can
begin, within a bound on residuals."""

import collections

from jaxtrain.schedule.clock import Times
from jaxtrain.schedule.orders import B, F, Orders, W
from jaxtrain.schedule.table import directions, local_unit_of, units_of

NO_TIME = float("inf")
# When it could begin, op, chunk. Choices are made and compared millions of times: they stay tuples.
Choice = tuple[float, int, int]


def list_schedule(
    stage_of: tuple[int, ...],
    stages: int,
    microbatches: int,
    bound: int,
    times: Times,
    patience: float,
    forward_first: bool,
) -> Orders | None:
    """Each stage's ops on chunks, in order; None if the bound leaves a stage nothing to do.

    stage_of:      of each chunk
    times:         of one chunk's ops (F, B, W) and of a message
    bound:         the most chunks' residuals on a stage, from F to the end of W; the chunks that
                   come later on a stage have room kept for them
    patience:      how long, in W's, a stage with a W to do waits for a B or F that is on its way
    forward_first: whether F and B take turns where both can begin; otherwise B goes first. Of
                   several B's the one of the earliest microbatch is taken, of several F's the one
                   furthest through the model.
    """
    state = _State(stage_of, stages, microbatches, bound, times)
    wait, last_op = patience * times.W, [F] * stages
    for _ in range(3 * len(stage_of) * microbatches):
        begin = min(state.begin)
        if begin == NO_TIME:
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
        turn = forward_first and last_op[stage] != F
        taken = (forward if turn else None) or backward or forward or weights
        assert taken is not None  # the choice that begins first is one of them
        last_op[stage] = taken[1]
        state.do(stage, taken)
    return state.orders


class _State:
    """What has been done, and when."""

    def __init__(
        self, stage_of: tuple[int, ...], stages: int, microbatches: int, bound: int, times: Times
    ):
        chunks = len(stage_of)
        self.stage_of, self.last, self.message = stage_of, chunks - 1, times.message
        self.ways, self.chunks_of = directions(stage_of, stages), units_of(stage_of, stages)
        # Of each chunk, the residuals that its stage may hold before another F of it.
        local = local_unit_of(stage_of)
        self.room = [
            bound - (len(self.chunks_of[stage]) - 1 - index)
            for stage, index in zip(stage_of, local, strict=True)
        ]
        self.time_f, self.time_b, self.time_w = times.F, times.B, times.W
        # The next microbatch of each chunk; and, by microbatch, when what F and B need can be read:
        # it comes in order.
        self.next_f, self.next_b = [0] * chunks, [0] * chunks
        self.came_f: list[list[float]] = [[0.0] * microbatches, *([] for _ in stage_of[1:])]
        self.came_b: list[list[float]] = [[] for _ in stage_of]
        self.held, self.clock = [0] * stages, [0.0] * stages
        # (chunk, microbatch)
        self.weights: list[collections.deque[tuple[int, int]]] = [
            collections.deque() for _ in range(stages)
        ]
        self.orders: Orders = [[] for _ in range(stages)]
        # what each stage could do next
        self.choices: list[list[Choice]] = [[] for _ in range(stages)]
        self.begin = [NO_TIME] * stages  # and when it could do something
        self.look(stage_of[0])

    def look(self, stage: int) -> None:
        """Finds a stage's choices, each from the time at which it could begin."""
        clock, held = self.clock[stage], self.held[stage]
        choices: list[Choice] = (
            [(clock, W, self.weights[stage][0][0])] if self.weights[stage] else []
        )
        earliest = clock if choices else NO_TIME
        for chunk in self.chunks_of[stage]:
            for op, came, microbatch in (
                (F, self.came_f[chunk], self.next_f[chunk]),
                (B, self.came_b[chunk], self.next_b[chunk]),
            ):
                if microbatch < len(came) and (op == B or held < self.room[chunk]):
                    begin = came[microbatch]
                    begin = begin if begin > clock else clock
                    choices.append((begin, op, chunk))
                    earliest = begin if begin < earliest else earliest
        self.choices[stage], self.begin[stage] = choices, earliest

    def do(self, stage: int, choice: Choice) -> None:
        """Runs an op on a stage, and looks again at the stages whose choices change."""
        begin, op, chunk = choice
        if op == W:
            chunk, microbatch = self.weights[stage].popleft()
            self.held[stage] -= 1
            self.clock[stage] = begin + self.time_w
        elif op == F:
            microbatch = self.next_f[chunk]
            self.next_f[chunk] += 1
            self.held[stage] += 1
            end = self.clock[stage] = begin + self.time_f
            reader, came = (chunk + 1, self.came_f) if chunk < self.last else (chunk, self.came_b)
            came[reader].append(end + (self.message if self.ways[chunk] else 0.0))
            if self.stage_of[reader] != stage:
                self.look(self.stage_of[reader])
        else:
            microbatch = self.next_b[chunk]
            self.next_b[chunk] += 1
            self.weights[stage].append((chunk, microbatch))
            end = self.clock[stage] = begin + self.time_b
            if chunk > 0:
                self.came_b[chunk - 1].append(end + (self.message if self.ways[chunk - 1] else 0.0))
                if self.stage_of[chunk - 1] != stage:
                    self.look(self.stage_of[chunk - 1])
        self.orders[stage].append((op, chunk, microbatch))
        self.look(stage)
