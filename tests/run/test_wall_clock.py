"""Parts of wall time: they nest, add up by construction, and other threads may look; the start of a
command, and the garbage collector during its imports."""

import gc
import itertools
import random
import threading

import pytest

from jaxtrain.run.wall_clock import (
    Current,
    Phase,
    WallClock,
    imports_without_collection,
    start_line,
    start_record,
)


def ticking(*moments: float):
    """A clock that says these moments, one a call."""
    return iter(moments).__next__


def test_an_inner_part_is_not_the_outer_ones():
    clock = WallClock(0.0, ticking(2.0, 3.0, 4.5, 6.0, 10.0, 12.0))
    clock.enter(Phase.STEPPING)
    with clock.phase(Phase.SAVING):
        with clock.phase(Phase.WAITING):
            pass
    assert clock.seconds() == {
        Phase.IMPORTS: 2.0,
        Phase.STEPPING: 1.0 + 2.0,
        Phase.SAVING: 1.5 + 4.0,
        Phase.WAITING: 1.5,
    }


def test_a_part_ends_where_an_error_leaves_it():
    clock = WallClock(0.0, ticking(1.0, 5.0, 7.0))
    with pytest.raises(ValueError), clock.phase(Phase.EVALUATING):
        raise ValueError
    assert clock.current == Current(Phase.IMPORTS, 2.0)


def test_parts_add_up_to_the_wall_time():
    chance, moments = (
        random.Random(0),
        itertools.accumulate(random.Random(1).random() for _ in itertools.count()),
    )
    last = 0.0

    def now() -> float:
        nonlocal last
        last = next(moments)
        return last

    clock = WallClock(0.0, now)
    for _ in range(1000):
        clock.enter(chance.choice([*Phase]))
        with clock.phase(chance.choice([*Phase])), clock.phase(chance.choice([*Phase])):
            pass
    assert sum(clock.seconds().values()) == pytest.approx(last, rel=1e-9)


def test_another_thread_may_look_at_any_moment():
    """It finds parts that add up, however often the first thread changes them."""
    clock, done, wrong = WallClock(), threading.Event(), []

    def look() -> None:
        while not done.is_set():
            before = clock.wall_s()
            total, current = sum(clock.seconds().values()), clock.current
            if not (
                before <= total + 1e-6
                and total <= clock.wall_s() + 1e-6
                and 0 <= current.seconds <= clock.wall_s()
            ):
                wrong.append((before, total, current))

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(2000):
        with clock.phase(Phase.SAVING):
            clock.enter(Phase.EVALUATING)
    done.set()
    thread.join()
    assert not wrong


# --- the start ------------------------------------------------------------------------------------


def test_parts_follow_each_other_and_add_up():
    now = iter([102.0, 102.01, 105.5, 106.0, 106.75, 106.75, 106.75])
    clock = WallClock(100.0, lambda: next(now))
    for part in (Phase.TABLE, Phase.COMPILING, Phase.STEPPING, Phase.COMPILING):
        clock.enter(part)
    parts = {"imports_s": 2.0, "table_s": 0.01, "compiling_s": 4.24, "stepping_s": 0.5}
    assert start_record(clock) == pytest.approx({"start_up_s": 6.75} | parts)
    assert start_line(clock) == "first step after 6.8 s: imports 2.0, compiling 4.2, stepping 0.5"


def test_the_collector_rests_during_imports_and_runs_again_after_them():
    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), imports_without_collection():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with imports_without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
