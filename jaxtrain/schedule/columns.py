"""What a tick reads of the table: for each op whether this stage runs it in this tick, and with which microbatch and slots.

The ops of a tick, in order:

    take_up_activation, take_down_activation, take_up_gradient, take_down_gradient
                                      what the last permute brought goes into its slot
    permute_EARLY
    busy                              whether the tick has any of what follows
    embed                             the first unit's input
    F, K, R, B, W of each unit        forward; forward that keeps what the backward reads; recompute; gradients
    send_up, send_down                a result that goes by another buffer than its op writes, into that buffer
    stay_activation, stay_gradient    a result that stays on its stage, from the buffer `up`, `down` or `y` into its slot
    head, embed_gradient
    permute_LATE

F, K and B write their result into the buffer by which it leaves, `up` or `down`, where the table allows that for the unit on every
stage, and into `y` where it does not. No JAX here.
"""

import numpy as np

from jaxtrain.schedule.slots import MESSAGES, POOLS, SHARED_SLOTS, SlottedTable
from jaxtrain.schedule.table import Op, Permute, Table, directions, units_of
from jaxtrain.schedule.transport import waiting

BUFFERS = ("up", "down", "y")
WAY = {"up": 1, "down": -1}
TAKES = tuple(f"take_{way}_{kind}" for kind in MESSAGES for way in WAY)
STAYS = tuple(f"stay_{kind}_{buffer}" for kind in MESSAGES for buffer in BUFFERS)
SLOTS = (*POOLS, *(f"{way}_{kind}" for way in ("up", "down", "stay") for kind in MESSAGES))


def units(table: Table) -> int:
    """Units on a stage, the most of all stages."""
    return max(table.stage_of.count(s) for s in range(table.stages))


def results(slotted: SlottedTable) -> dict[tuple[str, int], str]:
    """(F or B, local unit) → the buffer into which the op writes its result on every stage."""
    table, held, found = slotted.table, waiting(slotted.table), {}
    for op in (Op.F, Op.B):
        for u in range(units(table)):
            cells = (table.op == op) & (table.local_unit == u)
            ways = set(slotted.send[cells].tolist()) - {0}
            buffer = "y"
            if len(ways) == 1:
                way = "up" if ways == {1} else "down"
                # A result that stays passes through the buffer too, which must not hold a message then.
                if not (held[..., 0 if way == "up" else 1] & cells & (slotted.send == 0)).any():
                    buffer = way
            found[op.name, u] = buffer
    return found


def _keeps(table: Table) -> np.ndarray:
    """bool [ticks, stages]: whether a cell is an F that keeps what the backward reads."""
    own = units_of(table.stage_of, table.stages)
    keeping = [[not table.forward_only and not table.recomputes(g) for g in own[s]] for s in range(table.stages)]
    ticks = zip(table.op, table.local_unit, strict=True)
    return np.array([[o == Op.F and keeping[s][u] for s, (o, u) in enumerate(zip(*tick, strict=True))] for tick in ticks])


def columns(slotted: SlottedTable) -> dict[str, np.ndarray]:
    """Name → int32 [ticks, stages]: 1 where the stage runs the op; slots and microbatches, 0 where there are none."""
    t, n = slotted.table, units(slotted.table)
    keeps, everywhere = _keeps(t), np.arange(t.stages)[None]
    whole = lambda column: np.broadcast_to(column[:, None], t.op.shape)
    at = lambda stage: np.full((1, t.stages), True) if t.vocabulary == "parallel" else everywhere == stage
    wanted = {name: getattr(slotted, name.removeprefix("take_")) >= 0 for name in TAKES}
    wanted["embed"] = whole(t.embed >= 0) & at(t.stage_of[0])
    for u in range(n):
        of = lambda op, u=u: (t.op == op) & (t.local_unit == u)
        wanted |= {f"F{u}": of(Op.F) & ~keeps, f"K{u}": of(Op.F) & keeps, f"R{u}": of(Op.R), f"B{u}": of(Op.B), f"W{u}": of(Op.W)}
    into = results(slotted)
    through = {b: np.zeros(t.op.shape, bool) for b in BUFFERS}
    for (op, u), buffer in into.items():
        through[buffer] |= (t.op == Op[op]) & (t.local_unit == u)
    wanted |= {f"send_{way}": (slotted.send == step) & through["y"] for way, step in WAY.items()}
    for kind in MESSAGES:
        wanted |= {f"stay_{kind}_{b}": (getattr(slotted, f"stay_{kind}") >= 0) & through[b] for b in BUFFERS}
    wanted["head"] = whole(t.head >= 0) & at(t.stage_of[-1])
    wanted["embed_gradient"] = whole(t.embed_gradient >= 0) & at(t.stage_of[0])
    takes = {name: wanted.pop(name) for name in TAKES}
    wanted = takes | {"busy": np.any(list(wanted.values()), axis=0)} | wanted
    wanted |= {f"permute_{when.name}": whole(t.permute == when) for when in (Permute.EARLY, Permute.LATE)}
    numbers = {f"{name}_slot": getattr(slotted, name) for name in SLOTS}
    numbers |= {f"{name}_slot": whole(getattr(slotted, name)) for name in SHARED_SLOTS}
    numbers |= {"microbatch": t.microbatch} | {
        f"{name}_microbatch": whole(getattr(t, name)) for name in ("embed", "head", "embed_gradient")
    }
    return {k: a.astype(np.int32) for k, a in (wanted | {k: np.maximum(a, 0) for k, a in numbers.items()}).items()}


def permutes(table: Table) -> dict[str, int]:
    """The buffers that ever leave their stages → the step that they make."""
    ways = set(directions(table.stage_of, table.stages)) - {0}
    if not table.forward_only:
        ways |= {-d for d in ways}
    return {name: step for name, step in WAY.items() if step in ways}
