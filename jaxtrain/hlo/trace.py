"""A trace of jax.profiler (`*.xplane.pb`): which instructions each device was at, and when.

    CPU   the host's plane; threads of XLA run instructions of several devices, each event names its
          device
    GPU   a plane for each device; lines are streams of kernels, each event names its instruction,
          if it has one
    TPU   a plane for each device; "XLA Ops" has what the core does, "Async XLA Ops" what overlaps

Loops and calls have events of their own, which enclose those of what is in them.
"""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from jax.profiler import ProfileData

HOST = "/host:CPU"
DEVICE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
OPS, ASYNC_OPS, MODULES = "XLA Ops", "Async XLA Ops", "XLA Modules"  # lines of a TPU's plane
STREAM = "Stream #"  # with which the lines of a GPU's plane begin
NS = 1e-9


class TraceError(ValueError):
    """A trace that cannot be read, or in which nothing of the program is; the text is one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """What a device did from `begin` to `end`, in seconds of the trace.

    instruction: its name in the compiled program; "" where a kernel names none
    kernel:      the event's own name
    """

    instruction: str
    kernel: str
    begin: float
    end: float


Events = dict[int, list[Event]]  # by device, as the process numbers its own


def read(folder: pathlib.Path, module: str) -> Events:
    """The events of a program in the newest trace below a folder. Raises TraceError."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise TraceError(f"{folder} has no trace")
    try:
        events = events_of(ProfileData.from_file(str(files[-1])), module)
    except RuntimeError as error:  # of the parser, which is C++
        raise TraceError(
            f"{files[-1]} cannot be read ({' '.join(str(error).split())[:120]})"
        ) from None
    if not events:
        raise TraceError(f"{files[-1]} has no event of {module}")
    return events


def events_of(data: ProfileData, module: str) -> Events:
    """The events of a program, by its name; {} if there are none."""
    events: Events = {}
    for plane in data.planes:
        device = DEVICE.fullmatch(plane.name)
        if device or plane.name == HOST:
            for number, event in _of_plane(plane, module, int(device[1]) if device else None):
                events.setdefault(number, []).append(event)
    return events


def _of_plane(plane: Any, module: str, device: int | None) -> Iterator[tuple[int, Event]]:
    """(device, event) of a plane. device: whose it is; None for the host's, whose events say.

    A GPU's kernel that names no program counts: it is in a graph of this program, or is a copy.
    """
    lines = {line.name: line for line in plane.lines}
    if device is not None and OPS in lines:
        modules, ops, async_ops = (
            lines[name].events if name in lines else () for name in (MODULES, OPS, ASYNC_OPS)
        )
        runs = [
            (e.start_ns, e.start_ns + e.duration_ns)
            for e in modules
            if e.name.split("(")[0] == module
        ]
        for event in itertools.chain(ops, async_ops):
            if any(begin <= event.start_ns < end for begin, end in runs):
                yield device, _event(event, instruction_of(event.name))
        return
    for line in plane.lines:
        for event in line.events if device is None or line.name.startswith(STREAM) else ():
            values = dict(event.stats)
            if device is not None and values.get("hlo_module", module) == module:
                yield device, _event(event, str(values.get("hlo_op", "")))
            elif device is None and values.get("hlo_module") == module and "hlo_op" in values:
                yield int(values.get("device_ordinal", 0)), _event(event, str(values["hlo_op"]))


def instruction_of(name: str) -> str:
    """The instruction of an event's name: that, or its text "%fusion.1 = f32[8] fusion(…)"."""
    return name.split(" = ")[0].strip().removeprefix("%")


def _event(event: Any, instruction: str) -> Event:
    return Event(
        instruction, event.name, NS * event.start_ns, NS * (event.start_ns + event.duration_ns)
    )
