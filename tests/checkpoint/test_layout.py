"""The geometry of checkpoints: which device writes what, and in which pieces."""

import itertools

import jax
import numpy as np
import pytest
from support.checkpoint_state import Layout, abstract_state, stored_shapes

from jaxtrain.checkpoint.layout import holders, piece_shape, regions, stored_arrays, writers

LAYOUTS = [
    Layout(7, padded=13),
    Layout(7, stages=2, chunks=3, data=2, model=2),
    Layout(18, stages=4, chunks=3, data=2, padded=24),
    Layout(18, stages=2, data=4, padded=32),
    Layout(18, stages=3, chunks=2, data=2, padded=18),
    Layout(7, stages=7, padded=21),
    Layout(18, stages=1, chunks=2, data=2, model=4),
    Layout(7, stages=2, chunks=2, data=2, padded=24, replicas=2),
]


def arrays_of(layout: Layout):
    return stored_arrays(abstract_state(layout), stored_shapes(layout), layout.placement)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_stored_number_is_written_once(layout):
    for array in arrays_of(layout):
        written = np.zeros(array.shape, int)
        for part in array.parts:
            for bounds in writers(part).values():
                for region in regions(part, bounds, array.shape, layout.placement):
                    shard = np.empty([stop - start for start, stop in bounds])
                    assert shard[region.local].shape == written[region.stored].shape, array.name
                    written[region.stored] += 1
        assert (written == 1).all(), array.name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("limit", [16, 64, 10**9])
def test_a_piece_is_never_written_by_two_devices(layout, limit):
    for array in arrays_of(layout):
        piece = piece_shape(array, limit)
        writer = np.full([-(-n // c) for n, c in zip(array.shape, piece)], -1)
        for part, (device, bounds) in [(p, w) for p in array.parts for w in writers(p).items()]:
            for region in regions(part, bounds, array.shape, layout.placement):
                spans = [range(r.start // c, -(-r.stop // c)) for r, c in zip(region.stored, piece)]
                for index in itertools.product(*spans):
                    assert writer[index] in (-1, device.id), (array.name, index)
                    writer[index] = device.id


def test_pieces_stay_under_the_limit():
    array = next(a for a in arrays_of(LAYOUTS[1]) if a.name == "params/layers/mlp/w")
    assert (array.shape, array.parts[0].sharding.shard_shape(array.parts[0].shape)) == (
        (7, 8, 16),
        (1, 2, 8, 8),
    )
    assert piece_shape(array) == (1, 8, 8)
    # The dimension that is not sharded goes first; the other is halved within the shard.
    assert piece_shape(array, limit=64) == (1, 2, 8)
    assert piece_shape(array, limit=16) == (1, 1, 4)


def test_pieces_of_odd_shards_stay_under_the_limit_too():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
    state = {"w": jax.ShapeDtypeStruct((30, 14), np.float32, sharding=sharding)}
    (array,) = stored_arrays(state, {"w": (29, 14)}, LAYOUTS[0].placement)  # shards of 15 × 7
    assert [piece_shape(array, limit) for limit in (4 * 105, 4 * 104, 4 * 34, 4 * 5, 4)] == [
        (15, 7),
        (5, 7),
        (5, 1),
        (5, 1),
        (1, 1),
    ]


def test_replicas_take_turns():
    """Four data shards hold the parameters: each of them writes some."""
    layout = Layout(7, stages=2, chunks=3, data=4)
    parts = [p for a in arrays_of(layout) if a.name.startswith("params/") for p in a.parts]
    assert all(
        len(devices) == (4 if p.unit is not None else 8)
        for p in parts
        for devices in holders(p).values()
    )
    busy = {device for p in parts for device in writers(p)}
    assert len({d.id // 2 for d in busy}) == 4


def test_a_leaf_without_sharding_is_refused():
    layout = LAYOUTS[0]
    abstract = abstract_state(layout) | {"step": jax.ShapeDtypeStruct((), np.int32)}
    with pytest.raises(ValueError, match="step: only arrays with a sharding"):
        stored_arrays(abstract, stored_shapes(layout), layout.placement)


def test_a_stored_shape_that_does_not_fit_is_refused():
    layout = LAYOUTS[0]
    shapes = stored_shapes(layout)
    shapes["params"]["embed"]["table"] = (14, 8)
    with pytest.raises(
        ValueError,
        match=r"params/embed/table: an array of \[13, 8\] cannot hold the stored \[14, 8\]",
    ):
        stored_arrays(abstract_state(layout), shapes, layout.placement)
