"""`--replay=STEP`: repeats the steps of a run from a checkpoint up to this one with the run's
batches, and compares the last with the run's record.

    checkpoint 60 ── steps 61 … 70, batches as recorded ──▶ loss and gradient norm of step 70
                                                            │ compared with metrics.jsonl

Nothing is written into the run's folder, and no lock is taken, so a run may use it meanwhile.
"""

import concurrent.futures
import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from jaxtrain.checkpoint.resuming import folder_of_checkpoints, open_folder
from jaxtrain.checkpoint.steps import TO_TRAIN, choose
from jaxtrain.config import (
    CheckpointConfig,
    Config,
    UsageError,
    fields,
    flags_of,
    from_dict,
    get,
    replace,
)
from jaxtrain.config.phases import rate_lines, span_at, spans
from jaxtrain.data.batches import TrainingBatches
from jaxtrain.data.loader import make_loaders, prepare_corpora
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.phases.run_state import state_on_disk, until_exhausted
from jaxtrain.phases.span_programs import SpanPrograms
from jaxtrain.phases.start_lines import introduction, when_compiled
from jaxtrain.pipeline.prepared_run import PreparedRun
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.files import CONFIG_FILE, read_json
from jaxtrain.run.intervals import Intervals
from jaxtrain.run.metrics import METRICS, read_metrics
from jaxtrain.run.wall_clock import Phase, WallClock
from jaxtrain.training.step import make_step
from jaxtrain.training.update.optimizer import learning_rate

FIGURES = {name: metric.title for name, metric in METRICS.items() if metric.replayed}
# by precision.compute: the relative change of a figure that another order of sums can cause
ROUNDING = {"float32": 1e-4, "bfloat16": 1e-2}
ROUNDING_FP8 = 1e-2  # the same with products of FP8, whatever the compute type
# settings besides those of `optimizer` on which the learning rate depends
DECIDE_RATE = ("train.steps", "train.phases")
NEAREST = 3  # steps that are suggested besides the nearest


class ReplayError(RunError):
    """A step that cannot be replayed; the message names steps that can. nearest: the nearest of
    them, 0 if there are none."""

    status = ExitStatus.BAD_CONFIG

    def __init__(self, text: str, nearest: int = 0):
        super().__init__(text)
        self.nearest = nearest


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The record of a step in metrics.jsonl, and of the batches of all steps.

    figures: by name, None where one was not finite; learning_rate: of the step, None if unknown;
    batches: logged step → number of its batch; jumps: steps to which the run went back, after which
        other batches came.
    """

    figures: dict[str, float | None]
    batches: dict[int, int]
    jumps: list[int]
    learning_rate: float | None = None


def replay(run: PreparedRun, at: int, clock: WallClock) -> ExitStatus:
    """Repeats step `at` of the run in its folder and logs the differences. FINISHED if they are
    rounding, else BAD_NUMBERS.

    Raises the errors of loop.run; ReplayError if the folder has no record of the step, or no
    checkpoint before it.
    """
    config, folder = run.config, run.folder
    clock.enter(Phase.DATA)
    checkpoints = open_folder(run, before=at)
    values = cluster.from_main(lambda: _read(folder, checkpoints.directory, at), ReplayError)
    recorded = Recorded(**values | {"batches": dict(values["batches"])})
    # The newest checkpoint before the step, so that as few steps as possible are repeated.
    chosen = checkpoints.choose()
    if not chosen.start.resumes:
        raise ReplayError(
            f"--replay={at}: {checkpoints.directory} has no complete checkpoint before step {at}"
        )
    corpora = prepare_corpora(config.data, config.model.vocab_size, config.train)
    content = TrainingBatches(corpora, spans(config))
    chosen.check_corpora(content)
    config = until_exhausted(config, content)
    refuse_another_rate(config, at, recorded.learning_rate, folder)
    chosen.log_changes()
    clock.enter(Phase.TRACING)
    mesh = make_mesh(sizes_of(config.mesh))
    with jax.set_mesh(mesh), concurrent.futures.ThreadPoolExecutor(1) as executor:
        step = make_step(config, mesh, run.setup)
        tokens, replicas = step.abstract_batch["tokens"], step.separate_replicas
        data, _ = make_loaders(content, config.data, tokens, replicas, 0)
        with data, state_on_disk(step):
            programs = SpanPrograms(config, step)
            compiling = programs.start(chosen.start.meta.position, executor)
            clock.enter(Phase.COMPILING)
            cluster.log(*introduction(*programs.first), *corpora.describe())
            when_compiled(step, clock, compiling)
            state, start = chosen.restore(step, content)
            intervals = Intervals.of(config.train, config.checkpoint, config.metrics.log_every)
            numbers = batches_of(range(start.step + 1, at + 1), start.meta.position, recorded)
            cluster.log(
                f"replaying step {at} from the checkpoint of step {start.step}, with batches "
                f"{_listed(numbers)}"
            )
            # Local checkpoints are passed over: they are of the run's newest steps, and a run that
            # uses the folder meanwhile removes them.
            clock.enter(Phase.STEPPING)
            for done, number in enumerate(numbers, start.step + 1):
                of_span = programs.of(span_at(programs.spans, number))
                state, metrics = of_span.take(state, data.batch(number))
                if of_span.exchange and intervals.exchanges(done):
                    state = of_span.exchange(state)
            metrics = step.combine_metrics(metrics) if step.combine_metrics else metrics
            figures = {name: float(metrics[name]) for name in FIGURES}
    # A different mesh sums in another order, which is no difference that a user has to look into.
    rounding = ROUNDING[config.precision.compute]
    if config.precision.matmul != "compute":
        rounding = max(rounding, ROUNDING_FP8)
    return _compare(recorded.figures, figures, at, rounding)


def batches_of(steps: range, position: int, recorded: Recorded) -> list[int]:
    """The numbers of the batches of consecutive steps, the last of which is logged. position: the
    number of the first one, if the log does not have it.

    Backwards from a logged step numbers are consecutive up to a roll-back.
    """
    # Example: step 70 is logged with batch 74, since the run went back from step 65 to step 60 and
    # passed over 5 batches. Backwards, steps 70, 69, … 61 have batches 74, 73, … 65.
    numbers: dict[int, int] = {}
    for at in reversed(steps):
        if at in recorded.batches:
            numbers[at] = recorded.batches[at]
        elif at + 1 in numbers and at not in recorded.jumps:
            numbers[at] = numbers[at + 1] - 1
    for at in steps:  # before a roll-back: forwards from the checkpoint or a logged step
        numbers.setdefault(at, numbers.get(at - 1, position - 1) + 1)
    return [numbers[at] for at in steps]


def _read(folder: pathlib.Path, checkpoints: epath.Path, at: int) -> dict[str, Any]:
    """The fields of `Recorded` for step `at`, as JSON; `batches` as pairs. Raises ReplayError if
    the step cannot be replayed."""
    records = read_metrics(folder)
    logged = {record["step"]: record for record in records if "grad_norm" in record}
    oldest = min(choose(checkpoints, TO_TRAIN).steps, default=math.inf)
    refuse_unknown_step(at, sorted(logged), oldest, folder)
    return {
        "figures": {name: logged[at][name] for name in FIGURES},
        "batches": [[step, record.get("batch", step - 1)] for step, record in logged.items()],
        "jumps": [record["step"] for record in records if "rolled_back_from" in record],
        "learning_rate": logged[at].get("learning_rate"),
    }


def check_step(settings: CheckpointConfig, folder: pathlib.Path, at: int) -> None:
    """Raises UsageError unless step `at` of the run in `folder` can be replayed; errors of reading
    the folder too."""
    try:
        _read(folder, folder_of_checkpoints(settings, folder), at)
    except ReplayError as error:
        raise UsageError(
            str(error).rpartition(": use ")[0] or str(error),
            {"replay": error.nearest} if error.nearest else {},
        ) from None


def refuse_unknown_step(
    at: int, logged: Sequence[int], oldest: float, folder: pathlib.Path
) -> None:
    """Raises ReplayError, which names the nearest possible steps, unless step `at` is logged and
    after the oldest checkpoint."""
    possible = [step for step in logged if step > oldest]
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
    """Raises ReplayError if step `at` was logged with another learning rate than these settings
    give. It suggests those of the run's last start if they give that rate. If updates may be
    skipped (train.on_nonfinite), a step's rate is not known beforehand."""

    def same(config: Config) -> bool:
        rate = learning_rate(config.optimizer, config.train.steps, rate_lines(config))(at - 1)
        return math.isclose(float(rate), recorded or 0.0, rel_tol=1e-5)

    if recorded is None or config.train.on_nonfinite != "stop" or same(config):
        return
    use = "the settings with which the run did this step (train.steps, .phases and optimizer.*)"
    with contextlib.suppress(OSError, ValueError):  # also ConfigError
        ran = from_dict(read_json(folder / CONFIG_FILE, folder=folder))
        decide = [path for path in fields() if path.startswith(("optimizer.", *DECIDE_RATE))]
        as_ran = replace(config, {path: get(ran, path) for path in decide})
        if same(as_ran):
            use = flags_of(as_ran, config.as_read())
    raise ReplayError(
        f"--replay={at}: the learning rate of step {at} was {recorded:.6g}, which these "
        f"settings do not give: use {use}"
    )


def _listed(numbers: Sequence[int]) -> str:
    """Ascending numbers as a text: "3", "3 to 7", "3 to 7, 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _compare(
    recorded: Mapping[str, float | None], replayed: Mapping[str, float], at: int, rounding: float
) -> ExitStatus:
    """Logs recorded and replayed figures and their differences. FINISHED if these are rounding."""
    differences = {name: _difference(recorded[name], replayed[name]) for name in FIGURES}
    for name, words in FIGURES.items():
        then = "not finite" if recorded[name] is None else f"{recorded[name]:.9g}"
        cluster.log(
            f"{words} of step {at}: {then} in metrics.jsonl, {replayed[name]:.9g} now, "
            f"difference {differences[name]:.2g}"
        )
    worst = max(differences.values())
    limit = f"{rounding:g} of each, which another order of sums may change"
    if worst > rounding:
        cluster.log(f"not the same: more than {limit}")
        return ExitStatus.BAD_NUMBERS
    cluster.log(f"the same to rounding ({limit})" if worst else "the same, bit for bit")
    return ExitStatus.FINISHED


def _difference(recorded: float | None, replayed: float) -> float:
    """The relative difference of a figure. A recorded None equals a figure that is not finite, and
    differs infinitely from others."""
    if recorded is None or not math.isfinite(replayed):
        return 0.0 if recorded is None and not math.isfinite(replayed) else math.inf
    return abs(replayed - recorded) / max(abs(recorded), 1e-30)
