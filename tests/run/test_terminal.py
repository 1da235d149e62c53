"""A line that is drawn again in its place: where, how often, how wide, and what is left of it."""

import io

from jaxtrain.run import terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(stream: io.StringIO, shown: bool = True) -> str:
    line = terminal.Line(stream, shown)
    line.clear()
    for now, text in ((0.0, "first"), (0.05, "too soon"), (0.2, "x" * 100)):
        line.draw(text, now)
    line.clear()
    line.clear()
    return stream.getvalue()


def test_a_line_on_a_terminal_leaves_nothing():
    assert drawn(Terminal()) == f"\rfirst\x1b[K\r{'x' * (terminal.COLUMNS - 1)}\x1b[K\r\x1b[K"


def test_elsewhere_there_is_none(monkeypatch):
    assert drawn(io.StringIO()) == drawn(Terminal(), shown=False) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert drawn(Terminal()) == ""
