#!/usr/bin/env python
"""Every command of README.md and docs/features.md, run to its promised end in a folder of its own,
but for scripts/test.sh.

    tests/by_hand/try_docs.sh [--part=K/N] [--list] [--folder=runs/try_docs] [--patience=1800]

A command that trains takes 20 steps, 20 further ones where its run has some, and has to have logged
the last of them; --replay does the last step of a run again; a file that a flag names has to be
there afterwards. What needs a GPU, or a compiler that is not installed, may end in a refusal of one
line.

Commands that use each other's files are one group, and stand in one part. Folders of runs and logs
are in FOLDER/COMMIT, and results.jsonl there says what has passed: started again, the command goes
on with the rest. The exit status is 1 if a command failed.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from jaxtrain.run import streams  # noqa: E402 (the path comes first)
from jaxtrain.run.metrics import read_metrics  # noqa: E402

DOCUMENTS = ("README.md", "docs/features.md")
PROGRAMS, LEFT_OUT = ("python ", "scripts/"), ("scripts/install.sh", "scripts/test.sh")
STEPS = 20
# a GPU or a compiler may be missing
MAY_BE_REFUSED = ("benchmarks/gpu.py", "benchmarks/long_context.py")
TRAINING = ("scripts/train.sh", "jaxtrain.train", "jaxtrain.launch")
REFUSED = 2  # the exit status of a refusal


# --- the commands ---------------------------------------------------------------------------------


def fenced(text: str) -> list[str]:
    """The lines of a document's blocks of commands."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def tabled(text: str) -> list[str]:
    """The commands in the last column of a document's tables."""
    return re.findall(r"^\| [^|]+ \| `([^`]+)` \|$", text, re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command as a document has it, without its comment."""

    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def program(self) -> str:
        """A script, or a module of the package: scripts/train.sh, jaxtrain.generate."""
        python, *rest = self.words
        return python if python != "python" else rest[rest[0] == "-m"]

    def value(self, flag: str) -> str:
        """The value of a flag; "" where it is not given or has none."""
        return next(
            (
                word.partition("=")[2]
                for word in self.words
                if word.partition("=")[0] == f"--{flag}"
            ),
            "",
        )

    @property
    def trains(self) -> bool:
        return self.program in TRAINING and not any(
            word.startswith(("--dry_run", "--replay")) for word in self.words
        )

    @property
    def workdir(self) -> str:
        """The folder of the run that a command trains or uses; "" where there is none."""
        if self.program in TRAINING and "--dry_run" not in self.words:
            return (
                self.value("workdir") or f"runs/{pathlib.Path(self.value('config') or 'tiny').stem}"
            )
        return self.value("workdir") or next(
            (word for word in self.words if word.startswith("runs/")), ""
        )

    @property
    def group(self) -> str:
        """What commands of one group have in common: a table of one's own, or the folder of a
        run; published models are those of one run."""
        if re.search(r"init_from=|_hf ", self.text):
            return "runs/tiny"
        table = re.search(r"[\w/]+\.csv", self.text)
        return table[0] if table else self.workdir or self.text

    def files(self) -> list[str]:
        """The files that a command is to write, by its flags."""
        return [
            self.value(flag)
            for flag in ("csv", "svg", "png", "json", "out")
            if "." in self.value(flag)
        ]


def commands() -> list[Command]:
    """All that are tried, each once, in the order of the documents."""
    texts = [(ROOT / name).read_text() for name in DOCUMENTS]
    lines = [re.sub(r"\s+# .*", "", line) for text in texts for line in fenced(text) + tabled(text)]
    return [
        Command(line)
        for line in dict.fromkeys(lines)
        if line.startswith(PROGRAMS) and not line.startswith(LEFT_OUT)
    ]


def in_part(command: Command, number: int, parts: int) -> bool:
    """Whether a command belongs to a part. Its group is in one, and in the same one whatever other
    commands there are."""
    return zlib.crc32(command.group.encode()) % parts == number - 1


# --- a trial --------------------------------------------------------------------------------------


def last_step(folder: pathlib.Path, command: Command) -> int:
    """The last step that the command's run has logged; 0 if none is."""
    return max(
        (record["step"] for record in read_metrics(folder / command.workdir) if "loss" in record),
        default=0,
    )


def words_to_run(command: Command, folder: pathlib.Path) -> list[str]:
    """The command's words for a working folder elsewhere, with the number of steps that a trial
    takes."""
    words = [
        str(ROOT / word) if word.startswith(("scripts/", "benchmarks/")) else word
        for word in command.words
    ]
    words = [sys.executable if word == "python" else word for word in words]
    step = last_step(folder, command) if command.workdir else 0
    if command.value("replay"):  # of the step with which the run's learning rate came down
        words = [f"--replay={step}" if word.startswith("--replay=") else word for word in words] + [
            f"--config.train.steps={step}"
        ]
    return words + ([f"--config.train.steps={step + STEPS}"] if command.trains else [])


def prepare(folder: pathlib.Path) -> None:
    """A working folder: what commands of the documents find beside them."""
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    for name in DOCUMENTS:
        (folder / "texts" / name.replace("/", "_")).with_suffix(".txt").write_text(
            (ROOT / name).read_text() * 8
        )
    (folder / "README.md").write_text((ROOT / "README.md").read_text())


@dataclasses.dataclass(frozen=True)
class Trial:
    """What came of a command. wrong: why it failed, in one line; "" where it ended as promised."""

    command: str
    wrong: str
    seconds: float


def run(command: Command, folder: pathlib.Path, log: pathlib.Path, patience: float) -> Trial:
    """Runs a command in a working folder; what it prints goes to files."""
    words, step = (
        words_to_run(command, folder),
        last_step(folder, command) if command.workdir else 0,
    )
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": paths,
        "JAX_PLATFORMS": "cpu",
        "PYTHON": sys.executable,
    }
    began, errors = time.monotonic(), log.with_suffix(".err")
    with log.open("w") as out, errors.open("w") as err:
        try:
            done = subprocess.run(
                words,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=patience,
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = None
    ended = Ended(status, log.read_text(errors="replace"), errors.read_text(errors="replace"))
    wrong = (
        what_is_wrong(command, folder, ended, step)
        if status is not None
        else f"no end after {patience:g} s"
    )
    return Trial(
        command.text,
        f"{wrong}: {ended.last_line[:300]}" if wrong else "",
        round(time.monotonic() - began, 1),
    )


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process's exit status, None if it was ended, and what it printed on its two streams."""

    status: int | None
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return next(
            (
                line
                for line in reversed((self.err.strip() or self.out).splitlines())
                if line.strip()
            ),
            "nothing was printed",
        )

    @property
    def refused(self) -> bool:
        """Whether it ended in a refusal of one line."""
        return (
            self.status == REFUSED and self.err.startswith("error: ") and self.err.count("\n") == 1
        )


def what_is_wrong(command: Command, folder: pathlib.Path, ended: Ended, step: int) -> str:
    """Why a command has not ended as promised; "" where it has. step: the last one of its run
    before."""
    if "Traceback" in ended.out + ended.err:
        return f"a traceback, status {ended.status}"
    if command.program in MAY_BE_REFUSED and ended.refused:
        return ""
    if ended.status:
        return f"status {ended.status}"
    if not ended.out.strip():
        return "nothing on standard output"
    if command.trains and last_step(folder, command) != step + STEPS:
        return f"step {step + STEPS} is not logged in {command.workdir}"
    if "--json" in command.words and not is_json(ended.out):
        return "standard output is not a JSON object"
    missing = [name for name in command.files() if not (folder / name).is_file()]
    return f"{missing[0]} was not written" if missing else ""


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


# --- all of them ----------------------------------------------------------------------------------


def commit() -> str:
    """The commit, with a hash of what has been changed since; "" outside of a repository, where
    nothing is remembered."""
    git = lambda *words: (
        subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True).stdout
    )
    changes = git("diff", "HEAD")
    return git("rev-parse", "--short=12", "HEAD").decode().strip() + (
        f"-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else ""
    )


def try_all(
    chosen: list[Command], folder: pathlib.Path, patience: float, remembered: bool = True
) -> list[Trial]:
    """Runs the commands that have not passed yet, with a line for each; those that failed."""
    work, logs, results = folder / "work", folder / "logs", folder / "results.jsonl"
    logs.mkdir(parents=True, exist_ok=True)
    prepare(work)
    lines = (
        map(json.loads, results.read_text().splitlines()) if remembered and results.exists() else ()
    )
    passed = {line["command"] for line in lines if not line["wrong"]}
    failed = []
    for command in chosen:
        if command.text in passed:
            print(f"before  {'':7}  {command.text}", flush=True)
            continue
        log = logs / f"{zlib.crc32(command.text.encode()):08x}.log"
        trial = run(command, work, log, patience)
        with results.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(trial)) + "\n")
        print(
            f"{'failed' if trial.wrong else 'ok':6}  {trial.seconds:5.0f} s  {command.text}",
            flush=True,
        )
        if trial.wrong:
            failed.append(trial)
            print(f"                 {trial.wrong} ({log})", flush=True)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} commands end as promised", flush=True)
    return failed


def parse_part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text} is no part such as 2/4")
    return int(number), int(parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        type=parse_part,
        default=(1, 1),
        metavar="K/N",
        help="the K-th of N parts of the commands",
    )
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=ROOT / "runs" / "try_docs",
        help="of runs, logs and results, by commit",
    )
    parser.add_argument(
        "--patience", type=float, default=1800.0, help="seconds that a command may take"
    )
    options = parser.parse_args()
    chosen = [command for command in commands() if in_part(command, *options.part)]
    if options.list:
        print("\n".join(command.text for command in chosen))
        return 0
    name = commit()
    return int(
        bool(
            try_all(
                chosen,
                (options.folder / (name or "no commit")).resolve(),
                options.patience,
                remembered=bool(name),
            )
        )
    )


if __name__ == "__main__":
    sys.exit(streams.run(lambda _: main(), sys.argv[1:]))
