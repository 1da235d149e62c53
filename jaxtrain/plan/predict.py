"""The prediction of a step, from closed forms and from the table that training would use. No jax.

    predict    time by the closed forms of costs/, memory with the slots of the table
    exactly    time by the table: how often each op runs, and its coupled clock
               (schedule/coupled_clock.py), which know what closed forms do not: R that a table
               leaves out, permutes, shares of uneven stages, messages that come late. Sums over
               data and the optimizer stand outside the table, as the closed forms have them.

Devices of their own take as long as the busiest stage, and what it waits by the clock. Devices that
share cores run the ops of all stages, since the others use what an idle one leaves; they wait where
the clock, by which a device on its own is faster, takes longer than all work on all cores.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.config.pipeline_setup import make_setup, times_of
from jaxtrain.config.work import OURS, milliseconds, step_model_of
from jaxtrain.costs.collectives import STAGE
from jaxtrain.costs.hardware import GIB, Hardware
from jaxtrain.costs.memory import MemoryBreakdown, Slots, memory
from jaxtrain.costs.step_time import BUBBLE, StepModel, TimeBreakdown
from jaxtrain.plan import layout_flag
from jaxtrain.schedule.clock import Times
from jaxtrain.schedule.columns import permutes
from jaxtrain.schedule.coupled_clock import walk
from jaxtrain.schedule.orders import AUTO, GROWING, SCHEDULES, ZERO_BUBBLE
from jaxtrain.schedule.table import Op, Permute, Table, peak_residuals

DAY = 86400.0
OPS = (Op.F, Op.R, Op.B, Op.W)
# Passes over a message that overlaps with its tick's ops: five copies, as XLA's CPU programs have.
EARLY_PASSES = 10.0
# Stages · chunks on a stage · microbatches of a table that is made in a second: of a longer step a
# part of the microbatches is. `auto` tries some fifty tables.
CELLS, AUTO_CELLS = 2**12, 2**8
LEAST_ROUNDS, AUTO_ROUNDS = 4, 2  # microbatches of such a part, in those that fill the pipeline
# Schedules of shortened steps: all but a file's and those whose slots grow with the microbatches.
SHORTENED = frozenset({*SCHEDULES, AUTO}.difference(GROWING))


# --- by closed forms --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step: its time on the busiest device, and its memory on the fullest one.

    config:    resolved
    tokens:    of the run, None if not known
    in_flight: the most microbatches whose activations a stage holds, by the table that timed the
               step; None without one
    """

    config: Config
    work: StepModel
    time: TimeBreakdown
    memory: MemoryBreakdown
    tokens: float | None = None
    in_flight: float | None = None

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
        """Model FLOP/s of a device. Attention is counted as in the framework's published rates;
        ours counts it causally."""
        return self.work.model_flops() / self.seconds / self.devices

    @property
    def hardware_flops_per_s(self) -> float:
        """FLOP/s of a device with recomputation counted."""
        return self.work.hardware_flops() / self.seconds / self.devices

    def figures(self) -> dict[str, Any]:
        """What --json prints."""
        peak, bubble_s = (
            self.work.hardware.peak(self.work.dtype),
            self.time.exposed.get(BUBBLE, 0.0),
        )
        return step_figures(
            self.config,
            self.work,
            self.seconds,
            peak,
            self.memory.bytes,
            self.fits,
            bubble_s,
            self.tokens,
        )


def step_figures(
    config: Config,
    work: StepModel,
    seconds: float,
    peak: float,
    held: float,
    fits: bool,
    bubble_s: float,
    tokens: float | None,
) -> dict[str, Any]:
    """What --json prints of a step of so many seconds. peak: the mean of all devices' peaks; held:
    bytes of the fullest one."""
    model, hardware = (
        flops / seconds / work.layout.devices
        for flops in (work.model_flops(), work.hardware_flops())
    )
    tokens_per_s = work.layout.batch * work.model.sequence / seconds
    return {
        "step_time_s": seconds,
        "model_tflops_per_device": model / 1e12,
        "hardware_tflops_per_device": hardware / 1e12,
        "mfu": model / peak,
        "hfu": hardware / peak,
        "attention_flops": "causal" if work.framework.causal_rates else "full",
        "memory_gib_per_device": held / GIB,
        "fits": fits,
        "bubble_fraction": bubble_s / seconds,
        "tokens_per_s": tokens_per_s,
        # JSON has no infinity
        "train_days": min(tokens / tokens_per_s / DAY, sys.float_info.max) if tokens else None,
        "layout": layout_flag.of(config),
    }


def predict(
    config: Config, hardware: Hardware, assume: str = OURS, tokens: float | None = None
) -> Prediction:
    """The prediction for a resolved config whose mesh is known and whose rules are kept.

    Raises ConfigError where our own runtime has no table for it.
    """
    work = step_model_of(config, hardware, assume)
    slots = slots_of(with_op_times(config, work)) if work.framework.slots else None
    return Prediction(
        config, work, work.step(), memory(work, config.model.loss_chunk, slots), tokens
    )


# --- the table ----------------------------------------------------------------------------------


def with_op_times(config: Config, work: StepModel) -> Config:
    """The resolved config with the op times, in milliseconds, by which training makes its table on
    this hardware: its own where it has any or the devices are simulated, otherwise planned ones."""
    if config.mesh.stage == 1 or config.pipeline.times or work.hardware.alone > 1:
        return config
    return cfg.replace(config, {"pipeline.times": milliseconds(work.op_times())})


def part_of(config: Config) -> Config:
    """The part of a resolved config's step whose table is made: fewer microbatches of very many.

    `auto` then tries only the place of the vocabulary that the table of ZB-H1 has.
    """
    pipeline, stages = config.pipeline, config.mesh.stage
    auto = pipeline.schedule == AUTO
    cells, least = (AUTO_CELLS, AUTO_ROUNDS) if auto else (CELLS, LEAST_ROUNDS)
    most = max(least, cells // (stages**2 * max(1, pipeline.repeats))) * stages
    if pipeline.microbatches <= most or pipeline.schedule not in SHORTENED:
        return config
    config = cfg.replace(config, {"pipeline.microbatches": most})
    if auto and pipeline.vocabulary == "auto":
        settings = {
            "pipeline.schedule": ZERO_BUBBLE[0],
            "pipeline.repeats": 1,
            "pipeline.chunk_layers": (),
        }
        config = with_microbatches(config, most, make_setup(cfg.replace(config, settings)).table)
    return config


def with_microbatches(config: Config, microbatches: int, table: Table) -> Config:
    """The config with this number of microbatches, and the vocabulary where this table has it."""
    return cfg.replace(
        config, {"pipeline.microbatches": microbatches, "pipeline.vocabulary": table.vocabulary}
    )


def slots_of(config: Config) -> Slots | None:
    """Slots of a resolved config whose mesh is known; None with one stage, which has no table.

    A shortened step has as many as the whole one: no stage needs more than in its first rounds.
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


# --- by the table -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TableCounts:
    """Counts of a table.

    seconds:  by its coupled clock
    ops:      [ops, stages] of each of OPS on each stage, in those of a whole stage
    heads:    [stages] in whole ones
    messages: of a device
    early:    those of them that overlap with their tick's ops
    """

    seconds: float
    ops: np.ndarray
    heads: np.ndarray
    messages: float
    early: float

    def __add__(self, other: "TableCounts") -> "TableCounts":
        return TableCounts(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def __mul__(self, times: float) -> "TableCounts":
        return TableCounts(*(times * value for value in vars(self).values()))


def table_counts(
    config: Config, times: Times, shorter: Callable[[TableCounts, float], TableCounts] | None = None
) -> TableCounts:
    """Counts of a step whose ops take these times, linear in its microbatches: of the part of them
    that `part_of` gives, and extrapolated from that part and about half of it.

    shorter: makes the counts of the half from those of the part and the fraction of its
             microbatches; without it they are those of the half's own table.
    """
    part = part_of(config)
    timed, counts = part.pipeline.microbatches, _counts(part, times)
    if timed == config.pipeline.microbatches:
        return counts
    fewer = timed // config.mesh.stage // 2 * config.mesh.stage
    half = (
        shorter(counts, fewer / timed)
        if shorter
        else _counts(with_microbatches(part, fewer, make_setup(part).table), times)
    )
    return counts + (counts + half * -1.0) * (
        (config.pipeline.microbatches - timed) / (timed - fewer)
    )


def exactly(prediction: Prediction) -> Prediction:
    """The prediction with its step timed on the table; the same with one stage or another
    framework, which have none of ours.

    A step with very many microbatches is extrapolated linearly from two shorter ones. Raises
    ConfigError for a schedule that is not made for these numbers.
    """
    work, layout = prediction.work, prediction.work.layout
    if layout.stage == 1 or work.framework.name != OURS:
        return prediction
    config = with_op_times(prediction.config, work)
    times = times_of(cfg.replace(config, {"pipeline.times": work.op_times()}), layout.stage)
    table = make_setup(part_of(config)).table
    shorter = functools.partial(_without_waits, work) if config.pipeline.schedule == AUTO else None
    counts = table_counts(config, times, shorter)
    if work.hardware.alone > 1:
        (busy, waits), hidden = _on_shared_cores(work, counts), {}
    else:
        busy = max(_stages(work, counts), key=lambda parts: parts.seconds)
        waits = max(0.0, counts.seconds - busy.seconds)
        hidden = {part: s for part, s in prediction.time.hidden.items() if part == STAGE}
    time = busy + work.end_collectives(table.vocabulary == "parallel") * layout.microbatches
    time += TimeBreakdown({BUBBLE: waits}, hidden) + work.outside_microbatches(
        busy, times.F, times.B + times.W
    )
    return dataclasses.replace(
        prediction, time=time, in_flight=max(peak_residuals(table)) / max(1, layout.repeats)
    )


def _without_waits(work: StepModel, counts: TableCounts, part: float) -> TableCounts:
    """Counts of a step of `auto` with this part of the microbatches, if the busiest stage never
    waits in between: the best table for it may be one of another order."""
    busy = max(parts.seconds for parts in _stages(work, counts, dense=False))
    return dataclasses.replace(counts * part, seconds=counts.seconds - (1 - part) * busy)


def _counts(config: Config, times: Times) -> TableCounts:
    """Counts of a step whose ops take these times."""
    setup = make_setup(config)
    table, shares = setup.table, np.array([*setup.shares, 0.0])
    ops = np.array([np.where(table.op == op, shares[table.unit], 0.0).sum(0) for op in OPS])
    heads = (
        np.full(table.stages, 1 / table.stages)
        if table.vocabulary == "parallel"
        else np.arange(table.stages) == table.stage_of[-1]
    )
    early, late = (
        len(permutes(table)) * int((table.permute == when).sum())
        for when in (Permute.EARLY, Permute.LATE)
    )
    return TableCounts(
        walk(table, times, setup.shares), ops, table.microbatches * heads, early + late, early
    )


def _stages(work: StepModel, counts: TableCounts, dense: bool = True) -> list[TimeBreakdown]:
    """The work of each stage. dense: with the layers before the first unit."""
    ops, head = work.ops(), work.head()
    stages = [head * heads for heads in counts.heads.tolist()]
    for op, times in zip(OPS, counts.ops.tolist(), strict=True):
        stages = [busy + ops[op.name] * n for busy, n in zip(stages, times, strict=True)]
    if dense:
        stages[0] += work.dense_layers() * work.layout.microbatches
    return stages


def _on_shared_cores(work: StepModel, counts: TableCounts) -> tuple[TimeBreakdown, float]:
    """(work of the cores, seconds that they wait): a mean over the stages, with all messages, which
    overlap with nothing."""
    copied = EARLY_PASSES * work.message_bytes() / work.hardware.streaming
    busy, stages = (
        TimeBreakdown({STAGE: work.message() * counts.messages + copied * counts.early}),
        _stages(work, counts),
    )
    for parts in stages:
        busy += parts * (1 / len(stages))
    return busy, work.hardware.waited(busy.seconds, max(0.0, counts.seconds - busy.seconds))
