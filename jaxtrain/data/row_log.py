"""The sequences of every batch and their places in it, as the processes have read them:
rows/PROCESS.jsonl in a run's folder, if `metrics.rows` is set.

    {"batch": 17, "processes": 4, "time": 1763786000.123, "places": [0, 1, 2, 3],
     "rows": [805, 12, 330, 41]}

Each process writes a line when its loop takes a batch, with the numbers in the split ("rows") of
the sequences that its own devices hold. The files prove that another number of processes neither
repeats nor skips a sequence. No jax.
"""

import json
import os
import pathlib
import time
from collections.abc import Mapping

from jaxtrain.run import streams
from jaxtrain.run.files import LineFile

FOLDER = "rows"


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

    def write(self, batch: int, sequences: Mapping[int, int | None]) -> None:
        """Writes a line. `sequences` maps places in the batch to the sequences of the split that
        this process has read."""
        line = {
            "batch": batch,
            "processes": self._processes,
            "time": time.time(),
            "places": [*sequences],
            "rows": [*sequences.values()],
        }
        self._file.write(json.dumps(line))


def read_rows(workdir: str | os.PathLike) -> dict[int, dict[int, int]]:
    """Batch → place → sequence, from all processes of the last start that took the batch.

    Raises ValueError with the batch and the place where two processes have read different
    sequences. Places that no process has read are missing.
    """
    batches: dict[int, list[tuple[int, int, dict[int, int]]]] = {}
    for path in sorted(
        (pathlib.Path(workdir) / FOLDER).glob("*.jsonl"), key=lambda path: int(path.stem)
    ):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            sequences = dict(zip(line["places"], line["rows"], strict=True))
            batches.setdefault(line["batch"], []).append(
                (int(path.stem), line["processes"], sequences)
            )
    return {batch: _merged(batch, lines) for batch, lines in sorted(batches.items())}


def _merged(batch: int, lines: list[tuple[int, int, dict[int, int]]]) -> dict[int, int]:
    """Place → sequence of one batch, from (process, number of processes, place → sequence) by
    process, each in the order of writing, whatever the clocks said. Every start has process 0."""
    main = min(process for process, _, _ in lines)
    processes = [count for process, count, _ in lines if process == main][-1]
    last = {process: sequences for process, count, sequences in lines if count == processes}
    merged: dict[int, int] = {}
    for process, sequences in last.items():
        for place, sequence in sequences.items():
            if merged.setdefault(place, sequence) != sequence:
                raise ValueError(
                    f"batch {batch}, place {place}: process {process} has read sequence "
                    f"{sequence}, another one sequence {merged[place]}"
                )
    return merged
