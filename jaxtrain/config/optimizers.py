"""The optimizers that `optimizer.name` may name: a record of each has all in which it differs. A
file of one's own has a record in the same form, which `optimizer.name=FILE.py:SGD` names:

    import functools
    from jaxtrain.config.optimizers import OptimizerRecord, copies

    SGD = OptimizerRecord(
        "sgd", "gradient descent with momentum",
        make=lambda jax, optax, settings: optax.trace(settings.b1),
        reads={"b1": "decay of the sum of gradients"},
        state=functools.partial(copies, 1),  # one array of the parameter's shape
        passes=3,
    )

Clipping by the global norm, decay of weights and the learning rate are the same for all
(training/update/optimizer.py). This module works without jax, so jax and optax are arguments of
`make`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from jaxtrain.config import own_code

# A parameter's dimensions, by their numbers.
KeptDims = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer. `settings` below is the config's group `optimizer`.

    name:        as in `optimizer.name`
    text:        what it is, with its source
    make:        (jax, optax, settings) → a transformation, as of optax, of clipped gradients into
                 directions
    reads:       the settings that `make` and `state` read, each with what it means here
    state:       (shape of a parameter, settings) → the dimensions that each array of its state
                 keeps, in the order of optax's state; an array that keeps none is [1]
    passes:      arrays of the parameter's size that an update reads and writes besides its state:
                 the gradient, the parameter and its new value, each counted as often as it passes
    elementwise: each number has its update from its own gradient and state. Otherwise an update
                 depends on all numbers of a layer's parameter.
    momentum:    (tree of the state, settings → factor): after the first step that tree is the
                 clipped gradient times the factor; None if no tree is
    mup:         (settings, a parameter's mup_rate and mup_size) → μP's factor on its directions
                 (models/mup.py), here that of directions whose numbers are about 1
    fixed:       settings on which the shapes of the state depend: a resumed run keeps them
    rest:        of parameters that are no matrices between activations (models/spec.py:
                 Spec.orthogonalized), with a state of as many arrays. The others' directions are
                 then orthogonalized after `make` (training/update/muon.py). None: all are alike
    """

    name: str
    text: str
    make: Callable[[ModuleType, ModuleType, Any], Any]
    reads: Mapping[str, str]
    state: Callable[[tuple[int, ...], Any], tuple[KeptDims, ...]]
    passes: int
    elementwise: bool = True
    momentum: tuple[str, Callable[[Any], float]] | None = None
    mup: Callable[[Any, float, float], float] = lambda settings, rate, size: rate
    fixed: tuple[str, ...] = ()
    rest: "OptimizerRecord | None" = None

    def of(self, orthogonalized: bool) -> "OptimizerRecord":
        """The record of a parameter, which a Spec says to be orthogonalized, or not."""
        return self if orthogonalized or self.rest is None else self.rest

    def state_numbers(self, shape: tuple[int, ...], settings: Any) -> int:
        """Numbers in the state of a parameter of this shape."""
        return sum(math.prod(shape[d] for d in dims) for dims in self.state(shape, settings))


def copies(number: int, shape: tuple[int, ...], _: Any) -> tuple[KeptDims, ...]:
    """The state of so many arrays of the parameter's shape."""
    return (tuple(range(len(shape))),) * number


def _factored(shape: tuple[int, ...], settings: Any) -> tuple[KeptDims, ...]:
    """Adafactor's means of squares over the largest dimension and over the second largest, or all
    squares where the second largest is below `factored_size`."""
    dims = tuple(range(len(shape)))
    by_size = sorted(dims, key=lambda d: shape[d])
    if len(shape) < 2 or shape[by_size[-2]] < settings.factored_size:
        return (), (), dims
    second, largest = by_size[-2:]
    return tuple(d for d in dims if d != largest), tuple(d for d in dims if d != second), ()


def _adam(jax: ModuleType, optax: ModuleType, settings: Any, nesterov: bool = False) -> Any:
    """optax's Adam, with corrections of the moments' bias that are factors. XLA makes a factor of a
    division by a scalar in one program and not in another, so the last bit would differ."""
    adam = optax.scale_by_adam(settings.b1, settings.b2, settings.epsilon)
    root = lambda second: jax.numpy.sqrt(second) + settings.epsilon

    def update(gradients, state, params=None):
        _, new_state = adam.update(gradients, state, params)
        first, second = (
            optax.tree.scale(1 / (1 - decay**new_state.count), moment)
            for decay, moment in ((settings.b1, new_state.mu), (settings.b2, new_state.nu))
        )
        if nesterov:
            first = _nesterov(optax, settings.b1, gradients, new_state)
        return optax.tree.div(first, jax.tree.map(root, second)), new_state

    return optax.GradientTransformation(adam.init, update)


def _nesterov(optax: ModuleType, decay: float, gradients: Any, state: Any) -> Any:
    """Nesterov's momentum (Dozat 2016), corrected for its bias: that of the next step, if its
    gradient were this one. state: with this step's momentum"""
    ahead = optax.tree.scale(decay / (1 - decay ** (state.count + 1)), state.mu)
    now = optax.tree.scale((1 - decay) / (1 - decay**state.count), gradients)
    return optax.tree.add(ahead, now)


def _muon(jax: ModuleType, optax: ModuleType, settings: Any) -> Any:
    """The momentum of matrices, before it is orthogonalized. Its state is in the form of Adam's,
    with a second moment of one number."""

    def init(params):
        nothing = jax.tree.map(lambda p: jax.numpy.zeros(1, p.dtype), params)
        zeros = optax.tree.zeros_like(params)
        return optax.ScaleByAdamState(jax.numpy.zeros((), "int32"), zeros, nothing)

    def update(gradients, state, params=None):
        mu = optax.tree.update_moment(gradients, state.mu, settings.momentum, 1)
        state = state._replace(mu=mu, count=optax.safe_increment(state.count))
        return _nesterov(optax, settings.momentum, gradients, state), state

    return optax.GradientTransformation(init, update)


def _adafactor(_: ModuleType, optax: ModuleType, settings: Any) -> Any:
    parts = [
        optax.scale_by_factored_rms(
            decay_rate=settings.decay_exponent, min_dim_size_to_factor=settings.factored_size
        )
    ]
    if settings.update_clip:
        parts.append(optax.clip_by_block_rms(settings.update_clip))
    if settings.parameter_scale:
        parts.append(optax.scale_by_param_block_rms())
    return optax.chain(*parts)


OPTIMIZERS: Mapping[str, OptimizerRecord] = {
    optimizer.name: optimizer
    for optimizer in (
        OptimizerRecord(
            "adamw",
            "Loshchilov & Hutter 2019, arXiv:1711.05101",
            make=_adam,
            reads={
                "b1": "decay of the first moment",
                "b2": "decay of the second moment",
                "epsilon": "added to the root of the second moment",
            },
            state=functools.partial(copies, 2),
            passes=3,
            momentum=("mu", lambda s: 1 - s.b1),
        ),
        OptimizerRecord(
            "lion",
            "Chen et al. 2023, arXiv:2302.06675; the paper has b2=0.99 and a third to a tenth of "
            "adamw's learning rate",
            make=lambda _, optax, s: optax.scale_by_lion(s.b1, s.b2),
            reads={
                "b1": "weight of the momentum in an update, whose signs are taken",
                "b2": "decay of the momentum",
            },
            state=functools.partial(copies, 1),
            passes=3,
            momentum=("mu", lambda s: 1 - s.b2),
        ),
        OptimizerRecord(
            "adafactor",
            "Shazeer & Stern 2018, arXiv:1804.04235, without momentum",
            make=_adafactor,
            reads={
                "decay_exponent": "update t keeps 1 - t^-decay_exponent of the second moment",
                "factored_size": "a matrix whose two largest dimensions have this size keeps means "
                "of its second moment over rows and columns",
                "update_clip": "largest root mean square of a parameter's update; 0: no clipping",
                "parameter_scale": "updates are multiplied by the parameter's root mean square",
            },
            state=_factored,
            passes=6,  # the gradient for means, for the update and for its clipping; its scale
            elementwise=False,
            # with parameter_scale a direction has the parameter's size already
            mup=lambda s, rate, size: rate / size if s.parameter_scale else rate,
            fixed=("factored_size",),
        ),
        OptimizerRecord(
            "muon",
            "Jordan 2024, https://kellerjordan.github.io/posts/muon, with the rates of Liu et al. "
            "2025, arXiv:2502.16982, as optax.contrib.muon has it; adamw with Nesterov's momentum "
            "for embedding, head, norms and biases",
            make=_muon,
            reads={
                "momentum": "decay of the momentum of matrices",
                "muon_iterations": "Newton-Schulz iterations that orthogonalize a matrix",
                "muon_rms": "root mean square of a matrix's update over the learning rate",
                "adamw_learning_rate": "peak learning rate of all but matrices; 0: learning_rate",
                "b1": "decay of the first moment of all but matrices",
                "b2": "decay of the second moment of all but matrices",
                "epsilon": "added to the root of the second moment, and to a matrix's norm",
            },
            # the momentum, and nothing where `rest` has its second moment
            state=lambda shape, settings: (*copies(1, shape, settings), ()),
            passes=6,  # the gradient for the momentum, the direction there and back
            elementwise=False,
            momentum=("mu", lambda s: 1 - s.momentum),
            # a direction's spectral norm grows with the root of the width
            mup=lambda settings, rate, size: size,
            rest=OptimizerRecord(
                "adamw",
                "with Nesterov's momentum, as optax.contrib.muon has it",
                make=functools.partial(_adam, nesterov=True),
                reads={},
                state=functools.partial(copies, 2),
                passes=3,
                momentum=("mu", lambda s: 1 - s.b1),
            ),
        ),
    )
}


def record_of(name: str) -> OptimizerRecord:
    """The record of `optimizer.name`. Raises OwnCodeError for one's own that is none."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    record = own_code.load(name)
    if not isinstance(record, OptimizerRecord):
        raise own_code.OwnCodeError(
            "is no OptimizerRecord (jaxtrain.config.optimizers), but of type "
            f"{type(record).__name__}"
        )
    return record


READS = tuple(dict.fromkeys(name for o in OPTIMIZERS.values() for name in o.reads))


def meaning(setting: str) -> str:
    """The help of a setting that only some optimizers read."""
    return "; ".join(
        f"{o.name}: {o.reads[setting]}" for o in OPTIMIZERS.values() if setting in o.reads
    )
