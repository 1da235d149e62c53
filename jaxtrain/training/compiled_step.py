"""The programs of a step, compiled.

`trace` traces on the calling thread, which has the mesh; what it returns compiles, on another one
in a run, which reads data and restores its state meanwhile. All processes compile at the same time
and wait for each other without their devices (devices/cluster.py).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.stages import Compiled

from jaxtrain.devices import cluster
from jaxtrain.training.one_step import StepMetrics
from jaxtrain.training.several_steps import CompiledSteps
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of a step.

    train:    all of it, or its gradients if the update is streamed; of several steps if a program
              has several
    take:     (TrainState, batch) → (TrainState, StepMetrics); the state may not be used afterwards
    exchange: None if replicas are not independent
    several:  None if a program has one step
    """

    train: Compiled
    take: Callable[[TrainState, dict], tuple[TrainState, StepMetrics]]
    exchange: Compiled | None
    several: CompiledSteps | None = None


def trace(step: Step, like: Programs | None = None) -> Callable[[], Programs]:
    """Traces the programs of a step, in a thread that has its mesh. The function compiles them: it
    takes most of the time, and XLA leaves Python free meanwhile.

    like: those of a step with batches of another shape, whose other programs serve this one, too.
        Processes do not wait for each other then.
    """
    train = step.lower()
    exchange = step.exchange.lower(step.abstract_state()) if step.exchange and not like else None
    compile_streamed = step.streamed.lower() if step.streamed and not like else None

    def compile_all() -> Programs:
        # The same order in all processes, for each name is a barrier.
        compiled = train.compile() if like else cluster.compile_everywhere("step", train)
        several = CompiledSteps(compiled, step.steps_per_program) if step.several else None
        take: Any = several.take if several else compiled
        if compile_streamed:
            take = compile_streamed(compiled)
        if not like:
            exchanges = cluster.compile_everywhere("exchange", exchange) if exchange else None
            return Programs(compiled, take, exchanges, several)
        if step.streamed:
            of_like: Any = like.take
            take = dataclasses.replace(of_like, gradients=compiled)
        return dataclasses.replace(like, train=compiled, take=take, several=several)

    return compile_all


def compiled_memory(compiled: Compiled) -> dict[str, int] | None:
    """Bytes of a compiled program in one device's memory, {"arguments", "temporary", "results",
    "total"}; None if the platform does not report them. Results are those that reuse no
    argument's memory."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    }
    return parts | {"total": sum(parts.values())}
