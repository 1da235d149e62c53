"""The model's parameters on a mesh: the shape, dtype and sharding of each.

A ParameterLayout answers these questions for all parameters at once, by trees shaped like

    {"embed": …, "layers": {"0": …, "1": …}, "head": …}      and "predictors" or "first", if any

"layers"[u] has local unit u of all stages, stacks with leaves [stages, layers, …]
(schedule/placement.py). Where layers are of several forms (config/groups/layer_kinds.py),
"layers"[u] is {form: …} of the forms that some stage has there. Begin with `specs`, `shapes` and
`reductions`. All shardings follow from the reductions by ZeRO's stage (parallel/zero.py):

    scattered   of reduced gradients, and of parameters while they are updated
    shardings   of parameters that ops read: `scattered` with ZeRO-3, else replicated over the data
                shards
    held        of parameters in the state: `shardings`, but `scattered` for float32 masters

With `precision.params=bfloat16` ops read matrices of 2 bytes a number.

    masters=float32   the parameters are float32 masters, which lie with the optimizer's state:
                      scattered as it is, on the host if it is. Ops read copies of them
    masters=none      the parameters themselves are of 16 bits (training/update/rounding.py)

Vectors and routers, which no product of the compute type reads, are float32 in both cases.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxtrain.config import OptimizerConfig, PrecisionConfig, ResolvedModel, forms_of_layers
from jaxtrain.config.optimizers import record_of
from jaxtrain.config.sizes import SHARD_AXES
from jaxtrain.devices import host_memory
from jaxtrain.devices.mesh import AXES, DATA, MODEL, REPLICA, psum
from jaxtrain.devices.sharding import mesh_axes
from jaxtrain.devices.state_file import StateFile
from jaxtrain.models.spec import Spec, is_spec
from jaxtrain.models.transformer import ModelParts, build
from jaxtrain.parallel import replicas
from jaxtrain.parallel.zero import ParameterArray, Reduction, Zero, reduction_of, sum_of_squares
from jaxtrain.schedule.placement import Placement
from jaxtrain.training.update.optimizer import Optimizer, parts_of


class StackName(NamedTuple):
    """The stack of all layers of one form in a local unit. form: "" where all layers are of one"""

    unit: int
    form: str = ""

    @property
    def depth(self) -> int:
        """The number of keys in the tree that lead to the stack."""
        return 3 if self.form else 2


class LaidOutParameter(NamedTuple):
    """One parameter of a layout, or the stack of one parameter of all layers of a local unit.

    keys: its place in the tree of parameters
    spec: of one layer
    size: elements on all devices, with padding
    """

    keys: tuple[str, ...]
    spec: Spec
    size: int
    reduction: Reduction


class ParameterState(NamedTuple):
    """An array of the optimizer's state that belongs to one parameter, such as its first moment.

    array:    abstract, [leading dimensions of the stack, …]
    dims:     the dimensions of the parameter that the array keeps (config/optimizers.py)
    spec:     the parameter's, of one layer
    sharding: the parameter's during its update
    stack:    the parameter's; None outside of stacks
    """

    array: Any
    dims: tuple[int, ...]
    spec: Spec
    sharding: NamedSharding
    stack: StackName | None

    @property
    def lead(self) -> int:
        """The number of leading dimensions: 2 in a stack, [stages, layers], otherwise 0."""
        return len(self.sharding.spec) - len(self.spec.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterLayout:
    """The layout of the model's parameters on a mesh. All trees are shaped like the parameters."""

    parts: ModelParts
    placement: Placement
    mesh: Mesh
    zero: int = 1  # ZeRO's stage of layers, and where `shards_ends` is false of all others
    precision: PrecisionConfig = PrecisionConfig()
    independent_replicas: bool = False  # each replica has its own parameters
    offload: bool = False  # the optimizer's state, with masters, lies in the host's memory
    disk: StateFile | None = None  # or in this file
    optimizer: OptimizerConfig = OptimizerConfig()
    # what stands before and after the layers is sharded as in ZeRO-3, over a stage's devices
    shards_ends: bool = False
    evaluates_ema: bool = False  # the average is evaluated in the place of the parameters

    @classmethod
    def unstaged(
        cls,
        model: ResolvedModel,
        mesh: Mesh,
        precision: PrecisionConfig,
        independent_replicas: bool = False,
    ) -> "ParameterLayout":
        """The layout of a resolved config's model on a mesh with one stage, without ZeRO."""
        parts = build(model, mesh.shape[MODEL])
        placement = Placement(model.layers, forms=forms_of_layers(model))
        return cls(parts, placement, mesh, 0, precision, independent_replicas)

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of an array that every device holds, such as a loss."""
        return NamedSharding(self.mesh, P())

    # --- types and shapes -------------------------------------------------------------------------

    @property
    def masters(self) -> bool:
        """True if matrices are float32 masters, of which ops read 16-bit copies."""
        return self.precision.params != "float32" and self.precision.masters == "float32"

    def has_master(self, s: Spec) -> bool:
        """True for a parameter of which ops read a copy."""
        return self.masters and s.cast

    def dtype(self, s: Spec) -> jnp.dtype:
        """The type of a parameter in the state."""
        # A parameter that is not cast is read in float32, whatever the type of matrices.
        is_16_bit = s.cast and not self.masters
        return jnp.dtype(self.precision.params if is_16_bit else "float32")

    @property
    def specs(self) -> dict:
        """A Spec for each parameter; for a stack, the Spec of one layer."""
        return {**self.parts.ends, "layers": self.placement.of_units(self.parts.specs["layer"])}

    @property
    def stacks(self) -> list[StackName]:
        """The stacks of all local units."""
        units = range(self.placement.units_per_stage)
        return [StackName(u, form) for u in units for form in self.placement.forms_of_unit(u)]

    def stack_of(self, path: tuple) -> StackName | None:
        """The stack of a parameter, by its path in the tree; None outside of stacks."""
        if path[0].key != "layers":
            return None
        return StackName(int(path[1].key), path[2].key if self.placement.forms else "")

    def _map(self, fn: Callable[[Spec, tuple[int, ...], tuple[str, ...]], Any]) -> dict:
        """fn(spec, leading shape, leading axes) for all parameters."""

        stages = self.placement.stages
        shapes = {name: (stages, self.placement.stack_size(*name)) for name in self.stacks}

        def of_parameter(path: tuple, s: Spec) -> Any:
            # Embedding, head and what else is not in `layers` have no leading dimensions.
            stack = self.stack_of(path)
            return fn(s, shapes[stack], ("stage", "layer")) if stack else fn(s, (), ())

        return jax.tree_util.tree_map_with_path(of_parameter, self.specs, is_leaf=is_spec)

    @property
    def shapes(self) -> dict:
        """ShapeDtypeStructs of the parameters of one replica, without shardings."""
        return self._map(
            lambda s, shape, _: jax.ShapeDtypeStruct((*shape, *s.padded), self.dtype(s))
        )

    def parameters(self) -> list[LaidOutParameter]:
        """The parameters of one replica, in the order of their leaves."""
        specs = jax.tree_util.tree_leaves_with_path(self.specs, is_leaf=is_spec)
        reductions = jax.tree.leaves(self.reductions, is_leaf=lambda r: isinstance(r, Reduction))
        return [
            LaidOutParameter(
                tuple(str(key.key) for key in path), one, math.prod(array.shape), reduction
            )
            for (path, one), array, reduction in zip(
                specs, jax.tree.leaves(self.shapes), reductions, strict=True
            )
        ]

    # --- shardings --------------------------------------------------------------------------------

    @property
    def reductions(self) -> dict:
        """A Reduction for each parameter's gradient; with independent replicas, inside a
        replica."""
        sum_axes = replicas.sum_axes(self.independent_replicas)

        def reduction(s: Spec, lead: tuple[int, ...], axes: tuple[str, ...]) -> Reduction:
            # ZeRO shards layers over `data` alone. The ends lie on all stages, though one of them
            # reads them: `shards_ends` shards them over all devices of a stage to save memory.
            shard_axes = SHARD_AXES if self.shards_ends and not lead else (DATA,)
            array = ParameterArray((*axes, *s.axes), (*lead, *s.padded), len(lead), s.counts)
            return reduction_of(array, self.mesh, self.zero, sum_axes, shard_axes)

        return self._map(reduction)

    def _shardings(self, spec_of: Callable[[str, Reduction], P]) -> dict:
        """spec_of: (name of a part of the model, a parameter's reduction) → its spec"""
        return {
            name: jax.tree.map(
                lambda r, name=name: NamedSharding(self.mesh, spec_of(name, r)),
                part,
                is_leaf=lambda r: isinstance(r, Reduction),
            )
            for name, part in self.reductions.items()
        }

    @property
    def shardings(self) -> dict:
        """Shardings of the parameters of one replica that ops read."""
        # As the runtime's `zero_of_ends` (training/step.py: make_step): both have to agree, for the
        # manual region takes parameters in these shardings.
        ends = 3 if self.shards_ends else self.zero
        stage = lambda name: self.zero if name == "layers" else ends
        return self._shardings(lambda name, r: Zero(stage(name)).held(r))

    @property
    def scattered(self) -> dict:
        """Shardings of the reduced gradients, and of the parameters during their update."""
        return self._shardings(lambda _, r: r.storage)

    def _held(self, master: Callable[[NamedSharding], NamedSharding]) -> dict:
        """Shardings of the state's parameters; master(sharding): of a master, from that of its
        optimizer's state on devices."""
        return jax.tree.map(
            lambda s, read, scattered: master(scattered) if self.has_master(s) else read,
            self.specs,
            self.shardings,
            self.scattered,
            is_leaf=is_spec,
        )

    @property
    def held(self) -> dict:
        """Shardings of the parameters of one replica in the state: masters lie with the
        optimizer's state."""
        return self._held(host_memory.on_host if self.offload else lambda sharding: sharding)

    @property
    def outer(self) -> dict:
        """The arrays that replicas exchange, float32, as ShapeDtypeStructs. They are sharded as by
        ZeRO 1 at least."""
        # Each device of a replica exchanges its own shard. Without ZeRO all of them would have the
        # same numbers, and memory for them.
        return self._float32(dataclasses.replace(self, zero=max(self.zero, 1)).scattered)

    @property
    def ema(self) -> dict | None:
        """The average of the parameters, float32, as ShapeDtypeStructs that lie with the
        optimizer's state; None without `optimizer.ema_decay`."""
        place = host_memory.on_host if self.offload else lambda sharding: sharding
        average = self._float32(jax.tree.map(place, self.scattered))
        return average if self.optimizer.ema_decay else None

    def _float32(self, shardings: dict) -> dict:
        shape = lambda a, s: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=s)
        return jax.tree.map(shape, self.shapes, shardings)

    # --- inside jit: updated parameters, back in the types and places of the state ----------------

    def as_held(self, values: dict) -> dict:
        """Inside jit: the parameters of one replica in the types of the state and laid out as in
        it, on devices; the nearest numbers. values: float32, laid out as `scattered`"""

        def hold(s: Spec, a: jax.Array, scattered: NamedSharding, held: NamedSharding) -> jax.Array:
            return gathered(a, self.dtype(s), scattered, held)

        # On devices also with offload: the update writes masters to the host itself, layer by layer
        # (training/update/optimizer.py).
        shardings = self._held(lambda sharding: sharding)
        return jax.tree.map(hold, self.specs, values, self.scattered, shardings, is_leaf=is_spec)

    def working(self, values: Any) -> dict | None:
        """Inside jit: one replica's `TrainState.working` from parameters in float32, laid out as
        `scattered`; None where ops read the parameters themselves."""
        if not self.masters:
            return None

        def copy(
            s: Spec, a: jax.Array, scattered: NamedSharding, read: NamedSharding
        ) -> jax.Array | None:
            return gathered(a, self.precision.params, scattered, read) if s.cast else None

        return jax.tree.map(
            copy, self.specs, values, self.scattered, self.shardings, is_leaf=is_spec
        )

    @property
    def working_shapes(self) -> dict | None:
        """The result of `working` as ShapeDtypeStructs with shardings."""
        if not self.masters:
            return None

        def shape(s: Spec, a: jax.ShapeDtypeStruct, sharding: NamedSharding) -> Any:
            if not s.cast:
                return None
            return jax.ShapeDtypeStruct(a.shape, self.precision.params, sharding=sharding)

        return jax.tree.map(shape, self.specs, self.shapes, self.shardings, is_leaf=is_spec)

    def norm(self, tree: dict) -> jax.Array:
        """The l2 norm in float32 of arrays laid out as `scattered`: all devices of a replica add up
        the squares of their shards, in one all-reduce of a scalar."""
        shared = [a for a in AXES if not (self.independent_replicas and a == REPLICA)]
        sizes = {axis: self.mesh.shape[axis] for axis in shared}
        specs = jax.tree.map(lambda s: s.spec, self.scattered)

        # A manual region, since the partitioner would make one all-reduce for each group of axes
        # that parameters are sharded over. A shard that several devices have counts once:
        # sum_of_squares divides its squares by their number.
        def total(tree: dict) -> jax.Array:
            squares = jax.tree.map(lambda a, spec: sum_of_squares(a, spec, sizes), tree, specs)
            return psum(jnp.stack(jax.tree.leaves(squares)).sum(), shared)

        summed = jax.shard_map(
            total,
            mesh=self.mesh,
            in_specs=(specs,),
            out_specs=P(),
            axis_names=set(AXES),
            check_vma=False,
        )
        return jnp.sqrt(summed(tree))

    # --- the optimizer's state --------------------------------------------------------------------

    def state_of(
        self,
        optimizer: Optimizer,
        of_parameter: Callable[[ParameterState], Any],
        of_others: Callable[[Any], Any],
    ) -> Any:
        """A pytree like the optimizer's state: of_parameter(array) for the arrays that belong to
        one parameter, of_others(abstract array) for those that all share, such as counts of
        updates."""
        record = record_of(self.optimizer.name)
        tree: Any  # jax's type of a structure has no methods for mypy
        leaves, tree = jax.tree_util.tree_flatten_with_path(self.specs, is_leaf=is_spec)
        specs, stacks = [s for _, s in leaves], [self.stack_of(path) for path, _ in leaves]
        shardings = tree.flatten_up_to(self.scattered)
        parts, follow, outline = parts_of(jax.eval_shape(optimizer.init, self.shapes), tree)
        # The n-th tree of the state has the n-th array of each parameter, by the record's `state`.
        results, number = [], 0
        for part, follows in zip(parts, follow, strict=True):
            if not follows:
                results.append(of_others(part))
                continue
            arrays = tree.flatten_up_to(part)
            dims = [
                record.of(s.orthogonalized).state(s.shape, self.optimizer)[number] for s in specs
            ]
            of_each = map(ParameterState, arrays, dims, specs, shardings, stacks)
            results.append(tree.unflatten(map(of_parameter, of_each)))
            number += 1
        return outline.unflatten(results)

    def state_sharding(self, one: ParameterState) -> NamedSharding:
        """The sharding of an array of the optimizer's state: the dimensions that it keeps of its
        parameter lie on the mesh as the parameter's do during the update. With offload it is in the
        host's memory."""
        axes_of_parameter = [mesh_axes(entry) for entry in one.sharding.spec]
        axes_of_array = [
            *axes_of_parameter[: one.lead],
            *(axes_of_parameter[one.lead + d] for d in one.dims),
        ]

        def divides(axes: tuple[str, ...], size: int) -> bool:
            return size % math.prod(self.mesh.shape[axis] for axis in axes) == 0

        # An optimizer by rows and columns makes its state from the rows without those that pad a
        # parameter. Axes that divide the padded rows need not divide these: then the dimension is
        # replicated.
        # Not strict: an array that keeps no dimension of its parameter has one of size 1, which has
        # no axes.
        entries = [
            axes if divides(axes, size) else None
            for size, axes in zip(one.array.shape, axes_of_array, strict=False)
        ]
        on_device = NamedSharding(self.mesh, P(*entries))
        return host_memory.on_host(on_device) if self.offload else on_device


def gathered(
    a: jax.Array, dtype: jnp.dtype | str, scattered: NamedSharding, held: NamedSharding
) -> jax.Array:
    """Inside jit: an array in this type, laid out as `held`, from shards as `scattered`."""
    # The first constraint stands between the cast and the gather: without it the partitioner may
    # gather 32-bit numbers and cast the result, twice the bytes.
    narrow = lax.with_sharding_constraint(a.astype(dtype), scattered)
    return lax.with_sharding_constraint(narrow, held)
