"""What a step holds on the fullest device, by parts, in closed form.

weights, gradients, optimizer   by the stage of ZeRO, of the stage with most parameters
outer                           of independent replicas: the parameters of the last exchange, and
                                its momentum
activations                     what layers save of a microbatch, for those that a stage holds at
                                once
working                         what one layer's backward needs besides: its matrices and their
                                gradients, its widest results
logits                          of the tokens whose logits exist at a time: what exceeds `working`,
                                for head and layers take turns

Activations of our own runtime lie in slots of five pools, each shared by a stage's chunks:

    activation     a chunk's input: from its arrival to F, and to R where there is one
    gradient       the gradient of a chunk's output, to B
    residual_b     what B alone needs of F
    residual_w     what W needs too
    weight_stash   what B leaves for W

A table says how many slots there are of each (schedule/slots.py); `estimated_slots` has closed
forms of that. Bytes of a slot are those of the arrays that cross between ops as the layers are
traced (runtime/backward_split.py), by their widths. With one stage layers keep their inputs, or
both residuals.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxtrain.costs.collectives import FLOAT32
from jaxtrain.costs.layout import expert_rows
from jaxtrain.costs.step_time import ITEM, StepModel
from jaxtrain.schedule.orders import closed_forms

# Buffers do not fit without gaps: XLA's peak for H100s over what is live, but for `working`.
ALLOCATED = 1.01
LOGIT_BYTES = 10.0  # of a logit: in 32 bits, its gradient, and in 16 bits what products read of it
# Arrays of a microbatch at once in an op of our runtime: as wide as the layer, and as its hidden
# layer.
WIDE = 4
TRANSIT = 2  # slots of what comes and what leaves besides those that wait


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes by part on the fullest device. pools: of the activations, by their pool of slots, if
    any."""

    parts: Mapping[str, float]
    pools: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def bytes(self) -> float:
        """All bytes, with gaps between arrays."""
        return ALLOCATED * sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Slots:
    """Slots of each pool on the fullest stage.

    layers:             of the largest unit, for which each slot has room
    stored_layers:      layers for whose parameters a device has room, the same on all stages
    shares_vocabulary:  tables are split over the stages; otherwise every stage has room for all of
                        them
    """

    activation: float
    gradient: float
    residual_b: float
    residual_w: float
    weight_stash: float
    layers: int
    stored_layers: int
    shares_vocabulary: bool


def memory(step: StepModel, loss_chunk: int = 2048, slots: Slots | None = None) -> Memory:
    """Bytes of a step by part.

    loss_chunk: tokens whose logits exist at a time
    slots: of our own runtime's table; by default those of the schedule's closed form
    """
    if step.framework.slots:
        return _own_memory(step, loss_chunk, slots or estimated_slots(step))
    parameters, layout, framework = step.device_parameters().all, step.layout, step.framework
    shards = {stage: step.shards if layout.zero >= stage else 1 for stage in (1, 2, 3)}
    layers = math.ceil(step.model.layers / layout.stage) + step.model.dense_layers * (
        layout.stage == 1
    )
    logits = LOGIT_BYTES * min(step.tokens, loss_chunk) * step.model.vocab_size / layout.model
    offloaded, working = _offloaded(step), _framework_working(step)
    in_flight = 1.0 if "activations" in offloaded else microbatches_in_flight(step)
    return Memory(
        {
            "weights": framework.weight_bytes * parameters / shards[3],
            "gradients": framework.gradient_bytes * parameters / shards[2],
            "optimizer": 0.0
            if "optimizer" in offloaded
            else framework.state_bytes * parameters / shards[1],
            "activations": layer_activations(step) * layers * in_flight,
            "working": working,
            "logits": max(0.0, logits - working),
        }
    )


def _offloaded(step: StepModel) -> tuple[str, ...]:
    """What lies in the host's memory."""
    return ("activations", "optimizer") if step.layout.offload == "both" else (step.layout.offload,)


# --- our own runtime ----------------------------------------------------------------------------


def _own_memory(step: StepModel, loss_chunk: int, slots: Slots | None) -> Memory:
    """Bytes of our own runtime's step. slots: None with one stage."""
    layout, framework = step.layout, step.framework
    shared = slots.shares_vocabulary if slots else False
    held = step.device_parameters(slots.stored_layers if slots else 0, shared)
    shards = {stage: step.shards if layout.zero >= stage else 1 for stage in (1, 2, 3)}
    state = (held.layers + held.ends / step.parts_of_ends(layout.zero, shared)) / shards[1]
    outer = (
        held.layers + held.ends / step.parts_of_ends(max(layout.zero, 1), shared)
    ) / step.shards
    # XLA casts all weights to the type of the products before the loops, once.
    cast = 0 if step.dtype == "float32" else step.item
    pools = _pools(step, slots)
    working = _layer_working(step) + (transposed_pools(step, slots) if slots else 0.0)
    head = _head_working(step, loss_chunk, shared)
    optimizer = 0.0 if "optimizer" in _offloaded(step) else framework.state_bytes * state
    return Memory(
        {
            "weights": (framework.weight_bytes + cast) * held.all / shards[3],
            "gradients": framework.gradient_bytes * held.all / shards[2],
            "optimizer": optimizer,
            **({"outer": framework.outer_bytes * outer} if framework.outer_bytes else {}),
            "activations": sum(pools.values()) if slots else _saved_by_layers(step),
            "working": working,
            "logits": max(0.0, head - working),
        },
        pools,
    )


def estimated_slots(step: StepModel) -> Slots | None:
    """Slots of a layout with stages, by the peaks of the named schedules' tables
    (schedule/orders.py); None with one stage."""
    layout, p, v = step.layout, step.layout.stage, max(1, step.layout.repeats)
    if p == 1:
        return None
    chunks, schedule = layout.microbatches * v, closed_forms(layout.schedule)
    residuals = min(schedule.residuals(p, v, layout.microbatches), chunks)
    stashes = min(schedule.stashes(p), chunks)
    full, layers = layout.remat == "full", math.ceil(step.model.layers / (p * v))
    return Slots(
        activation=residuals if full else TRANSIT,
        gradient=schedule.gradients(p, layout.microbatches),
        residual_b=1 if full else residuals,
        residual_w=stashes if full else residuals,
        weight_stash=stashes,
        layers=layers,
        stored_layers=layers * v,
        shares_vocabulary=step.framework.vocabulary_parallel,
    )


class LayerBytes(NamedTuple):
    """Bytes on a device that one layer keeps of one microbatch: what crosses from the forward to B
    alone and to W, from B to W, and the layer's input."""

    residual_b: float
    residual_w: float
    weight_stash: float
    input: float = 0.0


def layer_bytes(step: StepModel, dense: bool = False) -> LayerBytes:
    """Bytes by the widths of the arrays: of a token's attention, of the MLP that it goes through,
    or of all rows of experts for which a device has room. dense: a layer before those with
    experts."""
    model, layout, item = step.model, step.layout, step.item
    width, experts = float(model.width), bool(model.experts) and not dense
    # keeps its input less the mean in 32 bits; RMSNorm its input
    layer_norm = model.norm_vectors > 1
    selective = layout.remat == "selective"
    attention = _attention_widths(step)
    hidden = model.shared_experts * model.expert_width if experts else model.mlp_width
    mlp = _mlp_widths(step, hidden)
    gradients = (4 if hidden else 3) * width
    statistics = FLOAT32 * model.heads  # a softmax's log-sum-exp
    for_b = item * (attention.residual_b + mlp.residual_b) + statistics
    for_w = item * (attention.residual_w + mlp.residual_w)
    stash = item * (attention.weight_stash + mlp.weight_stash + gradients)
    if selective:
        norms = item * 2 * width
        for_b += norms * layer_norm
        for_w += norms * (not layer_norm)
        stash += FLOAT32 * 2 * width * layer_norm  # made again by B
    else:
        for_w += 2 * width * (FLOAT32 if layer_norm else item)
    gathered = 0.0
    # B leaves gradients gathered over `model` as they are; biases need a device's part too
    if layout.model > 1:
        products = (1 if experts else 2) * item * width
        gathered = products * step.tokens
        stash -= 0.0 if model.biases else products
    received = LayerBytes(0.0, 0.0, 0.0)
    if experts:
        scores = FLOAT32 * model.experts  # of the router, and their gradients
        for_b, stash = for_b + scores * (1 if selective else 2), stash + scores
        received = _expert_row_bytes(step)
    split = step.tokens / layout.model
    return LayerBytes(
        for_b * split + masks(step) + received.residual_b,
        for_w * split + received.residual_w,
        stash * split + gathered + received.weight_stash,
        item * width * split,
    )


def _attention_widths(step: StepModel) -> LayerBytes:
    """Numbers of a token: queries, keys and values, attention's result, and the gradients of the
    first three. Latent attention has keys and values before they are rotated and spread, what they
    and queries are made of, and gradients of all of these."""
    model = step.model
    query, key = model.heads * model.score_dim, model.kv_heads * model.score_dim
    result, value = model.heads * model.output_dim, model.kv_heads * model.output_dim
    if not model.mla:
        return LayerBytes(query + key + value, result, query + key + value)
    latents = model.query_rank + model.kv_rank
    spread, rotated = (
        model.heads * (model.head_dim + model.value_dim),
        model.rope_dim * (1 + model.heads),
    )
    stash = query + key + value + 2 * latents + rotated
    return LayerBytes(query + spread, result + latents + model.rope_dim, stash)


def _mlp_widths(step: StepModel, hidden: int) -> LayerBytes:
    """Numbers of a token in an MLP with a hidden layer of this width."""
    gated = step.model.gated
    arrays = 3 if gated else 2
    if step.layout.remat == "selective":
        return LayerBytes(hidden if gated else 0.0, hidden, arrays * hidden)
    return LayerBytes(arrays * hidden, 0.0, arrays * hidden)


def _expert_row_bytes(step: StepModel) -> LayerBytes:
    """Bytes of all rows of experts on a device: as wide as an expert, which `model` splits, and as
    the layer, which it does not."""
    model, layout = step.model, step.layout
    size = step.item * expert_rows(model, layout)
    hidden, width = size * model.expert_width / layout.model, size * model.width
    arrays = 2 if model.gated else 1
    if layout.remat == "selective":  # B leaves what it computes again, too
        return LayerBytes(arrays * hidden, 0.0, (arrays + 1) * hidden + width)
    return LayerBytes((arrays + 1) * hidden, hidden + width, arrays * hidden + width)


def masks(step: StepModel) -> float:
    """Bytes of what hides keys from queries where `context` splits a sequence: a device has two
    pieces of it, one of which looks at half of the sequence and one at all of it. Devices of
    `model` have it each."""
    layout, length = step.layout, step.model.sequence
    if layout.context == 1:
        return 0.0
    piece = length / (2 * layout.context)
    return step.item * layout.microbatch * piece * 1.5 * length


def _pools(step: StepModel, slots: Slots | None) -> dict[str, float]:
    """Bytes of each pool in the device's memory; none with one stage."""
    if slots is None:
        return {}
    layer = layer_bytes(step)
    inputs = ("activation",) if step.layout.remat == "full" else ("residual_b", "residual_w")
    pools = {
        "activation": slots.activation * layer.input,
        "gradient": slots.gradient * layer.input,
        "residual_b": slots.residual_b * slots.layers * layer.residual_b,
        "residual_w": slots.residual_w * slots.layers * layer.residual_w,
        "weight_stash": slots.weight_stash * slots.layers * layer.weight_stash,
    }
    offloaded = inputs if "activations" in _offloaded(step) else ()
    return {pool: size for pool, size in pools.items() if pool not in offloaded}


def transposed_pools(step: StepModel, slots: Slots) -> float:
    """Bytes of copies where `model` splits layers: XLA transposes arrays of a whole pool before an
    op's loop over layers.

    For microbatches of several sequences W transposes a gathered array of the stash, and B what a
    norm has saved; the ops take turns. For one sequence, W transposes the two gradients that it
    sums for biases, as wide as the hidden layer and as the layer.
    """
    model, layout = step.model, step.layout
    if layout.model == 1:
        return 0.0
    stash = slots.weight_stash * slots.layers * step.item * step.tokens
    if layout.microbatch == 1:
        return stash * (model.hidden() + model.width) / layout.model if model.biases else 0.0
    number = 0 if layout.remat == "selective" else FLOAT32 if model.norm_vectors > 1 else step.item
    norms = number * slots.residual_w * slots.layers * step.tokens * model.width / layout.model
    return max(stash * model.width, norms)


def _saved_by_layers(step: StepModel) -> float:
    """Bytes that all layers save of the microbatch at hand, with one stage."""
    if "activations" in _offloaded(step):
        return 0.0
    saved = 0.0
    for dense, layers in ((False, step.model.layers), (True, step.model.dense_layers)):
        layer = layer_bytes(step, dense)
        saved += layers * (
            layer.input if step.layout.remat == "full" else layer.residual_b + layer.residual_w
        )
    return saved


def _layer_working(step: StepModel) -> float:
    """Bytes of what an op of one layer has besides what is saved.

    A matrix and its gradient take turns. With ZeRO-2 all of a layer's gradients are unsharded until
    they are scattered, in 16 bits and in 32. With ZeRO-3 the layer's matrices and the next one's
    are gathered: by several stages in B, before W makes the gradients; by one while gradients take
    the place of matrices and those of the layer before are on their way, as are those of the head,
    in two layouts.
    """
    model, layout, number = step.model, step.layout, step.framework.gradient_bytes
    arrays = WIDE * step.item * _widest(step) + masks(step)
    layer = step.layer_parameters()
    if layout.zero < 2 or step.shards == 1:
        return arrays + step.item * model.width * _columns(step)
    gathered = 2 * step.item * layer if layout.zero >= 3 else 0.0
    if layout.stage > 1:
        return arrays + max((step.item + number) * layer, gathered)
    head = 2 * number * model.vocab_size * model.width / layout.model if layout.zero >= 3 else 0.0
    return arrays + number * layer + max(step.item * layer, gathered) + head


def _widest(step: StepModel) -> float:
    """Numbers of a microbatch at the layer's width and at its widest: in attention or an MLP, or in
    all rows of experts."""
    model, layout = step.model, step.layout
    attention = model.heads * model.score_dim / layout.model
    if not model.experts:
        return step.tokens * (model.width + max(model.hidden() / layout.model, attention))
    shared = model.shared_experts * model.expert_width / layout.model
    routed = expert_rows(model, layout) * (model.width + model.expert_width / layout.model)
    return max(
        step.tokens * (model.width + shared) + routed, step.tokens * (model.width + attention)
    )


def _columns(step: StepModel) -> float:
    """Columns of a layer's largest matrix on a device; of all experts there together."""
    model, layout = step.model, step.layout
    experts = model.expert_width * max(model.experts / layout.expert, model.shared_experts)
    return (
        max(experts if model.experts else model.hidden(), model.heads * model.score_dim)
        / layout.model
    )


def _head_working(step: StepModel, loss_chunk: int, shared: bool) -> float:
    """Bytes of what head and loss have: their input and its gradient, logits, with ZeRO-2 the
    gradient of the table. Layers of modules that predict further tokens keep all that they have
    until after the loss their backward works as any layer's. shared: all stages share the head."""
    model, layout = step.model, step.layout
    columns = model.vocab_size / layout.model / (layout.stage if shared else 1)
    logits = LOGIT_BYTES * min(step.tokens, loss_chunk) * columns
    gradient = (
        step.framework.gradient_bytes
        * model.width
        * columns
        * (layout.zero >= 2 and step.shards > 1)
    )
    head = WIDE * step.item * step.tokens * model.width + logits + gradient
    if not model.predictions:
        return head
    layer = layer_bytes(dataclasses.replace(step, layout=dataclasses.replace(layout, remat="none")))
    return model.predictions * (layer.residual_b + layer.residual_w) + max(
        head, _layer_working(step)
    )


# --- other frameworks ---------------------------------------------------------------------------


def layer_activations(step: StepModel) -> float:
    """Bytes that one layer keeps of one microbatch on a device."""
    model, layout, framework = step.model, step.layout, step.framework
    if not framework.fused_attention:
        kind = layout.remat
        if kind != "full" and framework.sequence_parallel:
            kind = {"selective": "selective_sequence", "none": "sequence"}[kind]
        elif kind == "none" and layout.model > 1:
            kind = "tensor"
        return activation_bytes(
            kind, model.sequence, layout.microbatch, model.width, model.heads, layout.model
        )
    hidden = model.hidden()
    # queries, keys, values, and the result
    heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    split = layout.model if framework.sequence_parallel else 1
    width = {"full": 1.0, "selective": 2.0, "none": 4.0}[layout.remat] * model.width / split
    arrays = {"full": 0, "selective": 1, "none": 2}[layout.remat] * (2 if model.gated else 1)
    inner = heads + hidden * arrays if arrays else 0.0
    return ITEM * step.tokens * (width + inner / layout.model)


def activation_bytes(kind: str, s: int, b: int, h: int, a: int, t: int = 1) -> float:
    """Bytes that one layer keeps of a microbatch for its backward, in 16 bits (Korthikanti 2022,
    arXiv:2205.05198, table 2): h width, a heads, s sequence, b microbatch, t tensor parallel.

    kind: none, no parallelism; tensor; sequence, tensor and sequence parallelism; selective and
    selective_sequence, with attention's core computed again; full, the layer's input alone.
    """
    scores = 5 * a * s / h
    factor = {
        "none": 34 + scores,
        "tensor": 10 + 24 / t + scores / t,
        "sequence": 34 / t + scores / t,
        "selective": 10 + 24 / t,
        "selective_sequence": 34 / t,
        "full": 2.0,
    }[kind]
    return s * b * h * factor


def microbatches_in_flight(step: StepModel) -> float:
    """Microbatches whose activations the fullest stage holds at once, in those of a whole stage."""
    layout = step.layout
    p, v, m = layout.stage, layout.repeats, layout.microbatches
    return min(float(m), closed_forms(layout.schedule).residuals(p, v, m) / v) if p > 1 else 1.0


def _framework_working(step: StepModel) -> float:
    """Bytes of one layer's backward: with ZeRO-3 its matrices and the next one's, gathered, and
    their gradients before they are scattered, with the head's."""
    model, layout, number = step.model, step.layout, step.framework.gradient_bytes
    attention = (model.heads + 2 * model.kv_heads) * model.head_dim
    widest = max(model.mlp_width * (2 if model.gated else 1), attention) / layout.model
    layer = model.layer().all / layout.model / max(1, layout.expert)
    matrices = ITEM * layer
    if layout.zero >= 3 and layout.data > 1:
        matrices = (
            3 * ITEM + number
        ) * layer + number * model.vocab_size * model.width / layout.model / layout.stage
    return matrices + ITEM * 4 * step.tokens * widest
