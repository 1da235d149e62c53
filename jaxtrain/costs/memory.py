"""What a step holds on the fullest device, by parts, in closed form.

weights, gradients, optimizer   by the stage of ZeRO, of the stage with most parameters
outer                           of replicas that train apart: the parameters of the last exchange, and its momentum
activations                     what layers keep of a microbatch, for those that a stage holds at once; our own program's by slots.py
working                         what one layer's backward needs beside: its matrices and their gradients, its widest results
logits                          of the tokens whose logits exist at a time: what is more than `working`, for head and layers take turns
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxtrain.costs import identities
from jaxtrain.costs.expert_rows import rows_of
from jaxtrain.costs.slots import Slots, estimated, layer_bytes, masks, pool_bytes, turned_pools
from jaxtrain.costs.step_time import ITEM, Work
from jaxtrain.schedule.orders import closed_forms

ALLOCATED = 1.01  # of what is live at the peak, for buffers do not fit without gaps (XLA for H100s, but for what `working` counts)
LOGIT_BYTES = 10.0  # of a logit: in 32 bits, its gradient, and in 16 bits what products read of it
WIDE = 4  # arrays of a microbatch at once in an op of our own program, as wide as the layer, and as many as its hidden layer


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes by part on the fullest device. pools: of the activations, by the pool of slots that they lie in, where there are any."""

    parts: Mapping[str, float]
    pools: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def bytes(self) -> float:
        """With what lies between arrays."""
        return ALLOCATED * sum(self.parts.values())


def memory(work: Work, loss_chunk: int = 2048, slots: Slots | None = None) -> Memory:
    """The parts.

    loss_chunk: tokens whose logits exist at a time
    slots: of our own program's table; those of the schedule's closed form if not given
    """
    if work.program.slots:
        return _of_our_own(work, loss_chunk, slots or estimated(work))
    parameters, shards, layout = work.device_parameters().all, work.shards, work.layout
    program = work.program
    optimizer = program.state_bytes * parameters / (shards if layout.zero >= 1 else 1)
    layers = math.ceil(work.model.layers / layout.stage) + (work.model.dense_layers if layout.stage == 1 else 0)
    in_flight = 1.0 if layout.offload in ("activations", "both") else microbatches_in_flight(work)
    logits = LOGIT_BYTES * min(work.tokens, loss_chunk) * work.model.vocab_size / layout.model
    working = _working(work)
    return Memory(
        {
            "weights": program.weight_bytes * parameters / (shards if layout.zero >= 3 else 1),
            "gradients": program.gradient_bytes * parameters / (shards if layout.zero >= 2 else 1),
            "optimizer": 0.0 if layout.offload in ("optimizer", "both") else optimizer,
            "activations": layer_activations(work) * layers * in_flight,
            "working": working,
            "logits": max(0.0, logits - working),
        }
    )


# --- our own program -----------------------------------------------------------------------------------------------------------------


def _of_our_own(work: Work, loss_chunk: int, slots: Slots | None) -> Memory:
    """slots: None with one stage."""
    layout, program, shards = work.layout, work.program, work.shards
    shared = slots.shares_vocabulary if slots else False
    held = work.device_parameters(slots.rows if slots else 0, shared)
    sharded = {stage: shards if layout.zero >= stage else 1 for stage in (1, 2, 3)}
    state = (held.layers + held.ends / work.parts_of_ends(layout.zero, shared)) / sharded[1]
    outer = (held.layers + held.ends / work.parts_of_ends(max(layout.zero, 1), shared)) / shards
    # XLA casts all weights to the type of the products before the loops, once.
    cast = 0 if work.dtype == "float32" else work.item
    pools = _pools(work, slots)
    working, head = _layer_working(work) + (turned_pools(work, slots) if slots else 0.0), _head_working(work, loss_chunk, slots)
    return Memory(
        {
            "weights": (program.weight_bytes + cast) * held.all / sharded[3],
            "gradients": program.gradient_bytes * held.all / sharded[2],
            "optimizer": 0.0 if layout.offload in ("optimizer", "both") else program.state_bytes * state,
            **({"outer": program.outer_bytes * outer} if program.outer_bytes else {}),
            "activations": sum(pools.values()) if slots else _kept_by_layers(work),
            "working": working,
            "logits": max(0.0, head - working),
        },
        pools,
    )


def _pools(work: Work, slots: Slots | None) -> dict[str, float]:
    """Bytes of the pools on the device; none with one stage."""
    if slots is None:
        return {}
    layout = work.layout
    kept = ("activation",) if layout.remat == "full" else ("residual_b", "residual_w")
    away = kept if layout.offload in ("activations", "both") else ()
    return {pool: size for pool, size in pool_bytes(work, slots).items() if pool not in away}


def _kept_by_layers(work: Work) -> float:
    """Bytes that all layers keep of the microbatch at hand, with one stage."""
    if work.layout.offload in ("activations", "both"):
        return 0.0
    kept = 0.0
    for dense, layers in ((False, work.model.layers), (True, work.model.dense_layers)):
        layer = layer_bytes(work, dense)
        kept += layers * (layer.input if work.layout.remat == "full" else layer.residual_b + layer.residual_w)
    return kept


def _layer_working(work: Work) -> float:
    """Bytes of what an op of one layer has beside what is kept.

    A matrix and its gradient take turns. With ZeRO's stage 2 all of a layer's gradients are whole until they are scattered, in 16 bits and
    in 32. With stage 3 the layer's matrices and the next one's are gathered: by several stages in B, before W makes the gradients; by one
    while gradients take the place of matrices and those of the layer before are on their way, as are those of the head, in two layouts.
    """
    model, layout, number = work.model, work.layout, work.program.gradient_bytes
    arrays = WIDE * work.item * _widest(work) + masks(work)
    layer = work.layer_parameters()
    if layout.zero < 2 or work.shards == 1:
        return arrays + work.item * model.width * _columns(work)
    gathered = 2 * work.item * layer if layout.zero >= 3 else 0.0
    if layout.stage > 1:
        return arrays + max((work.item + number) * layer, gathered)
    head = 2 * number * model.vocab_size * model.width / layout.model if layout.zero >= 3 else 0.0
    return arrays + number * layer + max(work.item * layer, gathered) + head


def _widest(work: Work) -> float:
    """Numbers of a microbatch at the layer's width and at its widest: in attention or an MLP, or of all rows of experts."""
    model, layout = work.model, work.layout
    attention = model.heads * model.score_dim / layout.model
    if not model.experts:
        return work.tokens * (model.width + max(model.hidden() / layout.model, attention))
    shared, rows = model.shared_experts * model.expert_width / layout.model, rows_of(model, layout)
    experts = work.tokens * (model.width + shared) + rows * (model.width + model.expert_width / layout.model)
    return max(experts, work.tokens * (model.width + attention))


def _columns(work: Work) -> float:
    """Of a layer's largest matrix on a device; of all experts there together."""
    model, layout = work.model, work.layout
    experts = model.expert_width * max(model.experts / layout.expert, model.shared_experts)
    return max(experts if model.experts else model.hidden(), model.heads * model.score_dim) / layout.model


def _head_working(work: Work, loss_chunk: int, slots: Slots | None) -> float:
    """Bytes of what head and loss have: their input and its gradient, logits, with ZeRO's stage 2 the gradient of the table. Layers of
    modules that predict further tokens keep all that they have, until after the loss their backward works as any layer's."""
    model, layout = work.model, work.layout
    columns = model.vocab_size / layout.model / (layout.stage if slots and slots.shares_vocabulary else 1)
    gradient = work.program.gradient_bytes * model.width * columns if layout.zero >= 2 and work.shards > 1 else 0.0
    logits = LOGIT_BYTES * min(work.tokens, loss_chunk) * columns
    layer = layer_bytes(dataclasses.replace(work, layout=dataclasses.replace(layout, remat="none")))
    of_head = WIDE * work.item * work.tokens * model.width + logits + gradient
    if not model.predictions:
        return of_head
    return model.predictions * (layer.residual_b + layer.residual_w) + max(of_head, _layer_working(work))


# --- other programs ------------------------------------------------------------------------------------------------------------------


def layer_activations(work: Work) -> float:
    """Bytes that one layer keeps of one microbatch on a device."""
    model, layout, program = work.model, work.layout, work.program
    if not program.fused_attention:
        s, t = model.sequence, layout.model
        sequence = program.sequence_parallel
        kind = {
            "full": "full",
            "selective": "selective_sequence" if sequence else "selective",
            "none": "sequence" if sequence else "tensor" if t > 1 else "none",
        }[layout.remat]
        return identities.activation_bytes(kind, s, layout.microbatch, model.width, model.heads, t)
    hidden = model.hidden()
    heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim  # queries, keys, values, and the result
    split = layout.model if program.sequence_parallel else 1
    width = {"full": 1.0, "selective": 2.0, "none": 4.0}[layout.remat] * model.width / split
    inner = {"full": 0.0, "selective": heads + hidden * (2 if model.gated else 1), "none": heads + hidden * (4 if model.gated else 2)}
    return ITEM * work.tokens * (width + inner[layout.remat] / layout.model)


def microbatches_in_flight(work: Work) -> float:
    """Microbatches whose activations the fullest stage holds at once, in those of a whole stage."""
    layout = work.layout
    p, v, m = layout.stage, layout.repeats, layout.microbatches
    return min(float(m), closed_forms(layout.schedule).residuals(p, v, m) / v) if p > 1 else 1.0


def _working(work: Work) -> float:
    """Bytes of one layer's backward: with ZeRO-3 its matrices and the next one's, gathered, and their gradients before they are scattered,
    with the head's beside."""
    model, layout = work.model, work.layout
    widest = max(model.mlp_width * (2 if model.gated else 1), (model.heads + 2 * model.kv_heads) * model.head_dim) / layout.model
    layer = model.layer_parameters() / layout.model / max(1, layout.expert)
    matrices = ITEM * layer
    if layout.zero >= 3 and layout.data > 1:
        matrices = (2 * ITEM + ITEM + work.program.gradient_bytes) * layer
        matrices += work.program.gradient_bytes * model.vocab_size * model.width / layout.model / (layout.stage if layout.stage > 1 else 1)
    return matrices + ITEM * 4 * work.tokens * widest
