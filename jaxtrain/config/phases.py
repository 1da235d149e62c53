"""The spans of a config (groups/phase_settings.py), the config of each, and the learning rate's
lines. No jax."""

from typing import NamedTuple

from jaxtrain.config.groups.phase_settings import Span, phases_of, span_at, spans_of
from jaxtrain.config.paths import replace
from jaxtrain.config.states import Config

__all__ = [
    "RateLine",
    "Span",
    "config_of",
    "largest_of",
    "longest_sequence",
    "rate_lines",
    "span_at",
    "spans",
]


class RateLine(NamedTuple):
    """A line of the learning rate from that before update `begin` to `final` at update end − 1,
    both numbered from 0. It stays `final` afterwards."""

    begin: int
    end: int
    final: float


def spans(config: Config) -> tuple[Span, ...]:
    """The spans of a run, as `spans_of`."""
    return spans_of(config.data, config.train)


def config_of(config: Config, span: Span) -> Config:
    """The config whose step takes the batches of a span: a plain config without phases."""
    sizes = {
        "data.batch_size": span.batch_size,
        "data.sequence_length": span.sequence_length,
        "train.phases": (),
    }
    return replace(config, sizes)


def longest_sequence(config: Config) -> int:
    """The tokens of the longest sequences of a run."""
    return max(span.sequence_length for span in spans(config))


def largest_of(config: Config) -> tuple[Config, str]:
    """The config of the span with most tokens in a batch, and a line about it; without phases the
    config and ""."""
    if not config.train.phases:
        return config, ""
    span = max(spans(config), key=lambda span: span.batch_tokens)
    return config_of(config, span), f"train.phases: of the largest batches, {span.describe()}"


def rate_lines(config: Config) -> tuple[RateLine, ...]:
    """The lines of phases with `learning_rate_end`, in their order."""
    begins, ends = dict[str, int](), dict[str, int]()
    for span in spans(config):
        begins.setdefault(span.phase, span.begin)
        ends[span.phase] = span.end
    return tuple(
        RateLine(begins[name], ends[name], phase["learning_rate_end"])
        for name, phase in phases_of(config.train).items()
        if name in begins and "learning_rate_end" in phase
    )
