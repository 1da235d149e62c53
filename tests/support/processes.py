"""What /proc says about processes that a test has started."""

import os
import pathlib
import time


def children(pid: int) -> list[int]:
    """The processes that a process has started and that still run."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if int(parent) == pid and state != "Z":
            found.append(int(path.parent.name))
    return sorted(found)


def command_line(pid: int) -> str:
    """The words of a process's command; "" if it has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def process_of_run(launcher: int, number: int) -> int | None:
    """The process of a launcher that has this number, None while there is none."""
    return next(
        (pid for pid in children(launcher) if f"--process_id={number} " in f"{command_line(pid)} "),
        None,
    )


def assert_gone(pids: list[int]) -> None:
    """Waits for the end of processes."""
    end = time.monotonic() + 10
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < end, [command_line(pid) for pid in left]
        time.sleep(0.05)
