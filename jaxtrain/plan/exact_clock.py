"""A predicted step by the table that training would use: how often each op runs, and the exact clock. No jax.

The closed forms know no R that a table leaves out, no permutes, no shares of uneven stages and no messages that come late; the table and
its coupled clock (schedule/coupled_clock.py) do. What stands outside the table, sums over data and the optimizer, is as the closed forms
have it.

    devices of their own      the ops of the busiest stage, and what it waits by the clock
    devices that share cores  the ops of all stages, for what one leaves the others use. They wait where the clock, by which one that is
                              alone is faster, takes longer than all work on all cores
"""

import dataclasses
import functools

import numpy as np

from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.config.pipeline_setup import make_setup, times_of
from jaxtrain.config.work import OURS
from jaxtrain.costs.collectives import STAGE
from jaxtrain.costs.step_time import BUBBLE, Parts, Work
from jaxtrain.plan.prediction import Prediction
from jaxtrain.plan.tables import extrapolated, part_of, with_op_times
from jaxtrain.schedule.clock import Times
from jaxtrain.schedule.columns import permutes
from jaxtrain.schedule.coupled_clock import walk
from jaxtrain.schedule.orders import AUTO
from jaxtrain.schedule.table import Op, Permute, peak_residuals

OPS = (Op.F, Op.R, Op.B, Op.W)
EARLY_PASSES = 10.0  # over a message that goes beside its tick's ops: five copies by XLA's CPU backend, as read in its programs


@dataclasses.dataclass(frozen=True)
class Clocked:
    """A step by its table.

    time:      its parts; the bubble is what the busiest stage waits
    in_flight: the most microbatches whose activations a stage holds
    """

    time: Parts
    in_flight: float


@dataclasses.dataclass(frozen=True)
class _Counts:
    """What a table has.

    seconds: by its coupled clock
    ops:     [ops, stages] of each of OPS and each stage, in those of a whole stage
    heads:   [stages] in whole ones
    sends:   messages of a device
    early:   those of them that go beside their tick's ops
    """

    seconds: float
    ops: np.ndarray
    heads: np.ndarray
    sends: float
    early: float

    def __add__(self, other: "_Counts") -> "_Counts":
        return _Counts(
            self.seconds + other.seconds, self.ops + other.ops, self.heads + other.heads, self.sends + other.sends, self.early + other.early
        )

    def __sub__(self, other: "_Counts") -> "_Counts":
        return self + other * -1.0

    def __mul__(self, times: float) -> "_Counts":
        return _Counts(times * self.seconds, times * self.ops, times * self.heads, times * self.sends, times * self.early)


def clocked(prediction: Prediction) -> Clocked | None:
    """Step time simulated on the schedule's table; None with one stage, which has no table.

    A step with very many microbatches is extrapolated linearly from two shorter ones. Raises ConfigError for a
    schedule that is not made for these numbers.
    """
    work = prediction.work
    layout = work.layout
    if layout.stage == 1:
        return None
    config = with_op_times(prediction.config, work)
    times = times_of(cfg.replace(config, {"pipeline.times": work.op_times()}), layout.stage)
    table = make_setup(part_of(config)).table
    shorter = functools.partial(_of_a_part, work) if config.pipeline.schedule == AUTO else None
    counts = extrapolated(config, lambda part: _counts(part, times), shorter)
    shared = work.hardware.alone > 1
    busy, waits = _of_shared_cores(work, counts) if shared else _of_the_busiest(work, counts)
    sums = work.end_collectives(table.vocabulary == "parallel") * layout.microbatches
    beside = Parts({}, {} if shared else {part: s for part, s in prediction.time.hidden.items() if part == STAGE})
    time = busy + sums + beside + Parts({BUBBLE: waits}) + work.around(busy, times.F, times.B + times.W)
    return Clocked(time, max(peak_residuals(table)) / max(1, layout.repeats))


def exactly(prediction: Prediction) -> tuple[Prediction, Clocked | None]:
    """(the prediction with its step by the table, where our own program runs one; what the table says)."""
    clock = clocked(prediction) if prediction.work.program.name == OURS else None
    return dataclasses.replace(prediction, time=clock.time) if clock else prediction, clock


# --- what the table counts -----------------------------------------------------------------------------------------------------------


def _of_a_part(work: Work, counts: _Counts, part: float) -> _Counts:
    """What a step of `auto` with this part of the microbatches would have, if the busiest stage never waits in between: the table that is
    best for it may be one of another order."""
    busy = max(parts.seconds for parts in _stages(work, counts, dense=False))
    return dataclasses.replace(counts * part, seconds=counts.seconds - (1 - part) * busy)


def _counts(config: Config, times: Times) -> _Counts:
    """Counts of a step whose ops take these times."""
    setup = make_setup(config)
    table, shares = setup.table, np.array([*setup.shares, 0.0])
    ops = np.array([np.where(table.op == op, shares[table.unit], 0.0).sum(0) for op in OPS])
    heads = np.full(table.stages, 1 / table.stages) if table.vocabulary == "parallel" else np.arange(table.stages) == table.stage_of[-1]
    early, late = (len(permutes(table)) * int((table.permute == when).sum()) for when in (Permute.EARLY, Permute.LATE))
    return _Counts(walk(table, times, setup.shares), ops, table.microbatches * heads, early + late, early)


def _stages(work: Work, counts: _Counts, dense: bool = True) -> list[Parts]:
    """What each stage is busy with. dense: with the layers before the first unit."""
    ops, head = work.ops(), work.head()
    stages = []
    for stage, heads in enumerate(counts.heads.tolist()):
        busy = head * heads
        for op, times in zip(OPS, counts.ops.tolist(), strict=True):
            busy += ops[op.name] * times[stage]
        stages.append(busy)
    if dense:
        stages[0] += work.dense_layers() * work.layout.microbatches
    return stages


def _of_the_busiest(work: Work, counts: _Counts) -> tuple[Parts, float]:
    """(what the busiest stage is busy with, seconds that it waits), of devices that have cores of their own."""
    busy = max(_stages(work, counts), key=lambda parts: parts.seconds)
    return busy, max(0.0, counts.seconds - busy.seconds)


def _of_shared_cores(work: Work, counts: _Counts) -> tuple[Parts, float]:
    """(what the cores are busy with, seconds that they wait): a mean over the stages, with all messages, beside which nothing else runs."""
    copied = EARLY_PASSES * work.message_bytes() / work.hardware.streaming
    busy = Parts({STAGE: work.message() * counts.sends + copied * counts.early})
    for parts in (stages := _stages(work, counts)):
        busy += parts * (1 / len(stages))
    return busy, work.hardware.waited(busy.seconds, max(0.0, counts.seconds - busy.seconds))
