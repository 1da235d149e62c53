"""ArrayRecord files: what their records are, the documents, and what is said of bad ones."""

import gzip
import json

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from jaxtrain.config import sources
from jaxtrain.data.preparing.prepare import prepare
from jaxtrain.data.reading import documents
from jaxtrain.data.reading.array_records import _example
from jaxtrain.data.reading.bad_records import Skipped
from jaxtrain.data.tokenizer import DataError
from jaxtrain.run.exit_status import ExitStatus


@pytest.fixture
def write_records(tmp_path):
    """write_records(records, …) → the path of an ArrayRecord file."""

    def make(*records, name="a.array_record-00000-of-00001", options="group_size:1"):
        writer = ArrayRecordWriter(str(tmp_path / name), options)
        for record in records:
            writer.write(record if isinstance(record, bytes) else record.encode())
        writer.close()
        return tmp_path / name

    return make


def example(**features):
    """A tf.Example with features of bytes."""
    message = _example()()
    for name, values in features.items():
        entry = message.features.feature.add(key=name)
        entry.value.bytes_list.value.extend([values] if isinstance(values, bytes) else values)
    return message.SerializeToString()


def texts(path, fields=("text",), skipped=None):
    pieces = documents.pieces(
        sources.find(str(path)), fields, (), path.parent, skipped if skipped is not None else None
    )
    joined, done = "", []
    for piece in pieces:
        joined += piece.text
        if piece.ends:
            done.append(joined)
            joined = ""
    return done


def failure(path, fields=("text",)):
    with pytest.raises(DataError) as caught:
        texts(path, fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("options", ["group_size:1", "group_size:3,uncompressed"])
@pytest.mark.parametrize(
    "records",
    [
        ['{"text": "a漢"}', ' {"text": "", "x": 1}', '{"text": "b"}', '{"text": "c\\n"}'],
        [example(text=text, image=b"\xff\xfe") for text in ("a漢".encode(), b"", b"b", b"c\n")],
        ["a漢", "", "b", "c\n"],
    ],
    ids=["json", "example", "text"],
)
def test_records_are_documents(write_records, records, options):
    path = write_records(*records, options=options)
    assert texts(path) == ["a漢", "b", "c\n"]
    path.with_name("b.array_record.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert texts(path.with_name("b.array_record.gz")) == ["a漢", "b", "c\n"]


def test_fields_of_records(write_records, config):
    path = write_records(example(text=b"ab", title=b"T"), example(text=b"c", title=b"U"))
    corpus = prepare(config(source=path, text_fields=("title", "text"), loss_mask=("title",)), 257)
    assert corpus.tokens.tolist() == [*b"Tab", 256, *b"Uc", 256]
    assert corpus.mask.tolist() == [0, 1, 1, 1, 0, 1, 1]
    path = write_records("plain", name="b.array_record")
    with pytest.raises(DataError, match=r"no field 'body' .*use --config.data.text_fields=text$"):
        prepare(config(source=path, text_fields=("body",)), 257)
    with pytest.raises(DataError, match="data.tokenizer=none is for token files, and"):
        prepare(config(source=path, tokenizer="none"), 257)


def test_bad_records(write_records):
    good = json.dumps({"text": "good"})
    path = write_records(good, "{", "[1]", '{"text": 3}', b'{"text": "\xff"}', good)
    skipped = Skipped()
    assert texts(path, skipped=skipped) == ["good", "good"] and skipped.count == 4
    assert skipped.places[0].startswith(f"{path}: record 2: not valid JSON")
    assert skipped.places[1].startswith(f"{path}: record 3: a record must be a JSON object")
    path = write_records(example(text=b"good"), b"no proto", example(text=[b"a", b"b"]))
    skipped = Skipped()
    assert texts(path, skipped=skipped) == ["good"]
    assert skipped.places[0] == f"{path}: record 2: no tf.Example message"
    assert skipped.places[1].startswith(f"{path}: record 3: field 'text' is a list, not text")
    path = write_records("good", b"\xff", "good")
    assert texts(path, skipped=(skipped := Skipped())) == ["good", "good"] and skipped.count == 1


def test_a_shard_without_records_is_empty(write_records):
    path = write_records('{"body": "a"}', name="0.array_record")
    write_records(name="1.array_record")
    assert texts(path, ("body",)) == texts(path.parent / "*", ("body",)) == ["a"]


def test_fields_that_fit_are_named(write_records):
    path = write_records(example(body=b"long", image=b"\xff\xfe"))
    assert failure(path).endswith("use --config.data.text_fields=body")
    assert "field 'image' is bytes, not text" in failure(path, ("image",))


def test_a_damaged_file_loses_its_rest(write_records):
    """Every byte is under a checksum of the format."""
    records = [json.dumps({"text": f"{i} " * 2000}) for i in range(100)]
    path = write_records(*records, options="group_size:1,uncompressed")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    skipped = Skipped()
    done = texts(path, skipped=skipped)
    assert 0 < len(done) < 100 and done == [json.loads(r)["text"] for r in records[: len(done)]]
    assert skipped.count == 100 - len(done)
    message = failure(path)
    assert message.startswith(f"{path}: record {len(done) + 1}: not readable as ArrayRecord: ")
    for damaged in (content[:-5], content[:70_000], b"text\n" * 1000):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="record 1: not readable as ArrayRecord: ") as caught:
            texts(path)
        assert caught.value.status == ExitStatus.BAD_CONFIG
