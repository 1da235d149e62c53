#!/usr/bin/env python
"""Random damages, links, copies and permissions in the checkpoints of a tiny run.

    tests/by_hand/fuzz_checkpoints.py [--seed=N] [--cases=300] [--first=0] [--real_every=5]
                                      [--folder=F]

A run of three checkpoints is trained once. Each case is a copy of it, in which one to three damages
are drawn: files that are cut, flipped, deleted, extended, swapped between steps, or replaced by
folders, FIFOs, devices and links; manifests and metas that are written anew with right checksums;
steps that are copied, renamed, linked or taken from another run; permissions that are taken away.
Then `checkpoint ls`, `verify`, `show` and `prune` run in this process, and the choices of a step to
resume and to generate from. Of some cases real commands follow: `generate`, `convert to_hf`,
`train`.

Each of them ends within 20 s, below 2 GB more than before, with a documented status and without a
traceback. Nothing outside of the run changes. They agree on which steps are complete, and no step
that is complete is deleted but by `prune`, which keeps the newest. Cases that failed stay in
FOLDER, and the exit status is 1 if there are any.

Root may read everything, so that the script gives up that capability first (by setpriv).
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402, F401 (the path comes first)
from etils import epath  # noqa: E402

from jaxtrain.checkpoint import (  # noqa: E402
    __main__ as command,
    manifest,
    steps,
)
from jaxtrain.checkpoint.manifest import DatabaseError, ManifestError  # noqa: E402
from jaxtrain.checkpoint.resuming import choose_together  # noqa: E402
from jaxtrain.config.errors import UsageError  # noqa: E402
from jaxtrain.generate_command import find_checkpoint  # noqa: E402
from jaxtrain.run import streams  # noqa: E402
from jaxtrain.run.exit_status import RunError  # noqa: E402

LIMIT_S, LIMIT_BYTES, HANG_S = 20, 2 * 10**9, 120
STATUSES = {0, 2, 74}
CAPABILITIES = "-dac_override,-dac_read_search"
TINY = (
    "--cpu_devices=1 --config.model.layers=2 --config.model.width=32 --config.model.heads=2 "
    "--config.model.mlp_width=48 --config.data.sequence_length=16 --config.data.batch_size=8 "
    "--config.pipeline.schedule=1f1b --config.pipeline.repeats=0 --config.pipeline.microbatches=2 "
    "--config.mesh.model=1 --config.mesh.stage=1 --config.mesh.data=1 "
    "--config.train.sample_tokens=0 --config.metrics.tensorboard=false "
    "--config.checkpoint.every=3 --config.checkpoint.keep=10"
).split()
DEEP, LONG = "[" * 200_000, '{"3": 1' + "0" * 400 + ', "step": 1' + "0" * 400 + "}"


# --- damages --------------------------------------------------------------------------------------


class Damages:
    """Draws damages of a run. outside: a folder with another run, which nothing may change."""

    def __init__(self, draw: random.Random, run: pathlib.Path, outside: pathlib.Path):
        self.draw, self.run, self.outside = draw, run, outside
        self.steps = run / "checkpoints"

    def own(self, path: pathlib.Path) -> pathlib.Path:
        """A path at which a damage changes the run alone. Raises OSError for a link, what lies
        behind one, a file that has another name, and one that has grown already."""
        home = os.path.realpath(self.run)
        is_own = os.path.realpath(path) == os.path.join(home, path.relative_to(self.run))
        if not is_own or (
            path.is_file() and (path.stat().st_nlink > 1 or path.stat().st_size > 10**9)
        ):
            raise OSError(f"{path} is not the run's own")
        return path

    def step(self) -> pathlib.Path:
        return self.own(self.steps / self.draw.choice(["3", "6", "9", "9"]))

    def file(self) -> pathlib.Path:
        """A file of a step, the small ones as often as those of the database; or one beside."""
        files = [path for path in sorted(self.step().rglob("*")) if path.is_file()]
        if not files or self.draw.random() < 0.1:
            return self.own(self.steps / "validation_losses.json")
        special = [path for path in files if path.name in ("manifest.json", "metadata")]
        return self.own(self.draw.choice(special or files if self.draw.random() < 0.5 else files))

    def cut(self) -> None:
        path = self.file()
        os.truncate(path, self.draw.randrange(max(path.stat().st_size, 1)))

    def flip(self) -> None:
        path = self.file()
        content = bytearray(path.read_bytes())
        for _ in range(self.draw.choice([1, 1, 5])):
            if content:
                content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        path.write_bytes(content)

    def delete(self) -> None:
        self.file().unlink()

    def delete_folder(self) -> None:
        folders = [path for path in sorted(self.step().rglob("*")) if path.is_dir()]
        shutil.rmtree(self.own(self.draw.choice(folders)))

    def extend(self) -> None:
        with self.file().open("ab") as file:
            file.write(bytes(self.draw.choice([1, 100])))

    def grow(self) -> None:
        os.truncate(self.file(), 10**12)

    def swap(self) -> None:
        path = self.file()
        parts = path.relative_to(self.steps).parts
        twins = list((self.steps / self.draw.choice("369")).rglob(parts[-1]))
        twin = self.own(self.draw.choice(twins or [self.file()]))
        content = path.read_bytes()
        path.write_bytes(twin.read_bytes())
        twin.write_bytes(content)

    def replace(self) -> None:
        path = self.draw.choice([self.file, self.file, self.step])()
        twin = self.outside / "checkpoints" / "9"
        inside = path.relative_to(self.steps).parts[1:]
        secret = self.outside / "secret"
        links = [twin.joinpath(*inside), "/dev/zero", "/nowhere", path.name, secret, ".."]
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        kind = self.draw.randrange(9)
        if kind < 6:
            path.symlink_to(links[kind])
        elif kind == 6:
            os.mkfifo(path)
        elif kind == 7:
            path.mkdir()
        else:
            os.link(self.outside / "secret", path)

    def copy(self) -> None:
        source = self.draw.choice([self.step(), self.outside / "checkpoints" / "9"])
        name = self.draw.choice(["1", "4", "12", "109", "109", "9999999999", "99999999999", "09"])
        shutil.copytree(source, self.steps / name, symlinks=True)

    def rename(self) -> None:
        self.step().rename(self.steps / self.draw.choice(["2", "10", "109", "9.broken-1", "x"]))

    def link_step(self) -> None:
        twin = self.outside / "checkpoints" / "9"
        target = self.draw.choice([twin, self.outside, "9", "3", "/usr", "nothing"])
        names = ["1", "10", "12.orbax-checkpoint-tmp", "9.broken-1", "link"]
        (self.steps / self.draw.choice(names)).symlink_to(target)

    def permission(self) -> None:
        everything = [self.steps, *sorted(self.steps.rglob("*"))]
        path = self.draw.choice([self.step(), self.step(), *self.draw.sample(everything[1:], 3)])
        self.own(path).chmod(self.draw.choice([0, 0, 0o400, 0o100, 0o500]))

    def json(self) -> None:
        names = ["manifest.json", "meta/metadata", "_CHECKPOINT_METADATA"]
        places = [self.step() / name for name in names]
        places += [self.steps / "validation_losses.json", self.run / "config.json"]
        self.own(self.draw.choice(places)).write_text(
            self.draw.choice([DEEP, LONG, "[]", "1", "null", ""])
        )

    def meta(self) -> None:
        """A meta with another value, in a step that is sealed again."""
        step = self.step()
        path = self.own(step / "meta" / "metadata")
        meta = json.loads(path.read_text())
        key = self.draw.choice([*meta, "config.model", "config.data"])
        value = self.draw.choice(
            [None, -1, 10**30, "x" * 10**5, [], {}, {"a": {"b": 1}}, True, 1.5]
        )
        at = meta["config"] if "." in key else meta
        at[key.rpartition(".")[2]] = value
        path.write_text(json.dumps(meta))
        self.own(step / "manifest.json").unlink()
        manifest.write(epath.Path(step))

    def names(self) -> None:
        """A manifest with right checksums that names a file outside, or has odd values."""
        step = self.step()
        files = dict(manifest.read(epath.Path(step)))
        name = self.draw.choice(["/etc/passwd", "../../../outside/secret", "/dev/zero", "", "\n"])
        stored = self.draw.choice([(0, 0), (10**30, 1), ("x", 1), (-1, -1), (None, None)])
        files[name] = manifest.StoredFile(*stored, self.draw.choice([True, False]))  # type: ignore
        self.own(step / "manifest.json").write_bytes(manifest._encode(files))

    def entry(self) -> None:
        names = ["notes", "a\nb", "\udcff", "7", "12.orbax-checkpoint-tmp", "3.broken-2", "é"]
        path = self.steps / self.draw.choice(names)
        path.mkdir() if self.draw.random() < 0.5 else self.own(path).write_text("mine")

    def add_file(self) -> None:
        name = self.draw.choice(["notes", "state/x", "meta/\udcff"])
        self.own(self.step() / name).write_text("mine")

    def all_steps(self) -> None:
        self.steps.rename(self.run / "elsewhere")
        if self.draw.random() < 0.7:
            self.steps.symlink_to(self.draw.choice(["elsewhere", self.outside / "checkpoints"]))

    def apply(self) -> str:
        """Applies one, and returns its name; "" for one that the damages before leave no room
        for."""
        kinds: list[Callable[[], None]] = [
            *(self.cut, self.flip, self.delete, self.delete_folder, self.extend, self.grow),
            *(self.swap, self.replace, self.replace, self.replace, self.copy, self.copy),
            *(self.rename, self.link_step, self.permission, self.permission, self.json, self.meta),
            *(self.names, self.entry, self.add_file),
        ]
        if self.steps.is_symlink():
            return ""
        kind = self.draw.choice(kinds + [self.all_steps] * (self.draw.random() < 0.3))
        try:
            kind()
        except (OSError, ValueError, LookupError, TypeError, ManifestError, DatabaseError):
            return ""
        return kind.__name__


# --- what has happened ----------------------------------------------------------------------------


def digest(folder: pathlib.Path) -> str:
    """A digest of all that is in a folder and may be read, whose links are not followed."""
    result = hashlib.sha256()
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted([*folders, *names]):
            path, content = pathlib.Path(place, name), b""
            with contextlib.suppress(PermissionError):
                status = path.lstat()
                result.update(os.fsencode(path.relative_to(folder)) + b"\0%o" % status.st_mode)
                if path.is_symlink():
                    content = os.fsencode(os.readlink(path))
                elif path.is_file():
                    result.update(b"%d" % status.st_size)
                    with path.open("rb") as file:
                        content = file.read(10**6)
            result.update(content)
    return result.hexdigest()


class Judged:
    """Runs commands, and collects what is wrong with how they ended."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def inside(self, name: str, do: Callable[[], object]) -> tuple[object, str, str]:
        """(result, stdout, stderr) of a call in this process; the result of a RunError is its
        status."""
        out, err, began = io.StringIO(), io.StringIO(), time.monotonic()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result: object = None
        signal.alarm(LIMIT_S)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    result = do()
                except SystemExit as end:
                    result = end.code
                except (RunError, UsageError) as error:
                    result = int(getattr(error, "status", 2))
                    if "\n" in str(error) or len(str(error)) > 2000:
                        self.wrong.append(f"{name}: not one line: {str(error)[:300]!r}")
        except BaseException:
            self.wrong.append(f"{name}: {traceback.format_exc()[-1500:]}")
        finally:
            signal.alarm(0)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        if grown > LIMIT_BYTES or time.monotonic() - began > LIMIT_S:
            self.wrong.append(f"{name}: {grown:,} bytes, {time.monotonic() - began:.0f} s")
        self.text(name, err.getvalue())
        return result, out.getvalue(), err.getvalue()

    def text(self, name: str, err: str) -> None:
        if "Traceback" in err or sum(line.startswith("error:") for line in err.splitlines()) > 1:
            self.wrong.append(f"{name}: {err[-1500:]}")

    def status(self, name: str, *words: str) -> tuple[int, list[str]]:
        """(status, lines) of a `checkpoint` command."""
        result, out, _ = self.inside(name, lambda: streams.run(command.main, list(words)))
        if result not in STATUSES:
            self.wrong.append(f"{name}: status {result}")
        return (result if isinstance(result, int) else 1), out.splitlines()

    def real(self, name: str, *words: str) -> None:
        """A real command. Its limit counts processor time, for others may use the machine."""
        before = _of_children()
        try:
            ended = subprocess.run(
                [sys.executable, "-m", *words], capture_output=True, timeout=HANG_S, cwd=ROOT
            )
        except subprocess.TimeoutExpired:
            self.wrong.append(f"real {name}: longer than {HANG_S} s")
            return
        if _of_children() > before + LIMIT_S:
            self.wrong.append(f"real {name}: longer than {LIMIT_S} s")
        err = ended.stderr.decode(errors="replace")
        self.text(f"real {name}", err)
        if ended.returncode not in STATUSES:
            self.wrong.append(f"real {name}: status {ended.returncode}: {err[-1500:]}")


def _of_children() -> float:
    """Seconds of processor time of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def complete_steps(run: pathlib.Path) -> set[int]:
    """The steps that are complete, read byte by byte."""
    folder = epath.Path(run / "checkpoints")
    quiet = lambda done, total: None
    with contextlib.suppress(OSError):
        return {
            step
            for step in steps.step_numbers(folder)
            if command.reading.verify(folder / str(step), quiet) == []
        }
    return set()


def judge(run: pathlib.Path, outside: pathlib.Path) -> list[str]:
    """What is wrong with what the commands do in a run's folder."""
    judged, before = Judged(), digest(outside)
    whole = complete_steps(run)
    held = digest(run)
    status, lines = judged.status("ls", "ls", str(run))
    listed = {line.split()[0] for line in lines[1:] if line.endswith("complete")}
    complete = {int(name) for name in listed if name.isdigit()}
    verified, lines = judged.status("verify", "verify", str(run))
    intact = {int(line.split(":")[0]) for line in lines if ": complete, " in line}
    judged.status("show", "show", str(run))
    resumed, _, _ = judged.inside("resume", lambda: choose_together(run / "checkpoints"))
    used, _, _ = judged.inside("generate", lambda: find_checkpoint(str(run)))
    if digest(run) != held:
        judged.wrong.append("a command that only reads has changed the run")
    if status == verified == 0 and not intact <= complete:
        judged.wrong.append(f"ls {complete}, verify {intact}")
    if intact != whole and status == 0 and not (run / "checkpoints").is_symlink():
        judged.wrong.append(f"verify {intact}, complete {whole}")
    if status == 0 and isinstance(resumed, steps.StepChoice):
        newest = max(complete, default=None)
        if resumed.step != newest:
            judged.wrong.append(f"ls has {newest}, a run resumes {resumed.step}: {resumed}")
        if isinstance(used, tuple) and used[1] != newest:
            judged.wrong.append(f"ls has {newest}, generate takes {used[1]}")
    judged.status("prune", "prune", str(run), "--keep=2", "--broken", "--unfinished")
    if digest(run) != held:
        judged.wrong.append("prune without --yes has changed the run")
    judged.status("prune --yes", "prune", str(run), "--keep=2", "--broken", "--unfinished", "--yes")
    if not (run / "checkpoints").is_symlink():
        kept = sorted(complete & whole)[-2:] if complete == whole else sorted(whole)[-1:]
        if complete == whole and not set(kept) <= complete_steps(run):
            judged.wrong.append(f"prune has deleted of {kept}")
    if digest(outside) != before:
        judged.wrong.append("something outside of the run has changed")
    return judged.wrong


def judge_real(work: pathlib.Path, outside: pathlib.Path) -> list[str]:
    """What is wrong with what real commands do in a run's folder."""
    judged, before, whole = Judged(), digest(outside), complete_steps(work)
    judged.real("ls", "jaxtrain.checkpoint", "ls", str(work))
    judged.real(
        *("generate", "jaxtrain.generate", f"--workdir={work}", "--prompt=ab"),
        *("--tokens=3", "--cpu_devices=1"),
    )
    judged.real("to_hf", "jaxtrain.convert", "to_hf", f"--workdir={work}", f"{work}.hf")
    words = [f"--workdir={work}", "--config.train.steps=12", *TINY]
    words.append(f"--config.data.source={outside.parent / 'corpus.txt'}")
    judged.real("train", "jaxtrain.train", *words)
    if lost := whole - complete_steps(work):
        judged.wrong.append(f"train has lost {lost}")
    if digest(outside) != before:
        judged.wrong.append("something outside of the run has changed")
    return judged.wrong


def train(folder: pathlib.Path, seed: int) -> None:
    text = folder.parent / "corpus.txt"
    text.write_text("\n".join(f"a line about {number * 37 % 101}" for number in range(3000)))
    words = [f"--workdir={folder}", f"--config.data.source={text}", "--config.train.steps=9"]
    words += [*TINY, f"--config.train.seed={seed}"]
    subprocess.run([sys.executable, "-m", "jaxtrain.train", *words], check=True, cwd=ROOT)


def remove(folder: pathlib.Path) -> None:
    """A folder, whatever its permissions are."""
    for path, folders, _ in os.walk(folder):
        for name in folders:
            if not os.path.islink(os.path.join(path, name)):
                os.chmod(os.path.join(path, name), 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def make(run: pathlib.Path, seed: str) -> list[str]:
    """Makes a damaged run of a seed, and returns the names of its damages."""
    draw = random.Random(seed)
    remove(run)
    shutil.copytree(run.parent / "run", run)
    damages = Damages(draw, run, run.parent / "outside")
    return [name for _ in range(draw.choice([1, 1, 2, 3])) if (name := damages.apply())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the case to begin with")
    parser.add_argument("--real_every", type=int, default=5, help="0: no real commands")
    parser.add_argument("--folder", type=pathlib.Path)
    flags = parser.parse_args()
    folder = (flags.folder or ROOT / "runs" / "fuzz_checkpoints" / str(flags.seed)).absolute()
    if os.geteuid() == 0 and shutil.which("setpriv") and "FUZZ_UNPRIVILEGED" not in os.environ:
        without = [f"--inh-caps={CAPABILITIES}", f"--bounding-set={CAPABILITIES}"]
        os.environ["FUZZ_UNPRIVILEGED"] = "1"
        os.execvp("setpriv", ["setpriv", *without, sys.executable, *sys.argv])
    folder.mkdir(parents=True, exist_ok=True)
    for name, seed in (("run", 1), ("outside", 2)):
        if not (folder / name).exists():
            train(folder / name, seed)
    (folder / "outside" / "secret").write_text("secret")
    signal.signal(signal.SIGALRM, _late)
    command.retention.DELETION_S = 0.1
    failed = 0
    for case in range(flags.first, flags.cases):
        run = folder / f"case-{case}"
        names = make(run, f"{flags.seed} {case}")
        wrong = judge(run, folder / "outside")
        if flags.real_every > 0 and case % flags.real_every == 0:
            make(run, f"{flags.seed} {case}")
            wrong += judge_real(run, folder / "outside")
        print(
            f"{case}: {', '.join(names)}{': WRONG' * bool(wrong)}", *wrong, sep="\n  ", flush=True
        )
        failed += bool(wrong)
        if not wrong:
            for left in folder.glob(f"{run.name}*"):
                remove(left)
    print(f"{flags.cases - flags.first} cases, {failed} failed")
    return 1 if failed else 0


class Late(BaseException):
    """A command that takes too long. It is no OSError, which commands handle."""


def _late(number: int, frame: object) -> None:
    raise Late(f"longer than {LIMIT_S} s")


if __name__ == "__main__":
    sys.exit(main())
