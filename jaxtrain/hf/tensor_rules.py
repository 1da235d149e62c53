"""Rules from the tensors of a safetensors folder to the arrays of a checkpoint, used both ways.

A rule joins one published tensor, or some of its columns, to one stored array, or some of its
columns, in one layer and one expert:

    model.layers.3.self_attn.q_proj.weight    layers/attention/query/weight[3]    transposed
    transformer.h.3.attn.c_attn.weight[:, :D]  layers/attention/query/weight[3]    some columns

families/ has the rules of each family. Arrays are named as in a checkpoint, without "params/".
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class TensorRule:
    """A published tensor, and where a checkpoint has its numbers.

    tensor:    its name
    array:     name of the stored array
    index:     the layer and the expert in that array, as far as it has them
    transpose: the published matrix is [out, in], as torch's Linear has it; the stored one [in, out]
    taken:     the columns of the tensor, once transposed, in the stored order; None: all
    columns:   (start, stop) of the array's columns that hold them; None: all
    channels:  the published tensor is [channels, 1, size], as torch's Conv1d by channels has it;
               here it counts as the matrix without the 1
    """

    tensor: str
    array: str
    index: tuple[int, ...] = ()
    transpose: bool = False
    taken: np.ndarray | None = None
    columns: tuple[int, int] | None = None
    channels: bool = False

    @property
    def region(self) -> tuple:
        """The index of the rule's numbers in the stored array."""
        return (*self.index, ..., slice(*self.columns)) if self.columns else (*self.index, ...)

    def region_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the rule's numbers in a stored array of this shape."""
        region = tuple(shape[len(self.index) :])
        return (*region[:-1], self.columns[1] - self.columns[0]) if self.columns else region

    def covers(self, window: Sequence[range]) -> tuple[range, ...]:
        """The part of a window of the stored array, in the rule's layer and expert, that the rule's
        numbers fill."""
        if not self.columns:
            return tuple(window)
        start, stop = max(window[-1].start, self.columns[0]), min(window[-1].stop, self.columns[1])
        return (*window[:-1], range(start, max(start, stop)))

    def source(self, window: Sequence[range]) -> tuple[range, ...]:
        """The least region of the published tensor that holds the numbers of a window, which is not
        empty and which the rule covers."""
        if not window:
            return ()
        places = self._places(window[-1])
        region = (*window[:-1], range(int(places.min()), int(places.max()) + 1))
        region = region[::-1] if self.transpose else region
        return (region[0], range(1), *region[1:]) if self.channels else region

    def store(
        self,
        numbers: np.ndarray,
        region: Sequence[range],
        target: np.ndarray,
        window: Sequence[range],
    ) -> None:
        """Writes a region of the published tensor into its places of a window of the array.

        region: of the numbers, a part of what `source` gives for the window
        target: [..., *window], of which the numbers that are not in the region stay as they are
        """
        if self.channels:
            numbers, region = numbers[:, 0], (region[0], *region[2:])
        oriented = numbers.T if self.transpose else numbers
        spans = region[::-1] if self.transpose else region
        places: list[slice | np.ndarray] = [*index_in(window, spans)]
        if places:
            columns = self._places(window[-1]) - spans[-1].start
            inside = np.flatnonzero((columns >= 0) & (columns < len(spans[-1])))
            places[-1] = _as_slice(inside)
            oriented = oriented[..., _as_slice(columns[inside])]
        target[(..., *places)] = oriented

    def window(self, rows: range, shape: Sequence[int]) -> tuple[range, ...]:
        """The least window of the rule's layer and expert, in the stored array, that holds its part
        of some rows of the published tensor.

        rows: along the tensor's first dimension; shape: of the stored array
        """
        window = [range(size) for size in shape[len(self.index) :]]
        if self.columns:
            window[-1] = range(*self.columns)
        if window and (self.transpose or len(window) == 1):
            inside = np.flatnonzero(np.isin(self._places(window[-1]), rows))
            window[-1] = window[-1][inside[0] : inside[-1] + 1] if inside.size else range(0)
        elif window:
            window[0] = rows
        return tuple(window)

    def publish(
        self, numbers: np.ndarray, window: Sequence[range], tensor: np.ndarray, rows: range
    ) -> None:
        """Writes the numbers of a window into their places of the published tensor.

        window: as `window` has it, or a part of it; tensor: its rows `rows`
        """
        tensor = tensor[:, 0] if self.channels else tensor
        oriented = tensor.T if self.transpose else tensor
        places = [np.asarray(span) for span in window]
        if places:
            places[-1] = self._places(window[-1])
            dim = -1 if self.transpose else 0
            inside = np.isin(places[dim], rows)
            if not inside.all():
                numbers = np.compress(inside, numbers, axis=dim)
            places[dim] = places[dim][inside] - rows.start
        oriented[tuple(map(_as_slice, places))] = numbers

    def _places(self, columns: range) -> np.ndarray:
        """The columns of the tensor, once transposed, that some columns of the array are."""
        first = self.columns[0] if self.columns else 0
        in_rule = np.asarray(columns) - first
        return in_rule if self.taken is None else self.taken[in_rule]


def index_in(window: Sequence[range], part: Sequence[range]) -> tuple[slice, ...]:
    """The index of a part of a window in an array of the window."""
    return tuple(
        slice(span.start - outer.start, span.stop - outer.start)
        for span, outer in zip(part, window, strict=True)
    )


def _as_slice(places: np.ndarray) -> slice | np.ndarray:
    """The slice of consecutive places; other places themselves."""
    consecutive = places.size and np.array_equal(places, np.arange(places[0], places[-1] + 1))
    return slice(places[0], places[-1] + 1) if consecutive else places


@dataclasses.dataclass(frozen=True, eq=False)
class PublishedTensor:
    """A tensor of a safetensors folder: its name, its shape, and the rules that fill it."""

    name: str
    shape: tuple[int, ...]
    rules: tuple[TensorRule, ...]


def published_tensors(
    rules: Sequence[TensorRule], shapes: Mapping[str, Sequence[int]]
) -> Iterator[PublishedTensor]:
    """The tensors that a folder has by these rules.

    shapes: stored array → shape
    """
    by_tensor: dict[str, list[TensorRule]] = {}
    for rule in rules:
        by_tensor.setdefault(rule.tensor, []).append(rule)
    for name, parts in by_tensor.items():
        regions = [rule.region_shape(shapes[rule.array]) for rule in parts]
        shape = (*regions[0][:-1], sum(region[-1] for region in regions))
        shape = shape[::-1] if parts[0].transpose else shape
        shape = (shape[0], 1, *shape[1:]) if parts[0].channels else shape
        yield PublishedTensor(name, shape, tuple(parts))


def check_coverage(rules: Sequence[TensorRule], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises ValueError unless the rules fill each array, of these shapes, exactly once."""
    numbers = dict.fromkeys(shapes, 0)
    regions = set()
    for rule in rules:
        region = (rule.array, rule.index, rule.columns)
        if region in regions:
            raise ValueError(f"two rules fill {region}")
        regions.add(region)
        numbers[rule.array] += math.prod(rule.region_shape(shapes[rule.array]))
    for array, count in numbers.items():
        if count != math.prod(shapes[array]):
            raise ValueError(f"rules fill {count} of the {math.prod(shapes[array])} of {array}")
