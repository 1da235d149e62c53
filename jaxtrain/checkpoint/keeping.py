"""Which checkpoints are kept, and the deletion of the others. No jax.

validation_losses.json      {"100": 3.41, "200": 3.27}: by step, of the steps that are there; an
                            evaluation comes after its save
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

DELETION_S = 1.0  # seconds in which the deletion of a step comes further


@dataclasses.dataclass(frozen=True)
class Keep:
    """What is kept: so many of the newest, at least one; every step that `every` divides; so many
    of the lowest validation loss."""

    newest: int = 3
    every: int = 0
    best: int = 0

    def kept(self, present: Iterable[int], losses: Mapping[int, float]) -> set[int]:
        """Those of the present steps that are kept."""
        in_order = sorted(present)
        by_loss = sorted(
            (step for step in in_order if step in losses), key=lambda step: (losses[step], -step)
        )
        periodic = {step for step in in_order if self.every and step % self.every == 0}
        return {*in_order[-max(self.newest, 1) :], *by_loss[: self.best], *periodic}


def delete_others(directory: epath.Path, keep: Keep, saved: int) -> None:
    """Deletes the steps that need not be kept now that the step `saved` is there. OSError where
    that is not possible."""
    present = [step for step in steps.names(directory) if step <= saved]
    kept = keep.kept(present, read_losses(directory))
    for step in present:
        if step not in kept:
            delete(directory / str(step))


def delete(step: epath.Path) -> None:
    """Deletes a step, the manifest first: what an interruption leaves must not look whole."""
    (step / manifest.FILE).unlink(missing_ok=True)
    step.rmtree()


def unfinished(directory: epath.Path) -> list[str]:
    """The names of saves that did not end, none of which is under way."""
    return (
        [path.name for path in directory.iterdir() if steps.is_unfinished(path)]
        if directory.is_dir()
        else []
    )


def read_losses(directory: epath.Path) -> dict[int, float]:
    """Step → validation loss, for those that are known."""
    try:
        values = json.loads((directory / LOSSES).read_bytes())
        return {
            int(step): float(loss) for step, loss in values.items() if math.isfinite(float(loss))
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # there is none, or it is damaged: the steps are kept by their numbers


def note_loss(directory: epath.Path, step: int, loss: float) -> None:
    """Adds a step's validation loss, and forgets those of steps that are gone."""
    present = {*steps.names(directory), step}
    losses = {
        s: known
        for s, known in (read_losses(directory) | {step: loss}).items()
        if s in present and math.isfinite(known)
    }
    directory.mkdir(parents=True, exist_ok=True)
    _write_losses(directory, losses)


def forget_losses(directory: epath.Path, present: Iterable[int]) -> None:
    """Forgets the validation losses of all steps but these: a step that is saved again under the
    same number has another one."""
    losses = read_losses(directory)
    if gone := losses.keys() - set(present):
        _write_losses(directory, {step: loss for step, loss in losses.items() if step not in gone})


def _write_losses(directory: epath.Path, losses: Mapping[int, float]) -> None:
    beside = directory / f".{LOSSES}"
    beside.write_text(json.dumps(losses))
    beside.replace(directory / LOSSES)


def was_deleted(folder: epath.Path, had_manifest: bool) -> bool:
    """Whether a step in which something is missing is being deleted, as runs delete steps that they
    no longer keep: the manifest goes first (`delete`), then the rest, with no pause as long as
    DELETION_S."""
    rest, end = -1, 0.0
    while folder.exists():
        if had_manifest and (folder / manifest.FILE).exists():
            return False
        left = sum(len(files) + len(folders) for _, folders, files in os.walk(folder))
        rest, end = left, (end if left == rest else time.monotonic() + DELETION_S)
        if time.monotonic() > end:
            return False
        time.sleep(DELETION_S / 10)
    return True
