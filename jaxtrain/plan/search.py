"""The best layouts of a number of devices, by closed forms. No jax.

    meshes          all sizes of the six axes whose product is the number of devices and whose rules are kept
    × microbatch    divisors of a shard's sequences
    × remat         × zero × schedule × repeats; offload alone where nothing fits without

The ops of all microbatches, one after the other, are a lower bound of a step that no schedule changes: what is above the best is passed
over. `gpipe` is left out, since 1f1b takes as long and holds less, and so is zero=0 beside zero=1; `replica` is tried for the best alone.
Every layout that comes back keeps the rules of training.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError, checks
from jaxtrain.config.rules import divisors, near
from jaxtrain.config.settings import MOST_MICROBATCHES
from jaxtrain.config.surroundings import Surroundings
from jaxtrain.config.work import OURS, platform_of, program_of, transformer_of, work_of
from jaxtrain.costs import hardware
from jaxtrain.costs.frameworks import Program
from jaxtrain.costs.hardware import GIB, Hardware
from jaxtrain.costs.layout import Layout
from jaxtrain.costs.memory import memory
from jaxtrain.costs.step_time import Work
from jaxtrain.plan import layout_flag
from jaxtrain.plan.layout_flag import LayoutError
from jaxtrain.plan.predict import Clocked, Prediction, exactly, predict
from jaxtrain.schedule.orders import GROWING, SCHEDULES

SHOWN = 10
MOST_TIMES, MOST_STEPS = 4096, 64  # how far a number of devices that works is looked for: as a multiple, and one after the other
MOST_STAGES = 512  # of such a number
BEST = 14  # by closed forms, which the exact clock ranks again
LEAST_TOKENS = 1024  # of a sequence on a device of `context`: shorter parts are not tried
MOST_MODEL, MOST_REPLICAS, MOST_SEQUENCES, MOST_REPEATS = 64, 16, 64, 8
REMATS = ("none", "selective", "full")
OFFLOADS = ("none", "optimizer", "activations", "both")
TABLE_SETTINGS = {"pipeline.chunk_layers": (), "pipeline.times": (), "pipeline.memory": 0.0, "pipeline.layer_costs": ()}


@dataclasses.dataclass(frozen=True)
class Space:
    """What is searched: layouts of this config, whose own is of no account, on so many devices."""

    config: Config
    recipe: Config
    hardware: Hardware
    devices: int
    assume: str = OURS

    def on(self, devices: int) -> "Space":
        """This space on another number of devices."""
        return dataclasses.replace(self, devices=devices)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout that fits, and the seconds of its step."""

    layout: Layout
    seconds: float


def check(space: Space) -> None:
    """Raises ConfigError where the config breaks a rule of training whatever its layout is, and LayoutError for settings of one layout."""
    for path in TABLE_SETTINGS:
        if (value := cfg.get(space.config, path)) != cfg.get(space.recipe, path):
            use = {f"config.{path}": cfg.get(space.recipe, path)}
            rule = f"{cfg.flag_text(f'config.{path}', value)} is of one layout, which the planner is to find"
            raise LayoutError(rule, use, text=f"{LayoutError(rule, use)}, or a --layout of one kind of devices")
    layout = _smallest(space, Layout(replica=_replicas(space)))
    checks.check(laid_out(space, layout), Surroundings(layout.devices, platform_of(space.hardware), space.recipe))


def _smallest(space: Space, mesh: Layout) -> Layout:
    """A mesh with the smallest microbatch of which a step may have as many as that makes."""
    batch = space.config.data.batch_size
    each = batch // mesh.batch_shards if isinstance(batch, int) and 0 < batch <= cfg.LARGEST_INT else 1
    size = next((size for size in divisors(max(1, each)) if each // size <= MOST_MICROBATCHES), 1)
    return dataclasses.replace(mesh, microbatch=size, microbatches=each // size)


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
    check(space)
    for candidates in by_offload(space):
        if plans := [plan for plan in _plans(space, candidates, tokens) if plan.prediction.fits]:  # by its own table, too
            return sorted(plans, key=lambda plan: plan.prediction.seconds)[:SHOWN]
    raise _none_fits(space)


def check_fits(space: Space) -> None:
    """Raises what `best_plans` raises, as far as that is known without a search."""
    check(space)
    least = least_memory(space)
    if least is None or least[0] > space.hardware.memory:
        raise _none_fits(space)


def _plans(space: Space, candidates: Sequence[Candidate], tokens: float | None) -> Iterator[Plan]:
    """Plans of the candidates whose table can be made."""
    for candidate in candidates:
        with contextlib.suppress(ConfigError):  # the schedule is not made for so many stages and microbatches
            yield plan_of(laid_out(space, candidate.layout), space.hardware, space.assume, tokens)


def search(space: Space) -> list[Candidate]:
    """The best that fit, with as little offload as possible; empty where none fits."""
    return next(filter(None, by_offload(space)), [])


def by_offload(space: Space) -> Iterator[list[Candidate]]:
    """For every offload, the least first, the best that fit, fastest first: at most BEST, of each way to cut the model and schedule one."""
    return (_search(space, offload) for offload in OFFLOADS)


def laid_out(space: Space, layout: Layout) -> Config:
    """The space's config with a layout, not resolved."""
    return layout_flag.apply(cfg.replace(space.config, TABLE_SETTINGS), _values(layout))


def _values(layout: Layout) -> layout_flag.Values:
    return {key: getattr(layout, key) for key in layout_flag.KEYS if key != "vocabulary"}


def _search(space: Space, offload: str) -> list[Candidate]:
    """With this offload. Works are tried in the order of their lower bounds, until none can be among the best."""
    best: dict[tuple, Candidate] = {}
    bound = math.inf
    for least, work in sorted(((_lower_bound(work), work) for work in _works(space, offload)), key=lambda pair: pair[0]):
        if least >= bound:
            break
        for layout in _tables(work):
            row = _row(layout)
            candidate = _evaluated(space, work, layout, min(bound, best[row].seconds if row in best else math.inf))
            if candidate:
                best[row] = candidate
                bound = sorted(candidate.seconds for candidate in best.values())[BEST - 1] if len(best) >= BEST else math.inf
    ranked = sorted(best.values(), key=lambda candidate: candidate.seconds)[:BEST]
    return sorted((_with_replicas(space, candidate) for candidate in ranked), key=lambda candidate: candidate.seconds)


def _evaluated(space: Space, work: Work, layout: Layout, below: float) -> Candidate | None:
    """The layout with the seconds of its step, if it fits, takes less than `below` and keeps the rules."""
    work = dataclasses.replace(work, layout=layout)
    if memory(work, space.config.model.loss_chunk).bytes > space.hardware.memory:
        return None
    seconds = work.step().seconds
    return Candidate(layout, seconds) if seconds < below and _keeps_rules(space, layout) else None


def _with_replicas(space: Space, best: Candidate) -> Candidate:
    """The fastest of this candidate and its variants that turn data shards into replicas."""
    alone = best.layout
    work = work_of(laid_out(space, alone).resolve(), space.hardware, space.assume)
    for replica in divisors(alone.data)[1:]:
        if replica > MOST_REPLICAS or space.config.train.diloco_inner_steps:
            break
        layout = dataclasses.replace(alone, replica=replica, data=alone.data // replica)
        best = _evaluated(space, work, layout, best.seconds) or best
    return best


def _row(layout: Layout) -> tuple:
    """Layouts that differ in none of these are one row of the table."""
    return (layout.stage, layout.context, layout.expert, layout.model, layout.schedule)


def _lower_bound(work: Work) -> float:
    """Seconds that the ops of a stage take at least, one after the other: in the smallest chunks, gathered in ops, R leaves out most."""
    layout, layers = work.layout, work.model.layers
    chunks = max(1, min(MOST_REPEATS, layers // layout.stage))
    least = dataclasses.replace(work, layout=dataclasses.replace(layout, repeats=chunks, zero=3))
    return math.ceil(layers / layout.stage) * layout.microbatches * sum(op.seconds for op in least.layer().values())


# --- what is tried -------------------------------------------------------------------------------------------------------------------


def _works(space: Space, offload: str) -> Iterator[Work]:
    """A work for each mesh, microbatch and recomputation."""
    resolved = space.config.resolve()
    model, programs = transformer_of(resolved), _Programs(space, resolved)
    for mesh in meshes(space):
        each = space.config.data.batch_size // mesh.batch_shards
        for microbatch in divisors(each):
            if microbatch > MOST_SEQUENCES:
                break
            for remat in REMATS:
                layout = dataclasses.replace(mesh, microbatch=microbatch, microbatches=each // microbatch, remat=remat, offload=offload)
                yield Work(model, layout, programs.of(mesh.context), space.hardware, space.config.precision.compute)


class _Programs:
    """The program by the size of `context`, which may decide about its kernel of attention."""

    def __init__(self, space: Space, resolved: Config):
        self._space, self._config, self._programs = space, resolved, dict[int, Program]()

    def of(self, context: int) -> Program:
        if context not in self._programs:
            config = cfg.replace(self._config, {"mesh.context": context})
            self._programs[context] = program_of(config, self._space.hardware, self._space.assume)
        return self._programs[context]


def meshes(space: Space) -> Iterator[Layout]:
    """Every mesh of so many devices that keeps the rules, as a layout of one sequence in a microbatch."""
    config, n = space.config, space.devices
    m, tokens = config.model, config.data.sequence_length
    replicas = _replicas(space)
    stages = [size for size in divisors(n) if size <= m.layers]
    models = [size for size in divisors(n) if size <= MOST_MODEL and m.heads % size == 0]
    contexts = [size for size in divisors(n) if size == 1 or tokens // size >= LEAST_TOKENS]
    experts = [size for size in divisors(n) if m.experts and m.experts % size == 0] or [1]
    for model in models:
        for context in (size for size in contexts if n % (model * size) == 0):
            for expert in (size for size in experts if n % (model * context * size) == 0):
                if not _axes_fit(space, Layout(model=model, context=context, expert=expert, replica=replicas)):
                    continue
                for stage in (size for size in stages if n % (model * context * expert * size) == 0):
                    shards = n // (model * context * expert * stage)
                    if config.data.batch_size % (shards * expert):
                        continue
                    if shards % replicas == 0:
                        yield Layout(shards // replicas, stage, model, context, expert, replicas)


def _replicas(space: Space) -> int:
    """1, or as many as train apart: their number is no matter of speed."""
    return max(1, space.config.mesh.replica) if space.config.train.diloco_inner_steps else 1


def _axes_fit(space: Space, layout: Layout) -> bool:
    """Whether these axes cut what they cut evenly, with one data shard and stage and a batch that divides."""
    config = cfg.replace(space.config, TABLE_SETTINGS | {"data.batch_size": layout.batch_shards})
    return _keeps(space, layout_flag.apply(config, _values(layout)), layout.devices)


def _tables(work: Work) -> Iterator[Layout]:
    """The layout with every schedule, its numbers of chunks, and every stage of ZeRO that has a use."""
    layout, layers = work.layout, work.model.layers
    for zero in (1, 2, 3) if layout.data > 1 else (1,):
        if layout.stage == 1:
            yield dataclasses.replace(layout, zero=zero)
            continue
        for name, schedule in SCHEDULES.items():
            for repeats in range(1, MOST_REPEATS + 1):
                even = layers % (layout.stage * repeats) == 0 or (repeats == schedule.least_repeats and layers % layout.stage)
                if name not in GROWING and schedule.fits(repeats) and layout.stage * repeats <= layers and even:
                    yield dataclasses.replace(layout, zero=zero, schedule=name, repeats=repeats)


def _keeps_rules(space: Space, layout: Layout) -> bool:
    return _keeps(space, laid_out(space, layout), layout.devices)


def _keeps(space: Space, config: Config, devices: int) -> bool:
    return checks.first_broken(config, Surroundings(devices, platform_of(space.hardware), space.recipe)) is None


# --- where none fits -----------------------------------------------------------------------------------------------------------------


def least_memory(space: Space) -> tuple[float, Layout] | None:
    """The least bytes that any layout needs on the fullest device, with it; None where no mesh has so many devices."""
    least: tuple[float, Layout] | None = None
    resolved = space.config.resolve()
    model, programs = transformer_of(resolved), _Programs(space, resolved)
    for mesh in meshes(space):
        smallest = dataclasses.replace(_smallest(space, mesh), remat="full", offload="both")
        work = Work(model, smallest, programs.of(mesh.context), space.hardware, space.config.precision.compute)
        for layout in _tables(work):
            size = memory(dataclasses.replace(work, layout=layout), space.config.model.loss_chunk).bytes
            if not least or size < least[0]:
                least = size, layout
    return least


def _none_fits(space: Space) -> LayoutError:
    """Why a search found nothing, and the nearest that works."""
    least = least_memory(space)
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
    models = [size for size in divisors(m.heads) if size <= MOST_MODEL]
    contexts = [size for size in divisors(data.sequence_length) if size == 1 or data.sequence_length // size >= LEAST_TOKENS]
    inside = {model * context for model in models for context in contexts}
    stages = {size * stage for size in inside for stage in range(1, min(m.layers, MOST_STAGES) + 1)}
    yield from near(space.devices, {size * shards for size in stages for shards in divisors(data.batch_size)})


def _fits(space: Space) -> bool:
    """Whether a layout fits, by closed forms, and keeps all rules."""
    with contextlib.suppress(ConfigError, LayoutError):
        check(space)
        least = least_memory(space)
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
    spaces = ((settings, dataclasses.replace(space, config=cfg.replace(space.config, settings))) for settings in tried)
    settings = next((settings for settings, changed in spaces if _fits(changed)), {})
    return {f"config.{path}": value for path, value in settings.items()}
