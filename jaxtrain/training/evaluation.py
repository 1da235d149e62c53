"""The loss over held-out text."""

import concurrent.futures
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.stages import Compiled, Wrapped

from jaxtrain.devices import cluster
from jaxtrain.runtime.runtime import Losses


class Evaluation:
    """The mean loss over held-out batches. The program is compiled by `start_compiling`, or when
    `loss` is first called.

    Args:
      evaluate: (params, batch) → Losses, jitted: Step.evaluate.
      params: the parameters as ShapeDtypeStructs with shardings.
      batch: a batch's arrays as ShapeDtypeStructs with shardings.
      batches: gives the batches of the validation split, from the first one.
      executor: its thread compiles the program.
    """

    def __init__(
        self,
        evaluate: Wrapped,
        params: Any,
        batch: Mapping[str, jax.ShapeDtypeStruct],
        batches: Callable[[], Iterable[Mapping[str, jax.Array]]],
        executor: concurrent.futures.Executor,
    ):
        self._evaluate, self._params, self._batch = evaluate, params, batch
        self._batches, self._executor = batches, executor
        self._compiling: concurrent.futures.Future[Compiled] | None = None
        self._has_run = False

    def start_compiling(self) -> concurrent.futures.Future[Compiled]:
        """Traces the program and begins to compile it. Returns the future of the result."""
        lowered = self._evaluate.lower(self._params, self._batch)
        self._compiling = self._executor.submit(cluster.compile_everywhere, "evaluation", lowered)
        return self._compiling

    def loss(self, params: dict) -> float | None:
        """The mean loss over the weighted tokens of all batches, in nats; None if there are
        none."""
        losses: list[Losses] = []
        for batch in self._batches():
            compiled = (self._compiling or self.start_compiling()).result()
            if not self._has_run:
                # A GPU loads cuDNN's kernels when the program first runs. On an H200 that failed
                # beside other work: the last step's, or that of the next batch.
                jax.block_until_ready((params, batch))
            losses.append(compiled(params, batch))
            if not self._has_run:
                jax.block_until_ready(losses)
                self._has_run = True
        tokens = [float(batch.tokens) for batch in losses]
        # From here on the host waits. After the first batch it has only dispatched.
        if not sum(tokens):
            return None
        weighted = [float(batch.loss) * n for batch, n in zip(losses, tokens, strict=True)]
        return sum(weighted) / sum(tokens)
