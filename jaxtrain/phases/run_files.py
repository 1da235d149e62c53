"""The files that the start of a run leaves in its folder: its settings, the op times by which its
tables were made, and a line about the start.

    starts.jsonl     one JSON object a line
      {"time": 1763786001.5, "step": 40, "source": "step 40", "devices": "8 × cpu", "processes": 1,
       "versions": {"jaxtrain": "0.1.0", "jax": …, "python": …}, "changed": ["train.steps: 8 → 9"],
       "memory": {"parameters": 4096, …}, "compiled_memory": {"arguments": …, "temporary": …, …}}

    step, source       what the start goes on from; 0 and "" for a new run
    changed            settings that differ from those of the checkpoint
    memory             bytes on a device by kind, as in Step.state_memory
    compiled_memory    those of the program, null if the platform does not report them
"""

import contextlib
import platform
import time

import jax
from jax.stages import Compiled

from jaxtrain import __version__
from jaxtrain.checkpoint.resuming import StartPoint
from jaxtrain.config.paths import FORK
from jaxtrain.config.recipes import config_text
from jaxtrain.config.rules.resume import changes
from jaxtrain.devices import cluster
from jaxtrain.hf import source_files
from jaxtrain.hf.importing import PublishedWeights
from jaxtrain.phases.run_state import Fork, RunOrigin
from jaxtrain.pipeline.prepared_run import PreparedRun
from jaxtrain.run.files import (
    CONFIG_FILE,
    STARTS_FILE,
    append_record,
    read_json,
    replace_text,
    warned,
)
from jaxtrain.training import stored_op_times
from jaxtrain.training.compiled_step import compiled_memory
from jaxtrain.training.step import Step


def write_start(
    run: PreparedRun,
    start: StartPoint,
    step: Step,
    compiled: Compiled,
    origin: RunOrigin,
) -> None:
    """Writes, in process 0, config.json, with what a fork has inherited; the small files of a
    published model; op_times.json for op times that the user did not request; and a line of
    starts.jsonl."""
    if not cluster.is_main():
        return
    config, folder = run.config, run.folder
    folder.mkdir(parents=True, exist_ok=True)
    inherited = origin.record if isinstance(origin, Fork) else None
    if config.train.fork_from and not inherited:  # a fork that goes on
        with contextlib.suppress(OSError, ValueError):
            inherited = read_json(folder / CONFIG_FILE, folder=folder).get(FORK)
    with warned(folder / CONFIG_FILE, cluster.log):
        replace_text(folder / CONFIG_FILE, config_text(config, inherited))
    if isinstance(origin, PublishedWeights):
        with warned(folder / source_files.SOURCE, cluster.log):
            origin.keep(folder)
    devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    if stored_op_times.worth_storing(config.mesh, config.pipeline, run.requested.pipeline):
        with warned(folder / stored_op_times.OP_TIMES, cluster.log):
            stored_op_times.store(
                folder, config.pipeline.times, stored_op_times.depend_on(config), devices
            )
    record = {
        "time": round(time.time(), 3),
        "step": start.step,
        "source": start.source,
        "devices": devices,
        "processes": jax.process_count(),
        "versions": {
            "jaxtrain": __version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
        "changed": changes(start.meta.stored_config(), config) if start.step else [],
        "memory": step.state_memory(config.parallel.reduce == "microbatch"),
        "compiled_memory": compiled_memory(compiled),
    }
    append_record(folder / STARTS_FILE, record, cluster.log)
