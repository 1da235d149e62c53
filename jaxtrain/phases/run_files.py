"""The files that the start of a run leaves in its folder: its settings, and the op times by which
its tables were made."""

import contextlib
import pathlib

import jax

from jaxtrain.config import PipelineConfig, ResolvedConfig
from jaxtrain.config.paths import FORK
from jaxtrain.config.recipes import config_text
from jaxtrain.devices import cluster
from jaxtrain.hf import source_files
from jaxtrain.hf.importing import PublishedWeights
from jaxtrain.phases.run_state import Fork, Origin
from jaxtrain.run.files import CONFIG_FILE, read_json, replace_text, warned
from jaxtrain.training import stored_op_times


def write_settings(
    config: ResolvedConfig,
    requested: PipelineConfig,
    folder: pathlib.Path,
    origin: Origin,
) -> None:
    """Writes, in process 0, config.json, with what a fork has inherited; the small files of a
    published model; and op_times.json for op times that were not `requested` by the user."""
    if not cluster.is_main():
        return
    folder.mkdir(parents=True, exist_ok=True)
    record = origin.record(config) if isinstance(origin, Fork) else None
    if config.train.fork_from and not record:  # a fork that goes on
        with contextlib.suppress(OSError, ValueError):
            record = read_json(folder / CONFIG_FILE, folder=folder).get(FORK)
    with warned(folder / CONFIG_FILE, cluster.log):
        replace_text(folder / CONFIG_FILE, config_text(config, record))
    if isinstance(origin, PublishedWeights):
        with warned(folder / source_files.SOURCE, cluster.log):
            origin.keep(folder)
    if stored_op_times.worth_storing(config.mesh, config.pipeline, requested):
        devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
        with warned(folder / stored_op_times.OP_TIMES, cluster.log):
            stored_op_times.store(
                folder, config.pipeline.times, stored_op_times.depend_on(config), devices
            )
