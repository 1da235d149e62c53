"""Seconds of a step outside of its layers: embedding, dense layers, head, loss and multi-token
prediction modules of a microbatch; collectives of parameters and their gradients, and the
optimizer."""

import dataclasses
import functools
import math
from collections.abc import Iterable

from jaxtrain.config.optimizers import record_of
from jaxtrain.config.sizes import SHARD_AXES
from jaxtrain.planner.layer.collective_time import StepCollectives
from jaxtrain.planner.layer.layer import newton_schulz
from jaxtrain.planner.layer.layout import AXES
from jaxtrain.planner.layer.links import DATA, MODEL, Collective
from jaxtrain.planner.layer.settings import FLOAT32
from jaxtrain.planner.step.layer_time import LayerWork, MeanLayer
from jaxtrain.planner.step.parameters import AVERAGE, DeviceState
from jaxtrain.planner.step.step_part import StepPart, once, part
from jaxtrain.planner.step.time_breakdown import (
    DISK,
    HOST,
    MATMULS,
    MEMORY,
    OPTIMIZER,
    TimeBreakdown,
    overlapped,
)

# Fraction of the bytes of Muon's exchanges that have another round's iterations beside them, as XLA
# compiles Llama 3 8B for 8 H100s: all but those before the first round and after the last.
DEALT_OVERLAP = 0.5


class EndsTime(StepPart):
    """Seconds of both ends of a microbatch."""

    reads = (*AXES, "microbatch", "microbatches", "zero", "shards_ends")
    device, work = part(DeviceState), part(LayerWork)

    @functools.cached_property
    def _logits(self) -> TimeBreakdown:
        """The product with the output matrix, and the loss."""
        width, columns = self.model.width, self.model.vocab_size / self.layout.model
        passes = 4 * self.settings.rates.logit_passes * columns + 3 * self.item * width
        products = sum(self.work.product(self.tokens, columns, width))
        memory = self.tokens * passes / self.hardware.streaming
        return TimeBreakdown({MATMULS: products, MEMORY: memory})

    @once
    def head(self, layer: MeanLayer) -> TimeBreakdown:
        """Head, loss, embedding and multi-token prediction modules of one microbatch, forward and
        backward, on the devices of one stage. layer: the modules'"""
        width, modules, logits = self.model.width, self.model.mtp_depth, self._logits
        table, sharded = width * self.model.vocab_size / self.layout.model, self._sharded_at_end
        if not modules:
            return logits + sharded(table, 1, 1)
        # A prediction module joins two streams of the width and has a layer.
        last, product = self.model.stack[-1], self.work.product
        held = self.of_kind(last).layer_parameters() + 2 * width**2
        joining = sum(product(self.tokens / self.layout.model, width, 2 * width))
        # They save what they have in the device's memory: nothing of them is copied to the host's.
        layer = layer.of_kind(last)
        on_device = layer.on(dataclasses.replace(layer.layout, offload="none", save=()))
        ops = [op for name, op in on_device.ops(False).items() if name != "R"]
        module = sum(ops, TimeBreakdown({MATMULS: joining}))
        # The sum of the matrix's gradient is beside the modules' backward, what the modules gather
        # beside the head; the rest is waited for.
        covered = sharded(table, 0, 1) + sharded(held, 1, 0)
        waits = sharded(table, 1, 0) + sharded(held, 0, 1)
        waits += self._overlapped_with(module, covered)
        return logits * (1 + modules) + module * modules + waits

    @once
    def dense_layers(self, layer: MeanLayer) -> TimeBreakdown:
        """The layers before the first unit, of one microbatch: forward with the embedding, and
        once more with its gradient. Other frameworks have them among all layers."""
        layers = self.model.dense_layers
        if not layers:
            return TimeBreakdown()
        if not self.settings.ours:
            return sum(layer.mean(True).values(), TimeBreakdown()) * layers
        ops = layer.ops(True)
        each = ops["F"] * 2 + ops["B"] + ops["W"]
        sharded = self._sharded_at_end(self.layer_parameters(True), 2, 1)
        # a layer's are beside the products of the one before or after, where there is one
        return each * layers + sharded + self._overlapped_with(each, sharded) * (layers - 1)

    @once
    def _sharded_at_end(self, size: float, gathers: int, sums: int) -> TimeBreakdown:
        """Seconds in which an op of embedding or head gathers so many parameters, so many times,
        and scatters the sums of their gradients, where these are sharded as in ZeRO-3."""
        p = self.device.groups.ends._replace(size=size)
        if not p.as_zero3:
            return TimeBreakdown()
        c = self.collectives
        collectives = [*c.gathers([p] * gathers), *c.reductions_in_op([p] * sums)]
        return TimeBreakdown(self.links.seconds(collectives))

    def _overlapped_with(self, work: TimeBreakdown, messages: TimeBreakdown) -> TimeBreakdown:
        """Messages of an op of embedding or head that have this work beside them: on GPUs, as for
        overlapped cells; on TPUs they are synchronous."""
        part = float(self.settings.rates.cell_overlap > 0), work.seconds
        return overlapped(messages.exposed, dict.fromkeys(messages.exposed, part))

    @once
    def communication(self, shared: bool) -> TimeBreakdown:
        """Collectives of embedding, head and loss of one microbatch over `model` and `stage`.

        shared: all stages share both ends; otherwise those of the stage that has the head
        """
        seconds = self.seconds(shared and self.layout.stage > 1)
        return TimeBreakdown({axis: s for axis, s in seconds.items() if axis != DATA})

    @once
    def seconds(self, shared: bool) -> dict[str, float]:
        """Seconds by axis of the collectives of a microbatch's embedding, head and loss. shared: by
        all stages"""
        c = dataclasses.replace(self.collectives, shares_vocabulary=shared)
        return self.links.seconds(self.collectives_of_ends(c))

    def collectives_of_ends(self, c: StepCollectives) -> list[Collective]:
        """The collectives of a microbatch's embedding, head and loss, of those of a step; of other
        frameworks the sums over stages alone."""
        collectives, one_stage = [c.stage_sum(4)], self.layout.stage == 1
        if not self.settings.ours:
            return collectives
        collectives += c.loss() * (1 + self.model.mtp_depth)
        if c.shares_vocabulary or one_stage:
            table = self.device.groups.table
            collectives += c.lookup(table) + c.lookup_gradient(table, same_op=one_stage)
        return collectives


class UpdateTime(StepPart):
    """Seconds of the update and of the collectives around it."""

    reads = (*EndsTime.reads, "offload", "disk")
    device, work = part(DeviceState), part(LayerWork)

    def seconds(
        self, busy: TimeBreakdown, forward: float, backward: float, recomputed: float
    ) -> TimeBreakdown:
        """Collectives of parameters and their gradients (ZeRO's in each microbatch, sums after the
        last one, what the update gathers, DiLoCo's), and the optimizer.

        busy: a stage with its microbatches; forward, backward: seconds of one microbatch;
        recomputed: the fraction of the layers that R recomputes
        """
        layout, rates = self.layout, self.settings.rates
        overlap = rates.data_overlap, backward * layout.microbatches
        if layout.zero == 3 and self.shards > 1:
            overlap = rates.gather_overlap, busy.seconds
        parts = overlapped({DATA: self._over_data(recomputed)}, {DATA: overlap})
        after_update = forward if layout.zero else backward
        for seconds, work in zip(self._around, (backward, after_update), strict=True):
            parts += overlapped(seconds, dict.fromkeys(SHARD_AXES, (rates.data_overlap, work)))
        if self.settings.inner_steps:
            exchange = self.collectives.outer_exchange(self.device.groups)
            parts += TimeBreakdown(self.links.seconds(exchange)) * (1 / self.settings.inner_steps)
        return parts + self.optimizer

    @once
    def _over_data(self, recomputed: float) -> float:
        """Seconds of ZeRO's collectives over `data` in all microbatches, and of what is gathered
        once."""
        c, groups = self.collectives, self.device.groups
        gathers = c.gathers(groups[:2])
        # R is part of B on one stage, and other frameworks keep for B what R has gathered
        in_r = recomputed * (self.layout.stage > 1 and self.settings.ours)
        collectives = gathers * 2 + [g._replace(times=g.times * in_r) for g in gathers]
        collectives += c.reductions_in_op(groups[:2])
        if not groups.ends.as_zero3:  # else in the ops of embedding and head
            collectives += c.reductions_in_op([groups.ends])
            collectives += c.gathers([groups.ends])  # of the input's table, vectors are sent
        ends = self.part(EndsTime).seconds(c.shares_vocabulary).get(DATA, 0.0)
        seconds = self.layout.microbatches * (self.seconds_of_zero(collectives) + ends)
        if self.layout.zero < 3 or self.settings.parallel.gather == "layer":
            return seconds
        return seconds + self.seconds_of_zero(
            c.gathered(p) for p in groups if p.shard and not p.as_zero3
        )

    def seconds_of_zero(self, collectives: Iterable[Collective]) -> float:
        """Seconds of collectives of ZeRO in ops."""
        one_link = self.settings.one_link * (self.layout.zero == 3)
        return sum(self.links.seconds(collectives, one_link).values())

    @functools.cached_property
    def _around(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds by axis of the sums of gradients before an update, and of the all-gathers of what
        it has changed."""
        c, groups = self.collectives, self.device.groups
        sums = [collective for p in groups for collective in c.reductions(p)]
        return self.links.seconds(sums), self.links.seconds(map(c.after_the_update, groups))

    @functools.cached_property
    def op(self) -> TimeBreakdown:
        """The op that updates a stage's parameters in a table of several steps: sums of gradients,
        the optimizer, all-gathers."""
        return sum(map(TimeBreakdown, self._around), self.optimizer)

    @functools.cached_property
    def optimizer(self) -> TimeBreakdown:
        """The optimizer's passes over its state, which comes from the host's memory or the disk and
        goes back where it is offloaded. A disk's stream goes on while the devices update; only what
        is longer counts. It begins when all gradients are there, since they are clipped by their
        norm, so no other part of the step hides it but for the first buffers."""
        layout, settings = self.layout, self.settings
        parameters = self.device.updated()
        # the parameter, or its master, is read and written; a copy of a master is written
        value = 2 * (settings.master_bytes or settings.weight_bytes) + settings.copied_bytes
        passes = FLOAT32 * (record_of(settings.optimizer.name).passes - 2) + value
        state = 2 * settings.moment_bytes * self.device.numbers(settings.optimizer)
        if settings.ours and settings.optimizer.ema_decay:
            state += 2 * FLOAT32 * self.device.numbers(AVERAGE)
        seconds = {OPTIMIZER: (passes * parameters + state) / self.hardware.streaming}
        if layout.offloads("optimizer"):
            moved = 2 * settings.master_bytes * parameters + state
            if layout.disk:
                streamed = moved / self.hardware.disk_bytes_per_s
                seconds[DISK] = max(0.0, streamed - seconds[OPTIMIZER])
            else:
                seconds[HOST] = moved / self.hardware.host_bytes_per_s
        return TimeBreakdown(seconds) + self._orthogonalized

    @functools.cached_property
    def _orthogonalized(self) -> TimeBreakdown:
        """Muon's iterations of the matrices that a device is dealt, and the exchange of these."""
        if not (counts := self.device.matrices):
            return TimeBreakdown()
        product, iterations = self.work.product, self.settings.optimizer.muon_iterations
        devices = math.prod(getattr(self.layout, axis) for axis in (*SHARD_AXES, MODEL))
        seconds = {
            size: iterations * sum(product(*shape)[0] for shape in newton_schulz(*size))
            for size in counts
        }
        mean = sum(n * seconds[size] for size, n in counts.items()) / devices
        largest = max(counts, key=seconds.__getitem__)
        busiest = max(mean, math.ceil(counts[largest] / devices) * seconds[largest])
        sent = [c for p in self.device.groups for c in self.collectives.deals(p)]
        exchange = self.links.seconds(sent)
        covered = dict.fromkeys(exchange, (DEALT_OVERLAP, busiest))
        return overlapped(exchange, covered) + TimeBreakdown({OPTIMIZER: busiest})

    def newton_schulz_flops(self) -> float:
        """Operations of the iterations on the devices of a stage and replica."""
        of_one = lambda size: 2.0 * sum(map(math.prod, newton_schulz(*size)))
        iterations = self.settings.optimizer.muon_iterations
        return iterations * sum(n * of_one(size) for size, n in self.device.matrices.items())
