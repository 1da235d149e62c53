"""The training loop, from top to bottom: data, step, state, loop, end. `run` reads as the run goes;
its parts are in training/.

What a run leaves in its folder: config.json, metrics.jsonl, goodput.jsonl, checkpoints/,
tensorboard/, loss.png, goodput.png, profile/, metrics.rolled_back.jsonl of a run that has gone
back; op_times.json where they are planned or measured; planned.json where the kind of device is
known; and run.lock while it runs.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator

import jax
from etils import epath

from jaxtrain.checkpoint.keeping import Keep
from jaxtrain.checkpoint.local_restore import Saved
from jaxtrain.checkpoint.local_run import LocalCheckpoints
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.parameters import load_parameters
from jaxtrain.checkpoint.restoring import restore_newest
from jaxtrain.checkpoint.rollback import roll_back
from jaxtrain.checkpoint.steps import VERSION, Choice, Meta
from jaxtrain.config import Config, to_dict
from jaxtrain.data.loader import Feed
from jaxtrain.data.tokens import Corpus, bigram_entropy
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.generation.text import sample_text
from jaxtrain.pipeline import op_times
from jaxtrain.pipeline.setup import Setup
from jaxtrain.plan.measured_step import AfterWarmUp
from jaxtrain.preparation import loaders, prepare_corpus, start_compiling, when_compiled
from jaxtrain.resumption import Resumption, folder_of_checkpoints
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.goodput import Part, WallClock
from jaxtrain.run.goodput_log import GoodputLog, plot_goodput
from jaxtrain.run.line_file import warned
from jaxtrain.run.metrics import MetricsWriter, plot_losses
from jaxtrain.run.progress import Progress
from jaxtrain.run.run_lock import FolderError, RunLock
from jaxtrain.run.signals import Signals
from jaxtrain.run.watchdog import Watchdog
from jaxtrain.training.calendar import Calendar
from jaxtrain.training.evaluation import Evaluation
from jaxtrain.training.parameter_checks import Copies, Finiteness
from jaxtrain.training.profile import Profile, trace_folder
from jaxtrain.training.recovery import Judge, Memory
from jaxtrain.training.reporting import Pending, Reporter, Speedometer
from jaxtrain.training.requests import Request, Requests, no_request
from jaxtrain.training.state import initial_state, stored_shapes
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
        checkpoints = folder_of_checkpoints(config, folder)
        resumption = Resumption(checkpoints, config, unresolved, recipe)
        choice = resumption.choose()
        start = choice.step or 0
        corpus = prepare_corpus(config)
        resumption.check_corpus(choice, corpus)
        if start >= config.train.steps:
            cluster.say(f"{folder} already has its {start} steps: raise train.steps to go on")
            return ExitStatus.FINISHED
        resumption.say_changes(choice)

        clock.enter(Part.TRACING)
        mesh = make_mesh(sizes_of(config.mesh))
        with jax.set_mesh(mesh), contextlib.ExitStack() as closing:
            # ------------------------------------------------------------ step: its programs, compi
            step = make_step(config, mesh, setup)
            data, held_out = (
                closing.enter_context(loader) for loader in loaders(config, step, corpus, folder)
            )
            shapes, placement = stored_shapes(step.layout, step.optimizer), step.layout.placement
            local = LocalCheckpoints(
                config.checkpoint.local,
                folder,
                checkpoints,
                step.abstract_state(),
                shapes,
                placement,
            )
            newer = local.candidates(
                start, config.train.steps, functools.partial(resumption.why_not, corpus)
            )
            goodput = lasting.enter_context(_timed(folder, clock, newer[0] if newer else choice))
            signals.before_end(goodput.discard)
            # XLA compiles most of a program on one core
            beside = lasting.enter_context(concurrent.futures.ThreadPoolExecutor(2))
            make_state = functools.partial(
                initial_state, step.layout, step.optimizer, config.train.seed
            )
            programs = start_compiling(step, data, beside, clock)
            # Not before: one thread traces at a time, and the step's compilation is what takes
            # longest.
            first_state = None if start or newer else beside.submit(make_state)
            evaluation = Evaluation(step.evaluate, step.abstract_state().trained, held_out)
            soon = (
                [evaluation.start_compiling(beside)]
                if config.train.eval_every and held_out.batches
                else []
            )
            train, exchange = when_compiled(programs, config, step, corpus, clock, soon)
            cluster.say(*data.remarks(), *held_out.remarks())

            # ------------------------------------------------------------ state: restored or new
            restored = local.restore(newer)
            if restored:
                state, choice = (
                    restored.state,
                    dataclasses.replace(choice, step=restored.step, meta=restored.meta),
                )
            elif start:
                choose_again = functools.partial(resumption.choose_again, corpus)
                state, choice = restore_newest(
                    choice, choose_again, checkpoints, step.abstract_state(), shapes, placement
                )
            else:
                state = first_state.result() if first_state else make_state()
            start = choice.step or 0
            goodput.reached(start)
            source = f", {restored.source}" if restored else ""
            cluster.say(
                f"continuing from step {start}{source}"
                if start
                else f"starting: weights from seed {config.train.seed}"
            )

            # ------------------------------------------------------------ loop
            log, progress = _open_log(config, unresolved, folder, start, goodput)
            kept = Keep(
                config.checkpoint.keep, config.checkpoint.keep_every, config.checkpoint.keep_best
            )
            saves = Checkpointer(
                checkpoints, placement, shapes, kept, choice.strangers, progress.say
            )
            profile = Profile(
                trace_folder(folder), start, config.train.profile_steps, clock, progress.say
            )
            device_kind = mesh.devices.flat[0].device_kind
            measured = AfterWarmUp(config, device_kind, train, folder, profile, clock, progress.say)
            local.begin(start, progress.say)
            for part in (saves, local, log, progress, profile):
                closing.callback(part.close)
            calendar, requests = (
                Calendar.of(config),
                Requests(mesh, signals, saves, config.checkpoint.minutes, config.checkpoint.grace),
            )
            speedometer, room = Speedometer(config, step, start, clock), config.model.expert_room
            judge = Judge(config.train, data.rows_of, Memory.from_json(choice.memory), start)
            finite, copies = Finiteness(mesh), Copies(mesh, state)
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
            feed = Feed(data, choice.position, config.train.steps - start)
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
                if (
                    asked
                    or calendar.saves(at)
                    or calendar.saves_locally(at)
                    or calendar.evaluates(at)
                ):
                    asked |= reporter.finish(stopping=asked.stop)
                    lasting_save = (asked or calendar.saves(at)) and Request.HURRY not in asked
                    saving = judge.good and (lasting_save or calendar.saves_locally(at))
                    with clock.part(Part.SAVING):
                        if saving and judge.good_parameters(
                            at, feed.position, finite((state.params, state.anchor))
                        ):
                            meta = dataclasses.asdict(
                                _meta(
                                    config,
                                    corpus,
                                    at,
                                    feed.position,
                                    judge.memory,
                                    goodput.wall_s(),
                                )
                            )
                            if calendar.saves_locally(at):
                                local.save(at, state, meta)
                            if lasting_save:
                                requests.saved()
                                saves.save(at, state, meta)
                    reporter.saves(saves.figures())
                    if (
                        calendar.evaluates(at)
                        and (calendar.is_last(at) or not asked.stop)
                        and judge.good
                    ):
                        with clock.part(Part.EVALUATING):
                            validation = evaluation.loss(state.trained)
                        reporter.validation(at, validation)
                        saves.evaluated(at, validation)
                if judge.finding:
                    with clock.part(Part.ROLLING_BACK):
                        rollback, state = roll_back(
                            checkpoints, saves, judge.finding, state, step, config.train.seed
                        )
                        at = rollback.step
                        feed.jump(rollback.position, config.train.steps - at)
                        for listener in (judge, reporter, profile, measured, local):
                            listener.go_back(rollback)

            # ------------------------------------------------------------ end
            clock.enter(Part.ENDING)
            measured.finish(at)
            saves.wait()
            reporter.saves(saves.figures())
            if saves.newest == at:
                local.forget()
            progress.close()
            picture = beside.submit(_draw_losses, folder)  # while the sampler is compiled
            if at < config.train.steps:
                saved = (
                    "which is saved"
                    if saves.newest == at
                    else f"and step {saves.newest or 0} is saved"
                )
                cluster.say(
                    f"stopped at step {at} of {config.train.steps}, {saved}: the same command "
                    "goes on from there"
                )
                picture.result()
                return _together(
                    ExitStatus.INTERRUPTED if Request.INTERRUPT in asked else ExitStatus.STOPPED
                )
            del state, batch  # room for the sampler
        _conclude(config, corpus, validation, checkpoints, at)
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
            cluster.from_main(lambda: lock.take(cluster.say), FolderError)
            peers = cluster.connect_peers()
            with Watchdog(
                folder, peers, clock, config.train.hang_after, lock.release
            ).watching() as watchdog:
                yield signals, watchdog
    finally:
        lock.release()


@contextlib.contextmanager
def _timed(folder: pathlib.Path, clock: WallClock, begins: Choice | Saved) -> Iterator[GoodputLog]:
    """A context whose wall time by parts is in the run's folder; says at its end, and draws, what
    became of that of all starts.

    begins: what the run goes on from, as far as is known.
    """
    goodput = GoodputLog(
        folder if cluster.is_main() else None,
        clock,
        begins.step or 0,
        begins.meta.wall_s if begins.meta else 0.0,
    )
    with contextlib.closing(goodput):
        yield goodput
        cluster.say(goodput.summary())
    if cluster.is_main():
        with warned(folder / "goodput.png", cluster.say):
            plot_goodput(folder)


def _open_log(
    config: Config, unresolved: Config, folder: pathlib.Path, start: int, goodput: GoodputLog
) -> tuple[MetricsWriter, Progress]:
    """What a step's results are written to and shown by; config.json, and op times that were not
    given, are written too."""
    main = cluster.is_main()
    if main:
        folder.mkdir(parents=True, exist_ok=True)
        with warned(folder / "config.json", cluster.say):
            (folder / "config.json").write_text(json.dumps(to_dict(config), indent=2) + "\n")
        if op_times.worth_storing(config, unresolved):
            with warned(folder / op_times.OP_TIMES, cluster.say):
                op_times.store(
                    config, folder, f"{jax.device_count()} × {jax.devices()[0].device_kind}"
                )
    progress = Progress(config.train.steps, start, shown=main)
    return MetricsWriter(
        folder if main else None, config.metrics.tensorboard, start, goodput.wall_s, progress.say
    ), progress


def _meta(
    config: Config, corpus: Corpus, at: int, position: int, memory: Memory, wall_s: float
) -> Meta:
    """What is saved beside the state of step `at`; position: the number of the next batch."""
    tokenizer = corpus.tokenizer.describe()
    return Meta(
        to_dict(config),
        VERSION,
        at,
        position,
        wall_s,
        corpus.checksum,
        tokenizer,
        memory.to_json(),
    )


def _draw_losses(folder: pathlib.Path) -> None:
    """Writes loss.png, or says why not."""
    if cluster.is_main():
        with warned(folder / "loss.png", cluster.say):
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
        cluster.say(f"validation loss {validation:.4f} nats a token{beside}")
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
        cluster.say(f"sample, temperature {SAMPLE_TEMPERATURE}:\n{train.sample_prompt}{text}")
