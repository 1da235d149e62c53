"""How long a step takes, by parts, in closed form: enough to compare thousands of layouts. The exact clock of a table comes after.

    layer ops      products by their shapes, attention by its kernel, passes over memory, collectives of `model`, `context`, `expert`
    stage          its layers' F, R, B, W for each microbatch, the head where it lies
    step           microbatches one after the other, the bubble of the schedule, messages, sums of gradients, the optimizer

A step's parts add up to its time: what is hidden behind other work is listed apart and does not count.
"""

import dataclasses
import math

from jaxtrain.costs.hardware import Hardware
from jaxtrain.costs.layer_sends import LayerSends
from jaxtrain.costs.layout import Layout
from jaxtrain.costs.links import Links
from jaxtrain.costs.parameter_sends import ParameterSends
from jaxtrain.costs.parts import ATTENTION, BUBBLE, FIXED, HOST, MATMULS, MEMORY, OPTIMIZER, STAGE, Parts
from jaxtrain.costs.program import Program
from jaxtrain.costs.transformer import COLUMNS, WHOLE, Transformer, padded_vocabulary
from jaxtrain.schedule.orders import StageTimes, closed_forms

ITEM = 2  # bytes of an activation's number in 16 bits
UPDATE_BYTES = 28.0  # read and written of a parameter by AdamW in 32 bits: three read, three written, and the gradient
BACKWARD_PASSES = 2.0  # over memory, of those of the forward
ATTENTION_BACKWARD = 2.5  # products of attention's backward over the two of its forward: scores again, and four


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
        return 2 * ITEM if self.dtype == "float32" else ITEM

    @property
    def links(self) -> Links:
        """Between its devices."""
        return Links(self.layout, self.hardware)

    @property
    def tokens(self) -> float:
        """Of a microbatch on the devices of `model` together."""
        return self.layout.microbatch * self.model.sequence / self.layout.context

    @property
    def shards(self) -> int:
        """Into how many parts ZeRO cuts what it shares out over `data`."""
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
        sends, recomputed = self._sends(), layout.remat == "full"
        if recomputed:
            again = f + Parts({MATMULS: -sends.unread * self._output(dense)})
        elif layout.remat == "selective":
            again = Parts({ATTENTION: attention, MEMORY: scores}) if program.core_again else Parts({MEMORY: memory})
            if program.fused_attention and program.core_again:
                again = Parts({ATTENTION: attention})
        else:
            again = Parts()
        ops = {"F": f, "R": again, "B": b, "W": w}
        return {
            name: op + sends.of(name, dense, op.exposed.get(ATTENTION, 0.0)) if name != "R" or recomputed else op
            for name, op in ops.items()
        }

    def _sends(self) -> LayerSends:
        """R of our own program leaves out a layer's output that nobody reads: each one with one stage, which keeps the inputs of all
        layers, and with several that of a last layer that stands outside of a unit's loop."""
        layout, layers = self.layout, self._layers_of_unit()
        outside = layout.stage == 1 or layers <= 1 or (layout.zero == 3 and self.shards > 1 and not self.program.gathers_once)
        unread = (1.0 if layout.stage == 1 else 1 / max(1.0, layers)) if outside and self.program.slots else 0.0
        return LayerSends(self.model, layout, self.program, self.links, self.tokens, self.item, unread)

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
        tier = self.links.tier(STAGE)
        return self.message_bytes() / tier.bytes_per_s + 1e-6 * tier.latency_us

    def message_bytes(self) -> float:
        """Of such a message, on a device."""
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

    def vocabulary_sums(self) -> Parts:
        """Of one microbatch, where all stages share embedding and head: activations and gradients that come from the stage that has them to
        all, and back, as four sums over `stage`."""
        layout = self.layout
        if not self.program.vocabulary_parallel or layout.stage == 1:
            return Parts()
        return Parts({STAGE: 4 * self.links.collective(STAGE, self.item * self.tokens * self.model.width / layout.model, rounds=2)})

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
        step = stage * m + head * (m / p if shared else m) + self.vocabulary_sums() * m
        idle = closed_forms(layout.schedule).idle(p, layout.repeats, StageTimes(*times))
        waits = self.hardware.waited(step.seconds, idle) if p > 1 else 0.0
        return step + Parts({BUBBLE: waits}) + self._messages(sum(times)) + self.around(step, times[0], times[2] + times[3])

    def around(self, busy: Parts, forward: float, backward: float) -> Parts:
        """What a step has beside its microbatches: ZeRO-3's collectives, sums of gradients, the optimizer. busy: of a stage, with its
        microbatches; forward, backward: seconds of one."""
        sends = self._parameter_sends()
        return sends.zero_3(busy) + sends.sums(forward, backward) + self.update() + Parts({FIXED: self.program.fixed_s})

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

    def _parameter_sends(self) -> ParameterSends:
        model, layout = self.model, self.layout
        stages = layout.stage if self.program.vocabulary_parallel else 1
        output = (model.vocab_size / (stages * layout.model) + model.positions) * model.width
        rows = self.item * self.tokens * model.width / layout.model
        held = self.device_parameters()
        dense = model.dense_layers * self.layer_parameters(dense=True)
        numbers = held.all, held.layers + dense, held.experts, output
        return ParameterSends(layout, self.program, self.links, self.item, self.shards, *numbers, rows)

    def parts_of_ends(self, zero: int, shared: bool | None = None) -> int:
        """Into how many parts stages cut the state of what all of them have at both ends, of which each updates its own.

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
