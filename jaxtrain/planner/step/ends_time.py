"""Seconds of what stands before and after the layers: embedding, dense layers, head, loss and
multi-token prediction modules."""

import dataclasses
import functools

from jaxtrain.planner.step.layer_time import LayerTime, LayerWork
from jaxtrain.planner.step.layout import AXES
from jaxtrain.planner.step.links import DATA
from jaxtrain.planner.step.parameters import DeviceState
from jaxtrain.planner.step.step_part import StepPart, once
from jaxtrain.planner.step.time_breakdown import MATMULS, MEMORY, TimeBreakdown, overlapped


class EndsTime(StepPart):
    """Seconds of both ends of a microbatch."""

    reads = (*AXES, "microbatch", "microbatches", "zero", "shards_ends")

    @functools.cached_property
    def device(self) -> DeviceState:
        """What a device holds."""
        return self.part(DeviceState)

    def head(self, layer: LayerTime) -> TimeBreakdown:
        """Head, loss, embedding and multi-token prediction modules of one microbatch, forward and
        backward, on the devices of one stage. layer: the modules'"""
        width, columns = self.model.width, self.model.vocab_size / self.layout.model
        passes = 4 * self.framework.logit_passes * columns + 3 * self.item * width
        product = self.part(LayerWork).product
        products = sum(product(self.tokens, columns, width))
        memory = self.tokens * passes / self.hardware.streaming
        logits = TimeBreakdown({MATMULS: products, MEMORY: memory})
        modules, held = self.model.mtp_depth, self.layer_parameters() + 2 * width**2
        table = self._sharded_at_end(width * columns, 1, 1)
        if not modules:
            return logits + table
        # A prediction module joins two streams of the width and has a layer.
        joining = sum(
            self.part(LayerWork).product(self.tokens / self.layout.model, width, 2 * width)
        )
        ops = [op for name, op in layer.ops().items() if name != "R"]
        module = sum(ops, TimeBreakdown({MATMULS: joining}))
        # The sum of the matrix's gradient is beside the modules' backward, what the modules gather
        # beside the head; the rest is waited for.
        covered = self._sharded_at_end(width * columns, 0, 1) + self._sharded_at_end(held, 1, 0)
        waits = self._sharded_at_end(width * columns, 1, 0) + self._sharded_at_end(held, 0, 1)
        sharded = waits + self._overlapped_with(module, covered)
        return logits * (1 + modules) + module * modules + sharded

    def dense_layers(self, of: LayerTime) -> TimeBreakdown:
        """The layers before the first unit, of one microbatch: forward with the embedding, and
        once more with its gradient."""
        if not self.model.dense_layers:
            return TimeBreakdown()
        if not self.framework.slots:  # others have them among their layers
            return sum(of.mean(True).values(), TimeBreakdown()) * (self.model.dense_layers)
        ops = of.ops(True)
        layer, layers = ops["F"] * 2 + ops["B"] + ops["W"], self.model.dense_layers
        sharded = self._sharded_at_end(self.layer_parameters(dense=True), 2, 1)
        # a layer's are beside the products of the one before or after, where there is one
        return layer * layers + sharded + self._overlapped_with(layer, sharded) * (layers - 1)

    def _sharded_at_end(self, size: float, gathers: int, sums: int) -> TimeBreakdown:
        """Seconds in which an op of embedding or head gathers so many parameters, so many times,
        and scatters the sums of their gradients, where these are sharded as in ZeRO-3."""
        if not self.device.axes_of_ends:
            return TimeBreakdown()
        c, p = self.collectives, self.device.groups.ends._replace(size=size)
        return TimeBreakdown(
            self.links.seconds([*c.gathers([p] * gathers), *c.reductions_in_op([p] * sums)])
        )

    def _overlapped_with(self, work: TimeBreakdown, messages: TimeBreakdown) -> TimeBreakdown:
        """Messages of an op of embedding or head that have this work beside them: on GPUs, as for
        overlapped cells; on TPUs they are synchronous."""
        part = float(self.framework.cell_overlap > 0), work.seconds
        return overlapped(messages.exposed, dict.fromkeys(messages.exposed, part))

    def collectives_of_ends(self, shared: bool) -> TimeBreakdown:
        """Collectives of embedding, head and loss of one microbatch over `model` and `stage`.

        shared: all stages share both ends; otherwise those of the stage that has the head
        """
        seconds = self.seconds(shared and self.layout.stage > 1)
        return TimeBreakdown({axis: s for axis, s in seconds.items() if axis != DATA})

    @once
    def seconds(self, shared: bool) -> dict[str, float]:
        """Seconds by axis of the collectives of a microbatch's embedding, head and loss. shared: by
        all stages."""
        c, one_stage = self.collectives, self.layout.stage == 1
        if c.shares_vocabulary != shared:
            c = dataclasses.replace(c, shares_vocabulary=shared)
        collectives = [c.stage_sum(4)]
        if self.framework.slots:
            collectives += c.loss() * (1 + self.model.mtp_depth)
        if self.framework.slots and (shared or one_stage):
            table = self.device.groups.table
            collectives += c.lookup(table) + c.lookup_gradient(table, same_op=one_stage)
        return self.links.seconds(collectives)
