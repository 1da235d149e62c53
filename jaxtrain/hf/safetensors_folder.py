"""Folders of safetensors: one file, or several with an index. Files are read by memory map, one
tensor at a time. safetensors_writer.py writes them."""

import pathlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxtrain.hf.fields import HfError, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class SafetensorsFolder:
    """The tensors of a folder, by name. Nothing but the files' headers is read until `read`.

    Raises HfError, which names the file, for one that is missing, truncated or in another format.
    """

    def __init__(self, folder: pathlib.Path):
        self._files = {}
        self._file_of: dict[str, str] = {}
        self.path = folder
        for file, listed in _files(folder).items():
            path = folder / file
            try:
                opened = safe_open(path, framework="numpy")
            except FileNotFoundError:
                raise HfError(f"{path} is missing") from None
            except (OSError, SafetensorError) as error:
                raise HfError(f"{path} is no complete safetensors file: {error}") from None
            self._files[file] = opened
            present = set(opened.keys())
            for name in listed or sorted(present):
                if name not in present:
                    raise HfError(f"{path}: {name} is missing, which {INDEX} says is here")
                self._file_of[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def place(self, name: str) -> str:
        """The file and the tensor, for messages."""
        return f"{self.path / self._file_of[name]}: {name}"

    def dtype(self, name: str) -> str:
        """The type of a tensor's numbers, such as "BF16"."""
        return self._files[self._file_of[name]].get_slice(name).get_dtype()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """A tensor's numbers, in the type of the file."""
        return self._files[self._file_of[name]].get_tensor(name)


def _files(folder: pathlib.Path) -> dict[str, list[str]]:
    """File → the tensors that the index says are in it; [] where there is no index."""
    if (folder / INDEX).exists():
        files: dict[str, list[str]] = {}
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise HfError(f"{folder / INDEX} has no weight_map")
        for name, file in weight_map.items():
            files.setdefault(str(file), []).append(name)
        return files
    if (folder / SINGLE).exists():
        return {SINGLE: []}
    pickled = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
    rest = f"; {pickled[0]} is pickled, which is not read" if pickled else ""
    raise HfError(f"{folder} has neither {SINGLE} nor {INDEX}{rest}")
