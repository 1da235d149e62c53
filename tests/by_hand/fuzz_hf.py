#!/usr/bin/env python
"""Random config.json's of published families through jaxtrain convert and through transformers.

    tests/by_hand/fuzz_hf.py [--seed=N] [--cases=40] [--families=llama,gpt2]
                             [--folder=runs/fuzz_hf/SEED]

transformers makes a model of each config.json (fuzz_hf_configs.py), with random weights. jaxtrain
either refuses it by a line that names a field, and fuzz_hf_configs.py knows why it may, or imports
it: then its logits are those of transformers to 1e-5 of their largest, and the export has the same
bytes, which transformers reads with the same logits, also by a config.json that is written anew. Of
one case in five, gradients and greedy continuations are compared, too.

What has been run is in FOLDER/results.jsonl: started again, the same command goes on. The files of
cases that failed stay in FOLDER/cases, and the exit status is 1 if there are any. It needs
.venv-transformers (requirements/transformers.txt).
"""

import argparse
import collections
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import shutil
import sys
import traceback
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from support import COMPILE_QUICKLY  # noqa: E402 (the path comes first)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", COMPILE_QUICKLY)

import jax  # noqa: E402 (after its environment)
import numpy as np  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from support.hf_imported import (  # noqa: E402 (the path comes first)
    continuations,
    gradient_errors,
    logits_of,
    restored,
)
from support.in_transformers import run_script  # noqa: E402

from by_hand import fuzz_hf_configs  # noqa: E402 (the path comes first)
from jaxtrain import convert  # noqa: E402
from jaxtrain.hf.families import FAMILIES  # noqa: E402

BATCH = 40  # cases of one process of transformers
TOLERANCE = 1e-5  # of the largest logit
MODEL, RUN, OUT, WRITTEN = "model", "run", "out", "written"


def convert_quietly(*words: object) -> tuple[int, str]:
    """(exit status, stderr) of a convert command in this process; −1 and the traceback for an
    error that it does not handle."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = convert.main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
        except Exception:
            return -1, traceback.format_exc()
    return status, err.getvalue()


def same(logits: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max())


def judge_import(case: fuzz_hf_configs.Case, folder: pathlib.Path) -> dict[str, Any]:
    """Imports and exports a case: {"outcome", and "error" where it is not as it should be}."""
    model, run = folder / MODEL, folder / RUN
    refused_there = (model / "error.txt").exists()
    status, err = convert_quietly("from_hf", model, f"--workdir={run}")
    if status != 0:
        return judge_refusal(case, status, err, run, refused_there)
    if case.unknown:
        return {"outcome": "imported", "error": f"{case.unknown} was not refused"}
    expected = np.load(model / "reference.npz")["logits"]
    state = restored(run)
    logits = logits_of(*state)
    if not same(logits, expected):
        worst = np.abs(logits - expected).max() / np.abs(expected).max()
        return {"outcome": "imported", "error": f"logits differ by {worst:.1e} of their largest"}
    if case.everything and (error := judge_everything(state, model)):
        return {"outcome": "imported", "error": error}
    for name in (OUT, WRITTEN):
        if name == WRITTEN:
            (run / "hf" / "config.json").unlink()
        status, err = convert_quietly("to_hf", folder / name / MODEL, f"--workdir={run}")
        if status != 0:
            return {"outcome": "imported", "error": f"to_hf ({name}): {err}"}
    before, after = (load_file(f / "model.safetensors") for f in (model, folder / OUT / MODEL))
    wrong = [n for n in {*before, *after} if differ(before.get(n), after.get(n))]
    if wrong:
        return {"outcome": "imported", "error": f"{wrong[0]} has other bytes in the export"}
    return {"outcome": "imported"}


def judge_everything(state: tuple, model: pathlib.Path) -> str:
    """What is wrong with continuations and gradients; "" if nothing.

    state: of `restored`; model: the folder
    """
    expected = np.load(model / "reference.npz")
    for row, ids in enumerate(continuations(*state)):
        if ids != list(expected[f"continuation {row}"]):
            return f"continuation {row} is another one"
    errors = {name: error for name, error in gradient_errors(model).items() if error > 1e-4}
    return f"gradients differ: {errors}" if errors else ""


def differ(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return True
    return (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes())


def judge_refusal(
    case: fuzz_hf_configs.Case, status: int, err: str, run: pathlib.Path, refused_there: bool
) -> dict[str, Any]:
    match = re.match(r"error: \S*config\.json: ([\w.]+)", err)
    outcome = {"outcome": "refused", "line": err.strip()}
    if status != 2 or not err.startswith("error: ") or err.count("\n") != 1 or run.exists():
        return outcome | {"error": f"status {status} is no refusal: {err[-1500:]}"}
    if refused_there:
        return outcome | {"outcome": "refused by both"}
    if not match:
        return outcome | {"error": "names no field"}
    reason = fuzz_hf_configs.reason(case, match[1])
    outcome |= {"field": match[1], "reason": reason}
    return outcome if reason else outcome | {"error": f"refused without reason: {err.strip()}"}


def judge_exports(folder: pathlib.Path) -> str:
    """What transformers has against a case's exports; "" if nothing."""
    expected = np.load(folder / MODEL / "reference.npz")["logits"]
    for name in (OUT, WRITTEN):
        place = folder / name / MODEL
        if (place / "error.txt").exists():
            return f"transformers on {name}: {(place / 'error.txt').read_text()}"
        if not same(np.load(place / "logits.npy"), expected):
            return f"transformers has other logits for {name}"
    return ""


def run_batch(folder: pathlib.Path, names: list[tuple[str, int]], seed: int) -> list[dict]:
    """Runs some cases, and returns a result for each."""
    cases = {}
    for family, number in names:
        case = cases[f"{family}.{number}"] = fuzz_hf_configs.draw(family, seed, number)
        place = folder / f"{family}.{number}"
        shutil.rmtree(place, ignore_errors=True)
        (place / MODEL).mkdir(parents=True)
        (place / MODEL / "config.json").write_text(json.dumps(case.values, indent=1))
        settings = {"seed": number, **{n: vars(case)[n] for n in ("dtype", "saved", "everything")}}
        (place / MODEL / "case.json").write_text(json.dumps(settings))
    places = [folder / name / MODEL for name in cases]
    run_script("transformers_models.py", "make", *places)
    results = {}
    for name, case in cases.items():
        case.values = json.loads((folder / name / MODEL / "config.json").read_text())
        results[name] = judge_import(case, folder / name)
    exported = [
        folder / name / form / MODEL
        for name, result in results.items()
        if result["outcome"] == "imported" and "error" not in result
        for form in (OUT, WRITTEN)
    ]
    run_script("transformers_models.py", "read", *exported)
    for name in dict.fromkeys(place.parents[1].name for place in exported):
        if error := judge_exports(folder / name):
            results[name]["error"] = error
    for name, result in results.items():
        error = folder / name / MODEL / "error.txt"
        result |= {"case": name, **dataclasses.asdict(cases[name])}
        result["transformers"] = error.read_text() if error.exists() else ""
        if "error" not in result:
            shutil.rmtree(folder / name)
    jax.clear_caches()
    return list(results.values())


def conclude(results: list[dict]) -> int:
    """Prints what was imported and refused, by family and reason; the number of errors."""
    by_family = collections.defaultdict(collections.Counter)
    for result in results:
        by_family[result["family"]][result["outcome"]] += 1
        by_family[result["family"]]["error"] += "error" in result
    for family, counts in by_family.items():
        print(f"{family:12} " + ", ".join(f"{count} {word}" for word, count in counts.items()))
    reasons = collections.Counter(
        (result["reason"], result["field"]) for result in results if result.get("reason")
    )
    for (reason, field), count in reasons.most_common():
        print(f"  refused {count:4}  {reason}: {field}")
    for result in results:
        if "error" in result:
            print(f"{result['case']}: {result['error'][:600]}\n    {json.dumps(result['values'])}")
    return sum("error" in result for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=40, help="of each family")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--folder", type=pathlib.Path)
    flags = parser.parse_args()
    folder = flags.folder or ROOT / "runs" / "fuzz_hf" / str(flags.seed)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    results = {line["case"]: line for line in map(json.loads, lines)}
    wanted = [(f, n) for n in range(flags.cases) for f in flags.families.split(",")]
    missing = [(f, n) for f, n in wanted if f"{f}.{n}" not in results]
    for start in range(0, len(missing), BATCH):
        for result in run_batch(folder / "cases", missing[start : start + BATCH], flags.seed):
            results[result["case"]] = result
            with file.open("a") as stream:
                stream.write(json.dumps(result) + "\n")
        print(
            f"{min(start + BATCH, len(missing))} of {len(missing)} cases",
            file=sys.stderr,
            flush=True,
        )
    return conclude([results[f"{f}.{n}"] for f, n in wanted]) > 0


if __name__ == "__main__":
    sys.exit(main())
