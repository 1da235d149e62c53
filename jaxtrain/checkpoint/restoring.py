"""Restoring from the newest step that turns out to be whole, by all processes together.

Whether the numbers of arrays are whole is known only by reading them, and each process reads
others. So one may find damage where none of the others do; they tell each other, and all take an
older step, or none does.
"""

from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from jaxtrain.checkpoint.manager import restore
from jaxtrain.checkpoint.steps import CheckpointError, Choice, DamageError
from jaxtrain.devices import cluster
from jaxtrain.schedule.placement import Placement

ChooseAgain = Callable[[Mapping[int, str]], Choice]


def restore_newest(
    choice: Choice,
    choose_again: ChooseAgain,
    directory: epath.Path,
    abstract: Any,
    stored_shapes: Any,
    placement: Placement,
) -> tuple[Any, Choice]:
    """The state of the chosen step, or of the newest one before it whose arrays are whole; and the
    choice that it is of.

    Args:
      choice: of a step.
      choose_again: step → why it is damaged, for all that turned out to be → the next choice, which
        has a step.
      directory, abstract, stored_shapes, placement: as in `restore`.

    Raises:
      CheckpointError: as `restore` on any process, for what is no damage; and what `choose_again`
        raises.
    """
    damaged: dict[int, str] = {}
    while True:
        assert choice.step is not None
        state, why = _restore_together(directory, choice.step, abstract, stored_shapes, placement)
        if not why:
            return state, choice
        damaged[choice.step] = why
        choice = choose_again(damaged)


def _restore_together(directory: epath.Path, step: int, *what: Any) -> tuple[Any, str]:
    """(the state, "") if every process has restored its part, or (None, why not). Raises
    CheckpointError as `restore_newest`."""
    state, found = None, {"damage": "", "refusal": ""}
    try:
        state = restore(directory, step, *what)
    except DamageError as error:
        found["damage"] = error.what
    except CheckpointError as error:
        found["refusal"] = str(error)
    answers = cluster.gather(found)
    for kind, text in (
        (kind, answer[kind]) for kind in ("refusal", "damage") for answer in answers if answer[kind]
    ):
        if kind == "refusal":
            raise CheckpointError(text)
        return None, text
    return state, ""
