"""A source that is a prepared corpus → a prepared folder, which has its index and its description;
tokens and mask are read where they lie."""

import json
import os
import pathlib
import shutil
import time
from typing import Any

import numpy as np

from jaxtrain.config.sources import Source
from jaxtrain.data.preparing import cache
from jaxtrain.data.preparing.corpus_writer import INFO, corpus_checksum, sha256
from jaxtrain.data.reading.bad_records import BadFile
from jaxtrain.data.reading.compressed import open_input
from jaxtrain.data.tokenizer import DataError, Tokenizer
from jaxtrain.run.files import MOST_BYTES

INDEX = "documents.bin"
CHUNK = 1 << 20  # bytes copied at a time


def adopt_corpus(folder: pathlib.Path, data: Any, source: Source, tokenizer: Tokenizer) -> None:
    """Writes the index and the description of a prepared corpus into a folder, under the checksum
    that it has. Its tokens are not read, only their number is compared.

    Raises BadFile for files that are not those of the description, and DataError if
    data.tokenizer is not the corpus's.
    """
    files = {os.path.basename(file.path): file for file in source.files}
    try:
        with open_input(files[INFO].path) as stream:
            info = json.loads(stream.read(MOST_BYTES))
        parts, tokens, kind = info["parts"], int(info["tokens"]), info["tokenizer"]["kind"]
        sizes = {
            "tokens.bin": tokens * np.dtype(info["dtype"]).itemsize,
            INDEX: 8 * (int(info["documents"]) + 1),
        } | ({"mask.bin": tokens} if info["masked"] else {})
        prepared_with, given = (
            {**one, "path": ""} for one in (info["tokenizer"], tokenizer.describe())
        )
        index_checksum, checksum = parts["documents"], info["checksum"]
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise BadFile(
            f"{files[INFO].path}: not the description of a prepared corpus: copy the folder again"
        ) from error
    if prepared_with != given or checksum != corpus_checksum(parts, info["dtype"], tokenizer):
        remedy = (
            "use --config.data.tokenizer=bytes"
            if kind == "bytes"
            else f"name that of which {source.place}/tokenizer.json is a copy"
        )
        raise DataError(
            f"data.tokenizer={data.tokenizer} is not the tokenizer with which "
            f"data.source={data.source} was prepared: {remedy}"
        )
    for name, size in sizes.items():
        if name not in files or files[name].size != size:
            has = f"{files[name].size:,} bytes" if name in files else "nothing"
            raise BadFile(
                f"{source.place}/{name}: has {has}, and by {INFO} {size:,} bytes: copy it again"
            )
    # by parts, since many documents have an index of gigabytes
    with open_input(files[INDEX].path) as stream, open(folder / INDEX, "xb") as copy:
        shutil.copyfileobj(stream, copy, CHUNK)
    if sha256(folder / INDEX) != index_checksum:
        raise BadFile(f"{files[INDEX].path}: damaged: its checksum is not that in {INFO}")
    info |= {"of": folder.name.partition(cache.UNFINISHED)[0], "prepared": time.time()}
    (folder / INFO).write_text(json.dumps(info, indent=1) + "\n")
