"""Which layer lives where: layers → chunks → stages.

A model of L layers is cut into `stages · chunks` consecutive groups ("global chunks"). Chunk c of stage s is global chunk
c · stages + s: the circular placement of interleaved pipelines. Where the layers do not divide, the first groups hold one
more. In memory chunk c of all stages is one stacked array [stages, rows(c), ...]; a stage with fewer layers has an unused
row there, which is zero, has no gradient, and is in no count, norm or checkpoint.

      L = 7, stages = 2, chunks = 2          stage 0     stage 1
                                   chunk 0   0 1         2 3
                                   chunk 1   4 5         6 –
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Placement:
    """Layers over `stages` stages of `chunks` chunks each, in circular order.

    Raises ValueError if there are more chunks than layers.
    """

    layers: int
    stages: int = 1
    chunks: int = 1

    def __post_init__(self):
        if self.stages * self.chunks > self.layers:
            raise ValueError(
                f"{self.stages} stages of {self.chunks} chunks need at least {self.stages * self.chunks} layers, not {self.layers}"
            )

    def first_layer(self, chunk: int, stage: int) -> int:
        """The first layer of a stage's chunk."""
        group = chunk * self.stages + stage
        size, more = divmod(self.layers, self.stages * self.chunks)
        return group * size + min(group, more)

    def count(self, chunk: int, stage: int) -> int:
        """The number of layers in a stage's chunk."""
        size, more = divmod(self.layers, self.stages * self.chunks)
        return size + (chunk * self.stages + stage < more)

    def rows(self, chunk: int) -> int:
        """Rows of the stacked array of this chunk: the most layers that a stage has in it."""
        return max(self.count(chunk, s) for s in range(self.stages))

    def layer_index(self, chunk: int) -> np.ndarray:
        """[stages, rows(chunk)] int32: the layer in each row of the stacked array, −1 in an unused row."""
        index = np.full((self.stages, self.rows(chunk)), -1, np.int32)
        for s in range(self.stages):
            first, n = self.first_layer(chunk, s), self.count(chunk, s)
            index[s, :n] = np.arange(first, first + n)
        return index

    def describe(self) -> str:
        """One line for people: the number of layers on each stage, chunk by chunk."""
        if self.stages == 1:
            return f"{self.layers} layers on one stage"
        spread = ", ".join("+".join(str(self.count(c, s)) for c in range(self.chunks)) for s in range(self.stages))
        return f"{self.layers} layers over {self.stages} stages × {self.chunks} chunk{'s'[: self.chunks != 1]}: {spread}"
