"""JSON text read as a stream: `JsonText` is a window of a file, `values` and `items` read the
values in it one after the other. A bad value is given as a BadRecord, and reading goes on behind
it.

Memory does not grow with the file: the window holds the value that is being read and what was read
ahead of it.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from jaxtrain.data.reading.bad_records import BadRecord
from jaxtrain.data.reading.compressed import BLOCK, Reader

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# what opens, closes or separates JSON values, and what ends a text
OUTSIDE, IN_QUOTES = re.compile(r'["\[\]{},]'), re.compile(r'"|\\.', re.DOTALL)
SPACES = re.compile(r"[ \t\r\n]*")
# A word or number that is cut at the end of the characters read so far is at most as long as this.
CUT = 16
DECODER = json.JSONDecoder()

# (file and line, text, decoded value) of a JSON value
JsonValue = tuple[str, str, Any] | BadRecord


class JsonText:
    """A window of a JSON text. `_at` is the place of the reader in it, and blocks of the file are
    appended when they are needed.

    Bytes that are not UTF-8 become lone surrogates, so that only their record is bad.
    """

    def __init__(self, stream: Reader, path: str):
        self._path, self._stream, self._line = path, stream, 1
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text, self._at, self._counted, self._ended = "", 0, 0, False
        self._before = 0  # characters of the current line that are no longer in the window
        if stream.peek(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK):
            stream.read(len(BYTE_ORDER_MARK))
        self._more()

    @property
    def where(self) -> str:
        """File and line of the reader's place."""
        self._count_lines()
        return f"{self._path}:{self._line}"

    @property
    def rest_of_line(self) -> str:
        """The rest of the current line, as far as the window has it."""
        end = self._text.find("\n", self._at)
        return self._text[self._at : end if end >= 0 else None]

    def peek(self) -> str:
        """Moves to the next character that is no space, and returns it; "" at the end."""
        while True:
            self._at = SPACES.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def skip(self) -> None:
        """Moves behind the next character."""
        self._at += 1

    def value(self) -> tuple[str, Any]:
        """Reads the JSON value that begins here: its text, and the decoded value.

        Raises BadRecord for text that is no value.
        """
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # The value may go on behind the window. A string has no line break, so one that
                # does not end is a long one.
                cut = (
                    error.msg.startswith("Unterminated string")
                    or error.pos >= len(self._text) - CUT
                )
                if not (cut and self._more()):
                    begin = self._text.rfind("\n", 0, error.pos) + 1  # of its line
                    column = error.pos - begin + 1 + (self._before if not begin else 0)
                    number = self._line + self._text.count("\n", self._counted, error.pos)
                    raise BadRecord(
                        f"{self._path}:{number}",
                        f"not valid JSON: {error.msg} (column {column})",
                    ) from error
            except (ValueError, RecursionError) as error:
                raise BadRecord(
                    self.where, f"JSON that cannot be read: {str(error).splitlines()[0]}"
                ) from error
            else:
                if end < len(self._text) or not self._more():
                    raw, self._at = self._text[self._at : end], end
                    return raw, value

    def entry(self) -> Iterator[JsonValue]:
        """Reads the JSON value that begins here. Behind a bad one it goes on where brackets and
        quotes say that it ends; raises BadRecord if they do not."""
        where = self.where
        try:
            yield where, *self.value()
            return
        except BadRecord as bad:
            yield bad
        depth, quoted = 0, False
        while True:
            match = (IN_QUOTES if quoted else OUTSIDE).search(self._text, self._at)
            if match is None:
                # half of an escape may stand at the end of the window
                self._at = len(self._text) - self._text.endswith("\\", self._at)
                if not self._more():
                    raise BadRecord(where, "a record that does not end: no bracket closes it")
                continue
            mark, self._at = match[0], match.end()
            quoted = quoted != (mark == '"')
            depth += (mark in "[{") - (mark in "]}")
            if depth < 0 or (not depth and mark in ",]}"):
                self._at -= depth < 0 or mark == ","  # it separates, or ends the list
                return

    def _count_lines(self) -> None:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at

    def _more(self) -> bool:
        """Doubles the text behind the reader's place, so that a long value is decoded few times.

        Returns False at the end of the file.
        """
        if self._ended:
            return False
        self._count_lines()
        line = self._text.rfind("\n", 0, self._at) + 1
        self._before = self._at - line + (self._before if not line else 0)
        rest = self._text[self._at :]
        block = self._stream.read(max(BLOCK, len(rest)))
        self._ended = not block
        self._text, self._at, self._counted = (
            rest + self._decoder.decode(block, final=not block),
            0,
            0,
        )
        return True


def values(text: JsonText) -> Iterator[JsonValue]:
    """Values one after the other. A mark that only lists and objects have is a bad one."""
    while mark := text.peek():
        yield from text.entry()
        if mark in ",]}":  # there was no value to move behind
            text.skip()


def items(text: JsonText) -> Iterator[JsonValue]:
    """The items of a list."""
    text.skip()
    following = text.peek()
    while following != "]":
        yield from text.entry()
        following = text.peek()
        if following == ",":
            text.skip()
            text.peek()
        elif following != "]":
            problem = (
                f"{following!r} stands where a comma or the list's end should"
                if following
                else "the list does not end: the file is cut short"
            )
            raise BadRecord(text.where, f"not valid JSON: {problem}")
    text.skip()
    if text.peek():
        raise BadRecord(text.where, "not valid JSON: something stands behind the end of the list")
