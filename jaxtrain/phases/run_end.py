"""The end of a run that has all its steps: the picture of its losses, the last validation loss next
to the corpus's entropy, a sample, and the commands that one may want next."""

import pathlib

import jax
from etils import epath

from jaxtrain.checkpoint.restoring import load_parameters
from jaxtrain.checkpoint.steps import trained_group
from jaxtrain.config import ResolvedConfig
from jaxtrain.config.own_code import OwnCodeError
from jaxtrain.data.corpora import Corpora
from jaxtrain.data.corpus import bigram_entropy
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.devices import cluster
from jaxtrain.generation.sampling import Sampler, Sampling
from jaxtrain.generation.text import sample_text
from jaxtrain.models.own_module import without_cache
from jaxtrain.run.files import SAMPLES_FILE, append_record, warned
from jaxtrain.run.metrics import METRICS, plot_losses
from jaxtrain.run.next_commands import next_commands

SAMPLE_TEMPERATURE = 0.8


def draw_losses(folder: pathlib.Path) -> None:
    """Draws loss.png, in process 0."""
    if cluster.is_main():
        with warned(folder / "loss.png", cluster.log):
            plot_losses(folder)


def log_results(
    config: ResolvedConfig,
    corpora: Corpora,
    checkpoints: epath.Path,
    folder: pathlib.Path,
    validation_loss: float | None,
) -> None:
    """Logs, in process 0, the last validation loss next to the corpus's entropy, and a sample of
    the last checkpoint's model, which samples.jsonl in the run's folder has, too."""
    if not cluster.is_main():
        return
    if validation_loss is not None:
        alone = corpora.corpora[0] if len(corpora.corpora) == 1 else None
        entropy = bigram_entropy(alone) if alone else None
        line = METRICS["validation_loss"].line(validation_loss)
        if entropy is not None:
            line += f"; a table of which byte follows which would have {entropy:.4f}"
        cluster.log(line)
    train = config.train
    if not train.sample_tokens:
        return
    # The file of a layer of one's own is read again. It may have changed during a long run.
    try:
        without = without_cache(config.model)
    except OwnCodeError as error:
        cluster.log(f"no sample: a layer {error}")
        return
    if without:
        cluster.log(f"no sample: {without} has no `cached` and `cache_arrays`")
        return
    # From the checkpoint, not from the devices: process 0 samples alone, on one device, and holds
    # only its shards of the state.
    layout, params = load_parameters(
        checkpoints,
        train.last_step,
        config.model,
        config.precision,
        trained_group(train, train.eval_ema),
    )
    sampler = Sampler(layout.parts, params, jax.numpy.dtype(config.precision.compute))
    text = sample_text(
        sampler,
        corpora.tokenizer,
        train.sample_prompt,
        train.sample_tokens,
        Sampling(SAMPLE_TEMPERATURE, seed=train.seed),
    )
    cluster.log(f"sample, temperature {SAMPLE_TEMPERATURE}:\n{train.sample_prompt}{text}")
    sample = {"prompt": train.sample_prompt, "text": text, "temperature": SAMPLE_TEMPERATURE}
    append_record(folder / SAMPLES_FILE, {"step": train.last_step} | sample, cluster.log)


def all_done(
    config: ResolvedConfig, folder: pathlib.Path, steps: int, tokenizer: Tokenizer
) -> list[str]:
    """Lines for a run that has taken its steps before."""
    setting = "stop_at" if config.train.last_step < config.train.steps else "steps"
    return [
        f"{folder} already has its {steps} steps: raise train.{setting} to go on",
        *what_next(config, folder, tokenizer),
    ]


def what_next(config: ResolvedConfig, folder: pathlib.Path, tokenizer: Tokenizer) -> list[str]:
    """The last lines of a run that has all its steps: its files, and the next commands."""
    train, model = config.train, config.model
    # The sample's prompt was encoded; an empty one is an end of document, which ids may not have.
    empty = "0" if tokenizer.end_of_document is None else ""
    generate: dict[str, object] = {"prompt": train.sample_prompt if train.sample_tokens else empty}
    if model.positions == "learned":
        free = model.max_positions - 1 - len(str(generate["prompt"]).encode())
        generate["tokens"] = max(1, min(100, free))
    stops = train.last_step < train.steps
    train_on: dict[str, object] = (
        {"config.train.stop_at": 0} if stops else {"config.train.steps": 2 * train.steps}
    )
    if jax.process_count() == 1 and jax.default_backend() == "cpu":
        train_on["cpu_devices"] = jax.device_count()
    return next_commands(str(folder), generate, train_on, jax.process_count())
