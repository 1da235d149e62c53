"""`--replay=STEP`: a step of a run done again, from the checkpoint before it and with the batches
that the run had, beside its record.

    checkpoint 60 ── steps 61 … 70, batches as recorded ──▶ loss and gradient norm of step 70
                                                            │ those in metrics.jsonl

Nothing is written into the run's folder, and no lock is taken: a run may be at work there.
"""

import concurrent.futures
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from jaxtrain import config as cfg
from jaxtrain.checkpoint.checkpoints import Checkpoints, folder_of_checkpoints
from jaxtrain.checkpoint.steps import CONFIG, TO_TRAIN, choose
from jaxtrain.config import Config
from jaxtrain.config.errors import ConfigError, UsageError
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.pipeline.setup import Setup
from jaxtrain.preparation import loaders, prepare_corpus, start_compiling, when_compiled
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.metrics import read_metrics
from jaxtrain.run.wall_clock import Part, WallClock
from jaxtrain.training.calendar import Calendar
from jaxtrain.training.optimizer import learning_rate
from jaxtrain.training.step import Step, make_step

FIGURES = {"loss": "loss", "grad_norm": "gradient norm"}  # of a record, and what they are called
# by the type of compute: what another order of sums may change, of a figure
ROUNDING = {"float32": 1e-4, "bfloat16": 1e-2}
NEAREST = 3  # steps that are suggested


class ReplayError(RunError):
    """A step that cannot be done again; the message names those that can. nearest: the first of
    these, 0 if there are none."""

    status = ExitStatus.BAD_CONFIG

    def __init__(self, text: str, nearest: int = 0):
        super().__init__(text)
        self.nearest = nearest


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What metrics.jsonl has about a step: its figures by name, None where one was not finite; and
    what it has of all steps' batches.

    batches: step → number of the batch, of the steps that are logged; jumps: steps to which the run
    went back, after which other batches came. learning_rate: the step's.
    """

    figures: dict[str, float | None]
    batches: dict[int, int]
    jumps: list[int]
    learning_rate: float | None = None


def replay(
    config: Config,
    setup: Setup,
    folder: pathlib.Path,
    at: int,
    clock: WallClock,
    unresolved: Config,
    recipe: Config,
) -> ExitStatus:
    """Does step `at` of the run in `folder` again and says what differs: FINISHED where it is the
    same to rounding, else BAD_NUMBERS.

    Arguments as of loop.run, whose errors this raises; ReplayError where the folder has no record
    of the step, or no checkpoint before it.
    """
    clock.enter(Part.DATA)
    checkpoints = Checkpoints(config, unresolved, recipe, folder, before=at)
    recorded = _recorded(folder, checkpoints.directory, at)
    refuse_another_rate(config, at, recorded.learning_rate, folder)
    checkpoints.choose()
    if not checkpoints.step:
        place = checkpoints.directory
        raise ReplayError(f"--replay={at}: {place} has no whole checkpoint before step {at}")
    corpus = prepare_corpus(config)
    checkpoints.check_corpus(corpus)
    checkpoints.say_changes()
    clock.enter(Part.TRACING)
    mesh = make_mesh(sizes_of(config.mesh))
    with jax.set_mesh(mesh), concurrent.futures.ThreadPoolExecutor(1) as beside:
        step = make_step(config, mesh, setup)
        data, held_out = loaders(config, step, corpus, folder=None)
        with data, held_out:
            train, exchange = when_compiled(
                start_compiling(step, data, beside, clock), config, step, corpus, clock
            )
            state = checkpoints.restore_persistent(step)
            start, calendar = checkpoints.step, Calendar.of(config)
            numbers = batches_of(range(start + 1, at + 1), checkpoints.meta.position, recorded)
            cluster.log(
                f"replaying step {at} from the checkpoint of step {start}, with batches "
                f"{_listed(numbers)}"
            )
            clock.enter(Part.STEPPING)
            for done, number in enumerate(numbers, start + 1):
                state, metrics = train(state, data.batch(number))
                if exchange and calendar.exchanges(done):
                    state = exchange(state)
            figures = _figures(step, metrics)
    return _compare(recorded.figures, figures, at, ROUNDING[config.precision.compute])


def batches_of(steps: range, position: int, recorded: Recorded) -> list[int]:
    """The numbers of the batches of consecutive steps, the last of which is logged; position: of
    the first, if the log does not say.

    From a logged step backwards they are consecutive, as far as no rollback lies between.
    """
    numbers: dict[int, int] = {}
    for at in reversed(steps):
        if at in recorded.batches:
            numbers[at] = recorded.batches[at]
        elif at + 1 in numbers and at not in recorded.jumps:
            numbers[at] = numbers[at + 1] - 1
    for at in steps:  # before a rollback, from the checkpoint or a logged step on
        numbers.setdefault(at, numbers.get(at - 1, position - 1) + 1)
    return [numbers[at] for at in steps]


def _recorded(folder: pathlib.Path, checkpoints: epath.Path, at: int) -> Recorded:
    """What the log has of step `at`, as process 0 reads it, on every process. ReplayError where it
    cannot be replayed."""

    values = cluster.from_main(lambda: _read(folder, checkpoints, at), ReplayError)
    return Recorded(
        values["figures"], dict(values["batches"]), values["jumps"], values["learning_rate"]
    )


def _read(folder: pathlib.Path, checkpoints: epath.Path, at: int) -> dict[str, Any]:
    """What the log has of step `at`, as `Recorded` has it. ReplayError where the step cannot be
    replayed."""
    records = read_metrics(folder)
    logged = {record["step"]: record for record in records if "grad_norm" in record}
    first = min(choose(checkpoints, TO_TRAIN).steps, default=math.inf)
    refuse_unknown_step(at, sorted(logged), first, folder)
    return {
        "figures": {name: logged[at][name] for name in FIGURES},
        "batches": [[step, record.get("batch", step - 1)] for step, record in logged.items()],
        "jumps": [record["step"] for record in records if "rolled_back_from" in record],
        "learning_rate": logged[at].get("learning_rate"),
    }


def check_step(config: Config, folder: pathlib.Path, at: int) -> None:
    """Raises UsageError, or the error of what cannot be read, unless step `at` of the run in
    `folder` can be replayed."""
    try:
        _read(folder, folder_of_checkpoints(config.checkpoint, folder), at)
    except ReplayError as error:
        raise UsageError(
            str(error).rpartition(": use ")[0] or str(error),
            {"replay": error.nearest} if error.nearest else {},
        ) from None


def refuse_unknown_step(at: int, logged: Sequence[int], first: float, folder: pathlib.Path) -> None:
    """Raises ReplayError unless step `at` is one of the logged ones, after the `first` checkpoint;
    it names the nearest that are."""
    possible = [step for step in logged if step > first]
    if at in possible:
        return
    if at not in logged:
        rule = f"{folder} has no record of step {at} (metrics.log_every)"
    else:
        rule = f"{folder} has no checkpoint before step {at}"
    near = sorted(possible, key=lambda step: (abs(step - at), step))[: NEAREST + 1]
    if not near:
        raise ReplayError(
            f"--replay={at}: {rule}, and none of its steps can be replayed: none is logged "
            "after a checkpoint"
        )
    others = f" (or {', '.join(map(str, sorted(near[1:])))})" if near[1:] else ""
    raise ReplayError(f"--replay={at}: {rule}: use --replay={near[0]}{others}", near[0])


def refuse_another_rate(
    config: Config, at: int, recorded: float | None, folder: pathlib.Path
) -> None:
    """Raises ReplayError where step `at` was logged with another learning rate than the config's;
    it suggests the settings of the run's last start where these give that rate. With updates left
    out (train.on_nonfinite) no step's rate is known beforehand."""
    same = lambda config: math.isclose(
        float(learning_rate(config.optimizer, config.train.steps)(at - 1)),
        recorded or 0.0,
        rel_tol=1e-5,
    )
    if recorded is None or config.train.on_nonfinite != "stop" or same(config):
        return
    try:
        ran = cfg.from_dict(json.loads((folder / CONFIG).read_text()))
    except (OSError, ValueError, ConfigError):
        ran = config
    paths = [
        path for path in cfg.fields() if path == "train.steps" or path.startswith("optimizer.")
    ]
    settings = {
        path: cfg.get(ran, path) for path in paths if cfg.get(ran, path) != cfg.get(config, path)
    }
    use = " ".join(f"--config.{path}={cfg.value_text(value)}" for path, value in settings.items())
    if not settings or not same(cfg.replace(config, settings)):
        use = "the settings with which the run did this step (train.steps and optimizer.*)"
    raise ReplayError(
        f"--replay={at}: the learning rate of step {at} was {recorded:.6g}, which these "
        f"settings do not give: use {use}"
    )


def _figures(step: Step, metrics: object) -> dict[str, float]:
    """A step's figures, of independent replicas together."""
    whole = step.mean_metrics(metrics) if step.mean_metrics else metrics
    return {name: float(getattr(whole, name)) for name in FIGURES}


def _listed(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: "3", "3 to 7", "3 to 7, 9"."""
    starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1] + 1]
    runs = [
        numbers[first:end] for first, end in zip(starts, [*starts[1:], len(numbers)], strict=True)
    ]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _compare(
    recorded: Mapping[str, float | None], replayed: Mapping[str, float], at: int, rounding: float
) -> ExitStatus:
    """Says both and their differences. FINISHED where these are rounding."""
    differences = {name: _difference(recorded[name], replayed[name]) for name in FIGURES}
    for name, words in FIGURES.items():
        then = "not finite" if recorded[name] is None else f"{recorded[name]:.9g}"
        cluster.log(
            f"{words} of step {at}: {then} in metrics.jsonl, {replayed[name]:.9g} now, "
            f"difference {differences[name]:.2g}"
        )
    worst = max(differences.values())
    if worst == 0:
        cluster.log("the same, bit for bit")
    else:
        limit = f"{rounding:g} of each, which another order of sums may change"
        cluster.log(
            f"the same to rounding ({limit})"
            if worst <= rounding
            else f"not the same: more than {limit}"
        )
    return ExitStatus.FINISHED if worst <= rounding else ExitStatus.BAD_NUMBERS


def _difference(recorded: float | None, replayed: float) -> float:
    """Of two figures, relative to the recorded one; None and what is not finite are the same, and
    nothing else is like them."""
    if recorded is None or not math.isfinite(replayed):
        return 0.0 if recorded is None and not math.isfinite(replayed) else math.inf
    return abs(replayed - recorded) / max(abs(recorded), 1e-30)
