"""Files of safetensors: the bytes that the library safetensors writes, also of arrays that are not
contiguous and of tensors that come some rows at a time."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxtrain.hf.safetensors_writer import TensorEntry, write_tensors

NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def written(folder, tensors, largest=10**9, rows=2):
    """Writes tensors, so many rows at a time, into a new folder."""
    folder.mkdir()
    entries = [TensorEntry(n, NAMES[str(a.dtype)], a.shape) for n, a in tensors.items()]

    def blocks(entry):
        array = tensors[entry.name]
        if not array.shape:
            return [array]
        return [array[at : at + rows] for at in range(0, len(array), rows)]

    write_tensors(folder, entries, blocks, largest)
    return sorted(path.name for path in folder.iterdir())


def random_tensors(seed):
    random = np.random.default_rng(seed)
    tensors = {}
    for number in range(random.integers(1, 12)):
        dtype = [np.float32, ml_dtypes.bfloat16, np.float16][random.integers(3)]
        shape = tuple(random.integers(0, 9, random.integers(0, 4)))
        array = np.asarray(random.standard_normal(shape), dtype)
        tensors[f"layer.{random.integers(100)}.{number}"] = array.T if seed % 2 else array
    return tensors


@pytest.mark.parametrize("seed", range(20))
def test_the_library_s_bytes(tmp_path, seed):
    tensors = random_tensors(seed)
    assert written(tmp_path / "ours", tensors) == ["model.safetensors"]
    contiguous = {name: np.array(array, order="C") for name, array in tensors.items()}
    save_file(contiguous, tmp_path / "theirs", metadata={"format": "pt"})
    ours = (tmp_path / "ours" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs").read_bytes()


def test_files_of_a_size(tmp_path):
    """The last tensor is larger than a file may be, and gets one of its own."""
    sizes = {"a": 3, "b": 4, "c": 1, "d": 7, "e": 30}
    tensors = {name: np.arange(n, dtype=np.float32) for name, n in sizes.items()}
    files = written(tmp_path / "out", tensors, largest=4 * 8)
    assert files == [
        *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "out" / files[-1]).read_text())
    assert index["metadata"] == {"total_size": 4 * 45}
    assert index["weight_map"] == {
        name: files[number] for name, number in zip("abcde", (0, 0, 0, 1, 2), strict=True)
    }
    for file in files[:-1]:
        for name, array in load_file(tmp_path / "out" / file).items():
            assert index["weight_map"][name] == file and np.array_equal(array, tensors[name])


def test_too_few_numbers_are_noticed(tmp_path):
    with pytest.raises(ValueError, match="a has 8 bytes, not 12"):
        write_tensors(
            tmp_path, [TensorEntry("a", "F32", (3,))], lambda entry: [np.zeros(2, np.float32)], 100
        )
