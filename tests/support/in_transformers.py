"""Scripts of this folder in processes with transformers (requirements/transformers.txt)."""

import os
import subprocess
import sys

from support import ROOT

PACKAGES = ROOT / ".venv-transformers"
INSTALL_COMMAND = (
    f"python -m pip install --no-deps --target {PACKAGES.name} -r requirements/transformers.txt"
)


def has(package: str) -> bool:
    """True if a package is there for `run_script`."""
    return (PACKAGES / package).exists()


def run_script(script: str, *arguments: object) -> None:
    """Runs a script of this folder with the packages of PACKAGES; it must succeed."""
    environment = os.environ | {"PYTHONPATH": str(PACKAGES), "HF_HUB_OFFLINE": "1"}
    path = ROOT / "tests" / "support" / script
    words = [sys.executable, str(path), *map(str, arguments)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
