"""Seconds of a layer: its products by their shapes, attention by its kernel, passes over memory,
and the collectives of `model`, `context` and `expert`."""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxtrain.config.saved_values import ATTENTION as ATTENTION_CORE
from jaxtrain.planner.step.layer_collectives import FP8, scales_of
from jaxtrain.planner.step.layout import AXES
from jaxtrain.planner.step.links import CONTEXT, EXPERT, MODEL
from jaxtrain.planner.step.model import INPUTS, OUTPUTS, Product
from jaxtrain.planner.step.overlapped_cell import Phases, most_saved, saved_by_pair
from jaxtrain.planner.step.settings import ITEM
from jaxtrain.planner.step.step_part import StepPart, once
from jaxtrain.planner.step.time_breakdown import (
    ATTENTION,
    MATMULS,
    MEMORY,
    TimeBreakdown,
    overlapped,
)

FLOAT8, MXFLOAT8 = "float8", "mxfloat8"  # the keys of their peaks
NORMS_AND_SUMS = 4  # of a plain layer: two norms, two sums with the residual stream
BACKWARD_PASSES = 2.0  # passes of the backward over memory, for one of the forward


class ProductTime(NamedTuple):
    """Seconds on a device of a product, and of the gradients of its input and its weights."""

    of: Product
    forward: float
    inputs: float
    weights: float


class LayerWork(StepPart):
    """Seconds of the operations of one layer and microbatch on a device."""

    reads = (*AXES, "microbatch")

    @once
    def products(self, dense: bool) -> tuple[ProductTime, ...]:
        """Each product of a layer; routed and shared experts have one each."""
        return tuple(self._products(dense))

    def _products(self, dense: bool) -> Iterator[ProductTime]:
        """Each product of a layer; routed and shared experts have one each."""
        model, layout = self.model, self.layout
        for product in model.layer(dense).products:
            k = product.inputs / (layout.model if product.split == INPUTS else 1)
            n = product.outputs / (layout.model if product.split == OUTPUTS else 1)
            tokens, local = self.tokens, 1.0
            if product.experts:
                local = product.experts / layout.expert
                # Tokens of an expert on the busiest device of `expert`, for which the others wait.
                busiest = self.framework.imbalance if layout.expert > 1 else 1.0
                tokens *= model.experts_per_token / local * busiest
            fp8 = self.framework.fp8 and product.fp8
            yield ProductTime(product, *self.product(tokens, n, k, local, fp8))

    def product(
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

    @functools.cached_property
    def attention(self) -> tuple[float, float, float]:
        """Seconds of attention's core, forward and backward, and of its scores' passes through
        memory, forward. Fused kernels leave out what is masked, and keep scores on the chip."""
        model, layout, hardware = self.model, self.layout, self.hardware
        flops = layout.microbatch * model.attention_flops() / (layout.model * layout.context)
        seconds = flops / hardware.peak(self.dtype)
        if self.framework.fused_attention:
            forward, backward = (0.5 * seconds / reached for reached in hardware.attention)
            return forward, self.framework.attention_backward * backward, 0.0
        seconds /= hardware.matmul.reached(model.sequence, model.sequence, model.score_dim)
        scores = self.tokens * model.sequence * model.layer().scores / layout.model
        moved = self.item * self.framework.attention_passes * scores
        return seconds, 2 * seconds, moved / hardware.streaming

    @once
    def passes(self, dense: bool) -> float:
        """Seconds of passes over activations besides products, forward."""
        model, framework, split = self.model, self.framework, self.layout.model
        layer = model.layer(dense)
        outside = framework.passes / NORMS_AND_SUMS * layer.norms_and_sums * model.width
        if framework.sequence_parallel:
            outside /= split
        inner = framework.inner_passes / 2 * layer.inner / split
        # operations, each of which reads and writes
        started = (framework.passes + framework.inner_passes) / 2
        moved = self.item * self.tokens * (outside + inner)
        return moved / self.hardware.streaming + 1e-6 * self.hardware.launch_us * started


class LayerTime(StepPart):
    """Seconds of F, R, B and W of one layer and microbatch."""

    reads = (
        *(*AXES, "microbatch", "remat", "save", "zero", "expert_nodes", "repeats"),
        "layers_per_op",
    )

    @functools.cached_property
    def work(self) -> LayerWork:
        """The layer's operations."""
        return self.part(LayerWork)

    @once
    def ops(self, dense: bool = False) -> dict[str, TimeBreakdown]:
        """F, R, B and W of one layer and microbatch; R is what the layout's recomputation costs of
        a layer that has it, and the others are those of the mean layer."""
        recomputation, unread = self.layout.recomputation, self._unread
        if recomputation.layers is None:
            return self._ops_of_layer(dense, unread)
        recomputed, others = (
            self.on(self.layout.with_remat(mode)) for mode in (recomputation.mode, "none")
        )
        ops, fraction = recomputed._ops_of_layer(dense, unread), self.recomputed_fraction
        for op, seconds in others._ops_of_layer(dense, unread).items():
            if op != "R":
                ops[op] = ops[op] * fraction + seconds * (1 - fraction)
        return ops

    def mean(self, dense: bool = False) -> dict[str, TimeBreakdown]:
        """F, R, B and W of the mean layer and a microbatch."""
        ops = self.ops(dense)
        return ops | {"R": ops["R"] * self.recomputed_fraction}

    def _ops_of_layer(self, dense: bool, unread: float) -> dict[str, TimeBreakdown]:
        """F, R, B and W where all layers have the same recomputation. unread: `_unread`"""
        products = self.work.products(dense)
        forward, inputs, weights = (
            sum(of_op) for of_op in zip(*(seconds for _, *seconds in products), strict=True)
        )
        attention, attention_back, scores = self.work.attention
        passes = self.work.passes(dense)
        pass_over_weights = self.item * self.layer_parameters(dense) / self.hardware.streaming
        looped = self._layers_of_unit() > 1
        read = self.framework.weight_copies * pass_over_weights if looped else 0.0
        sums = self.framework.sum_passes * pass_over_weights * 2 * ITEM / self.item
        # The last product makes the layer's output. With one stage experts' gradients read theirs.
        read_anyway = self.model.experts and not dense and not self.layout.saves_inputs
        last = sum(product.forward for product in products if not product.of.read)
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
        attention, _, scores = self.work.attention
        core = self.layout.makes_again(ATTENTION_CORE)
        return {
            MATMULS: sum(
                product.forward
                for product in self.work.products(dense)
                if product.of.read and self.layout.makes_again(product.of.makes)
            ),
            ATTENTION: attention * core,
            MEMORY: self.work.passes(dense) + scores * core,
        }

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
        phases = self.phases("F")
        last = [p.forward for p in self.work.products(False) if not p.of.read]
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
            for product in self.work.products(dense)
            if product.of.split and not (routed and product.of.of_mlp)
        ]
        if op == "W":  # what row-parallel products multiply was gathered by B
            split = [product for product in split if product.of.split == OUTPUTS]
        work = {"F": "forward", "R": "forward", "B": "inputs", "W": "weights"}[op]
        fraction = 1 - 1 / self.layout.model
        each = seconds / max(1, len(split))
        return sum(min(each, fraction * getattr(product, work)) for product in split)

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

    @functools.cached_property
    def saved_by_overlap(self) -> float:
        """Seconds by which F and B of one microbatch each, in one layer, are expected to be shorter
        in overlapped cells than one after the other (overlapped_cell.py). Nothing is measured."""
        if not self.model.experts:
            return 0.0
        partial = self.layout.recomputation.layers is not None
        step = self.on(self.layout.with_remat("none")) if partial else self
        return self.framework.cell_overlap * most_saved(step.phases("F"), step.phases("B"))

    def phases(self, op: str) -> Phases:
        """The phases of a layer with experts in F or B."""
        forward = op == "F"
        seconds = {True: 0.0, False: self.work.attention[not forward]}  # experts', or others'
        for product in self.work.products(False):
            is_experts = product.of.of_mlp and bool(product.of.split)
            seconds[is_experts] += product.forward if forward else product.inputs
        outward, back = (
            self.links.seconds(messages).get(EXPERT, 0.0)
            for messages in self.collectives.routed(op)
        )
        dispatch, combine = (outward, back) if forward else (back, outward)
        return Phases(seconds[False], dispatch, seconds[True], combine)
