"""Maximal update parametrisation (μP; Yang et al. 2022, arXiv:2203.03466): initial values and rates
by parameter, with which a model of any width trains with the settings that are best for its base
model. The base model has width `model.mup_base_width`, and its other sizes in proportion.

With r, this model's width by the base model's, the paper's table 8 has factors on

    a parameter                             initial values   Adam's updates   its result
    inputs and outputs grow with the width  1/sqrt(r)        1/r
    inputs alone: a router                  1/r              1/r                          (table 3)
    embedding, vectors                      1                1
    head                                    1                1                1/r
    scores, where heads grow in size        as other matrices                 sqrt(base size/size)

A factor on a result is one on the initial values and updates of a parameter by which the result is
multiplied (the paper's lemma J.1): the last norm's scale for the head, tied or not, and the query
matrix, or its norm, for scores. So the model's function stays the same, and so does every export of
its parameters. A router is a layer of outputs, as Małaśnicki et al. 2025 (arXiv:2508.09752) have
it. The factors on other optimizers' updates are in config/optimizers.py.

Weights decay by the learning rate without these factors, so that a parameter forgets in equally
many steps at all widths (Wang & Aitchison 2024, arXiv:2405.13698).
"""

import dataclasses
import math

import jax

from jaxtrain.config import ResolvedModel
from jaxtrain.models.spec import Spec, is_spec

# Logical axes whose dimensions grow with the width.
GROWING = frozenset(("width", "heads", "kv_heads", "mlp", "latent"))


def growth(cfg: ResolvedModel) -> float:
    """The width by that of the base model; 1 without one."""
    return cfg.width / (cfg.mup_base_width or cfg.width)


def score_multiplier(cfg: ResolvedModel) -> float:
    """The factor on queries by which scores shrink as 1/size of a key instead of 1/sqrt(size). A
    `model.attention_scale` of the user's own stays."""
    if not cfg.mup_base_width or cfg.attention_scale:
        return 1.0
    base = (cfg.mup_base_head_dim or cfg.head_dim) + cfg.rope_head_dim
    return math.sqrt(base / (cfg.head_dim + cfg.rope_head_dim))


def describe(cfg: ResolvedModel) -> list[str]:
    """A line about the base model, if there is one, for the start of a run."""
    head_dim = cfg.mup_base_head_dim or cfg.head_dim
    base = f"width {cfg.mup_base_width}, with heads of {head_dim}"
    return [f"μP: initial values and rates are those for {base}, carried over"] * (growth(cfg) != 1)


def parametrized(cfg: ResolvedModel, tree: dict) -> dict:
    """The Specs of a model, with the factors of matrices that follow from their axes."""
    ratio = growth(cfg)
    return jax.tree.map(lambda spec: _scaled(spec, ratio), tree, is_leaf=is_spec)


def _scaled(spec: Spec, ratio: float) -> Spec:
    inputs_grow, outputs_grow = (axis in GROWING for axis in ("", "", *spec.axes)[-2:])
    if not (spec.matrix and inputs_grow) or spec.std is None:
        return spec
    size = ratio ** (-0.5 if outputs_grow else -1.0)
    return dataclasses.replace(
        spec,
        std=spec.std * size,
        mup_size=spec.mup_size * size,
        mup_rate=spec.mup_rate / ratio,
    )
