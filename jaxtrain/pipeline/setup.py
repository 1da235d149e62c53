"""The tables and the placement of a config: everything about a step that does not need its devices.
No jax.

Tables are made for op times. These are the config's; if it has none, the planner's for the hardware
that the config names; if it names none, they follow from the model's sizes: F, B and W of a stage
take the same time, R takes that of F, the head its share of the multiplications, a message a
fiftieth of F.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from jaxtrain.config import (
    ConfigError,
    ModelConfig,
    PipelineConfig,
    ResolvedConfig,
    ends_with_layers,
)
from jaxtrain.config.rules.rules import values_for
from jaxtrain.config.saved_values import saves_layer_inputs
from jaxtrain.config.sizes import remat_of
from jaxtrain.planner.step.planned_op_times import Model, load, model_of, op_times
from jaxtrain.schedule import by_name, table_search
from jaxtrain.schedule.clocks import Times
from jaxtrain.schedule.files.order_csv import read_schedule
from jaxtrain.schedule.orders import CSV, ONE_CHUNK, PLACEMENTS, SCHEDULES, ChunkOrders
from jaxtrain.schedule.packing import PACKINGS
from jaxtrain.schedule.placement import Placement, balanced, cut, spread
from jaxtrain.schedule.repeated_table import repeated, same_sums
from jaxtrain.schedule.simulate import Simulation, simulate
from jaxtrain.schedule.slots import SlottedTable, assign_slots
from jaxtrain.schedule.table import VOCABULARIES, Table
from jaxtrain.schedule.table_search import ANY_REPEATS, Report, part_of
from jaxtrain.schedule.table_spec import Cost, TableSpec, cost, memory_of
from jaxtrain.schedule.validator import check

MESSAGE = 0.02  # of F, where the config names no times
# the vocabulary is on the end stages alone where that saves more than a twentieth of the step
SAVED_MEMORY = 0.95
BUSY = 1.1  # of the mean work of a stage: what the busiest one works beyond that is worth a word


@dataclasses.dataclass(frozen=True, eq=False)
class _Candidate:
    """A table that is compared with others: its cost, and for each of its units the number of
    layers and the fraction of a stage's work."""

    cost: Cost
    table: Table
    sizes: tuple[int, ...]
    shares: tuple[float, ...]

    @property
    def weighed(self) -> Cost:
        """The cost by which the two places of the vocabulary are compared.

        Time is weighed against memory: embedding and head sharded over all stages need less of it
        than on the end stages alone.
        """
        factor = SAVED_MEMORY if self.table.vocabulary == "parallel" else 1.0
        return self.cost._replace(time=self.cost.time * factor)


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A step's tables and its placement.

    table:  the training table of one step, also with one stage
    shares: for each unit its fraction of a stage's work
    several: the table of `pipeline.steps_per_program` steps; None for one step
    """

    placement: Placement
    table: Table
    times: Times
    shares: tuple[float, ...]
    several: Table | None = None

    @functools.cached_property
    def train(self) -> SlottedTable | None:
        """The training table with its slots; None with one stage."""
        return assign_slots(self.table) if self.table.stages > 1 else None

    @functools.cached_property
    def train_several(self) -> SlottedTable | None:
        """The table of several steps with its slots."""
        return assign_slots(self.several) if self.several else None

    @functools.cached_property
    def evaluate(self) -> SlottedTable | None:
        """The table of forwards and losses alone, with its slots; None with one stage."""
        table = self.table
        if table.stages == 1:
            return None
        return assign_slots(
            by_name.make_forward_table(
                table.stage_of, table.stages, table.microbatches, vocabulary=table.vocabulary
            )
        )

    @property
    def shares_vocabulary(self) -> bool:
        """True if embedding and head are split over the stages, which do their ops together."""
        return self.table.stages > 1 and self.table.vocabulary == "parallel"

    def simulation(self) -> Simulation:
        """The time and memory, simulated, of the table that a run goes by."""
        return simulate(self.several or self.table, self.times, shares=self.shares)

    def describe(self) -> str:
        """A line of text: the table, its ticks and predicted bubble, where embedding and head
        are."""
        table = self.table
        if table.stages == 1:
            return f"{table.microbatches} microbatches one after the other"
        result = self.simulation()
        stage = "a stage"
        if result.imbalance > BUSY:
            stage = f"the busiest stage, which works {result.imbalance:.1f} times the mean,"
        where = (
            "shared by all stages"
            if table.vocabulary == "parallel"
            else "on the first and last stage"
        )
        ticks = f"{table.ticks} ticks"
        if self.several:
            ticks = f"{self.several.steps} steps in {self.several.ticks} ticks"
        return (
            f"{table.name}, {ticks}, predicted bubble {result.bubble_fraction_coupled:.1%} (the "
            f"part of a step in which {stage} has no work); embedding and head {where}"
        )


# --- op times -------------------------------------------------------------------------------------


def times_of(config: ResolvedConfig) -> Times:
    """The op times of a config: its `pipeline.times`; or those planned for `train.hardware`, in ms;
    or those that follow from the model's sizes, with F = 1. Raises HardwareError."""
    pipeline, stages, known = config.pipeline, config.mesh.stage, config.pipeline.times
    if not known and stages > 1 and config.train.hardware:
        known = op_times(config, load(config.train.hardware))
    model = model_of(config.model, config.data.sequence_length)
    return complete_times(known, model, stages, has_recompute_ops(pipeline.remat))


def has_recompute_ops(remat: str) -> bool:
    """True if an op R of its own recomputes what `pipeline.remat` says, and not B."""
    return remat_of(remat).mode == "full"


def saved_fractions(remat: str, sizes: Sequence[int]) -> tuple[float, ...]:
    """The fraction of each unit's layers that save all while `pipeline.remat` has others
    recomputed; () where no unit has such layers. sizes: the layers of each unit."""
    recomputed = [remat_of(remat).recomputed(size) for size in sizes]
    if not any(recomputed) or recomputed == [*sizes]:
        return ()
    return tuple(1 - each / max(1, size) for each, size in zip(recomputed, sizes, strict=True))


def complete_times(known: Sequence[float], model: Model, stages: int, recomputes: bool) -> Times:
    """The op times that are known, in the order of `pipeline.times`; the others follow from the
    model's sizes, and so do all, with F = 1, where none are known. recomputes: there are Rs"""
    recompute = float(recomputes and stages > 1)
    # A module that predicts a further token is another head, a layer and its projection, forward
    # and backward.
    module = model.vocab_size * model.width + model.layer().per_token + 2 * model.width**2
    stage = model.layer().per_token * model.layers / stages
    head = 3 * (model.vocab_size * model.width + model.mtp_depth * module) / stage
    # The dense layers before the others run forward with the embedding, and forward and backward
    # with its gradient: four times, in two.
    embed = 2 * model.dense_layers * model.layer(dense=True).per_token / stage
    if not known:
        return Times(1.0, 1.0, 1.0, MESSAGE, recompute, head, embed=embed)
    forward, *named = known
    left_out = (0.0, recompute * forward, head * forward, 0.0, 0.0, embed * forward)
    backward, weights, message, recompute, head, both, update, embed = (
        *named,
        *left_out[len(named) - 2 :],
    )
    return Times(
        forward,
        backward,
        weights,
        message,
        recompute,
        head,
        embed=embed,
        update=update,
        overlap=forward + backward - both if both else 0.0,
    )


# --- the search -----------------------------------------------------------------------------------


_SETUPS: dict[ResolvedConfig, Setup] = {}  # of the last configs, oldest first
MOST_SETUPS = 16


def make_setup(config: ResolvedConfig, report: Report = table_search.silent) -> Setup:
    """The tables of a config; the same object as long as it is one of the last MOST_SETUPS.

    report: is told how far the search for a table has come, where there is one. Raises ConfigError
    for a schedule that does not fit.
    """
    if config not in _SETUPS:
        times = times_of(config)
        setup = _Search(config.model, config.pipeline, config.mesh.stage, times, report).setup()
        while len(_SETUPS) >= MOST_SETUPS:
            _SETUPS.pop(next(iter(_SETUPS)))
        _SETUPS[config] = setup
    return _SETUPS[config]


@dataclasses.dataclass(frozen=True)
class _Search:
    """The search for the best table of a model on so many stages, with these op times."""

    model: ModelConfig
    pipeline: PipelineConfig
    stages: int
    times: Times
    report: Report

    def setup(self) -> Setup:
        """The setup of the best table. Raises ConfigError for a schedule that does not fit."""
        pipeline, layers, stages = self.pipeline, self.model.layers, self.stages
        if stages == 1:
            table = by_name.make_table(TableSpec(ONE_CHUNK, 1, 1, pipeline.microbatches))
            return Setup(Placement(layers), table, self.times, (1.0,))
        try:
            memory = pipeline.memory or None
            if pipeline.schedule == "auto" and not memory:
                # as many residuals as a stage holds in 1F1B with the same permutes
                sizes = spread(layers, stages)
                spec = TableSpec(
                    ONE_CHUNK,
                    stages,
                    1,
                    pipeline.microbatches,
                    permute="late" if pipeline.permute == "auto" else pipeline.permute,
                    remat_full=has_recompute_ops(pipeline.remat),
                    saved=saved_fractions(pipeline.remat, sizes),
                )
                memory = memory_of(by_name.make_table(spec))
            candidates = self._candidates(memory)
        except ConfigError:
            raise
        except table_search.MemoryTooSmall as error:
            if pipeline.memory:
                raise ConfigError(
                    "pipeline.memory",
                    pipeline.memory,
                    "is too little for any table found",
                    fixes=values_for("pipeline.memory", [error.least, 0.0]),
                ) from None
            candidates = self._candidates(error.least)
        except ValueError as error:
            reason, _, instead = str(error).partition(": use ")
            raise ConfigError(
                "pipeline.schedule",
                pipeline.schedule,
                f"does not work: {reason}{f' (use {instead})' * bool(instead)}",
                fixes=values_for("pipeline.schedule", SCHEDULES),
            ) from None
        best = min(candidates, key=lambda candidate: candidate.weighed)
        self.report("check", 1.0)
        check(best.table)
        placement = Placement(layers, stages, stage_of=best.table.stage_of, sizes=best.sizes)
        return Setup(placement, best.table, self.times, best.shares, self._several(best))

    def _several(self, best: _Candidate) -> Table | None:
        """The table of `pipeline.steps_per_program` steps; None for one. Raises ConfigError where
        it would add up a gradient in another order than one step at a time."""
        pipeline, steps = self.pipeline, self.pipeline.steps_per_program
        if steps == 1:
            return None
        if best.table.overlaps:
            raise ConfigError(
                "pipeline.steps_per_program",
                steps,
                f"has no table of several steps whose cells have F and B, as {pipeline.schedule}",
                fixes=[{"pipeline.steps_per_program": 1}],
            )
        table = repeated(best.table, steps, self.times, best.shares, pipeline.permute)
        check(table)
        shares_sum = table.vocabulary == "parallel" or table.stage_of[0] == table.stage_of[-1]
        if self.model.tied_embeddings and shares_sum and not same_sums(table, best.table):
            raise ConfigError(
                "pipeline.steps_per_program",
                steps,
                f"adds up the gradient of tied embeddings in another order than one step of "
                f"{pipeline.schedule} does",
                fixes=[
                    {"pipeline.steps_per_program": 1},
                    *values_for("pipeline.permute", PACKINGS),
                ],
            )
        return table

    def _candidates(self, memory: float | None) -> list[_Candidate]:
        """The tables for each number of chunks on a stage, and each place of the vocabulary, that
        the config leaves open.

        memory: the most residuals that a stage may hold with `auto`, in those of all its layers

        Raises MemoryTooSmall, with the least that suffices, if none fits.
        """
        pipeline, stages = self.pipeline, self.stages
        repeats: Sequence[int] = (pipeline.repeats,)
        if pipeline.schedule == "auto" and not pipeline.repeats:
            repeats = [n for n in ANY_REPEATS if n * stages <= self.model.layers]
            if pipeline.chunk_layers:
                repeats = (len(pipeline.chunk_layers) // stages,)
        vocabularies: Sequence[str] = (pipeline.vocabulary,)
        file = self._file
        if pipeline.vocabulary == "auto" and not isinstance(file, Table):
            vocabularies = ("end_stages",) if ends_with_layers(self.model) else VOCABULARIES
        if isinstance(file, ChunkOrders):
            repeats = (max(map(file.stage_of.count, range(stages))),)
        # the work grows with the chunks; a file's table needs none
        total, done = max(1, sum(repeats) * len(vocabularies)), 0
        candidates, too_small = [], []
        for number, vocabulary in itertools.product(repeats, vocabularies):
            part = part_of(self.report, done / total, number / total)
            for chunks in self._cuts(number):
                try:
                    candidates.append(self._candidate(number, chunks, vocabulary, memory, part))
                except table_search.MemoryTooSmall as error:
                    too_small.append(error.least)
            done += number
        if not candidates:
            raise table_search.MemoryTooSmall(memory or 0.0, min(too_small))
        return candidates

    @functools.cached_property
    def _file(self) -> Table | ChunkOrders | None:
        """The file's schedule, which fits the config; None for a named one. Raises ConfigError for
        one that does not fit, and ValueError for one that cannot be read."""
        if not self.pipeline.schedule.startswith(CSV):
            return None
        file = read_schedule(self.pipeline.schedule.removeprefix(CSV))
        _check_fits(file, self.model, self.pipeline, self.stages)
        return file

    def _cuts(self, repeats: int) -> list[tuple[int, ...]]:
        """The numbers of layers of each chunk to try, with `repeats` chunks on a stage."""
        pipeline, layers, times, file = self.pipeline, self.model.layers, self.times, self._file
        if pipeline.chunk_layers:
            return [pipeline.chunk_layers]
        if isinstance(file, Table):
            units = _units_of_chunks(file)
            firsts = itertools.accumulate((0, *units[:-1]))
            stages_of = [tuple(file.stage_of[first] for first in firsts)]
        elif file:
            units, stages_of = (1,) * len(file.stage_of), [file.stage_of]
        else:
            units = (1,) * (self.stages * repeats)
            known = SCHEDULES.get(self.pipeline.schedule)  # all for `auto`
            names = [each.placement for each in ([known] if known else SCHEDULES.values())]
            stages_of = [PLACEMENTS[name](self.stages, repeats) for name in dict.fromkeys(names)]
        if pipeline.layer_costs or not ends_with_layers(self.model):
            return [spread(layers, len(units), pipeline.layer_costs)]
        # Layers that no chunk has stand before the first chunk or after the last one, which may be
        # without others.
        saved = times.overlap if pipeline.overlap else 0.0
        layer = (times.F + times.B + times.W + times.R - saved) * self.stages / layers
        seconds = layer, 2 * times.embed, times.head
        least = _least_layers(units)
        return list(dict.fromkeys(balanced(layers, each, least, *seconds) for each in stages_of))

    def _candidate(
        self,
        repeats: int,
        chunks: tuple[int, ...],
        vocabulary: str,
        memory: float | None,
        report: Report,
    ) -> _Candidate:
        """A table with `repeats` chunks on a stage, of so many layers each; of `auto`, within
        `memory` residuals of a stage."""
        pipeline, stages, layers = self.pipeline, self.stages, self.model.layers
        file = self._file
        if isinstance(file, Table):
            units_per_chunk = _units_of_chunks(file)
            sizes = tuple(itertools.chain.from_iterable(map(spread, chunks, units_per_chunk)))
        else:
            units_per_chunk, sizes = cut(chunks, pipeline.layers_per_op)
        costs = pipeline.layer_costs or (1.0,) * layers
        ends, saved = itertools.accumulate(sizes), saved_fractions(pipeline.remat, sizes)
        shares = tuple(
            sum(costs[end - size : end]) / (sum(costs) / stages)
            for size, end in zip(sizes, ends, strict=True)
        )
        spec = TableSpec(
            pipeline.schedule,
            stages,
            repeats,
            pipeline.microbatches,
            times=self.times,
            permute=pipeline.permute,
            remat_full=has_recompute_ops(pipeline.remat),
            units_per_chunk=units_per_chunk,
            shares=shares,
            saved=saved,
            saves_inputs=saves_layer_inputs(remat_of(pipeline.remat).mode, pipeline.save),
            vocabulary=vocabulary,
            overlap=pipeline.overlap,
            memory=memory,
        )
        if isinstance(file, ChunkOrders):
            table = by_name.packed(file, spec, report)
        elif file:
            table = dataclasses.replace(file, saved=saved, saves_inputs=spec.saves_inputs)
        else:
            table = by_name.make_table(spec, report)
        return _Candidate(cost(table, spec), table, sizes, shares)


# --- a file's table and the config ----------------------------------------------------------------


def _units_of_chunks(table: Table) -> tuple[int, ...]:
    """The number of units of each chunk of a table."""
    return tuple(table.chunk_of.count(chunk) for chunk in sorted(set(table.chunk_of)))


def _check_fits(
    file: Table | ChunkOrders, model: ModelConfig, pipeline: PipelineConfig, stages: int
) -> None:
    """Raises ConfigError unless a file's schedule does what the config says.

    Its fix is all that the file needs changed, at once: whoever names a file asks for that
    schedule, and not for the least change.
    """
    schedule = pipeline.schedule
    by_names = values_for("pipeline.schedule", SCHEDULES)
    table = file if isinstance(file, Table) else None
    if table and table.forward_only:
        raise ConfigError(
            "pipeline.schedule",
            schedule,
            "has F ops alone, and training needs their B and W",
            fixes=by_names,
        )
    units = _units_of_chunks(table) if table else (1,) * len(file.stage_of)
    needs = [
        *_needed_sizes(file, units, pipeline, stages),
        *(_needed_by_table(table, pipeline) if table else ()),
        *_needed_layers(units, model, pipeline, stages),
    ]
    if needs:
        changes = {path: value for need in needs for path, value in need.fixes[0].items()}
        raise ConfigError(needs[0].field, needs[0].value, needs[0].rule, fixes=[changes])
    if table and table.vocabulary == "parallel" and (name := ends_with_layers(model)):
        raise ConfigError(
            f"model.{name}",
            getattr(model, name),
            f"needs embedding and head on one stage, and {schedule} shares them",
            fixes=[{f"model.{name}": 0}, *by_names],
        )


def _change(path: str, value: object, rule: str, needed: object) -> ConfigError:
    return ConfigError(path, value, rule, fixes=[{path: needed}])


def _needed_sizes(
    file: Table | ChunkOrders, units: Sequence[int], pipeline: PipelineConfig, stages: int
) -> Iterator[ConfigError]:
    """An error, with one fix, for each number of stages, microbatches and chunks that is not the
    file's. units: of each chunk"""
    name, chunks = pipeline.schedule, len(units)
    for path, value, needed in (
        ("mesh.stage", stages, file.stages),
        ("pipeline.microbatches", pipeline.microbatches, file.microbatches),
    ):
        if value != needed:
            yield _change(path, value, f"is not the {needed} of the table of {name}", needed)
    if pipeline.repeats and pipeline.repeats != chunks / file.stages:
        yield _change(
            "pipeline.repeats",
            pipeline.repeats,
            f"is not that of {name}, {chunks} chunks on {file.stages} stages",
            0,
        )
    if pipeline.chunk_layers and len(pipeline.chunk_layers) != chunks:
        yield _change(
            "pipeline.chunk_layers",
            pipeline.chunk_layers,
            f"has another number than the {chunks} chunks of {name}",
            (),
        )


def _needed_by_table(table: Table, pipeline: PipelineConfig) -> Iterator[ConfigError]:
    """An error, with one fix, for each setting that a file's table does not have; orders leave them
    open."""
    name = pipeline.schedule
    recomputes = has_recompute_ops(pipeline.remat)
    if table.recompute and not recomputes:
        yield _change(
            "pipeline.remat", pipeline.remat, f"does not go with the R ops of {name}", "full"
        )
    if recomputes and not table.recompute:
        yield _change(
            "pipeline.remat", pipeline.remat, f"needs R ops, and {name} has none", "selective"
        )
    if pipeline.vocabulary not in ("auto", table.vocabulary):
        yield _change(
            "pipeline.vocabulary", pipeline.vocabulary, f"is not that of {name}", table.vocabulary
        )


def _least_layers(units: Sequence[int]) -> tuple[int, ...]:
    """The fewest layers of each chunk: one for each of its units, or none in a first or last chunk
    of one unit."""
    ends = (0, len(units) - 1)
    return tuple(0 if chunk in ends and n == 1 else n for chunk, n in enumerate(units))


def _needed_layers(
    units: Sequence[int], model: ModelConfig, pipeline: PipelineConfig, stages: int
) -> Iterator[ConfigError]:
    """An error, with one fix, if the layers do not fill a file's units. units: of each chunk"""
    name, chunks, layers = pipeline.schedule, len(units), model.layers
    at_least = _least_layers(units)
    # as with a named schedule, no stage is without layers but by pipeline.chunk_layers
    needed = sum(at_least if chunks > stages else units)
    if needed > layers:
        enough = needed if len(set(units)) == 1 else chunks * max(units)
        yield _change("model.layers", layers, f"are fewer than the units of {name}", enough)
        return
    given = pipeline.chunk_layers if len(pipeline.chunk_layers) == chunks else ()
    if ends_with_layers(model) and not given and not pipeline.layer_costs:
        return  # `_cuts` gives each chunk what it needs
    sizes = given or spread(layers, chunks, pipeline.layer_costs)
    if any(size < least for size, least in zip(sizes, at_least, strict=True)):
        rule = f"leaves a chunk fewer layers than it has units in {name}"
        cuts = [field for field in ("chunk_layers", "layer_costs") if getattr(pipeline, field)]
        if cuts:
            yield _change(f"pipeline.{cuts[0]}", getattr(pipeline, cuts[0]), rule, ())
        else:
            yield _change("model.layers", layers, rule, chunks * max(units))
