"""Runs of two processes that are disturbed: for tests/chaos."""

import pathlib


def launched(
    workdir: pathlib.Path,
    restarts: int,
    *flags: str,
    module: str = "jaxtrain.train",
    before: tuple[str, ...] = (),
) -> list[str]:
    """The words of a launcher of two processes of one device each, which starts them again so
    often. before: words before the flags."""
    launcher = [
        "jaxtrain.launch",
        "--processes=2",
        "--devices_per_process=1",
        f"--restarts={restarts}",
        f"--module={module}",
    ]
    return [*launcher, "--", *before, "--config=recipe.py", f"--workdir={workdir.name}", *flags]
