"""Seconds outside of the microbatches' ops: collectives of parameters and their gradients, and the
optimizer."""

import functools

from jaxtrain.config.optimizers import OPTIMIZERS
from jaxtrain.planner.step.ends_time import EndsTime
from jaxtrain.planner.step.layer_collectives import FLOAT32
from jaxtrain.planner.step.layout import AXES
from jaxtrain.planner.step.links import DATA, Collective
from jaxtrain.planner.step.parameters import DeviceState
from jaxtrain.planner.step.step_part import StepPart
from jaxtrain.planner.step.time_breakdown import (
    DISK,
    FIXED,
    HOST,
    OPTIMIZER,
    TimeBreakdown,
    overlapped,
)


class UpdateTime(StepPart):
    """Seconds of the update and of the collectives around it."""

    reads = (
        *(*AXES, "microbatch", "microbatches", "zero", "shards_ends", "remat", "repeats"),
        *("layers_per_op", "offload", "disk"),
    )

    @functools.cached_property
    def device(self) -> DeviceState:
        """What a device holds."""
        return self.part(DeviceState)

    def outside_microbatches(
        self, busy: TimeBreakdown, forward: float, backward: float
    ) -> TimeBreakdown:
        """Collectives of parameters and their gradients (ZeRO's in each microbatch, sums after the
        last one, what the update gathers, DiLoCo's), the optimizer, and the framework's fixed time.

        busy: a stage with its microbatches; forward, backward: seconds of one microbatch
        """
        layout, framework, c = self.layout, self.framework, self.collectives
        groups, m = self.device.groups, layout.microbatches
        has_r = framework.slots and layout.stage > 1 and layout.recomputation.mode == "full"
        gathers = c.gathers(groups[:2])
        in_r = self.recomputed_fraction * has_r
        microbatch = gathers * 2 + [g._replace(times=g.times * in_r) for g in gathers]
        microbatch += c.reductions_in_op(groups[:2])
        if not self.device.axes_of_ends:  # else in the ops of embedding and head
            microbatch += c.reductions_in_op([groups.ends])
            if framework.slots:  # of the input's table, tokens' vectors are sent
                microbatch += c.gathers([groups.ends])
        one_link = framework.one_link if layout.zero == 3 else 0.0
        over_data = lambda collectives: self.links.seconds(collectives, one_link).get(DATA, 0.0)
        ends = self.part(EndsTime).seconds(c.shares_vocabulary).get(DATA, 0.0)
        zero, overlap = m * (over_data(microbatch) + ends), (framework.data_overlap, backward * m)
        if layout.zero == 3 and framework.gathers_once:
            zero += over_data(c.gathered(p) for p in groups if p.shard and not p.as_zero3)
        if layout.zero == 3 and self.shards > 1:
            overlap = framework.gather_overlap, busy.seconds
        parts = overlapped({DATA: zero}, {DATA: overlap})
        after_backward, after_update = self._around_the_update()
        for after, work in (
            (after_backward, backward),
            (after_update, forward if layout.zero else backward),
        ):
            seconds = self.links.seconds(after)
            parts += overlapped(seconds, {DATA: (framework.data_overlap, work)})
        if framework.inner_steps:
            outer = TimeBreakdown(self.links.seconds(c.outer_exchange(groups)))
            parts += outer * (1 / framework.inner_steps)
        return parts + self.update() + TimeBreakdown({FIXED: framework.fixed_s})

    def _around_the_update(self) -> tuple[list[Collective], list[Collective]]:
        """The sums of gradients before an update, and the all-gathers of what it has changed."""
        c, groups = self.collectives, self.device.groups
        reductions = [collective for p in groups for collective in c.reductions(p)]
        return reductions, [c.after_the_update(p) for p in groups]

    def update_op(self) -> TimeBreakdown:
        """The op that updates a stage's parameters in a table of several steps: sums of gradients,
        the optimizer, all-gathers."""
        reductions, gathers = self._around_the_update()
        return self.update() + TimeBreakdown(self.links.seconds([*reductions, *gathers]))

    def update(self) -> TimeBreakdown:
        """The optimizer's passes over its state, which comes from the host's memory or the disk and
        goes back where it is offloaded. A disk's stream goes on while the devices update; only what
        is longer counts. It begins when all gradients are there, since they are clipped by their
        norm, so no other part of the step hides it but for the first buffers."""
        layout, framework, held = self.layout, self.framework, self.device.parameters()
        parameters = held.layers + held.ends / self.device.parts_of_ends(layout.zero)
        if self.device.axes_of_ends:
            parameters = self.device.sharded(held, self.shards)
        elif layout.zero:
            parameters /= self.shards
        # the parameter, or its master, is read and written; a copy of a master is written
        value = framework.master_bytes or framework.weight_bytes
        copy = framework.weight_bytes * (framework.slots and framework.master_bytes > 0)
        passes = FLOAT32 * (OPTIMIZERS[self.optimizer.name].passes - 2) + 2 * value + copy
        state = 2 * framework.moment_bytes * self.device.optimizer_state()
        seconds = {OPTIMIZER: (passes * parameters + state) / self.hardware.streaming}
        if layout.offloads("optimizer"):
            moved = 2 * framework.master_bytes * parameters + state
            if layout.disk:
                streamed = moved / self.hardware.disk_bytes_per_s
                seconds[DISK] = max(0.0, streamed - seconds[OPTIMIZER])
            else:
                seconds[HOST] = moved / self.hardware.host_bytes_per_s
        return TimeBreakdown(seconds)
