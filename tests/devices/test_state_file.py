"""Arrays on disk: each number where it was written, whatever the sharding; errors by name; no file
left behind; memory that is bounded."""

import errno
import os
import threading

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxtrain.devices import state_file, state_stream
from jaxtrain.devices.mesh import make_mesh
from jaxtrain.devices.state_file import ALIGNMENT, StateFile, StateFileError
from jaxtrain.devices.state_stream import BlockGroup, Buffers, StateStream
from jaxtrain.run.exit_status import ExitStatus

SPECS = {
    "stacked": ((2, 3, 5, 8), P("stage", None, None, "data"), True),
    "replicated": ((2, 3, 7), P("stage"), True),
    "outside": ((9, 4), P(None, "data"), False),
    "number": ((1,), P(), False),
}


def file_of(folder) -> StateFile:
    mesh = make_mesh((1, 2, 2, 1, 1, 1), jax.devices()[:4])
    file = StateFile(str(folder))
    for name, (shape, spec, stacked) in SPECS.items():
        file.array(name, shape, np.dtype(np.float32), NamedSharding(mesh, spec), stacked)
    return file


def groups_of(file: StateFile) -> list[BlockGroup]:
    stacks = [file.arrays["stacked"], file.arrays["replicated"]]
    ends = [file.arrays["outside"], file.arrays["number"]]
    return [BlockGroup(file, ends, 0), *(BlockGroup(file, stacks, layer) for layer in range(3))]


def numbers(name: str, step: int = 0) -> np.ndarray:
    shape = SPECS[name][0]
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * step


def on_devices(file: StateFile, name: str) -> jax.Array:
    return jax.device_put(numbers(name), file.arrays[name].sharding)


@pytest.fixture
def opened(tmp_path):
    file = file_of(tmp_path / "disk")
    groups = groups_of(file)
    file.open()
    yield file, groups
    file.close()


def test_numbers_come_back_and_no_name_is_left(opened):
    file, _ = opened
    for name in SPECS:
        array = file.arrays[name]
        assert not np.asarray(array.load()).any()
        array.fill(on_devices(file, name))
    for name in SPECS:
        value = file.arrays[name].load()
        np.testing.assert_array_equal(np.asarray(value), numbers(name))
        assert value.sharding == file.arrays[name].sharding
    assert os.listdir(file.folder) == []
    file.clear()
    assert not np.asarray(file.arrays["stacked"].load()).any()


def test_blocks_are_aligned_and_do_not_overlap(opened):
    file, groups = opened
    offsets = sorted(
        (offset, array.size_in_file(block))
        for array in file.arrays.values()
        for block, offset in array.offsets.items()
    )
    assert all(offset % ALIGNMENT == 0 for offset, _ in offsets)
    ends = [offset + size for offset, size in offsets]
    assert [0, *ends] == [*(offset for offset, _ in offsets), file.size]
    assert [group.begin for group in groups[1:]] == [group.end for group in groups[:-1]]


@pytest.mark.parametrize("limit", [1, 10**9])
def test_passes_change_all_numbers_once_each(opened, monkeypatch, limit):
    """Each pass adds 1000, also where buffers hold one group only, and where numbers are replaced
    between passes while the next pass has begun."""
    monkeypatch.setattr(state_stream, "BUFFER_BYTES", limit)
    file, groups = opened
    stream = StateStream(file, groups)
    for name in SPECS:
        file.arrays[name].fill(on_devices(file, name))
    add = jax.jit(lambda arrays: [a + 1000 for a in arrays])

    def one_pass():
        for group, buffer in stream.one_pass():
            stream.write(group, add(group.on_devices(buffer)), buffer)

    one_pass()
    one_pass()
    for name in SPECS:
        np.testing.assert_array_equal(np.asarray(file.arrays[name].load()), numbers(name, 2))
    file.arrays["outside"].fill(on_devices(file, "outside"))
    one_pass()
    np.testing.assert_array_equal(np.asarray(file.arrays["outside"].load()), numbers("outside", 1))
    np.testing.assert_array_equal(np.asarray(file.arrays["stacked"].load()), numbers("stacked", 3))


@pytest.mark.parametrize("which, words", [("preadv", "read"), ("pwritev", "written")])
def test_an_error_of_the_disk_is_told_by_name(opened, monkeypatch, which, words):
    file, groups = opened
    stream = StateStream(file, groups)

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, which, fails)
    with pytest.raises(StateFileError) as raised:
        for _ in range(2):
            for group, buffer in stream.one_pass():
                stream.write(group, group.on_devices(buffer), buffer)
    expected = (
        rf"parallel.offload_directory='{file.folder}': {file.size:,} bytes of the optimizer's "
        f"state cannot be {words} (Input/output error); checkpoints are as they were"
    )
    assert str(raised.value) == expected
    assert raised.value.status is ExitStatus.STORAGE


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    file = file_of(tmp_path / "disk")
    groups_of(file)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StateFileError, match=r"cannot be reserved \(No space left on device\)"):
        file.open()
    assert os.listdir(file.folder) == []
    file.close()


def test_a_file_system_without_o_direct_and_without_unnamed_files(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    monkeypatch.delattr(os, "O_TMPFILE")
    file = file_of(tmp_path / "disk")
    groups_of(file)
    file.open()
    assert not file.direct and "no O_DIRECT" in file.describe()
    file.arrays["stacked"].fill(on_devices(file, "stacked"))
    np.testing.assert_array_equal(np.asarray(file.arrays["stacked"].load()), numbers("stacked"))
    assert os.listdir(file.folder) == []
    file.close()


def test_short_transfers_are_continued(opened, monkeypatch):
    file, _ = opened
    monkeypatch.setattr(state_file, "REQUEST_BYTES", 3 * ALIGNMENT)
    whole = {name: getattr(os, name) for name in ("preadv", "pwritev")}
    for name, transfer in whole.items():
        monkeypatch.setattr(os, name, lambda fd, b, at, t=transfer: t(fd, [b[0][:ALIGNMENT]], at))
    data = np.arange(2 * ALIGNMENT, dtype=np.uint8) % 251
    buffer = state_file.empty_buffer(2 * ALIGNMENT)
    buffer[:] = data
    file.write(0, buffer)
    np.testing.assert_array_equal(file.read(0, 2 * ALIGNMENT), data)


def test_buffers_bound_the_memory_under_way():
    buffers = Buffers(100)
    held = [buffers.take(40), buffers.take(60)]
    waits = []
    thread = threading.Thread(target=lambda: waits.append(buffers.take(40)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and not waits
    buffers.give(held[0])
    thread.join(10)
    assert waits[0] is held[0]  # memory of the same size is used again
    thread = threading.Thread(target=lambda: waits.append(buffers.take(10)))
    thread.start()
    buffers.stop()
    thread.join(10)
    assert waits[1] is None
