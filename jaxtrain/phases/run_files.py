"""The files that the start of a run leaves in its folder: its settings, and the op times by which
its tables were made."""

import pathlib

import jax

from jaxtrain.config import PipelineConfig, ResolvedConfig
from jaxtrain.config.recipes import config_text
from jaxtrain.devices import cluster
from jaxtrain.hf import source_files
from jaxtrain.hf.importing import PublishedWeights
from jaxtrain.run.files import CONFIG_FILE, replace_text, warned
from jaxtrain.training import stored_op_times


def write_settings(
    config: ResolvedConfig,
    requested: PipelineConfig,
    folder: pathlib.Path,
    weights: PublishedWeights | None,
) -> None:
    """Writes, in process 0, config.json, the small files of a published model, and op_times.json
    for op times that were not `requested` by the user."""
    if not cluster.is_main():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with warned(folder / CONFIG_FILE, cluster.log):
        replace_text(folder / CONFIG_FILE, config_text(config))
    if weights:
        with warned(folder / source_files.SOURCE, cluster.log):
            weights.keep(folder)
    if stored_op_times.worth_storing(config.mesh, config.pipeline, requested):
        devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
        with warned(folder / stored_op_times.OP_TIMES, cluster.log):
            stored_op_times.store(
                folder, config.pipeline.times, stored_op_times.depend_on(config), devices
            )
