"""`python -m jaxtrain.generate --workdir=DIR --prompt=TEXT`: text from a checkpoint.

    flags → checkpoint's folder → its meta (config, tokenizer) → prompt's ids
              what is wrong here: one line, status 2, no device touched
          → parameters on 1 device, or `--model` of them → text on stdout, as it comes
          → on stderr: figures, why it stopped, and how much of the text is beyond the length
            that the model was trained on

A checkpoint of any mesh, stages and schedule will do. Ids are made in generation/sampling.py, and
become text in generation/text.py. A single process: no jax.distributed.
"""

import contextlib
import dataclasses
import functools
import math
import os
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from jaxtrain import cli
from jaxtrain import config as cfg
from jaxtrain.checkpoint import stores
from jaxtrain.checkpoint.steps import (
    NONE,
    TO_GENERATE,
    CheckpointError,
    DamageError,
    Judge,
    Meta,
    StepChoice,
    checkpoints_of,
    choose,
    nothing_wrong,
    read_errors,
    read_meta,
    what_is_wrong,
)
from jaxtrain.checkpoint.subject import NoCheckpointsError, some_run, step_folder
from jaxtrain.config import Config
from jaxtrain.config.errors import UsageError
from jaxtrain.config.flags import MOST_CPU_DEVICES, Flag
from jaxtrain.config.mesh_rules import kv_heads_fit, mlp_widths
from jaxtrain.config.rules import divisors, near
from jaxtrain.devices import startup
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.wall_clock import imports_without_collection

if TYPE_CHECKING:  # these import jax, or take long
    import numpy as np

    from jaxtrain.data.tokenizer import Tokenizer
    from jaxtrain.generation.sampling import Sampler
    from jaxtrain.models.transformer import ModelParts

DESCRIPTION = """
Continues a prompt with the model of a checkpoint.

usage: jaxtrain generate --workdir=DIR --prompt=TEXT [flags]    (or python -m jaxtrain.generate …)
"""

# why a sample ends
ASKED, DOCUMENT, CTRL_C = "at --tokens", "at the end of the document", "by Ctrl-C"
MOST = 2**30  # tokens and samples, whose numbers are int32

FLAGS = (
    Flag(
        "workdir",
        "",
        "folder of a training run, or the folder or address (s3://BUCKET/PATH) of its checkpoints",
    ),
    Flag("prompt", "", "text to go on from; empty: the start of a document"),
    Flag("tokens", 100, "tokens to make; fewer where the document ends", 1, MOST),
    Flag("temperature", 1.0, "divides the logits: lower is more likely, 0 is --greedy", at_least=0),
    Flag("top_k", 0, "choose among this many most likely tokens; 0: all", 0, MOST),
    Flag(
        "top_p",
        1.0,
        "choose among the most likely tokens that together have this probability, above 0 and "
        "up to 1",
    ),
    Flag("greedy", False, "always the most likely token"),
    Flag("samples", 1, "continuations of the prompt", 1, MOST),
    Flag("seed", 0, "seed of the random numbers", 0, 2**32 - 1),
    Flag("step", -1, "step of the checkpoint; -1: the newest", at_least=-1),
    Flag("model", 1, "devices over which the model is split (tensor parallel)", at_least=1),
    Flag(
        "cpu_devices",
        0,
        "simulate this many CPU devices; 0: the platform's own, on a CPU as many as --model",
        0,
        MOST_CPU_DEVICES,
    ),
)


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 130 where Ctrl-C has ended the text; with one line on stderr 2 for what
    cannot work, 74 where storage fails."""
    try:
        return generate(cli.checked_flags(argv, DESCRIPTION, FLAGS, check))
    except UsageError as error:
        cli.fail(str(error))
    except CheckpointError as error:
        print(cfg.one_line(f"error: {error}"), file=sys.stderr, flush=True)
        return error.status


def generate(flags: types.SimpleNamespace) -> int:
    """The exit status, for checked flags. CheckpointError where the checkpoint cannot be read."""
    with imports_without_collection():
        start_jax(flags)
        if unused := startup.unused_accelerator(flags):
            cli.fail(unused)
        # not before the flags are known to be right: this takes seconds, and a mistake should not
        import jax

        from jaxtrain.generation.sampling import Sampler

    loaded: Loaded | None = None
    damaged: dict[int, str] = {}
    while loaded is None:
        loaded = load(flags, damaged)
    config, tokenizer, ids, step = loaded.config, loaded.tokenizer, loaded.ids, loaded.step

    trained_length = config.data.sequence_length
    if len(ids) + flags.tokens > trained_length:
        text = f"a prompt of {len(ids)} tokens and up to {flags.tokens} more"
        remark(
            f"{text} go beyond the {trained_length} tokens that the model was trained on "
            "(data.sequence_length)"
        )
    try:
        ended = sample(
            Sampler(loaded.parts, loaded.params, config.precision.compute),
            tokenizer,
            ids,
            step,
            flags,
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        cached = f"{flags.samples} × {len(ids) + flags.tokens} cached tokens"
        cli.fail(
            f"no memory for {cached} beside the model: use fewer --tokens or --samples, or a "
            "larger --model"
        )
    remark(how_it_ended(ended, len(ids), config))
    return ExitStatus.INTERRUPTED if ended.interrupted() else 0


# --- before jax -----------------------------------------------------------------------------------


def check(flags: types.SimpleNamespace) -> types.SimpleNamespace:
    """The flags, if they can be right for the checkpoint, as far as that is known without jax.
    Raises UsageError or CheckpointError."""
    check_flags(flags)
    found = find_checkpoint(flags.workdir, flags.step)
    if flags.refused:  # there is time for what takes jax
        from jaxtrain.checkpoint.restoring import wrong_arrays

        found = find_checkpoint(
            flags.workdir, flags.step, functools.partial(wrong_arrays, trained_alone=True)
        )
    config, _, ids = prompted(*found, flags)
    check_model(config, len(ids), flags)
    return flags


def check_flags(flags: types.SimpleNamespace) -> None:
    """Raises UsageError where a flag cannot be right whatever the checkpoint is."""
    if not 0 < flags.top_p <= 1:
        raise UsageError(
            f"--top_p={flags.top_p:g} must be above 0 and at most 1",
            {"top_p": 0.9 if flags.top_p <= 0 else 1.0},
        )
    if 0 < flags.cpu_devices < flags.model:
        raise UsageError(
            f"--cpu_devices={flags.cpu_devices} is less than --model={flags.model}",
            {"cpu_devices": flags.model},
        )


def find_checkpoint(
    workdir: str,
    step: int = -1,
    wrong: Judge = nothing_wrong,
    say: Callable[[str], object] = lambda line: None,
    damaged: Mapping[int, str] = NONE,
) -> tuple[epath.Path, int]:
    """The folder of checkpoints and the step, the newest complete one for −1. Raises UsageError if
    that is missing or not complete.

    wrong, damaged: as in `choose`; say: gets a line about what is passed over.
    """
    folder, choice = _checkpoints_of(workdir, wrong, damaged)
    if choice.step is None:
        broken = ", ".join(str(entry) for entry in choice.unrecognized if entry.step is not None)
        but = f"; these are not complete: {broken}" if broken else ""
        train = f"it first in python -m jaxtrain.train --workdir={workdir}"
        rule = f"--workdir={workdir!r} has no finished checkpoint{but}"
        raise UsageError(rule, advice="the folder of a run" if stores.scheme_of(folder) else train)
    if step < 0:
        if newer := [
            str(e) for e in choice.unrecognized if e.step is not None and e.step > choice.step
        ]:
            say(f"passed over: {', '.join(newer)}")
        return folder, choice.step
    why = next((e.why for e in choice.unrecognized if e.step == step), "")
    if not why and step in choice.steps:
        why = what_is_wrong(folder / str(step), Meta.from_json(read_meta(folder, step)), wrong)
        if not why:
            return folder, step
    others = [other for other in choice.steps if other != step]
    nearest = min(others, key=lambda other: (abs(other - step), other)) if others else choice.step
    rule = f"--step={step} {f'is not complete: {why}' if why else f'is no checkpoint of {workdir}'}"
    raise UsageError(f"{rule} (it has {', '.join(map(str, others))})", {"step": nearest})


def _checkpoints_of(
    workdir: str, wrong: Judge, damaged: Mapping[int, str]
) -> tuple[epath.Path, StepChoice]:
    """A run's folder of checkpoints, and what is in it. UsageError where there is none,
    CheckpointError if it cannot be read."""
    if not workdir:
        raise UsageError(
            "--workdir is empty",
            advice="the folder of a training run, such as "
            f"--workdir={some_run('tiny') or 'runs/tiny'}",
        )
    try:
        with read_errors(f"--workdir={workdir!r}"):
            folder = stores.folder(workdir)
            if not stores.is_folder(folder):
                word = "is not a folder" if folder.exists() else "does not exist"
                run = (
                    "the folder of a training run, such as "
                    f"--workdir={some_run(workdir) or 'runs/tiny'}"
                )
                raise UsageError(f"--workdir={cfg.shown(workdir)} {word}", advice=run)
            if step := step_folder(folder):
                fixes = (
                    {"workdir": str(step.parent), "step": int(step.name)}
                    if step.name.isdigit()
                    else {"workdir": str(step.parent)}
                )
                raise UsageError(f"--workdir={workdir!r} is the folder of one step", fixes)
            folder = checkpoints_of(folder)
            return folder, choose(folder, TO_GENERATE, wrong, damaged)
    except stores.AddressError as error:
        raise UsageError(error.about("workdir") if error.place == workdir else str(error)) from None
    except NoCheckpointsError as error:
        raise UsageError(f"--workdir: {error}") from None


def remark(line: str) -> None:
    """A line on standard error: standard output is for the text."""
    print(line, file=sys.stderr, flush=True)


def start_jax(flags: types.SimpleNamespace) -> None:
    """jax's devices and compilation cache, by the flags. Unlike in training, one process, and no
    more simulated devices than needed."""
    startup.set_xla_flags(os.environ)
    import jax

    settings: Any = jax.config  # its attributes have no declared types
    if flags.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
    asked = (
        "xla_force_host_platform_device_count" in os.environ["XLA_FLAGS"]
        or settings.jax_num_cpu_devices >= 0
    )
    if flags.cpu_devices or not asked:
        jax.config.update("jax_num_cpu_devices", flags.cpu_devices or flags.model)
    startup.use_compilation_cache()


# --- the checkpoint -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """A checkpoint's step, model and parameters, the prompt's ids, and what they were made with."""

    step: int
    config: Config
    tokenizer: "Tokenizer"
    ids: list[int]
    parts: "ModelParts"
    params: dict


def load(flags: types.SimpleNamespace, damaged: dict[int, str]) -> Loaded | None:
    """What the flags ask for, from the newest checkpoint that is not `damaged`: step → why. None if
    this one is, and it is added there.

    Ends with status 2 for what cannot work, and where the flags name a step that is damaged.
    """
    import jax

    from jaxtrain.checkpoint.restoring import load_parameters, wrong_arrays

    folder, step = find_checkpoint(
        flags.workdir,
        flags.step,
        functools.partial(wrong_arrays, trained_alone=True),
        remark,
        damaged,
    )
    config, tokenizer, ids = prompted(folder, step, flags)
    check_model(config, len(ids), flags)
    check_devices(len(jax.devices()), config, flags)
    try:
        with read_errors(folder):
            return Loaded(
                step,
                config,
                tokenizer,
                ids,
                *load_parameters(folder, step, config, jax.devices()[: flags.model]),
            )
    except DamageError as error:
        if flags.step >= 0:
            raise UsageError(str(error)) from None
        damaged[step] = error.what
        return None


def prompted(
    folder: epath.Path, step: int, flags: types.SimpleNamespace
) -> tuple[Config, "Tokenizer", list[int]]:
    """A checkpoint's resolved config and tokenizer, and the prompt's ids. Raises UsageError for
    what has none."""
    from jaxtrain.data.tokenizer import prompt_ids

    try:
        config, tokenizer = understand(
            Meta.from_json(read_meta(folder, step)), f"{folder}/{step}", flags.workdir
        )
        return config, tokenizer, prompt_ids(tokenizer, flags.prompt, config.model.vocab_size)
    except ValueError as error:  # also ConfigError and DataError
        raise UsageError(str(error)) from None


def understand(meta: Meta, name: str, workdir: str) -> tuple[Config, "Tokenizer"]:
    """The resolved config and the tokenizer that a checkpoint's meta describes. ValueError, in one
    line, for one that does not."""
    from jaxtrain.data.tokenizer import tokenizer_from

    for key, value in (("config", meta.config), ("tokenizer", meta.tokenizer)):
        if not value:
            raise ValueError(
                f"checkpoint {name} has no {key!r} in its meta: use one that jaxtrain.train "
                "has written"
            )
    try:
        return meta.stored_config().resolve(), tokenizer_from(meta.tokenizer, [workdir])
    except KeyError as error:
        raise ValueError(
            f"checkpoint {name} describes its tokenizer without {error}: use one that "
            "jaxtrain.train has written"
        ) from None


def check_model(config: Config, prompt: int, flags: types.SimpleNamespace) -> None:
    """Raises UsageError where the flags ask for more than the model has."""
    m = config.model
    if m.positions == "learned" and prompt + flags.tokens > m.max_positions:
        rule = (
            f"--tokens={flags.tokens} after a prompt of {prompt} goes beyond the learned "
            f"model.max_positions={m.max_positions}"
        )
        left, most = m.max_positions - prompt, max(m.max_positions - flags.tokens, 1)
        raise UsageError(
            rule,
            {"tokens": left} if left > 0 else {},
            advice="" if left > 0 else f"a prompt of at most {most} tokens",
        )
    sizes = {"heads": m.heads} | mlp_widths(m)
    undivided = [
        f"does not divide model.{field}={size}"
        for field, size in sizes.items()
        if size % flags.model
    ]
    if not kv_heads_fit(m, flags.model):
        undivided.append(f"neither splits model.kv_heads={m.kv_heads} nor shares each evenly")
    if undivided:
        works = near(
            flags.model, [n for n in divisors(math.gcd(*sizes.values())) if kv_heads_fit(m, n)]
        )
        raise UsageError(
            f"--model={flags.model} {undivided[0]}", {"model": works[0]}, sorted(works[1:5])
        )


def check_devices(count: int, config: Config, flags: types.SimpleNamespace) -> None:
    """Raises UsageError where there are fewer devices than `--model`."""
    if flags.model > count:
        fewer = max(
            n for n in range(1, count + 1) if flags.model % n == 0 and kv_heads_fit(config.model, n)
        )
        raise UsageError(
            f"--model={flags.model} is more than the {count} device{'s'[: count > 1]} here",
            {"model": fewer},
        )


# --- output ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ended:
    """How the samples of a prompt ended: each one's number of new tokens, and why there are not
    more."""

    tokens: list[int]
    reasons: list[str]

    def interrupted(self) -> bool:
        return CTRL_C in self.reasons


def sample(
    sampler: "Sampler",
    tokenizer: "Tokenizer",
    ids: list[int],
    step: int,
    flags: types.SimpleNamespace,
) -> Ended:
    """Makes the text that the flags ask for and prints it; says how long that took. ids: the
    prompt's; step: the checkpoint's."""
    from jaxtrain.generation.sampling import Sampling

    began = time.perf_counter()
    sampling = Sampling(
        0.0 if flags.greedy else flags.temperature, flags.top_k, flags.top_p, flags.seed
    )
    batches = sampler.start(
        ids, flags.tokens, sampling, flags.samples, tokenizer.end_of_document, tokenizer.vocab_size
    )
    prompt_read = time.perf_counter()
    ended = show(batches, tokenizer, ids, flags)
    seconds, tokens = time.perf_counter() - prompt_read, sum(ended.tokens)
    prompt = f"prompt of {len(ids)} tokens and compilation {prompt_read - began:.1f} s"
    remark(
        f"step {step}: {prompt}; {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} "
        "tokens/s"
    )
    return ended


def show(
    batches: "Iterable[np.ndarray]",
    tokenizer: "Tokenizer",
    ids: list[int],
    flags: types.SimpleNamespace,
) -> Ended:
    """Prints the prompt and its continuations: a single one as it comes, several when they are
    done. Ctrl-C ends them where they are.

    batches: ids [samples, n], −1 where a sample has ended; ids: the prompt's.
    """
    from jaxtrain.generation.text import TextStream

    streams = [TextStream(tokenizer, ids) for _ in range(flags.samples)]
    texts, counts = [""] * flags.samples, [0] * flags.samples
    reasons = [CTRL_C] * flags.samples  # until another one is known
    live = flags.samples == 1
    if live:
        _write(flags.prompt)
    with contextlib.suppress(KeyboardInterrupt):
        for batch in batches:
            for i, stream in enumerate(streams):
                kept = batch[i][batch[i] >= 0]
                counts[i] += len(kept)
                if len(kept) < len(batch[i]):
                    reasons[i] = DOCUMENT
                piece = stream.push(kept)
                texts[i] += piece
                if live:
                    _write(piece)
        reasons = [ASKED if count == flags.tokens else DOCUMENT for count in counts]
    if live:
        _write(streams[0].finish() + "\n")
        return Ended(counts, reasons)
    for i, stream in enumerate(streams):
        _write(
            f"--- sample {i + 1} of {flags.samples}\n{flags.prompt}{texts[i]}{stream.finish()}\n"
        )
    return Ended(counts, reasons)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def how_it_ended(ended: Ended, prompt: int, config: Config) -> str:
    """One line: why the samples stopped, and whether they went beyond the length that the model was
    trained on.

    prompt: the prompt's tokens.
    """
    remarks = []
    for reason in (ASKED, DOCUMENT, CTRL_C):
        tokens = [n for n, why in zip(ended.tokens, ended.reasons, strict=True) if why == reason]
        if tokens:
            number = (
                str(tokens[0]) if min(tokens) == max(tokens) else f"{min(tokens)} to {max(tokens)}"
            )
            samples = (
                f"{len(tokens)} of {len(ended.tokens)} samples " if len(ended.tokens) > 1 else ""
            )
            remarks.append(
                f"{samples}{reason}"
                + (
                    f"={number}"
                    if reason == ASKED
                    else f", after {number} token{'s'[: number != '1']}"
                )
            )
    positions = config.model.max_positions
    if config.model.positions == "learned" and prompt + max(ended.tokens) == positions:
        remarks.append(f"no position is left (model.max_positions={positions})")
    trained = config.data.sequence_length
    beyond = min(prompt + max(ended.tokens) - trained, max(ended.tokens))
    if beyond > 0:
        remarks.append(
            f"the last {beyond} lie beyond the {trained} tokens that the model was trained on "
            "(data.sequence_length)"
        )
    return f"stopped: {'; '.join(remarks)}"


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
