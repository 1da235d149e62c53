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
import pathlib
import re

from jaxtrain.pipeline.orders import PLACES
from jaxtrain.pipeline.table import VOCABULARIES, Cell, Op, Permute, Table, TableError, check, from_rows, local_index, units_of

COLUMNS = ("permute", "head", "embed", "embed_gradient")
CELL = re.compile(r"([FRBW])(\d+)\.(\d+)")


def to_csv(table: Table) -> str:
    """The text of a table's CSV file."""
    settings = [f"name={re.sub(r'[^A-Za-z0-9_.-]', '_', table.name)}", f"place={_numbers(table.place)}"]
    if table.chunk != tuple(range(table.units)):
        settings.append(f"chunk={_numbers(table.chunk)}")
    lines = [f"# {' '.join([*settings, f'vocabulary={table.vocabulary}'])}"]
    lines.append(",".join([*(f"stage {s}" for s in range(table.stages)), *COLUMNS]))
    index = local_index(table.place)
    for t, row in enumerate(table.rows()):
        cells = [f"{Op(c[0]).name}{index[c[1]]}.{c[2]}" if c else "" for c in row]
        numbers = [int(getattr(table, name)[t]) for name in COLUMNS[1:]]
        lines.append(",".join([*cells, Permute(int(table.permute[t])).name.lower(), *("" if n < 0 else str(n) for n in numbers)]))
    return "\n".join(lines) + "\n"


def read_csv(path: str) -> Table:
    """The checked table of a CSV file.

    Raises ValueError with file, line, row and column, and what the cell waits for, also for a file that cannot be read.
    """
    try:
        text = pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"{path!r} cannot be read ({reason}): use a file that python -m jaxtrain.schedule --csv=FILE writes") from None
    lines: list[int] = []  # the line in the file of each row
    try:
        table = _parse(text, pathlib.Path(path).stem, lines)
        check(table)
    except TableError as error:
        where = [path]
        if 0 <= error.row < len(lines):
            where.append(f"line {lines[error.row]} (row {error.row})")
        if error.stage >= 0 or error.column:
            where.append(f"column {error.column or f'stage {error.stage}'!r}")
        raise ValueError(f"{', '.join(where)}: {error.rule}") from None
    return table


def _numbers(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def _parse(text: str, stem: str, lines: list[int]) -> Table:
    """A table, not checked, from a file's text; fills `lines`."""
    settings: dict[str, str] = {}
    table_lines: list[tuple[int, list[str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            settings |= dict(re.findall(r"(\w+)=(\S+)", line))
        elif line.strip():
            table_lines.append((number, [field.strip() for field in next(csv.reader([line]))]))
    if len(table_lines) < 2:
        raise TableError("no rows: write a header line such as 'stage 0,stage 1' and one line for each row of the table")
    header = table_lines[0][1]
    stages = _stages(header)
    rows: list[list[tuple[int, int, int] | None]] = []  # op, local unit, microbatch
    named: dict[str, list[int]] = {name: [] for name in header[stages:]}
    for t, (number, fields) in enumerate(table_lines[1:]):
        lines.append(number)
        if len(fields) > len(header):
            raise TableError(f"{len(fields)} fields under a header of {len(header)}", t)
        fields += [""] * (len(header) - len(fields))
        rows.append([_cell(field, t, s) for s, field in enumerate(fields[:stages])])
        for name, field in zip(named, fields[stages:], strict=True):
            named[name].append(_column_value(name, field, t))
    cells = [cell for row in rows for cell in row if cell]
    if not cells:
        raise TableError("every cell is empty")
    place = _place(settings, stages, 1 + max(u for _, u, _ in cells))
    chunk = _chunk(settings, place)
    own = units_of(place, stages)
    in_order: list[list[Cell | None]] = []
    for t, row in enumerate(rows):
        in_order.append([])
        for s, cell in enumerate(row):
            if cell and cell[1] >= len(own[s]):
                raise TableError(f"there is no local unit {cell[1]} on a stage with {len(own[s])}: say place=… in a comment", t, s)
            in_order[-1].append((cell[0], own[s][cell[1]], cell[2]) if cell else None)
    vocabulary = settings.get("vocabulary", "parallel")
    if vocabulary not in VOCABULARIES:
        raise TableError(f"vocabulary={vocabulary!r}: use {' or '.join(VOCABULARIES)}")
    return from_rows(
        in_order,
        settings.get("name", stem),
        place,
        stages,
        1 + max(k for _, _, k in cells),
        chunk=chunk,
        permute=named.pop("permute", None),
        columns=dict(named),
        recompute=any(op == Op.R for op, _, _ in cells),
        recompute_last=any(cell and cell[:2] == (Op.R, len(place) - 1) for row in in_order for cell in row),
        forward_only=all(op == Op.F for op, _, _ in cells),
        vocabulary=vocabulary,
    )


def _stages(header: list[str]) -> int:
    """The number of stages of a header; TableError for one that is none."""
    stages = next((i for i, name in enumerate(header) if name in COLUMNS), len(header))
    extra = header[stages:]
    wanted = [f"stage {s}" for s in range(stages)]
    if not stages or header[:stages] not in (wanted, [str(s) for s in range(stages)]):
        raise TableError(f"the header is {','.join(header)!r}: use {','.join(wanted or ['stage 0'])}")
    if unknown := [name for name in extra if name not in COLUMNS or extra.count(name) > 1]:
        raise TableError(f"the header has {unknown[0]!r} after the stages: use each of {', '.join(COLUMNS)} once")
    return stages


def _cell(field: str, t: int, s: int) -> tuple[int, int, int] | None:
    if not field:
        return None
    match = CELL.fullmatch(field)
    if not match:
        raise TableError(f"{field!r} is no cell: write op, unit, dot, microbatch, such as F0.3", t, s)
    return int(Op[match[1]]), int(match[2]), int(match[3])


def _column_value(name: str, field: str, t: int) -> int:
    if name == "permute":
        if (field or "none").upper() not in Permute.__members__:
            raise TableError(f"{field!r} is no permute: use late, early or none", t, column=name)
        return int(Permute[(field or "none").upper()])
    if field and not field.isdecimal():
        raise TableError(f"{field!r} is no microbatch: use a number or nothing", t, column=name)
    return int(field) if field else -1


def _place(settings: dict[str, str], stages: int, repeats: int) -> tuple[int, ...]:
    text = settings.get("place", "circular")
    if text in PLACES:
        return PLACES[text](stages, repeats)
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise TableError(f"place={text!r}: use circular, v, or the stage of each unit with commas between")
    place = tuple(map(int, text.split(",")))
    if max(place) >= stages:
        raise TableError(f"place={text!r} names stage {max(place)}, and the header has {stages} stages")
    return place


def _chunk(settings: dict[str, str], place: tuple[int, ...]) -> tuple[int, ...] | None:
    if "chunk" not in settings:
        return None
    text = settings["chunk"]
    chunk = tuple(map(int, text.split(","))) if re.fullmatch(r"\d+(,\d+)*", text) else ()
    steps = [b - a for a, b in zip(chunk, chunk[1:], strict=False)]
    if len(chunk) != len(place) or chunk[0] != 0 or set(steps) - {0, 1}:
        raise TableError(f"chunk={text!r}: use {len(place)} numbers, from 0 on, each the one before or one more")
    return chunk
