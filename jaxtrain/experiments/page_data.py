"""What the page of a run shows, from the files of its folder, as an object that JSON can hold;
page.html names and draws it. jax is imported for the schedule's picture alone, without a device.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.config import Config, fields, get, setting_of, value_text
from jaxtrain.config.phases import spans
from jaxtrain.experiments.run_folder import RunFolder
from jaxtrain.pipeline.step_picture import step_picture
from jaxtrain.run.files import SAMPLES_FILE, STARTS_FILE, read_json_lines
from jaxtrain.run.goodput import TITLES, Goodput, read_goodput
from jaxtrain.run.metrics import METRICS, ROLLED_BACK_FILE, host, read_metrics
from jaxtrain.run.run_lock import NAME as LOCK, SILENCE_S
from jaxtrain.schedule.drawing import STARTS

POINTS = 800  # of a curve
LISTED = 40  # starts, the last ones
SAMPLES = 3


def page_data(run: RunFolder) -> dict[str, Any]:
    """All that the page of a run shows: curves of all numbers of its records, its starts, rollbacks
    and phases, goodput by parts, samples, schedule and settings."""
    goodput = Goodput(read_goodput(run.folder))
    names = dict.fromkeys(name for record in run.records for name in record)
    return {
        "name": run.name,
        "written": time.time(),
        "is_running": _is_running(run),
        "metrics": {
            name: {"title": each.title, "unit": each.unit, "meaning": each.meaning}
            | {"is_host": each.combine is host}
            for name, each in METRICS.items()
        },
        "curves": {name: points for name in names if (points := curve(run.records, name))},
        "discarded": curve(read_metrics(run.folder, ROLLED_BACK_FILE), "loss"),
        "rollbacks": [record for record in run.records if "rolled_back_from" in record],
        "phases": {span.phase: span.begin for span in reversed(spans(run.config))},
        "goodput": [
            dataclasses.asdict(start.last) | {"parts": start.parts()}
            for start in goodput.starts[-LISTED:]
        ],
        "parts": goodput.parts(),
        "titles": TITLES,
        "colours": STARTS,
        "starts": [*read_json_lines(run.folder / STARTS_FILE)][-LISTED:],
        "samples": [*read_json_lines(run.folder / SAMPLES_FILE)][-SAMPLES:],
        "schedule": _schedule(run.config),
        "settings": [
            [path, value_text(get(run.config, path)), value_text(field.default)]
            + [setting_of(field).doc]
            for path, field in fields().items()
        ],
    }


def curve(records: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float, float]]:
    """Steps, wall seconds and values of the records that have this number: all, or the least and
    the greatest of each of POINTS / 2 parts, in order, so that no spike is lost; and the last."""
    points = [
        (record["step"], record.get("wall_s", 0.0), float(f"{value:.7g}"))
        for record in records
        if isinstance(value := record.get(name), (int, float)) and math.isfinite(value)
    ]
    if len(points) <= POINTS:
        return points
    values = np.array([value for _, _, value in points])
    parts = np.array_split(np.arange(len(points)), POINTS // 2)
    ends = {part[index(values[part])] for part in parts for index in (np.argmin, np.argmax)}
    return [points[i] for i in sorted({*ends, len(points) - 1})]


def _is_running(run: RunFolder) -> bool | None:
    """True while a run holds the folder's lock; False if it died with it; None without one."""
    with contextlib.suppress(OSError):
        return time.time() - (run.folder / LOCK).stat().st_mtime < SILENCE_S
    return None


def _schedule(config: Config) -> tuple[str, str]:
    """A line about the table of a step, and its picture, "" if there is none."""
    try:
        return step_picture(config.resolve())
    except (ValueError, OSError) as error:
        return f"no picture: {error}", ""
