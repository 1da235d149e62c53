"""The programs of a run with phases: spans of another shape have another program, for the same
state. It is traced and compiled in a thread while the span before it runs, so that the loop waits
only where that takes longer than the span.

Tables, placement and layout of the parameters are those of the run's own step. Spans of one shape
share a program, and programs of neither the present nor the next span are dropped.
"""

import concurrent.futures
import dataclasses
import threading

import jax

from jaxtrain.config import ResolvedConfig, one_line
from jaxtrain.config.phases import Span, config_of, span_at, spans
from jaxtrain.devices import cluster
from jaxtrain.training.compiled_step import Programs, trace
from jaxtrain.training.step import Step, make_step


class SpanPrograms:
    """The programs of all spans, of which `start` compiles the first that is needed, and `of` the
    others.

    Args:
      config: the run's.
      step: of its own sizes, for the layout of the state.

    spans: of the run. first: config and step of the span that `start` has begun with
    """

    def __init__(self, config: ResolvedConfig, step: Step):
        self.spans, self.first = spans(config), (config, step)
        self._config, self._step = config, step
        self._programs: dict[tuple[int, int], concurrent.futures.Future[Programs]] = {}

    def start(
        self, batch: int, executor: concurrent.futures.Executor
    ) -> concurrent.futures.Future[Programs]:
        """Traces the programs of a batch, by its number, and compiles them on a thread of the
        executor."""
        span = span_at(self.spans, batch)
        self.first = config_of(self._config, span).resolve(), self._step_of(span)
        compiling = executor.submit(trace(self.first[1]))
        self._programs[span.shape] = compiling
        return compiling

    def of(self, span: Span) -> Programs:
        """The programs of a span, for which it waits, as all processes must. Those of the next span
        begin to be compiled. Raises JaxRuntimeError in all processes if one cannot compile
        them."""
        if span.shape not in self._programs:
            # What does not depend on a batch's shape is that of `start`, or of the span before.
            self._compile(span, next(iter(self._programs.values())).result())
        if not self._programs[span.shape].done():
            cluster.log(f"waiting for the program of {span.describe()}")
        programs = cluster.in_all(self._programs[span.shape].result, jax.errors.JaxRuntimeError)
        following = next((each for each in self.spans if each.begin >= span.end), span)
        for shape in self._programs.keys() - {span.shape, following.shape}:
            del self._programs[shape]
        if following.shape not in self._programs:
            self._compile(following, programs)
        return programs

    def _compile(self, span: Span, like: Programs) -> None:
        """Begins to trace and to compile the programs of a span in a thread."""
        compiling: concurrent.futures.Future[Programs] = concurrent.futures.Future()
        self._programs[span.shape] = compiling

        def trace_and_compile() -> None:
            try:
                with jax.set_mesh(self._step.mesh):
                    compiling.set_result(trace(self._step_of(span), like)())
            except BaseException as error:  # raised where the programs are needed
                cluster.log(f"warning: no program for {span.describe()}: {one_line(str(error))}")
                compiling.set_exception(error)

        # A daemon: a run that stops does not wait for a program that it will not run.
        threading.Thread(target=trace_and_compile, name="compiling", daemon=True).start()

    def _step_of(self, span: Span) -> Step:
        data = self._config.data
        if span.shape == (data.batch_size, data.sequence_length):
            return self._step
        step = make_step(self._config, self._step.mesh, self._step.setup, span)
        # Arrays on disk are known by their objects, which are those of the run's own layout.
        return dataclasses.replace(step, layout=self._step.layout, optimizer=self._step.optimizer)
