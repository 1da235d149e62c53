#!/usr/bin/env python
"""Random configs through the real command: those that work train like one device, those that don't are refused with flags that work.

    scripts/fuzz.py [--seed=N] [--valid=200] [--jobs=2] [--folder=runs/fuzz/SEED]

A valid case is a model and a layout of it (fuzz_valid.py). It trains two steps on simulated devices, in float32; losses, gradient norms
and the validation loss have to be those of one device. Cases come in groups of a model with several layouts, so that the run on one
device serves them all. What has been run is in FOLDER/results.jsonl, with the command of each case: started again, the same command
goes on. The exit status is 1 if a case failed.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import json
import math
import os
import pathlib
import random
import shlex
import shutil
import subprocess
import sys
import threading
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import fuzz_valid  # noqa: E402 (the path comes first)

from jaxtrain.metrics import read_metrics  # noqa: E402 (the path comes first)

LAYOUTS = 3  # of a model
TOLERANCE = 1e-5  # relative: sums in another order differ by less than 1e-6 in the first step (docs/log.md)
PATIENCE = 900.0  # seconds
WORDS = "a batch is cut into microbatches and every stage of the mesh works on one of them at each tick of the table".split()


def write_corpora(folder: pathlib.Path) -> None:
    """Two corpora of random sentences with prompts, one of short documents and one of long ones."""
    chance = random.Random(0)
    for name, documents, longest in (("corpus.jsonl", 3000, 12), ("long.jsonl", 400, 200)):
        sentence = lambda most: " ".join(chance.choices(WORDS, k=chance.randint(1, most)))
        lines = [json.dumps({"prompt": sentence(6) + "?", "answer": " " + sentence(longest)}) for _ in range(documents)]
        (folder / name).write_text("\n".join(lines) + "\n")


def flags_of(settings: dict[str, Any]) -> list[str]:
    """Settings as flags of the training command."""
    return [f"--config.{path}={_text(value)}" for path, value in settings.items()]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def environment(folder: pathlib.Path) -> dict[str, str]:
    """Of a command: no settings of jax but LLVM's level, for compilation is most of what a case takes."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA_", "SLURM_", "OMPI_"))}
    clean |= {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAXTRAIN_CACHE": str(folder / "cache")}
    return clean | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def train(folder: pathlib.Path, name: str, settings: dict[str, Any], devices: int) -> dict[str, Any]:
    """Trains by the real command: {"command", "seconds"} with "error", or with "figures" of the run: name → number."""
    workdir = folder / "work" / name
    shutil.rmtree(workdir, ignore_errors=True)
    words = [sys.executable, "-m", "jaxtrain.train", f"--config={ROOT / 'configs' / 'tiny.py'}", f"--workdir={workdir}"]
    words += [f"--cpu_devices={devices}", *flags_of(settings)]
    began = time.monotonic()
    result: dict[str, Any] = {"command": shlex.join(["python", *words[1:]])}
    try:
        done = subprocess.run(words, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=PATIENCE)
        error = "" if done.returncode == 0 else f"status {done.returncode}: {done.stderr[-1500:]}"
    except subprocess.TimeoutExpired:
        error = f"no end after {PATIENCE} s"
    result["seconds"] = round(time.monotonic() - began, 1)
    figures = {
        f"{key}, step {r['step']}": r[key] for r in read_metrics(workdir) for key in ("loss", "grad_norm", "validation_loss") if key in r
    }
    if not error and sum("loss, " in name for name in figures) < 2:
        error = f"two steps were not logged: {figures}"
    shutil.rmtree(workdir, ignore_errors=True)
    return result | ({"error": error} if error else {"figures": figures})


def difference(figures: dict[str, float], wanted: dict[str, float]) -> str:
    """Where two runs differ by more than TOLERANCE; "" where they do not."""
    if figures.keys() != wanted.keys():
        return f"{sorted(figures)} are not {sorted(wanted)}"
    far = {name: abs(figures[name] - value) / max(abs(value), 1e-30) for name, value in wanted.items()}
    return "; ".join(f"{name}: {figures[name]:.9g}, on one device {wanted[name]:.9g}" for name, gap in far.items() if not gap <= TOLERANCE)


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
    """The first `count` layouts of a model, and the run on one device before them, but for what has been run."""
    model, layouts = fuzz_valid.draw_group(seed, group, LAYOUTS)
    names = [f"{group}.{i}" for i in range(count)]
    if all(name in results.lines for name in names):
        return
    if f"{group}.one" not in results.lines:
        results.add(f"{group}.one", **train(folder, f"{group}.one", fuzz_valid.RUN | model | fuzz_valid.ONE_DEVICE, 1))
    one = results.lines[f"{group}.one"]
    for name, layout in zip(names, layouts):
        if name in results.lines:
            continue
        result = train(folder, name, fuzz_valid.RUN | model | layout.settings, layout.devices)
        if "figures" in result:
            result["error"] = difference(result["figures"], one["figures"]) if "figures" in one else "the run on one device failed"
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
        waiting = [pool.submit(run_group, folder, seed, group, size, results) for group, size in enumerate(sizes)]
        for number, done in enumerate(concurrent.futures.as_completed(waiting), 1):
            done.result()
            print(f"{number} of {groups} models, {time.monotonic() - began:.0f} s", flush=True)
    cases = [line for name, line in results.lines.items() if not name.endswith(".one")]
    failed = [line["case"] for line in cases if line["error"]]
    staged, odd = (sum(bool(test(line)) for line in cases) for test in (lambda c: c["stages"] > 1, lambda c: c["odd"]))
    text = f"{staged} with several stages, {odd} with sizes that are no powers of two"
    if older := sum(line["sources"] != sources() for line in cases):
        print(f"{older} of these cases were run with other sources of jaxtrain: another --folder runs all of them anew")
    print(f"valid: {len(cases) - len(failed)} of {len(cases)} as on one device ({text}){': failed ' * bool(failed)}{' '.join(failed)}")
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of what is drawn; without it a new one each time")
    parser.add_argument("--valid", type=int, default=200, help="valid configs that are trained")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time")
    parser.add_argument("--folder", type=pathlib.Path, help="of results; runs/fuzz/SEED if not given")
    options = parser.parse_args()
    folder = (options.folder or ROOT / "runs" / "fuzz" / str(options.seed)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}, results in {folder} (--seed={options.seed} goes on)", flush=True)
    write_corpora(folder)
    return int(run_valid(folder, options.seed, options.valid, options.jobs) > 0)


if __name__ == "__main__":
    sys.exit(main())
