"""`python -m jaxtrain.checkpoint ls | verify | show | diff | prune DIR`: what lies in a folder of
checkpoints. No jax, and no device.

What DIR is, subject.py says.
"""

import dataclasses
import datetime
import functools
import json
import math
import os
import shlex
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from etils import epath

from jaxtrain import cli
from jaxtrain.checkpoint import keeping, reading, steps, subject
from jaxtrain.checkpoint.database import DatabaseError
from jaxtrain.checkpoint.keeping import Keep
from jaxtrain.checkpoint.reading import StoredStep, Verified, in_units
from jaxtrain.checkpoint.steps import BROKEN, CheckpointError, Meta, Stranger, choose, what_is_wrong
from jaxtrain.checkpoint.stores import scheme_of, size_of
from jaxtrain.checkpoint.subject import NoCheckpointsError, Subject
from jaxtrain.config import Config, ConfigError, fields, flag_text, get, one_line
from jaxtrain.config.errors import UsageError
from jaxtrain.config.flags import Flag, read_flags
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.run_lock import RunLock

DESCRIPTION = """
Looks at the checkpoints of a run. DIR is the folder of a run, or the folder or address
(s3://BUCKET/PATH) of its checkpoints. But for prune it may also be the folder of one step, DIR/20,
which is meant alone then.

usage: jaxtrain checkpoint ls DIR                      its steps: size, time, validation loss, and
                                                       which are whole
       jaxtrain checkpoint verify DIR [--step=N]       reads every byte and names what is damaged,
                                                       by path and array; status 74 then
       jaxtrain checkpoint show DIR [--step=N]         config and arrays of a step, the newest whole
                                                       one if none is named
       jaxtrain checkpoint diff A B                    settings and arrays that differ between two
                                                       steps (DIR: its newest whole one)
       jaxtrain checkpoint prune DIR [flags] [--yes]   deletes steps that a policy does not keep,
                                                       broken and unfinished ones

`ls` looks at all files but does not read the arrays' numbers: whether these are whole, `verify`
says. `prune` says what it would delete, and deletes with --yes alone; the newest whole step is
always kept. No device is used. A place without checkpoints is refused with status 2; one that
cannot be read ends the command with 74.
"""
STEP = Flag("step", -1, "the step; -1: the newest whole one", at_least=-1)
FLAGS = {
    "ls": (),
    "verify": (Flag("step", -1, "this step alone; -1: all", at_least=-1),),
    "show": (
        STEP,
        Flag(
            "statistics",
            False,
            "read the arrays: least and greatest number, norm, and how many are not finite",
        ),
    ),
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
ASK = ("--help", "-h", "--version")
LISTED = 20  # arrays that `diff` lists
LOOKS = 5  # how often `verify` looks again where all steps were deleted meanwhile


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 2 for what cannot work, with one line on stderr; 74 where `verify` finds
    damage, or a place cannot be read."""
    try:
        command, subjects, flags = parse(argv)
        with steps.read_errors(" or ".join(str(each.step or each.directory) for each in subjects)):
            return _COMMANDS[command](subjects, flags)
    except RunError as error:
        print(one_line(f"error: {error}"), file=sys.stderr, flush=True)
        return error.status


def parse(argv: Sequence[str]) -> tuple[str, list[Subject], types.SimpleNamespace]:
    """The command, what it is about, and its flags; ends with status 2 for what is none. Raises
    RunError for a place that is none."""
    command, flagged = command_of(argv)
    if command not in FLAGS:
        asked = [word for word in argv if word in ASK]
        if asked or not argv:
            cli.parse_flags(asked or ["--help"], DESCRIPTION, ())
        commands = ", ".join(FLAGS)
        cli.fail(
            f"{command or argv[0]!r} is no command of jaxtrain checkpoint: use one of "
            f"{commands}, such as jaxtrain checkpoint ls DIR"
        )
    return command, *cli.checked_flags(
        flagged, DESCRIPTION, FLAGS[command], functools.partial(_checked, command), words=True
    )


def command_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The first word that belongs to no flag of any command, "" if there is none, and the other
    words."""
    every = {flag.name: flag for flags in FLAGS.values() for flag in flags}
    words = read_flags(
        [word for word in argv if word not in ASK],
        "",
        list(every.values()),
        with_config=False,
        with_words=True,
    ).words
    if not words:
        return "", list(argv)
    return words[0], [word for at, word in enumerate(argv) if at != list(argv).index(words[0])]


def _checked(
    command: str, flags: types.SimpleNamespace
) -> tuple[list[Subject], types.SimpleNamespace]:
    """What a command is about, and its flags. Raises UsageError, or RunError for a place that is
    none."""
    wanted = 2 if command == "diff" else 1
    if len(flags.words) != wanted:
        what = "two steps or runs" if wanted == 2 else "one folder"
        use = f"jaxtrain checkpoint {command} {'A B' if wanted == 2 else 'DIR'}"
        raise UsageError(f"{command} is about {what}, not {len(flags.words)}", advice=use)
    subjects = list(map(subject.find, flags.words))
    if command == "prune":
        _check_prune(subjects[0], flags)
    elif getattr(flags, "step", -1) >= 0:
        _step_of(subjects[0], flags.step)
    return subjects, flags


# --- ls and verify --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Listed:
    """A step as `ls` shows it. seconds: since 1970, None where that is not known; why: what is
    wrong with it, "" if nothing is."""

    folder: epath.Path
    size: int
    seconds: float | None
    loss: float | None
    why: str


def listed(of: Subject) -> list[Listed]:
    """The steps that are meant, in order, whole or not."""
    losses = keeping.read_losses(of.directory)
    found = []
    for folder in of.folders():
        meta = steps.look_at(folder)
        why = meta.why if isinstance(meta, Stranger) else what_is_wrong(folder, meta)
        loss = losses.get(int(folder.name)) if folder.name.isdigit() else None
        found.append(Listed(folder, size_of(folder), _saved_at(folder), loss, why))
    return found


def _saved_at(folder: epath.Path) -> float | None:
    """When a step was saved, in seconds since 1970. A store's folders have no times, but each step
    in one has Orbax's file."""
    try:
        if not scheme_of(folder):
            return os.lstat(folder).st_mtime
        return (
            json.loads((folder / "_CHECKPOINT_METADATA").read_bytes())["commit_timestamp_nsecs"]
            / 1e9
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None  # it is damaged, or was deleted meanwhile


def ls(subjects: list[Subject], flags: types.SimpleNamespace) -> int:
    (of,) = subjects
    rows = [("step", "size", "saved", "validation loss", "")]
    for row in listed(of):
        when = (
            ""
            if row.seconds is None
            else datetime.datetime.fromtimestamp(row.seconds).strftime("%Y-%m-%d %H:%M:%S")
        )
        rows.append(
            (
                row.folder.name,
                in_units(row.size),
                when,
                "" if row.loss is None else f"{row.loss:.4f}",
                row.why or "whole",
            )
        )
    if len(rows) == 1:
        print(f"{of.directory} has no checkpoint")
    else:
        _print_table(rows)
    for path in of.others():
        print(
            f"{path.name}  "
            f"{in_units(size_of(path))}{'' if BROKEN in path.name else '  not finished'}"
        )
    return ExitStatus.FINISHED


def verify(subjects: list[Subject], flags: types.SimpleNamespace) -> int:
    (of,) = subjects
    if flags.step >= 0:
        of = Subject(of.directory, _step_of(of, flags.step))
    done: list[Verified] = []
    seen: set[str] = set()
    # again where a run has deleted all, and saved others
    for newest_first in (False, *[True] * LOOKS):
        folders = [folder for folder in of.folders() if folder.name not in seen]
        seen |= {folder.name for folder in folders}
        for folder in folders[:: -1 if newest_first else 1]:
            step = reading.verify(folder, _progress(folder.name))
            _clear_progress()
            print(
                "\n".join(step.lines())
                if step
                else f"{folder.name}: was deleted while it was read",
                flush=True,
            )
            if step:
                done.append(step)
            if done and newest_first:
                break
        if done:
            break
    if not done:
        others = ", ".join(path.name for path in of.others())
        raise NoCheckpointsError(
            f"{of.directory} has no checkpoint to verify{', only ' * bool(others)}{others}"
        )
    damaged, unchecked = (
        ", ".join(step.folder.name for step in done if step.damage),
        sum(not step.checked for step in done),
    )
    result = f"{damaged} damaged" if damaged else "all whole"
    without = f", {unchecked} without checksums" if unchecked else ""
    size = in_units(sum(step.size for step in done))
    print(f"verified {len(done)} step{'s'[: len(done) > 1]}, {size}: {result}{without}", flush=True)
    return ExitStatus.STORAGE if damaged else ExitStatus.FINISHED


def _progress(step: str) -> Callable[[int, int], None]:
    """Shows on a terminal how much of a step is read."""
    line = streams.TerminalLine(sys.stderr)
    return lambda done, total: line.draw(f"{step}: {in_units(done)} of {in_units(total)}")


def _clear_progress() -> None:
    if streams.redraws(sys.stderr):
        streams.clear(sys.stderr)


# --- show and diff --------------------------------------------------------------------------------


def _step_of(of: Subject, step: int = -1) -> epath.Path:
    """The folder of the step that is meant: the only one, or that of this number, or for −1 the
    newest whole one."""
    if of.step:
        if step >= 0 and of.step.name != str(step):
            _no_such_step(
                f"{of.step}, which is a step",
                [int(of.step.name)] if of.step.name.isdigit() else [],
                step,
            )
        return of.step
    if step < 0:
        choice = choose(of.directory, {})
        if choice.step is None:
            raise CheckpointError(
                f"{of.directory} has no whole checkpoint{': ' * bool(choice.strangers)}{choice}"
            )
        return of.directory / str(choice.step)
    present = steps.names(of.directory)
    return (
        of.directory / str(step)
        if step in present
        else _no_such_step(str(of.directory), present, step)
    )


def _no_such_step(place: str, present: Sequence[int], step: int) -> NoReturn:
    nearest = min(present, key=lambda other: abs(other - step), default=-1)
    words = f" (it has {', '.join(map(str, present))})" if present else ""
    raise UsageError(f"--step={step} is no checkpoint of {place}{words}", {"step": nearest})


def _opened(folder: epath.Path) -> StoredStep:
    try:
        return reading.open_step(folder)
    except DatabaseError as error:
        raise CheckpointError(f"{folder}: its state {error}") from None


def _meta_of(folder: epath.Path) -> tuple[Meta, Config]:
    meta = steps.look_at(folder)
    if isinstance(meta, Stranger):
        raise CheckpointError(f"{folder} is no whole checkpoint: {meta.why}")
    try:
        return meta, meta.stored_config().resolve()
    except ConfigError as error:
        raise CheckpointError(f"{folder}: its config cannot be read: {error}") from None


def show(subjects: list[Subject], flags: types.SimpleNamespace) -> int:
    folder = _step_of(subjects[0], flags.step)
    meta, config = _meta_of(folder)
    stored = _opened(folder)
    print(
        f"{folder}: step {meta.step}, {meta.wall_s:.0f} s of training, corpus "
        f"{meta.checksum[:12]}, tokenizer {meta.tokenizer.get('kind')}"
    )
    print("\n".join(f"  {path} = {get(config, path)}" for path in fields()))
    rows = [
        (
            "array",
            "shape",
            "type",
            "size",
            *(("least", "greatest", "norm", "not finite") if flags.statistics else ()),
        )
    ]
    for name, array in stored.arrays.items():
        figures: tuple[str, ...] = ()
        if flags.statistics:
            try:
                s = reading.statistics(array)
                figures = (
                    f"{s.least:.4g}",
                    f"{s.greatest:.4g}",
                    f"{s.norm:.6g}",
                    str(s.not_finite),
                )
            except DatabaseError as error:
                figures = (str(error), "", "", "")
        rows.append(
            (
                name,
                str(list(array.shape)),
                array.dtype.name,
                in_units(reading.nbytes(array)),
                *figures,
            )
        )
    _print_table(rows)
    print(
        f"{len(stored.arrays)} arrays, {in_units(sum(map(reading.nbytes, stored.arrays.values())))}"
    )
    return ExitStatus.FINISHED


def diff(subjects: list[Subject], flags: types.SimpleNamespace) -> int:
    a, b = map(_step_of, subjects)
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
        elif (arrays_a[name].shape, arrays_a[name].dtype) != (
            arrays_b[name].shape,
            arrays_b[name].dtype,
        ):
            of = [
                f"{array.dtype.name}{list(array.shape)}"
                for array in (arrays_a[name], arrays_b[name])
            ]
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
        _print_table(
            [head, *((n, f"{d.absolute:.4g}", f"{d.relative:.4g}", share(n, d)) for n, d in shown)]
        )
    more = f", of which {len(shown)} are listed (--all lists all)" if len(shown) < len(rows) else ""
    print(f"{len(rows)} arrays differ{more}; {same} are the same")
    return ExitStatus.FINISHED


# --- prune ----------------------------------------------------------------------------------------


def doomed(of: Subject, flags: types.SimpleNamespace) -> dict[epath.Path, str]:
    """What `prune` deletes, each with its reason."""
    found: dict[epath.Path, str] = {}
    if flags.keep:
        whole = {int(row.folder.name): row.folder for row in listed(of) if not row.why}
        kept = Keep(flags.keep, flags.keep_every, flags.keep_best).kept(
            whole, keeping.read_losses(of.directory)
        )
        found |= {folder: "not kept" for step, folder in whole.items() if step not in kept}
    if flags.broken:
        found |= {path: "set aside as broken" for path in of.others() if BROKEN in path.name}
    if flags.unfinished:
        found |= {path: "not finished" for path in of.others() if BROKEN not in path.name}
    return found


def _check_prune(of: Subject, flags: types.SimpleNamespace) -> None:
    """Raises UsageError where `prune` has nothing to go by."""
    if of.step:
        given = [
            flag_text(f.name, getattr(flags, f.name))
            for f in FLAGS["prune"]
            if getattr(flags, f.name) != f.default
        ]
        words = " ".join([shlex.quote(str(of.directory)), *(given or ["--keep=3"])])
        rule = f"prune is about all steps of a run, and {str(of.step)!r} is one of them"
        raise UsageError(rule, advice=f"jaxtrain checkpoint prune {words}")
    if not (flags.keep or flags.broken or flags.unfinished):
        rule = "prune without a policy deletes nothing"
        raise UsageError(
            rule,
            {"keep": 3},
            text=f"{rule}: use --keep=3 (and --keep_every, --keep_best), --broken=true or "
            "--unfinished=true",
        )


def prune(subjects: list[Subject], flags: types.SimpleNamespace) -> int:
    (of,) = subjects
    directory = of.directory
    run = directory.parent if directory.name == "checkpoints" else directory
    lock = RunLock(run) if flags.yes and not scheme_of(run) else None  # a store has no locks
    if lock:
        lock.take()
    try:
        going = doomed(of, flags)
        total = sum(map(size_of, going))
        for folder, why in going.items():
            print(
                f"{'deleting' if flags.yes else 'would delete'} {folder} ({why}, "
                f"{in_units(size_of(folder))})",
                flush=True,
            )
            if flags.yes:
                keeping.delete(folder) if why == "not kept" else folder.rmtree()
        if flags.yes:
            keeping.forget_losses(directory, steps.names(directory))
        verb = "deleted" if flags.yes else "would be deleted: --yes deletes them"
        print(f"{len(going)} folders, {in_units(total)} {verb}" if going else "nothing to delete")
    except OSError as error:
        raise CheckpointError(f"{directory}: not all is deleted ({error.strerror})") from None
    finally:
        if lock:
            lock.release()
    return ExitStatus.FINISHED


# --- output ---------------------------------------------------------------------------------------


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be; the first and the last to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            f"{cell:{'<' if column in (0, len(row) - 1) else '>'}{widths[column]}}"
            for column, cell in enumerate(row)
        ]
        print("  ".join(cells).rstrip())


_COMMANDS: Mapping[str, Callable[[list[Subject], types.SimpleNamespace], int]] = {
    "ls": ls,
    "verify": verify,
    "show": show,
    "diff": diff,
    "prune": prune,
}


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
