"""Starts processes of checkpoint_worker.py, for tests."""

import os
import subprocess
import sys

from support import ROOT


def start(folder, *arguments, devices: int) -> subprocess.Popen:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = [sys.executable, ROOT / "tests" / "support" / "checkpoint_worker.py", folder, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
