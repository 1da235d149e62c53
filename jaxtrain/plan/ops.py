"""Which collectives stand in one op of the schedule: in a layer of F, R, B or W, in embedding and head.

Each mirrors the code that makes them, which is named; a collective that is added there needs its line here. A test compares both with the
compiled program. What needs no device beside its own costs nothing: axes of one device are left out by the caller (account.py).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxtrain.config import Config
from jaxtrain.config.pipeline_setup import Setup, make_setup
from jaxtrain.costs.expert_rows import capacity_of, room_of
from jaxtrain.devices.mesh import AXES, CONTEXT, DATA, EXPERT, MODEL, REPLICA, STAGE, batch_shards, sizes_of
from jaxtrain.devices.sharding import mesh_axes
from jaxtrain.models.spec import Spec
from jaxtrain.parallel.replicas import BLOCK
from jaxtrain.parallel.zero import Reduction, Zero
from jaxtrain.runtime.loss import cut_count
from jaxtrain.training.state import Layout
from jaxtrain.training.step import make_layout, zero_of

GATHER, SCATTER, SUM, EXCHANGE, PERMUTE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"
RAGGED = "ragged-all-to-all"
NUMBER = 4  # bytes of an int32 or a float32


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: over mesh axes, or among `devices` of them; `size` in bytes of the whole array (account.py)."""

    kind: str
    axes: tuple[str, ...]
    size: float
    devices: int = 0


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter, or its stack of layers: how it is reduced, and its elements on a device where it is whole over data."""

    spec: Spec
    reduction: Reduction
    size: int


class Sizes:
    """What all ops need to know of a step. `cpu`: 16-bit numbers are summed in 32 bits there.

    activation: elements of a microbatch [sequences, tokens, width] on the devices of `model` together
    item, summed: bytes of an activation's number, as it is and in a sum
    """

    def __init__(self, config: Config, cpu: bool):
        self.config, self.model = config, config.model
        # No device is needed: layouts ask a mesh for its sizes alone.
        self.mesh = cast(Mesh, AbstractMesh(sizes_of(config.mesh), AXES))
        self.axis_sizes: dict[str, int] = dict(self.mesh.shape)
        self.setup: Setup = make_setup(config)
        self.layout: Layout = make_layout(config, self.setup, self.mesh)
        self.shared = self.setup.shares_vocabulary
        self.zero: Zero = zero_of(config)
        self.cpu = cpu
        self.item = jnp.dtype(config.precision.compute).itemsize
        self.summed = self.bytes_in_a_sum(self.item)
        self.reduced = self.bytes_in_a_sum(self.zero.dtype.itemsize)
        self.sequences = config.sequences_per_microbatch // batch_shards(self.axis_sizes)
        self.tokens = config.data.sequence_length // self.axis_sizes[CONTEXT]
        self.activation = self.sequences * self.tokens * self.model.width
        self.selective = config.pipeline.remat == "selective"
        self.documents = not config.data.attend_across_documents

    def bytes_in_a_sum(self, item: int) -> int:
        return NUMBER if self.cpu else item

    def leaves(self, part: str, unit: str | None = None) -> dict[str, Leaf]:
        """The parameters of "embed" or "head", or of a local unit of "layers", one of "first" or "predictors", by their names."""
        trees = [
            tree[part] if unit is None else tree[part][unit] for tree in (self.layout.specs, self.layout.reductions, self.layout.shapes)
        ]
        flat = (_leaves_by_name(tree, kind) for tree, kind in zip(trees, (Spec, Reduction, jax.ShapeDtypeStruct), strict=True))
        return {
            name: Leaf(spec, reduction, part_of(array.shape, reduction.whole, self.axis_sizes))
            for (name, spec), (_, reduction), (_, array) in zip(*flat, strict=True)
        }

    def all_leaves(self) -> list[Leaf]:
        """All parameters, layers in their stacks."""
        parts = [self.leaves(part, c) for part in ("first", "layers", "predictors") for c in self.layout.specs.get(part, {})]
        return [leaf for leaves in (self.leaves("embed"), *parts, self.leaves("head")) for leaf in leaves.values()]


def _leaves_by_name(tree, kind: type) -> list[tuple[str, Any]]:
    """(name such as "attention.query", leaf) of a nested dict's leaves of a kind, in order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kind))
    return [(".".join(str(key.key) for key in path), leaf) for path, leaf in leaves]


def part_of(shape: tuple[int, ...], spec: PartitionSpec, axis_sizes: dict[str, int]) -> int:
    """Elements of a device's part of an array."""
    cut = math.prod(axis_sizes[a] for part in spec for a in mesh_axes(part))
    return math.prod(shape) // cut


# --- layers (models/) ------------------------------------------------------------------------------------------------------------


def layer(sizes: Sizes, op: str, last: bool = False, again: bool = False, dense: bool = False) -> Iterator[Collective]:
    """Of one layer's activations in F, R, B, W. last: its output is not needed; again: B and W stand behind R in one op, and what that has
    gathered is still there; dense: without experts where the others have them."""
    yield from _attention(sizes, op, again)
    yield from _around(sizes, op, [sizes.model.width], again, not last)
    yield from [] if dense else _experts(sizes, op, last)
    if op == "W":
        yield from _vectors(sizes)


def _around(sizes: Sizes, op: str, inputs: list[int], again: bool, output: bool = True) -> Iterator[Collective]:
    """Of a column-parallel product with inputs of these widths and a row-parallel one behind it (parallel/tensor.py)."""
    elements = sizes.sequences * sizes.tokens

    def gathered(width: int) -> Collective:
        return Collective(GATHER, (MODEL,), elements * width * sizes.item)

    def scattered(width: int) -> Collective:
        return Collective(SCATTER, (MODEL,), elements * width * sizes.summed)

    if op in "FR" or (op == "W" and not again):
        yield from map(gathered, inputs)
    if op == "B":
        yield gathered(sizes.model.width)
        yield from map(scattered, inputs)
    if op in "FR" and output:
        yield scattered(sizes.model.width)


def _attention(sizes: Sizes, op: str, again: bool) -> Iterator[Collective]:
    m = sizes.model
    if m.attention == "mla":
        yield from _around(sizes, op, [m.query_rank or m.width, m.kv_rank], again)
        if op in "FRB":  # the rotated key, whose gradient the partitioner sums
            size = sizes.sequences * sizes.tokens * m.rope_head_dim
            kind = GATHER if op != "B" else SUM if sizes.cpu else SCATTER
            yield Collective(kind, (MODEL,), size * (sizes.item if op != "B" else sizes.summed))
    else:
        yield from _around(sizes, op, [m.width], again)
        yield from _shared_heads(sizes, op, again)
    yield from _context(sizes, op, again)


def _experts(sizes: Sizes, op: str, last: bool) -> Iterator[Collective]:
    """Rows on their way to experts and back, with their weights (parallel/experts.py); dropless, as if all experts were chosen as often."""
    m, devices = sizes.model, sizes.axis_sizes[EXPERT]
    if not m.experts or (op == "W" and not sizes.selective):
        return
    kind, choices = EXCHANGE, sizes.sequences * sizes.tokens * m.experts_per_token
    if m.capacity_factor:
        most = capacity_of(sizes.tokens * sizes.axis_sizes[CONTEXT], m.experts_per_token, m.experts, m.capacity_factor)
        sent = m.experts * sizes.sequences * min(most, sizes.tokens)
        rows = sent
    else:
        tokens = sizes.sequences * sizes.tokens
        rows = room_of(tokens, m.experts_per_token, m.experts, devices, m.expert_room)
        most = min(tokens * min(m.experts_per_token, m.experts // devices), rows)
        sent = devices * most if sizes.cpu else choices
        kind = EXCHANGE if sizes.cpu else RAGGED
    row, weight = m.width * sizes.item, NUMBER
    returned = [] if last else [row]
    for size in [row] if op == "W" else [row, weight, *returned]:  # a selective remat does not keep what was sent: W sends it again
        yield Collective(kind, (EXPERT,), sent * size)
    if op == "B":
        yield Collective(SUM, (MODEL,), (rows if devices > 1 or m.capacity_factor else choices) * NUMBER)


def _shared_heads(sizes: Sizes, op: str, again: bool) -> Iterator[Collective]:
    """Columns of key/value heads that several devices of `model` share (tensor.shared_columns)."""
    m, devices = sizes.model, sizes.axis_sizes[MODEL] // sizes.model.kv_heads
    if devices > 1 and not (again and op == "B"):
        for rows in (m.width, m.width, *((1, 1) if m.biases else ())):
            size = rows * m.head_dim
            yield (
                Collective(SCATTER, (MODEL,), size * sizes.summed, devices)
                if op == "W"
                else Collective(GATHER, (MODEL,), size * sizes.item, devices)
            )


def _vectors(sizes: Sizes) -> Iterator[Collective]:
    """Gradients of what all devices of `model` have whole, each from its own tokens."""
    m = sizes.model
    scales = 2 * m.width * (2 if m.biases and m.norm == "layernorm" else 1)
    latent = 0
    if m.attention == "mla":
        latent = m.width * (m.query_rank + m.kv_rank + m.rope_head_dim)
        scales += m.query_rank + m.kv_rank
    yield Collective(SUM, (MODEL,), scales * NUMBER)
    if m.biases:
        yield Collective(SUM, (MODEL,), 2 * m.width * sizes.summed)
    yield Collective(SUM, (MODEL,), latent * sizes.summed)


def _context(sizes: Sizes, op: str, again: bool) -> Iterator[Collective]:
    """Of attention over a split sequence (parallel/context.py, parallel/ring.py)."""
    m, parts, model, mode = sizes.model, sizes.axis_sizes[CONTEXT], sizes.axis_sizes[MODEL], sizes.config.parallel.context
    again = again and op == "B"
    if parts == 1 or (op == "W" and (mode != "ulysses" or not sizes.selective)):
        return
    tokens, queries, heads = sizes.sequences * sizes.tokens, m.heads // model, max(m.kv_heads // model, 1)
    key, value = m.head_dim + m.rope_head_dim, m.value_head_dim or m.head_dim
    if mode == "ring":
        rounds = parts - 1 - again
        for size in (key, value):
            yield from [Collective(PERMUTE, (CONTEXT,), tokens * heads * size * sizes.item)] * rounds
            if op == "B":
                yield from [Collective(PERMUTE, (CONTEXT,), tokens * heads * size * NUMBER)] * parts
        if sizes.documents:
            yield from [Collective(PERMUTE, (CONTEXT,), tokens * NUMBER)] * rounds
        return
    if mode == "all_gather":
        for size in (key, value):
            if not again:
                yield Collective(GATHER, (CONTEXT,), tokens * parts * heads * size * sizes.item)
            if op == "B":
                yield Collective(SCATTER, (CONTEXT,), tokens * parts * heads * size * sizes.item)
    else:
        inputs, results = [(queries, key), (heads, key), (heads, value)], [(queries, value)]
        # A selective remat keeps nothing that was exchanged: queries, keys and values go again in B, the results in W.
        exchanged = {"B": [*inputs, *results] + inputs * sizes.selective, "W": results}.get(op, [*inputs, *results])
        for n, size in exchanged:
            yield Collective(EXCHANGE, (CONTEXT,), tokens * n * size * sizes.item)


def once(sizes: Sizes, op: str) -> Iterator[Collective]:
    """What is the same for all layers of an op: which documents the tokens of the whole sequence belong to."""
    if sizes.documents and op in "FRB" and sizes.config.parallel.context != "ring":
        yield Collective(GATHER, (CONTEXT,), sizes.sequences * sizes.tokens * sizes.axis_sizes[CONTEXT] * NUMBER)


# --- embedding and head (runtime/embedding_and_head.py) ---------------------------------------------------------------------------------


def _of_stage(sizes: Sizes) -> Collective:
    """One stage's activation on all stages, or the sum of all of them."""
    return Collective(SUM, (STAGE,) if sizes.shared else (), sizes.activation / sizes.axis_sizes[MODEL] * sizes.summed)


def _lookup(sizes: Sizes) -> Iterator[Collective]:
    if sizes.zero.gathers_in_ops and sizes.leaves("embed")["table"].reduction.over_data:  # its rows travel, not the table
        yield Collective(GATHER, (DATA,), sizes.sequences * sizes.tokens * sizes.axis_sizes[DATA] * NUMBER)
        yield Collective(EXCHANGE, (DATA,), sizes.activation / sizes.axis_sizes[MODEL] * sizes.item)
    yield Collective(SCATTER, (MODEL,), sizes.activation * sizes.summed)


def _lookup_gradient(sizes: Sizes, same_op: bool) -> Iterator[Collective]:
    """same_op: the tokens that `_lookup` has gathered, if it has, are still there."""
    if sizes.zero.reduces_in_ops and sizes.leaves("embed")["table"].reduction.over_data:
        if not (same_op and sizes.zero.gathers_in_ops):
            yield Collective(GATHER, (DATA,), sizes.sequences * sizes.tokens * sizes.axis_sizes[DATA] * NUMBER)
        yield Collective(EXCHANGE, (DATA,), sizes.activation / sizes.axis_sizes[MODEL] * sizes.item)
    yield Collective(GATHER, (MODEL,), sizes.activation * sizes.item)


def embed(sizes: Sizes) -> Iterator[Collective]:
    yield from _lookup(sizes)
    yield _of_stage(sizes)
    yield from gathers(sizes, sizes.leaves("embed"), "positions")
    yield from _first(sizes, "F")


def _first(sizes: Sizes, *of: str) -> Iterator[Collective]:
    """Dense layers before the first unit."""
    layers = sizes.layout.specs.get("first", {})
    for i in layers:
        again = "W" in of and int(i) == len(layers) - 1  # the last one's output is there already
        yield from once(sizes, "F")
        yield from gathers(sizes, sizes.leaves("first", i))
        for op in of:
            yield from layer(sizes, op, last=again, again=op != "F", dense=True)
        if "W" in of:
            yield from reductions_in_op(sizes, sizes.leaves("first", i))


def embed_gradient(sizes: Sizes) -> Iterator[Collective]:
    leaves = sizes.leaves("embed")
    if "first" in sizes.layout.specs:  # they are run once more
        yield from _lookup(sizes) if sizes.setup.train else ()  # on one stage the embedding is still there
        yield from _first(sizes, "F", "B", "W")
    yield _of_stage(sizes)
    yield from _lookup_gradient(sizes, same_op=not sizes.setup.train)
    if "positions" in leaves:
        yield Collective(GATHER, (MODEL,), sizes.activation * sizes.item)
        yield from reductions_in_op(sizes, {"positions": leaves["positions"]})


def head(sizes: Sizes) -> Iterator[Collective]:
    """With the loss, and the predictions of further tokens."""
    yield _of_stage(sizes)
    yield _of_stage(sizes)
    leaves = sizes.leaves("head")
    if sizes.model.tied_embeddings:
        leaves["table"] = sizes.leaves("embed")["table"]
    yield from gathers(sizes, leaves)
    yield from reductions_in_op(sizes, leaves)
    yield from _loss(sizes)
    for module in sizes.layout.specs.get("predictors", {}):
        yield from _prediction(sizes, sizes.leaves("predictors", module))


def _prediction(sizes: Sizes, leaves: dict[str, Leaf]) -> Iterator[Collective]:
    """Of a module, forward and backward at once (EmbeddingAndHead._predict)."""
    width = sizes.model.width
    yield from gathers(sizes, leaves)
    yield from reductions_in_op(sizes, leaves)
    yield from _lookup(sizes)
    yield from _lookup_gradient(sizes, same_op=True)
    yield from once(sizes, "F")
    for op in "FBW":
        yield from layer(sizes, op, again=op != "F")
    norms = 3 * width * (2 if sizes.model.biases and sizes.model.norm == "layernorm" else 1)
    yield Collective(SUM, (MODEL,), norms * NUMBER + (2 * width + sizes.model.biases) * width * sizes.summed)
    yield from _loss(sizes)


def _loss(sizes: Sizes) -> Iterator[Collective]:
    """The last norm, the product with the output matrix, and the softmax (runtime/loss.py)."""
    m, n, tokens = (
        sizes.model,
        cut_count(sizes.sequences, sizes.tokens, sizes.axis_sizes[MODEL], sizes.model.loss_chunk),
        sizes.sequences * sizes.tokens,
    )
    for axes in ((MODEL,), (STAGE,) if sizes.shared else ()):
        for numbers in (1, 2):  # the largest logit; the softmax's sum and the target's logit
            yield from [Collective(SUM, axes, numbers * tokens / n * NUMBER)] * n
    yield from [
        Collective(GATHER, (MODEL,), sizes.activation / n * sizes.item),
        Collective(SCATTER, (MODEL,), sizes.activation / n * sizes.summed),
    ] * n
    yield from [Collective(SUM, (MODEL,), m.width * (2 if m.biases and m.norm == "layernorm" else 1) * NUMBER)] * n


# --- parameters (parallel/zero.py) -----------------------------------------------------------------------------------------------


def gathers(sizes: Sizes, leaves: dict[str, Leaf], *names: str) -> Iterator[Collective]:
    """Of parameters (those of these names) that an op gathers before it reads them."""
    if sizes.zero.gathers_in_ops:
        yield from (whole(sizes, leaf) for name, leaf in leaves.items() if leaf.reduction.over_data and (not names or name in names))


def whole(sizes: Sizes, leaf: Leaf) -> Collective:
    return Collective(GATHER, (DATA,), leaf.size * (sizes.item if leaf.spec.cast else NUMBER))


def reductions_in_op(sizes: Sizes, leaves: dict[str, Leaf]) -> Iterator[Collective]:
    """Of a microbatch's gradients."""
    if sizes.zero.reduces_in_ops:
        yield from (Collective(SCATTER, (DATA,), leaf.size * sizes.reduced) for leaf in leaves.values() if leaf.reduction.over_data)


def reductions(sizes: Sizes, leaf: Leaf) -> Iterator[Collective]:
    """Of a gradient, after the last row: what the ops have left to do."""
    done = sizes.zero.reduces_in_ops and leaf.reduction.over_data
    size = leaf.size / (sizes.axis_sizes[DATA] if done else 1)
    scatter = tuple(a for a in leaf.reduction.scatter_axes if sizes.axis_sizes[a] > 1 and not (done and a == DATA))
    sums = tuple(a for a in leaf.reduction.sum_axes if sizes.axis_sizes[a] > 1)
    if scatter:
        yield Collective(SCATTER, scatter, size * sizes.reduced)
        size /= math.prod(sizes.axis_sizes[a] for a in scatter)
    inside = tuple(a for a in sums if a != REPLICA)
    if REPLICA in sums and inside:  # inside a replica first, then across, each device its share (parallel/replicas.py)
        yield Collective(SCATTER, inside, size * sizes.reduced)
        yield Collective(SUM, (REPLICA,), size / math.prod(sizes.axis_sizes[a] for a in inside) * sizes.reduced)
        yield Collective(GATHER, inside, size * sizes.reduced)
    elif sums:
        yield Collective(SUM, sums, size * sizes.reduced)


def after_the_update(sizes: Sizes, leaf: Leaf) -> Iterator[Collective]:
    """A parameter whose parts are updated where their optimizer state lies (training/step.py)."""
    kept = {DATA} if sizes.zero.stage == 3 else set()
    axes = tuple(a for a in leaf.reduction.scatter_axes if a not in kept)
    parts = math.prod(sizes.axis_sizes[a] for a in leaf.reduction.scatter_axes if a in kept)
    if axes:
        yield Collective(GATHER, axes, leaf.size / parts * NUMBER)


# --- replicas that train apart (parallel/replicas.py) ----------------------------------------------------------------------------


def exchange(sizes: Sizes) -> Iterator[Collective]:
    """Of replicas.mean_across: a device carries its share across, and gathers inside; and what makes parameters of the result
    (training/diloco.py)."""
    numbers = scales = 0
    replicas, split_over = sizes.axis_sizes[REPLICA], lambda spec: {a for p in spec for a in mesh_axes(p)}
    for array, params in zip(jax.tree.leaves(sizes.layout.outer), jax.tree.leaves(sizes.layout.shardings), strict=True):
        spec = array.sharding.spec
        part, split = part_of(array.shape, spec, sizes.axis_sizes), split_over(spec)
        yield Collective(GATHER, tuple(split - split_over(params.spec)), part_of(array.shape, params.spec, sizes.axis_sizes) * NUMBER)
        copies = tuple(a for a in AXES if a != REPLICA and a not in split)
        share = -(-part // math.prod(sizes.axis_sizes[a] for a in copies))
        block = min(BLOCK, -(-share // replicas))
        numbers += -(-share // (replicas * block)) * replicas * block
        scales += -(-share // (replicas * block)) * replicas
        if sizes.config.precision.outer == "float32":
            yield Collective(SUM, (REPLICA,), share * NUMBER)
        yield Collective(GATHER, copies, part * NUMBER)
    if sizes.config.precision.outer == "int8":
        for kind in (EXCHANGE, GATHER):
            yield from [Collective(kind, (REPLICA,), numbers), Collective(kind, (REPLICA,), scales * NUMBER)]
