"""The sizes of models whose layers are of several kinds."""

import dataclasses

import pytest

from benchmarks.model_forms import llama
from jaxtrain.planner.layer.model import Model, model_of

PLAIN = llama(6, 40, 4, 2, 12, 56, 257, 64)
PATTERN = ("window", "window", "full")


def with_pattern(**settings) -> Model:
    return dataclasses.replace(PLAIN, pattern=PATTERN, **settings)


@pytest.mark.parametrize("window", [1, 5, 64, 1000])
def test_operations_of_a_window(window):
    """Each token attends to itself and those before it in its window. Of all tokens half the square
    counts, and not the diagonal on its own: a half of what tokens have with themselves."""
    n, width = PLAIN.sequence, min(window, PLAIN.sequence)
    pairs = sum(min(i + 1, width) for i in range(n)) - width / 2
    model = dataclasses.replace(PLAIN, window=window)
    assert model.attention_flops() / 2 == 2 * PLAIN.layer().core * pairs
    assert model.layer().arrays == PLAIN.layer().arrays


def test_operations_are_those_of_each_layer():
    model = with_pattern(window=8)
    windows, full = (model.of_kind(kind).layer_flops() for kind in ("window", "full"))
    assert windows < full == PLAIN.layer_flops()
    head = 2 * model.sequence * model.vocab_size * model.width
    assert model.sequence_flops() == pytest.approx(4 * windows + 2 * full + head)
    costs = model.layer_costs
    assert sum(costs) == pytest.approx(6)
    assert costs[2] / costs[0] == pytest.approx(full / windows)


def test_kinds_and_forms():
    """The dense layers before all others count first; what no shape depends on makes no form."""
    model = with_pattern(window=8, dense_layers=1, experts=4, kinds=("full.rotary_base=1e6",))
    assert model.stack == ("window", "full", "window", "window", "full", "window")
    assert model.counts == ({"window": 4, "full": 2}, {"window": 1})
    assert model.forms == {"": 6}
    two = with_pattern(window=8, kinds=("full.head_dim=20",))
    assert two.forms == {"window": 4, "full": 2}
    assert two.of_kind("full").layer().size > two.of_kind("window").layer().size


def test_a_pattern_of_equal_layers_is_no_pattern():
    model = dataclasses.replace(PLAIN, pattern=("full",), window=8)
    assert model.layer_costs == () == PLAIN.layer_costs
    assert model.sequence_flops() == PLAIN.sequence_flops()


def test_sequences_of_a_kind():
    """Models of equal settings but for their sequences share no kind."""
    short, long = (model_of(with_pattern().resolved, n) for n in (64, 128))
    assert (short.of_kind("full").sequence, long.of_kind("full").sequence) == (64, 128)
