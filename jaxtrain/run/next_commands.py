"""The last lines of a run: where its files are, and the commands that come next."""

import os
import pathlib
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from jaxtrain.config import flag_text
from jaxtrain.run.files import CONFIG_FILE


def next_commands(
    folder: pathlib.Path, generate: Mapping[str, Any], train: Mapping[str, Any], processes: int
) -> list[str]:
    """Lines of text for a run in `folder` that has all its steps: its files; a command that writes
    text; one that trains on. A shell in the present folder takes them as they are.

    generate, train: flags of these commands; the run's folder is added
    processes: of the run; how several were started only the user knows
    """
    python = shlex.quote(sys.executable.removeprefix(os.getcwd() + os.sep))
    flags = " ".join(flag_text(name, value) for name, value in train.items())
    again = f"{python} -m jaxtrain.train {flag_text('config', folder / CONFIG_FILE)} {flags}"
    words = [flag_text(name, value) for name, value in generate.items()]
    return [
        f"files: {folder}: checkpoints/, {CONFIG_FILE}, metrics.jsonl, loss.png, goodput.png",
        " ".join(["write text:", python, "-m jaxtrain.generate", *words]),
        f"train on: {again if processes == 1 else f'the same command with {flags}'}",
    ]
