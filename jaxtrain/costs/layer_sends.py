"""What the ops of a layer send: collectives over `model`, `context` and `expert`, by op. Weights and their gradients are not among them."""

import dataclasses

from jaxtrain.costs.layout import Layout
from jaxtrain.costs.links import Links
from jaxtrain.costs.parts import Parts, beside
from jaxtrain.costs.program import Program
from jaxtrain.costs.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class LayerSends:
    """Of a microbatch of so many `tokens` on the devices of `model` together.

    item:   bytes of an activation's number
    unread: part of the layers whose output R does not make, for nobody reads it
    """

    model: Transformer
    layout: Layout
    program: Program
    links: Links
    tokens: float
    item: int
    unread: float

    def of(self, op: str, dense: bool) -> Parts:
        """Seconds of F, R, B or W of one layer, where the layout has that op; dense: without experts where the others have them."""
        return self._model(op) + self._context(op) + self._experts(op, dense)

    def _model(self, op: str) -> Parts:
        """Tensor parallelism's: four of [tokens, width], gathered and scattered or summed, which is the same number of bytes.

        Of latent attention our own program gathers the latents before heads. Its W gathers what the two products read, unless R has
        gathered that in the same op.
        """
        model, layout, ours = self.model, self.layout, self.program.slots
        if layout.model == 1 or (op == "W" and (not ours or self._one_backward())):
            return Parts()
        rounds = 2 if op == "W" else 4
        read = (model.query_rank or model.width) + model.kv_rank + model.rope_dim if model.mla and ours else model.width
        size = self.item * self.tokens
        seconds = self.links.collective("model", size * (read + (rounds - 1) * model.width) / rounds, rounds)
        if op == "R":
            seconds -= self.unread * self.links.collective("model", size * model.width)
        return beside("model", seconds, self.program.model_overlap)

    def _one_backward(self) -> bool:
        """Whether R, B and W of our own program are one op, in which what R has gathered is still there."""
        return self.layout.stage == 1 and self.layout.remat == "full"

    def _context(self, op: str) -> Parts:
        """Keys and values of the whole sequence, gathered."""
        model, layout = self.model, self.layout
        if layout.context == 1 or op == "W":
            return Parts()
        size = self.item * layout.microbatch * model.sequence * 2 * model.kv_heads * model.head_dim / layout.model
        return Parts({"context": self.links.collective("context", size)})

    def _experts(self, op: str, dense: bool) -> Parts:
        """Rows to their experts and back. In our own program each device of `model` sends all of them, R brings back no output that nobody
        reads, and W sends again what a selective recomputation does not keep."""
        model, layout, ours = self.model, self.layout, self.program.slots
        if layout.expert == 1 or dense or not model.experts:
            return Parts()
        ways = {"R": 2 - self.unread, "W": 1 if ours and layout.remat == "selective" else 0}.get(op, 2)
        size = self.item * self.tokens * model.experts_per_token * model.width / (1 if ours else layout.model)
        return Parts({"expert": ways * self.links.exchange("expert", size)}) if ways else Parts()
