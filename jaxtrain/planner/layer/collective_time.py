"""The collectives of a training step, each stated once: its kind, mesh axes, bytes and count.

The step's time (step_time.py), the dry run's communication volume (step_counts.py) and the compile
check sum these collectives. Each function mirrors the code that it names: a collective that is
added to that code needs a line in the function. A test compares both with the compiled program.

    size          bytes of the unsharded array: an all-gather's result, the operand of the others
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from jaxtrain.config.optimizers import record_of
from jaxtrain.config.sizes import OUTER_BLOCK
from jaxtrain.planner.layer.layer_collectives import LayerOpCollectives
from jaxtrain.planner.layer.layout import AXES
from jaxtrain.planner.layer.links import (
    EXCHANGE,
    GATHER,
    MODEL,
    REPLICA,
    SCATTER,
    STAGE,
    SUM,
    Collective,
    alike,
)
from jaxtrain.planner.layer.settings import FLOAT32


class Parameters(NamedTuple):
    """One parameter, or several that are sharded alike.

    size:     elements on a device, unsharded over `data`
    scatter:  axes over which ZeRO leaves the sum of its gradient scattered
    sums:     axes over which the gradient is only summed
    split:    axes that split the parameter itself
    shard:    axes of a stage's devices over which an op gathers the parameter with ZeRO-3, or
              scatters a microbatch's gradient
    outer:    axes over which ZeRO scatters the state that independent replicas share
    as_zero3: it is sharded as in ZeRO-3, whatever the others are (`parallel.ends`)
    cast:     matrix products read it in the type that they compute in
    product:  a matrix whose products may be of FP8
    matrix:   False for a norm, a bias or a count
    dealt:    None if it is no matrix that Muon deals out; otherwise the axes that split it, with
              those of `scatter`, and the axes along which devices have copies
    """

    size: float
    scatter: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    shard: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()
    cast: bool = True
    matrix: bool = True
    product: bool = False
    as_zero3: bool = False
    dealt: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    def in_ops(self, others: bool) -> bool:
        """True if ops gather it, or scatter its gradient. others: they do so with parameters that
        are not `as_zero3`"""
        return bool(self.shard) and (others or self.as_zero3)


class StepCollectives(LayerOpCollectives):
    """The collectives of a model's step with a layout."""

    # ------------------------------------------- embedding and head (runtime/embedding_and_head.py)

    def stage_sum(self, times: int = 1) -> Collective:
        """The collective that brings one stage's activation to all stages, or sums all of them."""
        return Collective(
            SUM,
            (STAGE,) * self.shares_vocabulary,
            self.activation / self.layout.model * self.summed,
            times,
        )

    def lookup(self, table: Parameters) -> list[Collective]:
        """The collectives of the embedding. Of a table that ZeRO-3 has scattered the tokens'
        vectors are sent, and not the table."""
        sent = self._over_table_shards(table) if table.in_ops(self.gathers_in_ops) else []
        return [*sent, Collective(SCATTER, (MODEL,), self.activation * self.summed)]

    def lookup_gradient(self, table: Parameters, same_op: bool) -> list[Collective]:
        """The collectives of the embedding's gradient. same_op: the token ids that `lookup` has
        gathered still exist."""
        ids, vectors = self._over_table_shards(table)
        sent = [vectors] if same_op and table.in_ops(self.gathers_in_ops) else [ids, vectors]
        sent *= table.in_ops(self.reduces_in_ops)
        return [*sent, Collective(GATHER, (MODEL,), self.activation * self.item)]

    def _over_table_shards(self, table: Parameters) -> list[Collective]:
        """The all-gather of token ids and the all-to-all of their vectors, for a table whose
        columns are scattered."""
        vectors = self.activation / self.layout.model * self.item
        ids = self.tokens * self.devices(table.shard) * FLOAT32
        return [Collective(GATHER, table.shard, ids), Collective(EXCHANGE, table.shard, vectors)]

    def loss(self) -> list[Collective]:
        """The collectives of the last norm, the product with the output matrix, and the softmax
        (runtime/loss.py)."""
        n, number = self.loss_cuts, self.tokens / self.loss_cuts * FLOAT32
        softmax = (number, 2 * number)  # the largest logit; the sum and the target's logit
        return [
            *alike(SUM, MODEL, softmax, n),
            *alike(SUM, STAGE, softmax if self.shares_vocabulary else (), n),
            Collective(GATHER, (MODEL,), self.activation / n * self.item, n),
            Collective(SCATTER, (MODEL,), self.activation / n * self.summed, n),
            Collective(SUM, (MODEL,), self._summed_of_ends("head."), n),
        ]

    def joining(self) -> Collective:
        """The sum of the gradients of what joins two streams in a multi-token prediction module."""
        return Collective(SUM, (MODEL,), self._summed_of_ends("predictors.0."))

    def _summed_of_ends(self, module: str) -> float:
        """Bytes of the gradients of a module's parameters, which all devices of `model` have."""
        return sum(
            array.size * (self.summed if array.cast else FLOAT32)
            for array in self.model.ends
            if array.name.startswith(module)
        )

    # ------------------------------------------------------------- parameters (parallel/zero.py)

    def gathers(self, parameters: Iterable[Parameters]) -> list[Collective]:
        """The all-gathers of the parameters that an op reads."""
        return [self.gathered(p) for p in parameters if p.in_ops(self.gathers_in_ops)]

    def gathered(self, p: Parameters) -> Collective:
        """The all-gather of a parameter that ZeRO-3 has scattered."""
        settings = self.settings
        read = self.item if settings.ours else settings.sent_weight
        if settings.fp8 and p.product:
            read = settings.format.sent
        return Collective(GATHER, p.shard, p.size * (read if p.cast else FLOAT32))

    def reductions_in_op(self, parameters: Iterable[Parameters]) -> list[Collective]:
        """The reduce-scatters of one microbatch's gradients."""
        return [
            Collective(
                SCATTER,
                p.shard,
                p.size * (self.settings.reduced_gradient or self.settings.sent_gradient),
            )
            for p in parameters
            if p.in_ops(self.reduces_in_ops)
        ]

    def reductions(self, p: Parameters) -> list[Collective]:
        """The collectives of a gradient after the last microbatch: what the ops have not
        reduced."""
        reduced = p.shard if p.in_ops(self.reduces_in_ops) else ()
        scatter = tuple(axis for axis in p.scatter if axis not in reduced)
        size = p.size * self.settings.sent_gradient / self.devices(reduced)
        share = size / self.devices(scatter)
        summed = [Collective(SUM, p.sums, share)]
        inside = tuple(axis for axis in p.sums if axis != REPLICA)
        # Gradients are summed inside each replica first; a device's share then crosses `replica`
        # (parallel/replicas.py).
        if REPLICA in p.sums and self.layout.replica > 1 and self.devices(inside) > 1:
            across = Collective(SUM, (REPLICA,), share / self.devices(inside))
            summed = [Collective(SCATTER, inside, share), across, Collective(GATHER, inside, share)]
        return [Collective(SCATTER, scatter, size), *summed]

    def after_the_update(self, p: Parameters) -> Collective:
        """The all-gather of a parameter whose shards are updated where their optimizer state lies
        (training/step.py)."""
        scattered = p.shard if self.layout.zero == 3 or p.as_zero3 else ()  # as ops read it
        axes = tuple(axis for axis in p.scatter if axis not in scattered)
        number = self.settings.sent_weight if p.cast else FLOAT32
        return Collective(GATHER, axes, p.size / self.devices(scattered) * number)

    def deals(self, p: Parameters) -> list[Collective]:
        """The all-to-alls that bring shards of Muon's momenta to the devices that have a matrix
        whole, and its directions back, and the all-gather of directions where devices have copies
        of shards (training/update/muon.py)."""
        if p.dealt is None or record_of(self.settings.optimizer.name).rest is None:
            return []
        shards, copies = p.dealt
        held = p.size / self.devices(p.scatter) * self.item
        return [
            Collective(EXCHANGE, shards, held / self.devices(copies), 2),
            Collective(GATHER, copies, held),
        ]

    # --------------------------------------------- independent replicas (parallel/replicas.py)

    def outer_exchange(self, parameters: Iterable[Parameters]) -> list[Collective]:
        """The collectives of `replicas.mean_across`, in which each device exchanges its shard over
        `replica` and then all-gathers inside the replica, and the all-gather of the parameters
        that this updates (training/update/diloco.py)."""
        int8 = self.settings.precision.outer == "int8"
        collectives: list[Collective] = []
        numbers = scales = 0
        for p in (p for p in parameters if p.size):
            part = math.ceil(p.size / self.devices(p.outer))
            copies = tuple(a for a in AXES if a != REPLICA and a not in (*p.split, *p.outer))
            share = math.ceil(part / self.devices(copies))
            block = min(OUTER_BLOCK, math.ceil(share / self.layout.replica))
            blocks = math.ceil(share / (self.layout.replica * block)) * self.layout.replica
            numbers += blocks * block
            scales += blocks
            collectives += [
                self.after_the_update(p._replace(scatter=p.outer)),
                Collective(SUM, (REPLICA,), share * FLOAT32 * (not int8)),
                Collective(GATHER, copies, part * FLOAT32),
            ]
        for kind in (EXCHANGE, GATHER) if int8 else ():
            collectives += alike(kind, REPLICA, (numbers, scales * FLOAT32))
        return collectives
