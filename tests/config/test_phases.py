"""Spans of a run."""

from jaxtrain.config import Config, TrainConfig
from jaxtrain.config.phases import config_of, span_at, spans


def test_a_run_without_phases_is_one_span():
    config = Config(train=TrainConfig(steps=7))
    (span,) = spans(config)
    assert (span.begin, span.end, span.batch_size) == (0, 7, config.data.batch_size)
    assert span_at((span,), 100) == span and span.rows_before(3) == 3 * config.data.batch_size
    assert config_of(config, span) == config
