"""`python -m jaxtrain.generate --workdir=DIR --prompt=TEXT`: text from a checkpoint.

    flags → checkpoint's folder → its meta (config, tokenizer) → prompt's ids      what is wrong here: one line, status 2, no device touched
          → parameters on 1 device, or `--model` of them → text on stdout, as it comes
          → on stderr: figures, why it stopped, and how much of the text is beyond the length that the model was trained on

A checkpoint of any mesh, stages and schedule will do. Sampling itself is in generation/sampling.py. A single process: no jax.distributed.
"""

import contextlib
import dataclasses
import difflib
import functools
import io
import math
import os
import pathlib
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain import cli
from jaxtrain.checkpoint.steps import STATE, TO_GENERATE, CheckpointError, choose, incomplete, read_meta
from jaxtrain.config import Config, flags
from jaxtrain.config.history import stored_config
from jaxtrain.config.mesh_rules import kv_heads_fit, mlp_widths
from jaxtrain.config.rules import divisors, near
from jaxtrain.devices import startup

DESCRIPTION = """
Continues a prompt with the model of a checkpoint.

usage: jaxtrain generate --workdir=DIR --prompt=TEXT [flags]      (or python -m jaxtrain.generate …)
"""

INTERRUPTED = 130  # exit status after Ctrl-C
ASKED, DOCUMENT, CTRL_C = "at --tokens", "at the end of the document", "by Ctrl-C"  # why a sample ends

FLAGS = (
    flags.Flag("workdir", "", "folder of a training run, with its checkpoints"),
    flags.Flag("prompt", "", "text to go on from; empty: the start of a document"),
    flags.Flag("tokens", 100, "tokens to make; fewer where the document ends", at_least=1),
    flags.Flag("temperature", 1.0, "divides the logits: lower is more likely, 0 is --greedy", at_least=0),
    flags.Flag("top_k", 0, "choose among this many most likely tokens; 0: all", at_least=0),
    flags.Flag("top_p", 1.0, "choose among the most likely tokens that together have this probability, above 0 and up to 1"),
    flags.Flag("greedy", False, "always the most likely token"),
    flags.Flag("samples", 1, "continuations of the prompt", at_least=1),
    flags.Flag("seed", 0, "seed of the random numbers", at_least=0),
    flags.Flag("step", -1, "step of the checkpoint; -1: the newest", at_least=-1),
    flags.Flag("model", 1, "devices over which the model is split (tensor parallel)", at_least=1),
    flags.Flag("cpu_devices", 0, "simulate this many CPU devices; 0: the platform's own, on a CPU as many as --model", at_least=0),
)


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 2 for what cannot work, with one line on stderr."""
    flags = cli.parse_flags(argv, DESCRIPTION, FLAGS)
    check_flags(flags)
    find_checkpoint(flags.workdir)
    start_jax(flags)
    import jax  # not before the flags are known to be right: this takes seconds, and a mistake should not

    from jaxtrain.checkpoint.manager import wrong_arrays
    from jaxtrain.checkpoint.parameters import load_parameters
    from jaxtrain.generation.sampling import Sampler, Sampling, prompt_ids

    folder, step = find_checkpoint(flags.workdir, flags.step, functools.partial(wrong_arrays, trained_alone=True), remark)
    try:
        config, tokenizer = understand(read_meta(folder, step), f"{folder}/{step}", flags.workdir)
        ids = prompt_ids(tokenizer, flags.prompt, config.model.vocab_size)
    except (ValueError, CheckpointError) as error:  # also ConfigError and DataError
        cli.fail(str(error))
    check_model(config, len(ids), flags)
    check_devices(len(jax.devices()), flags)
    try:
        parts, params = load_parameters(folder, step, config, jax.devices()[: flags.model])
    except CheckpointError as error:
        cli.fail(str(error))

    trained = config.data.sequence_length
    if len(ids) + flags.tokens > trained:
        text = f"a prompt of {len(ids)} tokens and up to {flags.tokens} more"
        remark(f"{text} go beyond the {trained} tokens that the model was trained on (data.sequence_length)")
    began = time.perf_counter()
    try:
        sampling = Sampling(0.0 if flags.greedy else flags.temperature, flags.top_k, flags.top_p, flags.seed)
        sampler = Sampler(parts, params, config.precision.compute)
        made = sampler.start(ids, flags.tokens, sampling, flags.samples, tokenizer.end_of_document, tokenizer.vocab_size)
        read = time.perf_counter()
        ended = show(made, tokenizer, ids, flags)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        cached = f"{flags.samples} × {len(ids) + flags.tokens} cached tokens"
        cli.fail(f"no memory for {cached} beside the model: use fewer --tokens or --samples, or a larger --model")
    seconds = time.perf_counter() - read
    remark(
        f"step {step}: prompt of {len(ids)} tokens and compilation {read - began:.1f} s; "
        f"{sum(ended.tokens)} tokens in {seconds:.1f} s, {sum(ended.tokens) / seconds:.1f} tokens/s"
    )
    remark(how_it_ended(ended, len(ids), config))
    return INTERRUPTED if ended.interrupted() else 0


# --- before jax ------------------------------------------------------------------------------------------------------------------


def check_flags(flags: types.SimpleNamespace) -> None:
    """Ends with status 2 where a flag cannot be right whatever the checkpoint is."""
    if not 0 < flags.top_p <= 1:
        cli.fail(f"--top_p={flags.top_p:g} must be above 0 and at most 1: use --top_p={0.9 if flags.top_p <= 0 else 1.0}")
    if flags.seed >= 2**32:
        cli.fail(f"--seed={flags.seed} must be below 2**32: use --seed={flags.seed % 2**32}")
    for name in ("tokens", "samples", "top_k"):
        if getattr(flags, name) > 2**30:
            cli.fail(f"--{name}={getattr(flags, name)} must be at most 2**30: use --{name}={2**30}")
    if 0 < flags.cpu_devices < flags.model:
        cli.fail(f"--cpu_devices={flags.cpu_devices} is less than --model={flags.model}: use --cpu_devices={flags.model}")


def find_checkpoint(
    workdir: str,
    step: int = -1,
    wrong: Callable[[dict, Any], str] = lambda meta, state: "",
    say: Callable[[str], object] = lambda line: None,
) -> tuple[pathlib.Path, int]:
    """The folder of checkpoints and the step, the newest whole one for −1; ends with status 2 where it is not there or not whole.

    wrong: as in `choose`; say: gets a line about what is passed over.
    """
    if not workdir:
        cli.fail(f"--workdir is empty: use the folder of a training run, such as --workdir={_some_run('tiny')}")
    folder = pathlib.Path(workdir).expanduser()
    try:
        if not folder.is_dir():
            word = "is not a folder" if folder.exists() else "does not exist"
            cli.fail(f"--workdir={workdir!r} {word}: use the folder of a training run, such as --workdir={_some_run(workdir)}")
        folder = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
        choice = choose(folder, TO_GENERATE, wrong)
    except OSError as error:
        cli.fail(f"--workdir={workdir!r} cannot be read ({error.strerror}): use a folder that you may read")
    except CheckpointError as error:
        cli.fail(str(error))
    if choice.step is None:
        broken = ", ".join(str(stranger) for stranger in choice.strangers if stranger.step is not None)
        but = f"; these are not whole: {broken}" if broken else ""
        cli.fail(f"--workdir={workdir!r} has no finished checkpoint{but}: use it first in python -m jaxtrain.train --workdir={workdir}")
    if step < 0:
        if newer := [str(s) for s in choice.strangers if s.step is not None and s.step > choice.step]:
            say(f"passed over: {', '.join(newer)}")
        return folder, choice.step
    why = next((s.why for s in choice.strangers if s.step == step), "")
    if not why and step in choice.steps:
        why = incomplete(folder / str(step) / STATE) or wrong(read_meta(folder, step), folder / str(step) / STATE)
        if not why:
            return folder, step
    steps = [s for s in choice.steps if s != step]
    near = min(steps, key=lambda s: (abs(s - step), s)) if steps else choice.step
    rule = f"is not whole: {why}" if why else f"is no checkpoint of {workdir}"
    cli.fail(f"--step={step} {rule} (it has {', '.join(map(str, steps))}): use --step={near}")


def remark(line: str) -> None:
    """A line on standard error: standard output is for the text."""
    print(line, file=sys.stderr, flush=True)


def _some_run(workdir: str) -> str:
    """A run of this folder with a name like the given one, for messages."""
    runs = [str(path.parent) for path in sorted(pathlib.Path("runs").glob("*/checkpoints"))]
    return (difflib.get_close_matches(workdir, runs, n=1, cutoff=0) or ["runs/tiny"])[0]


def start_jax(flags: types.SimpleNamespace) -> None:
    """jax's devices and compilation cache, by the flags. Unlike in training, one process, and no more simulated devices than needed."""
    startup.set_xla_flags(os.environ)
    import jax

    settings: Any = jax.config  # its attributes have no declared types
    if flags.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
    asked = "xla_force_host_platform_device_count" in os.environ["XLA_FLAGS"] or settings.jax_num_cpu_devices >= 0
    if flags.cpu_devices or not asked:
        jax.config.update("jax_num_cpu_devices", flags.cpu_devices or flags.model)
    startup.use_compilation_cache()


# --- the checkpoint --------------------------------------------------------------------------------------------------------------


def understand(meta: dict, name: str, workdir: str) -> tuple[Config, Any]:
    """The resolved config and the tokenizer that a checkpoint's meta describes. ValueError, in one line, for one that does not."""
    from jaxtrain.data.tokenizer import tokenizer_from

    for key in ("config", "tokenizer"):
        if not isinstance(meta.get(key), dict):
            raise ValueError(f"checkpoint {name} has no {key!r} in its meta: use one that jaxtrain.train has written")
    folders = [folder for folder in (meta.get("corpus_folder"), workdir) if folder]
    try:
        return stored_config(meta).resolve(), tokenizer_from(meta["tokenizer"], folders)
    except KeyError as error:
        raise ValueError(f"checkpoint {name} describes its tokenizer without {error}: use one that jaxtrain.train has written") from None


def check_model(config: Config, prompt: int, flags: types.SimpleNamespace) -> None:
    """Ends with status 2 where the flags ask for more than the model has."""
    m = config.model
    if m.positions == "learned" and prompt + flags.tokens > m.max_positions:
        left = m.max_positions - prompt
        use = f"--tokens={left}" if left > 0 else f"a prompt of at most {max(m.max_positions - flags.tokens, 1)} tokens"
        cli.fail(
            f"--tokens={flags.tokens} after a prompt of {prompt} goes beyond the learned model.max_positions={m.max_positions}: use {use}"
        )
    split = {"heads": m.heads} | mlp_widths(m)
    works = near(flags.model, [n for n in divisors(math.gcd(*split.values())) if kv_heads_fit(m, n)])
    refuse = lambda rule: cli.fail(str(flags.UsageError(f"--model={flags.model} {rule}", {"model": works[0]}, sorted(works[1:5]))))
    for field, size in split.items():
        if size % flags.model:
            refuse(f"does not divide model.{field}={size}")
    if not kv_heads_fit(m, flags.model):
        refuse(f"neither splits model.kv_heads={m.kv_heads} nor shares each evenly")


def check_devices(count: int, flags: types.SimpleNamespace) -> None:
    """Ends with status 2 where there are fewer devices than `--model`."""
    if flags.model > count:
        near = max(n for n in range(1, count + 1) if flags.model % n == 0)
        cli.fail(f"--model={flags.model} is more than the {count} device{'s'[: count > 1]} here: use --model={near}")


# --- output ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ended:
    """How the samples of a prompt ended: each one's number of new tokens, and why there are not more."""

    tokens: list[int]
    reasons: list[str]

    def interrupted(self) -> bool:
        return CTRL_C in self.reasons


def show(made, tokenizer, ids: list[int], flags: types.SimpleNamespace) -> Ended:
    """Prints the prompt and its continuations: a single one as it comes, several when they are done. Ctrl-C ends them where they are."""
    from jaxtrain.generation.sampling import TextStream

    streams = [TextStream(tokenizer, ids) for _ in range(flags.samples)]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character
    texts, counts = [""] * flags.samples, [0] * flags.samples
    reasons = [CTRL_C] * flags.samples  # until another one is known
    live = flags.samples == 1
    say = lambda text: print(text, end="", flush=True)
    if live:
        say(flags.prompt)
    with contextlib.suppress(KeyboardInterrupt):
        for new in made:
            for i, stream in enumerate(streams):
                kept = new[i][new[i] >= 0]
                counts[i] += len(kept)
                if len(kept) < len(new[i]):
                    reasons[i] = DOCUMENT
                piece = stream.push(kept)
                texts[i] += piece
                if live:
                    say(piece)
        reasons = [ASKED if count == flags.tokens else DOCUMENT for count in counts]
    if live:
        say(streams[0].finish() + "\n")
        return Ended(counts, reasons)
    for i, stream in enumerate(streams):
        say(f"--- sample {i + 1} of {flags.samples}\n{flags.prompt}{texts[i]}{stream.finish()}\n")
    return Ended(counts, reasons)


def how_it_ended(ended: Ended, prompt: int, config: Config) -> str:
    """One line: why the samples stopped, and whether they went beyond the length that the model was trained on.

    prompt: the prompt's tokens.
    """
    parts = []
    for reason in (ASKED, DOCUMENT, CTRL_C):
        tokens = [n for n, why in zip(ended.tokens, ended.reasons, strict=True) if why == reason]
        if tokens:
            number = str(tokens[0]) if min(tokens) == max(tokens) else f"{min(tokens)} to {max(tokens)}"
            samples = f"{len(tokens)} of {len(ended.tokens)} samples " if len(ended.tokens) > 1 else ""
            parts.append(f"{samples}{reason}" + (f"={number}" if reason == ASKED else f", after {number} token{'s'[: number != '1']}"))
    positions = config.model.max_positions
    if config.model.positions == "learned" and prompt + max(ended.tokens) == positions:
        parts.append(f"no position is left (model.max_positions={positions})")
    trained = config.data.sequence_length
    beyond = min(prompt + max(ended.tokens) - trained, max(ended.tokens))
    if beyond > 0:
        parts.append(f"the last {beyond} lie beyond the {trained} tokens that the model was trained on (data.sequence_length)")
    return f"stopped: {'; '.join(parts)}"


def run(argv: Sequence[str]) -> int:
    """`main`, ended quietly by Ctrl-C and by a reader that has seen enough."""
    try:
        return main(argv)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more to write to at exit
        return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
