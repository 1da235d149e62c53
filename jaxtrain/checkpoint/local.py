"""Local checkpoints, in a folder of each machine on a RAM disk or a local disk. They are written
every few steps and lost with the machine.

    LOCAL/tiny-3fa9c2b1d0e4/     a run: the name of its folder, and a digest of that folder and the
                                 run's id
      process-0/                 written by process 0
        30  35                   steps: the shards of its devices, one after the other, then the
                                 index, then the offset of the index
        .40                      a step that is being written

A file has the shards of one process, each once even if several of its devices hold it, and a
checksum for each. A save needs no collective and no agreement between processes: the next run finds
out which shards all processes together have (local_restore.py). Files of other runs are left alone.

Begin with `LocalCheckpointer.save`, and with `read_index` for the file's format.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxtrain.checkpoint.regions import Shard, Shards
from jaxtrain.checkpoint.steps import STEP_NAME, CheckpointError
from jaxtrain.checkpoint.storage import to_host
from jaxtrain.run.files import MOST_BYTES, open_regular, parse_json, replace_text

# in the folder of the persistent checkpoints: who deletes those begins another run
RUN_ID = ".run_id"
_TAIL = struct.Struct("<QI8s")  # bytes of the index, its checksum, MAGIC
MAGIC = b"JTLOCAL1"


@dataclasses.dataclass(frozen=True)
class ShardBytes:
    """The bytes of a shard in a file, and their checksum."""

    path: pathlib.Path
    offset: int
    size: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class FileIndex:
    """The index of a file.

    fingerprint: of the state's layout (Shards.fingerprint)
    start: the id of the start of the run that wrote it: files of two starts are never combined,
      for a start with other settings has other numbers for the same step
    meta: a checkpoint's meta, as JSON
    """

    fingerprint: str
    start: str
    meta: dict[str, Any]
    places: dict[Shard, ShardBytes]


class DamagedError(Exception):
    """A local file or a shard in it that is not as it was written; the message says which."""


def run_name(workdir: pathlib.Path, checkpoints: epath.Path) -> str:
    """The name of the run's folder on each machine. The main process alone calls it: others need
    not see the run's own folders yet.

    Makes the run's id, in the folder of its persistent checkpoints, if there is none.

    Raises CheckpointError if the id can be neither read nor written.
    """
    path = checkpoints / RUN_ID
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, secrets.token_hex(8) + "\n")
        run = path.read_text().strip()
    except OSError as error:
        raise CheckpointError(
            f"{path}, which tells this run's local checkpoints from others, cannot be used "
            f"({error.strerror})"
        ) from None
    workdir = workdir.absolute()
    return f"{workdir.name}-{hashlib.sha256(f'{run} {workdir}'.encode()).hexdigest()[:12]}"


class LocalCheckpointer:
    """Saves this process's shards of one run's state; every process calls every method.

    The newest two are retained while a third is written. Two are enough: a process begins to save
    only when the step is done on all devices, so when each has begun the save before, and has
    therefore finished the one before that.

    Args:
      folder: of the run on this machine; it exists, or can be made.
      shards: of the state.
      start: an id of this start of the run, the same on all processes.
      after: the step that this start resumes from; files of later steps are removed.
      log: gets a line when a save fails, and training goes on.
      process: this one's number.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        shards: Shards,
        start: str,
        after: int,
        log: Callable[[str], object],
        process: int | None = None,
    ):
        process = jax.process_index() if process is None else process
        self._run, self._folder = folder, folder / f"process-{process}"
        self._shards, self._log = shards, log
        self._needed = shards.needed_by(process)
        self._head = {"fingerprint": shards.fingerprint(), "start": start}
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="local_checkpoint"
        )
        self._writing: concurrent.futures.Future[None] | None = None
        self._saved: list[int] = []
        self._failed = False
        # Removed: links, which lead to files that are not this run's, and files that a killed
        # process was writing.
        links = [path for path in (self._run, self._folder) if path.is_symlink()]
        for path in links or self._folder.glob(".*"):
            path.unlink(missing_ok=True)
        # Files of later steps belong to a course that this start does not take: after a kill they
        # could pass for its own.
        self.give_up(after)

    def give_up(self, after: int) -> None:
        """Removes the files on this machine of steps later than `after`, from which the run goes
        on."""
        self.wait()
        self._saved = [step for step in self._saved if step <= after]
        for path, step in files_of(self._run):
            if step > after:
                path.unlink(missing_ok=True)

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Begins to save, and returns once this process's shards are copied to the host: the state
        may be changed or donated then.

        A save that is under way is finished first. The failure of one is told by a line, and the
        next is tried.

        Args:
          state: a pytree of jax.Array, whose layout is that of `shards`.
          meta: a JSON object.
        """
        # Before the copies are made: two copies of the state would be in the host's memory, and on
        # a RAM disk files are memory, too.
        self.wait()
        self._remove_old()
        leaves = jax.tree.leaves(state)
        data_of = {
            leaf: {shard.device: shard.data for shard in leaves[leaf].addressable_shards}
            for leaf in self._shards.leaves
        }
        copies = []
        for shard in self._needed:
            devices = self._shards.devices[shard]
            data = next(data_of[shard.leaf][d] for d in devices if d in data_of[shard.leaf])
            data.copy_to_host_async()  # all copies are under way before the first is waited for
            copies.append((shard, data))
        numbers = [(shard, to_host(data)) for shard, data in copies]
        self._writing = self._thread.submit(self._write, step, numbers, dict(meta))

    def wait(self) -> None:
        """Returns when no save is under way."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def forget(self) -> None:
        """Removes all files of the run on this machine: the persistent checkpoints have its newest
        step."""
        self.wait()
        shutil.rmtree(self._run, ignore_errors=True)

    def close(self) -> None:
        """Waits for a save that is under way, and ends the thread."""
        self.wait()
        self._thread.shutdown()

    def _write(
        self, step: int, numbers: list[tuple[Shard, np.ndarray]], meta: dict[str, Any]
    ) -> None:
        unfinished = self._folder / f".{step}"
        size = sum(array.nbytes for _, array in numbers)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # No fsync: the folder is lost with its machine, and after a kill of the process alone
            # the system still has what was written. A file that a crash of the machine has cut off
            # is known by its checksums.
            with open(unfinished, "wb") as file:
                _write_file(file, numbers, self._head | {"meta": meta})
            os.rename(unfinished, self._folder / str(step))
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            if not self._failed:  # once for as long as it lasts
                self._log(
                    f"warning: local checkpoint {step} is not written ({error.strerror}; "
                    f"{size:,} bytes in {self._folder})"
                )
            self._failed = True
        else:
            self._saved.append(step)
            self._failed = False

    def _remove_old(self) -> None:
        """Removes this run's files on this machine beyond the newest two of this process, before it
        writes one more."""
        if len(self._saved) < 2:
            return
        for path, step in files_of(self._run):
            is_old = path.parent == self._folder and step not in self._saved[-2:]
            # Processes of another number, of an earlier start, may have written here; those at work
            # now are at most a save behind.
            if is_old or (len(self._saved) >= 3 and step < self._saved[-3]):
                path.unlink(missing_ok=True)


def _write_file(file: Any, numbers: list[tuple[Shard, np.ndarray]], index: dict[str, Any]) -> None:
    # The index comes last, since it has the checksums of shards that are written as they come.
    places, offset = [], 0
    while numbers:  # each copy is freed as it is written
        shard, array = numbers.pop(0)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        file.write(data)
        places.append([shard.leaf, shard.bounds, offset, data.nbytes, zlib.crc32(data)])
        offset += data.nbytes
    text = json.dumps(index | {"places": places}).encode()
    file.write(text)
    file.write(_TAIL.pack(len(text), zlib.crc32(text), MAGIC))


def files_of(run: pathlib.Path) -> list[tuple[pathlib.Path, int]]:
    """The files of finished steps of a run on this machine, with their steps, whichever processes
    have written them: by process, then by step."""
    paths = [
        path
        for path in run.glob("process-*/*")
        if STEP_NAME.fullmatch(path.name) and not (run.is_symlink() or path.parent.is_symlink())
    ]
    return sorted(((path, int(path.name)) for path in paths), key=lambda f: (f[0].parent, f[1]))


def read_index(path: pathlib.Path) -> FileIndex:
    """The index of a file. Raises DamagedError if it cannot be read, or is not as it was
    written."""
    try:
        # From the end: the last bytes say where the index begins. Everything is checked before it
        # is used, because the file may be cut off anywhere or be no checkpoint at all.
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TAIL.size, 0))
            tail = file.read()
            length, crc32, magic = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, 0, b"")
            if magic != MAGIC or length > min(size, MOST_BYTES):
                raise DamagedError(f"{path} is cut off or damaged")
            file.seek(size - _TAIL.size - length)
            index = file.read(length)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from None
    if zlib.crc32(index) != crc32:
        raise DamagedError(f"{path} is damaged in its index")
    try:
        values = parse_json(index)
        places = {
            Shard(leaf, tuple((start, stop) for start, stop in bounds)): ShardBytes(path, *place)
            for leaf, bounds, *place in values["places"]
        }
        return FileIndex(values["fingerprint"], values["start"], values["meta"], places)
    except (ValueError, KeyError, TypeError):
        raise DamagedError(f"{path} has an index that jaxtrain does not write") from None


def read_shard(stored: ShardBytes, shard: Shard, dtype: np.dtype) -> np.ndarray:
    """A shard's numbers. Raises DamagedError if they cannot be read, or are not those that were
    written."""
    numbers = np.empty(shard.shape, dtype)
    data = numbers.reshape(-1).view(np.uint8).data
    try:
        with open(stored.path, "rb") as file:
            file.seek(stored.offset)
            read = file.readinto(data)
    except OSError as error:
        raise DamagedError(f"{stored.path} cannot be read ({error.strerror})") from None
    if (read, stored.size) != (data.nbytes, data.nbytes) or zlib.crc32(data) != stored.crc32:
        end = stored.offset + stored.size
        raise DamagedError(f"{stored.path} is damaged at bytes {stored.offset:,} to {end:,}")
    return numbers
