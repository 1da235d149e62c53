"""Layers that save the values which `pipeline.save` names: the gradients of one plain loop, what
crosses from the forward to the backward, and the products that run again."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small
from support.plain_loop import assert_same, gradients, reference
from support.small import Case

from jaxtrain import config as configs
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.checks import Environment
from jaxtrain.config.rules.unused import unused_settings
from jaxtrain.config.saved_values import LAYER_INPUT, PRODUCTS, SAVED_VALUES, saved_values
from jaxtrain.models import transformer
from jaxtrain.runtime.layers.backward_split import (
    LayerOp,
    LayerSplit,
    keep_everything,
    keep_named,
    keep_products,
)
from jaxtrain.runtime.layers.equations import NAME, has


def save(*names: str, remat: str = "selective", **changes) -> dict:
    return {"pipeline.remat": remat, "pipeline.save": names, **changes}


SEVEN = {"model.layers": 7}
EXPERTS = {"model.experts": 4, "model.expert_width": 16}
TWO_EXPERTS = EXPERTS | {"mesh.expert": 2}
INPUTS = SEVEN | save("layer_input", remat="full")
LATENT = {
    "model.attention": "mla",
    "model.kv_heads": 4,
    "model.kv_rank": 8,
    "model.query_rank": 12,
    "model.rope_head_dim": 4,
}
CASES = {
    "zb_h1, partly on the host": Case(
        (1, 2, 1), "zb_h1", 1, 4, save("layer_input:host", "attention:host", "mlp_in")
    ),
    "1f1b, of some layers, model": Case(
        (1, 2, 2),
        changes=SEVEN | save("qkv", "mlp_hidden", "attention_norm", remat="selective:2"),
    ),
    "ZeRO-3": Case(
        (2, 2, 1), "zb_h1", 1, 4, SEVEN | save("mlp_norm", "attention_out", **{"parallel.zero": 3})
    ),
    "one stage, experts": Case(
        (1, 1, 2),
        changes=EXPERTS | {"mesh.expert": 2} | save("attention", "mlp_in", "routed", "router"),
    ),
    "zb_v, experts": Case(
        (1, 2, 1),
        "zb_v",
        2,
        4,
        EXPERTS | {"mesh.expert": 2, "model.layers": 4} | save("qkv", "mlp_hidden"),
    ),
    "latent attention": Case((2, 2, 1), changes=LATENT | save("latent", "attention")),
    "context": Case((1, 2, 1), changes={"mesh.context": 2} | save("attention", "mlp_in")),
    "one stage, on the host": Case(
        (1, 1, 1), changes=SEVEN | save("layer_input:host", "qkv:host", "mlp_in")
    ),
    "one stage, inputs on the host": Case(
        (1, 1, 1), changes=SEVEN | save("layer_input:host", remat="full")
    ),
    "interleaved, of some layers on the host, model, ZeRO-2": Case(
        (2, 2, 2),
        "interleaved",
        2,
        4,
        SEVEN | save("qkv:host", "mlp_in", remat="selective:1") | {"parallel.zero": 2},
    ),
    "dualpipe_v, experts on the host": Case(
        (1, 2, 1),
        "dualpipe_v",
        2,
        5,
        TWO_EXPERTS | save("routed:host", "mlp_in:host") | {"pipeline.overlap": True},
    ),
    "inputs: zb_v, on the host, ZeRO-3": Case(
        (2, 2, 1),
        "zb_v",
        2,
        4,
        SEVEN | save("layer_input:host", remat="full") | {"parallel.zero": 3},
    ),
    "one stage, offloaded": Case(
        (1, 1, 1), changes=SEVEN | {"parallel.offload": "activations"} | save("attention_out")
    ),
    "inputs: 1f1b": Case((2, 2, 1), changes=INPUTS),
    "inputs: interleaved, model": Case((1, 2, 2), "interleaved", 2, 4, INPUTS),
    "inputs: gpipe, the last unit too": Case((1, 3, 1), "gpipe", 2, 5, INPUTS),
    "inputs: zb_h1, k of n, ZeRO-3": Case(
        (2, 2, 1), "zb_h1", 1, 4, INPUTS | {"pipeline.remat": "full:2", "parallel.zero": 3}
    ),
    "inputs: zb_v, experts": Case((1, 2, 1), "zb_v", 2, 4, INPUTS | TWO_EXPERTS),
    "inputs: dualpipe_v, overlapped": Case(
        (1, 2, 1), "dualpipe_v", 2, 5, INPUTS | TWO_EXPERTS | {"pipeline.overlap": True}
    ),
    "inputs: context": Case((1, 2, 1), changes=INPUTS | {"mesh.context": 2}),
    "inputs: units of a chunk": Case(
        (1, 2, 1), "zb_h2", 1, 4, INPUTS | {"pipeline.layers_per_op": 2}
    ),
    "inputs: offloaded": Case((1, 2, 1), changes=INPUTS | {"parallel.offload": "activations"}),
    "inputs: auto": Case((1, 4, 1), "auto", 1, 4, INPUTS),
}
ALWAYS = [
    "zb_h1, partly on the host",
    "one stage, on the host",
]  # inputs of layers: test_end_layers.py


@pytest.mark.parametrize(
    "name", small.named(ALWAYS, [name for name in CASES if name not in ALWAYS])
)
def test_gradients(name):
    config = CASES[name].config()
    assert_same(gradients(config), reference(config, 1))


@pytest.mark.full
@pytest.mark.parametrize(
    ("names", "without"),
    [(save("attention", "mlp_in"), "none"), (INPUTS, "full")],
    ids=["selective", "inputs"],
)
def test_fp8_rounds_as_without_names(names, without):
    """What B or R makes again in FP8 has the bits of the forward."""
    unnamed = names | save(remat=without)
    of = lambda changes: gradients(
        Case((1, 2, 1), "zb_h1", 1, 4, {"precision.matmul": "fp8"} | changes).config()
    )
    assert_same(of(names), of(unnamed))


# --- one layer ------------------------------------------------------------------------------------

MODELS = {
    "dense": {},
    "gpt2 form": {"model.norm": "layernorm", "model.activation": "gelu", "model.qk_norm": True},
    "experts": EXPERTS | {"model.shared_experts": 1},
    "latent": LATENT | EXPERTS,
    "norms of outputs, a gate": {
        "model.norm_place": "after",
        "model.attention_gate": True,
        "model.qk_norm": True,
        "model.qk_norm_over": "projection",
    },
    "parallel": {"model.parallel_block": True},
}
LENGTH, LONG = 16, 2048  # attention to all keys at once, or by blocks


def split_of(changes: dict, keep, length: int = LENGTH) -> tuple[LayerSplit, tuple]:
    """A layer cut into ops, and examples of its parameters, input and extra."""
    cfg = small.config(changes=changes).model
    parts = transformer.build(cfg)
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), parts.specs["layer"]
    )
    x = jax.ShapeDtypeStruct((2, length, cfg.width), jnp.float32)
    extra = (jax.ShapeDtypeStruct((1, length), jnp.int32), None)
    layer = lambda params, x, extra: parts.blocks[""](params)(x, *extra)
    with jax.set_mesh(small.mesh_of(small.config())):
        return LayerSplit(layer, params, x, extra, keep), (params, x, extra)


def products(split: LayerSplit, examples: tuple) -> list[int]:
    """Matrix products in the compiled F, B and W."""
    params, x, extra = examples
    residuals = split.residuals

    def count(op, *args) -> int:
        return len(re.findall(r" dot\(", jax.jit(op).lower(*args).compile().as_text()))

    with jax.set_mesh(small.mesh_of(small.config())):
        return [
            count(split.output_and_residuals, params, x, extra),
            count(split.input_gradient, params, extra, residuals, x),
            count(split.weight_gradient, params, extra, residuals.for_w, split.weight_stash),
        ]


@pytest.mark.parametrize("changes", [{}, EXPERTS])
def test_r_makes_no_output(changes):
    """The residuals are those of F, and the layer's last product is not among the products."""
    split, (params, x, _) = split_of(changes, keep_everything)
    random = np.random.default_rng(0)
    some = lambda a: jnp.asarray(random.normal(size=a.shape), a.dtype)
    params, x = jax.tree.map(some, (params, x))
    extra = jnp.arange(LENGTH, dtype=jnp.int32)[None], None
    with jax.set_mesh(small.mesh_of(small.config())):
        ops = [
            jax.jit(split.output_and_residuals),
            jax.jit(lambda *args: split.recompute(*args).run()),
        ]
        texts = [op.lower(params, x, extra).compile().as_text() for op in ops]
        (_, of_f), of_r = (op(params, x, extra) for op in ops)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), of_f, of_r)
    in_f, in_r = (len(re.findall(r" dot\(", text)) for text in texts)
    assert in_f - in_r == 1
    unread = jax.tree.map(
        lambda f, r: f and not r, split.reads(LayerOp.FORWARD), split.reads(LayerOp.RECOMPUTE)
    )
    (path,) = (path for path, one in jax.tree.leaves_with_path(unread) if one)
    assert "down" in jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", MODELS)
def test_names_are_those_of_the_layer(name):
    """Every name that a model has is of a value that its layer makes, and no other is."""
    asked = {LAYER_INPUT}  # every layer has it, unnamed

    def keep(equation) -> bool:
        if equation.primitive.name == NAME:
            asked.add(equation.params["name"])
        return True

    split_of(MODELS[name], keep)
    assert asked == set(saved_values(small.config(changes=MODELS[name]).model))
    assert asked <= set(SAVED_VALUES)


# Of queries, keys, values, attention's output, up, gate and down a product each in F, two of
# attention's core; B has seven gradients and the core's four, and what it makes again.
@pytest.mark.parametrize(
    ("names", "again"),
    [
        (("attention_norm",), 8),
        (("qkv", "attention", "attention_out", "mlp_in"), 2),
        *(
            pytest.param(names, again, marks=pytest.mark.full)
            for names, again in [
                (("qkv",), 5),
                (("mlp_in",), 6),
                (("mlp_hidden",), 8),
                (("attention_out", "mlp_in"), 5),
            ]
        ),
    ],
)
def test_products_that_run_again(names, again):
    """As compiled. For few tokens XLA's own attention attends again in any case."""
    assert products(*split_of({}, keep_named(names))) == [9, 11 + again, 7]


def loops(split: LayerSplit) -> int:
    """Loops in B, which are attention by blocks."""
    equations = split._equations[LayerOp.INPUT_GRADIENT]
    return sum(has(equation, frozenset({"while"})) for equation in equations)


def test_attention_runs_once_if_it_is_saved():
    """Its log-sum-exp is saved with its result."""
    saved, again = (
        split_of({}, keep_named(names), LONG)[0] for names in (("attention",), ("mlp_in",))
    )
    assert loops(again) - loops(saved) == 1
    heads, width = 8, 32
    sizes = [2 * LONG * width] * 2 + [2 * LONG * heads]  # input, result, log-sum-exp
    assert sorted(a.size for a in jax.tree.leaves(saved.residuals)) == sorted(sizes)


@pytest.mark.parametrize(
    "name", small.named(["dense", "latent"], sorted({*MODELS} - {"dense", "latent"}))
)
def test_selective_saves_what_these_names_save(name):
    """Without names: results of products. The planner counts them by these names."""

    def sizes(keep) -> list[int]:
        split, _ = split_of(MODELS[name], keep, LONG)
        return [
            small.nbytes(tree)
            for tree in (split.residuals.for_b, split.residuals.for_w, split.weight_stash)
        ]

    assert PRODUCTS == (
        "latent",
        "qkv",
        "attention",
        "attention_out",
        "router",
        "mlp_in",
        "mlp_out",
    )
    assert sizes(keep_named(PRODUCTS)) == pytest.approx(sizes(keep_products), rel=1e-3)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            save("attention", "mlp_inn"),
            "names 'mlp_inn', which no layer of this model has: its values are layer_input, "
            "attention_norm, qkv, attention, attention_out, mlp_norm, mlp_in, mlp_hidden, "
            "mlp_out: use --config.pipeline.save=attention,mlp_in",
        ),
        (
            save("attention:host", "mlp_inn:host"),
            "mlp_out: use --config.pipeline.save=attention:host,mlp_in:host",
        ),
        (save(":host"), "names ':host', which no layer of this model has"),
        (
            save("qkv", "attention", "qkv:host"),
            "saves 'qkv' on the device and on the host: "
            "use --config.pipeline.save=qkv:host,attention",
        ),
        (
            save("qkv:host", remat="full"),
            "is for pipeline.remat='selective', and 'full' saves layer_input at most",
        ),
        (
            save("qkv:host", **{"mesh.stage": 2, "pipeline.steps_per_program": 2}),
            "has its slots in the devices' memory, unlike pipeline.save=('qkv:host',)",
        ),
        (save("router"), "names 'router', which no layer of this model has"),
        (
            save("attention", remat="full:2"),
            "is for pipeline.remat='selective', and 'full:2' saves layer_input at most: "
            "use --config.pipeline.remat=selective:2",
        ),
        (
            save("attention", "layer_input", remat="full", **{"mesh.stage": 1}),
            "and 'full' saves layer_input at most: use --config.pipeline.remat=selective",
        ),
        (
            save("layer_input", remat="none"),
            "is for pipeline.remat='full', and 'none' recomputes no layer: "
            "use --config.pipeline.save=",
        ),
        (
            save("layer_input", remat="selective:2"),
            "is for pipeline.remat='full', and 'selective:2' saves that in any case, and would "
            "save nothing else: use --config.pipeline.save=",
        ),
        (
            save("attention", remat="none"),
            "is for pipeline.remat='selective', and 'none' recomputes no layer: "
            "use --config.pipeline.remat=selective",
        ),
    ],
)
def test_refused(changes, message):
    config = configs.replace(configs.Config(), changes)
    with pytest.raises(configs.ConfigError) as error:
        checks.check(config, Environment(1, "cpu", configs.Config()))
    assert message in str(error.value)


def test_names_without_use():
    on_host = save("mlp_out", "qkv:host")
    notes = lambda **changes: " ".join(
        note for note in unused_settings(small.config(changes=on_host | changes)) if "save" in note
    )
    assert notes() == "pipeline.save=mlp_out saves nothing: no backward reads it"
    assert notes(**{"model.norm_place": "after"}) == ""
    assert notes(**{"parallel.offload": "activations", "pipeline.save": ("qkv:host",)}) == (
        ":host in pipeline.save has no use with parallel.offload=activations"
    )


def test_more_layers_than_a_unit_has():
    notes = lambda remat, **changes: unused_settings(
        small.config((1, 2, 1), changes={"pipeline.remat": remat} | changes)
    )
    expected = "pipeline.remat=full:3 recomputes all layers: a unit has 2 at most"
    assert expected in notes("full:3")
    for remat in ("full:2", "full", "none", "full:0"):
        assert not any("recomputes" in note for note in notes(remat))
