"""What a setting's field says of its values."""

import pytest

from jaxtrain import config as cfg
from jaxtrain.config.groups.setting import Choices, Range, setting, setting_of
from jaxtrain.config.rules.field_rules import field_violation


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "text"),
    [
        (Range(), [-1e300, 0, 1e300], [], ""),
        (Range(at_least=0, below=1), [0, 0.5], [-0.1, 1], "at least 0 and below 1"),
        (Range(above=0, at_most=3), [0.1, 3], [0, 3.5], "above 0 and at most 3"),
        (Range(at_least=1), [1, 2], [0, float("nan")], "at least 1"),
    ],
)
def test_bounds(bounds, inside, outside, text):
    assert all(map(bounds.admit, inside)) and not any(map(bounds.admit, outside))
    assert str(bounds) == text


def test_a_field_has_choices_or_bounds():
    assert setting_of(setting("a", "of letters", Choices(("a", "b")))).choices.names == ("a", "b")
    number = setting_of(setting(1, "layers", Range(at_least=1)))
    assert (number.doc, number.bounds, number.choices) == ("layers", Range(1), Choices())


@pytest.mark.parametrize("path", cfg.fields())
def test_a_default_is_within_its_bounds(path):
    default = cfg.fields()[path].default
    assert field_violation(path, default, default) is None


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("pipeline.times", (1.0, 0.0, 1.0), None),
        ("pipeline.chunk_layers", (0, 2), None),
        ("pipeline.layer_costs", (1.0, 0.0), "has a number that is not above 0 or above"),
        ("pipeline.chunk_layers", (-1, 2), "has a number below 0 or above"),
        ("pipeline.times", (1.0, float("nan"), 1.0), "has a number below 0 or above"),
    ],
)
def test_items_of_tuples_have_bounds(path, value, rule):
    violation = field_violation(path, value, cfg.fields()[path].default)
    assert violation is None if rule is None else violation.rule.startswith(rule)
