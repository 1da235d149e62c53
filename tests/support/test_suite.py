"""The parts of the suite, and what is said of its cost."""

import argparse
import types

import pytest

from support import ROOT, suite


def test_every_test_is_in_one_part_whatever_the_others():
    tests = [f"tests/test_a.py::test_{n}" for n in range(200)]
    parts = [
        [test for test in tests if suite.in_part(test, (number, 4))] for number in (1, 2, 3, 4)
    ]
    assert sorted(sum(parts, [])) == sorted(tests) and min(map(len, parts)) > 30
    assert suite.in_part("tests/test_a.py::test_0", (4, 4))  # on every machine


def test_what_is_a_part():
    assert suite.parse_part("2/4") == (2, 4)
    for text in ("0/4", "5/4", "2", "/", "a/4", "-1/4"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^{text} is no part such as 2/4$"):
            suite.parse_part(text)


def test_whole_runs_come_first_and_then_the_rooms_from_above():
    files = [
        "test_train.py",
        "training/test_axes.py",
        "planner/step/test_step_counts.py",
        "schedule/test_table.py",
        "support/test_suite.py",
    ]
    turns = [suite.turn(ROOT / "tests" / file) for file in files]
    assert turns == sorted(set(turns)), turns


def test_the_tests_of_a_file_go_to_one_worker(request):
    """pytest-xdist says so in a test's name, or does not where it no longer fits pytest."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("the tests are not dealt out to workers")
    assert request.node.nodeid.endswith("@tests/support/test_suite.py")


def test_slowest_files():
    reports = [
        types.SimpleNamespace(nodeid=f"{file}.py::test_{n}", duration=n)
        for file in "ab"
        for n in (1.0, 2.5)
    ]
    reports.append(types.SimpleNamespace(nodeid="b.py::test_1.0", duration=0.5))  # its setup
    assert suite.slowest_files(reports, 2) == [
        "    7.5 s in all, by 2 workers; the slowest files:",
        "    4.0 s     2 tests  b.py",
        "    3.5 s     2 tests  a.py",
    ]
