"""The search for the fastest layouts of a number of devices; if none fits, for the nearest request
that has one. No jax.

    meshes          sizes of the six axes that keep the rules, and whose product is the number of
                    devices
    × microbatch    divisors of the sequences of a data shard
    × remat         × zero × schedule × repeats × overlap, where that is expected to gain; offload
                    only if nothing fits without it. Of a unit's layers the fewest that suffice are
                    recomputed

Closed forms find the BEST layouts; the exact clock of their tables then ranks these. A stage's ops
for all microbatches, one after the other, take at least as long with every schedule; layouts for
which this lower bound is above the best time found are passed over. `gpipe` is left out, since 1f1b
takes as long and holds less; so is zero=0, since zero=1 holds less. `replica` is tried only for the
best layouts.
"""

import contextlib
import dataclasses
import functools
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError, MeshedConfig, UsageError, shards_ends
from jaxtrain.config.groups.layout_settings import MOST_MICROBATCHES
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.rules import divisors, near
from jaxtrain.config.saved_values import saved_with
from jaxtrain.planner.layer.hardware import GIB, Hardware, known, load
from jaxtrain.planner.layer.layout import Layout
from jaxtrain.planner.layer.links import EXPERT, Links
from jaxtrain.planner.layer.model import model_of
from jaxtrain.planner.search import layout_flag
from jaxtrain.planner.search.predict import Prediction, exactly, predict
from jaxtrain.planner.step.memory import bounded, least_recomputed, memory
from jaxtrain.planner.step.step_model import OURS, settings_of, step_model_of
from jaxtrain.planner.step.step_time import StepModel
from jaxtrain.schedule.orders import GROWING, OVERLAPPED, SCHEDULES

SHOWN = 10  # layouts that the planner shows
BEST = 14  # layouts that the closed forms choose
LEAST_TOKENS = 1024  # least tokens of a sequence on a device, if `context` splits it
# the largest sizes that are tried
MOST_MODEL, MOST_REPLICAS, MOST_SEQUENCES, MOST_REPEATS = 64, 16, 64, 8
# where no layout fits: the largest multiple of the devices that is tried; how many other numbers of
# devices are tried, and the most stages on them
MOST_TIMES, MOST_NUMBERS, MOST_STAGES = 4096, 64, 512
# A layout that waits: the least seconds of its step, its place among equally fast ones, its step,
# and what is to be found out: its tables, whether it fits with a mode of remat, or nothing.
Waiting = tuple[float, tuple, StepModel, str]
CUT, FITS = "cut", "fits"
TABLE_SETTINGS = {
    "pipeline.chunk_layers": (),
    "pipeline.times": (),
    "pipeline.memory": 0.0,
    "pipeline.layer_costs": (),
}


@dataclasses.dataclass(frozen=True)
class Space:
    """The space that is searched: the layouts of a model and batch on a number of devices.

    config:  the settings of the request; those of its layout are ignored
    recipe:  the config before the user's flags
    assume:  the framework that runs the step, a name of other_frameworks.FRAMEWORKS
    """

    config: Config
    recipe: Config
    hardware: Hardware
    devices: int
    assume: str = OURS


@dataclasses.dataclass(frozen=True)
class TimedLayout:
    """A layout that fits, and the seconds of its step."""

    layout: Layout
    seconds: float


def best_plans(space: Space, tokens: float | None) -> list[Prediction]:
    """The predictions of at most SHOWN layouts that fit, by the exact clock, the fastest first.

    tokens: the tokens of the complete training, from which its days follow; None: not known

    Raises UsageError if no layout fits, with the nearest request that has a plan; ConfigError for
    a config that breaks a rule with every layout.
    """
    check(space)
    for candidates in by_offload(space):
        plans = []
        for candidate in candidates:
            with contextlib.suppress(ConfigError):  # no table for such stages and microbatches
                plans.append(exactly(_with_table(space, candidate.layout, tokens)))
        # A candidate fits by closed forms; its plan has to by its own table, too.
        fitting = [plan for plan in plans if plan.fits]
        if fitting:
            return sorted(fitting, key=operator.attrgetter("seconds"))[:SHOWN]
    raise _none_fits(space)


def _with_table(space: Space, layout: Layout, tokens: float | None) -> Prediction:
    """The prediction for a layout, with the fewest layers recomputed that fit by its table, which
    needs other slots than the closed forms say."""

    def predicted(layers: int) -> Prediction:
        remat = f"{mode}:{layers}" if 0 < layers < most else mode
        return predict(
            laid_out(space, layout.with_remat(remat)).resolve(),
            space.hardware,
            space.assume,
            tokens,
        )

    mode = layout.recomputation.mode
    most = max(layout.units(space.config.model.layers))
    layers = layout.recomputation.recomputed(most)
    plan = predicted(layers)
    while not plan.fits and 0 < layers < most:
        layers += 1
        plan = predicted(layers)
    while layers > 1 and (less := predicted(layers - 1)).fits:
        layers, plan = layers - 1, less
    return plan


def check_fits(space: Space) -> None:
    """Raises the errors of `best_plans`, except those that only its tables show."""
    check(space)
    if not _fits(space):
        raise _none_fits(space)


def check(space: Space) -> None:
    """Raises ConfigError for a config that breaks a rule of training with every layout, and
    UsageError for a setting that belongs to one layout."""
    for path in TABLE_SETTINGS:
        if (value := cfg.get(space.config, path)) != cfg.get(space.recipe, path):
            raise UsageError(
                f"{cfg.flag_text(f'config.{path}', value)} is of one layout, which the planner is "
                "to find",
                {f"config.{path}": cfg.get(space.recipe, path)},
                advice="(or a --layout of one kind of devices)",
            )
    layout = _smallest(space, Layout(replica=_replicas(space)))
    checks.check(laid_out(space, layout), _environment(space, layout))


def _smallest(space: Space, mesh: Layout) -> Layout:
    """The mesh with the smallest microbatch for which a step has at most MOST_MICROBATCHES."""
    batch, each = space.config.data.batch_size, 1
    if isinstance(batch, int) and 0 < batch <= cfg.LARGEST_INT:
        each = batch // mesh.batch_shards
    size = next((size for size in divisors(max(1, each)) if each // size <= MOST_MICROBATCHES), 1)
    return dataclasses.replace(mesh, microbatch=size, microbatches=each // size)


# --- by closed forms ----------------------------------------------------------------------------


def by_offload(space: Space) -> Iterator[list[TimedLayout]]:
    """Yields for each offload, beginning with none, the layouts that fit by closed forms: the
    fastest first, at most BEST, one for each combination of stages, context, expert, model and
    schedule."""
    return (_search(space, offload) for offload in layout_flag.choices("offload"))


def laid_out(space: Space, layout: Layout) -> MeshedConfig:
    """The space's config with a layout."""
    values = {key: getattr(layout, key) for key in layout_flag.KEYS if key != "vocabulary"}
    of_layout = {"pipeline.save": layout.save, "parallel.expert_nodes": layout.expert_nodes}
    config = cfg.replace(space.config, TABLE_SETTINGS | of_layout)
    return layout_flag.apply(config, values).on_own_mesh()


def _search(space: Space, offload: str) -> list[TimedLayout]:
    """The fastest layouts with this offload."""
    best: dict[tuple, TimedLayout] = {}
    group = operator.attrgetter("stage", "context", "expert", "model", "schedule")
    bounds = ((_lower_bound(work), work) for work in _cuts(space, offload))
    waiting = [(least, (least, i), work, CUT) for i, (least, work) in enumerate(bounds)]
    remats = layout_flag.choices("remat")[::-1]  # the fastest first
    fastest = _fitting(space, waiting, remats, lambda layout: group(layout) in best)
    for candidate in itertools.islice(fastest, BEST):
        best[group(candidate.layout)] = _with_replicas(space, candidate)
    return sorted(best.values(), key=operator.attrgetter("seconds"))


def _fitting(
    space: Space,
    waiting: list[Waiting],
    remats: Sequence[str],
    passed_over: Callable[[Layout], bool],
) -> Iterator[TimedLayout]:
    """Yields the layouts that fit and keep the rules, the fastest first, with the fewest layers
    recomputed: without recomputation, or where that does not fit with each of the other modes.

    Each waits by the least seconds that it may take, so that memory, for which a layer is traced,
    is asked for only where a layout may be the next.

    passed_over: by the layout; it may become true as layouts are found
    """
    fits = lambda step: least_recomputed(step, space.config.model.loss_chunk, space.hardware.memory)
    heapq.heapify(waiting)
    while waiting:
        least, order, step, state = heapq.heappop(waiting)
        if state == CUT:
            for i, layout in enumerate(_tables(step)):
                timed = step.on(layout.with_remat("none"))
                heapq.heappush(waiting, (timed.step().seconds, (*order, 0, i), timed, "none"))
        elif passed_over(step.layout):
            continue
        elif state == FITS:
            yield TimedLayout(step.layout, least)
        elif (state != "none" or fits(bounded(step))) and (fewest := fits(step)):
            if state in remats and _keeps_rules(space, fewest.layout):
                heapq.heappush(waiting, (fewest.step().seconds, order, fewest, FITS))
        elif state == "none":
            for i, remat in enumerate(each for each in remats if each != "none"):
                save = saved_with(space.config.pipeline, remat)
                every = step.on(dataclasses.replace(step.layout, remat=remat, save=save))
                if fewest := fits(bounded(every)):  # it is slower
                    steps = step.on(fewest.layout), every
                    seconds = max(least, min(each.step().seconds for each in steps))
                    place = (*order[:2], 1 + i, *order[3:])
                    heapq.heappush(waiting, (seconds, place, every, remat))


def _keeps_rules(space: Space, layout: Layout) -> bool:
    return checks.first_violation(laid_out(space, layout), _environment(space, layout)) is None


def _environment(space: Space, layout: Layout) -> checks.Environment:
    return checks.Environment(
        layout.devices, space.hardware.platform, space.recipe, is_ours=space.assume == OURS
    )


def _with_replicas(space: Space, best: TimedLayout) -> TimedLayout:
    """The fastest of `best` and its variants that turn data shards into replicas."""
    layout = best.layout
    work = step_model_of(laid_out(space, layout).resolve(), space.hardware, space.assume)
    # as fast but for rounding is no reason for replicas
    most = best.seconds * (1 - 1e-9)
    changed = (
        dataclasses.replace(layout, replica=replica, data=layout.data // replica, remat="none")
        for replica in divisors(layout.data)[1:]
        if replica <= MOST_REPLICAS and not space.config.train.diloco_inner_steps
    )
    waiting = [
        (seconds, (0, 0, 0, i), step, "none")
        for i, step in enumerate(map(work.on, changed))
        if (seconds := step.step().seconds) < most
    ]
    faster = next(_fitting(space, waiting, [layout.remat], lambda _: False), best)
    return faster if faster.seconds < most else best


def _lower_bound(work: StepModel) -> float:
    """The least seconds that a stage's ops take, one after the other, with any table: those without
    recomputation, which may be of one layer alone, in overlapped cells where those save time."""
    layout, layers = work.layout.with_remat("none"), work.model.layers
    least = work.on(dataclasses.replace(layout, zero=3))
    each = sum(op.seconds for op in least.layers.ops(False).values())
    # at most all cells are overlapped
    saved = least.saved_by_overlap() if layout.stage > 1 else 0.0
    return layout.microbatches * (math.ceil(layers / layout.stage) * each - saved)


def least_memory(space: Space, enough: float = 0.0) -> tuple[float, Layout] | None:
    """Returns (the least bytes that any layout needs on its fullest device, that layout), or the
    first that needs no more than `enough`; None if no mesh has so many devices."""
    least: tuple[float, Layout] | None = None
    for work in _works(space):
        smallest = dataclasses.replace(_smallest(space, work.layout), remat="full", offload="both")
        for layout in _tables(work.on(smallest)):
            size = memory(work.on(layout), space.config.model.loss_chunk).bytes
            if not least or size < least[0]:
                least = size, layout
            if size <= enough:
                return size, layout
    return least


# --- what is tried ------------------------------------------------------------------------------


def _works(space: Space) -> Iterator[StepModel]:
    """The step of each mesh, with one sequence in a microbatch."""
    resolved = space.config.fill()
    # `context` may decide about the kernel of attention.
    model = model_of(resolved.model, resolved.data.sequence_length)

    @functools.cache
    def step(context: int) -> StepModel:
        config = cfg.replace(resolved, {"mesh.context": context}).fill()
        settings = settings_of(config, space.hardware, space.assume)
        # Layouts are ranked without products beside `model`'s messages: nobody has measured these
        # between nodes. Those that are shown are timed with them.
        parallel = dataclasses.replace(settings.parallel, collective_matmul="off")
        settings = dataclasses.replace(settings, by_sequence=True, parallel=parallel)
        return StepModel(model, Layout(), settings, space.hardware)

    for mesh in meshes(space):
        yield step(mesh.context).on(mesh)


def _cuts(space: Space, offload: str) -> Iterator[StepModel]:
    """The step of each mesh and microbatch, without recomputation."""
    for work in _works(space):
        each = space.config.data.batch_size // work.layout.batch_shards
        sizes = [size for size in divisors(each) if size <= MOST_SEQUENCES]
        for size in sizes:
            yield work.on(
                dataclasses.replace(
                    work.layout,
                    microbatch=size,
                    microbatches=each // size,
                    remat="none",
                    offload=offload,
                )
            )


def meshes(space: Space) -> Iterator[Layout]:
    """Every mesh of the space's devices that keeps the rules, as a layout."""
    m, data, n, replicas = space.config.model, space.config.data, space.devices, _replicas(space)
    models = [size for size in divisors(n) if size <= MOST_MODEL and m.heads % size == 0]
    contexts = [
        size for size in divisors(n) if size == 1 or data.sequence_length // size >= LEAST_TOKENS
    ]
    experts = [size for size in divisors(n) if m.experts and m.experts % size == 0] or [1]
    for model, context, expert in itertools.product(models, contexts, experts):
        inside = Layout(model=model, context=context, expert=expert, replica=replicas)
        outside, rest = divmod(n, model * context * expert)
        # the rules that are left where the shards divide the batch
        evenly = cfg.replace(space.config, {"data.batch_size": inside.batch_shards})
        if rest or not _keeps_rules(dataclasses.replace(space, config=evenly), inside):
            continue
        for stage in (size for size in divisors(outside) if size <= m.layers):
            shards = outside // stage
            if shards % replicas == 0 and data.batch_size % (shards * expert) == 0:
                mesh = dataclasses.replace(inside, data=shards // replicas, stage=stage)
                ends, pipeline = space.config.parallel.ends, space.config.pipeline
                sharded = ends == "auto" and shards_ends(m, stage, pipeline)
                # Nodes of experts are the islands over which these lie; with one device of
                # `expert` on each, tokens do not go to nodes first.
                nodes = Links(mesh, space.hardware).islands(EXPERT)
                in_two_steps = space.config.parallel.expert_nodes > 1 and nodes < mesh.expert
                yield dataclasses.replace(
                    mesh,
                    expert_nodes=nodes if in_two_steps else 1,
                    shards_ends=sharded or ends == "sharded",
                )


def _replicas(space: Space) -> int:
    """The number of independent replicas, which does not change the speed; 1 without these."""
    return max(1, space.config.mesh.replica) if space.config.train.diloco_inner_steps else 1


def _tables(work: StepModel) -> Iterator[Layout]:
    """The layout with every schedule, every number of chunks that the schedule takes, and every
    useful stage of ZeRO."""
    layout, layers = work.layout, work.model.layers
    for zero in (1, 2, 3) if layout.data > 1 else (1,):
        if layout.stage == 1:
            yield dataclasses.replace(layout, zero=zero)
            continue
        most = min(MOST_REPEATS, layers // layout.stage)
        names = [name for name in SCHEDULES if name not in GROWING]
        for name, repeats in itertools.product(names, range(1, most + 1)):
            uneven = repeats == SCHEDULES[name].least_repeats and layers % layout.stage
            if SCHEDULES[name].fits(repeats) and (layers % (layout.stage * repeats) == 0 or uneven):
                laid = dataclasses.replace(layout, zero=zero, schedule=name, repeats=repeats)
                yield laid
                if name in OVERLAPPED and work.saved_by_overlap():
                    yield dataclasses.replace(laid, overlap=True)


# --- where none fits ----------------------------------------------------------------------------


def _none_fits(space: Space) -> UsageError:
    """The error for a search without a result, with the first request that works: another number of
    devices, a larger batch, other hardware, fewer layers, shorter sequences."""
    least = least_memory(space)
    batch, layers = space.config.data.batch_size, space.config.model.layers
    requests: list[dict[str, Any]] = []
    if least is None:
        rule = (
            f"--devices={space.devices}: no layout uses so many devices with "
            f"data.batch_size={batch} and model.layers={layers}"
        )
        requests += [
            *({"devices": number} for number in _usable_numbers(space)[:MOST_NUMBERS]),
            {"config.data.batch_size": space.devices * max(1, batch // space.devices)},
        ]
    else:
        size, layout = least
        parts = ", ".join(
            f"{axis}={getattr(layout, axis)}"
            for axis in ("stage", "model", "data", "expert")
            if getattr(layout, axis) > 1
        )
        rule = (
            f"--devices={space.devices}: no layout fits into {space.hardware.memory / GIB:.1f} "
            f"GiB of {space.hardware.name}"
        )
        if size > space.hardware.memory:
            rule += f": the smallest{f', {parts},' * bool(parts)} needs {size / GIB:.1f} GiB"
        multiples = sorted(
            base << power for base in (2, 3) for power in range(MOST_TIMES.bit_length())
        )
        requests += [
            {"devices": space.devices * times} for times in multiples if times <= MOST_TIMES
        ]
    kinds = sorted(map(load, known()), key=lambda kind: kind.memory)
    requests += [
        *({"hardware": kind.name} for kind in kinds),
        *({"config.model.layers": fewer} for fewer in _halves(layers)),
        *(
            {"config.model.layers": 1, "config.data.sequence_length": n}
            for n in _halves(space.config.data.sequence_length)
        ),
    ]
    return UsageError(
        rule,
        next((flags for flags in requests if _fits(_with_flags(space, flags))), {"config": "tiny"}),
    )


def _halves(number: int) -> list[int]:
    """Half of a number, a quarter of it, and so on down to 0."""
    return [number >> power for power in range(1, number.bit_length())]


def _usable_numbers(space: Space) -> list[int]:
    """Numbers of devices for which some data shards divide the batch, the nearest to the requested
    number first."""
    m, data = space.config.model, space.config.data
    models = [size for size in divisors(m.heads) if size <= MOST_MODEL]
    contexts = [
        size
        for size in divisors(data.sequence_length)
        if size == 1 or data.sequence_length // size >= LEAST_TOKENS
    ]
    inside = {model * context for model in models for context in contexts}
    stages = {size * stage for size in inside for stage in range(1, min(m.layers, MOST_STAGES) + 1)}
    return near(
        space.devices, {size * shards for size in stages for shards in divisors(data.batch_size)}
    )


def _with_flags(space: Space, flags: dict[str, Any]) -> Space:
    """The space of a request with these flags."""
    settings = {
        name.removeprefix("config."): value
        for name, value in flags.items()
        if name.startswith("config.")
    }
    kind = load(flags["hardware"]) if "hardware" in flags else space.hardware
    config = cfg.replace(space.config, settings)
    return dataclasses.replace(
        space, config=config, hardware=kind, devices=flags.get("devices", space.devices)
    )


def _fits(space: Space) -> bool:
    """True if a layout fits, by closed forms, and keeps all rules."""
    with contextlib.suppress(ConfigError, UsageError):
        check(space)
        least = least_memory(space, space.hardware.memory)
        return least is not None and least[0] <= space.hardware.memory
    return False
