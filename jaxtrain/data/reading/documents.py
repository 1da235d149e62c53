"""The documents of a source's files: pieces of text, in the order of the corpus.

Which files a source has, and the reader of each format, stands in config/sources.py. Readers of
texts are here, those of records in records.py; token_files.py maps token files. Everything is a
stream: a text comes in pieces, cut anywhere, so no file is ever in memory entirely. Encoding, the
end of documents and the prepared corpus are in preparing/prepare.py.
"""

import codecs
import itertools
import os
import pathlib
import pkgutil
from collections.abc import Iterator, Sequence

from jaxtrain.config.groups.formats import FORMATS
from jaxtrain.config.sources import File, Source
from jaxtrain.data.reading.bad_records import BadRecord, DamagedFile, Skipped
from jaxtrain.data.reading.compressed import BLOCK, Reader
from jaxtrain.data.reading.json_text import BYTE_ORDER_MARK
from jaxtrain.data.reading.records import Runs, TextPiece, TextPieces, not_utf8

RENAME = "remove it, or let its name begin with _ or ."


def check_files(source: Source) -> None:
    """Raises DataError if a file is empty or no regular file, before any file is read."""
    if source.unreadable:
        raise unreadable_file(source.unreadable).refusal(any_read=False)
    empty = [file.path for file in source.files if not file.size and file.format != "python"]
    if empty:
        raise _is_empty(empty[0], _others(empty)).refusal(any_read=False)


def pieces(
    source: Source,
    fields: tuple[str, ...],
    prompt_only: tuple[str, ...],
    scratch: pathlib.Path,
    skipped: Skipped | None = None,
    any_read: bool = False,
) -> Iterator[TextPiece]:
    """The documents of a source, piece by piece; a document may be cut anywhere, and its last piece
    ends it.

    Args:
      fields: names or paths of the fields of records whose text is joined, in this order.
      prompt_only: the fields among them whose tokens do not count in the loss.
      scratch: a folder for files that have to be decompressed entirely.
      skipped: collects the records that cannot be read; None: the first of them is raised.
      any_read: records of this source were read before.

    Raises DataError, with file and line (or row of Parquet), for what cannot be read.
    """
    # A prompt is encoded separately from the text that follows it, as when text is generated;
    # fields of one kind are encoded together.
    runs = [
        (not masked, tuple(names))
        for masked, names in itertools.groupby(fields, lambda name: name in prompt_only)
    ]
    for number, file in enumerate(source.files):
        count = 0  # of the file's documents
        format = FORMATS[file.format]
        reader = pkgutil.resolve_name(f"jaxtrain.data.reading.{format.reader}")
        try:
            if skipped is not None and format.holds == "text":
                for _ in reader(file, runs, scratch):  # raises the error of its end, if it has one
                    pass
            for piece in reader(file, runs, scratch):
                if isinstance(piece, TextPiece):
                    any_read = any_read or format.holds == "records"
                    count += piece.ends
                    yield piece._replace(file=number) if number else piece
                elif skipped is None:
                    raise piece
                else:
                    skipped.add(piece, number, file.path)
        except BadRecord as bad:
            if skipped is None:
                raise bad.refusal(any_read) from bad
            if format.holds == "records":
                bad.place += f"; the rest of the file is lost, after {count:,} documents of it"
            skipped.add(bad, number, file.path)


def unreadable_files(source: Source) -> Skipped:
    """The paths of a source that are no files to read, as records that are left out."""
    skipped = Skipped()
    for path in source.unreadable:
        skipped.add(unreadable_file([path]))
    return skipped


def unreadable_file(paths: Sequence[str]) -> BadRecord:
    """The error for paths that are no files to read: the first one, and the number of others."""
    what = "not a regular file"
    if not os.path.exists(paths[0]):
        what = "a link to nothing" if os.path.islink(paths[0]) else "it has gone"
    elif os.path.isdir(paths[0]):
        what = "a folder that may not be read"
    return DamagedFile(paths[0], f"{what}{_others(paths)}", RENAME)


def read_text(file: File, runs: Runs, scratch: pathlib.Path) -> TextPieces:
    """The pieces of a text file: one document, whose text goes on from piece to piece."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines, characters = 0, 0
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
            if not block:
                break
            yield TextPiece(text, True, False, stream.taken(), goes_on=True)
            block = stream.read(BLOCK)
    if not characters:
        raise _is_empty(file.path)
    yield TextPiece("", True, True, 0)


def _others(paths: Sequence[str]) -> str:
    return f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""


def _is_empty(path: str, others: str = "") -> BadRecord:
    return DamagedFile(f"{path}:1", f"the file is empty{others}", RENAME)


def read_python(file: File, runs: Runs, scratch: pathlib.Path) -> TextPieces:
    """The piece of a source of the library; none for one that is empty, or not UTF-8."""
    try:
        text = pathlib.Path(file.path).read_bytes().removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError:
        return  # a few of the library's sources are in other encodings on purpose
    if text:
        yield TextPiece(text, True, True, file.size)
