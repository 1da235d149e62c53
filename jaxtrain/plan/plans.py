"""The plans that a search ends with: its best layouts by the exact clock, or the nearest request that has any. No jax."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.config import Config, ConfigError, replace
from jaxtrain.config.rules import divisors, near
from jaxtrain.costs import hardware
from jaxtrain.costs.hardware import GIB, Hardware
from jaxtrain.plan import search
from jaxtrain.plan.exact_clock import Clocked, exactly
from jaxtrain.plan.layout_flag import LayoutError
from jaxtrain.plan.prediction import Prediction, predict
from jaxtrain.plan.search import Candidate, Space

SHOWN = 10
MOST_TIMES, MOST_STEPS = 4096, 64  # how far a number of devices that works is looked for: as a multiple, and one after the other
MOST_STAGES = 512  # of such a number


@dataclasses.dataclass(frozen=True)
class Plan:
    """A config with a layout, not resolved, what is predicted of it, and what its table says, by which the prediction goes then."""

    config: Config
    prediction: Prediction
    clock: Clocked | None = None


def plan_of(config: Config, kind: Hardware, assume: str, tokens: float | None) -> Plan:
    """The plan of a config that keeps its rules, timed on its table where our own program trains.

    Raises ConfigError for a table that cannot be made.
    """
    return Plan(config, *exactly(predict(config.resolve(), kind, assume, tokens)))


def best_plans(space: Space, tokens: float | None) -> list[Plan]:
    """At most SHOWN, the fastest by the exact clock first. Raises LayoutError, with the nearest request that has a plan, where no
    layout fits, and ConfigError for a config that breaks a rule whatever its layout is."""
    search.check(space)
    for candidates in search.by_offload(space):
        if plans := [plan for plan in _plans(space, candidates, tokens) if plan.prediction.fits]:  # by its own table, too
            return sorted(plans, key=lambda plan: plan.prediction.seconds)[:SHOWN]
    raise _none_fits(space)


def check_fits(space: Space) -> None:
    """Raises what `best_plans` raises, as far as that is known without a search."""
    search.check(space)
    least = search.least_memory(space)
    if least is None or least[0] > space.hardware.memory:
        raise _none_fits(space)


def _plans(space: Space, candidates: Sequence[Candidate], tokens: float | None) -> Iterator[Plan]:
    """Plans of the candidates whose table can be made."""
    for candidate in candidates:
        with contextlib.suppress(ConfigError):  # the schedule is not made for so many stages and microbatches
            yield plan_of(search.laid_out(space, candidate.layout), space.hardware, space.assume, tokens)


# --- where there is none -------------------------------------------------------------------------------------------------------------


def _none_fits(space: Space) -> LayoutError:
    """Why a search found nothing, and the nearest that works."""
    least = search.least_memory(space)
    if least is None:
        batch, layers = space.config.data.batch_size, space.config.model.layers
        rule = f"--devices={space.devices}: no layout uses so many devices with data.batch_size={batch} and model.layers={layers}"
        numbers = itertools.islice(_usable_numbers(space), MOST_STEPS)
        return LayoutError(rule, _number_of_devices(space, numbers) or _batch(space) or _other_hardware(space) or _smaller_model(space))
    size, layout = least
    parts = ", ".join(f"{axis}={getattr(layout, axis)}" for axis in ("stage", "model", "data", "expert") if getattr(layout, axis) > 1)
    rule = f"--devices={space.devices}: no layout fits into {space.hardware.memory / GIB:.1f} GiB of {space.hardware.name}"
    if size > space.hardware.memory:
        rule += f": the smallest{f', {parts},' * bool(parts)} needs {size / GIB:.1f} GiB"
    multiples = (space.devices * times for times in itertools.takewhile(lambda n: n <= MOST_TIMES, _growing()))
    return LayoutError(rule, _number_of_devices(space, multiples) or _other_hardware(space) or _smaller_model(space))


def _growing() -> Iterator[int]:
    """2, 3, 4, 6, 8, 12, 16, …"""
    yield 2
    for power in itertools.count(1):
        yield from (3 * 2 ** (power - 1), 2 ** (power + 1))


def _usable_numbers(space: Space) -> Iterator[int]:
    """Numbers of devices of which data shards divide the batch, the nearest to the one that was asked for first."""
    m, data = space.config.model, space.config.data
    models = [size for size in divisors(m.heads) if size <= search.MOST_MODEL]
    contexts = [size for size in divisors(data.sequence_length) if size == 1 or data.sequence_length // size >= search.LEAST_TOKENS]
    inside = {model * context for model in models for context in contexts}
    stages = {size * stage for size in inside for stage in range(1, min(m.layers, MOST_STAGES) + 1)}
    yield from near(space.devices, {size * shards for size in stages for shards in divisors(data.batch_size)})


def _fits(space: Space) -> bool:
    """Whether a layout fits, by closed forms, and keeps all rules."""
    with contextlib.suppress(ConfigError, LayoutError):
        search.check(space)
        least = search.least_memory(space)
        return least is not None and least[0] <= space.hardware.memory
    return False


def _number_of_devices(space: Space, numbers: Iterator[int]) -> dict[str, Any]:
    """The first number of devices on which a layout fits, as a flag; {} for none."""
    return next(({"devices": number} for number in numbers if _fits(space.on(number))), {})


def _other_hardware(space: Space) -> dict[str, Any]:
    """The kind of devices with least memory on which a layout fits, as a flag; {} for none."""
    kinds = sorted(map(hardware.load, hardware.known()), key=lambda kind: kind.memory)
    return next(({"hardware": kind.name} for kind in kinds if _fits(dataclasses.replace(space, hardware=kind))), {})


def _batch(space: Space) -> dict[str, Any]:
    """The batch with a sequence for each device, or some, as a flag; {} where that fits on no layout either."""
    return _changed(space, [{"data.batch_size": space.devices * max(1, space.config.data.batch_size // space.devices)}])


def _smaller_model(space: Space) -> dict[str, Any]:
    """Half as many layers, or a quarter, and so on; then shorter sequences too. As flags."""
    layers, length = (
        [n >> power for power in range(1, n.bit_length())] for n in (space.config.model.layers, space.config.data.sequence_length)
    )
    fewer = [{"model.layers": n} for n in layers]
    shorter = [{"model.layers": 1, "data.sequence_length": n} for n in length]
    return _changed(space, [*fewer, *shorter]) or {"config": "tiny"}


def _changed(space: Space, tried: Sequence[dict[str, int]]) -> dict[str, Any]:
    """The first settings with which a layout fits, as flags; {} for none."""
    spaces = ((settings, dataclasses.replace(space, config=replace(space.config, settings))) for settings in tried)
    settings = next((settings for settings, changed in spaces if _fits(changed)), {})
    return {f"config.{path}": value for path, value in settings.items()}
