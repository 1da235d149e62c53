"""The collectives of a training step, each stated once: its kind, mesh axes, bytes and count.

The step's time (step_time.py), the dry run's communication volume (step_counts.py) and the compile
check sum what stands here. A function mirrors the code that makes its collectives, which it names;
a collective that is added there needs its line here. A test compares both with the compiled
program.

    F, R, B, W    forward, recomputation, gradient of inputs, gradient of weights; of one layer
    size          bytes of the whole array: an all-gather's result, the operand of the others
    item          bytes of an activation's number
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxtrain.costs.hardware import Hardware, Tier
from jaxtrain.costs.layout import AXES, Layout, expert_rows
from jaxtrain.costs.transformer import Transformer

GATHER, SCATTER, SUM = "all-gather", "reduce-scatter", "all-reduce"
EXCHANGE, PERMUTE, RAGGED = "all-to-all", "collective-permute", "ragged-all-to-all"
REPLICA, DATA, STAGE, CONTEXT, EXPERT, MODEL = AXES
FLOAT32 = 4  # bytes of a float32 or an int32
OUTER_BLOCK = 1024  # numbers that share a scale where replicas exchange int8


class Collective(NamedTuple):
    """`times` collectives over mesh `axes`, of `size` bytes each; among `devices` neighbours, or
    all along the axes if 0."""

    kind: str
    axes: tuple[str, ...]
    size: float
    times: float = 1
    devices: int = 0


def sent(kind: str, size: float, devices: int) -> float:
    """Bytes that a device sends by the ring algorithms: (n − 1)/n of the size, twice that for an
    all-reduce, all of it in a permute."""
    if kind == PERMUTE:
        return size
    return size * (devices - 1) / devices * (2 if kind == SUM else 1)


class Parameters(NamedTuple):
    """A parameter, or several alike.

    size:     elements on a device, unsharded over `data`
    scatter:  axes over which ZeRO leaves the sum of its gradient scattered
    sums:     axes over which the gradient is only summed
    split:    axes that split the parameter itself
    outer:    axes over which ZeRO scatters what replicas have in common
    cast:     products read it in the type that they compute in
    matrix:   no norm, bias or count
    """

    size: float
    scatter: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()
    cast: bool = True
    matrix: bool = True

    @property
    def over_data(self) -> bool:
        return DATA in self.scatter


@dataclasses.dataclass(frozen=True)
class StepCollectives:
    """The collectives of a model's step with a layout.

    item:               bytes of an activation's number
    read, reduced:      bytes of a parameter's number where an op gathers it, and of its gradient in
                        a sum
    updated:            bytes of a parameter's number that is gathered after the update
    context:            `parallel.context`
    explicit:           as our own runtime sends: W gathers its inputs again, latents and shared
                        heads travel, all devices of `model` send all rows of experts
    shares_vocabulary:  embedding and head are split over the stages
    gathers_in_ops, reduces_in_ops: of ZeRO-3's parameters, and of each microbatch's gradients
    documents:          tokens attend within their document alone
    loss_cuts:          parts of a microbatch whose logits exist at a time
    imbalance:          rows of the busiest device's experts, over the mean
    cpu:                as XLA's CPU backend lowers them: 16-bit numbers are summed in 32 bits, and
                        all room for rows of experts travels
    outer_int8:         replicas exchange int8 with scales
    """

    model: Transformer
    layout: Layout
    item: float
    read: float
    reduced: float
    updated: float
    context: str = "all_gather"
    explicit: bool = True
    shares_vocabulary: bool = False
    gathers_in_ops: bool = False
    reduces_in_ops: bool = False
    documents: bool = False
    loss_cuts: int = 1
    imbalance: float = 1.0
    cpu: bool = False
    outer_int8: bool = False

    def devices(self, axes: Iterable[str]) -> int:
        """Devices along axes together."""
        return math.prod(getattr(self.layout, axis) for axis in axes)

    @property
    def summed(self) -> float:
        """Bytes of an activation's number in a sum."""
        return FLOAT32 if self.cpu else self.item

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of a microbatch on one group of `model` devices."""
        return self.layout.microbatch * (self.model.sequence // self.layout.context)

    @functools.cached_property
    def activation(self) -> int:
        """Elements of a microbatch's activation, on one group of `model` devices."""
        return self.tokens * self.model.width

    # --------------------------------------------------------------------------- layers (models/)

    def layer(
        self, op: str, last: bool = False, again: bool = False, dense: bool = False
    ) -> Iterator[Collective]:
        """One layer's activations in F, R, B or W.

        last:  nothing reads the layer's output
        again: B and W follow R in one op, which still has what R has gathered
        dense: a layer without experts where the others have them
        """
        if self.layout.model > 1:
            inputs = [self.model.width]
            if self.model.mla and self.explicit:
                inputs = [self.model.query_rank or self.model.width, self.model.kv_rank]
            yield from self._tensor(op, inputs, again)
            yield from self._tensor(op, [self.model.width], again, not last)
            yield from self._heads(op, again) if self.explicit else ()
        if self.layout.context > 1:
            yield from self._context(op, again)
        if self.model.experts and not dense:
            yield from self._experts(op, last)

    def _tensor(
        self, op: str, inputs: list[int], again: bool, output: bool = True
    ) -> Iterator[Collective]:
        """A column-parallel product with inputs of these widths and the row-parallel one behind it
        (parallel/tensor.py). Without sequence parallelism two all-reduces send as many bytes."""
        width = self.model.width
        gathered = lambda width: Collective(GATHER, (MODEL,), self.tokens * width * self.item)
        scattered = lambda width: Collective(SCATTER, (MODEL,), self.tokens * width * self.summed)
        if op in "FR" or (op == "W" and self.explicit and not again):
            yield from map(gathered, inputs)
        if op == "B":
            yield gathered(width)
            yield from map(scattered, inputs)
        if op in "FR" and output:
            yield scattered(width)

    def _heads(self, op: str, again: bool) -> Iterator[Collective]:
        """What devices of `model` have each: latents' rotated key, shared key/value heads,
        vectors."""
        m, latents = self.model, 0
        if m.mla:
            latents = m.width * (m.query_rank + m.kv_rank + m.rope_dim)
            if op in "FR":
                yield Collective(GATHER, (MODEL,), self.tokens * m.rope_dim * self.item)
            if op == "B":  # the partitioner sums its gradient
                kind = SUM if self.cpu else SCATTER
                yield Collective(kind, (MODEL,), self.tokens * m.rope_dim * self.summed)
        else:
            yield from self._shared_heads(op, again)
        if op == "W":
            norms = m.norm_vectors * 2 * m.width + (m.query_rank + m.kv_rank if m.mla else 0)
            yield Collective(SUM, (MODEL,), norms * FLOAT32)
            yield Collective(SUM, (MODEL,), 2 * m.width * self.summed * m.biases)
            yield Collective(SUM, (MODEL,), latents * self.summed)

    def _shared_heads(self, op: str, again: bool) -> Iterator[Collective]:
        """Columns of key/value heads that several devices of `model` share
        (tensor.shared_columns)."""
        m, devices = self.model, self.layout.model // self.model.kv_heads
        if devices > 1 and not (again and op == "B"):
            kind, number = (SCATTER, self.summed) if op == "W" else (GATHER, self.item)
            for columns in (m.width, 1)[: 1 + m.biases]:
                yield Collective(kind, (MODEL,), columns * m.head_dim * number, 2, devices)

    def _context(self, op: str, again: bool) -> Iterator[Collective]:
        """Attention over a split sequence (parallel/context.py, parallel/ring.py)."""
        m, parts, again = self.model, self.layout.context, again and op == "B"
        selective = self.layout.remat == "selective"
        if op == "W" and (self.context != "ulysses" or not selective):
            return
        queries, heads = m.heads / self.layout.model, max(m.kv_heads / self.layout.model, 1.0)
        key, value = float(self.tokens * m.score_dim), float(self.tokens * m.output_dim)
        if self.context == "ring":
            rounds = parts - 1 - again
            for size in (key, value):
                yield Collective(PERMUTE, (CONTEXT,), heads * size * self.item, rounds)
                if op == "B":
                    yield Collective(PERMUTE, (CONTEXT,), heads * size * FLOAT32, parts)
            if self.documents:
                yield Collective(PERMUTE, (CONTEXT,), self.tokens * FLOAT32, rounds)
        elif self.context == "all_gather":
            for size in (key, value) if self.explicit else (key + value,):
                if not again:
                    yield Collective(GATHER, (CONTEXT,), parts * heads * size * self.item)
                if op == "B" and self.explicit:
                    yield Collective(SCATTER, (CONTEXT,), parts * heads * size * self.item)
        else:
            inputs, result = [queries * key, heads * key, heads * value], [queries * value]
            # A selective remat keeps nothing that was exchanged: queries, keys and values go again
            # in B, the results in W.
            exchanged = {"B": [*inputs, *result, *inputs * selective], "W": result}.get(
                op, [*inputs, *result]
            )
            for size in exchanged:
                yield Collective(EXCHANGE, (CONTEXT,), size * self.item)

    def _experts(self, op: str, last: bool) -> Iterator[Collective]:
        """Rows on their way to experts and back, with their weights (parallel/experts.py)."""
        m, choices, received = (
            self.model,
            float(self.tokens * self.model.experts_per_token),
            expert_rows(self.model, self.layout),
        )
        selective = self.layout.remat == "selective"
        size = m.width * self.item
        if not self.explicit:  # each device of `model` sends its share
            if op != "W":
                yield Collective(
                    EXCHANGE, (EXPERT,), choices * self.imbalance / self.layout.model * size, 2
                )
            return
        if op == "W" and not selective:
            return
        kind = EXCHANGE if self.cpu or m.capacity_factor else RAGGED
        travelling = choices * self.imbalance
        if m.capacity_factor:
            travelling = received
        elif self.cpu:
            devices = self.layout.expert
            travelling = devices * min(
                self.tokens * min(m.experts_per_token, m.experts // devices), received
            )
        # Selective remat does not keep what was sent: W sends it again.
        for each in [size] if op == "W" else [size, FLOAT32] if last else [size, FLOAT32, size]:
            yield Collective(kind, (EXPERT,), travelling * each)
        if op == "B":
            weighted = received if self.layout.expert > 1 or m.capacity_factor else choices
            yield Collective(SUM, (MODEL,), weighted * FLOAT32)

    def document_ids(self, op: str) -> Iterator[Collective]:
        """The documents of the whole sequence's tokens, once for all layers of an op."""
        if self.documents and op in "FRB" and self.context != "ring":
            yield Collective(GATHER, (CONTEXT,), self.tokens * self.layout.context * FLOAT32)

    # ------------------------------------------- embedding and head (runtime/embedding_and_head.py)

    def stage_sum(self) -> Collective:
        """One stage's activation brought to all stages, or the sum of all of them."""
        return Collective(
            SUM,
            (STAGE,) if self.shares_vocabulary else (),
            self.activation / self.layout.model * self.summed,
        )

    def lookup(self, table: Parameters) -> Iterator[Collective]:
        """Embedded tokens. The rows of a table that ZeRO-3 has scattered travel, and not the
        table."""
        if self.gathers_in_ops and table.over_data:
            yield from self._rows_of_table()
        yield Collective(SCATTER, (MODEL,), self.activation * self.summed)

    def lookup_gradient(self, table: Parameters, same_op: bool) -> Iterator[Collective]:
        """Gradients of embedded tokens. same_op: tokens that `lookup` has gathered are still
        there."""
        if self.reduces_in_ops and table.over_data:
            yield from self._rows_of_table(tokens=not (same_op and self.gathers_in_ops))
        yield Collective(GATHER, (MODEL,), self.activation * self.item)

    def _rows_of_table(self, tokens: bool = True) -> Iterator[Collective]:
        if tokens:
            yield Collective(GATHER, (DATA,), self.tokens * self.layout.data * FLOAT32)
        yield Collective(EXCHANGE, (DATA,), self.activation / self.layout.model * self.item)

    def loss(self) -> Iterator[Collective]:
        """The last norm, the product with the output matrix, and the softmax (runtime/loss.py)."""
        n, number = self.loss_cuts, self.tokens / self.loss_cuts * FLOAT32
        for axis in (MODEL, STAGE)[: 1 + self.shares_vocabulary]:
            yield Collective(SUM, (axis,), number, n)  # the largest logit
            # the softmax's sum and the target's logit
            yield Collective(SUM, (axis,), 2 * number, n)
        yield Collective(GATHER, (MODEL,), self.activation / n * self.item, n)
        yield Collective(SCATTER, (MODEL,), self.activation / n * self.summed, n)
        yield Collective(SUM, (MODEL,), self.model.norm_vectors * self.model.width * FLOAT32, n)

    def joining(self) -> Collective:
        """Gradients of what joins two streams in a module that predicts a further token."""
        m = self.model
        norms = 3 * m.norm_vectors * m.width
        return Collective(
            SUM, (MODEL,), norms * FLOAT32 + (2 * m.width + m.biases) * m.width * self.summed
        )

    # ------------------------------------------------------------- parameters (parallel/zero.py)

    def gathers(self, parameters: Iterable[Parameters]) -> Iterator[Collective]:
        """Parameters that an op gathers before it reads them."""
        if self.gathers_in_ops:
            yield from (self.gathered(p) for p in parameters if p.over_data)

    def gathered(self, p: Parameters) -> Collective:
        """A parameter of ZeRO-3, brought together on each data shard."""
        return Collective(GATHER, (DATA,), p.size * (self.read if p.cast else FLOAT32))

    def reductions_in_op(self, parameters: Iterable[Parameters]) -> Iterator[Collective]:
        """A microbatch's gradients."""
        if self.reduces_in_ops:
            yield from (
                Collective(SCATTER, (DATA,), p.size * self.reduced)
                for p in parameters
                if p.over_data
            )

    def reductions(self, p: Parameters) -> Iterator[Collective]:
        """A gradient after the last microbatch: what the ops have left to do."""
        in_ops = self.reduces_in_ops and p.over_data
        size = p.size * self.reduced / (self.layout.data if in_ops else 1)
        scatter = tuple(
            a for a in p.scatter if getattr(self.layout, a) > 1 and not (in_ops and a == DATA)
        )
        if scatter:
            yield Collective(SCATTER, scatter, size)
            size /= self.devices(scatter)
        sums = tuple(a for a in p.sums if getattr(self.layout, a) > 1)
        inside = tuple(a for a in sums if a != REPLICA)
        # inside a replica first; a device's share then crosses (parallel/replicas.py)
        if REPLICA in sums and inside:
            yield Collective(SCATTER, inside, size)
            yield Collective(SUM, (REPLICA,), size / self.devices(inside))
            yield Collective(GATHER, inside, size)
        elif sums:
            yield Collective(SUM, sums, size)

    def after_the_update(self, p: Parameters) -> Iterator[Collective]:
        """A parameter whose shards are updated where their optimizer state lies
        (training/step.py)."""
        stays = {DATA} if self.layout.zero == 3 else set()
        if axes := tuple(a for a in p.scatter if a not in stays):
            yield Collective(
                GATHER,
                axes,
                p.size / self.devices(a for a in p.scatter if a in stays) * self.updated,
            )

    # --------------------------------------------- independent replicas (parallel/replicas.py)

    def outer_exchange(self, parameters: Iterable[Parameters]) -> Iterator[Collective]:
        """`replicas.mean_across`: each device exchanges its shard over `replica`, then all-gathers
        inside the replica; and the parameters made of the result (training/diloco.py)."""
        replicas, int8, scales = self.layout.replica, 0, 0
        for p in (p for p in parameters if p.size):
            stays = {DATA} & set(p.outer) if self.layout.zero == 3 else set()
            part = math.ceil(p.size / self.devices(p.outer))
            yield Collective(
                GATHER,
                tuple(a for a in p.outer if a not in stays),
                p.size / self.devices(stays) * FLOAT32,
            )
            copies = tuple(a for a in AXES if a != REPLICA and a not in (*p.split, *p.outer))
            share = -(-part // self.devices(copies))
            block = min(OUTER_BLOCK, -(-share // replicas))
            blocks = -(-share // (replicas * block)) * replicas
            int8, scales = int8 + blocks * block, scales + blocks
            if not self.outer_int8:
                yield Collective(SUM, (REPLICA,), share * FLOAT32)
            yield Collective(GATHER, copies, part * FLOAT32)
        if self.outer_int8:
            for kind in (EXCHANGE, GATHER):
                yield Collective(kind, (REPLICA,), int8)
                yield Collective(kind, (REPLICA,), scales * FLOAT32)


# --- how long they take -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Links:
    """The links between the devices of a layout."""

    layout: Layout
    hardware: Hardware

    def seconds(self, collectives: Iterable[Collective], one_link: float = 0.0) -> dict[str, float]:
        """Seconds by mesh axis. Several axes together count for the outermost.

        one_link: the part of one adapter's bandwidth that a ring between islands reaches; 0: its
                  devices in an island use all their adapters together
        """
        by_axis: dict[str, float] = {}
        for kind, axes, size, times, devices in collectives:
            route = self._route(axes)
            if route.devices > 1 and size and times:
                each = self._each(route, kind, size, devices or route.devices, one_link)
                by_axis[route.axis] = by_axis.get(route.axis, 0.0) + times * each
        return by_axis

    def tier(self, axes: tuple[str, ...]) -> Tier:
        """The slowest tier that a ring of these axes crosses. One that does not fit an island, or
        does not divide it, crosses to the next tier on some device, and the whole ring waits for
        that one."""
        return self._route(axes).tier

    def _each(self, route: "_Route", kind: str, size: float, count: int, one_link: float) -> float:
        """Seconds of one collective among `count` devices.

        A permute between islands goes through one adapter. In an all-to-all a device sends to
        neighbours in its island over the links inside, and at the same time to the others over its
        adapter. A ring between islands is bound by the slower links. Simulated devices share one
        memory, in which a sum takes as long as a message.
        """
        tier, inside, latency = route.tier, self.hardware.tiers[0], 1e-6 * route.tier.latency_us
        if kind == PERMUTE:
            return size / tier.bytes_per_s + latency
        passes = 2 if kind == SUM else 1
        if self.hardware.alone > 1:
            return passes * (size / tier.bytes_per_s + latency) / 2
        latency *= 2 * math.log2(count)
        if kind in (EXCHANGE, RAGGED):
            return (
                max(
                    size * (route.near - 1) / inside.bytes_per_s,
                    size * (count - route.near) / tier.bytes_per_s,
                )
                / count
                + latency
            )
        bytes_per_s = tier.bytes_per_s
        if tier is not inside:
            bytes_per_s = (
                bytes_per_s * one_link
                if one_link
                else min(bytes_per_s * route.near, inside.bytes_per_s)
            )
        return passes * (size * (count - 1) / count / bytes_per_s + latency)

    def _route(self, axes: tuple[str, ...]) -> "_Route":
        if axes in self._routes:
            return self._routes[axes]
        layout, tiers = self.layout, self.hardware.tiers
        tier, near, devices, outermost = 0, 1, 1, ""
        for axis in axes:
            count, apart = layout.neighbours(axis)
            if count == 1:
                continue
            span = count * apart
            fits = (
                not t.devices or layout.devices <= t.devices or _sharing(t, span) == span
                for t in tiers
            )
            tier = max(tier, next((n for n, fit in enumerate(fits) if fit), len(tiers) - 1))
            near, devices = near * max(1, _sharing(tiers[0], span) // apart), devices * count
            outermost = outermost or axis
        self._routes[axes] = _Route(outermost, devices, tiers[tier], near if tier else devices)
        return self._routes[axes]

    @functools.cached_property
    def _routes(self) -> dict[tuple[str, ...], "_Route"]:
        return {}


class _Route(NamedTuple):
    """What collectives over some axes go over.

    axis:    the outermost of them
    devices: along them together
    tier:    the links by which they are bound
    near:    devices of a ring that share an island of the first tier
    """

    axis: str
    devices: int
    tier: Tier
    near: int


def _sharing(tier: Tier, span: int) -> int:
    """The least number of `span` consecutive devices that share an island, over all starting
    positions. A job may take a power of two of an island with another number: 64 of 72."""
    return (
        max(math.gcd(span, tier.devices), math.gcd(span, 2 ** int(math.log2(tier.devices))))
        if tier.devices
        else span
    )
