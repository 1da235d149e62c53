"""Folders in object stores, gs://BUCKET/PATH and s3://BUCKET/PATH: what differs from a folder of a
file system. No jax.

Two libraries talk to a store. Small files, listings and deletions go through epath, which uses
fsspec (the packages s3fs and gcsfs); arrays go through TensorStore's own drivers. Both take
credentials from the environment, as the vendors' own programs do. Where an S3-compatible store is
(AWS_ENDPOINT_URL, AWS_REGION) TensorStore has to be told.

A store has no folders: one is there as long as something is in it. Nothing can be renamed there,
only copied; so a save has its step's name from the beginning, and is a step when its manifest is
there, which is written last (steps.py, saving.py).

Orbax 0.12.8 builds TensorStore's specs for gs:// alone; `_teach_orbax` adds s3://.
"""

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

import fsspec
from etils import epath

from jaxtrain.config import addresses
from jaxtrain.config.flags import UsageError
from jaxtrain.run.exit_status import ExitStatus, RunError

_PROTOCOLS = {"s3": "s3", "gs": "gcs"}  # as fsspec calls them
_PLACEHOLDER = "/.object_store/"  # stands for "s3://" while Orbax builds the spec of a local folder
# Half a minute of failures; a save is tried again beyond that (saving.py).
_RETRIES = {"max_retries": 6, "initial_delay": "1s", "max_delay": "8s"}
_TIMEOUTS = {
    "connect_timeout": 10,
    "read_timeout": 60,
    "retries": {"max_attempts": 4, "mode": "standard"},
}
_LIBRARIES = (
    "botocore",
    "aiobotocore",
    "aiohttp",
    "s3fs",
    "gcsfs",
    "google",
    "asyncio",
    "requests",
)


class AddressError(RunError):
    """An address that is in no store that can be used; the text is one line.

    place: the address; wrong: what is wrong with it, and what it may have been meant for.
    """

    status = ExitStatus.BAD_CONFIG

    def __init__(self, place: str, wrong: addresses.Fault):
        self.place, self.wrong = place, wrong
        super().__init__(
            f"{place!r} {wrong.rule}{': use ' * bool(wrong.meant)}{' or '.join(wrong.meant)}"
        )

    def about(self, flag: str) -> str:
        """The text about a flag whose value the address is."""
        meant = self.wrong.meant
        return str(
            UsageError(
                f"--{flag}={self.place!r} {self.wrong.rule}",
                {flag: meant[0]} if meant else {},
                meant[1:],
            )
        )


def scheme_of(path: str | os.PathLike) -> str:
    """`gs`, `s3` or another scheme of a URL; "" for a folder of a file system."""
    scheme, separator, _ = os.fspath(path).partition("://")
    return scheme if separator else ""


def folder(path: str | os.PathLike) -> epath.Path:
    """A folder by its path or URL, made ready to be used: what other processes write in a store is
    seen at once.

    Raises AddressError for what looks like a URL and is of no store, or of one whose package is not
    installed.
    """
    place = os.fspath(path)
    if wrong := addresses.fault(place) or addresses.missing_package(place):
        raise AddressError(place, wrong)
    scheme = scheme_of(path)
    if not scheme:
        return epath.Path(path).expanduser()
    options: dict[str, Any] = {"use_listings_cache": False} | (
        {"config_kwargs": _TIMEOUTS} if scheme == "s3" else {}
    )
    fsspec.config.conf.setdefault(_PROTOCOLS[scheme], {}).update(options)
    # gcsfs logs what it raises, too, with a traceback
    logging.getLogger(addresses.PACKAGES[scheme]).setLevel(logging.CRITICAL)
    _teach_orbax()
    return epath.Path(path)


def absolute(path: str | os.PathLike) -> epath.Path:
    """`folder`, absolute; epath takes URLs for relative paths."""
    return folder(path) if scheme_of(path) else folder(path).absolute()


def cannot_be_used(path: str | os.PathLike) -> str:
    """Why nothing can be written in a store's folder, in words; "" where it can, and for a folder
    of a file system."""
    if not scheme_of(path):
        return ""
    probe = folder(path) / ".can_be_written"
    try:
        probe.write_text("by jaxtrain")
        probe.unlink()
    except Exception as error:
        if not (why := failure(error)):
            raise
        return f"cannot be written ({why})"
    return ""


def failure(error: Exception) -> str:
    """What a store did not do, in words; "" for an error that is not of the libraries that talk to
    it."""
    words = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, OSError):
        return error.strerror or words
    return (
        words
        if type(error).__module__.partition(".")[0] in _LIBRARIES or isinstance(error, TimeoutError)
        else ""
    )


def move(source: epath.Path, target: epath.Path) -> None:
    """Gives a folder another name. In a store its files are copied there, and then deleted. OSError
    where that is not possible."""
    if not scheme_of(source):
        os.rename(source, target)
        return
    _copy(source, target)
    source.rmtree()


def _copy(source: epath.Path, target: epath.Path) -> None:
    for path in source.iterdir():
        if path.is_dir():
            _copy(path, target / path.name)
        else:
            path.copy(target / path.name)


def is_folder(path: epath.Path) -> bool:
    """Whether a folder is there; in a store, whether something is in it. Raises the error of a
    store that does not say, which its library's own `is_dir` takes for no folder."""
    if not scheme_of(path):
        return path.is_dir()
    try:
        return next(iter(path.iterdir()), None) is not None
    except (FileNotFoundError, NotADirectoryError):
        return False


def size_of(path: epath.Path) -> int:
    """The bytes of a file, or of all files below a folder; of what is deleted meanwhile, or a link
    to nothing, none."""
    try:
        if path.is_dir():
            return sum(size_of(each) for each in path.iterdir() if not os.path.islink(each))
        return path.stat().length
    except FileNotFoundError:
        return 0


def exists(path: epath.Path) -> bool:
    """Whether something has this name, be it a link to nothing."""
    return path.exists() or os.path.lexists(path)


# --- TensorStore ----------------------------------------------------------------------------------


def kvstore(folder: str | os.PathLike) -> dict[str, Any]:
    """TensorStore's spec of a folder."""
    path, scheme = os.fspath(folder), scheme_of(folder)
    if not scheme:
        return {"driver": "file", "path": f"{epath.Path(folder).absolute()}/"}
    bucket, _, key = path.partition("://")[2].partition("/")
    place = {"bucket": bucket, "path": f"{key.rstrip('/')}/"}
    if scheme == "gs":
        return {"driver": "gcs", **place, "context": {"gcs_request_retries": _RETRIES}}
    return {
        "driver": "s3",
        **place,
        **_s3_place(os.environ),
        "context": {"s3_request_retries": _RETRIES},
    }


def _s3_place(environment: Mapping[str, str]) -> dict[str, Any]:
    """Where S3 is and who asks, as far as the environment says it: by the variables that Amazon's
    programs read."""
    place: dict[str, Any] = {}
    if endpoint := environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL"):
        place["endpoint"] = endpoint
    if region := environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"):
        place["aws_region"] = region
    if "AWS_ACCESS_KEY_ID" in environment:
        # at once; else TensorStore looks through all places, for seconds
        place["aws_credentials"] = {"type": "environment"}
    return place


@functools.cache
def _teach_orbax() -> None:
    """Makes Orbax build specs of s3:// folders: as of a local folder, whose driver is then
    replaced."""
    from orbax.checkpoint._src.serialization import tensorstore_utils as orbax

    build = orbax.build_kvstore_tspec

    @functools.wraps(build)
    def build_kvstore_tspec(directory: str, *args: Any, **kwargs: Any) -> Any:
        if scheme_of(directory) != "s3":
            return build(directory, *args, **kwargs)
        return _in_store(build(_PLACEHOLDER + directory.removeprefix("s3://"), *args, **kwargs))

    orbax.build_kvstore_tspec = build_kvstore_tspec


def _in_store(spec: Any) -> Any:
    """A spec in which the placeholder's folders are the store's."""
    if not isinstance(spec, dict):
        return spec
    if spec.get("driver") == "file" and spec["path"].startswith(_PLACEHOLDER):
        return kvstore("s3://" + spec["path"].removeprefix(_PLACEHOLDER))
    # What is written in place and what by renaming is a matter of file systems alone: a store's
    # spec is the same for both.
    return {name: _in_store(value) for name, value in spec.items()}


def no_damage(error: ValueError) -> str:
    """Why TensorStore could not read, in words, where that is not for damage to what is stored; ""
    for damage."""
    return _NO_DAMAGE.get(str(error).partition(":")[0], "")


_NO_DAMAGE = {
    "PERMISSION_DENIED": "may not be read",
    "RESOURCE_EXHAUSTED": "needs more memory than there is",
    "UNAVAILABLE": "cannot be read: the storage does not answer",
    "DEADLINE_EXCEEDED": "cannot be read: the storage does not answer in time",
}
