"""Memory that is not there, for every command: which errors say so, the bytes that were asked for,
and those that the device or the host has. Standard library only."""

import contextlib
import pathlib
import re
import resource
import sys
from collections.abc import Callable, Iterator

from jaxtrain.run.exit_status import ExitStatus, RunError

_WORDS = re.compile(
    # a kernel that is too large for a core's own memory is a fault: no setting makes it fit
    "out of memory(?! in memory space [vs]mem)|bad_alloc|allocate memory|map segment|"
    "can't start new thread|"
    "(unable|failed|attempting) to (allocate|reserve)",
    re.IGNORECASE,
)
# "28660090904 bytes", "7.45 GiB", "20.10G": XLA's units are powers of 1024
_AMOUNT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?) ?(?:([KMGTPE])(?:iB|B)?|bytes|B)(?!\w)")
_UNITS = ["", *"KMGTPE"]


class OutOfMemoryError(RunError):
    """An allocation that the device or the host refused; the text is one line."""

    status = ExitStatus.OUT_OF_MEMORY


@contextlib.contextmanager
def named(advice: Callable[[int, int], str] = lambda asked, available: "") -> Iterator[None]:
    """A context that raises OutOfMemoryError in place of whatever jax, numpy, C++ and the system
    raise where memory is not there.

    advice: the rest of the line, from the bytes that were asked for and those that are there; 0 for
    what is not known
    """
    try:
        yield
    except (MemoryError, OSError, ImportError, RuntimeError, ValueError) as error:
        text, module = str(error), type(error).__module__
        # a refusal of jaxtrain's may quote such words, which are a setting's
        is_refusal = isinstance(error, ValueError) and module.startswith("jaxtrain.")
        if is_refusal or not (isinstance(error, MemoryError) or _WORDS.search(text)):
            raise
        asked, *others = [
            *(int(float(n) * 1024 ** _UNITS.index(unit)) for n, unit in _AMOUNT.findall(text)),
            0,
        ]
        # a TPU's compiler and allocator say both
        available = (others[0] if others and "hbm" in text.lower() else 0) or _free(error)
        known = [f"{asked:,} bytes asked for"] * bool(asked)
        known += [f"{available:,} there"] * bool(available)
        raise OutOfMemoryError(
            f"out of memory: {', '.join(known)}{advice(asked, available)}"
        ) from error


def _free(error: Exception) -> int:
    """Bytes that this process's first device has for programs, if an error of jax is about one that
    says so; else those of the host that are free and below the process's limit (ulimit -v). 0 where
    nobody says."""
    if type(error).__name__ == "JaxRuntimeError":
        stats = sys.modules["jax"].local_devices()[0].memory_stats()
        if stats and "bytes_limit" in stats:
            return int(stats["bytes_limit"])
    system, process = pathlib.Path("/proc/meminfo"), pathlib.Path("/proc/self/statm")
    if not system.exists():
        return 0
    free = 1024 * int(system.read_text().partition("MemAvailable:")[2].split()[0])
    limit, pages = resource.getrlimit(resource.RLIMIT_AS)[0], int(process.read_text().split()[0])
    return min(free, max(1, limit - pages * resource.getpagesize())) if limit > 0 else free
