"""The numbers of small published models, which depend on the names of tensors alone: transformers
(transformers_models.py) and jaxtrain compute with the same ones, and no file has to hold them.

Nothing here needs jax or torch.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SEQUENCES, LENGTH = 4, 33  # of a batch, the last token of each a target alone
PROMPTS = (5, 11)  # tokens of the prompts that are continued
CONTINUATION = 64  # tokens
ONE_PLUS = ("gemma2", "gemma3_text", "qwen3_next")  # families whose norms multiply by 1 + weight


def random(seed: int, name: str, shape: Sequence[int]) -> np.ndarray:
    """Float32 normal numbers that depend on seed, name and shape alone, whatever numpy's
    version."""
    generator = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode()))
    return generator.standard_normal(tuple(shape)).astype(np.float32)


def weights(
    seed: int, shapes: Mapping[str, Sequence[int]], model_type: str = ""
) -> dict[str, np.ndarray]:
    """Tensors in which nothing is zero or one, float32. Scales are around 1; a matrix gives numbers
    of the size of its inputs."""
    centre = np.float32(model_type not in ONE_PLUS)

    def tensor(name: str, shape: Sequence[int]) -> np.ndarray:
        noise = random(seed, name, shape)
        if len(shape) > 1:
            return np.float32(0.8 / np.sqrt(shape[-1])) * noise
        return centre * np.float32(name.endswith(".weight")) + np.float32(0.3) * noise

    return {name: tensor(name, shape) for name, shape in shapes.items()}


def tokens(vocabulary: int) -> np.ndarray:
    """Token ids, int64 [SEQUENCES, LENGTH]."""
    return np.random.RandomState(0).randint(0, vocabulary, (SEQUENCES, LENGTH)).astype(np.int64)


def tokens_of(config: Any) -> np.ndarray:
    """The tokens of a run's config, int32."""
    return tokens(config.model.vocab_size).astype(np.int32)


def digest(gradients: Mapping[str, np.ndarray]) -> np.ndarray:
    """The norm of each gradient and its projection on random numbers of norm 1, in the order of
    names, float64 [names, 2]. A tensor of NaN, which is no parameter, gives NaN."""

    def figures(name: str) -> tuple[float, float]:
        gradient = np.asarray(gradients[name], np.float64)
        direction = random(0, f"direction of {name}", gradient.shape).astype(np.float64)
        along = (gradient * direction).sum() / np.sqrt((direction**2).sum())
        return float(np.sqrt((gradient**2).sum())), float(along)

    return np.array([figures(name) for name in sorted(gradients)])
