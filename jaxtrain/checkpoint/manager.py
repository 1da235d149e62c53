"""Checkpoints of a run: when one is begun, finished, chosen to go on from, and deleted.

    directory/
      200/            a finished step; what is not finished has another name, so it is never found
        state/        parameters, optimizer and step: layers in order, nothing padded (layout.py,
                      storage.py)
        meta/         JSON: everything else that a run needs to go on

Any mesh, placement and number of processes restores what any other has saved. A save goes on in a
thread (saving.py); which steps are kept is decided in keeping.py. What else may lie in the folder
is known to steps.py; before the first save whatever has a step's name and is no whole step gets
another name.
"""

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from jaxtrain.checkpoint import keeping, steps, stores
from jaxtrain.checkpoint.database import STATE
from jaxtrain.checkpoint.keeping import Keep
from jaxtrain.checkpoint.layout import stored_arrays
from jaxtrain.checkpoint.saving import Outcome, Save, SaveThread
from jaxtrain.checkpoint.steps import (
    BROKEN,
    TO_TRAIN,
    CheckpointError,
    Choice,
    Meta,
    Shapes,
    Stranger,
    choose,
    read_meta,
)
from jaxtrain.checkpoint.storage import host_tree, read_tree
from jaxtrain.config import Config
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import AXES, REPLICA
from jaxtrain.models.transformer import build
from jaxtrain.schedule.placement import Placement
from jaxtrain.training.optimizer import make_optimizer
from jaxtrain.training.state import Layout, abstract_state, stored_shapes


def _is_for_users(record: logging.LogRecord) -> bool:
    """Orbax warns of what nobody need know, and logs with a traceback what it raises, too."""
    return "orbax" not in record.pathname


logging.getLogger("absl").addFilter(_is_for_users)


def latest_step(directory: str | os.PathLike) -> int | None:
    """The newest whole step, None if there is none. All processes must call it: they take process
    0's answer."""
    # File systems that hosts share may show a new folder to some of them later.
    return cluster.from_main(lambda: choose(directory, {}).step, CheckpointError)


def choose_together(
    directory: str | os.PathLike, damaged: Mapping[int, str] = steps.NONE, before: int | None = None
) -> Choice:
    """The step that a run goes on from, and what else is there: process 0's answer, on every
    process. damaged, before: as in `choose`.

    Raises CheckpointError where there is no whole step, but something of one: a run that begins
    anew would push it aside.
    """

    def decide() -> dict:
        choice = choose(directory, TO_TRAIN, wrong_arrays, damaged, before)
        if choice.step is None and any(s.holds for s in choice.strangers):
            lost = ", ".join(str(s) for s in choice.strangers if s.holds)
            raise CheckpointError(
                f"{directory} has no whole checkpoint: {lost}: move it away to begin anew, or "
                "use another --workdir"
            )
        return dataclasses.asdict(choice)

    values = cluster.from_main(decide, CheckpointError)
    meta = Meta(**values["meta"]) if values["meta"] else None
    return Choice(
        values["step"],
        meta,
        tuple(values["steps"]),
        tuple(Stranger(**stranger) for stranger in values["strangers"]),
    )


def wrong_arrays(meta: Meta, stored: Shapes, trained_alone: bool = False) -> str:
    """Which array of a state is missing or is not as the config in its meta makes it, in words; ""
    if none.

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
    arrays = stored_arrays(
        abstract_state(layout, optimizer), stored_shapes(layout, optimizer), placement
    )
    return {array.name: array.shape for array in arrays}


def restore(
    directory: str | os.PathLike, step: int, abstract: Any, stored_shapes: Any, placement: Placement
) -> Any:
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
    steps_folder = stores.absolute(directory)
    folder = steps_folder / str(step) / STATE
    if not folder.exists():
        raise CheckpointError(f"{steps_folder} has no checkpoint of step {step}")
    arrays = stored_arrays(abstract, stored_shapes, placement)
    return jax.tree.unflatten(jax.tree.structure(abstract), read_tree(folder, arrays, placement))


def _remove(folder: epath.Path) -> None:
    """Removes a folder if that is possible."""
    with contextlib.suppress(OSError):
        folder.rmtree()


class Checkpointer:
    """Saves and restores the state of one run; every process calls every method, at the same points
    of the program.

    Args:
      directory: where the steps lie; made by the first save.
      placement: which layer lies in which row of the state's arrays.
      stored_shapes: a pytree like the state with each leaf's true shape, a tuple or an object with
        a `shape`: of one layer for leaves under "layers", without padding elsewhere. Of an object
        with a `lead`, too, that is added in front.
      keep: which checkpoints are kept; a number is of the newest.
      broken: names of steps that are not whole, beside those that can be told by their files.
      say: gets a line for each name that is set aside, and for each save that fails.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        placement: Placement,
        stored_shapes: Any,
        keep: Keep | int = 3,
        broken: Sequence[Stranger] = (),
        say: Callable[[str], object] = print,
    ):
        self._directory = stores.absolute(directory)
        self._placement = placement
        self._stored_shapes = stored_shapes
        self._keep, self._broken, self._say = (
            keep if isinstance(keep, Keep) else Keep(keep),
            broken,
            say,
        )
        # those that are whole, or being saved; None before the first save
        self._steps: set[int] | None = None
        self._thread: SaveThread | None = None
        self._number = 0  # of the save in this run
        self._unsaved: Outcome | None = None  # a save that could not begin, if none has begun since
        self._is_last = False  # whether the save that is under way is waited for as the last one
        self._blocked_s: dict[int, float] = {}  # by step, of saves whose figures were not asked for
        self._ended: dict[int, Outcome] = {}
        self.longest_s = 0.0  # of the saves that have ended well

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
        """Begins to save, and returns once the state is copied to the host: it may be changed or
        donated then.

        A save that is under way is finished first, but not tried again. If it fails, that is said.
        Checkpoints that need not be kept are deleted when this one is finished.

        Args:
          state: a pytree of jax.Array, as in the constructor's `stored_shapes`.
          meta: what JSON can hold.

        Returns:
          False if this step is already saved, or being saved, or if the storage does not even say
          what is there, which is said.

        Raises:
          ValueError: the state is not laid out as the placement says.
          CheckpointError: what is in the way cannot be set aside.
        """
        began = time.monotonic()
        arrays = stored_arrays(state, self._stored_shapes, self._placement)
        if self._steps is None:
            tidied = cluster.from_main(self._try_to_tidy_up, CheckpointError)
            if tidied["why"]:
                self._unsaved = Outcome(step, tidied["why"], 1, time.monotonic() - began)
                if cluster.is_main():
                    self._conclude(self._unsaved)
                return False
            self._steps, self._unsaved = set(tidied["steps"]), None
            # by now they have other names, and theirs may be those of whole steps again
            self._broken = ()
        if self._thread:
            self._thread.give_up_waiting()
            self._settle()
        if step in self._steps:
            return False
        tree = host_tree(arrays, state, self._placement)
        self._number += 1
        self._steps.add(step)
        self._thread = SaveThread(
            self._directory, Save(self._number, step, tree, meta), self._prepare, self._conclude
        )
        self._blocked_s[step] = time.monotonic() - began
        return True

    @property
    def busy(self) -> bool:
        """Whether a save is under way in this process."""
        return self._thread is not None and self._thread.busy

    @property
    def newest(self) -> int | None:
        """The newest step that is saved, or being saved, as far as this run knows; None if there is
        none."""
        return max(self._steps, default=None) if self._steps else None

    def evaluated(self, step: int, loss: float | None) -> None:
        """Notes the validation loss of a step that is saved, or being saved: `checkpoint ls` shows
        it, and the best are kept by it."""
        if loss is not None and step in (self._steps or ()) and cluster.is_main():
            self._try(
                lambda: keeping.note_loss(self._directory, step, loss),
                f"the validation loss of step {step} is not noted",
            )

    def figures(self) -> dict[int, dict[str, float]]:
        """Step → how long its save blocked its caller, and how long it took in all, for those that
        have ended well since this was asked."""
        ended, self._ended = self._ended, {}
        blocked = {step: self._blocked_s.pop(step) for step in ended}
        well = {step: outcome for step, outcome in ended.items() if not outcome.why}
        return {
            s: {"save_blocked_s": round(blocked[s], 6), "save_s": round(outcome.seconds, 6)}
            for s, outcome in well.items()
        }

    def _settle(self) -> Outcome | None:
        """Waits for the save that is under way, if one is, and notes how it ended."""
        if self._thread is None:
            return None
        thread, self._thread = self._thread, None
        outcome = thread.wait()
        self._ended[outcome.step] = outcome
        if outcome.why:
            assert self._steps is not None
            self._steps.discard(outcome.step)
        else:
            self.longest_s = max(self.longest_s, outcome.seconds)
        return outcome

    # ---------------------------------------------------------------- process 0

    def _prepare(self, step: int) -> None:
        """Before a save is finished: nothing may have its name."""
        if stores.exists(self._directory / str(step)):
            self._set_aside(str(step), "it has come since the last save")

    def _conclude(self, outcome: Outcome) -> None:
        """After a save has ended, in its thread."""
        if outcome.why and self._is_last:
            return  # whoever waits for it is told
        if not outcome.why:
            delete = lambda: keeping.delete_others(self._directory, self._keep, outcome.step)
            self._try(
                delete, f"checkpoints that need not be kept are not deleted in {self._directory}"
            )
            return
        self._say(
            f"warning: step {outcome.step} is not saved: {self._failure(outcome)}; the next "
            "save tries again"
        )

    def _failure(self, outcome: Outcome) -> str:
        """Why a save failed, and what there is instead."""
        newest = max((step for step in self._steps or () if step != outcome.step), default=None)
        kept = "there is no checkpoint" if newest is None else f"the newest checkpoint is {newest}"
        tried = (
            f"{outcome.attempts} attempt{'s'[: outcome.attempts > 1]} in {outcome.seconds:.0f} s"
        )
        return f"{outcome.why} ({tried}); {kept} in {self._directory}"

    def _try_to_tidy_up(self) -> dict:
        """The steps that are there after `_tidy_up`; or why the storage does not do that, in
        words."""
        try:
            return {"steps": self._tidy_up(), "why": ""}
        except CheckpointError:
            raise
        except Exception as error:
            if not (why := stores.failure(error)):
                raise
            return {"steps": [], "why": why}

    def _tidy_up(self) -> list[int]:
        """Before the first save: removes what a kill has left, and sets aside what is no whole
        step. The steps that are there then."""
        broken = {
            s.name: s
            for s in (*steps.strangers(self._directory), *self._broken)
            if s.step is not None
        }
        whole = [step for step in choose(self._directory, {}).steps if str(step) not in broken]
        for name in keeping.unfinished(self._directory):
            _remove(self._directory / name)
        for stranger in broken.values():
            path = self._directory / stranger.name
            if (
                sum(step > (stranger.step or 0) for step in whole) >= self._keep.newest
                and path.is_dir()
                and not os.path.islink(path)
            ):
                # So many newer ones are whole that it would be deleted if it were: a deletion was
                # interrupted.
                _remove(path)
            if stores.exists(path):
                self._set_aside(stranger.name, stranger.why)
        forget = lambda: keeping.forget_losses(self._directory, whole)
        self._try(forget, f"validation losses of steps that are gone stay in {self._directory}")
        return whole

    def _try(self, do: Callable[[], object], otherwise: str) -> None:
        """Does what the run can do without; where the storage does not, a warning says what is then
        so."""
        try:
            do()
        except Exception as error:
            if not (why := stores.failure(error)):
                raise
            self._say(f"warning: {otherwise} ({why})")

    def _set_aside(self, name: str, why: str) -> None:
        number = 1
        while stores.exists(self._directory / f"{name}{BROKEN}{number}"):
            number += 1
        try:
            stores.move(self._directory / name, self._directory / f"{name}{BROKEN}{number}")
        except OSError as error:
            raise CheckpointError(
                f"{self._directory / name} ({why}) is in the way and cannot be renamed "
                f"({stores.failure(error)}): move it away"
            ) from None
        self._say(f"set aside in {self._directory}: {name} ({why}) is now {name}{BROKEN}{number}")

    # ---------------------------------------------------------------- all processes

    def latest_step(self) -> int | None:
        """The newest finished step, None if there is none."""
        return latest_step(self._directory)

    def read_meta(self, step: int) -> dict:
        """The JSON that was saved with a step. Raises CheckpointError if there is none."""
        return read_meta(self._directory, step)

    def restore(self, step: int, abstract: Any) -> Any:
        """The state of a step, laid out as `abstract` says. Arguments and errors as of the function
        `restore`."""
        return restore(self._directory, step, abstract, self._stored_shapes, self._placement)

    def set_aside_after(self, step: int, why: str) -> None:
        """Gives every checkpoint of a later step another name, once no save is under way. Every
        process must call it."""
        self.close()
        self._steps = None  # the next save looks again
        # Of a step that is saved again only the second save has figures.
        self._ended = {saved: outcome for saved, outcome in self._ended.items() if saved <= step}
        self._blocked_s = {
            saved: seconds for saved, seconds in self._blocked_s.items() if saved <= step
        }

        def rename() -> None:
            for later in choose(self._directory, {}).steps:
                if later > step:
                    self._set_aside(str(later), why)

        cluster.from_main(rename, CheckpointError)

    def wait(self) -> None:
        """Returns when no save is under way. Raises CheckpointError if the last one has failed."""
        self._is_last = True
        outcome = self._settle() or self._unsaved
        self._is_last = False
        if outcome and outcome.why:
            raise CheckpointError(
                f"step {outcome.step}, the last of this run, is not saved: {self._failure(outcome)}"
            )

    def close(self) -> None:
        """Waits for the save that is under way, whatever becomes of it."""
        if self._thread:
            self._thread.give_up_waiting()
        self._settle()
