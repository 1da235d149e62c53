"""Seconds of a layer: its products by their shapes, attention by its kernel, passes over memory,
and the collectives of `model`, `context` and `expert`."""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxtrain.config import kernels
from jaxtrain.config.saved_values import ATTENTION as ATTENTION_CORE
from jaxtrain.config.sizes import SELECTIVE
from jaxtrain.config.splash_backward import STEP, window_block_size, window_steps
from jaxtrain.planner.layer.layer import BATCH, EXPERT, INPUTS, MODEL, OUTPUTS, Product
from jaxtrain.planner.layer.layout import AXES, routed_capacity
from jaxtrain.planner.layer.links import CONTEXT
from jaxtrain.planner.layer.settings import FLOAT32, ITEM
from jaxtrain.planner.step.overlapped_cell import Phases, most_saved, saved_by_pair
from jaxtrain.planner.step.saved import bytes_on_host
from jaxtrain.planner.step.step_part import StepPart, once, part
from jaxtrain.planner.step.time_breakdown import (
    ATTENTION,
    HOST,
    MATMULS,
    MEMORY,
    TimeBreakdown,
    overlapped,
)

NORMS_AND_SUMS = 4  # of a plain layer: two norms, two sums with the residual stream
TURN = 40e-6  # seconds of a turn of a loop with a number of turns that comes from data, on an H100
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
        model, layout, times = self.model, self.layout, []
        for product in model.layer(dense).products:
            k = product.inputs / (layout.model if product.split == INPUTS else 1)
            n = product.outputs / (layout.model if product.split in (OUTPUTS, BATCH) else 1)
            tokens, local = self.tokens, 1.0
            if product.experts:
                local = product.experts / layout.expert
                tokens = self.routed_tokens / local
                tokens += min(tokens, self.settings.tile_rows) * (not model.capacity_factor)
            fp8, routed = self.settings.fp8 and product.fp8, product.experts > 0
            times.append(ProductTime(product, *self.product(tokens, n, k, local, fp8, routed)))
        return tuple(times)

    def turns(self, rows: float, numbers: float, routed: bool) -> tuple[float, float, float]:
        """Seconds that a product takes besides where loops go through the rows of an expert by
        blocks, as ours do on GPUs (parallel/experts/grouped.py): the product, and both gradients.
        Each turn of the weights' gradient reads and writes its sum of so many numbers. routed: of
        an expert
        """
        on_gpu, model = self.hardware.platform == kernels.GPU, self.model
        if not (routed and on_gpu and self.settings.ours) or model.capacity_factor:
            return 0.0, 0.0, 0.0
        from jaxtrain.parallel.experts import grouped

        device = routed_capacity(model, self.layout), model.experts // self.layout.expert
        turns, of_sum = (
            rows / grouped.block_rows(*device, grouped.MOST_ROWS_ON_GPU, blocks) + 0.5
            for blocks in (grouped.BLOCKS_ON_GPU, grouped.BLOCKS_OF_WEIGHTS)
        )
        summed = 2 * FLOAT32 * numbers / self.hardware.streaming
        return TURN * turns, TURN * turns, of_sum * (TURN + summed)

    def product(
        self,
        m: float,
        n: float,
        k: float,
        times: float = 1,
        fp8: bool = False,
        routed: bool = False,
    ) -> tuple[float, float, float]:
        """Seconds of so many products [m, k] · [k, n], and of the gradients of both operands.

        fp8:    of FP8 where the hardware has that, with what it costs to quantize both activations
        routed: of experts. In some frameworks one kernel makes those of all experts, of operands
                that it or the kernel before it has rounded
        """
        hardware, of = self.hardware, self.settings.format
        usual = hardware.peak_tflops[self.settings.precision.compute]
        flops = 2.0 * m * n * k / (1e12 * usual)
        moved = self.item * (m * k + k * n + m * n) / hardware.streaming
        fused = routed and self.settings.fused_experts == self.settings.precision.matmul
        launch = 1e-6 * hardware.launch_us / (times if fused else 1)
        seconds = [
            max(flops / hardware.matmul.reached(m, n, k), moved) + launch,
            max(flops / hardware.matmul.reached(m, k, n), moved) + launch,
            max(flops / hardware.matmul.reached(k, n, m), moved) + launch,
        ]
        if fp8:
            reach = of.reached * hardware.quantized_reached
            faster = usual / hardware.peak_tflops.get(of.peak, usual) / reach
            weights = faster if self.settings.fp8_in_w else 1.0
            # A pass for the tensor's scale reads; one for each form reads and writes.
            forms = max(1 + of.blocks, self.settings.fp8_forms)
            rounded = self.item * (of.scaled + forms) + of.number * forms
            passes = (not fused) * rounded / hardware.streaming
            seconds = [
                seconds[0] * faster + passes * m * k + 2 * launch,
                seconds[1] * faster + passes * m * n + 2 * launch,
                seconds[2] * weights,
            ]
        forward, inputs, of_weights = (
            times * (s + turn)
            for s, turn in zip(seconds, self.turns(m, n * k, routed), strict=True)
        )
        return forward, inputs, of_weights

    @functools.cached_property
    def attention(self) -> tuple[float, float, float]:
        """Seconds of attention's core, or of the products of tokens with tokens in its place,
        forward and backward, and of its scores' passes through memory, forward. Fused kernels leave
        out what is masked, and keep scores on the chip."""
        model, layout, hardware = self.model, self.layout, self.hardware
        flops = layout.microbatch * model.attention_flops() / (layout.model * layout.context)
        peak = hardware.peak(self.settings.precision.compute)
        blocks, windowed = self._window_blocks, 0 < model.window < model.sequence
        seconds = flops * blocks / peak
        mixed = 2.0 * self.tokens * model.layer().mixing / layout.model
        mixing = mixed / (peak * hardware.attention[0])
        if self.settings.fused_attention:
            forward, backward = (0.5 * seconds / reached for reached in hardware.attention)
            return forward + mixing, self.settings.attention_backward * backward + 2 * mixing, 0.0
        # with a window, blocks leave out what is masked here, too
        seconds *= (1 - windowed / 2) / hardware.matmul.reached(
            model.sequence, model.sequence, model.score_dim
        )
        keys = model.window * blocks if windowed else model.sequence
        scores = self.tokens * keys * model.layer().scores / layout.model
        moved = self.item * self.settings.attention_passes * scores
        forward = seconds + mixing
        return forward, 2 * forward, moved / hardware.streaming

    @property
    def _window_blocks(self) -> float:
        """Pairs of tokens in the blocks that a kernel computes of a window, over those in it; 1
        without a window, where the fraction of the peak that is reached has them."""
        window, tokens = self.model.window, self.model.sequence
        if not 0 < window < tokens:
            return 1.0
        block = STEP
        if self.hardware.platform == kernels.TPU:
            block = window_block_size(tokens // (2 * self.layout.context), window)
        return window_steps(window, block) * block / window

    @once
    def passes(self, dense: bool) -> float:
        """Seconds of passes over activations besides products, forward."""
        model, rates, split = self.model, self.settings.rates, self.layout.model
        layer = model.layer(dense)
        outside = rates.passes / NORMS_AND_SUMS * layer.norms_and_sums * model.width
        if self.settings.sequence_parallel:
            outside /= split
        inner = rates.inner_passes / 2 * layer.inner / split
        # operations, each of which reads and writes
        started = (rates.passes + rates.inner_passes) / 2
        # Our own devices of `model` have all routed tokens.
        rows = self.routed_tokens * (model.experts > 0 and not dense)
        routed = rates.routed_passes * rows * model.width / (1 if self.settings.ours else split)
        moved = self.item * (self.tokens * (outside + inner) + routed)
        return moved / self.hardware.streaming + 1e-6 * self.hardware.launch_us * started


class LayerTime(StepPart):
    """Seconds of one layer and microbatch, all of which have the layout's recomputation."""

    reads = (*AXES, "microbatch", "remat", "save", "expert_nodes", "offload")
    work = part(LayerWork)

    @once
    def ops(
        self, dense: bool, looped: bool, unread: float, pairs: tuple[float, float]
    ) -> dict[str, TimeBreakdown]:
        """F, R, B and W.

        looped: the layer is one of several of an op, which a loop goes through
        unread: the fraction of layers whose output nothing reads after R
        pairs:  the fraction of R's messages to experts that is hidden, and the seconds of work
                beside those of one layer
        """
        products = self.work.products(dense)
        forward, inputs, weights = (
            sum(of_op) for of_op in zip(*(seconds for _, *seconds in products), strict=True)
        )
        attention, attention_back, scores = self.work.attention
        passes, rates = self.work.passes(dense), self.settings.rates
        pass_over_weights = self.item * self.layer_parameters(dense) / self.hardware.streaming
        read = rates.weight_copies * pass_over_weights if looped else 0.0
        sums = rates.sum_passes * pass_over_weights * 2 * ITEM / self.item
        memory = passes + scores + read
        # The last product makes the layer's output. With one stage experts' gradients read theirs.
        read_anyway = self.model.experts and not dense and not self.layout.saves_inputs
        skipped = 0.0 if read_anyway else unread * self._last(dense)
        full = {MATMULS: forward - skipped, ATTENTION: attention, MEMORY: memory}
        again = self.made_again(dense) if self.layout.remat == SELECTIVE else {}
        memory_back = BACKWARD_PASSES * (passes + scores) + read
        ops: dict[str, dict[str, float]] = {
            "F": {MATMULS: forward, ATTENTION: attention, MEMORY: memory},
            "R": full if self.layout.remat == "full" else again,
            "B": {MATMULS: inputs, ATTENTION: attention_back, MEMORY: memory_back},
            "W": {MATMULS: weights, MEMORY: sums},
        }
        copies = self.layout.saves_on_host and not dense
        return {
            op: TimeBreakdown(parts)
            + self._collectives(op, dense, parts, unread, pairs)
            + (self._copies(op, sum(parts.values())) if copies else TimeBreakdown())
            for op, parts in ops.items()
        }

    def _copies(self, op: str, work: float) -> TimeBreakdown:
        """The copies of an op, beside its work in part: F's of what the layer saves to the host's
        memory, and back to what starts from it: R, or B, and W where that is an op of its own."""
        (saved, for_w), back = self.on_host(), "R" if self.layout.remat == "full" else "B"
        moved = {"F": saved, back: saved, "W": for_w * (self.layout.stage > 1)}.get(op, 0.0)
        beside = self.settings.rates.host_overlap[op != "F"], work
        return overlapped({HOST: moved / self.hardware.host_bytes_per_s}, {HOST: beside})

    def on_host(self) -> tuple[float, float]:
        """Bytes in the host's memory of what the layer saves of a microbatch: all of them, and
        those that W reads."""
        return bytes_on_host(self, self.layout.remat)

    def _last(self, dense: bool) -> float:
        """Seconds of the products that make the layer's output."""
        return sum(p.forward for p in self.work.products(dense) if not p.of.read)

    def made_again(self, dense: bool) -> dict[str, float]:
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

    def flops_made_again(self, attention: float) -> float:
        """Operations of a sequence that selective recomputation makes again. attention: those of
        its core"""
        again, model = self.layout.makes_again, self.model
        products = 2.0 * model.sequence * model.layer().made_again(again)
        return products + attention * again(ATTENTION_CORE)

    def _collectives(
        self,
        op: str,
        dense: bool,
        parts: Mapping[str, float],
        unread: float,
        pairs: tuple[float, float],
    ) -> TimeBreakdown:
        """An op's collectives, in part hidden. parts: its seconds; rings of keys and values overlap
        with those of attention. unread, pairs: as in `ops`"""
        c, remat = self.collectives, self.layout.remat
        if op == "R" and remat != "full":
            return TimeBreakdown()
        # our R, B and W are one op
        fused = self.settings.ours and self.layout.stage == 1 and remat == "full"
        seconds = self.links.seconds(c.layer(op, fused=fused, dense=dense))
        if op == "R" and unread:
            fewer = self.links.seconds(c.layer(op, True, fused, dense))
            seconds = {axis: s + unread * (fewer.get(axis, 0.0) - s) for axis, s in seconds.items()}
        ring = float(c.way_over_context == "ring" and self.hardware.alone <= 1)
        overlap = self.settings.rates.model_overlap * self.settings.format.overlaps, math.inf
        if self.multiplies_while_sending and not self.settings.fp8:
            overlap = 1.0, self._beside_products(op, dense, seconds.get(MODEL, 0.0))
        elsewhere = self.settings.rates.expert_overlap[self.links.islands(EXPERT) > 1], math.inf
        pairs = elsewhere if dense or op != "R" else pairs
        overlaps = {MODEL: overlap, CONTEXT: (ring, parts.get(ATTENTION, 0.0)), EXPERT: pairs}
        return overlapped(seconds, overlaps)

    def _beside_products(self, op: str, dense: bool, seconds: float) -> float:
        """Seconds of an op's collectives over `model` that go beside products: of each, up to those
        of the product that reads what is gathered or makes what is summed, but for one part of
        the product (parallel/collective_matmul.py). seconds: of the collectives, which are taken to
        be of one size"""
        routed = self.model.experts and not dense
        split = [
            product
            for product in self.work.products(dense)
            if product.of.split in (INPUTS, OUTPUTS) and not (routed and product.of.of_mlp)
        ]
        if op == "W":  # what row-parallel products multiply was gathered by B
            split = [product for product in split if product.of.split == OUTPUTS]
        work = {"F": "forward", "R": "forward", "B": "inputs", "W": "weights"}[op]
        fraction = 1 - 1 / self.layout.model
        each = seconds / max(1, len(split))
        return sum(min(each, fraction * getattr(product, work)) for product in split)

    @functools.cached_property
    def saved_by_overlap(self) -> float:
        """Seconds by which F and B of one microbatch each are expected to be shorter in overlapped
        cells than one after the other (overlapped_cell.py). Nothing is measured."""
        if not self.model.experts:
            return 0.0
        return self.settings.rates.cell_overlap * most_saved(self.phases("F"), self.phases("B"))

    @functools.cached_property
    def saved_by_pair(self) -> float:
        """Seconds of messages to experts that have work beside them where R recomputes layers by
        twos, for one layer."""
        phases = self.phases("F")
        return saved_by_pair(phases._replace(experts=phases.experts - self._last(False)))

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


class MeanLayer(StepPart):
    """Seconds of the mean layer and a microbatch, by the units of layers that ops go through, some
    of whose layers may be recomputed."""

    reads = (*LayerTime.reads, "zero", "repeats", "layers_per_op")

    @once
    def ops(self, dense: bool) -> dict[str, TimeBreakdown]:
        """F, R, B and W. R is what the layout's recomputation costs of a layer that has it, and the
        others are those of the mean layer."""
        kinds = [(kind._ops(dense), part) for kind, part in self.kinds(dense)]
        return {
            op: sum((ops[op] * part for ops, part in kinds), TimeBreakdown()) for op in kinds[0][0]
        }

    def _ops(self, dense: bool) -> dict[str, TimeBreakdown]:
        """`ops` where all layers are of one kind."""
        remat, looped = self.layout.recomputation, self._layers_of_unit > 1
        arguments = dense, looped, self.unread, self._pairs()
        ops, fraction = self._layer(remat.mode).ops(*arguments), self.recomputed_fraction
        if remat.layers is None:
            return ops
        others = self._layer("none").ops(*arguments)
        mixed = {op: ops[op] * fraction + others[op] * (1 - fraction) for op in ops}
        return mixed | {"R": ops["R"]}

    @once
    def mean(self, dense: bool) -> dict[str, TimeBreakdown]:
        """F, R, B and W, all of the mean layer."""
        ops = self.ops(dense)
        return ops | {"R": ops["R"] * self.recomputed_fraction}

    @functools.cached_property
    def total(self) -> TimeBreakdown:
        """All that the mean layer takes."""
        return sum(self.mean(False).values(), TimeBreakdown())

    @property
    def saved_by_overlap(self) -> float:
        """Seconds that overlapped cells save in one layer."""
        remat = self.layout.recomputation
        layer = self._layer(remat.mode if remat.layers is None else "none")
        return layer.mean_of_kinds(lambda kind: kind.saved_by_overlap)

    def _layer(self, mode: str) -> LayerTime:
        """A layer of this mode of recomputation."""
        uniform = mode == self.layout.remat
        return (self if uniform else self.on(self.layout.with_remat(mode))).part(LayerTime)

    @property
    def unread(self) -> float:
        """Fraction of recomputed layers whose recomputation can skip the down projection, because
        nothing reads its output: all of them where every layer's input was saved, as with one
        stage; otherwise only the last one of a unit, when it runs outside the unit's loop."""
        layers = self._layers_of_unit * self.recomputed_fraction
        if not self.settings.by_xla:
            return 0.0
        if self.layout.stage == 1 or self.layout.saves_inputs:
            return 1.0
        gathers = self.collectives.gathers_in_ops and self.shards > 1
        return 1 / max(1.0, layers) if layers <= 1 or gathers else 0.0

    @property
    def _layers_of_unit(self) -> float:
        """The mean number of layers that an op goes through."""
        return self.model.layers / len(self.layout.units(self.model.layers))

    def _pairs(self) -> tuple[float, float]:
        """The fraction of R's messages to experts that XLA covers, and the seconds of work beside
        those of one layer, where R recomputes layers by twos: each from its own input, and in one
        op (runtime/layers/layer_stack.py)."""
        layers = max(self.layout.units(self.model.layers))
        by_twos = self.layout.saves_inputs and not self.collectives.gathers_in_ops
        if not (self.model.experts and by_twos and layers > 1):
            return 0.0, 0.0
        hidden = self._layer("full").saved_by_pair * (layers - layers % 2) / layers
        return self.settings.rates.cell_overlap, hidden
