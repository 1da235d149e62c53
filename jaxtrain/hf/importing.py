"""A published model as a state before its first step: on the devices of a run, or on the host for a
checkpoint.

    published tensors ──rules──▶ windows of stored arrays ─┬─▶ shards on devices (train.init_from)
                                                           └─▶ pieces of a checkpoint (convert)

Only the bytes of these windows are read, a few rows at a time, whatever the model's size. Headers
are checked before; whatever is read is checked then. Everything that is not published, such as the
optimizer's moments, begins at zero.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint.regions import StoredArray, cut_piece, stored_arrays
from jaxtrain.checkpoint.restoring import expected_arrays
from jaxtrain.checkpoint.steps import ANCHOR, AVERAGE, PARAMETERS
from jaxtrain.checkpoint.storage import (
    DeferredPiece,
    HostArray,
    Views,
    nested,
    on_devices,
    zeros,
)
from jaxtrain.config import FilledConfig, ResolvedConfig
from jaxtrain.devices import cluster
from jaxtrain.devices.state_file import DiskArray, is_on_disk
from jaxtrain.hf import source_files
from jaxtrain.hf.families.family import layers_of, prediction_modules
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.run_config import Published, open_published
from jaxtrain.hf.safetensors_folder import DTYPES, SafetensorsFolder, TensorRegion
from jaxtrain.hf.tensor_rules import PublishedTensor, TensorRule, index_in
from jaxtrain.run import streams
from jaxtrain.run.exit_status import RunError
from jaxtrain.training.state import TrainState, stored_shapes, with_working
from jaxtrain.training.step import Step

READ_BYTES = 8 * 2**20  # of a tensor's rows that are read at a time, or one row
ReadProgress = Callable[[int, int], object]  # (steps done, all steps)


@dataclasses.dataclass(frozen=True, eq=False)
class PublishedWeights:
    """The tensors of a published model, by the family's names; their headers were checked.

    rules, tensors: of the model
    copies: name of a further tensor of the folder → the one whose numbers it must have
    arrays: of the state that a checkpoint of the run stores
    prefix: what the folder's names lack
    """

    published: Published
    folder: SafetensorsFolder
    rules: Sequence[TensorRule]
    tensors: Sequence[PublishedTensor]
    copies: Mapping[str, PublishedTensor]
    arrays: Sequence[StoredArray]
    prefix: str = ""

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of a tensor, or of a further one → its shape."""
        shapes = {tensor.name: tensor.shape for tensor in self.tensors}
        return shapes | {name: tensor.shape for name, tensor in self.copies.items()}

    def name(self, tensor: str) -> str:
        """The folder's name of a tensor."""
        return tensor.removeprefix(self.prefix)

    def keep(self, run: pathlib.Path) -> None:
        """Copies the model's small files into a run's folder. Raises OSError."""
        names = [*(tensor.name for tensor in self.tensors), *self.copies]
        # the type of an export, for which quantised numbers are bfloat16
        types = {
            name: "BF16" if self.parts(name) else self.folder.dtype(self.name(name))
            for name in names
        }
        source_files.keep(self.published.files, self.published.values, types, run)

    def parts(self, tensor: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """The folder's tensors that hold a quantised one, as `Float8.parts`; none for another."""
        quantization, name = self.published.quantization, self.name(tensor)
        return quantization.parts(self.folder, name, self.shapes[tensor]) if quantization else {}

    def blocks(
        self, tensor: str, region: TensorRegion
    ) -> Iterator[tuple[TensorRegion, np.ndarray]]:
        """The numbers of a region of a tensor by runs of its rows, each of about READ_BYTES.

        Raises HfError for numbers that cannot be read or are not finite.
        """
        if not region:
            yield region, self._numbers(tensor, region)
            return
        rows, others = region[0], region[1:]
        width = math.prod(map(len, others)) * 4
        count = max(READ_BYTES // max(width, 1), 1)
        for start in range(rows.start, rows.stop, count):
            part = (range(start, min(start + count, rows.stop)), *others)
            yield part, self._numbers(tensor, part)

    def _numbers(self, tensor: str, region: TensorRegion) -> np.ndarray:
        name, parts = self.name(tensor), self.parts(tensor)
        if parts and self.published.quantization:
            numbers = self.published.quantization.read(self.folder, name, region)
        else:
            numbers = self.folder.read(name, region)
        if not np.isfinite(numbers).all():
            place = self.folder.place(next(iter(parts), name))
            raise HfError(f"{place} has numbers that are not finite")
        return numbers


# --- checks ---------------------------------------------------------------------------------------


def open_weights(published: Published, config: FilledConfig) -> PublishedWeights:
    """The tensors of a published model, whose names, shapes and types are those of a config's
    model; no number is read.

    Raises HfError, which names file and tensor, for a file that is missing or damaged, a tensor
    that is missing or that no parameter is for, and for a wrong shape or type.
    """
    folder, model = published.tensors(), config.model
    # each layer and each expert has tensors of its own: no more of them are laid out
    family = published.family
    least = sum(
        1 if family.joins_experts else max(place.model.experts, 1) for place in layers_of(model)
    )
    if (count := len([*folder])) < least:
        experts = f" of {model.experts} experts" * (model.experts > 0)
        raise HfError(
            f"{folder.path} has {count} tensors, too few for the "
            f"{model.dense_layers + model.layers} layers{experts} of {published.place}"
        )
    arrays = expected_arrays(config)
    group = f"{PARAMETERS}/"
    shapes = {
        array.name.removeprefix(group): array.shape[array.leaves[0].lead :]
        for array in arrays
        if array.name.startswith(group)
    }
    rules, tensors = family.layout(config.model, published.values, shapes)
    lacks_prefix = not any(name.startswith(family.prefix) for name in folder)
    prefix, left_out = family.prefix if lacks_prefix else "", []
    if not config.model.mtp_depth:
        left_out = [module.removeprefix(prefix) for module in prediction_modules(published.model)]
        published = published.without_predictions()
    copies = {
        name: tensor
        for name, tensor in family.copies(config.model, tensors).items()
        if name.removeprefix(prefix) in folder
    }
    weights = PublishedWeights(published, folder, rules, tensors, copies, arrays, prefix)
    _check_headers(weights, (*family.unread, *(f"{module}." for module in left_out)))
    return weights


def open_together(config: ResolvedConfig) -> PublishedWeights:
    """The tensors of `train.init_from`; every process must call this, and opens them. Raises
    RunError in all of them: HfError as `open_weights`, or StoreError."""
    return cluster.in_all(
        lambda: open_weights(open_published(config.train.init_from), config), RunError
    )


def _check_headers(weights: PublishedWeights, left_out: tuple[str, ...]) -> None:
    """Raises HfError for a tensor that is missing, wrong by its header, or that no parameter is
    for. left_out: the beginnings of names of tensors that the run does not want"""
    folder, family, known = weights.folder, weights.published.family, set()
    for tensor in weights.tensors:
        parts = weights.parts(tensor.name)
        for name, (shape, dtype) in parts.items():
            _check_header(folder, name, shape, (dtype,))
        if not parts:
            _check_header(folder, weights.name(tensor.name), tensor.shape, tuple(DTYPES))
        known |= {weights.name(tensor.name), *parts}
    for copy, original in weights.copies.items():
        name, table = weights.name(copy), weights.name(original.name)
        known.add(name)
        _check_header(folder, name, folder.shape(table), (folder.dtype(table),))
    for name in folder:
        if name in known or name.endswith(family.dropped) or name.startswith(left_out):
            continue
        if 0 in folder.shape(name):  # such as transformers' shared experts where there are none
            continue
        raise HfError(f"{folder.place(name)} is no tensor of a {family.model_type} of config.json")


def _check_header(
    folder: SafetensorsFolder, name: str, shape: tuple[int, ...], dtypes: Sequence[str]
) -> None:
    """Raises HfError for a tensor that is missing or has another shape or type."""
    if name not in folder:
        raise HfError(f"{folder.path}: {name} is missing")
    if folder.shape(name) != shape:
        raise HfError(
            f"{folder.place(name)} is {list(folder.shape(name))}, not {list(shape)} by config.json "
            "and its defaults"
        )
    if folder.dtype(name) not in dtypes:
        raise HfError(
            f"{folder.place(name)} is of {folder.dtype(name)}: only {', '.join(dtypes)} are read"
        )


def check_copies(weights: PublishedWeights) -> None:
    """Raises HfError if a tensor that is published twice, such as the output matrix of tied
    embeddings, has other numbers the second time. Both are read."""
    for copy, original in weights.copies.items():
        region = [range(size) for size in original.shape]
        both = zip(weights.blocks(copy, region), weights.blocks(original.name, region), strict=True)
        if not all(np.array_equal(a, b) for (_, a), (_, b) in both):
            place, table = weights.folder.place(weights.name(copy)), weights.name(original.name)
            raise HfError(f"{place} differs from {table}, which the model uses in its place")


def check_numbers(
    weights: PublishedWeights, progress: ReadProgress = lambda done, total: None
) -> None:
    """Reads every number. Raises HfError, which names file and tensor, for those that are not
    finite, and as `check_copies`."""
    for number, tensor in enumerate(weights.tensors, 1):
        for _ in weights.blocks(tensor.name, [range(size) for size in tensor.shape]):
            pass
        progress(number, len(weights.tensors))
    check_copies(weights)


# --- numbers --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class PublishedArray:
    """A stored array of one replica whose numbers are published.

    rules: by the layer and the expert, all those that fill it
    """

    weights: PublishedWeights
    rules: Mapping[tuple[int, ...], Sequence[TensorRule]]

    def read(self, window: TensorRegion, target: np.ndarray) -> None:
        """Fills `target` [..., *window], of any floating type, with the numbers of a window of the
        array. Raises HfError as `PublishedWeights.blocks`."""
        depth = len(next(iter(self.rules)))
        for index in itertools.product(*window[:depth]):
            place = tuple(i - span.start for i, span in zip(index, window))
            for rule in self.rules[index]:
                covered = rule.covers(window[depth:])
                if all(covered):
                    inside: Any = (..., *place, *index_in(window[depth:], covered))
                    for region, numbers in self.weights.blocks(rule.tensor, rule.source(covered)):
                        rule.store(numbers, region, target[inside], covered)


def published_arrays(weights: PublishedWeights) -> dict[str, PublishedArray]:
    """Array, as a checkpoint names it → its numbers; arrays that are not in it begin at zero."""
    by_array: dict[str, dict[tuple[int, ...], list[TensorRule]]] = {}
    for rule in weights.rules:
        by_array.setdefault(rule.array, {}).setdefault(rule.index, []).append(rule)
    return {
        f"{group}/{name}": PublishedArray(weights, by_index)
        for name, by_index in by_array.items()
        for group in (PARAMETERS, ANCHOR, AVERAGE)
    }


# --- on the devices of a run ----------------------------------------------------------------------


def state_on_devices(
    weights: PublishedWeights, step: Step, progress: ReadProgress = lambda done, total: None
) -> TrainState:
    """The stored part of the state before its first step, on the devices of a run. Each process
    reads what its devices hold. Raises HfError as `PublishedWeights.blocks`."""
    abstract, published = step.abstract_state().stored, published_arrays(weights)
    arrays = stored_arrays(abstract, stored_shapes(step.layout, step.optimizer))
    leaves: dict[int, jax.Array | DiskArray] = {}
    for number, array in enumerate(arrays, 1):
        fill = functools.partial(_fill, published.get(array.name), array.leaves[0].lead)
        for leaf in array.leaves:
            leaves[leaf.index] = on_devices(array, leaf, fill)
        progress(number, len(arrays))
    return jax.tree.unflatten(
        jax.tree.structure(abstract, is_leaf=is_on_disk), [leaves[i] for i in sorted(leaves)]
    )


def read_together(weights: PublishedWeights, step: Step) -> TrainState:
    """The state before its first step, with the numbers of `state_on_devices`; every process must
    call this, and a terminal of process 0 shows the progress. Raises HfError in all of them."""
    main = cluster.is_main()

    def read() -> TrainState:
        with streams.counting("arrays read", sys.stderr, shown=main) as progress:
            state = state_on_devices(weights, step, progress)
        if main:
            check_copies(weights)
        return state

    return with_working(step.layout, cluster.in_all(read, HfError))


def _fill(numbers: PublishedArray | None, lead: int, views: Views) -> None:
    """Fills views of shards. numbers: None for zeros; lead: dimensions of replicas"""
    if numbers is None:
        return
    for target, index in views:
        # the index ends in an Ellipsis
        numbers.read([range(part.start, part.stop) for part in index[lead:-1]], target)


# --- on the host, for a checkpoint ----------------------------------------------------------------


def state_on_host(weights: PublishedWeights) -> dict:
    """The nested dict of HostArrays of a state before its first step."""
    stored, published = {}, published_arrays(weights)
    for array in weights.arrays:
        numbers = published.get(array.name)
        stored[array.name] = zeros(array) if numbers is None else _deferred(array, numbers)
    return nested(stored)


def _deferred(array: StoredArray, numbers: PublishedArray) -> HostArray:
    """An array of published numbers, in pieces that lie in one layer and one expert. Independent
    replicas begin with the same parameters."""
    lead = array.shape[: array.leaves[0].lead]
    shape = array.shape[len(lead) :]
    depth = len(next(iter(numbers.rules)))
    piece = (*[1] * depth, *cut_piece(shape[depth:], array.dtype.itemsize))
    blocks: list[tuple[tuple, Any]] = []
    for corner in itertools.product(
        *(range(0, size, step) for size, step in zip(shape, piece, strict=True))
    ):
        window = [
            range(at, min(at + step, size))
            for at, step, size in zip(corner, piece, shape, strict=True)
        ]
        index = tuple(slice(span.start, span.stop) for span in window)
        deferred = DeferredPiece(numbers.read, window, array.dtype)
        blocks += [((*replica, *index), deferred) for replica in np.ndindex(lead)]
    return HostArray(array.shape, array.dtype, (*[1] * len(lead), *piece), blocks)
