"""The arguments that benchmarks share."""

import argparse


def parser(description: str | None, changes: str) -> argparse.ArgumentParser:
    """A parser with a script's docstring as its help, for flags and, after --, those of training.

    changes: the help of the flags after --
    """
    arguments = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("changes", nargs="*", help=changes)
    return arguments
