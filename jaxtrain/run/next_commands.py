"""The last lines of a run: where its files are, and the commands that come next."""

import os
import shlex
import sys

from jaxtrain.config import flag_text
from jaxtrain.run.files import CONFIG_FILE


def next_commands(
    folder: str, generate: dict[str, object], train: dict[str, object], processes: int
) -> list[str]:
    """Lines of text for a run in `folder` that has all its steps: its files; a command that writes
    text; one that trains on. A shell in the present folder takes them as they are.

    generate, train: flags of these commands, to which the run's folder is added
    processes: of the run; how several were started only the user knows
    """
    python = shlex.quote(sys.executable.removeprefix(os.getcwd() + os.sep))
    listed = lambda flags: " ".join(flag_text(name, value) for name, value in flags.items())
    same_command = (
        f"{python} -m jaxtrain.train {flag_text('config', os.path.join(folder, CONFIG_FILE))}"
    )
    return [
        f"files: {folder}: checkpoints/, {CONFIG_FILE}, metrics.jsonl, loss.png, goodput.png",
        f"write text: {python} -m jaxtrain.generate {listed({'workdir': folder} | generate)}",
        f"train on: {same_command if processes == 1 else 'the same command with'} {listed(train)}",
    ]
