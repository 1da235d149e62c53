"""A run's files: lines on a disk that is full for a while are kept, written in order when it has
space, and warned of once."""

import errno
import os
import tracemalloc

import pytest

from jaxtrain.run import files, metrics
from jaxtrain.run.files import (
    MOST_DEPTH,
    LineFile,
    fresh,
    open_regular,
    parse_json,
    read_json,
    read_regular,
    replace_text,
)
from jaxtrain.run.metrics import MetricsWriter, read_metrics


@pytest.fixture
def room(monkeypatch):
    """A list whose only item is how many bytes the disk has left for os.write."""
    left, write = [1 << 30], os.write

    def write_some(descriptor, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(descriptor, data[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", write_some)
    return left


def test_lines_wait_for_room(tmp_path, room):
    said, path = [], tmp_path / "lines"
    file = LineFile(path, said.append)
    file.write("one")
    room[0] = 2
    for line in ("two", "three", "four"):
        file.write(line)
    assert path.read_text() == "one\ntw"
    assert said == [
        f"warning: {path} cannot be written (No space left on device): training goes on without it"
    ]
    room[0] = 1 << 30
    file.write("five")
    file.close()
    assert path.read_text() == "one\ntwo\nthree\nfour\nfive\n" and len(said) == 1


def test_metrics_on_a_full_disk(tmp_path, room):
    said = []
    writer = MetricsWriter(tmp_path, tensorboard=False, log=said.append)
    writer.write(1, loss=1.0)
    room[0] = 5
    writer.write(2, loss=2.0)
    writer.write(3, loss=3.0)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1] and len(said) == 1
    room[0] = 1 << 30
    writer.write(4, loss=4.0)
    writer.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4] and len(said) == 1


def test_tensorboard_on_a_full_disk(tmp_path, monkeypatch):
    """Its thread lives on: one that had ended would hold up the loop when its queue is full."""
    said = []
    writer = MetricsWriter(tmp_path, tensorboard=True, log=said.append)
    recorder = writer._events.file_writer.event_writer._ev_writer._py_recordio_writer

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recorder, "write", full)
    monkeypatch.setattr(recorder, "flush", full)
    for step in range(100):
        writer.write(step, loss=1.0)
    writer.close()
    folder = tmp_path / metrics.TENSORBOARD_FOLDER
    assert said == [
        f"warning: {folder} cannot be written (No space left on device): training goes on "
        "without it"
    ]


def test_files_that_have_no_end(tmp_path):
    """A pipe is not waited for, a device is not read, and no file is read beyond its bound."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "file").write_bytes(b"12345")
    for name, what in (("pipe", "a FIFO"), ("zero", "a device"), (".", "a folder")):
        with pytest.raises(OSError, match=f"it is {what}, not a file") as caught:
            open_regular(tmp_path / name)
        assert caught.value.filename == str(tmp_path / name)
    assert read_regular(tmp_path / "file", most=5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_regular(tmp_path / "file", most=4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothing")
    assert read_json(tmp_path / "file") == 12345


def test_links_that_leave_the_folder(tmp_path):
    """Whatever names it, nothing outside is read; a hub's cache has its blobs beside the folder."""
    secret, home = tmp_path / "secret", tmp_path / "models--x--y" / "snapshots" / "f00"
    (home / "sub").mkdir(parents=True)
    blobs = home.parents[1] / "blobs"
    for place in (blobs, tmp_path / "blobs"):
        place.mkdir()
    for path in (secret, home / "plain", blobs / "12", tmp_path / "blobs" / "12", home / "sub/a"):
        path.write_text(path.name)
    (blobs / "34").symlink_to(secret)
    shared = tmp_path / "blobs" / "ab" / "abcd"  # of several repositories
    shared.parent.mkdir()
    shared.write_text("12")
    (blobs / "56").symlink_to("../../blobs/ab/abcd")
    links = {
        "plain": "plain",
        "inside": "sub/a",
        "blob": "../../blobs/12",
        "sub/blob": "../../../blobs/12",
        "shared": "../../blobs/56",
        "absolute": str(blobs / "12"),
    }
    outside = ("../../../secret", str(secret), "/etc/passwd", "/dev/zero", "../../blobs/34")
    outside += ("../../../blobs/12", "../nothing", "..")
    for name, target in links.items():
        if name != "plain":
            (home / name).symlink_to(target)
    (tmp_path / "linked").symlink_to(home)
    for folder in (home, tmp_path / "linked"):
        for name in links:
            expected = {"plain": b"plain", "inside": b"a"}.get(name, b"12")
            assert read_regular(folder / name, folder=(folder / name).parent) == expected
    for number, target in enumerate(outside):
        (home / f"out{number}").symlink_to(target)
        with pytest.raises(OSError, match="it is a link to .*, outside of the folder"):
            read_regular(home / f"out{number}", folder=home)
    (home / "loop").symlink_to("loop")
    for name in ("loop", "a\0b", "\ud800", "x" * 5000):
        with pytest.raises(OSError):
            read_regular(home / name, folder=home)


def test_lines_that_no_run_writes(tmp_path):
    """They are left out, and are not held in memory."""
    path = tmp_path / "metrics.jsonl"
    deep, long = "[" * 100_000, '{"step": 2, "x": "' + "x" * files.MOST_LINE + '"}'
    path.write_text('{"step": 1}\n' + f"{deep}\n{long}\n" + '\xff\n{"step": 3}\n{"st')
    with path.open("ab") as file:
        file.truncate(60 * 2**20)
    tracemalloc.start()
    records = [*files.read_json_lines(path)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert records == [{"step": 1}, {"step": 3}] and peak < 20 * 2**20
    path.unlink()
    path.symlink_to("/dev/zero")
    assert [*files.read_json_lines(path)] == []
    (tmp_path.parent / "others.jsonl").write_text('{"step": 1}')
    path.unlink()
    path.symlink_to(tmp_path.parent / "others.jsonl")
    with pytest.raises(OSError, match="it is a link to .*, outside of the folder"):
        [*files.read_json_lines(path)]
    assert "outside of the folder" in files.try_file(path).why, "before training"


@pytest.mark.parametrize(
    "text, fault",
    [
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "nested deeper than 64 levels"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested deeper than 64 levels"),
        ('{"5": 1' + "0" * 400 + "}", "a number has 401 digits"),
        ('{"5": ', "Expecting value"),
    ],
)
def test_json_beyond_its_bounds(text, fault):
    with pytest.raises(ValueError, match=fault):
        parse_json(text)


def test_json_within_its_bounds():
    deepest = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert str(parse_json(deepest)) == deepest
    assert parse_json(b'{"a": [1, -2.5, "x", null, true]}') == {"a": [1, -2.5, "x", None, True]}
    assert parse_json("7") == 7


@pytest.mark.parametrize("kind", ["link", "hard link"])
def test_nothing_is_written_through_a_link(tmp_path, kind):
    """Neither through a hard link, as `cp -al` makes them of all files of a run."""
    other = tmp_path / "other"
    other.write_text("one\n")
    places = [tmp_path / name for name in ("lines", "text", "plot", ".text.new")]
    for path in places:
        os.symlink(other, path) if kind == "link" else os.link(other, path)
    file = LineFile(places[0], print)
    file.write("two")
    file.write("three")
    file.close()
    replace_text(places[1], "new")
    fresh(places[2]).write_text("drawn")
    assert [path.read_text() for path in places[:3]] == ["one\ntwo\nthree\n", "new", "drawn"]
    assert other.read_text() == "one\n" and not os.path.lexists(places[3])


def test_a_link_to_nothing_is_warned_of(tmp_path):
    said = []
    os.symlink(tmp_path / "nothing", tmp_path / "lines")
    LineFile(tmp_path / "lines", said.append).write("one")
    assert len(said) == 1 and not (tmp_path / "nothing").exists()


def test_a_text_that_cannot_be_replaced_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_text("before")

    def full(self, text):
        with open(self, "wb") as file:
            file.write(b"a")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "after")
    assert [each.name for each in tmp_path.iterdir()] == ["text"] and path.read_text() == "before"
