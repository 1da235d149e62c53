"""Addresses in object stores, s3://BUCKET/PATH and gs://BUCKET/PATH, and the faults of texts that
look like one. Standard library only.

A place is the text that a user gives for a folder: an address, or a path of the file system.
"""

import dataclasses
import importlib.util
import os
import re

# by scheme, the package through which that store is read and written
PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
HUB = "hf://"  # how the address of a source in the Hugging Face hub begins (data/stores/hub.py)
_LOOKS = re.compile(r"([^:/]*):/(/?)(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class BadAddress:
    """A fault of a place.

    rule:  the end of a sentence that begins with the place: "is in an unknown store"
    meant: places that an error suggests instead, the likeliest first: paths, and addresses in
        stores whose packages are installed, with BUCKET or run for a part that is missing
    """

    rule: str
    meant: tuple[str, ...] = ()


def is_address(place: str) -> bool:
    """True for a place with "://" in it, whether its store is known or not."""
    return "://" in place


def fault(place: str) -> BadAddress | None:
    """The fault of a place that looks like an address, or that is below the home folder of nobody
    here; None for any other path, and for a folder in a bucket of a known store (whether that
    store's package is installed or not).

    "SCHEME:/PATH" counts as a path unless the scheme is s3, gs or file.
    """
    if place.startswith("~") and os.path.expanduser(place) == place:
        return BadAddress("is below a home folder that does not exist here")
    looks = _LOOKS.match(place)
    if not looks:
        return None
    scheme, rest, lower = looks[1], looks[3].lstrip("/"), looks[1].lower()
    if lower == "file":
        return BadAddress("is not the address of a store", (f"/{rest}",))
    if lower not in PACKAGES:
        return (
            BadAddress("is in an unknown store", _in_stores(rest, *PACKAGES)) if looks[2] else None
        )
    if scheme != lower or not looks[2] or looks[3].startswith("/"):
        return BadAddress("is not the address of a store", _in_stores(rest, lower))
    bucket, _, key = rest.rstrip("/").partition("/")
    return (
        None
        if bucket and key
        else BadAddress("is not a folder in a bucket", _in_stores(rest, lower))
    )


def not_utf8(place: str) -> BadAddress | None:
    """The fault of a place with bytes that are not UTF-8, or that the locale's encoding cannot
    read; None for any other place. Such bytes are surrogates in the text."""
    clean = re.sub("[\ud800-\udfff]", "_", place)
    return (
        None
        if clean == place
        else BadAddress(
            "holds bytes that are not UTF-8, and arrays cannot be stored under such a name",
            (clean,),
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
    """The addresses of BUCKET/FOLDER in those of the stores whose packages are installed."""
    bucket, _, key = path.rstrip("/").partition("/")
    return tuple(
        f"{store}://{bucket or 'BUCKET'}/{key or 'run'}" for store in stores if _is_installed(store)
    )


def _is_installed(store: str) -> bool:
    return importlib.util.find_spec(PACKAGES[store]) is not None
