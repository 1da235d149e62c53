"""Where the time up to the first step went; the garbage collector while a command imports."""

import gc

import pytest

from jaxtrain.run import start_up
from jaxtrain.run.goodput import Part, WallClock
from jaxtrain.run.start_up import imports_without_collection


def test_parts_follow_each_other_and_add_up():
    now = iter([102.0, 102.01, 105.5, 106.0, 106.75, 106.75, 106.75])
    clock = WallClock(100.0, lambda: next(now))
    for part in (Part.TABLE, Part.COMPILING, Part.STEPPING, Part.COMPILING):
        clock.enter(part)
    parts = {"imports_s": 2.0, "table_s": 0.01, "compiling_s": 4.24, "stepping_s": 0.5}
    assert start_up.record(clock) == pytest.approx({"start_up_s": 6.75} | parts)
    assert (
        start_up.line(clock) == "first step after 6.8 s: imports 2.0, compiling 4.2, stepping 0.5"
    )


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
