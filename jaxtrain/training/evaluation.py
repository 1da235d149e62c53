"""The loss over held-out text."""

from typing import Any

import jax
from jax.stages import Compiled, Wrapped

from jaxtrain.data.loader import Loader
from jaxtrain.devices import cluster


class Evaluation:
    """The mean loss over the batches of a Loader; its program is compiled when it is asked for first.

    Args:
      evaluate: (params, batch) → (loss, tokens), as Step.evaluate.
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
            self._compiled = cluster.compile_everywhere("evaluation", self._evaluate, self._params, self._held_out.specification())
        results: list[tuple[jax.Array, jax.Array]] = [self._compiled(params, batch) for batch in self._held_out.iterate()]
        tokens = [float(count) for _, count in results]
        total = sum(tokens)
        return sum(float(loss) * count for (loss, _), count in zip(results, tokens, strict=True)) / total if total else None
