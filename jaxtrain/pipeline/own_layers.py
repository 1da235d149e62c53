"""The check of a layer of one's own before a run: it is constructed and called once, on shapes
alone, in some milliseconds. Nothing is compiled, and no device is used."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config import DataConfig, MeshConfig, PrecisionConfig, ResolvedModel
from jaxtrain.config.own_code import OwnCodeError
from jaxtrain.config.rules.rules import Violation, divisors, near, values_for
from jaxtrain.config.sizes import MX_BLOCK
from jaxtrain.devices.mesh import AbsentDevice, traced_for
from jaxtrain.models.own_module import OwnModule, SettingsError, constructor_of, errors_of
from jaxtrain.parallel.fp8 import fp8_of
from jaxtrain.runtime.layers.saved_bytes import as_used, examples

SEQUENCES = 2  # of the batch in the check


def violations(
    model: ResolvedModel, data: DataConfig, mesh: MeshConfig, precision: PrecisionConfig
) -> Iterator[Violation]:
    """The faults of `model.block` or `model.mixer`, of which the first is certain."""
    path, text = ("model.block", model.block) if model.block else ("model.mixer", model.mixer)
    tokens = data.sequence_length // max(mesh.context, 1)
    try:
        _try(model, precision, tokens, not data.attend_across_documents)
    except SettingsError as error:
        nearest = [{"model.block_settings": error.nearest}] if error.nearest else []
        yield Violation("model.block_settings", str(error), nearest)
        return
    except OwnCodeError as error:
        yield Violation(path, str(error))
        return
    construct = constructor_of(model)
    if mesh.context > 1 and getattr(construct.cls, "context", "") != "local":
        yield Violation(
            "mesh.context",
            f"splits sequences, and {path}={text!r} has no rule for that, such as context = "
            "'local' in its class if a token's output reads no other token",
            [{"mesh.context": 1}],
        )
    blocks = MX_BLOCK if precision.matmul == "mxfp8" else 1
    for name, spec in construct.specs.items():
        for size, shards in zip(spec.shape, spec.shards(mesh.model), strict=True):
            if size % shards:
                yield Violation(
                    "mesh.model",
                    f"does not divide the {size} of {'.'.join(name)} in {path}={text!r}",
                    values_for("mesh.model", near(mesh.model, divisors(size))),
                )
            elif spec.product and size % (shards * blocks):
                yield Violation(
                    "precision.matmul",
                    f"has blocks of {MX_BLOCK} numbers, which do not divide the {size // shards} "
                    f"of {'.'.join(name)} on a device",
                    values_for("precision.matmul", ["fp8", "compute"]),
                )


@functools.lru_cache(2**8)
def _try(model: ResolvedModel, precision: PrecisionConfig, tokens: int, documents: bool) -> None:
    """Constructs and calls the module. Raises OwnCodeError."""
    construct = constructor_of(model)
    compute, fp8 = jnp.dtype(precision.compute), fp8_of(precision, False)
    x = jax.ShapeDtypeStruct((SEQUENCES, tokens, model.width), compute)

    def call(x: jax.Array, extra) -> None:
        values = [
            as_used(spec, jnp.zeros(spec.shape), compute, fp8) for spec in construct.specs.values()
        ]
        module = OwnModule(model).module(values)
        state = lambda: {
            path: (type(node).__name__, node.get_raw_value())
            for path, node in nnx.iter_graph(module)
            if isinstance(node, nnx.Variable)
        }
        before = state()
        with errors_of(construct.cls, "cannot be called with (x, positions, segments)"):
            y = module(x, *extra)
        for path, (kind, value) in state().items():
            if path not in before or before[path][1] is not value:
                name = ".".join(map(str, path))
                raise OwnCodeError(
                    f"changes {name} ({kind}) in its call: a layer has no state and draws no "
                    "random numbers"
                )
        if not isinstance(y, jax.Array):
            raise OwnCodeError(f"returns a {type(y).__name__}, and not an array like its input")
        if y.shape != x.shape:
            raise OwnCodeError(f"returns {list(y.shape)} for an input of {list(x.shape)}")
        if y.dtype != x.dtype:
            raise OwnCodeError(
                f"returns {y.dtype} for an input of {x.dtype} (precision.compute): end with "
                ".astype(x.dtype)"
            )

    with traced_for(AbsentDevice("cpu")):
        jax.eval_shape(call, x, examples(model, SEQUENCES, tokens, documents)[:2])
