"""Token files (.bin, .npy): their tokens as an array, and the error for an id that no tokenizer of
the run makes, with the setting that reads the file."""

import pathlib
from typing import Any

import numpy as np

from jaxtrain.config.sources import File
from jaxtrain.data.reading.compressed import is_compressed
from jaxtrain.data.tokenizer import DataError, NoTokenizer, Tokenizer

MOST_IDS = 2**24  # more than any tokenizer has


def id_beyond_vocabulary(
    where: str, ids: np.ndarray, is_raw: bool, data: Any, tokenizer: Tokenizer
) -> DataError:
    """The error for an id of a token file that the tokenizer, or the model if there is no
    tokenizer, does not have.

    is_raw: True if data.token_dtype is the type of the ids; an .npy file states its own.
    """
    rule = f"{where} is beyond the {tokenizer.vocab_size} ids of data.tokenizer={data.tokenizer}"
    needed = int(ids.max()) + 1
    if isinstance(tokenizer, NoTokenizer):
        rule = f"{where} is not below model.vocab_size={tokenizer.vocab_size} and at least 0"
    if is_raw and (dtype := fitting_dtype(ids, data.token_dtype, tokenizer.vocab_size)):
        return DataError(f"{rule}: use --config.data.token_dtype={dtype}, with which all ids are")
    if ids.min() < 0 or needed > MOST_IDS:
        what = (
            f"what no data.token_dtype for {tokenizer.vocab_size} ids reads as ids"
            if is_raw
            else f"{ids.dtype} numbers, not ids"
        )
        return DataError(
            f"{rule}, and no tokenizer makes it: the file holds {what}; name another data.source"
        )
    if isinstance(tokenizer, NoTokenizer):
        return DataError(f"{rule}: use --config.model.vocab_size={needed}")
    return DataError(f"{rule}: name the tokenizer that made it, or none")


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


def token_path(folder: pathlib.Path, file: File) -> pathlib.Path:
    """The place of a token file's tokens: the prepared folder if it was decompressed, or the file
    itself."""
    if is_compressed(file.path):
        return folder / f"source.{file.format}"
    return pathlib.Path(file.path)


def map_tokens(file: File, path: pathlib.Path, token_dtype: str) -> np.memmap:
    """The tokens of a .bin or .npy file, [n], memory-mapped. Raises DataError if its size, shape or
    type cannot be that of tokens."""
    if file.format == "npy":
        try:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DataError(
                f"{file.path}:1: not an .npy file of numbers: {str(error).splitlines()[0]}"
            ) from error
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise DataError(
                f"{file.path}:1: holds {ids.dtype} of shape {ids.shape}, and must hold "
                "integers of one dimension, at least one"
            )
        return ids
    dtype, size = token_dtype_of(token_dtype), path.stat().st_size
    if size % dtype.itemsize or not size:
        raise DataError(
            f"{file.path}: {size} bytes are no whole number of tokens of "
            f"data.token_dtype={token_dtype}"
        )
    return np.memmap(path, dtype, "r")


def token_dtype_of(name: str) -> np.dtype:
    """The little-endian type of data.token_dtype."""
    return np.dtype(name).newbyteorder("<")
