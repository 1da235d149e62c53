"""The collectives of a training step, each stated once: its kind, mesh axes, bytes and count.

The step's time (step_time.py), the dry run's communication volume (step_counts.py) and the compile
check sum these collectives. Each function mirrors the code that it names: a collective that is
added to that code needs a line in the function. A test compares both with the compiled program.

    size          bytes of the unsharded array: an all-gather's result, the operand of the others
    item          bytes of an activation's number
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from jaxtrain.config.sizes import OUTER_BLOCK
from jaxtrain.planner.step.layer_collectives import FLOAT32, LayerCollectives
from jaxtrain.planner.step.layer_collectives import FP8 as FP8
from jaxtrain.planner.step.layer_collectives import scales_of as scales_of
from jaxtrain.planner.step.layout import AXES
from jaxtrain.planner.step.links import (
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


class StepCollectives(LayerCollectives):
    """The collectives of a model's step with a layout."""

    # ------------------------------------------- embedding and head (runtime/embedding_and_head.py)

    def stage_sum(self, times: int = 1) -> Collective:
        """The collective that brings one stage's activation to all stages, or sums all of them."""
        axes = (STAGE,) if self.shares_vocabulary else ()
        return Collective(SUM, axes, self.activation / self.layout.model * self.summed, times)

    def lookup(self, table: Parameters) -> list[Collective]:
        """The collectives of the embedding. Of a table that ZeRO-3 has scattered the tokens'
        vectors are sent, and not the table."""
        scatter = Collective(SCATTER, (MODEL,), self.activation * self.summed)
        sharded = self._gathers(table)
        return [*self._over_table_shards(table), scatter] if sharded else [scatter]

    def lookup_gradient(self, table: Parameters, same_op: bool) -> list[Collective]:
        """The collectives of the embedding's gradient. same_op: the token ids that `lookup` has
        gathered still exist."""
        gather = Collective(GATHER, (MODEL,), self.activation * self.item)
        ids, vectors = self._over_table_shards(table)
        sent_again = [vectors] if same_op and self._gathers(table) else [ids, vectors]
        return [*sent_again, gather] if self._reduces(table) else [gather]

    def _over_table_shards(self, table: Parameters) -> tuple[Collective, Collective]:
        """The all-gather of token ids and the all-to-all of their vectors, for a table whose
        columns are scattered."""
        vectors = self.activation / self.layout.model * self.item
        ids = self.tokens * self.devices(table.shard) * FLOAT32
        return Collective(GATHER, table.shard, ids), Collective(EXCHANGE, table.shard, vectors)

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
            Collective(SUM, (MODEL,), self.model.norm_vectors * self.model.width * FLOAT32, n),
        ]

    def joining(self) -> Collective:
        """The sum of the gradients of what joins two streams in a multi-token prediction module."""
        width, norms = self.model.width, 3 * self.model.norm_vectors * self.model.width
        matrix = 2 * width**2 * self.summed
        return Collective(SUM, (MODEL,), norms * FLOAT32 + matrix)

    # ------------------------------------------------------------- parameters (parallel/zero.py)

    def gathers(self, parameters: Iterable[Parameters]) -> list[Collective]:
        """The all-gathers of the parameters that an op reads."""
        return [self.gathered(p) for p in parameters if self._gathers(p)]

    def _gathers(self, p: Parameters) -> bool:
        """True if ops gather the parameter."""
        return bool(p.shard) and (self.gathers_in_ops or p.as_zero3)

    def _reduces(self, p: Parameters) -> bool:
        """True if each microbatch's gradient of the parameter is scattered."""
        return bool(p.shard) and (self.reduces_in_ops or p.as_zero3)

    def gathered(self, p: Parameters) -> Collective:
        """The all-gather of a parameter that ZeRO-3 has scattered."""
        fp8 = self.fp8 and p.product
        read = self.number_of_fp8 if fp8 else self.read if p.cast else FLOAT32
        return Collective(GATHER, p.shard, p.size * read)

    def reductions_in_op(self, parameters: Iterable[Parameters]) -> list[Collective]:
        """The reduce-scatters of one microbatch's gradients."""
        scattered = [p for p in parameters if self._reduces(p)]
        return [Collective(SCATTER, p.shard, p.size * self.reduced) for p in scattered]

    def reductions(self, p: Parameters) -> list[Collective]:
        """The collectives of a gradient after the last microbatch: what the ops have not
        reduced."""
        reduced = set(p.shard) if self._reduces(p) else set()
        scatter = tuple(a for a in p.scatter if getattr(self.layout, a) > 1 and a not in reduced)
        sums = tuple(a for a in p.sums if getattr(self.layout, a) > 1)
        inside = tuple(a for a in sums if a != REPLICA)
        size = p.size * self.reduced / self.devices(reduced)
        share = size / self.devices(scatter)
        collectives = [Collective(SCATTER, scatter, size)]
        # Gradients are summed inside each replica first; a device's share then crosses `replica`
        # (parallel/replicas.py).
        if REPLICA in sums and inside:
            across = Collective(SUM, (REPLICA,), share / self.devices(inside))
            gather = Collective(GATHER, inside, share)
            return [*collectives, Collective(SCATTER, inside, share), across, gather]
        return [*collectives, Collective(SUM, sums, share)]

    def _sharded_weights(self, p: Parameters) -> tuple[str, ...]:
        """The axes over which ZeRO-3 leaves a parameter scattered."""
        return p.shard if self.layout.zero == 3 or p.as_zero3 else ()

    def after_the_update(self, p: Parameters) -> Collective:
        """The all-gather of a parameter whose shards are updated where their optimizer state lies
        (training/step.py)."""
        scattered = self._sharded_weights(p)
        axes = tuple(a for a in p.scatter if a not in scattered)
        return Collective(GATHER, axes, p.size / self.devices(scattered) * self._updated(p))

    def _updated(self, p: Parameters) -> float:
        """Bytes of a parameter's number that is gathered after the update."""
        return self.updated if p.cast else FLOAT32

    # --------------------------------------------- independent replicas (parallel/replicas.py)

    def outer_exchange(self, parameters: Iterable[Parameters]) -> list[Collective]:
        """The collectives of `replicas.mean_across`, in which each device exchanges its shard over
        `replica` and then all-gathers inside the replica, and the all-gather of the parameters
        that this updates (training/diloco.py)."""
        collectives: list[Collective] = []
        int8 = scales = 0
        for p in (p for p in parameters if p.size):
            scattered = self._sharded_weights(p)
            gathered = tuple(a for a in p.outer if a not in scattered)
            part = math.ceil(p.size / self.devices(p.outer))
            copies = tuple(a for a in AXES if a != REPLICA and a not in (*p.split, *p.outer))
            share = math.ceil(part / self.devices(copies))
            block = min(OUTER_BLOCK, math.ceil(share / self.layout.replica))
            blocks = math.ceil(share / (self.layout.replica * block)) * self.layout.replica
            int8 += blocks * block
            scales += blocks
            collectives += [
                Collective(GATHER, gathered, p.size / self.devices(scattered) * self._updated(p)),
                Collective(SUM, (REPLICA,), share * FLOAT32 * (not self.outer_int8)),
                Collective(GATHER, copies, part * FLOAT32),
            ]
        for kind in (EXCHANGE, GATHER) if self.outer_int8 else ():
            collectives += alike(kind, REPLICA, (int8, scales * FLOAT32))
        return collectives
