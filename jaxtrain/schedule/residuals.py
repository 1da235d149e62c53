"""The residuals that a table's stages hold: its memory, without sizes in bytes. No JAX here."""

import numpy as np

from jaxtrain.schedule.table import Op, Table

# A chunk's input as a fraction of its residuals: in a Llama layer they are some 24 times the input.
# F saves the input alone where R rebuilds the rest.
INPUT = 1 / 20
ROUNDING = 1e-9  # of sums of residuals


def peak_residuals(table: Table, count_weight_stash: bool = False) -> list[float]:
    """The most residuals that each stage holds in one tick; 1 is those of one chunk for one
    microbatch.

    Residuals count from the tick of F to the tick of B. With `count_weight_stash` they count to the
    tick of W, so that the weight stash counts as much as the residuals of B; and of the
    recomputed layers of a unit F saves the input alone, a twentieth, and R the rest. A unit counts
    as its fraction of its chunk. Forward-only tables hold none.
    """
    if table.forward_only:
        return [0.0] * table.stages
    last_reader = Op.W if count_weight_stash else Op.B
    # 1f1b, stage 1 of 2, one unit a chunk: the cells F0 B0 W0 F1 B1 W1 change the number by
    # +1 −1 0 +1 −1 0, or counted to the end of W by +1 0 −1 +1 0 −1. The peak is the largest sum up
    # to a tick. The last column is of idle cells.
    change = np.zeros((len(Op), table.units + 1))
    for unit, chunk in enumerate(table.chunk_of):
        fraction = 1 / table.chunk_of.count(chunk)
        if count_weight_stash and table.recomputes(unit):
            rebuilt = fraction * (1 - INPUT) * table.recomputed[unit]
            change[Op.F, unit], change[Op.R, unit] = fraction - rebuilt, rebuilt
        else:
            change[Op.F, unit] = fraction
        change[last_reader, unit] = -fraction
    saved = np.cumsum(change[table.op, table.unit], axis=0)
    if table.overlaps:
        # An overlapped B frees residuals only after the tick in which its F saves others.
        freed = change[np.where(table.overlapped, Op.B, Op.IDLE), table.b_unit]
        saved += np.cumsum(freed, axis=0) - freed
    return [round(peak, 9) for peak in saved.max(axis=0, initial=0.0).tolist()]
