"""A filter of one's own."""

import collections

import pytest

from jaxtrain.config import ConfigError
from jaxtrain.data.preparing import own_filter
from jaxtrain.data.reading.records import TextPiece

FILTER = """
import re
def long(text):
    return len(text) > 4
def fails(text):
    return 1 / (len(text) - 3)
def nothing(text):
    pass
def begins(text):
    return text == "abcdef"
has_digit = re.compile(r"\\d").search
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILTER)
    return tmp_path / "mine.py"


def pieces_of(*documents):
    return [
        TextPiece(text, True, i == len(texts) - 1, 1)
        for texts in documents
        for i, text in enumerate(texts)
    ]


def test_documents_are_kept_with_all_their_pieces(file):
    pieces = pieces_of(["abc"], ["ab", "cd", "e"], ["", "x"], ["abcdef"])
    left_out = collections.Counter()
    kept = list(own_filter.kept(pieces, "mine.py:long", left_out))
    assert kept == [pieces[1], pieces[2], pieces[3], pieces[6]]
    assert left_out == {"filter": 2}


def test_a_filter_gets_the_beginning_of_a_long_document(file, monkeypatch):
    monkeypatch.setattr(own_filter, "LONGEST", 6)
    pieces = pieces_of(["abcd", "efgh", "ijk"], ["12345", "678"], ["abc"])
    left_out = collections.Counter()
    assert list(own_filter.kept(pieces, "mine.py:begins", left_out)) == pieces[:3]
    assert left_out == {"filter": 2}


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "mine.py:fails",
            "data.filter='mine.py:fails' fails: mine.py, line 6, raises "
            "ZeroDivisionError('division by zero'), for the document that begins with 'abc'",
        ),
        (
            "mine.py:nothing",
            "data.filter='mine.py:nothing' returns None, which is neither True nor False, for the "
            "document that begins with 'abc'",
        ),
        (
            "mine.py:has_digit",
            "data.filter='mine.py:has_digit' returns None, which is neither True nor False, for "
            "the document that begins with 'abc'",
        ),
        (
            "mine.py:re",
            "data.filter='mine.py:re' fails: mine.py:re raises TypeError(\"'module' object is not "
            "callable\"), for the document that begins with 'abc'",
        ),
        (
            "mine.py:lon",
            "data.filter='mine.py:lon' names lon, which mine.py does not define: it has long",
        ),
    ],
)
def test_one_line_about_a_filter_that_does_not_work(file, name, message):
    with pytest.raises(ConfigError) as error:
        list(own_filter.kept(pieces_of(["abc"]), name, collections.Counter()))
    assert str(error.value) == message
