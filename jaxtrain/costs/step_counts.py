"""The communication volume of a step: its collectives by op, as the schedule's table runs them.

The table says how often a stage runs an op, collectives.py which collectives stand in one. Nothing
is traced or compiled. Numbers of a few bytes (the loss, the norm of the gradients, counts) are left
out. With stages the counts are one stage's.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from jaxtrain.costs.collectives import (
    GATHER,
    MODEL,
    PERMUTE,
    STAGE,
    Collective,
    Parameters,
    StepCollectives,
    sent,
)
from jaxtrain.costs.layout import AXES
from jaxtrain.schedule.columns import (
    CELL_OPS,
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    WAY,
    cell_op,
    columns,
    permute_op,
    permutes,
)
from jaxtrain.schedule.placement import Placement
from jaxtrain.schedule.slots import SlottedTable
from jaxtrain.schedule.table import Permute, wraps


@dataclasses.dataclass(frozen=True)
class Entry:
    """Collectives of an op, alike: over mesh axes, among `devices` of them, `count` times a step,
    of `size` bytes (collectives.py)."""

    op: str
    kind: str
    axes: tuple[str, ...]
    devices: int
    count: int
    size: int

    @property
    def bytes(self) -> int:
        """Bytes that a device sends in a step."""
        return round(self.count * sent(self.kind, self.size, self.devices))


class Run(NamedTuple):
    """Layers of a local unit that go through F, R, B or W.

    label:  the op in whose program they stand
    times:  a step
    unread: layers of which nothing reads the output
    """

    label: str
    op: str
    times: int
    unit: int
    layers: int
    unread: int


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """The counts of a step.

    parameters: of a device, by group and name (training/sizes.py)
    table:      None with one stage
    exchanges:  replicas are independent, and exchange what they have learned
    """

    collectives: StepCollectives
    parameters: Mapping[str, Mapping[str, Parameters]]
    placement: Placement
    table: SlottedTable | None
    exchanges: bool

    # --- how often -----------------------------------------------------------------------------

    def times(self, stage: int) -> Mapping[str, int]:
        """How often a stage runs each op; one stage runs each once a microbatch."""
        if self.table is None:
            return collections.defaultdict(lambda: self.collectives.layout.microbatches)
        return {op: int(column[:, stage].sum()) for op, column in columns(self.table).runs.items()}

    def runs(self, stage: int) -> Iterator[Run]:
        """What layers go through on a stage; a single stage has R, B and W in one op
        (tick.Accumulate)."""
        times = self.times(stage)
        if self.table is None:
            layers, ops = (
                self.collectives.model.layers,
                "FRBW" if self.collectives.layout.remat == "full" else "FBW",
            )
            yield from (
                Run("F" if op == "F" else "B", op, times[op], 0, layers, layers * (op == "R"))
                for op in ops
            )
            return
        for unit in range(self.placement.units_per_stage):
            # A layer that stands outside of the loop over layers makes no output that nobody reads.
            outside = self.placement.stack_size(unit) == 1 or self.collectives.gathers_in_ops
            for name in CELL_OPS:
                op, layers = "F" if name == "K" else name, self.placement.layer_count(unit, stage)
                yield Run(
                    op, op, times[cell_op(name, unit)], unit, layers, int(outside and op == "R")
                )

    # --- communication volume ------------------------------------------------------------------

    def volume(self, stage: int = 0) -> list[Entry]:
        """The collectives of a step for the devices of a stage."""
        return self._entries(self._step(stage))

    def exchange_volume(self) -> list[Entry]:
        """The collectives of an exchange between independent replicas; [] without these."""
        exchange = self.collectives.outer_exchange(self._all_parameters())
        return self._entries([("exchange", 1, exchange)]) if self.exchanges else []

    def busiest_stage(self) -> int:
        """The stage whose devices send most."""
        return max(
            range(self.collectives.layout.stage),
            key=lambda stage: sum(entry.bytes for entry in self.volume(stage)),
        )

    def _entries(self, ops: Iterable[tuple[str, float, Iterable[Collective]]]) -> list[Entry]:
        counts: collections.Counter = collections.Counter()
        for op, times, collectives in ops:
            for c in collectives:
                axes = tuple(
                    a for a in AXES if a in c.axes and getattr(self.collectives.layout, a) > 1
                )
                if axes and c.size and times:
                    counts[
                        op, c.kind, axes, c.devices or self.collectives.devices(axes), round(c.size)
                    ] += round(times * c.times)
        return [
            Entry(op, kind, axes, devices, count, size)
            for (op, kind, axes, devices, size), count in counts.items()
        ]

    def _all_parameters(self) -> list[Parameters]:
        """All parameters, layers in their stacks."""
        return [p for group in self.parameters.values() for p in group.values()]

    def _step(self, stage: int) -> Iterator[tuple[str, float, Iterable[Collective]]]:
        """(op, how often a step, its collectives)."""
        c, times, parameters, one_stage = (
            self.collectives,
            self.times(stage),
            self._all_parameters(),
            self.table is None,
        )
        if c.layout.zero == 3 and not c.gathers_in_ops:
            yield "gather", 1, (c.gathered(p) for p in parameters if p.over_data)
        yield EMBED, times[EMBED], self._embed()
        # On one stage R, B and W are one op, which reads parameters and documents once; B and W
        # still have what R has gathered.
        again = one_stage and c.layout.remat == "full"
        for label, op, runs, unit, layers, unread in self.runs(stage):
            reads = not one_stage or op in "FB"
            if reads:
                yield label, runs, c.document_ids(op)
            yield label, runs * layers, self._weights(op, unit, reads)
            yield label, runs * (layers - unread), c.layer(op, again=again)
            yield label, runs * unread, c.layer(op, last=True, again=again)
        yield HEAD, times[HEAD], self._head()
        yield EMBED_GRADIENT, times[EMBED_GRADIENT], self._embed_gradient()
        if self.table:
            yield (
                "permute",
                times[permute_op(Permute.EARLY)] + times[permute_op(Permute.LATE)],
                self._messages(self.table, stage),
            )
        yield "reduce", 1, (each for p in parameters for each in c.reductions(p))
        yield "optimizer", 1, (each for p in parameters for each in c.after_the_update(p))

    def _weights(self, op: str, unit: int, reads: bool) -> Iterator[Collective]:
        """Collectives of an op on one layer's parameters: those that it reads, and gradients."""
        layers = self.placement.stack_size(unit)
        layer = [
            p._replace(size=p.size // layers) for p in self.parameters[f"layers/{unit}"].values()
        ]
        if reads:
            yield from self.collectives.gathers(p for p in layer if op != "W" or not p.matrix)
        if op == "W":
            yield from self.collectives.reductions_in_op(layer)

    def _messages(self, slotted: SlottedTable, stage: int) -> Iterator[Collective]:
        table, c = slotted.table, self.collectives
        for way in permutes(table):
            if wraps(table.stage_of, table.stages) or 0 <= stage + WAY[way] < table.stages:
                yield Collective(PERMUTE, (STAGE,), c.activation / c.layout.model * c.item)

    def _embed(self) -> Iterator[Collective]:
        c, embed = self.collectives, self.parameters["embed"]
        yield from c.lookup(embed["table"])
        yield c.stage_sum()
        yield from c.gathers(p for name, p in embed.items() if name == "positions")
        yield from self._dense_layers("F")

    def _dense_layers(self, ops: str) -> Iterator[Collective]:
        """Dense layers before the first unit."""
        c, count = self.collectives, self.collectives.model.dense_layers
        for i in range(count):
            layer = self.parameters[f"first/{i}"].values()
            last = "W" in ops and i == count - 1  # the last one's output is there already
            yield from c.document_ids("F")
            yield from c.gathers(layer)
            for op in ops:
                yield from c.layer(op, last=last, again=True, dense=True)
            if "W" in ops:
                yield from c.reductions_in_op(layer)

    def _embed_gradient(self) -> Iterator[Collective]:
        c, embed, one_stage = self.collectives, self.parameters["embed"], self.table is None
        if c.model.dense_layers:  # they are run once more
            # on one stage the embedding is still there
            yield from () if one_stage else c.lookup(embed["table"])
            yield from self._dense_layers("FBW")
        yield c.stage_sum()
        yield from c.lookup_gradient(embed["table"], same_op=one_stage)
        if "positions" in embed:
            yield Collective(GATHER, (MODEL,), c.activation * c.item)
            yield from c.reductions_in_op([embed["positions"]])

    def _head(self) -> Iterator[Collective]:
        """Head and loss, and the predictions of further tokens."""
        c, head = self.collectives, dict(self.parameters["head"])
        if c.model.tied:
            head["table"] = self.parameters["embed"]["table"]
        yield c.stage_sum()._replace(times=2)
        yield from c.gathers(head.values())
        yield from c.reductions_in_op(head.values())
        yield from c.loss()
        for i in range(c.model.predictions):
            yield from self._prediction(self.parameters[f"predictors/{i}"])

    def _prediction(self, module: Mapping[str, Parameters]) -> Iterator[Collective]:
        """A module's forward and backward at once (EmbeddingAndHead._predict)."""
        c, table = self.collectives, self.parameters["embed"]["table"]
        yield from c.gathers(module.values())
        yield from c.reductions_in_op(module.values())
        yield from c.lookup(table)
        yield from c.lookup_gradient(table, same_op=True)
        yield from c.document_ids("F")
        for op in "FBW":
            yield from c.layer(op, again=True)
        yield c.joining()
        yield from c.loss()
