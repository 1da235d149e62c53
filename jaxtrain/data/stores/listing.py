"""The files of a `data.source`, be it a path or an address in a store."""

import glob
import pathlib
from typing import Any

from jaxtrain.config import addresses, sources
from jaxtrain.config.sources import File, Source
from jaxtrain.data import hub
from jaxtrain.data.stores import filesystem


def find(name: str) -> Source:
    """The files of a `data.source`, as sources.find; those of an address have the version of their
    content in the place of a time. Errors as of sources.find, and StoreError."""
    if not addresses.is_address(name):
        return sources.find(name)
    sources.check_address(name)
    named = hub.repository("data.source", name)
    named = hub.pinned(named, "") if named else None
    root, pattern = (named.text if named else name).rstrip("/"), tuple[str, ...]()
    while glob.has_magic(root):
        root, _, last = root.rpartition("/")
        pattern = (last, *pattern)
    infos = _of_hub(root, named) if named else _of_store(root, name)
    files = [
        File(path, sources.format_of(path), info["size"], filesystem.version_of(info))
        for path, info in infos.items()
        if not path.endswith("/")  # an empty object that some programs make for a folder
    ]
    return sources.find_among(name, pathlib.Path(root), pattern, files)


def _of_hub(root: str, named: hub.Repository) -> dict[str, dict[str, Any]]:
    """Address → information of fsspec, of a repository's file or those in a folder of it."""
    return {
        path: info for path, info in hub.tree(named).items() if f"{path}/".startswith(f"{root}/")
    }


def _of_store(root: str, name: str) -> dict[str, dict[str, Any]]:
    """The same of a file of a store, or of those below an address. Raises StoreError."""
    store = filesystem.filesystem(root)
    key = store._strip_protocol(root)
    try:
        below = store.find(root, detail=True)
        # fsspec's own walk finds a file without saying anything about it
        return {
            root + path.removeprefix(key): info or store.info(path) for path, info in below.items()
        }
    except Exception as error:
        raise filesystem.refusal(f"data.source={name}", error) or error from error
