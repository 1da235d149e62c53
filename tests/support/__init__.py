"""What tests share: small configs, plain references, readers of compiled programs, runs of the command."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]  # of the repository

# The package's rooms from the lowest up; a room imports from those before it alone (test_imports.py).
ROOMS = "schedule config run devices data parallel models runtime training generation checkpoint plan".split()
