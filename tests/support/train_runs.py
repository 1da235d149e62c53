"""What the tests of whole runs share: a tiny recipe and corpus, the real commands in processes of
their own, and what a run has left.

A run's files are all in its own folder, the corpus's cache too. The optimizer's schedule does not
depend on train.steps, so that runs of different lengths are the same program and have the same
losses. The recipe is as small as a pipeline can be, on 2 devices, for most of these tests are about
the loop, its files and its processes; LARGE is for those about layouts.
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from jaxtrain.checkpoint import reading
from jaxtrain.checkpoint.local import RUN_ID
from jaxtrain.checkpoint.manifest import STATE, read_database
from jaxtrain.checkpoint.steps import LOSSES
from jaxtrain.run.files import TRIAL_NAME
from jaxtrain.run.metrics import read_metrics
from support import COMPILE_QUICKLY, ROOT

PATIENCE = 240.0  # seconds that nothing here should take, also on a busy machine

RECIPE = """
from jaxtrain.config import *


def get_config():
    return Config(
        model=ModelConfig(
            layers=3, width=32, heads=4, mlp_width=64,
            activation="gelu", tied_embeddings=True, init_std=0.1,
        ),
        data=DataConfig(source="corpus.txt", sequence_length=32, batch_size=16),
        mesh=MeshConfig(stage=2),
        pipeline=PipelineConfig(schedule="1f1b", microbatches=2),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=4, schedule="constant"),
        precision=PrecisionConfig(compute="float32"),
        train=TrainConfig(steps=12, eval_batches=2),
        checkpoint=CheckpointConfig(every=3, keep=100),
        metrics=MetricsConfig(log_every=1, tensorboard=False),
    )
"""
DEVICES = 2  # of the recipe
LARGE = {"model.layers": 9, "pipeline.microbatches": 4}  # that no mesh of 8 devices divides
# Meshes of 8 devices, data × stage × model; the first two have two chunks a stage.
MESHES = {
    "1x4x2": {
        "mesh.stage": 4,
        "mesh.model": 2,
        "pipeline.schedule": "interleaved",
        "pipeline.repeats": 2,
    },
    "2x2x2": {
        "mesh.data": 2,
        "mesh.model": 2,
        "pipeline.schedule": "interleaved",
        "pipeline.repeats": 2,
    },
    "8x1x1": {"mesh.data": 8, "mesh.stage": 1, "pipeline.microbatches": 2},
    "1x8x1": {"mesh.stage": 8, "pipeline.microbatches": 8},
}
WORDS = (
    "a batch is cut into microbatches and every stage of the mesh works on one of them at each "
    "tick of the table"
).split()


def write_inputs(folder: pathlib.Path) -> None:
    """The recipe and a corpus of random sentences, some documents of it, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.py").write_text(RECIPE)
    chance = random.Random(0)
    (folder / "corpus.txt").write_text(
        "".join(" ".join(chance.choices(WORDS, k=12)) + ".\n" for _ in range(800))
    )


def settings(**values: object) -> list[str]:
    """settings(train__steps=3) → ["--config.train.steps=3"]."""
    return flags_of({name.replace("__", "."): value for name, value in values.items()})


def large(mesh: str) -> list[str]:
    """The flags of the larger model on one of MESHES."""
    return flags_of(LARGE | MESHES[mesh])


def flags_of(values: dict[str, object]) -> list[str]:
    """flags_of({"train.steps": 3}) → ["--config.train.steps=3"]."""
    return [
        f"--config.{path}={str(value).lower() if isinstance(value, bool) else value}"
        for path, value in values.items()
    ]


@dataclasses.dataclass(frozen=True)
class Done:
    """A process that has ended."""

    status: int
    out: str
    err: str
    seconds: float


class Running:
    """A command that runs; what it prints goes to files, so that nothing holds it up.

    shell: how its streams are redirected, as a shell has it, such as ">/dev/full"; within: words of
        a command that becomes this one.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        words: Sequence[str],
        environment: dict[str, str] | None = None,
        shell: str = "",
        within: Sequence[str] = (),
    ):
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("JAX", "XLA_", "SLURM_", "OMPI_"))
        }
        clean |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        clean |= {"XLA_FLAGS": COMPILE_QUICKLY, "JAXTRAIN_CACHE": str(folder / "cache")} | (
            environment or {}
        )
        self._outputs = [folder / f"{time.monotonic_ns()}.{stream}" for stream in ("out", "err")]
        self._began = time.monotonic()
        with contextlib.ExitStack() as files:
            out, err = (files.enter_context(path.open("w")) for path in self._outputs)
            command = [
                *within,
                *(["sh", "-c", f'exec "$@" {shell}', "sh"] if shell else []),
                sys.executable,
                "-m",
                *words,
            ]
            self.process = subprocess.Popen(command, cwd=folder, env=clean, stdout=out, stderr=err)

    def output(self) -> str:
        """What it has printed on standard output so far."""
        return self._outputs[0].read_text()

    def errors(self) -> str:
        """What it has printed on standard error so far."""
        return self._outputs[1].read_text()

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Returns when the condition is true, looking every 2 ms. Fails when the process ends
        before, or it takes too long."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, f"ended before: {what}\n{self._text()}"
            assert time.monotonic() < end, f"waited too long: {what}\n{self._text()}"
            time.sleep(0.002)

    def stop_in(self, condition: Callable[[], object], what: str) -> None:
        """Returns with the process stopped while the condition is true, however short it is
        true."""
        while True:
            self.wait_for(condition, what)
            self.signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if condition():
                return
            self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, status: int | None = 0) -> Done:
        """Waits for its end, and for this exit status (None: any)."""
        self.process.wait(timeout=PATIENCE)
        seconds = time.monotonic() - self._began
        assert status is None or self.process.returncode == status, (
            f"status {self.process.returncode}, not {status}\n{self._text()}"
        )
        out, err = (path.read_text() for path in self._outputs)
        for path in self._outputs:
            path.unlink()
        return Done(self.process.returncode, out, err, seconds)

    def kill(self) -> None:
        self.process.kill()
        self.end(status=-signal.SIGKILL)

    def _text(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self._outputs if path.exists())


@contextlib.contextmanager
def running(
    folder: pathlib.Path,
    *words: str,
    environment: dict[str, str] | None = None,
    shell: str = "",
    within: Sequence[str] = (),
) -> Iterator[Running]:
    """`python -m WORDS…` in a folder, dead at the end of the block. shell, within: as of
    Running."""
    command = Running(folder, words, environment, shell, within)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.wait()


def training(workdir: pathlib.Path, *flags: str, devices: int = DEVICES) -> list[str]:
    """The words of a training command on simulated devices; the recipe is beside the workdir."""
    return [
        "jaxtrain.train",
        "--config=recipe.py",
        f"--workdir={workdir.name}",
        f"--cpu_devices={devices}",
        *flags,
    ]


def train(
    workdir: pathlib.Path,
    *flags: str,
    status: int | None = 0,
    devices: int = DEVICES,
    environment: dict[str, str] | None = None,
) -> Done:
    """Runs the training command to its end."""
    with running(
        workdir.parent, *training(workdir, *flags, devices=devices), environment=environment
    ) as command:
        return command.end(status)


# --- what a run has left --------------------------------------------------------------------------


def losses(workdir: pathlib.Path) -> dict[int, tuple[float, float]]:
    """step → (loss, gradient norm) of the training steps; each may be there once."""
    records = [record for record in read_metrics(workdir) if "loss" in record]
    found = {record["step"]: (record["loss"], record["grad_norm"]) for record in records}
    assert len(found) == len(records), "a step is there twice"
    return found


def last_step(workdir: pathlib.Path) -> int:
    """The last training step that is logged, 0 if none is."""
    return max((record["step"] for record in read_metrics(workdir) if "loss" in record), default=0)


def checkpoints(workdir: pathlib.Path) -> list[int]:
    """The finished checkpoints."""
    folder = workdir / "checkpoints"
    return (
        sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
        if folder.exists()
        else []
    )


def stored_parameters(workdir: pathlib.Path, step: int) -> list[np.ndarray]:
    """The arrays of a checkpoint's parameters, float64; of independent replicas [replicas, …]."""
    folder = epath.Path(workdir / "checkpoints" / str(step))
    arrays = reading.open_arrays(folder, read_database(folder / STATE))
    return [
        np.asarray(array.read().result(), np.float64)
        for name, array in arrays.items()
        if name.startswith("params/")
    ]


def assert_norm_is_stored(workdir: pathlib.Path, step: int) -> None:
    """The logged norm of the parameters is that of the checkpoint of the same step, to rounding of
    float32."""
    squares = sum(np.square(array).sum() for array in stored_parameters(workdir, step))
    (norm,) = [r["param_norm"] for r in read_metrics(workdir) if r["step"] == step and "loss" in r]
    assert norm == pytest.approx(np.sqrt(squares), rel=1e-6), f"step {step}"


def unfinished(workdir: pathlib.Path) -> list[str]:
    """Checkpoints that are being saved, or were when the process was killed."""
    try:
        names = os.listdir(workdir / "checkpoints")
    except FileNotFoundError:  # the check at the start makes the folder, and removes it
        return []
    trials = (name for name in names if name.startswith(TRIAL_NAME))
    return [name for name in names if not name.isdigit() and name not in (LOSSES, RUN_ID, *trials)]


def copy_up_to(step: int, workdir: pathlib.Path, new: pathlib.Path) -> None:
    """A workdir as it was when `step` had been saved, but for later records of its metrics."""
    shutil.copytree(workdir, new, dirs_exist_ok=True)
    for later in [s for s in checkpoints(new) if s > step]:
        shutil.rmtree(new / "checkpoints" / str(later))
    assert checkpoints(new)[-1] == step


def contents(folder: pathlib.Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder: its time of change and its bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }


def stored_numbers_are_finite(workdir: pathlib.Path, step: int) -> bool:
    """Whether all of a checkpoint's arrays are; False also if it has none."""
    with ocp.StandardCheckpointer() as plain:
        arrays = jax.tree.leaves(plain.restore(workdir / "checkpoints" / str(step) / "state"))
    return bool(arrays) and all(np.isfinite(array).all() for array in arrays)


def assert_same_trajectory(found: dict, expected: dict) -> None:
    """Losses of all of `found`'s steps to 1e-5 relative, gradient norms, which Adam's steps drive
    apart sooner, to 1e-4."""
    for step, (loss, norm) in found.items():
        assert loss == pytest.approx(expected[step][0], rel=1e-5, abs=0), f"step {step}"
        assert norm == pytest.approx(expected[step][1], rel=1e-4, abs=0), f"step {step}"
