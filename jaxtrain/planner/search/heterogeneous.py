"""Stages on different kinds of devices: `--hardware=a100-80gb:512,h100:512`. Layers are divided so
that all stages take equally long, as far as memory allows.

Each group of devices has entire stages, in the order of the flag. A stage's layers cost what its
group takes for them; the table's coupled clock (schedule/) then gives the step's time, with the
slowest stage and every wait. No jax.
"""

import bisect
import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain import config as configs
from jaxtrain.config import Config, ResolvedConfig, UsageError
from jaxtrain.config.rules.rules import divisors, near
from jaxtrain.pipeline.op_times import has_recompute_ops
from jaxtrain.planner.layer.hardware import GIB, Hardware, HardwareError, known, load
from jaxtrain.planner.search import layout_flag
from jaxtrain.planner.search.explain import amount, run_lines
from jaxtrain.planner.search.predict import PlannedTable, step_figures
from jaxtrain.planner.search.validation import expected
from jaxtrain.planner.step.memory import memory
from jaxtrain.planner.step.step_model import OURS, step_model_of
from jaxtrain.planner.step.step_time import StepModel
from jaxtrain.planner.step.time_breakdown import MATMULS, TimeBreakdown
from jaxtrain.schedule.orders import ONE_CHUNK, SCHEDULES

OF_TABLE = ("pipeline.chunk_layers", "pipeline.layer_costs", "pipeline.times")
LIKELY = 8  # devices of a group whose number cannot be read
# What one program over devices of two kinds cannot do, as XLA and jax are.
LIMITS = (
    "XLA compiles a program for one kind of device: a mesh of two kinds needs a program for "
    "each, and jax runs none over both",
    "all stages have as many slots as the busiest one, and stacks padded to the most layers: "
    "a faster device's memory holds both",
    "kernels are chosen by the lesser device, for stages must save the same residuals",
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

    layers:   of each stage
    seconds:  of a step, by the coupled clock and with what is outside the table
    ideal_s:  seconds of the same work at the sum of all speeds, without any wait
    stage_s:  seconds of each stage's work in a step
    bubble_s: seconds that the busiest stage waits
    work:     of the group whose plans have the widest error
    memory:   bytes of the fullest device of each stage
    fits:     True if each stage has that memory
    """

    config: ResolvedConfig
    work: StepModel
    groups: tuple[Group, ...]
    layers: tuple[int, ...]
    seconds: float
    ideal_s: float
    stage_s: tuple[float, ...]
    bubble_s: float
    memory: tuple[float, ...]
    fits: bool

    def stages(self) -> Iterator[tuple[Group, range]]:
        """Each group with its stages."""
        each = sum(group.devices for group in self.groups) // len(self.layers)
        ends = itertools.accumulate(group.devices // each for group in self.groups)
        for group, end in zip(self.groups, ends, strict=True):
            yield group, range(end - group.devices // each, end)

    def table(self) -> list[list[str]]:
        """The stages as lines of cells, the first with the columns' names."""
        return [
            ["stage", "device", "layers", "GiB", "seconds"],
            *(
                [
                    f"{stage}",
                    group.hardware.name,
                    f"{self.layers[stage]}",
                    f"{self.memory[stage] / GIB:.1f}",
                    f"{self.stage_s[stage]:.3g}",
                ]
                for group, stages in self.stages()
                for stage in stages
            ),
        ]

    def figures(self, tokens: float | None) -> dict[str, Any]:
        """The object that --json prints for one kind of devices, with rates over the mean peak, and
        the layers of each stage."""
        dtype, devices = self.config.precision.compute, sum(g.devices for g in self.groups)
        peaks = (g.devices * g.hardware.peak(dtype) for g in self.groups)
        mean = {dtype: sum(peaks) / devices / 1e12}
        hardware = dataclasses.replace(self.work.hardware, peak_tflops=mean)
        work = dataclasses.replace(self.work, hardware=hardware)
        bubble, held = self.bubble_s / self.seconds, max(self.memory)
        # the plan has its own table, whichever framework trains
        config = configs.replace(self.config, dict.fromkeys(OF_TABLE, ())).resolve()
        figures = step_figures(config, work, self.seconds, bubble, held, self.fits, tokens)
        return figures | {"layers": self.layers}


def is_groups(text: str) -> bool:
    """True if --hardware names groups of devices, NAME:DEVICES each."""
    return _whole_number(text.rpartition(":")[2]) is not None


def _whole_number(text: str) -> int | None:
    """The number of a text of digits, up to the largest of a setting; None for any other text."""
    is_short = text.isascii() and text.isdecimal() and len(text) <= 10
    return int(text) if is_short and int(text) <= configs.LARGEST_INT else None


def parse(text: str) -> list[Group]:
    """The groups of `NAME:DEVICES,NAME:DEVICES`. Raises HardwareError with one line."""
    words, groups = [word.strip() for word in text.split(",")], []
    for at, word in enumerate(words):
        name, _, count = word.rpartition(":")
        if not name or not _whole_number(count):
            words[at] = f"{name if name in known() else known()[0]}:{LIKELY}"
            raise HardwareError(text, f"has {word!r}, which is no NAME:DEVICES", ",".join(words))
        groups.append(Group(load(name), int(count)))
    return groups


def split_layers(
    layers: int, seconds: Sequence[float], fixed: Sequence[float], most: Sequence[int]
) -> list[int]:
    """Layers of each stage, at least one, cut so that the slowest stage takes the least time: each
    layer in turn goes to the stage that ends earliest with it.

    seconds: of a layer on each stage; fixed: of each stage without layers; most: layers that it has
    memory for, ignored where the memory is not enough for all.
    """
    if sum(min(m, layers) for m in most) < layers or min(most) < 1:
        most = [layers] * len(most)
    ends = sorted(
        (fixed[stage] + n * each, stage)
        for stage, each in enumerate(seconds)
        for n in range(2, min(most[stage], layers) + 1)
    )
    given = collections.Counter(stage for _, stage in ends[: layers - len(seconds)])
    return [1 + given[stage] for stage in range(len(seconds))]


def plan(config: ResolvedConfig, groups: Sequence[Group], assume: str = OURS) -> HeterogeneousPlan:
    """The plan of a config whose mesh has as many devices as the groups together, and more
    than one stage; it may not fit.

    Raises ValueError, with one line, where groups do not have entire stages or stages no entire
    chunks.
    """
    if config.pipeline.schedule not in SCHEDULES:
        raise ValueError(f"schedule={config.pipeline.schedule!r} cuts chunks by itself")
    m, loss_chunk = config.pipeline.microbatches, config.model.loss_chunk
    owners = _groups_of_stages(config.mesh.stage, groups)
    works = [step_model_of(config, group.hardware, assume) for group in owners]
    ops = [{name: op.seconds for name, op in work.layers.mean(False).items()} for work in works]
    seconds = [sum(op.values()) for op in ops]
    head, dense = max(work.head.seconds for work in works), works[0].dense_layers.seconds
    fixed = [dense, *[0.0] * (len(works) - 1)]
    fixed[-1] += 0.0 if works[-1].settings.vocabulary_parallel else head
    most = [_most_layers(work, loss_chunk) for work in works]
    layers = split_layers(config.model.layers, seconds, fixed, most)
    message = max(work.message() for work in works)
    planned = PlannedTable(_cut(config, layers, ops, message, head, works[0].recomputed_fraction))
    setup = planned.part().setup
    shared = setup.table.vocabulary == "parallel"
    stage_s = tuple(
        m * (n * s + (head / len(works) if shared else head * (stage == setup.table.stage_of[-1])))
        + m * dense * (stage == 0)
        for stage, (n, s) in enumerate(zip(layers, seconds, strict=True))
    )
    clock = max(planned.counts(setup.times).seconds, *stage_s)
    staged = [_with_layers(work, n) for work, n in zip(works, layers, strict=True)]
    after = max(_after(work, busy) for work, busy in zip(staged, stage_s, strict=True))
    after += m * max(work.ends.communication(shared).seconds for work in works)
    ideal = m * (config.model.layers / sum(1 / s for s in seconds) + (head + dense) / len(works))
    held = tuple(memory(work, loss_chunk).bytes for work in staged)
    return HeterogeneousPlan(
        config=planned.config,
        work=max(works, key=lambda work: expected(work).error),
        groups=tuple(groups),
        layers=tuple(layers),
        seconds=clock + after,
        ideal_s=ideal + after,
        stage_s=stage_s,
        bubble_s=clock - max(stage_s),
        memory=held,
        fits=all(size <= work.hardware.memory for size, work in zip(held, works, strict=True)),
    )


def _cut(
    config: ResolvedConfig,
    layers: Sequence[int],
    ops: Sequence[dict[str, float]],
    message: float,
    head: float,
    fraction: float,
) -> ResolvedConfig:
    """The config whose chunks give each stage its layers, with the costs of layers on their stages
    and the mean times of ops.

    layers: of each stage; ops: seconds of each op of a layer on each stage; fraction: of the layers
    that are recomputed
    """
    repeats, seconds = config.pipeline.repeats, [sum(op.values()) for op in ops]
    stage_of = PlannedTable(config).part().setup.table.stage_of
    if len(stage_of) != len(layers) * repeats:
        raise UsageError(
            "pipeline.layers_per_op cuts chunks, and groups of devices need them unsplit",
            {"config.pipeline.layers_per_op": 0},
        )
    remaining, chunks, costs = list(layers), [], []
    for unit, stage in enumerate(stage_of):
        size = round(remaining[stage] / stage_of[unit:].count(stage))
        if size < 1:
            raise ValueError(f"a stage of {layers[stage]} layers has no {repeats} chunks")
        chunks.append(size)
        costs += [seconds[stage] / min(seconds)] * size
        remaining[stage] -= size
    mean = {
        name: sum(op[name] * n for op, n in zip(ops, layers, strict=True)) / len(layers)
        for name in ops[0]
    }
    if not has_recompute_ops(config.pipeline.remat):  # what no R recomputes is part of B
        mean |= {"B": mean["B"] + mean["R"], "R": 0.0}
    mean["R"] /= fraction
    return configs.replace(
        config,
        {
            "pipeline.chunk_layers": tuple(chunks),
            "pipeline.layer_costs": tuple(costs),
            "pipeline.times": (mean["F"], mean["B"], mean["W"], message, mean["R"], head),
        },
    ).resolve()


def _after(work: StepModel, busy: float) -> float:
    """Seconds of a step outside its microbatches. busy: of the stage with them."""
    ops = {name: op.seconds for name, op in work.ops().items()}
    return work.outside_microbatches(
        TimeBreakdown({MATMULS: busy}), ops["F"], ops["B"] + ops["W"]
    ).seconds


def _with_layers(work: StepModel, layers: int) -> StepModel:
    """The work of a model in which every stage has this many layers."""
    model = dataclasses.replace(work.model, layers=layers * work.layout.stage)
    return dataclasses.replace(work, model=model)


def _groups_of_stages(stages: int, groups: Sequence[Group]) -> list[Group]:
    """The group of each stage."""
    devices = sum(group.devices for group in groups)
    if stages < 2 or devices % stages:
        raise ValueError(f"stage={stages} does not share out {devices} devices among stages")
    each, of_stage = devices // stages, []
    for group in groups:
        if group.devices % each:
            raise ValueError(
                f"{group.hardware.name} has {group.devices} devices, no whole number of "
                f"stages of {each}"
            )
        of_stage += [group] * (group.devices // each)
    return of_stage


def layouts(
    config: Config, groups: Sequence[Group], values: layout_flag.Values
) -> Iterator[layout_flag.Values]:
    """Layouts over all devices of the groups, in which these have entire stages, the nearest
    first."""
    sizes = [group.devices for group in groups]
    devices, batch = sum(sizes), config.data.batch_size
    stages = [
        devices // each
        for each in divisors(math.gcd(*sizes))
        if 1 < devices // each <= config.model.layers
    ]
    if values.get("schedule", config.pipeline.schedule) not in SCHEDULES:
        values = values | {"schedule": ONE_CHUNK, "repeats": 1}
    others = math.prod(values.get(axis, 1) for axis in ("context", "expert", "replica"))
    for stage in near(values.get("stage", 1), stages):
        for model in near(values.get("model", 1), divisors(devices // stage)):
            data, rest = divmod(devices // stage, model * others)
            tried = values | {"data": data, "stage": stage, "model": model}
            if not rest and data and batch % layout_flag.shards(tried) == 0:
                microbatches = divisors(batch // layout_flag.shards(tried))
                yield tried | {"microbatch": near(values.get("microbatch", 1), microbatches)[0]}


def hold_all_layers(config: ResolvedConfig, groups: Sequence[Group], assume: str = OURS) -> bool:
    """True if stages of these groups have memory for all layers of a config."""
    each = sum(group.devices for group in groups) // config.mesh.stage
    held = [
        _most_layers(step_model_of(config, group.hardware, assume), config.model.loss_chunk)
        * (group.devices // each)
        for group in groups
    ]
    return min(held) > 0 and sum(held) >= config.model.layers


def _most_layers(work: StepModel, loss_chunk: int) -> int:
    """The layers that a stage of this work has memory for; 0 if for none."""
    exceeds = lambda layers: (
        memory(_with_layers(work, layers), loss_chunk).bytes > work.hardware.memory
    )
    return bisect.bisect_left(range(1, work.model.layers + 1), True, key=exceeds)


def describe(plan: HeterogeneousPlan, tokens: float) -> list[str]:
    """The plan as lines of text: which stages have which layers, the step, and what is not yet
    possible. tokens: of the run; 0: not known."""
    layers = lambda stages: ", ".join(str(plan.layers[stage]) for stage in stages)
    sure = expected(plan.work)
    needs = ", ".join(f"stage {s} {size / 1e9:.1f} GB" for s, size in enumerate(plan.memory))
    return [
        *(
            f"{group.hardware.name}: stages {stages[0]} to {stages[-1]} with {layers(stages)} "
            "layers"
            for group, stages in plan.stages()
        ),
        f"step: {amount(plan.seconds, 'step', sure.error)}, "
        f"{plan.seconds / plan.ideal_s:.2f} times that of all devices at work without a wait "
        f"({plan.ideal_s:.3g} s)",
        *[f"does not fit: {needs}"] * (not plan.fits),
        *(
            run_lines(
                [(group.devices, group.hardware) for group in plan.groups],
                tokens,
                plan.figures(tokens)["tokens_per_s"],
                sure.error,
            )
            if tokens
            else ()
        ),
        *sure.lines(),
        "one program cannot do yet:",
        *(f"  {limit}" for limit in LIMITS),
    ]
