"""Writes a folder of safetensors: one file, or several with an index."""

import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from safetensors.numpy import save_file

from jaxtrain.hf.safetensors_folder import INDEX, SINGLE


def write_tensors(
    folder: pathlib.Path,
    sizes: Mapping[str, int],
    tensors: Iterable[tuple[str, np.ndarray]],
    largest: int,
) -> None:
    """Writes tensors into files of at most `largest` bytes, or of one tensor, and their index where
    there are several. One file's tensors are in memory at a time.

    sizes: tensor → bytes, in the order of `tensors`
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > largest:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    count = len(groups)
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    if count == 1:
        names = [SINGLE]
    stream = iter(tensors)
    for file, group in zip(names, groups, strict=True):
        # The writer takes the bytes of an array as they lie, whatever its strides are.
        content = {name: np.ascontiguousarray(array) for name, array in _take(stream, len(group))}
        save_file(content, folder / file, metadata={"format": "pt"})
    if count > 1:
        weight_map = {
            name: file for file, group in zip(names, groups, strict=True) for name in group
        }
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _take(stream: Iterator[tuple[str, np.ndarray]], count: int) -> Iterator[tuple[str, np.ndarray]]:
    for _ in range(count):
        yield next(stream)
