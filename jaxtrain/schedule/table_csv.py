"""A table as a CSV file, for a user's own schedules.

    # name=mine place=0,1,2,2,1,0 vocabulary=parallel
    stage 0,stage 1,stage 2,permute,head,embed,embed_gradient
    F0.0,,,late,,0,
    F0.1,F0.0,,late,,1,

A line is a row of the table. A cell is op, local unit, a dot, microbatch, or empty. The four columns at the end may be left out, one by
one: permutes are then late wherever a message moves, and head, embed and embed_gradient stand in the rows of the last unit's F, the first
unit's F and the first unit's B. So may the settings in the comment: `place` (also `circular` or `v`; default circular), `chunk` (the
chunk of each unit), `name` (default: the file's), `vocabulary`. Other lines that begin with # are comments. No JAX here.
"""

import csv
import difflib
import pathlib
import re
from collections.abc import Sequence

from jaxtrain.schedule.orders import PLACES
from jaxtrain.schedule.table import VOCABULARIES, Cell, Op, Permute, Table, TableError, from_cells, local_index, units_of
from jaxtrain.schedule.validator import check

COLUMNS = ("permute", "head", "embed", "embed_gradient")
CELL = re.compile(r"([FRBW])(\d{1,6})\.(\d{1,6})", re.ASCII)
NUMBERS = re.compile(r"\d{1,6}(,\d{1,6})*", re.ASCII)


def to_csv(table: Table) -> str:
    """The text of a table's CSV file."""
    settings = [f"name={re.sub(r'[^A-Za-z0-9_.-]', '_', table.name)}", f"place={_numbers(table.stage_of)}"]
    if table.chunk_of != tuple(range(table.units)):
        settings.append(f"chunk={_numbers(table.chunk_of)}")
    lines = [f"# {' '.join([*settings, f'vocabulary={table.vocabulary}'])}"]
    lines.append(",".join([*(f"stage {s}" for s in range(table.stages)), *COLUMNS]))
    index = local_index(table.stage_of)
    for t, row in enumerate(table.cells()):
        cells = [f"{Op(c[0]).name}{index[c[1]]}.{c[2]}" if c else "" for c in row]
        numbers = [int(getattr(table, name)[t]) for name in COLUMNS[1:]]
        lines.append(",".join([*cells, Permute(int(table.permute[t])).name.lower(), *("" if n < 0 else str(n) for n in numbers)]))
    return "\n".join(lines) + "\n"


def read_csv(path: str) -> Table:
    """The checked table of a CSV file.

    Raises ValueError, in one line, with file, line as an editor counts, column and what would be right, also for a file that cannot be
    read.
    """
    lines: list[int] = []  # the line in the file of each row
    try:
        table = _parse(_read(path), pathlib.Path(path).stem, lines)
        check(table)
    except _FileError as error:
        raise ValueError(f"{path}, {error}" if error.located else f"{path}: {error}") from None
    except TableError as error:
        where = [path]
        if 0 <= error.row < len(lines):
            where.append(f"line {lines[error.row]} (row {error.row})")
        if error.stage >= 0 or error.column:
            where.append(f"column {error.column or f'stage {error.stage}'!r}")
        named = [f"line {lines[t]}" if t < len(lines) else f"a line after {lines[-1]}" for t in error.rows]
        raise ValueError(f"{', '.join(where)}: {error.rule.format(*named) if named else error.rule}") from None
    return table


class _FileError(ValueError):
    """What is wrong with a file as a text; `line` and `column` say where, if there is a place."""

    def __init__(self, rule: str, line: int = 0, column: str = ""):
        where = ([f"line {line}"] if line else []) + ([f"column {column!r}"] if column else [])
        super().__init__(f"{', '.join(where)}: {rule}" if where else rule)
        self.located = bool(where)


def _read(path: str) -> str:
    """A file's text, without the mark that some editors put before it, lines ended by one newline each."""
    if not path:
        raise ValueError("csv: names no file: use csv:FILE, a file that python -m jaxtrain.schedule --csv=FILE writes")
    try:
        data = pathlib.Path(path).read_bytes()
        text = data.decode("utf-8-sig")
        reason = "it is no text" if "\0" in text else ""
    except OSError as error:
        reason = error.strerror or type(error).__name__
    except UnicodeDecodeError:
        utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        reason = "it is text in UTF-16: save it as UTF-8" if utf16 else "it is no text in UTF-8"
    if reason:
        raise ValueError(f"{path!r} cannot be read ({reason}): use a file that python -m jaxtrain.schedule --csv=FILE writes")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _numbers(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


Task = tuple[int, int, int]  # op, local unit, microbatch


def _parse(text: str, stem: str, lines: list[int]) -> Table:
    """A table, not checked, from a file's text; fills `lines`."""
    settings: dict[str, tuple[str, int]] = {}
    table_lines: list[tuple[int, list[str]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("#"):
            _read_settings(line, number, settings)
        elif line.strip():
            table_lines.append((number, _split(line, number)))
    if not table_lines:
        what = "has comments alone" if text.strip() else "is empty"
        raise _FileError(f"the file {what}: write a header line such as 'stage 0,stage 1' and one line for each row of the table")
    (at, header), body = table_lines[0], table_lines[1:]
    stages = _stages(header, at)
    if not body:
        raise _FileError("no rows follow the header: write one line for each row of the table, such as 'F0.0,'", at)
    rows: list[list[Task | None]] = []
    named: dict[str, list[int]] = {name: [] for name in header[stages:]}
    for number, fields in body:
        lines.append(number)
        if len(fields) != len(header):
            raise _FileError(
                f"{_count(len(fields), 'cell')} under a header of {len(header)}: use one for each column, empty or not", number
            )
        rows.append([_cell(field, number, header[s]) for s, field in enumerate(fields[:stages])])
        for name, field in zip(named, fields[stages:], strict=True):
            named[name].append(_column_value(name, field, number))
    _check_numbers(rows, lines, header)
    cells = [cell for row in rows for cell in row if cell]
    stage_of = _place(settings, stages, 1 + max(u for _, u, _ in cells))
    chunk_of = _chunk(settings, stage_of)
    own = units_of(stage_of, stages)
    in_order: list[list[Cell | None]] = []
    for number, row in zip(lines, rows, strict=True):
        in_order.append([])
        for s, cell in enumerate(row):
            if cell and cell[1] >= len(own[s]):
                right = f"use unit {_range(len(own[s]))}, or" if own[s] else "leave it empty, or"
                rule = f"there is no local unit {cell[1]} on a stage with {len(own[s])}: {right} say place=… in a comment"
                raise _FileError(rule, number, header[s])
            in_order[-1].append((cell[0], own[s][cell[1]], cell[2]) if cell else None)
    microbatches = 1 + max(k for _, _, k in cells)
    for name, values in named.items():
        for number, k in zip(lines, values, strict=True):
            if name != "permute" and k >= microbatches:
                raise _FileError(f"microbatch {k} is in no cell: use {_range(microbatches)}", number, name)
    vocabulary, number = settings.get("vocabulary", ("parallel", 0))
    if vocabulary not in VOCABULARIES:
        raise _FileError(f"vocabulary={vocabulary!r} is unknown: use {_nearest(vocabulary, VOCABULARIES)}", number)
    return from_cells(
        in_order,
        settings.get("name", (stem, 0))[0],
        stage_of,
        stages,
        microbatches,
        chunk_of=chunk_of,
        permute=named.pop("permute", None),
        columns=dict(named),
        recompute=any(op == Op.R for op, _, _ in cells),
        recompute_last=any(cell and cell[:2] == (Op.R, len(stage_of) - 1) for row in in_order for cell in row),
        forward_only=all(op == Op.F for op, _, _ in cells),
        vocabulary=vocabulary,
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s'[: n != 1]}"


def _range(n: int) -> str:
    return f"0 to {n - 1}" if n > 1 else "0"


def _nearest(name: str, known: Sequence[str]) -> str:
    return difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]


# --- lines -----------------------------------------------------------------------------------------------------------------------


def _split(line: str, number: int) -> list[str]:
    """A line's cells, quotes taken off."""
    try:
        return [field.strip() for field in next(csv.reader([line], strict=True))]
    except (csv.Error, StopIteration):
        raise _FileError("a quote is opened and not closed: leave quotes out", number) from None


SETTINGS = ("name", "place", "chunk", "vocabulary")


def _read_settings(line: str, number: int, settings: dict[str, tuple[str, int]]) -> None:
    """Adds the settings of a comment, each with its line; what is not like one is a remark."""
    for name, value in re.findall(r"(\w+)=(\S*)", line):
        if name not in SETTINGS and (near := difflib.get_close_matches(name.lower(), SETTINGS, n=1, cutoff=0.75)):
            raise _FileError(f"the setting {name!r} is unknown: use {near[0]}", number)
        if name in settings and name in SETTINGS and settings[name][0] != value:
            raise _FileError(f"{name}={value!r} is another value than in line {settings[name][1]}: leave one of them out", number)
        settings[name] = value, number


SEPARATORS = {";": "a semicolon", "\t": "a tab", "|": "a bar"}


def _separator(fields: list[str]) -> str | None:
    """What separates cells in a line that has no commas, in words; None if nothing does."""
    text = ",".join(fields)
    if "," in text:
        return None
    found = next((name for mark, name in SEPARATORS.items() if mark in text), None)
    cell = rf"(stage ?\d+|\d+|[A-Za-z]\d+\.\d+|{'|'.join(COLUMNS)})"
    return found or ("a space" if re.fullmatch(rf"{cell}(\s+{cell})+", text) else None)


def _stages(header: list[str], number: int) -> int:
    """The number of stages of a header."""
    if separator := _separator(header):
        raise _FileError(f"the cells are separated by {separator}: use commas", number)
    if any(CELL.fullmatch(name) for name in header):
        wanted = ",".join(f"stage {s}" for s in range(len(header)))
        raise _FileError(f"a row stands where the header should: write a line such as {wanted!r} before it", number)
    if all(name.isdecimal() for name in header if name not in COLUMNS):
        style = "{}"  # bare numbers
    else:
        style = "stage {}"
    stages = sum(name not in COLUMNS and not _like_a_column(name) for name in header)
    known = [style.format(s) for s in range(stages)]
    for i, name in enumerate(header):
        if name not in known and name not in COLUMNS:
            right = known[i] if i < stages else _nearest(name, COLUMNS)
            rest = [other for other in COLUMNS if other not in header]
            if i >= stages and right in header and rest:
                right = _nearest(name, rest)
            if re.fullmatch(r"stage \d+|\d+", name) and right in known:
                raise _FileError(f"column {right!r} is missing: use {','.join(known)}", number)
            raise _FileError(f"column {i + 1}, {name!r}, is unknown: use {right!r}", number)
        if name in header[:i]:
            raise _FileError(f"column {name!r} stands twice: use each once", number)
    if not stages:
        raise _FileError("the header has no stage: use 'stage 0' first", number)
    if header[:stages] != known:
        raise _FileError(f"the stages do not come first and in order: use {','.join(known)}", number)
    return stages


def _like_a_column(name: str) -> bool:
    return bool(difflib.get_close_matches(name.lower(), COLUMNS, n=1, cutoff=0.7))


# --- cells -----------------------------------------------------------------------------------------------------------------------


def _cell(field: str, number: int, column: str) -> Task | None:
    if not field:
        return None
    if match := CELL.fullmatch(field):
        return int(Op[match[1]]), int(match[2]), int(match[3])
    separator = next((name for mark, name in SEPARATORS.items() if mark in field), "a space" if len(field.split()) > 1 else None)
    if separator and all(CELL.fullmatch(part) for part in re.split(r"[;\t|\s]+", field) if part):
        raise _FileError(f"{field!r}: cells are separated by {separator}: use commas", number, column)
    if match := re.fullmatch(r"([A-Za-z]+)(\d{1,6})\.(\d{1,6})", field, re.ASCII):
        op = match[1].upper() if match[1].upper() in Op.__members__ else ""
        right = f"use {op}{match[2]}.{match[3]}" if op else "use F, R, B or W"
        raise _FileError(f"{field!r} has the unknown op {match[1]!r}: {right}", number, column)
    if re.fullmatch(r"[FRBW]\d+", field):
        raise _FileError(
            f"{field!r} has no microbatch: write op, unit, dot, microbatch, such as {field[0]}0.{field[1:][:6]}", number, column
        )
    raise _FileError(f"{field[:40]!r} is no cell: write op, unit, dot, microbatch, such as F0.3", number, column)


def _column_value(name: str, field: str, number: int) -> int:
    if name == "permute":
        if (field or "none").upper() not in Permute.__members__:
            near = difflib.get_close_matches(field.lower(), ("late", "early", "none"), n=1, cutoff=0.6)
            raise _FileError(f"{field!r} is no permute: use {near[0] if near else 'late, early or none'}", number, name)
        return int(Permute[(field or "none").upper()])
    if field and not re.fullmatch(r"\d{1,6}", field, re.ASCII):
        raise _FileError(f"{field[:40]!r} is no microbatch: use a number or nothing", number, name)
    return int(field) if field else -1


def _check_numbers(rows: list[list[Task | None]], lines: list[int], header: list[str]) -> None:
    """_FileError for a microbatch or a unit far from all others: whatever the file's numbers are, none is left out below the largest."""
    for i, what in ((2, "microbatch"), (1, "unit")):
        there = {cell[i] for row in rows for cell in row if cell}
        if not there:
            raise _FileError("every cell is empty: write tasks such as F0.0, op, unit, dot, microbatch")
        gap = next(n for n in range(len(there) + 1) if n not in there)
        if gap <= max(there):
            beyond = min(n for n in there if n > gap)
            t, s, cell = next((t, s, c) for t, row in enumerate(rows) for s, c in enumerate(row) if c and c[i] == beyond)
            name = f"{Op(cell[0]).name}{cell[1]}.{cell[2]}"
            missing = f"{what} {gap} is in no cell"
            right = f"use {_range(gap)}" if gap else "use 0"
            raise _FileError(f"{name} has {what} {beyond}, and {missing}: {right}, or write the tasks of {gap} too", lines[t], header[s])


# --- settings --------------------------------------------------------------------------------------------------------------------


def _place(settings: dict[str, tuple[str, int]], stages: int, repeats: int) -> tuple[int, ...]:
    text, number = settings.get("place", ("circular", 0))
    if text in PLACES:
        return PLACES[text](stages, repeats)
    if not NUMBERS.fullmatch(text):
        near = difflib.get_close_matches(text.lower(), PLACES, n=1, cutoff=0.6)
        right = near[0] if near else "circular, v, or the stage of each unit with commas between and no spaces"
        raise _FileError(f"place={text!r} is no place: use {right}", number)
    stage_of = tuple(map(int, text.split(",")))
    if max(stage_of) >= stages:
        raise _FileError(
            f"place={text!r} names stage {max(stage_of)}, and the header has {_count(stages, 'stage')}: use {_range(stages)}", number
        )
    for g, (a, b) in enumerate(zip(stage_of, stage_of[1:], strict=False)):
        if (b - a) % stages not in (0, 1, stages - 1):
            rule = f"unit {g} is on stage {a} and unit {g + 1} on stage {b}: put them on one stage or on neighbours"
            raise _FileError(f"place={text!r}: {rule}", number)
    return stage_of


def _chunk(settings: dict[str, tuple[str, int]], stage_of: tuple[int, ...]) -> tuple[int, ...] | None:
    if "chunk" not in settings:
        return None
    text, number = settings["chunk"]
    chunk_of = tuple(map(int, text.split(","))) if NUMBERS.fullmatch(text) else ()
    steps = [b - a for a, b in zip(chunk_of, chunk_of[1:], strict=False)]
    if len(chunk_of) != len(stage_of) or chunk_of[0] != 0 or set(steps) - {0, 1}:
        raise _FileError(f"chunk={text!r}: use {_count(len(stage_of), 'number')}, from 0 on, each the one before or one more", number)
    return chunk_of
