"""The losses over held-out text."""

import concurrent.futures
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.stages import Compiled, Wrapped

from jaxtrain.devices import cluster
from jaxtrain.runtime.runtime import Losses


class Evaluation:
    """The mean losses over validation sets. One program serves all of them. It is compiled by
    `start_compiling`, or when `losses` is first called.

    Args:
      evaluate: (params, batch) → Losses, jitted: Step.evaluate.
      params: the parameters as ShapeDtypeStructs with shardings.
      batch: a batch's arrays as ShapeDtypeStructs with shardings.
      sets: name → function that gives the batches of a validation set, from the first one.
      sources: the names of the sources, whose sets are what they hold out.
      executor: its thread compiles the program.
    """

    def __init__(
        self,
        evaluate: Wrapped,
        params: Any,
        batch: Mapping[str, jax.ShapeDtypeStruct],
        sets: Mapping[str, Callable[[], Iterable[Mapping[str, jax.Array]]]],
        sources: Collection[str],
        executor: concurrent.futures.Executor,
    ):
        self._evaluate, self._params, self._batch = evaluate, params, batch
        self._sets, self._sources, self._executor = sets, sources, executor
        self._compiling: concurrent.futures.Future[Compiled] | None = None
        self._has_run = False

    def start_compiling(self) -> concurrent.futures.Future[Compiled]:
        """Traces the program and begins to compile it. Returns the future of the result."""
        lowered = self._evaluate.lower(self._params, self._batch)
        self._compiling = self._executor.submit(cluster.compile_everywhere, "evaluation", lowered)
        return self._compiling

    def losses(self, params: dict) -> dict[str, float]:
        """The mean losses over weighted tokens with these parameters, in nats: name → that of a
        set, and "" → that over what all sources hold out together, or, if they hold out nothing,
        over all sets. Sets without such tokens are left out."""
        of_batches = {
            name: self._dispatch(params, batches()) for name, batches in self._sets.items()
        }
        # From here on the host waits. After the first batch it has only dispatched.
        weighted = {
            name: losses
            for name, losses in of_batches.items()
            if any(float(batch.tokens) for batch in losses)
        }
        held_out = [losses for name, losses in weighted.items() if name in self._sources]
        together = [*itertools.chain(*(held_out or weighted.values()))]
        return {n: _mean(losses) for n, losses in ({"": together} | weighted).items() if losses}

    def _dispatch(self, params: dict, batches: Iterable[Mapping[str, jax.Array]]) -> list[Losses]:
        """The losses of batches, which the devices may still compute."""
        losses: list[Losses] = []
        for batch in batches:
            compiled = (self._compiling or self.start_compiling()).result()
            if not self._has_run:
                # A GPU loads cuDNN's kernels when the program first runs. On an H200 that failed
                # beside other work: the last step's, or that of the next batch.
                jax.block_until_ready((params, batch))
            losses.append(compiled(params, batch))
            if not self._has_run:
                jax.block_until_ready(losses)
                self._has_run = True
        return losses


def _mean(losses: Sequence[Losses]) -> float:
    """The mean over all weighted tokens."""
    tokens = [float(batch.tokens) for batch in losses]
    return sum(float(batch.loss) * n for batch, n in zip(losses, tokens, strict=True)) / sum(tokens)
