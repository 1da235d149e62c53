"""The table that a config is trained with on a kind of device, and its slots, of which costs/ has closed forms for a search. No jax.

op times    the config's own, or those planned for the device: they decide where the vocabulary lies
pools       the most slots that any stage needs, which every stage's arrays have (schedule/slots.py)
layers      of the largest unit, and those for whose parameters a device has room (schedule/placement.py)
"""

from collections.abc import Callable
from typing import Protocol, Self, TypeVar

from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.config.pipeline_setup import make_setup
from jaxtrain.config.work import milliseconds
from jaxtrain.costs.memory import Slots
from jaxtrain.costs.step_time import Work
from jaxtrain.schedule.orders import AUTO, GROWING, SCHEDULES, ZERO_BUBBLE
from jaxtrain.schedule.table import Table


class Linear(Protocol):
    """Figures that can be added, and multiplied by a number."""

    def __add__(self, other: Self, /) -> Self: ...
    def __sub__(self, other: Self, /) -> Self: ...
    def __mul__(self, times: float, /) -> Self: ...


Figures = TypeVar("Figures", bound=Linear)
CELLS = 2**12  # stages · chunks on a stage · microbatches of a table that is made in a second; of longer steps a part is
AUTO_CELLS = 2**8  # the same of `auto`, which tries some fifty tables
LEAST_ROUNDS, AUTO_ROUNDS = 4, 2  # microbatches of such a part, in those of a pipeline that is filled
SHORTENED = frozenset({*SCHEDULES, AUTO}.difference(GROWING))  # all but a file's and those whose slots grow with the microbatches


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
