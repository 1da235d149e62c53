"""The reader of safetensors: any region of a tensor has numpy's numbers, no more is read than that,
and what the format does not allow is refused by file and tensor."""

import json
import os
import pathlib
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from support import safetensors_files

from jaxtrain.config.errors import shown
from jaxtrain.hf import safetensors_folder
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.safetensors_folder import INDEX, SINGLE, SafetensorsFolder

SHAPES = ((), (5,), (7, 9), (3, 5, 7), (2, 3, 4, 5), (40, 5000), (300, 16), (4, 0))
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        f"{n}.{np.dtype(dtype)}": random.standard_normal(shape).astype(dtype)
        for n, shape in enumerate(SHAPES)
        for dtype in DTYPES
    }


@pytest.mark.parametrize("page, buffer", [(4096, 2**22), (1, 2**22), (2**40, 100), (2**40, 2**22)])
def test_regions(tmp_path, monkeypatch, tensors, page, buffer):
    """Whether runs are read one by one, or in blocks with their gaps."""
    monkeypatch.setattr(safetensors_folder, "PAGE", page)
    monkeypatch.setattr(safetensors_folder, "BUFFER", buffer)
    safetensors_files.write(tmp_path / SINGLE, tensors)
    folder, random = SafetensorsFolder(tmp_path), np.random.default_rng(1)
    for name, array in tensors.items():
        for _ in range(12):
            region = [range(*sorted(random.integers(0, size + 1, 2))) for size in array.shape]
            region = [
                range(size) if random.random() < 0.4 else span
                for size, span in zip(array.shape, region, strict=True)
            ]
            expected = array[tuple(slice(span.start, span.stop) for span in region)]
            numbers = folder.read(name, region)
            assert (numbers.shape, numbers.dtype) == (expected.shape, array.dtype)
            assert numbers.tobytes() == np.ascontiguousarray(expected).tobytes(), (name, region)


def test_only_what_is_asked_for_is_read(tmp_path, monkeypatch):
    array = np.arange(64 * 8192, dtype=np.float32).reshape(64, 8192)
    safetensors_files.write(tmp_path / SINGLE, {"a": array})
    folder, read = SafetensorsFolder(tmp_path), []
    preadv = os.preadv

    def counted(descriptor, buffers, place):
        read.append(preadv(descriptor, buffers, place))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    for region in ([range(3, 5), range(8192)], [range(64), range(100, 900)]):
        read.clear()
        assert folder.read("a", region).nbytes == sum(read)
    read.clear()
    near = folder.read("a", [range(64), range(200, 8000)])
    assert sum(read) == 63 * 8192 * 4 + 7800 * 4 and near[63, 0] == array[63, 200]


def test_memory_of_a_region(tmp_path):
    """The region, and a buffer for gaps of less than a page."""
    array = np.zeros((2048, 8192), np.float32)
    safetensors_files.write(tmp_path / SINGLE, {"a": array})
    folder = SafetensorsFolder(tmp_path)
    for columns in (range(1000), range(7900)):
        tracemalloc.start()
        numbers = folder.read("a", [range(2048), columns])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < numbers.nbytes + safetensors_folder.BUFFER + 2**20


BROKEN = {
    "offsets beyond the file": ({"b": {"data_offsets": [80, 140]}, "a": {}}, "b has 60 bytes"),
    "overlap": ({"b": {"data_offsets": [76, 140]}}, "b has data_offsets that overlap a"),
    "gap": ({"b": {"data_offsets": [84, 148]}}, "b has data_offsets that leave a gap after a"),
    "shape and bytes": ({"a": {"shape": [5, 5]}}, "a has 80 bytes, which do not hold F32[5, 5]"),
    "type and bytes": ({"a": {"dtype": "F64"}}, "a has 80 bytes, which do not hold F64[4, 5]"),
    "shape": ({"a": {"shape": [4, -5]}}, "a has the shape [4, -5] in the header"),
    "no shape": ({"a": {"shape": None}}, "a has the shape None in the header"),
    "bool": ({"a": {"shape": [4, True]}}, "a has the shape [4, True] in the header"),
    "offsets": ({"a": {"data_offsets": [0]}}, "a has the data_offsets [0] in the header"),
    "backwards": ({"a": {"data_offsets": [80, 0]}}, "a has -80 bytes"),
    "dtype": ({"a": {"dtype": 3}}, "a has the dtype 3 in the header"),
    "a long dtype": ({"a": {"dtype": "X" * 10**6}}, "a has the dtype 'XX"),
    "huge": ({"a": {"shape": [0, 10**15]}}, "a has the shape [0, 1000000000000000] in the header"),
    "many dimensions": ({"a": {"shape": [1] * 10**5}}, "a has the shape [1, 1, 1"),
    "large offsets": ({"a": {"data_offsets": [0, 10**30]}}, "a has 10000"),
    "long offsets": ({"a": {"data_offsets": [0] * 10**5}}, "a has the data_offsets [0, 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_headers(tmp_path, name):
    changes, message = BROKEN[name]
    tensors = {"a": np.zeros((4, 5), np.float32), "b": np.zeros((4, 4), np.float32)}
    safetensors_files.write(tmp_path / SINGLE, tensors, **changes)
    with pytest.raises(HfError) as error:
        SafetensorsFolder(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / SINGLE}: {message}")
    assert len(str(error.value)) < 600


def test_names_that_no_tensor_has(tmp_path):
    for name in ("x" * 10**6, "\x1b[2J", "a\0b", "\n"):
        safetensors_files.write(tmp_path / SINGLE, {name: np.zeros(3, np.float32)})
        with pytest.raises(HfError) as error:
            SafetensorsFolder(tmp_path)
        assert str(error.value) == f"{tmp_path / SINGLE}: {shown(name)} is no name of a tensor"


def test_too_many_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_folder, "MOST_TENSORS", 1)
    arrays = dict.fromkeys(("a", "b"), np.zeros(3, np.float32))
    safetensors_files.write(tmp_path / SINGLE, arrays)
    with pytest.raises(HfError, match=f"^{tmp_path} has more than 1 tensors$"):
        SafetensorsFolder(tmp_path)


def test_files_that_are_none(tmp_path):
    """Pipes, devices and links that leave the folder are refused, when a header is read and when
    numbers are."""
    path, outside = tmp_path / "model" / SINGLE, tmp_path / "outside.safetensors"
    safetensors_files.write(outside, {"a": np.zeros((4, 5), np.float32)})
    path.parent.mkdir()
    path.write_bytes(outside.read_bytes())
    folder = SafetensorsFolder(path.parent)
    places = {
        "it is a FIFO": os.mkfifo,
        "it is a link to '/dev/zero'": lambda path: path.symlink_to("/dev/zero"),
        "it is a link to .*outside.safetensors'": lambda path: path.symlink_to(outside),
        "it is a folder": pathlib.Path.mkdir,
    }
    for message, make in places.items():
        path.unlink()
        make(path)
        with pytest.raises(HfError, match=f"^{path} cannot be read .{message}"):
            SafetensorsFolder(path.parent)
        with pytest.raises(HfError, match=f"^{path}: a cannot be read .{message}"):
            folder.read("a", [range(4), range(5)])


def test_broken_files(tmp_path):
    path = tmp_path / SINGLE
    safetensors_files.write(path, {"a": np.zeros((4, 5), np.float32)})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for broken, message in {
        b"": "its header is cut off",
        content[:7]: "its header is cut off",
        content[: 7 + length]: "its header is cut off",
        b"\xff" * 8 + content[8:]: "its header is cut off",
        content[:8] + b"x" * length + content[8 + length :]: "its header is no JSON object",
        (2).to_bytes(8, "little") + b"[]": "its header is no JSON object",
        content[:-1]: f"a ends at byte {len(content)}, and the file has {len(content) - 1}",
        content + b"0": f"its tensors end at byte {len(content)}",
    }.items():
        path.write_bytes(broken)
        with pytest.raises(HfError) as error:
            SafetensorsFolder(tmp_path)
        assert str(error.value).startswith(f"{path} is no complete safetensors file: {message}")


def test_a_file_that_is_cut_short_later(tmp_path):
    path = tmp_path / SINGLE
    safetensors_files.write(path, {"a": np.zeros((4, 5), np.float32)})
    folder = SafetensorsFolder(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    assert folder.read("a", [range(3), range(5)]).shape == (3, 5)
    with pytest.raises(HfError, match=f"^{path}: a was cut short meanwhile$"):
        folder.read("a", [range(4), range(5)])
    path.unlink()
    with pytest.raises(HfError, match=f"^{path}: a cannot be read .No such file"):
        folder.read("a", [range(3), range(5)])


def test_an_index(tmp_path):
    a, b = np.zeros((2, 3), np.float32), np.ones(4, np.float16)
    safetensors_files.write(tmp_path / "1.safetensors", {"a": a})
    safetensors_files.write(tmp_path / "2.safetensors", {"b": b, "unlisted": b})
    index = tmp_path / INDEX

    def refused(weight_map: object, message: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(HfError) as error:
            SafetensorsFolder(tmp_path)
        assert message in str(error.value)

    files = {"a": "1.safetensors", "b": "2.safetensors"}
    index.write_text(json.dumps({"weight_map": files}))
    folder = SafetensorsFolder(tmp_path)
    assert [*folder] == ["a", "b", "unlisted"], "what a file has, the index may leave out"
    assert (folder.shape("a"), folder.dtype("b")) == ((2, 3), "F16")
    assert folder.place("b") == f"{tmp_path / '2.safetensors'}: b"
    refused({**files, "c": "2.safetensors"}, "2.safetensors: c is missing, which")
    refused({**files, "c": "3.safetensors"}, "3.safetensors is missing")
    outsides = ("../1.safetensors", str(tmp_path / "1.safetensors"), ".", "", 1, "a\0b", "\ud800")
    for outside in (*outsides, "sub/1.safetensors", ["1.safetensors"], None, ".."):
        refused({"a": outside}, f"{index}: a is in {outside!r}, which is no name of a file in")
    refused({"a": "x" * 256}, "which is no name of a file in")
    refused({"a" * 10**6: "../x" * 10**5}, "aaa… is in '../x")
    refused({}, f"{index} has no weight_map")
    refused(None, f"{index} has no weight_map")
    safetensors_files.write(tmp_path / "2.safetensors", {"b": b, "a": a})
    refused(files, "2.safetensors: a is in 1.safetensors, too")
    safetensors_files.write(tmp_path / SINGLE, {"newer": a})
    assert [*SafetensorsFolder(tmp_path)] == ["newer"], (
        "as transformers, which does not see an index"
    )
