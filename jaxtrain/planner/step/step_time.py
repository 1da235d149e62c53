"""A step's time by part in closed form, which is fast enough to compare thousands of layouts.

    layer   products by their shapes, attention by its kernel, passes over memory, collectives of
            `model`, `context` and `expert`
    stage   F, R, B and W of its layers for each microbatch, and the head on the stage that has it
    step    microbatches one after the other, the bubble of the schedule, messages, sums of
            gradients, the optimizer

The exposed parts add up to the step's time; communication that is overlapped with other work is
listed separately.
planner/search/predict.py then times the schedule's own table.
"""

import functools
import itertools
import math
import operator

from jaxtrain.config.groups.layer_kinds import forms_of_layers
from jaxtrain.config.sizes import SELECTIVE
from jaxtrain.planner.layer.links import PERMUTE, STAGE, Collective
from jaxtrain.planner.step.layer_time import LayerTime, MeanLayer
from jaxtrain.planner.step.outside_layers import EndsTime, UpdateTime
from jaxtrain.planner.step.parameters import DeviceState
from jaxtrain.planner.step.step_part import StepPart, part
from jaxtrain.planner.step.time_breakdown import BUBBLE, TimeBreakdown, hidden_messages
from jaxtrain.schedule.clocks.times import KnownTimes
from jaxtrain.schedule.orders import Schedule, StageTimes, closed_forms
from jaxtrain.schedule.placement import PLACEMENTS, Placement, TimesToBalance, balanced


class StepModel(StepPart):
    """The step that is planned: a model with a layout, run with these settings, on devices of one
    kind."""

    layers, device = part(MeanLayer), part(DeviceState)
    ends, update = part(EndsTime), part(UpdateTime)

    @functools.cached_property
    def head(self) -> TimeBreakdown:
        """Head, loss, embedding and multi-token prediction modules of one microbatch, forward and
        backward, on the devices of one stage."""
        return self.ends.head(self.layers)

    @functools.cached_property
    def dense_layers(self) -> TimeBreakdown:
        """The layers before the first unit, of one microbatch: forward with the embedding, and
        once more with its gradient."""
        return self.ends.dense_layers(self.layers)

    def saved_by_overlap(self) -> float:
        """Seconds that overlapped cells save on an entire stage, of the mean number of layers."""
        return self.layers.saved_by_overlap * self.model.layers / self.layout.stage

    def message(self) -> float:
        """Seconds of a microbatch's activations from a stage to its neighbour."""
        message = Collective(PERMUTE, (STAGE,), self.message_bytes())
        return self.links.seconds([message]).get(STAGE, 0.0)

    def message_bytes(self) -> float:
        """Bytes that a device sends of a message between stages."""
        return self.item * self.tokens * self.model.width / self.layout.model

    def step(self) -> TimeBreakdown:
        """The step, on the device that works most."""
        layout, m, several = self.layout, self.layout.microbatches, self.layout.stage > 1
        ops, first, last = self.layers.mean(False), self.dense_layers, self.head
        layer = self.layers.total
        forms = self.schedule_forms
        saved = self.layers.saved_by_overlap if layout.overlap else 0.0
        cells = forms.shared_cells(layout.stage, layout.repeats, m) / layout.repeats
        layers, has_first, has_last = self._busiest_stage(
            layer.seconds - saved * cells / m, first.seconds, last.seconds
        )
        saved_on_stage = saved * layers
        shared = self.settings.vocabulary_parallel and several
        step = (layer * layers + first * has_first) * m
        step += last * has_last * (m / layout.stage if shared else m)
        step += self.ends.communication(shared) * m
        step += hidden_messages(saved_on_stage * cells)
        seconds = {name: ops[name].seconds * layers for name in "FRBW"}
        times = StageTimes(**seconds, overlap=saved_on_stage)
        waits = TimeBreakdown({BUBBLE: 0.0})
        if several:
            idle = forms.idle(layout.stage, layout.repeats, times)
            waits = TimeBreakdown({BUBBLE: self.hardware.waited(step.seconds, idle)})
            waits += self._messages(times.all)
        return step + waits + self.outside_microbatches(step, times.F, times.B + times.W)

    def outside_microbatches(
        self, busy: TimeBreakdown, forward: float, backward: float
    ) -> TimeBreakdown:
        """What is outside of the microbatches' ops. The arguments are those of
        `UpdateTime.seconds`."""
        recomputed = self.recomputed_fraction * (self.layout.recomputation.mode == "full")
        return self.update.seconds(busy, forward, backward, recomputed)

    def _busiest_stage(self, layer: float, first: float, last: float) -> tuple[float, bool, bool]:
        """Returns (the mean layers of the stage that works most; whether it has `first`, the dense
        layers before the others, and `last`, the head), from the seconds of these for one
        microbatch."""
        placement, layout = self.uneven_placement, self.layout
        if placement is None:
            return math.ceil(self.model.layers / layout.stage), True, True
        held, costs = [0.0] * layout.stage, iter(self.model.layer_costs or [1.0] * placement.layers)
        for stage, size in zip(placement.stage_of, placement.sizes, strict=True):
            held[stage] += sum(itertools.islice(costs, size))
        ends = placement.stage_of[0], placement.stage_of[-1]
        parts = [(size, stage == ends[0], stage == ends[1]) for stage, size in enumerate(held)]
        return max(parts, key=lambda part: sum(map(operator.mul, part, (layer, first, last))))

    @property
    def schedule_forms(self) -> Schedule:
        """The closed forms of the schedule; other frameworks have no overlapped cells."""
        return closed_forms(self.layout.schedule, self.layout.overlap and self.settings.ours)

    @functools.cached_property
    def uneven_placement(self) -> Placement | None:
        """The placement of layers of several kinds, or in which the stages that also run the dense
        layers or the prediction modules have fewer of the other layers, as pipeline/setup.py makes
        it; None where layers are spread evenly. The seconds that it balances are closed forms, for
        no table exists yet."""
        model, layout, costs = self.model, self.layout, self.model.layer_costs
        with_ends = bool(model.dense_layers or model.mtp_depth)
        if layout.stage == 1 or not (with_ends or costs):
            return None
        stage_of = PLACEMENTS[self.schedule_forms.placement](layout.stage, max(1, layout.repeats))
        least = (0, *(1,) * (len(stage_of) - 2), 0) if with_ends else (1,) * len(stage_of)
        layer = sum(op.seconds for op in self.layers.mean(False).values())
        if layout.overlap:
            layer -= self.layers.saved_by_overlap
        ends = (self.dense_layers.seconds, self.head.seconds) if with_ends else (0.0, 0.0)
        work = TimesToBalance(layer, *ends, costs, len(model.pattern))
        sizes = balanced(model.layers, stage_of, least, work)
        return Placement(model.layers, layout.stage, 1, stage_of, sizes, forms_of_layers(model))

    def _messages(self, microbatch: float) -> TimeBreakdown:
        """Two messages a chunk and microbatch, one each way, and the wait for those that arrive
        before any work. microbatch: seconds of a stage's work for one."""
        layout, each = self.layout, self.message()
        number = 2 * layout.microbatches * layout.repeats
        if not self.settings.rates.stage_overlap:
            return TimeBreakdown({STAGE: each * number})
        late = max(0.0, each - microbatch / layout.repeats / 2) * number
        exposed = late + 2 * each * (layout.stage - 1)
        return TimeBreakdown({STAGE: exposed}, {STAGE: max(0.0, each * number - exposed)})

    def ops(self) -> dict[str, TimeBreakdown]:
        """F, B, W and R of one microbatch on an entire stage; R if it recomputes all its layers.
        What no R op recomputes is part of B."""
        layers = self.model.layers / self.layout.stage
        ops = {name: op * layers for name, op in self.layers.ops(False).items()}
        if self.layout.recomputation.mode != "full":
            ops["B"] += ops["R"] * self.recomputed_fraction
            ops["R"] = TimeBreakdown()
        return ops

    def op_times(self) -> tuple[float, ...]:
        """Seconds of F, B, W, message, R and head of one microbatch on an entire stage, and, up to
        the last one that the layout has, of F and B at once, of the optimizer's update, and of the
        embedding with the dense layers behind it, in the order of `pipeline.times`."""
        ops, layout = {name: op.seconds for name, op in self.ops().items()}, self.layout
        both = ops["F"] + ops["B"] - self.saved_by_overlap() if layout.overlap else 0.0
        update = self.update.op.seconds if layout.steps > 1 else 0.0
        return KnownTimes(
            ops["F"],
            ops["B"],
            ops["W"],
            self.message(),
            ops["R"],
            self.head.seconds,
            FB=both or None,
            update=update or None,
            embedding=self.dense_layers.seconds / 2 or None,
        ).setting()

    def model_flops(self) -> float:
        """Operations of a step that the model itself needs, on all devices: forward, and twice that
        backward. Attention is counted as the framework's rates do."""
        tokens = self.layout.batch * self.model.sequence
        return tokens * self.model.training_flops_per_token(self.settings.causal_rates)

    def tokens_at_peak(self) -> float:
        """Tokens a second of devices that train at their peak, attention counted causally: model
        FLOPs utilization is a step's tokens a second over these."""
        peak = self.layout.devices * self.hardware.peak(self.settings.precision.compute)
        return peak / self.model.training_flops_per_token()

    def hardware_flops(self) -> float:
        """Operations with those that layers recompute (Narayanan 2021, Korthikanti 2022), and those
        of the update's iterations."""
        model, causal = self.model, self.settings.causal_rates
        remat, fraction = self.layout.recomputation.mode, self.recomputed_fraction
        recomputed = 0.0
        if remat == "full":
            heads = model.vocab_size * model.width * (1 + model.mtp_depth)
            recomputed = model.sequence_flops(causal) - 2.0 * model.sequence * heads
        elif remat == SELECTIVE:
            layer = self.on(self.layout.with_remat(remat)).part(LayerTime)
            of_core = 0.5 if causal else 1.0
            recomputed = model.layers * layer.mean_of_kinds(
                lambda kind: kind.flops_made_again(of_core * kind.model.attention_flops())
            )
        update = self.layout.replica * self.layout.stage * self.update.newton_schulz_flops()
        return self.model_flops() + self.layout.batch * fraction * recomputed + update
