"""Runs of several processes that are disturbed: for tests/chaos."""

import pathlib


def launched(
    workdir: pathlib.Path,
    restarts: int,
    *flags: str,
    module: str = "jaxtrain.train",
    before: tuple[str, ...] = (),
    devices: int = 1,
    processes: int = 2,
) -> list[str]:
    """The words of a launcher of some processes, which starts them again so often. before: words
    before the flags; devices: of each process."""
    launcher = [
        "jaxtrain.launch",
        f"--processes={processes}",
        f"--devices_per_process={devices}",
        f"--restarts={restarts}",
        f"--module={module}",
    ]
    return [*launcher, "--", *before, "--config=recipe.py", f"--workdir={workdir.name}", *flags]
