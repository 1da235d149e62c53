"""Collectives over mesh axes, and how long they take over the links between the devices of a
layout."""

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

from jaxtrain.planner.layer import torus_links
from jaxtrain.planner.layer.hardware import Hardware, Tier
from jaxtrain.planner.layer.layout import AXES, Layout

GATHER, SCATTER, SUM = "all-gather", "reduce-scatter", "all-reduce"
EXCHANGE, PERMUTE, RAGGED = "all-to-all", "collective-permute", "ragged-all-to-all"
REPLICA, DATA, STAGE, CONTEXT, EXPERT, MODEL = AXES


class Collective(NamedTuple):
    """`times` collectives over mesh `axes`, of `size` bytes each, among `devices`, each `stride`
    after the one before; 0: among all devices along the axes."""

    kind: str
    axes: tuple[str, ...]
    size: float
    times: float = 1
    devices: int = 0
    stride: int = 1


def sent(kind: str, size: float, devices: int) -> float:
    """Bytes that a device sends by the ring algorithms: (n − 1)/n of the size, twice that for an
    all-reduce, all of it in a permute."""
    if kind == PERMUTE:
        return size
    return size * (devices - 1) / devices * (2 if kind == SUM else 1)


def alike(
    kind: str,
    axis: str,
    sizes: Iterable[float],
    times: float = 1,
    devices: int = 0,
) -> list[Collective]:
    """Collectives over one axis, one for each of these sizes."""
    return [Collective(kind, (axis,), size, times, devices) for size in sizes]


class Route(NamedTuple):
    """The links that collectives over some axes use.

    axis:     the outermost of the axes
    devices:  along them together
    tier:     the slowest links that are crossed
    near:     devices of a ring that share an island, beyond which the last tier begins
    ring:     bytes a second that a device sends in a ring
    exchange: seconds of an all-to-all for each byte that a device has
    """

    axis: str
    devices: int
    tier: Tier
    near: int
    ring: float
    exchange: float


@dataclasses.dataclass(frozen=True)
class Links:
    """The links between the devices of a layout."""

    layout: Layout
    hardware: Hardware
    _routes: dict[tuple[tuple[str, ...], int, int], Route] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def seconds(self, collectives: Iterable[Collective], one_link: float = 0.0) -> dict[str, float]:
        """Seconds by mesh axis. Several axes together count for the outermost.

        one_link: the part of one adapter's bandwidth that a ring between islands reaches; 0: its
                  devices in an island use all their adapters together
        """
        by_axis: dict[str, float] = {}
        for kind, axes, size, times, devices, stride in collectives:
            route = self._routes.get((axes, devices, stride)) or self.route(axes, devices, stride)
            if route.devices > 1 and size and times:
                each = self._each(route, kind, size, one_link)
                by_axis[route.axis] = by_axis.get(route.axis, 0.0) + times * each
        return by_axis

    def _each(self, route: Route, kind: str, size: float, one_link: float) -> float:
        """Seconds of one collective.

        A permute goes one way, through one adapter or over one of the two links of a torus' ring.
        In an all-to-all a device sends to neighbours in its island over the links inside, and at
        the same time to the others over its adapter. A ring between islands is bound by the slower
        links. Simulated devices share one memory, in which a sum takes as long as a message.
        """
        tier, passes = route.tier, 2 if kind == SUM else 1
        latency, bytes_per_s = 1e-6 * tier.latency_us, tier.bytes_per_s
        if kind == PERMUTE:
            return size / bytes_per_s * (2 if tier.sides else 1) + latency
        if self.hardware.alone > 1:
            return passes * (size / bytes_per_s + latency) / 2
        latency *= 2 * math.log2(route.devices)
        if kind in (EXCHANGE, RAGGED):
            return size * route.exchange + latency
        alone = one_link and tier is not self.hardware.tiers[0]
        bytes_per_s = bytes_per_s * one_link if alone else route.ring
        return passes * (size * (1 - 1 / route.devices) / bytes_per_s + latency)

    def islands(self, axis: str) -> int:
        """The islands over which an axis lies, between which are the links of the last tier."""
        route = self.route((axis,))
        return route.devices // route.near if route.devices > 1 else 1

    def route(self, axes: tuple[str, ...], among: int = 0, apart: int = 1) -> Route:
        """The links that collectives over these axes use. A ring that does not fit an island, or
        does not divide it, crosses to the next tier on some device, and the entire ring waits for
        that one.

        among, apart: of one axis, only so many of its devices, each that far from the one before
        """
        layout, tiers = self.layout, self.hardware.tiers
        last, devices, outermost = 0, 1, ""
        sizes = tuple((axis, getattr(layout, axis)) for axis in reversed(AXES))
        near = [1] * len(tiers)  # devices of a ring that share an island of each tier
        for axis in axes:
            count, stride = layout.neighbours(axis)
            if count == 1:
                continue
            count, stride = among or count, stride * apart
            span = count * stride
            fits = [layout.devices <= t.devices or _sharing(t, span) == span for t in tiers]
            last = max(last, fits.index(True) if any(fits) else len(tiers) - 1)
            near = [
                n * max(1, _sharing(t, span) // stride) for n, t in zip(near, tiers, strict=True)
            ]
            devices *= count
            outermost = outermost or axis
        near[last:] = [devices] * (len(tiers) - last)
        ring, exchange, cores = math.inf, 0.0, 1  # the devices of a chip share its links
        for tier, below, joined in zip(tiers, (1, *near), near, strict=False):
            if joined > below:
                chips = min(layout.devices, tier.devices or layout.devices) // cores
                shares = torus_links.shares(chips, tier.sides, cores, sizes) if tier.sides else {}
                links, crossing = zip(*(shares.get(axis, (0, 0)) for axis in axes), strict=True)
                ring = min(ring, tier.bytes_per_s * (sum(links) or 1) * below)
                far = max(crossing) or (joined - below) / devices
                exchange = max(exchange, far / tier.bytes_per_s)
            cores = tier.devices
        route = Route(outermost, devices, tiers[last], near[-2:][0], ring, exchange)
        self._routes[axes, among, apart] = route
        return route


def _sharing(tier: Tier, span: int) -> int:
    """The least number of `span` consecutive devices that share an island, over all starting
    positions. A job may take a power of two of an island with another number: 64 of 72."""
    power = 1 << max(0, tier.devices.bit_length() - 1)
    # 0 devices stand for any number: all of them share it, and gcd(span, 0) is span
    return max(math.gcd(span, tier.devices), math.gcd(span, power))
