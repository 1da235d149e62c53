"""CSV files: there and back, what is left out, and what is said of a file that is wrong."""

import dataclasses
import os
import random

import numpy as np
import pytest
from support.pipeline_tables import grid, random_table

from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.files.table_csv import read_csv, to_csv
from jaxtrain.schedule.table import Op
from jaxtrain.schedule.table_spec import TableSpec

COLUMNS = ("op", "local_unit", "microbatch", "permute", "head", "embed", "embed_gradient")
COLUMNS += ("b_local_unit", "b_microbatch")
FB = (int(Op.F), int(Op.B))


def same(one, two) -> bool:
    fields = (
        "name",
        "stage_of",
        "chunk_of",
        "stages",
        "microbatches",
        "recompute",
        "recompute_last",
        "forward_only",
        "vocabulary",
    )
    return all(getattr(one, f) == getattr(two, f) for f in fields) and all(
        np.array_equal(getattr(one, c), getattr(two, c)) for c in COLUMNS
    )


def test_csv_there_and_back(tmp_path):
    tables = [
        t
        for permute in ("late", "early", "aligned")
        for t in grid(permute)
        if (t.stages in (1, 3) and t.microbatches in (1, 4)) or t.overlaps
    ]
    source = random.Random(3)
    tables += [random_table(source) for _ in range(30)]
    path = tmp_path / "t.csv"
    for table in tables:
        path.write_text(to_csv(table))
        again = read_csv(str(path))
        # R shows itself: with one unit there is none, whatever the table says.
        assert same(again, dataclasses.replace(table, recompute=bool((table.op == Op.R).any()))), (
            table.name
        )


def test_csv_columns_left_out_are_filled_in(tmp_path):
    table = make_table(TableSpec("interleaved", 3, 2, 5, permute="late"))
    lines = [",".join(line.split(",")[:3]) for line in to_csv(table).splitlines()[1:]]
    path = tmp_path / "mine.csv"
    path.write_text("# a schedule of my own\n\n" + "\n".join(lines) + "\n")
    assert same(read_csv(str(path)), dataclasses.replace(table, name="mine"))
    path.write_text(
        "# place=v\n0,1\nF0.0,\n,F0.0\n,F1.0\nF1.0,\nB1.0,\nW1.0,B1.0\n,W1.0\n,B0.0\n,W0.0\n"
        "B0.0,\nW0.0,\n"
    )
    assert read_csv(str(path)).stage_of == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "stage 0,stage 1\nF0.0,\n,F0.0\n,B0.0\nW0.0,W0.0\nB0.0,\n",
            "line 5 (tick 3), column 'stage 0': W0.0 waits for its B0.0 in line 6: move it after "
            "that",
        ),
        (
            "stage 0,stage 1\nF0.0,F0.0\n,B0.0\nB0.0,W0.0\nW0.0,\n",
            "line 2 (tick 0), column 'stage 1': F0.0 waits for F0.0 of stage 0 in line 2, whose "
            "message can be read from line 3 on: move it",
        ),
        (
            "# hello\nstage 0\nF0.0\n\nfoo\n",
            "line 5, column 'stage 0': 'foo' is no cell: write op, unit, dot, microbatch, such "
            "as F0.3",
        ),
        (
            "stage 0,permute\nF0.0,later\n",
            "line 2, column 'permute': 'later' is no permute: use late",
        ),
        (
            "stage 0,head\nF0.0,x\n",
            "line 2, column 'head': 'x' is no microbatch: use a number or nothing",
        ),
        (
            "stage 0\nF0.0,F0.1\n",
            "line 2: 2 cells under a header of 1: use one for each column, empty or not",
        ),
        ("stage 0,stage 2\nF0.0,\n", "line 1: column 'stage 1' is missing: use stage 0,stage 1"),
        ("stage 0,head,loss\nF0.0,,\n", "line 1: column 3, 'loss', is unknown: use 'permute'"),
        ("", "the file is empty: write a header line"),
        ("# a remark\n\n", "the file has comments alone: write a header line"),
        ("stage 0,stage 1\n\n", "line 1: no ticks follow the header"),
        ("stage 0\n,\n", "line 2: 2 cells under a header of 1"),
        ("stage 0,stage 1\n,\n", "every cell is empty: write tasks such as F0.0"),
        ("# hello\n\nstage 0,stage 1\nF0.0\n", "line 4: 1 cell under a header of 2"),
        ("stage 0;stage 1\nF0.0;\n", "line 1: the cells are separated by a semicolon: use commas"),
        (
            "stage 0\tstage 1\tpermute\nF0.0\t\n",
            "line 1: the cells are separated by a tab: use commas",
        ),
        ("0  1  head\nF0.0 F0.1 0\n", "line 1: the cells are separated by a space: use commas"),
        (
            "stage 0\nF0.0;B0.0\n",
            "line 2, column 'stage 0': 'F0.0;B0.0': cells are separated by a semicolon: use commas",
        ),
        (
            "F0.0,\n,F0.0\n",
            "line 1: a tick stands where the header should: write a line such as 'stage 0,stage "
            "1' before it",
        ),
        ("stage 0,stge 1\nF0.0,\n", "line 1: column 2, 'stge 1', is unknown: use 'stage 1'"),
        (
            "stage 0,Stage 1,premute\nF0.0,,\n",
            "line 1: column 2, 'Stage 1', is unknown: use 'stage 1'",
        ),
        (
            "stage 0,stage 1,premute\nF0.0,,\n",
            "line 1: column 3, 'premute', is unknown: use 'permute'",
        ),
        (
            "stage 0,embed,embed_gradent\nF0.0,,\n",
            "line 1: column 3, 'embed_gradent', is unknown: use 'embed_gradient'",
        ),
        (
            "stage 0,stage 1,stage 1\nF0.0,,\n",
            "line 1: column 'stage 1' stands twice: use each once",
        ),
        ("stage 0,head,head\nF0.0,,\n", "line 1: column 'head' stands twice: use each once"),
        (
            "stage 1,stage 0\nF0.0,\n",
            "line 1: the stages do not come first and in order: use stage 0,stage 1",
        ),
        ("head,stage 0\n,F0.0\n", "line 1: the stages do not come first and in order: use stage 0"),
        ("stage 0,\nF0.0,\n", "line 1: column 2, '', is unknown: use 'stage 1'"),
        (
            "stage 0\nG0.0\n",
            "line 2, column 'stage 0': 'G0.0' has the unknown op 'G': use F, R, B or W",
        ),
        ("stage 0\nf0.3\n", "line 2, column 'stage 0': 'f0.3' has the unknown op 'f': use F0.3"),
        (
            "stage 0\nF3\n",
            "line 2, column 'stage 0': 'F3' has no microbatch: write op, unit, dot, microbatch, "
            "such as F0.3",
        ),
        ("stage 0\nF0.1.5\n", "line 2, column 'stage 0': 'F0.1.5' is no cell"),
        ("stage 0\nF0.-1\n", "line 2, column 'stage 0': 'F0.-1' is no cell"),
        ("stage 0\nF0.٣\n", "line 2, column 'stage 0': 'F0.٣' is no cell"),
        ("stage 0\nF0." + "9" * 5000 + "\n", "line 2, column 'stage 0': 'F0.9999"),
        (
            "stage 0\nF0.0\nB0.0\nW0.0\nF0.30\n",
            "line 5, column 'stage 0': F0.30 has microbatch 30, and microbatch 1 is in no cell: "
            "use 0,",
        ),
        (
            "stage 0\nF0.0\nB0.0\nW700000.0\n",
            "line 4, column 'stage 0': W700000.0 has unit 700000, and unit 1 is in no cell: use 0,",
        ),
        (
            "stage 0,head\nF0.0,99999999999\n",
            "line 2, column 'head': '99999999999' is no microbatch",
        ),
        ("stage 0,head\nF0.0,1\n", "line 2, column 'head': microbatch 1 is in no cell: use 0"),
        ('stage 0\n"F0.0\n', "line 2: a quote is opened and not closed: leave quotes out"),
        ("# plcae=v\nstage 0\nF0.0\n", "line 1: the setting 'plcae' is unknown: use place"),
        (
            "# place=v\n# place=circular\nstage 0\nF0.0\n",
            "line 2: place='circular' is another value than in line 1: leave one of them out",
        ),
        (
            "stage 0\n\n# remark\nF0.0\nB0.0\nF0.0\nW0.0\n",
            "line 6 (tick 2), column 'stage 0': F0.0 stands already in line 4: use it once",
        ),
        (
            "stage 0,stage 1,permute\n\nF0.0,,none\nF0.1,,none\n,,late\n,F0.0,\n,F0.1,\n",
            "line 4 (tick 1), column 'stage 0': F0.1 overwrites the message of F0.0 in line 3: "
            "send that by a permute before",
        ),
        (
            "stage 0,stage 1,permute\nF0.0,,none\n,F0.0,\n",
            "line 3 (tick 1), column 'stage 1': F0.0 waits for F0.0 of stage 0 in line 2, whose "
            "message no permute sends",
        ),
        (
            "# place=0,1\nstage 0\nF0.0\n",
            "line 1: place='0,1' names stage 1, and the header has 1 stage: use 0",
        ),
        (
            "# place=x\nstage 0\nF0.0\n",
            "line 1: place='x' is no place: use circular, v, or the stage of each unit",
        ),
        ("# chunk=0,2\n# place=0,0\nstage 0\nF0.0\n", "chunk='0,2': use 2 numbers"),
        (
            "# place=0\nstage 0\nF1.0\nF0.0\n",
            "line 3, column 'stage 0': there is no local unit 1 on a stage with 1",
        ),
        ("# vocabulary=some\nstage 0\nF0.0\n", "line 1: vocabulary='some' is unknown: use "),
        (
            "stage 0\nF0.0\nB0.0\n",
            "column 'stage 0': W0.0 is missing (1 in all): write it after B0.0 in line 3",
        ),
        (
            "stage 0\nF0.0\nF0.1+W0.0\n",
            "line 3, column 'stage 0': 'F0.1+W0.0' is no overlapped cell: write an F and a B, such "
            "as F0.7+B1.3",
        ),
        ("stage 0\nF0.0\nF0.1+B0.9\n", "line 3, column 'stage 0': B0.9 has microbatch 9, and "),
        ("stage 0\nF0.0+B0.0\nW0.0\n", "column 'stage 0': B0.0 waits for its F0.0 in line 2"),
        ("stage 0\nF0.0\nF0.1+C0.0\n", "'C0.0' has the unknown op 'C': use F, R, B"),
        (
            "stage 0\nRB0.0\n",
            "line 2, column 'stage 0': 'RB0.0' has the unknown op 'RB': use F, R, B or W",
        ),
        (
            "stage 0,stage 1,head\nF0.0,,\n\n,F0.0,\n,B0.0,0\nB0.0,W0.0,\nW0.0,,\n",
            "line 5 (tick 2), column 'stage 1': B0.0 waits for head of microbatch 0 in line 5: "
            "move it to line 6 or later",
        ),
        (
            "stage 0,head\n\nF0.0,\nB0.0,\nW0.0,\n",
            "column 'head': microbatch 0 is missing (1 in all): write it in line 3, the tick of "
            "F0.0, or after",
        ),
        (
            "stage 0,permute,head,embed,embed_gradient\nF0.1,,1,0,\nF0.0,,0,1,\n",
            "line 2 (tick 0), column 'stage 0': F0.1 waits for embed of microbatch 1",
        ),
    ],
)
def test_a_bad_csv_is_answered_with_the_place(content, said, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        read_csv(str(path))
    text = str(error.value)
    assert text.startswith(str(path)) and said in text and "\n" not in text


def test_what_editors_and_spreadsheets_do_to_a_file(tmp_path):
    table = make_table(TableSpec("zb_v", 3, 2, 4, permute="early"))
    plain, path = to_csv(table), tmp_path / "t.csv"
    comment, *rows = plain.splitlines()
    quoted = "\n".join(
        [comment, *(",".join(f'"{field}"' for field in line.split(",")) for line in rows)]
    )
    for text in (
        "\ufeff" + plain,
        plain.replace("\n", "\r\n"),
        plain.replace("\n", "\r"),
        quoted,
        plain.replace(",", " , "),
        plain.rstrip(),
    ):
        path.write_bytes(text.replace(comment.replace(",", " , "), comment).encode())
        assert same(read_csv(str(path)), table)


def test_lines_are_counted_as_an_editor_does(tmp_path):
    """A form feed or a line separator of Unicode ends no line; a carriage return does, alone or
    not."""
    path = tmp_path / "t.csv"
    path.write_bytes(
        "# one\x0c still one \u2028 still\r\n# two\rstage 0\r\n\r\nF0.0\nX0.0\n".encode()
    )
    with pytest.raises(
        ValueError, match="t.csv, line 6, column 'stage 0': 'X0.0' has the unknown op 'X'"
    ):
        read_csv(str(path))


def test_no_csv_at_all(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "zeros").write_bytes(b"stage 0\0\nF0.0\n")
    (tmp_path / "latin").write_bytes("# é\nstage 0\n".encode("latin-1"))
    (tmp_path / "wide").write_text("stage 0\nF0.0\n", encoding="utf-16")
    reasons = {
        "absent": "No such file",
        "binary": "it is text in UTF-16: save it as UTF-8",
        "zeros": "it is no text",
        "latin": "it is no text in UTF-8",
        "wide": "it is text in UTF-16: save it as UTF-8",
        ".": "it is not a regular file",
        "pipe": "it is not a regular file",
    }
    for name, reason in reasons.items():
        with pytest.raises(ValueError, match=rf"cannot be read \({reason}.*\): use a file that"):
            read_csv(str(tmp_path / name))
    with pytest.raises(ValueError, match="csv: names no file: use csv:FILE"):
        read_csv("")
