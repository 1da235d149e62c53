"""The plans that a search ends with: its best layouts by the exact clock, or the nearest request that has any. No jax."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jaxtrain.config import Config, ConfigError
from jaxtrain.costs import hardware
from jaxtrain.costs.hardware import GIB, Hardware
from jaxtrain.plan import search
from jaxtrain.plan.exact_clock import Clocked, exactly
from jaxtrain.plan.layout_flag import LayoutError
from jaxtrain.plan.prediction import Prediction, predict
from jaxtrain.plan.search import Candidate, Space

SHOWN = 10
MOST_TIMES, MOST_STEPS = 4096, 2048  # how far a number of devices that works is looked for: as a multiple, and one by one


@dataclasses.dataclass(frozen=True)
class Plan:
    """A config with a layout, not resolved, what is predicted of it, and what its table says, by which the prediction goes then."""

    config: Config
    prediction: Prediction
    clock: Clocked | None = None


def plan_of(config: Config, kind: Hardware, assume: str, tokens: float | None) -> Plan:
    """Of a config that keeps its rules, by its table where our own program trains. Raises ConfigError for a table that cannot be made."""
    return Plan(config, *exactly(predict(config.resolve(), kind, assume, tokens)))


def best_plans(space: Space, tokens: float | None) -> list[Plan]:
    """At most SHOWN, the fastest by the exact clock first. Raises LayoutError, with the nearest request that has a plan, where no
    layout fits, and ConfigError for a config that breaks a rule whatever its layout is."""
    search.check(space)
    for candidates in search.by_offload(space):
        if plans := [plan for plan in _plans(space, candidates, tokens) if plan.prediction.fits]:  # by its own table, too
            return sorted(plans, key=lambda plan: plan.prediction.seconds)[:SHOWN]
    raise LayoutError(_nearest(space))


def _plans(space: Space, candidates: Sequence[Candidate], tokens: float | None) -> Iterator[Plan]:
    """Of those whose table can be made."""
    for candidate in candidates:
        with contextlib.suppress(ConfigError):  # the schedule is not made for so many stages and microbatches
            yield plan_of(search.laid_out(space, candidate.layout), space.hardware, space.assume, tokens)


# --- where there is none -------------------------------------------------------------------------------------------------------------


def _nearest(space: Space) -> str:
    """Why a search found nothing, and the nearest that works."""
    least = search.least_memory(space)
    if least is None:
        batch, layers = space.config.data.batch_size, space.config.model.layers
        rule = f"--devices={space.devices}: no layout uses so many devices with data.batch_size={batch} and model.layers={layers}"
        return f"{rule}: use {_number_of_devices(space, _outwards(space)) or _batch(space)}"
    size, layout = least
    parts = ", ".join(f"{axis}={getattr(layout, axis)}" for axis in ("stage", "model", "data", "expert") if getattr(layout, axis) > 1)
    rule = f"--devices={space.devices}: no layout fits into {space.hardware.memory / GIB:.1f} GiB of {space.hardware.name}"
    if size > space.hardware.memory:
        rule += f": the smallest{f', {parts},' * bool(parts)} needs {size / GIB:.1f} GiB"
    multiples = (space.devices * times for times in itertools.takewhile(lambda n: n <= MOST_TIMES, _growing()))
    use = _number_of_devices(space, multiples) or _other_hardware(space)
    return f"{rule}: use {use}" if use else f"{rule}: use fewer --config.model.layers or a shorter --config.data.sequence_length"


def _growing() -> Iterator[int]:
    """2, 3, 4, 6, 8, 12, 16, …"""
    yield 2
    for power in itertools.count(1):
        yield from (3 * 2 ** (power - 1), 2 ** (power + 1))


def _outwards(space: Space) -> Iterator[int]:
    """Numbers of devices by how far they are from the one that was asked for."""
    most = min(space.devices, _most_devices(space))
    yield from (n for away in range(MOST_STEPS) for n in (most - away, most + away) if n > 0)


def _most_devices(space: Space) -> int:
    """More than this no layout uses."""
    m, data = space.config.model, space.config.data
    return data.batch_size * m.layers * min(m.heads, search.MOST_MODEL) * max(1, data.sequence_length // search.LEAST_TOKENS)


def _number_of_devices(space: Space, numbers: Iterator[int]) -> str:
    """The first number of devices on which a layout fits, as a flag; "" for none."""
    for number in numbers:
        least = search.least_memory(space.on(number))
        if least and least[0] <= space.hardware.memory:
            return f"--devices={number}"
    return ""


def _other_hardware(space: Space) -> str:
    """The kind of devices with least memory on which a layout fits, as a flag; "" for none."""
    for kind in sorted(map(hardware.load, hardware.known()), key=lambda kind: kind.memory):
        least = search.least_memory(dataclasses.replace(space, hardware=kind))
        if least and least[0] <= kind.memory:
            return f"--hardware={kind.name}"
    return ""


def _batch(space: Space) -> str:
    return f"--config.data.batch_size={space.devices * max(1, space.config.data.batch_size // space.devices)}"
