"""The training loop, from top to bottom: mesh, data, step, state, loop, end. One function a banner; `run` reads as the run goes.

What a run leaves in its folder: config.json, metrics.jsonl, checkpoints/, tensorboard/, loss.png, profile/; and run.lock while it runs.
"""

import concurrent.futures
import contextlib
import dataclasses
import enum
import functools
import json
import math
import operator
import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.checkpoint.manager import Checkpointer, choose_together
from jaxtrain.checkpoint.parameters import load_parameters
from jaxtrain.config import Config, history, to_dict
from jaxtrain.config.checks import Surroundings, changes
from jaxtrain.config.pipeline_setup import make_setup
from jaxtrain.data.loader import Loader
from jaxtrain.data.tokens import Corpus, DataError, bigram_entropy, prepare
from jaxtrain.devices import cluster
from jaxtrain.devices import mesh as meshes
from jaxtrain.generation.sampling import prompt_ids, sample_text
from jaxtrain.plan.report import introduction
from jaxtrain.run import metrics
from jaxtrain.run.progress import Progress, StepTimer
from jaxtrain.run.run_lock import FolderError, RunLock
from jaxtrain.run.signals import Signals
from jaxtrain.training.state import initial_state, stored_shapes
from jaxtrain.training.step import Step, make_step

SAMPLE_TEMPERATURE = 0.8
PROFILE_FROM = 2  # steps of a run before the traced ones: the first two warm up


class LossError(RuntimeError):
    """A loss that is not finite; the message names the step's batch."""


def run(config: Config, workdir: str, began: float | None = None, unresolved: Config | None = None, recipe: Config | None = None) -> None:
    """Trains as a resolved config says until `train.steps`, or until SIGTERM or Ctrl-C, and leaves a checkpoint.

    Continues from the newest whole checkpoint of `workdir`. Raises FolderError where another run is at work there; ConfigError, DataError
    or CheckpointError, before anything is compiled or written, for a config that does not fit the checkpoint or the corpus, and for
    checkpoints of which none is whole; LossError for a loss that is not finite.

    began: when the command began, by time.monotonic, for `wall_s` of metrics.jsonl; now if not given.
    unresolved: the config before it was resolved, and recipe: before the command's flags; what an error suggests starts from these.
    """
    run_began = time.monotonic() if began is None else began
    say = print if cluster.is_main() else lambda *_, **__: None
    with contextlib.ExitStack() as closing:
        lock = RunLock(workdir)
        closing.callback(lock.release)
        # A run that is ended by a signal leaves no lock either.
        signals = closing.enter_context(Signals(lock.release, notices=cluster.is_main()))
        cluster.from_main(lambda: lock.take(functools.partial(say, flush=True)), FolderError)
        _run(config, unresolved or config, recipe or config, pathlib.Path(workdir), run_began, signals, say)


def _run(
    config: Config, unresolved: Config, recipe: Config, folder: pathlib.Path, run_began: float, signals: Signals, say: Callable
) -> None:
    # ---------------------------------------------------------------- what to train on, and from where
    make_setup(config)  # a schedule that does not fit is known before the corpus is read
    choice = choose_together(folder / "checkpoints")
    start, meta = choice.step or 0, choice.meta
    if choice.strangers:
        rest = f"the newest whole checkpoint is {start}" if start else "there is no whole checkpoint"
        say(f"passed over in {folder / 'checkpoints'}: {choice}; {rest}", flush=True)
    if start:
        around = Surroundings(jax.device_count(), jax.default_backend(), recipe, files=True)
        history.refuse_to_continue(meta, unresolved, around)
    corpus = prepare(config.data, config.model.vocab_size, progress=cluster.is_main())
    _check_corpus(corpus, meta)
    m = config.mesh
    mesh = meshes.make_mesh(meshes.sizes_of(m))
    if config.train.sample_tokens:
        prompt_ids(corpus.tokenizer, config.train.sample_prompt, config.model.vocab_size)
    if start >= config.train.steps:
        say(f"{folder} already has its {start} steps: raise train.steps to go on", flush=True)
        return
    if start and (changed := changes(history.stored_config(meta), config)):
        say(f"changed since the checkpoint of step {start}:", *changed, sep="\n  ", flush=True)

    with jax.set_mesh(mesh), contextlib.ExitStack() as closing:
        # ------------------------------------------------------------ the step, compiled
        step = make_step(config, mesh)
        apart = m.replica if config.train.diloco_inner_steps else 1
        load = lambda split, batches=None: closing.enter_context(
            Loader(corpus, config.data, split, step.batch_sharding, config.pipeline.microbatches, batches, apart)
        )
        data, held_out = load("train"), load("validation", config.train.eval_batches)
        abstract = step.abstract_state()
        began = time.perf_counter()
        # XLA compiles a program on one core: the first state is made beside.
        beside = closing.enter_context(concurrent.futures.ThreadPoolExecutor(1))
        first = None if start else beside.submit(initial_state, step.layout, step.optimizer, config.train.seed)
        train = _compile("step", step.train, abstract, data.specification())
        exchange = _compile("exchange", step.exchange, abstract) if step.exchange else None
        _introduce(config, step, train, corpus, time.perf_counter() - began, say)
        for remark in (*data.remarks(), *held_out.remarks()):
            say(remark, flush=True)

        # ------------------------------------------------------------ the state: restored or new
        saves = Checkpointer(
            folder / "checkpoints",
            step.layout.placement,
            stored_shapes(step.layout, step.optimizer),
            config.checkpoint.keep,
            choice.strangers,
            lambda line: progress.say(line),
        )
        closing.callback(saves.close)
        state = first.result() if first else saves.restore(start, abstract)
        say(f"continuing from step {start}" if start else f"starting: weights from seed {config.train.seed}", flush=True)
        if cluster.is_main():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(to_dict(config), indent=2) + "\n")

        def save(at: int, state: dict) -> None:
            asking.saved()
            meta = {"config": to_dict(config), "version": history.VERSION, "step": at, "wall_s": log.wall_s()}
            saves.save(at, state, meta | {"checksum": corpus.checksum, "tokenizer": corpus.tokenizer.describe()})

        evaluation = functools.cache(lambda: _compile("evaluation", step.evaluate, abstract[step.trained], held_out.specification()))

        def evaluate(at: int, state: dict) -> float | None:
            loss = _evaluate(evaluation(), held_out, state[step.trained]) if held_out.batches else None
            if loss is not None:
                log.write(at, validation_loss=loss)
                progress.say(f"step {at}: validation loss {loss:.4f} nats a token")
            return loss

        # ------------------------------------------------------------ the loop
        ran_before = meta.get("wall_s", 0.0)
        log = metrics.MetricsWriter(folder if cluster.is_main() else None, config.metrics.tensorboard, start, run_began, ran_before)
        progress = Progress(config.train.steps, start, shown=cluster.is_main())
        closing.callback(log.close)
        closing.callback(progress.close)
        rate, validation = _Rate(config, step, start), None
        # Processes of one machine would write to one file.
        traces = folder / "profile" / (f"process_{jax.process_index()}" if jax.process_count() > 1 else "")
        profile = _Profile(traces, start + PROFILE_FROM, config.train.profile_steps)
        closing.callback(profile.close)
        closing.enter_context(signals.deferred())
        asking = _Asking(mesh, signals, saves, config.checkpoint.minutes)
        at, waiting = start, None
        ahead: tuple | None = None
        due = lambda every: at == config.train.steps or bool(every and at % every == 0)
        for batch in data.iterate(start, config.train.steps):
            profile.before(at)
            with jax.profiler.StepTraceAnnotation("train", step_num=at):
                state, out = train(state, batch)
            at += 1
            # Replicas that train apart ask each other nothing in between.
            meet = exchange is None or due(config.train.diloco_inner_steps) or due(config.metrics.log_every)
            ahead, waiting = waiting, (at, out, asking.ask() if meet else _nothing)
            # Results are read one step behind, so that the device never waits for the host.
            asked = _report(ahead, config, step, data, rate, log, progress) if ahead is not None else _nothing()
            if exchange and due(config.train.diloco_inner_steps):
                state = exchange(state)
            profile.after(at, out)
            saving, evaluating = (asked.stop or due(every) for every in (config.checkpoint.every, config.train.eval_every))
            if saving or asked.save or evaluating:
                last = at == config.train.steps or asked.stop
                asked |= _report(waiting, config, step, data, rate, log, progress, True, last)
                waiting = None
                with rate.pause():
                    if saving or asked:
                        save(at, state)
                    if evaluating and (not asked.stop or at == config.train.steps):
                        validation = evaluate(at, state)
            stopping = asked.stop
            if stopping:
                break

        # ------------------------------------------------------------ the end
        saves.wait()
        progress.close()
        if cluster.is_main():
            metrics.plot_losses(folder)
        if at < config.train.steps:
            say(f"stopped at step {at} of {config.train.steps}, which is saved: the same command goes on from there", flush=True)
            return
        del state, batch  # room for the sampler
    _conclude(config, corpus, validation, folder, at, say)


# --- the parts -------------------------------------------------------------------------------------------------------------------


def _check_corpus(corpus: Corpus, meta: dict) -> None:
    """DataError where the processes read different corpora, or another than the checkpoint's."""
    if jax.process_count() > 1:
        mine = np.frombuffer(bytes.fromhex(corpus.checksum), np.uint8)
        if not (multihost_utils.process_allgather(mine) == mine).all():
            raise DataError(f"data.source={corpus.source} is not the same corpus on every host: use a file that all of them share")
    if meta and meta["checksum"] != corpus.checksum:
        raise DataError(
            f"data.source={corpus.source} has changed since the checkpoint (checksum {corpus.checksum[:12]}, "
            f"then {meta['checksum'][:12]}): put it back or use another --workdir"
        )


def _compile(name: str, function, *arguments):
    """The compiled program, when every process has it: none runs it and waits for others that still compile."""
    program = function.lower(*arguments).compile()
    cluster.barrier(f"compiled: {name}")
    return program


def _introduce(config: Config, step: Step, compiled, corpus: Corpus, seconds: float, say) -> None:
    """What somebody wants to see before the first step."""
    for line in introduction(config, step, compiled):
        say(line)
    held_out = f"{len(corpus.validation):,} tokens held out"
    say(f"corpus: {len(corpus.tokens):,} tokens, {len(corpus.documents) - 1:,} documents from {corpus.source}, {held_out}")
    say(f"compiled in {seconds:.1f} s", flush=True)


class _Rate:
    """Seconds a step, and what follows from them."""

    def __init__(self, config: Config, step: Step, start: int):
        self.tokens_per_step = config.data.batch_size * config.data.sequence_length
        m, device = config.model, step.mesh.devices.flat[0].device_kind
        flops = metrics.model_flops_per_token(
            step.parts.matmul_parameters, m.dense_layers + m.layers + m.mtp_depth, step.parts.attention_width, config.data.sequence_length
        )
        self._mfu = lambda per_second: metrics.mfu(per_second, flops, step.mesh.size, device, config.precision.compute)
        self._timer = StepTimer(start)
        self.lap, self.pause = self._timer.lap, self._timer.pause

    def recent(self) -> dict:
        """`figures` of the last seconds."""
        return self._figures(self._timer.recent())

    def since_log(self) -> dict:
        """`figures` of the steps since this was asked before."""
        return self._figures(self._timer.since_asked())

    def _figures(self, seconds: float) -> dict:
        per_second = self.tokens_per_step / seconds
        return {"step_time_s": seconds, "tokens_per_s": per_second, "mfu": self._mfu(per_second)}


def _report(
    waiting: tuple, config: Config, step: Step, data: Loader, rate: _Rate, log, progress, saving: bool = False, final: bool = False
) -> "_Asked":
    """Waits for a step's results and logs them; what was asked with it. LossError for a loss that is not finite."""
    at, out, asked = waiting
    logged = final or at == 1 or at % config.metrics.log_every == 0
    together = logged or saving or step.mean is None
    values = _read(out, step, together) | {"tokens": at * rate.tokens_per_step}
    rate.lap(at)
    # One replica's loss does not end the run: all see it when they meet.
    finite = not together or (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]))
    now = rate.recent()
    progress.update(at, loss=values["loss"], tokens_per_s=now["tokens_per_s"], mfu=now["mfu"])
    if logged or not finite:
        log.write(at, **values, **rate.since_log())
    if not finite:
        raise LossError(
            f"the loss is {values['loss']} (gradient norm {values['grad_norm']}) at {data.position(at - 1)}; the last checkpoint is kept"
        )
    return asked()


def _read(out: dict, step: Step, together: bool) -> dict[str, float]:
    """A step's metrics as numbers. Where replicas train apart: of all `together`, or of those that this process has a part of."""
    if step.mean is not None and together:
        out = step.mean(out)
    number = lambda a: float(a) if a.is_fully_replicated else float(np.mean([shard.data for shard in a.addressable_shards]))
    return {k: number(a) for k, a in out.items()}


def _evaluate(evaluation: Callable, held_out: Loader, params: dict) -> float | None:
    """The mean loss over the held-out batches' weighted tokens, in nats; None if there are none."""
    means = [evaluation(params, batch) for batch in held_out.iterate()]
    counts = [float(mean.tokens) for mean in means]
    total = sum(counts)
    return sum(float(mean.loss) * n for mean, n in zip(means, counts, strict=True)) / total if total else None


def _conclude(config: Config, corpus: Corpus, validation: float | None, folder: pathlib.Path, at: int, say) -> None:
    """The result beside the corpus's own, and a sample."""
    if not cluster.is_main():
        return
    if validation is not None:
        entropy = bigram_entropy(corpus)
        beside = f"; the corpus's byte-bigram entropy is {entropy:.4f}" if entropy is not None else ""
        say(f"validation loss {validation:.4f} nats a token{beside}", flush=True)
    train = config.train
    if train.sample_tokens:
        parts, params = load_parameters(folder / "checkpoints", at, config)
        dtype = jax.numpy.dtype(config.precision.compute)
        text = sample_text(
            parts, params, corpus.tokenizer, train.sample_prompt, train.sample_tokens, train.seed, SAMPLE_TEMPERATURE, dtype=dtype
        )
        say(f"sample, temperature {SAMPLE_TEMPERATURE}:\n{train.sample_prompt}{text}", flush=True)


@dataclasses.dataclass
class _Profile:
    """A jax.profiler trace of `count` steps from step `first` on, or of those that there are."""

    folder: pathlib.Path
    first: int
    count: int
    running: bool = False

    def before(self, at: int) -> None:
        if self.count and at == self.first:
            jax.profiler.start_trace(str(self.folder))
            self.running = True

    def after(self, at: int, out: dict) -> None:
        if at == self.first + self.count:
            jax.block_until_ready(out)
            self.close()

    def close(self) -> None:
        if self.running:
            jax.profiler.stop_trace()
            self.running = False


class _Asked(enum.Flag):
    """What processes want of the loop. They must do it at the same step."""

    STOP = enum.auto()  # some process has been asked to
    SAVE = enum.auto()  # process 0 finds that it is time

    @property
    def stop(self) -> bool:
        return _Asked.STOP in self

    @property
    def save(self) -> bool:
        return _Asked.SAVE in self


def _nothing() -> _Asked:
    return _Asked(0)


class _Asking:
    """Asks all processes: the question goes through the devices, behind the step that is running, and is answered with its results.

    minutes: after a save until it is time for the next, 0 for never; it is not while one is under way, which the next would wait for.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        signals: Signals,
        saves: Checkpointer,
        minutes: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._signals, self._saves = signals, saves
        self._after = 60 * minutes if minutes else math.inf
        self._clock, self._last = clock, clock()
        across, whole = (jax.sharding.PartitionSpec(axes) for axes in (mesh.axis_names, None))
        self._sharding = jax.sharding.NamedSharding(mesh, across)
        self._size = mesh.size
        self._any = jax.jit(lambda a: a.max(axis=0), out_shardings=jax.sharding.NamedSharding(mesh, whole))

    def saved(self) -> None:
        """A save begins."""
        self._last = self._clock()

    def ask(self) -> Callable[[], _Asked]:
        """A function that waits for the answer."""
        if jax.process_count() == 1:
            return self._mine
        mine = np.tile(np.array([flag in self._mine() for flag in _Asked], np.int32), (self._size, 1))
        answer = self._any(jax.make_array_from_callback(mine.shape, self._sharding, lambda index: mine[index]))
        return lambda: functools.reduce(operator.or_, (flag for flag, n in zip(_Asked, np.asarray(answer), strict=True) if n), _nothing())

    def _mine(self) -> _Asked:
        late = cluster.is_main() and self._clock() - self._last >= self._after and not self._saves.busy
        return (_Asked.STOP if self._signals.asked else _nothing()) | (_Asked.SAVE if late else _nothing())
