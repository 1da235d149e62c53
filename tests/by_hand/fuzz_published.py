#!/usr/bin/env python
"""Random hostile files in a published model and in a run's folder, through the real commands.

    tests/by_hand/fuzz_published.py [--seed=N] [--cases=400] [--only=N]
                                    [--folder=runs/fuzz_published]

A case is a copy of a tiny published model, or of a tiny run, with one to three hostile files: links
out of the folder, pipes, devices, sockets, sparse files, damaged bytes, JSON and headers of
safetensors with values that no program writes. A model goes through from_hf; what that accepts, and
a run, go through ls, generate, to_hf, and now and then through training; a run through plan
--advise, too. Each command is a fork of this process, which has imported everything.

A command may not leave a traceback or write lines of thousands of characters; its status is one of
docs/operations.md, and a refusal is one line. It may not open what lies outside of the folder, nor
leave the secret of these files anywhere, take more than 2 GB, or last for more than 20 s of CPU.

The files of cases that failed stay in FOLDER/cases, and the exit status is 1 if there are any.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from support import COMPILE_QUICKLY  # noqa: E402 (the path comes first)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", COMPILE_QUICKLY)

# Whatever a command needs is imported once, and no device is started: forks have no threads.
from jaxtrain import (  # noqa: E402
    convert,
    generate_command as generate,
    train_command as train,
)
from jaxtrain.checkpoint import (  # noqa: E402, F401
    __main__ as checkpoint,
    manager,
    restoring,
)
from jaxtrain.generation import sampling  # noqa: E402, F401
from jaxtrain.hf import importing  # noqa: E402, F401
from jaxtrain.planner.command import main as plan  # noqa: E402
from jaxtrain.run import streams  # noqa: E402
from jaxtrain.run.exit_status import ExitStatus  # noqa: E402

MODEL, RUN, OUT, OUTSIDE, FILES = "model", "run", "published", "outside", "files"
SECRET = "canary-5b1f7c"  # stands in every file that lies outside
MOST_GB, MOST_CPU_S, MOST_WALL_S = 2.0, 20.0, 40.0
LONGEST = 1000  # characters of a line
STATUSES = {int(status) for status in ExitStatus} - {ExitStatus.FAULT}
COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "from_hf": lambda argv: convert.main(["from_hf", *argv]),
    "to_hf": lambda argv: convert.main(["to_hf", *argv]),
    "ls": lambda argv: checkpoint.main(["ls", *argv]),
    "generate": generate.main,
    "train": train.main,
    "plan": plan.main,
}
TINY = {
    "model.layers": 2,
    "model.width": 32,
    "model.heads": 2,
    "model.mlp_width": 48,
    "model.vocab_size": 300,
    "mesh.stage": 1,
    "mesh.model": 1,
    "data.sequence_length": 16,
    "data.batch_size": 8,
    "pipeline.schedule": "1f1b",
    "pipeline.repeats": 1,
    "pipeline.microbatches": 1,
    "train.steps": 2,
    "train.sample_tokens": 0,
    "metrics.tensorboard": "false",
}


@dataclasses.dataclass(frozen=True)
class Ended:
    """A command that has ended: its status (negative: the signal), its output, peak memory in GB,
    seconds of CPU, whether it had to be stopped, and what it opened outside."""

    status: int
    output: str
    gb: float
    cpu_s: float
    stopped: bool
    outside: list[str]

    def fault(self) -> str:
        """What is wrong with it; "" if nothing is."""
        long = [line for line in self.output.splitlines() if len(line) > LONGEST]
        errors = [line for line in self.output.splitlines() if line.startswith("error: ")]
        faults = {
            f"status {self.status}": self.status not in STATUSES,
            "a traceback": "Traceback" in self.output or "panicked" in self.output,
            f"a line of {len(max(long, key=len, default=''))} characters": long,
            f"{len(errors)} lines of error": self.status and len(errors) != 1,
            f"{self.gb:.1f} GB": self.gb > MOST_GB,
            f"{self.cpu_s:.0f} s of CPU": self.cpu_s > MOST_CPU_S,
            f"stopped after {MOST_WALL_S} s": self.stopped,
            f"read {self.outside[:2]}": self.outside,
            "the secret in its output": SECRET in self.output,
        }
        return ", ".join(fault for fault, is_there in faults.items() if is_there)


def run(folder: pathlib.Path, command: str, *words: str) -> Ended:
    """Runs a command in a fork, in a folder."""
    sys.stdout.flush()
    log, opened = folder / f"{command}.log", folder / "opened"
    began = time.monotonic()
    if (child := os.fork()) == 0:
        status = 1
        try:
            os.chdir(folder)
            os.setsid()
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            for stream in (1, 2):
                os.dup2(descriptor, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
            record = os.open(opened, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            sys.addaudithook(lambda event, arguments: _record(record, event, arguments))
            status = streams.run(COMMANDS[command], words)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    stopped = False
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        if time.monotonic() - began > MOST_WALL_S:
            stopped = True
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    usage = ended[2]
    outside = str(folder / OUTSIDE)
    return Ended(
        os.waitstatus_to_exitcode(ended[1]),
        log.read_text(errors="replace"),
        usage.ru_maxrss / 1e6,
        usage.ru_utime + usage.ru_stime,
        stopped,
        [path for path in opened.read_text().splitlines() if path.startswith(outside)],
    )


def _record(descriptor: int, event: str, arguments: tuple) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes):
        real = os.path.realpath(os.fsencode(arguments[0]).replace(b"\0", b"?"))
        os.write(descriptor, real.replace(b"\n", b"?") + b"\n")


# --- what the cases begin from --------------------------------------------------------------------


def make_bases(folder: pathlib.Path) -> None:
    """A tiny run on a tokenizers file, and its published model with all small files."""
    (folder / "corpus").mkdir(parents=True)
    for number in range(3):
        text = " ".join(random.Random(number).choices("a batch of tokens is cut".split(), k=3000))
        (folder / "corpus" / f"{number}.txt").write_text(text)
    settings = TINY | {"data.source": "corpus", "data.cache": "cache"}
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    for source in ("bytes", f"{MODEL}/tokenizer.json"):
        shutil.rmtree(folder / RUN, ignore_errors=True)
        words = [f"--workdir={RUN}", "--cpu_devices=1", f"--config.data.tokenizer={source}", *flags]
        _needs(run(folder, "train", *words))
        if source == "bytes":
            _needs(run(folder, "to_hf", f"--workdir={RUN}", MODEL))
    values = {"chat_template.jinja": "{{ messages }}", "merges.txt": "#version: 0.2\n"}
    values |= dict.fromkeys(("special_tokens_map.json", "added_tokens.json", "vocab.json"), "{}")
    for name, text in values.items():
        (folder / MODEL / name).write_text(text)
    _needs(run(folder, "from_hf", MODEL, "--workdir=imported"))
    shutil.copytree(folder / "imported" / "hf", folder / RUN / "hf")
    (folder / OUTSIDE).mkdir()
    for path in (folder / MODEL).iterdir():
        content = path.read_bytes()
        if path.suffix == ".json":
            content = json.dumps(json.loads(content) | {"_secret": SECRET}).encode()
        elif path.suffix != ".safetensors":
            content += SECRET.encode()
        (folder / OUTSIDE / path.name).write_bytes(content)
    (folder / OUTSIDE / "secret").write_text(SECRET)


def _needs(ended: Ended) -> None:
    if ended.status:
        raise SystemExit(f"the base of the cases cannot be made: {ended.output[-2000:]}")


# --- hostile files --------------------------------------------------------------------------------


def socket_at(path: pathlib.Path) -> None:
    short = pathlib.Path("/tmp", f"fuzz-{os.getpid()}")  # the name of a socket has 107 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(short))
    shutil.move(short, path)


def sparse(path: pathlib.Path) -> None:
    with open(path, "wb") as file:
        file.truncate(10 << 30)


# Each takes the place of a file, which is gone.
SPECIAL: dict[str, Callable[[pathlib.Path], object]] = {
    "a link to the same file outside": lambda path: path.symlink_to(
        _outside(path) / path.name if (_outside(path) / path.name).exists() else _secret(path)
    ),
    "a link to a secret": lambda path: path.symlink_to(_secret(path)),
    "a relative link to a secret": lambda path: path.symlink_to(
        os.path.relpath(_secret(path), path.parent)
    ),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to its folder": lambda path: path.symlink_to("."),
    "a pipe": os.mkfifo,
    "a socket": socket_at,
    "a folder": pathlib.Path.mkdir,
    "10 GB of zeros": sparse,
    "nothing": lambda path: None,
    "an empty file": pathlib.Path.touch,
    "nested arrays": lambda path: path.write_text("[" * 10**5 + "]" * 10**5),
    "nested objects": lambda path: path.write_text('{"a":' * 90 + "1" + "}" * 90),
    "60 MB of digits": lambda path: path.write_text("1" * 60_000_000),
    "30 MB of arrays": lambda path: path.write_text("[" + "[]," * 10_000_000 + "1]"),
    "no UTF-8": lambda path: path.write_bytes(b'{"a": "\xff\xfe\x80"}'),
    "NaN": lambda path: path.write_text("NaN"),
    "a text": lambda path: path.write_text('"x"'),
    "UTF-16": lambda path: path.write_bytes('{"a": 1}'.encode("utf-16")),
}


def _case(path: pathlib.Path) -> pathlib.Path:
    """The case's folder."""
    return next(each.parent for each in path.parents if each.name in (MODEL, RUN))


def _outside(path: pathlib.Path) -> pathlib.Path:
    return _case(path) / OUTSIDE


def _secret(path: pathlib.Path) -> pathlib.Path:
    return _outside(path) / "secret"


def hostile_value(rng: random.Random) -> Any:
    """A value that no program writes there."""
    return rng.choice(
        [
            *(None, True, False, -1, 0, 1, 2, 255, 1.5, -0.0, 1e308, 1e-320),
            *(float("nan"), float("inf"), 10**30, 10**39, -(10**30), 10**400),
            *(2**31, 2**31 - 1, 2**32, 2**53, 2**62, 2**64, 10**12, 10**15, 65536, 10**6),
            *("", "x", "x" * 10**6, "\0", "\ud800", "\n\n", "\x1b[2J", "é" * 300, "../outside"),
            *("/etc/passwd", f"../{OUTSIDE}/secret", f"../{OUTSIDE}/tokenizer.json", "/dev/zero"),
            *([], {}, [[]], [None], {"": {}}, [1] * 10**5, [10**30], [-1], ["x"], {"a": [{}] * 9}),
            *(list(range(10**6)), [0, 1, 2], [0, 10**15], {"x" * 10**5: 1}, {"content": 5}),
            nested(rng.choice([10, 70, 2000])),
        ]
    )


def brief(value: Any) -> str:
    return deep_json(value)[:60]


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value] if depth % 3 else {"a": value}
    return value


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all values in a JSON value, of some in long lists."""
    found = [path]
    if len(path) > 20:
        return found
    items: Any = value.items() if isinstance(value, dict) else []
    items = enumerate(value[:5]) if isinstance(value, list) else items
    for key, inner in list(items)[:60]:
        found += places(inner, (*path, key))
    return found


def alter(rng: random.Random, value: Any, put: Callable[[random.Random], Any]) -> tuple[Any, str]:
    """A JSON value with another value, key or a key less somewhere."""
    all_places = places(value)
    shallow = [path for path in all_places if len(path) <= 2]
    path = rng.choice(all_places if rng.random() < 0.5 else shallow)
    new = put(rng)
    if not path:
        if isinstance(value, dict) and rng.random() < 0.8:
            key = rng.choice(
                ["x", "", "x" * 10**6, "\n", "auto_map", "\ud800", "_x", "__metadata__"]
            )
            return value | {key: new}, f"{key[:20]!r} = {brief(new)}"
        return new, f"all = {brief(new)}"
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    if rng.random() < 0.15:
        del parent[path[-1]]
        return value, f"without {path}"
    parent[path[-1]] = new
    return value, f"{path} = {brief(new)}"


def written(value: Any, rng: random.Random) -> bytes:
    """A JSON text, now and then with a mark of byte order or with each key twice."""
    text = deep_json(value)
    if rng.random() < 0.05:
        text = "\ufeff" + text
    if rng.random() < 0.05 and text.startswith("{") and len(text) > 2:
        text = text[:-1] + "," + text[1:]
    return text.encode("utf-8", "surrogatepass")


def deep_json(value: Any) -> str:
    limits = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    sys.setrecursionlimit(20_000)
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value)
    finally:
        sys.setrecursionlimit(limits[0])
        sys.set_int_max_str_digits(limits[1])


def alter_json(rng: random.Random, path: pathlib.Path) -> str:
    text = path.read_bytes()[: 10**5]
    try:
        value = json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)
    except (ValueError, IndexError, RecursionError):  # it is hostile already
        value = {}
    for _ in range(rng.choice([1, 1, 2])):
        value, what = alter(rng, value, hostile_value)
    path.write_bytes(written(value, rng) + b"\n")
    return what


def alter_header(rng: random.Random, path: pathlib.Path) -> str:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = rng.choice(list(header))
    what = rng.choice(["length", "tensor", "name", "field", "field", "any"])
    if what == "length":
        number = rng.choice([0, 1, 2**31, 2**62, 2**64 - 1, length - 1, length + 1, 10**8])
        path.write_bytes(struct.pack("<Q", number) + content[8:])
        return f"header of {number} bytes"
    if what == "tensor":
        shape = rng.choice(
            [[0, 10**15], [0] * 100_000, [0, *[2**31] * 7], [0], [], [2**62, 0], [0, -1], [1]]
        )
        dtype = rng.choice(["F32", "F64", "I4", "X" * 10**6, "", "BF16", "\n"])
        extra = rng.choice(["x", "x" * 10**6, "\n", "../x", "model.layers.0.rotary_emb.inv_freq"])
        header[extra] = {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        text = f"{extra[:20]!r}: {dtype[:20]!r} {str(shape)[:40]}"
    elif what == "name":
        new = rng.choice(["", "x" * 10**6, "\0", "\ud800", "é", f"{name}.x", "\x1b[2J"])
        header[new] = header.pop(name)
        text = f"{name} is {new[:20]!r}"
    elif what == "field":
        key = rng.choice(["dtype", "shape", "data_offsets"])
        value = rng.choice(
            [
                [0, 2**64],
                [-1, 5],
                [5, 0],
                [0, 10**30],
                ["a", "b"],
                [1.5, 2],
                "I8",
                "F64",
                "x" * 10**6,
            ]
            + [[1] * 100_000, [2**62, 2], [], [4], None, {}, [0, 10**15], hostile_value(rng)]
        )
        header[name][key] = value
        text = f"{name} {key} = {brief(value)}"
    else:
        header, text = alter(rng, header, hostile_value)
    raw = written(header, rng)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + rest)
    return text


def add_index(rng: random.Random, path: pathlib.Path) -> str:
    """Several files with an index in place of the single one, the names of which are hostile."""
    names = ["model.safetensors.index.json", f"../{OUTSIDE}/model.safetensors", "..", "", "."]
    names += [str(_outside(path) / "model.safetensors"), "a/b.safetensors", "x" * 10**5, "x\0y"]
    names += [
        "\ud800",
        "a\\b",
        "shard.safetensors",
        "shard.safetensors",
        "config.json",
        "fifo",
        "\n",
    ]
    name = rng.choice(names)
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    path.rename(path.with_name("shard.safetensors"))
    os.mkfifo(path.with_name("fifo"))
    weight_map: Any = dict.fromkeys((key for key in header if key != "__metadata__"), name)
    if rng.random() < 0.3:
        weight_map, _ = alter(rng, weight_map, hostile_value)
    values = {"metadata": {}, "weight_map": weight_map}
    path.with_name("model.safetensors.index.json").write_bytes(written(values, rng))
    return f"index names {name[:40]!r}"


def damage(rng: random.Random, path: pathlib.Path) -> str:
    content = bytearray(path.read_bytes())
    if rng.random() < 0.4:
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
        return "cut off"
    for _ in range(rng.choice([1, 3, 100])):
        if content:
            content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(content)
    return "other bytes"


def spoil(rng: random.Random, folder: pathlib.Path, count: int) -> str:
    """Makes some files of a folder hostile, and says how."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    likely = {".json": 5, ".safetensors": 8}
    said = []
    for _ in range(count):
        weights = [likely.get(path.suffix, 1 + 4 * (path.name == "metadata")) for path in files]
        path = files.pop(rng.choices(range(len(files)), weights)[0])
        said.append(f"{path.relative_to(folder)}: {spoil_file(rng, path)}")
    return "; ".join(said)


def spoil_file(rng: random.Random, path: pathlib.Path) -> str:
    kind = rng.choices(["special", "content", "damage"], [4, 6, 1])[0]
    if kind == "special":
        what = rng.choice(list(SPECIAL))
        path.unlink()
        SPECIAL[what](path)
        return what
    if kind == "content" and path.suffix == ".safetensors":
        return rng.choice([alter_header, alter_header, add_index])(rng, path)
    if kind == "content" and (path.suffix in (".json", ".jsonl") or path.name == "metadata"):
        return alter_json(rng, path)
    return damage(rng, path)


# --- a case ---------------------------------------------------------------------------------------


def commands_of(rng: random.Random, kind: str) -> list[tuple[str, ...]]:
    """The commands of a case, of which the first accepts a model or not."""
    trains = rng.random() < 0.15
    flags = ["--cpu_devices=1", "--config.data.cache=cache", "--config.data.source=corpus"]
    words = [f"--config={RUN}/config.json", f"--workdir={RUN}", "--config.train.steps=3", *flags]
    commands: list[tuple[str, ...]] = [
        ("ls", RUN),
        ("generate", f"--workdir={RUN}", "--tokens=3", "--cpu_devices=1", "--prompt=ab"),
        ("to_hf", f"--workdir={RUN}", OUT),
        *[("train", *words)] * trains,
    ]
    if kind == RUN:
        return [*commands, ("plan", f"--advise={RUN}")]
    if rng.random() < 0.1:  # in memory, instead of a checkpoint
        settings = TINY | {"train.init_from": MODEL, "train.steps": 1}
        flags += [f"--config.{k}={v}" for k, v in settings.items() if not k.startswith("model.")]
        return [("train", "--config=from_hf", f"--workdir={RUN}", *flags)]
    return [("from_hf", MODEL, f"--workdir={RUN}"), *commands]


def check(seed: int, bases: pathlib.Path, folder: pathlib.Path) -> tuple[str, str, str]:
    """Draws a case into a folder and runs it: (what it is, its statuses, what is wrong or "")."""
    rng = random.Random(seed)
    kind = MODEL if rng.random() < 0.6 else RUN
    for name in (kind, OUTSIDE, "corpus"):
        shutil.copytree(bases / name, folder / name)
    drawn = spoil(rng, folder / kind, rng.choices([1, 2, 3], [6, 2, 1])[0])
    statuses, faults = [], []
    for command, *words in commands_of(rng, kind):
        ended = run(folder, command, *words)
        statuses.append(f"{command} {ended.status}")
        if fault := ended.fault():
            faults.append(f"{command}: {fault}\n    {ended.output[-700:]!r}")
        if command == "from_hf" and ended.status:
            break
    for place in (RUN, OUT):
        faults += [
            f"the secret is in {path.relative_to(folder)}"
            for path in (folder / place).rglob("*")
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 10**8
            if SECRET.encode() in path.read_bytes()
        ]
    return f"{kind}/{drawn}", ", ".join(statuses), "\n  ".join(faults)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--only", type=int, help="this case, and keep its files")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "runs" / "fuzz_published")
    flags = parser.parse_args(arguments)
    bases = flags.folder / "bases"
    if not (bases / OUTSIDE / "secret").exists():
        shutil.rmtree(bases, ignore_errors=True)
        make_bases(bases)
    numbers = (
        [flags.only] if flags.only is not None else range(flags.seed, flags.seed + flags.cases)
    )
    outcomes, failures = collections.Counter[str](), 0
    for number in numbers:
        folder = flags.folder / "cases" / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        what, statuses, fault = check(number, bases, folder)
        outcomes[statuses] += 1
        if fault or flags.only is not None:
            failures += bool(fault)
            print(f"case {number}: {what}\n  {statuses}\n  {fault}", flush=True)
        else:
            shutil.rmtree(folder)
    for statuses, count in outcomes.most_common():
        print(f"{count:4}  {statuses}")
    print(f"{len(numbers)} cases, {failures} with faults")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
