"""A step's memory on the fullest device, by part, in closed form.

weights, gradients, optimizer   by ZeRO's stage, on the pipeline stage with most parameters
outer                           for independent replicas: the parameters of the last exchange, and
                                their momentum
activations                     the arrays that layers save, of the microbatches that a stage holds
                                at once
working                         the rest that one layer's backward needs: its matrices and their
                                gradients, its widest results
logits                          logits of the tokens that have any at a time. Head and layers take
                                turns, so only the bytes that exceed `working` count

Activations of our own runtime are in slots of five pools, each shared by a stage's chunks:

    activation     a chunk's input: from its arrival to F, or to R if there is one
    layer_input    the inputs of a chunk's layers: from F to R, where `pipeline.save` has them
    gradient       the gradient of a chunk's output, until B
    residual_b     the results of F that only B needs
    residual_w     the results of F that W needs too
    weight_stash   the results of B that W needs
    saved_b, saved_w, saved_stash   the same of the layers that save all, where others are
                                    recomputed

A table has a number of slots of each (schedule/slots.py); `estimated_slots` has closed forms for
it. The bytes of a slot are those of the arrays that go from op to op where a layer is cut (saved.py
traces it). With one stage layers save their inputs, or both residuals.
"""

import bisect
import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import cast

from jaxtrain.config import kernels
from jaxtrain.config.groups.layer_kinds import kinds_of_layers
from jaxtrain.config.saved_values import LayerBytes
from jaxtrain.config.sizes import SELECTIVE
from jaxtrain.planner.layer.layout import routed_capacity, sent_by_gateway
from jaxtrain.planner.layer.settings import FLOAT32, FP8, ITEM
from jaxtrain.planner.step.other_frameworks import saved_by_others, working_of_others
from jaxtrain.planner.step.parameters import AVERAGE, MASTERS, Layers
from jaxtrain.planner.step.saved import LeastSaved, SavedBytes, bytes_on_host, layer_bytes
from jaxtrain.planner.step.step_part import AnyPart
from jaxtrain.planner.step.step_time import StepModel
from jaxtrain.schedule.placement import spread
from jaxtrain.schedule.slots import SAVED

# Buffers do not fit without gaps: XLA's peak for H100s over what is live, but for `working`.
ALLOCATED = 1.01
# bytes of a parameter of independent replicas: its value after the last exchange, and its
# momentum, in 32 bits (training/update/diloco.py)
OUTER_BYTES = 8.0
# Bytes of a logit: itself and its gradient in 32 bits, and 16 bits that products read
LOGIT_BYTES = 10.0
# Arrays of a microbatch that an op of our runtime has at once, each as wide as the layer and its
# hidden layer together
WIDE = 4
TRANSIT = 2  # slots for the activations that arrive and leave, if none have to wait


@dataclasses.dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes by part on the fullest device.

    pools: bytes of the activations by pool of slots; empty without slots
    """

    parts: Mapping[str, float]
    pools: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def bytes(self) -> float:
        """All bytes, with gaps between arrays."""
        return ALLOCATED * sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class SlotCounts:
    """The number of slots of each pool on the fullest stage.

    units:              the kinds of the layers of each unit; a slot of residuals or of the stash
                        has memory for those of any unit
    recomputed:         layers of a unit, the lowest, that are recomputed while the others save all,
                        in slots of their own; or all of them
    stored_layers:      layers of each form whose parameters a device has memory for, the same on
                        all stages
    shares_vocabulary:  embedding and head are split over the stages; otherwise every stage has
                        memory for both
    """

    pools: Mapping[str, float]
    units: Sequence[Sequence[str]]
    recomputed: int
    stored_layers: Layers
    shares_vocabulary: bool

    def of_layers(self, pool: str, kinds: Sequence[str]) -> float:
        """The slots of a pool, 0 if there is none, times the layers of these kinds that each has
        memory for."""
        border, in_others = self.recomputed, pool in SAVED
        parts = (unit[border:] if in_others else unit[:border] for unit in self.units)
        return self.pools.get(pool, 0) * max(sum(k in kinds for k in part) for part in parts)


def memory(
    step: StepModel,
    loss_chunk: int = 2048,
    slots: SlotCounts | None = None,
    enough: float = math.inf,
) -> MemoryBreakdown:
    """Bytes of a step by part on the fullest device.

    loss_chunk: the most tokens whose logits exist at a time
    slots: the slots of our own runtime's table; None: those of the schedule's closed form
    enough: bytes; where other parts are more, no layer is traced for what it saves
    """
    layout, settings, shared, cast = step.layout, step.settings, None, 0
    if settings.ours:
        slots = slots or estimated_slots(step)
        shared = bool(slots and slots.shares_vocabulary)
        # Weights of another type than the products' are cast before the loops, once.
        cast = step.item * (step.item != settings.weight_bytes)
    layers = slots.stored_layers if slots else ()
    held = step.device.parameters(layers, shared)
    numbers = settings.format.number * (1 + settings.format.blocks)  # for F and B
    quantized = 0.0
    # Without masters other frameworks quantize a layer's weights as it is gathered.
    if settings.fp8 and (settings.ours or settings.master_bytes):
        of_ends = 1.0 if held.sharded_ends is None else held.sharded_ends / held.ends
        # parameters before and after a device's layers that multiply in FP8
        model = step.model
        at_ends = model.dense_layers * step.layer_parameters(True) + model.mtp_depth * (
            step.of_kind(model.stack[-1]).layer_parameters() + 2 * model.width**2
        )
        products = held.layers + of_ends * at_ends
        # Megatron's masters are beside parameters of the format that is gathered.
        stored = cast if settings.ours else settings.weight_bytes
        quantized = (numbers - stored * (settings.format.sent < ITEM)) * products
    of_layers = step.shards if layout.zero == 3 else 1
    weights = step.device.sharded(held, of_layers)
    gradients = step.device.sharded(held, step.shards if step.collectives.reduces_in_ops else 1)
    state = settings.master_bytes * step.device.numbers(MASTERS, layers, shared)
    state += settings.moment_bytes * step.device.numbers(step.settings.optimizer, layers, shared)
    if settings.ours and settings.optimizer.ema_decay:
        state += FLOAT32 * step.device.numbers(AVERAGE, layers, shared)
    parts = {
        "weights": (settings.weight_bytes + cast) * weights + quantized / of_layers,
        "gradients": (FLOAT32 if settings.ours else settings.sent_gradient) * gradients,
        "optimizer": state * (not layout.offloads("optimizer")),
    }
    if layout.steps > 1 and settings.ours:
        # The values that updates change, in 32 bits, beside what ops read; these values and the
        # state before an update, until its step is known to be right; and in an update the shards
        # of its gradients. Where ops read 16 bits, the parameters' own memory is free for sums.
        values = FLOAT32 * step.device.numbers(MASTERS, layers, shared)
        scattered = layout.zero > 0 and step.shards > 1
        unused = settings.weight_bytes * weights * bool(cast)
        parts["kept copy"] = max(values, state + (2 + scattered) * values - unused)
    if settings.inner_steps:
        outer = held.layers + held.ends / step.device.parts_of_ends(max(layout.zero, 1), shared)
        parts["outer"] = OUTER_BYTES * outer / step.shards
    working_of = _layer_working if settings.ours else working_of_others
    working = max(working_of(kind) for kind, _ in step.kinds())
    if sum(parts.values()) + working > enough:
        return MemoryBreakdown(parts | {"working": working}, {})
    if settings.ours:
        pools = _pools(step, slots) if slots else {}
        activations = sum(pools.values()) if slots else _saved_by_layers(step)
        head = max(_head_working(step, loss_chunk, bool(shared), working), _dense_working(step))
        if slots:
            working += max(transposed_pools(step, slots, alike) for alike in _pooled(step).values())
    else:
        activations, pools = saved_by_others(step), {}
        head = LOGIT_BYTES * min(step.tokens, loss_chunk) * step.model.vocab_size / layout.model
    parts |= {"activations": activations, "working": working, "logits": max(0.0, head - working)}
    return MemoryBreakdown(parts, pools)


# --- our own runtime ----------------------------------------------------------------------------


def estimated_slots(step: StepModel) -> SlotCounts | None:
    """The slots of a layout with stages, by the closed forms of its schedule (schedule/orders/):
    the peaks of its table. None with one stage."""
    layout, p, v = step.layout, step.layout.stage, max(1, step.layout.repeats)
    if p == 1:
        return None
    chunks, schedule = layout.microbatches * v, step.schedule_forms
    residuals = min(schedule.residuals(p, v, layout.microbatches), chunks)
    stashes = min(schedule.stashes(p), chunks)
    placement = step.uneven_placement
    layers = max(placement.sizes) if placement else math.ceil(step.model.layers / (p * v))
    remat, full = layout.recomputation, layout.recomputation.mode == "full"
    pieces = spread(layers, math.ceil(layers / (layout.layers_per_op or layers)))
    saved = sum(n - remat.recomputed(n) for n in pieces) if remat.mode != "none" else 0
    pools = {
        "activation": residuals if full and not layout.saves_inputs else TRANSIT,
        "gradient": schedule.gradients(p, layout.microbatches),
        "residual_b": 1 if full else residuals,
        "residual_w": stashes if full else residuals,
        "weight_stash": stashes,
        "layer_input": residuals * layout.saves_inputs,
        **dict(zip(SAVED, (residuals, residuals, stashes), strict=True)),
    }
    return SlotCounts(
        pools,
        placement.kinds_of_units(step.model.stack) if placement else [step.model.stack[:layers]],
        layers - saved,
        placement.stored_layers if placement else (layers * v,),
        step.settings.vocabulary_parallel,
    )


def least_recomputed(step: StepModel, loss_chunk: int, capacity: float) -> StepModel | None:
    """The step with the fewest layers of each unit recomputed, in its own mode of remat, with which
    it fits into so many bytes; None if it does not with all of them.

    Each recomputed layer more takes time and less memory, so a bisection finds the fewest.
    """
    mode, units = step.layout.recomputation.mode, step.layout.units(step.model.layers)

    def recomputing(layers: int) -> StepModel:
        every = layers == max(units) or mode == "none"
        return step.on(step.layout.with_remat(mode if every else f"{mode}:{layers}"))

    fits = lambda layers: memory(recomputing(layers), loss_chunk, enough=capacity).bytes <= capacity
    if not fits(most := max(units)):
        return None
    fewer = range(1 if mode != "none" else most, most)
    return recomputing(fewer.start + bisect.bisect_left(fewer, True, key=fits))


class _BoundedStep(StepModel):
    """A step whose layers save at most what they do."""

    def part(self, kind: type[AnyPart]) -> AnyPart:
        return super().part(cast(type[AnyPart], LeastSaved) if kind is SavedBytes else kind)


def bounded(step: StepModel) -> StepModel:
    """The step with a memory of at most its own, for which few layers are traced; the step itself
    where arrays go to the host's memory, or another framework runs it."""
    on_host = step.layout.offload != "none" or step.layout.saves_on_host
    return step if on_host or not step.settings.ours else step.as_part(_BoundedStep, step.layout)


def best_interval(step: StepModel) -> float | None:
    """The layers of a unit with which full recomputation takes least memory for what layers save:
    √(m · l · input / residuals), for l layers of a stage and m microbatches between their F and B.
    docs/parts.md derives it. None with one stage.
    """
    slots = estimated_slots(step.on(step.layout.with_remat("full")))
    if slots is None:
        return None
    saved = [(layer_bytes(kind, remat="none"), part) for kind, part in step.kinds()]
    rebuilt = sum(
        slots.pools[pool] * getattr(layer, pool) * part
        for pool in ("residual_b", "residual_w", "weight_stash")
        for layer, part in saved
    )
    layers = math.ceil(step.model.layers / step.layout.stage)
    in_flight = slots.pools["activation"] / max(1, step.layout.repeats)
    return min(layers, max(1.0, math.sqrt(in_flight * layers * saved[0][0].input / rebuilt)))


def _pools(step: StepModel, slots: SlotCounts) -> dict[str, float]:
    """Bytes of each pool in the device's memory."""
    # Units' inputs, and gradients of their outputs, are as large for all kinds of layers.
    message = layer_bytes(step.of_kind(step.model.stack[0])).input
    pools: dict[str, float] = collections.defaultdict(float)
    pools |= {pool: slots.pools[pool] * message for pool in ("activation", "gradient")}
    of_layer = ("residual_b", "residual_w", "weight_stash", "layer_input")
    for remat, names in (("", of_layer), ("none", SAVED)):
        for layer, kinds in _pooled(step, remat).items():
            on_device = layer.residual_b - layer.host_b, layer.residual_w - layer.host_w
            sizes = (*on_device, layer.weight_stash, layer.input)
            for pool, size in zip(names, sizes, strict=False):
                pools[pool] += slots.of_layers(pool, kinds) * size
    offloaded = (*SAVED[:2], "residual_b", "residual_w") * step.layout.offloads("activations")
    if step.layout.recomputation.mode == "full":
        inputs = "layer_input" if slots.pools.get("layer_input") else "activation"
        offloaded = (*offloaded[:2], *[inputs] * step.layout.saves_on_host)
    return {pool: size for pool, size in pools.items() if size and pool not in offloaded}


def _pooled(step: StepModel, remat: str = "") -> dict[LayerBytes, list[str]]:
    """The bytes of a layer → the kinds whose layers save so many. They are taken to save arrays of
    the same shapes, for which a stage has one pool (runtime/state_plan.py)."""
    pooled: dict[LayerBytes, list[str]] = {}
    for kind in step.model.counts[0]:
        pooled.setdefault(layer_bytes(step.of_kind(kind), remat=remat), []).append(kind)
    return pooled


def transposed_pools(step: StepModel, slots: SlotCounts, kinds: Sequence[str]) -> float:
    """Bytes of copies where `model` splits layers: XLA transposes arrays of an entire pool before
    an op's loop over layers. kinds: whose layers have the pool

    For microbatches of several sequences W transposes a gathered array of the stash, and B what a
    norm has saved; the ops take turns. For one sequence, W transposes the two gradients that it
    sums for biases, as wide as the hidden layer and as the layer. So it does with what a
    norm has made once more in 32 bits.
    """
    step, layout = step.of_kind(kinds[0]), step.layout
    model = step.model
    if layout.model == 1:
        return 0.0
    layer, saved = layer_bytes(step), layer_bytes(step, remat="none")
    of_layers = lambda pool: slots.of_layers(pool, kinds)
    stashed, saved_stash = of_layers("weight_stash"), of_layers("saved_stash")
    if layout.microbatch == 1:
        widths = model.layer().hidden * ("mlp" in model.biases) + model.width * (
            "out" in model.biases
        )
        biases = (stashed + saved_stash) * layer.input * widths / model.width
        return max(biases, stashed * layer.remade)
    gathered = stashed * layer.gathered + saved_stash * saved.gathered
    norms = of_layers("saved_w") * saved.normed
    if layout.recomputation.mode != SELECTIVE:
        norms += of_layers("residual_w") * layer.normed
    return max(gathered, norms, stashed * layer.remade)


def _saved_by_layers(step: StepModel) -> float:
    """Bytes that all layers save of a microbatch in the device's memory, with one stage. Dense
    layers stand with the embedding, which nothing is offloaded of."""
    mode, model = step.layout.recomputation.mode, step.model
    recomputed = step.layout.recomputation.recomputed(model.layers)

    def of_layer(kind: str, remat: str, dense: bool = False) -> float:
        layer = step.of_kind(kind)
        saved = layer_bytes(layer, dense, remat)
        there = 0.0 if dense else bytes_on_host(layer, remat)[0]
        return (saved.input if remat == "full" else saved.residual_b + saved.residual_w) - there

    modes = [mode if number < recomputed else "none" for number in range(model.layers)]
    first = kinds_of_layers(model)[: model.dense_layers]
    return sum(map(of_layer, model.stack, modes)) + sum(of_layer(k, mode, True) for k in first)


def _layer_working(step: StepModel) -> float:
    """Bytes of what an op of one layer has besides what is saved.

    A matrix and its gradient take turns. With ZeRO-2 all of a layer's gradients are unsharded until
    they are scattered, in 16 bits and in 32. With ZeRO-3 the layer's matrices and the next one's
    are gathered: by several stages in B, before W makes the gradients; by one while gradients take
    the place of matrices and those of the layer before are on their way, as are those of the head,
    in two layouts.
    """
    model, layout, number = step.model, step.layout, FLOAT32
    arrays = WIDE * step.item * _widest(step) + _masks(step) + _of_gateway(step)
    layer, scores = step.layer_parameters(), model.heads * model.score_dim
    if not step.collectives.reduces_in_ops or step.shards == 1:
        # the layer's largest matrix on a device, of all experts there together
        experts = model.expert_width * max(model.experts / layout.expert, model.shared_experts)
        columns = max(experts if model.experts else model.layer().hidden, scores) / layout.model
        return arrays + step.item * model.width * columns
    number_read = FP8 if step.settings.fp8 else step.item
    gathered = 2 * number_read * layer if layout.zero >= 3 else 0.0
    if layout.stage > 1:
        return arrays + max((step.item + number) * layer, gathered)
    layouts = 2 if layout.zero >= 3 else 1
    head = layouts * number * model.vocab_size * model.width / layout.model
    return arrays + number * layer + max(step.item * layer, gathered) + head


def _masks(step: StepModel) -> float:
    """Bytes of what hides keys from queries where `context` splits a sequence and a GPU's kernel is
    given masks: XLA makes them in each op. A device has two pieces of a sequence, one of which
    attends to half of it and one to all of it; each device of `model` has them."""
    layout, on_gpu = step.layout, step.hardware.platform == kernels.GPU
    if layout.context == 1 or step.collectives.way_over_context != "all_gather" or not on_gpu:
        return 0.0
    return step.item * layout.microbatch * 1.5 * step.model.sequence**2 / (2 * layout.context)


def _of_gateway(step: StepModel) -> float:
    """Bytes of the tokens that a device receives for its node and of those that it sends on, where
    tokens go to experts in two steps."""
    model, nodes = step.model, step.layout.expert_nodes
    if not model.experts or nodes == 1:
        return 0.0
    return step.item * model.width * (nodes * step.tokens + sent_by_gateway(model, step.layout))


def _widest(step: StepModel) -> float:
    """Numbers of a microbatch at the layer's width and at its widest: in attention, in an MLP, or
    in the capacity of a device's experts."""
    model, layout = step.model, step.layout
    attention = model.heads * model.score_dim / layout.model
    if not model.experts:
        return step.tokens * (model.width + max(model.layer().hidden / layout.model, attention))
    expert = model.expert_width / layout.model
    routed = routed_capacity(model, layout) * (model.width + expert)
    shared = step.tokens * (model.width + model.shared_experts * expert)
    return max(shared + routed, step.tokens * (model.width + attention))


def _head_working(step: StepModel, loss_chunk: int, shared: bool, layer_working: float) -> float:
    """Bytes of what head and loss have: their input and its gradient, logits, with ZeRO-2 the
    gradient of the table, and where the table is sharded itself. Layers of multi-token prediction
    modules save all that they have: their backward, which comes after the loss, works as any
    layer's. shared: all stages share the head."""
    model, layout, are_sharded = step.model, step.layout, bool(step.device.axes_of_ends)
    columns = model.vocab_size / layout.model / (layout.stage if shared else 1)
    scattered = are_sharded or (step.collectives.reduces_in_ops and step.shards > 1)
    # where the table is sharded its gradient is in two layouts: as it is made, and as it is sent
    number = FLOAT32 * (scattered + are_sharded) + step.item * are_sharded
    logits = LOGIT_BYTES * min(step.tokens, loss_chunk) * columns
    head = WIDE * step.item * step.tokens * model.width + logits + number * model.width * columns
    if not model.mtp_depth:
        return head
    step = step.of_kind(model.stack[-1])
    layer, parameters = layer_bytes(step, remat="none"), are_sharded * step.layer_parameters()
    each = layer.residual_b + layer.residual_w + step.item * parameters
    return model.mtp_depth * each + max(head, layer_working + FLOAT32 * parameters)


def _dense_working(step: StepModel) -> float:
    """Bytes of what the embedding's gradient has of the dense layers, which it runs once more: what
    they save, and, where they are sharded as in ZeRO-3, their matrices and the gradients of one."""
    layers, sharded = step.model.dense_layers, bool(step.device.axes_of_ends)
    if not layers or step.layout.stage == 1:
        return 0.0
    parameters = max(kind.layer_parameters(True) for kind, _ in step.kinds(dense=True))
    saved = lambda kind: sum(layer_bytes(kind, True, "none")[:2])  # both residuals
    of_one = step.mean_of_kinds(saved, dense=True)
    of_one += step.item * sharded * step.layer_parameters(True)
    return layers * of_one + (step.item + FLOAT32 * sharded) * parameters
