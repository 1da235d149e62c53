"""Tokenizers: text ↔ ids, and the description with which a checkpoint finds its tokenizer again.

`data.tokenizer` chooses one of three kinds: `bytes` (ids 0 to 255, end of document 256), the path
of a Hugging Face tokenizers JSON file, or `none` for token files whose tokenizer is missing (text
is then decimal ids). All have the same methods, and these attributes:

    vocab_size           the largest id plus one
    end_of_document      the id that ends each document; None: there is no such id
    begin_of_document    the ids that begin it
    stops                the ids at which generated text ends

sources.py reads files of text, preparing/prepare.py prepares a corpus.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tokenizers

from jaxtrain.config.errors import cut, shown
from jaxtrain.data.errors import DataError
from jaxtrain.data.marks import (
    BESIDE,
    END_OF_DOCUMENT,
    POST_PROCESSOR,
    Marks,
    MarksError,
    plain_marks,
    read_marks,
)
from jaxtrain.data.stores import hub
from jaxtrain.run.files import read_regular

TOKENIZER = "tokenizer.json"  # its name in a published model


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255; 256 ends a document.

    >>> ByteTokenizer().encode("né").tolist(), ByteTokenizer().decode([104, 105, 256])
    ([110, 195, 169], 'hi')
    """

    vocab_size: int = 257
    end_of_document: int = 256
    begin_of_document: tuple[int, ...] = ()
    stops: tuple[int, ...] = (256,)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        contents = [text.encode() for text in texts]
        return np.frombuffer(b"".join(contents), np.uint8), [*map(len, contents)]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode(errors="replace")

    def describe(self) -> dict[str, Any]:
        return {"kind": "bytes"}


@dataclasses.dataclass(frozen=True)
class NoTokenizer:
    """For token files without a tokenizer: text is written as decimal ids, and no id ends a
    document."""

    vocab_size: int
    end_of_document: None = None
    begin_of_document: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()

    def encode(self, text: str) -> np.ndarray:
        words = text.split()
        if bad := next(
            (w for w in words if not w.isdecimal() or len(w) > 18 or int(w) >= self.vocab_size),
            None,
        ):
            raise DataError(
                f"data.tokenizer=none takes ids from 0 to {self.vocab_size - 1} separated by "
                f"spaces as text, not {bad[:40]!r}"
            )
        return np.array([int(w) for w in words], np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        ids = [self.encode(text) for text in texts]
        return np.concatenate(ids), [*map(len, ids)]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def describe(self) -> dict[str, Any]:
        return {"kind": "none", "vocab_size": self.vocab_size}


class FileTokenizer:
    """A Hugging Face tokenizers JSON file. Its own truncation, padding, sampling and marks are
    switched off; documents and prompts get their marks by marks.py.

    marks: None: as the files beside it say

    Raises DataError if the file is missing, is no tokenizers file or contradicts the files beside
    it, or if nothing says what ends a document.
    """

    def __init__(self, path: str | pathlib.Path, marks: Marks | None = None):
        try:
            # In the folder whose other files belong to the tokenizer: a link's own if that has any,
            # as a hub's cache does, else its target's.
            link = pathlib.Path(os.path.expanduser(path))
            link = link.parent.resolve() / link.name
            has_others = any((link.parent / name).exists() for name in BESIDE)
            self.path = link if has_others else link.resolve()
            self.content = read_regular(self.path)
        except OSError as error:
            raise DataError(
                f"data.tokenizer={path}: {error.strerror}: name a tokenizers JSON file "
                "(or bytes, or none)"
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(self.content.decode())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the library raises bare Exceptions, and what is none
            raise DataError(
                f"data.tokenizer={path} is not a tokenizers JSON file: {_first_line(error)}"
            ) from error
        # Files made for fine-tuning often have truncation and padding, which would cut or fill the
        # documents of a corpus silently; files left from a training have its dropout, with which
        # each preparation would make another corpus.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        for sampling in {"dropout", "alpha", "nbest_size"} & {*dir(self._tokenizer.model)}:
            setattr(self._tokenizer.model, sampling, None)
        unknown = getattr(self._tokenizer.model, "unk_token", None) or ""
        self.unknown: int | None = self._tokenizer.token_to_id(unknown)
        self._plain = plain_marks(self._tokenizer)
        try:
            marks = marks or read_marks(self.path.parent, self._tokenizer)
        except MarksError as error:
            raise DataError(f"data.tokenizer={path}: {error}") from None
        if marks is None:
            raise DataError(
                f"data.tokenizer={path} has no end-of-document token: it needs an eos_token in "
                f"tokenizer_config.json, or one of {' '.join(END_OF_DOCUMENT)}"
            )
        self._marks = marks
        self.end_of_document: int = marks.ends
        self.begin_of_document, self.stops = marks.begins, marks.stops
        self.origin, self.token = marks.origin, self._tokenizer.id_to_token
        self.vocab_size = 1 + max(
            self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1
        )
        if (beyond := max(*marks.begins, marks.ends, 0)) >= self.vocab_size:
            raise DataError(
                f"data.tokenizer={path} puts id {beyond} around a document ({POST_PROCESSOR}, or "
                f"{marks.origin}), and has {self.vocab_size} ids: name files that belong together"
            )

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, [n] of an unsigned integer type, without beginning or end marks.
        Raises UnicodeEncodeError or DataError for a text that the tokenizer cannot encode."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        """The ids of texts, one after the other, on all cores; and the number of each text's."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the library raises bare Exceptions, and what is none
            raise DataError(
                f"data.tokenizer={self.path} cannot encode a text: {_first_line(error)}"
            ) from error
        ids, counts = array("I"), []
        for encoding in encodings:
            numbers = encoding.ids  # makes a list of Python's numbers
            ids.fromlist(numbers)  # twice as fast as NumPy reads it
            counts.append(len(numbers))
        return np.frombuffer(ids, np.uint32), counts

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, without the ends of documents. Ids that stand for no text are left
        out. Nothing is raised, whatever the ids are."""
        return self._tokenizer.decode(
            [i for i in map(int, ids) if 0 <= i < self.vocab_size], skip_special_tokens=True
        )

    def describe(self) -> dict[str, Any]:
        """A JSON object from which `tokenizer_from` makes an equal tokenizer."""
        file = {"kind": "tokenizers", "path": str(self.path), "sha256": self.sha256}
        if self._marks == self._plain:
            return file
        return file | {
            "marks": {
                "begins": [*self.begin_of_document],
                "ends": self.end_of_document,
                "stops": [*self.stops],
            }
        }


Tokenizer = ByteTokenizer | NoTokenizer | FileTokenizer


def marks_line(tokenizer: Tokenizer) -> str:
    """A line of text: the ids that begin and end a document, and what says so."""
    begins, end = tokenizer.begin_of_document, tokenizer.end_of_document
    if not isinstance(tokenizer, FileTokenizer):
        return f"documents: no id begins one, {'no id' if end is None else f'id {end}'} ends it"
    names = [f"{i} {tokenizer.token(i)!r}" for i in (*begins, tokenizer.end_of_document)]
    begin = (
        f"{', '.join(names[:-1])} begins one ({POST_PROCESSOR})" if begins else "no id begins one"
    )
    return f"documents: {begin}, {names[-1]} ends it ({tokenizer.origin})"


def load_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """The tokenizer of `data.tokenizer` for a model of `vocab_size` ids. Raises DataError if the
    model has too few.

    >>> load_tokenizer("bytes", 257).stops
    (256,)
    """
    tokenizer = open_tokenizer(name, vocab_size)
    if (least := tokenizer.vocab_size) > vocab_size:
        raise DataError(
            f"model.vocab_size={vocab_size} is less than the {least} ids of "
            f"data.tokenizer={name}: use --config.model.vocab_size={least}"
        )
    check_stops(tokenizer, vocab_size)
    return tokenizer


def check_stops(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises DataError for an id at which a file's tokenizer ends a text, and that a model of
    `vocab_size` ids lacks."""
    if isinstance(tokenizer, FileTokenizer) and (
        (beyond := max(tokenizer.stops, default=0)) >= vocab_size
    ):
        raise DataError(
            f"a text ends at id {beyond} (eos_token_id of generation_config.json or config.json), "
            f"and the model has {vocab_size} ids"
        )


def open_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """The tokenizer of `data.tokenizer`, whatever the size of the model's vocabulary is. Raises
    DataError, of which StoreError is that of the hub.

    vocab_size: the model's, for token files without a tokenizer
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "none":
        return NoTokenizer(vocab_size)
    if named := hub.repository("data.tokenizer", name):
        return FileTokenizer(hub.folder(named, (TOKENIZER, *BESIDE)) / TOKENIZER)
    return FileTokenizer(name)


def tokenizer_from(
    description: dict[str, Any], folders: Iterable[str | pathlib.Path] = ()
) -> Tokenizer:
    """The tokenizer that a `describe()` has described.

    A tokenizers file is looked for at its path, then as `tokenizer.json` in each of `folders`,
    since a prepared corpus has a copy. The first file whose sha256 is the described one is taken.
    Raises DataError if there is none.
    """
    if description["kind"] == "bytes":
        return ByteTokenizer()
    if description["kind"] == "none":
        return NoTokenizer(description["vocab_size"])
    path, sha256 = description["path"], description["sha256"]
    if not isinstance(path, str) or not isinstance(sha256, str):
        raise DataError(f"the tokenizer {shown(description)} has no path and sha256")
    for folder in (None, *folders):
        place = pathlib.Path(folder or "", "tokenizer.json" if folder else path)
        with contextlib.suppress(OSError):
            content = read_regular(place, folder=folder)
            if hashlib.sha256(content).hexdigest() == sha256:
                return FileTokenizer(place, _described_marks(description, content))
    raise DataError(
        f"data.tokenizer={cut(path)} {'has changed' if os.path.isfile(path) else 'is gone'} "
        "since this run was made: put the old file back "
        f"(its sha256 begins with {cut(sha256[:16])})"
    )


def _described_marks(description: dict[str, Any], content: bytes) -> Marks | None:
    """The marks of a description; those of the file alone, which has this content, where it has
    none. Raises DataError for marks that are no ids."""
    if "marks" not in description:
        return plain_marks(tokenizers.Tokenizer.from_str(content.decode()))
    marks = description["marks"]
    for ids in (marks["begins"], [marks["ends"]], marks["stops"]):
        if not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)):
            raise DataError(f"the tokenizer's marks {shown(marks)} are no ids")
    return Marks(tuple(marks["begins"]), marks["ends"], tuple(marks["stops"]))


def _first_line(error: BaseException) -> str:
    return cut((str(error).strip().splitlines() or [type(error).__name__])[0])


def prompt_ids(tokenizer: Tokenizer, prompt: str, vocab_size: int) -> list[int]:
    """The ids of a prompt, with those that begin a document; an empty prompt of a tokenizer without
    such ids is an end of document.

    Raises DataError for text that is not UTF-8 and for ids beyond `vocab_size`.
    """
    try:
        # an ASCII locale passes other bytes on as surrogates
        text = prompt.encode("utf-8", "surrogateescape").decode()
        ids = [*tokenizer.begin_of_document, *(int(i) for i in tokenizer.encode(text))]
    except UnicodeError:
        raise DataError("the prompt holds bytes that are not UTF-8: use UTF-8 text") from None
    if not ids:
        if tokenizer.end_of_document is None:
            raise DataError(
                "the prompt is empty, and this tokenizer has no end-of-document id to start "
                "from: use one id or more, such as 0"
            )
        ids = [tokenizer.end_of_document]
    if max(ids) >= vocab_size:
        raise DataError(
            f"the prompt has id {max(ids)}, and the model knows {vocab_size}: use the "
            "tokenizer that it was trained with"
        )
    return ids
