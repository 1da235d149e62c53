"""Phases of a run: from a step or a number of tokens on, other sizes of the batch, weights of
sources, and an end of the learning rate. No jax.

`train.phases` has items NAME.SETTING=TEXT. Phases follow each other in the order of their first
items, and a phase keeps what it does not change:

    step=N or tokens=N        it begins after N steps, or after the first step with N tokens or more
    sequence_length=T         as data.sequence_length
    batch_size=B              as data.batch_size; B1+B2+B3 is a ramp
    ramp_steps=N              its steps: equal parts have these sizes, and then the last one stays
    weight.SOURCE=W           as data.sources.SOURCE.weight
    learning_rate_end=R       a line from the rate before the phase to R at its last step

A `Span` is a part of a run in which all batches have one shape and one mixture. The spans follow
from the config alone, so tokens, rows and learning rate are functions of the number of a batch.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxtrain.config.groups.mixture_settings import mixture_of
from jaxtrain.config.paths import replace
from jaxtrain.config.states import Config


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase as its items describe it. None and (): not changed.

    step, tokens: its beginning, one of them
    batch_sizes: several for a ramp of `ramp_steps` steps
    weights: source → weight, of the changed ones
    """

    name: str = ""
    step: int | None = None
    tokens: int | None = None
    sequence_length: int | None = None
    batch_sizes: tuple[int, ...] = ()
    ramp_steps: int = 0
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    learning_rate_end: float | None = None


class Span(NamedTuple):
    """Batches of one shape and one mixture.

    phase: the name of the phase; "" before the first one
    begin, end: the numbers of its batches, [begin, end); the run's last span has end = train.steps,
        and batches beyond it are of this span, too (a run that passed over some needs more)
    rows, tokens: those of all batches before
    weights: of each source, in the order of `mixture_of`
    """

    phase: str
    begin: int
    end: int
    batch_size: int
    sequence_length: int
    weights: tuple[float, ...]
    rows: int
    tokens: int

    def rows_before(self, batch: int) -> int:
        """The rows of all batches before one of this span."""
        return self.rows + (batch - self.begin) * self.batch_size

    def tokens_before(self, batch: int) -> int:
        """The tokens of all batches before one of this span."""
        return self.tokens + (batch - self.begin) * self.batch_size * self.sequence_length


def phases_of(config: Config) -> tuple[Phase, ...]:
    """The phases of `train.phases`, whose items have the form that the rules ask for."""
    raise NotImplementedError


def spans(config: Config) -> tuple[Span, ...]:
    """The spans of a run, ascending, without gaps; one without `train.phases`."""
    data = config.data
    weights = tuple(source.weight for source in mixture_of(data))
    return (Span("", 0, config.train.steps, data.batch_size, data.sequence_length, weights, 0, 0),)


def span_at(all_spans: tuple[Span, ...], batch: int) -> Span:
    """The span of a batch, by its number."""
    return next((span for span in all_spans if batch < span.end), all_spans[-1])


def config_of(config: Config, span: Span) -> Config:
    """The config whose step takes the batches of a span: a plain config without phases."""
    sizes = {
        "data.batch_size": span.batch_size,
        "data.sequence_length": span.sequence_length,
        "train.phases": (),
    }
    return replace(config, sizes)


_ENTRY = re.compile(r"([\w-]+)\.(\w+)(?:\.([\w-]+))?=(.*)", re.DOTALL)
