"""A published model as the checkpoint of step 0.

The folder is read twice: once to check every tensor, so that nothing is written for one that is
damaged, and once to write. Orbax asks for a layer's or an expert's block of an array when it writes
it, so a few blocks are in memory at a time, whatever the model's size. Moments begin at zero
(training/state.py).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxtrain.checkpoint.layout import StoredArray, cut_piece, piece_shape
from jaxtrain.checkpoint.storage import HostArray, nested
from jaxtrain.hf.families.family import Family
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.rules import PublishedTensor, Rule
from jaxtrain.hf.safetensors_folder import DTYPES, SafetensorsFolder

SOURCE = "hf"  # the folder of a run with the published model's small files
CONFIG, TENSORS, TOKENIZER = "config.json", "tensors.json", "tokenizer.json"
SMALL_FILES = (
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclasses.dataclass(frozen=True, eq=False)
class PublishedTensors:
    """The tensors of a folder by the family's names, all of which were checked.

    prefix: what the folder's names lack
    """

    folder: SafetensorsFolder
    prefix: str = ""

    def name(self, tensor: str) -> str:
        """The folder's name of a tensor."""
        return tensor.removeprefix(self.prefix)

    def read(self, rule: Rule) -> np.ndarray:
        """The numbers of a rule's place in its stored array, float32."""
        tensor = self.folder.read(self.name(rule.tensor))
        return np.ascontiguousarray(rule.stored(tensor), dtype=np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class DeferredBlock:
    """A block of a stored array that is read when it is written. It has what TensorStore and
    storage.py ask of an array."""

    source: PublishedTensors
    rule: Rule
    nbytes: int

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.source.read(self.rule)


def checked_source(
    folder: SafetensorsFolder,
    family: Family,
    tensors: Sequence[PublishedTensor],
    tied: bool,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> PublishedTensors:
    """The folder's tensors, each of which was read once.

    tied: the model's output matrix is its embedding
    progress: called with the tensors that are checked, and all

    Raises HfError, which names file and tensor, for a tensor that is missing or that no parameter
    is for, a wrong shape or type, and numbers that are not finite.
    """
    lacks_prefix = not any(name.startswith(family.prefix) for name in folder)
    source = PublishedTensors(folder, family.prefix if lacks_prefix else "")
    for number, tensor in enumerate(tensors):
        name = source.name(tensor.name)
        if name not in folder:
            raise HfError(f"{folder.path}: {name} is missing")
        if folder.shape(name) != tensor.shape:
            shapes = f"{list(folder.shape(name))}, not {list(tensor.shape)}"
            raise HfError(f"{folder.place(name)} is {shapes} as config.json says")
        if folder.dtype(name) not in DTYPES:
            types = ", ".join(DTYPES)
            raise HfError(f"{folder.place(name)} is of {folder.dtype(name)}: only {types} are read")
        if not np.isfinite(folder.read(name)).all():
            raise HfError(f"{folder.place(name)} has numbers that are not finite")
        progress(number + 1, len(tensors))
    known = {source.name(tensor.name) for tensor in tensors}
    embedding = source.name(tensors[0].name)
    for name in folder:
        if name in known or name.endswith(family.dropped):
            continue
        if tied and name == "lm_head.weight":
            if folder.shape(name) == folder.shape(embedding) and np.array_equal(
                folder.read(name), folder.read(embedding)
            ):
                continue
            raise HfError(f"{folder.place(name)} differs from {embedding}, to which it is tied")
        raise HfError(f"{folder.place(name)} is no tensor of a {family.model_type} of config.json")
    return source


def state_tree(
    arrays: Sequence[StoredArray], rules: Sequence[Rule], source: PublishedTensors
) -> dict:
    """The nested dict of HostArrays of a state before its first step: the published parameters, and
    zeros for everything else.

    arrays: of the state
    """
    by_array: dict[str, list[Rule]] = {}
    for rule in rules:
        by_array.setdefault(rule.array, []).append(rule)
    stored = {}
    for array in arrays:
        group, _, name = array.name.partition("/")
        parameter = by_array.get(name) if group in ("params", "anchor") else None
        stored[array.name] = (
            zeros(array) if parameter is None else published(array, parameter, source)
        )
    return nested(stored)


def zeros(array: StoredArray) -> HostArray:
    """An array of zeros, which take no memory."""
    numbers = np.broadcast_to(np.zeros((), array.dtype), array.shape)
    return HostArray(array.shape, array.dtype, piece_shape(array), [((...,), numbers)])


def published(array: StoredArray, rules: Sequence[Rule], source: PublishedTensors) -> HostArray:
    """An array of published numbers, in pieces that lie in one layer and one expert. Independent
    replicas begin with the same parameters."""
    lead = array.shape[: array.leaves[0].lead]
    shape = array.shape[len(lead) :]
    inner = shape[len(rules[0].index) :]
    blocks: list[tuple[tuple, Any]] = [
        ((*replica, *rule.region), DeferredBlock(source, rule, nbytes(rule, shape, array.dtype)))
        for replica in np.ndindex(lead)
        for rule in rules
    ]
    outer = (1,) * (len(array.shape) - len(inner))
    return HostArray(
        array.shape, array.dtype, (*outer, *cut_piece(inner, array.dtype.itemsize)), blocks
    )


def nbytes(rule: Rule, shape: Sequence[int], dtype: np.dtype) -> int:
    """Bytes of a rule's numbers in a stored array of this shape."""
    return int(np.prod(rule.region_shape(shape))) * dtype.itemsize
