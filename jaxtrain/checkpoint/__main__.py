"""`python -m jaxtrain.checkpoint ls | verify | show | diff | prune DIR`: what lies in a folder of checkpoints. No jax, and no device."""

import dataclasses
import datetime
import json
import math
import os
import pathlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence

from etils import epath

from jaxtrain import cli
from jaxtrain.checkpoint import keeping, reading, steps
from jaxtrain.checkpoint.database import DatabaseError
from jaxtrain.checkpoint.keeping import Keep
from jaxtrain.checkpoint.reading import StoredStep
from jaxtrain.checkpoint.steps import BROKEN, CheckpointError, Meta, checkpoints_of, choose, read_meta, what_is_wrong
from jaxtrain.checkpoint.stores import scheme_of
from jaxtrain.config import Config, ConfigError, fields, get
from jaxtrain.config.flags import Flag
from jaxtrain.run import streams, terminal
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.run_lock import FolderError, RunLock

DESCRIPTION = """
Looks at the checkpoints of a run. DIR is the folder of a run or of its checkpoints; a STEP may be given as its folder, too.

usage: jaxtrain checkpoint ls DIR                        its steps: size, time, validation loss, and which are whole
       jaxtrain checkpoint verify DIR [--step=N]         reads every byte and names what is damaged, by path and array; status 74 then
       jaxtrain checkpoint show DIR [--step=N]           config and arrays of a step, the newest whole one if none is named
       jaxtrain checkpoint diff A B                      settings and arrays that differ between two steps (DIR: its newest whole one)
       jaxtrain checkpoint prune DIR [flags] [--yes]     deletes steps that a policy does not keep, broken and unfinished ones

`ls` looks at all files but does not read the arrays' numbers: whether these are whole, `verify` says. `prune` says what it would
delete, and deletes with --yes alone; the newest whole step is always kept. No device is used.
"""
STEP = Flag("step", -1, "the step; -1: the newest whole one", at_least=-1)
FLAGS = {
    "ls": (),
    "verify": (Flag("step", -1, "this step alone; -1: all", at_least=-1),),
    "show": (STEP, Flag("statistics", False, "read the arrays: least and greatest number, norm, and how many are not finite")),
    "diff": (Flag("all", False, "list all arrays that differ, not the 20 that differ most"),),
    "prune": (
        Flag("keep", 0, "keep so many of the newest steps; 0: all", at_least=0),
        Flag("keep_every", 0, "with --keep: keep steps that this divides", at_least=0),
        Flag("keep_best", 0, "with --keep: keep so many of the lowest validation loss", at_least=0),
        Flag("broken", False, "delete what runs have set aside as N.broken-1"),
        Flag("unfinished", False, "delete what saves that did not end have left"),
        Flag("yes", False, "delete; without it the command only says what it would delete"),
    ),
}
LISTED = 20  # arrays that `diff` lists


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 2 for what cannot work, with one line on stderr; 74 where `verify` has found damage, or another cannot read."""
    command, names, flags = parse(argv)
    try:
        return _COMMANDS[command](list(map(_folder, names)), flags)
    except (CheckpointError, FolderError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.status


def parse(argv: Sequence[str]) -> tuple[str, list[str], types.SimpleNamespace]:
    """The command, the names of the folders that it is about, and its flags; ends with status 2 for what is none."""
    words = [word for word in argv if not word.startswith("-")]
    command = words[0] if words else ""
    flagged = [word for word in argv if word.startswith("-")]
    if command not in FLAGS:
        if not argv or "--help" in argv or "-h" in argv or "--version" in argv:
            cli.parse_flags(flagged or ["--help"], DESCRIPTION, ())
        commands = ", ".join(FLAGS)
        cli.fail(f"{command or argv[0]!r} is no command of jaxtrain checkpoint: use one of {commands}, such as jaxtrain checkpoint ls DIR")
    flags = cli.parse_flags(flagged, DESCRIPTION, FLAGS[command])
    wanted = 2 if command == "diff" else 1
    if len(words) - 1 != wanted:
        what = "two steps or runs" if wanted == 2 else "one folder"
        use = f"jaxtrain checkpoint {command} {'A B' if wanted == 2 else 'DIR'}"
        cli.fail(f"{command} is about {what}, not {len(words) - 1}: use {use}")
    return command, words[1:], flags


def _folder(name: str) -> epath.Path:
    """The folder of checkpoints, or of a step; ends with status 2 where there is none."""
    folder = checkpoints_of(name)
    if not folder.is_dir():
        runs = sorted(str(path.parent) for path in pathlib.Path("runs").glob("*/checkpoints"))
        cli.fail(f"{name!r} is no folder: use the folder of a run, such as {runs[0] if runs else 'runs/tiny'}")
    return folder


# --- ls and verify -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Listed:
    """A step as `ls` shows it. seconds: since 1970; why: what is wrong with it, "" if nothing is."""

    step: int
    size: int
    seconds: float
    loss: float | None
    why: str


def listed(directory: epath.Path) -> list[Listed]:
    """All that has a step's name, in order."""
    losses = keeping.read_losses(directory)
    strange = {stranger.name: stranger.why for stranger in steps.strangers(directory)}
    found = []
    for step in steps.names(directory):
        folder = directory / str(step)
        why = strange.get(str(step)) or what_is_wrong(folder, Meta.from_json(read_meta(directory, step)))
        found.append(Listed(step, size_of(folder), _saved_at(folder), losses.get(step), why))
    return found


def _saved_at(folder: epath.Path) -> float:
    """When a step was saved, in seconds since 1970. A store's folders have no times, but each step in one has Orbax's file."""
    if not scheme_of(folder):
        return folder.stat().mtime
    return json.loads((folder / "_CHECKPOINT_METADATA").read_bytes())["commit_timestamp_nsecs"] / 1e9


def ls(places: list[epath.Path], flags: types.SimpleNamespace) -> int:
    (directory,) = places
    rows = [("step", "size", "saved", "validation loss", "")]
    for row in listed(directory):
        when = datetime.datetime.fromtimestamp(row.seconds).strftime("%Y-%m-%d %H:%M:%S")
        rows.append((str(row.step), in_units(row.size), when, "" if row.loss is None else f"{row.loss:.4f}", row.why or "whole"))
    if len(rows) == 1:
        print(f"{directory} has no checkpoint")
    else:
        _print_table(rows)
    for name in _others(directory):
        print(f"{name}  {in_units(size_of(directory / name))}")
    return ExitStatus.FINISHED


def _others(directory: epath.Path) -> list[str]:
    """What runs have set aside or not finished."""
    return sorted(path.name for path in directory.iterdir() if BROKEN in path.name or steps.is_unfinished(path))


def verify(places: list[epath.Path], flags: types.SimpleNamespace) -> int:
    (directory,) = places
    if flags.step >= 0 and flags.step not in steps.names(directory):
        _no_such_step(directory, flags.step)
    damaged, strange = 0, {stranger.name: stranger.why for stranger in steps.strangers(directory)}
    for step in [flags.step] if flags.step >= 0 else steps.names(directory):
        folder, found, checked = directory / str(step), 0, True
        if str(step) in strange:
            found += _say_damage(folder, strange[str(step)])
        else:
            checked = Meta.from_json(read_meta(directory, step)).version >= steps.MANIFEST_SINCE
            for why in reading.damages(folder, _progress(step), checked):
                found += _say_damage(folder, why)
        _clear_progress()
        without = "" if checked else "; it has no checksums, so damage inside of numbers is not known"
        print(f"{step}: {found} damaged" if found else f"{step}: whole, {in_units(size_of(folder))} read{without}", flush=True)
        damaged += bool(found)
    return ExitStatus.STORAGE if damaged else ExitStatus.FINISHED


def _say_damage(folder: epath.Path, why: str) -> int:
    _clear_progress()
    print(f"{folder}: {why}", flush=True)
    return 1


def _progress(step: int) -> Callable[[int, int], None]:
    """Shows on a terminal how much of a step is read."""
    line = terminal.Line(sys.stderr)
    return lambda done, total: line.draw(f"{step}: {in_units(done)} of {in_units(total)}")


def _clear_progress() -> None:
    if terminal.redraws(sys.stderr):
        terminal.clear(sys.stderr)


# --- show and diff -----------------------------------------------------------------------------------------------------------------


def _step_in(place: epath.Path, step: int = -1) -> epath.Path:
    """The folder of a step: of this one, of the newest whole one for −1, or the place itself if it is a step's."""
    if (place / steps.META).is_dir():
        return place
    if step < 0:
        choice = choose(place, {})
        if choice.step is None:
            raise CheckpointError(f"{place} has no whole checkpoint{': ' * bool(choice.strangers)}{choice}")
        return place / str(choice.step)
    return place / str(step) if step in steps.names(place) else _no_such_step(place, step)


def _no_such_step(directory: epath.Path, step: int) -> epath.Path:
    there = steps.names(directory)
    nearest = min(there, key=lambda other: abs(other - step), default=None)
    words = ", ".join(map(str, there))
    cli.fail(f"--step={step} is no checkpoint of {directory} (it has {words}): use --step={-1 if nearest is None else nearest}")


def _opened(folder: epath.Path) -> StoredStep:
    try:
        return reading.open_step(folder)
    except DatabaseError as error:
        raise CheckpointError(f"{folder}: its state {error}") from None


def _meta_of(folder: epath.Path) -> tuple[Meta, Config]:
    meta = Meta.from_json(read_meta(folder.parent, int(folder.name)))
    try:
        return meta, meta.stored_config().resolve()
    except ConfigError as error:
        raise CheckpointError(f"{folder}: its config cannot be read: {error}") from None


def show(places: list[epath.Path], flags: types.SimpleNamespace) -> int:
    folder = _step_in(places[0], flags.step)
    meta, config = _meta_of(folder)
    stored = _opened(folder)
    print(
        f"{folder}: step {meta.step}, {meta.wall_s:.0f} s of training, corpus {meta.checksum[:12]}, tokenizer {meta.tokenizer.get('kind')}"
    )
    print("\n".join(f"  {path} = {get(config, path)}" for path in fields()))
    rows = [("array", "shape", "type", "size", *(("least", "greatest", "norm", "not finite") if flags.statistics else ()))]
    for name, array in stored.arrays.items():
        figures: tuple[str, ...] = ()
        if flags.statistics:
            try:
                s = reading.statistics(array)
                figures = (f"{s.least:.4g}", f"{s.greatest:.4g}", f"{s.norm:.6g}", str(s.not_finite))
            except DatabaseError as error:
                figures = (str(error), "", "", "")
        rows.append((name, str(list(array.shape)), array.dtype.name, in_units(reading.nbytes(array)), *figures))
    _print_table(rows)
    print(f"{len(stored.arrays)} arrays, {in_units(sum(map(reading.nbytes, stored.arrays.values())))}")
    return ExitStatus.FINISHED


def diff(places: list[epath.Path], flags: types.SimpleNamespace) -> int:
    a, b = (_step_in(place) for place in places)
    (meta_a, config_a), (meta_b, config_b) = _meta_of(a), _meta_of(b)
    print(f"a  {a}: step {meta_a.step}\nb  {b}: step {meta_b.step}")
    for path in fields():
        if get(config_a, path) != get(config_b, path):
            print(f"  {path}: {get(config_a, path)} → {get(config_b, path)}")
    arrays_a, arrays_b = _opened(a).arrays, _opened(b).arrays
    rows, same = [], 0
    for name in sorted({*arrays_a, *arrays_b}):
        if name not in arrays_a or name not in arrays_b:
            print(f"  {name}: in {'b' if name in arrays_b else 'a'} alone")
        elif (arrays_a[name].shape, arrays_a[name].dtype) != (arrays_b[name].shape, arrays_b[name].dtype):
            of = [f"{array.dtype.name}{list(array.shape)}" for array in (arrays_a[name], arrays_b[name])]
            print(f"  {name}: {of[0]} → {of[1]}")
        else:
            try:
                found = reading.difference(arrays_a[name], arrays_b[name])
            except DatabaseError as error:
                raise CheckpointError(f"{name} {error} in {a} or {b}") from None
            if found.count:
                rows.append((name, found))
            else:
                same += 1
    rows.sort(key=lambda row: -row[1].relative if math.isfinite(row[1].relative) else -math.inf)
    shown = rows if flags.all else rows[:LISTED]
    if shown:
        share = lambda name, found: f"{found.count / max(math.prod(arrays_a[name].shape), 1):.1%}"
        head = ("array", "largest difference", "relative", "numbers that differ")
        _print_table([head, *((n, f"{d.absolute:.4g}", f"{d.relative:.4g}", share(n, d)) for n, d in shown)])
    more = f", of which {len(shown)} are listed (--all lists all)" if len(shown) < len(rows) else ""
    print(f"{len(rows)} arrays differ{more}; {same} are the same")
    return ExitStatus.FINISHED


# --- prune -------------------------------------------------------------------------------------------------------------------------


def doomed(directory: epath.Path, flags: types.SimpleNamespace) -> dict[str, str]:
    """What `prune` deletes, each with its reason."""
    found: dict[str, str] = {}
    if flags.keep:
        present = {row.step: row.why for row in listed(directory)}
        keep = Keep(flags.keep, flags.keep_every, flags.keep_best)
        whole = [step for step, why in present.items() if not why]
        kept = keep.kept(whole, keeping.read_losses(directory))
        found |= {str(step): "not kept" for step in whole if step not in kept}
    if flags.broken:
        found |= {name: "set aside as broken" for name in _others(directory) if BROKEN in name}
    if flags.unfinished:
        found |= {name: "not finished" for name in _others(directory) if BROKEN not in name}
    return found


def prune(places: list[epath.Path], flags: types.SimpleNamespace) -> int:
    (directory,) = places
    if not (flags.keep or flags.broken or flags.unfinished):
        cli.fail("prune without a policy deletes nothing: use --keep=3 (and --keep_every, --keep_best), --broken=true or --unfinished=true")
    run = directory.parent if directory.name == "checkpoints" else directory
    lock = RunLock(run) if flags.yes and not scheme_of(run) else None  # a store has no locks
    if lock:
        lock.take()
    try:
        going = doomed(directory, flags)
        total = sum(size_of(directory / name) for name in going)
        for name, why in going.items():
            print(
                f"{'deleting' if flags.yes else 'would delete'} {directory / name} ({why}, {in_units(size_of(directory / name))})",
                flush=True,
            )
            if flags.yes:
                keeping.delete(directory / name) if why == "not kept" else (directory / name).rmtree()
        verb = "deleted" if flags.yes else "would be deleted: --yes deletes them"
        print(f"{len(going)} folders, {in_units(total)} {verb}" if going else "nothing to delete")
    except OSError as error:
        raise CheckpointError(f"{directory}: not all is deleted ({error.strerror})") from None
    finally:
        if lock:
            lock.release()
    return ExitStatus.FINISHED


# --- output ------------------------------------------------------------------------------------------------------------------------


def size_of(folder: epath.Path) -> int:
    """The bytes of all files below a folder."""
    if not folder.is_dir():
        return folder.stat().length
    return sum(size_of(path) for path in folder.iterdir() if not os.path.islink(path))


def in_units(size: int) -> str:
    """A number of bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} B"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be; the first and the last to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [f"{cell:{'<' if column in (0, len(row) - 1) else '>'}{widths[column]}}" for column, cell in enumerate(row)]
        print("  ".join(cells).rstrip())


_COMMANDS: Mapping[str, Callable[[list[epath.Path], types.SimpleNamespace], int]] = {
    "ls": ls,
    "verify": verify,
    "show": show,
    "diff": diff,
    "prune": prune,
}


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
