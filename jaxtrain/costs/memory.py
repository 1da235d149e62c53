"""What a step holds on the fullest device, by parts, in closed form.

weights, gradients, optimizer   by the stage of ZeRO, of the stage with most parameters
activations                     what layers keep of a microbatch, for those that a stage holds at once
working                         what one layer's backward needs beside: its matrices and their gradients, its widest results
logits                          of the tokens whose logits exist at a time: what is more than `working`, for head and layers take turns
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxtrain.costs import identities
from jaxtrain.costs.step_time import ITEM, Work

ALLOCATED = 1.04  # of what is live at the peak, for buffers do not fit without gaps (XLA for H100s: 1.04 to 1.19)
LOGIT_BYTES = 10.0  # of a logit: in 32 bits, its gradient, and in 16 bits what products read of it


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes by part on the fullest device."""

    parts: Mapping[str, float]

    @property
    def bytes(self) -> float:
        """With what lies between arrays."""
        return ALLOCATED * sum(self.parts.values())


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
    if p == 1:
        return 1.0
    most = {
        "gpipe": m,
        "1f1b": p,
        "interleaved": p * (1 + (p - 1) / (p * v)),
        "zb_h1": p,
        "zb_h2": 2 * p - 1,
        "zb_v": p,
        "dualpipe_v": p + 1,
    }.get(layout.schedule, p * (1 + (p - 1) / (p * v)))
    return min(float(m), float(most))


def memory(work: Work, loss_chunk: int = 2048) -> Memory:
    """The parts. loss_chunk: tokens whose logits exist at a time."""
    model, layout, program = work.model, work.layout, work.program
    parameters, shards = work.device_parameters(), work.shards
    optimizer = program.state_bytes * parameters / (shards if layout.zero >= 1 else 1)
    layers = math.ceil(model.layers / layout.stage) + (model.dense_layers if layout.stage == 1 else 0)
    kept = layer_activations(work) * layers * microbatches_in_flight(work)
    if program.units and layout.stage > 1 and layout.remat == "full":
        kept = layer_activations(work) * layout.repeats * microbatches_in_flight(work) + _unit(work)
    logits = LOGIT_BYTES * min(work.tokens, loss_chunk) * model.vocab_size / layout.model
    working = _working(work)
    if layout.offload in ("optimizer", "both"):
        optimizer = 0.0
    if layout.offload in ("activations", "both"):
        kept = layer_activations(work) * layers
    return Memory(
        {
            "weights": program.weight_bytes * parameters / (shards if layout.zero >= 3 else 1),
            "gradients": program.gradient_bytes * parameters / (shards if layout.zero >= 2 else 1),
            "optimizer": optimizer,
            "activations": kept,
            "working": working,
            "logits": max(0.0, logits - working),
        }
    )


def _unit(work: Work) -> float:
    """Bytes of a chunk's residuals between R and B, and between B and W, of one microbatch: as compiled, of the hidden layer's arrays six
    (four without a gate), and nine as wide as the layer."""
    model, layout = work.model, work.layout
    hidden = model.hidden()
    heads = 4 * model.heads * model.score_dim + 4 * model.kv_heads * model.score_dim
    width = (6 if model.gated else 4) * hidden + 5 * model.width + heads
    layers = model.layers / (layout.stage * layout.repeats)
    return ITEM * layers * work.tokens * width / layout.model


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
