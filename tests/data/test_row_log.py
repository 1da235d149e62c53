"""The log of sequences: a full disk, several starts, processes that disagree. test_loader.py tests
what the loader writes into it."""

import pytest

from jaxtrain.data import row_log
from jaxtrain.data.row_log import ReadSequence, RowLog, read_rows


def read(number):
    return ReadSequence("", number, 0, number, [[8 * number, 8 * number + 8]])


def test_sequences_that_cannot_be_written_cost_a_warning(tmp_path, capsys):
    """A link to a device is not written through, and is not read to its end."""
    log = RowLog(tmp_path, 0, 1)
    (tmp_path / "rows" / "0.jsonl").symlink_to("/dev/zero")
    for batch in range(3):
        log.write(batch, {0: read(5)})
    out, err = capsys.readouterr()
    assert (
        not out
        and err.count("\n") == 1
        and "rows/0.jsonl cannot be written (it is a device, not a file): training goes on" in err
    )


def test_sequences_of_the_last_start_count_whatever_its_clock_says(tmp_path, monkeypatch):
    for seconds, processes, sequences in (
        (9000.0, 2, [{0: read(5)}, {1: read(6)}]),
        (5000.0, 1, [{0: read(7), 1: read(8)}]),
    ):
        monkeypatch.setattr(row_log.time, "time", lambda seconds=seconds: seconds)
        for process, own in enumerate(sequences):
            RowLog(tmp_path, process, processes).write(3, own)
    assert read_rows(tmp_path) == {3: {0: read(7), 1: read(8)}}


def test_processes_that_read_different_sequences_are_found_out(tmp_path):
    for process, sequence in enumerate([7, 8]):
        RowLog(tmp_path, process, 2).write(3, {0: read(5), 1: read(sequence)})
    with pytest.raises(
        ValueError, match="batch 3, place 1: process 1 has read sequence 8, another one sequence 7"
    ):
        read_rows(tmp_path)
