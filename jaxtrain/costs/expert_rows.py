"""Rows of experts: how many can arrive at a device. A token's choice of an expert is a row (parallel/experts.py)."""

import math

from jaxtrain.costs.layout import Layout
from jaxtrain.costs.transformer import Transformer


def room_of(tokens: int, choices: int, experts: int, devices: int, room: float) -> int:
    """Rows of experts that can arrive at one of `devices`, each with so many tokens of so many choices: all that can fall on it, or `room`
    times the mean, if that is fewer and not 0. A little more, so that large rooms are cut into equal tiles."""
    worst = devices * tokens * min(choices, experts // devices)
    bound = math.ceil(room * tokens * choices)
    step = 1 << max(bound.bit_length() - 7, 0)
    return min(worst, -(-bound // step) * step) if room else worst


def capacity_of(tokens: int, choices: int, experts: int, factor: float) -> int:
    """Positions of an expert for a sequence of so many tokens: `factor` times its share of the choices, at most one for each token."""
    return min(tokens, math.ceil(factor * tokens * choices / experts))


def rows_of(model: Transformer, layout: Layout) -> int:
    """Rows of a microbatch for which a device has room: by capacity where there is one, else by `expert_room`; 0 without experts."""
    if not model.experts:
        return 0
    tokens = model.sequence // layout.context
    if model.capacity_factor:
        most = capacity_of(model.sequence, model.experts_per_token, model.experts, model.capacity_factor)
        return model.experts * layout.microbatch * min(most, tokens)
    return room_of(layout.microbatch * tokens, model.experts_per_token, model.experts, layout.expert, model.expert_room)
