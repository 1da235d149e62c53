"""The reader of a folder of safetensors: one file, or several with an index.

    8 bytes   the header's length, little-endian
    header    JSON: tensor → {"dtype": "BF16", "shape": [out, in], "data_offsets": [begin, end]}
    the rest  the tensors' bytes, without gaps; offsets count from here

Headers are read and checked at once, numbers when they are asked for: any region of a tensor, and
no other bytes of the file but gaps of less than a page. Files are read with pread, for the pages of
a memory map would count as this process's memory.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.config.errors import cut, shown
from jaxtrain.hf.fields import MOST_JSON, HfError, read_json
from jaxtrain.run.files import open_regular, parse_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
FP8 = "F8_E4M3"
# These two are read with scales alone (quantization.py).
READ = {**DTYPES, FP8: np.dtype(ml_dtypes.float8_e4m3fn), "U8": np.dtype(np.uint8)}
# Bits of a number, of types that occur in files; numbers of the others are not read.
BITS = {name: 8 * dtype.itemsize for name, dtype in READ.items()} | {
    **dict.fromkeys(("BOOL", "I8", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16"), 16),
    **dict.fromkeys(("U32", "I32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
# Tensors of a folder, characters of a name, dimensions, and numbers of a tensor as if none of its
# dimensions were 0: far more than any model has.
MOST_TENSORS, MOST_NAME, MOST_DIMENSIONS, MOST_NUMBERS = 500_000, 255, 8, 2**40
PAGE = 4096  # gaps of fewer bytes are read along with their surroundings, as the disk does
BUFFER = 4 * 2**20  # bytes that are read at a time where there are such gaps

TensorRegion = Sequence[range]  # the consecutive indices of each dimension


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor of a file: its type, such as "BF16"; its shape; and its place in the file, in
    bytes."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFolder:
    """The tensors of a folder, by name.

    Raises HfError, which names the file and the tensor, for a file that is missing, truncated or in
    another format, and for an index that is not of these files.
    """

    def __init__(self, folder: pathlib.Path):
        self.path = folder
        self._entries: dict[str, FileTensor] = {}
        for file, listed in weight_files(folder).items():
            entries = read_header(folder / file)
            for name in listed:
                if name not in entries:
                    raise HfError(
                        f"{folder / file}: {cut(name)} is missing, which {INDEX} says is here"
                    )
            for name, entry in entries.items():
                if name in self._entries:
                    other = self._entries[name].file.name
                    raise HfError(f"{folder / file}: {name} is in {other}, too")
                self._entries[name] = entry
            if len(self._entries) > MOST_TENSORS:
                raise HfError(f"{folder} has more than {MOST_TENSORS:,} tensors")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def place(self, name: str) -> str:
        """The file and the tensor, for messages."""
        return f"{self._entries[name].file}: {name}"

    def dtype(self, name: str) -> str:
        """The type of a tensor's numbers, such as "BF16"."""
        return self._entries[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str, region: TensorRegion) -> np.ndarray:
        """The numbers of a region of a tensor, in the type of the file, which is one of READ.

        Raises HfError if the file cannot be read, or was cut short meanwhile.
        """
        entry = self._entries[name]
        numbers = np.empty([len(span) for span in region], READ[entry.dtype])
        try:
            with open_regular(entry.file, entry.file.parent) as file:
                if numbers.size:
                    _read_region(file.fileno(), entry, region, numbers)
        except EOFError:
            raise HfError(f"{self.place(name)} was cut short meanwhile") from None
        except OSError as error:
            raise HfError(f"{self.place(name)} cannot be read ({error.strerror})") from None
        return numbers


def weight_files(folder: pathlib.Path) -> dict[str, list[str]]:
    """File → the tensors that the index says are in it; [] for the single file, which has
    precedence over an index, as in transformers."""
    if os.path.lexists(folder / SINGLE):
        return {SINGLE: []}
    if os.path.lexists(folder / INDEX):
        files: dict[str, list[str]] = {}
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise HfError(f"{folder / INDEX} has no weight_map")
        for name, file in weight_map.items():
            if (
                file in ("", "..")
                or pathlib.PurePath(str(file)).name != file
                or len(file) > MOST_NAME
                or not file.isprintable()
            ):
                raise HfError(
                    f"{folder / INDEX}: {cut(name)} is in {shown(file)}, which is no name of a "
                    "file in this folder"
                )
            files.setdefault(file, []).append(name)
        return files
    pickled = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
    rest = f"; {min(pickled)} is pickled, which is not read" if pickled else ""
    raise HfError(f"{folder} has neither {SINGLE} nor {INDEX}{rest}")


def tensor_names(folder: pathlib.Path) -> Collection[str]:
    """The names of a folder's tensors, for which an index is enough. Raises HfError."""
    listed = [name for names in weight_files(folder).values() for name in names]
    return listed or [*SafetensorsFolder(folder)]


# --- headers --------------------------------------------------------------------------------------


def read_header(path: pathlib.Path) -> dict[str, FileTensor]:
    """The tensors of a file, by name. Raises HfError, which names the file, and the tensor if one
    is at fault, for a file that the format does not allow."""
    try:
        with open_regular(path, path.parent) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_JSON):
                raise HfError(f"{path} is no complete safetensors file: its header is cut off")
            header = parse_json(file.read(length))
    except FileNotFoundError:
        raise HfError(f"{path} is missing") from None
    except OSError as error:
        raise HfError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise HfError(f"{path} is no complete safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    begin = 8 + length
    entries = {name: _entry(path, name, values, begin) for name, values in header.items()}
    position, before = begin, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            word = "overlap" if entry.start < position else "leave a gap after"
            raise HfError(f"{path}: {name} has data_offsets that {word} {before or 'the header'}")
        position, before = entry.stop, name
        if position > size:
            raise HfError(
                f"{path} is no complete safetensors file: {name} ends at byte {position}, and the "
                f"file has {size}"
            )
    if position != size:
        raise HfError(
            f"{path} is no complete safetensors file: its tensors end at byte {position}, and the "
            f"file has {size}"
        )
    return entries


def _entry(path: pathlib.Path, name: str, values: Any, begin: int) -> FileTensor:
    """The tensor that a value of the header describes. begin: of the tensors' bytes in the file"""
    if len(name) > MOST_NAME or not name.isprintable():
        raise HfError(f"{path}: {shown(name)} is no name of a tensor")
    if not isinstance(values, Mapping):
        raise HfError(f"{path}: {name} has no description in the header")
    dtype, shape, offsets = (values.get(key, ()) for key in ("dtype", "shape", "data_offsets"))
    wrong = {
        "dtype": not (isinstance(dtype, str) and dtype.isprintable() and len(dtype) < 20),
        "shape": not _are_counts(shape)
        or len(shape) > MOST_DIMENSIONS
        or math.prod(size or 1 for size in shape) > MOST_NUMBERS,
        "data_offsets": not _are_counts(offsets) or len(offsets) != 2,
    }
    for key in wrong:
        if wrong[key]:
            raise HfError(f"{path}: {name} has the {key} {shown(values.get(key))} in the header")
    start, stop = offsets
    bits = math.prod(shape) * BITS.get(dtype, 0)
    if stop < start or (dtype in BITS and 8 * (stop - start) != bits):
        raise HfError(f"{path}: {name} has {stop - start} bytes, which do not hold {dtype}{shape}")
    return FileTensor(path, dtype, tuple(shape), begin + start, begin + stop)


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)


# --- numbers --------------------------------------------------------------------------------------


def _read_region(
    descriptor: int, entry: FileTensor, region: TensorRegion, numbers: np.ndarray
) -> None:
    """Fills a contiguous array with the numbers of a region, which has some.

    The region's bytes are runs of one length. Runs that lie close together are read in blocks with
    the gaps between them.
    """
    item = numbers.dtype.itemsize
    # dimensions behind `cut` are read completely
    cut = max((d for d, span in enumerate(region) if len(span) != entry.shape[d]), default=0)
    inner = math.prod(entry.shape[cut + 1 :]) * item
    span = region[cut] if region else range(1)
    run, stride = len(span) * inner, (entry.shape[cut] if region else 1) * inner
    outer = region[:cut]
    # the byte of each run, as an offset, and its place in `numbers`
    places = np.full([len(s) for s in outer], entry.start + span.start * inner)
    step = stride
    for d in reversed(range(cut)):
        along = np.asarray(outer[d]) * step
        places += along.reshape([-1 if d == e else 1 for e in range(cut)])
        step *= entry.shape[d]
    target = numbers.reshape(-1).view(np.uint8).reshape(places.shape + (run,))
    if cut == 0 or stride - run >= PAGE:
        for index, place in np.ndenumerate(places):
            _read_bytes(descriptor, target[index], int(place))
        return
    together = max(BUFFER // stride, 1)  # runs of a block
    buffer = np.empty(min(together, len(outer[-1])) * stride, np.uint8)
    for index in np.ndindex(places.shape[:-1]):
        for at in range(0, len(outer[-1]), together):
            runs = target[index][at : at + together]
            block = buffer[: len(runs) * stride]
            # the last run has no gap behind it to be read
            _read_bytes(descriptor, block[: len(block) - stride + run], int(places[index][at]))
            runs[...] = block.reshape(len(runs), stride)[:, :run]


def _read_bytes(descriptor: int, target: np.ndarray, place: int) -> None:
    """Fills consecutive bytes from a place of the file. Raises EOFError if it ends before."""
    view = target.data
    while view:
        count = os.preadv(descriptor, [view], place)
        if not count:
            raise EOFError
        view, place = view[count:], place + count
