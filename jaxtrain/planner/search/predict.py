"""The prediction of a step, from closed forms and from the table that training would use. No jax.

    predict    time by the closed forms of planner/step/, memory with the slots of the table
    exactly    time by the table: the runs of each op, and its coupled clock (schedule/clocks/),
               which include what closed forms do not: Rs that a table leaves out, permutes, shares
               of uneven stages, messages that come late. Sums over data and the optimizer are
               outside of the table, as in the closed forms.

On real devices a step takes as long as the ops of the busiest stage, plus its waits by the clock.
Simulated devices share cores, so the ops of all stages count: a device uses the cores that an idle
one leaves. They wait only if the clock, with the speed of a device that has the cores to itself,
takes longer than all ops on all cores.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxtrain import config as cfg
from jaxtrain.config import ResolvedConfig
from jaxtrain.config.sizes import remat_of
from jaxtrain.pipeline.op_times import complete_times, has_recompute_ops
from jaxtrain.pipeline.setup import Setup, make_setup
from jaxtrain.pipeline.step_picture import SHORTENED
from jaxtrain.planner.layer.hardware import GIB, Hardware
from jaxtrain.planner.layer.links import STAGE
from jaxtrain.planner.search import layout_flag
from jaxtrain.planner.search.validation import KEYS, Expected, expected
from jaxtrain.planner.step.memory import MemoryBreakdown, SlotCounts, memory
from jaxtrain.planner.step.step_model import OURS, milliseconds, step_model_of, unfollowed
from jaxtrain.planner.step.step_time import StepModel
from jaxtrain.planner.step.time_breakdown import BUBBLE, TimeBreakdown, hidden_messages
from jaxtrain.schedule.clocks.coupled import coupled_time
from jaxtrain.schedule.clocks.times import KnownTimes, Times
from jaxtrain.schedule.columns import permutes
from jaxtrain.schedule.orders import AUTO, ZERO_BUBBLE
from jaxtrain.schedule.table import Op, Permute, Table, peak_residuals

DAY = 86400.0
OPS = (Op.F, Op.R, Op.B, Op.W)
# Passes over a message that overlaps with its tick's ops: five copies, as XLA's CPU programs have.
EARLY_PASSES = 10.0
# Stages · chunks on a stage · microbatches of a table that is made in a second; of a longer step
# only a part of the microbatches is scheduled. `auto` tries some fifty tables.
CELLS, AUTO_CELLS = 2**12, 2**8
LEAST_ROUNDS, AUTO_ROUNDS = 4, 2  # microbatches of such a part, in those that fill the pipeline


# --- by closed forms --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step: its time on the busiest device, and its memory on the fullest one.

    slots:     of our own runtime's table; None without stages, and for other frameworks
    tokens:    of the run, None if not known
    in_flight: the most microbatches whose activations a stage holds, by the table that timed the
               step; None without one
    """

    config: ResolvedConfig
    work: StepModel
    time: TimeBreakdown
    slots: SlotCounts | None = None
    tokens: float | None = None
    in_flight: float | None = None

    @functools.cached_property
    def expected(self) -> Expected:
        """The error that is expected of the plan."""
        return expected(self.work)

    @functools.cached_property
    def memory(self) -> MemoryBreakdown:
        """The memory by part, computed when it is asked for: a layer is traced for it, and a run
        that compares its steps' time has no use for it."""
        return memory(self.work, self.config.model.loss_chunk, self.slots)

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

    def figures(self) -> dict[str, Any]:
        """The object that --json prints."""
        return step_figures(
            self.config,
            self.work,
            self.seconds,
            self.bubble_fraction,
            self.memory.bytes,
            self.fits,
            self.tokens,
        )


def step_figures(
    config: ResolvedConfig,
    work: StepModel,
    seconds: float,
    bubble_fraction: float,
    held: float,
    fits: bool,
    tokens: float | None,
) -> dict[str, Any]:
    """The figures that --json prints of a config's step that takes so many seconds.

    Attention is counted as in the framework's published rates; ours counts it causally.
    held: bytes of the fullest device; tokens: of the run
    """
    device_seconds = seconds * work.layout.devices
    peak = work.hardware.peak(work.settings.precision.compute)
    model, hardware = work.model_flops() / device_seconds, work.hardware_flops() / device_seconds
    tokens_per_s, sure = work.layout.batch * work.model.sequence / seconds, expected(work)
    days = tokens / tokens_per_s / DAY if tokens else 0.0
    return {
        "step_time_s": seconds,
        "model_tflops_per_device": model / 1e12,
        "hardware_tflops_per_device": hardware / 1e12,
        "mfu": model / peak,
        "hfu": hardware / peak,
        "attention_flops": "causal" if work.settings.causal_rates else "full",
        "memory_gib_per_device": held / GIB,
        "fits": fits,
        "bubble_fraction": bubble_fraction,
        "tokens_per_s": tokens_per_s,
        # JSON has no infinity
        "train_days": min(days, sys.float_info.max) if tokens else None,
        "step_time_range_s": sure.range_of(seconds),
        "tokens_per_s_range": sure.range_of(tokens_per_s),
        "train_days_range": [min(end, sys.float_info.max) for end in sure.range_of(days)]
        if tokens
        else None,
        "validation": {
            "kind": dict(zip(KEYS, sure.kind, strict=True)),
            "rows": sure.kinds.get(sure.kind, (0, 0.0))[0],
            "error": sure.error,
            "behind": [
                dict(zip((*KEYS, "rows", "error"), (*kind, *runs), strict=True))
                for kind, runs in sure.kinds.items()
            ],
        },
        "note": "; ".join(map(str.strip, sure.lines())),
        "layout": layout_flag.of(config),
        "notes": unfollowed(config, work.settings),
    }


def predict(
    config: ResolvedConfig, hardware: Hardware, assume: str = OURS, tokens: float | None = None
) -> Prediction:
    """The prediction for a config that keeps every rule.

    assume: the framework that trains; tokens: of the run
    Raises ConfigError if our own runtime has no table for it.

    >>> from jaxtrain import load_recipe
    >>> from jaxtrain.config.rules.mesh_rules import on_mesh
    >>> from jaxtrain.planner.layer.hardware import load
    >>> config = on_mesh(load_recipe("gpt2_124m"), devices=8).resolve()
    >>> 0.01 < predict(config, load("h100")).seconds < 10
    True
    """
    work, slots = step_model_of(config, hardware, assume), None
    if work.settings.ours:
        slots = PlannedTable(with_op_times(config, work)).slots()
    return Prediction(config, work, work.step(), slots, tokens)


def with_op_times(config: ResolvedConfig, work: StepModel) -> ResolvedConfig:
    """The config with the op times, in milliseconds, by which training makes its table on
    this hardware: the config's if it has any or the devices are simulated, otherwise planned
    ones."""
    if config.mesh.stage == 1 or config.pipeline.times or work.hardware.alone > 1:
        return config
    return config.with_times(milliseconds(work.op_times()))


# --- by the table -------------------------------------------------------------------------------


class TableCounts(NamedTuple):
    """Counts of a table.

    seconds:  by its coupled clock
    ops:      [ops, stages] of each of OPS on each stage; 1 is the op of an entire stage
    heads:    [stages]; 1 is an entire head
    messages: of a device
    early:    those of them that overlap with their tick's ops
    overlapped: [stages]; 1 is an F and a B of an entire stage in overlapped cells
    """

    seconds: float
    ops: np.ndarray
    heads: np.ndarray
    messages: float
    early: float
    overlapped: np.ndarray


@dataclasses.dataclass(frozen=True)
class PlannedTable:
    """The table that training would make for a config."""

    config: ResolvedConfig

    @property
    def setup(self) -> Setup:
        """The table with its slots. Raises ConfigError for a schedule that is not made for so many
        stages and microbatches."""
        return make_setup(self.config)

    def part(self) -> "PlannedTable":
        """The table of fewer microbatches, if the step has very many.

        `auto` then tries only the place of the vocabulary that the table of ZB-H1 has.
        """
        pipeline, stages = self.config.pipeline, self.config.mesh.stage
        auto = pipeline.schedule == AUTO
        cells, least = (AUTO_CELLS, AUTO_ROUNDS) if auto else (CELLS, LEAST_ROUNDS)
        most = max(least, cells // (stages**2 * max(1, pipeline.repeats))) * stages
        if pipeline.microbatches <= most or pipeline.schedule not in SHORTENED:
            return self
        config = cfg.replace(self.config, {"pipeline.microbatches": most}).resolve()
        if not auto or pipeline.vocabulary != "auto":
            return PlannedTable(config)
        settings = {"schedule": ZERO_BUBBLE[0], "repeats": 1, "chunk_layers": ()}
        zb_h1 = cfg.replace(config, {f"pipeline.{name}": value for name, value in settings.items()})
        return PlannedTable(config).with_microbatches(most, make_setup(zb_h1.resolve()).table)

    def with_microbatches(self, microbatches: int, table: Table) -> "PlannedTable":
        """The table of this number of microbatches, with the vocabulary where `table` has it."""
        changes = {
            "pipeline.microbatches": microbatches,
            "pipeline.vocabulary": table.vocabulary,
        }
        return PlannedTable(cfg.replace(self.config, changes).resolve())

    def slots(self) -> SlotCounts | None:
        """Slots of the step; None with one stage, which has no table.

        A shortened step has as many as the full one: no stage needs more than in its first rounds.
        """
        if self.config.mesh.stage == 1:
            return None
        setup, remat = self.part().setup, remat_of(self.config.pipeline.remat)
        assert setup.train is not None  # there are stages
        pools = setup.train.pool_sizes
        if setup.train_several:  # the program has both tables, one after the other
            several = setup.train_several.pool_sizes
            pools = {pool: max(number, several[pool]) for pool, number in pools.items()}
        placement, most = setup.placement, max(setup.placement.sizes)
        return SlotCounts(
            pools,
            units=placement.kinds_of_units(cfg.stacked_kinds(self.config.model)),
            recomputed=remat.recomputed(most) or most,
            stored_layers=placement.stored_layers,
            shares_vocabulary=setup.shares_vocabulary,
        )

    def counts(
        self, times: Times, shorter: Callable[[TableCounts, float], TableCounts] | None = None
    ) -> TableCounts:
        """Counts of a step whose ops take these times. Those of many microbatches are extrapolated
        linearly from `part` and about half of it.

        shorter: makes the counts of the half from those of the part and the fraction of its
                 microbatches; without it they are those of the half's own table.
        """
        part, stages = self.part(), self.config.mesh.stage
        microbatches, timed = (p.config.pipeline.microbatches for p in (self, part))
        counts, fewer = _counts(part.setup, times), timed // stages // 2 * stages
        if timed == microbatches:
            return counts
        half = (
            shorter(counts, fewer / timed)
            if shorter
            else _counts(part.with_microbatches(fewer, part.setup.table).setup, times)
        )
        slope = (microbatches - timed) / (timed - fewer)
        both: Iterable[tuple[Any, Any]] = zip(counts, half, strict=True)
        return TableCounts(*(a + (a - b) * slope for a, b in both))


def exactly(prediction: Prediction) -> Prediction:
    """The prediction with its step timed on the table. It stays as it is with one stage or for
    another framework, which have no table of ours.

    A step with very many microbatches is extrapolated linearly from two shorter ones. Raises
    ConfigError for a schedule that is not made for these numbers.
    """
    work, layout = prediction.work, prediction.work.layout
    if layout.stage == 1 or work.settings.name != OURS:
        return prediction
    config = with_op_times(prediction.config, work)
    times = complete_times(
        KnownTimes(*work.op_times()), work.model, layout.stage, has_recompute_ops(layout.remat)
    )
    planned, auto = PlannedTable(config), config.pipeline.schedule == AUTO
    table = planned.part().setup.table
    counts = planned.counts(times, functools.partial(_without_waits, work) if auto else None)
    hidden: dict[str, float] = {}
    shares_cores = work.hardware.alone > 1
    if shares_cores:
        busy = _on_shared_cores(work, counts)
    else:
        busy = max(_stages(work, counts), key=lambda parts: parts.seconds)
        hidden = {part: s for part, s in prediction.time.hidden.items() if part == STAGE}
    # the update is an op of the table where that has several steps, and after the table otherwise
    idle = max(0.0, counts.seconds - times.update - busy.seconds)
    waits = work.hardware.waited(busy.seconds, idle) if shares_cores else idle
    time = busy + work.ends.communication(table.vocabulary == "parallel") * layout.microbatches
    time += TimeBreakdown({BUBBLE: waits}, hidden)
    time += work.outside_microbatches(busy, times.F, times.B + times.W)
    in_flight = max(peak_residuals(table)) / max(1, layout.repeats)
    return dataclasses.replace(prediction, time=time, in_flight=in_flight)


def _without_waits(work: StepModel, counts: TableCounts, part: float) -> TableCounts:
    """Counts of a step of `auto` with this part of the microbatches, if the busiest stage never
    waits in between: the best table for it may be one of another order."""
    busy = max(parts.seconds for parts in _stages(work, counts, dense=False))
    values: Iterable[Any] = counts
    shorter = TableCounts(*(part * value for value in values))
    return shorter._replace(seconds=counts.seconds - (1 - part) * busy)


def _counts(setup: Setup, times: Times) -> TableCounts:
    """Counts of a table whose ops take these times."""
    table, shares = setup.table, np.array(setup.shares)
    work = {op: [*(shares * table.recomputed if op == Op.R else shares), 0.0] for op in OPS}
    cells, ops = table.busy, np.zeros((len(OPS), table.stages))
    for number, op in enumerate(OPS):
        of_op = cells.op == op
        np.add.at(ops[number], cells.stage[of_op], np.array(work[op])[cells.unit[of_op]])
    heads = np.arange(table.stages) == table.stage_of[-1]
    if table.vocabulary == "parallel":
        heads = np.full(table.stages, 1 / table.stages)
    early, late = (
        len(permutes(table)) * int((table.permute == when).sum())
        for when in (Permute.EARLY, Permute.LATE)
    )
    several = setup.several or table
    seconds = coupled_time(several, times, setup.shares) / several.steps
    shared = table.overlapped
    overlapped = np.zeros(shared.shape)
    overlapped[shared] = np.minimum(shares[table.unit[shared]], shares[table.b_unit[shared]])
    return TableCounts(
        seconds, ops, table.microbatches * heads, early + late, early, overlapped.sum(0)
    )


def _stages(work: StepModel, counts: TableCounts, dense: bool = True) -> list[TimeBreakdown]:
    """The work of each stage. dense: with the layers before the first unit."""
    ops, head = work.ops(), work.head
    stages = [head * heads for heads in counts.heads.tolist()]
    for op, times in zip(OPS, counts.ops.tolist(), strict=True):
        stages = [busy + ops[op.name] * n for busy, n in zip(stages, times, strict=True)]
    saved = work.saved_by_overlap()
    stages = [
        busy + hidden_messages(saved * n)
        for busy, n in zip(stages, counts.overlapped.tolist(), strict=True)
    ]
    if dense:
        stages[0] += work.dense_layers * work.layout.microbatches
    return stages


def _on_shared_cores(work: StepModel, counts: TableCounts) -> TimeBreakdown:
    """The work of the cores: the mean over the stages, with all messages, which overlap with
    nothing."""
    copied = EARLY_PASSES * work.message_bytes() / work.hardware.streaming
    messages = TimeBreakdown({STAGE: work.message() * counts.messages + copied * counts.early})
    stages = _stages(work, counts)
    return sum((parts * (1 / len(stages)) for parts in stages), messages)
