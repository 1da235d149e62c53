"""How many operations the products of a step take on a device, by op, from the config alone.

    weights     2 · parameters · tokens of each product with a matrix: forward (F, K), again (R), input's gradient (B), weights' (W)
    attention   of a causal sequence the half: two products forward (F, K, R); in B four, and the scores' once more, which nothing keeps

Key/value heads of which devices along `model` have copies count on each. Experts count for the tokens that choose them, as if evenly.
Documents kept apart count as one sequence.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator

from jaxtrain.config import Config
from jaxtrain.config.work import transformer_of
from jaxtrain.devices.mesh import CONTEXT, MODEL
from jaxtrain.plan.ops import Sizes
from jaxtrain.schedule.columns import CELL_OPS, EMBED, EMBED_GRADIENT, HEAD, cell_op, columns

FORWARD, AGAIN, INPUT, WEIGHTS = "F", "R", "B", "W"
BACKWARD_PRODUCTS = 2.5  # of attention's backward, over the two of its forward
BACKWARD_PRODUCTS_ONCE = 2.0  # without the scores that are computed again


@dataclasses.dataclass(frozen=True)
class Flops:
    """Operations of an op in a step on a device; `once` without what is computed again."""

    weights: float
    attention: float
    once: float

    @property
    def total(self) -> float:
        return self.weights + self.attention

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.weights + other.weights, self.attention + other.attention, self.once + other.once)

    def __mul__(self, times: float) -> "Flops":
        return Flops(times * self.weights, times * self.attention, times * self.once)


NOTHING = Flops(0.0, 0.0, 0.0)


def flops(config: Config, stage: int = 0) -> dict[str, Flops]:
    """Op → its operations, for the devices of a stage of a resolved config whose mesh is known."""
    sizes = Sizes(config, cpu=False)
    by_op: dict[str, Flops] = collections.defaultdict(lambda: NOTHING)
    for op, times, cost in _table(sizes, stage) if sizes.setup.train else _accumulation(sizes):
        by_op[op] += cost * times
    return {op: cost for op, cost in by_op.items() if cost.total}


def total(config: Config, stage: int = 0) -> Flops:
    """Of all ops."""
    return sum(flops(config, stage).values(), NOTHING)


def _table(sizes: Sizes, stage: int) -> Iterator[tuple[str, int, Flops]]:
    """(op, how often, what it takes)."""
    slotted, placement = sizes.setup.train, sizes.setup.placement
    assert slotted is not None
    times_of = {op: int(column[:, stage].sum()) for op, column in columns(slotted).runs.items()}
    for u in range(placement.units_per_stage):
        layers = placement.layer_count(u, stage)
        outside = int(placement.stack_size(u) == 1 or sizes.zero.gathers_in_ops)
        for name in CELL_OPS:
            op, times = FORWARD if name == "K" else name, times_of[cell_op(name, u)]
            yield op, times * (layers - outside), layer(sizes, op)
            yield op, times * outside, layer(sizes, op, output=op != AGAIN)
    yield HEAD, times_of[HEAD], _head(sizes)
    dense = sizes.model.dense_layers
    yield EMBED, times_of[EMBED] * dense, layer(sizes, FORWARD, dense=True)
    for op in (AGAIN, INPUT, WEIGHTS):
        yield EMBED_GRADIENT, times_of[EMBED_GRADIENT] * dense, layer(sizes, op, dense=True)


def _accumulation(sizes: Sizes) -> Iterator[tuple[str, int, Flops]]:
    m, layers, dense = sizes.config.pipeline.microbatches, sizes.model.layers, sizes.model.dense_layers
    again = [AGAIN] if sizes.config.pipeline.remat == "full" else []
    for op in (FORWARD, *again, INPUT, WEIGHTS):
        yield op, m * layers, layer(sizes, op, output=op != AGAIN)
    yield HEAD, m, _head(sizes)
    yield EMBED, m * dense, layer(sizes, FORWARD, dense=True)
    for op in (AGAIN, INPUT, WEIGHTS):
        yield EMBED_GRADIENT, m * dense, layer(sizes, op, dense=True)


def layer(sizes: Sizes, op: str, output: bool = True, dense: bool = False) -> Flops:
    """Of one layer and microbatch in F, R, B or W. output: whether its last product is needed; experts' outputs always are, for the
    gradients of the weights with which they are added."""
    model, tokens = sizes.model, _tokens(sizes)
    parameters = transformer_of(sizes.config).token_parameters(dense)
    if not output:
        down = model.mlp_width if dense or not model.experts else model.shared_experts * model.expert_width
        parameters -= model.width * down
    products, copied = 2.0 * parameters * tokens, 2.0 * _copied_columns(sizes) * model.width * tokens
    attention = attention_forward(sizes) * {INPUT: BACKWARD_PRODUCTS, WEIGHTS: 0.0}.get(op, 1.0)
    once = 0.0 if op == AGAIN else products + attention * (BACKWARD_PRODUCTS_ONCE / BACKWARD_PRODUCTS if op == INPUT else 1.0)
    return Flops(products + copied, attention, once)


def _copied_columns(sizes: Sizes) -> int:
    """Columns of keys and values that more than one device makes, as there are fewer heads of them than devices along `model`."""
    model = sizes.model
    return 0 if model.attention == "mla" else 2 * model.head_dim * max(0, sizes.axis_sizes[MODEL] - model.kv_heads)


def attention_forward(sizes: Sizes) -> float:
    """Of one layer and microbatch: the scores and the sum of values, of each token's earlier ones."""
    model, length = sizes.model, sizes.config.data.sequence_length
    key = model.head_dim + model.rope_head_dim
    width = model.heads * (key + (model.value_head_dim or key))
    return sizes.sequences * length**2 * width / (sizes.axis_sizes[CONTEXT] * sizes.axis_sizes[MODEL])


def _head(sizes: Sizes) -> Flops:
    """Of a microbatch: forward, and both gradients; with it the modules that predict further tokens."""
    model, shards = sizes.model, sizes.axis_sizes["stage"] if sizes.shared else 1
    logits = 3 * 2.0 * model.vocab_size * model.width * _tokens(sizes) * (1 + model.mtp_depth) / shards
    join = 3 * 2.0 * 2 * model.width**2 * _tokens(sizes)
    module = sum((layer(sizes, op) for op in (FORWARD, INPUT, WEIGHTS)), Flops(join, 0.0, join))
    return Flops(logits, 0.0, logits) + module * model.mtp_depth


def _tokens(sizes: Sizes) -> float:
    """Of a microbatch on a device, as if `model` cut them."""
    return math.prod((sizes.sequences, sizes.tokens)) / sizes.axis_sizes[MODEL]
