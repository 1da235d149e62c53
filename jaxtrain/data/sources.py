"""The files of `data.source`, and the documents in them.

    folder   every text, JSONL and Parquet file below it, in the order of their paths; names that begin with a dot are left out
    text     one document a file; any suffix but those below
    .jsonl   one document a line, of the fields `data.text_fields`, joined in that order; blank lines are no documents (.ndjson too)
    .parquet one document a row, of the same fields
    stdlib   the sources of the Python standard library: its *.py files without tests, one document each
    .bin .npy  tokens (tokens.py reads them): nothing here but their names

Everything is a stream: a long text comes in pieces cut after a line, so that no file is ever whole in memory.
Encoding, the end of documents and the prepared corpus are in tokens.py.
"""

import codecs
import dataclasses
import itertools
import json
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxtrain.data.tokenizer import DataError

STDLIB = "stdlib"
BLOCK = 1 << 20  # bytes of a text read, and encoded, at a time
LONGEST = 8 << 20  # characters of a text without a newline after which it is cut all the same
TOKEN_FORMATS = ("bin", "npy")
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".bin": "bin", ".npy": "npy"}
LEFT_OUT_OF_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SURROGATE = re.compile("[\\ud800-\\udfff]")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class File(NamedTuple):
    """A file of a source. Size in bytes; `modified` in nanoseconds."""

    path: str
    format: str  # text, jsonl, parquet, bin, npy, or python: a text that is left out if it is empty or not UTF-8
    size: int
    modified: int


class Piece(NamedTuple):
    """A part of a document: its text, whether its tokens count in the loss, whether the document ends here, and the bytes read for it."""

    text: str
    counts: bool
    ends: bool
    size: int


@dataclasses.dataclass(frozen=True)
class Source:
    """`name` for messages, and the files in the order of the corpus; `root` is what the user named."""

    name: str
    root: pathlib.Path
    files: tuple[File, ...]

    @property
    def holds_tokens(self) -> bool:
        return self.files[0].format in TOKEN_FORMATS

    @property
    def has_fields(self) -> bool:
        return any(file.format in ("jsonl", "parquet") for file in self.files)


def find(name: str) -> Source:
    """The files behind a `data.source`, looked at but not read. Raises DataError if it is missing or empty."""
    if name == STDLIB:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _walk(root, LEFT_OUT_OF_STDLIB) if path.endswith(".py")] if root.is_dir() else []
        if not paths:
            raise DataError(f"data.source=stdlib: this Python has no sources in {root}: name a folder or a file")
        return Source(STDLIB, root, tuple(_stat(path, "python") for path in paths))
    root = pathlib.Path(name).expanduser()
    if not root.exists():
        raise DataError(f"data.source={name}: no such file or folder")
    root = root.resolve()
    paths = _walk(root, frozenset()) if root.is_dir() else [str(root)]
    if not paths:
        raise DataError(f"data.source={name}: the folder holds no files (those whose names begin with a dot do not count)")
    files = tuple(_stat(path, FORMATS.get(pathlib.Path(path).suffix.lower(), "text")) for path in paths)
    empty = [file.path for file in files if not file.size]
    if empty:
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        raise DataError(f"{empty[0]}:1: the file is empty{more}: remove it, or let its name begin with a dot")
    if root.is_dir() and (tokens := next((file.path for file in files if file.format in TOKEN_FORMATS), None)):
        raise DataError(f"{tokens}: a token file is no document: name it as data.source, or let its name begin with a dot")
    return Source(name, root, files)


def pieces(source: Source, fields: tuple[str, ...], prompt_only: tuple[str, ...]) -> Iterator[Piece]:
    """The documents of a source, piece by piece; a document may be cut anywhere, its last piece ends it.

    Args:
      fields: names of the fields of JSONL and Parquet whose text is joined, in this order.
      prompt_only: those of them whose tokens do not count in the loss.

    Raises DataError, with file and line (or row), for what cannot be read.
    """
    # Fields are encoded together where nothing tells them apart, and apart where the loss does: as a prompt is when text is generated.
    runs = [(not masked, tuple(names)) for masked, names in itertools.groupby(fields, lambda name: name in prompt_only)]
    for file in source.files:
        if file.format == "jsonl":
            yield from _jsonl(file, runs)
        elif file.format == "parquet":
            yield from _parquet(file, runs)
        elif file.format == "python":
            yield from _python(file)
        else:
            yield from _text(file)


def _walk(root: pathlib.Path, left_out: set[str] | frozenset[str]) -> list[str]:
    """Regular files below a folder in the order of their paths; links to folders are not followed."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        paths = (os.path.join(folder, name) for name in names if not name.startswith("."))
        found += [path for path in paths if os.path.isfile(path)]
    return sorted(found, key=lambda path: pathlib.PurePath(path).parts)


def _stat(path: str, format: str) -> File:
    stat = os.stat(path)
    return File(path, format, stat.st_size, stat.st_mtime_ns)


def _text(file: File) -> Iterator[Piece]:
    decoder, lines, kept, first = codecs.getincrementaldecoder("utf-8")(), 0, "", True
    with open(file.path, "rb") as stream:
        while True:
            block = stream.read(BLOCK)
            read = len(block)
            if first:
                block, first = block.removeprefix(BYTE_ORDER_MARK), False
            try:
                text = decoder.decode(block, final=not read)
            except UnicodeDecodeError as error:
                raise _not_utf8(file.path, lines + error.object[: error.start].count(b"\n") + 1, error) from error
            lines += text.count("\n")
            kept += text
            if not read:
                break
            cut = len(kept) if len(kept) > LONGEST else kept.rfind("\n") + 1
            yield Piece(kept[:cut], True, False, read)
            kept = kept[cut:]
    yield Piece(kept, True, True, 0)


def _python(file: File) -> Iterator[Piece]:
    try:
        text = pathlib.Path(file.path).read_bytes().removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError:
        return  # a few of the library's sources are in other encodings on purpose
    if text:
        yield Piece(text, True, True, file.size)


def _jsonl(file: File, runs: list[tuple[bool, tuple[str, ...]]]) -> Iterator[Piece]:
    with open(file.path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            where = f"{file.path}:{number}"
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.isspace() or not line:
                continue
            try:
                record = json.loads(line.decode().rstrip())
            except UnicodeDecodeError as error:
                raise _not_utf8(file.path, number, error) from error
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not valid JSON: {error.msg} (column {error.colno})") from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of nested lists
                raise DataError(f"{where}: JSON that cannot be read: {str(error).splitlines()[0]}") from error
            if not isinstance(record, dict):
                raise DataError(f"{where}: a line must be a JSON object, not {_kind(record)}")
            document = list(_document(record, runs, where, len(line)))
            # Only an escape can bring half of a surrogate pair into decoded UTF-8, and it has no encoding.
            if b"\\u" in line and any(SURROGATE.search(piece.text) for piece in document):
                raise DataError(f"{where}: half of a surrogate pair (\\ud800 to \\udfff), which is no character")
            yield from document


def _parquet(file: File, runs: list[tuple[bool, tuple[str, ...]]]) -> Iterator[Piece]:
    # Half a second to import, and needed by few: not at the top.
    import pyarrow
    import pyarrow.parquet

    fields = [name for _, names in runs for name in names]
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(file.path) as parquet:
            _check_columns(file.path, parquet.schema_arrow, fields)
            size = file.size // max(1, parquet.metadata.num_rows)
            for batch in parquet.iter_batches(batch_size=256, columns=list(dict.fromkeys(fields))):
                for record in batch.to_pylist():
                    row += 1
                    yield from _document(record, runs, f"{file.path}: row {row}", size)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file.path}: row {row + 1}: not readable as Parquet: {str(error).splitlines()[0]}") from error


def _check_columns(path: str, schema: Any, fields: list[str]) -> None:
    import pyarrow

    for name in fields:
        if name not in schema.names:
            raise DataError(f"{path}: row 1: no field {name!r} (there are {', '.join(schema.names)}): set data.text_fields")
        kind = schema.field(name).type
        value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(value) or pyarrow.types.is_large_string(value) or pyarrow.types.is_string_view(value)):
            raise DataError(f"{path}: row 1: field {name!r} is {kind}, not text")


def _document(record: dict[str, Any], runs: list[tuple[bool, tuple[str, ...]]], where: str, size: int) -> Iterator[Piece]:
    """The pieces of one record: one for each run of fields with the same mask. A record without any text is no document."""
    for _, names in runs:
        for name in names:
            if name not in record:
                raise DataError(f"{where}: no field {name!r} (there are {', '.join(map(repr, record)) or 'none'}): set data.text_fields")
            if not isinstance(record[name], str):
                raise DataError(f"{where}: field {name!r} is {_kind(record[name])}, not text")
    texts = ["".join(record[name] for name in names) for _, names in runs]
    if any(texts):
        for i, text in enumerate(texts):
            last = i == len(runs) - 1
            yield Piece(text, runs[i][0], last, size if last else 0)


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)


def _not_utf8(path: str, line: int, error: UnicodeDecodeError) -> DataError:
    byte = f"0x{error.object[error.start]:02x}"
    return DataError(f"{path}:{line}: not UTF-8 text ({byte}: {error.reason}): convert it, or let its name begin with a dot")
