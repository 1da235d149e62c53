"""Object stores by fsspec: the options of their libraries, their errors in words, and reads that
wait an outage out. Checkpoints (checkpoint/stores.py) and sources talk to stores through this
module. No jax.

A read that fails is tried again, with waits of WAITS_S, for PATIENCE_S; meanwhile the watchdog does
not take the run for hung. What no wait mends (a file that is missing, a credential that is refused)
ends the run at once.
"""

import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import fsspec

from jaxtrain.config import addresses
from jaxtrain.data.errors import StoreAwayError, StoreError
from jaxtrain.data.stores import hub
from jaxtrain.run import streams, watchdog

T = TypeVar("T")


# Few attempts in the library, which does not tell of them: waited_out tries again, and the
# watchdog knows.
READING = {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 1}}
WAITS_S = (1.0, 2.0, 4.0, 8.0)  # between the attempts of a read; the last one stands for all others
PATIENCE_S = 3600.0  # seconds of failures, after which the run ends
TIMEOUTS = {
    "connect_timeout": 10,
    "read_timeout": 60,
    "retries": {"max_attempts": 4, "mode": "standard"},
}
LIBRARIES = (
    "botocore",
    "aiobotocore",
    "aiohttp",
    "s3fs",
    "gcsfs",
    "google",
    "asyncio",
    "requests",
    "httpx2",
)
# in the names of errors that no wait mends, and how gcsfs begins the texts of such ones
LASTING, REFUSED = (
    ("Credential", "Profile", "Validation", "Expired"),
    ("Forbidden: ", "Bad Request: "),
)
# What an information of fsspec has that is another for other content, the most certain first.
VERSIONS = ("ETag", "md5Hash", "generation", "etag", "blob_id", "mtime", "created")
# when the outage that was told began; setdefault and pop make one thread the first, and the last
_outage: dict[str, float] = {}
# Set when nobody needs what is read: no outage is waited out then, and nothing is read ahead, for
# the process would wait for that when it ends.
given_up = threading.Event()


def scheme_of(path: str | os.PathLike) -> str:
    """`gs`, `s3` or another scheme of an address; "" for a path of a file system."""
    scheme, separator, _ = os.fspath(path).partition("://")
    return scheme if separator else ""


def configure(scheme: str) -> None:
    """Sets the options of a store's library, for every file system of it that is made later."""
    # fsspec would list a folder once and believe that for good, but other processes write there.
    options = {"use_listings_cache": False} | (
        {"config_kwargs": TIMEOUTS} if scheme == "s3" else {}
    )
    fsspec.config.conf.setdefault(scheme, {}).update(options)
    # gcsfs logs what it raises, too, with a traceback
    logging.getLogger(addresses.PACKAGES[scheme]).setLevel(logging.CRITICAL)


def filesystem(address: str) -> Any:
    """The fsspec file system that reads sources in the store of an address. All threads share
    it."""
    return _filesystem(scheme_of(address))


@functools.cache
def _filesystem(scheme: str) -> Any:
    if f"{scheme}://" == hub.SCHEME:
        return hub.filesystem()
    configure(scheme)
    # fsspec's own instances are one for each thread, with connections of its own
    options = {"config_kwargs": READING} if scheme == "s3" else {}
    store = fsspec.filesystem(scheme, **options)
    store.retries = 1  # of s3fs and gcsfs
    return store


def failure(error: Exception) -> str:
    """The failure of a file system or a store, in words; "" for an error that does not come from
    them or the libraries that talk to them."""
    words = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, OSError):
        return error.strerror or words
    library = type(error).__module__.partition(".")[0]
    return words if library in LIBRARIES or words.startswith(REFUSED) else ""


def refusal(address: str, error: Exception) -> StoreError | None:
    """The error for an address that cannot be read, by its status one that may pass or one that
    does not; None for an error that does not come from a store."""
    if not (why := failure(error)):
        return None
    if named := hub.repository("data.source", address):
        return hub.refusal(named, error)
    lasts = (
        isinstance(error, FileNotFoundError | PermissionError)
        or any(word in type(error).__name__ for word in LASTING)
        or str(error).startswith(REFUSED)
        or getattr(error, "code", 0) == 401  # of gcsfs
    )
    return (StoreError if lasts else StoreAwayError)(f"{address} cannot be read ({why})")


def waited_out(address: str, read: Callable[[], T]) -> T:
    """What read() returns, which is called again while the store of an address does not answer. An
    outage and its end are told once, whatever the number of threads. Raises StoreError."""
    began = time.monotonic()
    with contextlib.ExitStack() as excuse:
        for attempt in itertools.count():
            try:
                result = read()
                break
            except Exception as error:
                if (problem := refusal(address, error)) is None:
                    raise
                is_over = given_up.is_set() or time.monotonic() - began > PATIENCE_S
                if is_over or not isinstance(problem, StoreAwayError):
                    raise problem from error
            if not attempt:  # one failed request is nothing to tell of, and no hang
                excuse.enter_context(watchdog.excused(address))
            elif attempt == 1 and _outage.setdefault("began", began) == began:
                streams.log(f"warning: {problem}: it is tried again until the store answers")
            given_up.wait(WAITS_S[min(attempt, len(WAITS_S) - 1)])
    if attempt > 1 and (since := _outage.pop("began", None)):
        streams.log(f"the store has answered, after {time.monotonic() - since:.0f} s")
    return result


def read_range(address: str, begin: int, end: int, waits: bool = True) -> bytes:
    """The bytes [begin, end) of a file; fewer if it ends before. waits: an outage is waited out,
    and not an error."""
    read = functools.partial(filesystem(address).cat_file, address, start=begin, end=end)
    return waited_out(address, read) if waits else read()


def version_of(info: dict[str, Any]) -> str:
    """What tells a file's content from another one's, by an information of fsspec: an ETag, a
    digest, a generation, or a time."""
    return next((str(info[name]).strip('"') for name in VERSIONS if info.get(name)), "")
