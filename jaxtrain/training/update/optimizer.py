"""The optimizer of the config's group `optimizer`, and its learning rate.

Begin with `Optimizer.update`. It updates one parameter after the other, each by

    ParameterUpdate   optax's direction, decay of weights, learning rate, rounding, skip
    _unstacked        the same for each layer of a stack on its own, where the direction of a number
                      depends on the other numbers of its layer's parameter (Adafactor)
    _layer_by_layer   the same in a loop over layers, with offload to the host's memory

Muon first has the momentum of each matrix, then the directions of all matrices together
(training/update/muon.py), and then their new values. training/update/average.py follows.

The state is a tuple as optax's `chain` has it. `parts_of` takes it apart into trees like the
parameters (the moments) and scalars that all parameters share (counts of updates).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from jaxtrain.config import ConfigError, OptimizerConfig, one_line
from jaxtrain.config.learning_rates import LEARNING_RATES
from jaxtrain.config.optimizers import OPTIMIZERS, record_of
from jaxtrain.config.phases import RateLine
from jaxtrain.devices.host_memory import is_on_host, read, write
from jaxtrain.models.spec import Spec, is_spec
from jaxtrain.training.update.muon import Orthogonalizer
from jaxtrain.training.update.rounding import rounded


def learning_rate(
    settings: OptimizerConfig, steps: int, lines: Sequence[RateLine] = ()
) -> Callable[[ArrayLike], jax.Array]:
    """A function step → learning rate, for steps from 0: linear warm-up to the peak over
    `warmup_steps`, then the schedule of `optimizer.schedule` (config/learning_rates.py) to the end
    of a run of `steps` steps. lines: of phases, ascending, in the place of what comes before"""
    peak, warm_up = settings.learning_rate, settings.warmup_steps
    after = LEARNING_RATES[settings.schedule].make(jnp, optax, settings, max(1, steps - warm_up))
    rate = after
    if warm_up:
        # The first step already updates: step 0 has 1/warm_up of the peak.
        rising = optax.linear_schedule(peak / warm_up, peak, max(1, warm_up - 1))
        rate = optax.join_schedules([rising, after], [warm_up])
    return functools.reduce(_with_line, lines, rate)


def _with_line(rate: Callable[[ArrayLike], jax.Array], line: RateLine) -> Callable:
    """The rate up to the beginning of a line, and the line from there on."""

    def after(step: ArrayLike) -> jax.Array:
        number = jnp.asarray(step) - line.begin + 1  # of the update on the line, from 1
        fraction = jnp.clip(number / (line.end - line.begin), 0, 1)
        before = rate(max(line.begin - 1, 0))
        on_line = (1 - fraction) * before + fraction * line.final
        return jnp.where(number < 1, rate(step), on_line)

    return after


class Updated(NamedTuple):
    """The result of an update.

    values: the parameters' new values as float32, exactly as `params` has them, laid out as the
        gradients
    params: the parameters in their own types and memories
    state:  of the optimizer
    """

    values: Any
    params: Any
    state: Any


class Guard(NamedTuple):
    """What all updates of a step need of all gradients: their l2 norm, a float32 scalar, and
    whether the updates are made, a bool scalar; None if they always are."""

    norm: Any
    finite: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Optimizer:
    """The optimizer of `optimizer.name` (config/optimizers.py) with clipping by the global norm
    before it, and after it decay of weights (matrices decay, norm scales and biases do not) and the
    learning rate, which depends on the number of updates.

    A number is computed in float32. Where the parameter or the moment is of 16 bits, it is rounded
    up or down at random (training/update/rounding.py), since the nearest number is often the old
    one.

    steps, rate_lines: of the run, for the learning rate
    specs: a pytree like the parameters, of Specs. Stacks are leaves [stages, layers, ...] under
        "layers"
    moments: type of the arrays of the state
    offload: the optimizer's state, and what the layout says of the parameters, is in the host's
        memory: `update` fetches it and writes it back leaf by leaf, and in stacks layer by layer
    scattered: shardings of gradients, which Muon needs; a tree like the parameters
    compute: type of Muon's products
    keys: for each parameter, in the order of the leaves, the keys of its random numbers [stages,
        layers, 2], or [2]; None where nothing is of 16 bits
    """

    settings: OptimizerConfig
    steps: int
    specs: dict
    moments: str = "float32"
    offload: bool = False
    keys: Sequence[np.ndarray] | None = None
    rate_lines: tuple[RateLine, ...] = ()
    scattered: dict | None = None
    compute: str = "float32"

    def of_part(
        self, specs: dict, keys: Sequence[Any] | None = None, scattered: dict | None = None
    ) -> "Optimizer":
        """This optimizer for some of the parameters, whose state is not in the host's
        memory."""
        return dataclasses.replace(self, specs=specs, keys=keys, scattered=scattered, offload=False)

    @property
    def rate(self) -> Callable[[ArrayLike], jax.Array]:
        """The number of updates before this one → its learning rate."""
        return learning_rate(self.settings, self.steps, self.rate_lines)

    def _directions(self, spec: Spec) -> optax.GradientTransformation:
        record = record_of(self.settings.name).of(spec.orthogonalized)
        return record.make(jax, optax, self.settings)

    def init(self, params: Any) -> Any:
        """The state before the first update: optax's of the clipping, of the directions, of the
        decay and of the learning rate."""
        tree: Any  # jax's type of a structure has no methods for mypy
        specs, tree = jax.tree.flatten(self.specs, is_leaf=is_spec)
        record = record_of(self.settings.name)
        parts = parts_of(jax.eval_shape(self._directions(specs[0]).init, params), tree)
        leaves = []
        for array, spec in zip(tree.flatten_up_to(params), specs, strict=True):
            # Each layer on its own, and without padding, where directions depend on all its numbers
            elementwise = record.of(spec.orthogonalized).elementwise
            rows, lead = (None, 0) if elementwise else (spec.shape[0], array.ndim - len(spec.shape))
            start = lambda a, s=spec, n=rows: jax.tree.leaves(self._directions(s).init(a[:n]))
            for _ in range(lead):
                axes = [0 if follows else None for follows in parts.follow]
                start = jax.vmap(start, out_axes=axes)
            leaves.append(start(array))
        parts = parts_of(_joined(leaves, parts, tree), tree)
        moments = lambda part: jax.tree.map(lambda a: a.astype(self.moments), part)
        state = parts.outline.unflatten(
            moments(part) if follows else part
            for part, follows in zip(parts.parts, parts.follow, strict=True)
        )
        nothing = optax.EmptyState()
        # Checkpoints name the state's arrays by their places in this tuple, so it has the same
        # places with and without clipping or decay.
        return nothing, state, nothing, optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(
        self,
        gradients: Any,
        state: Any,
        params: Any,
        finite: jax.Array | None = None,
        norm: jax.Array | None = None,
    ) -> Updated:
        """Inside jit: the parameters and the state after an update.

        finite: a scalar; if it is false, parameters and state stay as they are, bit for bit. None:
            they change in any case
        norm: of all gradients, float32; None: `gradients` are all
        """
        tree: Any
        specs, tree = jax.tree.flatten(self.specs, is_leaf=is_spec)
        if limit := self.settings.clip_norm:
            # optax's clip_by_global_norm, of gradients that may be some of those whose norm this
            # is. `limit / norm` is one number for all gradients, so each has a product and no
            # division: XLA would turn a division by a scalar into a product in one program and not
            # in another.
            norm = optax.tree.norm(gradients) if norm is None else norm
            clip = lambda g: lax.select(norm < limit, g, g * (limit / norm).astype(g.dtype))
            gradients = jax.tree.map(clip, gradients)
        no_clipping, of_directions, no_decay, schedule = state
        count = schedule.count  # of updates, not of steps: a skipped one does not move the rate
        rate = self.rate(count)
        parts = parts_of(of_directions, tree)
        # Each part of the state has a leaf for each parameter; a shared count is one for all.
        columns = [
            tree.flatten_up_to(part) if follows else [part] * len(specs)
            for part, follows in zip(parts.parts, parts.follow, strict=True)
        ]
        leaves = [list(of_one) for of_one in zip(*columns, strict=True)]
        record = record_of(self.settings.name)
        paths, of_each = zip(*jax.tree_util.tree_leaves_with_path(gradients), strict=True)

        def update_of(spec: Spec) -> ParameterUpdate:
            decay = self.settings.weight_decay if spec.matrix else 0.0
            of_rest = record.rest and not spec.orthogonalized and self.settings.adamw_learning_rate
            own_rate = rate * (of_rest / self.settings.learning_rate) if of_rest else rate
            factor = record.of(spec.orthogonalized).mup(self.settings, spec.mup_rate, spec.mup_size)
            directions = self._directions(spec)
            return ParameterUpdate(directions, parts, decay, own_rate, count, finite, factor)

        def run(i: int, one: Any, gradient: jax.Array, leaves: list, held: Any = None) -> tuple:
            key = None if self.keys is None else jnp.asarray(self.keys[i])
            if self.offload:
                layers = gradient.shape[1] if paths[i][0].key == "layers" else 0
                return _layer_by_layer(one, gradient, leaves, held, key, layers)
            value, after = one(gradient, leaves, held, key)
            return value, held, after

        # Muon: first the momenta of all matrices, then their directions together.
        momenta = {
            i: run(i, update_of(spec).momentum, of_each[i], leaves[i])
            for i, spec in enumerate(specs)
            if record.rest and spec.orthogonalized
        }
        directions = {}
        if momenta:
            shardings = tree.flatten_up_to(self.scattered)
            of_all = Orthogonalizer(self.settings, jnp.dtype(self.compute), shardings[0].mesh)
            layouts = {i: shardings[i].spec for i in momenta}
            directions = of_all({i: a for i, (a, *_) in momenta.items()}, specs, layouts)
        values, new_params, new_leaves = [], [], []
        parameters = zip(specs, of_each, tree.flatten_up_to(params), strict=True)
        for i, (spec, gradient, held) in enumerate(parameters):
            one = update_of(spec)
            if i in momenta:
                value, held, _ = run(i, one.move, directions[i], [], held)
                after = momenta[i][2]
            else:
                each = one if record.elementwise or record.rest else _unstacked(one, spec, gradient)
                value, held, after = run(i, each, gradient, leaves[i], held)
            values.append(value)
            # A parameter on the host was written there by the loop over its layers.
            new_params.append(held if is_on_host(held) else value.astype(held.dtype))
            new_leaves.append(after)
        counted = count + 1 if finite is None else jnp.where(finite, count + 1, count)
        new_state = (
            no_clipping,
            _joined(new_leaves, parts, tree),
            no_decay,
            optax.ScaleByScheduleState(counted),
        )
        return Updated(tree.unflatten(values), tree.unflatten(new_params), new_state)


def check_own_optimizer(settings: OptimizerConfig) -> None:
    """Raises ConfigError if `optimizer.name` is a record of one's own that makes no updates, or
    another state than it says. Nothing is computed."""
    if settings.name in OPTIMIZERS:
        return
    record, shape = record_of(settings.name), (256, 384)
    params = {"a": jax.ShapeDtypeStruct(shape, jnp.float32)}

    def update(params: Any) -> tuple[Any, Any]:
        directions = record.make(jax, optax, settings)
        state = directions.init(params)
        return state, directions.update(params, state, params)

    try:
        says = [tuple(shape[d] for d in dims) or (1,) for dims in record.state(shape, settings)]
        state, _ = jax.eval_shape(update, params)
    except Exception as error:
        rule = f"raises {type(error).__name__}: {error}"
    else:
        parts, follow, _ = parts_of(state, jax.tree.structure(params))
        has = [part["a"].shape for part, follows in zip(parts, follow, strict=True) if follows]
        if has == says:
            return
        rule = f"has a state of {has} for a parameter of {shape}, and its record says {says}"
    raise ConfigError("optimizer.name", settings.name, one_line(rule), "adamw or another record")


def updates_made(state: Any) -> jax.Array:
    """The number of updates in a state of `Optimizer`, int32: of steps without skipped ones."""
    return state[-1].count


# --- the state by its parts -----------------------------------------------------------------------


class StateParts(NamedTuple):
    """An optimizer's state taken apart.

    parts:   trees like the parameters (each moment), and leaves that all parameters share (a count
             of updates)
    follow:  for each part, True if it is such a tree
    outline: the structure whose leaves the parts are
    """

    parts: list[Any]
    follow: list[bool]
    outline: Any


def parts_of(state: Any, tree: Any) -> StateParts:
    """The parts of an optimizer's state. tree: the parameters' structure"""
    follows = lambda part: jax.tree.structure(part) == tree
    parts, outline = jax.tree.flatten(state, is_leaf=follows)
    return StateParts(parts, [follows(part) for part in parts], outline)


def _joined(leaves: list[list], parts: StateParts, tree: Any) -> Any:
    """The state of all parameters, in the form of `parts`, from the leaves of each one's."""
    columns = zip(*leaves, strict=True)
    # Each parameter's update has counted the shared counts on, all to the same number.
    return parts.outline.unflatten(
        tree.unflatten(column) if follows else column[-1]
        for column, follows in zip(columns, parts.follow, strict=True)
    )


# --- the update of one parameter ------------------------------------------------------------------


# (gradient, leaves of the state, parameter, its key) → (new values in float32, leaves of the new
# state), of one parameter
UpdateOne = Callable[
    [jax.Array, list[jax.Array], jax.Array, jax.Array | None], tuple[jax.Array, list[jax.Array]]
]


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterUpdate:
    """The update of one parameter, an UpdateOne.

    directions: optax's transformation of clipped gradients
    parts:      of the optimizer's state
    decay:      of weights, times the learning rate
    rate:       the learning rate
    count:      the number of updates before this one, int32
    finite:     as in Optimizer.update
    factor:     of μP, on directions and not on the decay (models/mup.py)
    """

    directions: optax.GradientTransformation
    parts: StateParts
    decay: float
    rate: jax.Array
    count: jax.Array
    finite: jax.Array | None
    factor: float = 1.0

    def __call__(
        self,
        gradient: jax.Array,
        leaves: list[jax.Array],
        held: jax.Array,
        key: jax.Array | None,
    ) -> tuple[jax.Array, list[jax.Array]]:
        # float32 for all products and sums: 16 bits would lose most of a small update
        value = held.astype(jnp.float32)
        direction, new_state = self._direction(gradient, leaves, value)
        new = self._taken([self._moved(value, direction), *new_state], [held, *leaves], key)
        return new[0].astype(jnp.float32), new[1:]

    def momentum(
        self, gradient: jax.Array, leaves: list[jax.Array], _: None, key: jax.Array | None
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The first part of an update whose direction is that of several parameters: what `make`
        of its record returns, and the leaves of the new state."""
        momentum, new_state = self._direction(gradient, leaves, None)
        return momentum, self._taken(new_state, leaves, key, 1)

    def move(
        self, direction: jax.Array, _: list, held: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The last part of such an update: new values in float32."""
        moved = self._moved(held.astype(jnp.float32), direction)
        return self._taken([moved], [held], key)[0].astype(jnp.float32), []

    def _direction(
        self, gradient: jax.Array, leaves: list[jax.Array], value: jax.Array | None
    ) -> tuple[jax.Array, list[jax.Array]]:
        wide = [
            a.astype(jnp.float32) if follows else a
            for a, follows in zip(leaves, self.parts.follow, strict=True)
        ]
        direction, new_state = self.directions.update(
            gradient, self.parts.outline.unflatten(wide), value
        )
        return direction, jax.tree.leaves(new_state)

    def _moved(self, value: jax.Array, direction: jax.Array) -> jax.Array:
        if self.factor != 1:
            direction = direction * self.factor
        if self.decay:
            direction = direction + self.decay * value
        return value - self.rate * direction

    def _taken(
        self, new: list[jax.Array], old: list[jax.Array], key: jax.Array | None, first_use: int = 0
    ) -> list[jax.Array]:
        """The new arrays in the types of the old ones, which stay where an update is skipped."""
        # The use tells apart the random numbers of the parameter and its moments, of one key.
        new = [
            rounded(a, before.dtype, key, self.count, use)
            for use, (a, before) in enumerate(zip(new, old, strict=True), first_use)
        ]
        # A skipped update is computed and not taken, by selects: a conditional would copy its
        # operands. A product with 0 would not do, since 0 · NaN is NaN.
        if self.finite is not None:
            new = [jnp.where(self.finite, a, before) for a, before in zip(new, old, strict=True)]
        return new


def _unstacked(one: ParameterUpdate, spec: Spec, like: jax.Array) -> UpdateOne:
    """`one` for each layer of a stack, without the rows that pad a parameter. like: the array, with
    the stack's dimensions in front"""
    rows, padding = spec.shape[0], spec.padded[0] - spec.shape[0]

    # Rows of zeros would count in means over rows, so the update does not see them.
    def unpadded(gradient, leaves, held, key):
        value, new_leaves = one(gradient[:rows], leaves, held[:rows], key)
        return jnp.pad(value, [(0, padding), *[(0, 0)] * (value.ndim - 1)]), new_leaves

    update, of_state = unpadded, [0 if follows else None for follows in one.parts.follow]
    for _ in like.shape[: -len(spec.shape)]:
        update = jax.vmap(update, in_axes=(0, of_state, 0, 0), out_axes=(0, of_state))
    return update


def _layer_by_layer(
    one: UpdateOne,
    gradient: jax.Array,
    state: list[jax.Array],
    held: jax.Array | None,
    key: jax.Array | None,
    layers: int,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """`one` by a loop over the layers of a stack; at once for another parameter (0 layers). Returns
    (new values, the parameter, leaves of the new state); only a parameter in the host's memory is
    written, for the others are the new values.
    """

    def start(layer: jax.Array, a: jax.Array) -> tuple:
        return (0, layer if layers else 0, *[0] * (a.ndim - 2))[: a.ndim]

    def read_layer(layer: jax.Array, a: jax.Array) -> jax.Array:
        return read(a, start(layer, a), (a.shape[0], 1, *a.shape[2:]) if layers else a.shape)

    def update_layer(
        layer: jax.Array, carry: tuple[jax.Array, jax.Array, list[jax.Array]]
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        # Nothing of the result is in an array of its own: values go into the gradient's memory, and
        # the state into its own.
        gradient, held, leaves = carry  # the gradient's layers become the new values'
        # A scalar counts steps: every layer begins from the count before the step.
        layer_state = [
            read_layer(layer, a) if a.ndim else before
            for a, before in zip(leaves, state, strict=True)
        ]
        value, new_state = one(
            read_layer(layer, gradient),
            layer_state,
            None if held is None else read_layer(layer, held),
            None if key is None else read_layer(layer, key),
        )
        if held is not None and is_on_host(held):
            held = write(held, value.astype(held.dtype), start(layer, held))
        pairs = zip(leaves, new_state, strict=True)
        return (
            write(gradient, value, start(layer, gradient)),
            held,
            [write(a, b, start(layer, a)) if a.ndim else b for a, b in pairs],
        )

    # XLA runs one loop after the other. Without loops it fetches several parameters' states, and
    # begins during the pipeline, when memory is scarcest. So a single update is a loop too, with a
    # number of trips that XLA does not see: it would dissolve a loop of one trip.
    trips = layers if layers > 1 else lax.optimization_barrier(1)
    return lax.fori_loop(0, trips, update_layer, (gradient, held, state))
