"""What a step sends of parameters and their gradients: ZeRO's collectives, sums over what has the same parameters, DiLoCo's exchange."""

import dataclasses
import functools

from jaxtrain.costs.layout import Layout
from jaxtrain.costs.links import Links
from jaxtrain.costs.parts import Parts, beside
from jaxtrain.costs.program import Program

FLOAT32 = 4  # bytes


@dataclasses.dataclass(frozen=True)
class ParameterSends:
    """Of a device on the stage with most parameters.

    item:        bytes of a number that products read
    shards:      into how many ZeRO cuts what it shares out over `data`; 1 where `data` does not divide
    parameters:  of the device; `layers` of them are its layers', `experts` its experts', and `output` those of the matrix that makes logits
                 and of the positions' table
    rows:        bytes of the embedded tokens of a microbatch
    """

    layout: Layout
    program: Program
    links: Links
    item: int
    shards: int
    parameters: float
    layers: float
    experts: float
    output: float
    rows: float

    def zero_3(self, stage: Parts) -> Parts:
        """ZeRO-3's collectives: parameters for the forward and for the backward of each microbatch, and sums of gradients behind it.

        Our own program gathers in the type that it computes in, once more where R is an op of its own, and sends rows of the first table
        instead of all of it. stage: what they may stand beside.
        """
        layout, program = self.layout, self.program
        if layout.zero < 3 or self.shards == 1:
            return Parts()
        over = functools.partial(self.links.collective, "data", one_link=program.one_link)
        if not program.slots:
            parameters = self.parameters
            each = 2 * over(program.sent_weight * parameters) + over(program.sent_gradient * parameters)
            return beside("data", layout.microbatches * each, program.gather_overlap, stage.seconds)
        layers, table = self.layers, self.output
        read = layers * (3 if layout.stage > 1 and layout.remat == "full" else 2) + table
        each = over(program.sent_gradient * (layers + table)) + over(self.rows) * (1 if program.gathers_once else 2)
        gathers = over(self.item * self.parameters) if program.gathers_once else over(self.item * read) * layout.microbatches
        return beside("data", each * layout.microbatches + gathers, program.gather_overlap, stage.seconds)

    def sums(self, forward: float, backward: float) -> Parts:
        """Sums of gradients over `data`, `context`, `expert` and `replica`, and the gather of parameters that ZeRO has updated in parts.

        forward, backward: seconds of a microbatch, the last and the next one.
        """
        layout, program = self.layout, self.program
        parameters, parts = self.parameters, Parts()
        if layout.data > 1 and (layout.zero < 3 or self.shards == 1):
            each = self.links.collective("data", program.sent_gradient * parameters)
            sent_back = program.sent_weight if layout.zero and self.shards > 1 else program.sent_gradient
            back = self.links.collective("data", sent_back * parameters)
            often = layout.microbatches if layout.zero > 1 and self.shards > 1 else 1
            if often > 1 and program.slots:  # rows of the first table's gradient, as with stage 3
                each = self.links.collective("data", program.sent_gradient * (self.layers + self.output) + self.rows)
            parts += beside("data", each * often, program.data_overlap, backward * often)
            parts += beside("data", back, program.data_overlap, forward if layout.zero else backward)
        # A device's share of `data`'s sums goes on: over `context` all of it, over `expert` what is no expert's.
        for axis, numbers in (("context", parameters), ("expert", parameters - self.experts)):
            parts += self._summed(axis, numbers / layout.data)
        if program.inner_steps and layout.replica > 1:
            return parts + self._outer_exchange() * (1 / program.inner_steps)
        return parts + self._summed("replica", parameters / (self.shards if layout.zero else 1))

    def _outer_exchange(self) -> Parts:
        """Between replicas that train apart: a device sums its share with its like, and gathers the others' shares inside the replica."""
        layout, each = self.layout, self.links.collective
        whole = FLOAT32 * self.parameters
        parts = Parts({"replica": each("replica", whole / FLOAT32 * self.program.sent_outer / layout.data / layout.context, rounds=2)})
        if layout.data > 1 and (layout.zero < 3 or self.shards == 1):
            parts += Parts({"data": each("data", whole)})
        return parts + Parts({"context": each("context", whole / layout.data)} if layout.context > 1 else {})

    def _summed(self, axis: str, parameters: float) -> Parts:
        """A sum of so many parameters' gradients over an axis."""
        if getattr(self.layout, axis) == 1:
            return Parts()
        return Parts({axis: self.links.collective(axis, self.program.sent_gradient * parameters, rounds=2)})
