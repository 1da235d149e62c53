"""Random command lines over all six commands, plausible and hostile values mixed: drawn and judged
here, for tests/by_hand/fuzz.py.

Whatever a command line is, it has to end by itself, with a status that docs/operations.md lists and
without a traceback. A refusal is one line, and the flags that it suggests are not refused when they
are put behind the others.
"""

import dataclasses
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from by_hand import fuzz_configs
from jaxtrain import (
    config as cfg,
    generate_command as generate,
    launch,
    show_schedule as schedule,
    train_command as train,
)
from jaxtrain.checkpoint import __main__ as checkpoint
from jaxtrain.config.flags import SHARED_FLAGS, Flag
from jaxtrain.planner.command import main as plan
from jaxtrain.planner.layer import hardware
from jaxtrain.planner.search import layout_flag
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.schedule import by_name

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # CPU-seconds that no command line that is drawn here should take
STARTED = "failed with status"  # what the launcher says of a process, in place of an error
WAIT = 240.0  # seconds after which a command is stopped: other work may share the cores
WEIGHTS = {"train": 5, "plan": 4, "schedule": 4, "checkpoint": 4, "generate": 3, "launch": 2}
NUMBERS = (
    "-1",
    "0",
    "1",
    "2",
    "3",
    "7",
    "64",
    "1000003",
    str(2**31),
    str(2**63),
    "1e308",
    "-0.0",
    "nan",
    "inf",
    "-inf",
    "1_000",
    "٣",
)
TEXTS = (
    "",
    " ",
    "x",
    "four",
    "-",
    "--",
    "None",
    "true",
    "é×→",
    "a b",
    "'",
    '"',
    "$HOME",
    "%s",
    "{}",
    "a" * 5000,
    "\udcff\udcfe",
    "\n",
)
# What the files of the folder are for: any flag may get any of them.
FILES = (
    *(
        "run",
        "run/checkpoints",
        "run/checkpoints/4",
        "run/checkpoints/2/",
        "run/checkpoints/4/state",
        "damaged",
        "empty",
        "absent",
    ),
    *(
        "corpus.txt",
        "corpus.jsonl",
        "tokens.bin",
        "huge.npy",
        "broken.jsonl.gz",
        "table.csv",
        "broken.csv",
        "hardware.json",
    ),
    *(
        "odd.json",
        "recipe.py",
        "broken.py",
        "fifo",
        "dangling",
        "folder_of_odds",
        "/dev/null",
        "/dev/full",
        "/dev/zero",
        "/proc/x",
    ),
    *(
        "/etc/passwd/x",
        "foo://x",
        "s3://bucket/x",
        "gs://bucket/x",
        "file:///tmp",
        "~nobody_here/x",
        "../x",
    ),
)
# A tiny model that trains for two steps: what a run of a valid command line costs.
TINY = {
    **{
        "model.layers": 2,
        "model.width": 16,
        "model.heads": 2,
        "model.mlp_width": 32,
        "data.sequence_length": 16,
        "data.batch_size": 8,
    },
    **{
        "mesh.stage": 1,
        "mesh.model": 1,
        "pipeline.schedule": "1f1b",
        "pipeline.repeats": 1,
        "pipeline.microbatches": 1,
    },
    **{
        "train.steps": 2,
        "train.sample_tokens": 0,
        "train.eval_batches": 1,
        "data.source": "corpus.txt",
        "data.cache": "cache",
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line. words: the command's own; output: what becomes of the command's streams."""

    command: str
    words: list[str]
    output: str = "read"


def write_inputs(folder: pathlib.Path) -> None:
    """The files that command lines name: a run and a damaged copy of it, corpora, tables, hardware
    files, recipes."""
    (folder / "empty").mkdir(exist_ok=True)
    (folder / "folder_of_odds").mkdir(exist_ok=True)
    chance = random.Random(0)
    sentence = lambda: " ".join(
        chance.choices("a batch is cut into microbatches and every stage works".split(), k=12)
    )
    (folder / "corpus.txt").write_text("".join(f"{sentence()}.\n" for _ in range(400)))
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": sentence()}) + "\n" for _ in range(200))
    )
    (folder / "broken.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00cut off")
    (folder / "tokens.bin").write_bytes(
        struct.pack("<4000H", *(chance.randrange(256) for _ in range(4000)))
    )
    import numpy as np

    np.save(folder / "huge.npy", np.full(4000, 2**40, np.int64))
    (folder / "recipe.py").write_text((ROOT / "configs" / "tiny.py").read_text())
    (folder / "broken.py").write_text("def get_config():\n    return 1 / 0\n")
    (folder / "hardware.json").write_text(
        (ROOT / "jaxtrain" / "planner" / "layer" / "hardware" / "h100.json").read_text()
    )
    odd = json.loads((folder / "hardware.json").read_text())
    (folder / "odd.json").write_text(
        json.dumps(odd | {"memory_gib": 1e300, "colour": "red", "name": None})
    )
    (folder / "broken.csv").write_text("tick,stage\n0,zero\n")
    for name in ("fifo", "folder_of_odds/fifo"):
        (folder / name).exists() or os.mkfifo(folder / name)
    for name in ("dangling", "folder_of_odds/dangling"):
        (folder / name).is_symlink() or (folder / name).symlink_to("nowhere")
    if not (folder / "table.csv").exists():
        _run(folder, ["jaxtrain.schedule", "--stages=2", "--microbatches=4", "--csv=table.csv"])
    if not (folder / "damaged").exists():
        settings = TINY | {"train.steps": 4, "checkpoint.every": 2}
        done = _run(
            folder,
            [
                "jaxtrain.train",
                "--workdir=run",
                "--cpu_devices=1",
                *fuzz_configs.flags_of(settings),
            ],
        )
        if done.status:
            raise SystemExit(f"the run that commands look at does not end: {done.err}")
        shutil.copytree(folder / "run", folder / "trained")
        shutil.copytree(folder / "run", folder / "damaged")
        file = max(
            (folder / "damaged" / "checkpoints" / "4" / "state").rglob("*"),
            key=lambda path: path.is_file() and path.stat().st_size,
        )
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.write_bytes(content)


# --- drawing --------------------------------------------------------------------------------------


def draw(chance: random.Random) -> Case:
    """A command line of one of the commands."""
    command = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    words = _DRAWN[command](chance)
    for _ in range(chance.choice((0, 0, 0, 0, 1, 2))):
        words.insert(chance.randint(0, len(words)), _stray(chance, words))
    output = chance.choices(
        ("read", "closed pipe", "full", "ascii", "no output", "narrow"), (12, 1, 1, 2, 1, 1)
    )[0]
    return Case(command, words, output)


def _flag(chance: random.Random, name: str, text: str) -> list[str]:
    """A flag in one of its forms."""
    return [f"--{name}={text}"] if chance.random() < 0.8 else [f"--{name}", text]


def _value(chance: random.Random, flag: Flag, plausible: Mapping[str, Sequence[str]]) -> str:
    """A text for a flag: mostly one that could be meant."""
    if chance.random() < 0.7 and flag.name in plausible:
        return chance.choice(plausible[flag.name])
    if chance.random() < 0.15:
        return chance.choice((*NUMBERS, *TEXTS, *FILES))
    if isinstance(flag.default, bool):
        return chance.choice(("true", "false", "1", "no", "maybe"))
    if isinstance(flag.default, str):
        return chance.choice((*FILES, *TEXTS))
    return chance.choice(("1", "2", "3", "4", "6", "8", *NUMBERS))


def _some(
    chance: random.Random, flags: Sequence[Flag], plausible: Mapping[str, Sequence[str]], most: int
) -> list[str]:
    """Some of a command's flags with values."""
    words: list[str] = []
    for flag in chance.sample(list(flags), min(len(flags), chance.randint(0, most))):
        if isinstance(flag.default, bool) and chance.random() < 0.6:
            words.append(f"--{flag.name}")
        else:
            words += _flag(chance, flag.name, _value(chance, flag, plausible))
    return words


def _stray(chance: random.Random, words: Sequence[str]) -> str:
    """What somebody may type by mistake."""
    if words and chance.random() < 0.5:
        word = chance.choice(words)
        place = chance.randrange(len(word) + 1)
        return chance.choice(
            (
                word[:place] + word[place + 1 :],
                word[1:],
                word + "x",
                word.replace("=", " "),
                word.replace("_", "-"),
            )
        )
    return chance.choice(
        (
            *TEXTS,
            *FILES,
            "--colour=red",
            "-h1",
            "--help=no",
            "--verbose",
            "--version=2",
            "---x=1",
            "--=",
            "-n",
            "8",
        )
    )


def _train(chance: random.Random) -> list[str]:
    plausible = {
        "config": ("tiny", "gpt2_124m", "tiny_diloco", "recipe.py", "broken.py"),
        "workdir": ("trained", "new", "empty"),
        "cpu_devices": ("1", "2", "3", "8"),
        "coordinator": ("localhost:1", "x", "localhost:99999"),
        "process_id": ("0", "1", "-1"),
        "replay": ("1", "2", "4", "5"),
    }
    words = fuzz_configs.flags_of(TINY) if chance.random() < 0.85 else []
    words += [
        f"--config.{path}={text}"
        for path, text in (
            fuzz_configs.spoil(chance) for _ in range(chance.choice((0, 0, 1, 1, 2, 3)))
        )
    ]
    if chance.random() < 0.4:
        path = chance.choice([path for path, field in cfg.fields().items() if field.type is str])
        words += _flag(chance, f"config.{path}", chance.choice((*FILES, *TEXTS)))
    # a process of several waits for the others
    alone = [flag for flag in (*SHARED_FLAGS, *train.FLAGS) if flag.name != "processes"]
    words += _some(chance, alone, plausible, 3)
    if chance.random() < 0.05:
        words += _flag(chance, "processes", chance.choice(("1", "0", "-1", "x", "nan")))
    # A run of another size than TINY's is looked at, and not trained: that takes longer than a case
    # may.
    given = dict(
        word.removeprefix("--config.").split("=", 1)
        for word in words
        if word.startswith("--config.") and "=" in word
    )
    small = all(given.get(path) == cfg.value_text(value) for path, value in TINY.items())
    return words if small else [*words, "--dry_run"]


def _plan(chance: random.Random) -> list[str]:
    sizes = lambda: ",".join(
        f"{key}={chance.choice((1, 2, 3, 4, 8, 16))}"
        for key in chance.sample(list(layout_flag.KEYS), 3)
    )
    kinds = list(hardware.known())
    plausible = {
        "config": ("llama3_8b", "gpt2_124m", "mixtral_8x7b", "tiny", "recipe.py"),
        "hardware": (*kinds, "hardware.json", "odd.json", f"{kinds[0]}:4,{kinds[1]}:4"),
        "devices": ("1", "8", "16", "24", "64", "97"),
        "layout": (
            "data=8",
            "data=2,stage=4,microbatch=1",
            sizes(),
            sizes(),
            "data=2,stage",
            "=",
            "data=8,data=4",
        ),
        "assume": ("jaxtrain", "megatron", "megatron_core"),
        "tokens": ("300e9", "1", "1e308"),
        "price": ("2.5", "1e308"),
        "kwh_price": ("0.2",),
        "recipe": ("planned.py", "/proc/x/planned.py", "empty"),
        "advise": ("run", "empty", "absent"),
        "png": ("plan.png", "/proc/x.png", "empty"),
    }
    words = _some(chance, plan.FLAGS, plausible, 5)
    if chance.random() < 0.6:  # a search over a large model may take longer than a case may
        words += [f"--layout={plausible['layout'][0]}", f"--devices={8}"]
    if chance.random() < 0.3:
        words += ["--config.{}={}".format(*fuzz_configs.spoil(chance))]
    return words


def _schedule(chance: random.Random) -> list[str]:
    plausible = {
        "schedule": (*by_name.NAMES, "csv:table.csv", "csv:broken.csv", "csv:", "1f1B", "zbv"),
        "stages": ("1", "2", "3", "4", "7", "8", "four"),
        "microbatches": ("1", "3", "8", "16", "x"),
        "repeats": ("1", "2", "3", "two"),
        "times": (
            "1,1,1,0",
            "18.5,18.1,9.3,0.6",
            "1,2",
            "a,b,c,d",
            "-1,1,1,0",
            "1e308,1,1,0",
            "nan,1,1,1",
        ),
        "recompute": ("1", "0", "x"),
        "vocabulary": ("parallel", "end_stages", "end"),
        "permute": ("auto", "late", "early"),
        "memory": ("1", "2", "8", "0.1"),
        **{name: (f"table.{name}", f"/proc/x.{name}", "empty") for name in ("csv", "svg", "png")},
    }
    return _some(chance, schedule.FLAGS, plausible, 6)


def _checkpoint(chance: random.Random) -> list[str]:
    command = chance.choice((*checkpoint.FLAGS, *checkpoint.FLAGS, "list", ""))
    plausible = {
        "step": ("2", "4", "3", "-1"),
        "keep": ("1", "2"),
        "keep_every": ("2",),
        "keep_best": ("1",),
    }
    places = [
        chance.choice(FILES[:8] if chance.random() < 0.7 else FILES)
        for _ in range(chance.choice((1, 1, 1, 1, 2, 2, 0, 3)))
    ]
    flags = [
        flag
        for flag in checkpoint.FLAGS.get(command, checkpoint.FLAGS["prune"])
        if flag.name != "yes"
    ]
    words = [*places, *_some(chance, flags, plausible, 2)]
    if chance.random() < 0.3 and places:  # flags before the folders
        words = [*words[len(places) :], *places]
    return [command, *words] if command or chance.random() < 0.5 else words


def _generate(chance: random.Random) -> list[str]:
    plausible = {
        "workdir": ("run", "run", "run", "damaged", "empty"),
        "prompt": ("a batch", "", "é", "\udcff"),
        "tokens": ("1", "3", "20"),
        "temperature": ("0", "0.5", "1e-30"),
        "top_k": ("1", "1000"),
        "top_p": ("0.5", "1.5", "0"),
        "samples": ("1", "2", "50"),
        "step": ("2", "4", "3"),
        "model": ("1", "2", "3"),
        "cpu_devices": ("1", "2", "8"),
    }
    words = _some(chance, generate.FLAGS, plausible, 5)
    return (
        words
        if any(word.startswith("--workdir") for word in words) or chance.random() < 0.2
        else ["--workdir=run", *words]
    )


def _launch(chance: random.Random) -> list[str]:
    plausible = {
        "processes": ("1", "2", "3", "0"),
        "devices_per_process": ("0", "1", "2", "-2"),
        "restarts": ("0", "1"),
        "module": ("jaxtrain.train", "jaxtrain.absent", "jaxtrain.generate", "", "a b", "--help"),
    }
    words = ["--processes=2", "--devices_per_process=1", *_some(chance, launch.FLAGS, plausible, 2)]
    return [*words, "--", *_train(chance), "--dry_run"]


_DRAWN = {
    "train": _train,
    "plan": _plan,
    "schedule": _schedule,
    "checkpoint": _checkpoint,
    "generate": _generate,
    "launch": _launch,
}


# --- judging --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Done:
    """A command that has ended. status: negative for a signal, None where it was stopped for it
    took too long; cpu: its CPU-seconds."""

    status: int | None
    out: str
    err: str
    cpu: float


def judge(folder: pathlib.Path, case: Case) -> dict[str, Any]:
    """{"command", "status", "cpu", "error"} of a case: "error" is "" where all is as it should
    be."""
    shell = shlex.join(["python", "-m", f"jaxtrain.{case.command}", *case.words])
    try:
        done = _run(folder, [f"jaxtrain.{case.command}", *case.words], case.output)
    except ValueError:  # a NUL in an argument, which no shell passes on
        return {"command": shell, "status": 2, "cpu": 0.0, "error": ""}
    error = fault_of(done, case.output) or _fault_of_suggestion(folder, case, done)
    command = f"{shell}   [{case.output}]" if case.output != "read" else shell
    return {
        "command": command.encode(errors="backslashreplace").decode(),
        "status": done.status,
        "cpu": round(done.cpu, 1),
        "error": error,
    }


def error_lines(done: Done) -> list[str]:
    """The errors that a command has printed, without the numbers that the launcher puts before
    those of its processes."""
    return re.findall(r"^(?:\[\d+\] )?(error: .*)$", done.err, re.MULTILINE)


def fault_of(done: Done, output: str = "read") -> str:
    """What is wrong with how a command has ended; "" if nothing is."""
    said = f"{done.err[-1500:]}"
    if done.status is None:
        return f"no end after {WAIT:.0f} s: {said}"
    if (
        "Traceback (most recent call last)" in done.out + done.err
        or "Exception ignored" in done.err
    ):
        return f"a traceback: {said}"
    if done.status not in {int(known) for known in ExitStatus} - {ExitStatus.FAULT}:
        return f"status {done.status}: {said}"
    if done.cpu > PATIENCE:
        return f"{done.cpu:.0f} CPU-seconds"
    lines = error_lines(done)
    if (
        done.status == ExitStatus.BAD_CONFIG
        and len(lines) != 1
        and output in ("read", "ascii", "narrow")
    ):
        return f"status 2 with {len(lines)} error lines: {said}"
    return ""


def _fault_of_suggestion(folder: pathlib.Path, case: Case, done: Done) -> str:
    """What is wrong with the flags that a refusal suggests; "" if nothing is, or none are
    suggested."""
    line = next(iter(error_lines(done)), "")
    if done.status != ExitStatus.BAD_CONFIG or not line:
        return ""
    try:
        words = fuzz_configs.suggested(line)
    except ValueError as error:
        return f"no shell can read its suggestion ({error}): {line}"
    if not words:
        return ""
    replays = any(word.startswith("--replay") for word in case.words)
    more = ["--dry_run"] if case.command == "train" and not replays else []
    # What the launcher itself refuses stands in front of the flags of the command that it starts.
    refused_by_launcher = case.command == "launch" and STARTED not in done.err
    at = case.words.index("--") if refused_by_launcher and "--" in case.words else len(case.words)
    again = _run(
        folder,
        [f"jaxtrain.{case.command}", *case.words[:at], *words, *more, *case.words[at:]],
        case.output,
    )
    if fault := fault_of(again, case.output):
        return f"with {shlex.join(words)}: {fault}"
    # by the command that it then starts, whose flags it does not know
    if refused_by_launcher and STARTED in again.err:
        return ""
    if again.status != ExitStatus.BAD_CONFIG or (
        _is_about_a_word(line) and _is_about_a_word(again.err)
    ):
        return ""
    said = next(iter(error_lines(again)), "").removeprefix("error: ")
    if f" (and {said})" in line:  # what no flag mends was said
        return ""
    return f"what it suggests is refused: {line} → {again.err[-500:]}"


WORDS_TO_DROP = (
    "is an unknown flag",
    "is an unknown setting",
    "belongs to no flag",
    "is a group of settings",
    "has no value",
)


def _is_about_a_word(line: str) -> bool:
    """Whether a refusal is about a word that has to go: nothing that is put behind the others can
    mend that."""
    return any(text in line for text in WORDS_TO_DROP)


def _run(folder: pathlib.Path, words: Sequence[str], output: str = "read") -> Done:
    """Runs `python -m WORDS` in the folder, stopped after WAIT seconds with all that it has
    started."""
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA_", "SLURM_", "OMPI_"))
    }
    clean |= {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAXTRAIN_CACHE": str(folder / "cache"),
    }
    clean |= {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    clean |= {
        "ascii": {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
        "narrow": {"COLUMNS": "20", "TERM": "dumb"},
    }.get(output, {})
    shell = {
        "closed pipe": '"$@" | head -c 1 >/dev/null',
        "full": '"$@" >/dev/full',
        "no output": '"$@" >&-',
    }.get(output, '"$@"')
    if output == "closed pipe":
        shell = f"set -o pipefail; {shell}"
    before = os.times()
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", sys.executable, "-m", *words],
        cwd=folder,
        env=clean,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=WAIT)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        status = None
    after = os.times()
    cpu = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return Done(
        status, out.decode(errors="backslashreplace"), err.decode(errors="backslashreplace"), cpu
    )
