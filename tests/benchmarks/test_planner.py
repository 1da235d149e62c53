"""The planner beside published runs."""

import statistics

import planner
import pytest


def test_errors():
    """Of all rows; constants are fitted to those of six sources, not to Llama 3's."""
    errors = {row.name: abs(row.error) for row in planner.rows()}
    assert len(errors) == 26
    assert statistics.median(errors.values()) < 0.1
    assert max(errors.values()) < 0.2, max(errors, key=errors.get)


def test_the_table(capsys):
    planner.main(["--markdown"])
    out = capsys.readouterr().out
    assert out.count("\n| ") == 26 and "median error" in out


@pytest.mark.parametrize("row", planner.rows(), ids=lambda row: row.name)
def test_a_layout_uses_the_run_s_devices_and_batch(row):
    assert str(row.work.layout.devices) in row.name.replace(",", "") or "torchtitan" in row.name
    assert row.work.layout.microbatches >= 1
