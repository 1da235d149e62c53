"""Checkpoints of a run: when one is begun, finished, found and deleted.

    directory/
      200/            a finished step; what is not finished has another name, so it is never found
        state/        parameters, optimizer and step: layers in order, nothing padded (layout.py, storage.py)
        meta/         JSON: everything else that a run needs to go on

Any mesh, placement and number of processes restores what any other has saved. Orbax sees to the background thread, to several
processes finishing together, and to the atomic end of a save.
"""

import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jaxtrain.checkpoint.layout import CheckpointError, stored_arrays
from jaxtrain.checkpoint.storage import host_tree, read_tree, tree_handler
from jaxtrain.pipeline.placement import Placement

STATE, META = "state", "meta"


def latest_step(directory: str | os.PathLike) -> int | None:
    """The newest finished step, None if there is none. All processes must call it: they take process 0's answer."""
    # File systems that hosts share may show a new folder to some of them later.
    folder = _folder(directory)
    steps = ocp.path.step.standard_name_format().find_all(folder) if folder.exists() else []
    step = max((s.step for s in steps), default=-1)
    if jax.process_count() > 1:
        step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
    return step if step >= 0 else None


def read_meta(directory: str | os.PathLike, step: int) -> dict:
    """The JSON that was saved with a step. Raises CheckpointError if there is none."""
    folder = _folder(directory) / str(step) / META
    if not folder.exists():
        raise CheckpointError(f"{directory} has no checkpoint of step {step}")
    return ocp.JsonCheckpointHandler().restore(folder, args=ocp.args.JsonRestore())


def _folder(directory: str | os.PathLike) -> epath.Path:
    text = os.fspath(directory)
    return epath.Path(text if "://" in text else os.path.abspath(text))


class Checkpointer:
    """Saves and restores the state of one run; every process calls every method.

    Args:
      directory: where the steps lie; made by the first save.
      placement: which layer lies in which row of the state's arrays.
      stored_shapes: a pytree like the state with each leaf's true shape, a tuple or an object with a `shape`: of one layer for
        leaves under "layers", without padding elsewhere. Of an object with a `lead`, too, that is added in front.
      keep: how many of the newest checkpoints are kept.
    """

    def __init__(self, directory: str | os.PathLike, placement: Placement, stored_shapes: Any, keep: int = 3):
        self._directory = _folder(directory)
        self._placement = placement
        self._stored_shapes = stored_shapes
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None

    def save(self, step: int, state: Any, meta: dict) -> bool:
        """Begins to save, and returns once the state is copied to the host: it may be changed or donated then.

        A save that is under way is finished first. Checkpoints beyond `keep` are deleted when this one is finished.

        Args:
          state: a pytree of jax.Array, as in the constructor's `stored_shapes`.
          meta: what JSON can hold.

        Returns:
          False if this step is already saved, or being saved.

        Raises:
          ValueError: the state is not laid out as the placement says.
          Exception: whatever made the save before this one fail.
        """
        if self._manager is None:
            self._manager = self._open()
        self._manager.wait_until_finished()
        if step in self._manager.all_steps():
            return False
        tree = host_tree(stored_arrays(state, self._stored_shapes, self._placement), state, self._placement)
        args = ocp.args.Composite(**{STATE: ocp.args.PyTreeSave(tree), META: ocp.args.JsonSave(meta)})
        # `force`: Orbax has ideas of its own about which steps are worth saving.
        return self._manager.save(step, args=args, force=True)

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            create=True,
            cleanup_tmp_directories=True,  # what an interrupted save has left; only the run that writes may delete it
            single_host_load_and_broadcast=True,  # as in latest_step: all processes must see the same steps
        )
        handlers = {STATE: tree_handler(), META: ocp.JsonCheckpointHandler()}
        return ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)

    def latest_step(self) -> int | None:
        """The newest finished step, None if there is none."""
        return latest_step(self._directory)

    def read_meta(self, step: int) -> dict:
        """The JSON that was saved with a step. Raises CheckpointError if there is none."""
        return read_meta(self._directory, step)

    def restore(self, step: int, abstract: dict) -> dict:
        """The state of a step, laid out as `abstract` says; padding and unused rows are zero.

        Args:
          abstract: the state with a jax.ShapeDtypeStruct with sharding for each array, or some of the state's top-level entries:
            `{"params": abstract["params"]}` reads the parameters alone.

        Raises:
          CheckpointError: no such step, or an array that is not stored or has another shape or dtype.
          ValueError: `abstract` is not laid out as the placement says.
        """
        folder = self._directory / str(step) / STATE
        if not folder.exists():
            raise CheckpointError(f"{self._directory} has no checkpoint of step {step}")
        arrays = stored_arrays(abstract, {k: self._stored_shapes[k] for k in abstract}, self._placement)
        return jax.tree.unflatten(jax.tree.structure(abstract), read_tree(folder, arrays, self._placement))

    def wait(self):
        """Returns when no save is under way; raises what made one fail."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self):
        """Waits, and ends Orbax's threads. The checkpointer cannot save any more."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None
