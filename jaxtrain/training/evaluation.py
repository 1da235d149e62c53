"""The loss over held-out text."""

import concurrent.futures
from typing import Any

from jax.stages import Compiled, Wrapped

from jaxtrain.data.loader import Loader
from jaxtrain.devices import cluster
from jaxtrain.runtime.runtime import Losses


class Evaluation:
    """The mean loss over the batches of a Loader. The program is compiled by `start_compiling`, or
    when `loss` is first called.

    Args:
      evaluate: (params, batch) → Losses, jitted: Step.evaluate.
      params: the parameters as ShapeDtypeStructs with shardings.
      held_out: the loader of the validation split.
      executor: its thread compiles the program.
    """

    def __init__(
        self,
        evaluate: Wrapped,
        params: Any,
        held_out: Loader,
        executor: concurrent.futures.Executor,
    ):
        self._evaluate, self._params, self._held_out = evaluate, params, held_out
        self._executor = executor
        self._compiling: concurrent.futures.Future[Compiled] | None = None

    def start_compiling(self) -> concurrent.futures.Future[Compiled]:
        """Traces the program and begins to compile it. Returns the future of the result."""
        lowered = self._evaluate.lower(self._params, self._held_out.specification())
        self._compiling = self._executor.submit(cluster.compile_everywhere, "evaluation", lowered)
        return self._compiling

    def loss(self, params: dict) -> float | None:
        """The mean loss over the weighted tokens of all batches, in nats; None if there are
        none."""
        if not self._held_out.batches:
            return None
        compiled = (self._compiling or self.start_compiling()).result()
        losses: list[Losses] = [compiled(params, batch) for batch in self._held_out.iterate()]
        tokens = [float(batch.tokens) for batch in losses]
        if not sum(tokens):
            return None
        weighted = [float(batch.loss) * n for batch, n in zip(losses, tokens, strict=True)]
        return sum(weighted) / sum(tokens)
