"""Layouts that differ from a planned one in one choice, and keep every rule: what they would gain, and need. No jax."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import Config, checks
from jaxtrain.config.surroundings import Surroundings
from jaxtrain.config.work import platform_of, step_model_of
from jaxtrain.costs.memory import memory
from jaxtrain.plan import layout_flag
from jaxtrain.plan.predict import Prediction
from jaxtrain.schedule.orders import INTERLEAVED, ZERO_BUBBLE

REMATS, ZEROS = ("none", "selective", "full"), (0, 1, 2, 3)
HALVED_FOR = (("model", "data"), ("stage", "data"), ("data", "model"), ("stage", "model"))  # (axis of half as many, of twice as many)


@dataclasses.dataclass(frozen=True)
class Change:
    """Other settings, the same as `--layout` names them, the seconds of the step then, and the bytes of its fullest device."""

    settings: Mapping[str, Any]
    text: str
    seconds: float
    bytes: float


def nearby(prediction: Prediction) -> list[Change]:
    """Single changes of the layout, the fastest first.

    They are reckoned by closed forms; where the prediction goes by its table, their steps are longer than those by as much as its own is.
    """
    work, config = prediction.work, prediction.config
    exact, here, changes = prediction.seconds / work.step().seconds, layout_flag.of(config), []
    around = Surroundings(prediction.devices, platform_of(work.hardware), config)
    for settings in _tried(config):
        changed = cfg.replace(config, settings)
        if checks.first_broken(changed, around) or changed.data.batch_size % _pieces(changed):
            continue
        resolved = changed.resolve()
        other = step_model_of(resolved, work.hardware, work.framework.name)
        differs = {key: value for key, value in layout_flag.of(resolved).items() if value != here[key]}
        needs = memory(other, config.model.loss_chunk).bytes
        changes.append(Change(settings, layout_flag.text_of(differs), exact * other.step().seconds, needs))
    return sorted(changes, key=lambda change: change.seconds)


def _tried(config: Config) -> Iterator[dict[str, Any]]:
    pipeline, mesh = config.pipeline, config.mesh
    yield from ({"pipeline.remat": remat} for remat in REMATS if remat != pipeline.remat)
    if mesh.data > 1:
        yield from ({"parallel.zero": zero} for zero in ZEROS if zero != config.parallel.zero)
    yield from ({"pipeline.microbatches": n} for n in (2 * pipeline.microbatches, pipeline.microbatches // 2) if n)
    if mesh.stage > 1:
        yield {"pipeline.schedule": INTERLEAVED, "pipeline.repeats": 2 * max(1, pipeline.repeats)}
        yield from ({"pipeline.schedule": name, "pipeline.repeats": 0} for name in ZERO_BUBBLE if name != pipeline.schedule)
    for fewer, more in HALVED_FOR:
        sizes = {axis: getattr(mesh, axis) for axis in (fewer, more)}
        if sizes[fewer] % 2 == 0:
            yield {f"mesh.{fewer}": sizes[fewer] // 2, f"mesh.{more}": 2 * sizes[more], "pipeline.repeats": 0}


def _pieces(config: Config) -> int:
    """The number of pieces into which replicas, shards and microbatches cut a step's batch."""
    mesh = config.mesh
    return mesh.replica * mesh.data * mesh.expert * config.pipeline.microbatches
