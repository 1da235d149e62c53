"""Sources → a prepared corpus: memory-mapped tokens, an index of documents, a mask and a checksum.

A corpus is prepared once, into a folder of the cache whose name depends on its source's content and
on settings, and on nothing else: a source or a cache that was moved or touched is not prepared
again.

    <cache>/corpus-<key>/     corpus.json     sizes, checksums, tokenizer, and the bad records that
                                              were left out
                              tokens.bin      uint16 or uint32 [tokens], every document ending with
                                              the end-of-document id
                              documents.bin   int64 [documents + 1]: the place of each, then the
                                              number of tokens
                              mask.bin        uint8 [tokens]: 1 where a token counts in the loss;
                                              only with data.loss_mask
                              tokenizer.json  a copy of the tokenizer's file, if it has one

    <cache>/corpus-<key>.parts-<version>/   encoded parts, until they are joined (parts.py)
    <cache>/known/<source>-<key>/at.json    the key of the content of files that have the paths,
                                            sizes and times of which this folder's key is a digest

A source is read to know its content if its files are not known. Prepared files that were written or
copied since are read, too, and compared with the checksums.

Texts are encoded part by part, by one process or by shards on several machines, and the parts
joined. Token files are checked and indexed where they lie; compressed ones are decompressed into
the folder. Everything is streamed: memory does not grow with the corpus. reading/ reads files,
token_files.py those that hold tokens, index_tokens.py finds their documents, encode.py encodes
documents, corpus_writer.py writes folders, split.py holds documents out, document_packing.py cuts
sequences, cache.py has the cache's folders. `data` below is the config's group of that name.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.config import ConfigError, addresses, own_code, sources
from jaxtrain.config.groups.formats import RECORDS
from jaxtrain.data.corpus import CHUNK, Corpus
from jaxtrain.data.preparing import cache, duplicates
from jaxtrain.data.preparing.adopt import adopt_corpus
from jaxtrain.data.preparing.corpus_writer import (
    INFO,
    ReadingProgress,
    corpus_checksum,
    sha256,
)
from jaxtrain.data.preparing.encode import cores
from jaxtrain.data.preparing.index_tokens import index_tokens
from jaxtrain.data.preparing.notes import notes
from jaxtrain.data.preparing.parts import (
    VERSION,
    Part,
    StoredPart,
    divide,
    encode_part,
    join,
    open_part,
)
from jaxtrain.data.reading.bad_records import Skipped
from jaxtrain.data.reading.compressed import is_compressed
from jaxtrain.data.reading.documents import check_files, unreadable_files
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
    ConfigError for a source that does not exist. Nothing is left behind then, but for complete
    parts where the disk is full or the process was interrupted.
    """
    began = time.time()
    with _preparing(data):
        corpus = Preparation(data, vocab_size, progress).corpus()
    if progress:
        if corpus.prepared < began:
            streams.log(
                f"{corpus.source} is taken from the cache, prepared at "
                f"{datetime.datetime.fromtimestamp(corpus.prepared):%Y-%m-%d %H:%M:%S}: "
                f"{corpus.folder}"
            )
        streams.log(
            *corpus.skipped.lines(corpus.source, corpus.folder / INFO),
            *notes(corpus.tokens, len(corpus.documents) - 1, data, corpus.tokenizer),
        )
    return corpus


@dataclasses.dataclass(frozen=True)
class ShardReport:
    """What a shard of a preparation has done.

    parts: the number of parts that the source has
    encoded: how many of them this call has encoded
    missing: the numbers of those that are not encoded yet; part p belongs to shard p % n
    corpus: the corpus, once no part is missing
    """

    parts: int
    encoded: int
    missing: tuple[int, ...]
    corpus: Corpus | None


def prepare_shard(
    data: Any, vocab_size: int, shard: tuple[int, int], progress: bool = True
) -> ShardReport:
    """Encodes the parts p of a source with p % n == i for shard=(i, n), and joins all parts if none
    is missing then. `data`, `vocab_size`, `progress` and errors are those of `prepare`.

    Shards may run at once, also on several machines with a common cache, and again after a kill.
    """
    with _preparing(data):
        return Preparation(data, vocab_size, progress).shard(*shard)


@contextlib.contextmanager
def _preparing(data: Any) -> Iterator[None]:
    """Raises DataError in place of an OSError. Removes folders that are empty at the end."""
    root = cache.folder_of(data.cache)
    try:
        with files.without_new_folders(root / KNOWN, root, *root.parents):
            yield
    except OSError as error:
        raise cache.refusal(error, root) or DataError(
            f"{error.filename or data.source}: {error.strerror or error}"
        ) from error


class Preparation:
    """The work on one source, whose files must stay as they are at the beginning."""

    def __init__(self, data: Any, vocab_size: int, progress: bool):
        self._data, self._progress, self._root = data, progress, cache.folder_of(data.cache)
        self._tokenizer = tokenizer = load_tokenizer(data.tokenizer, vocab_size)
        self._source = source = listing.find(data.source)
        _check(data, source, tokenizer)
        if progress:
            streams.log(*source.lines(), marks_line(tokenizer))
        is_stdlib = source.name == sources.STDLIB
        self._name = "Python's source code" if is_stdlib else source.root.name
        self._key = functools.partial(_key, data, source, tokenizer)
        self._stamps = {file.path: _stamp(file) for file in source.files}
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", sources.STDLIB if is_stdlib else self._name)[:40]
        self._known = self._root / KNOWN / f"{slug}-{self._key(lambda f: self._stamps[f.path])}"
        self._content_key = ""  # not read yet
        try:
            self._content_key = cache.ensure(self._known, _noted_key, self._note, progress)
        except OSError:  # a cache that may not be written can have the corpus all the same
            self._content_key = self._key(_content)
        self._work = self._root / f"corpus-{self._content_key}.parts-{VERSION}"

    @functools.cached_property
    def _parts(self) -> list[Part]:
        """The parts of the source. Token files, which are indexed where they lie, are one."""
        return (
            [Part(0, self._source, 0, sum(file.size for file in self._source.files))]
            if self._source.holds_tokens
            else divide(self._source)
        )

    def corpus(self) -> Corpus:
        """The corpus. If the cache does not have it, missing parts are encoded, and all joined."""
        with self._unusable_removed(keeps_parts=False):
            corpus = cache.ensure(self._folder(), self._open, self._fill, self._progress)
        shutil.rmtree(self._work, ignore_errors=True)
        return corpus

    def shard(self, number: int, count: int) -> ShardReport:
        """Encodes the parts of a shard, and joins all parts if they are there."""
        encoded = 0
        try:
            with self._unusable_removed():
                parts = self._parts[number::count]
                if not self._source.holds_tokens and not self._open(self._folder()):
                    encoded = len(self._missing(parts))
                    with self._unchanged():
                        self._encode(parts)
        except OSError:
            # Another process may have encoded the same parts, joined them and removed them.
            if not self._open(self._folder()):
                raise
        missing = self._missing(self._parts)
        indexes = self._source.holds_tokens and number == 0  # token files are one part
        is_ready = indexes or not missing or self._open(self._folder())
        corpus = self.corpus() if is_ready else None
        return ShardReport(len(self._parts), encoded, () if corpus else missing, corpus)

    def _note(self, folder: pathlib.Path) -> None:
        """Writes the key of the source's content into a folder of KNOWN."""
        with self._unchanged():
            (folder / NOTE).write_text(
                json.dumps({"of": self._known.name, "at": self._key(_content)})
            )

    def _folder(self) -> pathlib.Path:
        """The prepared folder. Older versions put the source's name before the key."""
        usual = self._root / f"corpus-{self._content_key}"
        return min(self._root.glob(f"*-{self._content_key}"), default=usual)

    def _open(self, folder: pathlib.Path) -> Corpus | None:
        """The corpus in a prepared folder; None if the folder is missing, damaged or another
        one's."""
        data, source, tokenizer = self._data, self._source, self._tokenizer
        try:
            info = files.read_json(folder / INFO)
            parts, written = info["parts"], os.stat(folder / INFO).st_mtime_ns
            checksum = corpus_checksum(parts, info["dtype"], tokenizer)
            if (folder.name, checksum) != (info["of"], info["checksum"]):
                return None
            arrays: dict[str, Any] = {
                "tokens": map_source(
                    folder, source, data, info["dtype"] if source.is_prepared else ""
                )
                if source.holds_tokens
                else np.memmap(folder / "tokens.bin", info["dtype"], "r"),
                "documents": np.memmap(folder / "documents.bin", "<i8", "r"),
                "mask": None,
            }
            if info["masked"] and source.is_prepared:
                (file,) = [file for file in source.files if file.path.endswith("mask.bin")]
                arrays["mask"] = map_tokens(file, file.path, data, "uint8")
            elif info["masked"]:
                arrays["mask"] = np.memmap(folder / "mask.bin", np.uint8, "r")
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
            skipped = unreadable_files(source)
            if "skipped" in info:  # only bad_records=skip writes it
                stored = Skipped(**info["skipped"])
                # A prepared corpus has the bad records of files that are not here.
                skipped.append(
                    stored
                    if source.is_prepared
                    else stored.at([file.path for file in source.files]),
                    0,
                )
            return Corpus(
                **arrays,
                checksum=checksum,
                tokenizer=tokenizer,
                folder=folder,
                source=data.source,
                validation_fraction=data.validation_fraction,
                skipped=skipped,
                prepared=min(info["prepared"], time.time()),
            )
        except (AttributeError, OSError, IndexError, KeyError, TypeError, ValueError):
            return None

    def _missing(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """The numbers of the parts that are not encoded."""
        return tuple(p.number for p in parts if open_part(p, p.folder(self._work)) is None)

    def _fill(self, folder: pathlib.Path) -> None:
        """Writes the corpus into a folder."""
        with self._unchanged():
            if self._source.is_prepared:
                adopt_corpus(folder, self._data, self._source, self._tokenizer)
            elif self._source.holds_tokens:
                index_tokens(folder, self._data, self._source, self._tokenizer, self._progress)
            else:
                stored = self._encode(self._parts)
                join(folder, stored, self._data, self._tokenizer, self._name, self._progress)

    def _encode(self, parts: Sequence[Part]) -> list[StoredPart]:
        """Encodes those of some parts that are missing."""
        missing, stored = set(self._missing(parts)), list[StoredPart]()
        size = sum(part.size for part in parts if part.number in missing)
        with contextlib.closing(ReadingProgress(self._name, size, self._progress)) as shown:
            for part in parts:
                any_read = self._source.has_fields and any(one.info["documents"] for one in stored)
                make = functools.partial(self._encode_part, part, any_read, shown)
                opened = functools.partial(open_part, part)
                stored.append(cache.ensure(part.folder(self._work), opened, make, self._progress))
            if missing:
                shown.finish(
                    tokens=sum(one.info["tokens"] for one in stored),
                    documents=sum(one.info["documents"] for one in stored),
                )
        return stored

    def _encode_part(
        self, part: Part, any_read: bool, shown: ReadingProgress, folder: pathlib.Path
    ) -> None:
        """Encodes a part into a folder, which no later preparation may find if the part's files
        have changed meanwhile."""
        encode_part(folder, part, self._data, self._tokenizer, any_read, shown)
        self._check_unchanged(part.source.files)

    def _check_unchanged(
        self, files: Sequence[sources.File] = (), cause: Exception | None = None
    ) -> None:
        """Raises DataError if some files of the source are not as they were: neither their times
        nor their content. files: without them all are compared, and their names."""
        try:
            has_changed = not files and self._source != listing.find(self._source.name)
            if any(_stamp(file) != self._stamps[file.path] for file in files or self._source.files):
                has_changed = has_changed or self._key(_content) != self._content_key
        except (ConfigError, OSError):
            has_changed = True  # they are gone
        if has_changed:
            raise DataError(
                f"data.source={self._data.source} changed while it was read: try again when it is "
                "complete"
            ) from cause

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Raises DataError if the source has changed at the end, whatever was raised inside: the
        change is why it could not be read."""
        try:
            yield
        except (DataError, OSError) as error:
            if not (isinstance(error, OSError) and cache.refusal(error, self._root)):
                self._check_unchanged(cause=error)
            raise
        self._check_unchanged()

    @contextlib.contextmanager
    def _unusable_removed(self, keeps_parts: bool = True) -> Iterator[None]:
        """Removes what no later preparation can use if something is raised: the parts of a source
        that cannot be read or has changed, unless other shards may need them; and the note of a
        source without parts."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, DataError | ConfigError) and not keeps_parts:
                shutil.rmtree(self._work, ignore_errors=True)
            if not self._work.exists():
                shutil.rmtree(self._known, ignore_errors=True)
            raise


def _check(data: Any, source: sources.Source, tokenizer: Tokenizer) -> None:
    """Raises DataError if the settings of `data` do not fit the source, or it cannot be read."""
    if data.bad_records == "stop" or not source.files:
        check_files(source)
    if data.loss_mask and not source.has_fields:
        raise DataError(
            f"data.loss_mask={','.join(data.loss_mask)} names fields of {RECORDS}, and "
            f"data.source={data.source} has none: leave it empty"
        )
    if isinstance(tokenizer, NoTokenizer) and not source.holds_tokens:
        raise DataError(
            f"data.tokenizer=none is for token files, and data.source={data.source} is text: name "
            "its tokenizer with --config.data.tokenizer"
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
            f"data.cache={stored} lies in data.source={data.source} and would become part of it: "
            "name a folder outside"
        )


def _key(
    data: Any,
    source: sources.Source,
    tokenizer: Tokenizer,
    known_by: Callable[[sources.File], list],
) -> str:
    """A digest of all that a prepared folder depends on, as 16 hexadecimal digits. Files count by
    what `known_by` returns; neither their paths nor what is no file are in the content's key."""
    fields = [data.text_fields, data.loss_mask] if source.has_fields else []
    raw = [token_dtype_of(data.token_dtype).str] if source.files[0].format == "bin" else []
    description = {k: v for k, v in tokenizer.describe().items() if k != "path"}
    skip = ["skip"] if data.bad_records == "skip" and not source.holds_tokens else []
    if data.filter and not source.holds_tokens:  # a module counts by its name
        skip += [own_code.digest(data.filter) or data.filter, own_code.parts(data.filter)[1]]
    if data.duplicates != "keep" and not source.holds_tokens:
        skip += [data.duplicates, str(duplicates.KEYS[data.duplicates])]
    digest = hashlib.sha256(json.dumps([FORMAT, description, fields, raw, *skip]).encode())
    with concurrent.futures.ThreadPoolExecutor(cores()) as threads:
        for known in threads.map(known_by, source.files):
            # The empty lists were paths and unreadable files once: digests stay as they were.
            digest.update(json.dumps([*known, []]).encode())
    digest.update(json.dumps([]).encode())
    return digest.hexdigest()[:16]


def _stamp(file: sources.File) -> list:
    """A file's path, format, size and times, the last of which no program can set: another file of
    the same size and age that takes its place has another one. A store's version of a file is
    enough."""
    changed = 0 if addresses.is_address(file.path) else os.stat(file.path).st_ctime_ns
    return [file.path, file.format, file.size, file.modified, changed]


def _content(file: sources.File) -> list:
    """A file's format, and the sha256 of its content, which is read, or a store's version of it. A
    prepared corpus is known by its corpus.json, which has the checksums of the others."""
    if file.format in ("prepared", "beside") and not file.path.endswith(INFO):
        return [file.format, file.size]
    if addresses.is_address(file.path):
        return [file.format, file.size, file.modified]
    return [file.format, sha256(file.path)]


def _noted_key(known: pathlib.Path) -> str | None:
    """The key that the note in a folder of KNOWN has; None without a note of this name. Older notes
    have the prepared folder's name, which ends with the key."""
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
        note = files.read_json(known / NOTE)
        if note["of"] == known.name:
            return str(note["at"].rpartition("-")[2])
    return None


def _digest(array: Sliced) -> str:
    """The sha256 of an array of a corpus, as hexadecimal."""
    digest = hashlib.sha256()
    for first in range(0, len(array), CHUNK):
        digest.update(np.ascontiguousarray(array[first : first + CHUNK]).data)
    return digest.hexdigest()
