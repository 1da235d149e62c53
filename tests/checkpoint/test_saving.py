"""Saves that the storage fails: retried, reported, given up for the next one."""

import errno
import re
import time

import numpy as np
import pytest
from etils import epath
from support.checkpoint_state import (
    Layout,
    assert_same,
    checkpointer,
    latest_step,
    meta_of,
    restored,
    state,
)

from jaxtrain.checkpoint import manifest, reading, saving, steps, storage, stores
from jaxtrain.checkpoint.steps import CheckpointError


def failing(monkeypatch, *failures: Exception) -> list[float]:
    """Makes the next writings of arrays fail, one by one, and returns the times at which they were
    begun."""
    write, left, begun = storage._write, list(failures), []

    async def fail(values, infos):
        begun.append(time.monotonic())
        if left:
            raise left.pop(0)
        await write(values, infos)

    monkeypatch.setattr(storage, "_write", fail)
    return begun


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_store_that_fails_for_a_while_costs_no_checkpoint(tmp_path, monkeypatch, caplog):
    """In the background, with growing waits, and without a word."""
    monkeypatch.setattr(saving, "RETRY_WAITS_S", (0.05, 0.1, 0.2))
    begun = failing(monkeypatch, FULL, ValueError("UNAVAILABLE: the store is busy"), FULL)
    layout, said = Layout(7), []
    c = checkpointer(tmp_path, layout, log=said.append)
    c.save(1, state(layout), {})
    c.wait()
    waits = np.diff(begun)
    assert len(waits) == 3 and (waits >= (0.05, 0.1, 0.2)).all()
    assert not said and not caplog.records
    assert_same(restored(tmp_path, 1, layout), state(layout))
    assert list(c.figures()) == [1] and not c.figures()
    c.close()


@pytest.mark.parametrize("version", ["0.12.4", "0.11.40", "0.12.5", "0.13.0rc1", "1.0"])
def test_a_version_of_orbax_that_hangs_is_refused(monkeypatch, version):
    """On the first GPU machine that ran this, every save of Orbax 0.12.4's kind hung for ever."""
    monkeypatch.setattr(saving.importlib.metadata, "version", lambda package: version)
    if version in ("0.12.4", "0.11.40"):
        with pytest.raises(saving.OrbaxError, match=re.escape(f"orbax-checkpoint {version} is")):
            saving.check_orbax()
    else:
        saving.check_orbax()


def test_a_failed_save_is_reported_and_the_next_one_tries_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(saving, "RETRY_WAITS_S", (0.01, 0.01))
    layout, said = Layout(7), []
    c = checkpointer(tmp_path, layout, log=said.append)
    c.save(1, state(layout), {})
    c.wait()
    with monkeypatch.context() as patch:
        failing(patch, *[FULL] * 6)
        c.save(2, state(layout), {})
        c.save(3, state(layout), {})
        with pytest.raises(
            CheckpointError,
            match=r"step 3, the last of this run, is not saved: No space left on device \(3 .*; "
            r"the newest checkpoint is 1 in ",
        ):
            c.wait()
    what = (
        r"No space left on device \(\d attempts? in 0 s\); the newest checkpoint is 1 in \S+; the "
        r"next save tries again"
    )
    line = rf"warning: step 2 is not saved: {what}"
    assert len(said) == 1 and re.fullmatch(line, said[0]), said
    assert not caplog.records and [path.name for path in tmp_path.iterdir()] == ["1"]
    assert c.save(3, state(layout), {})
    c.close()
    assert latest_step(tmp_path) == 3
    assert_same(restored(tmp_path, 1, layout), state(layout))


def test_a_save_that_fails_does_not_hold_up_the_next(tmp_path, monkeypatch):
    """It is not tried again when another one is due."""
    monkeypatch.setattr(saving, "RETRY_WAITS_S", (100.0,))
    begun, layout, said = failing(monkeypatch, FULL), Layout(7), []
    c = checkpointer(tmp_path, layout, log=said.append)
    c.save(1, state(layout), {})
    began = time.monotonic()
    c.save(2, state(layout), {})
    c.close()
    assert time.monotonic() - began < 50 and len(begun) == 2 and latest_step(tmp_path) == 2
    assert said[0].endswith(
        f"(1 attempt in 0 s); there is no checkpoint in {tmp_path}; the next save tries again"
    )


def test_a_process_that_does_not_see_the_folder_writes_nowhere(tmp_path, monkeypatch):
    """As one whose --workdir is another one, or whose disk is not mounted: the save has failed."""
    monkeypatch.setattr(saving, "RETRY_WAITS_S", ())
    monkeypatch.setattr(saving.SaveThread, "_make_folder", lambda self: None)
    c = checkpointer(tmp_path, Layout(7))
    c.save(1, state(Layout(7)), {})
    with pytest.raises(CheckpointError, match="process 0 does not see .*1.orbax-checkpoint-tmp, "):
        c.wait()
    assert not list(tmp_path.iterdir())


def test_a_fault_in_the_program_is_no_failure_of_the_storage(tmp_path, monkeypatch):
    failing(monkeypatch, KeyError("a mistake"))
    layout = Layout(7)
    c = checkpointer(tmp_path, layout)
    c.save(1, state(layout), {})
    with pytest.raises(KeyError, match="a mistake"):
        c.wait()


def test_owners_and_groups_without_a_name(tmp_path, monkeypatch):
    """As on volumes of Kubernetes, and for a user without an entry: nobody asks for the names."""

    def no_name(number: int):
        raise KeyError(f"not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", no_name)
    monkeypatch.setattr("grp.getgrgid", no_name)
    manifest.try_step(epath.Path(tmp_path / "trial"))
    layout = Layout(7)
    c = checkpointer(tmp_path / "run", layout)
    c.save(1, state(layout), meta_of(1))
    c.wait()
    c.close()
    folder = epath.Path(tmp_path / "run" / "1")
    assert stores.size_of(folder) > 4000 and steps.fault(folder) == ""
    assert reading.verify(folder, lambda done, total: None) == []
    assert_same(restored(tmp_path / "run", 1, layout), state(layout))
