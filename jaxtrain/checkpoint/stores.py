"""Folders in object stores, gs://BUCKET/PATH and s3://BUCKET/PATH, and their differences from
folders of a file system. No jax.

Two libraries talk to a store. Small files, listings and deletions go through epath, which uses
fsspec (the packages s3fs and gcsfs); arrays go through TensorStore's own drivers. Both take
credentials from the environment, like the vendors' own programs. TensorStore has to be told the
address of an S3-compatible store (AWS_ENDPOINT_URL, AWS_REGION).

A folder of a store exists as long as it has a file. Files cannot be renamed, only copied. So a save
has its step's name from the beginning, and becomes a step when its manifest exists, which is
written last (steps.py, saving.py).

Orbax 0.12.8 builds TensorStore's specs for gs:// alone; `_teach_orbax` adds s3://.

Begin with `folder`, which every path or URL of a user goes through.
"""

import errno
import functools
import os
import re
from collections.abc import Iterator
from typing import Any

from etils import epath

from jaxtrain.config import addresses
from jaxtrain.config.flags import UsageError
from jaxtrain.data.stores import filesystem
from jaxtrain.data.stores.filesystem import scheme_of
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.files import MOST_BYTES, open_regular, read_regular

_PLACEHOLDER = "/.object_store/"  # stands for "s3://" while Orbax builds the spec of a local folder
# Half a minute of failures; a save is tried again beyond that (saving.py).
_RETRIES = {"max_retries": 6, "initial_delay": "1s", "max_delay": "8s"}
_CODE = re.compile(r"[A-Z_]+: ")  # how TensorStore's errors begin
_OS_CODE = re.compile(r"\[os_error_code='(\d+)'\]")


class AddressError(RunError):
    """An address of no store that can be used; the text is one line.

    place: the address; wrong: the fault, and the addresses that it may have been meant for.
    """

    status = ExitStatus.BAD_CONFIG

    def __init__(self, place: str, wrong: addresses.BadAddress):
        self.place, self.wrong = place, wrong
        super().__init__(
            f"{place!r} {wrong.rule}{': use ' * bool(wrong.meant)}{' or '.join(wrong.meant)}"
        )

    def about(self, flag: str) -> str:
        """The text of this error where the address is a flag's value."""
        meant = self.wrong.meant
        text = f"--{flag}={self.place!r} {self.wrong.rule}"
        return str(UsageError(text, {flag: meant[0]} if meant else {}, meant[1:]))


def folder(path: str | os.PathLike) -> epath.Path:
    """A folder by its path or URL, ready to be used: files that other processes write to a store
    are seen at once.

    Raises AddressError for a URL of no known store, or of one whose package is not installed.
    """
    place = os.fspath(path)
    if wrong := addresses.fault(place) or addresses.missing_package(place):
        raise AddressError(place, wrong)
    scheme = scheme_of(place)
    if not scheme:
        return epath.Path(path).expanduser()
    filesystem.configure(scheme)
    _teach_orbax()
    return epath.Path(path)


def absolute(path: str | os.PathLike) -> epath.Path:
    """The absolute `folder`; epath takes URLs for relative paths."""
    return folder(path) if scheme_of(path) else folder(path).absolute()


def failure(error: Exception) -> str:
    """The failure of a file system or a store, in words, as filesystem.failure, which does not know
    TensorStore's."""
    if isinstance(error, ValueError) and _CODE.match(str(error)):
        error = as_os_error(error)
    return filesystem.failure(error)


def move(source: epath.Path, target: epath.Path) -> None:
    """Gives a folder another name. In a store its files are copied there, and then deleted. Raises
    OSError where that is not possible."""
    if not scheme_of(source):
        os.rename(source, target)
        return
    # Copied entirely before anything is deleted: a kill in between leaves both, and loses nothing.
    for name in files_below(source):
        (source / name).copy(target / name)
    source.rmtree()


def files_below(folder: epath.Path) -> Iterator[str]:
    """The paths of all files below a folder, relative to it."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from (f"{path.name}/{name}" for name in files_below(path))
        else:
            yield path.name


def is_folder(path: epath.Path) -> bool:
    """True if a folder exists; in a store, if it has a file. Raises the error of a store that does
    not answer, which its library's own `is_dir` takes for no folder."""
    if not scheme_of(path):
        return path.is_dir()
    try:
        return next(iter(path.iterdir()), None) is not None
    except (FileNotFoundError, NotADirectoryError):
        return False


def size_of(path: epath.Path) -> int:
    """The bytes of a file, or of all files below a folder. Links, files that are deleted
    meanwhile, and what may not be read count for nothing."""
    try:
        if path.is_dir() and not os.path.islink(path):
            return sum(size_of(each) for each in path.iterdir())
        return 0 if os.path.islink(path) else bytes_of(path)
    except (FileNotFoundError, PermissionError):
        return 0


def bytes_of(path: epath.Path) -> int:
    """The bytes of a file. Raises FileNotFoundError if there is none."""
    # epath's own stat looks up the names of owner and group, which need not have any
    return path.stat().length if scheme_of(path) else os.stat(path).st_size


def size_within(folder: epath.Path, name: str) -> int:
    """The bytes of a folder's file. Raises FileNotFoundError, and OSError for what is no regular
    file, or lies outside of the folder (`files.open_regular`): the name or a link leads there."""
    if scheme_of(path := folder / name):
        return bytes_of(path)
    with open_regular(path, folder) as file:
        return os.fstat(file.fileno()).st_size


def read_within(folder: epath.Path, name: str) -> bytes:
    """The bytes of a folder's file. Errors as of `size_within`, and OSError for one of more than
    MOST_BYTES."""
    if not scheme_of(path := folder / name):
        return read_regular(path, MOST_BYTES, folder)
    if bytes_of(path) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES:,} bytes", name)
    return path.read_bytes()


def remove(path: epath.Path) -> None:
    """Removes a file, a link, or a folder and all that is in it, if there is one; nothing that a
    link leads to."""
    if os.path.islink(path):
        path.unlink()
    elif path.exists():
        path.rmtree()


def exists(path: epath.Path) -> bool:
    """True if something has this name, a link to nothing included."""
    return path.exists() or os.path.lexists(path)


# --- TensorStore ----------------------------------------------------------------------------------


def kvstore(folder: str | os.PathLike) -> dict[str, Any]:
    """TensorStore's spec of a folder. The address, region and credentials of S3 come from the
    environment variables that Amazon's programs read."""
    path, scheme = os.fspath(folder), scheme_of(folder)
    if not scheme:
        return {"driver": "file", "path": f"{epath.Path(folder).absolute()}/"}
    # s3://BUCKET/PATH → "BUCKET" and "PATH/"
    bucket, _, key = path.partition("://")[2].partition("/")
    spec: dict[str, Any] = {"bucket": bucket, "path": f"{key.rstrip('/')}/"}
    if scheme == "gs":
        return spec | {"driver": "gcs", "context": {"gcs_request_retries": _RETRIES}}
    spec |= {"driver": "s3", "context": {"s3_request_retries": _RETRIES}}
    environment = os.environ
    if endpoint := environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL"):
        spec["endpoint"] = endpoint
    if region := environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"):
        spec["aws_region"] = region
    if "AWS_ACCESS_KEY_ID" in environment:
        # TensorStore would look through all sources of credentials, for seconds
        spec["aws_credentials"] = {"type": "environment"}
    return spec


@functools.cache
def _teach_orbax() -> None:
    """Makes Orbax build specs of s3:// folders: those of a local folder, whose driver is then
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
    """The spec with the store's folders in place of the placeholder's."""
    if not isinstance(spec, dict):
        return spec
    if spec.get("driver") == "file" and spec["path"].startswith(_PLACEHOLDER):
        return kvstore("s3://" + spec["path"].removeprefix(_PLACEHOLDER))
    # Orbax's specs differ in writing in place or by renaming, which a store does not know.
    return {name: _in_store(value) for name, value in spec.items()}


def as_os_error(error: ValueError) -> OSError:
    """An error of TensorStore as the system's error that it quotes; its number is 0 if it quotes
    none."""
    code = int(match[1]) if (match := _OS_CODE.search(str(error))) else 0
    return OSError(code, os.strerror(code) if code else " ".join(str(error).split())[:200])


def no_damage(error: ValueError) -> str:
    """The reason that TensorStore could not read, in words, if it is no damage to what is stored;
    "" for damage."""
    return _NO_DAMAGE.get(str(error).partition(":")[0], "")


_NO_DAMAGE = {
    "PERMISSION_DENIED": "may not be read",
    "RESOURCE_EXHAUSTED": "needs more memory than there is",
    "UNAVAILABLE": "cannot be read: the storage does not answer",
    "DEADLINE_EXCEEDED": "cannot be read: the storage does not answer in time",
}
