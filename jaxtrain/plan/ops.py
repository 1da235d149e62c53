"""Which collectives stand in one op of the schedule: in a layer of F, R, B or W, in embedding and head.

Each mirrors the code that makes them, which is named; a collective that is added there needs its line here. A test compares both with the
compiled program. What needs no device beside its own costs nothing: axes of one device are left out by the caller (account.py).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxtrain.config import Config
from jaxtrain.config.pipeline_setup import Setup, make_setup
from jaxtrain.devices.mesh import AXES, BATCH_AXES, CONTEXT, DATA, EXPERT, MODEL, REPLICA, STAGE, sizes_of
from jaxtrain.devices.sharding import mesh_axes
from jaxtrain.models.spec import Spec
from jaxtrain.parallel.experts import capacity_of
from jaxtrain.parallel.replicas import BLOCK
from jaxtrain.parallel.zero import Reduction, Zero
from jaxtrain.runtime.loss import cut_count
from jaxtrain.training.state import Layout
from jaxtrain.training.step import make_layout, zero_of

GATHER, SCATTER, SUM, EXCHANGE, PERMUTE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"
RAGGED = "ragged-all-to-all"
NUMBER = 4  # bytes of an int32 or a float32


@dataclasses.dataclass(frozen=True)
class Cost:
    """One collective: over mesh axes, or among `devices` of them; `size` in bytes of the whole array (account.py)."""

    kind: str
    axes: tuple[str, ...]
    size: float
    devices: int = 0


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter, or its stack of layers: how it is reduced, and its elements on a device where it is whole over data."""

    spec: Spec
    how: Reduction
    size: int


class Sizes:
    """What all ops need to know of a step. `cpu`: 16-bit numbers are summed in 32 bits there.

    activation: elements of a microbatch [rows, tokens, width] on the devices of `model` together, `tokens` and `rows` of its shape
    item, summed: bytes of an activation's number, as it is and in a sum
    """

    def __init__(self, config: Config, cpu: bool):
        self.config, self.model = config, config.model
        # No device is needed: layouts ask a mesh for its sizes alone.
        self.mesh = cast(Mesh, AbstractMesh(sizes_of(config.mesh), AXES))
        self.of: dict[str, int] = dict(self.mesh.shape)
        self.setup: Setup = make_setup(config)
        self.layout: Layout = make_layout(config, self.setup, self.mesh)
        self.shared = self.setup.shares_vocabulary
        self.zero: Zero = zero_of(config)
        self.cpu = cpu
        self.item = jnp.dtype(config.precision.compute).itemsize
        self.summed = self.bytes_in_a_sum(self.item)
        self.reduced = self.bytes_in_a_sum(self.zero.dtype.itemsize)
        self.rows = config.data.batch_size // config.pipeline.microbatches // math.prod(self.of[a] for a in BATCH_AXES)
        self.tokens = config.data.sequence_length // self.of[CONTEXT]
        self.activation = self.rows * self.tokens * self.model.width
        self.selective = config.pipeline.remat == "selective"
        self.documents = not config.data.attend_across_documents

    def bytes_in_a_sum(self, item: int) -> int:
        return NUMBER if self.cpu else item

    def leaves(self, part: str, chunk: str | None = None) -> dict[str, Leaf]:
        """Of "embed", "head", or of a chunk of "layers", one of "first" or "predictors", by the parameter's name."""
        own = lambda tree: tree[part] if chunk is None else tree[part][chunk]
        specs, hows, shapes = own(self.layout.specs), own(self.layout.reductions), own(self.layout.shapes)
        flat = lambda tree, kind: jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kind))
        made = {}
        for (path, s), (_, how), (_, array) in zip(
            flat(specs, Spec), flat(hows, Reduction), flat(shapes, jax.ShapeDtypeStruct), strict=True
        ):
            made[".".join(str(k.key) for k in path)] = Leaf(s, how, part_of(array.shape, how.whole, self.of))
        return made

    def all_leaves(self) -> list[Leaf]:
        """All parameters, layers in their stacks."""
        parts = [self.leaves(part, c) for part in ("first", "layers", "predictors") for c in self.layout.specs.get(part, {})]
        return [leaf for leaves in (self.leaves("embed"), *parts, self.leaves("head")) for leaf in leaves.values()]


def part_of(shape: tuple[int, ...], spec: PartitionSpec, sizes: dict[str, int]) -> int:
    """Elements of a device's part of an array."""
    cut = math.prod(sizes[a] for part in spec for a in mesh_axes(part))
    return math.prod(shape) // cut


# --- layers (models/) ------------------------------------------------------------------------------------------------------------


def layer(s: Sizes, op: str, last: bool = False, again: bool = False, dense: bool = False) -> Iterator[Cost]:
    """Of one layer's activations in F, R, B, W. last: its output is not needed; again: B and W stand behind R in one op, and what that has
    gathered is still there; dense: without experts where the others have them."""
    yield from _attention(s, op, again)
    yield from _around(s, op, [s.model.width], again, not last)
    yield from [] if dense else _experts(s, op, last)
    if op == "W":
        yield from _vectors(s)


def _around(s: Sizes, op: str, inputs: list[int], again: bool, output: bool = True) -> Iterator[Cost]:
    """Of a column-parallel product with inputs of these widths and a row-parallel one behind it (parallel/tensor.py)."""
    elements = s.rows * s.tokens
    whole = lambda width: Cost(GATHER, (MODEL,), elements * width * s.item)
    own = lambda width: Cost(SCATTER, (MODEL,), elements * width * s.summed)
    if op in "FR" or (op == "W" and not again):
        yield from map(whole, inputs)
    if op == "B":
        yield whole(s.model.width)
        yield from map(own, inputs)
    if op in "FR" and output:
        yield own(s.model.width)


def _attention(s: Sizes, op: str, again: bool) -> Iterator[Cost]:
    m = s.model
    if m.attention == "mla":
        yield from _around(s, op, [m.query_rank or m.width, m.kv_rank], again)
        if op in "FRB":  # the rotated key, whose gradient the partitioner sums
            size = s.rows * s.tokens * m.rope_head_dim
            kind = GATHER if op != "B" else SUM if s.cpu else SCATTER
            yield Cost(kind, (MODEL,), size * (s.item if op != "B" else s.summed))
    else:
        yield from _around(s, op, [m.width], again)
        yield from _shared_heads(s, op, again)
    yield from _context(s, op, again)


def _experts(s: Sizes, op: str, last: bool) -> Iterator[Cost]:
    """Rows on their way to experts and back, with their weights (parallel/experts.py); dropless, as if all experts were chosen as often."""
    m, devices = s.model, s.of[EXPERT]
    if not m.experts or (op == "W" and not s.selective):
        return
    kind, choices = EXCHANGE, s.rows * s.tokens * m.experts_per_token
    if m.capacity_factor:
        here = capacity_of(s.tokens * s.of[CONTEXT], m.experts_per_token, m.experts, m.capacity_factor)
        slots = m.experts * s.rows * min(here, s.tokens)
        rows = slots
    else:
        most = s.rows * s.tokens * min(m.experts_per_token, m.experts // devices)
        slots, rows = (devices * most, devices * most) if s.cpu else (choices, devices * most)
        kind = EXCHANGE if s.cpu else RAGGED
    there, back = (m.width * s.item, NUMBER), () if last else (m.width * s.item,)
    for size in there[:1] if op == "W" else (*there, *back):  # what was sent is not kept by a selective remat: W sends it again
        yield Cost(kind, (EXPERT,), slots * size)
    if op == "B":
        yield Cost(SUM, (MODEL,), (rows if devices > 1 or m.capacity_factor else choices) * NUMBER)


def _shared_heads(s: Sizes, op: str, again: bool) -> Iterator[Cost]:
    """Columns of key/value heads that several devices of `model` share (tensor.shared_columns)."""
    m, devices = s.model, s.of[MODEL] // s.model.kv_heads
    if devices > 1 and not (again and op == "B"):
        for rows in (m.width, m.width, *((1, 1) if m.biases else ())):
            size = rows * m.head_dim
            yield Cost(SCATTER, (MODEL,), size * s.summed, devices) if op == "W" else Cost(GATHER, (MODEL,), size * s.item, devices)


def _vectors(s: Sizes) -> Iterator[Cost]:
    """Gradients of what all devices of `model` have whole, each from its own tokens."""
    m = s.model
    scales = 2 * m.width * (2 if m.biases and m.norm == "layernorm" else 1)
    latent = 0
    if m.attention == "mla":
        latent = m.width * (m.query_rank + m.kv_rank + m.rope_head_dim)
        scales += m.query_rank + m.kv_rank
    yield Cost(SUM, (MODEL,), scales * NUMBER)
    if m.biases:
        yield Cost(SUM, (MODEL,), 2 * m.width * s.summed)
    yield Cost(SUM, (MODEL,), latent * s.summed)


def _context(s: Sizes, op: str, again: bool) -> Iterator[Cost]:
    """Of attention over a split sequence (parallel/context.py, parallel/ring.py)."""
    m, parts, model, how = s.model, s.of[CONTEXT], s.of[MODEL], s.config.parallel.context
    again = again and op == "B"
    if parts == 1 or (op == "W" and (how != "ulysses" or not s.selective)):
        return
    here, queries, heads = s.rows * s.tokens, m.heads // model, max(m.kv_heads // model, 1)
    key, value = m.head_dim + m.rope_head_dim, m.value_head_dim or m.head_dim
    if how == "ring":
        rounds = parts - 1 - again
        for size in (key, value):
            yield from [Cost(PERMUTE, (CONTEXT,), here * heads * size * s.item)] * rounds
            if op == "B":
                yield from [Cost(PERMUTE, (CONTEXT,), here * heads * size * NUMBER)] * parts
        if s.documents:
            yield from [Cost(PERMUTE, (CONTEXT,), here * NUMBER)] * rounds
        return
    if how == "all_gather":
        for size in (key, value):
            if not again:
                yield Cost(GATHER, (CONTEXT,), here * parts * heads * size * s.item)
            if op == "B":
                yield Cost(SCATTER, (CONTEXT,), here * parts * heads * size * s.item)
    else:
        there, back = [(queries, key), (heads, key), (heads, value)], [(queries, value)]
        # A selective remat keeps nothing that was exchanged: queries, keys and values go again in B, the results in W.
        every = {"B": [*there, *back] + there * s.selective, "W": back}.get(op, [*there, *back])
        for n, size in every:
            yield Cost(EXCHANGE, (CONTEXT,), here * n * size * s.item)


def once(s: Sizes, op: str) -> Iterator[Cost]:
    """What is the same for all layers of an op: which documents the tokens of the whole sequence belong to."""
    if s.documents and op in "FRB" and s.config.parallel.context != "ring":
        yield Cost(GATHER, (CONTEXT,), s.rows * s.tokens * s.of[CONTEXT] * NUMBER)


# --- embedding and head (runtime/embedding_and_head.py) ---------------------------------------------------------------------------------


def _of_stage(s: Sizes) -> Cost:
    """One stage's activation on all stages, or the sum of all of them."""
    return Cost(SUM, (STAGE,) if s.shared else (), s.activation / s.of[MODEL] * s.summed)


def _lookup(s: Sizes) -> Iterator[Cost]:
    if s.zero.gathers_in_ops and s.leaves("embed")["table"].how.over_data:  # its rows travel, not the table
        yield Cost(GATHER, (DATA,), s.rows * s.tokens * s.of[DATA] * NUMBER)
        yield Cost(EXCHANGE, (DATA,), s.activation / s.of[MODEL] * s.item)
    yield Cost(SCATTER, (MODEL,), s.activation * s.summed)


def _lookup_gradient(s: Sizes, same_op: bool) -> Iterator[Cost]:
    """same_op: the tokens that `_lookup` has gathered, if it has, are still there."""
    if s.zero.reduces_in_ops and s.leaves("embed")["table"].how.over_data:
        if not (same_op and s.zero.gathers_in_ops):
            yield Cost(GATHER, (DATA,), s.rows * s.tokens * s.of[DATA] * NUMBER)
        yield Cost(EXCHANGE, (DATA,), s.activation / s.of[MODEL] * s.item)
    yield Cost(GATHER, (MODEL,), s.activation * s.item)


def embed(s: Sizes) -> Iterator[Cost]:
    yield from _lookup(s)
    yield _of_stage(s)
    yield from gathers(s, s.leaves("embed"), "positions")
    yield from _first(s, "F")


def _first(s: Sizes, *of: str) -> Iterator[Cost]:
    """Dense layers before the first unit."""
    layers = s.layout.specs.get("first", {})
    for i in layers:
        again = "W" in of and int(i) == len(layers) - 1  # the last one's output is there already
        yield from once(s, "F")
        yield from gathers(s, s.leaves("first", i))
        for op in of:
            yield from layer(s, op, last=again, again=op != "F", dense=True)
        if "W" in of:
            yield from reductions_in_op(s, s.leaves("first", i))


def embed_gradient(s: Sizes) -> Iterator[Cost]:
    leaves = s.leaves("embed")
    if "first" in s.layout.specs:  # they are run once more
        yield from _lookup(s) if s.setup.train else ()  # on one stage the embedding is still there
        yield from _first(s, "F", "B", "W")
    yield _of_stage(s)
    yield from _lookup_gradient(s, same_op=not s.setup.train)
    if "positions" in leaves:
        yield Cost(GATHER, (MODEL,), s.activation * s.item)
        yield from reductions_in_op(s, {"positions": leaves["positions"]})


def head(s: Sizes) -> Iterator[Cost]:
    """With the loss, and the predictions of further tokens."""
    yield _of_stage(s)
    yield _of_stage(s)
    leaves = s.leaves("head")
    if s.model.tied_embeddings:
        leaves["table"] = s.leaves("embed")["table"]
    yield from gathers(s, leaves)
    yield from reductions_in_op(s, leaves)
    yield from _loss(s)
    for module in s.layout.specs.get("predictors", {}):
        yield from _prediction(s, s.leaves("predictors", module))


def _prediction(s: Sizes, leaves: dict[str, Leaf]) -> Iterator[Cost]:
    """Of a module, forward and backward at once (Ends._predict)."""
    width = s.model.width
    yield from gathers(s, leaves)
    yield from reductions_in_op(s, leaves)
    yield from _lookup(s)
    yield from _lookup_gradient(s, same_op=True)
    yield from once(s, "F")
    for op in "FBW":
        yield from layer(s, op, again=op != "F")
    norms = 3 * width * (2 if s.model.biases and s.model.norm == "layernorm" else 1)
    yield Cost(SUM, (MODEL,), norms * NUMBER + (2 * width + s.model.biases) * width * s.summed)
    yield from _loss(s)


def _loss(s: Sizes) -> Iterator[Cost]:
    """The last norm, the product with the output matrix, and the softmax (runtime/loss.py)."""
    m, n, tokens = s.model, cut_count(s.rows, s.tokens, s.of[MODEL], s.model.loss_chunk), s.rows * s.tokens
    for axes in ((MODEL,), (STAGE,) if s.shared else ()):
        for numbers in (1, 2):  # the largest logit; the softmax's sum and the target's logit
            yield from [Cost(SUM, axes, numbers * tokens / n * NUMBER)] * n
    yield from [Cost(GATHER, (MODEL,), s.activation / n * s.item), Cost(SCATTER, (MODEL,), s.activation / n * s.summed)] * n
    yield from [Cost(SUM, (MODEL,), m.width * (2 if m.biases and m.norm == "layernorm" else 1) * NUMBER)] * n


# --- parameters (parallel/zero.py) -----------------------------------------------------------------------------------------------


def gathers(s: Sizes, leaves: dict[str, Leaf], *names: str) -> Iterator[Cost]:
    """Of parameters (those of these names) that an op gathers before it reads them."""
    if s.zero.gathers_in_ops:
        yield from (whole(s, leaf) for name, leaf in leaves.items() if leaf.how.over_data and (not names or name in names))


def whole(s: Sizes, leaf: Leaf) -> Cost:
    return Cost(GATHER, (DATA,), leaf.size * (s.item if leaf.spec.cast else NUMBER))


def reductions_in_op(s: Sizes, leaves: dict[str, Leaf]) -> Iterator[Cost]:
    """Of a microbatch's gradients."""
    if s.zero.reduces_in_ops:
        yield from (Cost(SCATTER, (DATA,), leaf.size * s.reduced) for leaf in leaves.values() if leaf.how.over_data)


def reductions(s: Sizes, leaf: Leaf) -> Iterator[Cost]:
    """Of a gradient, after the last row: what the ops have left to do."""
    done = s.zero.reduces_in_ops and leaf.how.over_data
    size = leaf.size / (s.of[DATA] if done else 1)
    scatter = tuple(a for a in leaf.how.scatter_axes if s.of[a] > 1 and not (done and a == DATA))
    sums = tuple(a for a in leaf.how.sum_axes if s.of[a] > 1)
    if scatter:
        yield Cost(SCATTER, scatter, size * s.reduced)
        size /= math.prod(s.of[a] for a in scatter)
    inside = tuple(a for a in sums if a != REPLICA)
    if REPLICA in sums and inside:  # inside a replica first, then across, each device its share (parallel/replicas.py)
        yield Cost(SCATTER, inside, size * s.reduced)
        yield Cost(SUM, (REPLICA,), size / math.prod(s.of[a] for a in inside) * s.reduced)
        yield Cost(GATHER, inside, size * s.reduced)
    elif sums:
        yield Cost(SUM, sums, size * s.reduced)


def after_the_update(s: Sizes, leaf: Leaf) -> Iterator[Cost]:
    """A parameter whose parts are updated where their optimizer state lies (training/step.py)."""
    kept = {DATA} if s.zero.stage == 3 else set()
    axes = tuple(a for a in leaf.how.scatter_axes if a not in kept)
    parts = math.prod(s.of[a] for a in leaf.how.scatter_axes if a in kept)
    if axes:
        yield Cost(GATHER, axes, leaf.size / parts * NUMBER)


# --- replicas that train apart (parallel/replicas.py) ----------------------------------------------------------------------------


def exchange(s: Sizes) -> Iterator[Cost]:
    """Of replicas.mean_across: a device carries its share across, and gathers inside; and what makes parameters of the result
    (training/diloco.py)."""
    numbers = scales = 0
    replicas, split_over = s.of[REPLICA], lambda spec: {a for p in spec for a in mesh_axes(p)}
    for array, params in zip(jax.tree.leaves(s.layout.outer), jax.tree.leaves(s.layout.shardings), strict=True):
        spec = array.sharding.spec
        part, split = part_of(array.shape, spec, s.of), split_over(spec)
        yield Cost(GATHER, tuple(split - split_over(params.spec)), part_of(array.shape, params.spec, s.of) * NUMBER)
        copies = tuple(a for a in AXES if a != REPLICA and a not in split)
        share = -(-part // math.prod(s.of[a] for a in copies))
        block = min(BLOCK, -(-share // replicas))
        numbers += -(-share // (replicas * block)) * replicas * block
        scales += -(-share // (replicas * block)) * replicas
        if s.config.precision.outer == "float32":
            yield Cost(SUM, (REPLICA,), share * NUMBER)
        yield Cost(GATHER, copies, part * NUMBER)
    if s.config.precision.outer == "int8":
        for kind in (EXCHANGE, GATHER):
            yield from [Cost(kind, (REPLICA,), numbers), Cost(kind, (REPLICA,), scales * NUMBER)]
