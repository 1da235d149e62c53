"""The files of a `data.source`, be it a path or an address in a store."""

import glob
import pathlib
from typing import Any

from jaxtrain.config import addresses, sources
from jaxtrain.config.sources import File, Source
from jaxtrain.data.stores import filesystem, hub


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
    places = [root]
    if not pattern and root.endswith((".bin", ".idx")):  # a file of Megatron's has its index beside
        places = [f"{root[:-4]}.bin", f"{root[:-4]}.idx"]
        root, _, last = root.rpartition("/")
        pattern = (last,)
    files = [
        File(path, sources.format_of(path), info["size"], filesystem.version_of(info))
        for place in places
        for path, info in _infos(place, name, named).items()
        if not path.endswith("/")  # an empty object that some programs make for a folder
    ]
    return sources.find_among(name, pathlib.Path(root), pattern, files)


def _infos(place: str, name: str, named: hub.Repository | None) -> dict[str, dict[str, Any]]:
    """Address → information of fsspec, of a file, or of those below an address, in a store or in
    the hub's repository `named`. Raises StoreError."""
    if named:
        return {
            path: info
            for path, info in hub.tree(named).items()
            if f"{path}/".startswith(f"{place}/")
        }
    store = filesystem.filesystem(place)
    key = store._strip_protocol(place)
    try:
        # fsspec's own walk finds a file without saying anything about it
        return {
            place + path.removeprefix(key): info or store.info(path)
            for path, info in store.find(place, detail=True).items()
        }
    except Exception as error:
        raise filesystem.refusal(f"data.source={name}", error) or error from error
