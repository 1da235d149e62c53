"""Sources → a prepared corpus: memory-mapped tokens, an index of documents, a mask and a checksum.

A corpus is prepared once, into a folder of the cache whose name depends on its source's content and
on settings:

    <cache>/<source>-<key>/   corpus.json     sizes, checksums, tokenizer, and the bad records that
                                              were left out
                              tokens.bin      uint16 or uint32 [tokens], every document ending with
                                              the end-of-document id
                              documents.bin   int64 [documents + 1]: the place of each, then the
                                              number of tokens
                              mask.bin        uint8 [tokens]: 1 where a token counts in the loss;
                                              only with data.loss_mask
                              tokenizer.json  a copy of the tokenizer's file, if it has one

    <cache>/known/<source>-<key>/at.json      the folder of a source whose files have the paths,
                                              sizes and times of which this key is a digest

A source is read to know its content if its files are not known. Prepared files that were written or
copied since are read, too, and compared with the checksums.

Token files are checked and indexed where they lie; compressed ones are decompressed into the
folder. Everything is streamed: memory does not grow with the corpus. reading/ reads files,
token_files.py those that hold tokens, index_tokens.py finds their documents, encode.py encodes
documents, corpus_writer.py writes the folder, split.py holds documents out, document_packing.py
cuts sequences, cache.py has the cache's folders. `data` below is the config's group of that name.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtrain.config import ConfigError, addresses, sources
from jaxtrain.data.corpus import CHUNK, Corpus
from jaxtrain.data.preparing import cache
from jaxtrain.data.preparing.corpus_writer import (
    INFO,
    CorpusWriter,
    ReadingProgress,
    corpus_checksum,
)
from jaxtrain.data.preparing.encode import cores, encode
from jaxtrain.data.preparing.index_tokens import index_tokens
from jaxtrain.data.preparing.notes import notes
from jaxtrain.data.reading import documents
from jaxtrain.data.reading.array_records import kinds_line
from jaxtrain.data.reading.bad_records import Skipped
from jaxtrain.data.reading.compressed import is_compressed
from jaxtrain.data.reading.joined import Sliced, parts_of
from jaxtrain.data.reading.token_files import fitting_dtype, map_source, map_tokens, token_dtype_of
from jaxtrain.data.stores import listing
from jaxtrain.data.tokenizer import (
    DataError,
    NoTokenizer,
    Tokenizer,
    load_tokenizer,
    marks_line,
)
from jaxtrain.run import files, streams

KNOWN, NOTE = "known", "at.json"
FORMAT = 2  # the version of a prepared folder; part of its key


def prepare(data: Any, vocab_size: int, progress: bool = True) -> Corpus:
    """The corpus of a `data` config, prepared now if the cache does not have it.

    Args:
      data: source, tokenizer, text_fields, loss_mask, bad_records, token_dtype, validation_fraction
        and cache are used.
      vocab_size: the model's vocabulary; ids must be below it.
      progress: shows a bar on standard error, then the speed and the records that were left out.

    Raises DataError with one line, which names file and line of the problem if it has some, and
    ConfigError for a source that does not exist; nothing is left behind then.
    """
    began, root = time.time(), cache.folder_of(data.cache)
    try:
        tokenizer = load_tokenizer(data.tokenizer, vocab_size)
        source = listing.find(data.source)
        _check(data, source, tokenizer)
        if progress:
            streams.log(*source.lines(), *kinds_line(source.files), marks_line(tokenizer))
        name = source.name if source.name == sources.STDLIB else source.root.name
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:40]
        key = functools.partial(_key, data, source, tokenizer)
        known = root / KNOWN / f"{slug}-{key(_stamp)}"
        opened = functools.partial(_open, data=data, source=source, tokenizer=tokenizer)

        def know(temporary: pathlib.Path) -> None:
            at = f"{slug}-{key(_content)}"
            cache.ensure(root / at, opened, make, progress)
            (temporary / NOTE).write_text(json.dumps({"of": known.name, "at": at}))

        def make(temporary: pathlib.Path) -> None:
            try:
                fill = index_tokens if source.holds_tokens else _tokenize
                fill(temporary, data, source, tokenizer, progress)
            except (DataError, OSError) as error:
                of_cache = isinstance(error, OSError) and cache.refusal(error, root)
                if _has_changed(source) and not of_cache:
                    raise _changed(data) from error  # the change is why it could not be read
                raise
            if _has_changed(source) or not (
                known.name.endswith(key(_stamp)) or key(_content) in temporary.name
            ):
                raise _changed(data)

        try:
            corpus = cache.ensure(known, lambda path: opened(_folder(path)), know, progress)
        except OSError:  # a cache that may not be written can have the corpus all the same
            if (corpus := opened(root / f"{slug}-{key(_content)}")) is None:
                raise
        if corpus is None:
            raise _changed(data)
    except OSError as error:
        raise cache.refusal(error, root) or DataError(
            f"{error.filename or data.source}: {error.strerror or error}"
        ) from error
    if progress:
        if corpus.prepared < began:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(corpus.prepared))
            streams.log(
                f"{corpus.source} is taken from the cache, prepared at {when}: {corpus.folder}"
            )
        streams.log(
            *corpus.skipped.lines(corpus.source, corpus.folder / INFO),
            *notes(corpus.tokens, len(corpus.documents) - 1, data, tokenizer),
        )
    return corpus


def _has_changed(source: sources.Source) -> bool:
    """True if names, sizes or times of a source's files differ from those in `source`."""
    try:
        return source != listing.find(source.name)
    except (ConfigError, OSError):
        return True  # the files are gone


def _changed(data: Any) -> DataError:
    return DataError(
        f"data.source={data.source} changed while it was read: try again when it is complete"
    )


def _check(data: Any, source: sources.Source, tokenizer: Tokenizer) -> None:
    """Raises DataError if the settings of `data` do not fit the source, or it cannot be read."""
    mask, name = ",".join(data.loss_mask), data.source
    if data.bad_records == "stop" or not source.files:
        documents.check_files(source)
    if data.loss_mask and not source.has_fields:
        raise DataError(
            f"data.loss_mask={mask} names fields of {sources.RECORDS}, and data.source={name} has "
            "none: leave it empty"
        )
    if isinstance(tokenizer, NoTokenizer) and not source.holds_tokens:
        raise DataError(
            f"data.tokenizer=none is for token files, and data.source={name} is text: name its "
            "tokenizer with --config.data.tokenizer"
        )
    file, count = source.files[0], tokenizer.vocab_size
    if file.format == "bin" and data.token_dtype == "uint16" and count > 1 << 16:
        path, use = file.path, "use --config.data.token_dtype=uint32"
        if not is_compressed(file.path) and not fitting_dtype(
            map_tokens(file, file.path, data)[:CHUNK], "uint16", count
        ):
            use = f"write {path} as uint32, and {use}"
        whose = "model.vocab_size" if isinstance(tokenizer, NoTokenizer) else "data.tokenizer"
        raise DataError(f"data.token_dtype=uint16 has 65,536 ids, and {whose} has {count:,}: {use}")
    stored = cache.folder_of(data.cache)
    if any(source.takes(stored / "corpus" / file) for file in ("corpus.json", "tokens.bin")):
        raise DataError(
            f"data.cache={stored} lies in data.source={name} and would become part of it: "
            "name a folder outside"
        )


def _key(
    data: Any,
    source: sources.Source,
    tokenizer: Tokenizer,
    known_by: Callable[[sources.File], list],
) -> str:
    """A digest of all that a prepared folder depends on, as 16 hexadecimal digits. Files count by
    what `known_by` returns, and by their paths where bad records are named."""
    fields = [data.text_fields, data.loss_mask] if source.has_fields else []
    raw = [token_dtype_of(data.token_dtype).str] if source.files[0].format == "bin" else []
    description = {k: v for k, v in tokenizer.describe().items() if k != "path"}
    skip = ["skip"] if data.bad_records == "skip" and not source.holds_tokens else []
    digest = hashlib.sha256(json.dumps([FORMAT, description, fields, raw, *skip]).encode())
    with concurrent.futures.ThreadPoolExecutor(cores()) as threads:
        for file, known in zip(source.files, threads.map(known_by, source.files), strict=True):
            digest.update(json.dumps([*known, skip and file.path]).encode())
    digest.update(json.dumps(source.unreadable).encode())
    return digest.hexdigest()[:16]


def _stamp(file: sources.File) -> list:
    """A file's path, format, size and times, the last of which no program can set: another file of
    the same size and age that takes its place has another one. A store's version of a file is
    enough."""
    if addresses.is_address(file.path):
        return [*file]
    return [*file, os.stat(file.path).st_ctime_ns]


def _content(file: sources.File) -> list:
    """A file's format, and the sha256 of its content, which is read, or a store's version of it."""
    if addresses.is_address(file.path):
        return [file.format, file.size, file.modified]
    with open(file.path, "rb") as stream:
        return [file.format, hashlib.file_digest(stream, "sha256").hexdigest()]


def _folder(known: pathlib.Path) -> pathlib.Path:
    """The prepared folder that a folder of KNOWN names; itself, which is none, without a note."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        note = files.read_json(known / NOTE)
        if note["of"] == known.name:
            return known.parent.with_name(note["at"])
    return known


def _open(
    folder: pathlib.Path, data: Any, source: sources.Source, tokenizer: Tokenizer
) -> Corpus | None:
    """The corpus in a prepared folder; None if the folder is missing, damaged or another one's."""
    try:
        info = files.read_json(folder / INFO)
        parts, written = info["parts"], os.stat(folder / INFO).st_mtime_ns
        checksum = corpus_checksum(parts, info["dtype"], tokenizer)
        if (folder.name, checksum) != (info["of"], info["checksum"]):
            return None
        if source.holds_tokens:
            ids = map_source(folder, source, data)
        else:
            ids = np.memmap(folder / "tokens.bin", info["dtype"], "r")
        documents = np.memmap(folder / "documents.bin", "<i8", "r")
        mask = np.memmap(folder / "mask.bin", np.uint8, "r") if info["masked"] else None
        arrays: dict[str, Any] = {"tokens": ids, "documents": documents, "mask": mask}
        changed = [
            name
            for name in parts
            if any(
                pathlib.Path(part.filename).parent == folder
                and os.stat(part.filename).st_ctime_ns > written
                for part in parts_of(arrays[name])
            )
        ]
        if any(_digest(arrays[name]) != parts[name] for name in changed):
            return None
        if changed:
            with contextlib.suppress(OSError):  # of a cache that may not be written
                os.utime(folder / INFO)  # they need not be read again
        skipped = Skipped(**info.get("skipped", {}))  # only bad_records=skip writes "skipped"
        prepared = min(info["prepared"], time.time())
    except (AttributeError, OSError, KeyError, TypeError, ValueError):
        return None
    return Corpus(
        ids,
        documents,
        mask,
        checksum,
        tokenizer,
        folder,
        data.source,
        data.validation_fraction,
        skipped,
        prepared,
    )


def _digest(array: Sliced) -> str:
    """The sha256 of an array of a corpus, as hexadecimal."""
    digest = hashlib.sha256()
    for first in range(0, len(array), CHUNK):
        digest.update(np.ascontiguousarray(array[first : first + CHUNK]).data)
    return digest.hexdigest()


def _tokenize(
    folder: pathlib.Path, data: Any, source: sources.Source, tokenizer: Tokenizer, progress: bool
) -> None:
    """Encodes a source's documents into a folder."""
    assert tokenizer.end_of_document is not None  # _check: only a token file has no tokenizer
    dtype, n, count = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"), 0, 0
    skipped = Skipped() if data.bad_records == "skip" else None
    size = sum(file.size for file in source.files)
    name = "Python's source code" if source.name == sources.STDLIB else source.root.name
    stream = documents.pieces(
        source, tuple(data.text_fields), tuple(data.loss_mask), folder, skipped
    )
    with (
        contextlib.closing(CorpusWriter(folder)) as writer,
        contextlib.closing(ReadingProgress(name, size, progress)) as shown,
    ):
        writer.append("documents", np.zeros(1, "<i8"))
        for part in encode(stream, tokenizer, dtype):
            writer.append("tokens", part.ids)
            writer.append("documents", (n + part.ends).astype("<i8"))
            if data.loss_mask:
                writer.append("mask", part.mask)
            n, count = n + len(part.ids), count + len(part.ends)
            shown.update(part.size, part.text)
        if not count:
            why = (
                f"{skipped.count:,} bad records were left out, first {skipped.places[0]}"
                if skipped and skipped.count
                else "all of its text is empty"
            )
            use = f": use {skipped.settings}" if skipped and skipped.settings else ""
            raise DataError(
                f"{source.files[0].path}:1: no documents in data.source={data.source}: {why}{use}"
            )
        left_out = {"skipped": dataclasses.asdict(skipped)} if skipped else {}
        writer.finish(
            tokenizer,
            dtype=dtype.str,
            tokens=n,
            documents=count,
            masked=bool(data.loss_mask),
            **left_out,
        )
        shown.finish(n, count)
