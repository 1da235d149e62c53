"""The measured step of a run, and its time by the planner's parts, from a trace of its devices.

A listener of the loop times the steps after warm-up, once in each start of the run, and process 0
writes them with the planned step. The time for that is not a step's, but Phase.OTHER of the loop;
the other processes wait outside of any step, because a step in which they waited would count as
hung.

The parts are read from the trace's events (trace.py) and the compiled program (program.py).
At each moment the device computes if any event computes; otherwise it communicates, and this
communication is exposed; otherwise it waits. Events that compute at the same moment share it. So
the parts of a step add up to its time.

    matmuls      products, also of experts
    attention    its kernels, and all else in its scope
    optimizer    the update
    memory       all other computation
    host         copies to and from the host's memory
    AXIS         communication over a mesh axis, the one with the slowest links if there are
                 several; `communication` if no axis is known
    waiting      no event: bubbles, the time between kernels, the host
    other        a loop that became one kernel, whose parts are not known

In a collective a device waits for those that come later; between stages that is the bubble. The
last device does not wait. So the shortest time of a collective among this process's devices counts
as communication, and the rest as waiting. Devices of other processes are not seen: the wait for
them counts as communication.
"""

import collections
import dataclasses
import enum
import itertools
import pathlib
import re
import statistics
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.stages import Compiled

from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import AXES, sizes_of
from jaxtrain.parallel.attention.causal import SCOPE
from jaxtrain.planner.programs.loops import op_in
from jaxtrain.planner.programs.program import FREE, GROUPED, Instruction, Program, along
from jaxtrain.planner.programs.trace import Events, TraceError, TraceEvent, read
from jaxtrain.planner.search.compare import COMMUNICATION, WAITING, PlannedStep, Trace
from jaxtrain.planner.search.predict import Prediction
from jaxtrain.planner.step.time_breakdown import (
    ATTENTION,
    HOST,
    MATMULS,
    MEMORY,
    OPTIMIZER,
    TimeBreakdown,
)
from jaxtrain.run.files import PLANNED, replace_text, warned
from jaxtrain.run.wall_clock import STEPS, Phase, WallClock
from jaxtrain.training.profile import WARM_UP, Profile
from jaxtrain.training.recovery import Rollback

STEPS_MEASURED = 10
LEAST = 3  # measured steps of a run that ends early
OTHER = "other"
HOST_MEMORY = 5  # the memory space of arrays in the host's memory
ASYNCHRONOUS = ("-start", "-done", "-update")
BODIES_COUNT = FREE | {"while", "conditional"}  # opcodes that take no time of their own
# A GPU's kernels in graphs, which name no instruction, by their own names: those of libraries.
KERNELS = (
    (re.compile(r"nccl", re.IGNORECASE), COMMUNICATION),
    (re.compile(r"memcpy ?(?:d2h|h2d)", re.IGNORECASE), HOST),
    (re.compile(r"fmha|flash|cudnn.*(?:sdpa|attention|fusion)", re.IGNORECASE), ATTENTION),
    (re.compile(r"gemm|nvjet|cutlass|cublas|xmma", re.IGNORECASE), MATMULS),
)
NAMED_ATTENTION = re.compile(rf"[/(]{SCOPE}[/)]")


class Rank(enum.IntEnum):
    """Precedence of overlapping events: those of the least rank are counted."""

    COMPUTES = 0
    COMMUNICATES = 1
    ENCLOSES = 2


@dataclasses.dataclass(frozen=True)
class Kind:
    """The part of a step's time that an instruction belongs to, and its precedence."""

    part: str
    rank: Rank = Rank.COMPUTES


class Kinds:
    """The kinds of a compiled program's instructions.

    text: the program's text
    mesh: sizes by axis, the one with the slowest links first
    """

    def __init__(self, text: str, mesh: Mapping[str, int]):
        self.program, self.mesh = Program(text), mesh
        self._axes = [name for name, size in mesh.items() if size > 1]
        self._kinds: dict[tuple[str, str], Kind | None] = {}
        # XLA's own kernels have the names of their instructions, for C.
        self._by_kernel = {re.sub(r"\W", "_", name): i for name, i in self.program.named.items()}

    def of(self, event: TraceEvent) -> Kind | None:
        """The kind of an event's instruction, or of its kernel where the program has no such name.

        None for a loop, whose time is that of its body.
        """
        named = self.program.named.get(event.instruction)
        key = event.instruction, "" if named else event.kernel
        instruction = named or self._by_kernel.get(event.kernel)
        if key not in self._kinds and instruction:
            self._kinds[key] = self._of(instruction)
        elif key not in self._kinds:
            part = next((part for kernel, part in KERNELS if kernel.search(event.kernel)), MEMORY)
            rank = Rank.COMMUNICATES if part in (COMMUNICATION, HOST) else Rank.COMPUTES
            only_axis = part == COMMUNICATION and len(self._axes) == 1
            self._kinds[key] = Kind(self._axes[0] if only_axis else part, rank)
        return self._kinds[key]

    def _of(self, i: Instruction) -> Kind | None:
        if i.opcode in BODIES_COUNT:
            return None
        if i.opcode == "call":
            return Kind(OTHER, Rank.ENCLOSES)
        start = i
        if i.opcode.endswith("-done"):
            start = self.program.named.get(next(iter(i.operands), ""), i)
        products = self.program.multiplies(start)
        inside = [start, *self.program.below(start.calls.get("calls", ""))]
        if not products:
            if collective := next((j for j in inside if j.collective), None):
                axes, _ = along(collective, self.mesh)
                return Kind(axes[0], Rank.COMMUNICATES) if axes else None
            operands = [
                self.program.named[name] for name in start.operands if name in self.program.named
            ]
            if any(HOST_MEMORY in j.spaces for j in (start, *operands)):
                return Kind(HOST, Rank.COMMUNICATES)
        op_name = i.op_name
        if not op_name and i.opcode == "fusion":
            op_name = self.program.root(i.calls["calls"]).op_name
        kernel = next((j for j in inside if j.is_kernel), None)
        part = MATMULS if products else MEMORY
        if op_in(op_name) == OPTIMIZER:
            part = OPTIMIZER
        elif kernel and GROUPED.search(f"{kernel.target} {kernel.text}"):
            part = MATMULS
        elif NAMED_ATTENTION.search(op_name) or (kernel and kernel.target == "tpu_custom_call"):
            part = ATTENTION
        # An asynchronous operation counts only while the device computes nothing else.
        return Kind(part, Rank.ENCLOSES if i.opcode.endswith(ASYNCHRONOUS) else Rank.COMPUTES)


def measured_parts(events: Events, kinds: Kinds, steps: int, step_time_s: float) -> Trace:
    """Seconds by part of a step on the device that computes most, from a trace of `steps` steps.

    The exposed parts, `waiting` among them, add up to `step_time_s`. Raises TraceError if no event
    is of a known kind.
    """
    spans = {
        device: [(e.begin, e.end, kind) for e in of_device if (kind := kinds.of(e)) is not None]
        for device, of_device in without_waiting(events, kinds).items()
    }
    busy = {
        device: sum(end - begin for begin, end, kind in of_device if kind.rank is Rank.COMPUTES)
        for device, of_device in spans.items()
    }
    if not any(busy.values()):
        raise TraceError("the trace has no work of a device")
    device = max(busy, key=lambda number: busy[number])
    parts = shared_out(spans[device]) * (1 / steps)
    exposed = {**parts.exposed, WAITING: max(0.0, step_time_s - parts.seconds)}
    return Trace(step_time_s, device, exposed, parts.hidden)


def without_waiting(events: Events, kinds: Kinds) -> Events:
    """The events of each device by their beginning, with the time that a collective waits for
    other devices cut off at its front.

    The n-th event of an instruction is the same collective on all devices that run the instruction
    equally often (stages run it as often as their tables say). The device that entered last did not
    wait, so its event, the shortest of them, is the collective's own time.
    """
    ordered = {
        device: sorted(of_device, key=lambda event: event.begin)
        for device, of_device in events.items()
    }
    collectives: dict[tuple[int, str], list[TraceEvent]] = collections.defaultdict(list)
    for device, of_device in ordered.items():
        for event in of_device:
            kind = kinds.of(event) if event.instruction else None
            if kind is not None and kind.rank is Rank.COMMUNICATES and kind.part != HOST:
                collectives[device, event.instruction].append(event)
    shortest: dict[tuple[str, int], list[float]] = {}
    for (_, name), of_name in collectives.items():
        seconds = [event.end - event.begin for event in of_name]
        key = name, len(of_name)
        shortest[key] = list(map(min, seconds, shortest.get(key, seconds)))
    remaining = {key: iter(shortest[key[1], len(of_name)]) for key, of_name in collectives.items()}
    return {
        device: [
            dataclasses.replace(event, begin=event.end - next(remaining[device, event.instruction]))
            if (device, event.instruction) in remaining
            else event
            for event in of_device
        ]
        for device, of_device in ordered.items()
    }


def shared_out(spans: Sequence[tuple[float, float, Kind]]) -> TimeBreakdown:
    """Seconds by part of what one device did. spans: begin, end and kind of each event."""
    changes = [(begin, kind, 1) for begin, end, kind in spans if end > begin]
    changes += [(end, kind, -1) for begin, end, kind in spans if end > begin]
    changes.sort(key=lambda change: change[0])
    active: collections.Counter[Kind] = collections.Counter()
    exposed, hidden = (collections.defaultdict[str, float](float) for _ in range(2))
    for (since, kind, change), (until, _, _) in itertools.pairwise(changes):
        active[kind] += change
        active = +active  # without those that have ended
        if until == since:
            continue
        least = min((at.rank for at in active), default=None)
        ranked = sum(count for at, count in active.items() if at.rank is least)
        for at, count in active.items():
            if at.rank is least:
                exposed[at.part] += (until - since) * count / ranked
            elif at.rank is Rank.COMMUNICATES:
                hidden[at.part] += until - since
    return TimeBreakdown(dict(exposed), dict(hidden))


class AfterWarmUp:
    """Times the steps after the first ones and those of the profile.

    Args:
      plan: of the run on its devices; None if they are not known, and nothing is measured.
      program: the compiled step.
      folder: of the run, where planned.json goes.
      profile: of the loop, which is told of every step before this.
      clock: of the command.
      say: gets the lines.
    """

    def __init__(
        self,
        plan: Prediction | None,
        program: Compiled,
        folder: pathlib.Path,
        profile: Profile,
        clock: WallClock,
        say: Callable[[str], object],
    ):
        self._plan, self._program, self._folder = plan, program, folder
        self._profile, self._clock, self._say = profile, clock, say
        # After warm-up, the traced steps, and one that was dispatched without a step to wait for.
        self._first = profile.start + WARM_UP + profile.count + 1
        self._laps: list[float] = []
        self._since: float | None = None
        self._steps = 1  # of the program dispatched last

    def after(self, at: int, steps: int = 1) -> None:
        """Step `at` has been dispatched, the last one of a program of so many steps, and the
        program before has ended."""
        if self._plan is None or at < self._first:
            return
        now = self._clock.spent(*STEPS)
        if self._since is not None:
            self._laps.append((now - self._since) / self._steps)
        self._since, self._steps = now, steps
        if len(self._laps) >= STEPS_MEASURED:
            self._report(self._plan, at)

    def go_back(self, _: Rollback) -> None:
        """The run has gone back to an earlier step: steps are timed from the next one on."""
        self._since = None

    def finish(self, at: int) -> None:
        """The run ends at this step, or goes on with other ones: steps are reported if enough were
        timed."""
        if self._plan is not None and len(self._laps) >= LEAST:
            self._report(self._plan, at)
        self._plan = None

    def _report(self, plan: Prediction, at: int) -> None:
        """Logs and writes the comparison, once."""
        self._plan = None
        with self._clock.phase(Phase.OTHER):
            if cluster.is_main():
                step = PlannedStep(
                    at,
                    plan.work.hardware.name,
                    plan.seconds,
                    plan.time.exposed,
                    plan.time.hidden,
                    len(self._laps),
                    statistics.median(self._laps),
                    self._trace(dict(zip(AXES, sizes_of(plan.config.mesh), strict=True))),
                )
                for line in step.lines():
                    self._say(line)
                with warned(self._folder / PLANNED, self._say):
                    replace_text(self._folder / PLANNED, step.as_json())
            if self._profile.step_time_s is not None and jax.process_count() > 1:
                cluster.barrier("the profile is read")

    def _trace(self, mesh: Mapping[str, int]) -> Trace | None:
        """The profile's steps by part; None if none were traced, or with a warning if they cannot
        be read."""
        seconds = self._profile.step_time_s
        if seconds is None:
            return None
        try:
            text = self._program.as_text() or ""
            module = re.match(r"HloModule ([\w.\-]+)", text)
            events = read(self._profile.folder, module[1] if module else "")
            return measured_parts(events, Kinds(text, mesh), self._profile.count, seconds)
        except Exception as error:  # XLA's texts change with its version: no reason to end a run
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            self._say(f"warning: the profile cannot be read by part ({reason})")
            return None
