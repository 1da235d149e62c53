"""After which steps what is due."""

import pytest

from jaxtrain import config as configs
from jaxtrain.training.calendar import Calendar

STEPS = 10


def calendar(**changes) -> Calendar:
    return Calendar.of(
        configs.replace(
            configs.Config(),
            {"train.steps": STEPS} | {k.replace("__", "."): v for k, v in changes.items()},
        )
    )


def days(due) -> list[int]:
    return [at for at in range(1, STEPS + 1) if due(at)]


@pytest.mark.parametrize(
    ("every", "expected"),
    [(0, [10]), (1, [*range(1, 11)]), (4, [4, 8, 10]), (5, [5, 10]), (99, [10])],
)
def test_intervals_and_the_last_step(every, expected):
    c = calendar(checkpoint__every=every, train__eval_every=every)
    assert days(c.saves) == days(c.evaluates) == expected and days(c.is_last) == [10]


def test_the_first_step_is_logged_too():
    assert days(calendar(metrics__log_every=3).logs) == [1, 3, 6, 9, 10]


def test_copies_of_independent_replicas_are_compared_where_these_meet():
    assert (
        days(calendar(train__hash_every=4).compares) == [4, 8]
        and days(calendar(train__hash_every=0).compares) == []
    )
    independent = {"train__diloco_inner_steps": 3, "mesh__replica": 2}
    assert days(calendar(train__hash_every=4, **independent).compares) == [6, 9]  # for 4 and 8
    assert days(calendar(train__hash_every=1, **independent).compares) == [3, 6, 9, 10]
    assert days(calendar(train__hash_every=5, **independent).compares) == [6, 10]


def test_only_independent_replicas_exchange_and_they_meet_seldom():
    together, independent = (
        calendar(metrics__log_every=4),
        calendar(metrics__log_every=4, train__diloco_inner_steps=3, mesh__replica=2),
    )
    assert days(together.exchanges) == [] and days(together.meets) == [*range(1, 11)]
    assert days(independent.exchanges) == [3, 6, 9, 10] and days(independent.meets) == [
        3,
        4,
        6,
        8,
        9,
        10,
    ]
