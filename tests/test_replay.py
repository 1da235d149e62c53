"""A step done again beside its record: which steps can be, with which batches, and what is said.
Whole replays: test_bad_numbers.py."""

import json
import math
import pathlib

import pytest

from jaxtrain import config as configs, replay
from jaxtrain.replay import Recorded, ReplayError, batches_of, refuse_unknown_step
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.training.update.optimizer import learning_rate

NONE = "none of its steps can be replayed: none is logged after a checkpoint"
FOLDER = pathlib.Path("runs/tiny")


def recorded(batches: dict[int, int], *jumps: int) -> Recorded:
    return Recorded({}, batches, list(jumps))


@pytest.mark.parametrize(
    ("steps", "position", "log", "expected"),
    [
        (range(4, 7), 3, recorded({6: 5}), [3, 4, 5]),  # nothing was passed over
        (range(4, 7), 3, recorded({6: 15}, 3), [13, 14, 15]),  # the run went back to the checkpoint
        # and was killed then, and did not go back again
        (range(4, 7), 3, recorded({1: 0, 6: 5}, 3), [3, 4, 5]),
        # from an older checkpoint than the one that it went back to
        (range(4, 9), 3, recorded({8: 20}, 6), [3, 4, 5, 19, 20]),
        (range(4, 9), 3, recorded({4: 9, 8: 20}, 6), [9, 10, 11, 19, 20]),
        (range(4, 9), 3, recorded({6: 11, 8: 20}, 6), [9, 10, 11, 19, 20]),
    ],
)
def test_the_batches_are_those_that_the_run_had(steps, position, log, expected):
    assert batches_of(steps, position, log) == expected


@pytest.mark.parametrize(
    ("at", "logged", "first", "said"),
    [
        (
            7,
            [1, 5, 10, 15],
            3,
            "runs/tiny has no record of step 7 (metrics.log_every): use --replay=5 (or 10, 15)",
        ),
        (1, [1, 5, 10], 3, "runs/tiny has no checkpoint before step 1: use --replay=5 (or 10)"),
        (3, [1, 2, 3, 4], 3, "runs/tiny has no checkpoint before step 3: use --replay=4"),
        (3, [3], math.inf, f"runs/tiny has no checkpoint before step 3, and {NONE}"),
    ],
)
def test_a_step_that_cannot_be_replayed(at, logged, first, said):
    with pytest.raises(ReplayError) as error:
        refuse_unknown_step(at, logged, first, FOLDER)
    assert (
        str(error.value) == f"--replay={at}: {said}" and error.value.status == ExitStatus.BAD_CONFIG
    )


def test_a_step_that_can_be_replayed():
    refuse_unknown_step(10, [1, 5, 10], 3, FOLDER)


@pytest.mark.parametrize(
    ("then", "now", "status", "said"),
    [
        ((2.0, 0.5), (2.0, 0.5), 0, "the same, bit for bit"),
        (
            (2.0, 0.5),
            (2.0001, 0.5),
            0,
            "the same to rounding (0.0001 of each, which another order of sums may change)",
        ),
        (
            (2.0, 0.5),
            (2.0, 0.6),
            81,
            "not the same: more than 0.0001 of each, which another order of sums may change",
        ),
        ((None, None), (math.nan, math.inf), 0, "the same, bit for bit"),
        (
            (None, 0.5),
            (2.0, 0.5),
            81,
            "not the same: more than 0.0001 of each, which another order of sums may change",
        ),
        (
            (2.0, 0.5),
            (math.nan, 0.5),
            81,
            "not the same: more than 0.0001 of each, which another order of sums may change",
        ),
    ],
)
def test_what_is_said_of_the_figures(then, now, status, said, capsys):
    names = ("loss", "grad_norm")
    found = replay._compare(
        dict(zip(names, then, strict=True)), dict(zip(names, now, strict=True)), 7, 1e-4
    )
    lines = capsys.readouterr().out.splitlines()
    assert found == status and lines[-1] == said
    assert lines[0].startswith("loss of step 7: ") and lines[1].startswith(
        "gradient norm of step 7: "
    )


def test_another_learning_rate(tmp_path):
    """The run went on to 60 steps, by which its rate had come down: with 150 the same step is
    another one."""
    ran = configs.replace(
        configs.Config(), {"train.steps": 60, "optimizer.warmup_steps": 10}
    ).fill()
    (tmp_path / "config.json").write_text(json.dumps(configs.to_dict(ran)))
    rate = float(learning_rate(ran.optimizer, 60)(59))

    def refuse(config, recorded):
        replay.refuse_another_rate(config, 60, recorded, tmp_path)

    refuse(ran, rate)
    refuse(ran, None)
    longer = configs.replace(ran, {"train.steps": 150})
    with pytest.raises(
        ReplayError, match=rf"was {rate:.6g}, .* not give: use --config.train.steps=60$"
    ):
        refuse(longer, rate)
    with pytest.raises(ReplayError, match=r"use the settings with which the run did this step"):
        refuse(longer, 0.5)
    refuse(configs.replace(longer, {"train.on_nonfinite": "skip"}), rate)


def test_numbers_in_words():
    assert (
        replay._listed([3]) == "3" and replay._listed([3, 4, 5, 9, 11, 12]) == "3 to 5, 9, 11 to 12"
    )
