"""A kind of device's figures from measured times, by least squares: what a hardware file says of products and of links.

    product      seconds = launch + flops/peak · (1 + half_m/m + half_n/n + half_k/k)
    collective   seconds = rounds · ((n - 1)/n · bytes / bandwidth + 2 log2(n) · latency), with links
                 seconds = rounds / 2 · (bytes / bandwidth + latency), in one memory: as long for a sum as for a message, of any number

Both are sums of known terms with factors that are not negative; the relative errors are squared, for times differ by four orders of
magnitude. numpy alone.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np

from jaxtrain.costs.hardware import FIGURES, Matmul, Tier

LEAST_PART = 0.1  # of a time, when what surrounds it is taken off: it was measured apart, and may come out longer


@dataclasses.dataclass(frozen=True)
class Product:
    """Seconds of [m, k] · [k, n] on a device."""

    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclasses.dataclass(frozen=True)
class Collective:
    """Seconds of a collective over so many devices, of an array that has so many bytes on a device when whole.

    rounds: 1 for a gather or a scatter, 2 for a sum, which is both; 0 for a message to a neighbour
    one_memory: the devices are simulated ones, which share it
    """

    devices: int
    bytes: float
    rounds: int
    seconds: float
    one_memory: bool = False

    def terms(self) -> tuple[float, float]:
        """What bandwidth divides, and what latency multiplies."""
        if not self.rounds:
            return self.bytes, 1.0
        if self.one_memory:
            return self.rounds / 2 * self.bytes, self.rounds / 2
        n = self.devices
        return self.rounds * self.bytes * (n - 1) / n, self.rounds * 2 * math.log2(n)


@dataclasses.dataclass(frozen=True)
class Fit:
    """Factors of a sum's terms, and the median relative error of the sum beside what was measured."""

    factors: tuple[float, ...]
    error: float


def without(seconds: float, around: float) -> float:
    """A time without what surrounds it, a call or a launch, which was measured apart."""
    return max(seconds - around, LEAST_PART * seconds)


def fit(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """The factors, none below 0, with which sums of terms come closest to measured seconds: least squares of the relative errors.

    terms: a row for each measurement. Every subset of the terms is solved, for there are few.
    """
    rows = np.asarray(terms, float) / np.asarray(seconds, float)[:, None]
    scales = np.abs(rows).max(0)
    scales[scales == 0] = 1.0
    rows = rows / scales
    best, least = np.zeros(rows.shape[1]), math.inf
    for size in range(1, rows.shape[1] + 1):
        for chosen in itertools.combinations(range(rows.shape[1]), size):
            found = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)), rcond=None)[0]
            if (found < 0).any():
                continue
            factors = np.zeros(rows.shape[1])
            factors[list(chosen)] = found
            squares = float(((rows @ factors - 1) ** 2).sum())
            if squares < least:
                best, least = factors, squares
    return Fit(tuple(float(factor) for factor in best / scales), statistics.median(abs(float(e)) for e in rows @ best - 1))


def products(measured: Sequence[Product], launch: float) -> tuple[float, Matmul, float]:
    """(operations a second of a product of any size, the part of that which sizes leave, median relative error). launch: seconds of an
    operation that does nothing."""
    seconds = [without(product.seconds, launch) for product in measured]
    rows = [[p.flops * factor for factor in (1.0, 1 / p.m, 1 / p.n, 1 / p.k)] for p in measured]
    found = fit(rows, seconds)
    first = found.factors[0] or min(s / p.flops for s, p in zip(seconds, measured, strict=True))  # all of it by their sizes
    m, n, k = (factor / first for factor in found.factors[1:])
    return 1 / first, Matmul(1.0, (m, n, k)), found.error


def links(measured: Sequence[Collective], name: str, devices: int) -> tuple[Tier, float]:
    """The tier that joins the devices of these collectives, and the median relative error; all of its bandwidth is reached."""
    found = fit([collective.terms() for collective in measured], [collective.seconds for collective in measured])
    per_byte, latency = found.factors
    fastest = FIGURES["gb_per_s"][1]  # where no byte took time
    return Tier(name, devices, min(fastest, 1e-9 / per_byte) if per_byte else fastest, 1.0, 1e6 * latency), found.error
