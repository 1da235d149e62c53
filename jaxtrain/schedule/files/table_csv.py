"""A table as a CSV file, for a user's own schedules.

    # name=mine place=0,1,2,2,1,0 vocabulary=parallel
    stage 0,stage 1,stage 2,permute,head,embed,embed_gradient
    F0.0,,,late,,0,
    F0.1,F0.0,,late,,1,

A line is a tick. A cell is empty, or an op, its local unit, a dot and its microbatch; or an F and a
B of another microbatch that are overlapped, such as F0.7+B1.3. Each of the last four columns may be
left out. Without `permute`, ticks whose messages move have a late permute; without head, embed and
embed_gradient, these are in the ticks of the last unit's F, the first unit's F and the first unit's
B. The settings in the comment may be left out, too: `place`, the stage of each unit (or `circular`
or `v`; default circular), `chunk`, the chunk of each unit, `name` (default: the file's),
`vocabulary`. Other lines that begin with # are comments. No JAX here.
"""

import csv
import dataclasses
import difflib
import itertools
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.schedule.orders import PLACEMENTS
from jaxtrain.schedule.table import (
    VOCABULARIES,
    Cell,
    Op,
    Permute,
    Table,
    TableError,
    TableShape,
    cell_name,
    counted,
    directions,
    from_cells,
    overlapped_b,
    units_of,
)
from jaxtrain.schedule.validator import check

COLUMNS = ("permute", "head", "embed", "embed_gradient")
CELL = re.compile(r"([FRBW])(\d{1,6})\.(\d{1,6})", re.ASCII)
MOST_BYTES = 50_000_000  # of a file
NUMBERS = re.compile(r"\d{1,6}(,\d{1,6})*", re.ASCII)


def to_csv(table: Table) -> str:
    """The text of a table's CSV file."""
    settings = [
        f"name={re.sub(r'[^A-Za-z0-9_.-]', '_', table.name)}",
        f"place={','.join(map(str, table.stage_of))}",
    ]
    if table.chunk_of != tuple(range(table.units)):
        settings.append(f"chunk={','.join(map(str, table.chunk_of))}")
    lines = [
        f"# {' '.join([*settings, f'vocabulary={table.vocabulary}'])}",
        ",".join([*(f"stage {s}" for s in range(table.stages)), *COLUMNS]),
    ]
    for tick, cells in enumerate(table.cells):
        names = [cell_name(cell, table.stage_of) if cell else "" for cell in cells]
        for stage in np.flatnonzero(table.overlapped[tick]).tolist():
            b = overlapped_b(table, tick, stage)
            assert b is not None
            names[stage] += f"+{cell_name(b, table.stage_of)}"
        permute = Permute(int(table.permute[tick])).name.lower()
        microbatches = [int(getattr(table, name)[tick]) for name in COLUMNS[1:]]
        shown = ["" if microbatch < 0 else str(microbatch) for microbatch in microbatches]
        lines.append(",".join([*names, permute, *shown]))
    return "\n".join(lines) + "\n"


def read_csv(path: str, text: str | None = None) -> Table:
    """The checked table of a CSV file. text: the file's, if it has been read.

    Raises ValueError, in one line, with file, line as an editor counts, column and what would be
    right, also for a file that cannot be read.
    """
    text = read_text(path) if text is None else text
    try:
        lines = _parse(text)
        table = _table(lines, pathlib.Path(path).stem)
        try:
            check(table)
        except TableError as error:
            raise _in_lines(error, lines.numbers) from None
    except FileError as error:
        raise ValueError(f"{path}{error}") from None
    return table


class FileError(ValueError):
    """A fault in a file. Its text follows the file's name: ", line 3, column 'head': …"."""

    def __init__(self, rule: str, line: int | str = "", column: str = ""):
        where = f", line {line}" if line else ""
        super().__init__(f"{where}{f', column {column!r}' if column else ''}: {rule}")


def _in_lines(error: TableError, lines: list[int]) -> FileError:
    """The fault with the file's lines in place of ticks. lines: of each tick."""
    ticks = [
        f"line {lines[tick]}" if tick < len(lines) else f"a line after {lines[-1]}"
        for tick in error.ticks
    ]
    return FileError(
        error.rule.format(*ticks) if ticks else error.rule,
        f"{lines[error.tick]} (tick {error.tick})" if 0 <= error.tick < len(lines) else "",
        f"stage {error.stage}" if error.stage >= 0 else error.column,
    )


def read_text(path: str) -> str:
    """A file's text, without the mark that some editors put before it, lines ended by one newline
    each."""
    if not path:
        raise ValueError(
            "csv: names no file: use csv:FILE, a file that python -m jaxtrain.schedule "
            "--csv=FILE writes"
        )
    try:
        # `|` or `<(…)`
        piped = (
            path.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/"))
            and pathlib.Path(path).is_fifo()
        )
        # a pipe would be waited for, a device has no end
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
        raise ValueError(
            f"{path!r} cannot be read ({reason}): use a file that python -m jaxtrain.schedule "
            "--csv=FILE writes"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _range(count: int) -> str:
    return f"0 to {count - 1}" if count > 1 else "0"


def _nearest(name: str, known: Sequence[str]) -> str:
    return difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]


# --- lines ----------------------------------------------------------------------------------------


class _LocalCell(NamedTuple):
    """A cell as the file has it."""

    op: int
    local_unit: int
    microbatch: int


class _Setting(NamedTuple):
    """The value of a setting, and its line in the file (0: it is not in the file)."""

    value: str
    line: int = 0


@dataclasses.dataclass
class _Lines:
    """The contents of a file.

    settings: of the comments, by name
    header:   names of the columns, `stages` stages before the others
    numbers, cells: of each tick, its line in the file and its cells, by stage
    overlapped: (tick, stage) → the B of an overlapped cell, whose F is in `cells`
    columns:  of each column that is no stage, its values by tick
    """

    settings: dict[str, _Setting]
    header: list[str]
    stages: int
    numbers: list[int]
    cells: list[list[_LocalCell | None]]
    overlapped: dict[tuple[int, int], _LocalCell]
    columns: dict[str, list[int]]


def _parse(text: str) -> _Lines:
    """The contents of a file's text. Raises FileError."""
    settings: dict[str, _Setting] = {}
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
    lines = _Lines(settings, header, stages, [], [], {}, {name: [] for name in header[stages:]})
    for number, fields in ticks:
        if len(fields) != len(header):
            raise FileError(
                f"{counted(len(fields), 'cell')} under a header of {len(header)}: use one for each "
                "column, empty or not",
                number,
            )
        lines.numbers.append(number)
        cells: list[_LocalCell | None] = []
        for stage, (field, column) in enumerate(zip(fields, header[:stages], strict=False)):
            first, *second = _cells(field, number, column)
            cells.append(first)
            for cell in second:
                lines.overlapped[len(lines.cells), stage] = cell
        lines.cells.append(cells)
        for name, field in zip(lines.columns, fields[stages:], strict=True):
            lines.columns[name].append(_column_value(name, field, number))
    return lines


def split_line(line: str, number: int) -> list[str]:
    """A line's cells, quotes taken off."""
    try:
        return [field.strip() for field in next(csv.reader([line], strict=True))]
    except (csv.Error, StopIteration):
        raise FileError("a quote is opened and not closed: leave quotes out", number) from None


SETTINGS = ("name", "place", "chunk", "vocabulary")


def _read_settings(line: str, number: int, settings: dict[str, _Setting]) -> None:
    """Adds the settings of a comment, each with its line; anything else is a remark."""
    for name, value in re.findall(r"(\w+)=(\S*)", line):
        near = difflib.get_close_matches(name.lower(), SETTINGS, n=1, cutoff=0.75)
        if name in SETTINGS:
            known = settings.setdefault(name, _Setting(value, number))
            if known.value != value:
                raise FileError(
                    f"{name}={value!r} is another value than in line {known.line}: leave one of "
                    "them out",
                    number,
                )
        elif near:
            raise FileError(f"the setting {name!r} is unknown: use {near[0]}", number)


SEPARATORS = {";": "a semicolon", "\t": "a tab", "|": "a bar", " ": "a space"}


def _separator(text: str) -> str | None:
    """The name of what may separate the cells of a text without commas."""
    return next((name for mark, name in SEPARATORS.items() if mark in text), None)


def _stages(header: list[str], number: int) -> int:
    """The number of stages of a header."""
    text = ",".join(header)
    if "," not in text and (separator := _separator(text)):
        cell = rf"(stage ?\d+|\d+|[A-Za-z]\d+\.\d+|{'|'.join(COLUMNS)})"
        if separator != "a space" or re.fullmatch(rf"{cell}(\s+{cell})+", text):
            raise FileError(f"the cells are separated by {separator}: use commas", number)
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
    bare_numbers = all(name.isdecimal() for name in header if name not in COLUMNS)
    known = [str(stage) if bare_numbers else f"stage {stage}" for stage in range(stages)]
    for index, name in enumerate(header):
        if name not in known and name not in COLUMNS:
            raise _unknown_column(header, index, known, number)
        if name in header[:index]:
            raise FileError(f"column {name!r} stands twice: use each once", number)
    if not stages:
        raise FileError("the header has no stage: use 'stage 0' first", number)
    if header[:stages] != known:
        raise FileError(f"the stages do not come first and in order: use {','.join(known)}", number)
    return stages


def _unknown_column(header: list[str], index: int, known: list[str], number: int) -> FileError:
    """The error of a header's name at an index; `known`: the names of as many stages as it has."""
    name = header[index]
    if index < len(known):
        fix = known[index]
    else:
        fix = _nearest(name, [column for column in COLUMNS if column not in header] or COLUMNS)
    if re.fullmatch(r"stage \d+|\d+", name) and fix in known:
        return FileError(f"column {fix!r} is missing: use {','.join(known)}", number)
    return FileError(f"column {index + 1}, {name!r}, is unknown: use {fix!r}", number)


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


def _cell(field: str, number: int, column: str) -> _LocalCell | None:
    """The cell of a field, None for an empty one."""
    if not field:
        return None
    if match := CELL.fullmatch(field):
        return _LocalCell(int(Op[match[1]]), int(match[2]), int(match[3]))
    form = "write op, unit, dot, microbatch, such as"
    rule = f"{field[:40]!r} is no cell: {form} F0.3"
    parts = [part for part in re.split(r"[;\t|\s]+", field) if part]
    if (separator := _separator(field)) and all(CELL.fullmatch(part) for part in parts):
        rule = f"{field!r}: cells are separated by {separator}: use commas"
    elif match := re.fullmatch(r"([A-Za-z]+)(\d{1,6})\.(\d{1,6})", field, re.ASCII):
        op = match[1].upper() if match[1].upper() in Op.__members__ else ""
        fix = f"use {op}{match[2]}.{match[3]}" if op else "use F, R, B or W"
        rule = f"{field!r} has the unknown op {match[1]!r}: {fix}"
    elif re.fullmatch(r"[FRBW]\d+", field):
        rule = f"{field!r} has no microbatch: {form} {field[0]}0.{field[1:][:6]}"
    raise FileError(rule, number, column)


def _column_value(name: str, field: str, number: int) -> int:
    """The Permute or the microbatch that a field of a column says, −1 for none."""
    if name == "permute":
        field = field or "none"
        if field.upper() in Permute.__members__:
            return int(Permute[field.upper()])
        near = difflib.get_close_matches(field.lower(), ("late", "early", "none"), n=1, cutoff=0.6)
        fix = near[0] if near else "late, early or none"
        raise FileError(f"{field!r} is no permute: use {fix}", number, name)
    if field and not re.fullmatch(r"\d{1,6}", field, re.ASCII):
        raise FileError(f"{field[:40]!r} is no microbatch: use a number or nothing", number, name)
    return int(field) if field else -1


def _size(lines: _Lines, number_name: str) -> int:
    """The number of microbatches or of local units of a file's cells. Raises FileError for one far
    from all others: no number below the largest may be left out."""
    every = [
        (line, column, cell)
        for tick, (line, cells) in enumerate(zip(lines.numbers, lines.cells, strict=True))
        for stage, (column, f) in enumerate(zip(lines.header, cells, strict=False))
        for cell in (f, lines.overlapped.get((tick, stage)))
        if cell
    ]
    present = {getattr(cell, number_name) for _, _, cell in every}
    if not present:
        raise FileError("every cell is empty: write tasks such as F0.0, op, unit, dot, microbatch")
    gap = next(number for number in range(len(present) + 1) if number not in present)
    if gap > max(present):
        return gap
    beyond = min(number for number in present if number > gap)
    line, column, cell = next(each for each in every if getattr(each[2], number_name) == beyond)
    noun = number_name.removeprefix("local_")
    written = f"{Op(cell.op).name}{cell.local_unit}.{cell.microbatch}"
    raise FileError(
        f"{written} has {noun} {beyond}, and {noun} {gap} is in no cell: use {_range(gap)}, or "
        f"write the tasks of {gap} too",
        line,
        column,
    )


# --- the table ------------------------------------------------------------------------------------


def _table(lines: _Lines, stem: str) -> Table:
    """The table, not checked, of a file's contents. Raises FileError."""
    microbatches, local_units = _size(lines, "microbatch"), _size(lines, "local_unit")
    stage_of = _stage_of(lines, local_units)
    cells = _in_model_order(lines, stage_of)
    size = (len(cells), lines.stages)
    b_unit, b_microbatch = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
    for (tick, stage), cell in lines.overlapped.items():
        b_unit[tick, stage] = units_of(stage_of, lines.stages)[stage][cell.local_unit]
        b_microbatch[tick, stage] = cell.microbatch
    for name, values in lines.columns.items():
        for number, microbatch in zip(lines.numbers, values, strict=True):
            if name != "permute" and microbatch >= microbatches:
                raise FileError(
                    f"microbatch {microbatch} is in no cell: use {_range(microbatches)}",
                    number,
                    name,
                )
    vocabulary, number = lines.settings.get("vocabulary", _Setting("parallel"))
    if vocabulary not in VOCABULARIES:
        raise FileError(
            f"vocabulary={vocabulary!r} is unknown: use {_nearest(vocabulary, VOCABULARIES)}",
            number,
        )
    recomputed = {cell.unit for tick in cells for cell in tick if cell and cell.op == Op.R}
    shape = TableShape(
        name=lines.settings.get("name", _Setting(stem)).value,
        stage_of=stage_of,
        stages=lines.stages,
        microbatches=microbatches,
        chunk_of=_chunk_of(lines.settings, stage_of),
        recompute=bool(recomputed),
        recompute_last=len(stage_of) - 1 in recomputed,
        forward_only=not lines.overlapped
        and all(cell.op == Op.F for tick in cells for cell in tick if cell),
        vocabulary=vocabulary,
    )
    return from_cells(shape, cells, b_unit=b_unit, b_microbatch=b_microbatch, **lines.columns)


def _in_model_order(lines: _Lines, stage_of: tuple[int, ...]) -> list[list[Cell | None]]:
    """The cells with units in model order."""
    units = units_of(stage_of, lines.stages)
    for tick, (number, cells) in enumerate(zip(lines.numbers, lines.cells, strict=True)):
        of_stages = [(stage, cell) for stage, cell in enumerate(cells)]
        of_stages += [(s, cell) for (t, s), cell in lines.overlapped.items() if t == tick]
        for stage, cell in of_stages:
            count = len(units[stage])
            if cell and cell.local_unit >= count:
                fix = f"use unit {_range(count)}, or" if count else "leave it empty, or"
                raise FileError(
                    f"there is no local unit {cell.local_unit} on a stage with {count}: {fix} say "
                    "place=… in a comment",
                    number,
                    lines.header[stage],
                )
    return [
        [
            Cell(cell.op, units[stage][cell.local_unit], cell.microbatch) if cell else None
            for stage, cell in enumerate(cells)
        ]
        for cells in lines.cells
    ]


def _stage_of(lines: _Lines, local_units: int) -> tuple[int, ...]:
    """The stage of each unit, by the setting `place`."""
    stages = lines.stages
    text, number = lines.settings.get("place", _Setting("circular"))
    if text in PLACEMENTS:
        return PLACEMENTS[text](stages, local_units)
    if not NUMBERS.fullmatch(text):
        near = difflib.get_close_matches(text.lower(), PLACEMENTS, n=1, cutoff=0.6)
        fix = "circular, v, or the stage of each unit with commas between and no spaces"
        raise FileError(f"place={text!r} is no place: use {near[0] if near else fix}", number)
    stage_of = tuple(map(int, text.split(",")))
    if max(stage_of) >= stages:
        raise FileError(
            f"place={text!r} names stage {max(stage_of)}, and the header has "
            f"{counted(stages, 'stage')}: use {_range(stages)}",
            number,
        )
    try:
        directions(stage_of, stages)
    except TableError as error:
        raise FileError(f"place={text!r}: {error.rule}", number) from None
    return stage_of


def _chunk_of(settings: dict[str, _Setting], stage_of: tuple[int, ...]) -> tuple[int, ...]:
    """The chunk of each unit, by the setting `chunk`; empty where there is none."""
    if "chunk" not in settings:
        return ()
    text, number = settings["chunk"]
    chunk_of = tuple(map(int, text.split(","))) if NUMBERS.fullmatch(text) else ()
    steps = {following - chunk for chunk, following in itertools.pairwise(chunk_of)}
    if len(chunk_of) != len(stage_of) or chunk_of[0] != 0 or steps - {0, 1}:
        raise FileError(
            f"chunk={text!r}: use {counted(len(stage_of), 'number')}, from 0 on, each the one "
            "before or one more",
            number,
        )
    return chunk_of
