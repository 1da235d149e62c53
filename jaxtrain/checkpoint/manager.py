"""Checkpoints of a run: when one is begun, finished, chosen to go on from, and deleted.

    directory/
      200/            a finished step; what is not finished has another name, so it is never found
        state/        parameters, optimizer and step: layers in order, nothing padded (layout.py, storage.py)
        meta/         JSON: everything else that a run needs to go on

Any mesh, placement and number of processes restores what any other has saved. Orbax sees to the background thread, to several
processes finishing together, and to the atomic end of a save. What else may lie in the folder is known to steps.py; before the first
save whatever has a step's name and is no whole step gets another name.
"""

import asyncio
import dataclasses
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from jaxtrain.checkpoint import manifest, steps
from jaxtrain.checkpoint.database import STATE
from jaxtrain.checkpoint.layout import stored_arrays
from jaxtrain.checkpoint.steps import BROKEN, META, TO_TRAIN, CheckpointError, Choice, Meta, Shapes, Stranger, choose, read_meta
from jaxtrain.checkpoint.storage import host_tree, read_tree, tree_handler
from jaxtrain.config import Config
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import AXES, REPLICA
from jaxtrain.models.transformer import build
from jaxtrain.schedule.placement import Placement
from jaxtrain.training.optimizer import make_optimizer
from jaxtrain.training.state import Layout, abstract_state, stored_shapes


def _is_for_users(record: logging.LogRecord) -> bool:
    """Orbax warns of what a kill has left, of which nobody need know; what fails it raises, or logs as an error."""
    return record.levelno >= logging.ERROR or "orbax" not in record.pathname


logging.getLogger("absl").addFilter(_is_for_users)


def latest_step(directory: str | os.PathLike) -> int | None:
    """The newest whole step, None if there is none. All processes must call it: they take process 0's answer."""
    # File systems that hosts share may show a new folder to some of them later.
    return cluster.from_main(lambda: choose(directory, {}).step, CheckpointError)


def choose_together(directory: str | os.PathLike, damaged: Mapping[int, str] = steps.NONE, before: int | None = None) -> Choice:
    """The step that a run goes on from, and what else is there: process 0's answer, on every process. damaged, before: as in `choose`.

    Raises CheckpointError where there is no whole step, but something of one: a run that begins anew would push it aside.
    """

    def decide() -> dict:
        choice = choose(directory, TO_TRAIN, wrong_arrays, damaged, before)
        if choice.step is None and any(s.holds for s in choice.strangers):
            lost = ", ".join(str(s) for s in choice.strangers if s.holds)
            raise CheckpointError(f"{directory} has no whole checkpoint: {lost}: move it away to begin anew, or use another --workdir")
        return dataclasses.asdict(choice)

    values = cluster.from_main(decide, CheckpointError)
    meta = Meta(**values["meta"]) if values["meta"] else None
    return Choice(values["step"], meta, tuple(values["steps"]), tuple(Stranger(**stranger) for stranger in values["strangers"]))


def wrong_arrays(meta: Meta, stored: Shapes, trained_alone: bool = False) -> str:
    """Which array of a state is missing or is not as the config in its meta makes it, in words; "" if none.

    stored: the shapes of its arrays; trained_alone: of the parameters that are evaluated and used.
    """
    config = meta.stored_config().resolve()
    trained = "anchor/" if config.train.diloco_inner_steps else "params/"
    for name, shape in expected_shapes(config).items():
        if trained_alone and not name.startswith(trained):
            continue
        if name not in stored:
            return f"its state lacks {name}"
        if stored[name] != shape:
            return f"its state's {name} is {list(stored[name])}, not {list(shape)}"
    return ""


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Array → shape of the state that a resolved config's checkpoints hold. No device is used."""
    independent = config.train.diloco_inner_steps > 0
    sizes = [config.mesh.replica if independent and axis == REPLICA else 1 for axis in AXES]
    mesh: Any = jax.sharding.AbstractMesh(tuple(sizes), AXES)
    parts, placement = build(config.model, 1), Placement(config.model.layers)
    layout = Layout(parts, placement, mesh, 0, jnp.dtype(config.precision.params), independent)
    optimizer = make_optimizer(config.optimizer, config.train.steps, layout.specs)
    arrays = stored_arrays(abstract_state(layout, optimizer), stored_shapes(layout, optimizer), placement)
    return {array.name: array.shape for array in arrays}


def restore(directory: str | os.PathLike, step: int, abstract: Any, stored_shapes: Any, placement: Placement) -> Any:
    """The state of a step, laid out as `abstract` says; padding and unused rows are zero.

    Args:
      directory: where the steps lie.
      abstract: the state, or some of it, with a jax.ShapeDtypeStruct with sharding for each array.
      stored_shapes, placement: as in Checkpointer, for the same arrays.

    Raises:
      CheckpointError: no such step, or an array that is not stored or has another shape or dtype.
      DamageError: an array is damaged.
      ValueError: `abstract` is not laid out as the placement says.
    """
    directory = pathlib.Path(directory).absolute()
    folder = directory / str(step) / STATE
    if not folder.exists():
        raise CheckpointError(f"{directory} has no checkpoint of step {step}")
    arrays = stored_arrays(abstract, stored_shapes, placement)
    return jax.tree.unflatten(jax.tree.structure(abstract), read_tree(folder, arrays, placement))


class _UnfinishedStep(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A folder that is being saved. Process 0 finishes it, in the background, when all have written their part."""

    async def finalize(self) -> None:
        """Gives the folder its name; if it is a step, and not one of its parts, writes its manifest."""
        await super().finalize()
        if self.get_final().name not in (STATE, META):
            await asyncio.to_thread(manifest.write, self.get_final())


class Checkpointer:
    """Saves and restores the state of one run; every process calls every method.

    Args:
      directory: where the steps lie; made by the first save.
      placement: which layer lies in which row of the state's arrays.
      stored_shapes: a pytree like the state with each leaf's true shape, a tuple or an object with a `shape`: of one layer for
        leaves under "layers", without padding elsewhere. Of an object with a `lead`, too, that is added in front.
      keep: how many of the newest checkpoints are kept.
      broken: names of steps that are not whole, beside those that can be told by their files.
      say: gets a line for each name that is set aside.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        placement: Placement,
        stored_shapes: Any,
        keep: int = 3,
        broken: Sequence[Stranger] = (),
        say: Callable[[str], object] = print,
    ):
        self._directory = pathlib.Path(directory).absolute()
        self._placement = placement
        self._stored_shapes = stored_shapes
        self._keep, self._broken, self._say = keep, broken, say
        self._manager: ocp.CheckpointManager | None = None

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
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
        if cluster.is_main() and os.path.lexists(self._directory / str(step)):
            self._set_aside(str(step), "it has come since the last save")
        tree = host_tree(stored_arrays(state, self._stored_shapes, self._placement), state, self._placement)
        args = ocp.args.Composite(**{STATE: ocp.args.PyTreeSave(tree), META: ocp.args.JsonSave(dict(meta))})
        # `force`: Orbax has ideas of its own about which steps are worth saving.
        return self._manager.save(step, args=args, force=True)

    @property
    def busy(self) -> bool:
        """Whether a save is under way in this process."""
        return self._manager is not None and self._manager.is_saving_in_progress()

    def _open(self) -> ocp.CheckpointManager:
        cluster.from_main(self._set_all_aside, CheckpointError)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            create=True,
            cleanup_tmp_directories=True,  # what an interrupted save has left; only the run that writes may delete it
            single_host_load_and_broadcast=True,  # as in latest_step: all processes must see the same steps
            temporary_path_class=_UnfinishedStep,
        )
        handlers = {STATE: tree_handler(), META: ocp.JsonCheckpointHandler()}
        return ocp.CheckpointManager(epath.Path(self._directory), options=options, item_handlers=handlers)

    def _set_all_aside(self) -> None:
        """Before Orbax counts the steps: it would take all of these for steps, and delete whole ones for them."""
        broken = {s.name: s for s in (*steps.strangers(self._directory), *self._broken) if s.step is not None}
        whole = [step for step in choose(self._directory, {}).steps if str(step) not in broken]
        for stranger in broken.values():
            path = self._directory / stranger.name
            if sum(step > (stranger.step or 0) for step in whole) >= self._keep and path.is_dir() and not path.is_symlink():
                # So many newer ones are whole that it would be deleted if it were: a deletion was interrupted.
                shutil.rmtree(path, ignore_errors=True)
            if os.path.lexists(path):
                self._set_aside(stranger.name, stranger.why)

    def _set_aside(self, name: str, why: str) -> None:
        number = 1
        while os.path.lexists(self._directory / f"{name}{BROKEN}{number}"):
            number += 1
        try:
            os.rename(self._directory / name, self._directory / f"{name}{BROKEN}{number}")
        except OSError as error:
            raise CheckpointError(
                f"{self._directory / name} ({why}) is in the way and cannot be renamed ({error.strerror}): move it away"
            ) from None
        self._say(f"set aside in {self._directory}: {name} ({why}) is now {name}{BROKEN}{number}")

    def latest_step(self) -> int | None:
        """The newest finished step, None if there is none."""
        return latest_step(self._directory)

    def read_meta(self, step: int) -> dict:
        """The JSON that was saved with a step. Raises CheckpointError if there is none."""
        return read_meta(self._directory, step)

    def restore(self, step: int, abstract: Any) -> Any:
        """The state of a step, laid out as `abstract` says. Arguments and errors as of the function `restore`."""
        return restore(self._directory, step, abstract, self._stored_shapes, self._placement)

    def set_aside_after(self, step: int, why: str) -> None:
        """Gives every checkpoint of a later step another name, once no save is under way. Every process must call it."""
        self.close()  # Orbax remembers steps; the next save looks again

        def rename() -> None:
            for later in choose(self._directory, {}).steps:
                if later > step:
                    self._set_aside(str(later), why)

        cluster.from_main(rename, CheckpointError)

    def wait(self) -> None:
        """Returns when no save is under way; raises what made one fail."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends Orbax's threads, which another save would start again."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None
