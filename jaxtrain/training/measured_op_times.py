"""The measurement of a pipeline's op times, in the form of `pipeline.times`.

The step's gradients are compiled once with the ticks of the table as an argument. Ticks in which
all stages run nothing but one op time that op, in the program that trains; empty ticks time the
fixed cost of a tick, and of the program before and after the ticks.

Begin with `measured_times`: it compiles the program, times each op by `op_seconds`, and makes the
times of a stage of them by `times_of`. `known_times` is for a run that may have them already.
"""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.config import ResolvedConfig
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.pipeline.setup import Setup
from jaxtrain.planner.step.planned_op_times import hardware_at_hand, milliseconds, op_times
from jaxtrain.schedule.clocks.times import KnownTimes, Times
from jaxtrain.schedule.columns import (
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    TickColumns,
    cell_op,
    columns,
    overlapped_ops,
    permute_op,
)
from jaxtrain.schedule.table import Permute, Table, local_unit_of
from jaxtrain.training.state import initial_state
from jaxtrain.training.step import Step, make_step
from jaxtrain.training.stored_op_times import OpTimesError, depend_on, describe, needed, read

TICKS = 12  # of an op, in a timing
REPEATS = 5  # timings, of which the median counts


@dataclasses.dataclass(frozen=True)
class Duration:
    """Seconds of a call by the wall, and CPU-seconds of this process."""

    wall: float
    cpu: float


def measure(call: Callable[[], Any], repeats: int = REPEATS) -> Duration:
    """The duration of a call: the median of several, after one that is not counted."""
    # The first call may load kernels and fill caches.
    jax.block_until_ready(call())
    wall, cpu = [], []
    for _ in range(repeats):
        a, b = time.perf_counter(), time.process_time()
        jax.block_until_ready(call())
        wall.append(time.perf_counter() - a)
        cpu.append(time.process_time() - b)
    return Duration(statistics.median(wall), statistics.median(cpu))


def on_a_device(duration: Duration) -> float:
    """Seconds of one device in an SPMD program. Several CPU devices share cores: one of them has
    its share of the CPU-seconds."""
    shared = jax.default_backend() == "cpu" and jax.local_device_count() > 1
    return duration.cpu / jax.local_device_count() if shared else duration.wall


@dataclasses.dataclass(frozen=True, eq=False)
class Ops:
    """Seconds on a device of each op that the table has, and of the program outside of its
    ticks."""

    seconds: dict[str, float]
    outside: float


def op_seconds(table_columns: TickColumns, run_ticks: Callable[[TickColumns], float]) -> Ops:
    """The ops' seconds. run_ticks: columns of TICKS ticks → seconds on a device."""
    # The compiled program takes its columns as an argument, so one program runs ticks of any ops.
    # It has TICKS of them, for a loop's number of trips is fixed.
    empty = jax.tree.map(lambda column: np.zeros((TICKS, column.shape[1]), np.int32), table_columns)
    outside = run_ticks(empty)
    seconds = {}
    for op, column in table_columns.runs.items():
        if column.all():  # it has no loop: every tick runs it, the empty ones too
            seconds[op] = 0.0
        elif column.any():
            # With early permutes all ops are in a loop of busy ticks.
            one = dataclasses.replace(
                empty, runs={**empty.runs, op: empty.runs[op] + 1}, busy=empty.busy + 1
            )
            # Clocks are not exact: an op of no length may come out below zero.
            seconds[op] = max(0.0, run_ticks(one) - outside) / TICKS
    return Ops(seconds, outside)


def times_of(by_op: dict[str, float], table: Table, shares: Sequence[float]) -> Times:
    """The simulator's Times of a microbatch on one stage, from seconds by op. shares: each unit's
    fraction of a stage's work."""
    per_stage = {}
    # An op of a unit takes its share of the stage's work. The sum over units, over the sum of their
    # shares, is the time of an entire stage. `K` is an `F` that saves residuals.
    for op, kinds in {"F": "FK", "B": "B", "W": "W", "R": "R"}.items():
        seconds, share = 0.0, 0.0
        done = table.recomputed if op == "R" else np.ones(table.units)
        for g, u in enumerate(local_unit_of(table.stage_of)):
            ops = [cell_op(kind, u) for kind in kinds]
            measured = [by_op[name] for name in ops if name in by_op]
            if measured:
                seconds += statistics.mean(measured)
                share += shares[g] * float(done[g])
        per_stage[op] = seconds / share if share else 0.0
    per_stage["overlap"] = _overlap_of(by_op, per_stage, table, shares)
    # Stages that share the vocabulary each do their part of head and embedding at the same time.
    # The simulator's times are those of the whole.
    together = table.stages if table.vocabulary == "parallel" else 1
    # A table has late permutes, early ones or both. All send as much, so the longer time counts.
    message = max(by_op.get(permute_op(when), 0.0) for when in (Permute.LATE, Permute.EARLY))
    embed = (by_op[EMBED] + by_op[EMBED_GRADIENT]) / 2
    return Times(**per_stage, message=message, head=by_op[HEAD] * together, embed=embed * together)


def in_order(times: Times, table: Table, dense_layers: bool = False) -> tuple[float, ...]:
    """Measured times in the order of `pipeline.times`. dense_layers: the embedding has some behind
    it"""
    both = max(times.F, times.B, times.F + times.B - times.overlap)
    return KnownTimes(
        times.F,
        times.B,
        times.W,
        times.message,
        times.R,
        times.head,
        FB=both if table.overlaps else None,
        embedding=times.embed if dense_layers else None,
    ).setting()


def _overlap_of(
    by_op: Mapping[str, float],
    per_stage: Mapping[str, float],
    table: Table,
    shares: Sequence[float],
) -> float:
    """`Times.overlap`: the seconds by which measured overlapped cells are shorter than their F and
    B by themselves, over the share of a stage's work in both. per_stage: the other Times"""
    local = local_unit_of(table.stage_of)
    share_of = {  # by local unit: the mean over the stages
        u: statistics.mean(s for s, v in zip(shares, local, strict=True) if v == u)
        for u in set(local)
    }
    saved, share = 0.0, 0.0
    for name, (_, unit, b_unit) in overlapped_ops(table).items():
        if name in by_op:
            f, b = share_of[unit], share_of[b_unit]
            saved += per_stage["F"] * f + per_stage["B"] * b - by_op[name]
            share += min(f, b)
    return saved / share if share else 0.0


def random_batch(step: Step, vocab_size: int) -> dict[str, jax.Array]:
    """A batch of random tokens of weight 1, as the step takes it."""

    def filled(name: str, a: Any) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            shape = np.empty(a.shape, np.bool_)[index].shape
            if name in ("tokens", "targets"):
                return np.random.default_rng(0).integers(0, vocab_size, shape).astype(a.dtype)
            return np.ones(shape, a.dtype)

        return jax.make_array_from_callback(a.shape, a.sharding, part)

    return {name: filled(name, a) for name, a in step.abstract_batch.items()}


def measured_times(config: ResolvedConfig, setup: Setup) -> tuple[float, ...]:
    """F, B, W, message, R, head and, where the table or the model has them, FB and the embedding
    in milliseconds, as `pipeline.times` takes them, measured by process 0; () where F, B or W takes
    no measurable time. The optimizer's update is no op of the program that is timed.

    config: of a mesh with several stages. Every process of a run must call this.
    """
    cluster.log("measuring op times")
    mesh = make_mesh(sizes_of(config.mesh))
    with jax.set_mesh(mesh):
        step = make_step(config, mesh, setup)
        slotted = setup.train
        assert slotted is not None, "one stage has no table"
        table_columns = columns(slotted)
        # Any seed: no op's time depends on its numbers.
        params = initial_state(step.layout, step.optimizer, 0).read
        batch = random_batch(step, config.model.vocab_size)
        # The columns of a program with TICKS ticks; which ones does not matter for compiling.
        short = jax.tree.map(lambda column: column[:1].repeat(TICKS, 0), table_columns)
        compiled = step.gradients.lower(params, batch, short).compile()
        ops = op_seconds(
            table_columns,
            lambda ticks: on_a_device(measure(lambda: compiled(params, batch, ticks))),
        )
    times = times_of(ops.seconds, setup.table, setup.shares)
    values = in_order(times, setup.table, config.model.dense_layers > 0)
    # Processes measure different times and need the same table: those of process 0 count.
    known = milliseconds(values) if all(values[:3]) else ()
    return tuple(cluster.from_main(lambda: known, OpTimesError))


def planned_times(config: ResolvedConfig) -> tuple[float, ...]:
    """The planner's times of a config for `train.hardware` or the devices at hand, which
    a line names; () where their hardware is not known or has no peak for `precision.compute`.
    Raises HardwareError."""
    hardware = hardware_at_hand(config.train.hardware, jax.devices()[0].device_kind)
    if hardware is None or config.precision.compute not in hardware.peak_tflops:
        return ()
    times = op_times(config, hardware)
    cluster.log(describe(times, f"planned for {hardware.name}"))
    return times


def known_times(config: ResolvedConfig, folder: pathlib.Path | None) -> tuple[float, ...] | None:
    """The op times of a config: its own, or those stored in the run's folder, or planned ones.
    Empty if its tables are made without; None if they have to be measured.

    folder: None if nothing is read, as in a dry run

    Every process of a run must call this. Raises OpTimesError and HardwareError.
    """
    pipeline, settings = config.pipeline, depend_on(config)
    if not needed(config.mesh, pipeline):
        return pipeline.times
    stored = cluster.from_main(lambda: read(folder, settings), OpTimesError) if folder else None
    if stored is None:
        return None if pipeline.measure_times else planned_times(config)
    if stored or pipeline.measure_times:
        cluster.log(describe(stored))
    return tuple(stored)
