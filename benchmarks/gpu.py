"""The training step on one GPU against the same model in PyTorch, and each kernel against its
fallback: within 8 minutes on an H100 or H200.

    python benchmarks/gpu.py [--minutes=8] [--cases=gpt2_124m,gpt3_xl]
                             [--sides=jaxtrain,torch,kernels] [--json=FILE] [--config.… …]
    python benchmarks/gpu.py --device=cpu --tiny     the same on shapes that a CPU runs in a minute
                                                     or two, to see that all of it works

Needs the packages of benchmarks/requirements-gpu.txt and the trainer's (JAXTRAIN_EXTRAS=cuda13). If
the two want different CUDA libraries, --torch_python names another Python, which needs only torch
and numpy.

A side of a case is a process of its own, and they take turns. Both have the same batches, weights,
precision, recomputation and learning rates; their losses and norms of gradients are then the same
but for rounding, which says that the models are.

    gpu_cases.py                     the cases and their order
    gpu_step.py, gpu_kernels.py      our side
    torch_step.py, torch_models.py   PyTorch's side
    gpu_table.py                     the printed tables
"""

import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).parents[1]
sys.path[:0] = [
    path for path in (str(REPOSITORY), str(REPOSITORY / "benchmarks")) if path not in sys.path
]

import gpu_table  # noqa: E402 (the path comes first)
from arguments import fail  # noqa: E402
from gpu_cases import (  # noqa: E402
    CASES,
    KERNELS,
    OURS,
    TINY_STEPS,
    TORCH,
    WEIGHTS,
    Case,
    Job,
    config_of,
    expected_seconds,
    jobs,
    write_case,
)
from worker import Outcome, run_worker  # noqa: E402

from jaxtrain.config import Config, ConfigError  # noqa: E402
from jaxtrain.config.flags import Flag, read_flags  # noqa: E402
from jaxtrain.config.sizes import GPU_MEMORY  # noqa: E402

SIDES = (OURS, TORCH, KERNELS)
SCRIPTS = {OURS: "gpu_step.py", TORCH: "torch_step.py", KERNELS: "gpu_kernels.py"}
LAST_SECONDS = 5.0  # kept for the tables
# The environment of workers on a GPU, where the user has no other: one GPU, and its memory as far
# as possible. jax takes 0.75 of it otherwise, and torch leaves gaps between what it has taken.
DEFAULTS = {
    "CUDA_VISIBLE_DEVICES": "0",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": str(GPU_MEMORY),
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
COMPILED = {"cuda": "blocks", "cpu": "none"}  # on a CPU a compilation takes minutes
FLAGS = (
    Flag("device", "cuda", "cuda, or cpu"),
    Flag("tiny", False, "small shapes, three steps, one round"),
    Flag(
        "minutes", 8.0, "after which it is over; what there was no time for is named", at_least=0.1
    ),
    Flag("cases", "", "names, with semicolons between them; empty: all"),
    Flag("sides", ",".join(SIDES), "jaxtrain, torch, kernels"),
    Flag("rounds", 2, "rounds of each case, where there is time", at_least=1),
    Flag("steps", 0, "timed steps of a round; 0: the case's own number", at_least=0),
    Flag(
        "torch_compile",
        "",
        "torch.compile of: blocks, all by one code; model, in one piece; none, for a CPU; "
        "empty: by the device",
    ),
    Flag("torch_python", sys.executable, "the Python that has torch"),
    Flag("json", "", "file for all figures"),
    Flag("logs", "", "folder that keeps what the workers print"),
)


def main(argv: list[str]) -> None:
    """Runs a session and prints its report."""
    reading = read_flags(
        [word for word in argv if word != "--"], __doc__ or "", FLAGS, with_config=True
    )
    if reading.errors:
        fail(str(reading.errors[0]))
    values, deadline = reading.values, time.monotonic() + 60 * reading.values["minutes"]
    try:
        wanted = [
            (case, config_of(case, values["tiny"], reading.overrides))
            for case in chosen_cases(values)
        ]
        check(values)
        values["torch_compile"] = values["torch_compile"] or COMPILED[values["device"]]
    except (ConfigError, ValueError) as error:
        fail(str(error))
    with tempfile.TemporaryDirectory(prefix="jaxtrain-gpu-") as folder:
        session = Session(
            values,
            {case.name: (case, config) for case, config in wanted},
            pathlib.Path(folder),
            deadline,
        )
        session.run()
    report = session.report()
    print("\n" + gpu_table.text(report), flush=True)
    if values["json"]:
        pathlib.Path(values["json"]).write_text(json.dumps(report, indent=1))
    if not (session.results or session.kernels):
        sys.exit(1)


def chosen_cases(values: dict) -> list[Case]:
    """The cases that --cases names. Raises ValueError."""
    known = {case.name: case for case in CASES}
    names = (
        [name.strip() for name in values["cases"].split(";")] if values["cases"] else list(known)
    )
    for name in names:
        if name not in known:
            raise ValueError(
                f"--cases={name!r} is none of {'; '.join(known)}: use --cases={next(iter(known))}"
            )
    return [known[name] for name in names]


def check(values: dict) -> None:
    """Raises ValueError, one line, for flags that do not work together or here."""
    sides = values["sides"].split(",")
    for side in sides:
        if side not in SIDES:
            raise ValueError(f"--sides={side!r} is none of {', '.join(SIDES)}: use --sides={OURS}")
    if TORCH in sides and OURS not in sides:
        raise ValueError(
            f"--sides={values['sides']} has nothing that writes torch's weights: use "
            f"--sides={OURS},{values['sides']}"
        )
    if values["torch_compile"] not in ("", "blocks", "model", "none"):
        raise ValueError(
            f"--torch_compile={values['torch_compile']!r} is none of blocks, model, none: use "
            "--torch_compile=blocks"
        )
    if values["torch_compile"] == "none" and values["device"] != "cpu":
        raise ValueError(
            "--torch_compile=none would keep all scores of attention in memory: use "
            "--torch_compile=blocks"
        )
    if values["device"] not in COMPILED:
        raise ValueError(
            f"--device={values['device']!r} is none of {', '.join(COMPILED)}: use --device=cuda"
        )
    if values["device"] == "cpu" and not values["tiny"]:
        raise ValueError(
            "--device=cpu would take days with shapes for a GPU: use --device=cpu --tiny"
        )
    if TORCH in sides:
        python = values["torch_python"]
        try:
            tried = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
        except OSError as error:
            raise ValueError(f"--torch_python={python} does not run: {error.strerror}") from error
        if tried.returncode:
            install = f"{python} -m pip install -r benchmarks/requirements-gpu.txt"
            raise ValueError(
                f"--torch_python={python} has no torch: use {install}, or leave it out by "
                f"--sides={OURS},{KERNELS}"
            )
    if values["device"] == "cuda" and not driver():
        raise ValueError(
            "--device=cuda finds no NVIDIA GPU (nvidia-smi names none): use --device=cpu --tiny"
        )


class Session:
    """A run of the command: its jobs, one after the other, and their results.

    results: (case's name, side, round) → the worker's result
    kernels: results of the comparisons
    remarks: lines about jobs that failed or were left out
    """

    def __init__(
        self,
        values: dict,
        cases: dict[str, tuple[Case, Config]],
        folder: pathlib.Path,
        deadline: float,
    ):
        self.values, self.cases, self.folder, self.deadline = values, cases, folder, deadline
        self.results: dict[tuple[str, str, int], dict] = {}
        self.kernels: list[dict] = []
        self.remarks: list[str] = []
        self.measured: dict[tuple[str, str], float] = {}
        self.failed: set[tuple[str, str]] = set()
        self.began = time.monotonic()

    def run(self) -> None:
        """Runs the jobs for which there is time."""
        rounds = 1 if self.values["tiny"] else self.values["rounds"]
        wanted = list(
            jobs([case for case, _ in self.cases.values()], self.values["sides"].split(","), rounds)
        )
        for job in wanted:
            self._run(job)

    def _run(self, job: Job) -> None:
        remaining, needs = (
            self.deadline - LAST_SECONDS - time.monotonic(),
            expected_seconds(job, self.measured, self.values["tiny"]),
        )
        why = self._in_the_way(job)
        if not why and remaining < needs:
            why = f"{max(0, remaining):.0f} s are left, and it takes about {needs:.0f}"
        if why:
            print(f"{job.name}: left out: {why}", flush=True)
            self.remarks.append(f"{job.name}: left out: {why}")
            return
        folder = self._folder(job)
        outcome = run_worker(
            self._command(job, folder), self._environment(job), self._log(job), remaining
        )
        self._keep(job, outcome)
        # the next round writes them again: those of all cases are too much for many a disk
        if job.side == TORCH:
            shutil.rmtree(folder / WEIGHTS)

    def _in_the_way(self, job: Job) -> str:
        """The reason for which a job makes no sense, or ""."""
        name = job.case.name if job.case else ""
        if (name, job.side) in self.failed:
            return "its first round failed"
        if job.side == TORCH and not (self._folder(job) / WEIGHTS).exists():
            return f"it begins with the weights of {OURS}'s side, which has left none"
        return ""

    def _keep(self, job: Job, outcome: Outcome) -> None:
        name = job.case.name if job.case else ""
        print(f"{job.name}: {outcome.failure or 'done'} ({outcome.seconds:.0f} s)", flush=True)
        if outcome.result is None:
            self.failed.add((name, job.side))
            self.remarks.append(f"{job.name}: {outcome.failure}")
            return
        self.measured[name, job.side] = outcome.seconds
        if job.case is None:
            self.kernels += outcome.result["kernels"]
        else:
            self.results[name, job.side, job.round] = outcome.result

    def _folder(self, job: Job) -> pathlib.Path:
        """A case's folder, which both sides share, with its case.json."""
        names = list(self.cases)
        folder = self.folder / (KERNELS if job.case is None else str(names.index(job.case.name)))
        if not folder.exists():
            folder.mkdir()
            common = {"device": self.values["device"], "tiny": self.values["tiny"]}
            if job.case is None:
                dtype = "float32" if self.values["device"] == "cpu" else "bfloat16"
                (folder / "case.json").write_text(json.dumps(common | {"dtype": dtype}))
            else:
                case, config = self.cases[job.case.name]
                steps = self.values["steps"] or (TINY_STEPS if self.values["tiny"] else case.steps)
                torch = TORCH in self.values["sides"].split(",")
                write_case(
                    folder,
                    config,
                    **common,
                    steps=steps,
                    torch=torch,
                    torch_compile=self.values["torch_compile"],
                )
        return folder

    def _command(self, job: Job, folder: pathlib.Path) -> list[str]:
        python = self.values["torch_python"] if job.side == TORCH else sys.executable
        return [python, str(REPOSITORY / "benchmarks" / SCRIPTS[job.side]), str(folder)]

    def _log(self, job: Job) -> pathlib.Path:
        folder = pathlib.Path(self.values["logs"] or self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{job.name.replace(', ', '_').replace(' ', '_')}.log"

    def _environment(self, job: Job) -> dict[str, str]:
        """The environment of a job's process, with compilation caches of this session."""
        paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        environment = os.environ | {
            "PYTHONPATH": paths,
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "xla"),
        }
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")
        if self.values["device"] == "cpu":
            return environment | {
                "JAX_PLATFORMS": "cpu",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
            }
        # Of several GPUs one; and where jax finds none, it must not go on with a CPU.
        return {**DEFAULTS, **environment, "JAX_PLATFORMS": "cuda"}

    def report(self) -> dict:
        """The figures as --json has them."""
        rounds = [
            {"case": c, "side": s, "round": r, **result}
            for (c, s, r), result in self.results.items()
        ]
        versions: dict = {}
        for figures in rounds:
            versions |= figures.pop("versions")
        settings = {name: gpu_table.settings(config) for name, (_, config) in self.cases.items()}
        return {
            "date": datetime.date.today().isoformat(),
            "minutes": (time.monotonic() - self.began) / 60,
            "versions": versions | {"driver": driver()}
            if self.values["device"] == "cuda"
            else versions,
            "torch_compile": self.values["torch_compile"],
            "tiny": self.values["tiny"],
            "settings": settings,
            "rounds": rounds,
            "kernels": self.kernels,
            "remarks": self.remarks,
        }


def driver() -> str:
    """The NVIDIA driver's version, as nvidia-smi says it; "" where there is no GPU."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return ""
    return (
        done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else ""
    )


if __name__ == "__main__":
    main(sys.argv[1:])
