"""The log of sequences: a full disk, several starts, processes that disagree. test_loader.py tests
what the loader writes into it."""

import json

import pytest

from jaxtrain.data import row_log
from jaxtrain.data.row_log import ReadSequence, RowLog, SourceRows, check_rows, read_rows


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


def two_epochs(change):
    """Batches of two sequences of 8 tokens, two epochs of a corpus of 65; `change` is made to the
    sequences."""
    order = [2, 0, 3, 1, 5, 7, 6, 4, 1, 0, 2, 3, 7, 4, 5, 6, 0, 1]
    read = [
        ReadSequence("a", ordinal, ordinal // 8, number, [(8 * number, 8 * number + 9)])
        for ordinal, number in enumerate(order)
    ]
    change(read)
    return read


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda read: read.__delitem__(9), "batch 4, place 1: sequence 10 of source 'a' comes"),
        (lambda read: read.insert(9, read[8]), "batch 4, place 1: sequence 8 of source 'a' comes"),
        (
            lambda read: read.__setitem__(9, read[9]._replace(ranges=[(8, 17)])),
            "epoch 1 of source 'a' has a token twice",
        ),
        (
            lambda read: read.__setitem__(9, read[9]._replace(ranges=[(0, 1)])),
            "epoch 1 of source 'a' lacks 8 tokens",
        ),
    ],
)
def test_what_is_repeated_or_passed_over_is_found(tmp_path, change, message):
    for folder, changes in (("right", lambda read: None), ("wrong", change)):
        log, read = RowLog(tmp_path / folder, 0, 1), two_epochs(changes)
        for batch in range(len(read) // 2):
            log.write(batch, {0: read[2 * batch], 1: read[2 * batch + 1]})
    assert check_rows(tmp_path / "right") == {"a": SourceRows(18, 144, 3)}
    with pytest.raises(ValueError, match=f"^{message}"):
        check_rows(tmp_path / "wrong")


def test_a_missing_batch_is_found(tmp_path):
    log = RowLog(tmp_path, 0, 1)
    for batch in (3, 4, 6):
        log.write(batch, {0: read(batch)})
    with pytest.raises(ValueError, match="^batch 5 is missing"):
        check_rows(tmp_path)
    assert [json.loads(line)["batch"] for line in (tmp_path / "rows/0.jsonl").open()] == [3, 4, 6]
