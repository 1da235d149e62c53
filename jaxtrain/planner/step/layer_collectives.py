"""The collectives of a layer's ops: products over `model`, attention over `context`, experts.

Each function mirrors the code that it names: a collective that is added to that code needs a line
in the function. A test compares both with the compiled program.

    F, R, B, W    forward, recomputation, gradient of inputs, gradient of weights; of one layer
    item          bytes of an activation's number
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from jaxtrain.config.saved_values import (
    ATTENTION,
    ATTENTION_OUT,
    MLP_IN,
    QKV,
    ROUTED,
    ROUTER,
)
from jaxtrain.config.sizes import MX_BLOCK, SELECTIVE
from jaxtrain.planner.step.layout import (
    Layout,
    nodes_of_token,
    routed_capacity,
    sent_by_gateway,
)
from jaxtrain.planner.step.links import (
    CONTEXT,
    EXCHANGE,
    EXPERT,
    GATHER,
    MODEL,
    PERMUTE,
    RAGGED,
    SCATTER,
    SUM,
    Collective,
    alike,
)
from jaxtrain.planner.step.model import Model

FLOAT32 = 4  # bytes of a float32 or an int32
FP8 = 1


def scales_of(blocks: bool) -> float:
    """Bytes of numbers in FP8 with those of their scales, over bytes of the numbers."""
    return 1 + 1 / MX_BLOCK if blocks else 1.0


@dataclasses.dataclass(frozen=True)
class Activations:
    """What the collectives of a model's step with a layout depend on, and the sizes of activations.

    item:               bytes of an activation's number
    read, reduced:      bytes of a parameter's number where an op gathers it, and of its gradient in
                        a sum
    updated:            bytes of a parameter's number that is gathered after the update
    context:            `parallel.context`
    explicit:           as our own runtime communicates: W gathers its inputs again, latents and
                        shared heads are gathered, every device of `model` sends all routed tokens
    shares_vocabulary:  embedding and head are split over the stages
    gathers_in_ops, reduces_in_ops: of ZeRO-3's parameters, and of each microbatch's gradients
    documents:          tokens attend within their document alone
    loss_cuts:          parts of a microbatch whose logits exist at a time
    imbalance:          routed tokens of the busiest device's experts, over the mean
    cpu:                as XLA's CPU backend lowers them: 16-bit numbers are summed in 32 bits, and
                        the experts' full capacity is sent
    outer_int8:         replicas exchange int8 with scales
    fp8:                operands of products with layers' matrices are gathered and sent in FP8
    fp8_weight_gradients: also those of the products that make weights' gradients; otherwise
                        activations are gathered before they are quantized
    fp8_blocks:         blocks of numbers have their own scales, and operands a form for each
                        product (parallel/mxfp8.py)
    """

    model: Model
    layout: Layout
    item: float
    read: float
    reduced: float
    updated: float
    context: str = "all_gather"
    explicit: bool = True
    shares_vocabulary: bool = False
    gathers_in_ops: bool = False
    reduces_in_ops: bool = False
    documents: bool = False
    loss_cuts: int = 1
    imbalance: float = 1.0
    cpu: bool = False
    outer_int8: bool = False
    fp8: bool = False
    fp8_weight_gradients: bool = True
    fp8_blocks: bool = False

    def devices(self, axes: Iterable[str]) -> int:
        """The number of devices along these axes together."""
        return math.prod(getattr(self.layout, axis) for axis in axes)

    @property
    def summed(self) -> float:
        """Bytes of an activation's number in a sum."""
        return FLOAT32 if self.cpu else self.item

    @property
    def operand(self) -> float:
        """Bytes of a number of a product's operand that is gathered over `model`."""
        return self.number_of_fp8 if self.fp8 and self.fp8_weight_gradients else self.item

    @property
    def number_of_fp8(self) -> float:
        """Bytes of a number in FP8 with its part of a block's scale."""
        return FP8 * scales_of(self.fp8_blocks)

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of a microbatch on one group of `model` devices."""
        return self.layout.microbatch * (self.model.sequence // self.layout.context)

    @functools.cached_property
    def activation(self) -> int:
        """Elements of a microbatch's activation on one group of `model` devices."""
        return self.tokens * self.model.width


class ExpertCollectives(Activations):
    """The collectives of a layer's experts (parallel/experts.py)."""

    def _experts(self, op: str, unread: bool) -> list[Collective]:
        """The collectives of routed tokens on their way to experts and back, and of their weights
        (parallel/experts.py)."""
        m, outward, back = self.model, *self.routed(op, unread)
        if not self.explicit or not outward:
            return [*outward, *back]
        capacity = routed_capacity(m, self.layout)
        routed = float(self.tokens * m.experts_per_token)
        weighted = capacity if self.layout.expert > 1 or m.capacity_factor else routed
        summed = Collective(SUM, (MODEL,), weighted * FLOAT32 * (op == "B"))
        return [*outward, *back, summed]

    def routed(self, op: str, unread: bool = False) -> tuple[list[Collective], list[Collective]]:
        """The all-to-alls of an op that send routed tokens, or their gradients, to experts, and
        those that bring results back. unread: nothing reads the layer's output"""
        m, layout, size = self.model, self.layout, self.model.width * self.item
        exchanged = float(self.tokens * m.experts_per_token) * self.imbalance
        if not self.explicit:  # each device of `model` sends its share
            each = [] if op == "W" else alike(EXCHANGE, EXPERT, [exchanged / layout.model * size])
            return each, each
        if op == "W" and (self._sends_in_b("B") or not layout.makes_again(ROUTED)):
            return [], []
        if layout.expert_nodes > 1:
            return self._routed_in_two_steps(op, unread)
        capacity = routed_capacity(m, layout)
        if m.capacity_factor:
            exchanged = capacity
        elif self.cpu:
            most = self.tokens * min(m.experts_per_token, m.experts // layout.expert)
            exchanged = layout.expert * min(most, capacity)
        kind = EXCHANGE if self.cpu or m.capacity_factor else RAGGED
        of_widths = lambda widths: alike(kind, EXPERT, [exchanged * width for width in widths])
        if op == "W":  # Selective remat does not save what was sent: W sends it once more.
            return of_widths([size]), []
        out = m.width * FP8 if self.fp8 else size
        outward = [out, *self._weights_sent(op)] + [out] * self._sends_in_b(op)
        return of_widths(outward), of_widths([size] * (not unread))

    def _routed_in_two_steps(
        self, op: str, unread: bool
    ) -> tuple[list[Collective], list[Collective]]:
        """`routed` where a token goes to each node once, with the numbers and weights of its
        choices, and from there to its experts."""
        m, layout, size = self.model, self.layout, self.model.width * self.item
        nodes = layout.expert_nodes
        local, choices = layout.expert // nodes, m.experts_per_token
        rows = self.tokens * self.imbalance
        across, inside = nodes_of_token(m, nodes) * rows, float(choices * rows)
        if self.cpu:
            across = float(nodes * self.tokens)
            most = nodes * self.tokens * min(choices, m.experts // layout.expert)
            capacity = min(sent_by_gateway(m, layout), routed_capacity(m, layout))
            inside = float(local * min(most, capacity))
        kind = EXCHANGE if self.cpu else RAGGED

        def both(
            widths: list[float], weights: Sequence[float] = (), numbers: Sequence[float] = ()
        ) -> list[Collective]:
            """The collectives of both steps. widths: bytes of a row; weights, numbers: bytes of a
            choice. Across go those of all of a token's choices; the numbers go no further."""
            of_choices = [choices * number for number in [*weights, *numbers]]
            to_nodes = [across * n for n in [*widths, *of_choices]]
            to_experts = [inside * n for n in [*widths, *weights]]
            return [
                *alike(kind, EXPERT, to_nodes, devices=nodes, stride=local),
                *alike(kind, EXPERT, to_experts, devices=local),
            ]

        if op == "W":
            return both([size]), []
        out = m.width * FP8 if self.fp8 else size
        outward, weights = [out] + [out] * self._sends_in_b(op), self._weights_sent(op)
        numbers = [FLOAT32] * (op != "B" or layout.remat == SELECTIVE)
        return both(outward, weights, numbers), both([size] * (not unread))

    def _weights_sent(self, op: str) -> list[float]:
        """Bytes of the choices' weights that an op sends, each time for one choice: in B their
        gradients, and with selective recomputation themselves once more."""
        return [FLOAT32] * (2 if op == "B" and self.layout.remat == SELECTIVE else 1)

    def _sends_in_b(self, op: str) -> bool:
        """True if B sends tokens to experts once more, since selective remat has not saved them:
        for products that it makes again, and in FP8, where they wait for W."""
        again = self.layout.makes_again
        return op == "B" and again(ROUTED) and (self.fp8 or again(MLP_IN))


class LayerCollectives(ExpertCollectives):
    """The collectives of a layer (models/)."""

    def layer(
        self, op: str, unread: bool = False, fused: bool = False, dense: bool = False
    ) -> list[Collective]:
        """The collectives of one layer in F, R, B or W of one microbatch: those of activations and,
        in W, the sums over `model` of gradients that each of its devices has a part of. Those over
        `data` are in `gathers` and `reductions_in_op`.

        unread: nothing reads the layer's output
        fused:  F or R, B and W are one op, in which B and W reuse what was gathered before them
        dense:  the layer has an MLP for all tokens, in a model whose other layers have experts
        """
        collectives = []
        if self.layout.model > 1:
            collectives += self._over_model(op, unread, fused, dense)
        if self.layout.context > 1:
            collectives += self._over_context(op, fused and op == "B")
        if self.model.experts and not dense:
            collectives += self._experts(op, unread)
        return collectives

    def _over_model(self, op: str, unread: bool, fused: bool, dense: bool) -> list[Collective]:
        """The collectives of two column-parallel products, attention's and the MLP's, and of the
        row-parallel product after each (parallel/tensor.py). Without sequence parallelism two
        all-reduces send as many bytes. The router reads what experts gather in the compute type,
        and so does the sum of their results."""
        m, outputs = self.model, [self.model.width] * 2
        inputs = outputs
        if m.mla and self.explicit:
            inputs = [m.query_rank or m.width, m.kv_rank, m.width]
        read = outputs[:1] if unread else outputs
        in_weights = inputs if self.explicit and not fused else []
        # W is in one op with B, which has gathered some of them; in blocks in another form
        if self.layout.stage == 1 and not self.fp8_blocks:
            again = self._gathered_again(inputs, bool(m.experts) and not dense)
            in_weights = [n for n, is_gathered in zip(in_weights, again) if not is_gathered]
        gathered = {"F": inputs, "R": inputs, "B": outputs, "W": in_weights}[op]
        scattered = {"F": read, "R": read, "B": inputs, "W": []}[op]
        of_experts = bool(m.experts) and not dense
        # a gradient in blocks is rounded in two forms after it is gathered
        operand = self.item if self.fp8_blocks and op == "B" else self.operand
        last = self.item if of_experts else operand
        numbers = [*[operand] * (len(gathered) - 1), last]
        sizes = [self.tokens * n * number for n, number in zip(gathered, numbers)]
        if self.fp8_blocks and fused and op == "B":  # W's inputs are of another form than F's
            sizes += [self.tokens * n * self.operand for n in inputs]
        collectives = alike(GATHER, MODEL, sizes)
        collectives += alike(SCATTER, MODEL, [self.tokens * n * self.summed for n in scattered])
        if op == "B" and not fused:
            collectives += self._made_again_over_model(inputs, of_experts)
        return collectives + self._unsplit_over_model(op, fused) if self.explicit else collectives

    def _made_again_over_model(self, inputs: list[int], of_experts: bool) -> list[Collective]:
        """The collectives of products that B makes again with selective recomputation. inputs:
        widths of the column-parallel products' inputs, the MLP's last"""
        gathered = [self.tokens * n * self.operand for n in inputs]
        if of_experts:
            gathered[-1] = self.tokens * inputs[-1] * self.item
        again = self._gathered_again(inputs, of_experts)
        scattered = [self.activation * self.summed] * self.layout.makes_again(ATTENTION_OUT)
        return [
            *alike(GATHER, MODEL, [size for size, made in zip(gathered, again) if made]),
            *alike(SCATTER, MODEL, scattered),
        ]

    def _gathered_again(self, inputs: list[int], of_experts: bool) -> list[bool]:
        """Whether B gathers each of these inputs of column-parallel products, for products that it
        makes again."""
        again = self.layout.makes_again
        of_mlp = again(MLP_IN)
        if of_experts:
            shared = again(MLP_IN) and self.model.shared_experts > 0
            of_mlp = self._sends_in_b("B") or again(ROUTER) or shared
        return [*[again(QKV)] * (len(inputs) - 1), of_mlp]

    def _unsplit_over_model(self, op: str, fused: bool) -> list[Collective]:
        """The collectives of what several devices of `model` hold each: the rotated key of latent
        attention, key/value heads that they share (tensor.shared_columns), vectors and latents."""
        m, rotated, collectives = self.model, self.tokens * self.model.rope_head_dim, []
        sharing, qkv = self.layout.model // m.kv_heads, "qkv" in m.biases
        if m.mla and op in "FR":
            collectives = [Collective(GATHER, (MODEL,), rotated * self.item)]
        elif m.mla and op == "B":  # the partitioner sums the rotated key's gradient
            kind = SUM if self.cpu else SCATTER
            collectives = [Collective(kind, (MODEL,), rotated * self.summed)]
        elif not m.mla and sharing > 1 and not (fused and op == "B"):
            kind, number = (SCATTER, self.summed) if op == "W" else (GATHER, self.item)
            matrix = self.number_of_fp8 if self.fp8 and op != "W" else number
            sizes = [m.width * m.head_dim * matrix, m.head_dim * number][: 1 + qkv]
            collectives = alike(kind, MODEL, sizes, 2, sharing)
        if op == "W":
            ranks = m.query_rank + m.kv_rank
            heads = 2 * m.norm_vectors * m.head_dim * m.qk_norm
            norms = (m.norm_vectors * 2 * m.width + heads + ranks) * FLOAT32
            latents = (m.width + qkv) * (ranks + m.rope_head_dim) * self.summed
            biases = m.width * self.summed * len({"out", "mlp"}.intersection(m.biases))
            collectives += alike(SUM, MODEL, [norms, biases, latents])
        return collectives

    def _over_context(self, op: str, reuses: bool) -> list[Collective]:
        """The collectives of attention over a split sequence (parallel/context.py,
        parallel/ring.py). reuses: B has the keys and values that R has gathered."""
        m, shards, again = self.model, self.layout.context, self.layout.makes_again(ATTENTION)
        selective = self.layout.remat == SELECTIVE
        if op == "W" and (again or not (selective and self.context == "ulysses")):
            return []
        queries, heads = m.heads / self.layout.model, max(m.kv_heads / self.layout.model, 1.0)
        key, value = float(self.tokens * m.score_dim), float(self.tokens * m.output_dim)
        if self.context == "ring":
            sizes, rounds = [heads * key, heads * value], shards - 1 - reuses
            documents = [self.tokens * FLOAT32] * self.documents
            # as XLA's CPU backend sends to the next device of a stage
            kind, parts = (EXCHANGE, shards) if self.cpu and self.layout.stage > 1 else (PERMUTE, 1)
            to_next = lambda sizes, times: alike(kind, CONTEXT, [parts * n for n in sizes], times)
            last: float = FLOAT32
            if self.layout.stage > 1:
                sizes, last = [sum(sizes)], self.item
            collectives = to_next([n * self.item for n in sizes] + documents, rounds)
            if op == "B":
                collectives += to_next([n * FLOAT32 for n in sizes], shards - 1)
                collectives += to_next([n * last for n in sizes], 1)
            return collectives
        if self.context == "all_gather":
            arrays = (key, value) if self.explicit else (key + value,)
            sizes = [shards * heads * n * self.item for n in arrays]
            gathers = [] if reuses else alike(GATHER, CONTEXT, sizes)
            return gathers + alike(SCATTER, CONTEXT, sizes if op == "B" and self.explicit else [])
        inputs, result = [queries * key, heads * key, heads * value], [queries * value]
        # Selective remat saves nothing that was exchanged: B sends queries, keys and values once
        # more, W the results.
        both = inputs + result
        once_more = inputs * selective + result * again
        sizes = {"F": both, "R": both, "B": both + once_more, "W": result}[op]
        return alike(EXCHANGE, CONTEXT, [n * self.item for n in sizes])

    def document_ids(self, op: str) -> list[Collective]:
        """The all-gather of the documents of a sequence's tokens, once for all layers of an op."""
        is_gathered = self.documents and op in "FRB" and self.context != "ring"
        return alike(GATHER, CONTEXT, [self.tokens * self.layout.context * FLOAT32] * is_gathered)
