"""ArrayRecord files, which Grain reads → documents, a record each.

The first record of a file says what all of its records are: JSON objects; tf.Example messages, of
which features of bytes are fields; or plain UTF-8 text, which is the field `text`.
"""

import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.config.sources import File
from jaxtrain.data.reading.bad_records import BadRecord
from jaxtrain.data.reading.compressed import plain_file
from jaxtrain.data.reading.json_text import JsonValue
from jaxtrain.data.reading.records import (
    Runs,
    TextPieces,
    documents_of,
    not_utf8,
    parse,
    unreadable,
)

SEQUENTIAL = "readahead_buffer_size:0,max_parallelism:0"  # one record at a time, in this thread
JSON_OBJECT = re.compile(rb'\s*\{\s*["}]')
# tensorflow/core/example/{example,feature}.proto; a map is a list of entries
EXAMPLE_PROTO = """
name: "example.proto" package: "tensorflow"
message_type { name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "Feature"
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: "BytesList" } }
message_type { name: "Entry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Feature" } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Entry" } }
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
"""


def read_records(file: File, runs: Runs, scratch: pathlib.Path) -> TextPieces:
    """The records of an ArrayRecord file. After a damaged one the rest of the file is lost."""
    with plain_file(file.path, scratch) as path:
        records = _records(file.path, path)
        first = next(records, None)
        if first is None:
            return
        parse_record: Callable[[bytes, str], JsonValue] = parse
        if not JSON_OBJECT.match(first):
            parse_record = _parse_example if _fields(first) else _parse_text
        entries = (
            parse_record(record, f"{file.path}: record {number}")
            for number, record in enumerate(itertools.chain([first], records), 1)
        )
        # The bytes that records take in the file are not known: all count with the first document.
        sizes = itertools.chain([file.size], itertools.repeat(0))
        yield from documents_of(entries, "a record", runs, lambda: next(sizes))


def _records(name: str, path: pathlib.Path) -> Iterator[bytes]:
    """The records of the file at `path`, which messages call `name`."""
    from array_record.python.array_record_module import ArrayRecordReader

    number, count = 0, 1  # a file that cannot be opened has at least one
    try:
        reader = ArrayRecordReader(str(path), SEQUENTIAL)
        count = reader.num_records() if reader.ok() else 1
        while number < count:
            yield reader.read()
            number += 1
        reader.close()
    except (RuntimeError, ValueError, IndexError, MemoryError) as error:
        raise unreadable(
            f"{name}: record {number + 1}", "ArrayRecord", error, count - number
        ) from error


def _parse_example(record: bytes, where: str) -> JsonValue:
    """The fields of a tf.Example message, or the error of another record."""
    fields = _fields(record)
    return BadRecord(where, "no tf.Example message") if fields is None else (where, "", fields)


def _parse_text(record: bytes, where: str) -> JsonValue:
    """The field `text` of a record that is plain text, or the error of one that is not UTF-8."""
    try:
        return where, "", {"text": record.decode()}
    except UnicodeDecodeError as error:
        return not_utf8(where, error.object[error.start], error.reason)


def _fields(record: bytes) -> dict[str, Any] | None:
    """The features of a tf.Example: a text, or a list of what it has in place of one; None for
    another message, and for one without features."""
    from google.protobuf.message import DecodeError

    try:
        example = _example().FromString(record)
    except DecodeError:
        return None
    fields: dict[str, Any] = {}
    for feature in example.features.feature:
        values = [_text(value) for value in feature.value.bytes_list.value]
        fields[feature.key] = values[0] if len(values) == 1 else values
    return fields or None


def _text(value: bytes) -> str | bytes:
    """A value as text, if it is UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


@functools.cache
def _example() -> Any:
    """The class of tf.Example messages."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(EXAMPLE_PROTO, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))
