"""A run's op times, planned or measured once (`pipeline.measure_times`), as its folder stores them.
No jax.

    op_times.json   {"times": [F, B, W, message, R, head] in ms, "of": {setting: value}, "devices":
                    "8 × TPU v5p"}; of overlapped cells, of several steps in a program and of dense
                    layers before the others also FB, update and embedding

All processes and every restart take the times of the file, whatever the devices and the version of
the code, so the run's table stays the same. Times are measured or planned anew only if a setting in
"of" has changed, such as the mesh or the model. They are measured in training/measured_op_times.py.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping

from jaxtrain.config import MeshConfig, PipelineConfig, ResolvedConfig, fields, get, value_text
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.files import read_json, replace_text
from jaxtrain.schedule.clocks.times import KnownTimes

OP_TIMES = "op_times.json"
LATER = ("FB", "update", "embedding")  # only of some tables; 0 where they are not known
NAMES = tuple(field.name for field in dataclasses.fields(KnownTimes))
# Settings and groups of settings on which the times of a stage's microbatch depend, and how the
# times were made. The schedule is not among them.
_OF = (
    "model.",
    "mesh.",
    "data.sequence_length",
    "data.batch_size",
    "parallel.ends",
    "parallel.expert_nodes",
    "pipeline.microbatches",
    "pipeline.remat",
    "pipeline.save",
    "pipeline.overlap",
    "pipeline.steps_per_program",
    "precision.compute",
    "precision.matmul",
    "precision.fp8_gradients",
    "precision.fp8_weight_gradients",
    "pipeline.measure_times",
    "train.hardware",
)


class OpTimesError(RunError):
    """A file of op times that cannot be read; the text is one line."""

    status = ExitStatus.BAD_CONFIG


def needed(mesh: MeshConfig, pipeline: PipelineConfig) -> bool:
    """True if a mesh that is known has a table, and the config gives no op times for it."""
    return mesh.stage > 1 and not pipeline.times


def depend_on(config: ResolvedConfig) -> dict[str, str]:
    """The settings on which a config's times depend, as text."""
    return {path: value_text(get(config, path)) for path in fields() if path.startswith(_OF)}


def read(folder: pathlib.Path, settings: Mapping[str, str]) -> tuple[float, ...] | None:
    """The times in a run's folder, () if they could not be measured; None where the folder has none
    for these settings, those of `depend_on`. Raises OpTimesError."""
    file = folder / OP_TIMES
    try:
        values = read_json(file, folder=folder)
        times = tuple(float(value) for value in values["times"])
        # The rules of `pipeline.times`, for a person may have edited the file.
        keeps_rules = (
            3 <= len(times) <= len(NAMES) and all(times[:3]) and all(0 <= t < 1e9 for t in times)
        )
        if times and not keeps_rules:
            raise ValueError
        return times if values["of"] == settings else None
    # Without a file times are made. A damaged one is not replaced silently: other times make
    # another table, and the run would not go on as it began.
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OpTimesError(
            f"{str(file)!r} cannot be read ({error.strerror}): move it away"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise OpTimesError(
            f"{str(file)!r} has no op times: delete it, and they are made again"
        ) from None


def worth_storing(mesh: MeshConfig, pipeline: PipelineConfig, given: PipelineConfig) -> bool:
    """True if the times were planned or measured in this run, even if measuring
    failed, and not `given` by the user."""
    return bool(pipeline.times or pipeline.measure_times) and needed(mesh, given)


def store(
    folder: pathlib.Path, times: tuple[float, ...], settings: Mapping[str, str], devices: str
) -> None:
    """Writes times and the settings on which they depend into a run's folder, in one piece or not
    at all. devices: in words, such as "8 × TPU v5p". Raises OSError."""
    values = {"times": times, "of": settings, "devices": devices}
    replace_text(folder / OP_TIMES, json.dumps(values, indent=1) + "\n")


def describe(times: tuple[float, ...], source: str = f"of {OP_TIMES}") -> str:
    """A line of text with the times. source: where they come from."""
    if not times:
        return "op times could not be told apart: the table is made for those of the model's sizes"
    known = [(name, value) for name, value in zip(NAMES, times) if value or name not in LATER]
    return f"op times in ms, {source}: " + ", ".join(f"{name} {value:g}" for name, value in known)
