"""From a run's config to its tables and its placement: what is known of a step before any device is.

The times for which tables are made come from the config, or else from the model's sizes: F, B and W of a stage are taken as equal, R as
another F, the head by its share of the multiplications, a message as a fiftieth of F. No JAX here.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jaxtrain.config import Config, ConfigError, ModelConfig, ends_with_layers, get
from jaxtrain.schedule import by_name, search
from jaxtrain.schedule.orders import CSV, SCHEDULES
from jaxtrain.schedule.placement import Placement, cut, spread
from jaxtrain.schedule.search import ANY_REPEATS, Cost, Problem, Report, cost
from jaxtrain.schedule.simulate import Simulation, Times, simulate
from jaxtrain.schedule.slots import SlottedTable, assign_slots
from jaxtrain.schedule.table import VOCABULARIES, Table
from jaxtrain.schedule.table_csv import read_csv
from jaxtrain.schedule.validator import check

MESSAGE = 0.02  # of F, where the config names no times
SAVED_MEMORY = 0.95  # the vocabulary is on the end stages alone where that saves more than a twentieth of the step
# What it costs, a table, the layers and the share of each of its units.
Candidate = tuple[Cost, Table, tuple[int, ...], tuple[float, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A step's tables.

    train, evaluate: with their slots; None on one stage
    table:           the training table, also on one stage
    shares:          of each unit, its part of a stage's work
    """

    placement: Placement
    table: Table
    train: SlottedTable | None
    evaluate: SlottedTable | None
    times: Times
    shares: tuple[float, ...]

    @property
    def shares_vocabulary(self) -> bool:
        """Whether embedding and head are split over the stages, which do their ops together."""
        return self.train is not None and self.table.vocabulary == "parallel"

    def simulation(self) -> Simulation:
        """What the table costs in time and memory."""
        return simulate(self.table, self.times, shares=self.shares)

    def describe(self) -> str:
        """One line for people: the table, its predicted bubble, and the most activations on a stage."""
        t = self.table
        if self.train is None:
            return f"{t.microbatches} microbatches one after the other"
        found = self.simulation()
        bubble = f"predicted bubble {found.bubble_fraction_coupled:.1%} ({found.bubble_fraction:.1%} if stages ran on their own)"
        if found.imbalance > 1.1:
            bubble += f" of the busiest stage, which works {found.imbalance:.1f} times the mean"
        where = "shared by all stages" if t.vocabulary == "parallel" else "on the first and last stage"
        return f"{t.name}, {t.ticks} ticks, {bubble}; embedding and head {where}"


def layer_parameters(m: ModelConfig, dense: bool = False) -> int:
    """Parameters of one layer's matrices that a token is multiplied with, of a resolved model; of a `dense` one before the others."""
    if m.attention == "mla":
        attention = m.width * (m.query_rank + m.kv_rank + m.rope_head_dim) + m.heads * m.value_head_dim * m.width
        attention += m.heads * (m.head_dim + m.rope_head_dim) * (m.query_rank or m.width)
        attention += m.heads * (m.head_dim + m.value_head_dim) * m.kv_rank
    else:
        attention = m.width * m.head_dim * 2 * (m.heads + m.kv_heads)
    experts = 0 if dense else m.experts
    columns = (m.experts_per_token + m.shared_experts) * m.expert_width if experts else m.mlp_width
    return attention + m.width * (columns * (3 if m.activation == "swiglu" else 2) + experts)


def times_of(config: Config, stages: int) -> Times:
    """The op times of a resolved config: its own, or those of the module's text, with F = 1."""
    p, m = config.pipeline, config.model
    again = {"full": 1.0, "selective": 0.0, "none": 0.0}[p.remat] if stages > 1 else 0.0
    # A module that predicts a further token is another head, a layer and its projection, forward and backward.
    products = (1 + m.mtp_depth) * m.vocab_size * m.width + m.mtp_depth * (layer_parameters(m) + 2 * m.width**2)
    whole = layer_parameters(m) * m.layers / stages
    head = 3 * products / whole
    # The dense layers before the others run forward with the embedding, and forward and backward with its gradient: four times, in two.
    embed = 2 * m.dense_layers * layer_parameters(m, dense=True) / whole if m.experts else 0.0
    if not p.times:
        return Times(1.0, 1.0, 1.0, MESSAGE, again, head, embed=embed)
    f, b, w, message, r, own_head = (*p.times, *(0.0, again * p.times[0], head * p.times[0])[len(p.times) - 3 :])
    return Times(f, b, w, message, r, own_head, embed=embed * f)


_SETUPS: dict[Config, Setup] = {}  # of the last configs, oldest first
KEPT = 16


def make_setup(config: Config, report: Report = search.silent) -> Setup:
    """The tables of a resolved config whose mesh is known; the same object as long as it is remembered. Raises ConfigError for a schedule
    that does not fit. `report` is told how far the search for a table has come, where there is one."""
    if config not in _SETUPS:
        made = _search(config, report)
        while len(_SETUPS) >= KEPT:
            _SETUPS.pop(next(iter(_SETUPS)))
        _SETUPS[config] = made
    return _SETUPS[config]


def _search(config: Config, report: Report) -> Setup:
    p, stages = config.pipeline, config.mesh.stage
    try:
        if stages == 1:
            table = by_name.make_table("1f1b", 1, 1, p.microbatches)
            return Setup(Placement(config.model.layers), table, None, None, times_of(config, 1), (1.0,))
        made = _candidates(config, _memory(config), report)
    except ConfigError:
        raise
    except search.MemoryTooSmall as error:
        if p.memory:
            enough = [{"pipeline.memory": error.least}, {"pipeline.memory": 0.0}]
            raise ConfigError("pipeline.memory", p.memory, "is too little for any table found", fixes=enough) from None
        made = _candidates(config, error.least, report)
    except ValueError as error:
        reason, _, instead = str(error).partition(": use ")
        fixes = [{"pipeline.schedule": name} for name in SCHEDULES]
        rule = f"does not work: {reason}{f' (use {instead})' * bool(instead)}"
        raise ConfigError("pipeline.schedule", p.schedule, rule, fixes=fixes) from None
    # Between the two places for the vocabulary time is weighed against memory: each stage's share against both tables on every stage.
    weighed = lambda price, table: (price[0] * (SAVED_MEMORY if table.vocabulary == "parallel" else 1.0), *price[1:])
    _, table, sizes, shares = min(made, key=lambda candidate: weighed(*candidate[:2]))
    report("check, slots, evaluation", 1.0)
    check(table)
    placement = Placement(config.model.layers, stages, stage_of=table.stage_of, sizes=sizes)
    forward = by_name.make_forward_table(table.stage_of, stages, p.microbatches, vocabulary=table.vocabulary)
    return Setup(placement, table, assign_slots(table), assign_slots(forward), times_of(config, stages), shares)


def _memory(config: Config) -> float | None:
    """For `auto`, the most stashes that a stage may hold: by default those of 1F1B, sent in the same way."""
    p = config.pipeline
    if p.schedule != "auto" or p.memory:
        return p.memory or None
    mode = "late" if p.permute == "auto" else p.permute
    return search.memory_of(by_name.make_table("1f1b", config.mesh.stage, 1, p.microbatches, permute=mode, remat_full=p.remat == "full"))


def _candidates(config: Config, memory: float | None, report: Report) -> list[Candidate]:
    """The tables for each number of chunks on a stage and place of the vocabulary. Raises MemoryTooSmall, with the least, if none fits."""
    made, too_small = [], []
    wanted = list(itertools.product(_repeats(config), _vocabularies(config)))
    whole = sum(v for v, _ in wanted)  # the work grows with the chunks
    for i, (v, vocabulary) in enumerate(wanted):
        before = sum(v for v, _ in wanted[:i])
        part = lambda what, done, before=before, v=v: report(what, (before + v * done) / whole)
        try:
            made.append(_make(config, v, vocabulary, memory, part))
        except search.MemoryTooSmall as error:
            too_small.append(error.least)
    if not made:
        raise search.MemoryTooSmall(memory or 0.0, min(too_small))
    return made


def _repeats(config: Config) -> Sequence[int]:
    """The numbers of chunks on a stage to try."""
    p = config.pipeline
    if p.repeats or p.schedule != "auto":
        return (p.repeats,)
    if p.chunk_layers:
        return (len(p.chunk_layers) // config.mesh.stage,)
    return [v for v in ANY_REPEATS if v * config.mesh.stage <= config.model.layers]


def _vocabularies(config: Config) -> Sequence[str]:
    wanted = config.pipeline.vocabulary
    if wanted != "auto" or config.pipeline.schedule.startswith(CSV):
        return (wanted,)
    return ("end_stages",) if ends_with_layers(config.model) else VOCABULARIES


def _make(config: Config, repeats: int, vocabulary: str, memory: float | None, report: Report) -> Candidate:
    """A table for so many chunks on a stage; of `auto`, within so many stashes of a stage."""
    p, stages, layers = config.pipeline, config.mesh.stage, config.model.layers
    times, full = times_of(config, stages), p.remat == "full"
    own = p.schedule.startswith(CSV)
    if own:
        table = read_csv(p.schedule.removeprefix(CSV))
        _fits(config, table)
        groups = tuple(table.chunk_of.count(c) for c in sorted(set(table.chunk_of)))
        chunks = p.chunk_layers or spread(layers, len(groups), p.layer_costs)
        sizes = tuple(n for size, parts in zip(chunks, groups, strict=True) for n in spread(size, parts))
    else:
        chunks = p.chunk_layers or spread(layers, stages * repeats, p.layer_costs)
        groups, sizes = cut(chunks, p.layers_per_op)
    shares = _shares(config, sizes)
    problem = Problem(stages, p.microbatches, times, full, groups, shares, vocabulary)
    if not own:
        table = by_name.make_table(
            p.schedule, stages, repeats, p.microbatches, times=times, permute=p.permute, remat_full=full, groups=groups, shares=shares,
            vocabulary=vocabulary, memory=memory and repeats * memory, report=report,
        )  # fmt: skip
    return cost(table, problem), table, sizes, shares


def _shares(config: Config, sizes: Sequence[int]) -> tuple[float, ...]:
    """Of each unit, its part of a stage's work, by its layers' costs."""
    costs = config.pipeline.layer_costs or (1.0,) * config.model.layers
    whole, first, shares = sum(costs) / config.mesh.stage, 0, []
    for n in sizes:
        shares.append(sum(costs[first : first + n]) / whole)
        first += n
    return tuple(shares)


def _fits(config: Config, table: Table) -> None:
    """ConfigError unless a file's table does what the config says.

    Its fix is all that the table wants changed, at once: whoever names a file wants that table, and not the least change.
    """
    p = config.pipeline
    named = [{"pipeline.schedule": name} for name in SCHEDULES]
    if table.forward_only:
        rule = "has F ops alone, and training needs their B and W"
        raise ConfigError("pipeline.schedule", p.schedule, rule, fixes=named)
    wrong = _wanted(config, table)
    if wrong:
        path, (rule, _) = next(iter(wrong.items()))
        raise ConfigError(path, get(config, path), rule, fixes=[{path: value for path, (_, value) in wrong.items()}])
    if table.vocabulary == "parallel" and (path := ends_with_layers(config.model)):
        rule = f"needs embedding and head on one stage, and {p.schedule} shares them"
        raise ConfigError(path, get(config, path), rule, fixes=[{path: 0}, *named])


def _wanted(config: Config, table: Table) -> dict[str, tuple[str, Any]]:
    """Setting → (what is wrong with it for a file's table, the value that the table wants)."""
    p, name = config.pipeline, config.pipeline.schedule
    groups = [table.chunk_of.count(c) for c in sorted(set(table.chunk_of))]
    chunks = len(groups)
    wrong: dict[str, tuple[str, Any]] = {}
    for path, wanted in (("mesh.stage", table.stages), ("pipeline.microbatches", table.microbatches)):
        if get(config, path) != wanted:
            wrong[path] = f"is not the {wanted} of the table of {name}", wanted
    if table.recompute and p.remat != "full":
        wrong["pipeline.remat"] = f"does not go with the R ops of {name}", "full"
    if p.remat == "full" and not table.recompute:
        wrong["pipeline.remat"] = f"needs R ops, and {name} has none", "selective"
    if p.vocabulary not in ("auto", table.vocabulary):
        wrong["pipeline.vocabulary"] = f"is not that of {name}", table.vocabulary
    if p.repeats and p.repeats != chunks / table.stages:
        wrong["pipeline.repeats"] = f"is not that of {name}, {chunks} chunks on {table.stages} stages", 0
    if p.chunk_layers and len(p.chunk_layers) != chunks:
        wrong["pipeline.chunk_layers"] = f"has another number than the {chunks} chunks of {name}", ()
    if table.units > config.model.layers:
        return wrong | {"model.layers": (f"are fewer than the units of {name}", table.units)}
    own = p.chunk_layers if len(p.chunk_layers) == chunks else ()
    if any(n < parts for n, parts in zip(own or spread(config.model.layers, chunks, p.layer_costs), groups, strict=True)):
        cut_by = [path for path in ("pipeline.chunk_layers", "pipeline.layer_costs") if get(config, path)]
        rule = f"leaves a chunk fewer layers than it has units in {name}"
        path, value = (cut_by[0], ()) if cut_by else ("model.layers", chunks * max(groups))
        wrong[path] = rule, value
    return wrong
