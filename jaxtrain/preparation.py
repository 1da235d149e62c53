"""What a run needs before its first step: the corpus, its batches, and the compiled programs."""

import concurrent.futures
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.stages import Compiled

from jaxtrain.config import Config
from jaxtrain.data.loader import Loader
from jaxtrain.data.row_log import RowLog
from jaxtrain.data.tokenizer import prompt_ids
from jaxtrain.data.tokens import Corpus, DataError, prepare
from jaxtrain.devices import cluster
from jaxtrain.plan.report import as_compiled, introduction
from jaxtrain.run.wall_clock import Part, WallClock
from jaxtrain.training.step import Step


def prepare_corpus(config: Config) -> Corpus:
    """The corpus. DataError where processes read different ones, or for a prompt that cannot be."""
    corpus = prepare(config.data, config.model.vocab_size, progress=cluster.is_main())
    if jax.process_count() > 1:
        checksum = np.frombuffer(bytes.fromhex(corpus.checksum), np.uint8)
        if not (multihost_utils.process_allgather(checksum) == checksum).all():
            raise DataError(
                f"data.source={corpus.source} is not the same corpus on every host: use a "
                "file that all of them share"
            )
    if config.train.sample_tokens:
        prompt_ids(corpus.tokenizer, config.train.sample_prompt, config.model.vocab_size)
    return corpus


def loaders(
    config: Config, step: Step, corpus: Corpus, folder: pathlib.Path | None
) -> tuple[Loader, Loader]:
    """The batches to train on, and the held-out ones. folder: of the run, where rows are logged if
    they are to be; None: nowhere."""
    replicas = config.mesh.replica if config.train.diloco_inner_steps else 1
    log = (
        RowLog(folder, jax.process_index(), jax.process_count())
        if config.metrics.rows and folder
        else None
    )

    def load(split: str, batches: int | None, log: RowLog | None = None) -> Loader:
        return Loader(
            corpus,
            config.data,
            split,
            step.batch_sharding,
            config.pipeline.microbatches,
            batches,
            replicas,
            log,
        )

    return load("train", None, log), load("validation", config.train.eval_batches)


Programs = concurrent.futures.Future[dict[str, Compiled]]  # by name


def start_compiling(
    step: Step, data: Loader, beside: concurrent.futures.Executor, clock: WallClock
) -> Programs:
    """The programs of a step and, of independent replicas, of an exchange: traced when this
    returns, and compiled beside what follows."""
    state = step.abstract_state()
    lowered = {"step": step.train.lower(state, data.specification())}
    if step.exchange:
        lowered["exchange"] = step.exchange.lower(state)
    clock.enter(Part.COMPILING)
    return beside.submit(
        lambda: {
            name: cluster.compile_everywhere(name, program) for name, program in lowered.items()
        }
    )


def when_compiled(
    programs: Programs,
    config: Config,
    step: Step,
    corpus: Corpus,
    clock: WallClock,
    others: Sequence[concurrent.futures.Future] = (),
) -> tuple[Compiled, Compiled | None]:
    """The programs of a step and of an exchange, if there is one; says meanwhile what somebody
    wants to see before the first step.

    others: compilations that have to end, too. A GPU's compiler tries kernels out on the device,
    which has to be idle then.
    """
    held_out = f"{len(corpus.validation):,} tokens held out"
    cluster.log(
        *introduction(config, step),
        f"corpus: {len(corpus.tokens):,} tokens, {len(corpus.documents) - 1:,} documents from "
        f"{corpus.source}, {held_out}",
    )
    compiled = programs.result()
    for other in others:
        other.result()
    clock.enter(Part.STATE)
    cluster.log(
        *as_compiled(step, compiled["step"], clock.spent(Part.TRACING), clock.spent(Part.COMPILING))
    )
    return compiled["step"], compiled.get("exchange")
