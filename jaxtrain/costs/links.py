"""Links between the devices of a layout: how long collectives over its mesh axes take."""

import dataclasses
import math

from jaxtrain.costs.hardware import Hardware, Tier
from jaxtrain.costs.layout import Layout


@dataclasses.dataclass(frozen=True)
class Links:
    """Those of a kind of devices, with a layout on them."""

    layout: Layout
    hardware: Hardware

    def collective(self, axis: str, size: float, rounds: int = 1, one_link: float = 0.0) -> float:
        """Seconds of a ring's collective over a mesh axis: `rounds` of (n - 1)/n of `size` bytes, the array's on a device when whole.

        Devices that share their cores have one memory, in which a sum takes as long as a message, of any number of them. An axis whose
        devices lie in several islands is bound by the links between them; those of its devices that share an island send
        over as many links, or with `one_link` over one, of which they reach that part.
        """
        count, apart = self.layout.neighbours(axis)
        if count == 1:
            return 0.0
        tier = self.tier(axis)
        if self.hardware.alone > 1:
            return rounds / 2 * (size / tier.bytes_per_s + 1e-6 * tier.latency_us)
        inside = self.hardware.tiers[0]
        bytes_per_s = tier.bytes_per_s
        if tier is not inside and one_link:
            bytes_per_s *= one_link
        elif tier is not inside:
            bytes_per_s = min(bytes_per_s * self._near(count, apart), inside.bytes_per_s)
        hops = 1e-6 * tier.latency_us * math.log2(count) * 2
        return rounds * (size * (count - 1) / count / bytes_per_s + hops)

    def exchange(self, axis: str, size: float) -> float:
        """Seconds of an all-to-all over a mesh axis, in which a device sends each of the n an n-th of its `size` bytes: to those of its own
        island over the links inside, and at the same time to the others over its own adapter."""
        count, apart = self.layout.neighbours(axis)
        tier = self.tier(axis)
        if count == 1:
            return 0.0
        if self.hardware.alone > 1:
            return 0.5 * (size / tier.bytes_per_s + 1e-6 * tier.latency_us)
        inside = self.hardware.tiers[0]
        near = count if tier is inside else self._near(count, apart)
        seconds = max(size * (near - 1) / count / inside.bytes_per_s, size * (count - near) / count / tier.bytes_per_s)
        return seconds + 1e-6 * tier.latency_us * math.log2(count) * 2

    def around(self, axis: str, size: float, rounds: int) -> float:
        """Seconds in which each device passes `size` bytes on to the next one so often; over the border of an island one adapter does."""
        tier = self.tier(axis)
        return rounds * (size / tier.bytes_per_s + 1e-6 * tier.latency_us)

    def _near(self, count: int, apart: int) -> int:
        """Neighbours of an axis that share an island of the first tier."""
        return max(1, _together(self.hardware.tiers[0], count * apart) // apart)

    def tier(self, axis: str) -> Tier:
        """The links that bind an axis: the fastest ones that join all devices of the layout, or all that the axis goes over wherever they
        lie, for some of them lie in two islands where the axis does."""
        count, apart = self.layout.neighbours(axis)
        span, tiers = count * apart, self.hardware.tiers
        holds = lambda tier: not tier.devices or self.layout.devices <= tier.devices or _together(tier, span) == span
        return next((tier for tier in tiers if holds(tier)), tiers[-1])


def _together(tier: Tier, span: int) -> int:
    """Of `span` devices in a row, how many share an island at least, wherever they begin: rows follow each other without gaps. Of an island
    whose number is no power of two a job may take as many as that: 64 of 72."""
    return max(math.gcd(span, tier.devices), math.gcd(span, 2 ** int(math.log2(tier.devices)))) if tier.devices else span
