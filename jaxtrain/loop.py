"""The training loop. `run` is a run from top to bottom: checkpoint, corpus, mesh, step, batches,
programs, state, loop, end. `Trainer` is its loop; begin with `Trainer.train`. phases/run_end.py has
what is logged once all steps are done.

A run leaves these files in its folder: config.json, metrics.jsonl, goodput.jsonl, checkpoints/,
tensorboard/, loss.png, goodput.png, profile/; metrics.rolled_back.jsonl if it has gone back;
op_times.json if op times are planned or measured; planned.json if the hardware is known;
starts.jsonl; samples.jsonl; trackers/ if it has some; and run.lock while it runs.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Collection, Mapping

import jax

from jaxtrain.checkpoint.manager import RunCheckpoints
from jaxtrain.checkpoint.resuming import Candidates, StartPoint, open_folder
from jaxtrain.config.phases import Span, config_of, span_at, spans
from jaxtrain.data.batches import HeldOutBatches, TrainingBatches
from jaxtrain.data.loader import Feed, Loader, make_loaders, prepare_corpora
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.experiments.followers import Followers
from jaxtrain.phases.run_context import RunContext, evaluates_first, timed, watched
from jaxtrain.phases.run_end import all_done, draw_losses, log_results, what_next
from jaxtrain.phases.run_files import write_start
from jaxtrain.phases.run_state import make_state, open_origin, state_on_disk, until_exhausted
from jaxtrain.phases.span_programs import SpanPrograms
from jaxtrain.phases.start_lines import beginning, introduction, memory_lines, when_compiled
from jaxtrain.pipeline.prepared_run import PreparedRun
from jaxtrain.planner.for_training import AfterWarmUp, Prediction, fitting, plan_at_hand
from jaxtrain.run import out_of_memory
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.intervals import Intervals
from jaxtrain.run.metrics import MetricsWriter
from jaxtrain.run.progress import Progress
from jaxtrain.run.speculation import Speculation
from jaxtrain.run.wall_clock import Phase, WallClock
from jaxtrain.training.evaluation import Evaluation, OwnEvaluation
from jaxtrain.training.one_step import StepMetrics
from jaxtrain.training.parameter_checks import Copies
from jaxtrain.training.profile import Profile, trace_folder
from jaxtrain.training.recovery import DetectorState, SpikeDetector
from jaxtrain.training.reporting import Pending, Reporter, Speedometer
from jaxtrain.training.requests import Request, Requests, no_request
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step, make_step


@dataclasses.dataclass(frozen=True, eq=False)
class ReadyStep:
    """The run's own step, the compiled ones of its spans with the batches that these take, and the
    evaluations of the parameters."""

    step: Step
    programs: SpanPrograms
    batches: Loader[TrainingBatches]
    evaluation: Evaluation
    own_evaluation: OwnEvaluation


def run(prepared: PreparedRun, clock: WallClock) -> ExitStatus:
    """Trains until `train.steps`, or until SIGTERM or Ctrl-C, and leaves a checkpoint. Continues
    from the newest complete checkpoint in the run's folder. clock: of the command

    Raises FolderError if another run uses the folder. Before anything is compiled or written:
    FlagsError, DataError or CheckpointError for a config that does not fit the checkpoint or the
    corpus, and if no checkpoint is complete; HfError for a published model that is damaged. Raises
    NumbersError if numbers are not good and the run cannot go back.
    """
    config, folder = prepared.config, prepared.folder
    clock.enter(Phase.DATA)
    with (
        watched(config.train, folder, clock) as (signals, watchdog),
        out_of_memory.named(functools.partial(fitting, prepared.requested, prepared.environment)),
        contextlib.ExitStack() as lasting,  # until the last line is logged
    ):
        # --- checkpoint and corpus ---
        checkpoints = open_folder(prepared)
        chosen, origin = open_origin(checkpoints.choose())
        corpora = prepare_corpora(config.data, config.model.vocab_size, config.train)
        content = TrainingBatches(corpora, spans(config))
        chosen.check_corpora(content)
        config = until_exhausted(config, content)
        has_all = chosen.start.step >= config.train.last_step
        if has_all and not evaluates_first(config, chosen.start, folder):
            cluster.log(*all_done(config, folder, chosen.start.step, corpora.tokenizer))
            return ExitStatus.FINISHED
        chosen.log_changes()

        # --- mesh and step ---
        clock.enter(Phase.TRACING)
        mesh = make_mesh(sizes_of(config.mesh))
        with jax.set_mesh(mesh), contextlib.ExitStack() as closing:  # until the last step is saved
            step = make_step(config, mesh, prepared.setup)
            own_evaluation = OwnEvaluation(config, mesh, corpora.tokenizer)
            closing.enter_context(state_on_disk(step))
            begin = functools.partial(make_state, config, step, origin)
            candidates = chosen.candidates(step, content, begin)

            # --- batches ---
            clock.enter(Phase.DATA)
            # Now, because a damaged model ends the run before anything is compiled or written.
            initial = _done(begin()) if origin and not candidates.expected.resumes else None
            batches, held_out = make_loaders(
                content,
                config.data,
                step.abstract_batch["tokens"],
                step.separate_replicas,
                config.train.eval_batches,
                folder if config.metrics.rows else None,
            )
            loaders: list[Loader] = [batches, *held_out.values()]
            for loader in loaders:
                closing.enter_context(loader)
            goodput = lasting.enter_context(timed(folder, clock, candidates.expected))
            signals.before_end(goodput.discard)

            # --- programs, and meanwhile the state: XLA compiles most of a program on one core ---
            executor = lasting.enter_context(concurrent.futures.ThreadPoolExecutor(2))
            programs = SpanPrograms(config, step)
            compiling = programs.start(candidates.expected.meta.position, executor)
            clock.enter(Phase.COMPILING)
            if not (initial or candidates.expected.resumes):
                # Not before: one thread traces at a time, and the step takes longest to compile.
                initial = executor.submit(begin)
            evaluation = _evaluation(step, held_out, corpora.checksums, executor)
            validates = config.train.eval_every or evaluates_first(
                config, candidates.expected, folder
            )
            has_sets = any(loader.content.batches for loader in held_out.values())
            others = [evaluation.start_compiling()] if validates and has_sets else []
            cluster.log(*introduction(*programs.first), *corpora.describe())
            when_compiled(step, clock, compiling, others)
            cluster.log(*(line for each in loaders for line in each.content.remarks()))
            state, start = candidates.restore(initial)
            write_start(prepared, start, step, compiling.result().train, origin)

            # --- loop ---
            goodput.reached(start.step)
            cluster.log(beginning(config.train, start))
            context = RunContext(config, folder, clock, goodput, signals, watchdog)
            ready = ReadyStep(step, programs, batches, evaluation, own_evaluation)
            trainer = Trainer(context, ready, candidates, start, state)
            del initial, state  # the trainer's alone: it frees the memory where it goes back
            closing.callback(trainer.close)
            closing.enter_context(signals.deferred())  # a signal asks the loop to stop from now on
            trainer.train()

            # --- end ---
            status, validation_loss = trainer.finish(), trainer.validation_loss
            picture = executor.submit(draw_losses, folder)  # while the sampler is compiled
            if status is not ExitStatus.FINISHED:
                picture.result()
                return _together(status)
        del trainer  # and its state: the sampler needs the memory
        log_results(config, corpora, checkpoints.directory, folder, validation_loss)
        picture.result()
        lasting.close()  # it logs the goodput
        cluster.log(*what_next(config, folder, corpora.tokenizer))
        return _together(status)


class Trainer:
    """The loop of a run: it takes steps, saves, evaluates and goes back.

    at: the last dispatched step; state: after it; asked: the requests so far;
    validation_loss: the last one, if any.
    """

    def __init__(
        self,
        context: RunContext,
        ready: ReadyStep,
        candidates: Candidates,
        start: StartPoint,
        state: TrainState,
    ):
        config, clock, goodput = context.config, context.clock, context.goodput
        step, self.of_spans = ready.step, ready.programs
        self.evaluation, self.own_evaluation = ready.evaluation, ready.own_evaluation
        self.at, self.state = start.step, state
        self.config, self.step = config, step
        self.span = span_at(self.of_spans.spans, start.meta.position)
        self.programs = self.of_spans.of(self.span)
        self.asked = Request.NOTHING
        self.validation_loss: float | None = None
        self.clock, self.watchdog = clock, context.watchdog
        self.steps = config.train.last_step
        self.intervals = Intervals.of(config.train, config.checkpoint, config.metrics.log_every)
        self.evaluates_first = evaluates_first(config, start, context.folder)
        self.feed = Feed(ready.batches, start.meta.position, self.steps - self.at)

        # --- what people see ---
        main = cluster.is_main()
        self.progress = Progress(self.steps, self.at, shown=main)
        log_line = self.progress.log
        self.log = MetricsWriter(
            context.folder if main else None,
            config.metrics.tensorboard,
            self.at if start.resumes else 0,  # a fork begins new files
            goodput.wall_s,
            log_line,
        )
        names = config.metrics.trackers if main else ()
        self.trackers = Followers(context.folder, names, log_line)
        self.profile = Profile(
            trace_folder(context.folder), self.at, config.train.profile_steps, clock, log_line
        )
        plan = self.plan()
        self.measured = AfterWarmUp(
            plan, self.programs.train, context.folder, self.profile, clock, log_line
        )

        # --- what decides ---
        detected = DetectorState.from_json(start.meta.memory)
        describe = ready.batches.content.describe
        self.detector = SpikeDetector(config.train, describe, detected, self.at)
        self.speculation = Speculation(config.optimizer.clip_norm, self.detector.skips, log_line)
        self.checkpoints = RunCheckpoints(
            candidates, start, self.detector, goodput.wall_s, log_line
        )
        self.requests = Requests(
            step.mesh,
            context.signals,
            self.checkpoints.persistent,
            config.checkpoint.minutes,
            config.checkpoint.grace,
        )
        self.copies = Copies(step.mesh, state)

        # --- what reads the results, a step behind ---
        peak = plan.work.tokens_at_peak() if plan else None
        self.reporter = Reporter(
            intervals=self.intervals,
            spans=self.of_spans.spans,
            combine_metrics=step.combine_metrics,
            detector=self.detector,
            speedometer=Speedometer(self.span.batch_tokens, peak, self.at, clock),
            log=self.log,
            progress=self.progress,
            goodput=goodput,
            stragglers=context.watchdog.stragglers,
            expert_capacity=config.model.expert_room,
            speculation=self.speculation if self.programs.several else None,
        )

    def train(self) -> None:
        """Trains until `train.steps`, or until a request to stop."""
        self.clock.enter(Phase.STEPPING)
        if self.evaluates_first:
            self.validate()
        while self.at < self.steps and not self.asked.stop:
            span = span_at(self.of_spans.spans, self.feed.position)
            if span is not self.span:
                self.enter(span)
            begin = self.at
            self.profile.before(begin)
            metrics = self.take_steps()
            # The devices may still compute this step; what the host knows for sure is that they
            # have finished those before.
            self.watchdog.finished(self.at - 1)
            if self.programs.exchange and self.intervals.exchanges(self.at):
                self.state = self.programs.exchange(self.state)
            self.profile.after(self.at, metrics)
            self.measured.after(self.at, self.at - begin)
            saves = self.intervals.saves(self.at) or self.intervals.saves_locally(self.at)
            validates = self.intervals.evaluates(self.at)
            if self.asked or saves or validates or self.feed.position == self.span.end:
                # Before a save or an evaluation the step's own results are awaited: its numbers
                # may forbid both, and its answer may ask for a save. Figures are of one span.
                self.asked |= self.reporter.finish(stopping=self.asked.stop)
                self.save()
                if validates:
                    self.validate()
            if self.detector.fault:
                self.roll_back()

    def take_steps(self) -> StepMetrics:
        """Dispatches the next step, or those of the next program of several, and reports those of
        the program before. The metrics of the dispatched ones, which the devices may still
        compute."""
        begin, several = self.at, self.programs.several
        most = several.number if several else 1
        if self.span.end > self.feed.position:  # a run that passes over batches goes beyond the end
            most = min(most, self.span.end - self.feed.position)
        count = self.intervals.steps_until(begin, most, self.profile.stops)
        with self.clock.phase(Phase.WAITING):
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
            with self.clock.phase(Phase.OTHER):
                comparison = self.copies.compare(self.state)
        answer = self.requests.ask() if self.intervals.synchronizes(self.at) else no_request
        first_batch = self.feed.position - count
        steps = [
            Pending(
                begin + 1 + i, first_batch + i, metrics, no_request, None, i if several else None
            )
            for i in range(count)
        ]
        steps[-1] = dataclasses.replace(steps[-1], answer=answer, comparison=comparison)
        # These steps are only queued; the report is of those before, while the devices compute.
        self.asked = self.reporter.add(*steps)
        return metrics

    def enter(self, span: Span) -> None:
        """Goes on with the batches of another span, after all results of the one before."""
        self.measured.finish(self.at)
        if span.shape != self.span.shape:
            # Its program may not compile, or need more memory than there is: no step is lost then.
            self.asked |= Request.SAVE
            self.save()
        with self.clock.phase(Phase.COMPILING):
            self.programs, self.span = self.of_spans.of(span), span
            plan = self.plan()
        memory = memory_lines(self.step, self.programs.train)
        for line in (f"from step {self.at + 1} on: {span.describe()}", *memory):
            self.progress.log(line)
        peak = plan.work.tokens_at_peak() if plan else None
        self.reporter.speedometer = Speedometer(span.batch_tokens, peak, self.at, self.clock)
        self.progress.restart(self.at)
        self.watchdog.expect_longer()

    def plan(self) -> Prediction | None:
        """The planned step of the present span, if the devices are known."""
        config = config_of(self.config, self.span).resolve()
        return plan_at_hand(config, self.step.mesh.devices.flat[0].device_kind).prediction

    def save(self) -> None:
        """Saves the state where that is due or asked for, unless its numbers are not good."""
        # In a hurry the machine is gone before a persistent save could end.
        asked = bool(self.asked) or self.intervals.saves(self.at)
        persistent = asked and Request.HURRY not in self.asked
        locally = self.intervals.saves_locally(self.at)
        with self.clock.phase(Phase.SAVING):
            if (persistent or locally) and not self.detector.fault:
                begun = self.checkpoints.save(
                    self.at, self.state, self.feed.position, persistent, locally
                )
                if begun and persistent:
                    self.requests.saved()
        self.reporter.saves(self.checkpoints.persistent.figures())

    def validate(self) -> None:
        """Evaluates the state, unless its numbers are not good or the run stops early."""
        if self.detector.fault or (self.asked.stop and self.at < self.steps):
            return
        with self.clock.phase(Phase.EVALUATING):
            losses = self.evaluation.losses(self.state.trained)
            numbers = self.own_evaluation.numbers(
                self.evaluation, self.state.trained, self.at, self.progress.log
            )
        self.validation_loss = losses.get("")
        decay = self.config.optimizer.ema_decay * self.config.train.eval_ema
        self.reporter.validation(self.at, losses, numbers, decay)
        self.checkpoints.persistent.evaluated(self.at, self.validation_loss)

    def roll_back(self) -> None:
        """Goes back to a good checkpoint, and on with the batches after those at fault."""
        with self.clock.phase(Phase.ROLLING_BACK):
            rollback, self.state = self.checkpoints.roll_back(self.state)
            self.at = rollback.step
            self.feed.jump(rollback.position, self.steps - self.at)
            for listener in (
                self.detector,
                self.reporter,
                self.profile,
                self.measured,
                self.speculation,
            ):
                listener.go_back(rollback)

    def finish(self) -> ExitStatus:
        """Waits for the last save, and logs where the run has stopped. The run's status."""
        self.clock.enter(Phase.ENDING)
        self.measured.finish(self.at)
        if self.programs.several and self.speculation.steps:
            cluster.log(self.speculation.summary())
        self.checkpoints.finish(self.at)
        self.reporter.saves(self.checkpoints.persistent.figures())
        self.progress.close()
        if self.at == self.steps:
            return ExitStatus.FINISHED
        newest = self.checkpoints.persistent.newest
        saved = "which is saved" if newest == self.at else f"and step {newest or 0} is saved"
        cluster.log(
            f"stopped at step {self.at} of {self.steps}, {saved}: the same command goes on from "
            "there"
        )
        return ExitStatus.INTERRUPTED if Request.INTERRUPT in self.asked else ExitStatus.STOPPED

    def close(self) -> None:
        """Ends what the loop has open, also after an error; saves that are under way are waited
        for, after all files are closed."""
        with contextlib.ExitStack() as closing:
            for each in (self.trackers, self.checkpoints, self.log, self.progress, self.profile):
                closing.callback(each.close)


def _evaluation(
    step: Step,
    held_out: Mapping[str, Loader[HeldOutBatches]],
    sources: Collection[str],
    executor: concurrent.futures.Executor,
) -> Evaluation:
    params = step.abstract_state().trained
    sets = {name: loader.iterate for name, loader in held_out.items()}
    return Evaluation(step.evaluate, params, step.abstract_batch, sets, sources, executor)


def _done(state: TrainState) -> concurrent.futures.Future[TrainState]:
    """The future of a state that is there."""
    future: concurrent.futures.Future[TrainState] = concurrent.futures.Future()
    future.set_result(state)
    return future


def _together(status: ExitStatus) -> ExitStatus:
    """Returns the status when every process is here: process 0 still draws and samples, and jax
    aborts processes that wait long for it."""
    if jax.process_count() > 1:
        cluster.barrier("the run has ended")
    return status
