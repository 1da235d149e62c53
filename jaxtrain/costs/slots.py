"""What our own program's layers keep for their backward, as the runtime keeps it: slots of five pools, each shared by a stage's chunks.

    activation     a chunk's input: from its arrival to F, and to R where there is one
    gradient       the gradient of a chunk's output, to B
    residual_b     what B alone needs of F
    residual_w     what W needs too
    weight_stash   what B leaves for W

A table says how many slots there are of each (schedule/slots.py); `estimated` has closed forms of that. Bytes of a slot are those of the
arrays that cross between ops as the layers are traced (runtime/backward_split.py), by their widths. With one stage layers keep their
inputs, or both kinds of residuals.
"""

import dataclasses
import math

from jaxtrain.costs.expert_rows import rows_of
from jaxtrain.costs.step_time import Work
from jaxtrain.schedule.orders import closed_forms

FLOAT32 = 4  # bytes
OWN = 2  # slots of what comes and what leaves beside those that wait


@dataclasses.dataclass(frozen=True)
class Slots:
    """How many slots of each pool the fullest stage has, and what they are for.

    layers:             of the largest unit, for which each slot has room
    rows:               layers for whose parameters a device has room, which is the same on all stages
    shares_vocabulary:  tables are split over the stages; otherwise every stage has room for all of them
    """

    activation: float
    gradient: float
    residual_b: float
    residual_w: float
    weight_stash: float
    layers: int
    rows: int
    shares_vocabulary: bool


def estimated(work: Work) -> Slots | None:
    """Of a layout with stages, by the peaks of the named schedules' tables (schedule/orders.py); None with one stage."""
    layout, p, v = work.layout, work.layout.stage, max(1, work.layout.repeats)
    if p == 1:
        return None
    everything, schedule = layout.microbatches * v, closed_forms(layout.schedule)
    kept, behind = min(schedule.residuals(p, v, layout.microbatches), everything), min(schedule.stashes(p), everything)
    full = layout.remat == "full"
    layers = math.ceil(work.model.layers / (p * v))
    return Slots(
        activation=kept if full else OWN,
        gradient=schedule.gradients(p, layout.microbatches),
        residual_b=1 if full else kept,
        residual_w=behind if full else kept,
        weight_stash=behind,
        layers=layers,
        rows=layers * v,
        shares_vocabulary=work.program.vocabulary_parallel,
    )


@dataclasses.dataclass(frozen=True)
class LayerBytes:
    """Bytes on a device that one layer keeps of one microbatch: its input, what crosses from the forward to B alone and to W, and from B
    to W."""

    input: float
    residual_b: float
    residual_w: float
    weight_stash: float


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Numbers that cross between a layer's ops: residual_b, residual_w, weight_stash as in `LayerBytes`."""

    residual_b: float
    residual_w: float
    weight_stash: float


def layer_bytes(work: Work, dense: bool = False) -> LayerBytes:
    """By the widths of the arrays: of what attention has of a token, of the MLP that it goes through, or of all rows of experts for which a
    device has room. dense: of a layer before those with experts."""
    model, layout, item = work.model, work.layout, work.item
    width, experts = float(model.width), bool(model.experts) and not dense
    layer_norm = model.norm_vectors > 1  # keeps its input less the mean in 32 bits; RMSNorm keeps the input itself
    selective = layout.remat == "selective"
    attention = _of_attention(work)
    hidden = model.shared_experts * model.expert_width if experts else model.mlp_width
    mlp = _of_hidden(work, hidden)
    gradients = (4 if hidden else 3) * width
    for_b = item * (attention.residual_b + mlp.residual_b) + FLOAT32 * model.heads  # statistics of a softmax, log-sum-exp
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
    if layout.model > 1:  # B leaves the gradients that it has gathered over `model` as they are, and biases need a device's part beside
        of_products = (1 if experts else 2) * item * width
        gathered = of_products * work.tokens
        stash -= 0.0 if model.biases else of_products
    if experts:
        scores = FLOAT32 * model.experts  # of the router, and their gradients
        for_b, stash = for_b + scores * (1 if selective else 2), stash + scores
    rows = _of_rows(work) if experts else _Kept(0.0, 0.0, 0.0)
    split = work.tokens / layout.model
    return LayerBytes(
        input=item * width * split,
        residual_b=for_b * split + masks(work) + rows.residual_b,
        residual_w=for_w * split + rows.residual_w,
        weight_stash=stash * split + gathered + rows.weight_stash,
    )


def _of_attention(work: Work) -> _Kept:
    """Of a token: queries, keys and values, attention's result, and the gradients of the first three. Latent attention has keys and values
    before they are rotated and spread, what they and queries are made of, and gradients of all of these."""
    model = work.model
    query, key = model.heads * model.score_dim, model.kv_heads * model.score_dim
    result, value = model.heads * model.output_dim, model.kv_heads * model.output_dim
    if not model.mla:
        return _Kept(query + key + value, result, query + key + value)
    latents = model.query_rank + model.kv_rank
    made, rotated = model.heads * (model.head_dim + model.value_dim), model.rope_dim * (1 + model.heads)
    return _Kept(query + made, result + latents + model.rope_dim, query + key + value + 2 * latents + rotated)


def _of_hidden(work: Work, hidden: int) -> _Kept:
    """Of a token in an MLP with so many columns."""
    gated = work.model.gated
    arrays = 3 if gated else 2
    if work.layout.remat == "selective":
        return _Kept(hidden if gated else 0.0, hidden, arrays * hidden)
    return _Kept(arrays * hidden, 0.0, arrays * hidden)


def _of_rows(work: Work) -> _Kept:
    """Bytes of all rows of experts on a device: as wide as an expert, which `model` splits, and as the layer, which it does not."""
    model, layout = work.model, work.layout
    rows = work.item * rows_of(model, layout)
    hidden, width = rows * model.expert_width / layout.model, rows * model.width
    arrays = 2 if model.gated else 1
    if layout.remat == "selective":  # B leaves what it computes again, too
        return _Kept(arrays * hidden, 0.0, (arrays + 1) * hidden + width)
    return _Kept((arrays + 1) * hidden, hidden + width, arrays * hidden + width)


def masks(work: Work) -> float:
    """Bytes of what hides keys from queries where a sequence is split over `context`: a device has two pieces of it, one of which looks at
    half of the sequence and one at all of it. Devices of `model` have it each."""
    layout, length = work.layout, work.model.sequence
    if layout.context == 1:
        return 0.0
    piece = length / (2 * layout.context)
    return work.item * layout.microbatch * piece * 1.5 * length


def pool_bytes(work: Work, slots: Slots) -> dict[str, float]:
    """Bytes of each pool on a device."""
    layer = layer_bytes(work)
    return {
        "activation": slots.activation * layer.input,
        "gradient": slots.gradient * layer.input,
        "residual_b": slots.residual_b * slots.layers * layer.residual_b,
        "residual_w": slots.residual_w * slots.layers * layer.residual_w,
        "weight_stash": slots.weight_stash * slots.layers * layer.weight_stash,
    }


def turned_pools(work: Work, slots: Slots) -> float:
    """Bytes of copies where `model` splits layers: XLA transposes arrays of a whole pool before an op's loop over layers.

    Of microbatches of several sequences W turns an array of the stash that was gathered, and B what a norm has kept; the ops take turns. Of
    one sequence, W turns the two gradients that it sums for biases, as wide as the hidden layer and as the layer.
    """
    model, layout = work.model, work.layout
    if layout.model == 1:
        return 0.0
    stash = slots.weight_stash * slots.layers * work.item * work.tokens
    if layout.microbatch == 1:
        return stash * (model.hidden() + model.width) / layout.model if model.biases else 0.0
    number = 0 if layout.remat == "selective" else FLOAT32 if model.norm_vectors > 1 else work.item
    norms = number * slots.residual_w * slots.layers * work.tokens * model.width / layout.model
    return max(stash * model.width, norms)
