"""Every script of benchmarks/, docs/, scripts/ and tests/by_hand/ runs to its end at its smallest
size, with the processes that it starts.

A script runs inside this process, which has imported jax already; the processes that it starts are
real ones. A new file fails `test_every_script_is_run` until it has a smallest run here, or a test
elsewhere that runs it.
"""

import dataclasses
import importlib.util
import os
import re
import runpy
import sys

import pytest
from support import ROOT, hardware_file

from jaxtrain.planner.programs.topology import Platform

PATTERNS = (
    "benchmarks/*.py",
    "docs/*.py",
    "scripts/*.*",
    "scripts/launch/*.*",
    "tests/by_hand/[!_]*.*",
)
SCRIPTS = sorted(
    {
        str(path.relative_to(ROOT))
        for pattern in PATTERNS
        for path in ROOT.glob(pattern)
        if not path.name.startswith("test_")
    }
)


@dataclasses.dataclass(frozen=True)
class Smallest:
    """A script's smallest run.

    arguments: HERE in them is the test's folder
    says:      texts that standard output or standard error has at its end
    processes: other scripts that it starts as processes
    """

    arguments: list[str]
    says: tuple[str, ...]
    status: int = 0
    processes: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


HERE = "HERE"
MODEL = [
    *(
        "--config.model.layers=2",
        "--config.model.width=16",
        "--config.model.heads=4",
        "--config.model.mlp_width=32",
    ),
    *(
        "--config.model.vocab_size=257",
        "--config.data.sequence_length=16",
        f"--config.data.source={ROOT / 'README.md'}",
    ),
]
FLAT = [
    *("--config.mesh.stage=1", "--config.mesh.model=1", "--config.pipeline.microbatches=1"),
    *("--config.pipeline.schedule=1f1b", "--config.pipeline.repeats=1"),
]
STAGES = [
    *(
        "--config.mesh.data=4",
        "--config.mesh.stage=2",
        "--config.mesh.model=1",
        "--config.pipeline.microbatches=2",
    ),
    *(
        "--config.pipeline.schedule=1f1b",
        "--config.pipeline.repeats=1",
        "--config.pipeline.remat=none",
    ),
]
RUNS = {
    # Its process imports all that it needs, and then finds no compiler: a compilation takes a
    # minute (benchmarks/test_ahead_figures.py).
    "benchmarks/ahead.py": Smallest(
        ["--layout=pipeline", "--platform=v5p"],
        ("refused: RuntimeError: JAX TPU support not installed",),
        1,
    ),
    "benchmarks/checkpoint.py": Smallest(
        ["--every=1", "--saves=1", "--pairs=1", f"--folder={HERE}", "--", *MODEL, *FLAT],
        ("a save every 1 steps", "blocked"),
    ),
    "benchmarks/cpu_step.py": Smallest(
        ["--layouts=data8", "--steps=1", f"--json={HERE}/steps.json", "--", *MODEL], ("\ndata8 ",)
    ),
    "benchmarks/windows.py": Smallest(
        ["--tokens=64", "--batch=1", "--heads=2", "--kv_heads=1", "--size=8", "--windows=16"],
        ("\nwindow    16: ",),
    ),
    "benchmarks/diloco.py": Smallest(
        [
            "--steps=1",
            "--inner_steps=1",
            "--cases=apart, int8",
            "--",
            *MODEL,
            *FLAT,
            "--config.mesh.data=4",
        ],
        ("\napart, int8 ",),
    ),
    "benchmarks/gpu.py": Smallest(
        ["--device=cpu", "--tiny", "--sides=jaxtrain,kernels", "--cases=gpt2_124m", "--steps=1"],
        ("gpt2_124m, jaxtrain: done", "kernels: done"),
        processes=("benchmarks/gpu_step.py", "benchmarks/gpu_kernels.py"),
    ),
    "benchmarks/mup.py": Smallest(
        [
            "--widths=16",
            "--rates=0.01",
            "--steps=1",
            f"--csv={HERE}/mup.csv",
            f"--picture={HERE}/mup.svg",
            "--",
            f"--config.data.source={ROOT / 'README.md'}",
            "--config.model.layers=1",
        ],
        ("with μP: best rate 0.01 at width 16: by 1 ×", "\nwithout: "),
    ),
    "benchmarks/optimizers.py": Smallest(
        ["--layouts=data8.zero1", "--rounds=1", "--", *MODEL], ("\ndata8.zero1 ",)
    ),
    "benchmarks/offload_disk.py": Smallest(
        [f"--folder={HERE}", "--layers=1", "--width=32", "--pairs=1"],
        ("update over disk:", "1 layers: peak memory"),
    ),
    # As ahead.py, whose process is the same one.
    "benchmarks/long_context.py": Smallest(
        ["--lengths=1024", "--modes=ring"], ("refused: NotImplementedError: topology",), 1
    ),
    "benchmarks/overhead.py": Smallest(
        ["--rounds=1", "--microbatches=1", "--", *MODEL], ("round 1: ", "ratio of CPU-seconds: ")
    ),
    # The recorded figures; tests/benchmarks/test_peer_ahead.py has a MaxText that stands in.
    "benchmarks/peer_ahead.py": Smallest([], ("seconds with exposed collectives",)),
    "benchmarks/pipeline.py": Smallest(
        [f"--config={ROOT}/configs/tiny.py", *MODEL, *STAGES],
        ("measured step", "--config.pipeline.times="),
    ),
    "benchmarks/planned_order.py": Smallest(
        ["--layouts=data8", "--rounds=1", f"--hardware={HERE}/hardware.json", "--", *MODEL],
        ("planned s", "\ndata8 "),
    ),
    "benchmarks/planner.py": Smallest(
        [f"--rows={ROOT}/benchmarks/published/measured_here.csv"], ("by kind of run",)
    ),
    "benchmarks/preparing.py": Smallest(
        ["--mb=1", "--vocabulary=300", "--rounds=1"],
        ("tokenizers alone: ", "prepare reaches ", " by CPU-seconds"),
    ),
    "benchmarks/vocabulary.py": Smallest(
        ["--vocabulary=257", "--stages=4", "--", *MODEL, *STAGES], ("zb_v", "\nparallel ")
    ),
    "docs/draw_idea.py": Smallest([f"--out={HERE}/idea.svg"], ("wrote ",)),
    "docs/draw_stages.py": Smallest([f"--out={HERE}/stages.svg"], ("wrote ",)),
    "docs/draw_step.py": Smallest([f"--out={HERE}/step.svg"], ("wrote ",)),
    "tests/by_hand/fuzz.py": Smallest(
        [
            "--seed=1",
            "--invalid=1",
            "--commands=0",
            "--dry_run=0",
            "--valid=0",
            "--jobs=1",
            f"--folder={HERE}/fuzz",
        ],
        ("invalid: 1 of 1 refused",),
    ),
    # commands are run by tests/by_hand/test_try_docs.py
    "tests/by_hand/try_docs.py": Smallest(["--list", "--part=1/5"], ("python -m jaxtrain.",)),
    # What these start is not on every machine: Ray, and Slurm's daemons.
    "scripts/launch/ray_train.py": Smallest(["--help"], ("--gpus_per_worker",)),
    "tests/by_hand/rehearse_ray.py": Smallest([f"--packages={HERE}"], ("Ray is not in ",), 2),
    "tests/by_hand/rehearse_slurm.py": Smallest(
        [], ("error: ",), 2, environment={"PATH": "/nowhere"}
    ),
}
# Files that are run by a test of their own.
ELSEWHERE = {
    "benchmarks/torch_step.py": "tests/benchmarks/test_gpu_torch.py",  # needs torch
    "benchmarks/import_memory.py": "tests/benchmarks/test_import_memory.py",
    "benchmarks/maxtext_compile.py": "tests/benchmarks/test_peer_ahead.py",
    "docs/write_models.py": "tests/test_docs.py",
    "tests/by_hand/try_docs.sh": "tests/test_scripts.py",
    "tests/by_hand/fuzz_checkpoints.py": "tests/by_hand/test_fuzz_checkpoints.py",
    "tests/by_hand/fuzz_hf.py": "tests/by_hand/test_fuzz_hf.py",
    "tests/by_hand/fuzz_published.py": "tests/by_hand/test_fuzz_published.py",
    "tests/by_hand/fuzz_tokenizers.py": "tests/by_hand/test_fuzz_tokenizers.py",
    **{f"scripts/{name}.sh": "tests/test_scripts.py" for name in ("train", "test", "install")},
    **dict.fromkeys(
        (f"scripts/launch/jobset{end}.yaml" for end in ("", "_tpu", "_sweep")),
        "tests/launch/test_engines.py",
    ),
    **dict.fromkeys(
        (
            f"scripts/launch/{name}"
            for name in (
                *("skypilot.yaml", "tpu_vm.sh"),
                *("process_per_gpu.sh", "Dockerfile.dockerignore"),
            )
        ),
        "tests/launch/test_engines.py",
    ),
    **dict.fromkeys(
        (f"scripts/launch/slurm{end}" for end in (".sbatch", "_pyxis.sbatch", "_requeue.sh")),
        "tests/launch/test_slurm.py",
    ),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_run(script):
    """A file has a smallest run, or is started by one, or another script imports or sources it, or
    a test elsewhere runs it."""
    stem = (ROOT / script).stem
    if script in ELSEWHERE:
        assert stem in (ROOT / ELSEWHERE[script]).read_text(), (
            f"{ELSEWHERE[script]} does not run {script}"
        )
    elif script not in RUNS and not any(script in run.processes for run in RUNS.values()):
        assert '__name__ == "__main__"' not in (ROOT / script).read_text(), (
            f"{script} has no smallest run: add one to RUNS"
        )
        used = re.compile(
            rf'^ *(import|from) (by_hand import .*)?\b{stem}\b|^source .*/{stem}\.sh"$',
            re.MULTILINE,
        )
        users = [
            other
            for other in SCRIPTS
            if other != script and used.search((ROOT / other).read_text())
        ]
        assert users, f"no script uses {script}: add one to RUNS"


# Their rooms' own tests cover what these run.
LONG = [f"benchmarks/{name}.py" for name in ("diloco", "gpu", "mup", "offload_disk")]


@pytest.mark.parametrize(
    "script", [pytest.param(s, marks=[pytest.mark.full] * (s in LONG)) for s in RUNS]
)
def test_the_smallest_run(script, tmp_path, monkeypatch, capfd):
    run = RUNS[script]
    hardware_file.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    if script in ("benchmarks/ahead.py", "benchmarks/long_context.py"):
        if any(importlib.util.find_spec(module) for module in ("libtpu", "jax_plugins")):
            pytest.skip(
                "the compilers are installed in this environment: a compilation takes a minute"
            )
        monkeypatch.setattr(Platform, "missing", False)
    before = dict(os.environ)
    own = {"JAXTRAIN_CACHE": str(tmp_path / "cache"), "JAXTRAIN_COMPILERS": str(tmp_path)}
    os.environ.update(own | run.environment)
    monkeypatch.setattr(
        sys,
        "argv",
        [str(ROOT / script), *(word.replace(HERE, str(tmp_path)) for word in run.arguments)],
    )
    monkeypatch.setattr(sys, "path", [str((ROOT / script).parent), *sys.path])
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    finally:
        os.environ.clear()
        os.environ.update(before)
    out, err = capfd.readouterr()
    assert status == run.status, f"status {status}\n{out}\n{err}"
    for text in run.says:
        assert text in out + err, f"{text!r} is not in what it says:\n{out}\n{err}"
