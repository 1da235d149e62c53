"""Folders that are whole or not there: failures, kills and races."""

import fcntl
import os
import threading

import pytest

from jaxtrain.data.preparing import cache


def is_complete(folder):
    return (folder / "done").exists()


def writer(text):
    def make(folder):
        (folder / "done").write_text(text)

    return make


def test_made_once(tmp_path):
    folder = tmp_path / "a" / "b" / "c"
    cache.ensure(folder, is_complete, writer("1"), False)
    cache.ensure(folder, is_complete, writer("2"), False)
    assert (folder / "done").read_text() == "1"
    assert [path.name for path in folder.parent.iterdir()] == ["c"]


def test_failure_leaves_nothing(tmp_path):
    def make(folder):
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.ensure(tmp_path / "a" / "b", is_complete, make, False)
    assert not list(tmp_path.iterdir())


def test_damaged_folder_is_made_again(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "half").touch()
    cache.ensure(tmp_path / "c", is_complete, writer("1"), False)
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["done"]


def test_leftovers_of_this_machine_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(cache.socket, "gethostname", lambda: "here")
    for name in ("c.tmp-here-1-x", "c.tmp-elsewhere-1-x", "other.tmp-here-1-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    (tmp_path / "c.lock").touch()  # what a killed process leaves of its lock
    cache.ensure(tmp_path / "c", is_complete, writer("1"), False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "c",
        "c.tmp-elsewhere-1-x",
        "other.tmp-here-1-x",
    ]


def run_together(count, target):
    threads = [threading.Thread(target=target, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def test_those_who_wait_find_it_made(tmp_path):
    makers = []

    def make(folder):
        makers.append(folder)
        assert len(list(tmp_path.glob("c.tmp-*"))) == 1
        (folder / "done").touch()

    run_together(8, lambda i: cache.ensure(tmp_path / "c", is_complete, make, False))
    assert len(makers) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_without_locks_the_first_stays(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    # all four are making it at once, and then rename at once
    together = threading.Barrier(4, timeout=30)
    made = []

    def work(i):
        def make(folder):
            (folder / "done").write_text(str(i))
            together.wait()

        cache.ensure(tmp_path / "c", is_complete, make, False)
        made.append(i)

    run_together(4, work)
    assert sorted(made) == [0, 1, 2, 3]
    assert [path.name for path in tmp_path.iterdir() if path.name != "c.lock"] == ["c"]


def test_folder_of(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXTRAIN_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder_of("") == tmp_path / ".cache" / "jaxtrain"
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "shared"))
    assert cache.folder_of("") == tmp_path / "shared"
    assert cache.folder_of("~/mine") == tmp_path / "mine"
    monkeypatch.delenv("JAXTRAIN_CACHE")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home folder
    rule = "^data.cache=~/.cache/jaxtrain is below a home folder, and this user has none: use --con"
    with pytest.raises(cache.CacheError, match=rule) as error:
        cache.folder_of("")
    assert error.value.status == 2 and not os.path.exists("~")
