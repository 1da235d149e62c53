"""The prediction of a step, from closed forms and from the table that training would use. No jax.

    predict    time by the closed forms of costs/, memory with the slots of the table
    exactly    time by the table: how often each op runs, and its coupled clock
               (schedule/coupled_clock.py), which know what closed forms do not: R that a table leaves
               out, permutes, shares of uneven stages, messages that come late. Sums over data and
               the optimizer stand outside the table, as the closed forms have them.

Devices of their own take as long as the busiest stage, and what it waits by the clock. Devices that
share cores run the ops of all stages, for what one leaves the others use; they wait where the clock,
by which a device on its own is faster, takes longer than all work on all cores.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.config.pipeline_setup import make_setup, times_of
from jaxtrain.config.work import OURS, milliseconds, work_of
from jaxtrain.costs.collectives import STAGE
from jaxtrain.costs.hardware import GIB, Hardware
from jaxtrain.costs.memory import Memory, Slots, memory
from jaxtrain.costs.step_time import BUBBLE, Parts, Work
from jaxtrain.plan import layout_flag
from jaxtrain.schedule.clock import Times
from jaxtrain.schedule.columns import permutes
from jaxtrain.schedule.coupled_clock import walk
from jaxtrain.schedule.orders import AUTO, GROWING, SCHEDULES, ZERO_BUBBLE
from jaxtrain.schedule.table import Op, Permute, Table, peak_residuals

DAY = 86400.0
OPS = (Op.F, Op.R, Op.B, Op.W)
EARLY_PASSES = 10.0  # over a message that goes beside its tick's ops: five copies by XLA's CPU backend, as read in its programs

CELLS = 2**12  # stages · chunks on a stage · microbatches of a table that is made in a second; of longer steps a part is
AUTO_CELLS = 2**8  # the same of `auto`, which tries some fifty tables
LEAST_ROUNDS, AUTO_ROUNDS = 4, 2  # microbatches of such a part, in those of a pipeline that is filled
SHORTENED = frozenset({*SCHEDULES, AUTO}.difference(GROWING))  # all but a file's and those whose slots grow with the microbatches


# --- the prediction ---


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step of `config`, which is resolved, and what it takes on the device that works most and on the fullest one.

    tokens: of the run, None if not known
    """

    config: Config
    work: Work
    time: Parts
    memory: Memory
    tokens: float | None = None

    @property
    def devices(self) -> int:
        return self.work.layout.devices

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def fits(self) -> bool:
        return self.memory.bytes <= self.work.hardware.memory

    @property
    def tokens_per_s(self) -> float:
        return self.work.layout.batch * self.work.model.sequence / self.seconds

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the step in which a device waits for others."""
        return self.time.exposed.get(BUBBLE, 0.0) / self.seconds

    @property
    def model_flops_per_s(self) -> float:
        """Model FLOP/s of a device. Attention is counted as the framework's published rates do; ours counts it causally."""
        return self.work.model_flops() / self.seconds / self.devices

    @property
    def hardware_flops_per_s(self) -> float:
        """FLOP/s of a device with recomputation counted."""
        return self.work.hardware_flops() / self.seconds / self.devices

    def figures(self) -> dict[str, Any]:
        """What --json prints."""
        peak, bubble_s = self.work.hardware.peak(self.work.dtype), self.time.exposed.get(BUBBLE, 0.0)
        return step_figures(self.config, self.work, self.seconds, peak, self.memory.bytes, self.fits, bubble_s, self.tokens)


def step_figures(
    config: Config, work: Work, seconds: float, peak: float, held: float, fits: bool, bubble_s: float, tokens: float | None
) -> dict[str, Any]:
    """What --json prints of a step of so many seconds, by devices whose peak is the mean of all. held: bytes of the fullest one."""
    model, hardware = (flops / seconds / work.layout.devices for flops in (work.model_flops(), work.hardware_flops()))
    tokens_per_s = work.layout.batch * work.model.sequence / seconds
    return {
        "step_time_s": seconds,
        "model_tflops_per_device": model / 1e12,
        "hardware_tflops_per_device": hardware / 1e12,
        "mfu": model / peak,
        "hfu": hardware / peak,
        "attention_flops": "causal" if work.program.causal_rates else "full",
        "memory_gib_per_device": held / GIB,
        "fits": fits,
        "bubble_fraction": bubble_s / seconds,
        "tokens_per_s": tokens_per_s,
        "train_days": min(tokens / tokens_per_s / DAY, sys.float_info.max) if tokens else None,  # JSON has no infinity
        "layout": layout_flag.of(config),
    }


def predict(config: Config, hardware: Hardware, assume: str = OURS, tokens: float | None = None) -> Prediction:
    """The prediction for a resolved config whose mesh is known and whose rules are kept.

    Raises ConfigError where our own program has no table for it.
    """
    work = work_of(config, hardware, assume)
    slots = slots_of(with_op_times(config, work)) if work.program.slots else None
    return Prediction(config, work, work.step(), memory(work, config.model.loss_chunk, slots), tokens)


# --- the table ---


class Linear(Protocol):
    """Figures that can be added, and multiplied by a number."""

    def __add__(self, other: Self, /) -> Self: ...
    def __sub__(self, other: Self, /) -> Self: ...
    def __mul__(self, times: float, /) -> Self: ...


Figures = TypeVar("Figures", bound=Linear)


def with_op_times(config: Config, work: Work) -> Config:
    """The resolved config with the op times, in milliseconds, by which training makes its table on the work's kind of device: of simulated
    ones, which it does not know, those of the config."""
    if config.mesh.stage == 1 or config.pipeline.times or work.hardware.alone > 1:
        return config
    return cfg.replace(config, {"pipeline.times": milliseconds(work.op_times())})


def part_of(config: Config) -> Config:
    """A resolved config's step as far as its table is made: of one with very many microbatches a shorter one.

    Of `auto`, which then tries the vocabulary in both places, it is tried in that of the table of ZB-H1 alone.
    """
    pipeline, stages = config.pipeline, config.mesh.stage
    auto = pipeline.schedule == "auto"
    cells, least = (AUTO_CELLS, AUTO_ROUNDS) if auto else (CELLS, LEAST_ROUNDS)
    most = max(least, cells // (stages**2 * max(1, pipeline.repeats))) * stages
    if pipeline.microbatches <= most or pipeline.schedule not in SHORTENED:
        return config
    config = cfg.replace(config, {"pipeline.microbatches": most})
    if auto and pipeline.vocabulary == "auto":
        plain = make_setup(cfg.replace(config, {"pipeline.schedule": ZERO_BUBBLE[0], "pipeline.repeats": 1, "pipeline.chunk_layers": ()}))
        config = cfg.replace(config, {"pipeline.vocabulary": plain.table.vocabulary})
    return config


def extrapolated(
    config: Config, measure: Callable[[Config], Figures], shorter: Callable[[Figures, float], Figures] | None = None
) -> Figures:
    """The figures of a step, linear in its microbatches: measured for a part of them, and extrapolated from that part and about half of it.

    measure: of a config as `part_of` gives it; shorter: what replaces the measurement of the half, from the figures of the part and the
    half's microbatches in those of the part.
    """
    part = part_of(config)
    timed, figures = part.pipeline.microbatches, measure(part)
    if timed == config.pipeline.microbatches:
        return figures
    fewer = timed // config.mesh.stage // 2 * config.mesh.stage
    half = shorter(figures, fewer / timed) if shorter else measure(with_microbatches(part, fewer, make_setup(part).table))
    return figures + (figures - half) * ((config.pipeline.microbatches - timed) / (timed - fewer))


def with_microbatches(config: Config, microbatches: int, table: Table) -> Config:
    """The config with this number of microbatches, and with the vocabulary where this table has it."""
    return cfg.replace(config, {"pipeline.microbatches": microbatches, "pipeline.vocabulary": table.vocabulary})


def slots_of(config: Config) -> Slots | None:
    """Slots of a resolved config whose mesh is known; None with one stage, which has no table.

    A step with very many microbatches has the slots of a shorter one: no stage needs more than in its first rounds, but with `gpipe`.

    Raises ConfigError for a schedule that is not made for so many stages and microbatches.
    """
    if config.mesh.stage == 1:
        return None
    setup = make_setup(part_of(config))
    placement = setup.placement
    assert setup.train is not None  # there are stages
    return Slots(
        **setup.train.pool_sizes,
        layers=max(placement.sizes),
        stored_layers=sum(map(placement.stack_size, range(placement.units_per_stage))),
        shares_vocabulary=setup.shares_vocabulary,
    )


# --- its clock ---


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
