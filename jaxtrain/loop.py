"""The training loop: `run` sets a run up, trains and finishes. `Trainer` has the parts of a run,
and `Trainer.train` is the loop.

A run leaves these files in its folder: config.json, metrics.jsonl, goodput.jsonl, checkpoints/,
tensorboard/, loss.png, goodput.png, profile/; metrics.rolled_back.jsonl if it has gone back;
op_times.json if op times are planned or measured; planned.json if the hardware is known; and
run.lock while it runs.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax

from jaxtrain import cli
from jaxtrain.checkpoint.checkpoints import Checkpoints, TrainedCorpus
from jaxtrain.checkpoint.restoring import load_parameters
from jaxtrain.config import Config, PipelineConfig
from jaxtrain.config.recipes import config_text
from jaxtrain.config.rules.checks import Environment
from jaxtrain.data.loader import Feed, make_loaders, prepare_corpus
from jaxtrain.data.tokens import Corpus, bigram_entropy
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.devices.state_file import StateFileError
from jaxtrain.generation.text import sample_text
from jaxtrain.hf import importing, source_files
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.importing import PublishedWeights
from jaxtrain.hf.tokenizer_files import tokenizer_of_run
from jaxtrain.pipeline.setup import Setup
from jaxtrain.planner.for_training import AfterWarmUp, fitting, plan_at_hand
from jaxtrain.run import out_of_memory
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.files import CONFIG_FILE, replace_text, warned
from jaxtrain.run.goodput import GoodputLog, plot_goodput
from jaxtrain.run.intervals import Intervals
from jaxtrain.run.metrics import METRICS, MetricsWriter, plot_losses
from jaxtrain.run.next_commands import next_commands
from jaxtrain.run.progress import Progress
from jaxtrain.run.run_lock import FolderError, RunLock
from jaxtrain.run.signals import Signals
from jaxtrain.run.speculation import Speculation
from jaxtrain.run.wall_clock import Part, WallClock
from jaxtrain.run.watchdog import Watchdog
from jaxtrain.start_lines import as_compiled, introduction
from jaxtrain.training import stored_op_times
from jaxtrain.training.compiled_step import Programs, start_compiling
from jaxtrain.training.evaluation import Evaluation
from jaxtrain.training.one_step import StepMetrics
from jaxtrain.training.parameter_checks import Copies
from jaxtrain.training.profile import Profile, trace_folder
from jaxtrain.training.recovery import DetectorState, SpikeDetector
from jaxtrain.training.reporting import Pending, Reporter, Speedometer
from jaxtrain.training.requests import Request, Requests, no_request
from jaxtrain.training.state import TrainState, initial_state
from jaxtrain.training.step import Step, make_step

SAMPLE_TEMPERATURE = 0.8


def run(
    config: Config,
    setup: Setup,
    folder: pathlib.Path,
    clock: WallClock,
    unresolved: Config,
    environment: Environment,
) -> ExitStatus:
    """Trains until `train.steps`, or until SIGTERM or Ctrl-C, and leaves a checkpoint. Continues
    from the newest complete checkpoint of `folder`.

    config: resolved; setup: its tables; clock: of the command
    unresolved: the config before it was resolved, from which an error's suggestions start
    environment: what these suggestions have to fit

    Raises FolderError if another run uses the folder. Before anything is compiled or written:
    FlagsError, DataError, ChangedCorpusError or CheckpointError for a config that does not fit
    the checkpoint or the corpus, and if no checkpoint is complete; HfError for a published model
    that is damaged. Raises NumbersError if numbers are not good and the run cannot go back.
    """
    clock.enter(Part.DATA)
    with (
        _watched(config.train.hang_after, folder, clock) as (signals, watchdog),
        out_of_memory.named(functools.partial(fitting, unresolved, environment)),
        contextlib.ExitStack() as lasting,
    ):
        checkpoints = Checkpoints(config, unresolved, environment, folder)
        checkpoints.choose()
        weights = _open_weights(config, checkpoints.resumes)
        corpus = checked_corpus(config, checkpoints)
        if checkpoints.step >= config.train.steps:
            done = f"{folder} already has its {checkpoints.step} steps"
            cluster.log(f"{done}: raise train.steps to go on", *_what_next(config, folder, corpus))
            return ExitStatus.FINISHED
        checkpoints.log_changes()
        clock.enter(Part.TRACING)
        mesh = make_mesh(sizes_of(config.mesh))
        with jax.set_mesh(mesh), contextlib.ExitStack() as closing:
            step = make_step(config, mesh, setup)
            closing.enter_context(state_on_disk(step))
            begin = functools.partial(_begin, config, step, weights)
            checkpoints.attach(step, begin)
            clock.enter(Part.DATA)
            # damage ends the run before anything is compiled or written
            state = begin() if weights and not checkpoints.resumes else None
            trainer = Trainer(config, folder, clock, step, corpus, checkpoints, begin)
            closing.enter_context(trainer.data)
            closing.enter_context(trainer.held_out)
            goodput = lasting.enter_context(_timed(folder, clock, checkpoints))
            signals.before_end(goodput.discard)
            # XLA compiles most of a program on one core
            executor = lasting.enter_context(concurrent.futures.ThreadPoolExecutor(2))
            trainer.compile_and_restore(executor, state)
            _write_settings(config, unresolved.pipeline, folder, weights)
            trainer.open(goodput, signals, watchdog, closing)
            trainer.train()
            status = trainer.finish(executor)
            if status is not ExitStatus.FINISHED:
                return _together(status)
        trainer.conclude()
        lasting.close()  # it logs the goodput
        cluster.log(*_what_next(config, folder, corpus))
        return _together(status)


class Trainer:
    """The parts of a run. Its methods are called in their order, each once; `train` is the loop.

    at: the last dispatched step; state: after it; asked: the requests so far;
    validation_loss: the last one, if any.
    """

    def __init__(
        self,
        config: Config,
        folder: pathlib.Path,
        clock: WallClock,
        step: Step,
        corpus: Corpus,
        checkpoints: Checkpoints,
        begin: Callable[[], TrainState],
    ):
        self.config, self.folder, self.clock, self.begin = config, folder, clock, begin
        self.step, self.corpus, self.checkpoints = step, corpus, checkpoints
        self.data, self.held_out = make_loaders(
            corpus,
            config.data,
            step.abstract_batch["tokens"],
            step.separate_replicas,
            config.train.eval_batches,
            folder if config.metrics.rows else None,
        )
        self.intervals = Intervals.of(config.train, config.checkpoint, config.metrics.log_every)
        self.asked = Request.NOTHING
        self.validation_loss: float | None = None

    # --- set up -----------------------------------------------------------------------------------

    def compile_and_restore(
        self, executor: concurrent.futures.Executor, state: TrainState | None
    ) -> None:
        """Compiles the programs, meanwhile initializes the state of a new run, and restores the
        state of another. state: the state before the first step, if it is known"""
        config, step = self.config, self.step
        compiling = start_compiling(step, executor)
        self.clock.enter(Part.COMPILING)
        # Not before: one thread traces at a time, and the step takes longest to compile.
        is_known = state or self.checkpoints.resumes
        new_state = None if is_known else executor.submit(self.begin)
        abstract = step.abstract_state().trained
        self.evaluation = Evaluation(
            step.evaluate, abstract, self.held_out.specification(), self.held_out.iterate, executor
        )
        validates = config.train.eval_every and self.held_out.batches
        others = [self.evaluation.start_compiling()] if validates else []
        cluster.log(*introduction(config, step), self.corpus.describe())
        self.programs = when_compiled(step, self.clock, compiling, others)
        cluster.log(*self.data.remarks(), *self.held_out.remarks())
        state = state or self.checkpoints.restore()
        if state is None:
            state = new_state.result() if new_state else self.begin()
        self.state, self.at = state, self.checkpoints.step

    def open(
        self,
        goodput: GoodputLog,
        signals: Signals,
        watchdog: Watchdog,
        closing: contextlib.ExitStack,
    ) -> None:
        """Opens the log and all that watches the loop, to be closed by `closing`. From now on
        signals ask the loop to stop."""
        config, clock, start, checkpoints = self.config, self.clock, self.at, self.checkpoints
        main, mesh = cluster.is_main(), self.step.mesh
        goodput.reached(start)
        origin = config.train.init_from
        if checkpoints.resumes:
            rest = f"; train.init_from={origin} is passed over" if origin else ""
            cluster.log(f"continuing from {checkpoints.source}{rest}")
        else:
            cluster.log(f"starting: weights from {origin or f'seed {config.train.seed}'}")
        self.progress = Progress(config.train.steps, start, shown=main)
        log_line = self.progress.log
        tensorboard = config.metrics.tensorboard
        log = MetricsWriter(
            self.folder if main else None, tensorboard, start, goodput.wall_s, log_line
        )
        self.profile = Profile(
            trace_folder(self.folder), start, config.train.profile_steps, clock, log_line
        )
        plan = plan_at_hand(config, mesh.devices.flat[0].device_kind).prediction
        self.measured = AfterWarmUp(
            plan, self.programs.train, self.folder, self.profile, clock, log_line
        )
        detected = DetectorState.from_json(checkpoints.meta.memory)
        self.detector = SpikeDetector(config.train, self.data.describe, detected, start)
        checkpoints.begin(self.intervals, self.detector, goodput.wall_s, log_line)
        for part in (checkpoints, log, self.progress, self.profile):
            closing.callback(part.close)
        self.requests = Requests(
            mesh, signals, checkpoints, config.checkpoint.minutes, config.checkpoint.grace
        )
        self.copies = Copies(mesh, self.state)
        self.watchdog = watchdog
        tokens = config.data.batch_size * config.data.sequence_length
        peak = plan.work.tokens_at_peak() if plan else None
        self.speculation = Speculation(config.optimizer.clip_norm, self.detector.skips, log_line)
        self.reporter = Reporter(
            intervals=self.intervals,
            combine_metrics=self.step.combine_metrics,
            detector=self.detector,
            speedometer=Speedometer(tokens, peak, start, clock),
            log=log,
            progress=self.progress,
            goodput=goodput,
            stragglers=watchdog.stragglers,
            expert_capacity=config.model.expert_room,
            speculation=self.speculation if self.programs.several else None,
        )
        closing.enter_context(signals.deferred())
        self.feed = Feed(self.data, checkpoints.meta.position, config.train.steps - start)

    # --- train ------------------------------------------------------------------------------------

    def train(self) -> None:
        """Trains until `train.steps`, or until a request to stop."""
        self.clock.enter(Part.STEPPING)
        while self.at < self.config.train.steps and not self.asked.stop:
            begin = self.at
            self.profile.before(begin)
            metrics = self.train_steps()
            self.watchdog.finished(self.at - 1)
            if self.programs.exchange and self.intervals.exchanges(self.at):
                self.state = self.programs.exchange(self.state)
            self.profile.after(self.at, metrics)
            self.measured.after(self.at, self.at - begin)
            validates = self.intervals.evaluates(self.at)
            if self.asked or self.checkpoints.due(self.at) or validates:
                self.asked |= self.reporter.finish(stopping=self.asked.stop)
                self.save()
                if validates:
                    self.validate()
            if self.detector.fault:
                self.roll_back()

    def train_steps(self) -> StepMetrics:
        """Dispatches the next step, or those of the next program of several, and reports those of
        the program before. The metrics of the dispatched ones, which the devices may still
        compute."""
        begin, several = self.at, self.programs.several
        most = several.number if several else 1
        count = self.intervals.steps_until(begin, most, self.profile.stops)
        with self.clock.part(Part.WAITING):
            batches = [self.feed.next() for _ in range(count)]
        with jax.profiler.StepTraceAnnotation("train", step_num=begin):
            if several is None:
                self.state, metrics = self.programs.take(self.state, batches[0])
            else:
                together = count == several.number and self.speculation.tries
                run = several.together if together else several.alone
                self.state, metrics = run(self.state, batches)
                self.speculation.dispatched(together)
        self.at += count
        comparison = None
        if self.intervals.compares(self.at):
            with self.clock.part(Part.OTHER):
                comparison = self.copies.compare(self.state)
        answer = self.requests.ask() if self.intervals.synchronizes(self.at) else no_request
        first = self.feed.position - count
        steps = [
            Pending(begin + 1 + i, first + i, metrics, no_request, None, i if several else None)
            for i in range(count)
        ]
        steps[-1] = dataclasses.replace(steps[-1], answer=answer, comparison=comparison)
        self.asked = self.reporter.add(*steps)
        return metrics

    def save(self) -> None:
        """Saves the state where that is due or asked for."""
        with self.clock.part(Part.SAVING):
            if self.checkpoints.after(self.at, self.state, self.feed.position, self.asked):
                self.requests.saved()
        self.reporter.saves(self.checkpoints.saves.figures())

    def validate(self) -> None:
        """Evaluates the state, unless its numbers are not good or the run stops early."""
        if self.detector.fault or (self.asked.stop and self.at < self.config.train.steps):
            return
        with self.clock.part(Part.EVALUATING):
            self.validation_loss = self.evaluation.loss(self.state.trained)
        self.reporter.validation(self.at, self.validation_loss)
        self.checkpoints.saves.evaluated(self.at, self.validation_loss)

    def roll_back(self) -> None:
        """Goes back to a good checkpoint, and on with the batches after those at fault."""
        with self.clock.part(Part.ROLLING_BACK):
            rollback, self.state = self.checkpoints.roll_back(self.state)
            self.at = rollback.step
            self.feed.jump(rollback.position, self.config.train.steps - self.at)
            for listener in (
                self.detector,
                self.reporter,
                self.profile,
                self.measured,
                self.speculation,
            ):
                listener.go_back(rollback)

    # --- finish -----------------------------------------------------------------------------------

    def finish(self, executor: concurrent.futures.Executor) -> ExitStatus:
        """Waits for the last save, and draws the losses. The run's status."""
        self.clock.enter(Part.ENDING)
        self.measured.finish(self.at)
        if self.programs.several and self.speculation.steps:
            cluster.log(self.speculation.summary())
        self.checkpoints.finish(self.at)
        self.reporter.saves(self.checkpoints.saves.figures())
        self.progress.close()
        # drawn while the sampler is compiled
        self.picture = executor.submit(_draw_losses, self.folder)
        del self.state  # the sampler needs its memory
        if self.at == self.config.train.steps:
            return ExitStatus.FINISHED
        newest = self.checkpoints.saves.newest
        saved = "which is saved" if newest == self.at else f"and step {newest or 0} is saved"
        cluster.log(
            f"stopped at step {self.at} of {self.config.train.steps}, {saved}: the same command "
            "goes on from there"
        )
        self.picture.result()
        return ExitStatus.INTERRUPTED if Request.INTERRUPT in self.asked else ExitStatus.STOPPED

    def conclude(self) -> None:
        """Logs the last validation loss next to the corpus's entropy, and a sample."""
        if cluster.is_main():
            if self.validation_loss is not None:
                entropy = bigram_entropy(self.corpus)
                line = METRICS["validation_loss"].line(self.validation_loss)
                if entropy is not None:
                    line += f"; a table of which byte follows which would have {entropy:.4f}"
                cluster.log(line)
            if self.config.train.sample_tokens:
                self._log_sample()
        self.picture.result()

    def _log_sample(self) -> None:
        train = self.config.train
        layout, params = load_parameters(
            self.checkpoints.directory,
            self.at,
            self.config.model,
            self.config.precision,
            independent_replicas=train.diloco_inner_steps > 0,
        )
        text = sample_text(
            layout.parts,
            params,
            self.corpus.tokenizer,
            train.sample_prompt,
            train.sample_tokens,
            train.seed,
            SAMPLE_TEMPERATURE,
            dtype=jax.numpy.dtype(self.config.precision.compute),
        )
        cluster.log(f"sample, temperature {SAMPLE_TEMPERATURE}:\n{train.sample_prompt}{text}")


def _what_next(config: Config, folder: pathlib.Path, corpus: Corpus) -> list[str]:
    """The last lines of a run that has all its steps: its files, and the next commands."""
    train, model = config.train, config.model
    # The sample's prompt was encoded; an empty one is an end of document, which ids may not have.
    empty = "0" if corpus.tokenizer.end_of_document is None else ""
    generate: dict[str, object] = {"prompt": train.sample_prompt if train.sample_tokens else empty}
    if model.positions == "learned":
        free = model.max_positions - 1 - len(str(generate["prompt"]).encode())
        generate["tokens"] = max(1, min(100, free))
    train_on: dict[str, object] = {"config.train.steps": 2 * train.steps}
    if jax.process_count() == 1 and jax.default_backend() == "cpu":
        train_on["cpu_devices"] = jax.device_count()
    return next_commands(str(folder), generate, train_on, jax.process_count())


def _open_weights(config: Config, resumes: bool) -> PublishedWeights | None:
    """The published weights that a new run starts from; None for a run that resumes, or starts from
    random ones. Every process must call this. Raises HfError in all of them."""
    if resumes or not config.train.init_from:
        return None
    weights = importing.open_together(config)
    run = cluster.in_all(lambda: tokenizer_of_run(weights.published, config), HfError)
    cluster.log(*(f"note: {note}" for note in run.notes))
    return weights


def checked_corpus(config: Config, checkpoints: Checkpoints) -> Corpus:
    """The corpus of a resolved config. Raises DataError, and ChangedCorpusError if the checkpoint
    was trained on another one."""
    corpus = prepare_corpus(config.data, config.model.vocab_size, config.train)
    checkpoints.check_corpus(
        TrainedCorpus(corpus.source, corpus.checksum, corpus.tokenizer.describe())
    )
    return corpus


def _begin(config: Config, step: Step, weights: PublishedWeights | None) -> TrainState:
    """The state before the first step; every process must call this. weights: of
    `train.init_from`, if they are open"""
    if step.layout.disk:
        step.layout.disk.clear()
    if config.train.init_from:
        return importing.read_together(weights or importing.open_together(config), step)
    return initial_state(step.layout, step.optimizer, config.train.seed)


@contextlib.contextmanager
def state_on_disk(step: Step) -> Iterator[None]:
    """A context in which the file of the optimizer's state is open, if that is on disk. Every
    process must call this. Raises StateFileError in all of them."""
    file = step.layout.disk
    if not file:
        yield
        return
    with contextlib.closing(file):
        cluster.in_all(file.open, StateFileError)
        cluster.log(file.describe())
        yield


def when_compiled(
    step: Step,
    clock: WallClock,
    compiling: concurrent.futures.Future[Programs],
    others: Sequence[concurrent.futures.Future] = (),
) -> Programs:
    """Waits for a step's programs, and logs their memory and times.

    others: compilations that have to end too: a GPU's compiler tries kernels out on the device,
    which has to be idle then.
    """
    programs = compiling.result()
    for other in others:
        other.result()
    clock.enter(Part.STATE)
    tracing, seconds = clock.spent(Part.TRACING), clock.spent(Part.COMPILING)
    cluster.log(*as_compiled(step, programs.train, tracing, seconds))
    return programs


def _together(status: ExitStatus) -> ExitStatus:
    """Returns the status when every process is here: process 0 still draws and samples, and jax
    aborts processes that wait long for it."""
    if jax.process_count() > 1:
        cluster.barrier("the run has ended")
    return status


@contextlib.contextmanager
def _watched(
    hang_after: float, folder: pathlib.Path, clock: WallClock
) -> Iterator[tuple[Signals, Watchdog]]:
    """A context in which no other run uses the folder. Whatever ends this run, a signal or a hang,
    leaves no lock.

    Raises FolderError as RunLock.take, and FlagsError for a ConfigError inside.
    """
    lock = RunLock(folder)
    try:
        with Signals(lock.release, notices=cluster.is_main()) as signals:
            cluster.from_main(lambda: lock.take(cluster.log), FolderError)
            watchdog = Watchdog(folder, cluster.connect_peers(), clock, hang_after, lock.release)
            with watchdog.watching(), cli.refused_settings():
                yield signals, watchdog
    finally:
        lock.release()


@contextlib.contextmanager
def _timed(
    folder: pathlib.Path, clock: WallClock, checkpoints: Checkpoints
) -> Iterator[GoodputLog]:
    """A context whose wall time by parts is logged in the run's folder. At its end the goodput of
    all starts is logged and drawn."""
    main = cluster.is_main()
    goodput = GoodputLog(folder if main else None, clock, checkpoints.step, checkpoints.meta.wall_s)
    with contextlib.closing(goodput):
        yield goodput
        cluster.log(goodput.summary())
    if main:
        with warned(folder / "goodput.png", cluster.log):
            plot_goodput(folder)


def _write_settings(
    config: Config, given: PipelineConfig, folder: pathlib.Path, weights: PublishedWeights | None
) -> None:
    """Writes, in process 0, config.json, the small files of a published model, and op_times.json
    for op times that were not `given` by the user."""
    if not cluster.is_main():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with warned(folder / CONFIG_FILE, cluster.log):
        replace_text(folder / CONFIG_FILE, config_text(config))
    if weights:
        with warned(folder / source_files.SOURCE, cluster.log):
            weights.keep(folder)
    if stored_op_times.worth_storing(config.mesh, config.pipeline, given):
        devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
        with warned(folder / stored_op_times.OP_TIMES, cluster.log):
            stored_op_times.store(
                folder, config.pipeline.times, stored_op_times.depend_on(config), devices
            )


def _draw_losses(folder: pathlib.Path) -> None:
    if cluster.is_main():
        with warned(folder / "loss.png", cluster.log):
            plot_losses(folder)
