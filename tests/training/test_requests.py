"""What the loop asks of all processes: whether to stop, and whether it is time to save. Whole runs
are in test_train.py."""

import math
import types

import jax
import pytest

from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import make_mesh
from jaxtrain.training.requests import Request, Requests

STOP, SAVE, NOTHING = Request.STOP, Request.SAVE, Request.NOTHING


@pytest.fixture(params=[1, 2], ids=["one process", "through the devices"])
def requests(request, monkeypatch):
    """(Requests of 10 minutes, what it listens to); with the way that several processes go."""
    monkeypatch.setattr(jax, "process_count", lambda: request.param)
    world = types.SimpleNamespace(
        now=50.0, asked=False, interrupted=False, asked_at=math.inf, longest_s=0.0, busy=False
    )
    return Requests(
        make_mesh((1, 2, 2, 1, 1, 2), jax.devices()), world, world, 10, 30, lambda: world.now
    ), world


def test_a_save_every_ten_minutes_after_the_last(requests):
    requests, world = requests
    answers = []
    for minute in range(1, 26):
        world.now = 50 + 60 * minute
        answers.append(requests.ask()())
        if minute in (4, 15):  # for another reason; by time
            requests.saved()
    assert [minute for minute, answer in enumerate(answers, 1) if Request.SAVE in answer] == [
        14,
        15,
        25,
    ]
    assert not any(answer.stop for answer in answers)


def test_never_while_a_save_is_under_way(requests):
    """The next would wait for it, and the step for that."""
    requests, world = requests
    world.now, world.busy = 50 + 660, True
    assert requests.ask()() == NOTHING
    world.busy = False
    assert requests.ask()() == SAVE


def test_stop_and_save_at_once(requests):
    requests, world = requests
    assert requests.ask()() == NOTHING
    world.asked = True
    assert requests.ask()() == STOP
    world.now += 600
    assert requests.ask()() == STOP | SAVE


def test_process_0_has_the_clock_and_any_may_stop(requests, monkeypatch):
    requests, world = requests
    monkeypatch.setattr(cluster, "is_main", lambda: False)
    world.now, world.asked = 50 + 6000, True
    assert requests.ask()() == STOP


def test_zero_minutes_are_never(monkeypatch):
    world = types.SimpleNamespace(
        now=0.0, asked=False, interrupted=False, asked_at=math.inf, longest_s=0.0, busy=False
    )
    requests = Requests(
        make_mesh((1, 1, 1, 1, 1, 1), jax.devices()[:1]), world, world, 0.0, 0.0, lambda: world.now
    )
    world.now = 1e9
    assert requests.ask()() == NOTHING


@pytest.mark.parametrize(
    ("longest", "busy", "hurry"),
    [(0.0, False, False), (20.0, False, False), (20.0, True, True), (35.0, False, True)],
)
def test_a_save_has_to_fit_into_the_grace_after_a_signal(requests, longest, busy, hurry):
    """30 s: a save that is under way is finished first."""
    requests, world = requests
    world.asked, world.asked_at, world.longest_s, world.busy = True, world.now - 1, longest, busy
    assert requests.ask()() == (STOP | Request.HURRY if hurry else STOP)


def test_ctrl_c_is_told_from_other_signals(requests):
    requests, world = requests
    world.asked = world.interrupted = True
    assert requests.ask()() == STOP | Request.INTERRUPT
