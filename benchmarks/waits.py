"""The seconds for which a step waits for its collectives, by a timeline of each computation.

Instructions run one after the other, each for its estimated seconds. An asynchronous collective
begins at its start, or when the collective before it on the same links has ended, and its done
waits until it has ended. Permutes in different directions have links of their own; other
collectives share those of their axes. A synchronous collective is waited for, less what is computed
in one fusion with it; what is under way on its links ends later by as much. One that is not done in
the computation of its start counts as waited for.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtrain.planner.programs.loops import StepLoops
from jaxtrain.planner.programs.program import Instruction


@dataclasses.dataclass(frozen=True)
class Message:
    """The collectives of an instruction: the seconds that they take, and the links they go over."""

    seconds: float
    links: str


class Waits:
    """Seconds waited for each instruction with collectives, in one run of it: `once`, by name.

    seconds:  of an instruction, run once, without its collectives
    message:  its collectives; None for other instructions
    """

    def __init__(
        self,
        loops: StepLoops,
        seconds: Callable[[Instruction], float],
        message: Callable[[Instruction], Message | None],
    ):
        self.loops, self._seconds, self._message = loops, seconds, message
        self.once: dict[str, float] = {}
        self._run(loops.program.entry, 1)

    def _run(self, computation: str, times: Any) -> float:
        """Seconds of one run of a computation, which runs `times` a step."""
        clock, ends, free = 0.0, dict[str, float](), dict[str, float]()
        links: dict[str, str] = {}
        for i in self.loops.program.inline(computation):
            message = self._message(i)
            if i.opcode == "while":
                trips = self.loops.trips(i, times)
                clock += float(trips) * self._run(i.calls["body"], times * trips)
            elif message and is_asynchronous(i):
                ends[i.name] = max(clock, free.get(message.links, 0.0)) + message.seconds
                free[message.links], self.once[i.name] = ends[i.name], message.seconds
                links[i.name] = message.links
            elif message:
                computed = self._seconds(i)
                self.once[i.name] = max(0.0, message.seconds - computed)
                if free.get(message.links, 0.0) > clock:
                    free[message.links] += message.seconds
                for name, end in ends.items():
                    if links[name] == message.links and end > clock:
                        ends[name] = end + message.seconds
                clock += max(message.seconds, computed)
            elif started := next((name for name in i.operands if name in ends), ""):
                self.once[started] = max(0.0, ends.pop(started) - clock)
                clock += self.once[started]
            else:
                clock += self._seconds(i)
        return clock


def is_asynchronous(i: Instruction) -> bool:
    """True for the start of an asynchronous collective that the compiler has not made
    synchronous."""
    return i.starts and '"is_sync":true' not in i.text
