"""What a step says about itself. What becomes of it, files and pictures, is in run/metrics.py."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """A step's float32 scalars; of independent replicas one of each, [replicas].

    loss:          the mean over the batch's weighted tokens, in nats, before the update
    grad_norm:     of all gradients together, before clipping
    learning_rate: of the update
    tokens:        how many weighted tokens the batch has
    mtp_loss:      the mean loss of predictions beyond the next token; None where the model makes
                   none
    expert_load:   the busiest expert's load over the mean, of the layer where that is largest; None
                   without experts
    dropped:       the part of the choices of experts that was dropped; None where nothing can be
    skipped:       updates skipped since the run began, this step's too, for their numbers were not
                   finite; None where none is
    """

    loss: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    tokens: jax.Array
    mtp_loss: jax.Array | None = None
    expert_load: jax.Array | None = None
    dropped: jax.Array | None = None
    skipped: jax.Array | None = None

    def by_name(self) -> dict[str, jax.Array]:
        """The metrics that there are."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def mean_over_replicas(each: StepMetrics) -> StepMetrics:
    """The metrics of the whole step, from those of each replica: the loss is weighted by tokens;
    tokens and skipped updates are sums."""
    tokens = each.tokens.sum()
    means = jax.tree.map(jnp.mean, each)
    loss, skipped = (
        (each.loss * each.tokens).sum() / jnp.maximum(tokens, 1),
        None if each.skipped is None else each.skipped.sum(),
    )
    return dataclasses.replace(means, loss=loss, tokens=tokens, skipped=skipped)
