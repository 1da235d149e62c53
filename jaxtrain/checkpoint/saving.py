"""A save, in a thread: all processes write it, and retry when the storage fails; process 0 finishes
it. There is one save at a time.

    process 0   makes N.orbax-checkpoint-tmp/
    each        writes its part of the arrays into it, and tells process 0 if that has failed
    process 0   joins the parts, finds every piece of every array in what lies there, writes meta
                and manifest, and renames the folder to N/: a step appears complete or not at all
                (in an object store it has this name from the beginning, and the manifest makes it
                complete)
                or removes the folder, waits, and lets all retry; or gives up
    each        is told the result

Processes talk through jax's coordination service, because a thread must not mix collectives with
those of the main thread. manager.py decides which steps stay.
"""

import dataclasses
import importlib.metadata
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxtrain.checkpoint import manifest, stores
from jaxtrain.checkpoint.manifest import META, STATE, DatabaseError
from jaxtrain.checkpoint.steps import ORBAX_UNFINISHED, CheckpointError, is_unfinished
from jaxtrain.checkpoint.storage import tree_handler
from jaxtrain.devices import cluster
from jaxtrain.run.exit_status import ExitStatus, RunError

# Before this version of Orbax a save does not end, or fails.
ORBAX = (0, 12, 5)
# Seconds before each further attempt: a store that fails for half a minute costs no checkpoint.
RETRY_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

FAULT = "a fault in the program"

# The class of Orbax that reads each item, for programs that know Orbax alone.
_ORBAX_METADATA = {
    "item_handlers": {
        META: "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler",
        STATE: "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler",
    },
    "metrics": {},
    "performance_metrics": {},
    "custom_metadata": {},
}


class OrbaxError(RunError):
    """A version of Orbax that saves no checkpoints of ours; the text is one line."""

    status = ExitStatus.BAD_CONFIG


def check_orbax() -> None:
    """Raises OrbaxError where the installed Orbax is older than ORBAX."""
    version = importlib.metadata.version("orbax-checkpoint")
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < ORBAX:
        needed = ".".join(map(str, ORBAX))
        raise OrbaxError(
            f"orbax-checkpoint {version} is installed, in which saves hang or fail: python -m pip "
            f"install -U 'orbax-checkpoint>={needed}'"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Save:
    """The data of a save. number: of the save in this run; tree: this process's HostArrays
    (storage.host_tree); meta: a JSON object; blocked_s: seconds that its caller waited."""

    number: int
    step: int
    tree: dict
    meta: Mapping[str, Any]
    blocked_s: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a save. why: the last failure, in words, "" if it succeeded; seconds: of all
    attempts together; blocked_s: seconds that its caller waited."""

    step: int
    why: str
    attempts: int
    seconds: float
    blocked_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The answer of process 0 to an attempt. why: the failure, "" if there is none."""

    why: str
    retry: bool


class SaveThread:
    """A save that is under way.

    Args:
      directory: where the steps lie.
      save: the same step and number on every process.
      before: called with the step in process 0 alone, in the thread, before the step appears in the
        directory.
      after: called in process 0 alone, in the thread, when the save has ended.
    """

    def __init__(
        self,
        directory: epath.Path,
        save: Save,
        before: Callable[[int], object],
        after: Callable[[Outcome], object],
    ):
        self._directory, self._save, self._before, self._after = directory, save, before, after
        # a store's folder cannot be renamed: a step is complete when its manifest exists
        self._in_place = bool(stores.scheme_of(directory))
        self._unfinished = directory / f"{save.step}{'' if self._in_place else ORBAX_UNFINISHED}"
        self._hurry = threading.Event()
        # of the program: it is raised where the save is waited for
        self._fault: Exception | None = None
        self.outcome: Outcome | None = None
        # A daemon: a process that ends for another reason does not wait for a store that does not
        # answer.
        self._thread = threading.Thread(target=self._run, name=f"save {save.step}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    def give_up_waiting(self) -> None:
        """Makes this attempt the last, for another save is due."""
        self._hurry.set()

    def wait(self) -> Outcome:
        """The outcome of the save, when it has ended. Raises a fault in the program."""
        self._thread.join()
        if self._fault is not None:
            raise self._fault
        assert self.outcome is not None
        return self.outcome

    def _run(self) -> None:
        began, attempt, verdict = time.monotonic(), 0, Verdict("", retry=True)
        try:
            while verdict.retry:
                verdict = self._attempt(attempt)
                attempt += 1
            seconds, save = time.monotonic() - began, self._save
            self.outcome = Outcome(save.step, verdict.why, attempt, seconds, save.blocked_s)
            # In this thread too: deletions in a remote store take as long as a save.
            if cluster.is_main():
                self._after(self.outcome)
        except Exception as error:
            self._fault = self._fault or error

    def _attempt(self, attempt: int) -> Verdict:
        """The answer of process 0 when all have written their shards."""
        # Every process asks the same questions in the same order, whatever has failed on it, or the
        # others would wait for an answer that never comes. Each attempt has questions of its own.
        question = f"save {self._save.number}/{attempt}"
        # Nobody writes before the folder is there: to make it is to remove an earlier attempt's.
        why = cluster.told_by_main(f"{question}/folder", lambda: self._failure(self._make_folder))
        # Process 0 has all reports only when all have written, so this is the barrier before the
        # parts are joined.
        reports = cluster.told_to_main(f"{question}/parts", why or self._failure(self._write))

        def decide() -> dict:
            # The coordination service keeps every answer, and a run has thousands of saves. All
            # processes have begun this save, so nobody asks for the answers of the one before.
            cluster.forget(f"save {self._save.number - 1}")
            why = next(filter(None, reports), "") or self._failure(self._finish)
            if why:
                # a full disk needs the space for the next attempt
                self._failure(lambda: stores.remove(self._unfinished))
            last = attempt == len(RETRY_WAITS_S) or why.startswith(FAULT)
            retry = bool(why) and not last and not self._hurry.wait(RETRY_WAITS_S[attempt])
            return {"why": why, "retry": retry}

        return Verdict(**cluster.told_by_main(f"{question}/end", decide))

    def _failure(self, do: Callable[[], object]) -> str:
        """Calls `do`, and returns the storage's failure in words, "" if there is none. A fault in
        the program has words too, for which the others wait; `wait` raises it."""
        try:
            do()
        except Exception as error:
            if why := stores.failure(error):
                return why
            if isinstance(error, CheckpointError):
                return str(error)
            if isinstance(error, DatabaseError):
                return f"the state that was written {error}"
            self._fault = error
            return f"{FAULT}: {type(error).__name__}"
        return ""

    def _make_folder(self) -> None:
        # In a store the step has its final name from the beginning: a complete step of that name,
        # which has come since the last save, is set aside before the files of this one replace it.
        if self._in_place and not is_unfinished(self._unfinished):
            self._before(self._save.step)
        stores.remove(self._unfinished)
        for item in (STATE, META):
            (self._unfinished / item).mkdir(parents=True)

    def _write(self) -> None:
        if not (self._in_place or (self._unfinished / STATE).is_dir()):
            raise CheckpointError(
                f"process {jax.process_index()} does not see {self._unfinished}, which process 0 "
                "has made in its folder"
            )
        tree_handler().save(self._unfinished / STATE, args=ocp.args.PyTreeSave(self._save.tree))

    def _finish(self) -> None:
        # The order matters: the manifest lists every other file, so it is last; and the rename
        # makes the step visible, so it comes after the manifest. A kill between any two lines
        # leaves a folder that no reader takes for a step.
        folder = self._unfinished
        tree_handler().finalize(folder / STATE)
        (folder / META / "metadata").write_text(json.dumps(dict(self._save.meta)))
        times = {"init_timestamp_nsecs": time.time_ns(), "commit_timestamp_nsecs": time.time_ns()}
        (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(_ORBAX_METADATA | times))
        manifest.write(folder)
        if not self._in_place:
            self._before(self._save.step)
            folder.rename(self._directory / str(self._save.step))
