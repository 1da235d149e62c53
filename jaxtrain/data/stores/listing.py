"""The files of a `data.source`, be it a path or an address in a store."""

import glob
import pathlib

from jaxtrain.config import addresses, sources
from jaxtrain.config.sources import File, Source
from jaxtrain.data.stores import filesystem


def find(name: str) -> Source:
    """The files of a `data.source`, as sources.find; those of an address have the version of their
    content in the place of a time. Errors as of sources.find, and StoreError."""
    if not addresses.is_address(name):
        return sources.find(name)
    sources.check_address(name)
    root, pattern = name.rstrip("/"), tuple[str, ...]()
    while glob.has_magic(root):
        root, _, last = root.rpartition("/")
        pattern = (last, *pattern)
    store = filesystem.filesystem(root)
    try:
        below = store.find(root, detail=True)
        # fsspec's own walk finds a file without saying anything about it
        infos = {path: info or store.info(path) for path, info in below.items()}
    except FileNotFoundError:
        infos = {}
    except Exception as error:
        raise filesystem.refusal(root, error) or error from error
    key = store._strip_protocol(root)
    files = [
        File(
            root + path.removeprefix(key),
            sources.format_of(path),
            info["size"],
            filesystem.version_of(info),
        )
        for path, info in infos.items()
        if not path.endswith("/")  # an empty object that some programs make for a folder
    ]
    return sources.find_among(name, pathlib.Path(root), pattern, files)
