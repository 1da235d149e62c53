"""The command `generate --workdir=DIR --prompt=TEXT`: text from a checkpoint.

    flags → checkpoint's folder → its meta (config, tokenizer) → prompt's ids
              an error up to here is one line with status 2, and no device is used
          → parameters on 1 device, or on `--context` × `--model` → text on stdout, as it is made
          → on stderr: figures, why it stopped, and how much of the text is beyond the length
            that the model was trained on

A checkpoint of any mesh, number of stages and schedule can be read. generation/sampling.py makes
ids, generation/text.py makes text from them, generation/output.py prints it. There is one process,
without jax.distributed.
"""

import dataclasses
import functools
import math
import os
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from etils import epath

from jaxtrain import cli
from jaxtrain.checkpoint import stores
from jaxtrain.checkpoint.steps import (
    NONE,
    TO_TRAIN,
    DamageError,
    Meta,
    StepCheck,
    StepChoice,
    checkpoints_of,
    choose,
    nothing_wrong,
    read_errors,
    read_meta,
    trained_group,
    what_is_wrong,
)
from jaxtrain.checkpoint.subject import NoCheckpointsError, some_run, step_folder
from jaxtrain.config import (
    Config,
    MeshConfig,
    ResolvedModel,
    StoredConfig,
    UsageError,
    flag_text,
    models_of_kinds,
    own_code,
    shown,
)
from jaxtrain.config.flags import MOST_CPU_DEVICES, Flag
from jaxtrain.config.phases import longest_sequence
from jaxtrain.config.rules.mesh_rules import kv_heads_fit, mlp_widths
from jaxtrain.config.rules.rules import divisors, near
from jaxtrain.devices import startup
from jaxtrain.devices.cluster_environment import SIMULATED_DEVICES, read_environment
from jaxtrain.hf.source_files import SOURCE
from jaxtrain.run import out_of_memory, streams
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.wall_clock import imports_without_collection

if TYPE_CHECKING:  # these import jax, or take long
    from jaxtrain.data.tokenizer import Tokenizer
    from jaxtrain.generation.output import Endings
    from jaxtrain.generation.sampling import Sampler

DESCRIPTION = """
Continues a prompt with the model of a checkpoint.

usage: jaxtrain generate --workdir=DIR --prompt=TEXT [flags]    (or python -m jaxtrain.generate …)
"""

# flags of random choices
RANDOM = ("temperature", "top_k", "top_p", "samples", "seed")
MOST = 2**30  # tokens and samples, whose numbers are int32

EMA = Flag("ema", False, "use the average of the parameters (optimizer.ema_decay)")
FLAGS = (
    Flag(
        "workdir",
        "",
        "folder of a training run, or the folder or address (s3://BUCKET/PATH) of its checkpoints",
    ),
    Flag("prompt", "", "text to continue; empty: the start of a document"),
    Flag("tokens", 100, "new tokens of each sample; fewer if the document ends", 1, MOST),
    Flag(
        "temperature",
        1.0,
        "divisor of the logits: below 1 likely tokens become more likely; 0: as --greedy",
        at_least=0,
    ),
    Flag("top_k", 0, "number of most likely tokens to choose among; 0: all", 0, MOST),
    Flag(
        "top_p",
        1.0,
        "choose among the fewest most likely tokens whose probabilities sum to at least this, "
        "above 0; 1: all",
    ),
    Flag("greedy", False, "always choose the most likely token"),
    Flag("samples", 1, "number of continuations of the prompt", 1, MOST),
    Flag("seed", 0, "seed of the random numbers", 0, 2**32 - 1),
    Flag("step", -1, "step of the checkpoint; -1: the newest", at_least=-1),
    EMA,
    Flag("model", 1, "devices over which the model is split (tensor parallel)", at_least=1),
    Flag(
        "context",
        1,
        "parts of the key/value cache's tokens, each on --model devices of its own",
        at_least=1,
    ),
    Flag(
        "cpu_devices",
        0,
        "simulate this many CPU devices; 0: the platform's own, on a CPU --context × --model",
        0,
        MOST_CPU_DEVICES,
    ),
)


@cli.command
def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0; 130 if Ctrl-C has ended the text; with one line on stderr 2 for
    flags that cannot work, 74 for storage that fails."""
    return generate(cli.checked_flags(argv, DESCRIPTION, FLAGS, check))


def generate(flags: types.SimpleNamespace) -> int:
    """Returns the exit status, for checked flags. Raises UsageError, and CheckpointError where the
    checkpoint cannot be read."""
    with imports_without_collection():
        start_jax(flags)
        if unused := startup.unused_accelerator(flags):
            raise cli.FlagsError(unused)
        # Only now that the flags are known to be right: this takes seconds.

        from jaxtrain.generation import sampling  # noqa: F401
    if unused := unused_flags(flags):
        streams.remark(f"note: {unused} changes nothing: the most likely token is always chosen")
    model = load(flags)
    prompt, trained_length = len(model.ids), longest_sequence(model.config)
    if prompt + flags.tokens > trained_length:
        streams.remark(
            f"a prompt of {prompt} tokens and up to {flags.tokens} more go beyond the "
            f"{trained_length} tokens that the model was trained on (data.sequence_length)"
        )
    advice = lambda asked, available: (
        f", for {flags.samples} × {prompt + flags.tokens} cached tokens beside the model: use "
        "fewer --tokens or --samples, or a larger --context or --model"
    )
    with out_of_memory.named(advice):
        endings = sample(model, flags)
    settings = model.config.model
    positions = settings.max_positions if settings.positions == "learned" else 0
    streams.remark(endings.describe(prompt, positions, trained_length))
    return ExitStatus.INTERRUPTED if endings.interrupted else 0


def sample(model: "Loaded", flags: types.SimpleNamespace) -> "Endings":
    """Makes and prints the text that the flags ask for, and a line with the time that it took."""
    from jaxtrain.generation.output import show
    from jaxtrain.generation.sampling import Sampling

    began, tokenizer = time.perf_counter(), model.tokenizer
    temperature = 0.0 if flags.greedy else flags.temperature
    batches = model.sampler.start(
        model.ids,
        flags.tokens,
        Sampling(temperature, flags.top_k, flags.top_p, flags.seed),
        flags.samples,
        tokenizer.stops,
        tokenizer.vocab_size,
    )
    prompt_read = time.perf_counter()
    endings = show(batches, tokenizer, flags.prompt, model.ids, flags.samples, flags.tokens)
    seconds, tokens = time.perf_counter() - prompt_read, sum(endings.tokens)
    streams.remark(
        f"step {model.step}: prompt of {len(model.ids)} tokens and compilation "
        f"{prompt_read - began:.1f} s; {tokens} tokens in {seconds:.1f} s, "
        f"{tokens / seconds:.1f} tokens/s"
    )
    return endings


# --- before jax -----------------------------------------------------------------------------------


def check(flags: types.SimpleNamespace) -> types.SimpleNamespace:
    """The flags, checked against the checkpoint as far as that is possible without jax. Raises
    UsageError or CheckpointError."""
    check_flags(flags)
    own_code.distrust(flags.workdir)
    checkpoint = find_checkpoint(flags.workdir, flags.step)
    if flags.refused:  # the command ends here, so importing jax delays nothing
        from jaxtrain.checkpoint.restoring import wrong_arrays

        wrong = functools.partial(wrong_arrays, trained_alone=True, average=flags.ema)
        checkpoint = find_checkpoint(flags.workdir, flags.step, wrong)
    config, _, ids = prompted(*checkpoint, flags)
    check_model(config.model, len(ids), flags)
    return flags


def check_flags(flags: types.SimpleNamespace) -> None:
    """Raises UsageError for flags that no checkpoint can satisfy."""
    if not 0 < flags.top_p <= 1:
        raise UsageError(
            f"--top_p={flags.top_p:g} must be above 0 and at most 1",
            {"top_p": 0.9 if flags.top_p <= 0 else 1.0},
        )
    if flags.context > 1 and device_count(flags) > MOST_CPU_DEVICES:
        raise UsageError(
            f"{split_flags(flags)} is more than {MOST_CPU_DEVICES} devices",
            # SIMULATED_DEVICES start in seconds
            {"context": max(1, SIMULATED_DEVICES // flags.model)},
        )
    if 0 < flags.cpu_devices < device_count(flags):
        raise UsageError(
            f"--cpu_devices={flags.cpu_devices} is less than {split_flags(flags)}",
            {"cpu_devices": device_count(flags)},
        )


def unused_flags(flags: types.SimpleNamespace) -> str:
    """The flags, as text, of random choices where none are made."""
    given = {f.name: value for f in FLAGS if (value := getattr(flags, f.name)) != f.default}
    greedy = flags.greedy or not flags.temperature
    unused = [name for name in RANDOM if greedy and given.get(name)]
    return " ".join(flag_text(name, given[name]) for name in unused)


def device_count(flags: types.SimpleNamespace) -> int:
    """The number of devices that the flags ask for."""
    return flags.context * flags.model


def split_flags(flags: types.SimpleNamespace) -> str:
    """The flags that split the model and the cache, for an error."""
    names = [name for name in ("context", "model") if getattr(flags, name) > 1] or ["model"]
    return " × ".join(f"--{name}={getattr(flags, name)}" for name in names)


def find_checkpoint(
    workdir: str,
    step: int = -1,
    wrong: StepCheck = nothing_wrong,
    log: Callable[[str], object] = lambda line: None,
    damaged: Mapping[int, str] = NONE,
) -> tuple[epath.Path, int]:
    """The folder of checkpoints and the step, the newest complete one for −1. Raises UsageError if
    that is missing or not complete.

    wrong, damaged: as in `choose`; log: gets a line with newer steps that are not complete.
    """
    folder, choice = _checkpoints_of(workdir, wrong, damaged)
    if choice.step is None:
        broken = ", ".join(str(entry) for entry in choice.unrecognized if entry.step is not None)
        but = f"; these are not complete: {broken}" if broken else ""
        train = "" if broken else f"it first in python -m jaxtrain.train --workdir={workdir}"
        rule = f"--workdir={workdir!r} has no finished checkpoint{but}"
        raise UsageError(rule, advice="the folder of a run" if stores.scheme_of(folder) else train)
    if step < 0:
        newer = [
            str(entry)
            for entry in choice.unrecognized
            if entry.step is not None and entry.step > choice.step
        ]
        if newer:
            log(f"passed over: {', '.join(newer)}")
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
    workdir: str, wrong: StepCheck, damaged: Mapping[int, str]
) -> tuple[epath.Path, StepChoice]:
    """A run's folder of checkpoints, and the choice among its steps. Raises UsageError if there
    is none, CheckpointError if it cannot be read."""
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
                raise UsageError(
                    f"--workdir={shown(workdir)} {word}",
                    advice="the folder of a training run, such as "
                    f"--workdir={some_run(workdir) or 'runs/tiny'}",
                )
            if step := step_folder(folder):
                fixes = (
                    {"workdir": str(step.parent), "step": int(step.name)}
                    if step.name.isdigit()
                    else {"workdir": str(step.parent)}
                )
                raise UsageError(f"--workdir={workdir!r} is the folder of one step", fixes)
            folder = checkpoints_of(folder)
            return folder, choose(folder, TO_TRAIN, wrong, damaged)
    except stores.AddressError as error:
        raise UsageError(error.about("workdir") if error.place == workdir else str(error)) from None
    except NoCheckpointsError as error:
        raise UsageError(f"--workdir: {error}") from None


def start_jax(flags: types.SimpleNamespace) -> None:
    """Sets up jax's devices and compilation cache by the flags. Unlike training, one process, with
    as many simulated devices as needed. Raises ClusterError where jax does not start, and
    UsageError for another number of devices than this process already has."""
    startup.set_xla_flags(os.environ)
    with read_environment():
        import jax

    startup.simulate_devices(flags.cpu_devices, device_count(flags))
    with read_environment():
        jax.devices()
    startup.use_compilation_cache()


# --- the checkpoint -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """A checkpoint's step, config, tokenizer and model, and the ids of the prompt."""

    step: int
    config: Config
    tokenizer: "Tokenizer"
    ids: list[int]
    sampler: "Sampler"


def load(flags: types.SimpleNamespace) -> Loaded:
    """The model that the flags ask for; without --step that of the newest checkpoint whose arrays
    can be read. Raises UsageError for flags that cannot work, and where --step is damaged."""
    import jax

    from jaxtrain.checkpoint.restoring import load_parameters, wrong_arrays
    from jaxtrain.devices.mesh import make_mesh, sizes_of
    from jaxtrain.generation.sampling import Sampler

    wrong = functools.partial(wrong_arrays, trained_alone=True, average=flags.ema)
    damaged: dict[int, str] = {}
    while True:
        folder, step = find_checkpoint(flags.workdir, flags.step, wrong, streams.remark, damaged)
        config, tokenizer, ids = prompted(folder, step, flags)
        check_model(config.model, len(ids), flags)
        check_own_layers(config.model)
        check_devices(len(jax.devices()), config.model, flags)
        sizes = sizes_of(MeshConfig(data=1, context=flags.context, model=flags.model))
        mesh = make_mesh(sizes, jax.devices()[: device_count(flags)])
        try:
            with read_errors(folder):
                layout, params = load_parameters(
                    folder,
                    step,
                    config.model,
                    config.precision,
                    trained_group(config.train, flags.ema),
                    mesh,
                )
        except DamageError as error:
            if flags.step >= 0:
                raise UsageError(str(error)) from None
            damaged[step] = error.what
        else:
            sampler = Sampler(layout.parts, params, config.precision.compute)
            return Loaded(step, config, tokenizer, ids, sampler)


def prompted(
    folder: epath.Path, step: int, flags: types.SimpleNamespace
) -> tuple[StoredConfig, "Tokenizer", list[int]]:
    """A checkpoint's config and tokenizer, and the prompt's ids. Raises UsageError if
    the meta or the prompt cannot be read."""
    from jaxtrain.data.tokenizer import prompt_ids

    try:
        meta = Meta.from_json(read_meta(folder, step))
        config, tokenizer = understand(meta, f"{folder}/{step}", flags.workdir, flags.ema)
        return config, tokenizer, prompt_ids(tokenizer, flags.prompt, config.model.vocab_size)
    except ValueError as error:  # also ConfigError and DataError
        raise UsageError(str(error)) from None


def understand(
    meta: Meta, name: str, workdir: str, average: bool = False
) -> tuple[StoredConfig, "Tokenizer"]:
    """The config and the tokenizer that a checkpoint's meta describes. Raises ValueError,
    in one line, for a meta that lacks one. average: --ema asks for one, which must be there"""
    from jaxtrain.data.tokenizer import check_stops, tokenizer_from

    try:
        config = meta.stored_config()
        if average and not config.optimizer.ema_decay:
            rule = f"--ema=true asks for an average, and checkpoint {name} has none"
            raise UsageError(f"{rule} (optimizer.ema_decay=0)", {"ema": False})
        # the run's folder, or that of its checkpoints
        folders = [workdir, f"{workdir}/{SOURCE}", f"{workdir}/../{SOURCE}"]
        tokenizer = tokenizer_from(meta.tokenizer, folders)
    except KeyError as error:
        raise ValueError(
            f"checkpoint {name} describes its tokenizer without {error}: use one that "
            "jaxtrain.train has written"
        ) from None
    check_stops(tokenizer, config.model.vocab_size)
    return config, tokenizer


def check_model(model: ResolvedModel, prompt: int, flags: types.SimpleNamespace) -> None:
    """Raises UsageError for more tokens than the model has positions, and for a --model that does
    not split it evenly. prompt: its tokens."""
    if model.positions == "learned" and prompt + flags.tokens > model.max_positions:
        rule = (
            f"--tokens={flags.tokens} after a prompt of {prompt} goes beyond the learned "
            f"model.max_positions={model.max_positions}"
        )
        free, most = model.max_positions - prompt, max(model.max_positions - flags.tokens, 1)
        if free > 0:
            raise UsageError(rule, {"tokens": free})
        raise UsageError(rule, advice=f"a prompt of at most {most} tokens")
    kinds = models_of_kinds(model).values()
    sizes = [("heads", m.heads) for m in kinds] + [s for m in kinds for s in mlp_widths(m).items()]
    undivided = [
        *(f"does not divide model.{field}={size}" for field, size in sizes if size % flags.model),
        *(
            f"neither splits model.kv_heads={m.kv_heads} nor shares each evenly"
            for m in kinds
            if not kv_heads_fit(m, flags.model)
        ),
    ]
    if undivided:
        fits = lambda n: all(kv_heads_fit(m, n) for m in kinds)
        works = near(flags.model, filter(fits, divisors(math.gcd(*(n for _, n in sizes)))))
        raise UsageError(
            f"--model={flags.model} {undivided[0]}", {"model": works[0]}, sorted(works[1:5])
        )


def check_own_layers(model: ResolvedModel) -> None:
    """Raises UsageError for layers of one's own that cannot be imported, or that have no cache."""
    from jaxtrain.models.own_module import without_cache

    try:
        without = without_cache(model)
    except own_code.OwnCodeError as error:
        raise UsageError(f"the checkpoint's model.block or model.mixer {error}") from None
    if without:
        raise UsageError(f"{without} cannot continue a text: it has no `cached` and `cache_arrays`")


def check_devices(count: int, model: ResolvedModel, flags: types.SimpleNamespace) -> None:
    """Raises UsageError if there are fewer devices than `--context` × `--model`."""
    if device_count(flags) <= count:
        return
    rule = f"{split_flags(flags)} is more than the {count} device{'s'[: count > 1]} here"
    if flags.model <= count:
        raise UsageError(rule, {"context": count // flags.model})
    fewer = max(n for n in range(1, count + 1) if flags.model % n == 0 and kv_heads_fit(model, n))
    context = {"context": count // fewer} if flags.context * fewer > count else {}
    raise UsageError(rule, {"model": fewer} | context)
