"""The picture of the first microbatches of a step's table. No jax."""

from jaxtrain import config as cfg
from jaxtrain.config import ResolvedConfig
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.schedule import drawing
from jaxtrain.schedule.orders import AUTO, GROWING, SCHEDULES

ROUNDS = 2  # microbatches of the picture, in those that fill the pipeline
# Schedules of shortened steps: all but a file's and those whose slots grow with the microbatches.
SHORTENED = frozenset({*SCHEDULES, AUTO}.difference(GROWING))


def step_picture(config: ResolvedConfig) -> tuple[str, str]:
    """A line about the table of a step, and its timeline as SVG, "" for one stage. Raises
    ConfigError for a schedule that is not made for so many stages and microbatches."""
    count, few = config.pipeline.microbatches, ROUNDS * config.mesh.stage
    if config.mesh.stage == 1:
        return "one stage, whose microbatches follow each other", ""
    shown = min(count, few) if config.pipeline.schedule in SHORTENED else count
    setup = make_setup(cfg.replace(config, {"pipeline.microbatches": shown}).resolve())
    svg = drawing.svg(setup.table, setup.simulation().timeline_coupled, setup.table.name)
    return f"{shown} of the {count} microbatches of a step, by the exact clock", svg
