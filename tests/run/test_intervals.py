"""The steps after which something is due."""

import pytest

from jaxtrain import config as configs
from jaxtrain.run.intervals import Intervals

STEPS = 10


def intervals(**changes) -> Intervals:
    config = configs.replace(
        configs.Config(),
        {"train.steps": STEPS} | {k.replace("__", "."): v for k, v in changes.items()},
    )
    return Intervals.of(config.train, config.checkpoint, config.metrics.log_every)


def steps(due) -> list[int]:
    return [at for at in range(1, STEPS + 1) if due(at)]


@pytest.mark.parametrize(
    ("every", "expected"),
    [(0, [10]), (1, [*range(1, 11)]), (4, [4, 8, 10]), (5, [5, 10]), (99, [10])],
)
def test_intervals_and_the_last_step(every, expected):
    c = intervals(checkpoint__every=every, train__eval_every=every)
    assert steps(c.saves) == steps(c.evaluates) == expected


def test_the_first_step_is_logged_too():
    assert steps(intervals(metrics__log_every=3).logs) == [1, 3, 6, 9, 10]


def test_copies_of_independent_replicas_are_compared_at_exchanges():
    assert (
        steps(intervals(train__hash_every=4).compares) == [4, 8]
        and steps(intervals(train__hash_every=0).compares) == []
    )
    independent = {"train__diloco_inner_steps": 3, "mesh__replica": 2}
    assert steps(intervals(train__hash_every=4, **independent).compares) == [6, 9]  # for 4 and 8
    assert steps(intervals(train__hash_every=1, **independent).compares) == [3, 6, 9, 10]
    assert steps(intervals(train__hash_every=5, **independent).compares) == [6, 10]


def test_only_independent_replicas_exchange_and_synchronize_seldom():
    together, independent = (
        intervals(metrics__log_every=4),
        intervals(metrics__log_every=4, train__diloco_inner_steps=3, mesh__replica=2),
    )
    assert steps(together.exchanges) == [] and steps(together.synchronizes) == [*range(1, 11)]
    assert steps(independent.exchanges) == [3, 6, 9, 10] and steps(independent.synchronizes) == [
        3,
        4,
        6,
        8,
        9,
        10,
    ]


def test_a_stop_before_the_last_step_is_saved_and_evaluated_and_exchanges_nothing():
    c = intervals(train__stop_at=7, train__diloco_inner_steps=3, mesh__replica=2)
    assert steps(c.saves) == steps(c.evaluates) == [7] and steps(c.exchanges) == [3, 6, 9, 10]
    assert intervals(train__stop_at=99).last == 10


def test_a_program_of_several_steps_ends_where_something_is_due():
    c = intervals(
        checkpoint__every=4, train__eval_every=6, train__hash_every=9, metrics__log_every=1
    )
    ends, at = [], 0
    while at < STEPS:
        at += c.steps_until(at, 3, lambda step: step == 2)
        ends.append(at)
    assert ends == [2, 4, 6, 8, 9, 10]
    free = intervals(checkpoint__every=0, train__eval_every=0)
    assert [free.steps_until(at, 3, lambda step: False) for at in (0, 6, 7, 8, 9)] == [
        3,
        3,
        3,
        2,
        1,
    ]
    assert free.steps_until(0, 1, lambda step: True) == 1
