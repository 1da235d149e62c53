"""Rows between devices: both ways in which they travel bring what they should, where they
should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import AXES, EXPERT, make_mesh
from jaxtrain.parallel.experts.exchange_group import ExchangeGroup
from jaxtrain.parallel.experts.expert_messages import ragged_all_to_all

DEVICES, MOST, CAPACITY = 4, 5, 18


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, **names):
    """`lax.ragged_all_to_all` by gathering everything: row j of those from device s to this one
    lands at its output offset + j."""
    rows, starts, sizes, lands = (
        lax.all_gather(a, **names) for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    me = lax.axis_index(names["axis_name"])
    for s in range(rows.shape[0]):
        at = lands[s, me] + jnp.arange(MOST)
        at = jnp.where(jnp.arange(MOST) < sizes[s, me], at, output.shape[0])
        output = output.at[at].set(
            rows[s].at[starts[s, me] + jnp.arange(MOST)].get(mode="fill", fill_value=0), mode="drop"
        )
    return output


@pytest.mark.parametrize("way", ["cpu", "default"])
@pytest.mark.parametrize("fills", [True, False])
def test_ragged_rows(monkeypatch, way, fills):
    """Behind the rows that arrive are zeros, or what was there."""
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, -1, dtype))
    monkeypatch.setattr(lax, "platform_dependent", lambda x, **ways: ways[way](x))
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    random = np.random.default_rng(0)
    travel = random.integers(0, MOST + 1, (DEVICES, DEVICES))
    travel[1, 2], travel[:, 3] = 0, [0, MOST, 0, 1]
    rows = np.zeros((DEVICES, CAPACITY + 2, 2), np.float32)
    for s in range(DEVICES):
        number = travel[s].sum()
        rows[s, :number] = np.stack([np.full(number, s), np.arange(number)], 1) + 1
    mesh = make_mesh([DEVICES if axis == EXPERT else 1 for axis in AXES], jax.devices()[:DEVICES])
    group = ExchangeGroup(DEVICES)
    move = lambda rows: ragged_all_to_all(rows, jnp.asarray(travel), CAPACITY, MOST, fills, group)
    local = lambda rows: move(rows[0])[None]
    with jax.set_mesh(mesh):
        got = jax.jit(
            jax.shard_map(
                local,
                in_specs=P(EXPERT),
                out_specs=P(EXPERT),
                axis_names=set(AXES),
                check_vma=False,
            )
        )(rows)
    for d in range(DEVICES):
        expected = np.concatenate(
            [rows[s, travel[s, :d].sum() : travel[s, : d + 1].sum()] for s in range(DEVICES)]
        )
        np.testing.assert_array_equal(got[d, : len(expected)], expected)
        behind = -1 if way == "default" and not fills else 0
        assert (got[d, len(expected) :] == behind).all()
