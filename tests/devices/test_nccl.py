"""devices/nccl.py, without a GPU: what it finds, refuses and says."""

import contextlib
import importlib.metadata
import platform
import subprocess
import sys

import jax
import pytest
from support import ROOT

import jaxtrain
from jaxtrain import cli, train_command as train
from jaxtrain.devices import nccl, startup
from jaxtrain.devices.cluster_environment import ClusterError
from jaxtrain.run import streams

LIBRARY = "int ncclGetVersion(int *number) { *number = 22902; return 0; }"


@pytest.fixture
def wheels(monkeypatch):
    """Versions of wheels that are installed, by name."""
    found: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return found


def test_the_version_of_a_wheel(wheels):
    wheels |= {"numpy": "2.3.4", "nvidia-nccl-cu12": "2.28.9", "nvidia-nccl-cu13": "2.30.7.1"}
    assert nccl.version() == (2, 30, 7)
    del wheels["nvidia-nccl-cu13"]
    assert nccl.version() == (2, 28, 9)


def test_no_version_where_there_is_no_library(wheels, monkeypatch):
    assert nccl.version() == ()


def test_the_library_that_the_linker_finds(tmp_path):
    (tmp_path / "nccl.c").write_text(LIBRARY)
    words = ["cc", "-shared", "-fPIC", "-o", tmp_path / "libnccl.so.2", tmp_path / "nccl.c"]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("needs a C compiler")
    program = "from jaxtrain.devices import nccl; print(nccl.version())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "(2, 29, 2)\n"


@pytest.mark.parametrize(
    "found, machine, refused",
    [
        ((2, 29, 2), "aarch64", True),
        ((2, 28, 9), "aarch64", True),
        ((2, 29, 3), "aarch64", False),
        ((2, 30, 0), "aarch64", False),
        ((2, 28, 9), "x86_64", False),
        ((), "aarch64", False),
    ],
)
def test_what_hangs_on_arm_is_refused(found, machine, refused):
    """In one line, with the flag that lets one insist."""
    context = pytest.raises(ClusterError) if refused else contextlib.nullcontext()
    with context as error:
        nccl.describe(found, 16, 16, machine=machine)
    if refused:
        said = str(error.value)
        assert said.startswith(f"NCCL {'.'.join(map(str, found))} hangs on aarch64")
        assert (error.value.status, "--old_nccl=true" in said, "\n" in said) == (2, True, False)
        _, flags = cli.parse(["--old_nccl=true"], "", train.FLAGS)
        assert nccl.describe(found, 16, 16, flags.old_nccl, machine)


def test_training_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "start_jax", lambda *arguments: None)
    monkeypatch.setattr(streams, "outlive", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(nccl, "version", lambda: (2, 28, 9))
    with pytest.raises(ClusterError, match="NCCL 2.28.9 hangs on aarch64"):
        jaxtrain.train(workdir=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_what_the_start_says():
    assert nccl.describe((2, 30, 7), 16, 16) == ["NCCL 2.30.7; 1 of 16 GPUs in a process"]
    line, note = nccl.describe((), 8, 1)
    assert line == "NCCL of an unknown version; 8 of 8 GPUs in a process"
    assert note.startswith("note: ") and "--processes=8 --" in note


def test_requirements_have_one_that_does_not_hang():
    text = (ROOT / "requirements/cuda13.txt").read_text()
    (pinned,) = [line for line in text.splitlines() if line.startswith("nvidia-nccl-cu13==")]
    found = tuple(map(int, pinned.partition("==")[2].split("#")[0].strip().split(".")))
    assert found >= nccl.LEAST_ON_ARM
