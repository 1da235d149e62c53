"""Files of records → documents: JSONL, JSON, Parquet and Arrow, and the fields that
`data.text_fields` names in them.

    JSONL    one record a line; blank lines are no records
    JSON     a list of records; or one record; or several, one after the other; or one a line, which
             is JSONL with another suffix
    Parquet  one record a row
    Arrow    one record a row: a stream (datasets writes these) or a file with a footer

A record is an object, and its text is the joined texts of its fields. A field's name may be a path:
`doc.text` is the field `text` of `doc`, and `turns.0.text` the field `text` of the first item of
the list `turns`. A field that is itself named `doc.text` has precedence. Everything is a stream: of
a list, only the current items are in memory.

Readers yield the pieces of documents. They yield a BadRecord instead of a record that cannot be
read, and raise one if the rest of the file cannot be read.
"""

import contextlib
import difflib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxtrain.config import addresses, suggestion
from jaxtrain.config.sources import File
from jaxtrain.data.reading.bad_records import SET_FIELDS, BadRecord, DamagedFile
from jaxtrain.data.reading.compressed import BLOCK, Reader, is_compressed, open_input, plain_file
from jaxtrain.data.reading.extents import lines_before
from jaxtrain.data.reading.json_text import BYTE_ORDER_MARK, JsonText, JsonValue, items, values
from jaxtrain.data.stores.ranges import PART, StoreStream

SURROGATE = re.compile("[\\ud800-\\udfff]")
SIMILAR = 0.75  # how alike a misspelt field and the field that is meant are at least
ROWS = 256  # rows of a Parquet or Arrow file that are turned into records at a time
ARROW_FILE = b"ARROW1"  # at both ends of an Arrow file with a footer
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # the last bytes of an Arrow stream
MISSING = object()
# what reading a damaged file raises, beside pyarrow's own errors
UNREADABLE = (OSError, MemoryError, OverflowError, UnicodeDecodeError)

# (whether their tokens count in the loss, names of fields)
Runs = list[tuple[bool, tuple[str, ...]]]


class TextPiece(NamedTuple):
    """A part of a document.

    counts: True if its tokens count in the loss.
    ends: True if the document ends here.
    size: bytes of the file that were read for it.
    goes_on: True if its text goes on in the next piece, with which it is encoded as one.
    file: the number of its file among those of the source.
    """

    text: str
    counts: bool
    ends: bool
    size: int
    goes_on: bool = False
    file: int = 0


TextPieces = Iterator[TextPiece | BadRecord]


# --- JSONL ----------------------------------------------------------------------------------------


def read_jsonl(file: File, runs: Runs, scratch: pathlib.Path) -> TextPieces:
    """The records of a JSONL file, or of an extent of one."""
    with Reader(file.path, file.first, file.last) as stream:
        for piece in documents_of(_lines(stream, file), "a line", runs, stream.taken):
            # Lines before an extent are counted only where a line's number is needed.
            if file.first and isinstance(piece, BadRecord):
                line = int(piece.where.rpartition(":")[2]) + lines_before(file)
                piece = BadRecord(f"{file.path}:{line}", piece.what, piece.fix, piece.settings)
            yield piece


def _lines(stream: Reader, file: File) -> Iterator[JsonValue]:
    """The values of lines, without blank ones. Their numbers begin with the extent's first line."""
    for number, line in enumerate(stream, 1):
        if number == 1 and not file.first:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield parse(line, f"{file.path}:{number}")


def parse(line: bytes, where: str) -> JsonValue:
    """The JSON value of a line, or the error of a bad one."""
    try:
        text = line.decode().rstrip()
        return where, text, json.loads(text)
    except UnicodeDecodeError as error:
        return not_utf8(where, error.object[error.start], error.reason)
    except json.JSONDecodeError as error:
        return BadRecord(where, f"not valid JSON: {error.msg} (column {error.colno})")
    # a number of thousands of digits, thousands of nested lists
    except (ValueError, RecursionError) as error:
        return BadRecord(where, f"JSON that cannot be read: {str(error).splitlines()[0]}")


def documents_of(
    entries: Iterator[JsonValue], what: str, runs: Runs, taken: Callable[[], int]
) -> TextPieces:
    """The pieces of values that must be objects, and the errors of those that are bad.

    what: a value, in words; taken: returns the bytes of the file that were read since its last
    call."""
    for entry in entries:
        try:
            if isinstance(entry, BadRecord):
                raise entry
            where, text, record = entry
            text.encode()  # fails where a byte of the file was not UTF-8
            if not isinstance(record, dict):
                raise BadRecord(where, f"{what} must be a JSON object, not {_kind(record)}")
            document = _document(record, runs, where, taken())
            # Half of a surrogate pair has no encoding, and only an escape can bring it into
            # decoded UTF-8.
            if "\\u" in text and any(SURROGATE.search(piece.text) for piece in document):
                raise BadRecord(
                    where, "half of a surrogate pair (\\ud800 to \\udfff), which is no character"
                )
        except UnicodeEncodeError as error:
            # JsonText has decoded a byte that is not UTF-8 to a lone surrogate.
            yield not_utf8(where, ord(text[error.start]) - 0xDC00, "invalid byte")
        except BadRecord as bad:
            yield bad
        else:
            yield from document


def not_utf8(where: str, byte: int, reason: str) -> BadRecord:
    """The error for a byte that is not UTF-8."""
    return BadRecord(
        where,
        f"not UTF-8 text (0x{byte:02x}: {reason})",
        "convert it, or let the file's name begin with _ or .",
    )


# --- JSON -----------------------------------------------------------------------------------------


def read_json(file: File, runs: Runs, scratch: pathlib.Path) -> TextPieces:
    """The records of a JSON file: a list of them, or one, or several, one after the other."""
    if _has_records_as_lines(file.path):
        yield from read_jsonl(file, runs, scratch)
        return
    with Reader(file.path) as stream:
        text = JsonText(stream, file.path)
        opening = text.peek()
        if opening not in ("[", "{"):
            kind = {"": "nothing", '"': "text"}.get(opening, f"what begins with {opening!r}")
            raise BadRecord(
                text.where,
                "a JSON file must hold an object, a list of objects, or one object a line, "
                f"not {kind}",
            )
        entries = items(text) if opening == "[" else values(text)
        yield from documents_of(entries, "a record", runs, stream.taken)


def _has_records_as_lines(path: str) -> bool:
    """True if a JSON file has one object a line: its first line is an object, or ends like one."""
    with Reader(path) as stream:
        text = JsonText(stream, path)
        if text.peek() != "{":
            return False
        line = text.rest_of_line
        try:
            raw, _ = text.value()
        except BadRecord:
            return line.rstrip().endswith("}")
        return "\n" not in raw and not text.rest_of_line.strip()


# --- Parquet and Arrow ----------------------------------------------------------------------------


def read_parquet(file: File, runs: Runs, scratch: pathlib.Path) -> TextPieces:
    """The records of a Parquet file. A compressed one is decompressed into `scratch` before, since
    its parts are not read in their order. If a page is damaged, the rest of its row group is
    lost."""
    # Half a second to import, and needed by few: not at the top.
    import pyarrow.parquet

    is_stored = addresses.is_address(file.path) and not is_compressed(file.path)
    opened: contextlib.AbstractContextManager[Any] = (
        StoreStream(file.path, ahead=0) if is_stored else plain_file(file.path, scratch)
    )
    row = end = 0
    errors = (pyarrow.ArrowException, *UNREADABLE)
    try:
        # By default pyarrow reads the columns of a row group into memory entirely. In a store the
        # buffer is the size of a request.
        with (
            opened as content,
            pyarrow.parquet.ParquetFile(
                content,
                pre_buffer=False,
                buffer_size=PART if is_stored else BLOCK,
                page_checksum_verification=True,
            ) as parquet,
        ):
            columns = _columns(parquet.schema_arrow, runs)
            size = file.size // max(1, parquet.metadata.num_rows)
            for group in range(file.last or parquet.num_row_groups):
                row, end = end, end + parquet.metadata.row_group(group).num_rows
                if group < file.first:
                    continue
                try:
                    for batch in parquet.iter_batches(ROWS, [group], columns):
                        rows = _rows(batch, file.path, row, "Parquet")
                        yield from documents_of(rows, "a row", runs, lambda: size)
                        row += len(batch)
                except errors as error:
                    yield unreadable(
                        f"{file.path}: rows {row + 1} to {end}", "Parquet", error, end - row
                    )
    except errors as error:
        raise unreadable(f"{file.path}: row {end + 1}", "Parquet", error) from error


def read_arrow(file: File, runs: Runs, scratch: pathlib.Path) -> TextPieces:
    """The records of an Arrow stream, or of a file with a footer, which is a stream between two
    marks. If it is damaged, the rest of the stream is lost."""
    import pyarrow

    row = 0
    if not is_compressed(file.path) and not _has_arrow_end(file.path):
        yield DamagedFile(
            file.path,
            "it lacks the mark of its end, as if it were cut short or still written",
            "get the file again",
        )
    try:
        with Reader(file.path) as stream:
            has_footer = stream.peek(len(ARROW_FILE)).startswith(ARROW_FILE)
            if has_footer:
                stream.read(len(ARROW_FILE) + 2)  # two zeros follow
            reader = pyarrow.ipc.open_stream(stream)
            columns = _columns(reader.schema, runs)
            for batch in reader:
                for first in range(0, len(batch), ROWS):
                    few = batch.select(columns).slice(first, ROWS)
                    entries = _rows(few, file.path, row, "Arrow")
                    yield from documents_of(entries, "a row", runs, stream.taken)
                    row += len(few)
            if not has_footer and stream.read(1):
                yield DamagedFile(f"{file.path}: row {row + 1}", "bytes follow the stream's end")
    except (pyarrow.ArrowException, *UNREADABLE) as error:
        raise unreadable(f"{file.path}: row {row + 1}", "Arrow", error) from error


def _has_arrow_end(path: str) -> bool:
    """True if a file ends as an Arrow stream or file does, or as a stream of the time before
    version 0.15, whose messages begin with their length."""
    with open_input(path, ahead=0) as file:
        head = file.read(len(ARROW_FILE))
        file.seek(-min(len(ARROW_END), file.seek(0, os.SEEK_END)), os.SEEK_END)
        tail = file.read(len(ARROW_END))
    if head == ARROW_FILE:
        return tail.endswith(ARROW_FILE)
    return tail == ARROW_END or not head.startswith(ARROW_END[:4])


def _rows(batch: Any, path: str, before: int, format: str) -> Iterator[JsonValue]:
    """The rows of a pyarrow.RecordBatch, which follow so many of their file, as records, and the
    errors of those with a value that is none of its type."""
    try:
        batch.validate(full=True)  # without it a damaged offset would be followed
        records = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if len(batch) == 1:
            yield unreadable(f"{path}: row {before + 1}", format, error)
            return
        for row in range(len(batch)):
            yield from _rows(batch.slice(row, 1), path, before + row, format)
    else:
        for number, record in enumerate(records, before + 1):
            yield f"{path}: row {number}", "", record


def unreadable(where: str, format: str, error: Exception, records: int = 1) -> DamagedFile:
    """The error for content that a format's library cannot read. Raises an error of the disk."""
    if isinstance(error, OSError) and error.errno:
        raise error
    reason = (str(error).splitlines() or ["it ends too early"])[0]
    return DamagedFile(where, f"not readable as {format}: {reason}", records=records)


def _columns(schema: Any, runs: Runs) -> list[str]:
    """The columns of a pyarrow.Schema that have the fields of the runs. If one is missing or cannot
    be text, all columns, among which the error of the first record names those that are."""
    import pyarrow

    columns: list[str] = []
    for name in (name for _, names in runs for name in names):
        matches = [one for one in schema if name == one.name or name.startswith(f"{one.name}.")]
        if not matches or pyarrow.types.is_primitive(matches[0].type):
            return schema.names
        columns += [one.name for one in matches]
    return list(dict.fromkeys(columns))


# --- fields ---------------------------------------------------------------------------------------


def _document(record: dict[str, Any], runs: Runs, where: str, size: int) -> list[TextPiece]:
    """The pieces of one record: one for each run of fields with the same mask. A record without any
    text is no document."""
    texts = ["".join([_text_of(record, name, runs, where) for name in names]) for _, names in runs]
    if not any(texts):
        return []
    *before, last = zip(texts, runs, strict=True)
    return [
        *(TextPiece(text, counts, False, 0) for text, (counts, _) in before),
        TextPiece(last[0], last[1][0], True, size),
    ]


def _text_of(record: dict[str, Any], name: str, runs: Runs, where: str) -> str:
    """The text of a field. Raises BadRecord if it is missing or not text."""
    value = record.get(name)  # nearly always a text: the other way takes longer
    if not isinstance(value, str):
        value = _field(record, name)
    if isinstance(value, str):
        return value
    settings = _fitting_fields(record, runs)
    if value is MISSING:
        raise BadRecord(where, _no_field(record, name), SET_FIELDS, settings)
    raise BadRecord(
        where,
        f"field {name!r} is {_kind(value)}, not text",
        SET_FIELDS if isinstance(value, list | dict) else "",
        settings,
    )


def _fitting_fields(record: dict[str, Any], runs: Runs) -> str:
    """The flags with which a record is read: the field of the most similar name, else the one with
    the longest text, takes the place of each that is missing or not text. "" if no flags help."""
    texts = dict(_texts_in(record))
    fields = {name: counts for counts, names in runs for name in names}
    unused = sorted(texts.keys() - fields, key=lambda path: (-len(texts[path]), path))
    chosen = {}
    for name in fields:
        chosen[name] = name
        if not isinstance(_field(record, name), str | None):
            similar = difflib.get_close_matches(name, unused, 1, SIMILAR) or unused[:1]
            if not similar:
                return ""
            chosen[name] = similar[0]
            unused.remove(similar[0])
    changes = {"data.text_fields": tuple(chosen.values())}
    if masked := tuple(chosen[name] for name, counts in fields.items() if not counts):
        changes["data.loss_mask"] = masked
    return suggestion(changes) if [*chosen] != [*chosen.values()] else ""


def _texts_in(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The texts of a record: the path of each, and the text. Lists are left out, for another
    record's may be shorter."""
    if isinstance(value, str):
        yield path, value
    for name, inner in value.items() if isinstance(value, dict) else ():
        if name:
            yield from _texts_in(inner, f"{path}.{name}" if path else name)


def _field(value: Any, name: str) -> Any:
    """The value of a field of a record, or the type of a column of a schema, by its name or path.

    MISSING if there is no such field.
    """
    inner = _inner(value)
    if name in inner:
        return inner[name]
    for at in reversed([match.start() for match in re.finditer(r"\.", name)]):
        if (
            name[:at] in inner
            and (value_inside := _field(inner[name[:at]], name[at + 1 :])) is not MISSING
        ):
            return value_inside
    return MISSING


def _inner(value: Any) -> dict[str, Any]:
    """The values inside an object or a list, by name."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        return {str(i): item for i, item in enumerate(value)}
    return {}


def _no_field(value: Any, name: str) -> str:
    """The message about a missing field: the part of its path that exists, and the fields there."""
    path = ""
    while heads := [head for head in _inner(value) if name.startswith(f"{head}.")]:
        head = max(heads, key=len)
        path, value, name = f"{path}{head}.", _inner(value)[head], name[len(head) + 1 :]
    fields_present = ", ".join(map(repr, _inner(value))) or (
        "none" if isinstance(value, dict | list) else f"none: it is {_kind(value)}"
    )
    inside = f"in {path.removesuffix('.')!r} " if path else ""
    return f"no field {path + name!r} ({inside}there are {fields_present})"


def _kind(value: Any) -> str:
    """The JSON kind of a value, in words."""
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        bytes: "bytes",
        list: "a list",
        dict: "an object",
        type(None): "null",
    }
    return kinds.get(type(value), f"a {type(value).__name__}")
