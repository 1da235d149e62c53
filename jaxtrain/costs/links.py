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
        elif tier is not inside and inside.devices > apart:
            bytes_per_s = min(bytes_per_s * max(1, min(count, inside.devices // apart)), inside.bytes_per_s)
        hops = 1e-6 * tier.latency_us * math.log2(count) * 2
        return rounds * (size * (count - 1) / count / bytes_per_s + hops)

    def tier(self, axis: str) -> Tier:
        """The links that bind an axis: those over all its devices, for some neighbours lie in two islands where the axis does."""
        return self.hardware.tier(math.prod(self.layout.neighbours(axis)))
