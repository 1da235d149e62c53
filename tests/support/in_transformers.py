"""Scripts of this folder in processes with transformers (requirements/transformers.txt), and with
the owners of formats of data (requirements/formats.txt)."""

import os
import subprocess
import sys

from support import ROOT

PACKAGES, FORMATS = ROOT / ".venv-transformers", ROOT / ".venv-formats"
INSTALL, OF_FORMATS = "python -m pip install --no-deps --target", "requirements/formats.txt"
INSTALL_COMMAND = f"{INSTALL} {PACKAGES.name} -r requirements/transformers.txt"
INSTALL_FORMATS = f"{INSTALL_COMMAND}; {INSTALL} {FORMATS.name} -r {OF_FORMATS}"


def has(package: str) -> bool:
    """True if a package is there for `run_script`."""
    return any((folder / package).exists() for folder in (PACKAGES, FORMATS))


def run_script(script: str, *arguments: object) -> None:
    """Runs a script of this folder with the packages of PACKAGES and FORMATS; it must succeed."""
    paths = {"PYTHONPATH": f"{PACKAGES}{os.pathsep}{FORMATS}"}
    environment = os.environ | paths | {"HF_HUB_OFFLINE": "1"}
    path = ROOT / "tests" / "support" / script
    words = [sys.executable, str(path), *map(str, arguments)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
