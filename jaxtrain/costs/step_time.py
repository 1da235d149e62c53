"""How long a step takes, in parts, in closed form: fast enough to compare thousands of layouts.

    layer   products by their shapes, attention by its kernel, passes over memory, collectives of
            `model`, `context` and `expert`
    stage   F, R, B and W of its layers for each microbatch, and the head where it lies
    step    microbatches one after the other, the bubble of the schedule, messages, sums of
            gradients, the optimizer

The exposed parts add up to the step's time; what is hidden behind other work is listed apart. The
exact clock of a table comes after (plan/predict.py).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

from jaxtrain.costs.collectives import (
    CONTEXT,
    DATA,
    EXPERT,
    MODEL,
    PERMUTE,
    REPLICA,
    STAGE,
    Collective,
    Links,
    Parameters,
    StepCollectives,
)
from jaxtrain.costs.frameworks import Framework
from jaxtrain.costs.hardware import Hardware
from jaxtrain.costs.layout import Layout
from jaxtrain.costs.transformer import COLUMNS, WHOLE, Transformer
from jaxtrain.schedule.orders import StageTimes, closed_forms

ITEM = 2  # bytes of a number in 16 bits
# AdamW in 32 bits, for a parameter: three numbers read, three written, and the gradient
UPDATE_BYTES = 28.0
BACKWARD_PASSES = 2.0  # passes of the backward over memory, for one of the forward
# products of attention's backward over the two of its forward: scores again, and four
ATTENTION_BACKWARD = 2.5

MATMULS, ATTENTION, MEMORY, BUBBLE, OPTIMIZER, HOST, FIXED = (
    "matmuls",
    "attention",
    "memory",
    "bubble",
    "optimizer",
    "host",
    "fixed",
)
COMMUNICATION_AXES = (MODEL, CONTEXT, EXPERT, STAGE, DATA, REPLICA)


def bytes_of(dtype: str) -> int:
    """Bytes of a number of a type as a config names it."""
    return 2 * ITEM if dtype == "float32" else ITEM


@dataclasses.dataclass(frozen=True)
class TimeBreakdown:
    """Seconds by part. Communication is named by its mesh axis.

    exposed: parts that add up to the time
    hidden:  seconds that run beside other parts
    """

    exposed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hidden: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.exposed.values())

    def __add__(self, other: "TimeBreakdown") -> "TimeBreakdown":
        return TimeBreakdown(_sum(self.exposed, other.exposed), _sum(self.hidden, other.hidden))

    def __mul__(self, times: float) -> "TimeBreakdown":
        return TimeBreakdown(
            {k: v * times for k, v in self.exposed.items()},
            {k: v * times for k, v in self.hidden.items()},
        )


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    total = dict(a)
    for part, seconds in b.items():
        total[part] = total.get(part, 0.0) + seconds
    return total


def overlapped(
    seconds: Mapping[str, float], overlaps: Mapping[str, tuple[float, float]]
) -> TimeBreakdown:
    """Communication by axis, in part hidden.

    overlaps: by axis, the fraction that can overlap with other work, and the seconds of that work
    """
    hidden = {
        axis: part * min(seconds[axis], work)
        for axis, (part, work) in overlaps.items()
        if part and axis in seconds
    }
    return TimeBreakdown({axis: s - hidden.get(axis, 0.0) for axis, s in seconds.items()}, hidden)


@dataclasses.dataclass(frozen=True)
class DeviceParameters:
    """Numbers of parameters on a device.

    layers:  in the stage's layers
    ends:    before and after them: tables, the last norm, dense first layers, modules that predict
             further tokens
    experts: the part of `layers` that experts have
    """

    layers: float
    ends: float
    experts: float

    @property
    def all(self) -> float:
        return self.layers + self.ends


@dataclasses.dataclass(frozen=True)
class StepModel:
    """The step that is planned: a model with a layout, trained by a framework, on devices of one
    kind."""

    model: Transformer
    layout: Layout
    framework: Framework
    hardware: Hardware
    dtype: str = "bfloat16"

    @functools.cached_property
    def item(self) -> int:
        """Bytes of an activation's number."""
        return bytes_of(self.dtype)

    @functools.cached_property
    def links(self) -> Links:
        """The links between the devices."""
        return Links(self.layout, self.hardware)

    @functools.cached_property
    def tokens(self) -> float:
        """Tokens of a microbatch on one group of `model` devices."""
        return self.layout.microbatch * self.model.sequence / self.layout.context

    @property
    def shards(self) -> int:
        """ZeRO's shard count over `data`; 1 if it does not divide the model's dimensions."""
        data = self.layout.data
        return 1 if self.framework.by_dimension and self.model.width % data else data

    # --------------------------------------------------------------------------------------- layers

    def layer(self, dense: bool = False) -> dict[str, TimeBreakdown]:
        """F, R, B and W of one layer and microbatch; R is what the layout's recomputation costs."""
        layout, framework = self.layout, self.framework
        shapes = tuple(self._products(dense))
        products = [times * self._product(m, n, k) for times, m, n, k in shapes]
        inputs = sum(times * self._product(m, k, n) for times, m, n, k in shapes)
        weights = sum(times * self._product(k, n, m) for times, m, n, k in shapes)
        attention, attention_back = self._attention()
        passes, scores = self._passes(dense), self._scores()
        copies = framework.weight_copies * self.item if self._layers_of_unit() > 1 else 0.0
        parameters = self.layer_parameters(dense) / self.hardware.streaming
        read, sums = copies * parameters, 2 * ITEM * framework.sum_passes * parameters
        f = TimeBreakdown(
            {MATMULS: sum(products), ATTENTION: attention, MEMORY: passes + scores + read}
        )
        b = TimeBreakdown(
            {
                MATMULS: inputs,
                ATTENTION: attention_back,
                MEMORY: BACKWARD_PASSES * (passes + scores) + read,
            }
        )
        again: dict[str, float] = {}
        # the last product makes the layer's output; experts' gradients need theirs
        if layout.remat == "full":
            skipped = 0.0 if self.model.experts and not dense else self._unread * products[-1]
            again = {**f.exposed, MATMULS: f.exposed[MATMULS] - skipped}
        elif layout.remat == "selective":
            again = (
                {ATTENTION: attention, MEMORY: scores} if framework.core_again else {MEMORY: passes}
            )
        ops = {
            "F": f,
            "R": TimeBreakdown(again),
            "B": b,
            "W": TimeBreakdown({MATMULS: weights, MEMORY: sums}),
        }
        return {
            name: op + self._layer_collectives(name, dense, op.exposed.get(ATTENTION, 0.0))
            if name != "R" or layout.remat == "full"
            else op
            for name, op in ops.items()
        }

    def _products(self, dense: bool) -> Iterator[tuple[float, float, float, float]]:
        """(times, m, n, k) of a layer's products [m, k] · [k, n] on a device."""
        model, layout = self.model, self.layout
        for name, inputs, outputs in model.layer(dense).products:
            k = inputs if name in COLUMNS or name in WHOLE else inputs / layout.model
            n = outputs / layout.model if name in COLUMNS else outputs
            if model.experts and not dense and name.startswith("mlp"):
                chosen = model.experts_per_token + model.shared_experts
                k, n = (k / chosen, n) if name == "mlp_out" else (k, n / chosen)
                local = model.experts / layout.expert
                # Rows of an expert on the busiest device of `expert`, for which the others wait.
                rows = (
                    self.tokens
                    * model.experts_per_token
                    / local
                    * (self.framework.imbalance if layout.expert > 1 else 1.0)
                )
                yield local, rows, n, k
                yield model.shared_experts, self.tokens, n, k
            else:
                yield 1, self.tokens, n, k

    def _product(self, m: float, n: float, k: float) -> float:
        """Seconds of [m, k] · [k, n]."""
        hardware = self.hardware
        flops = 2.0 * m * n * k / (hardware.peak(self.dtype) * hardware.matmul.reached(m, n, k))
        moved = self.item * (m * k + k * n + m * n) / hardware.streaming
        return max(flops, moved) + 1e-6 * hardware.launch_us

    def _with_gradients(self, m: float, n: float, k: float) -> float:
        """Seconds of [m, k] · [k, n] and of the gradients of both operands."""
        return self._product(m, n, k) + self._product(m, k, n) + self._product(k, n, m)

    def _layer_collectives(self, op: str, dense: bool, attention: float) -> TimeBreakdown:
        """Collectives of one layer's op. attention: its seconds, with which rings of keys and
        values overlap."""
        again = self.framework.slots and self.layout.stage == 1 and self.layout.remat == "full"
        seconds = self.links.seconds(self.collectives.layer(op, again=again, dense=dense))
        if op == "R" and self._unread:
            last = self.links.seconds(self.collectives.layer(op, True, again, dense))
            seconds = {
                axis: s + self._unread * (last.get(axis, 0.0) - s) for axis, s in seconds.items()
            }
        ring = self.framework.context_by == "ring" and self.hardware.alone <= 1
        return overlapped(
            seconds,
            {MODEL: (self.framework.model_overlap, math.inf), CONTEXT: (float(ring), attention)},
        )

    @functools.cached_property
    def collectives(self) -> StepCollectives:
        """The collectives of the step."""
        layout, framework = self.layout, self.framework
        return StepCollectives(
            self.model,
            layout,
            item=self.item,
            read=self.item if framework.slots else framework.sent_weight,
            reduced=framework.sent_gradient,
            updated=framework.sent_weight,
            context=framework.context_by,
            explicit=framework.slots,
            shares_vocabulary=framework.vocabulary_parallel and layout.stage > 1,
            gathers_in_ops=layout.zero == 3 and not framework.gathers_once,
            reduces_in_ops=layout.zero > 1,
            imbalance=framework.imbalance,
            outer_int8=framework.sent_outer < framework.sent_weight,
        )

    @functools.cached_property
    def _unread(self) -> float:
        """Fraction of layers whose recomputation can skip the down projection, because nothing
        reads its output: all of them with one stage (every layer's input was saved); with several
        stages only a unit's last layer, when it runs outside the unit's loop."""
        layout, layers = self.layout, self._layers_of_unit()
        if not self.framework.slots:
            return 0.0
        if layout.stage == 1:
            return 1.0
        outside = layers <= 1 or (
            layout.zero == 3 and self.shards > 1 and not self.framework.gathers_once
        )
        return 1 / max(1.0, layers) if outside else 0.0

    def _layers_of_unit(self) -> float:
        """Layers that an op of our own runtime goes through."""
        return self.model.layers / (
            self.layout.stage * self.layout.repeats if self.layout.stage > 1 else 1
        )

    def layer_parameters(self, dense: bool = False) -> float:
        """Parameters of one layer on a device."""
        return self.model.device_layer_parameters(self.layout.model, self.layout.expert, dense)

    def _attention(self) -> tuple[float, float]:
        """Seconds of attention's core, forward and backward: fused kernels leave out what is
        masked."""
        model, layout, hardware = self.model, self.layout, self.hardware
        seconds = (
            layout.microbatch
            * model.attention_flops()
            / (layout.model * layout.context)
            / hardware.peak(self.dtype)
        )
        if self.framework.fused_attention:
            return (
                0.5 * seconds / hardware.attention_forward,
                ATTENTION_BACKWARD * 0.5 * seconds / hardware.attention_backward,
            )
        seconds /= hardware.matmul.reached(model.sequence, model.sequence, model.score_dim)
        return seconds, 2 * seconds

    def _scores(self) -> float:
        """Seconds in which scores pass through memory, forward."""
        model, layout = self.model, self.layout
        if self.framework.fused_attention:
            return 0.0
        scores = layout.microbatch * model.heads / layout.model * model.sequence**2 / layout.context
        return self.item * self.framework.attention_passes * scores / self.hardware.streaming

    def _passes(self, dense: bool) -> float:
        """Seconds of passes over activations beside products, forward."""
        model, layout, framework = self.model, self.layout, self.framework
        outside = (
            framework.passes * model.width / (layout.model if framework.sequence_parallel else 1)
        )
        heads = (model.heads + 2 * model.kv_heads) * model.head_dim
        inner = (
            framework.inner_passes
            * (heads + model.hidden(dense) * (1.5 if model.gated else 1.0))
            / layout.model
        )
        # operations, each of which reads and writes
        started = (framework.passes + framework.inner_passes) / 2
        return (
            self.item * self.tokens * (outside + inner) / self.hardware.streaming
            + 1e-6 * self.hardware.launch_us * started
        )

    # ----------------------------------------------------------------------------- messages and end

    def message(self) -> float:
        """Seconds of a microbatch's activations from a stage to its neighbour."""
        return self.links.seconds([Collective(PERMUTE, (STAGE,), self.message_bytes())]).get(
            STAGE, 0.0
        )

    def message_bytes(self) -> float:
        """Bytes of a message between stages, a device."""
        return (
            self.item
            * self.tokens
            * self.model.width
            / (self.layout.model if self.framework.split_sends else 1)
        )

    def head(self) -> TimeBreakdown:
        """Head, loss, embedding and predictions of further tokens of one microbatch, forward and
        backward, on the devices of one stage."""
        model, columns = self.model, self.model.vocab_size / self.layout.model
        memory = (
            4 * self.framework.logit_passes * self.tokens * columns
            + 3 * self.item * self.tokens * model.width
        )
        products = self._with_gradients(self.tokens, columns, model.width)
        logits = TimeBreakdown({MATMULS: products, MEMORY: memory / self.hardware.streaming})
        if not model.predictions:
            return logits
        # A module that predicts a further token joins two streams of the width and has a layer.
        join = TimeBreakdown(
            {
                MATMULS: self._with_gradients(
                    self.tokens / self.layout.model, model.width, 2 * model.width
                )
            }
        )
        layer = (op for name, op in self.layer().items() if name != "R")
        return logits * (1 + model.predictions) + sum(layer, join) * model.predictions

    def end_collectives(self, shared: bool) -> TimeBreakdown:
        """Collectives of embedding, head and loss of one microbatch over `model` and `stage`.

        shared: all stages share both ends; otherwise those of the stage that has the head
        """
        seconds = self._end_seconds(shared and self.layout.stage > 1)
        return TimeBreakdown({axis: s for axis, s in seconds.items() if axis != DATA})

    def _end_seconds(self, shared: bool) -> dict[str, float]:
        """Seconds by axis of the collectives of a microbatch's embedding, head and loss. shared: by
        all stages."""
        if shared not in self._ends:
            c = self.collectives
            if c.shares_vocabulary != shared:
                c = dataclasses.replace(c, shares_vocabulary=shared)
            collectives = [c.stage_sum()._replace(times=4)]
            if self.framework.slots:
                collectives += [
                    part for _ in range(1 + self.model.predictions) for part in c.loss()
                ]
                if shared or self.layout.stage == 1:
                    table = self._parameters[-1]
                    collectives += [
                        *c.lookup(table),
                        *c.lookup_gradient(table, same_op=self.layout.stage == 1),
                    ]
            self._ends[shared] = self.links.seconds(collectives)
        return self._ends[shared]

    @functools.cached_property
    def _ends(self) -> dict[bool, dict[str, float]]:
        return {}

    # ------------------------------------------------------------------------------------- the step

    def step(self) -> TimeBreakdown:
        """All of a step, on the device that works most."""
        model, layout = self.model, self.layout
        p, m, layers = (
            layout.stage,
            layout.microbatches,
            math.ceil(self.model.layers / layout.stage),
        )
        ops = self.layer()
        stage = sum(ops.values(), TimeBreakdown()) * layers
        if model.dense_layers:
            stage += sum(self.layer(dense=True).values(), TimeBreakdown()) * model.dense_layers
        shared = self.framework.vocabulary_parallel and p > 1
        step = stage * m + self.head() * (m / p if shared else m) + self.end_collectives(shared) * m
        times = StageTimes(*(ops[name].seconds * layers for name in "FRBW"))
        waits = (
            self.hardware.waited(
                step.seconds, closed_forms(layout.schedule).idle(p, layout.repeats, times)
            )
            if p > 1
            else 0.0
        )
        beside = self._messages(times.all) + self.outside_microbatches(
            step, times.F, times.B + times.W
        )
        return step + TimeBreakdown({BUBBLE: waits}) + beside

    def outside_microbatches(
        self, busy: TimeBreakdown, forward: float, backward: float
    ) -> TimeBreakdown:
        """ZeRO-3's collectives, sums of gradients, the optimizer.

        busy: a stage with its microbatches; forward, backward: seconds of one microbatch
        """
        collectives = self._parameter_collectives(busy.seconds, forward, backward)
        return collectives + self.update() + TimeBreakdown({FIXED: self.framework.fixed_s})

    def _messages(self, microbatch: float) -> TimeBreakdown:
        """Two messages a chunk and microbatch, one each way, and the wait of the first ones to
        arrive."""
        layout, each = self.layout, self.message()
        if layout.stage == 1:
            return TimeBreakdown()
        number = 2 * layout.microbatches * layout.repeats
        if not self.framework.stage_overlap:
            return TimeBreakdown({STAGE: each * number})
        exposed = max(0.0, each - microbatch / layout.repeats / 2) * number + 2 * each * (
            layout.stage - 1
        )
        return TimeBreakdown({STAGE: exposed}, {STAGE: max(0.0, each * number - exposed)})

    def device_parameters(self, layers: int = 0, shared: bool | None = None) -> DeviceParameters:
        """The parameters of a device on the stage with most of them.

        layers: for which a device has room; those of the busiest stage if 0
        shared: all stages share the tables at both ends; as the framework has it if None. Where
                they do not, each stage of our own runtime has both tables; others' first and last
                stage have one each.
        """
        model, layout, framework = self.model, self.layout, self.framework
        layers = layers or math.ceil(model.layers / layout.stage)
        shared = framework.vocabulary_parallel if shared is None else shared
        ends = model.device_end_parameters(layout.model, layout.stage if shared else 1)
        if layout.stage > 1 and not shared and not framework.slots and not model.tied:
            ends -= model.device_table_parameters(layout.model)
        ends += model.dense_layers * self.layer_parameters(dense=True)
        ends += model.predictions * (model.joining_parameters() + self.layer_parameters())
        experts = layers * model.expert_parameters() / (layout.model * layout.expert)
        return DeviceParameters(layers * self.layer_parameters(), ends, experts)

    @functools.cached_property
    def _parameters(self) -> tuple[Parameters, ...]:
        """A device's parameters as collectives see them: experts, other layers, the matrix that
        makes logits with modules that predict further tokens, and the table of the input last.
        Other frameworks have the last three in one."""
        model, layout, framework = self.model, self.layout, self.framework
        held = self.device_parameters()
        dense = model.dense_layers * self.layer_parameters(dense=True)
        data = (DATA,) if self.shards > 1 else ()
        scatter = data if layout.zero else ()
        sums = tuple(
            a
            for a in (REPLICA, DATA, CONTEXT)
            if a not in scatter and not (a == REPLICA and framework.inner_steps)
        )
        experts = Parameters(held.experts, scatter, sums, (STAGE, EXPERT, MODEL), data)
        layers = Parameters(
            held.layers + dense - held.experts, scatter, (*sums, EXPERT), (STAGE, MODEL), data
        )
        ends = held.ends - dense
        if not framework.slots:
            return experts, layers._replace(size=layers.size + ends)
        shared = framework.vocabulary_parallel and layout.stage > 1
        table = (
            0.0
            if model.tied
            else model.device_table_parameters(layout.model, layout.stage if shared else 1)
        )
        at_ends = layers
        if layout.stage > 1 and not shared and self.parts_of_ends(layout.zero) > 1:
            at_ends = layers._replace(
                scatter=(*scatter, STAGE), split=(MODEL,), outer=(*data, STAGE)
            )
        elif layout.stage > 1 and not shared:
            at_ends = layers._replace(sums=(*sums, STAGE, EXPERT), split=(MODEL,))
        return experts, layers, at_ends._replace(size=ends - table), at_ends._replace(size=table)

    def _parameter_collectives(self, busy: float, forward: float, backward: float) -> TimeBreakdown:
        """Collectives of parameters and their gradients: ZeRO's in each microbatch, sums behind
        them, what the update gathers, DiLoCo's.

        busy: seconds of a stage with its microbatches; forward, backward: seconds of one of them
        """
        layout, framework, c, m = (
            self.layout,
            self.framework,
            self.collectives,
            self.layout.microbatches,
        )
        parameters = self._parameters
        one_link = framework.one_link if layout.zero == 3 else 0.0
        over_data = lambda collectives: self.links.seconds(collectives, one_link).get(DATA, 0.0)
        reads = 3 if framework.slots and layout.stage > 1 and layout.remat == "full" else 2
        microbatch = reads * over_data(c.gathers(parameters[:2])) + over_data(
            c.reductions_in_op(parameters[:3])
        )
        if framework.slots:  # rows of the input's table travel
            microbatch += over_data(c.gathers(parameters[2:3]))
        zero = m * (microbatch + self._end_seconds(c.shares_vocabulary).get(DATA, 0.0))
        if layout.zero == 3 and framework.gathers_once:
            zero += over_data(c.gathered(p) for p in parameters if p.over_data)
        gathers = layout.zero == 3 and self.shards > 1
        overlap = (
            (framework.gather_overlap, busy) if gathers else (framework.data_overlap, backward * m)
        )
        parts = overlapped({DATA: zero}, {DATA: overlap})
        for collectives, work in (
            (c.reductions, backward),
            (c.after_the_update, forward if layout.zero else backward),
        ):
            after = self.links.seconds(
                collective for p in parameters for collective in collectives(p)
            )
            parts += overlapped(after, {DATA: (framework.data_overlap, work)})
        if framework.inner_steps:
            parts += TimeBreakdown(self.links.seconds(c.outer_exchange(parameters))) * (
                1 / framework.inner_steps
            )
        return parts

    def parts_of_ends(self, zero: int, shared: bool | None = None) -> int:
        """The number of shards into which stages cut the state of embedding and head; each stage
        updates its own shard.

        zero: ZeRO's stage; shared: as in `device_parameters`
        """
        layout, shared = (
            self.layout,
            self.framework.vocabulary_parallel if shared is None else shared,
        )
        if (
            not self.framework.slots
            or shared
            or not zero
            or self.model.width % (self.shards * layout.stage)
        ):
            return 1
        return layout.stage

    def update(self) -> TimeBreakdown:
        """The optimizer's passes over its state, which comes from the host's memory and goes back
        where it is offloaded."""
        layout, held = self.layout, self.device_parameters()
        parameters = (held.layers + held.ends / self.parts_of_ends(layout.zero)) / (
            self.shards if layout.zero else 1
        )
        seconds = {OPTIMIZER: UPDATE_BYTES * parameters / self.hardware.streaming}
        if layout.offload in ("optimizer", "both"):
            seconds[HOST] = (
                2 * self.framework.state_bytes * parameters / self.hardware.host_bytes_per_s
            )
        return TimeBreakdown(seconds)

    def ops(self) -> dict[str, TimeBreakdown]:
        """F, B, W and R of one microbatch on a whole stage: what no R op computes again is part of
        B."""
        layers = self.model.layers / self.layout.stage
        ops = {name: op * layers for name, op in self.layer().items()}
        if self.layout.remat != "full":
            ops["B"], ops["R"] = ops["B"] + ops["R"], TimeBreakdown()
        return ops

    def dense_layers(self) -> TimeBreakdown:
        """The layers before the first unit, of one microbatch: forward with the embedding, and
        again with its gradient."""
        if not self.model.dense_layers:
            return TimeBreakdown()
        ops = self.layer(dense=True)
        return (ops["F"] * 2 + ops["B"] + ops["W"]) * self.model.dense_layers

    def op_times(self) -> tuple[float, ...]:
        """Seconds of F, B, W, message, R and head of one microbatch on a whole stage, in the order
        of `pipeline.times`."""
        ops = {name: op.seconds for name, op in self.ops().items()}
        return ops["F"], ops["B"], ops["W"], self.message(), ops["R"], self.head().seconds

    # ----------------------------------------------------------------------------------- operations

    def model_flops(self) -> float:
        """Operations of a step that the model itself needs, on all devices: forward, and twice that
        backward. Attention is counted as the framework's rates do."""
        return (
            self.layout.batch
            * self.model.sequence
            * self.model.training_flops_per_token(self.framework.causal_rates)
        )

    def hardware_flops(self) -> float:
        """Operations with those that are computed again, of the layers (Narayanan 2021, Korthikanti
        2022)."""
        model, layout, causal = self.model, self.layout, self.framework.causal_rates
        again = 0.0
        if layout.remat == "full":
            again = model.sequence_flops(
                causal
            ) - 2.0 * model.vocab_size * model.width * model.sequence * (1 + model.predictions)
        elif layout.remat == "selective" and self.framework.core_again:
            again = model.layers * model.attention_flops() * (0.5 if causal else 1.0)
        return self.model_flops() + layout.batch * again
