"""What crosses the runtime's scan: the state that a tick changes, and the constants that it reads.

An op names what it reads and writes by `Field`s: a field of one of the two, or a path into one that
is a dict, such as ("gradients", "layers", "0"). `only` takes these out of a record, `merged` puts
them back.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax

Field = str | tuple[str, ...]
Array = Any  # a jax.Array; None where a table has no such value, or an op does not name it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constants:
    """What no op changes, on each device.

    params: {"embed": …, "layers": {"0": …}, "head": …} and what else the model has, in the compute
        type; "layers" by local unit, leaves [stack_size, ...]
    batch: {"tokens", "targets", "weights", "segments" and "positions" if any}, [microbatches, B,
        T], and "mtp" (`look_ahead`); weights are divided by their sum over the global batch, so
        that losses are plain sums
    """

    params: Any = None
    batch: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TickState:
    """What the scan over the ticks carries, on each device. B, T: sequences and tokens of a
    microbatch there.

    loss, mtp_loss: float32 scalars, the sums so far: of the next tokens, and of those beyond
    gradients: float32 sums in the parameters' tree
    activation, gradient: pools of inputs of units, and of gradients of their outputs: [slots, B, T,
        D] of the compute type
    residual_b, residual_w, weight_stash: pools of what the forward leaves for B alone, for B and W,
        and B for W: lists of arrays [slots · layers, ...]
    up, down: [B, T, D], what leaves to the next and to the previous stage; result: an op's that
        does neither
    up_arrived, down_arrived: what came with the last permute, by the buffer in which it left the
        other stage

    Evaluation has neither gradients nor what belongs to a backward, one stage neither pools nor
    buffers, and a table no buffer that it does not use: these are None.
    """

    loss: Array = None
    mtp_loss: Array = None
    gradients: Any = None
    activation: Array = None
    gradient: Array = None
    residual_b: list[jax.Array] | Any = None
    residual_w: list[jax.Array] | Any = None
    weight_stash: list[jax.Array] | Any = None
    up: Array = None
    down: Array = None
    result: Array = None
    up_arrived: Array = None
    down_arrived: Array = None


Record = TypeVar("Record", TickState, Constants)


def fields(record: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(record))


def keys_of(field: Field) -> tuple[str, ...]:
    return (field,) if isinstance(field, str) else field


def only(record: Record, names: Iterable[Field]) -> Record:
    """The record without what none of the names leads to: None in place of a field, missing in a
    dict."""
    kept: dict[str, Any] = {}
    for name in names:
        field, *keys = keys_of(name)
        kept[field] = _with_path(kept.get(field), getattr(record, field), keys)
    return type(record)(**kept)


def _with_path(kept: Any, tree: Any, keys: Sequence[str]) -> Any:
    """`kept` and the part of the tree to which the keys lead."""
    if not keys:
        return tree
    first, *rest = keys
    kept = kept or {}
    return {**kept, first: _with_path(kept.get(first), tree[first], rest)}


def merged(record: Record, part: Record) -> Record:
    """The record with all that `part` has in its place; what is None or missing there stays."""
    return type(record)(
        **{
            name: _merged(getattr(record, name), getattr(part, name))
            for name in fields(type(record))
        }
    )


def _merged(tree: Any, part: Any) -> Any:
    if part is None:
        return tree
    if isinstance(part, dict) and isinstance(tree, dict):
        return {**tree, **{key: _merged(tree.get(key), value) for key, value in part.items()}}
    return part
