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

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxtrain.config import OptimizerConfig
from jaxtrain.config.optimizers import OPTIMIZERS
from jaxtrain.config.saved_values import ATTENTION as ATTENTION_CORE
from jaxtrain.config.sizes import SHARD_AXES, scattered
from jaxtrain.planner.step.collectives import (
    CONTEXT,
    DATA,
    EXPERT,
    FLOAT32,
    FP8,
    MODEL,
    PERMUTE,
    REPLICA,
    STAGE,
    Collective,
    Links,
    Parameters,
    StepCollectives,
    scales_of,
)
from jaxtrain.planner.step.frameworks import Framework
from jaxtrain.planner.step.hardware import Hardware
from jaxtrain.planner.step.layout import Layout
from jaxtrain.planner.step.overlapped_cell import Phases, most_saved, saved_by_pair
from jaxtrain.planner.step.transformer import (
    COLUMNS,
    MAKES,
    UNSPLIT,
    Array,
    Transformer,
    padded_vocabulary,
)
from jaxtrain.schedule.orders import PLACEMENTS, Schedule, StageTimes, closed_forms
from jaxtrain.schedule.placement import Placement, balanced

FLOAT8, MXFLOAT8 = "float8", "mxfloat8"  # the keys of their peaks
ITEM = 2  # bytes of a number in 16 bits
BACKWARD_PASSES = 2.0  # passes of the backward over memory, for one of the forward

MATMULS, ATTENTION, MEMORY, BUBBLE, OPTIMIZER, HOST, DISK, FIXED = (
    "matmuls",
    "attention",
    "memory",
    "bubble",
    "optimizer",
    "host",
    "disk",
    "fixed",
)
MASTERS, PARAMETERS = "masters", "parameters"  # numbers of a device beside an optimizer's state
COMMUNICATION_AXES = (MODEL, CONTEXT, EXPERT, STAGE, DATA, REPLICA)


def bytes_of(dtype: str) -> int:
    """Bytes of a number of a type as a config names it."""
    return 2 * ITEM if dtype == "float32" else ITEM


@dataclasses.dataclass(frozen=True)
class TimeBreakdown:
    """Seconds by part. Communication is named by its mesh axis.

    exposed: parts that add up to the time
    hidden:  seconds that overlap with other parts
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
    return {**a, **{part: a.get(part, 0.0) + seconds for part, seconds in b.items()}}


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


def hidden_messages(seconds: float) -> TimeBreakdown:
    """What changes where so many seconds of routed tokens' messages are hidden behind other
    work."""
    return TimeBreakdown({EXPERT: -seconds}, {EXPERT: seconds}) if seconds else TimeBreakdown()


@dataclasses.dataclass(frozen=True)
class DeviceParameters:
    """Numbers of parameters on a device.

    layers:  in the stage's layers
    ends:    before and after them: tables, the last norm, dense first layers, multi-token
             prediction modules
    experts: the part of `layers` that experts have
    sharded_ends: `ends` where they are sharded as in ZeRO-3 (`parallel.ends`), otherwise None
    """

    layers: float
    ends: float
    experts: float
    sharded_ends: float | None = None

    @property
    def all(self) -> float:
        return self.layers + self.ends


class StateNumbers(NamedTuple):
    """Numbers of an optimizer's state, or of masters, on a device: of a layer in a stage's stack,
    and of what all stages have: an MLP layer, the layer of a prediction module, a table of the
    vocabulary, and the rest of the ends."""

    layer: float
    dense_layer: float
    predictor: float
    table: float
    ends: float


class Product(NamedTuple):
    """Seconds on a device of a product, and of the gradients of its input and its weights. name: as
    in Transformer.layer"""

    name: str
    forward: float
    inputs: float
    weights: float


@functools.lru_cache(maxsize=4096)
def _state_numbers(
    model: Transformer,
    of: OptimizerConfig | str,
    sizes: tuple[int, ...],
    zero: bool,
    shared: bool,
    shards_ends: bool,
) -> StateNumbers:
    """The state where ZeRO shards a dimension of each array.

    of: an optimizer's state; MASTERS, which are those of the matrices that products read; or
    PARAMETERS, which stages do not share
    sizes: of the axes in COMMUNICATION_AXES; zero: ZeRO's stage is at least 1; shared: each table
    is split over the stages; shards_ends: what stands before and after the layers has axes of its
    own
    """
    by_axis = dict(zip(COMMUNICATION_AXES, sizes, strict=True))
    optimizer = None if isinstance(of, str) else of
    record = OPTIMIZERS[optimizer.name] if optimizer else None

    def numbers(
        array: Array, at_end: bool = True, over_stage: bool = True, padded: tuple[int, ...] = ()
    ) -> int:
        padded = padded or array.shape
        splits = [by_axis.get(axis, 1) for axis in array.axes]
        if zero:
            shard_axes = SHARD_AXES if at_end and shards_ends else (DATA,)
            inside = [axis for axis in shard_axes if axis not in array.axes]
            unsplit = [not axis for axis in array.axes]
            axes, dim = scattered(padded, unsplit, inside, over_stage and of != PARAMETERS, by_axis)
            splits[dim] *= math.prod(by_axis[axis] for axis in axes)
        # Without padding a dimension may not divide; each device has all of it.
        held = padded if record is None or record.elementwise else array.shape
        parts = [n if n % split else n // split for n, split in zip(held, splits, strict=True)]
        if record is None or optimizer is None:
            return math.prod(parts) if array.cast or of == PARAMETERS else 0
        state = record.state(array.shape, optimizer)
        return sum(math.prod(parts[dim] for dim in dims) for dims in state)

    layer, dense_layer = model.layer().arrays, model.layer(dense=True).arrays
    by_axis["vocabulary"] = shards = by_axis[MODEL] * (by_axis[STAGE] if shared else 1)
    table = Array((model.vocab_size, model.width), ("vocabulary", ""))
    padded = padded_vocabulary(model.vocab_size, shards), model.width
    return StateNumbers(
        sum(numbers(array, at_end=False, over_stage=False) for array in layer),
        sum(map(numbers, dense_layer)),
        sum(map(numbers, layer)),
        numbers(table, over_stage=not shared, padded=padded),
        sum(map(numbers, model.end_arrays)),
    )


@dataclasses.dataclass(frozen=True)
class StepModel:
    """The step that is planned: a model with a layout, trained by a framework, on devices of one
    kind.

    by_sequence: what layers save of a microbatch is taken to be that of one sequence times their
        number, for searches, which have many sizes of microbatches (saved.py)
    """

    model: Transformer
    layout: Layout
    framework: Framework
    hardware: Hardware
    dtype: str = "bfloat16"
    optimizer: OptimizerConfig = OptimizerConfig()
    by_sequence: bool = False
    _layers: dict[bool, dict[str, TimeBreakdown]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _ends: dict[bool, dict[str, float]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        undivided = self.framework.by_dimension and self.model.width % self.layout.data
        return 1 if undivided else self.layout.data

    @functools.cached_property
    def axes_of_ends(self) -> tuple[str, ...]:
        """The axes inside a stage over which what stands before and after the layers is sharded as
        in ZeRO-3, experts but for their own axis; () where it is not."""
        if not (self.layout.shards_ends and self.framework.slots):
            return ()
        sizes = {axis: getattr(self.layout, axis) for axis in SHARD_AXES}
        return scattered((self.model.width,), [True], SHARD_AXES, False, sizes)[0]

    def sharded(self, held: DeviceParameters, shards: int) -> float:
        """The number of parameters on a device where ZeRO cuts layers into so many shards, and with
        them what stands before and after them, unless that has axes of its own."""
        if held.sharded_ends is None:
            return held.all / shards
        return held.layers / shards + held.sharded_ends

    @property
    def reduces_in_ops(self) -> bool:
        """True if each microbatch's gradients are reduced: from ZeRO-2 on, and by jaxtrain with
        ZeRO-1 where a step is one microbatch on one stage (`Config.resolve`)."""
        layout = self.layout
        is_one = self.framework.slots and layout.stage == layout.microbatches == 1
        return layout.zero > 1 or (layout.zero == 1 and is_one)

    # --------------------------------------------------------------------------------------- layers

    def layer(self, dense: bool = False) -> dict[str, TimeBreakdown]:
        """F, R, B and W of one layer and microbatch; R is what the layout's recomputation costs of
        a layer that has it, and the others are those of the mean layer."""
        if dense not in self._layers:
            self._layers[dense] = self._layer(dense)
        return self._layers[dense]

    def _layer(self, dense: bool) -> dict[str, TimeBreakdown]:
        recomputation, unread = self.layout.recomputation, self._unread
        if recomputation.layers is None:
            return self._ops_of_layer(dense, unread)
        recomputed, others = (
            dataclasses.replace(self, layout=self.layout.with_remat(mode))
            for mode in (recomputation.mode, "none")
        )
        ops, fraction = recomputed._ops_of_layer(dense, unread), self.recomputed_fraction
        for op, seconds in others._ops_of_layer(dense, unread).items():
            if op != "R":
                ops[op] = ops[op] * fraction + seconds * (1 - fraction)
        return ops

    @functools.cached_property
    def recomputed_fraction(self) -> float:
        """The fraction of the layers that the layout's recomputation concerns."""
        return self.layout.recomputed_fraction(self.model.layers)

    def mean_layer(self, dense: bool = False) -> dict[str, TimeBreakdown]:
        """F, R, B and W of the mean layer and a microbatch."""
        ops = self.layer(dense)
        return ops | {"R": ops["R"] * self.recomputed_fraction}

    def _ops_of_layer(self, dense: bool, unread: float) -> dict[str, TimeBreakdown]:
        """F, R, B and W where all layers have the same recomputation. unread: `_unread`"""
        products = list(self._products(dense))
        forward, inputs, weights = (
            sum(of_op) for of_op in zip(*(seconds for _, *seconds in products), strict=True)
        )
        attention, attention_back, scores = self._attention()
        passes = self._passes(dense)
        pass_over_weights = self.item * self.layer_parameters(dense) / self.hardware.streaming
        looped = self._layers_of_unit() > 1
        read = self.framework.weight_copies * pass_over_weights if looped else 0.0
        sums = self.framework.sum_passes * pass_over_weights * 2 * ITEM / self.item
        # The last product makes the layer's output. With one stage experts' gradients read theirs.
        read_anyway = self.model.experts and not dense and not self.layout.saves_inputs
        last = sum(product.forward for product in products if product.name == "mlp_out")
        skipped = 0.0 if read_anyway else unread * last
        memory = passes + scores + read
        core = {ATTENTION: attention, MEMORY: scores}
        recomputed: dict[str, dict[str, float]] = {
            "full": {MATMULS: forward - skipped, ATTENTION: attention, MEMORY: memory},
            "selective": core if self.framework.recomputes_core else self._made_again(dense),
            "none": {},
        }
        memory_back = BACKWARD_PASSES * (passes + scores) + read
        ops = {
            "F": {MATMULS: forward, ATTENTION: attention, MEMORY: memory},
            "R": recomputed[self.layout.recomputation.mode],
            "B": {MATMULS: inputs, ATTENTION: attention_back, MEMORY: memory_back},
            "W": {MATMULS: weights, MEMORY: sums},
        }
        return {
            op: TimeBreakdown(parts) + self._layer_collectives(op, dense, parts, unread)
            for op, parts in ops.items()
        }

    def _made_again(self, dense: bool) -> dict[str, float]:
        """Seconds by part of what selective recomputation makes again: the products and the core of
        attention whose results a layer does not save, and passes over memory."""
        attention, _, scores = self._attention()
        core = self.layout.makes_again(ATTENTION_CORE)
        return {
            MATMULS: sum(
                product.forward
                for product in self._products(dense)
                if product.name in MAKES and self.layout.makes_again(MAKES[product.name])
            ),
            ATTENTION: attention * core,
            MEMORY: self._passes(dense) + scores * core,
        }

    def _products(self, dense: bool) -> Iterator[Product]:
        """Each product of a layer; routed and shared experts have one each."""
        model, layout = self.model, self.layout
        for name, inputs, outputs in model.layer(dense).products:
            k = inputs if name in COLUMNS or name in UNSPLIT else inputs / layout.model
            n = outputs / layout.model if name in COLUMNS else outputs
            fp8 = self.framework.fp8 and name != "router"
            if not (model.experts and not dense and name.startswith("mlp")):
                yield Product(name, *self._product(self.tokens, n, k, fp8=fp8))
                continue
            chosen = model.experts_per_token + model.shared_experts
            k, n = (k / chosen, n) if name == "mlp_out" else (k, n / chosen)
            local = model.experts / layout.expert
            # Tokens of an expert on the busiest device of `expert`, for which the others wait.
            busiest = self.framework.imbalance if layout.expert > 1 else 1.0
            routed = self.tokens * model.experts_per_token / local * busiest
            yield Product(name, *self._product(routed, n, k, local, fp8))
            yield Product(name, *self._product(self.tokens, n, k, model.shared_experts, fp8))

    def _product(
        self, m: float, n: float, k: float, times: float = 1, fp8: bool = False
    ) -> tuple[float, float, float]:
        """Seconds of so many products [m, k] · [k, n], and of the gradients of both operands. fp8:
        of FP8 where the hardware has that, with what it costs to quantize both activations."""
        hardware = self.hardware
        flops = 2.0 * m * n * k / hardware.peak(self.dtype)
        moved = self.item * (m * k + k * n + m * n) / hardware.streaming
        launch, reached = 1e-6 * hardware.launch_us, hardware.matmul.reached
        seconds = [
            max(flops / reached(m, n, k), moved) + launch,
            max(flops / reached(m, k, n), moved) + launch,
            max(flops / reached(k, n, m), moved) + launch,
        ]
        if fp8:
            blocks = self.framework.fp8_blocks
            key = MXFLOAT8 if blocks else FLOAT8
            peak = hardware.peak_tflops.get(key, hardware.peak_tflops[self.dtype])
            faster = hardware.peak_tflops[self.dtype] / peak
            weights = faster if self.framework.fp8_weight_gradients else 1.0
            # A pass finds the largest number, another one reads and writes; in blocks a pass for
            # each of two forms does both.
            written = 2 * FP8 * scales_of(blocks) if blocks else FP8
            passes = (2 * self.item + written) / hardware.streaming
            seconds = [
                seconds[0] * faster + passes * m * k + 2 * launch,
                seconds[1] * faster + passes * m * n + 2 * launch,
                seconds[2] * weights,
            ]
        forward, inputs, of_weights = (times * s for s in seconds)
        return forward, inputs, of_weights

    def _layer_collectives(
        self, op: str, dense: bool, parts: Mapping[str, float], unread: float
    ) -> TimeBreakdown:
        """Collectives of one layer's op. parts: its seconds; rings of keys and values overlap with
        those of attention. unread: `_unread`"""
        c, full = self.collectives, self.layout.remat == "full"
        if op == "R" and not full:
            return TimeBreakdown()
        fused = self.framework.slots and self.layout.stage == 1 and full
        seconds = self.links.seconds(c.layer(op, fused=fused, dense=dense))
        if op == "R" and unread:
            fewer = self.links.seconds(c.layer(op, True, fused, dense))
            seconds = {axis: s + unread * (fewer.get(axis, 0.0) - s) for axis, s in seconds.items()}
        ring = float(self.framework.context_by == "ring" and self.hardware.alone <= 1)
        overlap = self.framework.model_overlap, math.inf
        if self.framework.collective_matmul:
            overlap = 1.0, self._beside_products(op, dense, seconds.get(MODEL, 0.0))
        pairs = (0.0, 0.0) if dense or op != "R" else self._pairs_of_layers()
        overlaps = {MODEL: overlap, CONTEXT: (ring, parts.get(ATTENTION, 0.0)), EXPERT: pairs}
        return overlapped(seconds, overlaps)

    def _pairs_of_layers(self) -> tuple[float, float]:
        """The fraction of R's messages to experts that XLA covers, and the seconds of work beside
        those of one layer, where R recomputes layers by twos: each from its own input, and in one
        op (runtime/layer_stack.py)."""
        layers = self.layout.recomputation.recomputed(max(self.layout.units(self.model.layers)))
        by_twos = self.layout.saves_inputs and not self.collectives.gathers_in_ops
        if not (self.model.experts and by_twos and layers > 1):
            return 0.0, 0.0
        phases = self._phases("F")
        last = [p.forward for p in self._products(False) if p.name == "mlp_out"]
        saved = saved_by_pair(phases._replace(experts=phases.experts - sum(last)))
        return self.framework.cell_overlap, saved * (layers - layers % 2) / layers

    def _beside_products(self, op: str, dense: bool, seconds: float) -> float:
        """Seconds of an op's collectives over `model` that go beside products: of each, up to those
        of the product that reads what is gathered or makes what is summed, but for one part of
        the product (parallel/collective_matmul.py). seconds: of the collectives, which are taken to
        be of one size"""
        routed = self.model.experts and not dense
        split = [
            product
            for product in self._products(dense)
            if product.name not in UNSPLIT and not (routed and product.name.startswith("mlp"))
        ]
        if op == "W":  # what row-parallel products multiply was gathered by B
            split = [product for product in split if product.name in COLUMNS]
        work = {"F": "forward", "R": "forward", "B": "inputs", "W": "weights"}[op]
        fraction = 1 - 1 / self.layout.model
        each = seconds / max(1, len(split))
        return sum(min(each, fraction * getattr(product, work)) for product in split)

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
            reduces_in_ops=self.reduces_in_ops,
            imbalance=framework.imbalance,
            outer_int8=framework.sent_outer < framework.sent_weight,
            fp8=framework.fp8,
            fp8_weight_gradients=framework.fp8_weight_gradients,
            fp8_blocks=framework.fp8_blocks,
        )

    @functools.cached_property
    def _unread(self) -> float:
        """Fraction of recomputed layers whose recomputation can skip the down projection, because
        nothing reads its output: all of them where every layer's input was saved, as with one
        stage; otherwise only the last one of a unit, when it runs outside the unit's loop."""
        layout, layers = self.layout, self._layers_of_unit() * self.recomputed_fraction
        gathers = layout.zero == 3 and self.shards > 1 and not self.framework.gathers_once
        if not self.framework.slots:
            return 0.0
        if layout.stage == 1 or layout.saves_inputs:
            return 1.0
        return 1 / max(1.0, layers) if layers <= 1 or gathers else 0.0

    def _layers_of_unit(self) -> float:
        """The mean number of layers that an op of our own runtime goes through."""
        return self.model.layers / len(self.layout.units(self.model.layers))

    def layer_parameters(self, dense: bool = False) -> float:
        """Parameters of one layer on a device."""
        return self.model.device_layer_parameters(self.layout.model, self.layout.expert, dense)

    def _attention(self) -> tuple[float, float, float]:
        """Seconds of attention's core, forward and backward, and of its scores' passes through
        memory, forward. Fused kernels leave out what is masked, and keep scores on the chip."""
        model, layout, hardware = self.model, self.layout, self.hardware
        flops = layout.microbatch * model.attention_flops() / (layout.model * layout.context)
        seconds = flops / hardware.peak(self.dtype)
        if self.framework.fused_attention:
            forward = 0.5 * seconds / hardware.attention_forward
            products = self.framework.attention_backward
            return forward, products * 0.5 * seconds / hardware.attention_backward, 0.0
        seconds /= hardware.matmul.reached(model.sequence, model.sequence, model.score_dim)
        scores = self.tokens * model.sequence * model.heads / layout.model
        moved = self.item * self.framework.attention_passes * scores
        return seconds, 2 * seconds, moved / hardware.streaming

    def _passes(self, dense: bool) -> float:
        """Seconds of passes over activations besides products, forward."""
        model, framework, split = self.model, self.framework, self.layout.model
        outside = framework.passes * model.width
        if framework.sequence_parallel:
            outside /= split
        heads = (model.heads + 2 * model.kv_heads) * model.head_dim
        hidden = model.hidden(dense) * (1.5 if model.gated else 1.0)
        inner = framework.inner_passes * (heads + hidden) / split
        # operations, each of which reads and writes
        started = (framework.passes + framework.inner_passes) / 2
        moved = self.item * self.tokens * (outside + inner)
        return moved / self.hardware.streaming + 1e-6 * self.hardware.launch_us * started

    def saved_by_overlap(self) -> float:
        """`saved_in_layer` on an entire stage, of the mean number of layers."""
        return self.saved_in_layer() * self.model.layers / self.layout.stage

    def saved_in_layer(self) -> float:
        """Seconds by which F and B of one microbatch each, in one layer, are expected to be shorter
        in overlapped cells than one after the other (overlapped_cell.py). Nothing is measured."""
        if not self.model.experts:
            return 0.0
        partial = self.layout.recomputation.layers is not None
        step = dataclasses.replace(self, layout=self.layout.with_remat("none")) if partial else self
        return self.framework.cell_overlap * most_saved(step._phases("F"), step._phases("B"))

    def _phases(self, op: str) -> Phases:
        """The phases of a layer with experts in F or B."""
        forward = op == "F"
        seconds = {True: 0.0, False: self._attention()[not forward]}  # experts', or others'
        for product in self._products(dense=False):
            is_experts = product.name.startswith("mlp")
            seconds[is_experts] += product.forward if forward else product.inputs
        outward, back = (
            self.links.seconds(messages).get(EXPERT, 0.0)
            for messages in self.collectives.routed(op)
        )
        dispatch, combine = (outward, back) if forward else (back, outward)
        return Phases(seconds[False], dispatch, seconds[True], combine)

    # ----------------------------------------------------------------------------- messages and end

    def message(self) -> float:
        """Seconds of a microbatch's activations from a stage to its neighbour."""
        message = Collective(PERMUTE, (STAGE,), self.message_bytes())
        return self.links.seconds([message]).get(STAGE, 0.0)

    def message_bytes(self) -> float:
        """Bytes that a device sends of a message between stages."""
        split = self.layout.model if self.framework.split_sends else 1
        return self.item * self.tokens * self.model.width / split

    def head(self) -> TimeBreakdown:
        """Head, loss, embedding and multi-token prediction modules of one microbatch, forward and
        backward, on the devices of one stage."""
        width, columns = self.model.width, self.model.vocab_size / self.layout.model
        passes = 4 * self.framework.logit_passes * columns + 3 * self.item * width
        products = sum(self._product(self.tokens, columns, width))
        memory = self.tokens * passes / self.hardware.streaming
        logits = TimeBreakdown({MATMULS: products, MEMORY: memory})
        modules, held = self.model.predictions, self.layer_parameters() + 2 * width**2
        table = self._sharded_at_end(width * columns, 1, 1)
        if not modules:
            return logits + table
        # A prediction module joins two streams of the width and has a layer.
        joining = sum(self._product(self.tokens / self.layout.model, width, 2 * width))
        ops = [op for name, op in self.layer().items() if name != "R"]
        layer = sum(ops, TimeBreakdown({MATMULS: joining}))
        # The sum of the matrix's gradient is beside the modules' backward, what the modules gather
        # beside the head; the rest is waited for.
        covered = self._sharded_at_end(width * columns, 0, 1) + self._sharded_at_end(held, 1, 0)
        waits = self._sharded_at_end(width * columns, 1, 0) + self._sharded_at_end(held, 0, 1)
        sharded = waits + self._overlapped_with(layer, covered)
        return logits * (1 + modules) + layer * modules + sharded

    def _sharded_at_end(self, size: float, gathers: int, sums: int) -> TimeBreakdown:
        """Seconds in which an op of embedding or head gathers so many parameters, so many times,
        and scatters the sums of their gradients, where these are sharded as in ZeRO-3."""
        if not self.axes_of_ends:
            return TimeBreakdown()
        c, p = self.collectives, self._parameters[2]._replace(size=size)
        return TimeBreakdown(
            self.links.seconds([*c.gathers([p] * gathers), *c.reductions_in_op([p] * sums)])
        )

    def _overlapped_with(self, work: TimeBreakdown, messages: TimeBreakdown) -> TimeBreakdown:
        """Messages of an op of embedding or head that have this work beside them: on GPUs, as for
        overlapped cells; on TPUs they are synchronous."""
        part = float(self.framework.cell_overlap > 0), work.seconds
        return overlapped(messages.exposed, dict.fromkeys(messages.exposed, part))

    def end_collectives(self, shared: bool) -> TimeBreakdown:
        """Collectives of embedding, head and loss of one microbatch over `model` and `stage`.

        shared: all stages share both ends; otherwise those of the stage that has the head
        """
        seconds = self._end_seconds(shared and self.layout.stage > 1)
        return TimeBreakdown({axis: s for axis, s in seconds.items() if axis != DATA})

    def _end_seconds(self, shared: bool) -> dict[str, float]:
        """Seconds by axis of the collectives of a microbatch's embedding, head and loss. shared: by
        all stages. A step asks twice."""
        if shared not in self._ends:
            c, one_stage = self.collectives, self.layout.stage == 1
            if c.shares_vocabulary != shared:
                c = dataclasses.replace(c, shares_vocabulary=shared)
            collectives = [c.stage_sum(4)]
            if self.framework.slots:
                collectives += c.loss() * (1 + self.model.predictions)
            if self.framework.slots and (shared or one_stage):
                table = self._parameters[-1]
                collectives += c.lookup(table) + c.lookup_gradient(table, same_op=one_stage)
            self._ends[shared] = self.links.seconds(collectives)
        return self._ends[shared]

    # ------------------------------------------------------------------------------------- the step

    def step(self) -> TimeBreakdown:
        """The step, on the device that works most."""
        layout, m, several = self.layout, self.layout.microbatches, self.layout.stage > 1
        ops, first, last = self.mean_layer(), self.dense_layers(), self.head()
        layer = sum(ops.values(), TimeBreakdown())
        forms = self.schedule_forms
        saved = self.saved_in_layer() if layout.overlap else 0.0
        cells = forms.shared_cells(layout.stage, layout.repeats, m) / layout.repeats
        layers, has_first, has_last = self._busiest_stage(
            layer.seconds - saved * cells / m, first.seconds, last.seconds
        )
        saved_on_stage = saved * layers
        shared = self.framework.vocabulary_parallel and several
        step = (layer * layers + first * has_first) * m
        step += last * has_last * (m / layout.stage if shared else m)
        step += self.end_collectives(shared) * m
        step += hidden_messages(saved_on_stage * cells)
        seconds = {name: ops[name].seconds * layers for name in "FRBW"}
        times = StageTimes(**seconds, overlap=saved_on_stage)
        waits = TimeBreakdown({BUBBLE: 0.0})
        if several:
            idle = forms.idle(layout.stage, layout.repeats, times)
            waits = TimeBreakdown({BUBBLE: self.hardware.waited(step.seconds, idle)})
            waits += self._messages(times.all)
        return step + waits + self.outside_microbatches(step, times.F, times.B + times.W)

    def _busiest_stage(self, layer: float, first: float, last: float) -> tuple[int, bool, bool]:
        """Returns (the layers of the stage that works most; whether it has `first`, the dense
        layers before the others, and `last`, the head), from the seconds of these for one
        microbatch."""
        placement, layout = self.balanced, self.layout
        if placement is None:
            return math.ceil(self.model.layers / layout.stage), True, True
        held = [0] * layout.stage
        for stage, size in zip(placement.stage_of, placement.sizes, strict=True):
            held[stage] += size
        ends = placement.stage_of[0], placement.stage_of[-1]
        parts = [(size, stage == ends[0], stage == ends[1]) for stage, size in enumerate(held)]
        return max(parts, key=lambda part: sum(map(operator.mul, part, (layer, first, last))))

    @property
    def schedule_forms(self) -> Schedule:
        """The closed forms of the schedule; other frameworks have no overlapped cells."""
        return closed_forms(self.layout.schedule, self.layout.overlap and self.framework.slots)

    @functools.cached_property
    def balanced(self) -> Placement | None:
        """The placement in which stages with what is in no unit have fewer layers, by closed forms
        (pipeline/setup.py); None where layers are spread evenly."""
        model, layout = self.model, self.layout
        ends = model.dense_layers or model.predictions
        if not self.framework.slots or layout.stage == 1 or not ends:
            return None
        stage_of = PLACEMENTS[self.schedule_forms.placement](layout.stage, max(1, layout.repeats))
        least = (0, *(1,) * (len(stage_of) - 2), 0)
        layer = sum(op.seconds for op in self.mean_layer().values())
        if layout.overlap:
            layer -= self.saved_in_layer()
        seconds = layer, self.dense_layers().seconds, self.head().seconds
        sizes = balanced(model.layers, stage_of, least, *seconds)
        return Placement(model.layers, layout.stage, 1, stage_of, sizes)

    def _messages(self, microbatch: float) -> TimeBreakdown:
        """Two messages a chunk and microbatch, one each way, and the wait for those that arrive
        before any work. microbatch: seconds of a stage's work for one."""
        layout, each = self.layout, self.message()
        number = 2 * layout.microbatches * layout.repeats
        if not self.framework.stage_overlap:
            return TimeBreakdown({STAGE: each * number})
        late = max(0.0, each - microbatch / layout.repeats / 2) * number
        exposed = late + 2 * each * (layout.stage - 1)
        return TimeBreakdown({STAGE: exposed}, {STAGE: max(0.0, each * number - exposed)})

    def device_parameters(self, layers: int = 0, shared: bool | None = None) -> DeviceParameters:
        """The parameters of a device on the stage with most of them.

        layers: that a device has memory for; those of the busiest stage if 0
        shared: all stages share the tables at both ends; as the framework has it if None. Where
                they do not, each stage of our own runtime has both tables; others' first and last
                stage have one each.
        """
        model, layout, framework = self.model, self.layout, self.framework
        layers = layers or math.ceil(model.layers / layout.stage)
        shared = framework.vocabulary_parallel if shared is None else shared
        table = model.device_table_parameters(layout.model, layout.stage if shared else 1)
        ends = self._tables(shared) * table + model.end_parameters
        ends += model.dense_layers * self.layer_parameters(dense=True)
        ends += model.predictions * self.layer_parameters()
        experts = model.expert_parameters() / (layout.model * layout.expert)
        sharded = self._numbers_at_ends(PARAMETERS, shared) if self.axes_of_ends else None
        return DeviceParameters(layers * self.layer_parameters(), ends, layers * experts, sharded)

    def _tables(self, shared: bool) -> int:
        """Tables of the vocabulary on the stage with most of them."""
        one_end = self.layout.stage > 1 and not shared and not self.framework.slots
        return 1 if one_end else self.model.tables

    def device_state(self, layers: int = 0, shared: bool | None = None) -> float:
        """Numbers of the optimizer's state on a device of the stage with most of them, without
        counts of updates. The arguments are those of `device_parameters`."""
        model, layout = self.model, self.layout
        if not self.framework.by_dimension:
            record, layer = OPTIMIZERS[self.optimizer.name], model.layer()
            numbers = sum(record.state_numbers(a.shape, self.optimizer) for a in layer.arrays)
            held = self.device_parameters(layers, shared).all
            return numbers / layer.all * held / (self.shards if layout.zero else 1)
        return self._sharded_by_dimension(self.optimizer, layers, shared)

    def device_masters(self, layers: int = 0, shared: bool | None = None) -> float:
        """Numbers of the masters that such a device has, if the framework has masters. The
        arguments are those of `device_parameters`."""
        layout = self.layout
        if self.framework.by_dimension:
            return self._sharded_by_dimension(MASTERS, layers, shared)
        held = self.device_parameters(layers, shared)
        updated = held.layers + held.ends / self.parts_of_ends(layout.zero, shared)
        return updated / (self.shards if layout.zero else 1)

    def _sharded_by_dimension(
        self, of: OptimizerConfig | str, layers: int, shared: bool | None
    ) -> float:
        """Numbers of an optimizer's state, or of masters, on a device of the stage with most."""
        shared = self.framework.vocabulary_parallel if shared is None else shared
        layers = layers or math.ceil(self.model.layers / self.layout.stage)
        return layers * self._numbers(of, shared).layer + self._numbers_at_ends(of, shared)

    def _numbers(self, of: OptimizerConfig | str, shared: bool) -> StateNumbers:
        sizes, zero = tuple(getattr(self.layout, a) for a in COMMUNICATION_AXES), self.layout.zero
        return _state_numbers(self.model, of, sizes, zero > 0, shared, bool(self.axes_of_ends))

    def _numbers_at_ends(self, of: OptimizerConfig | str, shared: bool) -> float:
        """The numbers that a device has before and after its layers."""
        model, numbers = self.model, self._numbers(of, shared)
        ends = numbers.ends + self._tables(shared) * numbers.table
        return ends + (
            model.dense_layers * numbers.dense_layer + model.predictions * numbers.predictor
        )

    @functools.cached_property
    def _parameters(self) -> tuple[Parameters, ...]:
        """A device's parameters as collectives see them: experts; other layers; the output matrix
        with the prediction modules; the input's table. Other frameworks have the last three in one.
        Dense layers are with the other layers, or with the output matrix where both are sharded
        alike."""
        model, layout, framework = self.model, self.layout, self.framework
        held, axes = self.device_parameters(), self.axes_of_ends
        dense = 0.0 if axes else model.dense_layers * self.layer_parameters(dense=True)
        data = (DATA,) if self.shards > 1 else ()
        scatter = data if layout.zero else ()
        replicas = () if framework.inner_steps else (REPLICA,)
        sums = tuple(a for a in (*replicas, DATA, CONTEXT) if a not in scatter)
        experts = Parameters(
            held.experts, scatter, sums, (STAGE, EXPERT, MODEL), scatter, data, product=True
        )
        size, ends = held.layers + dense - held.experts, held.ends - dense
        layers = experts._replace(size=size, sums=(*sums, EXPERT), split=(STAGE, MODEL))
        if not framework.slots:
            return experts, layers._replace(size=size + ends)
        stages = layout.stage if framework.vocabulary_parallel else 1
        table = 0.0 if model.tied else model.device_table_parameters(layout.model, stages)
        at_ends = layers._replace(product=False)
        if axes:
            sums = tuple(a for a in (*replicas, *SHARD_AXES, STAGE) if a not in axes)
            at_ends = Parameters(0, axes, sums, (MODEL,), axes, axes, as_zero3=True)
        elif layout.stage > stages and self.parts_of_ends(layout.zero) > 1:
            all_sums = (*sums, EXPERT)
            at_ends = Parameters(0, (*scatter, STAGE), all_sums, (MODEL,), scatter, (*data, STAGE))
        elif layout.stage > stages:
            at_ends = Parameters(0, scatter, (*sums, STAGE, EXPERT), (MODEL,), scatter, data)
        return experts, layers, at_ends._replace(size=ends - table), at_ends._replace(size=table)

    def outside_microbatches(
        self, busy: TimeBreakdown, forward: float, backward: float
    ) -> TimeBreakdown:
        """Collectives of parameters and their gradients (ZeRO's in each microbatch, sums after the
        last one, what the update gathers, DiLoCo's), the optimizer, and the framework's fixed time.

        busy: a stage with its microbatches; forward, backward: seconds of one microbatch
        """
        layout, framework, c = self.layout, self.framework, self.collectives
        parameters, m = self._parameters, layout.microbatches
        has_r = framework.slots and layout.stage > 1 and layout.recomputation.mode == "full"
        gathers = c.gathers(parameters[:2])
        in_r = self.recomputed_fraction * has_r
        microbatch = gathers * 2 + [g._replace(times=g.times * in_r) for g in gathers]
        microbatch += c.reductions_in_op(parameters[:2])
        if not self.axes_of_ends:  # else in the ops of embedding and head
            microbatch += c.reductions_in_op(parameters[2:3])
            if framework.slots:  # of the input's table, tokens' vectors are sent
                microbatch += c.gathers(parameters[2:3])
        one_link = framework.one_link if layout.zero == 3 else 0.0
        over_data = lambda collectives: self.links.seconds(collectives, one_link).get(DATA, 0.0)
        ends = self._end_seconds(c.shares_vocabulary).get(DATA, 0.0)
        zero, overlap = m * (over_data(microbatch) + ends), (framework.data_overlap, backward * m)
        if layout.zero == 3 and framework.gathers_once:
            zero += over_data(c.gathered(p) for p in parameters if p.shard and not p.as_zero3)
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
            outer = TimeBreakdown(self.links.seconds(c.outer_exchange(parameters)))
            parts += outer * (1 / framework.inner_steps)
        return parts + self.update() + TimeBreakdown({FIXED: framework.fixed_s})

    def _around_the_update(self) -> tuple[list[Collective], list[Collective]]:
        """The sums of gradients before an update, and the all-gathers of what it has changed."""
        c, parameters = self.collectives, self._parameters
        reductions = [collective for p in parameters for collective in c.reductions(p)]
        return reductions, [c.after_the_update(p) for p in parameters]

    def update_op(self) -> TimeBreakdown:
        """The op that updates a stage's parameters in a table of several steps: sums of gradients,
        the optimizer, all-gathers."""
        reductions, gathers = self._around_the_update()
        return self.update() + TimeBreakdown(self.links.seconds([*reductions, *gathers]))

    def parts_of_ends(self, zero: int, shared: bool | None = None) -> int:
        """The number of shards into which stages cut the state of embedding and head; each stage
        updates its own shard.

        zero: ZeRO's stage; shared: as in `device_parameters`
        """
        shared = self.framework.vocabulary_parallel if shared is None else shared
        divides = self.model.width % (self.shards * self.layout.stage) == 0
        return self.layout.stage if self.framework.slots and not shared and zero and divides else 1

    def update(self) -> TimeBreakdown:
        """The optimizer's passes over its state, which comes from the host's memory or the disk and
        goes back where it is offloaded. A disk's stream goes on while the devices update; only what
        is longer counts. It begins when all gradients are there, since they are clipped by their
        norm, so no other part of the step hides it but for the first buffers."""
        layout, framework, held = self.layout, self.framework, self.device_parameters()
        parameters = held.layers + held.ends / self.parts_of_ends(layout.zero)
        if self.axes_of_ends:
            parameters = self.sharded(held, self.shards)
        elif layout.zero:
            parameters /= self.shards
        # the parameter, or its master, is read and written; a copy of a master is written
        value = framework.master_bytes or framework.weight_bytes
        copy = framework.weight_bytes * (framework.slots and framework.master_bytes > 0)
        passes = FLOAT32 * (OPTIMIZERS[self.optimizer.name].passes - 2) + 2 * value + copy
        state = 2 * framework.moment_bytes * self.device_state()
        seconds = {OPTIMIZER: (passes * parameters + state) / self.hardware.streaming}
        if layout.offloads("optimizer"):
            moved = 2 * framework.master_bytes * parameters + state
            if layout.disk:
                streamed = moved / self.hardware.disk_bytes_per_s
                seconds[DISK] = max(0.0, streamed - seconds[OPTIMIZER])
            else:
                seconds[HOST] = moved / self.hardware.host_bytes_per_s
        return TimeBreakdown(seconds)

    def ops(self) -> dict[str, TimeBreakdown]:
        """F, B, W and R of one microbatch on an entire stage; R if it recomputes all its layers.
        What no R op recomputes is part of B."""
        layers = self.model.layers / self.layout.stage
        ops = {name: op * layers for name, op in self.layer().items()}
        if self.layout.recomputation.mode != "full":
            ops["B"] += ops["R"] * self.recomputed_fraction
            ops["R"] = TimeBreakdown()
        return ops

    def dense_layers(self) -> TimeBreakdown:
        """The layers before the first unit, of one microbatch: forward with the embedding, and
        once more with its gradient."""
        if not self.model.dense_layers:
            return TimeBreakdown()
        if not self.framework.slots:  # others have them among their layers
            return sum(self.mean_layer(dense=True).values(), TimeBreakdown()) * (
                self.model.dense_layers
            )
        ops = self.layer(dense=True)
        layer, layers = ops["F"] * 2 + ops["B"] + ops["W"], self.model.dense_layers
        sharded = self._sharded_at_end(self.layer_parameters(dense=True), 2, 1)
        # a layer's are beside the products of the one before or after, where there is one
        return layer * layers + sharded + self._overlapped_with(layer, sharded) * (layers - 1)

    def op_times(self) -> tuple[float, ...]:
        """Seconds of F, B, W, message, R and head of one microbatch on an entire stage, and, up to
        the last one that the layout has, of F and B at once, of the optimizer's update, and of the
        embedding with the dense layers behind it, in the order of `pipeline.times`."""
        ops, layout = {name: op.seconds for name, op in self.ops().items()}, self.layout
        times = ops["F"], ops["B"], ops["W"], self.message(), ops["R"], self.head().seconds
        both = ops["F"] + ops["B"] - self.saved_by_overlap() if layout.overlap else 0.0
        update = self.update_op().seconds if layout.steps > 1 else 0.0
        later = [both, update, self.dense_layers().seconds / 2]
        while later and not later[-1]:
            later.pop()
        return *times, *later

    # ----------------------------------------------------------------------------------- operations

    def model_flops(self) -> float:
        """Operations of a step that the model itself needs, on all devices: forward, and twice that
        backward. Attention is counted as the framework's rates do."""
        tokens = self.layout.batch * self.model.sequence
        return tokens * self.model.training_flops_per_token(self.framework.causal_rates)

    def tokens_at_peak(self) -> float:
        """Tokens a second of devices that train at their peak, attention counted causally: model
        FLOPs utilization is a step's tokens a second over these."""
        peak = self.layout.devices * self.hardware.peak(self.dtype)
        return peak / self.model.training_flops_per_token()

    def hardware_flops(self) -> float:
        """Operations with those that layers recompute (Narayanan 2021, Korthikanti 2022)."""
        model, causal = self.model, self.framework.causal_rates
        remat, fraction = self.layout.recomputation.mode, self.recomputed_fraction
        recomputed = 0.0
        if remat == "full":
            heads = model.vocab_size * model.width * (1 + model.predictions)
            recomputed = model.sequence_flops(causal) - 2.0 * model.sequence * heads
        elif remat == "selective" and self.framework.recomputes_core:
            recomputed = model.layers * model.attention_flops() * (0.5 if causal else 1.0)
        elif remat == "selective":
            again = self.layout.makes_again
            core = model.attention_flops() * (0.5 if causal else 1.0) * again(ATTENTION_CORE)
            recomputed = model.layers * (2.0 * model.sequence * model.made_again(again) + core)
        return self.model_flops() + self.layout.batch * fraction * recomputed
