"""The preparation of a run before its first step: its corpus, its batches, and its programs."""

import concurrent.futures
import dataclasses
import pathlib

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.stages import Compiled

from jaxtrain.config import DataConfig, TrainConfig
from jaxtrain.data.loader import Loader
from jaxtrain.data.row_log import RowLog
from jaxtrain.data.tokenizer import prompt_ids
from jaxtrain.data.tokens import Corpus, DataError, prepare
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import REPLICA
from jaxtrain.training.step import Step


def prepare_corpus(data: DataConfig, vocab_size: int, train: TrainConfig) -> Corpus:
    """The corpus. Raises DataError if processes read different ones, and for a
    `train.sample_prompt` that cannot be encoded."""
    corpus = prepare(data, vocab_size, progress=cluster.is_main())
    if jax.process_count() > 1:
        checksum = np.frombuffer(bytes.fromhex(corpus.checksum), np.uint8)
        if not (multihost_utils.process_allgather(checksum) == checksum).all():
            raise DataError(
                f"data.source={corpus.source} is not the same corpus on every host: use a "
                "file that all of them share"
            )
    if train.sample_tokens:
        prompt_ids(corpus.tokenizer, train.sample_prompt, vocab_size)
    return corpus


def make_loaders(
    step: Step,
    corpus: Corpus,
    data: DataConfig,
    eval_batches: int,
    rows_folder: pathlib.Path | None = None,
) -> tuple[Loader, Loader]:
    """The loaders of training batches and of held-out ones. rows_folder: the run's, where the
    training batches' rows are logged; None: they are not."""
    microbatches = step.abstract_batch["tokens"].shape[0]
    replicas = step.mesh.shape[REPLICA] if step.layout.independent_replicas else 1
    log = RowLog(rows_folder, jax.process_index(), jax.process_count()) if rows_folder else None

    def load(split: str, batches: int | None, log: RowLog | None) -> Loader:
        sharding = step.batch_sharding
        return Loader(corpus, data, split, sharding, microbatches, batches, replicas, log)

    return load("train", None, log), load("validation", eval_batches, None)


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of a step; exchange: None if replicas are not independent."""

    train: Compiled
    exchange: Compiled | None


def start_compiling(
    step: Step, executor: concurrent.futures.Executor
) -> concurrent.futures.Future[Programs]:
    """Traces the programs of a step; the future has them compiled."""
    state = step.abstract_state()
    train = step.train.lower(state, step.abstract_batch)
    exchange = step.exchange.lower(state) if step.exchange else None

    def compile_both() -> Programs:
        return Programs(
            cluster.compile_everywhere("step", train),
            cluster.compile_everywhere("exchange", exchange) if exchange else None,
        )

    return executor.submit(compile_both)
