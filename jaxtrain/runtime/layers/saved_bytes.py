"""The layer that the runtime cuts into ops, and the bytes that it saves by this cut: what the
runtime's pools have, and what the planner counts, where no device need be there."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec as P

from jaxtrain.config import PrecisionConfig, ResolvedModel
from jaxtrain.config.groups.layer_kinds import (
    forms_of_kinds,
    has_dropout,
    kinds_of_layers,
    of_kind,
)
from jaxtrain.config.saved_values import LAYER_INPUT, LayerBytes, names_of, names_on_host
from jaxtrain.config.sizes import SELECTIVE
from jaxtrain.devices.mesh import AXES, MODEL, AbsentDevice, manual_axes, traced_for
from jaxtrain.devices.sharding import local_shape
from jaxtrain.models.spec import Spec
from jaxtrain.models.transformer import ModelParts, build
from jaxtrain.parallel import collective_matmul
from jaxtrain.parallel.attention import cudnn
from jaxtrain.parallel.attention.heads import row_major
from jaxtrain.parallel.fp8 import Fp8, Quantized, fp8_of, quantized_weights
from jaxtrain.parallel.mxfp8 import blocked_weights
from jaxtrain.parallel.tensor import TOKENS
from jaxtrain.runtime.layers.backward_split import (
    ACTIVATIONS,
    LayerSplit,
    keep_everything,
    keep_named,
    keep_products,
    makes_named,
)
from jaxtrain.runtime.layers.equations import HostRule, KeepRule


@dataclasses.dataclass(frozen=True)
class RuntimeLayer:
    """A layer of one kind, as the runtime runs it.

    compute: dtype of activations
    fp8:     the use of FP8 in products with its matrices; None: they are of `compute`
    kind:    its kind (config/groups/layer_kinds.py)
    dense:   of the layers before the first one that has experts
    """

    parts: ModelParts
    compute: jnp.dtype
    fp8: Fp8 | None = None
    kind: str = ""
    dense: bool = False

    @property
    def specs(self) -> dict:
        if not self.dense:
            return self.parts.layer_specs(self.kind)
        kinds = kinds_of_layers(self.parts.cfg)
        return self.parts.specs["first"][str(kinds.index(self.kind))]

    @property
    def form(self) -> str:
        return forms_of_kinds(self.parts.cfg)[self.kind]

    def __call__(self, params, x: jax.Array, extra) -> jax.Array:
        """x [B, T, D] → the same shape and dtype. extra: (positions, segments or None, noise if
        training drops numbers)"""
        blocks = self.parts.dense_blocks if self.dense else self.parts.blocks
        return row_major(blocks[self.kind](params)(row_major(x, TOKENS), *extra), TOKENS)

    def split(
        self, message: tuple[int, ...], extra, keep: KeepRule, hosted: HostRule
    ) -> LayerSplit:
        """The layer cut into ops, for activations of the shape `message`, [B, T, D], on a device.
        keep, hosted: what its forward saves, and what of that in the host's memory"""
        x = jax.ShapeDtypeStruct(message, self.compute)
        params = jax.tree.map(self._shape_as_used, self.specs)
        # A device has memory for more rows of experts than arrive, on average for half of them.
        has_experts = of_kind(self.parts.cfg, self.kind).experts > 0
        recomputed = ACTIVATIONS if has_experts else frozenset()
        return LayerSplit(self, params, x, extra, keep, recomputed).placed(hosted)

    def _shape_as_used(self, spec: Spec) -> Any:
        """The shape of one parameter in the form that products take, unsharded."""
        held = jax.ShapeDtypeStruct(local_shape(spec.axes, spec.padded), jnp.float32)
        return jax.eval_shape(lambda a: as_used(spec, a, self.compute, self.fp8), held)


def as_used(
    spec: Spec, a: jax.Array, compute: jnp.dtype, fp8: Fp8 | None, axes: Sequence[str] = ()
) -> jax.Array | Quantized:
    """A parameter, or a stack of them, in the form that products take. axes: of the mesh, that
    split it in the manual region"""
    if not spec.cast:
        return a
    # The products of other parameters stay in `compute`.
    if fp8 is None or not spec.product:
        return a.astype(compute)
    if fp8.blocks:
        return blocked_weights(a, fp8)
    return quantized_weights(a, fp8, len(spec.shape), axes)


def keep_rule(mode: str, save: Sequence[str]) -> KeepRule:
    """What the forward of a layer with this mode of remat saves: with selective the values of the
    names in `save`, or without any the results of products; with others everything, for R makes it
    again with full."""
    if mode != SELECTIVE:
        return keep_everything
    return keep_named(names_of(save)) if save else keep_products


def host_rule(mode: str, save: Sequence[str], offload: bool = False) -> HostRule:
    """What a layer's forward saves in the host's memory: the values that `save` has there, with
    `offload` all; with full the layer's input at most, from which R makes the rest in the device's
    memory."""
    if offload and mode != "full":
        return lambda maker: True
    # A layer's input has no equation that makes it, and so no maker: it is asked for by its name.
    names = names_on_host(save) if mode == SELECTIVE else ()
    return lambda maker: makes_named(names, maker) if maker else LAYER_INPUT in names


def examples(cfg: ResolvedModel, sequences: int, tokens: int, documents: bool) -> tuple[Any, ...]:
    """The shapes of what a layer reads beside its input, for a microbatch on a device in training.
    documents: tokens attend within their document"""
    numbers = lambda n, dtype=jnp.int32: jax.ShapeDtypeStruct((n, tokens), dtype)
    noise = (numbers(sequences, jnp.uint32),) if has_dropout(cfg) else ()
    extra = (numbers(sequences), numbers(sequences)) if documents else (numbers(1), None)
    return *extra, *noise


def in_manual_region(
    make: Callable[[], list],
    mesh: Mesh | AbstractMesh,
    beside_products: str,
    target: Mesh | AbsentDevice,
) -> list:
    """The list that `make` returns inside the manual region of a program for `target`, which is
    traced and not compiled: there an op knows the experts and the context of all devices.

    beside_products: `parallel.collective_matmul`
    """
    results = []

    def trace() -> jax.Array:
        # The list has objects that shard_map cannot return, so it leaves by the closure.
        results.extend(make())
        return jnp.zeros(())

    run = jax.shard_map(
        trace, mesh=mesh, in_specs=(), out_specs=P(), axis_names=manual_axes(mesh), check_vma=False
    )
    with traced_for(target), collective_matmul.requested(beside_products), cudnn.stand_in():
        # Only traced: the devices of `target` need not be there.
        jax.eval_shape(run)
    return results


def bytes_of(split: LayerSplit, model: int) -> LayerBytes:
    """Bytes on each of `model` devices of what a layer saves of one microbatch.

    Values are split over `model`, except those of the weight stash that B has gathered for W: each
    device holds them unsplit.
    """
    size = lambda arrays: sum(a.size * a.dtype.itemsize for a in arrays) // model
    largest = lambda arrays: max((size([a]) for a in arrays), default=0)
    hosted = lambda arrays, places: size(itertools.compress(arrays, places))
    # B gathers these over `model`, so each device has all of them and not a share.
    gathered = [a for a, g in zip(split.weight_stash, split.gathered, strict=True) if g]
    whole = lambda arrays: [a for a in arrays if a.size == split.x.size]
    return LayerBytes(
        size(split.residuals.for_b),
        size(split.residuals.for_w),
        size(split.weight_stash) + size(gathered) * (model - 1),
        size([split.x]),
        largest(gathered) * model,
        largest(whole(split.residuals.for_w)),
        largest(a for a in whole(split.weight_stash) if a.dtype == jnp.float32),
        hosted(split.residuals.for_b, split.on_host.for_b),
        hosted(split.residuals.for_w, split.on_host.for_w),
    )


@dataclasses.dataclass(frozen=True)
class LayerOnMesh:
    """A layer of a model, with one microbatch, on devices that need not be there.

    dense: of the layers before the first one that has experts
    sequences, tokens: of the microbatch on one group of `model` devices
    documents: tokens attend within their document
    mesh_sizes: in AXES' order
    platform: of the devices, by jax's name
    context, expert_nodes, beside_products: `parallel.context`, `parallel.expert_nodes` and
        `parallel.collective_matmul`
    """

    cfg: ResolvedModel
    precision: PrecisionConfig
    dense: bool
    sequences: int
    tokens: int
    documents: bool
    mesh_sizes: tuple[int, ...]
    platform: str
    context: str
    expert_nodes: int
    beside_products: str

    def splits(self, mode: str, save: Sequence[str]) -> list[LayerSplit]:
        """The layer cut in two ways by one trace: with everything saved, and as `keep_rule` says.
        To be called in the manual region of a mesh of `mesh_sizes`."""
        parts = build(self.cfg, context=self.context, expert_nodes=self.expert_nodes)
        compute, fp8 = jnp.dtype(self.precision.compute), fp8_of(self.precision, False)
        kind = kinds_of_layers(self.cfg)[0]
        layer = RuntimeLayer(parts, compute, fp8, kind, self.dense)
        shape = self.sequences, self.tokens, self.cfg.width
        extra = examples(self.cfg, self.sequences, self.tokens, self.documents)
        # The second cut uses the first one's trace, which takes most of the time.
        everything = layer.split(shape, extra, keep_everything, host_rule("none", ()))
        saved = everything.recut(keep_rule(mode, save)).placed(host_rule(mode, save))
        return [everything, saved]


@functools.lru_cache(2**12)
def saved_bytes(
    layer: LayerOnMesh, mode: str, save: Sequence[str]
) -> tuple[LayerBytes, LayerBytes]:
    """What one layer saves of a microbatch on a device: (everything, what it saves with a mode of
    remat). A layer is traced once. mode, save: as for `keep_rule`"""
    make = functools.partial(layer.splits, mode, save)
    mesh = AbstractMesh(layer.mesh_sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    device = AbsentDevice(layer.platform)
    # The caller may be inside a mesh or a trace, which would refuse another mesh. A thread of its
    # own is in none.
    with ThreadPoolExecutor(1) as alone:
        traced = alone.submit(in_manual_region, make, mesh, layer.beside_products, device).result()
    everything, saved = (bytes_of(split, mesh.shape[MODEL]) for split in traced)
    return everything, saved
