"""Checkpoints of runs that are killed, and of runs of several processes. Each test starts
processes: some seconds a test."""

import signal

import pytest
from support.checkpoint_processes import run_together, start
from support.checkpoint_state import (
    Layout,
    assert_same,
    checkpointer,
    latest_step,
    meta_of,
    restored,
    state,
)


@pytest.mark.parametrize("when", ["during", "written", "unfinished"])
def test_a_killed_save_leaves_the_one_before(tmp_path, when):
    layout = Layout(7, stages=2, chunks=2, data=2, model=2)
    c = checkpointer(tmp_path, layout)
    c.save(1, state(layout), meta_of(1))
    c.close()
    process = start(tmp_path, "kill", when, devices=8)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (9 if when == "unfinished" else -signal.SIGKILL), output
    other = Layout(7, stages=4, data=2)
    if when == "unfinished":
        # The background thread may or may not have finished: whichever is the newest is complete.
        assert latest_step(tmp_path) in (1, 2)
    else:
        assert latest_step(tmp_path) == 1
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith("2")] != [], (
            "killed before anything was written"
        )
    assert_same(restored(tmp_path, latest_step(tmp_path), other), state(other))
    # The remains are in nobody's way.
    c = checkpointer(tmp_path, other, keep=1)
    c.save(2, state(other), meta_of(2))
    c.close()
    assert latest_step(tmp_path) == 2
    assert_same(restored(tmp_path, 2, other), state(other))
    assert [p.name for p in tmp_path.iterdir()] == ["2"]


@pytest.mark.full
def test_what_one_process_cannot_write_all_write_again(tmp_path):
    layout = (7, 2, 1, 1, 1, 16)
    run_together(tmp_path, ["failing"], 2, *layout, devices=1)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    one = Layout(7)
    assert_same(restored(tmp_path, 1, one), state(one))


# Processes; layers, stages, chunks, data, model, padded: stages of their own processes, and stages
# within each.
PROCESSES = [(2, (7, 4, 1, 1, 2, 16)), (4, (7, 2, 3, 2, 2, 32)), (2, (7, 2, 2, 4, 1, 24))]


@pytest.mark.parametrize(
    "chain",
    [PROCESSES[:1], pytest.param(PROCESSES, marks=pytest.mark.full)],
    ids=["1-2-1", "1-2-4-2-1"],
)
def test_processes_restore_each_other(tmp_path, chain):
    """So many processes, of 8 devices in all, each on another mesh."""
    first = Layout(7, stages=1, chunks=2, data=4, model=2)
    c = checkpointer(tmp_path, first)
    c.save(1, state(first), {"step": 1})
    c.close()
    for step, (processes, layout) in enumerate(chain, start=1):
        run_together(tmp_path, ["next"], processes, step, *layout, devices=8 // processes)
    last = Layout(7, stages=4, chunks=1, data=2)
    assert latest_step(tmp_path) == 1 + len(chain)
    assert_same(restored(tmp_path, 1 + len(chain), last), state(last))
