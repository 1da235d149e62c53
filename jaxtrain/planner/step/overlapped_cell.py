"""The time that F of one microbatch and B of another save in an overlapped cell
(`pipeline.overlap`), in closed form.

Messages are those of routed tokens between the devices of `expert`. A layer has four phases in F,
and the same four the other way round in B. A trip of the cell's loop has a layer of each:

    F                        B                            saves at most
    attention                combine: gradients of the    min(F's attention, B's combine)
                             outputs to their experts
    dispatch: tokens to      experts                      min(F's dispatch, B's experts)
    their experts
    experts                  dispatch: gradients of the   min(F's experts, B's dispatch)
                             inputs back
    combine: outputs back    attention                    min(F's combine, B's attention)

In each line one of the two computes while the other only waits for its message. One after the
other they take computation + message, at the same time max(computation, message), so the line saves
the shorter of both (DeepSeek-V3, arXiv:2412.19437, figure 4, without its further split of B and W).
The sum is at most F and at most B.

Computation is products and attention's core alone: passes over memory, and what B recomputes, are
not counted. Messages are assumed to slow no computation down, though transport takes processors of
a GPU from the products. Collectives over `model` and `context` save nothing: none of them has
products beside it as compiled for H100s. XLA covers only a part of the messages
(`Rates.cell_overlap`).
"""

from typing import NamedTuple


class Phases(NamedTuple):
    """Seconds of the phases of one layer in F, or in B, where `combine` comes first and `attention`
    last. attention: with the router; experts: with the shared ones"""

    attention: float
    dispatch: float
    experts: float
    combine: float


def most_saved(forward: Phases, backward: Phases) -> float:
    """Seconds that a layer's F and B save at the same time where every message is covered."""
    return (
        min(forward.attention, backward.combine)
        + min(forward.dispatch, backward.experts)
        + min(forward.experts, backward.dispatch)
        + min(forward.combine, backward.attention)
    )


def saved_by_pair(recompute: Phases) -> float:
    """Seconds that R saves of a layer where it recomputes two layers at the same time. The dispatch
    of the first is beside the attention of the second, and that of the second beside the experts of
    the first. recompute: without the last product, and with no combine"""
    r = recompute
    return (min(r.dispatch, r.attention) + min(r.dispatch, r.experts)) / 2
