"""Seconds outside of the microbatches' ops: collectives of parameters and their gradients, and the
optimizer."""

import functools
from collections.abc import Iterable

from jaxtrain.config.optimizers import OPTIMIZERS
from jaxtrain.planner.step.ends_time import EndsTime
from jaxtrain.planner.step.layer_collectives import FLOAT32
from jaxtrain.planner.step.links import DATA, Collective
from jaxtrain.planner.step.parameters import DeviceState
from jaxtrain.planner.step.step_part import StepPart, once, part
from jaxtrain.planner.step.time_breakdown import DISK, HOST, OPTIMIZER, TimeBreakdown, overlapped


class UpdateTime(StepPart):
    """Seconds of the update and of the collectives around it."""

    reads = (*EndsTime.reads, "offload", "disk")
    device = part(DeviceState)

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
            parts += overlapped(seconds, {DATA: (rates.data_overlap, work)})
        if self.settings.inner_steps:
            exchange = self.collectives.outer_exchange(self.device.groups)
            parts += TimeBreakdown(self.links.seconds(exchange)) * (1 / self.settings.inner_steps)
        return parts + self.update

    @once
    def _over_data(self, recomputed: float) -> float:
        """Seconds of ZeRO's collectives over `data` in all microbatches, and of what is gathered
        once."""
        c, groups = self.collectives, self.device.groups
        gathers = c.gathers(groups[:2])
        in_r = recomputed * (self.layout.stage > 1)
        collectives = gathers * 2 + [g._replace(times=g.times * in_r) for g in gathers]
        collectives += c.reductions_in_op(groups[:2])
        if not groups.ends.as_zero3:  # else in the ops of embedding and head
            collectives += c.reductions_in_op([groups.ends])
            collectives += c.gathers([groups.ends])  # of the input's table, vectors are sent
        ends = self.part(EndsTime).seconds(c.shares_vocabulary).get(DATA, 0.0)
        seconds = self.layout.microbatches * (self.seconds_of_zero(collectives) + ends)
        if self.layout.zero < 3 or not self.settings.gathers_once:
            return seconds
        return seconds + self.seconds_of_zero(
            c.gathered(p) for p in groups if p.shard and not p.as_zero3
        )

    def seconds_of_zero(self, collectives: Iterable[Collective]) -> float:
        """Seconds over `data` of collectives of ZeRO in ops."""
        return self.links.seconds(collectives).get(DATA, 0.0)

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
        return sum(map(TimeBreakdown, self._around), self.update)

    @functools.cached_property
    def update(self) -> TimeBreakdown:
        """The optimizer's passes over its state, which comes from the host's memory or the disk and
        goes back where it is offloaded. A disk's stream goes on while the devices update; only what
        is longer counts. It begins when all gradients are there, since they are clipped by their
        norm, so no other part of the step hides it but for the first buffers."""
        layout, settings = self.layout, self.settings
        optimizer, parameters = settings.optimizer, self.device.updated()
        # the parameter, or its master, is read and written; a copy of a master is written
        value = 2 * (settings.master_bytes or settings.weight_bytes) + settings.copied_bytes
        passes = FLOAT32 * (OPTIMIZERS[optimizer.name].passes - 2) + value
        state = 2 * settings.moment_bytes * self.device.numbers(optimizer)
        seconds = {OPTIMIZER: (passes * parameters + state) / self.hardware.streaming}
        if layout.offloads("optimizer"):
            moved = 2 * settings.master_bytes * parameters + state
            if layout.disk:
                streamed = moved / self.hardware.disk_bytes_per_s
                seconds[DISK] = max(0.0, streamed - seconds[OPTIMIZER])
            else:
                seconds[HOST] = moved / self.hardware.host_bytes_per_s
        return TimeBreakdown(seconds)
