"""The losses over held-out text, and evaluations of one's own (`train.evaluate`):

def evaluate(params, context):
    return {"loss_of_arithmetic": context.loss(tokens)}

context.step             the number of steps done
context.config, .mesh    of the run: ResolvedConfig and jax.sharding.Mesh
context.tokenizer        its encode(text) gives ids, decode(ids) text
context.loss             (tokens, weights) → the mean loss, as Evaluation.loss with `params`
"""

import concurrent.futures
import contextlib
import functools
import itertools
import signal
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled, Wrapped

from jaxtrain.config import ConfigError, ResolvedConfig, one_line, own_code
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
        self._compiling = self._executor.submit(
            cluster.compile_everywhere,
            "evaluation",
            self._evaluate.lower(self._params, self._batch),
        )
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

    def loss(self, params: dict, tokens: Any, weights: Any = None) -> float:
        """The mean loss over weighted tokens with these parameters, in nats.

        tokens: int [n, up to the sequence length + 1]; weights: [n, 1 less] of the tokens from the
        second one on, None for 1. Every process has all of them.
        """
        tokens = np.asarray(tokens, np.int32)
        ones = np.ones_like(tokens[:, 1:])
        arrays = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": ones if weights is None else np.asarray(weights),
            "segments": ones,
            "positions": np.cumsum(ones, 1) - 1,
        }
        shape = self._batch["tokens"].shape
        padding = (0, -len(tokens) % (shape[0] * shape[1])), (0, shape[2] - ones.shape[1])
        padded = {name: np.pad(arrays[name], padding).reshape(-1, *shape) for name in self._batch}
        place = lambda a, like: jax.make_array_from_callback(
            shape, like.sharding, a.astype(like.dtype).__getitem__
        )
        batches = (
            {name: place(padded[name][i], like) for name, like in self._batch.items()}
            for i in range(len(padded["tokens"]))
        )
        return _mean(self._dispatch(params, batches))

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


# --- of one's own ---------------------------------------------------------------------------------


class TimeUpError(BaseException):
    """Ends an evaluation that takes too long; `except Exception` in it does not stop that."""


class OwnEvaluation:
    """The function that `train.evaluate` names, if it does. Raises ConfigError for code that is not
    there. tokenizer: of the run"""

    def __init__(self, config: ResolvedConfig, mesh: Mesh, tokenizer: Any):
        self._config, self._mesh, self._tokenizer = config, mesh, tokenizer
        self._text, self._limit = config.train.evaluate, config.train.evaluate_seconds
        try:
            self._function = own_code.load(self._text) if self._text else None
        except own_code.OwnCodeError as error:
            raise ConfigError(
                "train.evaluate", self._text, str(error), fixes=[{"train.evaluate": ""}]
            ) from None

    def numbers(
        self, evaluation: Evaluation, params: dict, step: int, log: Callable[[str], object]
    ) -> dict[str, float]:
        """Name → number that the function returns for these parameters; {} if it fails, which costs
        a line. Every process must call this, and none goes on before all are here: what a process
        still computes must not run beside the next step's collectives."""
        if not self._function:
            return {}
        context = types.SimpleNamespace(
            step=step,
            config=self._config,
            mesh=self._mesh,
            tokenizer=self._tokenizer,
            loss=functools.partial(evaluation.loss, params),
        )
        numbers, why, began = {}, "", time.monotonic()
        try:
            with _ended_after(self._limit):
                numbers = {
                    str(name): float(number)
                    for name, number in self._function(params, context).items()
                }
        except (Exception, SystemExit, TimeUpError) as error:
            why = f"{type(error).__name__}: {error}"
        if (seconds := time.monotonic() - began) > self._limit:
            why = f"{seconds:.1f} s, more than train.evaluate_seconds={self._limit:g}"
        if why := next(filter(None, cluster.gather(why)), ""):
            log(one_line(f"warning: step {step}: no numbers of train.evaluate={self._text}: {why}"))
        return {} if why else numbers


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """A context that TimeUpError ends after so many seconds, in the main thread of a run of one
    process. One of several processes would leave the others in a collective: they wait, and the
    watchdog ends a run that hangs."""
    if jax.process_count() > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise TimeUpError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
