"""A trace of jax.profiler (`*.xplane.pb`): the instructions that each device ran, and their times.

    CPU   the host's plane: XLA's threads run instructions of several devices; an event names its
          instruction and its device
    GPU   a plane for each device: streams of kernels; an event names its instruction, unless the
          kernel is in a graph
    TPU   a plane for each device: "XLA Ops" has what the core runs, "Async XLA Ops" what overlaps

A loop or a call has an event too, which encloses those of its body.
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
STREAM = "Stream #"  # the beginning of the names of a GPU plane's lines
NS = 1e-9


class TraceError(ValueError):
    """A trace that cannot be read or has no event of the program; the text is one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event of a device, from `begin` to `end` in seconds of the trace.

    instruction: name of the instruction in the compiled program; "" for a kernel that names none
    kernel:      the event's name
    """

    instruction: str
    kernel: str
    begin: float
    end: float


Events = dict[int, list[TraceEvent]]  # by the device's number in this process


def read(folder: pathlib.Path, module: str) -> Events:
    """The events of a program in the newest trace below a folder. Raises TraceError if there is no
    trace, if it cannot be read, or if it has no event of the program."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise TraceError(f"{folder} has no trace")
    try:
        events = events_of(ProfileData.from_file(str(files[-1])), module)
    except RuntimeError as error:  # from the parser, which is C++
        reason = " ".join(str(error).split())[:120]
        raise TraceError(f"{files[-1]} cannot be read ({reason})") from None
    if not events:
        raise TraceError(f"{files[-1]} has no event of {module}")
    return events


def events_of(data: ProfileData, module: str) -> Events:
    """The events of the program of this name; {} if there are none."""
    events: Events = {}
    for plane in data.planes:
        device = DEVICE.fullmatch(plane.name)
        if device or plane.name == HOST:
            number = int(device[1]) if device else None
            for ran_on, event, instruction in _of_plane(plane, module, number):
                begin, end = NS * event.start_ns, NS * (event.start_ns + event.duration_ns)
                events.setdefault(ran_on, []).append(
                    TraceEvent(instruction, event.name, begin, end)
                )
    return events


def _of_plane(plane: Any, module: str, device: int | None) -> Iterator[tuple[int, Any, str]]:
    """Yields (device, event, name of the instruction) for each event of a program in a plane.

    A GPU's kernel that names no program is taken as the program's: it is in one of its graphs, or
    is a copy.

    module: the program's name
    device: number of the device whose plane it is; None for the host's plane, whose events name
        their devices
    """
    lines = {line.name: line.events for line in plane.lines}
    if device is not None and OPS in lines:
        runs = [
            (run.start_ns, run.start_ns + run.duration_ns)
            for run in lines.get(MODULES, ())
            if run.name.split("(")[0] == module
        ]
        for event in itertools.chain(lines[OPS], lines.get(ASYNC_OPS, ())):
            if any(begin <= event.start_ns < end for begin, end in runs):
                # the instruction's name or its text: "%fusion.1 = f32[8] fusion(…)"
                yield device, event, event.name.split(" = ")[0].strip().removeprefix("%")
        return
    for line in plane.lines:
        for event in line.events if device is None or line.name.startswith(STREAM) else ():
            stats = dict(event.stats)
            if device is not None and stats.get("hlo_module", module) == module:
                yield device, event, str(stats.get("hlo_op", ""))
            elif device is None and stats.get("hlo_module") == module and "hlo_op" in stats:
                yield int(stats.get("device_ordinal", 0)), event, str(stats["hlo_op"])
