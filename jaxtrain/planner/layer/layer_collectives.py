"""The collectives of a layer's ops: products over `model`, attention over `context`, experts.

What is sent over `model` follows from the layer's products and parameters; attention and experts
mirror the code that they name. A test compares all of it with the compiled program.

    F, R, B, W    forward, recomputation, gradient of inputs, gradient of weights; of one layer
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxtrain.config import kernels
from jaxtrain.config.saved_values import ATTENTION, MLP_IN, ROUTED
from jaxtrain.config.sizes import SELECTIVE
from jaxtrain.planner.layer.layer import INPUTS, OUTPUTS, Layer, Product
from jaxtrain.planner.layer.layout import nodes_of_token, routed_capacity, sent_by_gateway
from jaxtrain.planner.layer.links import (
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
from jaxtrain.planner.layer.settings import FLOAT32, FP8, StepSizes

# Parameters that devices of `model` share where it has more devices than key/value heads.
OF_KV_HEADS = ("attention.key", "attention.value")


# --- what a layer's description says about `model` ------------------------------------------------


class Joint(NamedTuple):
    """Numbers of tokens that the devices of `model` gather before products, or sum behind them
    (parallel/tensor.py).

    width:    numbers of a token
    products: that read or make them
    experts:  they are of a module with experts, which gathers in the compute type
    """

    width: int
    products: tuple[Product, ...]
    experts: bool

    @property
    def read(self) -> bool:
        """True if the backward reads what the products make."""
        return any(product.read for product in self.products)


class Joints(NamedTuple):
    """What a layer sends over `model`.

    inputs, results: in the layer's order; F gathers the one and sums the other
    by_call:         inputs where each call of products gathers its own, as B sums their gradients
    by_module:       inputs where a module gathers once what it reads
    float32, cast:   numbers of parameters that all devices of `model` have but use on tokens of
                     their own, so that W sums their gradients: in float32, in the compute type
    """

    inputs: tuple[Joint, ...]
    results: tuple[Joint, ...]
    by_call: tuple[Joint, ...]
    by_module: tuple[Joint, ...]
    float32: int
    cast: int


@functools.lru_cache(1024)
def joints(layer: Layer) -> Joints:
    """What a layer sends over `model`. Products of one value share what is gathered of it, those of
    one call the sum of its gradients. A module with experts gathers its input once for all that
    reads it, the router too, and sums the results of all experts at once (`spread` and `collect` of
    parallel/experts/exchange_group.py)."""
    with_experts = {_module(product.names[0]) for product in layer.products if product.experts}
    inputs: dict[str | int, Joint] = {}
    results: dict[str | int, Joint] = {}
    by_call: dict[str | int, Joint] = {}
    gathered: dict[str, int] = {}  # a module with experts → the value that it gathers
    for product in layer.products:
        module = _module(product.names[0])
        experts = module in with_experts
        value = gathered.setdefault(module, product.value) if experts else product.value
        call: str | int = module if experts else product.call
        groups = (
            [(results, call)] if product.split == INPUTS else [(inputs, value), (by_call, call)]
        )
        for group, key in groups if product.split in (INPUTS, OUTPUTS) or experts else ():
            width = product.outputs if group is results else product.inputs
            joint = group.get(key) or Joint(width, (), experts)
            group[key] = joint._replace(products=(*joint.products, product))
    by_module = [
        result._replace(
            products=tuple(
                product
                for joint in inputs.values()
                for product in joint.products
                if _module(product.names[0]) == _module(result.products[0].names[0])
            )
        )
        for result in results.values()
    ]
    uses = collections.Counter(owner(name) for product in layer.products for name in product.names)
    sizes: collections.Counter = collections.Counter()
    for array in layer.arrays:
        # a module with experts has all tokens on every device
        if MODEL not in array.axes and _module(array.name) not in with_experts:
            # a vector that is added to a product has its type; each product's part has a sum
            times = uses[owner(array.name)]
            sizes[array.cast or times > 0] += array.size * max(1, times)
    return Joints(
        tuple(inputs.values()),
        tuple(results.values()),
        tuple(by_call.values()),
        tuple(by_module),
        float32=sizes[False],
        cast=sizes[True],
    )


def _module(name: str) -> str:
    """The module of a layer that has a parameter."""
    return name.partition(".")[0]


def owner(name: str) -> str:
    """The name of what has a parameter: a matrix and its bias have the same."""
    return name.removesuffix(".weight").removesuffix(".bias")


@dataclasses.dataclass(frozen=True)
class Activations(StepSizes):
    """What the collectives of a step depend on.

    shares_vocabulary:  embedding and head are split over the stages
    reduces_in_ops:     each microbatch's gradients are reduced
    loss_cuts:          parts of a microbatch whose logits exist at a time
    cpu:                as XLA's CPU backend lowers them: 16-bit numbers are summed in 32 bits, and
                        the experts' full capacity is sent
    """

    shares_vocabulary: bool = False
    reduces_in_ops: bool = False
    loss_cuts: int = 1
    cpu: bool = False

    def devices(self, axes: Iterable[str]) -> int:
        """The number of devices along these axes together."""
        return math.prod(getattr(self.layout, axis) for axis in axes)

    @property
    def summed(self) -> float:
        """Bytes of an activation's number in a sum."""
        return FLOAT32 if self.cpu else self.item

    @functools.cached_property
    def gathers_in_ops(self) -> bool:
        """Ops gather the parameters of ZeRO-3, and not a step once."""
        return self.layout.zero == 3 and self.settings.parallel.gather == "layer"

    @functools.cached_property
    def activation(self) -> float:
        """Elements of a microbatch's activation on one group of `model` devices."""
        return self.tokens * self.model.width


class Hop(NamedTuple):
    """A step of routed tokens on their way to experts.

    rows:    that a device sends
    weights, numbers: of choices, that go with a row
    devices, stride: between which they go, as in Collective
    """

    rows: float
    weights: int = 1
    numbers: int = 0
    devices: int = 0
    stride: int = 1


class ExpertCollectives(Activations):
    """The collectives of a layer's experts (parallel/experts/expert_messages.py)."""

    def _experts(self, op: str, unread: bool) -> list[Collective]:
        """The collectives of routed tokens on their way to experts and back, and of their
        weights."""
        m, outward, back = self.model, *self.routed(op, unread)
        if not self.settings.ours or op != "B":
            return [*outward, *back]
        weighted = float(self.tokens * m.experts_per_token)
        if self.layout.expert > 1 or m.capacity_factor:
            weighted = routed_capacity(m, self.layout)
        gated = float(self.tokens) * bool(m.shared_experts and m.shared_gate)
        return [*outward, *back, *alike(SUM, MODEL, [weighted * FLOAT32, gated * FLOAT32])]

    def routed(self, op: str, unread: bool = False) -> tuple[list[Collective], list[Collective]]:
        """The all-to-alls of an op that send routed tokens, or their gradients, to experts, and
        those that bring results back. unread: nothing reads the layer's output"""
        m, layout, size = self.model, self.layout, self.model.width * self.item
        if not self.settings.ours:  # each device of `model` sends its share
            nodes, sent = layout.expert_nodes, self.routed_tokens / layout.model * size
            # to a node once, while the one before goes on from there to its devices
            among = (nodes, layout.expert // nodes) if nodes > 1 else (0, 1)
            if self.settings.sends_once and not m.capacity_factor:
                sent *= nodes_of_token(m, among[0] or layout.expert) / m.experts_per_token
            each = [Collective(EXCHANGE, (EXPERT,), sent, 1, *among)] * (op != "W")
            return each, each
        if op == "W" and (self._sends_in_b() or not layout.makes_again(ROUTED)):
            return [], []
        kind, hops = EXCHANGE if self.cpu or m.capacity_factor else RAGGED, self._hops()

        def send(rows: list[float], weights: int = 0, numbers: int = 0) -> list[Collective]:
            """The collectives of all steps. rows: bytes of each row that is sent; weights, numbers:
            how often those of the choices are"""
            return [
                Collective(kind, (EXPERT,), hop.rows * each, 1, hop.devices, hop.stride)
                for hop in hops
                for each in (
                    *rows,
                    *[FLOAT32 * hop.weights] * weights,
                    *[FLOAT32 * hop.numbers] * numbers,
                )
            ]

        if op == "W":  # Selective remat does not save what was sent: W sends it once more.
            return send([size]), []
        # B sends gradients of weights, and with selective recomputation F's once more
        again = op == "B" and layout.remat == SELECTIVE
        row = float(m.width * FP8) if self.settings.fp8 else size
        rows = [row] * (1 + (op == "B" and self._sends_in_b()))
        back = [float(size)] * ((not unread) + (again and self._reads_experts))
        return send(rows, 1 + again, op != "B" or again), send(back)

    def _hops(self) -> list[Hop]:
        """The steps of all tokens on their way to experts: one, or two, where a token goes to each
        node once, with the numbers and weights of its choices, and from there to its experts. The
        numbers go no further."""
        m, layout, nodes = self.model, self.layout, self.layout.expert_nodes
        choices, local = m.experts_per_token, layout.expert // nodes
        inside = self.routed_tokens
        if self.cpu and not m.capacity_factor:
            most = nodes * self.tokens * min(choices, m.experts // layout.expert)
            capacity = min(sent_by_gateway(m, layout), routed_capacity(m, layout))
            inside = float(local * min(most, capacity))
        if nodes == 1:
            return [Hop(inside)]
        across = nodes if self.cpu else nodes_of_token(m, nodes) * self.busiest
        return [Hop(across * self.tokens, choices, choices, nodes, local), Hop(inside, 1, 0, local)]

    @functools.cached_property
    def _reads_experts(self) -> bool:
        """True if the backward reads what experts send back, which nothing saves."""
        return any(
            joint.experts and joint.read for joint in joints(self.model.layer(dense=False)).results
        )

    def _sends_in_b(self) -> bool:
        """True if B sends tokens to experts once more, since selective remat has not saved them:
        for products that it makes again, and in FP8, where they wait for W."""
        again = self.layout.makes_again
        return again(ROUTED) and (self.settings.fp8 or again(MLP_IN))


class LayerOpCollectives(ExpertCollectives):
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
        collectives, layer = [], self.model.layer(dense)
        if self.layout.model > 1:
            collectives += self._over_model(op, unread, fused, joints(layer))
            collectives += self._of_parameters(op, fused, layer) if self.settings.ours else []
        if self.layout.context > 1:
            collectives += self._over_context(op, fused and op == "B")
        if self.model.experts and not dense:
            collectives += self._experts(op, unread and not self._reads_experts)
        return collectives

    def _over_model(self, op: str, unread: bool, fused: bool, layer: Joints) -> list[Collective]:
        """The collectives before and behind a layer's products. Without sequence parallelism two
        all-reduces send as many bytes."""
        calls, results = layer.by_call if self.settings.ours else layer.by_module, layer.results
        # A value is gathered once; but each call rounds to FP8 on its own.
        is_shared = self.settings.ours and not (self.settings.fp8_in_w)
        inputs: Sequence[Joint] = layer.inputs if is_shared else calls
        if op == "B":
            # a gradient in blocks is rounded in two forms after it is gathered
            by_gradient = {joint.products[0].gradient: joint for joint in results}
            in_blocks = self.settings.format.blocks
            gradients = by_gradient.values() if is_shared or in_blocks else results
            gathers = self._gathered_bytes(gradients, rounded=not in_blocks)
            summed: Sequence[Joint] = calls
            if not fused:
                gathers += self._gathered_bytes(filter(self._made_again, inputs))
                summed = (*calls, *filter(self._made_again, results))
            elif self.settings.format.blocks:  # W's inputs are of another form than F's
                gathers += self._gathered_bytes(inputs)
        elif op == "W":
            # W is in one op with B, which has gathered some of them; in blocks in another form
            reuses = self.layout.stage == 1 and not self.settings.format.blocks
            read = () if fused or not self.settings.ours else inputs
            inputs = [joint for joint in read if not (reuses and self._made_again(joint))]
            gathers, summed = self._gathered_bytes(inputs), ()
        else:
            gathers = self._gathered_bytes(inputs)
            summed = tuple(joint for joint in results if not unread or joint.read)
        sizes = [self.tokens * joint.width * self.summed for joint in summed]
        return [*alike(GATHER, MODEL, gathers), *alike(SCATTER, MODEL, sizes)]

    def _gathered_bytes(self, joints: Iterable[Joint], rounded: bool = True) -> list[float]:
        """Bytes of all-gathers. rounded: to FP8 before, if products are of that"""
        fp8 = rounded and self.settings.fp8_in_w
        operand = self.settings.format.number if fp8 else self.item
        return [
            self.tokens * joint.width * (self.item if joint.experts else operand)
            for joint in joints
        ]

    def _made_again(self, joint: Joint) -> bool:
        """True if B makes some of its products again, with selective recomputation."""
        again, selective = self.layout.makes_again, self.layout.remat == SELECTIVE
        return any(
            self._sends_in_b()
            if product.experts and product.split == OUTPUTS
            else product.read and (again(product.makes) or product.experts * selective > 0)
            for product in joint.products
        )

    def _of_parameters(self, op: str, fused: bool, layer: Layer) -> list[Collective]:
        """The collectives of what several devices of `model` hold each: the rotated key of latent
        attention, key/value heads that they share (tensor.shared_columns), vectors and latents."""
        m, collectives, sharing = self.model, [], self.layout.model // self.model.kv_heads
        if m.rope_head_dim and op in "FRB":
            # the partitioner sums the rotated key's gradient
            kind = GATHER if op != "B" else SUM if self.cpu else SCATTER
            number = self.summed if op == "B" else self.item
            collectives = [Collective(kind, (MODEL,), self.tokens * m.rope_head_dim * number)]
        if sharing > 1 and not (fused and op == "B"):
            kind, number = (SCATTER, self.summed) if op == "W" else (GATHER, self.item)
            matrix = self.settings.format.number if self.settings.fp8 and op != "W" else number
            sizes = [
                array.size / m.kv_heads * (matrix if array.product else number)
                for array in layer.arrays
                if array.name.startswith(OF_KV_HEADS) and MODEL in array.axes
            ]
            collectives += alike(kind, MODEL, sizes, 1, sharing)
        # A norm over numbers that `model` splits sums their squares, and B what its gradient is of.
        split = [a for a in layer.arrays if a.axes == (MODEL,) and a.name.endswith("_norm.scale")]
        sums = len(split) * (2 if m.norm == "layernorm" else 1) * (op != "W")
        sums *= 2 if op == "B" and self.layout.remat == SELECTIVE else 1
        collectives += alike(SUM, MODEL, [self.tokens * FLOAT32] * sums)
        if op == "W":
            of = joints(layer)
            collectives += alike(SUM, MODEL, [of.float32 * FLOAT32, of.cast * self.summed])
        return collectives

    @functools.cached_property
    def way_over_context(self) -> str:
        """How attention reaches the tokens of other devices: `parallel.context`, or in layers of
        our own with a window kernels.NEIGHBOURS, or "all_gather"."""
        way, model = self.settings.parallel.context, self.model
        if way == "ulysses" or not self.settings.ours:
            return way
        return kernels.reach(way, self.layout.context, model.sequence, model.window)

    def _over_context(self, op: str, reuses: bool) -> list[Collective]:
        """The collectives of attention over a split sequence (parallel/attention/context.py,
        parallel/attention/ring.py). reuses: B has the keys and values that R has gathered."""
        m, shards, again = self.model, self.layout.context, self.layout.makes_again(ATTENTION)
        # Selective remat saves nothing that was exchanged: B sends queries, keys and values once
        # more, W the results.
        selective, way = self.layout.remat == SELECTIVE, self.way_over_context
        if op == "W" and (again or not (selective and way == "ulysses")):
            return []
        if way == kernels.NEIGHBOURS:
            return self._from_neighbours(op, reuses)
        queries, heads = m.heads / self.layout.model, max(m.kv_heads / self.layout.model, 1.0)
        key = float(self.tokens * m.score_dim)
        value = float(self.tokens * m.value_head_dim) or key
        sizes = [heads * key, heads * value]
        if way == "ring":
            several = self.layout.stage > 1
            # as XLA's CPU backend sends to the next device of a stage
            kind, parts = (EXCHANGE, shards) if self.cpu and several else (PERMUTE, 1)
            arrays, last = ([sum(sizes)], self.item) if several else (sizes, FLOAT32)
            documents = [self.tokens * FLOAT32] * self.settings.documents
            messages = [([n * self.item for n in arrays] + documents, shards - 1 - reuses)]
            if op == "B":
                messages += [([n * FLOAT32 for n in arrays], shards - 1)]
                messages += [([n * last for n in arrays], 1)]
            return [
                Collective(kind, (CONTEXT,), parts * n, times)
                for numbers, times in messages
                for n in numbers
            ]
        if way == "all_gather":
            arrays = sizes if self.settings.ours else [(key + value) * heads]
            gathered = [shards * n * self.item for n in arrays]
            scattered = gathered if op == "B" and self.settings.ours else []
            gathers = alike(GATHER, CONTEXT, [] if reuses else gathered)
            return gathers + alike(SCATTER, CONTEXT, scattered)
        inputs, result = [queries * key, *sizes], [queries * value]
        sent = result if op == "W" else inputs + result
        sent += (inputs * selective + result * again) if op == "B" else []
        return alike(EXCHANGE, CONTEXT, [n * self.item for n in sent])

    def _from_neighbours(self, op: str, reuses: bool) -> list[Collective]:
        """The messages of a window: the last tokens of the chunks before a device's two, of keys,
        values and segments, and in B the gradients of keys and values
        (context.attend_by_neighbours)."""
        m, shards = self.model, self.layout.context
        heads, of_device = max(m.kv_heads / self.layout.model, 1.0), m.sequence // shards
        values = m.value_head_dim or m.score_dim
        numbers = [n * heads * self.item for n in (m.score_dim, values)]
        sent = [*([] if reuses else [*numbers, FLOAT32]), *(numbers if op == "B" else [])]
        chunk, collectives = of_device // 2, []
        kind, parts = PERMUTE, 1
        if self.layout.stage > 1:
            kind, parts = (EXCHANGE, shards) if self.cpu else (RAGGED, 1)
        for hop in range(1, -(-(m.window - 1) // chunk) + 1):
            tokens = min(chunk, m.window - 1 - (hop - 1) * chunk) * self.layout.microbatch
            ways = 2 + (hop > 1)  # up, down, and over the middle of the sequence
            collectives += alike(kind, CONTEXT, [parts * tokens * n for n in sent], ways)
        return collectives

    def document_ids(self, op: str) -> list[Collective]:
        """The all-gather of the documents of a sequence's tokens, once for all layers of an op."""
        size = self.tokens * self.layout.context * FLOAT32
        gathers = op in "FRB" and self.settings.parallel.context != "ring"
        return alike(GATHER, CONTEXT, [size] * (self.settings.documents and gathers))
