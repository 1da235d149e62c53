"""From a run's config to its tables and its placement: what is known of a step before any device
is.

The times for which tables are made come from the config; or else from the planner, for the kind of
device that it names; or else from the model's sizes: F, B and W of a stage are taken as equal, R as
another F, the head by its share of the multiplications, a message as a fiftieth of F. No JAX here.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtrain.config import Config, ConfigError, ends_with_layers, get
from jaxtrain.costs import hardware
from jaxtrain.pipeline.step_model import planned_op_times, transformer_of
from jaxtrain.schedule import by_name, search
from jaxtrain.schedule.clocks import Times
from jaxtrain.schedule.orders import CSV, ONE_CHUNK, SCHEDULES
from jaxtrain.schedule.placement import Placement, cut, spread
from jaxtrain.schedule.search import ANY_REPEATS, Report, part_of
from jaxtrain.schedule.simulate import Simulation, simulate
from jaxtrain.schedule.slots import SlottedTable, assign_slots
from jaxtrain.schedule.table import VOCABULARIES, Table
from jaxtrain.schedule.table_csv import read_csv
from jaxtrain.schedule.table_spec import Cost, TableSpec, cost, memory_of
from jaxtrain.schedule.validator import check

MESSAGE = 0.02  # of F, where the config names no times
# the vocabulary is on the end stages alone where that saves more than a twentieth of the step
SAVED_MEMORY = 0.95
BUSY = 1.1  # of the mean work of a stage: what the busiest one works beyond that is worth a word


@dataclasses.dataclass(frozen=True, eq=False)
class _Candidate:
    """A table that is compared with others: its cost, and of each of its units the layers and the
    part of a stage's work."""

    cost: Cost
    table: Table
    sizes: tuple[int, ...]
    shares: tuple[float, ...]

    @property
    def weighed(self) -> Cost:
        """The cost by which the places for the vocabulary are compared.

        Time is weighed against memory: each stage's share of the tables against both of them on the
        end stages.
        """
        factor = SAVED_MEMORY if self.table.vocabulary == "parallel" else 1.0
        return self.cost._replace(time=self.cost.time * factor)


class _Change(NamedTuple):
    """What is wrong with a setting for a file's table, and the value that the table needs."""

    rule: str
    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A step's tables.

    table:           the training table, also on one stage
    shares:          of each unit, its part of a stage's work
    """

    placement: Placement
    table: Table
    times: Times
    shares: tuple[float, ...]

    @functools.cached_property
    def train(self) -> SlottedTable | None:
        """The training table with its slots; None on one stage."""
        return assign_slots(self.table) if self.table.stages > 1 else None

    @functools.cached_property
    def evaluate(self) -> SlottedTable | None:
        """Forwards and losses alone, with their slots; None on one stage."""
        table = self.table
        if table.stages == 1:
            return None
        forward = by_name.make_forward_table(
            table.stage_of, table.stages, table.microbatches, vocabulary=table.vocabulary
        )
        return assign_slots(forward)

    @property
    def shares_vocabulary(self) -> bool:
        """Whether embedding and head are split over the stages, which do their ops together."""
        return self.table.stages > 1 and self.table.vocabulary == "parallel"

    def simulation(self) -> Simulation:
        """What the table costs in time and memory."""
        return simulate(self.table, self.times, shares=self.shares)

    def describe(self) -> str:
        """One line for people: the table, its predicted bubble, and the most activations on a
        stage."""
        table = self.table
        if table.stages == 1:
            return f"{table.microbatches} microbatches one after the other"
        result = self.simulation()
        bubble = (
            f"predicted bubble {result.bubble_fraction_coupled:.1%} ({result.bubble_fraction:.1%} "
            "if stages ran on their own)"
        )
        if result.imbalance > BUSY:
            bubble += f" of the busiest stage, which works {result.imbalance:.1f} times the mean"
        where = (
            "shared by all stages"
            if table.vocabulary == "parallel"
            else "on the first and last stage"
        )
        return f"{table.name}, {table.ticks} ticks, {bubble}; embedding and head {where}"


# --- op times -------------------------------------------------------------------------------------


def times_of(config: Config, stages: int) -> Times:
    """The op times of a resolved config: its own; those planned for `train.hardware`, in ms; or
    those of the module's text, with F = 1. Raises HardwareError for a kind of device that is not
    known."""
    pipeline, model, sizes = config.pipeline, config.model, transformer_of(config)
    recompute = {"full": 1.0, "selective": 0.0, "none": 0.0}[pipeline.remat] if stages > 1 else 0.0
    # A module that predicts a further token is another head, a layer and its projection, forward
    # and backward.
    module = model.vocab_size * model.width + sizes.layer().per_token + 2 * model.width**2
    stage = sizes.layer().per_token * model.layers / stages
    head = 3 * (model.vocab_size * model.width + model.mtp_depth * module) / stage
    # The dense layers before the others run forward with the embedding, and forward and backward
    # with its gradient: four times, in two.
    embed = (
        2 * model.dense_layers * sizes.layer(dense=True).per_token / stage if model.experts else 0.0
    )
    known = pipeline.times
    if not known and stages > 1 and config.train.hardware:
        known = planned_op_times(config, hardware.load(config.train.hardware))
    if not known:
        return Times(1.0, 1.0, 1.0, MESSAGE, recompute, head, embed=embed)
    forward, *named = known
    left_out = (0.0, recompute * forward, head * forward)[len(named) - 2 :]
    backward, weights, message, recompute, head = (*named, *left_out)
    return Times(forward, backward, weights, message, recompute, head, embed=embed * forward)


# --- the search -----------------------------------------------------------------------------------


_SETUPS: dict[Config, Setup] = {}  # of the last configs, oldest first
MOST_SETUPS = 16


def make_setup(config: Config, report: Report = search.silent) -> Setup:
    """The tables of a resolved config whose mesh is known; the same object as long as it is
    remembered.

    `report` is told how far the search for a table has come, where there is one. Raises ConfigError
    for a schedule that does not fit.
    """
    if config not in _SETUPS:
        setup = _search(config, report)
        while len(_SETUPS) >= MOST_SETUPS:
            _SETUPS.pop(next(iter(_SETUPS)))
        _SETUPS[config] = setup
    return _SETUPS[config]


def _search(config: Config, report: Report) -> Setup:
    """The setup of the best table. Raises ConfigError for a schedule that does not fit."""
    pipeline, stages = config.pipeline, config.mesh.stage
    if stages == 1:
        table = by_name.make_table(TableSpec(ONE_CHUNK, 1, 1, pipeline.microbatches))
        return Setup(Placement(config.model.layers), table, times_of(config, 1), (1.0,))
    try:
        candidates = _candidates(config, _memory(config), report)
    except ConfigError:
        raise
    except search.MemoryTooSmall as error:
        if pipeline.memory:
            enough = [{"pipeline.memory": error.least}, {"pipeline.memory": 0.0}]
            raise ConfigError(
                "pipeline.memory",
                pipeline.memory,
                "is too little for any table found",
                fixes=enough,
            ) from None
        candidates = _candidates(config, error.least, report)
    except ValueError as error:
        reason, _, instead = str(error).partition(": use ")
        fixes = [{"pipeline.schedule": name} for name in SCHEDULES]
        rule = f"does not work: {reason}{f' (use {instead})' * bool(instead)}"
        raise ConfigError("pipeline.schedule", pipeline.schedule, rule, fixes=fixes) from None
    best = min(candidates, key=lambda candidate: candidate.weighed)
    report("check", 1.0)
    table = best.table
    check(table)
    placement = Placement(config.model.layers, stages, stage_of=table.stage_of, sizes=best.sizes)
    return Setup(placement, table, times_of(config, stages), best.shares)


def _memory(config: Config) -> float | None:
    """For `auto`, the most residuals that a stage may hold, in those of a whole one: by default
    those of 1F1B, sent in the same way."""
    pipeline = config.pipeline
    if pipeline.schedule != "auto" or pipeline.memory:
        return pipeline.memory or None
    permute = "late" if pipeline.permute == "auto" else pipeline.permute
    spec = TableSpec(
        ONE_CHUNK,
        config.mesh.stage,
        1,
        pipeline.microbatches,
        permute=permute,
        remat_full=pipeline.remat == "full",
    )
    return memory_of(by_name.make_table(spec))


def _candidates(config: Config, memory: float | None, report: Report) -> list[_Candidate]:
    """The tables for each number of chunks on a stage and place of the vocabulary. Raises
    MemoryTooSmall, with the least, if none fits."""
    candidates, too_small = [], []
    tried = list(itertools.product(_repeats(config), _vocabularies(config)))
    # the work grows with the chunks; of a file's table there is none
    whole, done = max(1, sum(repeats for repeats, _ in tried)), 0
    for repeats, vocabulary in tried:
        part = part_of(report, done / whole, repeats / whole)
        try:
            candidates.append(_candidate(config, repeats, vocabulary, memory, part))
        except search.MemoryTooSmall as error:
            too_small.append(error.least)
        done += repeats
    if not candidates:
        raise search.MemoryTooSmall(memory or 0.0, min(too_small))
    return candidates


def _repeats(config: Config) -> Sequence[int]:
    """The numbers of chunks on a stage to try."""
    pipeline, stages = config.pipeline, config.mesh.stage
    if pipeline.repeats or pipeline.schedule != "auto":
        return (pipeline.repeats,)
    if pipeline.chunk_layers:
        return (len(pipeline.chunk_layers) // stages,)
    return [repeats for repeats in ANY_REPEATS if repeats * stages <= config.model.layers]


def _vocabularies(config: Config) -> Sequence[str]:
    """The places of the vocabulary to try."""
    vocabulary = config.pipeline.vocabulary
    if vocabulary != "auto" or config.pipeline.schedule.startswith(CSV):
        return (vocabulary,)
    return ("end_stages",) if ends_with_layers(config.model) else VOCABULARIES


def _candidate(
    config: Config, repeats: int, vocabulary: str, memory: float | None, report: Report
) -> _Candidate:
    """A table for so many chunks on a stage; of `auto`, within so many residuals of a stage."""
    pipeline, stages, layers = config.pipeline, config.mesh.stage, config.model.layers
    table = None
    if pipeline.schedule.startswith(CSV):
        table = read_csv(pipeline.schedule.removeprefix(CSV))
        _check_fits(config, table)
        groups = _groups(table)
        chunks = pipeline.chunk_layers or spread(layers, len(groups), pipeline.layer_costs)
        sizes = tuple(
            size
            for chunk, units in zip(chunks, groups, strict=True)
            for size in spread(chunk, units)
        )
    else:
        chunks = pipeline.chunk_layers or spread(layers, stages * repeats, pipeline.layer_costs)
        groups, sizes = cut(chunks, pipeline.layers_per_op)
    spec = TableSpec(
        pipeline.schedule,
        stages,
        repeats,
        pipeline.microbatches,
        times=times_of(config, stages),
        permute=pipeline.permute,
        remat_full=pipeline.remat == "full",
        groups=groups,
        shares=_shares(config, sizes),
        vocabulary=vocabulary,
        memory=memory,
    )
    table = table or by_name.make_table(spec, report)
    return _Candidate(cost(table, spec), table, sizes, _shares(config, sizes))


def _groups(table: Table) -> tuple[int, ...]:
    """The number of units of each chunk of a table."""
    return tuple(table.chunk_of.count(chunk) for chunk in sorted(set(table.chunk_of)))


def _shares(config: Config, sizes: Sequence[int]) -> tuple[float, ...]:
    """Of each unit, its part of a stage's work, by its layers' costs."""
    costs = config.pipeline.layer_costs or (1.0,) * config.model.layers
    stage, first, shares = sum(costs) / config.mesh.stage, 0, []
    for size in sizes:
        shares.append(sum(costs[first : first + size]) / stage)
        first += size
    return tuple(shares)


# --- a file's table and the config ----------------------------------------------------------------


def _check_fits(config: Config, table: Table) -> None:
    """ConfigError unless a file's table does what the config says.

    Its fix is all that the table needs changed, at once: whoever names a file asks for that table,
    and not for the least change.
    """
    schedule = config.pipeline.schedule
    by_names = [{"pipeline.schedule": name} for name in SCHEDULES]
    if table.forward_only:
        rule = "has F ops alone, and training needs their B and W"
        raise ConfigError("pipeline.schedule", schedule, rule, fixes=by_names)
    changes = _changes(config, table)
    if changes:
        path, change = next(iter(changes.items()))
        raise ConfigError(
            path,
            get(config, path),
            change.rule,
            fixes=[{path: change.value for path, change in changes.items()}],
        )
    if table.vocabulary == "parallel" and (path := ends_with_layers(config.model)):
        rule = f"needs embedding and head on one stage, and {schedule} shares them"
        raise ConfigError(path, get(config, path), rule, fixes=[{path: 0}, *by_names])


def _changes(config: Config, table: Table) -> dict[str, _Change]:
    """Setting → what a file's table needs changed in it."""
    pipeline, name = config.pipeline, config.pipeline.schedule
    chunks = len(_groups(table))
    changes: dict[str, _Change] = {}
    for path, value in (
        ("mesh.stage", table.stages),
        ("pipeline.microbatches", table.microbatches),
    ):
        if get(config, path) != value:
            changes[path] = _Change(f"is not the {value} of the table of {name}", value)
    if table.recompute and pipeline.remat != "full":
        changes["pipeline.remat"] = _Change(f"does not go with the R ops of {name}", "full")
    if pipeline.remat == "full" and not table.recompute:
        changes["pipeline.remat"] = _Change(f"needs R ops, and {name} has none", "selective")
    if pipeline.vocabulary not in ("auto", table.vocabulary):
        changes["pipeline.vocabulary"] = _Change(f"is not that of {name}", table.vocabulary)
    if pipeline.repeats and pipeline.repeats != chunks / table.stages:
        changes["pipeline.repeats"] = _Change(
            f"is not that of {name}, {chunks} chunks on {table.stages} stages", 0
        )
    if pipeline.chunk_layers and len(pipeline.chunk_layers) != chunks:
        changes["pipeline.chunk_layers"] = _Change(
            f"has another number than the {chunks} chunks of {name}", ()
        )
    return changes | _changed_layers(config, table)


def _changed_layers(config: Config, table: Table) -> dict[str, _Change]:
    """What a file's table needs changed in the layers or their cut: every unit has one, at
    least."""
    pipeline, layers, name, groups = (
        config.pipeline,
        config.model.layers,
        config.pipeline.schedule,
        _groups(table),
    )
    if table.units > layers:
        return {"model.layers": _Change(f"are fewer than the units of {name}", table.units)}
    given = pipeline.chunk_layers if len(pipeline.chunk_layers) == len(groups) else ()
    chunks = given or spread(layers, len(groups), pipeline.layer_costs)
    if all(size >= units for size, units in zip(chunks, groups, strict=True)):
        return {}
    cut_by = [
        path for path in ("pipeline.chunk_layers", "pipeline.layer_costs") if get(config, path)
    ]
    rule = f"leaves a chunk fewer layers than it has units in {name}"
    return (
        {cut_by[0]: _Change(rule, ())}
        if cut_by
        else {"model.layers": _Change(rule, len(groups) * max(groups))}
    )
