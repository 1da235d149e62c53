"""Stages on unequal devices: `--hardware=a100-80gb:512,h100:512`. Layers are cut so that all stages take as long, if memory lets them.

Groups of devices have whole stages, in the order in which they are named. A stage's layers cost what its group takes for them; the table's
coupled clock (schedule/) then says what a step takes, for the slowest stage and every wait are in it. No jax.
"""

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.config.pipeline_setup import make_setup
from jaxtrain.config.work import OURS, work_of
from jaxtrain.costs import hardware as kinds
from jaxtrain.costs.hardware import Hardware, HardwareError
from jaxtrain.costs.memory import ALLOCATED, memory
from jaxtrain.costs.step_time import Work
from jaxtrain.plan.layout_flag import whole_number
from jaxtrain.schedule.simulate import simulate

LIKELY = 8  # devices of a group whose number cannot be read
# What one program over devices of two kinds cannot do, as XLA and jax are.
LIMITS = (
    "XLA compiles a program for one kind of device: a mesh of two kinds needs a program for each, and jax runs none over both",
    "all stages have as many slots as the busiest one, and stacks padded to the most layers: a faster device's memory holds both",
    "kernels are chosen by the lesser device, for stages must keep the same residuals",
    "sums over an axis that spans both groups go at the slower links' pace",
)


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices of one kind."""

    hardware: Hardware
    devices: int


@dataclasses.dataclass(frozen=True)
class Unequal:
    """A plan over groups.

    layers:  of each stage; groups: by stage
    seconds: of a step, by the coupled clock and what stands beside the table
    ideal_s: the same work at the sum of all speeds, without any wait
    stage_s: of each stage's work in a step
    memory:  bytes of the fullest device of each stage; fits: whether each has them
    """

    config: Config
    groups: tuple[Group, ...]
    layers: tuple[int, ...]
    seconds: float
    ideal_s: float
    stage_s: tuple[float, ...]
    memory: tuple[float, ...]
    fits: bool

    def settings(self) -> Mapping[str, object]:
        """What the recipe needs beside its layout."""
        return {"pipeline.chunk_layers": self.config.pipeline.chunk_layers}


def is_groups(text: str) -> bool:
    """Whether --hardware names groups of devices, NAME:DEVICES each."""
    return whole_number(text.rpartition(":")[2]) is not None


def parse(text: str) -> list[Group]:
    """The groups of `NAME:DEVICES,NAME:DEVICES`. Raises HardwareError with one line."""
    words, groups = [word.strip() for word in text.split(",")], []
    for at, word in enumerate(words):
        name, _, count = word.rpartition(":")
        if not name or not whole_number(count):
            words[at] = f"{name if name in kinds.known() else kinds.known()[0]}:{LIKELY}"
            raise HardwareError(text, f"has {word!r}, which is no NAME:DEVICES", ",".join(words))
        groups.append(Group(kinds.load(name), int(count)))
    return groups


def split_layers(layers: int, seconds: Sequence[float], fixed: Sequence[float], most: Sequence[int]) -> list[int]:
    """Layers of each stage, in which the slowest takes the least: each layer in turn goes to the stage that is then first to end.

    seconds: of a layer on each stage; fixed: of each stage without layers; most: layers for which it has memory. Each has at least one.
    Raises ValueError where there is no room for all.
    """
    if sum(min(m, layers) for m in most) < layers or min(most) < 1:
        raise ValueError(f"{layers} layers do not fit: the stages have room for {', '.join(map(str, most))}")
    given = [1] * len(seconds)
    heap = [(fixed[s] + 2 * seconds[s], s) for s in range(len(seconds)) if most[s] > 1]
    heapq.heapify(heap)
    for _ in range(layers - len(seconds)):
        end, stage = heapq.heappop(heap)
        given[stage] += 1
        if given[stage] < most[stage]:
            heapq.heappush(heap, (end + seconds[stage], stage))
    return given


def plan(config: Config, groups: Sequence[Group], assume: str = OURS) -> Unequal:
    """Of a resolved config whose mesh has as many devices as the groups together, and more than one stage.

    Raises ValueError, with one line, where groups do not have whole stages or layers do not fit.
    """
    stage_of = _groups_of_stages(config, groups)
    works = [work_of(config, groups[g].hardware, assume) for g in stage_of]
    seconds = [sum(op.seconds for op in work.layer().values()) for work in works]
    head = 0.0 if works[-1].program.vocabulary_parallel else works[-1].head().seconds
    layers = split_layers(config.model.layers, seconds, [*[0.0] * (len(works) - 1), head], [_most_layers(work) for work in works])
    message, head = max(work.message() for work in works), max(work.head().seconds for work in works)
    mean = _stage(works, layers)
    cut = configs.replace(
        config,
        {
            "pipeline.chunk_layers": (chunks := _chunks(config, layers)),
            "pipeline.layer_costs": _layer_costs(config, chunks, seconds),
            "pipeline.times": (mean["F"], mean["B"], mean["W"], message, mean["R"], head),
        },
    )
    setup = make_setup(cut)
    clock = simulate(setup.table, setup.times, shares=setup.shares)
    after = max((work.step().exposed.get("data", 0.0) + work.update().seconds) for work in works)
    m = config.pipeline.microbatches
    stage_s = tuple(m * n * s for n, s in zip(layers, seconds, strict=True))
    rates = sum(1 / s for s in seconds)
    ideal = m * config.model.layers / rates + m * head / len(works)
    held = tuple(_bytes(work, n) for work, n in zip(works, layers, strict=True))
    fits = all(size <= work.hardware.memory for size, work in zip(held, works, strict=True))
    return Unequal(cut, tuple(groups), tuple(layers), clock.step_time_coupled + after, ideal + after, stage_s, held, fits)


def _groups_of_stages(config: Config, groups: Sequence[Group]) -> list[int]:
    """Stage → its group."""
    stages, devices = config.mesh.stage, sum(group.devices for group in groups)
    if stages < 2 or devices % stages:
        raise ValueError(f"stage={stages} does not share out {devices} devices: use stages that divide them")
    each, found = devices // stages, []
    for number, group in enumerate(groups):
        if group.devices % each:
            near = math.gcd(*(g.devices for g in groups))
            fewest = devices // near
            rule = f"{group.hardware.name} has {group.devices} devices, no whole number of stages of {each}"
            raise ValueError(f"{rule}: use stage={fewest}, or a multiple of it")
        found += [number] * (group.devices // each)
    return found


def _most_layers(work: Work) -> int:
    """Layers for which a stage of this work has memory; at least none."""
    parts, layers = memory(work).parts, work.model.layers / work.layout.stage
    growing = sum(parts[name] for name in ("weights", "gradients", "optimizer", "activations")) / layers
    room = work.hardware.memory / ALLOCATED - parts["working"] - parts["logits"]
    return max(0, int(room / growing))


def _bytes(work: Work, layers: int) -> float:
    """Of the fullest device of a stage with so many layers."""
    parts, mean = memory(work).parts, work.model.layers / work.layout.stage
    growing = ("weights", "gradients", "optimizer", "activations")
    return ALLOCATED * sum(size * (layers / mean if name in growing else 1.0) for name, size in parts.items())


def _chunks(config: Config, layers: Sequence[int]) -> tuple[int, ...]:
    """Layers of each chunk in model order, so that stages have theirs."""
    of_stage, repeats = make_setup(config).table.stage_of, max(1, config.pipeline.repeats)
    if len(of_stage) != config.mesh.stage * repeats:
        raise ValueError("pipeline.layers_per_op cuts chunks, and unequal devices need them whole: use pipeline.layers_per_op=0")
    left, chunks = list(layers), []
    for unit, stage in enumerate(of_stage):
        size = round(left[stage] / of_stage[unit:].count(stage))
        if size < 1:
            raise ValueError(f"a stage of {layers[stage]} layers has no {repeats} chunks: use fewer repeats")
        chunks.append(size)
        left[stage] -= size
    return tuple(chunks)


def _layer_costs(config: Config, chunks: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Of each layer in model order, the seconds that it takes where it lies, relative to the fastest."""
    of_stage, fastest = make_setup(config).table.stage_of, min(seconds)
    return tuple(seconds[stage] / fastest for size, stage in zip(chunks, of_stage, strict=True) for _ in range(size))


def _stage(works: Sequence[Work], layers: Sequence[int]) -> dict[str, float]:
    """Seconds of F, R, B and W of a microbatch on a stage, in the mean over stages with these layers."""
    total: dict[str, float] = {}
    for work, count in zip(works, layers, strict=True):
        for name, parts in work.layer().items():
            total[name] = total.get(name, 0.0) + parts.seconds * count / len(works)
    return total


def describe(unequal: Unequal) -> list[str]:
    """For people: which stages have which layers, the step, and what stands in the way."""
    stage, lines = 0, []
    each = sum(group.devices for group in unequal.groups) // len(unequal.layers)
    for group in unequal.groups:
        count = group.devices // each
        listed = ", ".join(map(str, unequal.layers[stage : stage + count]))
        lines.append(f"{group.hardware.name}: stages {stage} to {stage + count - 1} with {listed} layers")
        stage += count
    over = unequal.seconds / unequal.ideal_s
    lines.append(f"step: {unequal.seconds:.3g} s, {over:.2f} times that of all devices at work without a wait ({unequal.ideal_s:.3g} s)")
    if not unequal.fits:
        lines.append("does not fit: " + ", ".join(f"stage {s} {size / 1e9:.1f} GB" for s, size in enumerate(unequal.memory)))
    return [*lines, "one program cannot do yet:", *(f"  {limit}" for limit in LIMITS)]
