"""What the readers of both formats share: a file's text, a line's cells, and the error of a fault
in a file. No JAX here."""

import csv
import difflib
import os
import pathlib
from collections.abc import Sequence

from jaxtrain.schedule.table import ScheduleError

MOST_BYTES = 50_000_000  # of a file
WRITTEN = "a file that python -m jaxtrain.schedule --csv=FILE writes"


class FileError(ScheduleError):
    """A fault in a file. Its problem follows the file's name: ", line 3, column 'head': …"."""

    def __init__(self, rule: str, line: int | str = "", column: str = "", *, use: object = ""):
        where = f", line {line}" if line else ""
        super().__init__(f"{where}{f', column {column!r}' if column else ''}: {rule}", use)

    def of(self, path: str) -> ScheduleError:
        """This fault of the file at a path."""
        return ScheduleError(f"{path}{self.problem}", self.use)


def read_text(path: str) -> str:
    """A file's text, without the mark that some editors put before it, lines ended by one newline
    each."""
    if not path:
        raise ScheduleError("csv: names no file", use=f"csv:FILE, {WRITTEN}")
    try:
        # A pipe of the shell, `|` or `<(…)`, has somebody who writes into it. Another pipe, or a
        # device, would be read for ever.
        piped = (
            path.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/"))
            and pathlib.Path(path).is_fifo()
        )
        if os.path.exists(path) and not (os.path.isfile(path) or piped):
            raise OSError(0, "it is not a regular file")
        if not piped and os.path.exists(path) and os.path.getsize(path) > MOST_BYTES:
            raise OSError(0, f"it has more than {MOST_BYTES:,} bytes")
        data = pathlib.Path(path).read_bytes()
        text = data.decode("utf-8-sig")
        reason = "it is no text" if "\0" in text else ""
    except OSError as error:
        reason = error.strerror or type(error).__name__
    except UnicodeDecodeError:
        utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        reason = "it is text in UTF-16: save it as UTF-8" if utf16 else "it is no text in UTF-8"
    if reason:
        raise ScheduleError(f"{path!r} cannot be read ({reason})", use=WRITTEN)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def split_line(line: str, number: int) -> list[str]:
    """A line's cells, quotes taken off."""
    try:
        return [field.strip() for field in next(csv.reader([line], strict=True))]
    except (csv.Error, StopIteration):
        raise FileError("a quote is opened and not closed: leave quotes out", number) from None


def number_range(count: int) -> str:
    return f"0 to {count - 1}" if count > 1 else "0"


def nearest(name: str, known: Sequence[str]) -> str:
    return difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]
