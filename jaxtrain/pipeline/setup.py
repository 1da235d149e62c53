"""The tables and the placement of a config: everything about a step that does not need its devices.
No jax.

Tables are made for op times. These are the config's; if it has none, the planner's for the hardware
that the config names; if it names none, they follow from the model's sizes: F, B and W of a stage
take the same time, R takes that of F, the head its share of the multiplications, a message a
fiftieth of F (op_times.py).

How to read this file: `make_setup` returns a `Setup`, and keeps the last ones. `_Search.setup`
compares the candidates that the config leaves open, and makes of the best one the setup:

    number of chunks a stage  ×  place of the vocabulary  ×  cuts of the layers into chunks
    `_candidates`                `_candidates`               `_cuts`

`_candidate` makes the table of each.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from jaxtrain.config import (
    ConfigError,
    ModelConfig,
    PipelineConfig,
    ResolvedConfig,
    ends_with_layers,
    forms_of_layers,
)
from jaxtrain.config.rules.rules import values_for
from jaxtrain.config.saved_values import saves_layer_inputs
from jaxtrain.config.sizes import remat_of
from jaxtrain.pipeline.op_times import complete_times, has_recompute_ops, saved_fractions
from jaxtrain.pipeline.schedule_file import check_fits, least_layers, units_of_chunks
from jaxtrain.planner.step.planned_op_times import load, model_of, op_times
from jaxtrain.schedule import by_name, table_search
from jaxtrain.schedule.clocks.simulate import Simulation, simulate
from jaxtrain.schedule.clocks.times import KnownTimes, Times
from jaxtrain.schedule.files.order_csv import read_schedule
from jaxtrain.schedule.orders import CSV, ONE_CHUNK, SCHEDULES, ChunkOrders
from jaxtrain.schedule.packing import PACKINGS
from jaxtrain.schedule.placement import PLACEMENTS, Placement, TimesToBalance, balanced, cut, spread
from jaxtrain.schedule.repeated_table import repeated, same_sums
from jaxtrain.schedule.slots import SlottedTable, assign_slots
from jaxtrain.schedule.table import VOCABULARIES, ScheduleError, Table
from jaxtrain.schedule.table_spec import Cost, TableSpec, cost, memory_of
from jaxtrain.schedule.validator import check

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
    def weighted_cost(self) -> Cost:
        """The cost by which the two places of the vocabulary are compared.

        Time is weighed against memory: embedding and head sharded over all stages need less of it
        than on the end stages alone.
        """
        # The end stages alone have the vocabulary only where the step then takes less than 95 % of
        # the time. Among tables of one place of the vocabulary the factor changes nothing.
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
    or, where none are known, F = B = W = 1 and the others from the model's sizes. Raises
    HardwareError."""
    pipeline, stages, known = config.pipeline, config.mesh.stage, config.pipeline.times
    if not known and stages > 1 and config.train.hardware:
        known = op_times(config, load(config.train.hardware))
    model = model_of(config.model, config.data.sequence_length)
    recomputes = has_recompute_ops(pipeline.remat)
    return complete_times(KnownTimes(*known) if known else None, model, stages, recomputes)


# --- the search -----------------------------------------------------------------------------------


_SETUPS: dict[ResolvedConfig, Setup] = {}  # of the last configs, oldest first
MOST_SETUPS = 16


def make_setup(
    config: ResolvedConfig, report: table_search.ReportProgress = table_search.silent
) -> Setup:
    """The tables of a config; the same object as long as it is one of the last MOST_SETUPS.

    report: is told how far the search for a table has come, where there is one. Raises ConfigError
    for a schedule that does not fit.

    >>> from jaxtrain import load_recipe
    >>> from jaxtrain.config.rules.mesh_rules import on_mesh
    >>> setup = make_setup(on_mesh(load_recipe("tiny"), devices=8).resolve())
    >>> setup.table.name, setup.table.stages, setup.table.microbatches
    ('interleaved', 2, 4)
    """
    # Checks, the planner and the trainer ask for the same setup, and a search takes seconds. A dict
    # keeps its insertion order, so the oldest one goes first.
    if config not in _SETUPS:
        times = times_of(config)
        costs = model_of(config.model, config.data.sequence_length).layer_costs
        search = _Search(config.model, config.pipeline, config.mesh.stage, times, costs, report)
        setup = search.setup()
        while len(_SETUPS) >= MOST_SETUPS:
            _SETUPS.pop(next(iter(_SETUPS)))
        _SETUPS[config] = setup
    return _SETUPS[config]


@dataclasses.dataclass(frozen=True)
class _Search:
    """The search for the best table of a model on so many stages, with these op times. costs: of
    each layer over the mean one's, where layers are of several kinds; otherwise ()"""

    model: ModelConfig
    pipeline: PipelineConfig
    stages: int
    times: Times
    costs: tuple[float, ...]
    report: table_search.ReportProgress

    def setup(self) -> Setup:
        """The setup of the best table. Raises ConfigError for a schedule that does not fit."""
        pipeline, layers, stages = self.pipeline, self.model.layers, self.stages
        forms = forms_of_layers(self.model)
        if stages == 1:
            table = by_name.make_table(TableSpec(ONE_CHUNK, 1, 1, pipeline.microbatches))
            return Setup(Placement(layers, forms=forms), table, self.times, (1.0,))
        try:
            memory = pipeline.memory or None
            if pipeline.schedule == "auto" and not memory:
                # `auto` without a bound takes as much memory as 1F1B with the same permutes: the
                # schedule that a user would otherwise have. More memory is only for who asks.
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
        except table_search.MemoryTooSmall as error:
            if pipeline.memory:
                raise ConfigError(
                    "pipeline.memory",
                    pipeline.memory,
                    "is too little for any table found",
                    fixes=values_for("pipeline.memory", [error.least, 0.0]),
                ) from None
            candidates = self._candidates(error.least)
        except ScheduleError as error:
            # The ConfigError's own fixes are flags. The error's is in words of its file, and stands
            # in brackets.
            instead = f" (use {error.use})" if error.use else ""
            raise ConfigError(
                "pipeline.schedule",
                pipeline.schedule,
                f"does not work: {error.problem}{instead}",
                fixes=values_for("pipeline.schedule", SCHEDULES),
            ) from None
        # Of equal candidates the earliest: fewer chunks, then the vocabulary on all stages.
        best = min(candidates, key=lambda candidate: candidate.weighted_cost)
        self.report("check", 1.0)
        check(best.table)
        placement = Placement(layers, stages, 1, best.table.stage_of, best.sizes, forms)
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
        # Head and embedding add to one array, the gradient of tied tables, where they are on the
        # same devices. Several steps in a program must add in the order of one step, bit for bit.
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
            repeats = [n for n in table_search.ANY_REPEATS if n * stages <= self.model.layers]
            if pipeline.chunk_layers:
                repeats = (len(pipeline.chunk_layers) // stages,)
        if not repeats:
            raise ScheduleError(f"{self.model.layers} layers are fewer than {stages} stages")
        # A file's table has its vocabulary's place. Dense layers and prediction modules run with
        # embedding and head, on one stage each, so these cannot be split over stages.
        vocabularies: Sequence[str] = (pipeline.vocabulary,)
        file = self._file
        if pipeline.vocabulary == "auto" and not isinstance(file, Table):
            vocabularies = ("end_stages",) if ends_with_layers(self.model) else VOCABULARIES
        if isinstance(file, ChunkOrders):
            repeats = (max(map(file.stage_of.count, range(stages))),)
        # the work grows with the chunks; a file's table needs none
        total, done = max(1, sum(repeats) * len(vocabularies)), 0
        candidates, too_small = [], []
        # One candidate that does not fit into `memory` is no error. If none does, the least bound
        # that would do for any of them is the fix.
        for number, vocabulary in itertools.product(repeats, vocabularies):
            report = table_search.report_share(self.report, done / total, number / total)
            for chunks in self._cuts(number):
                try:
                    candidates.append(self._candidate(number, chunks, vocabulary, memory, report))
                except table_search.MemoryTooSmall as error:
                    too_small.append(error.least)
            done += number
        if not candidates:
            raise table_search.MemoryTooSmall(memory or 0.0, min(too_small))
        return candidates

    @functools.cached_property
    def _file(self) -> Table | ChunkOrders | None:
        """The file's schedule, which fits the config; None for a named one. Raises ConfigError for
        one that does not fit, and ScheduleError for one that cannot be read."""
        if not self.pipeline.schedule.startswith(CSV):
            return None
        file = read_schedule(self.pipeline.schedule.removeprefix(CSV))
        check_fits(file, self.model, self.pipeline, self.stages)
        return file

    def _cuts(self, repeats: int) -> list[tuple[int, ...]]:
        """The numbers of layers of each chunk to try, with `repeats` chunks on a stage."""
        pipeline, layers, times, file = self.pipeline, self.model.layers, self.times, self._file
        if pipeline.chunk_layers:
            return [pipeline.chunk_layers]
        if isinstance(file, Table):
            units = units_of_chunks(file)
            lowest_units = itertools.accumulate((0, *units[:-1]))
            stages_of = [tuple(file.stage_of[unit] for unit in lowest_units)]
        elif file:
            units, stages_of = (1,) * len(file.stage_of), [file.stage_of]
        else:
            units = (1,) * (self.stages * repeats)
            known = SCHEDULES.get(self.pipeline.schedule)  # all for `auto`
            names = [each.placement for each in ([known] if known else SCHEDULES.values())]
            stages_of = [PLACEMENTS[name](self.stages, repeats) for name in dict.fromkeys(names)]
        with_ends = ends_with_layers(self.model)
        if pipeline.layer_costs or not (with_ends or self.costs):
            return [spread(layers, len(units), pipeline.layer_costs)]
        # Dense layers run before the first chunk, prediction modules after the last one; these two
        # chunks may then have no layer of their own. `times` are of a stage, and one layer is what
        # there is to move: with 4 stages, 8 layers and F + B + W + R = 6 it takes 3.
        saved = times.overlap if pipeline.overlap else 0.0
        layer = (times.F + times.B + times.W + times.R - saved) * self.stages / layers
        ends = (2 * times.embed, times.head) if with_ends else (0.0, 0.0)
        work = TimesToBalance(layer, *ends, self.costs, len(self.model.pattern))
        least = least_layers(units) if with_ends else tuple(units)
        return list(dict.fromkeys(balanced(layers, each, least, work) for each in stages_of))

    def _candidate(
        self,
        repeats: int,
        chunks: tuple[int, ...],
        vocabulary: str,
        memory: float | None,
        report: table_search.ReportProgress,
    ) -> _Candidate:
        """A table with `repeats` chunks on a stage, of so many layers each; of `auto`, within
        `memory` residuals of a stage."""
        pipeline, stages, layers = self.pipeline, self.stages, self.model.layers
        # A file's table says how many units each chunk has; orders and named schedules take the
        # setting's.
        file = self._file
        if isinstance(file, Table):
            units_per_chunk = units_of_chunks(file)
            sizes = tuple(itertools.chain.from_iterable(map(spread, chunks, units_per_chunk)))
        else:
            units_per_chunk, sizes = cut(chunks, pipeline.layers_per_op)
        # A unit's share is the cost of its layers over that of a mean stage. 8 layers of cost 1 on
        # 4 stages, a unit of 3 layers: 3 / (8 / 4) = 1.5.
        costs = pipeline.layer_costs or self.costs or (1.0,) * layers
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
        return _Candidate(cost(table, self.times, shares), table, sizes, shares)
