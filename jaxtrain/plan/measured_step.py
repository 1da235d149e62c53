"""The measured step of a run, and its time by the planner's parts, from a trace of its devices.

A listener of the loop times the steps after warm-up, once in each start of the run, and process 0
writes them with the planned step. That takes the loop's time, but not the steps' (Part.OTHER); the
other processes wait outside of any step, which would count as hung.

TimeBreakdown are read from the trace's events (hlo/trace.py) and the compiled program
(hlo/program.py). At each moment the device computes, if any event does; else it communicates, which
is then exposed; else it waits. What computes at the same moment shares it. So a step's parts add up
to its time.

    matmuls      products, grouped ones of experts too
    attention    its kernels, and all else under that name
    optimizer    the update
    memory       all other computation
    host         copies to and from the host's memory
    AXIS         communication over a mesh axis, the one with the slowest links if there are
                 several; `communication` if no axis is known
    waiting      no event: bubbles, the time between kernels, the host
    other        a loop that became one kernel, in which nothing can be told apart

A device waits in a collective for those that come later: between stages that is the bubble. The
last device does not wait, so a collective takes as long as on the device of this process where it
is shortest, and the rest is waiting. Devices of other processes are not seen: the wait for them
counts as communication.
"""

import collections
import dataclasses
import enum
import math
import pathlib
import re
import statistics
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.stages import Compiled

from jaxtrain.config import Config
from jaxtrain.costs.step_time import ATTENTION, HOST, MATMULS, MEMORY, OPTIMIZER, TimeBreakdown
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import AXES, sizes_of
from jaxtrain.hlo.cost import Costs, target
from jaxtrain.hlo.loops import op_in
from jaxtrain.hlo.program import FREE, Instruction, Program, along
from jaxtrain.hlo.step_figures import GROUPED, NO_KERNELS
from jaxtrain.hlo.trace import Event, Events, TraceError, read
from jaxtrain.parallel.attention import SCOPE
from jaxtrain.plan.compare import COMMUNICATION, PLANNED, WAITING, PlannedStep, Trace, plan_at_hand
from jaxtrain.run.files import warned
from jaxtrain.run.wall_clock import STEPS, Part, WallClock
from jaxtrain.training.profile import WARM_UP, Profile
from jaxtrain.training.recovery import Rollback

OTHER = "other"
HOST_MEMORY = 5  # the space of arrays in it
ASYNCHRONOUS = ("-start", "-done", "-update")
LOOPS = frozenset({"while", "conditional"})
# Kernels of GPUs that name no instruction (in graphs of kernels) by their own names.
KERNELS = (
    (re.compile(r"nccl", re.IGNORECASE), COMMUNICATION),
    (re.compile(r"memcpy ?(?:d2h|h2d)", re.IGNORECASE), HOST),
    (re.compile(r"fmha|flash|cudnn.*(?:sdpa|attention)", re.IGNORECASE), ATTENTION),
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

    text: of the program
    mesh: sizes by axis, the one with the slowest links first
    """

    def __init__(self, text: str, mesh: Mapping[str, int]):
        self.program, self.mesh = Program(text), mesh
        self.costs = Costs(self.program)
        self._axes = [name for name, size in mesh.items() if size > 1]
        self._named = {
            i.name: i for instructions in self.program.computations.values() for i in instructions
        }
        self._kinds: dict[tuple[str, str], Kind | None] = {}

    def of(self, event: Event) -> Kind | None:
        """The kind of an event's instruction; None of a loop, whose time is that of its body."""
        key = event.instruction, "" if event.instruction in self._named else event.kernel
        if key not in self._kinds:
            instruction = self._named.get(key[0])
            self._kinds[key] = (
                self._of(instruction) if instruction else self._of_kernel(event.kernel)
            )
        return self._kinds[key]

    def _of_kernel(self, name: str) -> Kind:
        """The kind of a kernel that the program's text does not name."""
        part = next((part for pattern, part in KERNELS if pattern.search(name)), MEMORY)
        rank = Rank.COMMUNICATES if part in (COMMUNICATION, HOST) else Rank.COMPUTES
        only_axis = part == COMMUNICATION and len(self._axes) == 1
        return Kind(self._axes[0] if only_axis else part, rank)

    def _of(self, i: Instruction) -> Kind | None:
        if i.opcode in LOOPS or i.opcode in FREE:
            return None
        if i.opcode == "call":
            return Kind(OTHER, Rank.ENCLOSES)
        start = (
            self._named.get(i.operands[0]) if i.opcode.endswith("-done") and i.operands else None
        )
        start = start or i
        called = [name for role, name in start.calls.items() if role == "calls"]
        inside = [start, *(j for name in called for j in self.program.below(name))]
        products = any(self.costs.flops(j) for j in inside)
        if not products:
            if collective := next((j for j in inside if j.collective), None):
                axes, _ = along(collective, self.mesh)
                return Kind(axes[0], Rank.COMMUNICATES) if axes else None
            operands = [self._named[name] for name in start.operands if name in self._named]
            if any(HOST_MEMORY in j.spaces for j in (start, *operands)):
                return Kind(HOST, Rank.COMMUNICATES)
        # What is in flight while the device computes counts where it computes nothing.
        rank = Rank.ENCLOSES if i.opcode.endswith(ASYNCHRONOUS) else Rank.COMPUTES
        return Kind(self._computed(i, inside, products), rank)

    def _computed(self, i: Instruction, inside: Sequence[Instruction], products: bool) -> str:
        """The part of an instruction that does not communicate."""
        op_name = i.op_name
        if not op_name and i.opcode == "fusion":
            op_name = self.program.root(i.calls["calls"]).op_name
        kernels = (
            j for j in inside if j.opcode == "custom-call" and not NO_KERNELS.search(target(j))
        )
        kernel = next(kernels, None)
        if op_in(op_name) == OPTIMIZER:
            return OPTIMIZER
        if kernel is not None and GROUPED.search(f"{target(kernel)} {kernel.text}"):
            return MATMULS
        if NAMED_ATTENTION.search(op_name) or (
            kernel is not None and target(kernel) == "tpu_custom_call"
        ):
            return ATTENTION
        return MATMULS if products else MEMORY


def measured_parts(events: Events, kinds: Kinds, steps: int, step_time_s: float) -> Trace:
    """Seconds by part in a trace of `steps` steps, which took `step_time_s` each, on the device
    that computes most. The exposed parts, `waiting` among them, add up to the step.

    Raises TraceError where no event is of a known kind.
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
    parts += TimeBreakdown({WAITING: max(0.0, step_time_s - parts.seconds)})
    return Trace(step_time_s, device, parts.exposed, parts.hidden)


def without_waiting(events: Events, kinds: Kinds) -> Events:
    """The events in order, each collective from when the last of these devices has come to it.

    The n-th event of an instruction is the same collective on all devices that run it equally
    often: stages run the collectives of their ops as often as their tables say.
    """
    ordered = {
        device: sorted(of_device, key=lambda event: event.begin)
        for device, of_device in events.items()
    }
    collectives: dict[tuple[int, str], list[Event]] = collections.defaultdict(list)
    for device, of_device in ordered.items():
        for event in of_device:
            kind = kinds.of(event) if event.instruction else None
            if kind is not None and kind.rank is Rank.COMMUNICATES and kind.part != HOST:
                collectives[device, event.instruction].append(event)
    same: dict[tuple[str, int], list[list[float]]] = collections.defaultdict(list)
    for (_, name), of_name in collectives.items():
        same[name, len(of_name)].append([event.end - event.begin for event in of_name])
    shortest = {
        key: [min(each) for each in zip(*durations, strict=True)] for key, durations in same.items()
    }
    seconds = {key: iter(shortest[key[1], len(of_name)]) for key, of_name in collectives.items()}
    return {
        device: [
            dataclasses.replace(event, begin=event.end - next(seconds[device, event.instruction]))
            if (device, event.instruction) in seconds
            else event
            for event in of_device
        ]
        for device, of_device in ordered.items()
    }


def shared_out(spans: Sequence[tuple[float, float, Kind]]) -> TimeBreakdown:
    """Seconds by part of what one device did at these times: begin, end and kind of each."""
    changes = [(begin, kind, 1) for begin, end, kind in spans if end > begin]
    changes += [(end, kind, -1) for begin, end, kind in spans if end > begin]
    active: collections.Counter[Kind] = collections.Counter()
    exposed: dict[str, float] = collections.defaultdict(float)
    hidden: dict[str, float] = collections.defaultdict(float)
    since = -math.inf
    for moment, kind, change in sorted(changes, key=lambda change: change[0]):
        if active and moment > since:
            least = min(at.rank for at in active)
            share = (moment - since) / sum(
                count for at, count in active.items() if at.rank is least
            )
            for at, count in active.items():
                if at.rank is least:
                    exposed[at.part] += share * count
                elif at.rank is Rank.COMMUNICATES:
                    hidden[at.part] += moment - since
        since = moment
        active[kind] += change
        if not active[kind]:
            del active[kind]
    return TimeBreakdown(dict(exposed), dict(hidden))


STEPS_MEASURED = 10
LEAST = 3  # steps of a run that ends early


class AfterWarmUp:
    """Times the steps after the first ones and those of the profile.

    Args:
      config: a resolved config whose mesh is known.
      program: of the step.
      folder: of the run, where planned.json goes.
      profile: of the loop, which is told of every step before this.
      clock: of the command.
      say: gets the lines.
    """

    def __init__(
        self,
        config: Config,
        device_kind: str,
        program: Compiled,
        folder: pathlib.Path,
        profile: Profile,
        clock: WallClock,
        say: Callable[[str], object],
    ):
        self._config, self._program, self._folder = config, program, folder
        self._profile, self._clock, self._say = profile, clock, say
        self._plan = plan_at_hand(config, device_kind).prediction
        # After warm-up, the traced steps, and one that was dispatched without a step to wait for.
        self._first = profile.start + WARM_UP + profile.count + 1
        self._laps: list[float] = []
        self._since: float | None = None

    def after(self, at: int) -> None:
        """Step `at` has been dispatched, and the one before has ended."""
        if self._plan is None or at < self._first:
            return
        now = self._clock.spent(*STEPS)
        if self._since is not None:
            self._laps.append(now - self._since)
        self._since = now
        if len(self._laps) >= STEPS_MEASURED:
            self._report(at)

    def go_back(self, _: Rollback) -> None:
        """The run has gone back to an earlier step: steps are timed from the next one on."""
        self._since = None

    def finish(self, at: int) -> None:
        """The run ends at this step: its steps are reported if enough were timed."""
        if len(self._laps) >= LEAST:
            self._report(at)

    def _report(self, at: int) -> None:
        """Logs and writes the comparison, once."""
        plan, laps = self._plan, self._laps
        assert plan is not None
        self._plan, self._laps = None, []
        with self._clock.part(Part.OTHER):
            if cluster.is_main():
                time, name = plan.time, plan.work.hardware.name
                step = PlannedStep(
                    at,
                    name,
                    plan.seconds,
                    time.exposed,
                    time.hidden,
                    len(laps),
                    statistics.median(laps),
                    self._trace(),
                )
                for line in step.lines():
                    self._say(line)
                with warned(self._folder / PLANNED, self._say):
                    (self._folder / PLANNED).write_text(step.as_json())
            if self._profile.step_time_s is not None and jax.process_count() > 1:
                cluster.barrier("the profile is read")

    def _trace(self) -> Trace | None:
        """The profile's steps by part; None if none were traced, or with a warning if they cannot
        be read."""
        seconds = self._profile.step_time_s
        if seconds is None:
            return None
        try:
            text = self._program.as_text() or ""
            module = re.match(r"HloModule ([\w.\-]+)", text)
            events = read(self._profile.folder, module[1] if module else "")
            mesh = dict(zip(AXES, sizes_of(self._config.mesh), strict=True))
            return measured_parts(events, Kinds(text, mesh), self._profile.count, seconds)
        except Exception as error:  # XLA's texts change with its version: no reason to end a run
            self._say(
                f"warning: the profile cannot be read by part ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]})"
            )
            return None
