"""Which row of the corpus stood where in every batch, as the processes have read them:
rows/PROCESS.jsonl in a run's folder.

    {"batch": 17, "processes": 4, "time": 1763786000.123, "places": [0, 1, 2, 3],
     "rows": [805, 12, 330, 41]}

A line is written by each process as its loop takes a batch, with the rows that its own devices
hold. Only `metrics.rows` asks for it: it proves that changing the number of processes neither
repeats nor skips a row. No jax.
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
    """What one process writes. A line that has no room on the disk is written before the next one.

    Args:
      workdir: of the run.
      process, processes: the number of this one, and how many there are.
    """

    def __init__(self, workdir: str | os.PathLike, process: int, processes: int):
        path, self._processes = pathlib.Path(workdir) / FOLDER / f"{process}.jsonl", processes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(path, streams.log)

    def write(self, batch: int, rows: Mapping[int, int | None]) -> None:
        """One line. rows: place in the batch → row of the split, of those that this process has
        read."""
        line = {
            "batch": batch,
            "processes": self._processes,
            "time": time.time(),
            "places": [*rows],
            "rows": [*rows.values()],
        }
        self._file.write(json.dumps(line))


def read_rows(workdir: str | os.PathLike) -> dict[int, dict[int, int]]:
    """Batch → place → row, from all processes of the start that has taken the batch last.

    Processes that hold the same place have read the same row: ValueError names the batch and the
    place where they have not. Places that nobody has read are missing.
    """
    found: dict[int, list[tuple[int, int, dict[int, int]]]] = {}
    for path in sorted(
        (pathlib.Path(workdir) / FOLDER).glob("*.jsonl"), key=lambda path: int(path.stem)
    ):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            rows = dict(zip(line["places"], line["rows"], strict=True))
            found.setdefault(line["batch"], []).append((int(path.stem), line["processes"], rows))
    return {batch: _together(batch, lines) for batch, lines in sorted(found.items())}


def _together(batch: int, lines: list[tuple[int, int, dict[int, int]]]) -> dict[int, int]:
    """lines: by process, each in the order in which it was written, whatever its clock said;
    process 0 is in every start."""
    first = min(process for process, _, _ in lines)
    processes = [those for process, those, _ in lines if process == first][-1]
    last = {process: rows for process, those, rows in lines if those == processes}
    whole: dict[int, int] = {}
    for process, rows in last.items():
        for place, row in rows.items():
            if whole.setdefault(place, row) != row:
                raise ValueError(
                    f"batch {batch}, place {place}: process {process} has read row {row}, "
                    f"another one row {whole[place]}"
                )
    return whole
