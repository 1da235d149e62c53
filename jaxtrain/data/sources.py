"""The files of `data.source`, and the documents in them.

    folder   every text, JSON, JSONL and Parquet file below it, in the order of their paths; names
             that begin with a dot are left out, links to folders are reported and not followed; a
             pipe, a socket or a dangling link is a file that cannot be read
    text     one document a file; any suffix except those below
    .jsonl   one document a line, of the fields `data.text_fields`, joined in that order; blank
             lines are no documents (.ndjson too)
    .json    one document for each object of a list, or one a line, or one alone, of the same fields
    .parquet one document a record, of the same fields
    stdlib   the sources of the Python standard library: its *.py files without tests, one document
             each
    .bin .npy  tokens: only their names are read here, tokens.py reads the files

Each file may be compressed (`.jsonl.gz`, `.txt.zst`, …; compressed.py). Everything is a stream: a
long text comes in pieces cut after a line, so no file is ever in memory entirely. Records are in
records.py; encoding, the end of documents and the prepared corpus in tokens.py.
"""

import codecs
import dataclasses
import itertools
import os
import pathlib
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence

from jaxtrain.data.bad_records import BadRecord, Skipped
from jaxtrain.data.compressed import Reader, is_compressed, unpack, without_suffix
from jaxtrain.data.records import (
    BYTE_ORDER_MARK,
    File,
    Piece,
    Pieces,
    Runs,
    not_utf8,
    read_json,
    read_jsonl,
    read_parquet,
)
from jaxtrain.data.tokenizer import DataError

STDLIB = "stdlib"
BLOCK = 1 << 20  # bytes of a text read, and encoded, at a time
LONGEST = 8 << 20  # characters of a text without a newline after which it is cut all the same
TOKEN_FORMATS = ("bin", "npy")
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".bin": "bin",
    ".npy": "npy",
}
# of files read from end to end
RECORD_READERS: dict[str, Callable[[File, Runs], Pieces]] = {"jsonl": read_jsonl, "json": read_json}
RECORD_FORMATS = {*RECORD_READERS, "parquet"}  # those with fields
LEFT_OUT_OF_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Source:
    """The files of a `data.source`.

    name: the source as messages name it.
    root: the folder or file that the user named.
    files: the files in the order of the corpus.
    unreadable: paths below a folder that are no regular files: pipes, sockets, devices, links to
        nothing.
    linked_folders: links to folders, which are not followed.
    """

    name: str
    root: pathlib.Path
    files: tuple[File, ...]
    unreadable: tuple[str, ...] = ()
    linked_folders: tuple[str, ...] = ()

    @property
    def holds_tokens(self) -> bool:
        return self.files[0].format in TOKEN_FORMATS

    @property
    def has_fields(self) -> bool:
        return any(file.format in RECORD_FORMATS for file in self.files)


def find(name: str) -> Source:
    """The files of a `data.source`, which are not read. Raises DataError if there are none."""
    if name == STDLIB:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        # nothing is below a folder that does not exist
        paths = [path for path in _walk(root, LEFT_OUT_OF_STDLIB)[0] if path.endswith(".py")]
        if not paths:
            raise DataError(
                f"data.source=stdlib: this Python has no sources in {root}: name a folder or a file"
            )
        return Source(STDLIB, root, tuple(_stat(path, "python") for path in paths))
    root = pathlib.Path(name).expanduser()
    if not root.exists():
        raise DataError(f"data.source={name}: no such file or folder")
    if not root.is_dir() and not root.is_file():  # a pipe would be waited for, a device has no end
        raise DataError(
            f"data.source={name}: not a regular file or a folder: write what it gives into a "
            "file, and name that"
        )
    root = root.resolve()
    paths, unreadable, linked = _walk(root, frozenset()) if root.is_dir() else ([str(root)], [], [])
    if not paths:
        what = (
            "links to folders, which are not followed, do"
            if linked
            else "those whose names begin with a dot do"
        )
        raise (
            unreadable_file(unreadable).refusal()
            if unreadable
            else DataError(f"data.source={name}: the folder holds no files ({what} not count)")
        )
    files = tuple(
        _stat(path, FORMATS.get(pathlib.Path(without_suffix(path)).suffix.lower(), "text"))
        for path in paths
    )
    if root.is_dir() and (
        tokens := next((file.path for file in files if file.format in TOKEN_FORMATS), None)
    ):
        raise DataError(
            f"{tokens}: a token file is no document: name it as data.source, or let its name "
            "begin with a dot"
        )
    return Source(name, root, files, tuple(unreadable), tuple(linked))


def check_files(source: Source) -> None:
    """Raises DataError if a file is empty or no regular file, before any file is read."""
    if source.unreadable:
        raise unreadable_file(source.unreadable).refusal()
    empty = [file.path for file in source.files if not file.size and file.format != "python"]
    if empty:
        raise _is_empty(empty[0], _others(empty)).refusal()


def pieces(
    source: Source,
    fields: tuple[str, ...],
    prompt_only: tuple[str, ...],
    scratch: pathlib.Path,
    skipped: Skipped | None = None,
) -> Iterator[Piece]:
    """The documents of a source, piece by piece; a document may be cut anywhere, and its last piece
    ends it.

    Args:
      fields: names or paths of the fields of JSON, JSONL and Parquet whose text is joined, in this
        order.
      prompt_only: the fields among them whose tokens do not count in the loss.
      scratch: a folder for files that have to be decompressed entirely.
      skipped: collects the records that cannot be read; None: the first of them is raised.

    Raises DataError, with file and line (or row of Parquet), for what cannot be read.
    """
    # A prompt is encoded separately from the text that follows it, as when text is generated;
    # fields of one kind are encoded together.
    runs = [
        (not masked, tuple(names))
        for masked, names in itertools.groupby(fields, lambda name: name in prompt_only)
    ]
    if skipped is not None:
        for path in source.unreadable:
            skipped.add(unreadable_file([path]))
    for file in source.files:
        try:
            for piece in _read(file, runs, scratch, complete=skipped is not None):
                if isinstance(piece, Piece):
                    yield piece
                elif skipped is None:
                    raise piece
                else:
                    skipped.add(piece)
        except BadRecord as bad:
            if skipped is None:
                raise bad.refusal() from bad
            skipped.add(bad)


def _read(file: File, runs: Runs, scratch: pathlib.Path, complete: bool) -> Pieces:
    """The pieces of a file. `complete`: pieces of a text only if all of it can be read."""
    if file.format in RECORD_READERS:
        return RECORD_READERS[file.format](file, runs)
    if file.format == "parquet":
        return _parquet(file, runs, scratch)
    if file.format == "python":
        return _python(file)
    if complete:
        for _ in _text(file):  # raises the error of its end before the text's first piece
            pass
    return _text(file)


def _walk(
    root: pathlib.Path, left_out: set[str] | frozenset[str]
) -> tuple[list[str], list[str], list[str]]:
    """Below a folder: the regular files, the paths that cannot be read, and the links to folders,
    which are not followed; each in the order of their paths."""
    files: list[str] = []
    others: list[str] = []
    linked: list[str] = []
    unlisted = lambda error: others.append(error.filename)
    for folder, folders, names in os.walk(root, onerror=unlisted):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        below = [os.path.join(folder, name) for name in names if not name.startswith(".")]
        files += [path for path in below if os.path.isfile(path)]
        others.extend(path for path in below if not os.path.isfile(path))
        linked += filter(os.path.islink, (os.path.join(folder, name) for name in folders))
    by_parts = lambda path: pathlib.PurePath(path).parts
    return sorted(files, key=by_parts), sorted(others, key=by_parts), sorted(linked, key=by_parts)


def unreadable_file(paths: Sequence[str]) -> BadRecord:
    """The error for paths that are no files to read: the first one, and the number of others."""
    what = "not a regular file"
    if not os.path.exists(paths[0]):
        what = "a link to nothing" if os.path.islink(paths[0]) else "it has gone"
    elif os.path.isdir(paths[0]):
        what = "a folder that may not be read"
    return BadRecord(
        paths[0], f"{what}{_others(paths)}", "remove it, or let its name begin with a dot"
    )


def _stat(path: str, format: str) -> File:
    stat = os.stat(path)
    return File(path, format, stat.st_size, stat.st_mtime_ns)


def _text(file: File) -> Iterator[Piece]:
    """The pieces of a text file: one document, cut after lines."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines, characters, rest = 0, 0, ""
    with Reader(file.path) as stream:
        block = stream.read(BLOCK).removeprefix(BYTE_ORDER_MARK)
        while True:
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line = lines + error.object[: error.start].count(b"\n") + 1
                raise not_utf8(
                    f"{file.path}:{line}", error.object[error.start], error.reason
                ) from error
            lines += text.count("\n")
            characters += len(text)
            rest += text
            if not block:
                break
            cut = len(rest) if len(rest) > LONGEST else rest.rfind("\n") + 1
            yield Piece(rest[:cut], True, False, stream.taken())
            rest = rest[cut:]
            block = stream.read(BLOCK)
    if not characters:
        raise _is_empty(file.path)
    yield Piece(rest, True, True, 0)


def _others(paths: Sequence[str]) -> str:
    return f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""


def _is_empty(path: str, others: str = "") -> BadRecord:
    return BadRecord(
        f"{path}:1", f"the file is empty{others}", "remove it, or let its name begin with a dot"
    )


def _parquet(file: File, runs: Runs, scratch: pathlib.Path) -> Pieces:
    """The pieces of a Parquet file. A compressed one is decompressed into `scratch` first, since
    its parts are not read in their order."""
    if not is_compressed(file.path):
        yield from read_parquet(file, pathlib.Path(file.path), runs)
        return
    with tempfile.NamedTemporaryFile(dir=scratch) as plain:
        unpack(file.path, pathlib.Path(plain.name))
        yield from read_parquet(file, pathlib.Path(plain.name), runs)


def _python(file: File) -> Iterator[Piece]:
    try:
        text = pathlib.Path(file.path).read_bytes().removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError:
        return  # a few of the library's sources are in other encodings on purpose
    if text:
        yield Piece(text, True, True, file.size)
