"""The source of each sequence of a mixture, by closed form. No jax.

Training sequences are numbered through all batches. A `Segment` is a part of them with constant
weights, which are multiples of 1/PARTS. Its sources follow a table of PARTS entries over and over,
so the source of sequence i, and how many of that source come before it, take two look-ups:

    weights 1/2, 1/4, 1/4    table  a b a c      source of sequence i:   table[i mod PARTS]

The table is the schedule of Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32,
1980): with S sources, source k of weight w has come w·n times among the first n sequences, to
within 1 − 1/(2S − 2), for each n. Its (j+1)-th sequence is due between the first n with
w·n ≥ j + δ and the last one with w·n ≤ j + 1 − δ, δ = 1/(2S − 2); the earliest due date goes
first.
"""

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from jaxtrain.config.groups.mixture_settings import PARTS


def in_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights, at least one of them positive, as numbers of PARTS whose sum is PARTS: the nearest
    ones by the largest remainders. A positive weight has 1 at least."""
    exact = [Fraction(weight) for weight in weights]
    parts = [0] * len(exact)
    others, left = {k for k, weight in enumerate(exact) if weight}, PARTS
    total = sum(exact, Fraction(0))
    while tiny := {k for k in others if exact[k] * left < total}:
        for k in tiny:
            parts[k] = 1
        others, left = others - tiny, left - len(tiny)
        total -= sum(exact[k] for k in tiny)
    shares = {k: exact[k] * left / total for k in sorted(others)}
    for k, share in shares.items():
        parts[k] = math.floor(share)
    largest_remainders = sorted(shares, key=lambda k: parts[k] - shares[k])
    for k in largest_remainders[: PARTS - sum(parts)]:
        parts[k] += 1
    return tuple(parts)


@functools.lru_cache(64)
def make_table(parts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The table of weights as `in_parts` returns them, one period of a mixture: [PARTS] uint16, the
    source of each entry, and the number of earlier entries of the same source."""
    active = np.flatnonzero(parts)
    weights = np.array(parts)[active]
    unit = max(1, 2 * len(active) - 2)  # 1/δ
    source = np.repeat(active, weights)
    weight = np.repeat(weights, weights) * unit
    number = np.arange(PARTS) - np.repeat(np.cumsum(weights) - weights, weights)  # of its source's
    first = -(-PARTS * (number * unit + 1) // weight)
    due = PARTS * ((number + 1) * unit - 1) // weight
    by_first = np.argsort(first, kind="stable")
    jobs = (due * PARTS + source)[by_first].tolist()
    released = np.searchsorted(first[by_first], np.arange(1, PARTS + 1), "right").tolist()
    waiting: list[int] = []
    chosen, done = [], 0
    for count in released:
        for job in jobs[done:count]:
            heapq.heappush(waiting, job)
        done = count
        chosen.append(heapq.heappop(waiting) % PARTS)
    sources = np.array(chosen, np.uint16)
    before = np.empty(PARTS, np.uint16)
    before[np.argsort(sources, kind="stable")] = number
    return sources, before


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """Sequences from number `first` on, up to the next segment. counts: of each source before
    `first`; parts: the weights, () where no source is left."""

    first: int
    counts: tuple[int, ...]
    parts: tuple[int, ...]

    def draw(self, number: int) -> tuple[int, int]:
        """The source of a sequence, and the number of its sequences before this one."""
        periods, at = divmod(number - self.first, PARTS)
        sources, before = make_table(self.parts)
        source = int(sources[at])
        return source, self.counts[source] + periods * self.parts[source] + int(before[at])

    def counts_at(self, number: int) -> tuple[int, ...]:
        """The sequences of each source before this number."""
        periods, at = divmod(number - self.first, PARTS)
        sources, _ = make_table(self.parts)
        begun = np.bincount(sources[:at], minlength=len(self.parts))
        return tuple(
            count + periods * part + some
            for count, part, some in zip(self.counts, self.parts, begun.tolist(), strict=True)
        )

    def number_at(self, source: int, count: int) -> int:
        """The number after that of the sequence with which a source has `count`, more than before
        the segment."""
        periods, at = divmod(count - self.counts[source] - 1, self.parts[source])
        places = np.flatnonzero(make_table(self.parts)[0] == source)
        return self.first + periods * PARTS + int(places[at]) + 1
