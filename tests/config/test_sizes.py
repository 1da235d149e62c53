"""Sizes on which models and planner agree: rows of the vocabulary, capacities of experts."""

from jaxtrain.config.sizes import capacity_of, device_capacity, padded_vocabulary


def test_padded_vocabulary():
    assert [padded_vocabulary(61, n) for n in (1, 2, 4, 8)] == [61, 62, 64, 64]
    # whole tiles of 128 on each
    assert [padded_vocabulary(50257, n) for n in (1, 2, 8)] == [50304, 50432, 51200]
    assert padded_vocabulary(128256, 8) == 129024


def test_positions_of_an_expert():
    assert capacity_of(128, 2, 8, 1.0) == 32 and capacity_of(128, 2, 8, 1.25) == 40
    assert capacity_of(100, 2, 8, 1.01) == 26  # upwards
    assert capacity_of(128, 2, 8, 100.0) == 128  # a token chooses an expert once


def test_capacity_of_a_device():
    assert device_capacity(100, 2, 8, 4, 0.0) == 4 * 100 * 2  # all devices' choices
    assert device_capacity(100, 4, 4, 4, 0.0) == 4 * 100  # a token chooses an expert once
    assert device_capacity(100, 2, 8, 4, 1.501) == 304  # in fours
    assert device_capacity(100, 2, 8, 4, 9.0) == 800  # never more than all
    assert device_capacity(8192, 2, 8, 8, 2.0) == 32768
    assert device_capacity(5, 2, 8, 4, 1.0) == 10
