#!/usr/bin/env python
"""Random configs through the real command: those that work train like one device, those that don't
are refused with flags that work; and random command lines of all commands, which end as they
should.

    tests/by_hand/fuzz.py [--seed=N] [--valid=200] [--invalid=2000] [--dry_run=50] [--commands=400]
                    [--jobs=2] [--folder=runs/fuzz/SEED]

A valid case is a model and a layout of it (fuzz_valid.py). It trains two steps on simulated
devices, in float32; losses, gradient norms and the validation loss have to be those of one device.
Cases come in groups of a model with several layouts, so that the run on one device serves them all.

An invalid case is refused, and the flags that the refusal suggests are put behind the others:
everything that a run checks must pass then (fuzz_configs.py). For `--dry_run` of them that is done
by the real command with --dry_run, of small models alone, which compile.

A command line may be anything (fuzz_commands.py): it ends by itself, without a traceback, and what
it suggests is not refused.

What has been run is in FOLDER/results.jsonl, with the command of each case: started again, the same
command goes on. The exit status is 1 if a case failed.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import random
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from by_hand import fuzz_commands, fuzz_configs, fuzz_valid  # noqa: E402 (the path comes first)
from jaxtrain.config import get, value_text  # noqa: E402
from jaxtrain.run import streams  # noqa: E402 (the path comes first)
from jaxtrain.run.metrics import read_metrics  # noqa: E402

LAYOUTS = 3  # of a model
# relative: sums in another order differ by less than 1e-6 in the first step (docs/log.md)
TOLERANCE = 1e-5
PATIENCE = 900.0  # seconds
# The largest sizes that are compiled, for --dry_run; what is suggested is as near as can be to
# whatever was drawn.
SMALL = {
    **{
        "model.layers": 12,
        "model.width": 512,
        "model.heads": 32,
        "model.vocab_size": 5000,
        "model.experts": 32,
        "model.mtp_depth": 3,
    },
    **dict.fromkeys(("model.mlp_width", "model.expert_width", "model.max_positions"), 2048),
    **dict.fromkeys(("model.kv_rank", "model.query_rank"), 512),
    **dict.fromkeys(
        ("model.rope_head_dim", "model.value_head_dim", "model.head_dim", "data.sequence_length"),
        256,
    ),
    **{"model.dense_layers": 6, "model.shared_experts": 6, "model.capacity_factor": 20},
    **{"data.batch_size": 128, "pipeline.microbatches": 32},
}
WORDS = (
    "a batch is cut into microbatches and every stage of the mesh works on one of them at each "
    "tick of the table"
).split()


def write_corpora(folder: pathlib.Path) -> None:
    """Two corpora of random sentences with prompts, one of short documents and one of long ones."""
    chance = random.Random(0)
    for name, documents, longest in (("corpus.jsonl", 3000, 12), ("long.jsonl", 400, 200)):
        sentence = lambda most: " ".join(chance.choices(WORDS, k=chance.randint(1, most)))
        lines = [
            json.dumps({"prompt": sentence(6) + "?", "answer": " " + sentence(longest)})
            for _ in range(documents)
        ]
        (folder / name).write_text("\n".join(lines) + "\n")


def environment(folder: pathlib.Path) -> dict[str, str]:
    """Of a command: no settings of jax but LLVM's level, for compilation is most of what a case
    takes."""
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA_", "SLURM_", "OMPI_"))
    }
    clean |= {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAXTRAIN_CACHE": str(folder / "cache"),
    }
    return clean | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def train(
    folder: pathlib.Path, name: str, settings: dict[str, Any], devices: int
) -> dict[str, Any]:
    """Trains by the real command: {"command", "seconds"} with "error", or with "figures" of the
    run: name → number."""
    workdir = folder / "work" / name
    shutil.rmtree(workdir, ignore_errors=True)
    words = [
        sys.executable,
        "-m",
        "jaxtrain.train",
        f"--config={ROOT / 'configs' / 'tiny.py'}",
        f"--workdir={workdir}",
    ]
    words += [
        f"--cpu_devices={devices}",
        *(f"--config.{path}={value_text(value)}" for path, value in settings.items()),
    ]
    began = time.monotonic()
    result: dict[str, Any] = {"command": shlex.join(["python", *words[1:]])}
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env=environment(folder),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        error = "" if done.returncode == 0 else f"status {done.returncode}: {done.stderr[-1500:]}"
    except subprocess.TimeoutExpired:
        error = f"no end after {PATIENCE} s"
    result["seconds"] = round(time.monotonic() - began, 1)
    figures = {
        f"{key}, step {r['step']}": r[key]
        for r in read_metrics(workdir)
        for key in ("loss", "grad_norm", "validation_loss")
        if key in r
    }
    if not error and sum("loss, " in name for name in figures) < 2:
        error = f"two steps were not logged: {figures}"
    shutil.rmtree(workdir, ignore_errors=True)
    return result | ({"error": error} if error else {"figures": figures})


def difference(figures: dict[str, float], wanted: dict[str, float]) -> str:
    """Where two runs differ by more than TOLERANCE; "" where they do not."""
    if figures.keys() != wanted.keys():
        return f"{sorted(figures)} are not {sorted(wanted)}"
    far = {
        name: abs(figures[name] - value) / max(abs(value), 1e-30) for name, value in wanted.items()
    }
    return "; ".join(
        f"{name}: {figures[name]:.9g}, on one device {wanted[name]:.9g}"
        for name, gap in far.items()
        if not gap <= TOLERANCE
    )


@functools.cache
def sources() -> str:
    """A hash of the package's sources."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "jaxtrain").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Results:
    """What has been run, in a file that grows by a line a case."""

    def __init__(self, path: pathlib.Path):
        self._path, self._lock = path, threading.Lock()
        lines = path.read_text().splitlines() if path.exists() else []
        self.lines = {line["case"]: line for line in map(json.loads, lines)}

    def add(self, case: str, **values: Any) -> None:
        with self._lock:
            self.lines[case] = {"case": case, "sources": sources(), **values}
            with self._path.open("a") as file:
                file.write(json.dumps(self.lines[case]) + "\n")


def run_group(folder: pathlib.Path, seed: int, group: int, count: int, results: Results) -> None:
    """The first `count` layouts of a model, and the run on one device before them, but for what has
    been run."""
    model, layouts = fuzz_valid.draw_group(seed, group, LAYOUTS)
    names = [f"{group}.{i}" for i in range(count)]
    if all(name in results.lines for name in names):
        return
    if f"{group}.one" not in results.lines:
        results.add(
            f"{group}.one",
            **train(folder, f"{group}.one", fuzz_valid.RUN | model | fuzz_valid.ONE_DEVICE, 1),
        )
    one = results.lines[f"{group}.one"]
    for name, layout in zip(names, layouts):
        if name in results.lines:
            continue
        result = train(folder, name, fuzz_valid.RUN | model | layout.settings, layout.devices)
        if "figures" in result:
            result["error"] = (
                difference(result["figures"], one["figures"])
                if "figures" in one
                else "the run on one device failed"
            )
        result |= {"stages": layout.stages, "odd": layout.odd}
        results.add(name, **result)
        if result["error"]:
            print(f"{name}: {result['error'].strip()}\n    {result['command']}", flush=True)


def run_valid(folder: pathlib.Path, seed: int, count: int, jobs: int) -> int:
    """Runs `count` valid cases and says how they went; the number that failed."""
    results, began = Results(folder / "results.jsonl"), time.monotonic()
    groups = math.ceil(count / LAYOUTS)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        sizes = [min(LAYOUTS, count - LAYOUTS * group) for group in range(groups)]
        waiting = [
            pool.submit(run_group, folder, seed, group, size, results)
            for group, size in enumerate(sizes)
        ]
        for number, done in enumerate(concurrent.futures.as_completed(waiting), 1):
            done.result()
            print(f"{number} of {groups} models, {time.monotonic() - began:.0f} s", flush=True)
    cases = [line for name, line in results.lines.items() if "stages" in line]
    staged, odd = sum(line["stages"] > 1 for line in cases), sum(line["odd"] for line in cases)
    return conclude(
        "valid",
        cases,
        f"as on one device ({staged} with several stages, {odd} with sizes that are no powers "
        "of two)",
    )


def draw_refused(
    seed: int, number: int, most: int = max(fuzz_configs.DEVICES)
) -> tuple[list[str], int]:
    """(flags, devices) of an invalid case with at most so many devices."""
    chance = random.Random(f"{seed}/invalid/{number}")
    devices = chance.choice([n for n in fuzz_configs.DEVICES if n <= most])
    return fuzz_configs.draw_invalid(chance, devices), devices


def judge(seed: int, number: int) -> dict[str, Any]:
    """{"error", "command"} of an invalid case: "error" is "" where all is as it should be."""
    flags, devices = draw_refused(seed, number)
    command = shlex.join(["python", "-m", "jaxtrain.train", f"--cpu_devices={devices}", *flags])
    return {"command": command, "error": fuzz_configs.refusal_holds(flags, devices) or ""}


def run_judged(
    folder: pathlib.Path,
    kind: str,
    judge_case: Callable[[int], dict[str, Any]],
    count: int,
    jobs: int,
    well: str,
) -> int:
    """Judges `count` cases of a kind, in processes of their own, and says how they went; the number
    that failed."""
    results, began = Results(folder / "results.jsonl"), time.monotonic()
    left = [number for number in range(count) if f"{kind}.{number}" not in results.lines]
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(judge_case, number): number for number in left}
        for done, future in enumerate(concurrent.futures.as_completed(waiting), 1):
            result = future.result()
            results.add(f"{kind}.{waiting[future]}", **result)
            if result["error"]:
                print(
                    f"{kind}.{waiting[future]}: {result['error']}\n    {result['command']}",
                    flush=True,
                )
            if done % 100 == 0:
                print(
                    f"{done} of {len(left)} cases ({kind}), {time.monotonic() - began:.0f} s",
                    flush=True,
                )
    return conclude(
        kind, [line for name, line in results.lines.items() if name.startswith(f"{kind}.")], well
    )


def run_invalid(folder: pathlib.Path, seed: int, count: int, jobs: int) -> int:
    """Judges `count` invalid configs and says how they went; the number that failed."""
    return run_judged(
        folder,
        "invalid",
        functools.partial(judge, seed),
        count,
        jobs,
        "refused with flags that work",
    )


def judge_command(folder: pathlib.Path, seed: int, number: int) -> dict[str, Any]:
    """What fuzz_commands.judge says of a random command line."""
    return fuzz_commands.judge(
        folder, fuzz_commands.draw(random.Random(f"{seed}/command/{number}"))
    )


def run_commands(folder: pathlib.Path, seed: int, count: int, jobs: int) -> int:
    """Runs `count` command lines and says how they went; the number that failed."""
    place = folder / "commands"
    place.mkdir(exist_ok=True)
    fuzz_commands.write_inputs(place)
    return run_judged(
        folder,
        "command",
        functools.partial(judge_command, place, seed),
        count,
        jobs,
        "ended as they should",
    )


def mended(seed: int, number: int) -> tuple[list[str], int, str, list[str]] | None:
    """(flags, devices, the refusal, the flags that it suggests) of an invalid case; None where the
    model that works is not small."""
    flags, devices = draw_refused(seed, number, 8)
    line = fuzz_configs.refusal_of(flags, devices)
    words = fuzz_configs.suggested(line)
    config = fuzz_configs.config_of([*flags, *words]).fill()
    return (
        None
        if any(get(config, path) > most for path, most in SMALL.items())
        else (flags, devices, line, words)
    )


def compile_mended(folder: pathlib.Path, seed: int, number: int) -> dict[str, Any] | None:
    """{"error", "command"} of an invalid case by the real command with --dry_run, refused and then
    mended; None if it is not small."""
    case = mended(seed, number)
    if case is None:
        return None
    flags, devices, line, words = case
    command = [
        sys.executable,
        "-m",
        "jaxtrain.train",
        f"--config={fuzz_configs.RECIPE}",
        f"--cpu_devices={devices}",
        "--dry_run",
        *flags,
    ]
    run = lambda more: subprocess.run(
        [*command, *more],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    refused, works = run([]), run(words)
    error = ""
    if (refused.returncode, refused.stderr.strip()) != (2, line):
        error = (
            f"status {refused.returncode}, and it is not the refusal {line!r}: "
            f"{refused.stderr[-500:]}"
        )
    elif works.returncode != 0:
        error = f"status {works.returncode} with {shlex.join(words)}: {works.stderr[-1500:]}"
    return {"command": shlex.join(["python", *command[1:]]), "error": error}


def run_dry(folder: pathlib.Path, seed: int, count: int, jobs: int) -> int:
    """Compiles `count` invalid cases once they are mended, and says how they went; the number that
    failed."""
    results = Results(folder / "results.jsonl")
    numbers = (n for n in itertools.count() if f"dry_run.{n}" in results.lines or mended(seed, n))
    names = {n: f"dry_run.{n}" for n in itertools.islice(numbers, count)}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting = {
            pool.submit(compile_mended, folder, seed, n): n
            for n, name in names.items()
            if name not in results.lines
        }
        for done, future in enumerate(concurrent.futures.as_completed(waiting), 1):
            result = future.result()
            assert result is not None  # `mended` has looked
            results.add(names[waiting[future]], **result)
            print(f"{done} of {len(waiting)} compiled", flush=True)
            if result["error"]:
                print(
                    f"{names[waiting[future]]}: {result['error']}\n    {result['command']}",
                    flush=True,
                )
    return conclude(
        "dry_run",
        [results.lines[name] for name in names.values()],
        "refused, and compiled with what was suggested",
    )


def conclude(kind: str, cases: list[dict[str, Any]], well: str) -> int:
    """Says how cases went; the number that failed."""
    failed = [line["case"] for line in cases if line["error"]]
    if older := sum(line["sources"] != sources() for line in cases):
        print(
            f"{older} of these cases were run with other sources of jaxtrain: another "
            "--folder runs all of them anew"
        )
    print(
        f"{kind}: {len(cases) - len(failed)} of {len(cases)} "
        f"{well}{': failed ' * bool(failed)}{' '.join(failed)}",
        flush=True,
    )
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=random.randrange(10**6),
        help="of what is drawn; without it a new one each time",
    )
    parser.add_argument("--valid", type=int, default=200, help="valid configs that are trained")
    parser.add_argument(
        "--invalid", type=int, default=2000, help="invalid configs whose refusals are judged"
    )
    parser.add_argument(
        "--dry_run", type=int, default=50, help="invalid configs that are mended and compiled"
    )
    parser.add_argument(
        "--commands", type=int, default=400, help="random command lines of all commands"
    )
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="of results; runs/fuzz/SEED if not given"
    )
    options = parser.parse_args()
    folder = (options.folder or ROOT / "runs" / "fuzz" / str(options.seed)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}, results in {folder} (--seed={options.seed} goes on)", flush=True)
    write_corpora(folder)
    failed = 0
    for run, count in (
        (run_invalid, options.invalid),
        (run_commands, options.commands),
        (run_dry, options.dry_run),
        (run_valid, options.valid),
    ):
        failed += run(folder, options.seed, count, options.jobs) if count else 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(streams.run(lambda _: main(), sys.argv[1:]))
