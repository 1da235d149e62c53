"""Token files → a prepared folder: their ids are checked where they lie, and the places of their
documents written down."""

import contextlib
import pathlib
from typing import Any

import numpy as np

from jaxtrain.config.sources import Source
from jaxtrain.data.corpus import CHUNK
from jaxtrain.data.preparing.corpus_writer import CorpusWriter, ReadingProgress
from jaxtrain.data.reading.compressed import is_compressed, plain_file, unpack
from jaxtrain.data.reading.joined import parts_of
from jaxtrain.data.reading.megatron_index import document_ends, index_path
from jaxtrain.data.reading.token_files import (
    id_beyond_vocabulary,
    map_source,
    read_tokens,
    token_path,
)
from jaxtrain.data.tokenizer import Tokenizer


def index_tokens(
    folder: pathlib.Path, data: Any, source: Source, tokenizer: Tokenizer, progress: bool
) -> None:
    """Checks the ids of a source's token files and writes the places of its documents into a
    folder.

    Megatron's index says where documents end. In other files a document ends with the
    end-of-document id, and at the end of the file.
    """
    files, count, end = source.token_files, 0, 0
    for file in files:
        if is_compressed(file.path):
            unpack(file.path, pathlib.Path(token_path(folder, source, file)))
    tokens = map_source(folder, source, data)
    with (
        contextlib.closing(CorpusWriter(folder)) as writer,
        contextlib.closing(ReadingProgress(source.root.name, tokens.nbytes, progress)) as shown,
    ):
        writer.append("documents", np.zeros(1, "<i8"))
        for file, ids in zip(files, parts_of(tokens), strict=True):
            if file.format == "megatron":
                with plain_file(index_path(file.path), folder) as index:
                    for ends in document_ends(file, index):
                        writer.append("documents", (end + ends).astype("<i8"))
                        count += len(ends)
            place = 0  # of the chunk in its file
            for chunk in read_tokens(ids, CHUNK):
                bad = np.flatnonzero((chunk < 0) | (chunk >= tokenizer.vocab_size))
                if len(bad):
                    where = f"{file.path}: token {chunk[bad[0]]} at position {place + bad[0]}"
                    known = ids if isinstance(ids, np.ndarray) else chunk  # all of a local file
                    raise id_beyond_vocabulary(where, known, file.format == "bin", data, tokenizer)
                writer.append("tokens", chunk, store=False)
                place += len(chunk)
                if file.format != "megatron":
                    ends = _ends(chunk, place == len(ids), tokenizer.end_of_document)
                    writer.append("documents", (end + place - len(chunk) + ends).astype("<i8"))
                    count += len(ends)
                shown.update(chunk.nbytes, chunk.nbytes)
            end += place
        writer.finish(tokenizer, dtype=tokens.dtype.str, tokens=end, documents=count, masked=False)
        shown.finish(end, count)


def _ends(chunk: np.ndarray, is_last: bool, end_of_document: int | None) -> np.ndarray:
    """The places in a chunk of ids after the documents that end there; is_last: the file ends with
    the chunk, and a document with it."""
    is_end = chunk == end_of_document if end_of_document is not None else np.zeros(len(chunk), bool)
    is_end[-1] |= is_last
    return np.flatnonzero(is_end) + 1
