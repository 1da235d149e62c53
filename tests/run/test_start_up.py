"""Where the time up to the first step went; the garbage collector while a command imports."""

import gc

import pytest

from jaxtrain.run.start_up import StartUp, imports_without_collection


def test_parts_follow_each_other_and_add_up():
    now = iter([102.0, 102.01, 105.5, 106.0, 106.75])
    start_up = StartUp(100.0, lambda: next(now))
    assert [start_up.ended(part) for part in ("imports", "table", "compiling", "running")] == pytest.approx([2.0, 0.01, 3.49, 0.5])
    assert start_up.ended("compiling") == pytest.approx(0.75)
    record = {"start_up_s": 6.75, "imports_s": 2.0, "table_s": 0.01, "compiling_s": 4.24, "running_s": 0.5}
    assert start_up.record() == pytest.approx(record)
    assert start_up.line() == "first step after 6.8 s: imports 2.0, compiling 4.2, running 0.5"


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
