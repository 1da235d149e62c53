"""The account of a step: which collectives a device takes part in, how often, and how many bytes it sends, from the config alone.

Nothing is traced or compiled: the table says how often a stage runs an op, ops.py which collectives stand in one. Numbers of a few bytes
(the loss, the norm of the gradients, counts) are left out.

    size    bytes of the whole array: an all-gather's result, the operand of the others
    bytes   what a device sends in a step, by the ring algorithms: (n − 1)/n of the size, twice that for an all-reduce, all of it in a
            permute

With stages the account is of one of them: those of a table differ.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator

from jaxtrain.config import Config
from jaxtrain.devices.mesh import AXES, MODEL, STAGE
from jaxtrain.plan import ops
from jaxtrain.plan.ops import PERMUTE, SUM, Collective, Sizes
from jaxtrain.schedule.columns import CELL_OPS, EMBED, EMBED_GRADIENT, HEAD, WAY, cell_op, columns, permute_op, permutes
from jaxtrain.schedule.table import Permute, wraps


@dataclasses.dataclass(frozen=True)
class Entry:
    """Collectives of an op, alike: over mesh axes, among `devices` of them, `count` times a step."""

    op: str
    kind: str
    axes: tuple[str, ...]
    devices: int
    count: int
    size: int

    @property
    def bytes(self) -> int:
        """What a device sends in a step."""
        return round(self.count * sent(self.kind, self.size, self.devices))


def sent(kind: str, size: float, devices: int) -> float:
    """Bytes that a device sends of an array of `size` bytes."""
    if kind == PERMUTE:
        return size
    return size * (devices - 1) / devices * (2 if kind == SUM else 1)


def account(config: Config, stage: int = 0, cpu: bool = False) -> list[Entry]:
    """The entries of a resolved config whose mesh is known, for the devices of a stage; `cpu`: as XLA's CPU backend lowers them, 16-bit
    numbers summed in 32 bits."""
    sizes = Sizes(config, cpu)
    return _entries(sizes, _step(sizes, stage))


def exchange_account(config: Config, cpu: bool = False) -> list[Entry]:
    """The same of an exchange between replicas that train apart, which comes every `train.diloco_inner_steps`; [] where there is none."""
    sizes = Sizes(config, cpu)
    return _entries(sizes, [("exchange", 1, ops.exchange(sizes))] if sizes.layout.independent_replicas else [])


def busiest(config: Config, cpu: bool = False) -> int:
    """The stage whose devices send most."""
    sizes = Sizes(config, cpu)
    return max(range(config.mesh.stage), key=lambda stage: sum(row.bytes for row in _entries(sizes, _step(sizes, stage))))


def _entries(sizes: Sizes, parts: Iterable[tuple[str, int, Iterable[Collective]]]) -> list[Entry]:
    counts: collections.Counter = collections.Counter()
    for op, times, costs in parts:
        for cost in costs:
            axes = tuple(a for a in AXES if a in cost.axes and sizes.axis_sizes[a] > 1)
            if axes and cost.size and times:
                counts[op, cost.kind, axes, cost.devices or math.prod(sizes.axis_sizes[a] for a in axes), round(cost.size)] += times
    return [Entry(op, kind, axes, devices, count, size) for (op, kind, axes, devices, size), count in counts.items()]


def _step(sizes: Sizes, stage: int) -> Iterator[tuple[str, int, Iterable[Collective]]]:
    """(op, how often a step, what stands in it)."""
    if sizes.zero.stage == 3 and not sizes.zero.gathers_in_ops:
        yield "gather", 1, [ops.whole(sizes, leaf) for leaf in sizes.all_leaves() if leaf.reduction.over_data]
    yield from (_table(sizes, stage) if sizes.setup.train else _accumulation(sizes))
    yield "reduce", 1, [cost for leaf in sizes.all_leaves() for cost in ops.reductions(sizes, leaf)]
    yield "optimizer", 1, [cost for leaf in sizes.all_leaves() for cost in ops.after_the_update(sizes, leaf)]


def _table(sizes: Sizes, stage: int) -> Iterator[tuple[str, int, Iterable[Collective]]]:
    slotted, placement = sizes.setup.train, sizes.setup.placement
    assert slotted is not None
    table, times_of = slotted.table, {op: int(column[:, stage].sum()) for op, column in columns(slotted).runs.items()}
    yield "embed", times_of[EMBED], ops.embed(sizes)
    for u in range(placement.units_per_stage):
        layers = placement.layer_count(u, stage)
        # A layer that stands outside of the loop over layers makes no output that nobody reads.
        outside = int(placement.stack_size(u) == 1 or sizes.zero.gathers_in_ops)
        for name in CELL_OPS:
            op, times = "F" if name == "K" else name, times_of[cell_op(name, u)]
            yield op, times, ops.once(sizes, op)
            yield op, times * layers, _weights(sizes, op, str(u))
            yield op, times * (layers - outside), ops.layer(sizes, op)
            yield op, times * outside, ops.layer(sizes, op, last=name == "R")
    yield "head", times_of[HEAD], ops.head(sizes)
    yield "embed_gradient", times_of[EMBED_GRADIENT], ops.embed_gradient(sizes)
    ticks = sum(times_of[permute_op(when)] for when in (Permute.EARLY, Permute.LATE))
    round_ = wraps(table.stage_of, table.stages)
    sends = [way for way in permutes(table) if round_ or 0 <= stage + WAY[way] < table.stages]
    yield "permute", ticks, [Collective(PERMUTE, (STAGE,), sizes.activation / sizes.axis_sizes[MODEL] * sizes.item) for _ in sends]


def _accumulation(sizes: Sizes) -> Iterator[tuple[str, int, Iterable[Collective]]]:
    """One stage: forward and backward of a microbatch at once (tick.Accumulate)."""
    m, layers = sizes.config.pipeline.microbatches, sizes.model.layers
    again = sizes.config.pipeline.remat == "full"
    yield "embed", m, ops.embed(sizes)
    yield "F", m, ops.once(sizes, "F")
    yield "F", m * layers, [*ops.layer(sizes, "F"), *_weights(sizes, "F", "0")]
    yield "head", m, ops.head(sizes)
    yield "B", m, ops.once(sizes, "B")
    if again:
        yield "B", m * layers, ops.layer(sizes, "R", last=True)
    yield "B", m * layers, [*ops.layer(sizes, "B", again=again), *_weights(sizes, "R" if again else "B", "0")]
    yield "B", m * layers, [*ops.layer(sizes, "W", again=again), *_weights(sizes, "W", "0", reads=False)]
    yield "embed_gradient", m, ops.embed_gradient(sizes)


def _weights(sizes: Sizes, op: str, chunk: str, reads: bool = True) -> Iterator[Collective]:
    """What an op does with one layer's parameters: gathers what it reads, reduces their gradients."""
    leaves = {
        name: dataclasses.replace(leaf, size=leaf.size // sizes.setup.placement.stack_size(int(chunk)))
        for name, leaf in sizes.leaves("layers", chunk).items()
    }
    vectors = {name: leaf for name, leaf in leaves.items() if not leaf.spec.matrix}
    if reads:
        yield from ops.gathers(sizes, vectors if op == "W" else leaves)
    if op == "W":
        yield from ops.reductions_in_op(sizes, leaves)
