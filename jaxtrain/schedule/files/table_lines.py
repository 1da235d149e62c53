"""The contents of a table's CSV file, as they stand in it: settings, header, cells. table_csv.py
describes the format and makes a table of them. Begin with `parse`.

Every fault names its line and column, and where a slip can be guessed (a semicolon for a comma, a
lower-case op) what would be right. No JAX here.
"""

import dataclasses
import difflib
import re
from typing import Any, NamedTuple

from jaxtrain.schedule.files.csv_text import FileError, nearest, split_line
from jaxtrain.schedule.table import Op, Permute, counted

COLUMNS = ("permute", "head", "embed", "embed_gradient")
CELL = re.compile(r"([FRBW])(\d{1,6})\.(\d{1,6})", re.ASCII)


class LocalCell(NamedTuple):
    """A cell as the file has it."""

    op: int
    local_unit: int
    microbatch: int


class Setting(NamedTuple):
    """The value of a setting, and its line in the file (0: it is not in the file)."""

    value: str
    line: int = 0


@dataclasses.dataclass
class Lines:
    """The contents of a file.

    settings: of the comments, by name
    header:   names of the columns, `stages` stages before the others
    numbers, cells: of each tick, its line in the file and its cells, by stage
    overlapped: (tick, stage) → the B of an overlapped cell, whose F is in `cells`
    columns:  of each column that is no stage, its values by tick
    """

    settings: dict[str, Setting]
    header: list[str]
    stages: int
    numbers: list[int]
    cells: list[list[LocalCell | None]]
    overlapped: dict[tuple[int, int], LocalCell]
    columns: dict[str, list[int]]


def parse(text: str) -> Lines:
    """The contents of a file's text. Raises FileError."""
    # Lines are numbered from 1, as editors do. Comments and empty lines may stand anywhere; the
    # first other line is the header.
    settings: dict[str, Setting] = {}
    table_lines: list[tuple[int, list[str]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("#"):
            _read_settings(line, number, settings)
        elif line.strip():
            table_lines.append((number, split_line(line, number)))
    if not table_lines:
        raise FileError(
            f"the file {'has comments alone' if text.strip() else 'is empty'}: write a header line "
            "such as 'stage 0,stage 1' and one line for each tick of the table"
        )
    (header_line, header), ticks = table_lines[0], table_lines[1:]
    stages = _stages(header, header_line)
    if not ticks:
        raise FileError(
            "no ticks follow the header: write one line for each tick of the table, such as "
            "'F0.0,'",
            header_line,
        )
    lines = Lines(settings, header, stages, [], [], {}, {name: [] for name in header[stages:]})
    for number, fields in ticks:
        if len(fields) != len(header):
            raise FileError(
                f"{counted(len(fields), 'cell')} under a header of {len(header)}",
                number,
                use="one for each column, empty or not",
            )
        lines.numbers.append(number)
        cells: list[LocalCell | None] = []
        for stage, (field, column) in enumerate(zip(fields, header[:stages], strict=False)):
            cell, *overlapped = _cells(field, number, column)
            cells.append(cell)
            for b in overlapped:
                lines.overlapped[len(lines.cells), stage] = b
        lines.cells.append(cells)
        for name, field in zip(lines.columns, fields[stages:], strict=True):
            lines.columns[name].append(_column_value(name, field, number))
    return lines


SETTINGS = ("name", "place", "chunk", "vocabulary")


def _read_settings(line: str, number: int, settings: dict[str, Setting]) -> None:
    """Adds the settings of a comment, each with its line; anything else is a remark."""
    # "# name=mine place=v, my own schedule" sets name and place. A word that is nearly a setting is
    # a slip ("plase=v"), any other ("see=paper") a remark.
    for name, value in re.findall(r"(\w+)=(\S*)", line):
        near = difflib.get_close_matches(name.lower(), SETTINGS, n=1, cutoff=0.75)
        if name in SETTINGS:
            known = settings.setdefault(name, Setting(value, number))
            if known.value != value:
                raise FileError(
                    f"{name}={value!r} is another value than in line {known.line}: leave one of "
                    "them out",
                    number,
                )
        elif near:
            raise FileError(f"the setting {name!r} is unknown", number, use=near[0])


SEPARATORS = {";": "a semicolon", "\t": "a tab", "|": "a bar", " ": "a space"}


def _separator(text: str) -> str | None:
    """The name of what may separate the cells of a text without commas."""
    return next((name for mark, name in SEPARATORS.items() if mark in text), None)


def _stages(header: list[str], number: int) -> int:
    """The number of stages of a header."""
    # In order: another separator, no header at all, unknown or repeated columns, no stage, stages
    # in another order. The earliest of these that applies explains the line best.
    text = ",".join(header)
    if "," not in text and (separator := _separator(text)):
        cell = rf"(stage ?\d+|\d+|[A-Za-z]\d+\.\d+|{'|'.join(COLUMNS)})"
        if separator != "a space" or re.fullmatch(rf"{cell}(\s+{cell})+", text):
            raise FileError(f"the cells are separated by {separator}", number, use="commas")
    if any(CELL.fullmatch(name) for name in header):
        example = ",".join(f"stage {stage}" for stage in range(len(header)))
        raise FileError(
            f"a tick stands where the header should: write a line such as {example!r} before it",
            number,
        )
    of_stages = [
        name
        for name in header
        if name not in COLUMNS
        and not difflib.get_close_matches(name.lower(), COLUMNS, n=1, cutoff=0.7)
    ]
    stages = len(of_stages)
    # "stage 0,stage 1" or "0,1": both are read, "stage 0,1" is not
    bare_numbers = all(name.isdecimal() for name in header if name not in COLUMNS)
    known = [str(stage) if bare_numbers else f"stage {stage}" for stage in range(stages)]
    for index, name in enumerate(header):
        if name not in known and name not in COLUMNS:
            raise _unknown_column(header, index, known, number)
        if name in header[:index]:
            raise FileError(f"column {name!r} stands twice", number, use="each once")
    if not stages:
        raise FileError("the header has no stage", number, use="'stage 0' first")
    if header[:stages] != known:
        raise FileError("the stages do not come first and in order", number, use=",".join(known))
    return stages


def _unknown_column(header: list[str], index: int, known: list[str], number: int) -> FileError:
    """The error of a header's name at an index; `known`: the names of as many stages as it has."""
    name = header[index]
    if index < len(known):
        fix = known[index]
    else:
        fix = nearest(name, [column for column in COLUMNS if column not in header] or COLUMNS)
    if re.fullmatch(r"stage \d+|\d+", name) and fix in known:
        return FileError(f"column {fix!r} is missing", number, use=",".join(known))
    return FileError(f"column {index + 1}, {name!r}, is unknown", number, use=repr(fix))


# --- cells ----------------------------------------------------------------------------------------


def _cells(field: str, number: int, column: str) -> list[Any]:
    """The cell of a field, None for an empty one; or the F and the B of an overlapped cell."""
    parts = [part.strip() for part in field.split("+")]
    if len(parts) == 1:
        return [_cell(field, number, column)]
    cells = [_cell(part, number, column) for part in parts]
    if [cell and cell.op for cell in cells] != [Op.F, Op.B]:
        raise FileError(
            f"{field[:40]!r} is no overlapped cell: write an F and a B, such as F0.7+B1.3",
            number,
            column,
        )
    return cells


def _cell(field: str, number: int, column: str) -> LocalCell | None:
    """The cell of a field, None for an empty one."""
    if not field:
        return None
    if match := CELL.fullmatch(field):
        return LocalCell(int(Op[match[1]]), int(match[2]), int(match[3]))
    # What was it to be? Cells with another separator, an op in lower case or another op, an op
    # without its microbatch.
    form, use = "write op, unit, dot, microbatch, such as", ""
    rule = f"{field[:40]!r} is no cell: {form} F0.3"
    parts = [part for part in re.split(r"[;\t|\s]+", field) if part]
    if (separator := _separator(field)) and all(CELL.fullmatch(part) for part in parts):
        rule, use = f"{field!r}: cells are separated by {separator}", "commas"
    elif match := re.fullmatch(r"([A-Za-z]+)(\d{1,6})\.(\d{1,6})", field, re.ASCII):
        op = match[1].upper() if match[1].upper() in Op.__members__ else ""
        rule = f"{field!r} has the unknown op {match[1]!r}"
        use = f"{op}{match[2]}.{match[3]}" if op else "F, R, B or W"
    elif re.fullmatch(r"[FRBW]\d+", field):
        rule = f"{field!r} has no microbatch: {form} {field[0]}0.{field[1:][:6]}"
    raise FileError(rule, number, column, use=use)


def _column_value(name: str, field: str, number: int) -> int:
    """The Permute or the microbatch that a field of a column says, −1 for none."""
    if name == "permute":
        field = field or "none"
        if field.upper() in Permute.__members__:
            return int(Permute[field.upper()])
        near = difflib.get_close_matches(field.lower(), ("late", "early", "none"), n=1, cutoff=0.6)
        use = near[0] if near else "late, early or none"
        raise FileError(f"{field!r} is no permute", number, name, use=use)
    if field and not re.fullmatch(r"\d{1,6}", field, re.ASCII):
        raise FileError(f"{field[:40]!r} is no microbatch", number, name, use="a number or nothing")
    return int(field) if field else -1
