"""The table that a config is trained with on a kind of device, and its slots, of which costs/ has closed forms for a search. No jax.

op times    the config's own, or those planned for the device: they decide where the vocabulary lies
pools       the most slots that any stage needs, which every stage's arrays have (schedule/slots.py)
layers      of the largest unit, and those for whose parameters a device has room (schedule/placement.py)
"""

import math

from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.config.pipeline_setup import make_setup
from jaxtrain.costs.slots import Slots
from jaxtrain.costs.step_time import Work
from jaxtrain.schedule.orders import SCHEDULES

CELLS = 2**14  # stages · chunks on a stage · microbatches of a table that is made in a second or two; of longer steps a part is
LEAST_ROUNDS = 4  # microbatches of such a part, in those of a pipeline that is filled
SHORTENED = frozenset({*SCHEDULES, "auto"} - {"gpipe"})  # all but a file's and the one whose slots grow with the microbatches


def op_times(work: Work) -> tuple[float, ...]:
    """Seconds of F, B, W, message, R and head of one microbatch on a whole stage, as `pipeline.times` has them: what no R op computes
    again is part of B."""
    layers = math.ceil(work.model.layers / work.layout.stage)
    forward, again, backward, weights = (work.layer()[name].seconds * layers for name in "FRBW")
    if work.layout.remat != "full":
        backward, again = backward + again, 0.0
    return forward, backward, weights, work.message(), again, work.head().seconds


def with_op_times(config: Config, work: Work) -> Config:
    """The resolved config with the op times by which its table is made."""
    if config.mesh.stage == 1 or config.pipeline.times:
        return config
    return cfg.replace(config, {"pipeline.times": op_times(work)})


def slots_of(config: Config) -> Slots | None:
    """Of a resolved config whose mesh is known; None with one stage, which has no table.

    Of a step with very many microbatches those of a shorter one: no stage ever has more than in the first rounds, but with `gpipe`. Raises
    ConfigError for a schedule that is not made for so many stages and microbatches.
    """
    pipeline, stages = config.pipeline, config.mesh.stage
    if stages == 1:
        return None
    rounds = max(LEAST_ROUNDS, CELLS // (stages**2 * max(1, pipeline.repeats)))
    if pipeline.schedule in SHORTENED and rounds * stages < pipeline.microbatches:
        config = cfg.replace(config, {"pipeline.microbatches": rounds * stages})
    setup = make_setup(config)
    placement = setup.placement
    assert setup.train is not None  # there are stages
    return Slots(
        **setup.train.pool_sizes,
        layers=max(placement.sizes),
        rows=sum(map(placement.stack_size, range(placement.units_per_stage))),
        shares_vocabulary=setup.shares_vocabulary,
    )
