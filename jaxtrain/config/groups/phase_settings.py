"""The phases of a run, and the spans that follow from them. No jax.

`train.phases` has items NAME.SETTING=TEXT. Phases follow each other in the order of their first
items, and a phase keeps what it does not change, but for the learning rate's end:

    step=N or tokens=N        it begins after N steps, or after the first step with N tokens or more
    sequence_length=T         as data.sequence_length
    batch_size=B              as data.batch_size; B1+B2+B3 is a ramp
    ramp_steps=N              its steps: equal parts have these sizes, and then the last one stays
    weight.SOURCE=W           as data.sources.SOURCE.weight
    learning_rate_end=R       a line from the rate before the phase to R at its last step, which
                              later phases keep until one of them has an end of its own

A `Span` is a part of a run in which all batches have one shape and one mixture. The spans follow
from the settings alone, so tokens, rows and learning rate are functions of the number of a batch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.config.groups.mixture_settings import mixture_of
from jaxtrain.config.groups.run_settings import DataConfig, TrainConfig
from jaxtrain.config.groups.setting import LARGEST_INT, Item, Range, parse_item, text_value

_NOT_NEGATIVE, _SIZE = Range(at_least=0), Range(at_least=1, at_most=LARGEST_INT)
# Setting → a number of the type of its numbers, and their bounds.
SETTINGS: Mapping[str, tuple[float, Range]] = {
    "step": (0, _NOT_NEGATIVE),
    "tokens": (0, _NOT_NEGATIVE),
    "sequence_length": (0, _SIZE),
    "batch_size": (0, _SIZE),
    "ramp_steps": (0, _SIZE),
    "weight": (0.0, _NOT_NEGATIVE),
    "learning_rate_end": (0.0, _NOT_NEGATIVE),
}
# Setting, or weight.SOURCE → its number; batch_size has a tuple of them, several for a ramp
TrainingPhase = dict[str, Any]


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

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences of a batch, and tokens of a sequence."""
        return self.batch_size, self.sequence_length

    @property
    def batch_tokens(self) -> int:
        """The tokens of a batch."""
        return self.batch_size * self.sequence_length

    def rows_before(self, batch: int) -> int:
        """The rows of all batches before one of this span."""
        return self.rows + (batch - self.begin) * self.batch_size

    def tokens_before(self, batch: int) -> int:
        """The tokens of all batches before one of this span."""
        return self.tokens + (batch - self.begin) * self.batch_tokens

    def describe(self) -> str:
        """The sizes, the weights and the phase in words."""
        weights = f", weights {'+'.join(map(str, self.weights))}" if len(self.weights) > 1 else ""
        phase = f" in phase {self.phase}" if self.phase else ""
        return f"{self.batch_size} sequences of {self.sequence_length} tokens{weights}{phase}"


def numbers_of(item: Item) -> tuple[Any, ...]:
    """The numbers of an item, several of a ramp; () if its setting has no such numbers."""
    kind, bounds = SETTINGS.get(item.setting, (None, _SIZE))
    parts = item.text.split("+") if item.setting == "batch_size" else [item.text]
    numbers = tuple(text_value(part, kind) for part in parts)
    of_type = {type(n) for n in numbers} == {type(kind)} and all(map(math.isfinite, numbers))
    return numbers if of_type and all(map(bounds.admit, numbers)) else ()


def phases_of(train: TrainConfig) -> dict[str, TrainingPhase]:
    """The phases of `train.phases` by name, in their order. Items that rules refuse are left
    out."""
    phases: dict[str, TrainingPhase] = {}
    for item in filter(None, map(parse_item, train.phases)):
        phase = phases.setdefault(item.name, {})
        if numbers := numbers_of(item):
            key = f"{item.setting}.{item.part}" if item.part else item.setting
            phase[key] = numbers if item.setting == "batch_size" else numbers[0]
    return phases


def spans_of(data: DataConfig, train: TrainConfig) -> tuple[Span, ...]:
    """The spans of a run, ascending, without gaps; one without `train.phases`. A phase that begins
    after the run's last step has none."""
    weights = {source.name: source.weight for source in mixture_of(data)}
    of_data = data.batch_size, data.sequence_length, tuple(weights.values())
    spans = [Span("", 0, train.steps, *of_data, rows=0, tokens=0)]
    for name, phase in phases_of(train).items():
        begin = _first_batch(phase, spans)
        if begin >= train.steps:
            continue
        before = span_at(spans, begin)
        weights = {s: phase.get(f"weight.{s}", weight) for s, weight in weights.items()}
        changed = before._replace(
            phase=name,
            sequence_length=phase.get("sequence_length", before.sequence_length),
            weights=tuple(weights.values()),
        )
        # A ramp that an earlier phase has begun goes on.
        inherited = [(span.begin, span.batch_size) for span in spans if span.begin > begin]
        sizes, ramp_steps = phase.get("batch_size", ()), phase.get("ramp_steps", 0)
        ramp = [(begin + i * ramp_steps // len(sizes), size) for i, size in enumerate(sizes)]
        batch_sizes = ramp or [(begin, before.batch_size), *inherited]
        earlier = [span for span in spans if span.begin < begin]
        of_phase = [changed._replace(begin=at, batch_size=size) for at, size in batch_sizes]
        begun = [span for span in of_phase if span.begin < train.steps]
        spans = [*_in_sequence([*earlier, *begun], train.steps)]
    return tuple(spans)


def _first_batch(phase: TrainingPhase, spans: Sequence[Span]) -> int:
    """The number of a phase's first batch, after those of the spans before it; the largest number
    if its beginning is not known."""
    if "step" in phase or "tokens" not in phase:
        return phase.get("step", LARGEST_INT)
    tokens = phase["tokens"]
    span = next((span for span in spans if span.tokens_before(span.end) >= tokens), spans[-1])
    return span.begin + max(0, -(-(tokens - span.tokens) // span.batch_tokens))


def _in_sequence(parts: Sequence[Span], steps: int) -> Iterator[Span]:
    """The parts, whose beginnings are known, with their ends and what comes before each."""
    rows = tokens = 0
    for part, end in zip(parts, [*(part.begin for part in parts[1:]), steps], strict=True):
        span = part._replace(end=end, rows=rows, tokens=tokens)
        rows, tokens = span.rows_before(end), span.tokens_before(end)
        yield span


def span_at(spans: Sequence[Span], batch: int) -> Span:
    """The span of a batch, by its number."""
    return next((span for span in spans if batch < span.end), spans[-1])
