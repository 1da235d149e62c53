"""The retention of checkpoints: which steps stay, and the deletion of the others. No jax.

validation_losses.json      {"100": 3.41, "200": 3.27}: step → loss, for the steps that exist. It is
                            a file of its own because a step is evaluated after its save
"""

import dataclasses
import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from etils import epath

from jaxtrain.checkpoint import manifest, steps, stores
from jaxtrain.run.files import parse_json, replace_text

DELETION_S = 1.0  # a deletion that makes no progress for so many seconds was interrupted


@dataclasses.dataclass(frozen=True)
class Retention:
    """The rule for steps that stay: the `newest`, at least one; every step that `every` divides;
    the `best` by validation loss."""

    newest: int
    every: int = 0
    best: int = 0

    def retained(self, steps: Iterable[int], losses: Mapping[int, float]) -> set[int]:
        """The steps that stay. losses: step → validation loss, for those that have one."""
        in_order = sorted(steps)
        by_loss = sorted(losses.keys() & in_order, key=lambda step: (losses[step], -step))
        periodic = {step for step in in_order if self.every and step % self.every == 0}
        return {*in_order[-max(self.newest, 1) :], *by_loss[: self.best], *periodic}


NEWEST_THREE = Retention(3)


def delete_others(
    directory: epath.Path, retention: Retention, saved: int, complete: set[int]
) -> None:
    """Deletes the steps that need not stay now that the step `saved` is complete, and remains of
    deletions. Steps that are not complete keep no place of another one's, and are left: the next
    run sets them aside. Raises OSError as `delete`.

    complete: the steps that this run knows to be complete, to which others are added. Of these only
    the manifest is looked for: a large model's step has thousands of files, each a request or two
    to a store.
    """
    present = [step for step in steps.step_numbers(directory) if step <= saved]
    losses = read_losses(directory)
    complete.add(saved)

    def fault(step: int) -> str:
        folder = directory / str(step)
        why = "" if step in complete and (folder / manifest.FILE).exists() else steps.fault(folder)
        complete.update([] if why else [step])
        return why

    # A broken step would take the place of a good one among the newest or the best. So those that
    # the policy would retain are checked, and it is asked again without the broken ones, until all
    # that it retains are complete. Steps that `every` retains take no place, and are not checked.
    counted = dataclasses.replace(retention, every=0)
    while broken := {s for s in counted.retained(present, losses) - {saved} if fault(s)}:
        present = [step for step in present if step not in broken]
    delete(
        directory / str(step)
        for step in sorted(set(present) - retention.retained(present, losses))
        if is_remainder(directory / str(step)) or not fault(step)
    )


def is_remainder(step: epath.Path) -> bool:
    """True for the folder of a step that was being deleted: it has no manifest."""
    return (
        step.is_dir()
        and os.access(step, os.R_OK | os.X_OK)
        and not (os.path.islink(step) or stores.exists(step / manifest.FILE))
    )


def delete(folders: Iterable[epath.Path]) -> None:
    """Deletes steps, the manifest of each first: the rest of an interrupted deletion must not look
    complete. Of a link nothing but the link is deleted. Raises OSError that names those which
    cannot be deleted, after all others."""
    failures = []
    for step in folders:
        # A failure ends the deletion of one step alone: a disk that fills up needs the others gone.
        try:
            if step.is_dir() and not os.path.islink(step):
                (step / manifest.FILE).unlink(missing_ok=True)
            stores.remove(step)
        except OSError as error:
            failures.append(f"{step.name}: {error.strerror}")
    if failures:
        raise OSError(errno.EACCES, ", ".join(failures))


def read_losses(
    directory: epath.Path, log: Callable[[str], object] = lambda line: None
) -> dict[int, float]:
    """Step → validation loss, for those that are known. log: gets a line about a damaged file,
    which the next loss replaces; the steps are retained by their numbers until then."""
    try:
        values = parse_json(stores.read_within(directory, steps.LOSSES))
        return {
            int(step): float(loss) for step, loss in values.items() if math.isfinite(float(loss))
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log(f"note: {directory / steps.LOSSES} is not used ({getattr(error, 'strerror', error)})")
        return {}


def note_losses(
    directory: epath.Path,
    present: Iterable[int],
    added: Mapping[int, float] = MappingProxyType({}),
    log: Callable[[str], object] = lambda line: None,
) -> None:
    """Forgets the validation losses of all steps but these, and adds others: a step that is saved
    again under the same number has another one. log: as of `read_losses`."""
    before, remaining = read_losses(directory, log), {*present, *added}
    losses = {s: v for s, v in {**before, **added}.items() if s in remaining and math.isfinite(v)}
    if losses != before:
        directory.mkdir(parents=True, exist_ok=True)
        replace_text(directory / steps.LOSSES, json.dumps(losses))


def was_deleted(folder: epath.Path, had_manifest: bool) -> bool:
    """True if a step that lacks something is being deleted, as runs delete steps that they no
    longer retain: the manifest goes first (`delete`), then the rest, with no pause as long as
    DELETION_S. Waits for the end of that deletion."""
    # Nobody says that a deletion is under way, so it is told by its progress: fewer entries at each
    # look. One that stands still was interrupted, and what is left is damage.
    before, end = -1, 0.0
    while folder.exists():
        if had_manifest and (folder / manifest.FILE).exists():
            return False
        remaining = sum(len(files) + len(folders) for _, folders, files in os.walk(folder))
        if remaining != before:
            before, end = remaining, time.monotonic() + DELETION_S
        if time.monotonic() > end:
            return False
        time.sleep(DELETION_S / 10)
    return True
