"""What tests share: small configs, plain references, readers of compiled programs, runs of the command."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]  # of the repository
