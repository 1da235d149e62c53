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
`vocabulary`. Other lines that begin with # are comments.

`to_csv` writes and `read_csv` reads; table_lines.py reads lines and cells as they stand, and here
they become a table, with units in model order. No JAX here.
"""

import difflib
import itertools
import pathlib
import re

import numpy as np

from jaxtrain.schedule.cell_grid import from_cells
from jaxtrain.schedule.files.csv_text import FileError, nearest, number_range, read_text
from jaxtrain.schedule.files.table_lines import COLUMNS, Lines, Setting, parse
from jaxtrain.schedule.placement import PLACEMENTS
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
    overlapped_b,
    units_of,
)
from jaxtrain.schedule.validator import check

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

    Raises ScheduleError, with file, line as an editor counts, column and what would be right, also
    for a file that cannot be read.
    """
    text = read_text(path) if text is None else text
    try:
        lines = parse(text)
        table = _table(lines, pathlib.Path(path).stem)
        try:
            check(table)
        except TableError as error:
            raise _in_lines(error, lines.numbers) from None
    except FileError as error:
        raise error.of(path) from None
    return table


def _in_lines(error: TableError, lines: list[int]) -> FileError:
    """The fault with the file's lines in place of ticks. lines: of each tick."""
    # A message that arrives after the table's end is named by the last line.
    ticks = [
        f"line {lines[tick]}" if tick < len(lines) else f"a line after {lines[-1]}"
        for tick in error.ticks
    ]
    return FileError(
        error.rule.format(*ticks) if ticks else error.rule,
        f"{lines[error.tick]} (tick {error.tick})" if 0 <= error.tick < len(lines) else "",
        f"stage {error.stage}" if error.stage >= 0 else error.column,
        use=error.use,
    )


# --- reading: the table of a file's contents ------------------------------------------------------


def _table(lines: Lines, stem: str) -> Table:
    """The table, not checked, of a file's contents. Raises FileError."""
    # A file says nothing about sizes: they follow from the largest numbers in its cells. It has Rs,
    # or is of forwards alone, if its cells are.
    microbatches, local_units = _size(lines, "microbatch"), _size(lines, "local_unit")
    stage_of = _stage_of(lines, local_units)
    cells = _in_model_order(lines, stage_of)
    overlapped = {
        (tick, stage): (units_of(stage_of, lines.stages)[stage][b.local_unit], b.microbatch)
        for (tick, stage), b in lines.overlapped.items()
    }
    for name, values in lines.columns.items():
        for number, microbatch in zip(lines.numbers, values, strict=True):
            if name != "permute" and microbatch >= microbatches:
                raise FileError(
                    f"microbatch {microbatch} is in no cell",
                    number,
                    name,
                    use=number_range(microbatches),
                )
    vocabulary, number = lines.settings.get("vocabulary", Setting("parallel"))
    if vocabulary not in VOCABULARIES:
        raise FileError(
            f"vocabulary={vocabulary!r} is unknown",
            number,
            use=nearest(vocabulary, VOCABULARIES),
        )
    recomputed = {cell.unit for tick in cells for cell in tick if cell and cell.op == Op.R}
    shape = TableShape(
        name=lines.settings.get("name", Setting(stem)).value,
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
    return from_cells(shape, cells, overlapped, **lines.columns)


def _size(lines: Lines, number_name: str) -> int:
    """The number of microbatches or of local units of a file's cells. Raises FileError for one far
    from all others: no number below the largest may be left out."""
    # Microbatches 0 1 2 7: gap 3, so the smallest number beyond is 7, most likely a slip, and the
    # error shows the cell that has it.
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
        f"{written} has {noun} {beyond}, and {noun} {gap} is in no cell",
        line,
        column,
        use=f"{number_range(gap)}, or write the tasks of {gap} too",
    )


def _in_model_order(lines: Lines, stage_of: tuple[int, ...]) -> list[list[Cell | None]]:
    """The cells with units in model order."""
    # F1.3 on stage 2 of a V with 3 stages, 0 1 2 2 1 0: local unit 1 there is unit 3 of the model.
    units = units_of(stage_of, lines.stages)
    for tick, (number, cells) in enumerate(zip(lines.numbers, lines.cells, strict=True)):
        of_stages = [(stage, cell) for stage, cell in enumerate(cells)]
        of_stages += [(s, lines.overlapped.get((tick, s))) for s in range(lines.stages)]
        for stage, cell in of_stages:
            count = len(units[stage])
            if cell and cell.local_unit >= count:
                rule = f"there is no local unit {cell.local_unit} on a stage with {count}"
                other = "or say place=… in a comment"
                raise FileError(
                    rule if count else f"{rule}: leave it empty, {other}",
                    number,
                    lines.header[stage],
                    use=f"unit {number_range(count)}, {other}" if count else "",
                )
    return [
        [
            Cell(cell.op, units[stage][cell.local_unit], cell.microbatch) if cell else None
            for stage, cell in enumerate(cells)
        ]
        for cells in lines.cells
    ]


def _stage_of(lines: Lines, local_units: int) -> tuple[int, ...]:
    """The stage of each unit, by the setting `place`."""
    # place=v, place=circular, or the stages themselves: place=0,1,1,0
    stages = lines.stages
    text, number = lines.settings.get("place", Setting("circular"))
    if text in PLACEMENTS:
        return PLACEMENTS[text](stages, local_units)
    if not NUMBERS.fullmatch(text):
        near = difflib.get_close_matches(text.lower(), PLACEMENTS, n=1, cutoff=0.6)
        use = "circular, v, or the stage of each unit with commas between and no spaces"
        raise FileError(f"place={text!r} is no place", number, use=near[0] if near else use)
    stage_of = tuple(map(int, text.split(",")))
    if max(stage_of) >= stages:
        raise FileError(
            f"place={text!r} names stage {max(stage_of)}, and the header has "
            f"{counted(stages, 'stage')}",
            number,
            use=number_range(stages),
        )
    try:
        directions(stage_of, stages)
    except TableError as error:
        raise FileError(f"place={text!r}: {error.rule}", number) from None
    return stage_of


def _chunk_of(settings: dict[str, Setting], stage_of: tuple[int, ...]) -> tuple[int, ...]:
    """The chunk of each unit, by the setting `chunk`; empty where there is none."""
    # chunk=0,0,1,1 for four units of two chunks: numbers grow by 0 or 1 from unit to unit
    if "chunk" not in settings:
        return ()
    text, number = settings["chunk"]
    chunk_of = tuple(map(int, text.split(","))) if NUMBERS.fullmatch(text) else ()
    steps = {following - chunk for chunk, following in itertools.pairwise(chunk_of)}
    if len(chunk_of) != len(stage_of) or chunk_of[0] != 0 or steps - {0, 1}:
        raise FileError(
            f"chunk={text!r}",
            number,
            use=f"{counted(len(stage_of), 'number')}, from 0 on, each the one before or one more",
        )
    return chunk_of
