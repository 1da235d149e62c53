"""Collectives over the axes of a layout: which links they cross, and how many of them."""

import dataclasses

import pytest

from jaxtrain.planner.layer.hardware import Tier, load
from jaxtrain.planner.layer.layout import Layout
from jaxtrain.planner.layer.links import EXCHANGE, GATHER, Collective, Links

ISLANDS = dataclasses.replace(
    load("h100"), tiers=(Tier("inside", 8, 400.0, 1.0, 0.0), Tier("outside", 0, 50.0, 1.0, 0.0))
)


def links(**layout: int) -> Links:
    return Links(Layout(**layout), ISLANDS)


def seconds(over: Links, kind: str, axis: str) -> float:
    """Seconds of a collective of 1 GB over an axis."""
    return over.seconds([Collective(kind, (axis,), 1e9)]).get(axis, 0.0)


@pytest.mark.parametrize("expert, model, outside", [(32, 1, 24), (32, 2, 28), (8, 8, 7)])
def test_a_device_sends_its_rows_over_its_own_adapter(expert, model, outside):
    """1 GB in equal parts to all experts: those of other islands over 50 GB/s, whatever the
    neighbours send."""
    assert seconds(links(expert=expert, model=model, data=2), EXCHANGE, "expert") == pytest.approx(
        outside / expert / 50
    )


def test_an_exchange_inside_an_island():
    assert (
        seconds(links(expert=4, data=8), EXCHANGE, "expert")
        == pytest.approx(0.75 / 400)
        == seconds(links(expert=4), GATHER, "expert")
    )
    assert seconds(links(data=4), EXCHANGE, "expert") == 0


def test_steps_across_islands_and_inside():
    """1 GB to one device of each of eight islands, and to the eight of an island."""
    over = links(expert=64, data=2)
    across = Collective(EXCHANGE, ("expert",), 1e9, devices=8, stride=8)
    inside = Collective(EXCHANGE, ("expert",), 1e9, devices=8)
    assert over.seconds([across])["expert"] == pytest.approx(7 / 8 / 50)
    assert over.seconds([inside])["expert"] == pytest.approx(7 / 8 / 400)


def test_an_axis_that_does_not_divide_an_island_leaves_it():
    """Rows of six on islands of eight begin anywhere: two at least lie together and send over two
    adapters. Six alone fit."""
    straddling = links(model=6, data=8)
    assert straddling.route(("model",)).tier.name == "outside"
    assert seconds(straddling, GATHER, "model") == pytest.approx(5 / 6 / 100)
    assert (
        links(model=6).route(("model",)).tier.name
        == links(model=4, data=64).route(("model",)).tier.name
        == "inside"
    )


def test_a_job_takes_as_many_of_an_island_as_divides():
    """64 of 72."""
    rack = dataclasses.replace(
        ISLANDS, tiers=(dataclasses.replace(ISLANDS.tiers[0], devices=72), ISLANDS.tiers[1])
    )
    names = {
        m: Links(Layout(model=m, data=144), rack).route(("model",)).tier.name
        for m in (8, 9, 16, 64, 72, 48)
    }
    assert names == dict.fromkeys((8, 9, 16, 64, 72), "inside") | {48: "outside"}
