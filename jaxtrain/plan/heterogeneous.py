"""Stages on unequal devices: `--hardware=a100-80gb:512,h100:512`. Layers are cut so that all stages
take as long, if memory lets them.

Groups of devices have whole stages, in the order in which they are named. A stage's layers cost
what its group takes for them; the table's coupled clock (schedule/) then says what a step takes,
for the slowest stage and every wait are in it. No jax.
"""

import bisect
import dataclasses
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.config.errors import UsageError
from jaxtrain.config.rules import divisors, near
from jaxtrain.costs import hardware as kinds
from jaxtrain.costs.hardware import Hardware, HardwareError
from jaxtrain.costs.memory import memory
from jaxtrain.costs.step_time import MATMULS, StepModel, TimeBreakdown
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.pipeline.step_model import OURS, step_model_of
from jaxtrain.plan import layout_flag
from jaxtrain.plan.layout_flag import whole_number
from jaxtrain.plan.predict import part_of, step_figures, table_counts
from jaxtrain.schedule.orders import ONE_CHUNK, SCHEDULES

LIKELY = 8  # devices of a group whose number cannot be read
# What one program over devices of two kinds cannot do, as XLA and jax are.
LIMITS = (
    "XLA compiles a program for one kind of device: a mesh of two kinds needs a program for "
    "each, and jax runs none over both",
    "all stages have as many slots as the busiest one, and stacks padded to the most layers: "
    "a faster device's memory holds both",
    "kernels are chosen by the lesser device, for stages must keep the same residuals",
    "sums over an axis that spans both groups go at the slower links' pace",
)


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices of one kind."""

    hardware: Hardware
    devices: int


@dataclasses.dataclass(frozen=True)
class HeterogeneousPlan:
    """A plan over groups.

    layers:  of each stage; groups: by stage
    seconds: of a step, by the coupled clock and what stands beside the table
    ideal_s: the same work at the sum of all speeds, without any wait
    stage_s: of each stage's work in a step
    bubble_s: what the busiest stage waits
    memory:  bytes of the fullest device of each stage; fits: whether each has them
    """

    config: Config
    groups: tuple[Group, ...]
    layers: tuple[int, ...]
    seconds: float
    ideal_s: float
    stage_s: tuple[float, ...]
    bubble_s: float
    memory: tuple[float, ...]
    fits: bool

    def settings(self) -> Mapping[str, object]:
        """What the recipe needs beside its layout."""
        return {"pipeline.chunk_layers": self.config.pipeline.chunk_layers}

    def figures(self, tokens: float | None) -> dict[str, Any]:
        """What --json prints of one kind of devices, rates over the mean peak, and the layers of
        each stage."""
        work = step_model_of(self.config, self.groups[0].hardware)
        devices = sum(group.devices for group in self.groups)
        peak = (
            sum(group.devices * group.hardware.peak(work.dtype) for group in self.groups) / devices
        )
        return step_figures(
            self.config,
            work,
            self.seconds,
            peak,
            max(self.memory),
            self.fits,
            self.bubble_s,
            tokens,
        ) | {"layers": self.layers}


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


def split_layers(
    layers: int, seconds: Sequence[float], fixed: Sequence[float], most: Sequence[int]
) -> list[int]:
    """Layers of each stage, in which the slowest takes the least: each layer in turn goes to the
    stage that is then first to end.

    seconds: of a layer on each stage; fixed: of each stage without layers; most: layers for which
    it has memory, of no account where there is no room for all. Each stage has at least one layer.
    """
    if sum(min(m, layers) for m in most) < layers or min(most) < 1:
        most = [layers] * len(most)
    given = [1] * len(seconds)
    heap = [(fixed[s] + 2 * seconds[s], s) for s in range(len(seconds)) if most[s] > 1]
    heapq.heapify(heap)
    for _ in range(layers - len(seconds)):
        end, stage = heapq.heappop(heap)
        given[stage] += 1
        if given[stage] < most[stage]:
            heapq.heappush(heap, (end + seconds[stage], stage))
    return given


def plan(config: Config, groups: Sequence[Group], assume: str = OURS) -> HeterogeneousPlan:
    """The plan of a resolved config whose mesh has as many devices as the groups together, and more
    than one stage; it may not fit.

    Raises ValueError, with one line, where groups do not have whole stages or stages no whole
    chunks.
    """
    if config.pipeline.schedule not in SCHEDULES:
        raise ValueError(f"schedule={config.pipeline.schedule!r} cuts chunks by itself")
    stage_of, m, chunk = (
        _groups_of_stages(config, groups),
        config.pipeline.microbatches,
        config.model.loss_chunk,
    )
    works = [step_model_of(config, groups[g].hardware, assume) for g in stage_of]
    ops = [{name: op.seconds for name, op in work.layer().items()} for work in works]
    seconds = [sum(op.values()) for op in ops]
    head, message = (
        max(work.head().seconds for work in works),
        max(work.message() for work in works),
    )
    fixed = [0.0] * len(works)
    fixed[0] += works[0].dense_layers().seconds
    fixed[-1] += 0.0 if works[-1].framework.vocabulary_parallel else head
    layers = split_layers(
        config.model.layers, seconds, fixed, [_most_layers(work, chunk) for work in works]
    )
    mean = {
        name: sum(op[name] * n for op, n in zip(ops, layers, strict=True)) / len(works)
        for name in ops[0]
    }
    if config.pipeline.remat != "full":  # what no R computes again is part of B
        mean |= {"B": mean["B"] + mean["R"], "R": 0.0}
    cut = configs.replace(
        config,
        {
            "pipeline.chunk_layers": (chunks := _chunks(config, layers)),
            "pipeline.layer_costs": _layer_costs(config, chunks, seconds),
            "pipeline.times": (mean["F"], mean["B"], mean["W"], message, mean["R"], head),
        },
    )
    setup = make_setup(part_of(cut))
    shared = setup.table.vocabulary == "parallel"
    heads = [
        head / len(works) if shared else head * (stage == setup.table.stage_of[-1])
        for stage in range(len(works))
    ]
    beside = [fixed[0], *[0.0] * (len(works) - 1)]
    stage_s = tuple(
        m * (n * s + h + b) for n, s, h, b in zip(layers, seconds, heads, beside, strict=True)
    )
    clock = max(table_counts(cut, setup.times).seconds, *stage_s)
    after = max(
        _after(_with_layers(work, n), busy)
        for work, n, busy in zip(works, layers, stage_s, strict=True)
    )
    after += m * max(work.end_collectives(shared).seconds for work in works)
    ideal = m * (config.model.layers / sum(1 / s for s in seconds) + (head + fixed[0]) / len(works))
    held = tuple(
        memory(_with_layers(work, n), chunk).bytes for work, n in zip(works, layers, strict=True)
    )
    fits = all(size <= work.hardware.memory for size, work in zip(held, works, strict=True))
    return HeterogeneousPlan(
        cut,
        tuple(groups),
        tuple(layers),
        clock + after,
        ideal + after,
        stage_s,
        clock - max(stage_s),
        held,
        fits,
    )


def _after(work: StepModel, busy: float) -> float:
    """Seconds of what a step has beside its microbatches. busy: of the stage with them."""
    ops = {name: op.seconds for name, op in work.ops().items()}
    return work.outside_microbatches(
        TimeBreakdown({MATMULS: busy}), ops["F"], ops["B"] + ops["W"]
    ).seconds


def _with_layers(work: StepModel, layers: int) -> StepModel:
    """The work of a model in which every stage has this many layers."""
    return dataclasses.replace(
        work, model=dataclasses.replace(work.model, layers=layers * work.layout.stage)
    )


def _groups_of_stages(config: Config, groups: Sequence[Group]) -> list[int]:
    """Stage → its group."""
    stages, devices = config.mesh.stage, sum(group.devices for group in groups)
    if stages < 2 or devices % stages:
        raise ValueError(f"stage={stages} does not share out {devices} devices among stages")
    each, of_stage = devices // stages, []
    for number, group in enumerate(groups):
        if group.devices % each:
            raise ValueError(
                f"{group.hardware.name} has {group.devices} devices, no whole number of "
                f"stages of {each}"
            )
        of_stage += [number] * (group.devices // each)
    return of_stage


def layouts(
    config: Config, groups: Sequence[Group], values: layout_flag.Values
) -> Iterator[layout_flag.Values]:
    """Layouts over all devices of the groups, in which these have whole stages, the nearest
    first."""
    devices, most = (
        sum(group.devices for group in groups),
        math.gcd(*(group.devices for group in groups)),
    )
    stages = [
        devices // each for each in divisors(most) if 1 < devices // each <= config.model.layers
    ]
    if values.get("schedule", config.pipeline.schedule) not in SCHEDULES:
        values = values | {"schedule": ONE_CHUNK, "repeats": 1}
    others = math.prod(values.get(axis, 1) for axis in ("context", "expert", "replica"))
    for stage in near(values.get("stage", 1), stages):
        for model in near(values.get("model", 1), divisors(devices // stage)):
            data, rest = divmod(devices // stage, model * others)
            shards = data * values.get("expert", 1) * values.get("replica", 1)
            if not rest and data and config.data.batch_size % shards == 0:
                sizes = divisors(config.data.batch_size // shards)
                microbatch = near(values.get("microbatch", 1), sizes)[0]
                yield values | {
                    "data": data,
                    "stage": stage,
                    "model": model,
                    "microbatch": microbatch,
                }


def has_room(config: Config, groups: Sequence[Group], assume: str = OURS) -> bool:
    """Whether stages of these groups have memory for all layers of a resolved config."""
    each = sum(group.devices for group in groups) // config.mesh.stage
    room = [
        _most_layers(step_model_of(config, group.hardware, assume), config.model.loss_chunk)
        for group in groups
    ]
    return (
        min(room) > 0
        and sum(n * group.devices // each for n, group in zip(room, groups, strict=True))
        >= config.model.layers
    )


def _most_layers(work: StepModel, loss_chunk: int) -> int:
    """Layers for which a stage of this work has memory; at least none."""
    fits = lambda layers: (
        memory(_with_layers(work, layers), loss_chunk).bytes <= work.hardware.memory
    )
    return bisect.bisect_left(
        range(1, work.model.layers + 1), True, key=lambda layers: not fits(layers)
    )


def _chunks(config: Config, layers: Sequence[int]) -> tuple[int, ...]:
    """Layers of each chunk in model order, so that stages have theirs."""
    of_stage, repeats = make_setup(part_of(config)).table.stage_of, config.pipeline.repeats
    if len(of_stage) != config.mesh.stage * repeats:
        raise UsageError(
            "pipeline.layers_per_op cuts chunks, and unequal devices need them whole",
            {"config.pipeline.layers_per_op": 0},
        )
    left, chunks = list(layers), []
    for unit, stage in enumerate(of_stage):
        size = round(left[stage] / of_stage[unit:].count(stage))
        if size < 1:
            raise ValueError(f"a stage of {layers[stage]} layers has no {repeats} chunks")
        chunks.append(size)
        left[stage] -= size
    return tuple(chunks)


def _layer_costs(
    config: Config, chunks: Sequence[int], seconds: Sequence[float]
) -> tuple[float, ...]:
    """Relative time of each layer in model order, on the stage that has it; 1 on the fastest."""
    of_stage, fastest = make_setup(part_of(config)).table.stage_of, min(seconds)
    return tuple(
        seconds[stage] / fastest
        for size, stage in zip(chunks, of_stage, strict=True)
        for _ in range(size)
    )


def describe(plan: HeterogeneousPlan) -> list[str]:
    """For people: which stages have which layers, the step, and what stands in the way."""
    stage, lines = 0, []
    each = sum(group.devices for group in plan.groups) // len(plan.layers)
    for group in plan.groups:
        count = group.devices // each
        listed = ", ".join(map(str, plan.layers[stage : stage + count]))
        lines.append(
            f"{group.hardware.name}: stages {stage} to {stage + count - 1} with {listed} layers"
        )
        stage += count
    over = plan.seconds / plan.ideal_s
    lines.append(
        f"step: {plan.seconds:.3g} s, {over:.2f} times that of all devices at work without a "
        f"wait ({plan.ideal_s:.3g} s)"
    )
    if not plan.fits:
        lines.append(
            "does not fit: "
            + ", ".join(f"stage {s} {size / 1e9:.1f} GB" for s, size in enumerate(plan.memory))
        )
    return [*lines, "one program cannot do yet:", *(f"  {limit}" for limit in LIMITS)]
