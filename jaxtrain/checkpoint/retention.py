"""The retention of checkpoints: which steps stay, and the deletion of the others. No jax.

validation_losses.json      {"100": 3.41, "200": 3.27}: step → loss, for the steps that exist. It is
                            a file of its own because a step is evaluated after its save
"""

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterable, Mapping

from etils import epath

from jaxtrain.checkpoint import manifest, steps
from jaxtrain.checkpoint.steps import LOSSES

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


def delete_others(directory: epath.Path, retention: Retention, saved: int) -> None:
    """Deletes the steps that need not stay now that the step `saved` is complete. Raises OSError
    where that is not possible."""
    present = [step for step in steps.step_numbers(directory) if step <= saved]
    for step in sorted(set(present) - retention.retained(present, read_losses(directory))):
        delete(directory / str(step))


def delete(step: epath.Path) -> None:
    """Deletes a step, the manifest first: the rest of an interrupted deletion must not look
    complete."""
    (step / manifest.FILE).unlink(missing_ok=True)
    step.rmtree()


def read_losses(directory: epath.Path) -> dict[int, float]:
    """Step → validation loss, for those that are known."""
    try:
        values = json.loads((directory / LOSSES).read_bytes())
        return {
            int(step): float(loss) for step, loss in values.items() if math.isfinite(float(loss))
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # it is missing or damaged: the steps are retained by their numbers


def note_loss(directory: epath.Path, step: int, loss: float) -> None:
    """Adds a step's validation loss, and forgets those of steps that are gone."""
    present = {*steps.step_numbers(directory), step}
    losses = read_losses(directory) | {step: loss}
    directory.mkdir(parents=True, exist_ok=True)
    _write_losses(
        directory,
        {s: known for s, known in losses.items() if s in present and math.isfinite(known)},
    )


def forget_losses(directory: epath.Path, present: Iterable[int]) -> None:
    """Forgets the validation losses of all steps but these: a step that is saved again under the
    same number has another one."""
    losses = read_losses(directory)
    if gone := losses.keys() - set(present):
        _write_losses(directory, {step: loss for step, loss in losses.items() if step not in gone})


def _write_losses(directory: epath.Path, losses: Mapping[int, float]) -> None:
    unfinished = directory / f".{LOSSES}"
    unfinished.write_text(json.dumps(losses))
    unfinished.replace(directory / LOSSES)


def was_deleted(folder: epath.Path, had_manifest: bool) -> bool:
    """True if a step that lacks something is being deleted, as runs delete steps that they no
    longer retain: the manifest goes first (`delete`), then the rest, with no pause as long as
    DELETION_S. Waits for the end of that deletion."""
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
