"""The arguments that benchmarks share."""

import argparse
import sys
from typing import NoReturn


def parser(description: str | None, changes: str) -> argparse.ArgumentParser:
    """A parser with a script's docstring as its help, for flags and, after --, those of training.

    changes: the help of the flags after --
    """
    arguments = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("changes", nargs="*", help=changes)
    return arguments


def fail(message: str) -> NoReturn:
    """Ends the process with one line on standard error and status 2."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(2)
