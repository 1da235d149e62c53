"""How long a step takes, by parts, in closed form: enough to compare thousands of layouts. The exact clock of a table comes after.

    layer ops      products by their shapes, attention by its kernel, passes over memory, collectives of `model`, `context`, `expert`
    stage          its layers' F, R, B, W for each microbatch, the head where it lies
    step           microbatches one after the other, the bubble of the schedule, messages, sums of gradients, the optimizer

A step's parts add up to its time: what is hidden behind other work is listed apart and does not count.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

from jaxtrain.costs.collectives import CONTEXT, DATA, EXPERT, MODEL, REPLICA, STAGE, Links, Parameters, StepCollectives
from jaxtrain.costs.frameworks import Program
from jaxtrain.costs.hardware import Hardware
from jaxtrain.costs.layout import Layout
from jaxtrain.costs.transformer import COLUMNS, WHOLE, Transformer, padded_vocabulary
from jaxtrain.schedule.orders import StageTimes, closed_forms

ITEM = 2  # bytes of a number in 16 bits
UPDATE_BYTES = 28.0  # read and written of a parameter by AdamW in 32 bits: three read, three written, and the gradient
BACKWARD_PASSES = 2.0  # over memory, of those of the forward
ATTENTION_BACKWARD = 2.5  # products of attention's backward over the two of its forward: scores again, and four


def bytes_of(dtype: str) -> int:
    """Bytes of a number of a type as a config names it."""
    return 2 * ITEM if dtype == "float32" else ITEM


MATMULS, ATTENTION, MEMORY, BUBBLE, OPTIMIZER, HOST, FIXED = "matmuls", "attention", "memory", "bubble", "optimizer", "host", "fixed"
COMMUNICATION_AXES = (MODEL, CONTEXT, EXPERT, STAGE, DATA, REPLICA)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Seconds by part: those that count, and those that stand beside others. Communication is named by its axis."""

    exposed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hidden: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.exposed.values())

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(_sum(self.exposed, other.exposed), _sum(self.hidden, other.hidden))

    def __mul__(self, times: float) -> "Parts":
        return Parts({k: v * times for k, v in self.exposed.items()}, {k: v * times for k, v in self.hidden.items()})


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in (*a, *(key for key in b if key not in a))}


def overlapped(seconds: Mapping[str, float], overlaps: Mapping[str, tuple[float, float]]) -> Parts:
    """Communication by axis. overlaps: by axis, the part of it that can overlap with other work, and the seconds of that work."""
    hidden = {axis: part * min(seconds[axis], others) for axis, (part, others) in overlaps.items() if part and axis in seconds}
    return Parts({axis: s - hidden.get(axis, 0.0) for axis, s in seconds.items()}, hidden)


@dataclasses.dataclass(frozen=True)
class DeviceParameters:
    """Numbers of parameters on a device.

    layers:  of the stage's layers
    ends:    of what stands before and after them: tables, the last norm, dense first layers, modules that predict further tokens
    experts: of the layers', those of experts
    """

    layers: float
    ends: float
    experts: float

    @property
    def all(self) -> float:
        return self.layers + self.ends


@dataclasses.dataclass(frozen=True)
class Work:
    """What is planned: a model with a layout, by a program, on a kind of device."""

    model: Transformer
    layout: Layout
    program: Program
    hardware: Hardware
    dtype: str = "bfloat16"

    @property
    def item(self) -> int:
        """Bytes of an activation's number."""
        return bytes_of(self.dtype)

    @functools.cached_property
    def links(self) -> Links:
        """The links between the devices."""
        return Links(self.layout, self.hardware)

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one group of `model` devices."""
        return self.layout.microbatch * self.model.sequence / self.layout.context

    @property
    def shards(self) -> int:
        """ZeRO's shard count over `data`; 1 if it does not divide the model's dimensions."""
        data = self.layout.data
        return 1 if self.program.by_dimension and self.model.width % data else data

    # ------------------------------------------------------------------------------------------------------------ layers

    def layer(self, dense: bool = False) -> dict[str, Parts]:
        """F, R, B and W of one layer and microbatch; R is what the layout's recomputation costs."""
        model, layout, program = self.model, self.layout, self.program
        forward, weights, inputs = 0.0, 0.0, 0.0
        for name, n_in, n_out in model.products(dense):
            k, n = float(n_in), float(n_out)
            if name in COLUMNS:
                n = n_out / layout.model
            elif name not in WHOLE:
                k = n_in / layout.model
            tokens, experts = self.tokens, 1.0
            if model.experts and not dense and name.startswith("mlp"):
                # Rows of an expert: all devices of `expert` send theirs; those of the busiest device, for which the others wait.
                experts = model.experts_per_token + model.shared_experts
                local = model.experts / layout.expert
                rows = self.tokens * model.experts_per_token / local * (program.imbalance if layout.expert > 1 else 1.0)
                k, n = (k / experts, n) if name == "mlp_out" else (k, n / experts)
                forward += local * self._product(rows, n, k) + model.shared_experts * self._product(tokens, n, k)
                inputs += local * self._product(rows, k, n) + model.shared_experts * self._product(tokens, k, n)
                weights += local * self._product(k, n, rows) + model.shared_experts * self._product(k, n, tokens)
                continue
            forward += self._product(tokens, n, k)
            inputs += self._product(tokens, k, n)
            weights += self._product(k, n, tokens)
        attention, attention_back = self._attention()
        memory, scores = self._passes(dense), self._scores()
        f = Parts({MATMULS: forward, ATTENTION: attention, MEMORY: memory + scores})
        b = Parts({MATMULS: inputs, ATTENTION: attention_back, MEMORY: BACKWARD_PASSES * (memory + scores)})
        w = Parts({MATMULS: weights})
        if program.sum_passes:
            w += self._over_weights(dense, 2 * ITEM * program.sum_passes)
        if program.weight_copies and self._layers_of_unit() > 1:
            copies = self._over_weights(dense, self.item * program.weight_copies)
            f, b = f + copies, b + copies
        recomputed = layout.remat == "full"
        if recomputed:
            again = f + Parts({MATMULS: -self._unread * self._output(dense)})
        elif layout.remat == "selective":
            again = Parts({ATTENTION: attention, MEMORY: scores}) if program.core_again else Parts({MEMORY: memory})
            if program.fused_attention and program.core_again:
                again = Parts({ATTENTION: attention})
        else:
            again = Parts()
        ops = {"F": f, "R": again, "B": b, "W": w}
        return {
            name: op + self._layer_collectives(name, dense, op.exposed.get(ATTENTION, 0.0)) if name != "R" or recomputed else op
            for name, op in ops.items()
        }

    def _layer_collectives(self, op: str, dense: bool, attention: float) -> Parts:
        """Collectives of one layer's op, whose attention takes so many seconds: rings of keys and values overlap with it."""
        again = self.program.slots and self.layout.stage == 1 and self.layout.remat == "full"
        seconds = self.links.seconds(self.collectives.layer(op, again=again, dense=dense))
        if op == "R" and self._unread:
            last = self.links.seconds(self.collectives.layer(op, True, again, dense))
            seconds = {axis: s + self._unread * (last.get(axis, 0.0) - s) for axis, s in seconds.items()}
        ring = self.program.context_by == "ring" and self.hardware.alone <= 1
        overlaps = {MODEL: (self.program.model_overlap, math.inf), CONTEXT: (float(ring), attention)}
        return overlapped(seconds, overlaps)

    @functools.cached_property
    def collectives(self) -> StepCollectives:
        """The collectives of the step."""
        layout, program = self.layout, self.program
        return StepCollectives(
            self.model,
            layout,
            item=self.item,
            read=self.item if program.slots else program.sent_weight,
            reduced=program.sent_gradient,
            updated=program.sent_weight,
            context=program.context_by,
            explicit=program.slots,
            shares_vocabulary=program.vocabulary_parallel and layout.stage > 1,
            gathers_in_ops=layout.zero == 3 and not program.gathers_once,
            reduces_in_ops=layout.zero > 1,
            imbalance=program.imbalance,
            outer_int8=program.sent_outer < program.sent_weight,
        )

    @property
    def _unread(self) -> float:
        """Fraction of layers whose recomputation can skip the down projection, because nothing reads its output: all of them with one
        stage (every layer's input was saved); with several stages only a unit's last layer, when it runs outside the unit's loop."""
        layout, layers = self.layout, self._layers_of_unit()
        if not self.program.slots:
            return 0.0
        if layout.stage == 1:
            return 1.0
        outside = layers <= 1 or (layout.zero == 3 and self.shards > 1 and not self.program.gathers_once)
        return 1 / max(1.0, layers) if outside else 0.0

    def _layers_of_unit(self) -> float:
        """Layers that an op of our own program goes through."""
        return self.model.layers / (self.layout.stage * self.layout.repeats if self.layout.stage > 1 else 1)

    def layer_parameters(self, dense: bool = False) -> float:
        """Parameters of one layer on a device."""
        return self.model.device_layer_parameters(self.layout.model, self.layout.expert, dense)

    def _over_weights(self, dense: bool, moved: float) -> Parts:
        """So many bytes moved for each of a layer's parameters."""
        return Parts({MEMORY: moved * self.layer_parameters(dense) / self.hardware.streaming})

    def _output(self, dense: bool) -> float:
        """Seconds of the product that makes a layer's output; 0 of experts, whose weights' gradients need it."""
        if self.model.experts and not dense:
            return 0.0
        inputs, outputs = next((k, n) for name, k, n in self.model.products(dense) if name == "mlp_out")
        return self._product(self.tokens, outputs, inputs / self.layout.model)

    def _product(self, m: float, n: float, k: float) -> float:
        """Seconds of [m, k] · [k, n]."""
        hardware = self.hardware
        flops = 2.0 * m * n * k / (hardware.peak(self.dtype) * hardware.matmul.reached(m, n, k))
        moved = self.item * (m * k + k * n + m * n) / hardware.streaming
        return max(flops, moved) + 1e-6 * hardware.launch_us

    def _attention(self) -> tuple[float, float]:
        """Seconds of attention's core, forward and backward: fused kernels leave out what is masked."""
        model, layout, hardware = self.model, self.layout, self.hardware
        flops = layout.microbatch * model.attention_flops() / (layout.model * layout.context)
        if self.program.fused_attention:
            peak = hardware.peak(self.dtype)
            half = 0.5 * flops / peak
            return half / hardware.attention_forward, ATTENTION_BACKWARD * half / hardware.attention_backward
        reached = hardware.matmul.reached(model.sequence, model.sequence, model.score_dim)
        seconds = flops / (hardware.peak(self.dtype) * reached)
        return seconds, 2 * seconds

    def _scores(self) -> float:
        """Seconds in which scores pass through memory, forward."""
        model, layout = self.model, self.layout
        if self.program.fused_attention:
            return 0.0
        scores = layout.microbatch * model.heads / layout.model * model.sequence**2 / layout.context
        return self.item * self.program.attention_passes * scores / self.hardware.streaming

    def _passes(self, dense: bool) -> float:
        """Seconds of passes over activations beside products, forward."""
        model, layout, program = self.model, self.layout, self.program
        outside = program.passes * model.width / (layout.model if program.sequence_parallel else 1)
        heads = (model.heads + 2 * model.kv_heads) * model.head_dim
        hidden = model.hidden(dense)
        inner = program.inner_passes * (heads + hidden * (1.5 if model.gated else 1.0)) / layout.model
        started = (program.passes + program.inner_passes) / 2  # operations, each of which reads and writes
        return self.item * self.tokens * (outside + inner) / self.hardware.streaming + 1e-6 * self.hardware.launch_us * started

    # ------------------------------------------------------------------------------------------------------------ messages

    def message(self) -> float:
        """Seconds of a microbatch's activations from a stage to its neighbour."""
        layout = self.layout
        if layout.stage == 1:
            return 0.0
        return self.links.message(STAGE, self.message_bytes())

    def message_bytes(self) -> float:
        """Bytes of a message between stages, a device."""
        return self.item * self.tokens * self.model.width / (self.layout.model if self.program.split_sends else 1)

    # ------------------------------------------------------------------------------------------------------------ the step

    def head(self) -> Parts:
        """Head, loss, embedding and predictions of further tokens of one microbatch, forward and backward, on the devices of one stage."""
        model, layout = self.model, self.layout
        columns = model.vocab_size / layout.model
        products = self._product(self.tokens, columns, model.width) + self._product(self.tokens, model.width, columns)
        products += self._product(model.width, columns, self.tokens)
        memory = 4 * self.program.logit_passes * self.tokens * columns + 3 * self.item * self.tokens * model.width
        parts = Parts({MATMULS: products, MEMORY: memory / self.hardware.streaming})
        return parts * (1 + model.predictions) + self._prediction() * model.predictions

    def _prediction(self) -> Parts:
        """A module that predicts a further token, but for its logits: a layer, and before it the product that joins two of its widths."""
        if not self.model.predictions:
            return Parts()
        width, rows = self.model.width, self.tokens / self.layout.model
        join = self._product(rows, width, 2 * width) + self._product(rows, 2 * width, width) + self._product(2 * width, width, rows)
        parts = Parts({MATMULS: join})
        for op, of_layer in self.layer().items():
            parts += of_layer if op != "R" else Parts()
        return parts

    def end_collectives(self, shared: bool) -> Parts:
        """Collectives of embedding, head and loss of one microbatch over `model` and `stage`. shared: all stages share both ends; otherwise
        those of the head are meant where stages differ."""
        seconds = self._end_seconds(shared and self.layout.stage > 1)
        return Parts({axis: s for axis, s in seconds.items() if axis != DATA})

    @functools.cached_property
    def _ends(self) -> dict[bool, dict[str, float]]:
        return {}

    def _end_seconds(self, shared: bool) -> dict[str, float]:
        """Seconds by axis of the collectives of a microbatch's embedding, head and loss. shared: by all stages."""
        if shared not in self._ends:
            c = self.collectives
            if c.shares_vocabulary != shared:
                c = dataclasses.replace(c, shares_vocabulary=shared)
            collectives = [c.stage_sum()._replace(times=4)]
            if self.program.slots:
                for _ in range(1 + self.model.predictions):
                    collectives += c.loss()
                if shared or self.layout.stage == 1:
                    table = self._parameters[-1]
                    collectives += [*c.lookup(table), *c.lookup_gradient(table, same_op=self.layout.stage == 1)]
            self._ends[shared] = self.links.seconds(collectives)
        return self._ends[shared]

    def step(self) -> Parts:
        """All of a step, on the device that works most."""
        model, layout, program = self.model, self.layout, self.program
        p, m = layout.stage, layout.microbatches
        ops = self.layer()
        whole = Parts()
        for op in ops.values():
            whole += op
        layers = math.ceil(model.layers / p)  # of the busiest stage
        stage = whole * layers
        if model.dense_layers:
            for op in self.layer(dense=True).values():
                stage += op * (model.dense_layers)
        head = self.head()
        shared = program.vocabulary_parallel and p > 1
        times = [ops[name].seconds * layers for name in "FRBW"]
        step = stage * m + head * (m / p if shared else m) + self.end_collectives(shared) * m
        idle = closed_forms(layout.schedule).idle(p, layout.repeats, StageTimes(*times))
        waits = self.hardware.waited(step.seconds, idle) if p > 1 else 0.0
        return step + Parts({BUBBLE: waits}) + self._messages(sum(times)) + self.around(step, times[0], times[2] + times[3])

    def around(self, busy: Parts, forward: float, backward: float) -> Parts:
        """What a step has beside its microbatches: ZeRO-3's collectives, sums of gradients, the optimizer. busy: of a stage, with its
        microbatches; forward, backward: seconds of one."""
        return self._parameter_collectives(busy.seconds, forward, backward) + self.update() + Parts({FIXED: self.program.fixed_s})

    def _messages(self, microbatch: float) -> Parts:
        """Two messages a chunk and microbatch, one each way, and the wait of the first ones to arrive."""
        layout = self.layout
        if layout.stage == 1:
            return Parts()
        each = self.message()
        seconds = 2 * each * layout.microbatches * layout.repeats
        if not self.program.stage_overlap:
            return Parts({STAGE: seconds})
        per_chunk = microbatch / layout.repeats / 2
        exposed = max(0.0, each - per_chunk) * 2 * layout.microbatches * layout.repeats + 2 * each * (layout.stage - 1)
        return Parts({STAGE: exposed}, {STAGE: max(0.0, seconds - exposed)})

    def device_parameters(self, layers: int = 0, shared: bool | None = None) -> "DeviceParameters":
        """The parameters of a device on the stage with most of them.

        layers: for which a device has room; those of the busiest stage if not given. shared: whether all stages share the tables at both
        ends; as the program has it if not given. Where they do not, each stage of our own program has all of them, another's first and
        last stage one each.
        """
        model, layout, program = self.model, self.layout, self.program
        layers = layers or math.ceil(model.layers / layout.stage)
        shared = program.vocabulary_parallel if shared is None else shared
        tables = model.device_table_parameters(layout.model, layout.stage if shared else 1)
        if layout.stage > 1 and not shared and not program.slots and not model.tied:
            tables -= padded_vocabulary(model.vocab_size, layout.model) * model.width / layout.model
        dense, modules = model.dense_layers * self.layer_parameters(dense=True), model.predictions * model.joining_parameters()
        experts = layers * model.expert_parameters() / (layout.model * layout.expert)
        ends = tables + dense + modules + model.predictions * self.layer_parameters()
        return DeviceParameters(layers * self.layer_parameters(), ends, experts)

    @functools.cached_property
    def _parameters(self) -> tuple[Parameters, ...]:
        """A device's parameters as collectives see them: experts, other layers, the matrix that makes logits with modules that predict
        further tokens, and the table of the input last. Other programs have the last three in one."""
        model, layout, program = self.model, self.layout, self.program
        held = self.device_parameters()
        dense = model.dense_layers * self.layer_parameters(dense=True)
        data = (DATA,) if self.shards > 1 else ()
        scatter = data if layout.zero else ()
        sums = tuple(a for a in (REPLICA, DATA, CONTEXT) if a not in scatter and not (a == REPLICA and program.inner_steps))
        experts = Parameters(held.experts, scatter, sums, (STAGE, EXPERT, MODEL), data)
        layers = Parameters(held.layers + dense - held.experts, scatter, (*sums, EXPERT), (STAGE, MODEL), data)
        ends = held.ends - dense
        if not program.slots:
            return experts, layers._replace(size=layers.size + ends)
        shared = program.vocabulary_parallel and layout.stage > 1
        table = (
            0.0
            if model.tied
            else padded_vocabulary(model.vocab_size, layout.model) * model.width / layout.model / (layout.stage if shared else 1)
        )
        if shared or layout.stage == 1:
            at_ends = layers
        elif self.parts_of_ends(layout.zero) > 1:
            at_ends = layers._replace(scatter=(*scatter, STAGE), split=(MODEL,), outer=(*data, STAGE))
        else:
            at_ends = layers._replace(sums=(*sums, STAGE, EXPERT), split=(MODEL,))
        return experts, layers, at_ends._replace(size=ends - table), at_ends._replace(size=table)

    def _parameter_collectives(self, busy: float, forward: float, backward: float) -> Parts:
        """Collectives of parameters and their gradients: ZeRO's in each microbatch, sums behind them, what the update gathers, DiLoCo's.

        busy: seconds of a stage with its microbatches; forward, backward: seconds of one of them, the next and the last.
        """
        layout, program, all_of_step, m = self.layout, self.program, self.collectives, self.layout.microbatches
        parameters = self._parameters
        seconds = functools.partial(self.links.seconds, one_link=program.one_link if layout.zero == 3 else 0.0)
        in_op = parameters[:2]
        reads = 3 if program.slots and layout.stage > 1 and layout.remat == "full" else 2
        microbatch = [c._replace(times=reads) for c in all_of_step.gathers(in_op)]
        if program.slots:  # rows of the input's table travel
            in_op = parameters[:3]
            microbatch += all_of_step.gathers(parameters[2:3])
        microbatch += all_of_step.reductions_in_op(in_op)
        zero = m * (seconds(microbatch).get(DATA, 0.0) + self._end_seconds(all_of_step.shares_vocabulary).get(DATA, 0.0))
        if layout.zero == 3 and program.gathers_once:
            zero += seconds(all_of_step.gathered(p) for p in parameters if p.over_data).get(DATA, 0.0)
        gathers = layout.zero == 3 and self.shards > 1
        parts = overlapped({DATA: zero}, {DATA: (program.gather_overlap, busy) if gathers else (program.data_overlap, backward * m)})
        after = ((all_of_step.reductions, backward), (all_of_step.after_the_update, forward if layout.zero else backward))
        for collectives, others in after:
            after_all = self.links.seconds(c for p in parameters for c in collectives(p))
            parts += overlapped(after_all, {DATA: (program.data_overlap, others)})
        if program.inner_steps:
            parts += Parts(self.links.seconds(all_of_step.outer_exchange(parameters))) * (1 / program.inner_steps)
        return parts

    def parts_of_ends(self, zero: int, shared: bool | None = None) -> int:
        """The number of shards into which stages cut the state of embedding and head; each stage updates its own shard.

        zero: ZeRO's stage; shared: as in `device_parameters`.
        """
        layout, shared = self.layout, self.program.vocabulary_parallel if shared is None else shared
        if not self.program.slots or shared or not zero or self.model.width % (self.shards * layout.stage):
            return 1
        return layout.stage

    def update(self) -> Parts:
        """The optimizer's passes over its state, which comes from the host's memory and goes back where it is offloaded."""
        layout = self.layout
        held = self.device_parameters()
        parameters = (held.layers + held.ends / self.parts_of_ends(layout.zero)) / (self.shards if layout.zero else 1)
        parts = Parts({OPTIMIZER: UPDATE_BYTES * parameters / self.hardware.streaming})
        if layout.offload in ("optimizer", "both"):
            parts += Parts({HOST: 2 * self.program.state_bytes * parameters / self.hardware.host_bytes_per_s})
        return parts

    def ops(self) -> dict[str, Parts]:
        """F, B, W and R of one microbatch on a whole stage: what no R op computes again is part of B."""
        layers = self.model.layers / self.layout.stage
        ops = {name: op * layers for name, op in self.layer().items()}
        if self.layout.remat != "full":
            ops["B"], ops["R"] = ops["B"] + ops["R"], Parts()
        return ops

    def dense_layers(self) -> Parts:
        """The layers before the first unit, of one microbatch: forward with the embedding, and again with its gradient."""
        if not self.model.dense_layers:
            return Parts()
        ops = self.layer(dense=True)
        return (ops["F"] * 2 + ops["B"] + ops["W"]) * self.model.dense_layers

    def op_times(self) -> tuple[float, ...]:
        """Seconds of F, B, W, message, R and head of one microbatch on a whole stage, in the order of `pipeline.times`."""
        ops = {name: op.seconds for name, op in self.ops().items()}
        return ops["F"], ops["B"], ops["W"], self.message(), ops["R"], self.head().seconds

    # ------------------------------------------------------------------------------------------------------------ figures

    def model_flops(self) -> float:
        """Operations of a step that the model itself needs, on all devices: forward, and twice that backward. Attention is counted as the
        program's rates do."""
        return self.layout.batch * self.model.sequence * self.model.training_flops_per_token(self.program.causal_rates)

    def hardware_flops(self) -> float:
        """With those that are computed again, of the layers (Narayanan 2021, Korthikanti 2022)."""
        model, layout, causal = self.model, self.layout, self.program.causal_rates
        again = 0.0
        if layout.remat == "full":
            head = 2.0 * model.vocab_size * model.width * model.sequence * (1 + model.predictions)
            again = model.sequence_flops(causal) - head
        elif layout.remat == "selective" and self.program.core_again:
            again = model.layers * model.attention_flops() * (0.5 if causal else 1.0)
        return self.model_flops() + layout.batch * again
