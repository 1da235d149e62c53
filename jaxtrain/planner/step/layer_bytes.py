"""The bytes that one layer saves of one microbatch on a device, by the widths of the arrays that go
from op to op when the layers are traced (runtime/backward_split.py)."""

from collections.abc import Collection
from typing import NamedTuple

from jaxtrain.config.saved_values import (
    ATTENTION,
    ATTENTION_NORM,
    ATTENTION_OUT,
    LATENT,
    MLP_HIDDEN,
    MLP_IN,
    MLP_NORM,
    QKV,
    ROUTED,
    ROUTER,
)
from jaxtrain.config.sizes import SELECTIVE
from jaxtrain.planner.step.collectives import FLOAT32, FP8, scales_of
from jaxtrain.planner.step.layout import leaves_out_empty, routed_capacity
from jaxtrain.planner.step.step_time import StepModel


class LayerBytes(NamedTuple):
    """Bytes on a device that one layer saves of one microbatch: from the forward for B alone and
    for W, from B for W, and the layer's input."""

    residual_b: float
    residual_w: float
    weight_stash: float
    input: float = 0.0

    def plus(self, other: "LayerBytes") -> "LayerBytes":
        """The sum, array by array."""
        return LayerBytes(*(a + b for a, b in zip(self, other, strict=True)))


def layer_bytes(step: StepModel, dense: bool = False, remat: str = "") -> LayerBytes:
    """Bytes by the widths of the arrays: of a token's attention, of the MLP that it goes through,
    and of the capacity of a device's experts. dense: a layer before those with experts; remat: the
    layout's if not given."""
    model, layout, item = step.model, step.layout, step.item
    width, experts = float(model.width), bool(model.experts) and not dense
    selective = (remat or layout.recomputation.mode) == SELECTIVE
    if selective:
        names = layout.saved_names
        saved, routed = _named(step, dense, names), _routed_named(step, experts, names)
    else:
        saved, routed = _all(step, dense), _routed_all(step, experts)
    # B leaves gradients gathered over `model` as they are; biases need a device's part too
    gathered = item * width * (layout.model > 1)
    row_parallel = {"out"} if experts else {"out", "mlp"}
    stash = saved.weight_stash - gathered * len(row_parallel.difference(model.biases))
    split, inputs = step.tokens / layout.model, item * width * step.tokens / layout.model
    for_b, for_w = saved.residual_b, saved.residual_w
    if step.settings.fp8_blocks and step.settings.fp8_weight_gradients:
        return LayerBytes(
            (for_b + for_w) * split + masks(step),
            step.tokens * _inputs(step) * (not selective),
            step.tokens * (_operands(step, dense) - _inputs(step) * (not selective)),
            inputs,
        )
    if step.settings.fp8 and step.settings.fp8_weight_gradients:
        # the router reads its input in the compute type, and statistics of the norm before it
        scores, router = FLOAT32 * model.experts * experts, item * width * experts
        saved_norm = not selective or MLP_NORM in layout.saved_names
        return LayerBytes(
            (for_b + for_w - router * saved_norm) * split + masks(step) + routed.residual_b,
            (router + FLOAT32 * experts) * split * saved_norm + routed.residual_w,
            (router + FLOAT32 * experts) * split * (not saved_norm)
            + scores * split
            + step.tokens * _operands(step, dense)
            + routed.weight_stash,
            inputs,
        )
    return LayerBytes(
        for_b * split + masks(step) + routed.residual_b,
        for_w * split + routed.residual_w,
        stash * split + gathered * len(row_parallel) * step.tokens + routed.weight_stash,
        inputs,
    )


def masks(step: StepModel) -> float:
    """Bytes of what hides keys from queries where `context` splits a sequence. A device has two
    pieces of it, one of which attends to half of the sequence and one to all of it. Each device of
    `model` has them."""
    layout, length = step.layout, step.model.sequence
    piece = length / (2 * layout.context)
    return step.item * layout.microbatch * piece * 1.5 * length * (layout.context > 1)


def _inputs(step: StepModel) -> float:
    """Bytes of a token on a device: the inputs of a dense layer's products, in blocks of FP8. F
    rounds and leaves them where everything is saved."""
    split = step.model.layer(dense=False).products
    numbers = sum(inputs for name, inputs, _ in split) / step.layout.model
    return FP8 * scales_of(True) * numbers


def _operands(step: StepModel, dense: bool) -> float:
    """Bytes of a token on a device: the operands in FP8 that B leaves for W, without routed tokens.

    Each product's input, and the gradient of its output, which is gathered over `model` behind a
    matrix that is split by rows. Shared experts read what is gathered for all experts.
    """
    model, split = step.model, step.layout.model
    experts = bool(model.experts) and not dense
    numbers = 0.0
    for name, inputs, outputs in model.layer(dense).products:
        if name == "router" or (experts and name.startswith("mlp")):
            continue
        by_rows = name in ("attention_output", "mlp_out")
        numbers += inputs / split + outputs / (1 if by_rows else split)
    if experts and model.shared_experts:
        hidden = model.shared_experts * model.expert_width * (3 if model.gated else 2)
        numbers += 2 * model.width + hidden / split
    return FP8 * scales_of(step.settings.fp8_blocks) * numbers


# --- bytes of a token ---------------------------------------------------------------------------


def _mlp_width(step: StepModel, dense: bool) -> float:
    """Columns of the MLP or the shared experts, 0 without any."""
    model = step.model
    has_experts = bool(model.experts) and not dense
    return float(model.shared_experts * model.expert_width if has_experts else model.mlp_width)


def _gradients(step: StepModel, dense: bool) -> float:
    """Bytes of a token's gradients as wide as the layer: of each block's output and of each norm's,
    where a product reads it."""
    return step.item * step.model.width * (4 if _mlp_width(step, dense) else 3)


def _all(step: StepModel, dense: bool) -> LayerBytes:
    """Bytes of a token where everything that the backward reads is saved."""
    model, item, hidden = step.model, step.item, _mlp_width(step, dense)
    arrays = 2 if model.gated else 1
    mlp = LayerBytes((arrays + 1) * hidden, 0.0, (arrays + 1) * hidden)
    if model.experts and not dense:
        mlp = _recomputing_activation(hidden, arrays)
    widths = _attention_widths(step).plus(mlp)
    # LayerNorm saves its input less the mean in 32 bits; RMSNorm its input
    norms = 2 * model.width * (FLOAT32 if model.layer_norm else item)
    scores = FLOAT32 * model.experts * (not dense)  # of the router, and their gradients
    statistics = FLOAT32 * model.heads  # a softmax's log-sum-exp
    return LayerBytes(
        item * widths.residual_b + statistics + 2 * scores,
        item * widths.residual_w + norms,
        item * widths.weight_stash + _gradients(step, dense) + scores,
    )


def _recomputing_activation(hidden: float, arrays: int) -> LayerBytes:
    """Numbers, or bytes, of a hidden layer that is made again from its first products, of which
    there are so many: by W from one, by B from two. B leaves the products' gradients."""
    if arrays == 1:
        return LayerBytes(0.0, hidden, hidden)
    return LayerBytes(arrays * hidden, 0.0, (arrays + 1) * hidden)


def _attention_widths(step: StepModel) -> LayerBytes:
    """Numbers of a token where all is saved: queries, keys and values, attention's result, and the
    gradients of the first three. Norms of queries and keys need what they norm and its gradient.
    Latent attention has keys and values before they are rotated and spread, what they and queries
    are made of, and gradients of all of these."""
    model = step.model
    query, key, value, result = _heads(step)
    if not model.mla:
        normed, stash = (query + key) * model.qk_norm, query + key + value
        # W reads what is normed, from which B rotates once more, and both the size of each head
        sizes = (model.heads + model.kv_heads) * model.qk_norm * FLOAT32 / step.item
        return LayerBytes(stash - normed + sizes, result + normed + sizes, stash + normed)
    latents, rotated = model.query_rank + model.kv_rank, model.rope_dim * (1 + model.heads)
    spread = model.heads * (model.head_dim + model.value_dim)
    stash = query + key + value + 2 * latents + rotated
    return LayerBytes(query + spread, result + latents + model.rope_dim, stash)


def _heads(step: StepModel) -> tuple[int, int, int, int]:
    """Numbers of a token's queries, keys, values and of attention's result."""
    model = step.model
    return (
        model.heads * model.score_dim,
        model.kv_heads * model.score_dim,
        model.kv_heads * model.output_dim,
        model.heads * model.output_dim,
    )


def _named(step: StepModel, dense: bool, names: Collection[str]) -> LayerBytes:
    """Bytes of a token where the layer's input and the values of these names are saved, and B
    recomputes the rest: with that of the input and the gradients."""
    model, item = step.model, step.item
    width, rms = item * float(model.width), not model.layer_norm
    first, second = made_norms(step, dense, names)
    # W adds up the residual stream in the middle, if it reads the layer's input in any case
    adds = ATTENTION_OUT in names and not first
    scores = FLOAT32 * model.experts * (not dense)
    parts = [
        _saved(width, for_w=rms and not first),
        _saved(width * (ATTENTION_OUT in names), for_w=rms and adds and not second),
        _norm(step, ATTENTION_NORM in names, first, source_saved=True),
        _norm(step, MLP_NORM in names, second, source_saved=adds),
        _named_attention(step, names),
        _named_mlp(step, dense, names),
        LayerBytes(scores * (ROUTER in names), 0.0, scores + _gradients(step, dense)),
    ]
    return LayerBytes(*map(sum, zip(*parts, strict=True)))


def _saved(size: float, for_w: bool) -> LayerBytes:
    """A residual of this size, which W reads or B alone."""
    return LayerBytes(0.0, size, 0.0) if for_w else LayerBytes(size, 0.0, 0.0)


def made_norms(step: StepModel, dense: bool, names: Collection[str]) -> tuple[bool, bool]:
    """Whether B makes the outputs of the two norms once more, because a product that it runs again
    reads them."""
    reads_first, reads_second = {QKV}, {MLP_IN}
    if step.model.mla:  # queries without a latent come from the norm
        reads_first = {LATENT} if step.model.query_rank else {LATENT, QKV}
    if step.model.experts and not dense:
        sent = ROUTED in names and not step.model.shared_experts
        reads_second = {ROUTER, ROUTED if sent else MLP_IN}
    return (
        ATTENTION_NORM not in names and not reads_first <= {*names},
        MLP_NORM not in names and not reads_second <= {*names},
    )


def _norm(step: StepModel, saved: bool, made: bool, source_saved: bool) -> LayerBytes:
    """A norm's output, and for the gradient of its scale what is normed: in 32 bits where B makes
    it or takes the mean off, else by its source."""
    width, item, rms = step.model.width, step.item, not step.model.layer_norm
    if made:
        return LayerBytes(0.0, 0.0, (FLOAT32 + item) * width)
    source = item * width * (not source_saved) if rms else FLOAT32 * width
    return LayerBytes(0.0, item * width * saved, source)


def _named_attention(step: StepModel, names: Collection[str]) -> LayerBytes:
    """Attention's bytes of a token, from its projections to its core's result."""
    model, item = step.model, step.item
    query, key, value, result = _heads(step)
    core = LayerBytes(0.0, 0.0, item * result)
    if ATTENTION in names:
        core = LayerBytes(FLOAT32 * model.heads, item * result, 0.0)
    gradients = item * (query + key + value)
    if not model.mla:
        # B leaves what it norms once more, in 32 bits, and its gradient
        gradients += (FLOAT32 + item) * (query + key) * model.qk_norm
        projected = LayerBytes(item * (query + key + value) * (QKV in names), 0.0, gradients)
        return core.plus(projected)
    latents = model.query_rank + model.kv_rank
    spread = query + model.heads * (model.head_dim + model.value_dim)
    gradients += item * (2 * latents + model.rope_dim * (1 + model.heads))
    compressed = item * (latents + model.rope_dim)
    if QKV not in names:  # B norms the latents once more
        saved = LayerBytes(compressed * (LATENT in names), 0.0, (FLOAT32 + item) * latents)
    elif LATENT in names:
        saved = LayerBytes(item * spread, compressed, 0.0)
    else:
        saved = LayerBytes(item * spread, 0.0, compressed)
    return core.plus(saved).plus(LayerBytes(0.0, 0.0, gradients))


def _named_mlp(step: StepModel, dense: bool, names: Collection[str]) -> LayerBytes:
    """Bytes of a token in the hidden layer of the MLP or the shared experts."""
    model, hidden = step.model, step.item * _mlp_width(step, dense)
    arrays, is_mlp = 2 if model.gated else 1, dense or not model.experts
    stash = arrays * hidden
    if MLP_HIDDEN in names:  # B leaves that of shared experts, which is behind a barrier
        return LayerBytes(stash * (MLP_IN in names), hidden, stash + hidden * (not is_mlp))
    if MLP_IN in names and not is_mlp:
        return _recomputing_activation(hidden, arrays)
    if MLP_IN in names:
        return LayerBytes((arrays - 1) * hidden, hidden, stash + hidden)
    return LayerBytes(0.0, 0.0, stash + (1 + is_mlp) * hidden)


# --- bytes of routed tokens ---------------------------------------------------------------------


def _routed_sizes(step: StepModel) -> tuple[float, float, int]:
    """Returns (bytes of all routed tokens that a device has the capacity for: as wide as the layer,
    which `model` does not split; as wide as an expert, which it does; number of first products)."""
    model = step.model
    size = step.item * routed_capacity(model, step.layout)
    arrays = 2 if model.gated else 1
    return size * model.width, size * model.expert_width / step.layout.model, arrays


def _routed_all(step: StepModel, experts: bool) -> LayerBytes:
    """Bytes of routed tokens where everything is saved. experts: the layer has some"""
    width, hidden, arrays = _routed_sizes(step)
    if not experts:
        return LayerBytes(0.0, 0.0, 0.0)
    if leaves_out_empty(step.model, step.layout) and not step.settings.fp8:
        # the weighed activation and its gradient are one function of the first products
        return LayerBytes(arrays * hidden, hidden + width, arrays * hidden + width)
    if step.settings.fp8 and step.settings.fp8_weight_gradients:
        rows, columns = FP8 * width / step.item, FP8 * hidden / step.item
        gradients = rows + arrays * columns
        if step.model.shared_experts:  # a barrier is between what F sends and what W reads
            shared = FP8 * step.tokens * step.model.width
            return LayerBytes(arrays * hidden + rows + shared, 0.0, gradients + rows + columns)
        return LayerBytes(arrays * hidden, rows, gradients + columns)
    return _recomputing_activation(hidden, arrays).plus(LayerBytes(0.0, width, width))


def _routed_named(step: StepModel, experts: bool, names: Collection[str]) -> LayerBytes:
    """Bytes of routed tokens where the values of these names are saved, and B recomputes the rest
    of what W reads, too. experts: the layer has some"""
    width, hidden, arrays = _routed_sizes(step)
    if not experts:
        return LayerBytes(0.0, 0.0, 0.0)
    first = arrays * hidden * (MLP_IN in names)
    last = hidden * (MLP_HIDDEN in names)
    if step.settings.fp8 and step.settings.fp8_weight_gradients:
        rows, columns = FP8 * width / step.item, FP8 * hidden / step.item
        received, stash = rows * (ROUTED in names), 2 * rows + (arrays + 1) * columns
        if step.model.shared_experts:  # a barrier is between what F sends and what W reads
            return LayerBytes(first + last + received, 0.0, stash)
        return LayerBytes(first + last, received, stash - received)
    # W sends tokens once more that B has not needed
    received = width * (MLP_IN not in names)
    stash = arrays * hidden + width + hidden * (MLP_HIDDEN not in names)
    if arrays == 1 and first and not last and not leaves_out_empty(step.model, step.layout):
        first, last, stash = 0.0, first, stash - hidden
    if ROUTED in names:
        return LayerBytes(first, last + width, stash)
    return LayerBytes(first, last, stash + received)
