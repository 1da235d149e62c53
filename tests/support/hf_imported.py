"""A published model as plain parameters (small.py), in memory, and parameters or gradients by the
published names."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

from jaxtrain.checkpoint.restoring import expected_shapes, load_parameters
from jaxtrain.checkpoint.steps import Meta, read_meta
from jaxtrain.checkpoint.storage import nested
from jaxtrain.config import Config, replace
from jaxtrain.generation.sampling import Sampler, Sampling
from jaxtrain.hf.model_config import family_of, read_model
from jaxtrain.hf.run_config import read_published
from jaxtrain.hf.tensor_rules import PublishedTensor, TensorRule
from jaxtrain.models import transformer
from jaxtrain.training.parameter_layout import ParameterLayout
from support import hf_reference

PARAMETERS = "params/"
# One loss for all: that of the next token.
PLAIN_LOSS = {
    "model.balance_loss": 0.0,
    "model.z_loss": 0.0,
    "precision.compute": "float32",
}


@dataclasses.dataclass(frozen=True)
class Imported:
    """A published model: its resolved config, its tensors, and its parameters (plain)."""

    config: Config
    tensors: Sequence[PublishedTensor]
    plain: dict

    def published(self, plain: dict) -> dict[str, np.ndarray]:
        """Parameters, or their gradients, by the published names, float32."""
        arrays = {
            jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(array)
            for path, array in jax.tree_util.tree_leaves_with_path(plain)
        }
        result = {}
        for tensor in self.tensors:
            numbers = np.full(tensor.shape, np.nan, np.float32)
            for rule in tensor.rules:
                array, rows = arrays[rule.array], range(len(numbers))
                rule.publish(array[rule.region], rule.window(rows, array.shape), numbers, rows)
            result[tensor.name] = numbers
        return result


def fill(array: np.ndarray, rule: TensorRule, tensor: np.ndarray) -> None:
    """Writes a complete published tensor into its places of a stored array."""
    window = rule.covers([range(size) for size in array.shape[len(rule.index) :]])
    rule.store(tensor, [range(size) for size in tensor.shape], array[rule.region], window)


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Stored array → shape, of a resolved config's parameters."""
    return {
        name.removeprefix(PARAMETERS): shape
        for name, shape in expected_shapes(config).items()
        if name.startswith(PARAMETERS)
    }


def laid_out(values: Mapping[str, Any], **changes: Any) -> tuple:
    """(rules, tensors, shapes of the parameters) of a config.json."""
    family, model, _ = read_model(values, "config.json")
    config = replace(Config(model=model), {"data.sequence_length": 16} | changes).fill()
    shapes = parameter_shapes(config)
    return *family.layout(config.model, values, shapes), shapes


def imported(
    values: Mapping[str, Any],
    weights: Callable[[Mapping[str, Sequence[int]]], Mapping[str, np.ndarray]],
    changes: Mapping[str, Any],
) -> Imported:
    """The model of a config.json. Raises HfError for a config.json that is refused.

    weights: (published tensor → shape) → the tensors
    changes: settings by path, such as "mesh.stage"
    """
    family, model, _ = read_model(values, "config.json")
    config = replace(Config(model=model), PLAIN_LOSS | dict(changes)).fill()
    shapes = parameter_shapes(config)
    rules, tensors = family.layout(config.model, values, shapes)
    published = weights({tensor.name: tensor.shape for tensor in tensors})
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for rule in rules:
        fill(arrays[rule.array], rule, published[rule.tensor])
    return Imported(config, tensors, nested(arrays))


def imported_folder(folder: pathlib.Path, changes: Mapping[str, Any]) -> Imported:
    """The model of a folder with config.json and model.safetensors."""
    published = load_file(folder / "model.safetensors")
    return imported(read_published(folder).values, lambda shapes: published, changes)


def complete(
    values: Mapping[str, Any],
    weights: Callable[[Mapping[str, Sequence[int]]], Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """The tensors of a config.json's model, with those that a folder may have twice. weights: as in
    `imported`"""
    tensors: dict[str, np.ndarray] = {}

    def drawn(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
        tensors.update(weights(shapes))
        return tensors

    model = imported(values, drawn, {})
    copies = family_of(values, "config.json").copies(model.config.model, model.tensors)
    return tensors | {name: tensors[original.name] for name, original in copies.items()}


def restored(workdir: pathlib.Path) -> tuple[Config, ParameterLayout, dict]:
    """A run's resolved config, and the layout and parameters of its checkpoint of step 0."""
    checkpoints = workdir / "checkpoints"
    config = Meta.from_json(read_meta(checkpoints, 0)).stored_config()
    config = replace(config, {"precision.compute": "float32"})
    layout, params = load_parameters(checkpoints, 0, config.model, config.precision)
    return config, layout, params


def logits_of(config: Config, layout: ParameterLayout, params: dict) -> np.ndarray:
    """Float32 logits [B, T, V] of hf_reference's tokens."""
    tokens = hf_reference.tokens_of(config)[:, :-1]
    with jax.set_mesh(layout.mesh):
        logits = jax.jit(
            lambda params: transformer.logits(layout.parts, params, tokens, dtype=jnp.float32)
        )(params)
    return np.asarray(logits)[..., : config.model.vocab_size]


def continuations(config: Config, layout: ParameterLayout, params: dict) -> list[list[int]]:
    """Greedy continuations of hf_reference's prompts, with a cache."""
    tokens, sampler = hf_reference.tokens_of(config), Sampler(layout.parts, params)
    result = []
    for row, length in enumerate(hf_reference.PROMPTS):
        prompt = [int(token) for token in tokens[row, :length]]
        bursts = sampler.start(prompt, hf_reference.CONTINUATION, Sampling(temperature=0.0))
        result.append([int(token) for burst in bursts for token in burst[0]])
    return result


def gradient_errors(folder: pathlib.Path) -> dict[str, float]:
    """Published tensor → the largest difference between transformers' gradient of the loss and
    jaxtrain's, as a fraction of the largest number of the tensor's gradient. Where that is below
    1e-3 of the model's largest one, it is a fraction of that: what should be nothing is rounding.

    folder: of transformers_models.py
    """
    model = imported_folder(folder, {"data.sequence_length": hf_reference.LENGTH - 1})
    parts, tokens = transformer.build(model.config.model), hf_reference.tokens_of(model.config)

    @jax.jit
    @jax.grad
    def gradients(params):
        logits = transformer.logits(parts, params, tokens[:, :-1])[..., : parts.cfg.vocab_size]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    expected = load_file(folder / "gradients.safetensors")
    got = model.published(gradients(model.plain))
    assert got.keys() == expected.keys()
    largest = {name: np.abs(g).max() for name, g in expected.items() if not np.isnan(g).any()}
    assert all("correction_bias" in name for name in expected.keys() - largest.keys())
    floor = 1e-3 * max(largest.values())
    return {
        name: float(np.abs(got[name] - expected[name]).max() / max(size, floor))
        for name, size in largest.items()
    }
