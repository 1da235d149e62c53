"""What trackers have of runs, read by their own libraries: `tracker_records.py FOLDER` prints the
JSON object {tracker: [[run, step, numbers], …]}, in the order in which they have it.

FOLDER has wandb/ of off-line sessions, trackio's database trackio/, and MLflow's mlflow.db.
"""

import json
import pathlib
import sys

import mlflow
from trackio.sqlite_storage import SQLiteStorage
from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = (
    32768,
    7,
)  # bytes of a block and of a record's header, in the format of LevelDB's log
FULL, LAST = 1, 4


def wandb_records(path: pathlib.Path):
    """The records of a .wandb file."""
    content = path.read_bytes()
    at, parts = HEADER, []
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts.append(content[at + HEADER : at + HEADER + length])
        at += HEADER + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def of_wandb(folder: pathlib.Path):
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "history":
                values = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                run = path.stem.removeprefix("run-")
                yield run, values["_step"], {k: v for k, v in values.items() if k[0] != "_"}


def of_trackio(folder: pathlib.Path):
    for run in SQLiteStorage.get_runs("tests"):
        for row in SQLiteStorage.get_logs("tests", run):
            yield run, row["step"], {k: v for k, v in row.items() if k not in ("step", "timestamp")}


def of_mlflow(folder: pathlib.Path):
    """Each metric of a step is a row of its own."""
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("tests")
    for run in client.search_runs([experiment.experiment_id]):
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                yield run.info.run_id, metric.step, {name: metric.value}


if __name__ == "__main__":
    place = pathlib.Path(sys.argv[1])
    found = {"wandb": of_wandb, "trackio": of_trackio, "mlflow": of_mlflow}
    print(json.dumps({name: list(read(place)) for name, read in found.items()}))
