"""The checkpoints that a run saves while it trains. `RunCheckpoints` saves the state, and goes back
to an earlier step. `Checkpointer` begins and ends the save of a persistent checkpoint, and sets
steps aside or deletes them.

    RunCheckpoints.save      the numbers are good     no: nothing is saved
      Checkpointer.save      is this step saved already? the copies to the host (storage.py)
        SaveThread           the files, in a thread, with retries (saving.py)
        retention.py         the steps that stay, and the deletion of others
      LocalCheckpointer.save this machine's file (local.py)

    directory/
      200/            a finished step; an unfinished one has another name, so it is never taken
        state/        parameters, optimizer and step: layers in order, nothing padded (regions.py,
                      storage.py)
        meta/         JSON: everything else that a run needs to resume

Any mesh, placement and number of processes can restore what any other has saved (resuming.py).
Before the first save, everything that has a step's name and is not a complete step is renamed.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxtrain.checkpoint import retention, stores
from jaxtrain.checkpoint.local import LocalCheckpointer
from jaxtrain.checkpoint.regions import stored_arrays
from jaxtrain.checkpoint.resuming import (
    Candidates,
    StartPoint,
    choose_together,
    restore_newest,
    stored_state,
)
from jaxtrain.checkpoint.saving import Outcome, Save, SaveThread
from jaxtrain.checkpoint.steps import (
    BROKEN,
    VERSION,
    CheckpointError,
    Meta,
    UnrecognizedEntry,
    choose,
    is_unfinished,
    step_numbers,
    unrecognized,
)
from jaxtrain.checkpoint.storage import host_tree
from jaxtrain.config import to_dict
from jaxtrain.devices import cluster
from jaxtrain.training.parameter_checks import Finiteness
from jaxtrain.training.recovery import DetectorState, NumbersError, Rollback, SpikeDetector
from jaxtrain.training.state import TrainState, with_working

# Orbax warns of what users need not know, and logs with a traceback what it raises, too.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


class RunCheckpoints:
    """The checkpoints of a run that trains. Every process calls every method, at the same point of
    the program.

    Args:
      candidates: among which the run has found its start; they have its config, batches and step.
      start: the step that the run starts from.
      detector: decides whether the run's numbers may be saved; its state is saved with them.
      wall_s: returns the seconds that the run has taken, over all its starts.
      log: gets a line for each entry that is set aside, and for each save that fails.

    persistent: saves the persistent ones.
    """

    def __init__(
        self,
        candidates: Candidates,
        start: StartPoint,
        detector: SpikeDetector,
        wall_s: Callable[[], float],
        log: Callable[[str], object],
    ):
        folder, self._step = candidates.chosen.folder, candidates.step
        self._directory, self._config = folder.directory, folder.run.config
        self._corpora, self._new_state = candidates.batches.corpora, candidates.new_state
        self._origin = candidates.chosen.origin
        self._detector, self._wall_s = detector, wall_s
        self._finite = Finiteness(self._step.mesh)
        settings = self._config.checkpoint
        _, stored = stored_state(self._step)
        self.persistent = Checkpointer(
            self._directory,
            stored,
            retention.Retention(settings.keep, settings.keep_every, settings.keep_best),
            start.unrecognized,
            log,
            # numbers on disk are read while they are written, and the next step would change them
            waits=self._step.layout.disk is not None,
        )
        self._local: LocalCheckpointer | None = None
        if local := candidates.local:
            self._local = LocalCheckpointer(
                local.files.folder, local.files.shards, local.start_id, start.step, log
            )

    def save(
        self, at: int, state: TrainState, position: int, persistent: bool, locally: bool
    ) -> bool:
        """Begins the saves of step `at` that are asked for, and returns True; False, and nothing is
        saved, if its numbers are not good. The state may be donated when this returns.

        position: the number of the next batch.

        Raises NumbersError if parameters that are not finite end the run.
        """
        # A checkpoint with bad numbers would be the newest one, which a restart takes. The loss of
        # a step says nothing of the parameters after its update, so these are looked at themselves.
        if not self._detector.check_parameters(
            at, position, self._finite((state.read, state.anchor))
        ):
            return False
        meta = Meta(
            config=to_dict(self._config),
            version=VERSION,
            step=at,
            position=position,
            wall_s=self._wall_s(),
            checksum=self._corpora.checksum,
            checksums=self._corpora.checksums,
            tokenizer=self._corpora.tokenizer.describe(),
            memory=self._detector.state.to_json(),
        )
        if self._local and locally:
            self._local.save(at, state.stored, dataclasses.asdict(meta))
        if persistent:
            self.persistent.save(at, state.stored, dataclasses.asdict(meta))
        return True

    def roll_back(self, state: TrainState) -> tuple[Rollback, TrainState]:
        """Goes back to the newest complete checkpoint from before the detector's fault, or to the
        run's beginning if there is no checkpoint at all. Returns the roll-back and the state.

        A save that is under way is finished first. Later checkpoints are set aside, because their
        steps are trained again. `state` is deleted, to free its memory. Nothing is compiled.

        Raises NumbersError if there are checkpoints, but none from before the fault;
        CheckpointError as `choose_together` and `restore_newest` do.
        """
        fault = self._detector.fault
        assert fault
        self.persistent.close()
        choice = choose_together(self._directory, before=fault.since)
        if choice.step is None and (later := choose_together(self._directory).steps):
            raise NumbersError(
                f"{fault.why}; the checkpoints that are kept begin with step {later[0]}, and the "
                "run would have to go back further: keep more of them (checkpoint.keep), or make "
                "them less often (checkpoint.every)"
            )
        # The loop holds these arrays until this returns, so to drop references would free nothing.
        for array in jax.tree.leaves(state):
            array.delete()
        if choice.step is not None:
            choose_again = functools.partial(choose_together, self._directory, before=fault.since)
            stored, choice = restore_newest(
                choice, choose_again, self._directory, *stored_state(self._step)
            )
            state, meta = with_working(self._step.layout, stored), choice.meta
        else:
            state, meta = self._new_state(), self._origin.meta
        at = meta.step
        # Only now that an earlier step is restored: a run that ends before this line finds the
        # later steps at its next start, with the detector's state in them, and decides as here.
        self.persistent.set_aside_after(at, f"the run went back to step {at}")
        position = meta.position if fault.batch is None else fault.batch + 1
        rollback = Rollback(fault.at, at, position, fault.why, DetectorState.from_json(meta.memory))
        if self._local:
            self._local.give_up(at)
        return rollback, state

    def finish(self, at: int) -> None:
        """Waits for the last save. Local checkpoints are removed if step `at`, the last, is saved
        persistently.

        Raises CheckpointError if the last save has failed.
        """
        self.persistent.wait()
        if self._local and self.persistent.newest == at:
            self._local.forget()

    def close(self) -> None:
        """Waits for saves that are under way, whether they succeed or not."""
        if self._local:
            self._local.close()
        self.persistent.close()


class Checkpointer:
    """Saves the state of one run; every process calls every method, at the same points of the
    program.

    Args:
      directory: the folder of the steps; the first save makes it.
      stored: a pytree like the state with a Stored for each leaf (`training.state.stored_shapes`).
      keep: which steps stay.
      broken: entries that are no complete steps, besides those that can be told by their files.
      log: gets a line for each entry that is set aside, and for each save that fails.
      waits: a save returns when it has ended, for the state is not copied before.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        stored: Any,
        keep: retention.Retention = retention.NEWEST_THREE,
        broken: Sequence[UnrecognizedEntry] = (),
        log: Callable[[str], object] = print,
        waits: bool = False,
    ):
        self._directory = stores.absolute(directory)
        self._stored = stored
        self._keep, self._broken, self._log, self._waits = keep, broken, log, waits
        self._steps: set[int] | None = None  # complete or being saved; None before the first save
        self._complete: set[int] = set()  # of these, in process 0 (retention.delete_others)
        self._thread: SaveThread | None = None
        self._number = 0  # of the save in this run
        self._unsaved: Outcome | None = None  # a save that could not begin, if none has begun since
        self._is_last = False  # whether the save that is under way is waited for as the last one
        self._ended: list[Outcome] = []  # of saves whose figures were not asked for
        self.longest_s = 0.0  # of the saves that have succeeded; 0 before the first

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
        """Begins to save, and returns once the state is copied to the host: it may be changed or
        donated then.

        A save that is under way is finished first, but not retried. Its failure is told by a line.
        Checkpoints that need not stay are deleted when this one is finished.

        Args:
          state: a pytree of jax.Array, as in the constructor's `stored`.
          meta: a JSON object.

        Returns:
          False if this step is already saved, or being saved, or if the storage does not even list
          its steps, which is told by a line.

        Raises:
          ValueError: the state is not laid out as `stored` says.
          CheckpointError: an entry that is in the way cannot be set aside.
        """
        arrays = stored_arrays(state, self._stored)
        return self.save_tree(step, lambda: host_tree(arrays, state), meta)

    def save_tree(self, step: int, tree: Callable[[], dict], meta: Mapping[str, Any]) -> bool:
        """Does as `save`, for a state that is not in the devices' memory.

        tree: returns the nested dict of this process's HostArrays, once no save is under way
        """
        began = time.monotonic()
        if self._steps is None:
            # Not when the run starts: until it saves, it changes nothing in the folder. Process 0
            # alone deletes and renames, so no process ever finds another one's work half done.
            tidied = cluster.from_main(self._tidy_up, CheckpointError)
            if tidied["why"]:
                self._unsaved = Outcome(step, tidied["why"], 1, time.monotonic() - began)
                if cluster.is_main():
                    self._conclude(self._unsaved)
                return False
            self._steps, self._unsaved = set(tidied["steps"]), None
            # by now they have other names, and theirs may be those of complete steps
            self._broken = ()
        # One save at a time: two would hold two copies of the state in the host's memory.
        self.close()
        if step in self._steps:
            return False
        arrays = tree()
        self._number += 1
        # Noted before it is complete, on every process alike; `_settle` takes a failed one out.
        self._steps.add(step)
        save = Save(self._number, step, arrays, meta, time.monotonic() - began)
        self._thread = SaveThread(self._directory, save, self._prepare, self._conclude)
        if self._waits:
            self._unsaved = self._settle()
        return True

    @property
    def busy(self) -> bool:
        """True while a save is under way in this process."""
        return self._thread is not None and self._thread.busy

    @property
    def newest(self) -> int | None:
        """The newest step that is saved, or being saved, as far as this run knows; None if there is
        none."""
        return max(self._steps, default=None) if self._steps else None

    def evaluated(self, step: int, loss: float | None) -> None:
        """Notes the validation loss of a step that is saved, or being saved: `checkpoint ls` shows
        it, and the best steps are known by it."""
        if loss is not None and step in (self._steps or ()) and cluster.is_main():
            self._try(
                lambda: retention.note_losses(
                    self._directory, step_numbers(self._directory), {step: loss}
                ),
                f"the validation loss of step {step} is not noted",
            )

    def figures(self) -> dict[int, dict[str, float]]:
        """Step → the seconds that its save blocked its caller and took in all, for saves that have
        succeeded since the last call."""
        ended, self._ended = self._ended, []
        return {
            save.step: {
                "save_blocked_s": round(save.seconds if self._waits else save.blocked_s, 6),
                "save_s": round(save.seconds, 6),
            }
            for save in ended
            if not save.why
        }

    def set_aside_after(self, step: int, why: str) -> None:
        """Gives every checkpoint of a later step another name, once no save is under way."""
        # A save that ended after the renames would bring a later step back.
        self.close()
        self._steps = None  # the next save looks again
        # A step that is saved again has the figures of its second save alone.
        self._ended = [save for save in self._ended if save.step <= step]

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
        """Waits for the last attempt of the save that is under way, whether it succeeds or not."""
        if self._thread:
            self._thread.give_up_waiting()
        self._settle()

    def _settle(self) -> Outcome | None:
        """Waits for the save that is under way, if one is, and notes how it ended."""
        if self._thread is None:
            return None
        # Dropped first: `wait` may raise a fault of the program, and `close` is called again then.
        thread, self._thread = self._thread, None
        outcome = thread.wait()
        self._ended.append(outcome)
        if outcome.why:
            assert self._steps is not None
            self._steps.discard(outcome.step)
        else:
            self.longest_s = max(self.longest_s, outcome.seconds)
        return outcome

    # ---------------------------------------------------------------- process 0

    def _prepare(self, step: int) -> None:
        """Before a save is finished: sets aside what has its name."""
        if stores.exists(self._directory / str(step)):
            self._set_aside(str(step), "it has come since the last save")

    def _conclude(self, outcome: Outcome) -> None:
        """After a save has ended, in its thread."""
        # Steps are deleted only when a newer one is complete, so a failed save costs none of them.
        if outcome.why and self._is_last:
            return  # whoever waits for it is told
        if outcome.why:
            self._log(
                f"warning: step {outcome.step} is not saved: {self._failure(outcome)}; the next "
                "save tries again"
            )
            return
        self._try(
            lambda: retention.delete_others(
                self._directory, self._keep, outcome.step, self._complete
            ),
            f"checkpoints that need not be kept are not deleted in {self._directory}",
        )

    def _failure(self, outcome: Outcome) -> str:
        """The failure of a save, and the checkpoint that there is instead."""
        newest = max((step for step in self._steps or () if step != outcome.step), default=None)
        instead = (
            "there is no checkpoint" if newest is None else f"the newest checkpoint is {newest}"
        )
        tried = (
            f"{outcome.attempts} attempt{'s'[: outcome.attempts > 1]} in {outcome.seconds:.0f} s"
        )
        return f"{outcome.why} ({tried}); {instead} in {self._directory}"

    def _tidy_up(self) -> dict:
        """Before the first save: removes what a kill has left, and sets aside what is no complete
        step. Returns the complete steps, or why the storage fails, in words."""
        try:
            # A step that cannot be read at the moment, which `choose` leaves out, is not broken.
            broken = {
                entry.name: entry
                for entry in (*unrecognized(self._directory), *self._broken)
                if entry.step is not None
            }
            complete = [
                step for step in choose(self._directory, {}).steps if str(step) not in broken
            ]
            if self._directory.is_dir():
                with contextlib.suppress(OSError):
                    retention.delete(list(filter(is_unfinished, self._directory.iterdir())))
            for entry in broken.values():
                path = self._directory / entry.name
                # What is left of an interrupted deletion is deleted if enough newer steps are
                # complete that the policy would not retain it; all else is set aside, not lost.
                newer = sum(step > (entry.step or 0) for step in complete)
                if newer >= self._keep.newest and retention.is_remainder(path):
                    with contextlib.suppress(OSError):
                        retention.delete([path])
                if stores.exists(path):
                    self._set_aside(entry.name, entry.why)
        except Exception as error:
            if not (why := stores.failure(error)):
                raise
            return {"steps": [], "why": why}
        self._try(
            lambda: retention.note_losses(self._directory, complete, log=self._log),
            f"validation losses of steps that are gone stay in {self._directory}",
        )
        return {"steps": complete, "why": ""}

    def _try(self, do: Callable[[], object], otherwise: str) -> None:
        """Calls `do`, without which the run can go on; a failure of the storage is told by a
        warning that says `otherwise`."""
        try:
            do()
        except Exception as error:
            if not (why := stores.failure(error)):
                raise
            self._log(f"warning: {otherwise} ({why})")

    def _set_aside(self, name: str, why: str) -> None:
        # Never over an entry that was set aside before: it may be the only copy of its step.
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
        self._log(f"set aside in {self._directory}: {name} ({why}) is now {name}{BROKEN}{number}")
