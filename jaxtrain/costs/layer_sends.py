"""What the ops of a layer send: collectives over `model`, `context` and `expert`, by op. Weights and their gradients are not among them."""

import dataclasses

from jaxtrain.costs.layout import Layout
from jaxtrain.costs.links import Links
from jaxtrain.costs.parts import Parts, beside
from jaxtrain.costs.program import Program
from jaxtrain.costs.transformer import Transformer

FLOAT32 = 4  # bytes


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

    def of(self, op: str, dense: bool, attention: float) -> Parts:
        """Seconds of F, R, B or W of one layer, where the layout has that op. dense: without experts where the others have them; attention:
        seconds of the op's attention."""
        return self._model(op) + self._context(op, attention) + self._experts(op, dense)

    def _model(self, op: str) -> Parts:
        """Tensor parallelism's: four of [tokens, width], gathered and scattered or summed, which is the same number of bytes.

        Of latent attention our own program gathers the latents before heads. Its W gathers what the two products read, unless R has
        gathered that in the same op, and sums the gradients of the matrices that make latents.
        """
        model, layout, ours = self.model, self.layout, self.program.slots
        if layout.model == 1 or (op == "W" and not ours):
            return Parts()
        latents = model.query_rank + model.kv_rank + model.rope_dim if model.mla and ours else 0
        sums = self.links.collective("model", self.item * model.width * latents, rounds=2) if op == "W" and latents else 0.0
        if op == "W" and self._one_backward():
            return Parts({"model": sums})
        rounds = 2 if op == "W" else 4
        read = latents + (0 if latents and model.query_rank else model.width)
        size = self.item * self.tokens
        seconds = sums + self.links.collective("model", size * (read + (rounds - 1) * model.width) / rounds, rounds)
        if op == "R":
            seconds -= self.unread * self.links.collective("model", size * model.width)
        return beside("model", seconds, self.program.model_overlap)

    def _one_backward(self) -> bool:
        """Whether R, B and W of our own program are one op, in which what R has gathered is still there."""
        return self.layout.stage == 1 and self.layout.remat == "full"

    def _context(self, op: str, attention: float) -> Parts:
        """Of attention over a split sequence, by `program.context_by`.

        all_gather  keys and values of the whole sequence; B scatters their gradients, too, and gathers again what no R has gathered
        ring        the same in messages to the next device, which go beside attention; the gradients go round as well, in 32 bits
        ulysses     queries, keys, values and the result, each exchanged for heads; a selective recomputation exchanges once more

        Of other programs B is taken to gather what F does.
        """
        layout, mode, links = self.layout, self.program.context_by, self.links
        selective = layout.remat == "selective"
        if layout.context == 1 or (op == "W" and not (mode == "ulysses" and selective)):
            return Parts()
        keys, queries = self._of_heads()
        if mode == "ulysses":
            result = queries * self.model.output_dim / (self.model.score_dim + self.model.output_dim)
            again = queries + keys - result if selective else 0.0
            return Parts({"context": links.exchange("context", {"B": queries + keys + again, "W": result}.get(op, queries + keys))})
        there = int(op == "B" and self._one_backward())  # what R has brought
        if mode == "ring":
            rounds = layout.context - 1 - there
            seconds = links.around("context", keys, rounds)
            if op == "B":
                seconds += links.around("context", keys * FLOAT32 / self.item, layout.context)
            return beside("context", seconds, 0.0 if links.hardware.alone > 1 else 1.0, attention)
        ways = 2 - there if op == "B" and self.program.slots else 1
        return Parts({"context": ways * links.collective("context", keys * layout.context)})

    def _of_heads(self) -> tuple[float, float]:
        """Bytes of a device's keys with their values, and of its queries with what attention makes of them."""
        model, layout = self.model, self.layout
        each = self.item * layout.microbatch * model.sequence / layout.context * (model.score_dim + model.output_dim)
        return each * max(model.kv_heads / layout.model, 1.0), each * model.heads / layout.model

    def _experts(self, op: str, dense: bool) -> Parts:
        """Rows to their experts and back. In our own program each device of `model` sends all of them, R brings back no output that nobody
        reads, and W sends again what a selective recomputation does not keep. The busiest device's, for which the others wait."""
        model, layout, ours = self.model, self.layout, self.program.slots
        if layout.expert == 1 or dense or not model.experts:
            return Parts()
        ways = {"R": 2 - self.unread, "W": 1 if ours and layout.remat == "selective" else 0}.get(op, 2)
        size = self.item * self.tokens * model.experts_per_token * model.width / (1 if ours else layout.model) * self.program.imbalance
        return Parts({"expert": ways * self.links.exchange("expert", size)}) if ways else Parts()
