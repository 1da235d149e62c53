"""The geometry of checkpoints: which device writes what, and in which pieces; which process needs
which shards, and who can give a lost one, by plain sets."""

import itertools

import jax
import numpy as np
import pytest
from support.checkpoint_state import Layout, abstract_state, stored_shapes

from jaxtrain.checkpoint.regions import (
    Shard,
    Shards,
    holders,
    piece_shape,
    regions,
    stored_arrays,
    writers,
)
from jaxtrain.training.state import Stored

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
    return stored_arrays(abstract_state(layout), stored_shapes(layout))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_stored_number_is_written_once(layout):
    for array in arrays_of(layout):
        written = np.zeros(array.shape, int)
        for part in array.leaves:
            for bounds in writers(part).values():
                for region in regions(part, bounds, array.shape):
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
        for part, (device, bounds) in [(p, w) for p in array.leaves for w in writers(p).items()]:
            for region in regions(part, bounds, array.shape):
                spans = [range(r.start // c, -(-r.stop // c)) for r, c in zip(region.stored, piece)]
                for index in itertools.product(*spans):
                    assert writer[index] in (-1, device.id), (array.name, index)
                    writer[index] = device.id


def test_pieces_stay_under_the_limit():
    array = next(a for a in arrays_of(LAYOUTS[1]) if a.name == "params/layers/mlp/w")
    assert (array.shape, array.leaves[0].sharding.shard_shape(array.leaves[0].shape)) == (
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
    (array,) = stored_arrays(state, {"w": Stored((29, 14))})  # shards of 15 × 7
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
    parts = [p for a in arrays_of(layout) if a.name.startswith("params/") for p in a.leaves]
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
        stored_arrays(abstract, stored_shapes(layout))


def test_a_stored_shape_that_does_not_fit_is_refused():
    layout = LAYOUTS[0]
    shapes = stored_shapes(layout)
    shapes["params"]["embed"]["table"] = Stored((14, 8))
    with pytest.raises(
        ValueError,
        match=r"params/embed/table: an array of \[13, 8\] cannot hold the stored \[14, 8\]",
    ):
        stored_arrays(abstract_state(layout), shapes)


# --- shards and their processes -------------------------------------------------------------------


def shards_of(layout: Layout, devices_per_process: int = 1) -> Shards:
    """Of the known state, with devices 0 … in processes of so many."""
    arrays = stored_arrays(abstract_state(layout), stored_shapes(layout))
    return Shards(arrays, lambda device: device.id // devices_per_process)


SHARD_LAYOUTS = [
    Layout(7, stages=2, data=2, model=2),
    Layout(7, stages=2, data=2, scatters=False),
    Layout(7, stages=2, chunks=2, data=4),
]


@pytest.mark.parametrize("layout", SHARD_LAYOUTS, ids=str)
@pytest.mark.parametrize("devices_per_process", [1, 2])
def test_a_process_needs_what_its_devices_hold(layout, devices_per_process):
    """Each distinct shard once, and together all that there is."""
    shards = shards_of(layout, devices_per_process)
    leaves = jax.tree.leaves(abstract_state(layout))
    for process in range(layout.mesh.size // devices_per_process):
        needed = shards.needed_by(process)
        assert len(set(needed)) == len(needed)
        expected = set()
        for leaf, array in enumerate(leaves):
            for device, index in array.sharding.devices_indices_map(array.shape).items():
                if device.id // devices_per_process == process:
                    expected.add(
                        Shard(leaf, tuple(i.indices(n)[:2] for i, n in zip(index, array.shape)))
                    )
        assert set(needed) == expected
    assert len(shards.devices) == sum(len(holders(leaf)) for leaf in shards.leaves.values())


def test_copies_give_and_what_is_scattered_is_gone():
    """Devices: data 2 × stage 2, each a process. Processes 0 and 2 have the same stage's
    parameters; moments are scattered over data."""
    scattered, copied = (
        shards_of(Layout(7, stages=2, data=2)),
        shards_of(Layout(7, stages=2, data=2, scatters=False)),
    )
    for shards, whole in [(scattered, False), (copied, True)]:
        givers = shards.givers({0: shards.needed_by(0)})
        assert set(givers) == set(shards.needed_by(0))
        for shard, giver in givers.items():
            if shard.leaf < len(shards.leaves) and "params/" in shards.name(shard):
                assert giver.id in (1, 2, 3)
            assert giver is None or giver in shards.devices[shard] and giver.id != 0
        assert all(givers.values()) == whole
    # Both copies of a stage's part are gone; the other stage's are not asked for.
    lost = {
        process: [
            s
            for s in copied.needed_by(process)
            if s.shape and copied.name(s) == "params/layers/norm"
        ]
        for process in (0, 2)
    }
    assert lost[0] == lost[2] and lost[0] != []
    assert set(copied.givers(lost).values()) == {None}
    assert [giver.id for giver in copied.givers({0: lost[0]}).values()] == [2]


def test_a_fingerprint_is_a_layouts():
    layouts = [
        *(
            Layout(7, stages=2, data=2),
            Layout(7, stages=2, data=2, scatters=False),
            Layout(7, stages=4, data=1),
        ),
        *(
            Layout(8, stages=2, data=2),
            Layout(7, stages=2, data=2, padded=32),
            Layout(7, stages=2, chunks=2, data=2),
        ),
    ]
    assert len({shards_of(layout).fingerprint() for layout in layouts}) == len(layouts)
    # Which processes the devices are in does not matter: machines may be numbered anew.
    assert shards_of(layouts[0], 2).fingerprint() == shards_of(layouts[0]).fingerprint()
