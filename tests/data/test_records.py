"""Records: JSON in its forms, fields by path, and what becomes of records that cannot be read."""

import gzip
import json
import re

import pytest

from jaxtrain.config import sources
from jaxtrain.data.reading import documents, json_text
from jaxtrain.data.reading.bad_records import PLACES, SET_FIELDS, Skipped
from jaxtrain.data.tokenizer import DataError

BLOCKS = pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])


def texts(path, fields=("text",), skipped=None):
    """The text of each document of a file or folder."""
    found, text = [], ""
    source = sources.find(str(path))
    for piece in documents.pieces(source, fields, (), source.root.parent, skipped):
        text += piece.text
        if piece.ends:
            found, text = [*found, text], ""
    assert not text
    return found


def failure(path, fields=("text",)):
    """The message, without the other way that it names."""
    with pytest.raises(DataError) as caught:
        texts(path, fields)
    message, _, way = str(caught.value).partition("use --config.data.bad_records=")
    assert way in ("", "skip to leave out what cannot be read") and "\n" not in message
    return message


def left_out(path, fields=("text",)):
    """(texts, places of what was left out)."""
    skipped = Skipped()
    return texts(path, fields, skipped), skipped.places


# --- JSON -----------------------------------------------------------------------------------------

TEXTS = ["one", 'a "quoted" [list] {object}, \\ and \n', "naïve 漢字 🙂", "x" * 300, "last"]
RECORDS = [
    {"id": i, "text": text, "more": [1, {"deep": [None, True, -1.5e-7]}]}
    for i, text in enumerate(TEXTS)
]
FORMS = {
    "list": json.dumps(RECORDS),
    "list with line breaks": json.dumps(RECORDS, indent=2, ensure_ascii=False) + "\n",
    "list, an item a line": "[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]",
    "list without spaces": json.dumps(RECORDS, separators=(",", ":")),
    "lines": "\n".join(map(json.dumps, RECORDS)),
    "lines and blank ones": "\r\n \r\n"
    + "\r\n\r\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS)
    + "\r\n",
    "one after the other": "".join(map(json.dumps, RECORDS)),
    "one after the other, with line breaks": "\n".join(
        json.dumps(record, indent=1) for record in RECORDS
    ),
}


@BLOCKS
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_json(write, monkeypatch, form, block):
    monkeypatch.setattr(json_text, "BLOCK", block)
    assert texts(write("a.json", FORMS[form])) == TEXTS
    assert texts(write("b.JSON", b"\xef\xbb\xbf" + FORMS[form].encode())) == TEXTS
    assert texts(write("c.json.gz", gzip.compress(FORMS[form].encode()))) == TEXTS


@BLOCKS
def test_one_object(write, monkeypatch, block):
    monkeypatch.setattr(json_text, "BLOCK", block)
    for text in (
        json.dumps(RECORDS[0]),
        json.dumps(RECORDS[0], indent=4),
        '{"id": {"a": 1}\n, "text": "one"}',
    ):
        assert texts(write("a.json", text)) == ["one"]
    assert texts(write("b.json", "[]")) == texts(write("c.json", " [ \n ] ")) == []


@BLOCKS
@pytest.mark.parametrize(
    "text, message",
    [
        ('[{"text": "x"},\n {"text": 3}]', ":2: field 'text' is a number, not text"),
        ('[{"text": "x"},\n\n "y"]', ":3: a record must be a JSON object, not text"),
        (
            '[{"text": "x"},\n {"text": "y" "z"}]',
            ":2: not valid JSON: Expecting ',' delimiter (column 15): ",
        ),
        (
            '[{"text": "x"}\n {"text": "y"}]',
            ":2: not valid JSON: '{' stands where a comma or the list's end should",
        ),
        ('[{"text": "x"},\n]', ":2: not valid JSON: "),
        ('[{"text": "x"},\n{"text": "y', ":2: not valid JSON: Unterminated string"),
        ('[{"text": "x"}\n', ":2: not valid JSON: the list does not end: the file is cut short"),
        ('[{"text": "x"}]\n[1]', ":2: not valid JSON: something stands behind the end of the list"),
        ('[{"text": "x\ny"}]', ":1: not valid JSON: Invalid control character at (column 13)"),
        ('[{"text": "\\ud800"}]', ":1: half of a surrogate pair"),
        (b'[{"text": "x"},\n{"text": "\xff"}]', ":2: not UTF-8 text (0xff: invalid byte)"),
        (b'[{"text": "x", "other": "\xe6\xbc"}]', ":1: not UTF-8 text (0xe6: invalid byte)"),
        (
            '"text"',
            ":1: a JSON file must hold an object, a list of objects, or one object a line, "
            "not text",
        ),
        (
            "\n12",
            ":2: a JSON file must hold an object, a list of objects, or one object a line, "
            "not what begins with '1'",
        ),
        (
            " \n",
            ":2: a JSON file must hold an object, a list of objects, or one object a line, "
            "not nothing",
        ),
        ('{"text": "x"}\n{"text": "y"\n', ":2: not valid JSON: "),
        ('{"text": "x", }\n{"text": "y"}\n', ":1: not valid JSON: "),
        ('{"text": "x"\n,}', ":2: not valid JSON: "),
        (
            '{"data": [{"text": "x"}]}',
            ":1: no field 'text' (there are 'data'): set data.text_fields to fields of text",
        ),
        pytest.param("[" * 100_000, ":1: ", id="nested"),
        pytest.param('[{"n": ' + "9" * 5000 + "}]", ":1: JSON that cannot be read: ", id="digits"),
    ],
)
def test_json_that_cannot_be_read(write, monkeypatch, text, message, block):
    monkeypatch.setattr(json_text, "BLOCK", block)
    path = write("a.json", text)
    assert failure(path).startswith(f"{path}{message}")


def test_columns_and_lines_of_long_files(write, monkeypatch):
    monkeypatch.setattr(json_text, "BLOCK", 16)
    path = write("a.json", "[" + '{"text": "x"}, ' * 100 + '{"text" "y"}]')
    assert (
        f"{path}:1: not valid JSON: Expecting ':' delimiter (column {1 + 15 * 100 + 9})"
        in failure(path)
    )
    path = write("b.json", "[" + '{"text":\n "x"}, ' * 100 + '{"text" "y"}]')
    assert f"{path}:101: not valid JSON: Expecting ':' delimiter (column 16)" in failure(path)


def test_a_list_is_not_whole_in_memory(write):
    import tracemalloc

    path = write(
        "a.json",
        "[" + ",".join(json.dumps({"text": "some text " * 200}) for _ in range(10_000)) + "]",
    )
    tracemalloc.start()
    source = sources.find(str(path))
    count = sum(piece.ends for piece in documents.pieces(source, ("text",), (), source.root.parent))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 10_000 and path.stat().st_size > 20_000_000 and peak < 12_000_000


def test_a_malformed_item_is_not_looked_for_to_the_end(write, monkeypatch):
    """Of a large file no more is read than shows that an item is malformed."""
    path = write("a.json", '[{"text": x}, ' + '{"text": "y"},' * 500_000)
    read = []
    more = json_text.JsonText._more
    monkeypatch.setattr(json_text.JsonText, "_more", lambda text: read.append(1) or more(text))
    assert "not valid JSON" in failure(path)
    assert len(read) <= 4


# --- fields ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record, field, text",
    [
        ({"doc": {"text": "a"}}, "doc.text", "a"),
        ({"doc": {"text": "a"}, "doc.text": "b"}, "doc.text", "b"),
        ({"doc": {"a.b": "c"}}, "doc.a.b", "c"),
        ({"doc.a": {"b": "c"}, "doc": {"a": {"x": "d"}}}, "doc.a.b", "c"),
        ({"doc.a": {"x": "c"}, "doc": {"a": {"b": "d"}}}, "doc.a.b", "d"),
        ({"turns": [{"text": "q"}, {"text": "r"}]}, "turns.1.text", "r"),
        ({"turns": ["q", "r"]}, "turns.0", "q"),
        ({"0": "a"}, "0", "a"),
        ({"a": {"": "b"}}, "a.", "b"),
    ],
)
def test_fields_by_path(write, record, field, text):
    for name in ("a.jsonl", "a.json"):
        assert texts(write(name, json.dumps(record)), (field,)) == [text]


@pytest.mark.parametrize(
    "record, field, message",
    [
        (
            {"doc": {"body": "a", "id": 1}},
            "doc.text",
            "no field 'doc.text' (in 'doc' there are 'body', 'id'): use "
            "--config.data.text_fields=doc.body",
        ),
        (
            {"doc": None},
            "doc.text",
            "no field 'doc.text' (in 'doc' there are none: it is null): set data.text_fields to ",
        ),
        ({"doc": {"text": {}}}, "doc.text", "field 'doc.text' is an object, not text"),
        ({"doc": {}}, "doc.text", "no field 'doc.text' (in 'doc' there are none): set"),
        (
            {"a": {"b": {"c": "x"}}},
            "a.b.d",
            "no field 'a.b.d' (in 'a.b' there are 'c'): use --config.data.text_fields=a.b.c",
        ),
        ({"turns": ["a"]}, "turns.1", "no field 'turns.1' (in 'turns' there are '0'): set"),
        ({"turns": ["a"]}, "turns.-1", "no field 'turns.-1' (in 'turns' there are '0'): set"),
        (
            {"body": "x"},
            "text",
            "no field 'text' (there are 'body'): use --config.data.text_fields=body",
        ),
    ],
)
def test_fields_that_are_not_there(write, record, field, message):
    path = write("a.jsonl", json.dumps(record))
    assert failure(path, (field,)).startswith(f"{path}:1: {message}")


@pytest.mark.parametrize(
    "record, fields, masked, flags",
    [
        # the longest text, and the text of the most similar name
        ({"url": "u", "body": "a long text", "id": 7}, ("text",), (), "text_fields=body"),
        ({"url": "u", "Text": "a", "body": "longer"}, ("text",), (), "text_fields=Text"),
        ({"content": "a", "id": 7}, ("id",), (), "text_fields=content"),
        ({"doc": {"body": "b"}, "b": ""}, ("text",), (), "text_fields=doc.body"),
        # the fields that are right stay; so do lists, by their paths
        ({"q": "question", "answer": "a"}, ("q", "answr"), (), "text_fields=q,answer"),
        ({"t": [{"x": "q"}], "a": "b"}, ("t.0.x", "text"), (), "text_fields=t.0.x,a"),
        (
            {"question": "question", "answer": "a"},
            ("prompt", "answer"),
            ("prompt",),
            "text_fields=question,answer --config.data.loss_mask=question",
        ),
        ({"my field": "a"}, ("text",), (), "text_fields='my field'"),
        # nothing helps: a field has no text here, there is too little, or it is in a list alone
        ({"text": None, "url": "u"}, ("text",), (), ""),
        ({"a": "b"}, ("x", "y"), (), ""),
        ({"turns": [{"text": "a"}]}, ("text",), (), ""),
    ],
)
def test_fields_that_read_the_record_are_suggested(write, record, fields, masked, flags):
    path = write("a.jsonl", json.dumps(record))
    with pytest.raises(DataError) as caught:
        list(documents.pieces(sources.find(str(path)), fields, masked, path.parent))
    line = str(caught.value)
    assert line.endswith(f": use --config.data.{flags}") if flags else "text_fields=" not in line


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize("field", ["text", "messages"])
@pytest.mark.parametrize("parquet", [False, True])
def test_records_none_of_which_is_read_are_not_to_be_skipped(write, tmp_path, field, parquet):
    """Chats, say: to leave out what cannot be read would leave out all of them."""
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"messages": [CHAT] * 3}), path)
    path = path if parquet else write("a.jsonl", json.dumps({"messages": CHAT}))
    with pytest.raises(DataError) as caught:
        texts(path, (field,))
    assert str(caught.value).endswith(f": {SET_FIELDS}")


def test_fields_are_suggested_only_for_the_first_record(write, tmp_path):
    """A later one is the one that is wrong."""
    write("d/a.jsonl", '{"text": "a"}\n{"body": "b"}')
    assert failure(tmp_path / "d").endswith(f"(there are 'body'): {SET_FIELDS}, or ")
    write("d/a.jsonl", '{"text": "a"}')
    write("d/b.json", '{"body": "b"}')
    assert failure(tmp_path / "d").endswith(f"(there are 'body'): {SET_FIELDS}, or ")
    write("d/a.jsonl", '{"body": "b"}')
    assert failure(tmp_path / "d").endswith("use --config.data.text_fields=body")
    write("d/README.md", "a text has no fields")  # and comes before them
    assert failure(tmp_path / "d").endswith("use --config.data.text_fields=body")


def test_fields_of_parquet_by_path(tmp_path):
    import pyarrow
    import pyarrow.parquet

    columns = {
        "doc": [{"text": f"d{i}", "meta": {"title": f"t{i}"}} for i in range(5)],
        "turns": [[{"text": f"q{i}"}, {"text": f"r{i}"}] for i in range(5)],
        "doc.body": [f"b{i}" for i in range(5)],
        "id": list(range(5)),
    }
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    assert texts(path, ("doc.text", "doc.meta.title", "doc.body", "turns.1.text")) == [
        f"d{i}t{i}b{i}r{i}" for i in range(5)
    ]
    assert failure(path, ("doc.nothing",)).startswith(
        f"{path}: row 1: no field 'doc.nothing' (in 'doc' there are 'text', 'meta'): use "
        "--config.data.text_fields=doc.meta.title"
    )
    assert failure(path, ("doc.meta",)).startswith(
        f"{path}: row 1: field 'doc.meta' is an object, not text"
    )
    assert failure(path, ("id.x",)).startswith(
        f"{path}: row 1: no field 'id.x' (in 'id' there are none: it is a number): use "
        "--config.data.text_fields=doc.body"
    )
    assert "'turns.2.text'" in failure(path, ("turns.2.text",))
    whole = path.read_bytes()
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress(whole))
    assert texts(tmp_path / "b.parquet.gz", ("doc.text",)) == [f"d{i}" for i in range(5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "b.parquet.gz"]


# --- bad records ----------------------------------------------------------------------------------


def test_bad_lines_are_left_out(write):
    lines = [
        *(
            b'{"text": "a"}',
            b'{"text": "b"',
            b'{"text": 3}',
            b'{"body": "c"}',
            b'{"text": "\xff"}',
            b"",
            b'{"text": "\\ud800"}',
        ),
        *(b"[1]", b'{"text": "d"}'),
    ]
    for name in ("a.jsonl", "a.json"):
        path = write(name, b"\n".join(lines))
        found, places = left_out(path)
        assert found == ["a", "d"]
        assert [re.search(r":(\d+): (\w+)", place).groups() for place in places] == [
            *(("2", "not"), ("3", "field"), ("4", "no"), ("5", "not"), ("7", "half"), ("8", "a")),
        ]
    skipped = Skipped()
    texts(path, skipped=skipped)
    assert skipped.count == len(skipped.places) == 6
    said = skipped.lines("corpus", path)
    assert (
        said[0] == "data.bad_records=skip: 6 bad records of data.source=corpus left out:"
        and said[-1] == f"  and 1 more, which are in {path}"
        and len(said) == PLACES + 2
    )
    assert Skipped().lines("corpus", path) == []


def test_bad_items_of_a_list_are_left_out(write, monkeypatch):
    path = write(
        "a.json", b'[{"text": "a"}, 3, {"text": null}, {"x": "\xff", "text": "b"},\n{"text": "c"}]'
    )
    found, places = left_out(path)
    assert found == ["a", "c"] and len(places) == 3 and "not UTF-8 text (0xff" in places[2]


BAD_VALUES = (
    *('{"text": oops}', '{"text": "x" "y"}', '{"text": "\\x, }"}', '{"text": "}]\t"}', "oops"),
    *(
        '{"a": {"b": [1, "\\"]", nan]}}',
        '"\\q"',
        "[" * 3000 + "]" * 3000,
        '{"n": 1' + "0" * 5000 + "}",
    ),
)


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize("bad", BAD_VALUES, ids=range(len(BAD_VALUES)))
def test_a_bad_item_costs_no_other(write, monkeypatch, bad, block):
    """Its brackets and quotes say where it ends, wherever the blocks of the file end."""
    monkeypatch.setattr(json_text, "BLOCK", block)
    items = ['{"text": "a"}', bad, '{"text": "b, [c]"}', bad, '{"text": "d"}']
    found, places = left_out(write("a.json", "[" + ",\n".join(items) + "\n]"))
    assert found == ["a", "b, [c]", "d"]
    assert [re.search(r"json:(\d+): ", place)[1] for place in places] == ["2", "4"]
    if bad.startswith(("{", "[")):
        found, places = left_out(write("b.json", '{"text":\n"a"}' + "\n".join(items[1:])))
        assert found == ["a", "b, [c]", "d"] and len(places) == 2


@pytest.mark.parametrize("marks", [",", "]", "}", ",,", "] }"])
def test_marks_between_values_cost_no_other(write, marks):
    """Each is a bad record, and is moved behind."""
    found, places = left_out(write("a.json", f'{{\n"text": "a"}} {marks} {{"text": "b"}}\n'))
    assert found == ["a", "b"] and len(places) == len(marks.replace(" ", ""))


def test_what_is_lost_with_the_rest_of_a_file(write, tmp_path):
    """A line says so, and how much of it was read before."""
    lost = "; the rest of the file is lost, after 2 documents of it"
    for text in ('{"text": "c"', '{"text": "open', '{"text": ["c"}'):
        path = write("a.json", f'[{{"text": "a"}}, {{"text": "b"}},\n {text}, {{"text": "d"}}]')
        found, places = left_out(path)
        assert found == ["a", "b"] and places[0].startswith(f"{path}:2: not valid JSON: ")
        assert len(places) == 2 and places[1].endswith(lost) and "does not end: " in places[1]
    path = write("a.json", '[{"text": "a"} {"text": "b"}]')
    assert left_out(path)[1][0].endswith("; the rest of the file is lost, after 1 documents of it")
    content = gzip.compress(b"".join(b'{"text": "%d"}\n' % n for n in range(9999)))
    found, places = left_out(write("b.jsonl.gz", content[:9000]))
    lost = f"; the rest of the file is lost, after {len(found):,} documents of it"
    assert len(found) > 1000 and len(places) == 1 and places[0].endswith(lost)


def test_bad_files_are_left_out(write, tmp_path):
    write("d/a.txt", "fine")
    write("d/b.txt", b"first\n" * 1_000_000 + b"\xff")  # its beginning is no document either
    write("d/c.txt", "")
    write("d/d.jsonl.gz", gzip.compress(b'{"text": "g"}\n' * 1000)[:-9])
    write("d/e.parquet", "no such file")
    write("d/f.json", "3")
    write("d/g.txt.zst", b"\x28\xb5\x2f\xfd1234")
    write("d/h.txt", "end")
    found, places = left_out(tmp_path / "d")
    assert found[0] == "fine" and found[-1] == "end" and set(found[1:-1]) == {"g"}
    assert [place.removeprefix(f"{tmp_path}/d/")[0] for place in places] == [
        "b",
        "c",
        "d",
        "e",
        "f",
        "g",
    ]


@pytest.mark.parametrize("rows", [1, 256, 1000])
def test_values_that_are_no_text_cost_no_other_row(tmp_path, rows):
    """Parquet does not check that strings are UTF-8."""
    import pyarrow
    import pyarrow.parquet

    texts = [b"\xff" if row in (3, 300, 999) else b"%d" % row for row in range(1000)]
    column = pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=rows)
    found, places = left_out(path)
    assert found == [text.decode() for text in texts if text != b"\xff"]
    said = "not readable as Parquet: In column 0: Invalid: Invalid UTF8 sequence at string index 0"
    assert places == [f"{path}: row {row}: {said}" for row in (4, 301, 1000)]


def test_a_damaged_page_costs_its_row_group(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path, rows = tmp_path / "a.parquet", [f"row {row} of a text" for row in range(900)]
    options = {"row_group_size": 300, "write_page_checksum": True, "use_dictionary": False}
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path, **options)
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    content[group.data_page_offset + group.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    skipped = Skipped()
    assert texts(path, skipped=skipped) == rows[:300] + rows[600:] and skipped.count == 300
    (place,) = skipped.places
    assert place.startswith(f"{path}: rows 301 to 600: not readable as Parquet: ")
    assert failure(path).startswith(f"{path}: rows 301 to 600: not readable as Parquet: ")
    pyarrow.parquet.write_table(pyarrow.table({"body": rows}), path)
    skipped = Skipped()
    assert texts(path, skipped=skipped) == [] and skipped.count == 900
    assert skipped.places[-1] == f"{path}: row 900: no field 'text' (there are 'body')"


def test_bad_rows_are_left_out(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), path)
    assert left_out(path) == (["a", "b"], [f"{path}: row 2: field 'text' is null, not text"])
    assert failure(path) == f"{path}: row 2: field 'text' is null, not text: "
