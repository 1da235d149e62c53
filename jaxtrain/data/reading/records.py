"""Files of records → documents: JSONL, JSON and Parquet, and the fields that `data.text_fields`
names in them.

    JSONL    one record a line; blank lines are no records
    JSON     a list of records; or one record; or several, one after the other; or one a line, which
             is JSONL with another suffix
    Parquet  one record a row

A record is an object, and its text is the joined texts of its fields. A field's name may be a path:
`doc.text` is the field `text` of `doc`, and `turns.0.text` the field `text` of the first item of
the list `turns`. A field that is itself named `doc.text` has precedence. Everything is a stream: of
a list, only the current items are in memory.

Readers yield the pieces of documents. They yield a BadRecord instead of a record that cannot be
read, and raise one if the rest of the file cannot be read.
"""

import difflib
import json
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxtrain.config import suggestion
from jaxtrain.config.sources import File
from jaxtrain.data.reading.bad_records import SET_FIELDS, BadRecord
from jaxtrain.data.reading.compressed import BLOCK, Reader, is_compressed, unpack
from jaxtrain.data.reading.extents import lines_before
from jaxtrain.data.reading.json_text import BYTE_ORDER_MARK, JsonText, JsonValue, items, values

SURROGATE = re.compile("[\\ud800-\\udfff]")
SIMILAR = 0.75  # how alike a misspelt field and the field that is meant are at least
PARQUET_ROWS = 256  # rows of a Parquet file read at a time
MISSING = object()

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
        for piece in _documents(_lines(stream, file), "a line", runs, stream):
            # Lines before an extent are counted only where a line's number is needed.
            if file.first and isinstance(piece, BadRecord):
                piece = piece.lines_below(lines_before(file))
            yield piece


def _lines(stream: Reader, file: File) -> Iterator[JsonValue]:
    """The values of lines, without blank ones. Their numbers begin with the extent's first line."""
    path = file.path
    for number, line in enumerate(stream, 1):
        if number == 1 and not file.first:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield _parse(line, f"{path}:{number}")


def _parse(line: bytes, where: str) -> JsonValue:
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


def _documents(entries: Iterator[JsonValue], what: str, runs: Runs, stream: Reader) -> TextPieces:
    """The pieces of values that must be objects, and the errors of those that are bad. what: a
    value, in words"""
    for entry in entries:
        try:
            if isinstance(entry, BadRecord):
                raise entry
            where, text, record = entry
            text.encode()  # fails where a byte of the file was not UTF-8
            if not isinstance(record, dict):
                raise BadRecord(where, f"{what} must be a JSON object, not {_kind(record)}")
            document = list(_document(record, runs, where, stream.taken()))
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
        yield from _documents(entries, "a record", runs, stream)


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


# --- Parquet --------------------------------------------------------------------------------------


def read_parquet(file: File, runs: Runs, scratch: pathlib.Path) -> TextPieces:
    """The records of a Parquet file. A compressed one is decompressed into `scratch` before, since
    its parts are not read in their order."""
    if not is_compressed(file.path):
        yield from _rows(file, pathlib.Path(file.path), runs)
        return
    with tempfile.NamedTemporaryFile(dir=scratch) as plain:
        unpack(file.path, pathlib.Path(plain.name))
        yield from _rows(file, pathlib.Path(plain.name), runs)


def _rows(file: File, path: pathlib.Path, runs: Runs) -> TextPieces:
    """The records of a Parquet file, which lies at `path`, decompressed. If a page is damaged, the
    rest of its row group is lost."""
    # Half a second to import, and needed by few: not at the top.
    import pyarrow
    import pyarrow.parquet

    row = end = 0
    errors = (pyarrow.ArrowException, OSError)
    try:
        # A buffer: without one pyarrow reads a row group's columns into memory entirely.
        with pyarrow.parquet.ParquetFile(
            path, buffer_size=BLOCK, page_checksum_verification=True
        ) as parquet:
            columns = _columns(file.path, parquet, runs)
            size = file.size // max(1, parquet.metadata.num_rows)
            for group in range(file.last or parquet.num_row_groups):
                row, end = end, end + parquet.metadata.row_group(group).num_rows
                if group < file.first:
                    continue
                try:
                    for batch in parquet.iter_batches(PARQUET_ROWS, [group], columns):
                        for record in _records(batch):
                            row += 1
                            yield from _row(record, runs, f"{file.path}: row {row}", size)
                except errors as error:
                    yield _not_parquet(f"{file.path}: rows {row + 1} to {end}", error, end - row)
    except errors as error:
        raise _not_parquet(f"{file.path}: row {end + 1}", error) from error


def _records(batch: Any) -> list[Any]:
    """The records of a pyarrow.RecordBatch; if a value is none of its type, a batch for each."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError):
        return [batch.slice(row, 1) for row in range(len(batch))]


def _row(record: Any, runs: Runs, where: str, size: int) -> TextPieces:
    """The pieces of a record, or the error of a bad one."""
    try:
        (record,) = [record] if isinstance(record, dict) else record.to_pylist()
        yield from list(_document(record, runs, where, size))
    except BadRecord as bad:
        yield bad
    except (ValueError, OverflowError) as error:
        yield _not_parquet(where, error)


def _not_parquet(where: str, error: Exception, records: int = 1) -> BadRecord:
    """The error for content that pyarrow cannot read. Raises an error of the disk."""
    if isinstance(error, OSError) and error.errno:
        raise error
    return BadRecord(
        where, f"not readable as Parquet: {str(error).splitlines()[0]}", records=records
    )


def _columns(path: str, parquet: Any, runs: Runs) -> list[str]:
    """The columns of a pyarrow.parquet.ParquetFile that have the fields of the runs.

    Raises BadRecord for a field that is missing or not text.
    """
    import pyarrow

    fields = [name for _, names in runs for name in names]
    # the items of lists that a path names
    indices = {part for name in fields for part in name.split(".") if part.isdecimal()}

    def shape_of(kind: Any) -> Any:
        if pyarrow.types.is_struct(kind):
            return {
                kind.field(i).name: shape_of(kind.field(i).type) for i in range(kind.num_fields)
            }
        if (
            pyarrow.types.is_list(kind)
            or pyarrow.types.is_large_list(kind)
            or pyarrow.types.is_fixed_size_list(kind)
        ):
            return dict.fromkeys(indices, shape_of(kind.value_type))
        return kind

    def bad_field(what: str, fix: str) -> BadRecord:
        batch = next(parquet.iter_batches(batch_size=1), None)
        settings = _fitting_fields(batch.to_pylist()[0], runs) if batch else ""
        return BadRecord(f"{path}: row 1", what, fix, settings, parquet.metadata.num_rows)

    shape = {column.name: shape_of(column.type) for column in parquet.schema_arrow}
    columns: list[str] = []
    for name in fields:
        column = _field(shape, name)
        if column is MISSING:
            raise bad_field(_no_field(shape, name), SET_FIELDS)
        value = column.value_type if isinstance(column, pyarrow.DictionaryType) else column
        if not (
            value == pyarrow.string()
            or value == pyarrow.large_string()
            or value == pyarrow.string_view()
        ):
            raise bad_field(f"field {name!r} is {_kind(column)}, not text", SET_FIELDS)
        columns += [column for column in shape if name == column or name.startswith(f"{column}.")]
    return list(dict.fromkeys(columns))


# --- fields ---------------------------------------------------------------------------------------


def _document(record: dict[str, Any], runs: Runs, where: str, size: int) -> Iterator[TextPiece]:
    """The pieces of one record: one for each run of fields with the same mask. A record without any
    text is no document."""
    texts = ["".join(_text_of(record, name, runs, where) for name in names) for _, names in runs]
    if any(texts):
        for i, (text, (counts, _)) in enumerate(zip(texts, runs, strict=True), 1):
            yield TextPiece(text, counts, i == len(runs), size if i == len(runs) else 0)


def _text_of(record: dict[str, Any], name: str, runs: Runs, where: str) -> str:
    """The text of a field. Raises BadRecord if it is missing or not text."""
    value = _field(record, name)
    if isinstance(value, str):
        return value
    settings = _fitting_fields(record, runs)
    if value is MISSING:
        raise BadRecord(where, _no_field(record, name), SET_FIELDS, settings)
    fix = SET_FIELDS if isinstance(value, list | dict) else ""
    raise BadRecord(where, f"field {name!r} is {_kind(value)}, not text", fix, settings)


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
    while True:
        inner = _inner(value)
        head = next(
            (head for head in sorted(inner, key=len, reverse=True) if name.startswith(f"{head}.")),
            None,
        )
        if head is None:
            break
        path, value, name = f"{path}{head}.", inner[head], name[len(head) + 1 :]
    fields_present = ", ".join(map(repr, inner)) or (
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
        list: "a list",
        dict: "an object",
        type(None): "null",
    }
    return kinds.get(type(value), str(value))
