"""What a run does with checkpoints in its machines' own folders (`checkpoint.local`), from its
start to its end.

Writing is in local.py, restoring in local_restore.py.
"""

import dataclasses
import os
import pathlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxtrain.checkpoint.layout import stored_arrays
from jaxtrain.checkpoint.local import LocalCheckpointer, run_name
from jaxtrain.checkpoint.local_restore import LocalFiles, Saved
from jaxtrain.checkpoint.shards import Shards
from jaxtrain.checkpoint.steps import CheckpointError, Meta
from jaxtrain.devices import cluster
from jaxtrain.schedule.placement import Placement
from jaxtrain.training.recovery import Rollback


@dataclasses.dataclass(frozen=True, eq=False)
class LocalState:
    """A state from the machines' own folders. source: where it was found, in words."""

    step: int
    meta: Meta
    state: Any
    source: str


class LocalCheckpoints:
    """The local checkpoints of one run. Every process calls every method, at the same point of the
    program.

    Args:
      local: checkpoint.local; where it is empty nothing is ever found or saved.
      workdir, checkpoints: the run's folder, and that of its persistent checkpoints.
      abstract: the state as ShapeDtypeStructs with shardings.
      stored_shapes, placement: as in Checkpointer, for the same arrays.

    Raises CheckpointError, on all processes, where the run's id can be neither read nor written.
    """

    def __init__(
        self,
        local: str,
        workdir: pathlib.Path,
        checkpoints: str | os.PathLike,
        abstract: Any,
        stored_shapes: Any,
        placement: Placement,
    ):
        self._saver: LocalCheckpointer | None = None
        self._files: LocalFiles | None = None
        self._tree = jax.tree.structure(abstract)
        self._folder = pathlib.Path(local)
        if not local:
            return
        run, self._start = cluster.from_main(
            lambda: (run_name(workdir, checkpoints), secrets.token_hex(4)), CheckpointError
        )
        self._folder /= run
        self._shards = Shards(stored_arrays(abstract, stored_shapes, placement), placement)
        self._files = LocalFiles(self._folder, self._shards)

    def candidates(self, after: int, before: int, wrong: Callable[[Meta], str]) -> list[Saved]:
        """The steps that can be restored, newest first: arguments as of LocalFiles.candidates."""
        return self._files.candidates(after, before, wrong) if self._files else []

    def restore(self, candidates: list[Saved]) -> LocalState | None:
        """The newest state of the candidates that is undamaged on all machines together; None if
        there is none."""
        restored = self._files.restore(candidates) if self._files else None
        if restored is None:
            return None
        machines = (
            "this machine still has" if jax.process_count() == 1 else "the machines still have"
        )
        moved = (
            f"; {restored.moved:,} bytes of it came from other processes" if restored.moved else ""
        )
        source = f"which {machines} in {self._folder}{moved}"
        return LocalState(
            restored.step, restored.meta, jax.tree.unflatten(self._tree, restored.leaves), source
        )

    def begin(self, after: int, say: Callable[[str], object]) -> None:
        """Saving begins, in a run that goes on from step `after`. say: gets a line when a save
        fails."""
        if self._files:
            self._saver = LocalCheckpointer(self._folder, self._shards, self._start, after, say)

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """As LocalCheckpointer.save."""
        if self._saver:
            self._saver.save(step, state, meta)

    def go_back(self, rollback: Rollback) -> None:
        """Removes what this machine has of the steps that a rollback gives up."""
        if self._saver:
            self._saver.give_up(rollback.step)

    def forget(self) -> None:
        """Removes what this machine has of the run, whose newest step is saved for good."""
        if self._saver:
            self._saver.forget()

    def close(self) -> None:
        """Ends a save that is under way."""
        if self._saver:
            self._saver.close()
