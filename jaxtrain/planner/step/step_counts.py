"""The communication volume of a step: its collectives by op, as the schedule's table runs them.

The table has the number of times that a stage runs an op, collective_time.py the collectives in an
op. Nothing is traced or compiled. Collectives of a few bytes (the loss, the norm of the gradients,
counts) are left out. With several stages the counts are one stage's.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from jaxtrain.config.groups.layer_kinds import forms_of_kinds, kinds_of_layers
from jaxtrain.planner.layer.collective_time import Parameters, StepCollectives
from jaxtrain.planner.layer.layer_collectives import owner
from jaxtrain.planner.layer.layout import AXES
from jaxtrain.planner.layer.links import GATHER, MODEL, PERMUTE, STAGE, Collective, sent
from jaxtrain.schedule.columns import (
    CELL_OPS,
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    cell_op,
    columns,
    overlapped_ops,
    permute_op,
    permutes,
)
from jaxtrain.schedule.placement import Placement
from jaxtrain.schedule.slots import SlottedTable
from jaxtrain.schedule.table import Permute, wraps


@dataclasses.dataclass(frozen=True)
class CollectiveCount:
    """Collectives of an op that are alike: over mesh axes, among `devices` of them, `count` times a
    step, of `size` bytes (collective_time.py)."""

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


class LayerPass(NamedTuple):
    """Layers of a local unit that go through F, R, B or W.

    label:  the op in whose program they are
    times:  a step
    unread: layers of which nothing reads the output
    remat:  how they are recomputed
    lowest: they are among the unit's lowest layers that go through the op
    kind:   of the layers (config/groups/layer_kinds.py)
    """

    label: str
    op: str
    times: int
    unit: int
    layers: int
    unread: int
    remat: str
    lowest: bool = True
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """The counts of a step.

    parameters: of a device, by group and name (planner/programs/report.py: parameters_of)
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
        """The number of times that a stage runs each op; one stage runs each once a microbatch."""
        if self.table is None:
            return collections.defaultdict(lambda: self.collectives.layout.microbatches)
        return {op: int(column[:, stage].sum()) for op, column in columns(self.table).runs.items()}

    def layer_passes(self, stage: int) -> list[LayerPass]:
        """The passes of layers through ops on a stage; a single stage has R, B and W in one op
        (tick.Accumulate)."""
        passes, c, placement = [], self.collectives, self.placement
        remat, every = c.layout.recomputation, self.table is None or c.layout.saves_inputs
        by_unit = placement.kinds_of_units(c.model.stack)
        several = len(c.model.counts[0]) > 1
        for label, op, unit, times in self._ops_on_units(self.times(stage)):
            at = (placement.unit_at(unit, s) for s in range(placement.stages))
            parts = {by_unit[n][: remat.recomputed(len(by_unit[n]))] for n in at if n is not None}
            kinds = [c.model.stack[layer] for layer in placement.layers_of(unit, stage)]
            # A layer outside of the loops over layers makes no output that nobody reads: the last
            # one, where ops gather the next layer or where it is the only one of its kind. None is
            # outside where stages end with other kinds, or run the unit without a layer.
            last = {part[-1:] for part in parts}
            single = len(parts) == 1 and all(part.count(part[-1]) == 1 for part in parts if part)
            peeled = c.gathers_in_ops and (len(parts) == 1 or not several)
            outside = len(last) == 1 and () not in last and (peeled or single)
            # The ranges of a unit's layers (runtime/layers/layer_loops.py: LayerRange).
            lower = remat.recomputed(len(kinds))
            for mode, part, lowest in (
                (remat.mode, kinds[:lower], True),
                ("none", kinds[lower:], not lower),
            ):
                counts = collections.Counter(part if op != "R" or mode == "full" else ())
                for kind, count in counts.items():
                    unread = count if every else int(outside and kind == part[-1])
                    of_kind = count, unread * (op == "R"), mode, lowest and kind == part[0], kind
                    passes.append(LayerPass(label, op, times, unit, *of_kind))
        return passes

    def _ops_on_units(self, times: Mapping[str, int]) -> Iterator[tuple[str, str, int, int]]:
        """(label, op, local unit, times) of each op; the table's `FB` has two ops, and so has one
        stage's B with R and W."""
        if self.table is None:
            yield from (("F" if op == "F" else "B", op, 0, times[op]) for op in "FRBW")
            return
        for unit in range(self.placement.units_per_stage):
            for name in CELL_OPS:
                op = "F" if name == "K" else name
                yield op, op, unit, times[cell_op(name, unit)]
        for name, (_, unit, b_unit) in overlapped_ops(self.table.table).items():
            yield "FB", "F", unit, times[name]
            yield "FB", "B", b_unit, times[name]

    # --- communication volume ------------------------------------------------------------------

    def volume(self, stage: int = 0) -> list[CollectiveCount]:
        """The collectives of a step for the devices of a stage."""
        return self._entries(self._step(stage))

    def exchange_volume(self) -> list[CollectiveCount]:
        """The collectives of an exchange between independent replicas; [] without these."""
        exchange = self.collectives.outer_exchange(self._all_parameters())
        return self._entries([("exchange", 1, exchange)]) if self.exchanges else []

    def busiest_stage(self) -> int:
        """The stage whose devices send most."""
        return max(
            range(self.collectives.layout.stage),
            key=lambda stage: sum(entry.bytes for entry in self.volume(stage)),
        )

    def _entries(
        self, ops: Iterable[tuple[str, float, Iterable[Collective]]]
    ) -> list[CollectiveCount]:
        counts: collections.Counter = collections.Counter()
        sizes = dataclasses.asdict(self.collectives.layout)
        for op, times, collectives in ops:
            for c in collectives:
                axes = tuple(a for a in AXES if a in c.axes and sizes[a] > 1)
                if axes and c.size and times:
                    devices = c.devices or self.collectives.devices(axes)
                    counts[op, c.kind, axes, devices, round(c.size)] += round(times * c.times)
        return [
            CollectiveCount(op, kind, axes, devices, count, size)
            for (op, kind, axes, devices, size), count in counts.items()
        ]

    def _all_parameters(self) -> list[Parameters]:
        """All parameters, layers in their stacks."""
        return [p for group in self.parameters.values() for p in group.values()]

    def _step(self, stage: int) -> list[tuple[str, float, list[Collective]]]:
        """The ops of a step: (name, number of times that it runs, its collectives)."""
        c, times, one_stage = self.collectives, self.times(stage), self.table is None
        parameters = self._all_parameters()
        once = c.layout.zero == 3 and not c.gathers_in_ops
        embed = self.parameters["embed"]
        embedding = [
            *c.lookup(embed["table"]),
            c.stage_sum(),
            *c.gathers(p for name, p in embed.items() if name == "positions"),
            *self._dense_layers("F"),
        ]
        ops = [
            (
                "gather",
                1.0,
                [c.gathered(p) for p in parameters if once and p.shard and not p.as_zero3],
            ),
            (EMBED, times[EMBED], embedding),
        ]
        for label, op, runs, unit, layers, unread, remat, lowest, kind in self.layer_passes(stage):
            # On one stage R, B and W are one op, which reads parameters and documents once.
            reads, fused = not one_stage or op in "FB", one_stage and remat == "full"
            of_layer = dataclasses.replace(
                c, model=c.model.of_kind(kind), layout=c.layout.with_remat(remat)
            )
            ops += [
                (label, runs, c.document_ids(op) if reads and lowest else []),
                (label, runs * layers, self._weights(op, unit, kind, reads)),
                (label, runs * (layers - unread), of_layer.layer(op, fused=fused)),
                (label, runs * unread, of_layer.layer(op, unread=True, fused=fused)),
            ]
        ops += [
            (HEAD, times[HEAD], self._head()),
            (EMBED_GRADIENT, times[EMBED_GRADIENT], self._embed_gradient()),
        ]
        if self.table:
            permutations = times[permute_op(Permute.EARLY)] + times[permute_op(Permute.LATE)]
            ops.append(("permute", permutations, self._messages(self.table, stage)))
        return [
            *ops,
            ("reduce", 1, [collective for p in parameters for collective in c.reductions(p)]),
            ("optimizer", 1, [c.after_the_update(p) for p in parameters]),
            ("optimizer", 1, [collective for p in parameters for collective in c.deals(p)]),
        ]

    def _weights(self, op: str, unit: int, kind: str, reads: bool) -> list[Collective]:
        """Collectives of an op on one layer's parameters: those that it reads, and gradients."""
        c, form = self.collectives, forms_of_kinds(self.collectives.model.resolved)[kind]
        layers = self.placement.stack_size(unit, form)
        stacks = self.parameters[f"layers/{unit}" + f"/{form}" * bool(form)]
        layer = {name: p._replace(size=p.size // layers) for name, p in stacks.items()}
        # R of each layer from its own input does without the products that make its output.
        unread = {
            owner(name)
            for product in c.model.of_kind(kind).layer().products
            for name in product.names
            if op == "R" and c.layout.saves_inputs and not product.read
        }
        read = [
            p
            for name, p in layer.items()
            if reads and (op != "W" or not p.matrix) and owner(name) not in unread
        ]
        return [*c.gathers(read), *c.reductions_in_op(layer.values() if op == "W" else ())]

    def _messages(self, slotted: SlottedTable, stage: int) -> list[Collective]:
        table, c = slotted.table, self.collectives
        goes_round = wraps(table.stage_of, table.stages)
        sent_to = [stage + step for step in permutes(table).values()]
        message = Collective(PERMUTE, (STAGE,), c.activation / c.layout.model * c.item)
        return [message for to in sent_to if goes_round or 0 <= to < table.stages]

    def _dense_layers(self, ops: str) -> list[Collective]:
        """Collectives of the dense layers before the first unit."""
        c, count, collectives = self.collectives, self.collectives.model.dense_layers, []
        for i, kind in enumerate(kinds_of_layers(c.model)[:count]):
            of_kind = dataclasses.replace(c, model=c.model.of_kind(kind))
            layer = self.parameters[f"first/{i}"].values()
            unread = "W" in ops and i == count - 1  # its output is there already
            collectives += [*c.document_ids("F"), *c.gathers(layer)]
            for op in ops:
                collectives += of_kind.layer(op, unread=unread, fused=True, dense=True)
            collectives += c.reductions_in_op(layer if "W" in ops else [])
        return collectives

    def _embed_gradient(self) -> list[Collective]:
        c, embed, one_stage = self.collectives, self.parameters["embed"], self.table is None
        positions = [p for name, p in embed.items() if name == "positions"]
        # Dense layers are run once more; on one stage the embedding is still there.
        is_looked_up = c.model.dense_layers > 0 and not one_stage
        return [
            *(c.lookup(embed["table"]) if is_looked_up else ()),
            *self._dense_layers("FBW"),
            c.stage_sum(),
            *c.lookup_gradient(embed["table"], same_op=one_stage),
            *[Collective(GATHER, (MODEL,), c.activation * c.item)] * len(positions),
            *c.reductions_in_op(positions),
        ]

    def _head(self) -> list[Collective]:
        """Collectives of head and loss, and of the multi-token prediction modules, whose forward
        and backward are one op (EmbeddingAndHead._predict)."""
        c, head, table = (
            self.collectives,
            self.parameters["head"],
            self.parameters["embed"]["table"],
        )
        read = [*head.values(), table] if c.model.tied_embeddings else list(head.values())
        collectives = [c.stage_sum(2), *c.gathers(read), *c.reductions_in_op(read), *c.loss()]
        last = dataclasses.replace(c, model=c.model.of_kind(c.model.stack[-1]))
        for i in range(c.model.mtp_depth):
            module = self.parameters[f"predictors/{i}"].values()
            collectives += [
                *c.gathers(module),
                *c.reductions_in_op(module),
                *c.lookup(table),
                *c.lookup_gradient(table, same_op=True),
                *c.document_ids("F"),
                *(collective for op in "FBW" for collective in last.layer(op, fused=True)),
                c.joining(),
                *c.loss(),
            ]
        return collectives
