"""What is said of a search while it lasts: a line in place on a terminal, lines elsewhere, nothing
where it is short."""

import io

from jaxtrain.run.search_progress import SearchProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(stream: io.StringIO, seconds: list[float], shown: bool = True) -> str:
    """What a search says that begins at 0 and tells at these times."""
    clock = iter([0.0, *seconds])
    with SearchProgress("tables", stream, shown, lambda: next(clock)) as progress:
        for i in range(len(seconds)):
            progress(f"order {i}", i / len(seconds))
    return stream.getvalue()


def test_lines_every_few_seconds_where_there_is_no_terminal():
    text = said(io.StringIO(), [0.1, 4.9, 5.0, 6.0, 9.9, 10.1, 80.0, 81.0])
    assert (
        text
        == "tables: 25%, order 2, 0:05\ntables: 62%, order 5, 0:10\ntables: 75%, order 6, 1:20\n"
    )


def test_one_line_in_place_on_a_terminal_and_none_left():
    text = said(Terminal(), [0.5, 1.0, 1.05, 70.0])
    drawn = text.removesuffix("\r\x1b[K").split("\r")
    assert drawn[0] == "" and text.endswith("\x1b[K\r\x1b[K") and "\n" not in text
    assert [line.removesuffix("\x1b[K") for line in drawn[1:]] == [
        "tables [#####...............]  25% order 1, 0:01",
        "tables [###############.....]  75% order 3, 1:10",
    ]


def test_nothing_where_it_is_short_or_another_process_speaks():
    assert (
        said(io.StringIO(), [0.1, 4.0])
        == said(Terminal(), [0.1, 0.9])
        == said(io.StringIO(), [10.0, 20.0], shown=False)
        == ""
    )
