"""`jaxtrain COMMAND …` or `python -m jaxtrain COMMAND …`: runs the module jaxtrain.COMMAND, or
that of a room which has several commands.

pyproject.toml installs it as `jaxtrain`. Each module parses its own flags; nothing slow is imported
here.
"""

import difflib
import runpy
import shlex
import sys
from collections.abc import Sequence

from jaxtrain import __version__
from jaxtrain.run import streams

COMMANDS = {
    "train": "train what a recipe describes, or continue it",
    "data": "corpora prepared before a run, and training sequences shown as the model sees them",
    "plan": "what a run needs, how fast it is and how to lay it out, before anyone pays",
    "generate": "text from a checkpoint",
    "schedule": "a pipeline schedule as a picture and in figures",
    "checkpoint": "checkpoints of runs: listed, verified, shown, compared, deleted, averaged",
    "convert": "published models (Hugging Face) to checkpoints, and back",
    "launch": "a run of several processes on this machine",
    "compare": "runs side by side: settings that differ, and their losses in one picture",
    "page": "a run as one HTML file, or served on this machine while it goes on",
    "sweep": "runs of one recipe that differ by settings, and their table",
    "track": "a run's records sent to wandb, trackio or mlflow",
}
IN_ROOMS = {name: f"experiments.{name}" for name in ("sweep", "compare", "page", "track")}
HELP = "\n".join(
    [
        "usage: jaxtrain COMMAND [flags]      (without installation: python -m jaxtrain "
        "COMMAND [flags])",
        "",
        "Trains transformers in JAX on a named device mesh.",
        "",
        "Commands (jaxtrain COMMAND --help has the flags of each):",
        *(f"    {name:10}  {doc}" for name, doc in COMMANDS.items()),
        "",
        "    --help      this text",
        "    --version   jaxtrain's version",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name (those of the process, if not given), which may end
    the process with a status of its own.

    `--help`, `--version` and no arguments at all print and give 0. What names no command gives 2,
    and one line on stderr.
    """
    return streams.run(_main, sys.argv[1:] if argv is None else argv)


def _main(argv: Sequence[str]) -> int:
    command, *rest = [*argv] or ["--help"]
    if command in ("--help", "-h"):
        print(HELP)
    elif command == "--version":
        print(f"jaxtrain {__version__}")
    elif command in COMMANDS:
        sys.argv[1:] = rest
        module = IN_ROOMS.get(command, command)
        runpy.run_module(f"jaxtrain.{module}", run_name="__main__", alter_sys=True)
    else:
        print(" ".join(f"error: {_unknown(command, rest)}".split()), file=sys.stderr, flush=True)
        return 2
    return 0


def _unknown(command: str, rest: Sequence[str]) -> str:
    """The error for a first argument that names no command, with one that would work."""
    if command.startswith("-") and (after := next((word for word in rest if word in COMMANDS), "")):
        return f"{command!r} stands before the command: use jaxtrain {after} and then the flags"
    if command.startswith("-"):
        return (
            f"{command!r} stands in the place of a command: use jaxtrain train "
            f"{shlex.join([command, *rest])}"
        )
    near = difflib.get_close_matches(command, [*COMMANDS, "--help", "--version"], n=1, cutoff=0.5)
    return (
        f"{command!r} is an unknown command: use jaxtrain "
        f"{near[0] if near else ', '.join(COMMANDS)}"
    )


if __name__ == "__main__":
    sys.exit(main())
