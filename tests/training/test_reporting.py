"""What becomes of a step's results: one step behind, logged when due, an error where the loss is
not finite."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config import TrainConfig
from jaxtrain.config.phases import Span
from jaxtrain.devices.mesh import REPLICA, make_mesh
from jaxtrain.run.goodput import GoodputLog
from jaxtrain.run.intervals import Intervals
from jaxtrain.run.peers import Slowest, Stragglers
from jaxtrain.run.wall_clock import Phase, WallClock
from jaxtrain.training.one_step import combine_replicas, step_metrics
from jaxtrain.training.recovery import DetectorState, NumbersError, Rollback, SpikeDetector
from jaxtrain.training.reporting import Pending, Reporter
from jaxtrain.training.requests import Request, no_request


class Log:
    """A log, a progress bar and a speedometer that remember what they are told."""

    def __init__(self):
        self.written, self.start_ups, self.shown, self.laps = {}, {}, [], []

    def write(self, at, **values):
        (self.start_ups if "start_up_s" in values else self.written)[at] = values

    def update(self, at, **figures):
        self.shown.append((at, figures["loss"]))

    def log(self, line):
        self.shown.append(line)

    def lap(self, at):
        self.laps.append(at)

    def restart(self, at):
        self.laps.append(f"from {at}")

    def go_back(self, at, **values):
        self.written[f"back to {at}"] = values

    def recent(self):
        return {"step_time_s": 0.5, "tokens_per_s": 200.0, "mfu": None}

    since_asked = recent


def reporter(
    log_every: int = 4,
    combine_metrics=None,
    expert_room: float = 0.0,
    stragglers: Stragglers | None = None,
    **policy,
) -> tuple[Reporter, Log]:
    log = Log()
    intervals = Intervals(
        last=10,
        save_every=0,
        evaluate_every=0,
        log_every=log_every,
        exchange_every=0 if combine_metrics is None else 5,
    )
    clock = WallClock(4.0, clock=lambda: 6.5)
    clock.enter(Phase.STEPPING)
    detector = SpikeDetector(TrainConfig(**policy), lambda number: f"batch {number}: its rows")
    return Reporter(
        intervals=intervals,
        spans=(Span("", 0, 10, 5, 20, (1.0,), 0, 0),),
        combine_metrics=combine_metrics,
        detector=detector,
        speedometer=log,
        log=log,
        progress=log,
        goodput=GoodputLog(None, clock),
        stragglers=stragglers or Stragglers(),
        expert_capacity=expert_room,
    ), log


def pending(at: int, loss: float = 2.0, answer=no_request) -> Pending:
    return Pending(
        at,
        at + 6,
        step_metrics(
            loss=jnp.float32(loss),
            grad_norm=jnp.float32(0.5),
            param_norm=jnp.float32(30),
            learning_rate=jnp.float32(0.1),
            weighted_tokens=jnp.float32(7),
        ),
        answer,
    )


def test_batches_in_which_no_token_counts_are_warned_of():
    reports, log = reporter()
    for at, tokens in enumerate([7, 0, 0, 3, 0, 0], 1):
        metrics = pending(at).metrics | step_metrics(weighted_tokens=jnp.float32(tokens))
        reports.add(Pending(at, at, metrics, no_request))
    reports.finish(stopping=True)
    said = [line for line in log.shown if "no token of a batch counts" in str(line)]
    counts = [(line.partition("(")[2].split()[0], line.rpartition("at step ")[2]) for line in said]
    assert counts == [
        ("1", "2, batch 2: its rows"),
        ("2", "3, batch 3: its rows"),
        ("4", "6, batch 6: its rows"),
    ]


@pytest.mark.parametrize("room", [0.0, 1.5])
def test_drops_beyond_the_room_are_warned_of(room):
    reports, log = reporter(expert_room=room)
    for at, dropped in enumerate([0.0, 0.001, 0.0015, 0.0, 0.002], 1):
        metrics = pending(at).metrics | step_metrics(dropped=jnp.float32(dropped))
        reports.add(Pending(at, at, metrics, no_request))
    reports.finish(stopping=True)
    said = [line for line in log.shown if isinstance(line, str) and line.startswith("warning: ")]
    assert [line.split(",")[0] for line in said] == [
        "warning: step 2: 0.10% of the choices of experts were dropped",
        "warning: step 5: 0.20% of the choices of experts were dropped",
    ] * bool(room)
    assert all(
        line.endswith(
            "beyond model.expert_room=1.5: --config.model.expert_room=3 has room for more"
        )
        for line in said
    )


def test_one_step_behind_and_logged_when_due():
    reports, log = reporter()
    for at in range(1, 6):
        assert reports.add(pending(at)) is Request.NOTHING
        assert log.laps == [*range(1, at)]
    assert [*log.written] == [1, 4]
    assert (
        reports.finish(stopping=False) is Request.NOTHING
        and log.laps[-1] == 5
        and [*log.written] == [1, 4]
    )
    figures = {"step_time_s": 0.5, "tokens_per_s": 200.0, "mfu": None}
    assert log.written[4] == pytest.approx(
        {
            "loss": 2.0,
            "grad_norm": 0.5,
            "param_norm": 30.0,
            "learning_rate": 0.1,
            "weighted_tokens": 7.0,
            "tokens": 400,
            "batch": 10,
            "goodput": 0.0,
            **figures,
        }
    )


class Heard:
    """A Speculation that remembers what it is told."""

    def __init__(self):
        self.steps = []

    def saw(self, loss, grad_norm):
        self.steps.append((round(loss, 1), grad_norm))

    def ran(self, first, last):
        self.steps.append((first, last))


def test_the_steps_of_a_program_are_reported_one_by_one_when_the_next_is_dispatched():
    reports, log = reporter(log_every=1)
    reports.speculation = heard = Heard()

    def program(first: int, asked: Request = Request.NOTHING) -> list[Pending]:
        metrics = {
            name: jnp.stack([value + i for i in range(3)])
            for name, value in pending(first).metrics.items()
        }
        steps = [Pending(first + i, first + i, metrics, no_request, None, i) for i in range(3)]
        return [*steps[:2], dataclasses.replace(steps[2], answer=lambda: asked)]

    assert reports.add(*program(1, Request.SAVE)) is Request.NOTHING
    assert not log.written and not log.laps
    assert reports.add(*program(4)) is Request.SAVE
    assert [*log.written] == [1, 2, 3] and log.laps == [3]
    assert [log.written[at]["loss"] for at in (1, 2, 3)] == [2.0, 3.0, 4.0]
    assert [log.written[at]["tokens"] for at in (1, 2, 3)] == [100, 200, 300]
    assert all(log.written[at]["step_time_s"] == 0.5 for at in (1, 2, 3))
    reports.finish(stopping=False)
    assert [*log.written] == [1, 2, 3, 4, 5, 6] and log.laps == [3, 6]
    of_program = [(2.0, 0.5), (3.0, 1.5), (4.0, 2.5)]
    assert heard.steps == [*of_program, (1, 3), *of_program, (4, 6)]
    assert reports.finish(stopping=False) is Request.NOTHING and log.laps == [3, 6]


def test_the_start_up_ends_with_the_first_step():
    reports, log = reporter()
    reports.add(pending(6))
    assert not log.start_ups
    reports.add(pending(7))
    reports.finish(stopping=True)
    assert log.start_ups == {
        6: {"start_up_s": 2.5, "imports_s": 2.5, "stepping_s": 0.0, "awaiting_s": 0.0}
    }
    assert log.shown == ["first step after 2.5 s: imports 2.5", (6, 2.0), (7, 2.0)]


def test_the_slowest_process_is_logged_and_said_once_a_window():
    stragglers = Stragglers()
    reports, log = reporter(log_every=1, stragglers=stragglers)
    reports.add(pending(1))
    for at, slowest in enumerate(
        [Slowest(3, "process 3", (1, 9), 0.5, 0.4, 0.1, 1.0)] * 2 + [None], 2
    ):
        reports.add(pending(at))
        stragglers.slowest = slowest
    reports.finish(stopping=True)
    logged = {at: values.get("slowest_process") for at, values in log.written.items()}
    assert logged == {1: None, 2: 3, 3: 3, 4: None} and log.written[2]["slowest_behind_s"] == 0.4
    assert (
        len(
            [
                line
                for line in log.shown
                if isinstance(line, str)
                and line.startswith("warning: steps 1 to 9: process 3 is slowest")
            ]
        )
        == 1
    )


def test_a_run_that_stops_logs_its_last_step():
    reports, log = reporter()
    reports.add(pending(2))
    reports.finish(stopping=True)
    assert [*log.written] == [2]


def test_the_answer_is_that_of_the_step_before():
    reports, _ = reporter()
    reports.add(pending(1, answer=lambda: Request.STOP))
    assert reports.add(pending(2, answer=lambda: Request.SAVE)) is Request.STOP
    assert reports.finish(stopping=True) is Request.SAVE


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_logged_and_ends_the_run(loss):
    reports, log = reporter()
    reports.add(pending(3, loss))
    where = "at step 3, batch 9: its rows; the last checkpoint is kept"
    with pytest.raises(NumbersError, match=rf"the loss is (nan|inf) \(gradient norm 0.5\) {where}"):
        reports.add(pending(4))
    assert [*log.written] == [3]


def test_independent_replicas_are_put_together_only_where_they_meet():
    calls = []

    def mean(metrics):
        calls.append(metrics)
        return combine_replicas(metrics)

    reports, log = reporter(combine_metrics=mean)
    over_replicas = NamedSharding(
        make_mesh((2, 1, 1, 1, 1, 1), jax.devices()[:2]), PartitionSpec(REPLICA)
    )
    pairs = {"loss": [1, np.nan], "grad_norm": [1, 1], "weighted_tokens": [10, 30]}
    each = {name: jax.device_put(np.float32(pair), over_replicas) for name, pair in pairs.items()}
    reports.add(Pending(2, 1, each, no_request))
    # step 2 is not logged: a replica's loss ends nothing yet
    reports.add(Pending(3, 2, each, no_request))
    assert not calls and not log.written
    with pytest.raises(NumbersError):
        reports.finish(stopping=False)
    assert len(calls) == 1


def skipping(at: int, skipped: int, loss: float = float("nan")) -> Pending:
    return Pending(
        at,
        at - 1,
        pending(at, loss).metrics | step_metrics(skipped=jnp.float32(skipped)),
        no_request,
    )


def test_a_skipped_update_is_logged_and_warned_of():
    reports, log = reporter(on_nonfinite="skip")
    for each in (skipping(2, 0, 2.0), skipping(3, 1), skipping(5, 1, 2.0)):
        reports.add(each)
    reports.finish(stopping=False)
    assert [*log.written] == [3] and log.written[3]["skipped"] == 1
    said = [line for line in log.shown if isinstance(line, str) and line.startswith("warning: ")]
    assert said == [
        "warning: an update was skipped: the loss is nan (gradient norm 0.5) at step 3, batch "
        "2: its rows"
    ]


def test_going_back_is_said_and_logged():
    reports, log = reporter(on_nonfinite="rollback", nonfinite_limit=2)
    detector = reports.detector
    for each in (skipping(5, 1), skipping(6, 2), skipping(7, 3)):
        reports.add(each)
    assert detector.fault.since == 5 and detector.fault.batch == 5
    rollback = Rollback(6, 4, 6, "why", DetectorState())
    for part in (detector, reports):
        part.go_back(rollback)
    assert detector.fault is None and log.laps[-1] == "from 4"
    assert log.written["back to 4"] == {
        "rolled_back_from": 6,
        "next_batch": 6,
        "why": "why",
        "rollbacks": 1,
    }
    assert log.shown[-1] == "warning: back from step 6 to step 4, and on with batch 6: why"
    assert reports.finish(stopping=True) is Request.NOTHING  # step 7 is forgotten


def test_validation_is_logged_where_there_is_any():
    reports, log = reporter()
    reports.validation(4, {}, {}, 0)
    reports.validation(5, {"": 1.25}, {}, 0)
    reports.validation(6, {"web": 1.25, "code": 1.75, "": 1.5}, {}, 0)
    sets = {"validation_loss/web": 1.25, "validation_loss/code": 1.75}
    assert log.written == {5: {"validation_loss": 1.25}, 6: {"validation_loss": 1.5} | sets}
    assert log.shown == [
        "step 5: validation loss 1.2500 nats a token",
        "step 6: validation loss 1.5000 nats a token (web 1.2500, code 1.7500)",
    ]


def test_tokens_are_those_of_all_steps_whatever_their_sizes():
    reporter_, log = reporter(log_every=1)
    reporter_.spans = (
        Span("", 0, 2, 5, 20, (1.0,), 0, 0),
        Span("long", 2, 10, 5, 40, (1.0,), 10, 200),
    )
    for at in range(1, 5):
        reporter_.add(pending(at))
    reporter_.finish(stopping=True)
    assert [log.written[at]["tokens"] for at in range(1, 5)] == [100, 200, 400, 600]
