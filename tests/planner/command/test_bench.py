"""Timed programs on this process's simulated devices, of sizes that take no time."""

import time

import jax
import pytest

from jaxtrain.planner.command import bench
from jaxtrain.planner.layer.links import GATHER, PERMUTE, SCATTER, SUM


def test_seconds_of_devices_that_share_cores_are_cpu_seconds():
    """A call that sleeps takes none of them; on devices of their own it takes what the clock
    says."""
    calls = []
    nap = lambda: calls.append(time.sleep(0.01))
    assert bench.seconds_of(nap, 2, False, 0.001) < 0.005
    assert bench.seconds_of(nap, 0, False, 0.001) >= 0.01


@pytest.mark.parametrize(
    ("devices", "groups"),
    [(1, []), (2, [2]), (6, [2, 6]), (8, [2, 4, 8]), (12, [2, 4, 12])],
    ids=lambda value: str(value),
)
def test_groups(devices, groups):
    assert bench.groups_of(devices) == groups


@pytest.fixture(scope="module")
def small() -> bench.Bench:
    return bench.Bench(jax.devices(), 0.0005)


def test_times_are_those_of_what_was_asked_for(small):
    assert small.product(8, 16, 32, "float32") > 0
    assert all(seconds > 0 for seconds in small.attention(1, 32, 2, 8, "float32"))
    moved, seconds = small.streaming(1 << 12)
    assert moved == 2 << 12 and seconds > 0
    assert small.call > 0 and small.launch() >= 0


def test_collectives_over_groups(small):
    timed = list(small.collectives(4, 1 << 12))
    assert [[c.kind for c in each.collectives] for each in timed] == [
        [GATHER, SCATTER],
        [SUM],
        [PERMUTE],
    ]
    assert all(each.devices == 4 and each.seconds > 0 for each in timed)
    assert {c.size for each in timed for c in each.collectives} == {1 << 12}


def test_a_time_without_its_call():
    """A tenth of it is left, at least: the call may be measured as longer than it was."""
    assert bench.without(3.0, 1.0) == 2.0 and bench.without(3.0, 4.0) == pytest.approx(0.3)
