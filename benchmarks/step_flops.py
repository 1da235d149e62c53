"""Operations of a step on a device by op, from the config alone; compiled programs have as many.

Operations of products with weights are 2 · parameters · tokens: forward (F, K), again (R), of the
input's gradient (B) and the weights' (W). Causal attention takes half of its products: two forward
(F, K, R), in B four and the scores' once more. Key/value heads that several devices of `model`
share count on each. Experts count for the tokens that choose them, as if evenly. Documents kept
separate count as one sequence.
"""

import collections
import dataclasses

from jaxtrain.costs.step_counts import StepCounts
from jaxtrain.costs.step_time import ATTENTION_BACKWARD
from jaxtrain.schedule.columns import EMBED, EMBED_GRADIENT, HEAD

# products of attention's backward over the forward's two, without the scores computed again
ATTENTION_BACKWARD_ONCE = 2.0


@dataclasses.dataclass(frozen=True)
class Flops:
    """Operations: products with weights, attention's; `once`: both without recomputation."""

    weights: float = 0.0
    attention: float = 0.0
    once: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.attention

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.weights + other.weights, self.attention + other.attention, self.once + other.once
        )

    def __mul__(self, times: float) -> "Flops":
        return Flops(times * self.weights, times * self.attention, times * self.once)


def by_op(counts: StepCounts, stage: int = 0) -> dict[str, Flops]:
    """Operations of a step by op, for the devices of a stage."""
    flops: dict[str, Flops] = collections.defaultdict(Flops)
    for run in counts.layer_passes(stage):
        flops[run.op] += _layer(counts, run.op) * (run.times * (run.layers - run.unread))
        flops[run.op] += _layer(counts, run.op, output=False) * (run.times * run.unread)
    times, dense = counts.times(stage), counts.collectives.model.dense_layers
    flops[HEAD] += _head(counts) * times[HEAD]
    flops[EMBED] += _layer(counts, "F", dense=True) * (times[EMBED] * dense)
    for op in "RBW":
        flops[EMBED_GRADIENT] += _layer(counts, op, dense=True) * (times[EMBED_GRADIENT] * dense)
    return {op: of_op for op, of_op in flops.items() if of_op.total}


def total(counts: StepCounts, stage: int = 0) -> Flops:
    """Operations of all ops of a step, for the devices of a stage."""
    return sum(by_op(counts, stage).values(), Flops())


def _tokens(counts: StepCounts) -> float:
    """Tokens of a microbatch on a device, as if `model` cut them."""
    return counts.collectives.tokens / counts.collectives.layout.model


def _layer(counts: StepCounts, op: str, output: bool = True, dense: bool = False) -> Flops:
    """Operations of one layer and microbatch. output: whether its last product is needed; experts'
    outputs always are, for the gradients of the weights with which they are added."""
    m, layout, tokens = counts.collectives.model, counts.collectives.layout, _tokens(counts)
    parameters = m.layer(dense).per_token
    if not output:
        parameters -= m.width * (
            m.mlp_width if dense or not m.experts else m.shared_experts * m.expert_width
        )
    shared = 0 if m.mla else 2 * m.head_dim * max(0, layout.model - m.kv_heads)
    products, copied = 2.0 * parameters * tokens, 2.0 * shared * m.width * tokens
    forward = m.attention_flops() / 2 * layout.microbatch / (layout.context * layout.model)
    attention = forward * {"B": ATTENTION_BACKWARD, "W": 0.0}.get(op, 1.0)
    needed = forward * ATTENTION_BACKWARD_ONCE if op == "B" else attention
    return Flops(products + copied, attention, 0.0 if op == "R" else products + needed)


def _head(counts: StepCounts) -> Flops:
    """Operations of a microbatch's head, forward and both gradients, with the modules that predict
    further tokens."""
    m, shards = (
        counts.collectives.model,
        counts.collectives.layout.stage if counts.collectives.shares_vocabulary else 1,
    )
    logits = 3 * 2.0 * m.vocab_size * m.width * _tokens(counts) * (1 + m.predictions) / shards
    join = 3 * 2.0 * 2 * m.width**2 * _tokens(counts)
    module = sum((_layer(counts, op) for op in "FBW"), Flops(join, 0.0, join))
    return Flops(logits, 0.0, logits) + module * m.predictions
