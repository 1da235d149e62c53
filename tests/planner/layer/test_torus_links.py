"""The torus of a TPU slice, and what each mesh axis has of its links."""

import pytest

from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.layer.layout import Layout
from jaxtrain.planner.layer.links import EXCHANGE, GATHER, PERMUTE, Collective, Links
from jaxtrain.planner.layer.torus_links import rings, shapes

ICI = {"tpu-v4": 100, "tpu-v5e": 100, "tpu-v5p": 200, "tpu-v6e": 200, "tpu-7x": 100}  # of a device


def gb_per_s(name: str, axis: str, kind: str = GATHER, **layout: int) -> float:
    """GB/s of a collective of 1,000 GB over an axis, at links' full speed."""
    hardware = load(name)
    links = Links(Layout(**layout), hardware)
    seconds = links.seconds([Collective(kind, (axis,), 1e12)])[axis]
    devices = links.route((axis,)).devices
    sent = 1e3 * (1 if kind == PERMUTE else (devices - 1) / devices)
    return sent / seconds / links.route((axis,)).tier.reached


@pytest.mark.parametrize(
    "chips, sides, shape, wraps",
    [
        (64, 3, (4, 4, 4), True),
        (128, 3, (4, 4, 8), True),
        (256, 3, (4, 8, 8), True),
        (192, 3, (4, 4, 12), True),
        (512, 3, (8, 8, 8), True),
        (32, 3, (2, 4, 4), False),
        (256, 2, (16, 16), True),
        (16, 2, (4, 4), False),
    ],
)
def test_a_slice_is_the_closest_to_a_cube(chips, sides, shape, wraps):
    assert shapes(chips, sides)[0] == shape and all(rings(shape)) == wraps
    assert rings((8, 16)) == (False, True)  # a v5e of 8x16 wraps around along the longer side


@pytest.mark.parametrize(
    "name, layout, rings_at_once",
    [
        ("tpu-v4", {"data": 64}, 3),
        ("tpu-v4", {"data": 16, "model": 4}, 2),
        ("tpu-v5e", {"data": 256}, 2),
        ("tpu-v5e", {"data": 16, "model": 16}, 1),
        ("tpu-v5e", {"data": 16}, 1),  # 4x4 is a mesh: half of each of two sides
        ("tpu-v5p", {"data": 8}, 1.5),
        ("tpu-v6e", {"data": 128}, 1.5),
        ("tpu-7x", {"data": 8}, 2),  # both devices of a chip have its links together
        ("tpu-7x", {"data": 256, "model": 2}, 3),
    ],
)
def test_a_gather_uses_the_links_of_all_its_sides(name, layout, rings_at_once):
    """A gather over several sides takes bytes / (bandwidth of a ring · sides), and twice that where
    no side is a ring (How to Scale Your Model, chapter on sharding)."""
    assert gb_per_s(name, "data", **layout) == pytest.approx(rings_at_once * ICI[name], rel=1e-3)


def test_an_all_to_all_is_a_quarter_of_a_gather_a_chip_of_a_ring():
    """Of 16 chips in a ring each sends its own bytes over 16/4 hops, of 4x4x4 over one."""
    assert gb_per_s("tpu-v5e", "expert", EXCHANGE, expert=16, data=16) == pytest.approx(
        100 * 15 / 16 / 4, rel=1e-3
    )
    assert gb_per_s("tpu-v5p", "expert", EXCHANGE, expert=64) == pytest.approx(
        200 * 63 / 64, rel=1e-3
    )


def test_a_message_to_a_neighbour_goes_over_one_link():
    assert gb_per_s("tpu-v5p", "stage", PERMUTE, stage=4, data=16) == pytest.approx(100, rel=1e-3)


def test_groups_between_each_other_share_a_side():
    """64 x 4 on 16x16: the inner axis has a quarter of a side, the outer one the rest and a
    side."""
    assert gb_per_s("tpu-v6e", "expert", expert=4, data=64) == pytest.approx(100, rel=1e-3)
    assert gb_per_s("tpu-v6e", "data", expert=4, data=64) == pytest.approx(225, rel=1e-3)


def test_two_devices_of_a_chip_have_their_own_link():
    route = Links(Layout(model=2, data=64), load("tpu-7x")).route(("model",))
    assert route.tier.name.startswith("chip") and route.ring == pytest.approx(600e9 * 0.85)


def test_slices_are_islands():
    """18 of 32 replicas of 512 chips share a slice of 9,216 chips, and send over its network."""
    links = Links(Layout(data=1024, replica=32), load("tpu-7x"))
    assert links.islands("replica") == 2 and links.islands("data") == 1
