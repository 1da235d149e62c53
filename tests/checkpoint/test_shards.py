"""Which process needs which shards, and who can give a lost one, by plain sets."""

import jax
import pytest
from support.checkpoint_state import Layout, abstract_state, stored_shapes

from jaxtrain.checkpoint.layout import holders, stored_arrays
from jaxtrain.checkpoint.shards import Shard, Shards


def shards_of(layout: Layout, devices_per_process: int = 1) -> Shards:
    """Of the known state, with devices 0 … in processes of so many."""
    arrays = stored_arrays(abstract_state(layout), stored_shapes(layout), layout.placement)
    return Shards(arrays, layout.placement, lambda device: device.id // devices_per_process)


LAYOUTS = [
    Layout(7, stages=2, data=2, model=2),
    Layout(7, stages=2, data=2, scatters=False),
    Layout(7, stages=2, chunks=2, data=4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
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
    assert len(shards.devices) == sum(len(holders(part)) for part in shards.parts.values())


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
            if shard.leaf < len(shards.parts) and "params/" in shards.name(shard):
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
