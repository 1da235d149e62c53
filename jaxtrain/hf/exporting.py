"""A checkpoint as a published model: a folder of safetensors and config.json.

The folder has another name until it is complete. A file's tensors are in memory at a time.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.checkpoint.reading import Array
from jaxtrain.checkpoint.steps import CheckpointError
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.files import CONFIG
from jaxtrain.hf.rules import PublishedTensor
from jaxtrain.hf.safetensors_folder import DTYPES
from jaxtrain.hf.safetensors_writer import write_tensors


def export_folder(
    target: pathlib.Path,
    config: Mapping[str, Any],
    tensors: Sequence[PublishedTensor],
    arrays: Mapping[str, Array],
    dtypes: Mapping[str, str],
    largest: int,
    files: Mapping[str, pathlib.Path],
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> None:
    """Writes a published model's folder, which appears complete or not at all.

    config: its config.json; tensors: in order; arrays: the checkpoint's, without "params/";
    dtypes: tensor → its type, such as "BF16"; largest: bytes of a file;
    files: name → a file to copy into the folder

    Raises HfError for a target that exists or cannot be written, CheckpointError for an array that
    cannot be read.
    """
    if target.exists():
        raise HfError(f"{target} exists already: name a folder that does not")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    sizes = {
        tensor.name: int(np.prod(tensor.shape)) * DTYPES[dtypes[tensor.name]].itemsize
        for tensor in tensors
    }
    try:
        unfinished.mkdir(parents=True)
        write_tensors(unfinished, sizes, _numbers(tensors, arrays, dtypes, progress), largest)
        for name, file in files.items():
            shutil.copyfile(file, unfinished / name)
        (unfinished / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        unfinished.rename(target)
    except OSError as error:
        raise HfError(f"{target} cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _numbers(
    tensors: Sequence[PublishedTensor],
    arrays: Mapping[str, Array],
    dtypes: Mapping[str, str],
    progress: Callable[[int, int], object],
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads the tensors one by one."""
    for number, tensor in enumerate(tensors):
        numbers = np.empty(tensor.shape, DTYPES[dtypes[tensor.name]])
        for rule in tensor.rules:
            try:
                rule.publish(arrays[rule.array][rule.region].read().result(), numbers)
            except ValueError as error:
                raise CheckpointError(f"{rule.array} cannot be read: {error}") from None
        yield tensor.name, numbers
        progress(number + 1, len(tensors))
