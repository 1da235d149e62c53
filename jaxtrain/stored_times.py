"""A run's op times: planned for its devices, or measured before its first step
(`pipeline.measure_times`), and kept in its folder.

    op_times.json   {"times": [F, B, W, message, R, head] in ms, "of": what they are of, "devices":
                    …}

The file decides for all processes and for every restart, on whatever devices and by whatever
version: the table stays as it is. Only where something that the times are of has been changed, such
as the mesh or the model, are they made again.
"""

import json
import os
import pathlib

import jax

from jaxtrain.config import Config, fields, get, replace, value_text
from jaxtrain.config.pipeline_setup import Setup
from jaxtrain.config.work import kind_at_hand, planned_op_times
from jaxtrain.costs.hardware import Hardware
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.places import OP_TIMES
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.training.op_times import measured_times
from jaxtrain.training.step import make_step

# What the times of a stage's microbatch are of, and how they are made; a table may have been cut
# otherwise and they still hold.
_OF = (
    "model",
    "mesh",
    "data.sequence_length",
    "data.batch_size",
    "pipeline.microbatches",
    "pipeline.remat",
    "precision.compute",
)
_MADE = ("pipeline.measure_times", "train.hardware")


class OpTimesError(RunError):
    """A file of op times that cannot be read; the text is one line."""

    status = ExitStatus.BAD_CONFIG


def wanted(config: Config) -> bool:
    """Whether a config has a table whose op times are not given. Its mesh is known."""
    return config.mesh.stage > 1 and not config.pipeline.times


def planned(config: Config) -> tuple[float, ...]:
    """Those of a resolved config for its `hardware_at_hand`, with a line about them; () where that
    is not known."""
    kind = hardware_at_hand(config)
    if kind is None:
        return ()
    times = planned_op_times(config, kind)
    cluster.log(describe(times, f"planned for {kind.name}"))
    return times


def hardware_at_hand(config: Config) -> Hardware | None:
    """The config's kind of device, or that of the devices at hand; None where it is not known, as
    on simulated devices, or has no peak for the type that is computed in. Raises HardwareError."""
    kind = kind_at_hand(config, jax.devices()[0].device_kind)
    return kind if kind and config.precision.compute in kind.peak_tflops else None


def stored(config: Config, folder: pathlib.Path) -> tuple[float, ...] | None:
    """The times in the run's folder, () if they could not be measured; None where there are none
    for this resolved config. Every process must call this. Raises OpTimesError."""
    found = cluster.from_main(lambda: _read(config, folder), OpTimesError)
    return None if found is None else tuple(found)


def measure(config: Config, setup: Setup) -> tuple[float, ...]:
    """Process 0's measured times; () where they could not be told apart. Every process must call
    this."""
    cluster.log("measuring op times")
    mesh = make_mesh(sizes_of(config.mesh))
    with jax.set_mesh(mesh):
        times = measured_times(config, make_step(config, mesh, setup))
    return tuple(cluster.from_main(lambda: times, OpTimesError))


def to_keep(config: Config, given: Config) -> bool:
    """Whether a resolved config's times are not those of the config as `given`: planned, or
    measured, if only in vain."""
    found_out = config.pipeline.times or config.pipeline.measure_times
    return wanted(replace(config, {"pipeline.times": given.pipeline.times})) and bool(found_out)


def keep(config: Config, folder: pathlib.Path) -> None:
    """Stores a resolved config's times, as planned or measured, in the run's folder, whole or not
    at all. Raises OSError."""
    part = folder / f"{OP_TIMES}.part"
    devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    part.write_text(
        json.dumps(
            {"times": config.pipeline.times, "of": _of(config), "devices": devices}, indent=1
        )
        + "\n"
    )
    os.replace(part, folder / OP_TIMES)


def describe(times: tuple[float, ...], source: str = f"of {OP_TIMES}") -> str:
    """A line for people. source: where the times come from."""
    if not times:
        return "op times could not be told apart: the table is made for those of the model's sizes"
    named = zip(("F", "B", "W", "message", "R", "head"), times, strict=True)
    return f"op times in ms, {source}: " + ", ".join(f"{name} {value:g}" for name, value in named)


def _of(config: Config) -> dict[str, str]:
    """What the times of a config are of."""
    return {
        path: value_text(get(config, path))
        for path in fields()
        if path.startswith(_OF) or path in _MADE
    }


def _read(config: Config, folder: pathlib.Path) -> list[float] | None:
    file = folder / OP_TIMES
    if file.exists() and not file.is_file():  # reading a FIFO would wait for a writer
        raise OpTimesError(f"{str(file)!r} is no file: move it away")
    try:
        values = json.loads(file.read_bytes())
        times = [float(value) for value in values["times"]]
        return times if values["of"] == _of(config) else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OpTimesError(
            f"{str(file)!r} cannot be read ({os.strerror(error.errno or 0)})"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise OpTimesError(
            f"{str(file)!r} has no op times: delete it, and they are made again"
        ) from None
