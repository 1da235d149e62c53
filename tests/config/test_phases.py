"""Phases of a run: its spans, the rules of their items, and what a checkpoint may go on with."""

import pytest
from support.broken_settings import offer

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError, TrainConfig
from jaxtrain.config.phases import RateLine, config_of, largest_of, rate_lines, span_at, spans
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.checks import Environment
from jaxtrain.config.rules.unused import unused_settings

BASE = cfg.replace(Config(), {"mesh.data": 4, "train.steps": 100})
SOURCES = {"data.sources": ("web=a.txt", "web.weight=3", "code=b.txt")}


def with_phases(*items, **settings):
    return cfg.replace(BASE, {"train.phases": items} | settings)


def test_a_run_without_phases_is_one_span():
    config = Config(train=TrainConfig(steps=7))
    (span,) = spans(config)
    assert (span.begin, span.end, span.batch_size) == (0, 7, config.data.batch_size)
    assert span_at((span,), 100) == span and span.rows_before(3) == 3 * config.data.batch_size
    assert config_of(config, span) == config


def test_phases_keep_what_they_do_not_change():
    config = with_phases(
        *("ramp.step=10", "ramp.batch_size=4+8+32", "ramp.ramp_steps=31"),
        *("long.step=35", "long.sequence_length=256"),
        *("last.tokens=400e3", "last.weight.web=0.5", "last.learning_rate_end=1e-5"),
        *("never.step=1000", "never.batch_size=64"),
        **SOURCES,
    )
    # by hand: the ramp begins at batches 10, 20 and 30, and goes on where `long` begins
    assert [(s.phase, s.begin, s.end, s.batch_size, s.sequence_length) for s in spans(config)] == [
        ("", 0, 10, 16, 128),
        ("ramp", 10, 20, 4, 128),
        ("ramp", 20, 30, 8, 128),
        ("ramp", 30, 35, 32, 128),
        ("long", 35, 77, 32, 256),
        ("last", 77, 100, 32, 256),
    ]
    assert [s.weights for s in spans(config)] == [(3.0, 1.0)] * 5 + [(0.5, 1.0)]
    for span in spans(config):  # sums over all batches before
        before = [span_at(spans(config), batch) for batch in range(span.end)]
        assert span.rows_before(span.end) == sum(s.batch_size for s in before)
        assert span.tokens_before(span.end) == sum(s.batch_tokens for s in before)
    assert spans(config)[-2].tokens_before(76) < 400_000 <= spans(config)[-1].tokens
    assert rate_lines(config) == (RateLine(77, 100, 1e-5),)
    line = "of the largest batches, 32 sequences of 256 tokens, weights 3.0+1.0 in phase long"
    of_long = config_of(config, spans(config)[-2])
    assert largest_of(config) == (of_long, f"train.phases: {line}")
    assert config.fill().model.max_positions == 256
    note = "train.phases: phase never never begins within train.steps=100"
    assert unused_settings(config) == [note]


def test_a_ramp_that_a_later_phase_begins_in_goes_on():
    config = with_phases(
        *("a.step=0", "a.batch_size=4+8", "a.ramp_steps=20"), "b.step=5", "b.sequence_length=64"
    )
    assert [(s.phase, s.begin, *s[3:5]) for s in spans(config)] == [
        ("a", 0, 4, 128),
        ("b", 5, 4, 64),
        ("b", 10, 8, 64),
    ]


@pytest.mark.parametrize(
    "items, rule",
    [
        (("a",), "has 'a', which is not NAME.SETTING=VALUE"),
        (("a.step=9", "a.weight=1"), "has 'a.weight=1', which is not NAME.SETTING=VALUE"),
        (("a.step=9", "a.sequence_lenght=64"), "has 'a.sequence_lenght=64', whose setting is none"),
        (("a.step=x",), "has 'a.step=x', which needs a whole number at least 0"),
        (("a.step=9", "a.batch_size=8+b"), "'a.batch_size=8+b', which needs a whole number"),
        (("a.step=9", "a.learning_rate_end=nan"), "which needs a number at least 0"),
        (("a.step=9", "a.step=10"), "names a setting twice"),
        (("a.batch_size=8",), "has phase a with neither step nor tokens"),
        (("a.step=1", "a.tokens=5"), "has phase a with both step and tokens"),
        (("a.step=9", "b.step=9"), "has phase b begin before or with a"),
        (("a.step=9", "b.tokens=10"), "has phase b begin before or with a"),
        (("a.step=9", "a.batch_size=8+16"), "with 2 batch sizes, which need 2 ramp_steps or more"),
        (("a.step=9", "a.ramp_steps=8"), "with ramp_steps, and no batch_size of several sizes"),
        (("a.step=9", "a.weight.wep=1"), "has 'a.weight.wep=1', and data.sources has web, code"),
        (
            ("a.step=9", "a.weight.web=0", "a.weight.code=0"),
            "leaves no source a weight above 0 in phase a",
        ),
        (
            ("a.step=9", "a.batch_size=8+6", "a.ramp_steps=4"),
            "makes data.batch_size=6, which is no multiple of mesh.data=4, that is 4 (in phase a",
        ),
    ],
    ids=str,
)
def test_what_is_refused(items, rule):
    config, environment = with_phases(*items, **SOURCES), Environment(4, "cpu")
    error = checks.error_of(config, environment)
    assert error.field == "train.phases" and rule in error.args[0]
    assert checks.error_of(cfg.replace(config, offer(error)), environment) is None


@pytest.mark.parametrize(
    "settings, items, says",
    [
        (
            {"model.positions": "learned", "model.max_positions": 128},
            ("a.step=9", "a.sequence_length=256"),
            "is a shorter table than data.sequence_length=256 (in phase a of train.phases)",
        ),
        (
            {"mesh.context": 2, "mesh.data": 2},
            ("a.step=9", "a.sequence_length=130"),
            "which do not divide data.sequence_length=130 (in phase a of train.phases): use "
            "--config.train.phases=a.step=9,a.sequence_length=128",
        ),
    ],
)
def test_rules_hold_for_each_span(settings, items, says):
    error = checks.error_of(with_phases(*items, **settings), Environment(4, "cpu"))
    assert says in str(error)


def test_a_checkpoint_goes_on_with_other_phases_after_its_batches():
    old = with_phases("a.step=10", "a.batch_size=32")
    stored = old.to_store()
    later = ("a.step=10", "a.batch_size=32", "b.step=50", "b.batch_size=64")
    for items, position in ((later, 50), ((), 10), (("c.step=10", "c.batch_size=32"), 50)):
        checks.check_resume(stored, with_phases(*items), position=position)
    says = r"of 51 batches: batch 50 has 64 sequences of 128 tokens in phase b, and had 32 .* a:"
    with pytest.raises(ConfigError, match=says):
        checks.check_resume(stored, with_phases(*later), position=51)
    with pytest.raises(ConfigError, match="of data.batch_size=16: use ") as error:
        checks.check_resume(stored, cfg.replace(old, {"data.batch_size": 64}), position=50)
    resized = cfg.replace(old, offer(error.value))
    checks.check_resume(stored, resized, position=50)
    assert spans(resized)[-1][:4] == ("from_50", 50, 100, 64)
