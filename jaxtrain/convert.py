"""`python -m jaxtrain.convert from_hf | to_hf`: a published model as the checkpoint of step 0, and
a checkpoint as a published model. hf/families/ has the families.

    from_hf DIR --workdir=W   DIR/config.json → settings, DIR/*.safetensors → W/checkpoints/0
    to_hf --workdir=W DIR     W/checkpoints/N → DIR/config.json, DIR/*.safetensors

One process, on the host; no device is used.
"""

import collections
import dataclasses
import functools
import math
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain import cli, places
from jaxtrain.checkpoint import reading, stores
from jaxtrain.checkpoint.manifest import STATE, DatabaseError, read_database
from jaxtrain.checkpoint.steps import (
    CheckpointError,
    Meta,
    choose,
    read_errors,
    read_meta,
    trained_group,
)
from jaxtrain.config import Config, StoredConfig, UsageError, replace, to_dict
from jaxtrain.config.flags import Flag, Reading, read_flags
from jaxtrain.config.phases import longest_sequence
from jaxtrain.config.recipes import config_text
from jaxtrain.config.rules import checks
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.devices.cluster_environment import read_environment
from jaxtrain.generate_command import EMA, find_checkpoint, understand
from jaxtrain.hf.exporting import export_folder
from jaxtrain.hf.fields import HfError, read_json
from jaxtrain.hf.model_config import differing, family_of, read_model, write_model
from jaxtrain.hf.run_config import Published, open_published, started_from
from jaxtrain.hf.safetensors_folder import DTYPES
from jaxtrain.hf.source_files import CONFIG, SOURCE, TENSORS, TOKENIZER
from jaxtrain.hf.tensor_rules import PublishedTensor
from jaxtrain.hf.tokenizer_files import exported_files, token_ids, tokenizer_of_run
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.files import CONFIG_FILE, replace_text
from jaxtrain.run.run_lock import RunLock

DESCRIPTION = """
Starts a run from a published model, and publishes a run's model, as Hugging Face's transformers
reads it: config.json and safetensors.

usage: jaxtrain convert from_hf DIR --workdir=W [--config.GROUP.FIELD=VALUE …]
                          DIR's model as the checkpoint of step 0 of a run in W, which
                          jaxtrain train --config=W/config.json --workdir=W continues
       jaxtrain convert to_hf --workdir=W DIR [flags]
                          the newest checkpoint of W, as a new folder DIR

A field of config.json that jaxtrain cannot honour is refused by its name, and so is a tensor that
is missing, damaged or too many; nothing is written then, and the status is 2.
"""
WORKDIR = Flag("workdir", "", "folder of the run")
FLAGS = {
    "from_hf": (WORKDIR,),
    "to_hf": (
        WORKDIR,
        Flag("step", -1, "step of the checkpoint; -1: the newest", at_least=-1),
        EMA,
        Flag(
            "dtype",
            "",
            "type of the numbers: float32, bfloat16 or float16; empty: each tensor's own in the "
            "model that the run began with, else that of the run's parameters",
        ),
        Flag(
            "max_shard",
            "5GB",
            "most bytes of a file's numbers, such as 500MB or 2GiB; a tensor is not cut",
        ),
    ),
}
TYPES = {str(dtype): name for name, dtype in DTYPES.items()}  # "float32" → "F32"


@cli.command
def main(argv: Sequence[str]) -> int:
    """The exit status: 0; with one line on stderr 2 for what cannot work, 74 for storage that
    fails."""
    command, *rest = [*argv] or ["--help"]
    if command not in FLAGS:
        if command not in ("--help", "-h", "--version"):
            raise cli.FlagsError(
                f"{command!r} is no command of jaxtrain convert: use from_hf or to_hf"
            )
        read_flags([command], DESCRIPTION, (), with_config=False)  # prints, and ends the process
    run = from_hf if command == "from_hf" else to_hf
    flags = read_flags(rest, DESCRIPTION, FLAGS[command], command == "from_hf", with_words=True)
    run(flags)
    return ExitStatus.FINISHED


def folder_of(flags: types.SimpleNamespace, command: str) -> pathlib.Path:
    """The folder that the command's word names. Raises UsageError if there is not one word, or no
    workdir."""
    usage = f"jaxtrain convert {command} DIR --workdir=W"
    if len(flags.words) != 1:
        raise UsageError(f"{command} is about one folder, not {len(flags.words)}", advice=usage)
    if scheme := stores.scheme_of(flags.words[0]):
        raise UsageError(
            f"{flags.words[0]} is an address ({scheme}), and published models are local folders",
            advice=usage,
        )
    folder = pathlib.Path(flags.words[0])
    if not flags.workdir:
        new = pathlib.Path("runs", folder.name)
        fixes = {} if command == "to_hf" or new.exists() else {"workdir": str(new)}
        exists = f" (and {folder} exists already: name a folder that does not)"
        usage += exists * (command == "to_hf" and folder.exists())
        raise UsageError("--workdir is empty", fixes, advice="" if fixes else usage)
    return folder


# --- in -------------------------------------------------------------------------------------------


def from_hf(command_line: Reading) -> None:
    """Writes the run's folder. Raises FlagsError, HfError or CheckpointError."""

    def check(command_line: Reading) -> tuple[Published, Config]:
        published = open_published(
            str(folder_of(command_line.namespace, "from_hf")), setting="from_hf"
        )
        config, _ = started_from(published, Config(), command_line.overrides)
        if error := checks.error_of(config):
            raise error
        return published, config

    published, config = cli.checked(command_line, check)
    workdir = pathlib.Path(command_line.namespace.workdir)
    places.check(config, str(workdir))
    start_on_host()
    from jaxtrain.checkpoint.resuming import folder_of_checkpoints
    from jaxtrain.hf import importing

    checkpoints = folder_of_checkpoints(config.checkpoint, workdir)
    with read_errors(checkpoints):
        choice = choose(checkpoints, {})
    if choice.steps or choice.unrecognized:
        raise HfError(f"{checkpoints} has checkpoints already: use another --workdir")
    run = tokenizer_of_run(published, config.data.tokenizer, config.model.vocab_size)
    description = run.tokenizer.describe()
    if config.data.tokenizer == published.tokenizer:  # the run's copy lasts
        config = replace(config, {"data.tokenizer": str(workdir / SOURCE / TOKENIZER)})
        description["path"] = str((workdir / SOURCE / TOKENIZER).resolve())
    source = importing.open_weights(published, config.to_store())
    with streams.counting("tensors checked", sys.stderr) as progress:
        importing.check_numbers(source, progress)
    lock = RunLock(workdir)
    lock.take(print)
    try:
        source.keep(workdir)
        save_first_step(workdir, config, description, lambda: importing.state_on_host(source))
    except OSError as error:
        raise CheckpointError(f"{workdir} cannot be written ({error.strerror})") from None
    finally:
        lock.release()
    for note in (*published.notes_for(config.model, config.data), *run.notes):
        print(f"note: {note}")
    print(
        f"{workdir}: step 0 of a {published.family.model_type} with "
        f"{len(source.tensors) + len(source.copies)} tensors; to continue it:\n"
        f"python -m jaxtrain.train --config={workdir / CONFIG_FILE} --workdir={workdir}"
    )


def start_on_host() -> None:
    """Starts jax, which the checkpoint's geometry needs, on one CPU device."""
    with read_environment():
        import jax

    jax.config.update("jax_platforms", "cpu")


def save_first_step(
    workdir: pathlib.Path, config: Config, tokenizer: dict[str, Any], tree: Callable[[], dict]
) -> None:
    """Writes the folder of a run that begins with a state made on the host: step 0, and
    config.json. Raises OSError and CheckpointError.

    tokenizer: its description; tree: as of Checkpointer.save_tree
    """
    from jaxtrain.checkpoint.manager import Checkpointer
    from jaxtrain.checkpoint.resuming import folder_of_checkpoints

    saves = Checkpointer(folder_of_checkpoints(config.checkpoint, workdir), None)
    saves.save_tree(0, tree, vars(Meta(to_dict(config.to_store()), tokenizer=tokenizer)))
    saves.wait()
    replace_text(workdir / CONFIG_FILE, config_text(config))


# --- out ------------------------------------------------------------------------------------------


def to_hf(command_line: Reading) -> None:
    """Writes the published folder. Raises FlagsError, HfError or CheckpointError."""

    def check(command_line: Reading) -> tuple[types.SimpleNamespace, pathlib.Path, int]:
        flags = command_line.namespace
        target = folder_of(flags, "to_hf")
        if flags.dtype and flags.dtype not in TYPES:
            raise UsageError(
                f"--dtype={flags.dtype} is no type of published numbers",
                {"dtype": "bfloat16"},
                ["float32", "float16"],
            )
        return flags, target, _bytes(flags.max_shard)

    flags, target, largest = cli.checked(command_line, check)
    start_on_host()
    from jaxtrain.checkpoint.restoring import wrong_arrays

    try:
        checkpoints, step = find_checkpoint(
            flags.workdir,
            flags.step,
            functools.partial(wrong_arrays, trained_alone=True, average=flags.ema),
            _remark,
        )
        meta = Meta.from_json(read_meta(checkpoints, step))
        config, tokenizer = understand(meta, f"{checkpoints}/{step}", flags.workdir, flags.ema)
        folder = checkpoints / str(step)
        opened = reading.open_arrays(folder, read_database(folder / STATE))
    except DatabaseError as error:
        raise CheckpointError(f"{checkpoints}: its state {error}") from None
    except ValueError as error:  # UsageError and ConfigError, too
        raise HfError(str(error)) from None
    group = f"{trained_group(config.train, flags.ema)}/"
    arrays = {name.removeprefix(group): a for name, a in opened.items() if name.startswith(group)}
    source, workdir = pathlib.Path(flags.workdir) / SOURCE, pathlib.Path(flags.workdir).resolve()
    if source.is_symlink():  # what it leads to would be published
        raise HfError(f"{source} is a link to {os.path.realpath(source)!r}, not the run's folder")
    values = _published_config(source / CONFIG, config, tokenizer)
    shapes = {name: array.shape for name, array in arrays.items()}
    family = family_of(values, CONFIG)
    _, tensors = family.layout(config.model, values, shapes)
    published = read_json(source / TENSORS) if os.path.lexists(source / TENSORS) else {}
    if any(name not in [*DTYPES] for name in published.values()):
        raise HfError(f"{source / TENSORS} has types that are none of {', '.join(DTYPES)}")
    tensors += [
        dataclasses.replace(original, name=name)
        for name, original in family.copies(config.model, tensors).items()
        if name in published  # the model that the run began with has it twice
    ]
    dtype = TYPES[flags.dtype or config.precision.params]
    dtypes = dict.fromkeys((tensor.name for tensor in tensors), dtype)
    if not flags.dtype:
        dtypes |= {name: dtype for name, dtype in published.items() if name in dtypes}
    values |= _dtype_fields(values, tensors, dtypes)
    copied = exported_files(tokenizer, source)
    home = getattr(tokenizer, "path", source).parent
    for what, place in (("tensors", checkpoints), (", ".join(sorted(copied)), home)):
        if not pathlib.Path(os.path.realpath(place)).is_relative_to(workdir):
            _remark(f"{what}: those of {place}")
    with streams.counting("MB written", sys.stderr) as progress:
        export_folder(target, values, tensors, arrays, dtypes, largest, copied, progress, _remark)
    print(f"{target}: step {step} as a {values['model_type']} with {len(tensors)} tensors")


def _published_config(
    path: pathlib.Path, config: StoredConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The config.json of a run's model: the one that the run began with, or a new one. path: of
    that one"""
    if os.path.lexists(path):
        values = read_json(path)
        _, model, _ = read_model(values, str(path))
        if not any(differing(model, config.model)):
            return values
    values = write_model(config.model, None, longest_sequence(config))
    return values | token_ids(tokenizer) | {"pad_token_id": None}


def _dtype_fields(
    values: Mapping[str, Any], tensors: Sequence[PublishedTensor], dtypes: Mapping[str, str]
) -> dict[str, str]:
    """The fields of config.json that say the type of most numbers.

    values: of config.json; dtypes: tensor → its type
    """
    counts = collections.Counter[str]()
    for tensor in tensors:
        counts[dtypes[tensor.name]] += math.prod(tensor.shape)
    commonest = str(DTYPES[counts.most_common(1)[0][0]])
    names = [name for name in ("dtype", "torch_dtype") if name in values] or ["dtype"]
    return dict.fromkeys(names, commonest)


def _remark(line: str) -> None:
    """A line on standard error, for people."""
    streams.remark(f"note: {line}")


def _bytes(text: str) -> int:
    """The bytes of a text such as "5GB" or "500MiB". Raises UsageError for another text."""
    match = re.fullmatch(r"([1-9][0-9]*)(?:([KMGT])(i?))?B", text)
    if not match:
        raise UsageError(f"--max_shard={text} is no size", {"max_shard": "5GB"})
    number, unit, binary = match.groups()
    return int(number) * (1024 if binary else 1000) ** (" KMGT".index(unit) if unit else 0)


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
