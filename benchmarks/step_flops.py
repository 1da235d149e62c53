"""FLOPs of a step on a device by op, from the config alone; compiled programs have as many.

Products with weights take 2 · parameters · tokens FLOPs, once in each of F (or K), R, B and W; and
once more in B if selective recomputation makes their results again.
Causal attention takes half of its products: two in F, K and R; in B four and the scores' again.
Key/value heads that several devices of `model` share count on each. Experts count for the tokens
that choose them, as if evenly. Separate documents count as one sequence.
"""

import collections
import dataclasses

from jaxtrain.config.groups.layer_kinds import kinds_of_layers
from jaxtrain.config.saved_values import ATTENTION, QKV
from jaxtrain.planner.layer.settings import ATTENTION_BACKWARD
from jaxtrain.planner.step.step_counts import StepCounts
from jaxtrain.schedule.columns import EMBED, EMBED_GRADIENT, HEAD

# products of attention's backward over the forward's two, without the scores computed again
ATTENTION_BACKWARD_ONCE = 2.0


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of products with weights and of attention. once: both without recomputation."""

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
    """FLOPs of a step by op, on a device of a stage."""
    flops: dict[str, Flops] = collections.defaultdict(Flops)
    for run in counts.layer_passes(stage):
        of_kind = _of_kind(counts, run.kind)
        flops[run.op] += _layer(of_kind, run.op) * (run.times * (run.layers - run.unread))
        if run.op == "B" and run.remat == "selective":
            flops[run.op] += _made_again(of_kind) * (run.times * run.layers)
        flops[run.op] += _layer(of_kind, run.op, output=False) * (run.times * run.unread)
    times, model = counts.times(stage), counts.collectives.model
    flops[HEAD] += _head(_of_kind(counts, model.stack[-1])) * times[HEAD]
    for kind in kinds_of_layers(model)[: model.dense_layers]:
        first = _of_kind(counts, kind)
        flops[EMBED] += _layer(first, "F", dense=True) * times[EMBED]
        for op in "RBW":
            flops[EMBED_GRADIENT] += _layer(first, op, dense=True) * times[EMBED_GRADIENT]
    return {op: of_op for op, of_op in flops.items() if of_op.total}


def total(counts: StepCounts, stage: int = 0) -> Flops:
    """FLOPs of all ops of a step, on a device of a stage."""
    return sum(by_op(counts, stage).values(), Flops())


def _of_kind(counts: StepCounts, kind: str) -> StepCounts:
    """The counts of a step whose layers are all of one kind."""
    c = counts.collectives
    of_kind = dataclasses.replace(c, model=c.model.of_kind(kind))
    return dataclasses.replace(counts, collectives=of_kind)


def _tokens(counts: StepCounts) -> float:
    """Tokens of a microbatch on a device, as if `model` split them."""
    return counts.collectives.tokens / counts.collectives.layout.model


def _layer(counts: StepCounts, op: str, output: bool = True, dense: bool = False) -> Flops:
    """FLOPs of one layer and microbatch.

    output: the last product is needed; those of experts are in any case, for the router's
        gradients, but where R starts from the inputs of layers
    """
    m, layout, tokens = counts.collectives.model, counts.collectives.layout, _tokens(counts)
    parameters = m.layer(dense).per_token
    if not output:
        parameters -= sum(
            m.layer(dense).used(product)
            for product in m.layer(dense).products
            if not product.read and (layout.saves_inputs or not product.experts)
        )
    shared = 0 if m.attention == "mla" else 2 * m.head_dim * max(0, layout.model - m.kv_heads)
    products, copied = 2.0 * parameters * tokens, 2.0 * shared * m.width * tokens
    forward = m.attention_flops() / 2 * layout.microbatch / (layout.context * layout.model)
    attention = forward * {"B": ATTENTION_BACKWARD, "W": 0.0}.get(op, 1.0)
    needed = forward * ATTENTION_BACKWARD_ONCE if op == "B" else attention
    return Flops(products + copied, attention, 0.0 if op == "R" else products + needed)


def _made_again(counts: StepCounts) -> Flops:
    """FLOPs of what B makes again in one layer and microbatch with selective recomputation."""
    m, layout = counts.collectives.model, counts.collectives.layout
    parameters = m.layer().made_again(layout.makes_again)
    shared = 0 if m.attention == "mla" else 2 * m.head_dim * max(0, layout.model - m.kv_heads)
    parameters += shared * m.width * layout.makes_again(QKV)
    forward = m.attention_flops() / 2 * layout.microbatch / (layout.context * layout.model)
    return Flops(2.0 * parameters * _tokens(counts), forward * layout.makes_again(ATTENTION))


def _head(counts: StepCounts) -> Flops:
    """FLOPs of a microbatch's head with its gradients and the modules that predict further
    tokens."""
    m, shards = (
        counts.collectives.model,
        counts.collectives.layout.stage if counts.collectives.shares_vocabulary else 1,
    )
    logits = 3 * 2.0 * m.vocab_size * m.width * _tokens(counts) * (1 + m.mtp_depth) / shards
    join = 3 * 2.0 * 2 * m.width**2 * _tokens(counts)
    module = sum((_layer(counts, op) for op in "FBW"), Flops(join, 0.0, join))
    return Flops(logits, 0.0, logits) + module * m.mtp_depth
