"""Layers of several kinds in the runtime, of one form or of several: gradients of one device on
every schedule, by loops over whole periods and by the layer's index; pools begin with NaN. What a
stage allocates, and which loops its program has."""

import jax.numpy as jnp
import pytest
from support import small
from support.plain_loop import assert_same, gradients, reference
from support.small import Case

from jaxtrain.devices import host_memory

# Kinds of one form differ in what no parameter's shape depends on.
ONE_FORM = ("a.norm_epsilon=0.3", "b.rotary_base=10", "c.positions=none")
FORMS = ("a.norm_epsilon=0.3", "b.head_dim=8", "b.mlp_width=32", "c.experts=4", "c.expert_width=16")
PATTERNS = {"3:1": ("a", "a", "a", "b"), "5:1": ("c", "c", "c", "c", "c", "b"), "1:1": ("b", "a")}


def kinds(pattern: str, layers: int, settings: tuple[str, ...] = ONE_FORM) -> dict:
    """Changes of a config. Its pattern's kinds alone have settings."""
    named = PATTERNS[pattern]
    settings = tuple(entry for entry in settings if entry[0] in named)
    return {"model.layers": layers, "model.pattern": named, "model.kinds": settings}


SELECTIVE, NONE, K_OF_N = ({"pipeline.remat": remat} for remat in ("selective", "none", "full:1"))
ZERO_3, LAST = {"parallel.zero": 3}, {"parallel.zero": 1, "parallel.reduce": "last"}
INPUTS = {"pipeline.save": ("layer_input",)}
CASES = {
    "periods of two forms, ZeRO-3": Case((2, 1, 1), changes=kinds("3:1", 7, FORMS) | ZERO_3),
    "by index, two forms": Case((1, 3, 1), "zb_h1", 1, 3, kinds("3:1", 7, FORMS) | NONE),
}
MORE = {
    "one stage": Case((1, 1, 2), changes=kinds("5:1", 7) | SELECTIVE),
    "one stage, full": Case((2, 1, 1), changes=kinds("3:1", 7, FORMS)),
    "one stage, k of n": Case((2, 1, 1), changes=kinds("3:1", 12, FORMS) | K_OF_N | ZERO_3),
    "by index": Case((2, 2, 1), "1f1b", 1, 3, kinds("3:1", 7)),
    "by index, ZeRO-3, inputs of layers": Case(
        (2, 4, 1), "gpipe", 1, 4, kinds("5:1", 12) | ZERO_3 | INPUTS
    ),
    "periods on every stage": Case((1, 2, 2), "zb_v", 2, 4, kinds("1:1", 12) | NONE),
    "overlapped, by index": Case((1, 2, 1), "dualpipe_v", 2, 4, kinds("3:1", 7) | K_OF_N),
    "overlapped, periods": Case((1, 2, 1), "dualpipe_v", 2, 4, kinds("1:1", 12) | NONE),
    "overlapped, three forms of experts": Case(
        (1, 2, 1),
        "dualpipe_v",
        2,
        4,
        kinds("5:1", 12, FORMS) | {"mesh.expert": 2, "pipeline.overlap": True},
    ),
    "experts, by index": Case((1, 4, 1), "zb_h2", 1, 8, kinds("5:1", 7, FORMS) | SELECTIVE),
    "reduced in the last W": Case((2, 2, 1), "1f1b", 1, 4, kinds("3:1", 7, FORMS) | LAST),
    "ZeRO-2, a form on one stage": Case(
        (2, 2, 1), "interleaved", 2, 4, kinds("5:1", 7, FORMS) | {"parallel.zero": 2}
    ),
    "dense layers and a module of prediction": Case(
        (2, 2, 1),
        "zb_v",
        2,
        3,
        kinds("3:1", 6, FORMS) | {"model.dense_layers": 1, "model.mtp_depth": 1} | NONE,
    ),
    "dropped layers of a stage": Case(
        (1, 2, 1),
        "1f1b",
        1,
        4,
        kinds("3:1", 7) | {"pipeline.chunk_layers": (2, 5), "pipeline.layers_per_op": 2},
    ),
}


def assert_gradients(monkeypatch, case: Case) -> None:
    config = case.config()
    expected = reference(config, 1)
    unfilled = lambda shape, dtype, on_host: jnp.full(shape, jnp.nan, dtype)
    monkeypatch.setattr(host_memory, "empty_pool", unfilled)
    assert_same(gradients(config), expected)


@pytest.mark.parametrize("name", small.named(CASES, MORE))
def test_gradients(monkeypatch, name):
    assert_gradients(monkeypatch, (CASES | MORE)[name])
