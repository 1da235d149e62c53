"""Token files (.bin, .npy, Megatron's .bin with .idx): the tokens of a source as one array, and the
error for an id that no tokenizer of the run makes, with the setting that reads the file."""

import io
import os
import pathlib
import resource
import tokenize
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxtrain.config import addresses
from jaxtrain.config.sources import File, Source
from jaxtrain.data.reading.bad_records import BadFile
from jaxtrain.data.reading.compressed import is_compressed, open_input
from jaxtrain.data.reading.joined import Joined, Sliced
from jaxtrain.data.reading.megatron_index import index_path, read_header
from jaxtrain.data.stores.ranges import StoreArray, StoreFile, block_cache
from jaxtrain.data.tokenizer import NoTokenizer, Tokenizer

NPY_HEADER = 1 << 14  # bytes that hold an .npy file's header
MOST_IDS = 2**24  # more than any tokenizer has


def id_beyond_vocabulary(
    where: str, ids: np.ndarray, is_raw: bool, data: Any, tokenizer: Tokenizer
) -> BadFile:
    """The error for an id of a token file that the tokenizer, or the model if there is no
    tokenizer, does not have.

    is_raw: True if data.token_dtype is the type of the ids; an .npy file states its own.
    """
    needed, known = int(ids.max()) + 1, tokenizer.vocab_size
    rule = (
        f"{where} is not below model.vocab_size={known} and at least 0"
        if isinstance(tokenizer, NoTokenizer)
        else f"{where} is beyond the {known} ids of data.tokenizer={data.tokenizer}"
    )
    if is_raw and (dtype := fitting_dtype(ids, data.token_dtype, known)):
        return BadFile(f"{rule}: use --config.data.token_dtype={dtype}, with which all ids are")
    if ids.min() < 0 or needed > MOST_IDS:
        what = (
            f"what no data.token_dtype for {known} ids reads as ids"
            if is_raw
            else f"{ids.dtype} numbers, not ids"
        )
        return BadFile(
            f"{rule}, and no tokenizer makes it: the file holds {what}; name another data.source"
        )
    if isinstance(tokenizer, NoTokenizer):
        return BadFile(f"{rule}: use --config.model.vocab_size={needed}")
    return BadFile(f"{rule}: name the tokenizer that made it, or none")


def fitting_dtype(ids: np.ndarray, dtype: str, ids_known: int) -> str:
    """The widest integer type with which all ids of a raw file are below `ids_known`, and which
    has so many; or "". Types of one byte are not tried, since their ids nearly always are."""
    content = ids.view(np.uint8)
    for name in ("uint32", "uint16"):  # the halves of the first one may be ids, too
        size = np.dtype(name).itemsize
        if (
            size != np.dtype(dtype).itemsize
            and len(content) % size == 0
            and ids_known <= 1 << 8 * size
            and int(content.view(f"<u{size}").max()) < ids_known
        ):
            return name
    return ""


def token_path(folder: pathlib.Path, source: Source, file: File) -> str:
    """The place of a token file's tokens: the prepared folder if it was decompressed, or the file
    itself."""
    if is_compressed(file.path):
        return str(folder / f"source{source.token_files.index(file) or ''}.{file.format}")
    return file.path


def map_source(folder: pathlib.Path, source: Source, data: Any, raw_dtype: str = "") -> Sliced:
    """The tokens of a source's files, [n], memory-mapped or read by ranges, with those that were
    decompressed in a prepared folder. Raises BadFile if they are of several types, and as
    map_tokens does."""
    files = source.token_files
    # A memory map keeps its file open, and the usual limit is 1,024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + len(files), hard), hard))
    parts = [map_tokens(file, token_path(folder, source, file), data, raw_dtype) for file in files]
    for file, part in zip(files, parts, strict=True):
        if part.dtype != parts[0].dtype:
            raise BadFile(
                f"{file.path}: holds {part.dtype} ids, and {files[0].path} {parts[0].dtype}: the "
                f"files of data.source={source.name} must have one type: write it as "
                f"{parts[0].dtype}, or name it as another source"
            )
    return parts[0] if len(parts) == 1 else Joined(parts)


def map_tokens(file: File, path: str, data: Any, raw_dtype: str = "") -> np.memmap | StoreArray:
    """The tokens of a file that lies at a path or address, [n], memory-mapped or read by ranges.
    Raises BadFile if its size, shape or type cannot be that of tokens.

    data: token_dtype, cache and store_cache_gb are used
    raw_dtype: takes the place of data.token_dtype
    """
    is_stored, begin = addresses.is_address(path), 0
    size = file.size if is_stored else os.path.getsize(path)
    if file.format == "npy":
        dtype, count, begin = _npy_header(file, path)
        if begin + count * dtype.itemsize > size:
            raise BadFile(
                f"{file.path}: {size:,} bytes, which are too few for its {count:,} {dtype} ids: it "
                "is cut short or damaged"
            )
    else:
        if file.format == "megatron":
            index = index_path(file.path)
            with open_input(index, ahead=0) as stream:
                dtype, *_ = read_header(stream, index)
            whose = f"{dtype.name}, the type in its index"
        else:
            dtype = token_dtype_of(raw_dtype or data.token_dtype)
            whose = f"data.token_dtype={data.token_dtype}"
        count = size // dtype.itemsize
        if size % dtype.itemsize or not size:
            raise BadFile(f"{file.path}: {size} bytes are no whole number of tokens of {whose}")
    if is_stored:
        return StoreArray(StoreFile(file, block_cache(data)), dtype, begin, count)
    return np.memmap(pathlib.Path(path), dtype, "r", begin, (count,))


def _npy_header(file: File, path: str) -> tuple[np.dtype, int, int]:
    """The type, the number and the first byte of the ids in an .npy file that lies at a path."""
    with open_input(path, ahead=0) as stream:
        head = io.BytesIO(stream.read(NPY_HEADER))  # a damaged length is no reason to read more
    read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    try:
        shape, _, dtype = read[np.lib.format.read_magic(head)[0]](head)
    except (KeyError, ValueError, EOFError, OverflowError, tokenize.TokenError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadFile(f"{file.path}:1: not an .npy file of numbers: {reason}") from error
    if len(shape) != 1 or dtype.kind not in "iu" or shape[0] < 1:
        raise BadFile(
            f"{file.path}:1: holds {dtype} of shape {shape}, and must hold integers of one "
            "dimension, at least one"
        )
    return dtype, shape[0], head.tell()


def read_tokens(ids: np.memmap | StoreArray, most: int) -> Iterator[np.ndarray]:
    """The tokens of a file in arrays of up to `most`: read, not mapped, since the process would die
    if a mapped file were cut short meanwhile. Raises BadFile if it was."""
    if isinstance(ids, StoreArray):
        for first in range(0, len(ids), most):
            ids.prefetch(first + most, first + 2 * most)
            yield ids[first : first + most]
        return
    with open_input(str(ids.filename)) as stream:
        stream.seek(ids.offset)
        for first in range(0, len(ids), most):
            size = min(most, len(ids) - first) * ids.itemsize
            content = stream.read(size)
            if len(content) < size:
                raise BadFile(f"{ids.filename}: the file was cut short while it was read")
            yield np.frombuffer(content, ids.dtype)


def token_dtype_of(name: str) -> np.dtype:
    """The little-endian type of data.token_dtype."""
    return np.dtype(name).newbyteorder("<")
