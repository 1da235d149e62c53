"""The loss over held-out text."""

from typing import Any

from jax.stages import Compiled, Wrapped

from jaxtrain.data.loader import Loader
from jaxtrain.devices import cluster
from jaxtrain.runtime.runtime import Losses


class Evaluation:
    """The mean loss over the batches of a Loader; its program is compiled when it is asked for first.

    Args:
      evaluate: (params, batch) → Losses, as Step.evaluate.
      params: the parameters as ShapeDtypeStructs with shardings.
      held_out: the batches.
    """

    def __init__(self, evaluate: Wrapped, params: Any, held_out: Loader):
        self._evaluate, self._params, self._held_out = evaluate, params, held_out
        self._compiled: Compiled | None = None

    def loss(self, params: dict) -> float | None:
        """The mean over the batches' weighted tokens, in nats; None if there are none."""
        if not self._held_out.batches:
            return None
        if self._compiled is None:
            self._compiled = cluster.compile_everywhere("evaluation", self._evaluate.lower(self._params, self._held_out.specification()))
        losses: list[Losses] = [self._compiled(params, batch) for batch in self._held_out.iterate()]
        tokens = [float(batch.tokens) for batch in losses]
        total = sum(tokens)
        return sum(float(batch.loss) * count for batch, count in zip(losses, tokens, strict=True)) / total if total else None
