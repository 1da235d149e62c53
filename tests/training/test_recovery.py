"""When numbers end a run or take it back. No jax."""

import json
import math
import subprocess
import sys

import pytest

from jaxtrain.config import TrainConfig
from jaxtrain.training.recovery import (
    LEAST,
    WINDOW,
    DetectorState,
    Fault,
    Numbers,
    NumbersError,
    Rollback,
    SpikeDetector,
    deviations,
)

NOTHING = DetectorState()


def detector(state: DetectorState = NOTHING, **policy) -> SpikeDetector:
    return SpikeDetector(TrainConfig(**policy), lambda number: f"batch {number}: its rows", state)


def numbers(at: int, loss: float = 2.0, *finite: bool, is_global: bool = True) -> Numbers:
    return Numbers(at, at + 3, loss, 0.5, finite or (math.isfinite(loss),), is_global)


def see(one: SpikeDetector, losses, start: int = 1) -> list[Fault | None]:
    """What is found after each step."""
    return [one.check(numbers(at, loss)) for at, loss in enumerate(losses, start)]


NAN = math.nan
USUAL = [2.0 + 0.01 * (i % 5) for i in range(LEAST)]  # median 2.02, robust deviation 0.0148


def test_stop_ends_with_the_first():
    one = detector()
    assert see(one, [2.0, 3.0, 1e9]) == [None] * 3
    fault = one.check(numbers(4, NAN))
    with pytest.raises(NumbersError) as error:
        one.act(fault)
    assert (
        str(error.value)
        == "the loss is nan (gradient norm 0.5) at step 4, batch 7: its rows; the last "
        "checkpoint is kept"
    )
    assert NumbersError.status == 81


def test_skip_ends_with_the_last_of_so_many_in_a_row():
    one = detector(on_nonfinite="skip", nonfinite_limit=3)
    assert see(one, [NAN, NAN, 2.0, NAN, NAN]) == [None] * 5
    fault = one.check(numbers(6, NAN))
    assert (fault.since, fault.batch) == (4, 9)
    with pytest.raises(
        NumbersError, match="^3 updates in a row were skipped, from step 4 on: the loss is nan"
    ):
        one.act(fault)


def test_rollback_goes_back_and_ends_at_last():
    one = detector(on_nonfinite="rollback", nonfinite_limit=2, rollbacks=2)
    for count in (1, 2):
        *_, fault = see(one, [2.0, NAN, NAN])
        assert (fault.at, fault.since, fault.batch) == (3, 2, 6)
        one.act(fault)
        assert one.fault == fault and one.fault
        one.go_back(Rollback(3, 1, 7, fault.why, DetectorState()))
        assert one.fault is None and one.state == DetectorState(rollbacks=count)
    with pytest.raises(
        NumbersError, match="the run has gone back 2 times, as often as train.rollbacks=2 lets it"
    ):
        one.act(see(one, [NAN, NAN])[-1])


def test_the_first_fault_counts():
    one = detector(on_nonfinite="rollback", nonfinite_limit=1)
    for found in see(one, [NAN, NAN]):
        one.act(found)
    assert one.fault.at == 1


def test_deviations():
    assert deviations(5.0, [1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx((5 - 3) / 1.4826)
    assert deviations(1.0, [1.0, 2.0, 3.0]) < 0
    assert deviations(2.01, [2.0] * 9) == pytest.approx(10)  # of the least deviation, 0.001


def test_spikes_in_a_row():
    one = detector(on_nonfinite="rollback", spike_threshold=6.0, spike_steps=2)
    assert see(one, [9.0, *USUAL[1:]]) == [None] * LEAST  # too few before, then none
    assert one.state.losses[0] == 9.0
    assert see(one, [2.4, 2.02, 2.4], start=LEAST + 1) == [None] * 3  # a single one passes
    fault = one.check(numbers(LEAST + 4, 2.5))
    assert (fault.since, fault.batch) == (LEAST + 3, LEAST + 7)
    assert (
        "the last of 2 spikes in a row, " in fault.why
        and "robust deviations above the usual 2.0" in fault.why
    )
    assert all(loss not in one.state.losses for loss in (2.4, 2.5))


def test_a_loss_far_below_and_a_loss_that_is_not_finite_are_no_spikes():
    one = detector(
        DetectorState(losses=tuple(USUAL)),
        on_nonfinite="rollback",
        spike_threshold=6.0,
        spike_steps=1,
    )
    assert see(one, [0.1, NAN, 2.0]) == [None] * 3
    assert NAN not in one.state.losses


def test_without_a_threshold_no_loss_is_remembered():
    one = detector(on_nonfinite="rollback")
    assert see(one, [*USUAL, 1e9]) == [None] * (LEAST + 1) and one.state == DetectorState()


def test_the_window_ends():
    one = detector(on_nonfinite="rollback", spike_threshold=6.0)
    see(one, [3.0] * 10 + [2.0] * WINDOW)
    assert one.state.losses == (2.0,) * WINDOW


def test_a_run_that_was_killed_judges_as_if_it_had_not_been():
    """Its state goes through a checkpoint's meta."""
    losses = [*USUAL, 2.5, NAN, 2.5, NAN, NAN, 2.5, 2.5]
    policy = {
        "on_nonfinite": "rollback",
        "spike_threshold": 6.0,
        "spike_steps": 3,
        "nonfinite_limit": 2,
    }
    whole = detector(**policy)
    expected = see(whole, losses)
    assert any(expected)
    for cut in range(len(losses)):
        first = detector(**policy)
        see(first, losses[:cut])
        state = DetectorState.from_json(json.loads(json.dumps(first.state.to_json())))
        assert state == first.state
        second = detector(state, **policy)
        assert (
            see(second, losses[cut:], start=cut + 1) == expected[cut:]
            and second.state == whole.state
        )
    assert DetectorState.from_json(
        {"rollbacks": "x", "losses": [1.0, None], "more": 3}
    ) == DetectorState(losses=(1.0,))


def test_each_of_the_replicas_that_train_apart_has_its_own_row():
    one = detector(on_nonfinite="skip", nonfinite_limit=2)
    assert one.check(numbers(1, NAN, False, True, is_global=False)) is None
    assert one.check(numbers(2, NAN, True, False, is_global=False)) is None
    fault = one.check(numbers(3, NAN, True, False, is_global=False))
    assert fault.since == 2 and one.state.nonfinite_since is None


def test_parameters_that_are_not_finite_are_not_saved():
    one = detector(on_nonfinite="rollback")
    assert one.check_parameters(5, 9, True) and one.fault is None
    assert not one.check_parameters(5, 9, False)
    assert (one.fault.since, one.fault.batch) == (5, 8)
    for choice in ("stop", "skip"):
        with pytest.raises(
            NumbersError, match="the parameters after step 5 are not finite, though its loss was"
        ):
            detector(on_nonfinite=choice).check_parameters(5, 9, False)


def test_copies_that_differ():
    one = detector(on_nonfinite="rollback")
    one.check_copies(100, "")
    one.check_copies(200, "cpu:3 (process 1) has parameters that are not those of the 3 others")
    assert (one.fault.since, one.fault.batch) == (101, None)  # the same batches come again
    assert one.fault.why.endswith("the 3 others, at step 200 (not yet at step 100)")
    one.go_back(Rollback(200, 90, 90, "", DetectorState()))
    one.check_copies(100, "cpu:3 (process 1)")
    assert one.fault.since == 91
    for choice in ("stop", "skip"):
        with pytest.raises(NumbersError, match="^cpu:3, at step 7; the last checkpoint is kept"):
            detector(on_nonfinite=choice).check_copies(7, "cpu:3")


def test_without_jax():
    code = "import sys, jaxtrain.training.recovery; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
