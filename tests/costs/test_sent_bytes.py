"""Bytes by mesh axis that a step's time is reckoned from, against the account's of the same layout (plan/account.py), as a device sends."""

import collections
import dataclasses

import pytest

from jaxtrain import config as configs
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.costs.hardware import Tier, load
from jaxtrain.plan import layout_flag
from jaxtrain.plan.account import account, busiest, exchange_account
from jaxtrain.plan.exact_clock import exactly
from jaxtrain.plan.prediction import predict

# Over one kind of links of 1 GB/s without latency, seconds are GB.
LINKS = (Tier("links", 0, 1.0, 1.0, 0.0),)


def sent(recipe: str, layout: str, **changes) -> tuple[dict[str, float], dict[str, float]]:
    """(GB that the plan of a layout reckons with, GB of the account), by axis.

    All experts are chosen as often, and replicas that train apart exchange in every step. An account's sum over two axes is of neither.
    """
    config = configs.replace(load_recipe(find_recipe(recipe)), {key.replace("__", "."): value for key, value in changes.items()})
    config = layout_flag.apply(config, layout_flag.read(layout)).resolve()
    prediction = predict(config, dataclasses.replace(load("h100"), tiers=LINKS))
    work = dataclasses.replace(prediction.work, program=dataclasses.replace(prediction.work.program, imbalance=1.0))
    time = exactly(dataclasses.replace(prediction, work=work, time=work.step()))[0].time
    counted: collections.Counter = collections.Counter()
    stage = busiest(config) if config.mesh.stage <= 4 else config.mesh.stage // 2
    for entry in [*account(config, stage), *exchange_account(config)]:
        counted[",".join(entry.axes)] += entry.bytes / 1e9
    return {axis: time.exposed.get(axis, 0.0) + time.hidden.get(axis, 0.0) for axis in counted | time.exposed}, counted


@pytest.mark.parametrize(
    "recipe, layout, changes",
    [
        ("llama3_8b", "data=8,zero=3", {}),
        ("llama3_8b", "data=8,zero=3", {"parallel__gather": "step"}),
        ("llama3_8b", "data=8,zero=2", {}),
        ("llama3_8b", "data=8,stage=2,zero=3,schedule=zb_h1,remat=none", {}),
        ("mixtral_8x7b", "data=4,stage=4,expert=8,zero=3", {}),
    ],
)
def test_zero_3_gathers_what_an_op_reads_in_the_type_that_it_computes_in(recipe, layout, changes):
    """Three times where R is an op of its own, twice otherwise, or once a step. Gradients, with stage 2 too, but for the first table's."""
    planned, counted = sent(recipe, f"{layout},microbatch=1", **changes)
    assert planned["data"] == pytest.approx(counted["data"], rel=0.01)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_data_that_does_not_divide_sums_whole_gradients_once(zero):
    planned, counted = sent("llama3_8b", f"data=7,zero={zero},microbatch=1", data__batch_size=504)
    assert planned["data"] == pytest.approx(counted["data"], rel=0.01)


@pytest.mark.parametrize(
    "recipe, layout",
    [
        ("llama3_8b", "data=8,model=8,remat=full"),
        ("llama3_8b", "data=8,model=8,remat=none"),
        ("llama3_8b", "data=8,model=8,remat=selective"),
        ("gpt3_175b", "data=8,stage=4,model=8,schedule=zb_h1,remat=none"),
        ("gpt3_175b", "data=8,stage=4,model=8,schedule=1f1b"),
    ],
)
def test_model_s_inputs_of_weight_gradients_are_gathered_again(recipe, layout):
    """But where R, B and W are one op. Embedding, head and loss, which stand in the account alone, are about a hundredth."""
    planned, counted = sent(recipe, f"{layout},microbatch=1")
    assert 0.97 < planned["model"] / counted["model"] < 1


@pytest.mark.parametrize(
    "recipe, layout",
    [
        ("mixtral_8x7b", "data=2,expert=8,model=4"),
        ("mixtral_8x7b", "data=2,expert=8,model=4,remat=selective"),
        ("mixtral_8x7b", "data=2,stage=4,expert=4,remat=none,schedule=zb_h1"),
        ("mixtral_8x7b", "data=2,stage=4,expert=4,repeats=8,schedule=interleaved"),
    ],
)
def test_every_device_of_model_sends_all_rows(recipe, layout):
    """R brings none back where nobody reads them; a selective recomputation's W sends them again."""
    planned, counted = sent(recipe, f"{layout},microbatch=1")
    assert planned["expert"] == pytest.approx(counted["expert"], rel=0.01)


@pytest.mark.parametrize(
    "mode, layout",
    [
        ("all_gather", "data=2,context=4"),
        ("all_gather", "data=2,context=4,zero=3,remat=none"),
        ("all_gather", "data=2,context=4,stage=2,model=2"),
        ("ulysses", "data=2,context=4"),
        ("ulysses", "data=2,context=4,stage=2,remat=selective,schedule=zb_h1"),
        ("ring", "data=2,context=4"),
        ("ring", "data=2,context=4,remat=none"),
    ],
)
def test_context_by_its_mode_in_every_op(mode, layout):
    """With the sums of gradients over it."""
    planned, counted = sent("llama3_8b", f"{layout},microbatch=1", parallel__context=mode)
    assert planned["context"] == pytest.approx(counted["context"], rel=0.01)


def test_latents_and_the_gradients_of_what_makes_them():
    """What stands in the account alone: embedding, head, the module that predicts further, and weights of chosen experts."""
    planned, counted = sent("deepseek_v3", "data=1,context=4,expert=2,model=2,microbatch=1,remat=selective")
    assert planned["model"] == pytest.approx(counted["model"], rel=0.08)


@pytest.mark.parametrize("layout", ["data=4,replica=2", "data=2,context=2,replica=2", "data=2,replica=2,zero=3"])
@pytest.mark.parametrize("outer", ["float32", "int8"])
def test_replicas_that_train_apart_exchange_now_and_then(layout, outer):
    changes = {"precision__outer": outer, "parallel__zero": 1}
    planned, counted = sent("llama3_8b", f"{layout},microbatch=1", train__diloco_inner_steps=1, **changes)
    for axis in ("replica", "data", "context"):
        assert planned.get(axis, 0.0) == pytest.approx(counted[axis], rel=0.01)
    seldom, _ = sent("llama3_8b", f"{layout},microbatch=1", train__diloco_inner_steps=100, **changes)
    assert seldom["replica"] == pytest.approx(planned["replica"] / 100)
