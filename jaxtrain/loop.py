"""The training loop, from top to bottom: data, step, state, loop, end. `run` reads as the run goes;
its parts are in training/.

What a run leaves in its folder: config.json, metrics.jsonl, goodput.jsonl, checkpoints/,
tensorboard/, loss.png, goodput.png, profile/, metrics.rolled_back.jsonl of a run that has gone
back; op_times.json where they are planned or measured; planned.json where the kind of device is
known; and run.lock while it runs.
"""

import concurrent.futures
import contextlib
import functools
import json
import pathlib
from collections.abc import Iterator

import jax
from etils import epath

from jaxtrain.checkpoint.checkpoints import Checkpoints
from jaxtrain.checkpoint.parameters import load_parameters
from jaxtrain.config import Config, to_dict
from jaxtrain.data.loader import Feed
from jaxtrain.data.tokens import Corpus, bigram_entropy
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.generation.text import sample_text
from jaxtrain.pipeline import op_times
from jaxtrain.pipeline.setup import Setup
from jaxtrain.plan.compare import plan_at_hand
from jaxtrain.plan.measured_step import AfterWarmUp
from jaxtrain.preparation import loaders, prepare_corpus, start_compiling, when_compiled
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.files import warned
from jaxtrain.run.goodput import GoodputLog, plot_goodput
from jaxtrain.run.metrics import MetricsWriter, plot_losses
from jaxtrain.run.progress import Progress
from jaxtrain.run.run_lock import FolderError, RunLock
from jaxtrain.run.signals import Signals
from jaxtrain.run.wall_clock import Part, WallClock
from jaxtrain.run.watchdog import Watchdog
from jaxtrain.training.calendar import Calendar
from jaxtrain.training.evaluation import Evaluation
from jaxtrain.training.parameter_checks import Copies
from jaxtrain.training.profile import Profile, trace_folder
from jaxtrain.training.recovery import Judge, Memory
from jaxtrain.training.reporting import Pending, Reporter, Speedometer
from jaxtrain.training.requests import Request, Requests, no_request
from jaxtrain.training.state import initial_state
from jaxtrain.training.step import make_step

SAMPLE_TEMPERATURE = 0.8


def run(
    config: Config,
    setup: Setup,
    folder: pathlib.Path,
    clock: WallClock,
    unresolved: Config,
    recipe: Config,
) -> ExitStatus:
    """Trains as a resolved config says until `train.steps`, or until SIGTERM or Ctrl-C, and leaves
    a checkpoint. What the run ends with.

    Continues from the newest whole checkpoint of `folder`. setup: the config's tables; clock: of
    the command;
    unresolved, recipe: the config before it was resolved, and before the command's flags, from
        which an error's suggestions start.

    Raises FolderError where another run is at work in the folder; ConfigError, DataError or
    CheckpointError, before anything is compiled or written, for a config that does not fit the
    checkpoint or the corpus, and for checkpoints of which none is whole; NumbersError where numbers
    are not good and the run cannot help itself.
    """
    clock.enter(Part.DATA)
    with _watched(config, folder, clock) as (signals, watchdog), contextlib.ExitStack() as lasting:
        # ---------------------------------------------------------------- data: what to train on, a
        checkpoints = Checkpoints(config, unresolved, recipe, folder)
        checkpoints.choose()
        corpus = prepare_corpus(config)
        checkpoints.check_corpus(corpus)
        if checkpoints.step >= config.train.steps:
            done = f"{folder} already has its {checkpoints.step} steps"
            cluster.log(f"{done}: raise train.steps to go on")
            return ExitStatus.FINISHED
        checkpoints.say_changes()

        clock.enter(Part.TRACING)
        mesh = make_mesh(sizes_of(config.mesh))
        with jax.set_mesh(mesh), contextlib.ExitStack() as closing:
            # ------------------------------------------------------------ step: its programs, compi
            step = make_step(config, mesh, setup)
            data, held_out = (
                closing.enter_context(loader) for loader in loaders(config, step, corpus, folder)
            )
            checkpoints.attach(step)
            goodput = lasting.enter_context(_timed(folder, clock, checkpoints))
            signals.before_end(goodput.discard)
            # XLA compiles most of a program on one core
            beside = lasting.enter_context(concurrent.futures.ThreadPoolExecutor(2))
            make_state = functools.partial(
                initial_state, step.layout, step.optimizer, config.train.seed
            )
            programs = start_compiling(step, data, beside, clock)
            # Not before: one thread traces at a time, and the step's compilation is what takes
            # longest.
            first_state = None if checkpoints.step else beside.submit(make_state)
            evaluation = Evaluation(step.evaluate, step.abstract_state().trained, held_out)
            soon = (
                [evaluation.start_compiling(beside)]
                if config.train.eval_every and held_out.batches
                else []
            )
            train, exchange = when_compiled(programs, config, step, corpus, clock, soon)
            cluster.log(*data.remarks(), *held_out.remarks())

            # ------------------------------------------------------------ state: restored or new
            state = checkpoints.restore()
            if state is None:
                state = first_state.result() if first_state else make_state()
            start = checkpoints.step
            goodput.reached(start)
            cluster.log(
                f"continuing from {checkpoints.source}"
                if start
                else f"starting: weights from seed {config.train.seed}"
            )

            # ------------------------------------------------------------ loop
            log, progress = _open_log(config, unresolved, folder, start, goodput)
            profile = Profile(
                trace_folder(folder), start, config.train.profile_steps, clock, progress.log
            )
            plan = plan_at_hand(config, mesh.devices.flat[0].device_kind).prediction
            measured = AfterWarmUp(plan, train, folder, profile, clock, progress.log)
            judge = Judge(
                config.train, data.describe, Memory.from_json(checkpoints.meta.memory), start
            )
            checkpoints.begin(judge, goodput.wall_s, progress.log)
            for part in (checkpoints, log, progress, profile):
                closing.callback(part.close)
            calendar = Calendar.of(config)
            minutes, grace = config.checkpoint.minutes, config.checkpoint.grace
            requests = Requests(mesh, signals, checkpoints, minutes, grace)
            speedometer, room = Speedometer(config, step, start, clock), config.model.expert_room
            copies = Copies(mesh, state)
            reporter = Reporter(
                calendar,
                step.mean_metrics,
                judge,
                speedometer,
                log,
                progress,
                goodput,
                watchdog.stragglers,
                room,
            )
            closing.enter_context(signals.deferred())
            feed = Feed(data, checkpoints.meta.position, config.train.steps - start)
            at, asked, validation = start, Request.NOTHING, None
            clock.enter(Part.STEPPING)
            while at < config.train.steps and not asked.stop:
                profile.before(at)
                with clock.part(Part.WAITING):
                    batch = feed.next()
                with jax.profiler.StepTraceAnnotation("train", step_num=at):
                    state, metrics = train(state, batch)
                at += 1
                comparison = None
                if calendar.compares(at):
                    with clock.part(Part.OTHER):
                        comparison = copies.compare(state)
                answer = requests.ask() if calendar.meets(at) else no_request
                asked = reporter.add(Pending(at, feed.position - 1, metrics, answer, comparison))
                watchdog.finished(at - 1)
                if exchange and calendar.exchanges(at):
                    state = exchange(state)
                profile.after(at, metrics)
                measured.after(at)
                if asked or checkpoints.due(at) or calendar.evaluates(at):
                    asked |= reporter.finish(stopping=asked.stop)
                    with clock.part(Part.SAVING):
                        if checkpoints.after(at, state, feed.position, asked):
                            requests.saved()
                    reporter.saves(checkpoints.figures())
                    if (
                        calendar.evaluates(at)
                        and (calendar.is_last(at) or not asked.stop)
                        and judge.good
                    ):
                        with clock.part(Part.EVALUATING):
                            validation = evaluation.loss(state.trained)
                        reporter.validation(at, validation)
                        checkpoints.evaluated(at, validation)
                if judge.finding:
                    with clock.part(Part.ROLLING_BACK):
                        rollback, state = checkpoints.roll_back(state)
                        at = rollback.step
                        feed.jump(rollback.position, config.train.steps - at)
                        for listener in (judge, reporter, profile, measured):
                            listener.go_back(rollback)

            # ------------------------------------------------------------ end
            clock.enter(Part.ENDING)
            measured.finish(at)
            checkpoints.finish(at)
            reporter.saves(checkpoints.figures())
            progress.close()
            picture = beside.submit(_draw_losses, folder)  # while the sampler is compiled
            if at < config.train.steps:
                saved = (
                    "which is saved"
                    if checkpoints.newest == at
                    else f"and step {checkpoints.newest or 0} is saved"
                )
                cluster.log(
                    f"stopped at step {at} of {config.train.steps}, {saved}: the same command "
                    "goes on from there"
                )
                picture.result()
                return _together(
                    ExitStatus.INTERRUPTED if Request.INTERRUPT in asked else ExitStatus.STOPPED
                )
            del state, batch  # room for the sampler
        _conclude(config, corpus, validation, checkpoints.directory, at)
        picture.result()
        return _together(ExitStatus.FINISHED)


# --- the parts ------------------------------------------------------------------------------------


def _together(status: ExitStatus) -> ExitStatus:
    """The status, when every process is here: process 0 still draws and samples, and jax aborts
    those that wait long for it."""
    if jax.process_count() > 1:
        cluster.barrier("the run has ended")
    return status


@contextlib.contextmanager
def _watched(
    config: Config, folder: pathlib.Path, clock: WallClock
) -> Iterator[tuple[Signals, Watchdog]]:
    """A context in which no other run is at work in the folder, and whatever ends this one, a
    signal or a hang, leaves no lock.

    FolderError as RunLock.take.
    """
    lock = RunLock(folder)
    try:
        with Signals(lock.release, notices=cluster.is_main()) as signals:
            cluster.from_main(lambda: lock.take(cluster.log), FolderError)
            peers = cluster.connect_peers()
            with Watchdog(
                folder, peers, clock, config.train.hang_after, lock.release
            ).watching() as watchdog:
                yield signals, watchdog
    finally:
        lock.release()


@contextlib.contextmanager
def _timed(
    folder: pathlib.Path, clock: WallClock, checkpoints: Checkpoints
) -> Iterator[GoodputLog]:
    """A context whose wall time by parts is in the run's folder; says at its end, and draws, what
    became of that of all starts.

    checkpoints: they know what the run resumes from.
    """
    goodput = GoodputLog(
        folder if cluster.is_main() else None, clock, checkpoints.step, checkpoints.meta.wall_s
    )
    with contextlib.closing(goodput):
        yield goodput
        cluster.log(goodput.summary())
    if cluster.is_main():
        with warned(folder / "goodput.png", cluster.log):
            plot_goodput(folder)


def _open_log(
    config: Config, unresolved: Config, folder: pathlib.Path, start: int, goodput: GoodputLog
) -> tuple[MetricsWriter, Progress]:
    """What a step's results are written to and shown by; config.json, and op times that were not
    given, are written too."""
    main = cluster.is_main()
    if main:
        folder.mkdir(parents=True, exist_ok=True)
        with warned(folder / "config.json", cluster.log):
            (folder / "config.json").write_text(json.dumps(to_dict(config), indent=2) + "\n")
        if op_times.worth_storing(config, unresolved):
            with warned(folder / op_times.OP_TIMES, cluster.log):
                op_times.store(
                    config, folder, f"{jax.device_count()} × {jax.devices()[0].device_kind}"
                )
    progress = Progress(config.train.steps, start, shown=main)
    return MetricsWriter(
        folder if main else None, config.metrics.tensorboard, start, goodput.wall_s, progress.log
    ), progress


def _draw_losses(folder: pathlib.Path) -> None:
    """Writes loss.png, or says why not."""
    if cluster.is_main():
        with warned(folder / "loss.png", cluster.log):
            plot_losses(folder)


def _conclude(
    config: Config, corpus: Corpus, validation: float | None, checkpoints: epath.Path, at: int
) -> None:
    """Says the result beside the corpus's own, and a sample."""
    if not cluster.is_main():
        return
    if validation is not None:
        entropy = bigram_entropy(corpus)
        beside = (
            f"; the corpus's byte-bigram entropy is {entropy:.4f}" if entropy is not None else ""
        )
        cluster.log(f"validation loss {validation:.4f} nats a token{beside}")
    train = config.train
    if train.sample_tokens:
        parts, params = load_parameters(checkpoints, at, config)
        dtype = jax.numpy.dtype(config.precision.compute)
        text = sample_text(
            parts,
            params,
            corpus.tokenizer,
            train.sample_prompt,
            train.sample_tokens,
            train.seed,
            SAMPLE_TEMPERATURE,
            dtype=dtype,
        )
        cluster.log(f"sample, temperature {SAMPLE_TEMPERATURE}:\n{train.sample_prompt}{text}")
