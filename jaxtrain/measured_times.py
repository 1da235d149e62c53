"""`pipeline.measure_times`: op times measured before the first step, once, and kept in the run's folder.

    op_times.json   {"times": [F, B, W, message, R, head], "of": what they are of, "devices": …}

The file decides for all processes and for every restart, on whatever devices: the table stays as it is. Only where something that the times
are of has been changed, such as the mesh or the model, are they measured again.
"""

import contextlib
import json
import os
import pathlib

import jax

from jaxtrain.config import Config, fields, get, value_text
from jaxtrain.config.pipeline_setup import Setup
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.training.op_times import measured_times
from jaxtrain.training.step import make_step

OP_TIMES = "op_times.json"
# What the times of a stage's microbatch are of; a table may have been cut otherwise and they still hold.
_OF = ("model", "mesh", "data.sequence_length", "data.batch_size", "pipeline.microbatches", "pipeline.remat", "precision.compute")


class OpTimesError(RunError):
    """A file of op times that cannot be read or written; the text is one line."""

    status = ExitStatus.BAD_CONFIG


def wanted(config: Config) -> bool:
    """Whether a resolved config's op times are measured: given ones count more, and one stage has no table."""
    return config.pipeline.measure_times and not config.pipeline.times and config.mesh.stage > 1


def stored(config: Config, folder: pathlib.Path) -> tuple[float, ...] | None:
    """The times in the run's folder, () if they could not be measured; None where there are none for this resolved config. Every process
    must call this. Raises OpTimesError."""
    found = cluster.from_main(lambda: _read(config, folder), OpTimesError)
    return None if found is None else tuple(found)


def measure(config: Config, setup: Setup, folder: pathlib.Path) -> tuple[float, ...]:
    """Process 0's times, which are then in the run's folder; where another start has stored some meanwhile, those. Every process must call
    this. Raises OpTimesError."""
    cluster.say("measuring op times")
    mesh = make_mesh(sizes_of(config.mesh))
    with jax.set_mesh(mesh):
        times = measured_times(config, make_step(config, mesh, setup))
    return tuple(cluster.from_main(lambda: _write(config, folder, times), OpTimesError))


def describe(times: tuple[float, ...]) -> str:
    """A line for people."""
    if not times:
        return "op times could not be told apart: the table is made for those of the model's sizes"
    named = zip(("F", "B", "W", "message", "R", "head"), times, strict=True)
    return f"op times in ms, of {OP_TIMES}: " + ", ".join(f"{name} {value:g}" for name, value in named)


def _of(config: Config) -> dict[str, str]:
    """What the times of a config are of."""
    return {path: value_text(get(config, path)) for path in fields() if path.startswith(_OF)}


def _read(config: Config, folder: pathlib.Path) -> list[float] | None:
    file = folder / OP_TIMES
    try:
        values = json.loads(file.read_bytes())
        times = [float(value) for value in values["times"]]
        return times if values["of"] == _of(config) else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OpTimesError(f"{str(file)!r} cannot be read ({os.strerror(error.errno or 0)})") from None
    except (ValueError, KeyError, TypeError):
        raise OpTimesError(f"{str(file)!r} has no op times: delete it, and they are measured again") from None


def _write(config: Config, folder: pathlib.Path, times: tuple[float, ...]) -> list[float]:
    """Stores the times, whole or not at all; the first of two starts wins. Those that are stored."""
    file = folder / OP_TIMES
    part = folder / f"{OP_TIMES}.{os.getpid()}"
    values = {"times": times, "of": _of(config), "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(values, indent=1) + "\n")
        if not file.exists():
            with contextlib.suppress(OSError):  # another start's are there by now, or this file system has no links
                os.link(part, file)
        if not file.exists() or _read(config, folder) is None:  # the others are of another mesh or model
            os.replace(part, file)
        part.unlink(missing_ok=True)
    except OSError as error:
        raise OpTimesError(f"{str(file)!r} cannot be written ({os.strerror(error.errno or 0)})") from None
    return _read(config, folder) or []
