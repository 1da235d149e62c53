"""The mesh of an elastic config (`mesh.elastic`) on other devices than its sizes ask for. Standard
library only.

Replicas are given up first, then data shards; more devices are used the other way round. All other
axes stay, for they cut the model. The batch stays too: where it is cut into fewer shards, it is cut
into as many more microbatches, so that a device has as many sequences at once, and the memory for
them, as before.
"""

import math
from collections.abc import Iterator

from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.config.rules import divisors
from jaxtrain.schedule.orders import CSV

REPLICA, DATA, MICROBATCHES = "mesh.replica", "mesh.data", "pipeline.microbatches"
KEPT = ("stage", "context", "expert", "model")


def fitted(config: Config, devices: int) -> Config:
    """The config with replica, data and microbatches for so many devices; as it is where its own
    sizes fit, or none do."""
    kept = math.prod(getattr(config.mesh, axis) for axis in KEPT)
    if (
        min(config.mesh.replica, config.mesh.data) < -1
        or 0 in (config.mesh.replica, config.mesh.data)
        or kept < 1
        or devices % kept
    ):
        return config
    for replica, data in _sizes(config, devices // kept):
        for microbatches in _microbatches(config, replica * data):
            if config.data.batch_size % (replica * data * config.mesh.expert * microbatches) == 0:
                return cfg.replace(
                    config, {REPLICA: replica, DATA: data, MICROBATCHES: microbatches}
                )
    return config


def notes(asked: Config, config: Config) -> list[str]:
    """What was changed of the asked config, for people, in one line or none. config: the same,
    fitted."""
    pairs = {
        path: (cfg.get(asked, path), cfg.get(config, path))
        for path in (REPLICA, DATA, MICROBATCHES)
    }
    changed = [
        f"{path} {before} → {after}"
        for path, (before, after) in pairs.items()
        if before not in (after, -1)
    ]
    devices = math.prod(getattr(config.mesh, axis) for axis in ("replica", "data", *KEPT))
    batch = f"a step still has {config.data.batch_size} sequences"
    return (
        [
            f"elastic: {', '.join(changed)} for the {devices} device{'s'[: devices > 1]} at "
            f"hand; {batch}"
        ]
        if changed
        else []
    )


def _sizes(config: Config, shards: int) -> Iterator[tuple[int, int]]:
    """(replica, data) whose product is the number of shards, the best first."""
    replica, data = config.mesh.replica, config.mesh.data
    # such replicas have parameters of their own, so that they stay as many
    apart = config.train.diloco_inner_steps > 0
    every = [
        (shards // size, size)
        for size in divisors(shards)
        if not apart or shards // size == replica
    ]
    # that axis follows the devices; the other one gives way where it has to
    if -1 in (replica, data):
        size, at = (replica, 0) if data == -1 else (data, 1)
        yield from sorted(every, key=lambda sizes: (sizes[at] > size, abs(sizes[at] - size)))
    elif shards <= replica * data:
        yield from sorted(
            every, key=lambda sizes: (sizes[0] > replica or sizes[1] > data, -min(sizes[1], data))
        )
    else:  # replicas where there are some, or else data shards
        grows = lambda sizes: (
            sizes[0] >= replica and sizes[1] >= data and (replica > 1 or sizes[0] == 1)
        )
        yield from sorted(every, key=lambda sizes: (not grows(sizes), abs(sizes[1] - data)))


def _microbatches(config: Config, shards: int) -> Iterator[int]:
    """Numbers of microbatches, the best first: a device has as many sequences in one as asked for,
    or else fewer, or else more."""
    asked, before = config.pipeline.microbatches, config.mesh.replica * config.mesh.data
    # a file's table has its own number
    if shards == before or before < 1 or config.pipeline.schedule.startswith(CSV):
        yield asked
        return
    each = config.data.batch_size // (shards * config.mesh.expert)
    yield from sorted(
        divisors(max(1, each)),
        key=lambda number: (
            number * shards < asked * before,
            abs(number * shards - asked * before),
        ),
    )
