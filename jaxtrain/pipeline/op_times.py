"""What is known of a config's ops before they have a table: which layers an R recomputes, and how
long each op takes. No jax.

An op's time comes from the config, from the planner or from a measurement (`KnownTimes`). What none
of them knows follows from the model's sizes: `complete_times`.
"""

from collections.abc import Sequence

from jaxtrain.config.sizes import remat_of
from jaxtrain.planner.step.planned_op_times import Model
from jaxtrain.schedule.clocks.times import KnownTimes, Times

MESSAGE = 0.02  # of F, where no times are known


def has_recompute_ops(remat: str) -> bool:
    """True if an op R of its own recomputes what `pipeline.remat` says, and not B."""
    return remat_of(remat).mode == "full"


def saved_fractions(remat: str, sizes: Sequence[int]) -> tuple[float, ...]:
    """The fraction of each unit's layers that save all while `pipeline.remat` has others
    recomputed; () where no unit has such layers. sizes: the layers of each unit."""
    # remat="full:2" (two layers of a unit), units of 3 and 1 layers: 2 and 1 are recomputed, so the
    # fractions that save all are 1/3 and 0.
    recomputed = [remat_of(remat).recomputed(size) for size in sizes]
    if not any(recomputed) or recomputed == [*sizes]:
        return ()
    return tuple(1 - each / max(1, size) for each, size in zip(recomputed, sizes, strict=True))


def complete_times(known: KnownTimes | None, model: Model, stages: int, recomputes: bool) -> Times:
    """The times of all ops. Of those that are not known, R, head and embedding follow from F and
    the model's sizes; the others are 0. With `known` None, F = B = W = 1 and a message is MESSAGE.

    recomputes: there are ops R. A pipeline of one stage has none
    """
    if known is None:
        known = KnownTimes(F=1.0, B=1.0, W=1.0, message=MESSAGE)
    # All below in times of F: a stage's forward takes time in proportion to its parameters that
    # each token multiplies with.
    per_token = lambda kind, dense=False: kind.layer(dense).per_token
    stage = model.mean(per_token) * model.layers / stages
    # A module that predicts a further token is another head, a layer and its projection. All of
    # them run forward and backward, three times a forward.
    last = model.of_kind(model.stack[-1])
    module = model.vocab_size * model.width + per_token(last) + 2 * model.width**2
    head = 3 * (model.vocab_size * model.width + model.mtp_depth * module) / stage
    # The dense layers before the others run forward with the embedding, and forward and backward
    # with its gradient: four forwards, in two ops.
    embed = 2 * model.dense_layers * model.mean(lambda kind: per_token(kind, True), True) / stage
    recompute = float(recomputes and stages > 1)
    both = known.FB or 0.0
    return Times(
        known.F,
        known.B,
        known.W,
        known.message or 0.0,
        recompute * known.F if known.R is None else known.R,
        head * known.F if known.head is None else known.head,
        embed=embed * known.F if known.embedding is None else known.embedding,
        update=known.update or 0.0,
        overlap=known.F + known.B - both if both else 0.0,
    )
