"""`python -m jaxtrain.checkpoint ls | verify | show | diff | prune | mean DIR`: lists, verifies,
shows, compares, deletes and averages checkpoints. No device, and no jax but for `mean`.

subject.py finds the checkpoints that DIR stands for.
"""

import contextlib
import datetime
import math
import os
import pathlib
import shlex
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorstore as ts
from etils import epath

from jaxtrain import cli, places
from jaxtrain.checkpoint import reading, retention, steps, stores, subject
from jaxtrain.checkpoint.manifest import DatabaseError
from jaxtrain.checkpoint.subject import NoCheckpointsError, Subject
from jaxtrain.config import UsageError, fields, flag_text, get, own_code, replace
from jaxtrain.config.flags import Flag, read_flags
from jaxtrain.config.rules.resume import violations
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.files import parse_json
from jaxtrain.run.metrics import METRICS
from jaxtrain.run.run_lock import RunLock

DESCRIPTION = """
Lists, verifies, shows, compares, deletes and averages the checkpoints of runs. DIR is the folder of
a run, or the folder or address (s3://BUCKET/PATH) of its checkpoints. Except for prune it may also
be the folder of one step, such as DIR/20.

usage: jaxtrain checkpoint ls DIR                      its steps: size, time, validation loss, and
                                                       which are complete
       jaxtrain checkpoint verify DIR [--step=N]       reads every byte and names what is damaged,
                                                       by path and array; status 74 then
       jaxtrain checkpoint show DIR [--step=N]         config and arrays of a step, the newest
                                                       complete one if none is named
       jaxtrain checkpoint diff A B                    settings and arrays that differ between two
                                                       steps (DIR: its newest complete one)
       jaxtrain checkpoint prune DIR [flags] [--yes]   deletes steps that a policy does not keep,
                                                       broken and unfinished ones
       jaxtrain checkpoint mean DIR … [--steps=A,B] [--out=NEW]
                                                       the mean of the parameters of steps of one
                                                       run or several, as step 0 of a new run

`ls` checks all files but does not read the arrays' numbers; `verify` finds damage to these. `prune`
says what it would delete, and deletes only with --yes; the newest complete step always stays. No
device is used. A place without checkpoints is refused with status 2; one that cannot be read ends
the command with 74.
"""
STEP = Flag("step", -1, "the step; -1: the newest complete one", at_least=-1)
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
        Flag("keep", 0, "keep this many of the newest steps; 0: all", at_least=0),
        Flag("keep_every", 0, "with --keep: keep steps that this divides", at_least=0),
        Flag(
            "keep_best", 0, "with --keep: keep this many steps with the lowest losses", at_least=0
        ),
        Flag("broken", False, "delete the steps that runs have set aside as N.broken-1"),
        Flag("unfinished", False, "delete the remains of saves that did not end"),
        Flag("yes", False, "delete; without it the command only says what it would delete"),
    ),
    "mean": (
        Flag("steps", "", "the steps of each run, such as 80,90,100; empty: all"),
        Flag("out", "runs/mean", "folder of the new run"),
    ),
}
ASK = ("--help", "-h", "--version")
LISTED = 20  # arrays that `diff` lists
LOOKS = 5  # how often `verify` looks again where all steps were deleted meanwhile


@cli.command
def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 2 for what cannot work, with one line on stderr; 74 where `verify` finds
    damage, or a place cannot be read."""
    command, subjects, flags = parse(argv)
    with steps.read_errors(" or ".join(str(each.step or each.directory) for each in subjects)):
        return _COMMANDS[command](*subjects, flags) or ExitStatus.FINISHED


def parse(argv: Sequence[str]) -> tuple[str, list[Subject], types.SimpleNamespace]:
    """The command, its places, and its flags; ends with status 2 for what is none. Raises RunError
    for a place without checkpoints."""
    command, flagged = command_of(argv)
    if command not in FLAGS:
        asked = [word for word in argv if word in ASK]
        if asked or not argv:
            read_flags(asked or ["--help"], DESCRIPTION, (), with_config=False)  # ends here
        raise cli.FlagsError(
            f"{command or argv[0]!r} is no command of jaxtrain checkpoint: use one of "
            f"{', '.join(FLAGS)}, such as jaxtrain checkpoint ls DIR"
        )

    def check(flags: types.SimpleNamespace) -> tuple[list[Subject], types.SimpleNamespace]:
        count, what, words = (
            (2, "two steps or runs", "A B") if command == "diff" else (1, "one folder", "DIR")
        )
        if len(flags.words) != count and command != "mean":
            raise UsageError(
                f"{command} is about {what}, not {len(flags.words)}",
                advice=f"jaxtrain checkpoint {command} {words}",
            )
        subjects = list(map(subject.find, flags.words))
        if command == "prune":
            _check_prune(subjects[0], flags)
        elif getattr(flags, "step", -1) >= 0:
            _step_of(subjects[0], flags.step)
        return subjects, flags

    return command, *cli.checked_flags(flagged, DESCRIPTION, FLAGS[command], check, words=True)


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
    others = list(argv)
    if words:
        others.remove(words[0])
    return "".join(words[:1]), others


# --- ls and verify --------------------------------------------------------------------------------


def ls(of: Subject, flags: types.SimpleNamespace) -> None:
    losses = retention.read_losses(of.directory, streams.remark)
    table = [("step", "size", "saved", METRICS["validation_loss"].title, "")]
    for folder in of.folders():
        loss = losses.get(int(folder.name)) if folder.name.isdigit() else None
        table.append(
            (
                folder.name,
                reading.in_units(stores.size_of(folder)),
                _saved_at(folder),
                "" if loss is None else f"{loss:.4f}",
                steps.fault(folder) or "complete",
            )
        )
    if len(table) == 1:
        print(f"{of.directory} has no checkpoint")
    else:
        streams.log(*streams.aligned(table, "<>>><"))
    for path in of.others():
        print(
            f"{path.name}  {reading.in_units(stores.size_of(path))}"
            f"{'' if steps.BROKEN in path.name else '  not finished'}"
        )


def _saved_at(folder: epath.Path) -> str:
    """The local time of a step's save; "" if it is not known. A store's folders have no times, but
    each step in one has Orbax's file."""
    try:
        if stores.scheme_of(folder):
            metadata = parse_json(stores.read_within(folder, "_CHECKPOINT_METADATA"))
            seconds = metadata["commit_timestamp_nsecs"] / 1e9
        else:
            seconds = os.lstat(folder).st_mtime
        return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return ""  # it is damaged, or was deleted meanwhile


def verify(of: Subject, flags: types.SimpleNamespace) -> ExitStatus:
    if flags.step >= 0:
        of = Subject(of.directory, _step_of(of, flags.step))
    verified: dict[str, int] = {}  # step → bytes
    damaged: list[str] = []
    seen: set[str] = set()
    # A run may go on meanwhile, and delete every step of the first look before it is read. Then the
    # folder is looked at again, and only its newest step is read, which lives longest.
    for newest_first in (False, *[True] * LOOKS):
        folders = [folder for folder in of.folders() if folder.name not in seen]
        seen |= {folder.name for folder in folders}
        for folder in folders[:: -1 if newest_first else 1]:
            size = stores.size_of(folder)
            damage = _verify(folder)
            if damage is None:
                print(f"{folder.name}: was deleted while it was read", flush=True)
                continue
            verified[folder.name] = size
            result = (
                f"{len(damage)} damaged" if damage else f"complete, {reading.in_units(size)} read"
            )
            print(
                *(f"{folder}: {why}" for why in damage),
                f"{folder.name}: {result}",
                sep="\n",
                flush=True,
            )
            if damage:
                damaged.append(folder.name)
            if newest_first:
                break
        if verified:
            break
    if not verified:
        others = ", ".join(path.name for path in of.others())
        raise NoCheckpointsError(
            f"{of.directory} has no checkpoint to verify{', only ' * bool(others)}{others}"
        )
    result = f"{', '.join(damaged)} damaged" if damaged else "all complete"
    print(
        f"verified {len(verified)} step{'s'[: len(verified) > 1]}, "
        f"{reading.in_units(sum(verified.values()))}: {result}",
        flush=True,
    )
    return ExitStatus.STORAGE if damaged else ExitStatus.FINISHED


def _verify(folder: epath.Path) -> list[str] | None:
    """Calls `reading.verify`, and shows on a terminal how much of the step is read."""
    line = streams.TerminalLine(sys.stderr)
    damage = reading.verify(
        folder,
        lambda done, total: line.draw(
            f"{folder.name}: {reading.in_units(done)} of {reading.in_units(total)}"
        ),
    )
    line.clear()
    return damage


# --- show and diff --------------------------------------------------------------------------------


def _step_of(of: Subject, step: int = -1) -> epath.Path:
    """The folder of the step that is meant: the only one, or that of this number, or for −1 the
    newest complete one."""
    if step < 0 and of.step:
        return of.step
    if step < 0:
        choice = steps.choose(of.directory, steps.TO_TRAIN)
        if choice.step is None:
            rest = f": {choice}" if choice.unrecognized else ""
            raise steps.CheckpointError(f"{of.directory} has no complete checkpoint{rest}")
        return of.directory / str(choice.step)
    present = {folder.name: folder for folder in of.folders()}
    if str(step) not in present:
        place = f"{of.step}, which is a step" if of.step else of.directory
        numbers = [int(name) for name in present if name.isdigit()]
        words = f" (it has {', '.join(map(str, numbers))})" if numbers else ""
        raise UsageError(
            f"--step={step} is no checkpoint of {place}{words}",
            {"step": min(numbers, key=lambda other: abs(other - step), default=-1)},
        )
    return present[str(step)]


def show(of: Subject, flags: types.SimpleNamespace) -> None:
    step = reading.open_step(_step_of(of, flags.step))
    meta = step.meta
    print(
        f"{step.folder}: step {meta.step}, {meta.wall_s:.0f} s of training, corpus "
        f"{meta.checksum[:12]}, tokenizer {meta.tokenizer.get('kind')}"
    )
    print("\n".join(f"  {path} = {get(step.config, path)}" for path in fields()))
    statistics = ("least", "greatest", "norm", "not finite") if flags.statistics else ()
    table: list[tuple[str, ...]] = [("array", "shape", "type", "size", *statistics)]
    for name, array in step.arrays.items():
        cells = (
            name,
            str(list(array.shape)),
            array.dtype.name,
            reading.in_units(reading.nbytes(array)),
        )
        table.append((*cells, *_statistics(array)) if flags.statistics else cells)
    streams.log(*streams.aligned(table, "<>"))
    print(
        f"{len(step.arrays)} arrays, "
        f"{reading.in_units(sum(map(reading.nbytes, step.arrays.values())))}"
    )


def _statistics(array: ts.TensorStore) -> tuple[str, str, str, str]:
    try:
        s = reading.statistics(array)
    except DatabaseError as error:
        return str(error), "", "", ""
    return f"{s.least:.4g}", f"{s.greatest:.4g}", f"{s.norm:.6g}", str(s.not_finite)


def diff(one: Subject, other: Subject, flags: types.SimpleNamespace) -> None:
    a, b = reading.open_step(_step_of(one)), reading.open_step(_step_of(other))
    print(f"a  {a.folder}: step {a.meta.step}\nb  {b.folder}: step {b.meta.step}")
    for path in fields():
        if get(a.config, path) != get(b.config, path):
            print(f"  {path}: {get(a.config, path)} → {get(b.config, path)}")
    differences: dict[str, reading.Difference] = {}
    for name in sorted({*a.arrays, *b.arrays}):
        if name not in a.arrays or name not in b.arrays:
            print(f"  {name}: in {'b' if name in b.arrays else 'a'} alone")
            continue
        kinds = [f"{x.dtype.name}{list(x.shape)}" for x in (a.arrays[name], b.arrays[name])]
        if kinds[0] != kinds[1]:
            print(f"  {name}: {kinds[0]} → {kinds[1]}")
            continue
        try:
            differences[name] = reading.difference(a.arrays[name], b.arrays[name])
        except DatabaseError as error:
            raise steps.CheckpointError(f"{name} {error} in {a.folder} or {b.folder}") from None
    differing = [item for item in differences.items() if item[1].count]
    largest = sorted(differing, key=lambda item: item[1].relative, reverse=True)
    shown = largest if flags.all else largest[:LISTED]
    if shown:
        table = [("array", "largest difference", "relative", "numbers that differ")]
        for name, d in shown:
            share = d.count / max(math.prod(a.arrays[name].shape), 1)
            table.append((name, f"{d.absolute:.4g}", f"{d.relative:.4g}", f"{share:.1%}"))
        streams.log(*streams.aligned(table, "<>"))
    rest = f", of which {len(shown)} are listed (--all lists all)"
    print(
        f"{len(differing)} arrays differ{rest if len(shown) < len(differing) else ''}; "
        f"{len(differences) - len(differing)} are the same"
    )


# --- prune ----------------------------------------------------------------------------------------


def _check_prune(of: Subject, flags: types.SimpleNamespace) -> None:
    """Raises UsageError if `prune` has nothing to go by, or would delete through a link of a
    run."""
    if of.step or (
        os.path.islink(of.directory)  # the folder that the user names may be a link
        and of.directory == stores.folder(flags.words[0]) / "checkpoints"
    ):
        given = [
            flag_text(f.name, getattr(flags, f.name))
            for f in FLAGS["prune"]
            if getattr(flags, f.name) != f.default
        ]
        target = str(of.directory) if of.step else os.path.realpath(of.directory)
        words = " ".join([shlex.quote(target), *(given or ["--keep=3"])])
        rule = (
            f"prune is about all steps of a run, and {str(of.step)!r} is one of them"
            if of.step
            else f"{str(of.directory)!r} is a link, through which prune deletes nothing"
        )
        raise UsageError(rule, advice=f"jaxtrain checkpoint prune {words}")
    if not (flags.keep or flags.broken or flags.unfinished):
        raise UsageError(
            "prune without a policy deletes nothing",
            {"keep": 3},
            advice="(and --keep_every, --keep_best), --broken=true or --unfinished=true",
        )


def _to_delete(of: Subject, flags: types.SimpleNamespace) -> dict[epath.Path, str]:
    """The folders that `prune` deletes, each with its reason."""
    reasons: dict[epath.Path, str] = {}
    if flags.keep:
        faults = {each: steps.fault(each) for each in of.folders()}
        for each in filter(faults.get, faults):
            streams.remark(f"note: {each} is left: {faults[each]}")
        complete = {int(each.name): each for each, why in faults.items() if not why}
        policy = retention.Retention(flags.keep, flags.keep_every, flags.keep_best)
        retained = policy.retained(complete, retention.read_losses(of.directory, streams.remark))
        reasons |= {each: "not kept" for step, each in complete.items() if step not in retained}
    if flags.broken:
        reasons |= {
            path: "set aside as broken" for path in of.others() if steps.BROKEN in path.name
        }
    if flags.unfinished:
        reasons |= {path: "not finished" for path in of.others() if steps.BROKEN not in path.name}
    return reasons


def prune(of: Subject, flags: types.SimpleNamespace) -> None:
    run = of.directory.parent if of.directory.name == "checkpoints" else of.directory
    try:
        with contextlib.ExitStack() as locked:
            # What to delete is decided under the lock: a run would save and delete meanwhile. A
            # store has no locks.
            if flags.yes and not stores.scheme_of(run):
                lock = RunLock(run)
                lock.take()
                locked.callback(lock.release)
            reasons = _to_delete(of, flags)
            total = reading.in_units(sum(map(stores.size_of, reasons)))
            for folder, why in reasons.items():
                print(
                    f"{'deleting' if flags.yes else 'would delete'} {folder} ({why}, "
                    f"{reading.in_units(stores.size_of(folder))})",
                    flush=True,
                )
            if flags.yes:
                retention.delete(reasons)
                retention.note_losses(of.directory, steps.step_numbers(of.directory))
    except OSError as error:
        raise steps.CheckpointError(
            f"{of.directory}: not all is deleted ({error.strerror})"
        ) from None
    done = "deleted" if flags.yes else "would be deleted: --yes deletes them"
    print(f"{len(reasons)} folders, {total} {done}" if reasons else "nothing to delete")


# --- mean -----------------------------------------------------------------------------------------


# the new run's: parameters of one replica, its own folder
OF_ONE_RUN = {
    "optimizer.ema_decay": 0.0,
    "train.eval_ema": False,
    "train.diloco_inner_steps": 0,
    "checkpoint.local_every": 0,
    **dict.fromkeys(("train.init_from", "train.fork_from"), ""),
    **dict.fromkeys(("checkpoint.directory", "checkpoint.local"), ""),
}


def mean(*subjects_and_flags: Any) -> None:
    *subjects, flags = subjects_and_flags
    folders: list[epath.Path] = []
    for place, of in zip(flags.words, subjects, strict=True):
        own_code.distrust(place)
        present = {folder.name: folder for folder in of.folders()}
        wanted = [*present] if of.step or not flags.steps else flags.steps.split(",")
        if missing := [step for step in wanted if step not in present]:
            raise cli.FlagsError(
                f"{of.directory} has no step {missing[0]!r}: use "
                f"--steps={','.join([*present][-3:])}"
            )
        folders += [present[step] for step in wanted]
    if len(folders) < 2:
        raise cli.FlagsError(
            f"mean is about several steps, not {len(folders)}: use jaxtrain checkpoint mean DIR "
            "--steps=A,B"
        )
    if os.path.lexists(flags.out) or stores.scheme_of(flags.out):
        raise cli.FlagsError(f"--out={flags.out} is no new folder: use another name")
    opened = [reading.open_step(folder) for folder in folders]
    config = replace(opened[0].config, OF_ONE_RUN)
    places.check(config, flags.out)
    try:
        for folder, step in zip(folders, opened, strict=True):
            for violation in violations(opened[0].config, step.config):
                if (field := violation.field).startswith("model."):
                    raise cli.FlagsError(
                        f"{folder} has {field}={get(step.config, field)!r}, and {folders[0]} "
                        f"{get(opened[0].config, field)!r}: use steps of one model"
                    )
            if (damage := _verify(folder)) != []:
                raise steps.CheckpointError(f"{folder}: {(damage or ['it was deleted'])[0]}")
        from jaxtrain.convert import save_first_step, start_on_host

        start_on_host()
        from jaxtrain.checkpoint.restoring import mean_state

        save_first_step(
            pathlib.Path(flags.out),
            config,
            opened[0].meta.tokenizer,
            lambda: mean_state(opened, config.to_store()),
        )
    except own_code.OwnCodeError as error:  # of its optimizer, or of a layer
        raise cli.FlagsError(f"{folders[0]}: code of one's own {error}") from None
    print(f"{flags.out}: step 0 with the mean of {', '.join(map(str, folders))}")


# A command takes its places and its flags, and returns an exit status if it is not FINISHED.
_COMMANDS: Mapping[str, Callable[..., ExitStatus | None]] = {
    "ls": ls,
    "verify": verify,
    "show": show,
    "diff": diff,
    "prune": prune,
    "mean": mean,
}


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
