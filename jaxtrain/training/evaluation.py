"""The loss over held-out text."""

import concurrent.futures
from typing import Any

from jax.stages import Compiled, Lowered, Wrapped

from jaxtrain.data.loader import Loader
from jaxtrain.devices import cluster
from jaxtrain.runtime.runtime import Losses


class Evaluation:
    """The mean loss over the batches of a Loader; its program is compiled beside something else, or
    when the loss is asked for first.

    Args:
      evaluate: (params, batch) → Losses, as Step.evaluate.
      params: the parameters as ShapeDtypeStructs with shardings.
      held_out: the batches.
    """

    def __init__(self, evaluate: Wrapped, params: Any, held_out: Loader):
        self._evaluate, self._params, self._held_out = evaluate, params, held_out
        self._compiled: Compiled | None = None

    def start_compiling(
        self, beside: concurrent.futures.Executor
    ) -> concurrent.futures.Future[None]:
        """Traces the program, and compiles it beside what follows: what comes back is done then."""
        return beside.submit(self._compile, self._lower())

    def _lower(self) -> Lowered:
        return self._evaluate.lower(self._params, self._held_out.specification())

    def _compile(self, lowered: Lowered) -> None:
        self._compiled = cluster.compile_everywhere("evaluation", lowered)

    def loss(self, params: dict) -> float | None:
        """The mean over the batches' weighted tokens, in nats; None if there are none."""
        if not self._held_out.batches:
            return None
        if self._compiled is None:
            self._compile(self._lower())
        assert self._compiled is not None
        losses: list[Losses] = [self._compiled(params, batch) for batch in self._held_out.iterate()]
        tokens = [float(batch.tokens) for batch in losses]
        total = sum(tokens)
        return (
            sum(float(batch.loss) * count for batch, count in zip(losses, tokens, strict=True))
            / total
            if total
            else None
        )
