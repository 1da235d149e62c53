"""The documents in a source's files, and errors with file and line for what cannot be read."""

import contextlib
import json
import os
import re
import socket

import pytest

from jaxtrain.config import sources
from jaxtrain.data.reading import documents as readers
from jaxtrain.data.reading.bad_records import Skipped
from jaxtrain.data.tokenizer import DataError


def pieces(source, fields=("text",), prompt_only=(), skipped=None):
    """The pieces of a source; what has to be decompressed as a whole lies beside it."""
    found = sources.find(str(source))
    if skipped is None:
        readers.check_files(found)
    return readers.pieces(
        found,
        fields,
        prompt_only,
        found.root if found.root.is_dir() else found.root.parent,
        skipped,
    )


def documents(source, fields=("text",), prompt_only=(), skipped=None):
    """[[(text, counts), …] per document]; neighbours with the same mask joined."""
    found, current = [], []
    for piece in pieces(source, fields, prompt_only, skipped):
        if current and current[-1][1] == piece.counts:
            current[-1] = (current[-1][0] + piece.text, piece.counts)
        elif piece.text:
            current.append((piece.text, piece.counts))
        if piece.ends:
            found.append(current)
            current = []
    assert not current
    return found


def texts(source, **arguments):
    return ["".join(text for text, _ in document) for document in documents(source, **arguments)]


def failure(source, **arguments):
    """The message, without the other way that it may name."""
    with pytest.raises(DataError) as caught:
        documents(source, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value).partition("use --config.data.bad_records=")[0]


def jsonl(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def test_text_is_one_document(write):
    assert texts(write("a.txt", "one\r\ntwo\n")) == ["one\r\ntwo\n"]
    assert texts(write("b.txt", b"\xef\xbb\xbfmarked")) == ["marked"]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_long_text_comes_in_pieces(write, monkeypatch, block):
    text = "naïve 漢字 🙂\nline two\n" * 5 + "no newline at the end 漢"
    monkeypatch.setattr(readers, "BLOCK", block)
    path = write("a.txt", text)
    found = list(pieces(path))
    assert "".join(piece.text for piece in found) == text
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]
    assert [piece.goes_on for piece in found] == [not piece.ends for piece in found]
    assert sum(piece.size for piece in found) == path.stat().st_size


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_text_that_is_not_utf8(write, monkeypatch, block):
    monkeypatch.setattr(readers, "BLOCK", block)
    path = write("a.txt", "first\nsecond 漢\n".encode() + b"third \xff here\n")
    assert failure(path).startswith(f"{path}:3: not UTF-8 text (0xff")
    cut = write("cut.txt", "first\n漢".encode()[:-1])
    assert failure(cut).startswith(f"{cut}:2: not UTF-8 text")


def test_folder_is_sorted_and_recursive(write, tmp_path):
    write("d/b.txt", "b")
    write("d/a/z.md", "z")
    write("d/a/two.jsonl", jsonl({"text": "j1"}, {"text": "j2"}))
    write("d/.hidden.bin", b"\xff")
    write("d/.git/x", b"\xff")
    write("d/noise", "n")
    assert texts(tmp_path / "d") == ["j1", "j2", "z", "b", "n"]


def test_folder_with_a_binary_file(write, tmp_path):
    write("d/a.txt", "fine")
    path = write("d/picture.png", b"\x89PNG\r\n\x1a\n\xff")
    assert failure(tmp_path / "d").startswith(f"{path}:1: not UTF-8 text (0x89")
    path.unlink()


def test_empty_files(write, tmp_path):
    path = write("e/empty.txt", "")
    assert failure(path).startswith(f"{path}:1: the file is empty: ")
    write("e/a.txt", "a")
    assert failure(tmp_path / "e").startswith(f"{path}:1: the file is empty: ")
    write("e/z.txt", "")
    assert failure(tmp_path / "e").startswith(f"{path}:1: the file is empty (and 1 more): ")


@pytest.fixture
def special(tmp_path):
    """special(name, kind) → the path of what is no file to read: a pipe, a socket or a link to
    nothing."""
    sockets = []

    def make(name, kind):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            sockets.append(socket.socket(socket.AF_UNIX))
            with contextlib.chdir(path.parent):  # its path may have no more than 107 bytes
                sockets[-1].bind(path.name)
        else:
            path.symlink_to("nothing")
        return path

    yield make
    for each in sockets:
        each.close()


@pytest.mark.parametrize(
    "kind, what",
    [
        ("pipe", "not a regular file"),
        ("socket", "not a regular file"),
        ("link", "a link to nothing"),
    ],
)
def test_folder_with_what_is_no_file(write, special, tmp_path, kind, what):
    """Said by name, and left out only where what cannot be read may be."""
    path = special("d/b", kind)
    assert failure(tmp_path / "d").startswith(
        f"{path}: {what}: remove it, or let its name begin with _ or ., or "
    )
    write("d/a.txt", "a")
    assert failure(tmp_path / "d").startswith(f"{path}: {what}: remove it")
    assert texts(tmp_path / "d", skipped=Skipped()) == ["a"]
    left_out = readers.unreadable_files(sources.find(str(tmp_path / "d")))
    assert left_out.count == 1 and left_out.places == [f"{path}: {what}"]
    special("d/c", kind)
    assert failure(tmp_path / "d").startswith(f"{path}: {what} (and 1 more): remove it")


def test_links_to_folders_are_not_followed(write, tmp_path):
    write("d/a.txt", "a")
    write("other/b.txt", "b")
    (tmp_path / "d" / "link").symlink_to(tmp_path / "other")
    assert texts(tmp_path / "d") == ["a"]
    assert sources.find(str(tmp_path / "d")).linked_folders == (str(tmp_path / "d" / "link"),)


def test_jsonl_fields_and_mask(write):
    path = write(
        "a.jsonl",
        jsonl(
            {"q": "Q1", "a": "A1", "x": 3},
            {"a": "A2", "q": "Q2"},
            {"q": "", "a": ""},
            {"q": "Q3", "a": ""},
        )
        + "\n  \n",
    )
    assert texts(path, fields=("q", "a")) == ["Q1A1", "Q2A2", "Q3"]
    assert documents(path, fields=("q", "a"), prompt_only=("q",)) == [
        [("Q1", False), ("A1", True)],
        [("Q2", False), ("A2", True)],
        [("Q3", False)],
    ]
    # The end of a document counts as its last field does, even where that is empty: "say nothing"
    # is an answer.
    last = [piece for piece in pieces(path, ("q", "a"), ("q",)) if piece.ends]
    assert [piece.counts for piece in last] == [True] * 3
    assert documents(path, fields=("a", "q"), prompt_only=("q", "a"))[0] == [("A1Q1", False)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', "not valid JSON: .*column 13"),
        (b"text", "not valid JSON"),
        (b'["text"]', "a line must be a JSON object, not a list"),
        (b"3", "a line must be a JSON object, not a number"),
        (
            b'{"body": "x", "id": 1}',
            "no field 'text' .there are 'body', 'id'.: set data.text_fields to fields of text",
        ),
        (b"{}", "no field 'text' .there are none."),
        (b'{"text": 3}', "field 'text' is a number, not text"),
        (b'{"text": null}', "field 'text' is null, not text"),
        (b'{"text": ["x"]}', "field 'text' is a list, not text"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"text": "\xff"}', "not UTF-8 text .0xff"),
        pytest.param(b"[" * 100_000, "JSON", id="nested"),
        pytest.param(b'{"n": ' + b"9" * 5000 + b"}", "JSON", id="digits"),
    ],
)
def test_jsonl_errors_name_file_and_line(write, line, message):
    path = write("a.jsonl", b'{"text": "fine"}\n\n' + line + b"\n")
    assert re.match(f"{path}:3: {message}", failure(path))


def test_jsonl_escapes(write):
    assert texts(write("a.jsonl", '{"text": "\\ud83d\\ude42 \\u6f22"}\n{"text": "r\u2028s"}')) == [
        "🙂 漢",
        "r\u2028s",
    ]


@pytest.fixture
def parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    def make(columns, **arguments):
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path, **arguments)
        return path

    return make


def test_parquet(parquet):
    import pyarrow

    rows = [f"text {i}" for i in range(1000)]
    path = parquet(
        {"id": list(range(1000)), "text": rows, "q": pyarrow.array(rows).dictionary_encode()},
        row_group_size=300,
    )
    assert texts(path) == rows
    assert documents(path, fields=("q", "text"), prompt_only=("q",))[7] == [
        ("text 7", False),
        ("text 7", True),
    ]


def test_parquet_errors_name_file_and_row(parquet, write):
    path = parquet({"id": list(range(400)), "text": ["x"] * 299 + [None] + ["x"] * 100})
    assert failure(path) == f"{path}: row 300: field 'text' is null, not text: "
    assert (
        failure(path, fields=("body",))
        == f"{path}: row 1: no field 'body' (there are 'id', 'text'): use "
        "--config.data.text_fields=text"
    )
    assert (
        failure(path, fields=("id",)) == f"{path}: row 1: field 'id' is a number, not text: use "
        "--config.data.text_fields=text"
    )
    damaged = write("b.parquet", path.read_bytes()[:-20])
    assert failure(damaged).startswith(f"{damaged}: row 1: not readable as Parquet: ")


def test_stdlib_leaves_out_what_is_no_text(write, tmp_path, monkeypatch):
    write("lib/a.py", "a = 1\n")
    write("lib/empty.py", "")
    write("lib/latin.py", b"# \xe9\n")
    write("lib/test/t.py", "t")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    assert texts("stdlib") == ["a = 1\n"]
