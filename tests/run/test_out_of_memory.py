"""run/out_of_memory.py: the words of each platform that say so, recorded from compilers, allocators
and libraries, and their figures; whatever else is raised stays what it is."""

import errno
import os
import resource
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxtrain import cli
from jaxtrain.config import ConfigError
from jaxtrain.run import out_of_memory
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.out_of_memory import OutOfMemoryError, named

GIB = 2**30
JAX = jax.errors.JaxRuntimeError
TPU = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm."


def said(error: BaseException, advice=lambda asked, there: "") -> str:
    with pytest.raises(OutOfMemoryError) as raised, named(advice):
        raise error
    assert raised.value.status == ExitStatus.OUT_OF_MEMORY == 82
    return str(raised.value)


@pytest.mark.parametrize(
    ("error", "asked", "there"),
    [
        (JAX("RESOURCE_EXHAUSTED: Out of memory allocating 28660090904 bytes."), 28660090904, 0),
        (
            JAX("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."),
            16 * GIB,
            0,
        ),
        (
            JAX(
                "RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B) on "
                "device ordinal 0"
            ),
            2 * GIB,
            0,
        ),
        (
            JAX(f"{TPU} Used 20.50G of 15.50G hbm. Exceeded hbm capacity by 5.00G."),
            20.5 * GIB,
            15.5 * GIB,
        ),
        (
            JAX(
                "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
                "memory required for HLO temporaries (516.50G) exceeds available HBM (95.50G)"
            ),
            516.5 * GIB,
            95.5 * GIB,
        ),
        (
            JAX(
                "RESOURCE_EXHAUSTED: Attempting to allocate 2.00G. That was not possible. There "
                "are 1.25G free.; (0x0x0_HBM0)"
            ),
            2 * GIB,
            1.25 * GIB,
        ),
        (MemoryError(), 0, 0),
        (MemoryError("std::bad_alloc"), 0, 0),
        (RuntimeError("std::bad_alloc"), 0, 0),
        (RuntimeError("can't start new thread"), 0, 0),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), 0, 0),
        (ImportError("libx.so: failed to map segment: Cannot allocate memory"), 0, 0),
    ],
    ids=lambda value: f"{value!r:.60}" if isinstance(value, Exception) else "",
)
def test_words_and_figures(error, asked, there):
    figures = []
    line = said(error, lambda *known: figures.append(known) or ": use less")
    assert figures[0][0] == asked and (figures[0][1] == there or not there)
    assert figures[0][1] > 0  # of the host, where no device says it
    assert line.startswith("out of memory: ") and line.endswith(
        f"{figures[0][1]:,} there: use less"
    )
    assert (f"{int(asked):,} bytes asked for, " in line) == bool(asked)


def test_numpys_own():
    with pytest.raises(OutOfMemoryError, match=r"memory: [\d,]{20,} bytes asked for, [\d,]+ there"):
        with named():
            np.empty(2**50)


@pytest.mark.parametrize(
    "error",
    [
        JAX("RESOURCE_EXHAUSTED: run/profile/x.xplane.pb; No space left on device"),
        JAX("INTERNAL: a fault"),
        JAX(
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack "
            "for %gmm.7. Scoped allocation with size 17.00M and limit 16.00M exceeded"
        ),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        ValueError("cannot reshape array of size 3"),
        KeyError("memory"),
        ConfigError("data.source", "out of memory", "is no path"),
    ],
    ids=repr,
)
def test_other_errors_stay(error):
    with pytest.raises(type(error)) as raised, named():
        raise error
    assert raised.value is error


def test_a_devices_memory(monkeypatch):
    """Where the platform says it, and an error of jax is about it."""

    class Device:
        def memory_stats(self):
            return {"bytes_limit": 7}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert said(JAX("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")).endswith(
        "9 bytes asked for, 7 there"
    )
    assert not said(MemoryError()).endswith(" 7 there")


def test_a_processs_limit():
    """Of `ulimit -v`, in a process of its own."""
    program = (
        "import resource\n"
        "from jaxtrain.run import out_of_memory as memory\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({GIB}, {GIB}))\n"
        "print(memory._free(MemoryError()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert 0 < int(done.stdout) < GIB, done.stderr
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != GIB


def test_a_system_that_does_not_say(monkeypatch):
    monkeypatch.setattr(out_of_memory.pathlib.Path, "exists", lambda path: False)
    assert said(MemoryError()) == "out of memory: " + said(MemoryError()).partition(": ")[2]
    assert "there" not in said(MemoryError())


def test_a_command_ends_with_a_line(capsys):
    def main(argv):
        raise MemoryError("Unable to allocate\n7.00 GiB for an array")

    assert cli.command(main)([]) == 82
    assert capsys.readouterr().err.startswith(
        f"error: out of memory: {7 * GIB:,} bytes asked for, "
    )
