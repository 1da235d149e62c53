"""A run's folder as whoever looks at runs reads it. No jax."""

import os
import pathlib
from typing import Any, NamedTuple

from jaxtrain.config import Config, UsageError, own_code
from jaxtrain.config.recipes import RecipeError, load_recipe
from jaxtrain.run.files import CONFIG_FILE
from jaxtrain.run.metrics import read_metrics


class RunFolder(NamedTuple):
    """A run: its folder, its settings, and the records of metrics.jsonl in the order of their
    lines."""

    folder: pathlib.Path
    config: Config
    records: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    def curve(self, metric: str, over: str = "step") -> list[tuple[float, float]]:
        """(abscissa, value) of the records that have both as numbers. over: another metric"""
        is_number = lambda value: isinstance(value, (int, float))
        return [
            (record[over], record[metric])
            for record in self.records
            if is_number(record.get(over)) and is_number(record.get(metric))
        ]


def read_run(folder: str | os.PathLike) -> RunFolder:
    """The run in a folder, of which no file is run as code from now on. Raises UsageError for a
    folder without a config.json, or whose files cannot be read."""
    path = pathlib.Path(folder)
    own_code.distrust(str(path))  # it may be a stranger's
    try:
        return RunFolder(path, load_recipe(path / CONFIG_FILE), read_metrics(path))
    except (RecipeError, OSError) as error:
        why = error.rule if isinstance(error, RecipeError) else error
        raise UsageError(
            f"{str(path)!r} is not the folder of a run: {why}",
            advice="the --workdir of jaxtrain train",
        ) from error
