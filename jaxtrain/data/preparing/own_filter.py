"""A filter of one's own (`data.filter`): a function of a document's text that says whether it is
kept. It runs once for each document, while the source is read.

    def long_enough(text: str) -> bool:
        return len(text) > 200
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from jaxtrain.config import ConfigError, one_line, own_code
from jaxtrain.data.reading.records import TextPiece

LONGEST = 1 << 25  # characters that a filter gets: the first ones of a longer document


def kept(pieces: Iterable[TextPiece], setting: str, left_out: Counter[str]) -> Iterator[TextPiece]:
    """The pieces of the documents that the function keeps; the others are counted as
    left_out["filter"].

    Raises ConfigError, with the file's line, for code that cannot be imported or raises an error.
    """
    try:
        function = own_code.load(setting)
    except own_code.OwnCodeError as error:
        raise ConfigError("data.filter", setting, str(error)) from None
    waiting: list[TextPiece] = []  # pieces of a document of which nothing is decided yet
    characters, keeps = 0, None
    for piece in pieces:
        waiting.append(piece)
        characters += len(piece.text)
        if keeps is None and (piece.ends or characters >= LONGEST):
            text = "".join(each.text for each in waiting)
            keeps = _decision(function, text[:LONGEST], setting)
            left_out["filter"] += not keeps
        if keeps is not None:
            yield from waiting if keeps else ()
            waiting.clear()
        if piece.ends:
            characters, keeps = 0, None


def _decision(function: Callable[[str], object], text: str, setting: str) -> bool:
    try:
        return bool(function(text))
    except (Exception, SystemExit) as error:
        inside = error.__traceback__ and error.__traceback__.tb_next
        file = inside.tb_frame.f_code.co_filename if inside else setting
        raises = f"{os.path.basename(file)}{own_code.line_in(file, error)} raises {error!r}"
        raise ConfigError(
            "data.filter",
            setting,
            f"fails: {one_line(raises)}, for the document that begins with {text[:40]!r}",
        ) from error
