"""Which process is the slowest, from beats."""

import pytest

from jaxtrain.run.peers import Beat
from jaxtrain.run.stragglers import WINDOW_S, Slowest, Stragglers


def run(
    stragglers: Stragglers,
    own: dict[int, float],
    seconds: int,
    data_wait: float = 0.0,
    begin: tuple[int, float] = (1, 100.0),
) -> None:
    """Beats once a second of processes that take a step in 0.2 s, with so much time of their own in
    each."""
    first, now = begin
    for second in range(seconds + 1):
        step = first + 5 * second
        beats = {
            p: (
                f"process {p} (host{p})",
                Beat(step, own_s=each * step, data_wait_s=data_wait * step),
            )
            for p, each in own.items()
        }
        stragglers.take(beats, now + second)


def test_the_process_with_most_time_of_its_own_is_named():
    stragglers = Stragglers()
    own = {0: 0.020, 1: 0.010, 2: 0.100, 3: 0.012}
    run(stragglers, own, int(WINDOW_S) - 1, 0.09)
    assert stragglers.slowest is None, "the window is not over"
    run(stragglers, own, int(WINDOW_S), 0.09)
    slowest = stragglers.slowest
    assert (slowest.process, slowest.steps) == (2, (2, 51))
    assert (slowest.own_s, slowest.data_wait_s, slowest.behind_s, slowest.step_s) == pytest.approx(
        (0.1, 0.09, 0.088, 0.2)
    )
    text = (
        "warning: steps 2 to 51: process 2 (host2) is slowest, with 0.100 s of its own a step "
        "(0.090 waiting for data), the median 0.012"
    )
    assert slowest.line() == f"{text}; a step takes 0.200 s"


def test_nobody_is_named_for_little():
    stragglers = Stragglers()
    run(stragglers, {0: 0.025, 1: 0.010, 2: 0.011}, 30)
    assert stragglers.slowest is None


def test_of_two_the_slower_is_named():
    stragglers = Stragglers()
    run(stragglers, {0: 0.010, 1: 0.060}, 15)
    assert stragglers.slowest.process == 1 and stragglers.slowest.behind_s == pytest.approx(0.05)


def test_who_has_caught_up_is_no_longer_named():
    stragglers = Stragglers()
    stragglers.slowest = Slowest(1, "process 1", (1, 2), 1.0, 0.0, 0.0, 1.0)
    run(stragglers, {0: 0.010, 1: 0.011}, 10)
    assert stragglers.slowest is None


def test_a_window_begins_with_the_first_step_and_anew_after_a_roll_back():
    stragglers = Stragglers()
    stragglers.take({0: ("", Beat()), 1: ("", Beat())}, 0.0)
    run(stragglers, {0: 0.0, 1: 0.1}, 9)
    assert stragglers.slowest is None, "the start does not count"
    run(stragglers, {0: 0.0, 1: 0.1}, 9, begin=(1, 110.0))
    assert stragglers.slowest is None, "what was before the roll-back does not count"
    run(stragglers, {0: 0.0, 1: 0.1}, 1, begin=(51, 120.0))
    assert stragglers.slowest.process == 1 and stragglers.slowest.step_s == pytest.approx(0.2)


def test_a_step_longer_than_the_window_makes_it_longer():
    stragglers = Stragglers()
    for now in range(0, 100, 5):
        step = 1 + now // 20
        stragglers.take(
            {p: ("", Beat(step, own_s=own * step)) for p, own in enumerate([0.0, 10.0])}, float(now)
        )
        assert (stragglers.slowest is None) == (now < 60)
