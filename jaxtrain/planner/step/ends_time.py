"""Seconds of what stands before and after the layers: embedding, dense layers, head, loss and
multi-token prediction modules."""

import dataclasses
import functools

from jaxtrain.planner.step.collectives import StepCollectives
from jaxtrain.planner.step.layer_time import LayerWork, MeanLayer
from jaxtrain.planner.step.layout import AXES
from jaxtrain.planner.step.links import DATA, Collective
from jaxtrain.planner.step.parameters import DeviceState
from jaxtrain.planner.step.step_part import StepPart, once, part
from jaxtrain.planner.step.time_breakdown import MATMULS, MEMORY, TimeBreakdown, overlapped


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

    def head(self, layer: MeanLayer) -> TimeBreakdown:
        """Head, loss, embedding and multi-token prediction modules of one microbatch, forward and
        backward, on the devices of one stage. layer: the modules'"""
        width, modules, logits = self.model.width, self.model.mtp_depth, self._logits
        table, sharded = width * self.model.vocab_size / self.layout.model, self._sharded_at_end
        if not modules:
            return logits + sharded(table, 1, 1)
        # A prediction module joins two streams of the width and has a layer.
        held, product = self.layer_parameters() + 2 * width**2, self.work.product
        joining = sum(product(self.tokens / self.layout.model, width, 2 * width))
        ops = [op for name, op in layer.ops(False).items() if name != "R"]
        module = sum(ops, TimeBreakdown({MATMULS: joining}))
        # The sum of the matrix's gradient is beside the modules' backward, what the modules gather
        # beside the head; the rest is waited for.
        covered = sharded(table, 0, 1) + sharded(held, 1, 0)
        waits = sharded(table, 1, 0) + sharded(held, 0, 1)
        waits += self._overlapped_with(module, covered)
        return logits * (1 + modules) + module * modules + waits

    def dense_layers(self, layer: MeanLayer) -> TimeBreakdown:
        """The layers before the first unit, of one microbatch: forward with the embedding, and
        once more with its gradient."""
        layers = self.model.dense_layers
        if not layers:
            return TimeBreakdown()
        ops = layer.ops(True)
        each = ops["F"] * 2 + ops["B"] + ops["W"]
        sharded = self._sharded_at_end(self.layer_parameters(dense=True), 2, 1)
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
        """The collectives of a microbatch's embedding, head and loss, of those of a step."""
        collectives, one_stage = [c.stage_sum(4)], self.layout.stage == 1
        collectives += c.loss() * (1 + self.model.mtp_depth)
        if c.shares_vocabulary or one_stage:
            table = self.device.groups.table
            collectives += c.lookup(table) + c.lookup_gradient(table, same_op=one_stage)
        return collectives
