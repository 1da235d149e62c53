#!/usr/bin/env python
"""A rehearsal of ray_train.py on this machine's CPU: two workers, one of which is killed; Ray
starts both again, and the run ends.

    python tests/by_hand/rehearse_ray.py [--install] [--packages=FOLDER]

Ray and what it imports are in FOLDER (build/ray): jaxtrain's own environment stays as it is.
--install puts them there by pip, some 100 MB. The exit status is 1 where something was not seen,
and the run's folder stays then.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Ray Train with what it imports and jaxtrain's environment lacks. No versions of jax, numpy or
# pyarrow: those of the environment are used.
PACKAGES = """ray==2.60.0 pandas fsspec pydantic pydantic-core annotated-types typing-inspection
typing-extensions click filelock jsonschema jsonschema-specifications referencing rpds-py attrs
msgpack packaging requests urllib3 idna certifi charset-normalizer python-dateutil
six pyyaml""".split()
PATIENCE = 600.0  # seconds that nothing here should take
RECIPE = """
from jaxtrain.config import *


def get_config():
    return Config(
        model=ModelConfig(
            layers=2, width=32, heads=4, mlp_width=64,
            activation="gelu", tied_embeddings=True, init_std=0.1,
        ),
        data=DataConfig(source={corpus!r}, sequence_length=32, batch_size=16),
        mesh=MeshConfig(stage=2),
        pipeline=PipelineConfig(schedule="1f1b", microbatches=2),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=4, schedule="constant"),
        precision=PrecisionConfig(compute="float32"),
        train=TrainConfig(steps={steps}, eval_batches=2, sample_tokens=0),
        checkpoint=CheckpointConfig(every=20, keep=2),
        metrics=MetricsConfig(log_every=1, tensorboard=False),
    )
"""
STEPS = 150


class NotSeen(Exception):
    """Something that should have happened did not, in one line."""


def wait_for(condition: Callable[[], object], what: str, process: subprocess.Popen) -> None:
    """Returns when the condition is true. Raises NotSeen after PATIENCE, or when the process has
    ended."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            raise NotSeen(f"not seen: {what}")
        time.sleep(0.1)


def seen(text: str) -> None:
    """Prints what was seen, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def workers_below(root: int) -> list[int]:
    """The processes of Ray's workers that train, among the descendants of a process. Ray gives them
    their names."""
    parents, names = {}, {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)] = int(text[1])
            names[int(path.name)] = (path / "cmdline").read_bytes().decode(errors="replace")
    found = []
    for number, name in names.items():
        above = number
        while above in parents and above != root:
            above = parents[above]
        if above == root and "RayTrainWorker" in name:
            found.append(number)
    return sorted(found)


def checkpoint(workdir: pathlib.Path) -> int:
    """The newest finished checkpoint, 0 if there is none."""
    return max(
        (int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()),
        default=0,
    )


def rehearse(folder: pathlib.Path, packages: pathlib.Path) -> None:
    """Raises NotSeen."""
    workdir, out = folder / "run", folder / "out.txt"
    (folder / "corpus.txt").write_text((ROOT / "jaxtrain" / "launch.py").read_text() * 4)
    (folder / "recipe.py").write_text(RECIPE.format(corpus=str(folder / "corpus.txt"), steps=STEPS))
    command = [
        sys.executable,
        ROOT / "scripts" / "launch" / "ray_train.py",
        "--workers=2",
        "--cpu_devices=1",
    ]
    command += ["--", f"--config={folder}/recipe.py", f"--workdir={workdir}"]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX", "XLA_", "RAY_"))
    }
    environment |= {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{packages}",
        "JAXTRAIN_CACHE": str(folder / "cache"),
    }
    with out.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for(
            lambda: checkpoint(workdir) > 0 and len(workers_below(process.pid)) == 2,
            "a checkpoint",
            process,
        )
        seen(f"two workers train; the first checkpoint is step {checkpoint(workdir)}")
        victim = workers_below(process.pid)[-1]
        os.kill(victim, signal.SIGKILL)
        seen(f"kill -9 of worker {victim}")
        wait_for(
            lambda: "continuing from step" in out.read_text(errors="replace"),
            "workers that go on",
            process,
        )
        (goes_on, *_) = re.findall(r"continuing from step \d+", out.read_text(errors="replace"))
        seen(f"Ray has started both again: {goes_on}")
        status = process.wait(timeout=PATIENCE)
        steps = [
            json.loads(text)["step"]
            for text in (workdir / "metrics.jsonl").read_text().splitlines()
            if '"loss"' in text
        ]
        if status or steps != list(range(1, STEPS + 1)):
            raise NotSeen(
                f"status 0 and steps 1 to {STEPS}, each once: status {status}, {len(steps)} steps"
            )
        seen(f"the job has ended with status 0; metrics.jsonl has each of {STEPS} steps once")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="install Ray into the folder by pip, unless it is there",
    )
    parser.add_argument(
        "--packages",
        type=pathlib.Path,
        default=ROOT / "build" / "ray",
        help="folder of Ray's packages",
    )
    arguments = parser.parse_args()
    packages = arguments.packages.resolve()
    if not (packages / "ray").is_dir() and not arguments.install:
        print(
            f"error: Ray is not in {packages}: use --install, or --packages=FOLDER", file=sys.stderr
        )
        return 2
    if not (packages / "ray").is_dir():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--target",
            packages,
        ]
        subprocess.run([*pip, *PACKAGES], check=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxtrain-ray-"))
    try:
        rehearse(folder, packages)
    except NotSeen as error:
        print(f"error: {error}; its log is {folder / 'out.txt'}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
