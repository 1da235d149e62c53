"""Processes of checkpoint_worker.py, for tests."""

import os
import subprocess
import sys

from jaxtrain.launch import free_port
from support import ROOT


def start(folder, *arguments, devices: int) -> subprocess.Popen:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = [
        sys.executable,
        ROOT / "tests" / "support" / "checkpoint_worker.py",
        folder,
        *map(str, arguments),
    ]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run_together(folder, what, processes: int, *arguments, devices: int) -> list[str]:
    """The outputs of so many processes, which must end well. arguments: what follows the port;
    devices: of each."""
    port = free_port()
    running = [
        start(folder, *what, processes, number, port, *arguments, devices=devices)
        for number in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=180)[0] for process in running]
        assert all(process.returncode == 0 for process in running), "\n".join(outputs)
        return outputs
    finally:
        for process in running:
            process.kill()
