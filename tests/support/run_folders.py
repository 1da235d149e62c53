"""Folders of runs that nobody has run."""

import json
import pathlib
from typing import Any

from jaxtrain.config import Config, replace
from jaxtrain.config.recipes import config_text

ONE_DEVICE = replace(Config(), {"mesh.data": 1})


def write_run(
    folder: pathlib.Path, config: Config = ONE_DEVICE, **lines: list[Any]
) -> pathlib.Path:
    """The folder with a config, and files of JSON lines by their names, "__" for a dot: records,
    and texts as they are."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config_text(config))
    for name, records in lines.items():
        text = "".join(r if isinstance(r, str) else f"{json.dumps(r)}\n" for r in records)
        (folder / f"{name.replace('__', '.')}.jsonl").write_text(text)
    return folder
