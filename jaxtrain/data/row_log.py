"""The sequences of every batch and their places in it, as the processes have read them:
rows/PROCESS.jsonl in a run's folder, if `metrics.rows` is set.

    {"batch": 17, "processes": 4, "time": 1763786000.123, "places": [0, 1], "rows": [805, 12],
     "sources": ["web", "code"], "ordinals": [51, 17], "epochs": [0, 0],
     "ranges": [[[103040, 103168]], [[1536, 1600], [1700, 1764]]]}

Each process writes a line when its loop takes a batch, with the sequences that its own devices
hold: their numbers ("rows") among those of the source's training split, in their epoch; their
sources; the numbers of sequences of the source before them ("ordinals"); and the ranges of the
source's corpus that they read. These have a token more than the inputs, the last target. The first
token of a range is an input alone, so an epoch has every token once, but for the first tokens of
documents. `check_rows` proves from the files alone that no sequence and no token was repeated or
passed over, whatever the numbers of processes were. No jax.
"""

import itertools
import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxtrain.run import streams
from jaxtrain.run.files import LineFile

FOLDER = "rows"


class ReadSequence(NamedTuple):
    """A sequence that was read; fields as in the log."""

    source: str
    ordinal: int
    epoch: int
    number: int
    ranges: list[tuple[int, int]]


class SourceRows(NamedTuple):
    """What a run has read of a source: the numbers of sequences, of tokens that were
    predicted, and of the epochs in which they are."""

    sequences: int
    tokens: int
    epochs: int


class RowLog:
    """The file of one process. A line that a full disk refuses is written before the next one.

    Args:
      workdir: the run's folder.
      process, processes: the number of this process, and the number of processes.
    """

    def __init__(self, workdir: str | os.PathLike, process: int, processes: int):
        path, self._processes = pathlib.Path(workdir) / FOLDER / f"{process}.jsonl", processes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(path, streams.log)

    def write(self, batch: int, sequences: Mapping[int, ReadSequence]) -> None:
        """Writes a line. `sequences` maps places in the batch to what this process has read."""
        read = sequences.values()
        line = {
            "batch": batch,
            "processes": self._processes,
            "time": time.time(),
            "places": [*sequences],
            "rows": [one.number for one in read],
            "sources": [one.source for one in read],
            "ordinals": [one.ordinal for one in read],
            "epochs": [one.epoch for one in read],
            "ranges": [one.ranges for one in read],
        }
        self._file.write(json.dumps(line))


def read_rows(workdir: str | os.PathLike) -> dict[int, dict[int, ReadSequence]]:
    """Batch → place → sequence, from all processes of the last start that took the batch.

    Raises ValueError with the batch and the place where two processes have read different
    sequences. Places that no process has read are missing.
    """
    batches: dict[int, list[tuple[int, int, dict[int, ReadSequence]]]] = {}
    for path in sorted(
        (pathlib.Path(workdir) / FOLDER).glob("*.jsonl"), key=lambda path: int(path.stem)
    ):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            columns = (line[name] for name in ("sources", "ordinals", "epochs", "rows", "ranges"))
            read = itertools.starmap(ReadSequence, zip(*columns, strict=True))
            batches.setdefault(line["batch"], []).append(
                (int(path.stem), line["processes"], dict(zip(line["places"], read, strict=True)))
            )
    return {batch: _merged(batch, lines) for batch, lines in sorted(batches.items())}


def check_rows(workdir: str | os.PathLike) -> dict[str, SourceRows]:
    """Source → what the run has read of it, if no sequence of it was repeated or passed over, and
    no token: each epoch has a token once at most, and a whole one lacks less than a sequence.

    Raises ValueError with the batch, or the source and the epoch, where that is not so.
    """
    batches = read_rows(workdir)
    read: dict[str, list[ReadSequence]] = {}
    for expected, (batch, sequences) in enumerate(batches.items(), min(batches, default=0)):
        if batch != expected or sequences.keys() != set(range(len(sequences))):
            raise ValueError(f"batch {expected} is missing, or a part of it")
        for place, one in sorted(sequences.items()):
            before = read.setdefault(one.source, [])
            if before and one.ordinal != before[-1].ordinal + 1:
                raise ValueError(
                    f"batch {batch}, place {place}: sequence {one.ordinal} of source "
                    f"{one.source!r} comes after sequence {before[-1].ordinal}"
                )
            before.append(one)
    return {source: _source_rows(sequences) for source, sequences in read.items()}


def _source_rows(sequences: list[ReadSequence]) -> SourceRows:
    """What was read of a source. Raises ValueError for a token that an epoch has twice or lacks."""
    source, epochs = sequences[0].source, itertools.groupby(sequences, lambda one: one.epoch)
    everything, tokens, lacking, lengths = _predicted(sequences), 0, {}, {}
    for epoch, some in epochs:
        alike = [*some]
        # A corpus that is shorter than a sequence is repeated in it.
        read = sum(_predicted([one]) for one in alike)
        if (of_epoch := _predicted(alike)) < read:
            raise ValueError(f"epoch {epoch} of source {source!r} has a token twice")
        tokens += read
        lacking[epoch] = everything - of_epoch
        lengths[epoch] = max(sum(high - low for low, high in one.ranges) for one in alike) - 1
    # The rest of an epoch is shorter than a sequence, which may be as long as the next epoch's.
    whole = list(lengths)[bool(sequences[0].ordinal) : -1]
    for epoch in whole:
        if lacking[epoch] >= max(lengths[epoch], lengths.get(epoch + 1, 0)):
            raise ValueError(f"epoch {epoch} of source {source!r} lacks {lacking[epoch]} tokens")
    return SourceRows(len(sequences), tokens, len(lengths))


def _predicted(sequences: list[ReadSequence]) -> int:
    """The number of a corpus's tokens that are read after another one in some sequences."""
    ranges = np.array(sorted(each for one in sequences for each in one.ranges)).reshape(-1, 2)
    reached = np.append(0, np.maximum.accumulate(ranges[:, 1]))
    return int(np.maximum(0, reached[1:] - np.maximum(ranges[:, 0] + 1, reached[:-1])).sum())


def _merged(
    batch: int, lines: list[tuple[int, int, dict[int, ReadSequence]]]
) -> dict[int, ReadSequence]:
    """Place → sequence of one batch, from (process, number of processes, place → sequence) by
    process, each in the order of writing, whatever the clocks said. Every start has process 0."""
    main = min(process for process, _, _ in lines)
    processes = [count for process, count, _ in lines if process == main][-1]
    last = {process: sequences for process, count, sequences in lines if count == processes}
    merged: dict[int, ReadSequence] = {}
    for process, sequences in last.items():
        for place, sequence in sequences.items():
            if merged.setdefault(place, sequence) != sequence:
                raise ValueError(
                    f"batch {batch}, place {place}: process {process} has read sequence "
                    f"{sequence.number}, another one sequence {merged[place].number}"
                )
    return merged
