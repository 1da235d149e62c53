"""Places that are addresses, s3://BUCKET/PATH and gs://BUCKET/PATH, and what looks like one and is
none. Standard library only.

Everything else is a folder of a file system.
"""

import dataclasses
import importlib.util
import re

# by scheme, the package through which that store is read and written
PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
_LOOKS = re.compile(r"([^:/]*):/(/?)(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class BadAddress:
    """A fault of a place, in words that follow it, and the places that were perhaps meant, nearest
    first: folders, and addresses in stores whose packages are installed."""

    rule: str
    meant: tuple[str, ...] = ()


def is_address(place: str) -> bool:
    """Whether a place is an address and no file, in any store or none."""
    return "://" in place


def fault(place: str) -> BadAddress | None:
    """The fault of a place that is an address or looks like one; None for a folder in a store's
    bucket or in a file system."""
    looks = _LOOKS.match(place)
    if not looks:
        return None
    scheme, rest, lower = looks[1], looks[3].lstrip("/"), looks[1].lower()
    if lower == "file":
        return BadAddress("is no store's address", (f"/{rest}",))
    if lower not in PACKAGES:
        return (
            BadAddress("is in no store that is known", _in_stores(rest, *PACKAGES))
            if looks[2]
            else None
        )
    if scheme != lower or not looks[2] or looks[3].startswith("/"):
        return BadAddress("is no store's address", _in_stores(rest, lower))
    bucket, _, key = rest.rstrip("/").partition("/")
    return (
        None if bucket and key else BadAddress("is no folder in a bucket", _in_stores(rest, lower))
    )


def not_utf8(place: str) -> BadAddress | None:
    """The fault of a folder of checkpoints whose name is not UTF-8 (or cannot be read as such in a
    locale of fewer characters)."""
    clean = re.sub("[\ud800-\udfff]", "_", place)
    return (
        None
        if clean == place
        else BadAddress(
            "holds bytes that are not UTF-8, and no array is stored under such a name", (clean,)
        )
    )


def missing_package(place: str) -> BadAddress | None:
    """The fault of an address in a store whose package is not installed; None for any other
    place."""
    scheme = place.partition("://")[0] if is_address(place) else ""
    if scheme not in PACKAGES or _is_installed(scheme):
        return None
    return BadAddress(
        f"needs the package {PACKAGES[scheme]}, which is not installed: pip install "
        f"'jaxtrain[{scheme}]'"
    )


def _in_stores(path: str, *stores: str) -> tuple[str, ...]:
    """The addresses of a path, bucket and folder, in those of the stores that can be used."""
    bucket, _, key = path.rstrip("/").partition("/")
    return tuple(
        f"{store}://{bucket or 'BUCKET'}/{key or 'run'}" for store in stores if _is_installed(store)
    )


def _is_installed(store: str) -> bool:
    return importlib.util.find_spec(PACKAGES[store]) is not None
