"""Trackers of a run: Weights & Biases, trackio and MLflow, each made of the run and its id there.

    last           the newest step that the tracker has in full, -1 if none; the caller counts on.
                   The tracker itself is asked, so a kill between sending and noting costs nothing
    log(step, …)   takes all numbers of a step after the last one
    close()        returns when all is stored

One's own has these three, too. No jax; the libraries are imported where they are used.
"""

import importlib.util
import json
import os
import pathlib
import shutil
from typing import Any

from jaxtrain.config import is_choice, own_code, to_dict, value_text
from jaxtrain.experiments.followers import FOLDER
from jaxtrain.experiments.run_folder import RunFolder
from jaxtrain.run.files import read_json, replace_text


def fault_of(name: str) -> str:
    """The reason why an item of metrics.trackers cannot work, in words that follow it; "" if there
    is none."""
    if not is_choice("metrics.trackers", name):
        return "is none of wandb, trackio, mlflow and FILE.py:CLASS"
    if ":" not in name:
        is_here = importlib.util.find_spec(name) is not None
        return "" if is_here else f"needs a package that is not installed: pip install {name}"
    try:
        own_code.digest(name)
    except own_code.OwnCodeError as error:
        return str(error)
    return ""


def tracker_class(name: str) -> Any:
    """The class of an item of metrics.trackers. Raises OwnCodeError."""
    return {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}.get(name) or own_code.load(name)


class Wandb:
    """Weights & Biases. A server knows the last step. Nobody can read the file of an off-line
    session before its end, so what a kill has left of one is deleted, and sent again."""

    def __init__(self, run: RunFolder, run_id: str):
        import wandb

        # session → its last step, of those that have ended
        self._file = run.folder / FOLDER / f"wandb-{run_id}.json"
        self._ended = read_json(self._file) if self._file.is_file() else {}
        self._run = wandb.init(
            project=run.config.metrics.project or os.environ.get("WANDB_PROJECT", "jaxtrain"),
            id=run_id,
            name=run.name,
            config=to_dict(run.config),
            resume="allow",
        )
        self._session = pathlib.Path(self._run.dir).parent
        for other in self._session.parent.glob(f"offline-run-*-{run_id}"):
            if other.name not in self._ended and other != self._session:
                shutil.rmtree(other)
        self.last = max([self._run.step - 1, *self._ended.values()])

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()
        if not self._run.disabled:
            replace_text(self._file, json.dumps(self._ended | {self._session.name: self.last}))


class Trackio:
    """trackio, whose database or server knows the last step."""

    def __init__(self, run: RunFolder, run_id: str):
        import trackio

        self._run = trackio.init(
            project=run.config.metrics.project or os.environ.get("TRACKIO_PROJECT", "jaxtrain"),
            name=f"{run.name}-{run_id}",  # by which it finds the run again
            config=to_dict(run.config),
            resume="allow",
        )
        self.last, self.close = self._run._next_step - 1, self._run.finish

    def log(self, step: int, numbers: dict[str, float]) -> None:
        # "time" is a name of trackio's own
        self._run.log({k: v for k, v in numbers.items() if k != "time"}, step)


class Mlflow:
    """MLflow, whose stores know the last step of each metric; some of them may have part of a step
    after a kill."""

    def __init__(self, run: RunFolder, run_id: str):
        import mlflow

        self._log, self.close = mlflow.log_metrics, mlflow.end_run
        experiment = mlflow.set_experiment(
            run.config.metrics.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", "jaxtrain")
        )
        matches = mlflow.search_runs(
            [experiment.experiment_id], f"tags.jaxtrain = '{run_id}'", output_format="list"
        )
        data = mlflow.start_run(
            matches[0].info.run_id if matches else None,
            run_name=run.name,
            tags={"jaxtrain": run_id},
        ).data
        for group, settings in to_dict(run.config).items():
            texts = {f"{group}.{name}": value_text(value) for name, value in settings.items()}
            mlflow.log_params({k: v for k, v in texts.items() if k not in data.params})
        self._steps = {metric.key: metric.step for metric in data.to_proto().metrics}
        self.last = self._steps.get("wall_s", -1)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        absent = {k: v for k, v in numbers.items() if self._steps.get(k, -1) < step}
        absent["wall_s"] = absent.pop("wall_s")  # the last one: the step is complete
        self._log(absent, step=step, timestamp=round(1000 * numbers["time"]))
