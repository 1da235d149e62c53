"""Whether a config fits the file with a schedule that it names, a table or orders of ops, and the
changes without which it does not. No jax.

A file fixes numbers that are settings otherwise: stages, microbatches, chunks, for a table also
units, recomputation and the place of the vocabulary. `check_fits` collects every setting that says
something else.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxtrain.config import ConfigError, ModelConfig, PipelineConfig, ends_with_layers
from jaxtrain.config.rules.rules import values_for
from jaxtrain.pipeline.op_times import has_recompute_ops
from jaxtrain.schedule.orders import SCHEDULES, ChunkOrders
from jaxtrain.schedule.placement import spread
from jaxtrain.schedule.table import Table


def units_of_chunks(table: Table) -> tuple[int, ...]:
    """The number of units of each chunk of a table."""
    return tuple(table.chunk_of.count(chunk) for chunk in sorted(set(table.chunk_of)))


class NeededChange(NamedTuple):
    """A change of a setting without which a config does not fit the file that it names.

    path, value: the setting, and the value that does not fit
    rule: why it does not fit, to be read after the two
    needed: the value that fits
    """

    path: str
    value: object
    rule: str
    needed: object


def check_fits(
    file: Table | ChunkOrders, model: ModelConfig, pipeline: PipelineConfig, stages: int
) -> None:
    """Raises ConfigError unless the config fits the schedule of the file that it names.

    The fix has all changes of the config that the file needs, at once, even if naming a shipped
    schedule would be the smaller change: whoever names a file wants that schedule.
    """
    # A file of 4 stages with R ops, a config with mesh.stage=2 and pipeline.remat=selective: the
    # error is about mesh.stage, and its fix is {"mesh.stage": 4, "pipeline.remat": "full"}.
    schedule = pipeline.schedule
    shipped_schedules = values_for("pipeline.schedule", SCHEDULES)
    table = file if isinstance(file, Table) else None
    if table and table.forward_only:
        raise ConfigError(
            "pipeline.schedule",
            schedule,
            "has F ops alone, and training needs their B and W",
            fixes=shipped_schedules,
        )
    # Orders say nothing of units: `pipeline.layers_per_op` cuts their chunks.
    units = units_of_chunks(table) if table else (1,) * len(file.stage_of)
    changes = [
        *_changed_sizes(file, units, pipeline, stages),
        *(_changed_by_table(table, pipeline) if table else ()),
        *_changed_layers(units, model, pipeline, stages),
    ]
    if changes:
        # The error is about the first change; its one fix has all of them.
        shown = changes[0]
        fix = {change.path: change.needed for change in changes}
        raise ConfigError(shown.path, shown.value, shown.rule, fixes=[fix])
    if table and table.vocabulary == "parallel" and (name := ends_with_layers(model)):
        raise ConfigError(
            f"model.{name}",
            getattr(model, name),
            f"needs embedding and head on one stage, and {schedule} shares them",
            fixes=[{f"model.{name}": 0}, *shipped_schedules],
        )


def _changed_sizes(
    file: Table | ChunkOrders, units: Sequence[int], pipeline: PipelineConfig, stages: int
) -> Iterator[NeededChange]:
    """A change of each number of stages, microbatches and chunks that is not the file's. units: of
    each chunk"""
    name, chunks = pipeline.schedule, len(units)
    for path, value, needed in (
        ("mesh.stage", stages, file.stages),
        ("pipeline.microbatches", pipeline.microbatches, file.microbatches),
    ):
        if value != needed:
            yield NeededChange(path, value, f"is not the {needed} of the table of {name}", needed)
    if pipeline.repeats and pipeline.repeats != chunks / file.stages:
        yield NeededChange(
            "pipeline.repeats",
            pipeline.repeats,
            f"is not that of {name}, {chunks} chunks on {file.stages} stages",
            0,
        )
    if pipeline.chunk_layers and len(pipeline.chunk_layers) != chunks:
        yield NeededChange(
            "pipeline.chunk_layers",
            pipeline.chunk_layers,
            f"has another number than the {chunks} chunks of {name}",
            (),
        )


def _changed_by_table(table: Table, pipeline: PipelineConfig) -> Iterator[NeededChange]:
    """A change of each setting that a file's table does not have. Orders leave them open."""
    name = pipeline.schedule
    recomputes = has_recompute_ops(pipeline.remat)
    if table.recompute and not recomputes:
        yield NeededChange(
            "pipeline.remat", pipeline.remat, f"does not go with the R ops of {name}", "full"
        )
    if recomputes and not table.recompute:
        yield NeededChange(
            "pipeline.remat", pipeline.remat, f"needs R ops, and {name} has none", "selective"
        )
    if pipeline.vocabulary not in ("auto", table.vocabulary):
        yield NeededChange(
            "pipeline.vocabulary", pipeline.vocabulary, f"is not that of {name}", table.vocabulary
        )


def least_layers(units: Sequence[int]) -> tuple[int, ...]:
    """The fewest layers of each chunk: one for each of its units, or none in a first or last chunk
    of one unit."""
    ends = (0, len(units) - 1)
    return tuple(0 if chunk in ends and n == 1 else n for chunk, n in enumerate(units))


def _changed_layers(
    units: Sequence[int], model: ModelConfig, pipeline: PipelineConfig, stages: int
) -> Iterator[NeededChange]:
    """A change of the layers, or of their cut, if they do not fill a file's units. units: of each
    chunk"""
    name, chunks, layers = pipeline.schedule, len(units), model.layers
    at_least = least_layers(units)
    # With several chunks a stage, the first or the last chunk may be empty, since its stage has
    # others. With one, only pipeline.chunk_layers leaves a stage without layers, as it does with a
    # named schedule.
    needed = sum(at_least if chunks > stages else units)
    if needed > layers:
        enough = needed if len(set(units)) == 1 else chunks * max(units)
        yield NeededChange("model.layers", layers, f"are fewer than the units of {name}", enough)
        return
    chunk_layers = pipeline.chunk_layers if len(pipeline.chunk_layers) == chunks else ()
    if ends_with_layers(model) and not chunk_layers and not pipeline.layer_costs:
        return  # the setup's `_cuts` gives each chunk the layers that it needs
    # Chunks of 2 units with 5 layers for 3 chunks: spread gives 2 2 1, and the last one has a unit
    # without a layer. 3 · 2 layers are enough for any cut.
    sizes = chunk_layers or spread(layers, chunks, pipeline.layer_costs)
    if any(size < least for size, least in zip(sizes, at_least, strict=True)):
        rule = f"leaves a chunk fewer layers than it has units in {name}"
        cuts = [field for field in ("chunk_layers", "layer_costs") if getattr(pipeline, field)]
        if cuts:
            yield NeededChange(f"pipeline.{cuts[0]}", getattr(pipeline, cuts[0]), rule, ())
        else:
            yield NeededChange("model.layers", layers, rule, chunks * max(units))
